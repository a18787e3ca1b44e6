//! A model of a cluster: an API server that applies patches, kubelets, and users with hooks. No clock, no chance.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::{Timestamp, ToSpan};
use serde_json::{Value, json};

use crate::api::cloneset::CloneSet;
use crate::api::keys;
use crate::in_place::tests::apply;
use crate::in_place::{Pod, Target, Write};
use crate::manager::cloneset::plan::{
    Act, Claim, Failure, Observed, Plan, Revision, Subject, Switches, plan,
};

/// The hook that users put on Pods.
pub const HOOK: &str = "example.io/hold";

#[derive(Clone)]
pub struct World {
    pub set: Value,
    pub pods: BTreeMap<String, Value>,
    pub claims: BTreeMap<String, Value>,
    pub revisions: Vec<Revision>,
    pub failures: BTreeMap<Subject, Failure>,
    pub jobs: Vec<String>,
    pub now: Timestamp,
    /// How many of the next acts fail.
    pub failing: usize,
    made: u64,
}

impl World {
    pub fn new(spec: Value) -> Self {
        let mut world = Self {
            set: json!({
                "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet",
                "metadata": { "name": "s", "namespace": "n", "uid": "set", "generation": 1, "resourceVersion": "1" },
                "spec": spec,
            }),
            pods: BTreeMap::new(),
            claims: BTreeMap::new(),
            revisions: Vec::new(),
            failures: BTreeMap::new(),
            jobs: Vec::new(),
            now: Timestamp::from_second(1_700_000_000).unwrap(),
            failing: 0,
            made: 0,
        };
        world.settle_revision();
        world
    }

    /// Changes the spec (merge patch).
    pub fn edit(&mut self, patch: &Value) {
        json_patch::merge(&mut self.set["spec"], patch);
        let generation = self.set["metadata"]["generation"].as_i64().unwrap();
        self.set["metadata"]["generation"] = json!(generation + 1);
        self.settle_revision();
    }

    /// The revision of the template becomes the newest.
    fn settle_revision(&mut self) {
        let mut template = self.set["spec"]["template"].clone();
        template["$patch"] = json!("replace");
        let data = json!({ "spec": { "template": template } });
        let known = self.revisions.iter().position(|r| r.data == data);
        let revision = known
            .map(|at| self.revisions.remove(at))
            .unwrap_or_else(|| Revision {
                name: format!("s-{}", self.fresh()),
                data,
                claims: None,
                downloaded: false,
            });
        self.revisions.push(revision);
    }

    fn fresh(&mut self) -> u64 {
        self.made += 1;
        self.made
    }

    pub fn observe(&self) -> Observed {
        let set: CloneSet = serde_json::from_value(self.set.clone()).unwrap();
        let update = self.revisions.last().unwrap().name.clone();
        let current = set
            .status
            .as_ref()
            .map(|s| s.current_revision.clone())
            .unwrap_or_default();
        let known = self.revisions.iter().any(|r| r.name == current);
        let claim = |(name, claim): (&String, &Value)| Claim {
            name: name.clone(),
            uid: name.clone(),
            instance: claim["metadata"]["labels"][keys::CLONESET_INSTANCE_ID]
                .as_str()
                .unwrap()
                .to_owned(),
            deleting: false,
            unbound: claim["status"]["phase"].as_str().map(str::to_owned),
        };
        let ours = |claim: &(&String, &Value)| claim.1["metadata"]["ownerReferences"][0]["uid"] == "set";
        Observed {
            set: Arc::new(set),
            pods: self.pods.values().map(|pod| Arc::new(Pod::of(pod))).collect(),
            claims: self.claims.iter().filter(ours).map(claim).collect(),
            revisions: self.revisions.iter().cloned().map(Arc::new).collect(),
            current: if known { current } else { update.clone() },
            update,
            collisions: None,
            jobs: self.jobs.clone(),
            nodes: BTreeMap::new(),
            failures: self.failures.clone(),
            switches: Switches::default(),
            seed: self.made,
        }
    }

    /// One pass: plans and acts. Returns what was observed and planned.
    pub fn reconcile(&mut self) -> (Observed, Plan) {
        let now = self.now;
        self.failures.retain(|_, failure| failure.until > now);
        let observed = self.observe();
        let plan = plan(&observed, self.now);
        for act in &plan.acts {
            if self.failing > 0 {
                self.failing -= 1;
                let failure = Failure {
                    scale: act.scales(),
                    until: self.now.checked_add(5.seconds()).unwrap(),
                    message: "refused".to_owned(),
                };
                self.failures.insert(act.subject(), failure);
                continue;
            }
            self.act(act);
        }
        if let Some(status) = &plan.status {
            self.set["status"] = json!(status);
        }
        (observed, plan)
    }

    fn act(&mut self, act: &Act) {
        match act {
            Act::CreatePod { name, pod, claims } => {
                for claim in claims {
                    let name = claim["metadata"]["name"].as_str().unwrap().to_owned();
                    assert!(
                        self.claims.insert(name, claim.clone()).is_none(),
                        "a claim is made twice"
                    );
                }
                self.create(name, pod.clone());
            }
            Act::DeletePod { name, claims, .. } => {
                self.delete(name);
                self.claims.retain(|claim, _| !claims.contains(claim));
            }
            Act::PatchPod {
                uid, name, writes, ..
            } => {
                let pod = self.pods.get_mut(name).unwrap();
                assert_eq!(pod["metadata"]["uid"], json!(uid));
                for write in writes {
                    patch(pod, write);
                }
            }
            Act::PatchClaim { name, patch } => json_patch::merge(self.claims.get_mut(name).unwrap(), patch),
            Act::DeleteClaim { name, .. } => assert!(self.claims.remove(name).is_some()),
            Act::CreateJob(job) => self.jobs.push(job.metadata.name.clone().unwrap()),
            Act::DeleteJob(name) => self.jobs.retain(|job| job != name),
            Act::LabelRevision { name, .. } => {
                let revision = self.revisions.iter_mut().find(|r| r.name == *name).unwrap();
                revision.downloaded = true;
            }
            Act::PatchSet(patch) => self.edit(&patch["spec"]),
        }
    }

    fn create(&mut self, name: &str, mut pod: Value) {
        let uid = format!("u{}", self.fresh());
        pod["metadata"]["uid"] = json!(uid);
        pod["metadata"]["resourceVersion"] = json!("1");
        pod["metadata"]["creationTimestamp"] = json!(self.now.to_string());
        // What a later Kubernetes adds, and nobody here knows.
        pod["spec"]["ofOthers"] = json!(uid);
        pod["status"] = json!({ "phase": "Pending" });
        assert!(
            self.pods.insert(name.to_owned(), pod).is_none(),
            "a Pod is made twice"
        );
    }

    /// Deletes a Pod, whoever does it; at once, unless finalizers hold it.
    pub fn delete(&mut self, name: &str) {
        let Some(pod) = self.pods.get_mut(name) else {
            return;
        };
        pod["metadata"]["deletionTimestamp"] = json!(self.now.to_string());
        self.collect();
    }

    /// Removes what nothing holds any more.
    fn collect(&mut self) {
        self.pods.retain(|_, pod| {
            let held = pod["metadata"]["finalizers"]
                .as_array()
                .is_some_and(|f| !f.is_empty());
            pod["metadata"]["deletionTimestamp"].is_null() || held
        });
        let pods: Vec<&Value> = self.pods.values().map(|pod| &pod["metadata"]["uid"]).collect();
        self.claims.retain(|_, claim| {
            let owner = &claim["metadata"]["ownerReferences"][0]["uid"];
            owner == "set" || pods.contains(&owner)
        });
    }

    /// The user whose hook is a finalizer acts on a Pod: lets go of it, or takes it into use.
    pub fn hook(&mut self, name: &str) {
        let Some(pod) = self.pods.get_mut(name) else {
            return;
        };
        let state = pod["metadata"]["labels"][keys::LIFECYCLE_STATE]
            .as_str()
            .unwrap_or_default();
        let gone = !pod["metadata"]["deletionTimestamp"].is_null();
        let finalizers = match state {
            _ if gone => json!([]),
            "PreparingDelete" | "PreparingUpdate" | "Updating" => json!([]),
            _ => json!([HOOK]),
        };
        pod["metadata"]["finalizers"] = finalizers;
        self.collect();
    }

    /// A container ends by itself and is started again as it was.
    pub fn crash(&mut self, name: &str) {
        let id = self.fresh();
        let Some(pod) = self.pods.get_mut(name) else {
            return;
        };
        if pod["status"]["containerStatuses"]
            .get(0)
            .is_some_and(|s| s["started"].is_string())
        {
            pod["status"]["containerStatuses"][0]["containerID"] = json!(format!("containerd://{id}"));
        }
    }

    /// The kubelet of a Pod does what there is to do.
    pub fn kubelet(&mut self, name: &str) {
        let id = self.fresh();
        let now = self.now.to_string();
        let Some(pod) = self.pods.get_mut(name) else {
            return;
        };
        pod["spec"]["nodeName"] = json!("node");
        pod["status"]["phase"] = json!("Running");
        let container = pod["spec"]["containers"][0].clone();
        if pod["status"]["containerStatuses"].is_null() {
            pod["status"]["containerStatuses"] =
                json!([{ "name": "app", "ready": false, "restartCount": 0 }]);
        }
        let status = &mut pod["status"]["containerStatuses"][0];
        status["resources"] = container["resources"].clone();
        if status["started"] != container["image"] {
            let image = container["image"].as_str().unwrap();
            if image.ends_with("bad") {
                // The old container is ended before the new image is pulled.
                status["started"] = Value::Null;
                status["ready"] = json!(false);
                status["state"] = json!({ "waiting": { "reason": "ImagePullBackOff" } });
            } else {
                status["started"] = json!(image);
                status["containerID"] = json!(format!("containerd://{id}"));
                status["image"] = json!(image);
                status["imageID"] = json!(format!("sha256:{image}"));
                status["state"] = json!({ "running": {} });
                status["ready"] = json!(true);
            }
        } else {
            status["ready"] = json!(true);
            status["state"] = json!({ "running": {} });
        }
        let ready = status["ready"] == true;
        condition(pod, "ContainersReady", ready, &now);
        let seen = Pod::of(pod);
        let gates = seen
            .gates
            .iter()
            .all(|gate| seen.condition(gate).is_some_and(|c| c.holds));
        condition(pod, "Ready", ready && gates, &now);
    }
}

/// Patches as the API server does: only what belongs to the resource, and only the version that a patch names.
fn patch(pod: &mut Value, write: &Write) {
    let version = &pod["metadata"]["resourceVersion"];
    let asked = &write.patch["metadata"]["resourceVersion"];
    assert!(asked.is_null() || asked == version, "an act is in its own way");
    let has = |part: &str| write.patch.get(part).is_some();
    let fits = match write.to {
        Target::Pod => !has("status"),
        Target::Status => !has("spec") && write.patch["metadata"].get("finalizers").is_none(),
        Target::Resize => !has("status") && write.patch["metadata"].get("labels").is_none(),
    };
    assert!(fits, "{write:?}");
    let next: u64 = version.as_str().unwrap().parse().unwrap();
    apply(pod, &write.patch);
    pod["metadata"]["resourceVersion"] = json!((next + 1).to_string());
}

fn condition(pod: &mut Value, type_: &str, holds: bool, now: &str) {
    if Pod::of(pod).condition(type_).is_some_and(|c| c.holds == holds) {
        return;
    }
    let status = if holds { "True" } else { "False" };
    let new =
        json!({ "type": type_, "status": status, "lastTransitionTime": now, "reason": "", "message": "" });
    apply(pod, &json!({ "status": { "conditions": [new] } }));
}

//! A model of a cluster: an API server that applies patches, kubelets, and users with hooks. No clock, no chance.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::faults::Fault;
use crate::cloneset::observe::{Index, Said};
use crate::cloneset::plan::{
    Failure, Job, LeftOver, Observed, Plan, Revision, Subject, Switches, Template, plan,
};
use kruise_api::cloneset::CloneSet;
use kruise_api::keys;
use kruise_api::owner::Owner;
use kruise_cluster::{Change, Key};
use kruise_workload::claim::Claim;
use kruise_workload::in_place::{Pod, Target, Write};
use kruise_workload::testing::apply;

use crate::view::{ClaimView, CloneSetView, PodView, RawPod};

/// The hook that users put on Pods.
pub const HOOK: &str = "example.io/hold";

/// UID of somebody who owns claims, too, and stays.
pub const BACKUP: &str = "backup";

#[derive(Clone)]
pub struct World {
    pub set: Value,
    /// The hooks that there were at first; their user goes by these.
    pub hooks: Value,
    pub pods: BTreeMap<String, Value>,
    pub claims: BTreeMap<String, Value>,
    pub revisions: Vec<Revision>,
    /// Whether the API server refuses templates that are new.
    pub refusing: bool,
    pub template: Template,
    pub failures: BTreeMap<Subject, Failure>,
    pub jobs: Vec<String>,
    pub now: Timestamp,
    /// How many of the next acts fail.
    pub failing: usize,
    /// How they do.
    pub fault: Fault,
    pub left: LeftOver,
    /// New Pods that the watch has not shown yet.
    pub unseen: BTreeSet<String>,
    /// Whether what is deleted takes its time.
    pub slow: bool,
    /// Names of jobs that are being deleted.
    pub going: BTreeSet<String>,
    pub switches: Switches,
    /// What an object of the CloneSet takes.
    pub memory: usize,
    /// Whether there is a daemon on the node.
    pub daemons: bool,
    /// Whether the API server counts the generations of Pods.
    pub counts: bool,
    /// Ids of Pods that the CloneSet deleted; their claims are to go with them.
    pub spent: BTreeSet<String>,
    /// Pods of another namespace.
    pub abroad: Vec<Value>,
    /// Names that a Pod of somebody else was found to have when one of ours was to be made.
    pub met: BTreeSet<String>,
    made: u64,
}

impl World {
    pub fn new(spec: Value) -> Self {
        let mut world = Self {
            hooks: spec["lifecycle"].clone(),
            set: json!({
                "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet",
                "metadata": { "name": "s", "namespace": "n", "uid": "set", "generation": 1, "resourceVersion": "1" },
                "spec": spec,
            }),
            pods: BTreeMap::new(),
            claims: BTreeMap::new(),
            revisions: Vec::new(),
            refusing: false,
            template: Template::Taken,
            failures: BTreeMap::new(),
            jobs: Vec::new(),
            now: Timestamp::from_second(1_700_000_000).unwrap(),
            failing: 0,
            fault: Fault::Refused,
            left: LeftOver::default(),
            unseen: BTreeSet::new(),
            slow: false,
            going: BTreeSet::new(),
            switches: Switches::default(),
            memory: 0,
            daemons: false,
            counts: false,
            spent: BTreeSet::new(),
            abroad: Vec::new(),
            met: BTreeSet::new(),
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

    /// The API server refuses new templates, or no more.
    pub fn refuse(&mut self, refusing: bool) {
        self.refusing = refusing;
        self.settle_revision();
    }

    /// The revision of the template becomes the newest, if it may.
    fn settle_revision(&mut self) {
        let mut template = self.set["spec"]["template"].clone();
        template["$patch"] = json!("replace");
        let data = json!({ "spec": { "template": template } });
        if self.revisions.last().is_some_and(|r| r.data == data) {
            // Claims alone change nothing.
            self.template = Template::Taken;
            return;
        }
        let claims = Some(self.set["spec"]["volumeClaimTemplates"].to_string());
        let known = self.revisions.iter().position(|r| r.data == data);
        if self.refusing && known.is_none() {
            self.template = Template::Refused("no such field".to_owned());
            return;
        }
        self.template = Template::Taken;
        let revision = match known.map(|at| self.revisions.remove(at)) {
            Some(known) => Revision { claims, ..known },
            None => Revision {
                name: format!("s-{}", self.fresh()),
                data,
                claims,
                downloaded: false,
            },
        };
        self.revisions.push(revision);
    }

    pub fn fresh(&mut self) -> u64 {
        self.made += 1;
        self.made
    }

    pub fn observe(&self) -> Observed {
        let set: CloneSet = serde_json::from_value(self.set.clone()).unwrap();
        let update = self.revisions.last().map(|r| r.name.clone()).unwrap_or_default();
        let current = set
            .status
            .as_ref()
            .map(|s| s.current_revision.clone())
            .unwrap_or_default();
        let known = self.revisions.iter().any(|r| r.name == current);
        let belongings = self.index(&set).belongings(&set);
        let jobs = self.jobs.iter().map(|name| Job {
            name: name.clone(),
            uid: name.clone(),
        });
        Observed {
            set: Arc::new(set),
            pods: belongings.pods,
            claims: belongings.claims,
            given: belongings.given,
            revisions: self.revisions.iter().cloned().map(Arc::new).collect(),
            current: if known { current } else { update.clone() },
            update,
            template: self.template.clone(),
            collisions: None,
            memory: self.memory,
            unread: Vec::new(),
            jobs: jobs.collect(),
            nodes: BTreeMap::new(),
            failures: self.failures.clone(),
            left: self.left.clone(),
            switches: self.switches,
            seed: self.made,
        }
    }

    /// What the watches have told.
    fn index(&self, set: &CloneSet) -> Index {
        let mut index = Index::default();
        let seen = self.pods.iter().filter(|(name, _)| !self.unseen.contains(*name));
        let here = seen.map(|(name, pod)| (Key::namespaced("n", name), pod));
        let there = self.abroad.iter().map(|pod| {
            let name = pod["metadata"]["name"].as_str().unwrap();
            (Key::namespaced("evil", name), pod)
        });
        for (key, pod) in here.chain(there) {
            let mut view = PodView::from(&RawPod::from(pod.clone()));
            if view.workload.is_none() && self.met.contains(&key.name) {
                view.workload = Some(Arc::new(Pod::of(pod)));
            }
            let new = Some(Arc::new(view));
            index.apply(&Said::Pod(Change { key, old: None, new }));
        }
        for (name, stored) in &self.claims {
            let typed = serde_json::from_value(json!({ "metadata": stored["metadata"] })).unwrap();
            let view = ClaimView {
                claim: claim((name, stored)),
                ..ClaimView::of(&typed)
            };
            let (key, new) = (Key::namespaced("n", name), Some(Arc::new(view)));
            index.apply(&Said::Claim(Change { key, old: None, new }));
        }
        let (key, new) = (Key::namespaced("n", "s"), Some(Arc::new(CloneSetView::from(set))));
        index.apply(&Said::Set(Change { key, old: None, new }));
        index
    }

    /// Somebody makes a Pod in another namespace, which nothing here may touch.
    pub fn make_abroad(&mut self, mut pod: Value) {
        let (fresh, metadata) = (self.fresh(), &mut pod["metadata"]);
        metadata["uid"] = json!(format!("abroad-{fresh}"));
        metadata["namespace"] = json!("evil");
        metadata["annotations"][keys::POD_DELETION_COST] = json!("2147483647");
        if metadata["name"].as_str().is_none_or(str::is_empty) {
            metadata["name"] = json!("s-abroad");
        }
        self.abroad.push(pod);
    }

    /// One pass: plans and acts. Returns what was observed and planned.
    pub fn reconcile(&mut self) -> (Observed, Plan) {
        let now = self.now;
        self.failures.retain(|_, failure| failure.until > now);
        let mut observed = self.observe();
        // What is done is forgotten as each pass begins.
        self.left.settle(&observed.pods);
        observed.left = self.left.clone();
        let plan = plan(&observed, self.now);
        plan.acts.iter().for_each(|act| self.attempt(act));
        if let Some(status) = &plan.status {
            self.set["status"] = json!(status);
        }
        (observed, plan)
    }

    /// Makes a Pod of ours, unless somebody else's has that name.
    pub fn create(&mut self, name: &str, mut pod: Value) -> bool {
        if let Some(there) = self.pods.get(name) {
            let ours = ours(&Pod::of(there));
            if !ours {
                self.met.insert(name.to_owned());
            }
            assert!(!ours || self.unseen.remove(name), "a Pod is made twice");
            return ours;
        }
        let uid = format!("u{}", self.fresh());
        pod["metadata"]["name"] = json!(name);
        pod["metadata"]["uid"] = json!(uid);
        pod["metadata"]["resourceVersion"] = json!("1");
        if self.counts {
            pod["metadata"]["generation"] = json!(1);
        }
        pod["metadata"]["creationTimestamp"] = json!(self.now.to_string());
        // What a later Kubernetes adds, and nobody here knows.
        pod["spec"]["ofOthers"] = json!(uid);
        pod["status"] = json!({ "phase": "Pending" });
        self.unseen.remove(name);
        self.pods.insert(name.to_owned(), pod);
        true
    }

    /// Deletes a claim: it stays while a Pod has it, as its protection wants, or while all takes its time.
    pub fn delete_claim(&mut self, name: &str) {
        if let Some(claim) = self.claims.get_mut(name) {
            claim["metadata"]["deletionTimestamp"] = json!(self.now.to_string());
        }
        self.collect();
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
    pub fn collect(&mut self) {
        self.pods.retain(|_, pod| {
            let held = pod["metadata"]["finalizers"]
                .as_array()
                .is_some_and(|f| !f.is_empty());
            pod["metadata"]["deletionTimestamp"].is_null() || held
        });
        let pods: Vec<&Value> = self.pods.values().map(|pod| &pod["metadata"]["uid"]).collect();
        let ids = self
            .pods
            .values()
            .map(|pod| &pod["metadata"]["labels"][keys::CLONESET_INSTANCE_ID]);
        let ids: Vec<&Value> = ids.collect();
        let slow = self.slow;
        let lives = |owner: &Value| {
            let uid = &owner["uid"];
            uid == "set" || uid == BACKUP || pods.contains(&uid)
        };
        self.claims.retain(|_, claim| {
            let owners = claim["metadata"]["ownerReferences"].as_array_mut().unwrap();
            // What nobody ever owned, or was left behind, stays.
            let orphan = owners.is_empty();
            owners.retain(lives);
            let owned = orphan || !owners.is_empty();
            let used = || ids.contains(&&claim["metadata"]["labels"][keys::CLONESET_INSTANCE_ID]);
            let deleted = claim["metadata"]["deletionTimestamp"].is_string();
            owned && (!deleted || slow || used())
        });
    }

    /// The CloneSet is deleted without what it owns, and made again.
    pub fn orphan(&mut self) {
        for object in self.pods.values_mut().chain(self.claims.values_mut()) {
            let owners = object["metadata"]["ownerReferences"].as_array_mut();
            owners
                .into_iter()
                .for_each(|owners| owners.retain(|owner| owner["uid"] != "set"));
        }
        self.set["status"] = Value::Null;
        self.restart();
    }

    /// The user of the hooks acts on a Pod: lets go of it, or takes it into use. One item after the other.
    pub fn hook(&mut self, name: &str) {
        let asked = &self.hooks["preDelete"];
        let labelled = asked["labelsHandler"].is_object();
        let finalized = !labelled || asked["finalizersHandler"].is_array();
        let Some(pod) = self.pods.get_mut(name) else {
            return;
        };
        let meta = &mut pod["metadata"];
        let state = meta["labels"][keys::LIFECYCLE_STATE].as_str();
        let lets_go = ["PreparingDelete", "PreparingUpdate", "Updating"];
        let gone = !meta["deletionTimestamp"].is_null();
        let on = !gone && !state.is_some_and(|state| lets_go.contains(&state));
        let (finalizers, label) = if on {
            (json!([HOOK]), json!("yes"))
        } else {
            (json!([]), json!("no"))
        };
        if finalized && meta["finalizers"] != finalizers {
            meta["finalizers"] = finalizers;
        } else if labelled {
            meta["labels"][HOOK] = label;
        }
        self.collect();
    }
}

/// The reference to the CloneSet, as on what it makes.
pub fn owner() -> Value {
    json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "s", "uid": "set", "controller": true })
}

/// Whether the CloneSet controls a Pod.
pub fn ours(pod: &Pod) -> bool {
    pod.controller == Owner::controller_in(&json!([owner()]))
}

/// Whether an object has the owner of this UID, among others.
pub fn owned(object: &Value, uid: &str) -> bool {
    let owners = object["metadata"]["ownerReferences"].as_array();
    owners.into_iter().flatten().any(|owner| owner["uid"] == uid)
}

fn claim((name, claim): (&String, &Value)) -> Claim {
    let meta = &claim["metadata"];
    let mut owners = meta["ownerReferences"].as_array().unwrap().iter();
    let backup = owners.find(|owner| owner["uid"] == BACKUP);
    Claim {
        name: name.clone(),
        uid: name.clone(),
        instance: meta["labels"][keys::CLONESET_INSTANCE_ID]
            .as_str()
            .unwrap()
            .to_owned(),
        deleting: meta["deletionTimestamp"].is_string(),
        shared: backup.is_some(),
        controlled: backup.is_some_and(|owner| owner["controller"] == true),
        unbound: claim["status"]["phase"].as_str().map(str::to_owned),
    }
}

/// Patches as the API server does, one write after the other.
pub fn patch(pod: &mut Value, writes: &[Write]) {
    for (at, write) in writes.iter().enumerate() {
        let patch = match at {
            0 => write.patch.clone(),
            _ => write.after(&Pod::of(pod)).into_owned(),
        };
        stored(pod, write, &patch);
    }
}

/// Only what belongs to the resource, and only the version that the patch names.
fn stored(pod: &mut Value, write: &Write, sent: &Value) {
    let version = &pod["metadata"]["resourceVersion"];
    let asked = &sent["metadata"]["resourceVersion"];
    assert!(asked.is_null() || asked == version, "an act is in its own way");
    let has = |part: &str| write.patch.get(part).is_some();
    let fits = match write.to {
        Target::Pod => !has("status"),
        Target::Status => !has("spec") && write.patch["metadata"].get("finalizers").is_none(),
        Target::Resize => !has("status") && write.patch["metadata"].get("labels").is_none(),
    };
    assert!(fits, "{write:?}");
    let next: u64 = version.as_str().unwrap().parse().unwrap();
    let before = pod["spec"].clone();
    apply(pod, sent);
    if let Some(generation) = pod["metadata"]["generation"].as_i64() {
        let changed = i64::from(pod["spec"] != before);
        pod["metadata"]["generation"] = json!(generation + changed);
    }
    pod["metadata"]["resourceVersion"] = json!((next + 1).to_string());
}

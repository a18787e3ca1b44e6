//! A model of a cluster: an API server that applies patches, kubelets, and users with hooks. No clock, no randomness.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::faults::Fault;
use crate::cloneset::observe::{Index, WatchEvent};
use crate::cloneset::plan::{
    ActionFailure, FailureSubject, Features, ImagePullJobRef, Observed, ParsedRevision, Plan, TemplateStatus,
    UnfinishedCreations, plan,
};
use kruise_api::cloneset::CloneSet;
use kruise_api::keys;
use kruise_api::owner::Owner;
use kruise_cluster::{Change, Key};
use kruise_workload::claim::Claim;
use kruise_workload::in_place::{PatchTarget, Pod, PodWrite};
use kruise_workload::testing::apply;

use crate::view::{ClaimView, CloneSetView, PodView, RawPod};

/// The finalizer of the users' hook on Pods.
pub const HOOK: &str = "example.io/hold";

/// UID of another, permanent owner of claims.
pub const BACKUP: &str = "backup";

#[derive(Clone)]
pub struct FakeCluster {
    pub set: Value,
    /// The initial hooks; their user acts on these.
    pub initial_hooks: Value,
    pub pods: BTreeMap<String, Value>,
    pub claims: BTreeMap<String, Value>,
    pub revisions: Vec<ParsedRevision>,
    /// Whether the API server refuses new templates.
    pub templates_refused: bool,
    pub template_status: TemplateStatus,
    pub failures: BTreeMap<FailureSubject, ActionFailure>,
    pub jobs: Vec<String>,
    pub now: Timestamp,
    /// How many of the next actions fail.
    pub failures_left: usize,
    /// How they fail.
    pub fault: Fault,
    pub unfinished: UnfinishedCreations,
    /// New Pods that the watch has not shown yet.
    pub not_yet_watched: BTreeSet<String>,
    /// Whether deletions take time.
    pub slow_deletion: bool,
    /// Names of jobs that are being deleted.
    pub terminating_jobs: BTreeSet<String>,
    pub features: Features,
    /// Memory of one object of the CloneSet in bytes.
    pub memory: usize,
    /// Whether the node has a daemon.
    pub has_daemon: bool,
    /// Whether the API server counts the generations of Pods.
    pub counts_generations: bool,
    /// IDs of Pods that the CloneSet deleted; their claims must be deleted too.
    pub deleted_ids: BTreeSet<String>,
    /// Pods of another namespace.
    pub foreign_namespace_pods: Vec<Value>,
    /// Names that a foreign Pod turned out to have when one of ours should have been created.
    pub foreign_names: BTreeSet<String>,
    last_id: u64,
}

impl FakeCluster {
    pub fn new(spec: Value) -> Self {
        let mut cluster = Self {
            initial_hooks: spec["lifecycle"].clone(),
            set: json!({
                "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet",
                "metadata": { "name": "s", "namespace": "n", "uid": "set", "generation": 1, "resourceVersion": "1" },
                "spec": spec,
            }),
            pods: BTreeMap::new(),
            claims: BTreeMap::new(),
            revisions: Vec::new(),
            templates_refused: false,
            template_status: TemplateStatus::Accepted,
            failures: BTreeMap::new(),
            jobs: Vec::new(),
            now: Timestamp::from_second(1_700_000_000).unwrap(),
            failures_left: 0,
            fault: Fault::Refused,
            unfinished: UnfinishedCreations::default(),
            not_yet_watched: BTreeSet::new(),
            slow_deletion: false,
            terminating_jobs: BTreeSet::new(),
            features: Features::default(),
            memory: 0,
            has_daemon: false,
            counts_generations: false,
            deleted_ids: BTreeSet::new(),
            foreign_namespace_pods: Vec::new(),
            foreign_names: BTreeSet::new(),
            last_id: 0,
        };
        cluster.sync_revision();
        cluster
    }

    /// Changes the spec (merge patch).
    pub fn edit(&mut self, patch: &Value) {
        json_patch::merge(&mut self.set["spec"], patch);
        self.unfinished.without_claims.clear();
        let generation = self.set["metadata"]["generation"].as_i64().unwrap();
        self.set["metadata"]["generation"] = json!(generation + 1);
        self.sync_revision();
    }

    /// Sets whether the API server refuses new templates.
    pub fn set_templates_refused(&mut self, refused: bool) {
        self.templates_refused = refused;
        self.sync_revision();
    }

    /// Makes the revision of the template the newest, unless it is refused.
    fn sync_revision(&mut self) {
        let mut template = self.set["spec"]["template"].clone();
        template["$patch"] = json!("replace");
        let data = json!({ "spec": { "template": template } });
        if self.revisions.last().is_some_and(|r| r.data == data) {
            // A change of claim templates alone changes nothing.
            self.template_status = TemplateStatus::Accepted;
            return;
        }
        let claims = Some(self.set["spec"]["volumeClaimTemplates"].to_string());
        let position = self.revisions.iter().position(|r| r.data == data);
        if self.templates_refused && position.is_none() {
            self.template_status = TemplateStatus::Rejected("no such field".to_owned());
            return;
        }
        self.template_status = TemplateStatus::Accepted;
        let revision = match position.map(|at| self.revisions.remove(at)) {
            Some(known) => ParsedRevision {
                claim_hash: claims,
                ..known
            },
            None => ParsedRevision {
                name: format!("s-{}", self.next_id()),
                data,
                claim_hash: claims,
                pre_downloaded: false,
            },
        };
        self.revisions.push(revision);
    }

    pub fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    pub fn observe(&self) -> Observed {
        let set: CloneSet = serde_json::from_value(self.set.clone()).unwrap();
        let update = self.revisions.last().map(|r| r.name.clone()).unwrap_or_default();
        let current = set
            .status
            .as_ref()
            .map(|s| s.current_revision.clone())
            .unwrap_or_default();
        let current_exists = self.revisions.iter().any(|r| r.name == current);
        let belongings = self.build_index(&set).owned_objects(&set);
        let jobs = self.jobs.iter().map(|name| ImagePullJobRef {
            name: name.clone(),
            uid: name.clone(),
        });
        Observed {
            set: Arc::new(set),
            pods: belongings.pods,
            claims: belongings.claims,
            claims_owned_by_pod: belongings.claims_owned_by_pod,
            revisions: self.revisions.iter().cloned().map(Arc::new).collect(),
            current_revision: if current_exists { current } else { update.clone() },
            update_revision: update,
            template_status: self.template_status.clone(),
            collision_count: None,
            max_pod_memory: self.memory,
            unread_revisions: Vec::new(),
            jobs: jobs.collect(),
            nodes: BTreeMap::new(),
            failures: self.failures.clone(),
            unfinished: self.unfinished.clone(),
            features: self.features,
            rng_seed: self.last_id,
        }
    }

    /// The state that the watches have shown.
    fn build_index(&self, set: &CloneSet) -> Index {
        let mut index = Index::default();
        let watched = self
            .pods
            .iter()
            .filter(|(name, _)| !self.not_yet_watched.contains(*name));
        let here = watched.map(|(name, pod)| (Key::namespaced("n", name), pod));
        let elsewhere = self.foreign_namespace_pods.iter().map(|pod| {
            let name = pod["metadata"]["name"].as_str().unwrap();
            (Key::namespaced("evil", name), pod)
        });
        for (key, pod) in here.chain(elsewhere) {
            let mut view = PodView::from(&RawPod::from(pod.clone()));
            if view.workload_pod.is_none() && self.foreign_names.contains(&key.name) {
                view.workload_pod = Some(Arc::new(Pod::from_json(pod)));
            }
            let new = Some(Arc::new(view));
            index.apply(&WatchEvent::Pod(Change { key, old: None, new }));
        }
        for (name, stored) in &self.claims {
            let typed = serde_json::from_value(json!({ "metadata": stored["metadata"] })).unwrap();
            let view = ClaimView {
                claim: claim_view((name, stored)),
                ..ClaimView::from_object(&typed)
            };
            let (key, new) = (Key::namespaced("n", name), Some(Arc::new(view)));
            index.apply(&WatchEvent::Claim(Change { key, old: None, new }));
        }
        let (key, new) = (Key::namespaced("n", "s"), Some(Arc::new(CloneSetView::from(set))));
        index.apply(&WatchEvent::CloneSet(Change { key, old: None, new }));
        index
    }

    /// Creates a Pod in another namespace, which the controller must not touch.
    pub fn create_pod_elsewhere(&mut self, mut pod: Value) {
        let (fresh, metadata) = (self.next_id(), &mut pod["metadata"]);
        metadata["uid"] = json!(format!("abroad-{fresh}"));
        metadata["namespace"] = json!("evil");
        metadata["annotations"][keys::POD_DELETION_COST] = json!("2147483647");
        if metadata["name"].as_str().is_none_or(str::is_empty) {
            metadata["name"] = json!("s-abroad");
        }
        self.foreign_namespace_pods.push(pod);
    }

    /// One reconcile: plans and executes. Returns the observed state and the plan.
    pub fn reconcile(&mut self) -> (Observed, Plan) {
        let now = self.now;
        self.failures.retain(|_, failure| failure.retry_at > now);
        let mut observed = self.observe();
        // Completed creations are forgotten at the start of each reconcile.
        self.unfinished.forget_existing(&observed.pods);
        observed.unfinished = self.unfinished.clone();
        let plan = plan(&observed, self.now);
        plan.actions.iter().for_each(|action| self.try_action(action));
        if let Some(status) = &plan.status {
            self.set["status"] = json!(status);
        }
        (observed, plan)
    }

    /// Creates a Pod of ours, unless a foreign Pod has that name.
    pub fn create_pod(&mut self, name: &str, mut pod: Value) -> bool {
        if let Some(there) = self.pods.get(name) {
            let ours = is_controlled(&Pod::from_json(there));
            if !ours {
                self.foreign_names.insert(name.to_owned());
            }
            assert!(
                !ours || self.not_yet_watched.remove(name),
                "a Pod is created twice"
            );
            return ours;
        }
        let uid = format!("u{}", self.next_id());
        pod["metadata"]["name"] = json!(name);
        pod["metadata"]["uid"] = json!(uid);
        pod["metadata"]["resourceVersion"] = json!("1");
        if self.counts_generations {
            pod["metadata"]["generation"] = json!(1);
        }
        pod["metadata"]["creationTimestamp"] = json!(self.now.to_string());
        // A field of a later Kubernetes that our code does not know.
        pod["spec"]["ofOthers"] = json!(uid);
        pod["status"] = json!({ "phase": "Pending" });
        self.not_yet_watched.remove(name);
        self.pods.insert(name.to_owned(), pod);
        true
    }

    /// Deletes a claim: it remains while a Pod uses it (storage protection), or while deletions take time.
    pub fn delete_claim(&mut self, name: &str) {
        if let Some(claim) = self.claims.get_mut(name) {
            claim["metadata"]["deletionTimestamp"] = json!(self.now.to_string());
        }
        self.collect_garbage();
    }

    /// Deletes a Pod for any client; immediately, unless it has finalizers.
    pub fn delete_pod(&mut self, name: &str) {
        let Some(pod) = self.pods.get_mut(name) else {
            return;
        };
        pod["metadata"]["deletionTimestamp"] = json!(self.now.to_string());
        self.collect_garbage();
    }

    /// Removes objects whose deletion nothing blocks any more.
    pub fn collect_garbage(&mut self) {
        self.pods.retain(|_, pod| {
            let has_finalizers = pod["metadata"]["finalizers"]
                .as_array()
                .is_some_and(|f| !f.is_empty());
            pod["metadata"]["deletionTimestamp"].is_null() || has_finalizers
        });
        let pods: Vec<&Value> = self.pods.values().map(|pod| &pod["metadata"]["uid"]).collect();
        let ids = self
            .pods
            .values()
            .map(|pod| &pod["metadata"]["labels"][keys::CLONESET_INSTANCE_ID]);
        let ids: Vec<&Value> = ids.collect();
        let slow = self.slow_deletion;
        let lives = |owner: &Value| {
            let uid = &owner["uid"];
            uid == "set" || uid == BACKUP || pods.contains(&uid)
        };
        self.claims.retain(|_, claim| {
            let owners = claim["metadata"]["ownerReferences"].as_array_mut().unwrap();
            // Orphaned objects and those never owned are kept.
            let orphan = owners.is_empty();
            owners.retain(lives);
            let owned = orphan || !owners.is_empty();
            let used = || ids.contains(&&claim["metadata"]["labels"][keys::CLONESET_INSTANCE_ID]);
            let deleted = claim["metadata"]["deletionTimestamp"].is_string();
            owned && (!deleted || slow || used())
        });
    }

    /// Deletes the CloneSet with orphaned dependents, and creates it again.
    pub fn recreate_without_dependents(&mut self) {
        for object in self.pods.values_mut().chain(self.claims.values_mut()) {
            let owners = object["metadata"]["ownerReferences"].as_array_mut();
            owners
                .into_iter()
                .for_each(|owners| owners.retain(|owner| owner["uid"] != "set"));
        }
        self.set["status"] = Value::Null;
        self.restart_manager();
    }

    /// The user of the hooks acts on a Pod: releases or acknowledges it, one item after another.
    pub fn run_hook_user(&mut self, name: &str) {
        let pre_delete = &self.initial_hooks["preDelete"];
        let labelled = pre_delete["labelsHandler"].is_object();
        let finalized = !labelled || pre_delete["finalizersHandler"].is_array();
        let Some(pod) = self.pods.get_mut(name) else {
            return;
        };
        let meta = &mut pod["metadata"];
        let state = meta["labels"][keys::LIFECYCLE_STATE].as_str();
        let lets_go = ["PreparingDelete", "PreparingUpdate", "Updating"];
        let deleted = !meta["deletionTimestamp"].is_null();
        let on = !deleted && !state.is_some_and(|state| lets_go.contains(&state));
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
        self.collect_garbage();
    }
}

/// The owner reference to the CloneSet on objects that it creates.
pub fn owner_reference() -> Value {
    json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "s", "uid": "set", "controller": true })
}

/// Whether the CloneSet controls a Pod.
pub fn is_controlled(pod: &Pod) -> bool {
    pod.controller == Owner::controller_from_json(&json!([owner_reference()]))
}

/// Whether an object has an owner with this UID.
pub fn has_owner(object: &Value, uid: &str) -> bool {
    let owners = object["metadata"]["ownerReferences"].as_array();
    owners.into_iter().flatten().any(|owner| owner["uid"] == uid)
}

fn claim_view((name, claim): (&String, &Value)) -> Claim {
    let meta = &claim["metadata"];
    let mut owners = meta["ownerReferences"].as_array().unwrap().iter();
    let backup = owners.find(|owner| owner["uid"] == BACKUP);
    Claim {
        name: name.clone(),
        uid: name.clone(),
        instance_id: meta["labels"][keys::CLONESET_INSTANCE_ID]
            .as_str()
            .unwrap()
            .to_owned(),
        terminating: meta["deletionTimestamp"].is_string(),
        has_other_owner: backup.is_some(),
        has_other_controller: backup.is_some_and(|owner| owner["controller"] == true),
        unbound_storage_class: claim["status"]["phase"].as_str().map(str::to_owned),
    }
}

/// Applies patches like the API server, one write after another.
pub fn apply_writes(pod: &mut Value, writes: &[PodWrite]) {
    for (at, write) in writes.iter().enumerate() {
        let patch = match at {
            0 => write.patch.clone(),
            _ => write.rebased_on(&Pod::from_json(pod)).into_owned(),
        };
        apply_write(pod, write, &patch);
    }
}

/// Applies only fields of the (sub)resource, and only if the version matches.
fn apply_write(pod: &mut Value, write: &PodWrite, sent: &Value) {
    let version = &pod["metadata"]["resourceVersion"];
    let required_version = &sent["metadata"]["resourceVersion"];
    assert!(
        required_version.is_null() || required_version == version,
        "an action conflicts with its own earlier write"
    );
    let patches = |part: &str| write.patch.get(part).is_some();
    let fits = match write.target {
        PatchTarget::Pod => !patches("status"),
        PatchTarget::Status => !patches("spec") && write.patch["metadata"].get("finalizers").is_none(),
        PatchTarget::Resize => !patches("status") && write.patch["metadata"].get("labels").is_none(),
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

//! The observed state, evaluated once.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;

use jiff::Timestamp;
use serde_json::Value;

use super::limits::Limits;
use super::replica_counts::{CountedPod, ReplicaCounts, replica_counts};
use super::types::{self, FailureSubject, Observed, ParsedRevision};
use kruise_api::cloneset::CloneSetSpec;
use kruise_api::keys;
use kruise_api::lifecycle::{Lifecycle, LifecycleHook, LifecycleStateType as State};
use kruise_api::owner::Owner;
use kruise_api::selector::CompiledSelector;
use kruise_api::validation::cloneset::without_invalid_hooks;
use kruise_workload::claim::Claim;
use kruise_workload::in_place::{Pod, Template};
use kruise_workload::pods;
use kruise_workload::revision::short_hash;

/// A Pod that counts, with its derived properties.
///
/// All steps of a plan need these, and there may be ten thousand Pods, so they are calculated once.
pub(super) struct ObservedPod<'a> {
    pub pod: &'a Pod,
    pub state: State,
    /// Whether it has the update revision.
    pub updated: bool,
    /// Whether a user requested its deletion.
    pub specified: bool,
    /// Whether it is running and ready, and not being updated.
    pub ready: bool,
    /// Whether it is Normal and has been ready for `minReadySeconds`.
    pub available: bool,
    /// Whether it needs no write and waits for nothing, unless it is chosen.
    pub settled: bool,
}

impl Deref for ObservedPod<'_> {
    type Target = Pod;

    fn deref(&self) -> &Pod {
        self.pod
    }
}

/// The observed state, evaluated once.
pub(super) struct PlanView<'a> {
    pub observed: &'a Observed,
    pub spec: &'a CloneSetSpec,
    /// Label selector of its Pods.
    pub selector: CompiledSelector,
    pub now: Timestamp,
    pub limits: Limits,
    /// The revisions by their hashes, the oldest of each.
    revisions: BTreeMap<&'a str, &'a ParsedRevision>,
    /// The hashes of the revisions that take too much memory to be parsed.
    unread: BTreeSet<&'a str>,
    /// The hooks without items that no Pod can have, which would block Pods forever.
    lifecycle: Option<Lifecycle>,
    /// Seconds that a Pod must be ready to be available.
    pub min_ready: i32,
    /// The claims that are not terminating, by the instance ID of their Pod.
    pub claims: BTreeMap<&'a str, Vec<&'a Claim>>,
    /// The Pods that count: owned by the CloneSet, neither ended nor terminating.
    pub pods: Vec<ObservedPod<'a>>,
    /// Names in `podsToDelete`; the list may be as long as there are Pods.
    pods_to_delete: BTreeSet<&'a str>,
}

/// How many Pods one plan creates, patches or deletes at most: the state changes while these requests are sent, and
/// each reconcile would plan the rest again.
pub const MAX_PODS_PER_PLAN: usize = 500;
/// Maximum memory of the objects that a plan creates or patches, in bytes. All concurrent reconciles need theirs at the
/// same time.
const MAX_PLAN_MEMORY: usize = 16 << 20;

impl<'a> PlanView<'a> {
    /// How many Pods this plan creates, patches or deletes at most: fewer if they take much memory.
    pub fn pod_limit(&self) -> usize {
        (MAX_PLAN_MEMORY / self.observed.max_pod_memory.max(1)).clamp(1, MAX_PODS_PER_PLAN)
    }

    pub fn new(observed: &'a Observed, now: Timestamp) -> Self {
        let spec = &observed.set.spec;
        let mut claims: BTreeMap<&str, Vec<&Claim>> = BTreeMap::new();
        for claim in observed.claims.iter().filter(|claim| !claim.terminating) {
            claims.entry(&claim.instance_id).or_default().push(claim);
        }
        let mut revisions = BTreeMap::new();
        for revision in &observed.revisions {
            revisions
                .entry(short_hash(&revision.name))
                .or_insert(revision.as_ref());
        }
        let unread = observed.unread_revisions.iter();
        let pods_to_delete = spec.scale_strategy.iter().map(|scale| &scale.pods_to_delete);
        Self {
            observed,
            spec,
            selector: CompiledSelector::from(&spec.selector),
            now,
            limits: Limits::from_spec(spec, &observed.features),
            revisions,
            unread: unread.map(|name| short_hash(name)).collect(),
            lifecycle: spec.lifecycle.as_ref().map(without_invalid_hooks),
            min_ready: spec.min_ready_seconds.unwrap_or_default(),
            claims,
            pods: Vec::with_capacity(observed.pods.len()),
            pods_to_delete: pods_to_delete.flatten().map(String::as_str).collect(),
        }
    }

    pub fn revision(&self, name: &str) -> Option<&'a ParsedRevision> {
        self.observed
            .revisions
            .iter()
            .find(|r| r.name == name)
            .map(AsRef::as_ref)
    }

    /// The revision that a Pod has.
    pub fn pod_revision(&self, pod: &Pod) -> Option<&'a ParsedRevision> {
        self.revisions.get(pods::revision_hash(pod)?).copied()
    }

    /// Whether the Pod's revision takes too much memory to be parsed.
    pub fn is_unread(&self, pod: &Pod) -> bool {
        pods::revision_hash(pod).is_some_and(|hash| self.unread.contains(hash))
    }

    /// The Pod template of a revision, for writes into Pods.
    pub fn template_of_revision(&self, revision: &str) -> Template<'a> {
        let revision = self.revision(revision);
        revision.map_or_else(Template::unknown, |revision| Template::from_data(&revision.data))
    }

    /// The template of the revision that a Pod has.
    pub fn pod_template(&self, pod: &Pod) -> Template<'a> {
        let revision = self.pod_revision(pod);
        revision.map_or_else(Template::unknown, |revision| Template::from_data(&revision.data))
    }

    /// The owner that the CloneSet's Pods refer to.
    pub fn owner(&self) -> Owner {
        Owner::clone_set(&self.observed.set.metadata)
    }

    /// The controller owner reference for objects that the CloneSet creates.
    pub fn owner_reference(&self) -> Value {
        self.owner().controller_reference()
    }

    pub fn lifecycle(&self) -> Option<&Lifecycle> {
        self.lifecycle.as_ref()
    }

    pub fn pre_delete(&self) -> Option<&LifecycleHook> {
        self.lifecycle()?.pre_delete.as_ref()
    }

    pub fn in_place_update(&self) -> Option<&LifecycleHook> {
        self.lifecycle()?.in_place_update.as_ref()
    }

    /// Whether there is nothing to update Pods to, because the template has no revision.
    pub fn template_rejected(&self) -> bool {
        self.observed.template_status != types::TemplateStatus::Accepted
    }

    /// Adds a Pod that counts.
    pub fn add_pod(&mut self, pod: &'a Pod) {
        self.pods.push(ObservedPod {
            pod,
            state: pods::lifecycle_state(pod),
            updated: pods::has_revision(pod, &self.observed.update_revision),
            specified: pod.labels.contains_key(keys::SPECIFIED_DELETE)
                || self.pods_to_delete.contains(pod.name.as_str()),
            ready: pods::ready(pod, 0, self.now),
            available: pods::available(pod, self.min_ready, self.now),
            settled: pods::is_settled(pod),
        });
    }

    /// Whether the Pod counts as updated when scaling.
    pub fn counts_as_updated(&self, pod: &ObservedPod<'_>) -> bool {
        let include_prepared = self.observed.features.preparing_update_as_update;
        pod.updated || (include_prepared && pod.state == State::PreparingUpdate)
    }

    /// The ten numbers; `updated` decides which Pods count as updated.
    pub fn replica_counts(&self, updated: impl Fn(&ObservedPod<'_>) -> bool) -> ReplicaCounts {
        let counted = self.pods.iter().map(|pod| CountedPod {
            updated: updated(pod),
            preparing_delete: pod.state == State::PreparingDelete,
            specified: pod.specified,
            available: pod.available,
        });
        replica_counts(
            counted,
            &self.limits,
            self.observed.current_revision == self.observed.update_revision,
        )
    }

    /// Whether this failed and would fail again.
    pub fn failed_permanently(&self, subject: &FailureSubject) -> bool {
        self.observed.failures.get(subject).is_some_and(|f| f.permanent)
    }

    /// Until when a failed action must not be retried.
    pub fn retry_at(&self, subject: &FailureSubject) -> Option<Timestamp> {
        let failure = self.observed.failures.get(subject)?;
        Some(failure.retry_at).filter(|until| *until > self.now)
    }
}

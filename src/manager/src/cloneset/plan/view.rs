//! What is observed, looked at once.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::limits::Limits;
use super::numbers::{Counted, Numbers, numbers};
use super::types::{self, Observed, Revision, Subject};
use kruise_api::cloneset::CloneSetSpec;
use kruise_api::keys;
use kruise_api::lifecycle::{Lifecycle, LifecycleHook, LifecycleStateType as State};
use kruise_api::owner::Owner;
use kruise_api::validation::clone_set::possible;
use kruise_workload::claim::Claim;
use kruise_workload::in_place::{Pod, Template};
use kruise_workload::pods;

/// A Pod that counts, and what holds of it now.
///
/// All of a plan's steps ask for these, and there may be ten thousand Pods: they are found out once.
pub(super) struct Seen<'a> {
    pub pod: &'a Pod,
    pub state: State,
    /// Whether it has the update revision.
    pub updated: bool,
    /// Whether somebody asked for its deletion.
    pub specified: bool,
    /// Whether it runs and is ready, and no update holds it.
    pub ready: bool,
    /// Whether it is in use, and was ready for as long as it must be.
    pub available: bool,
    /// Whether it needs nothing, nor waits for anything, unless it is chosen.
    pub rests: bool,
}

impl Deref for Seen<'_> {
    type Target = Pod;

    fn deref(&self) -> &Pod {
        self.pod
    }
}

/// What is observed, looked at once.
pub(super) struct View<'a> {
    pub observed: &'a Observed,
    pub spec: &'a CloneSetSpec,
    pub now: Timestamp,
    pub limits: Limits,
    /// The hooks, without what no Pod can have: that would hold Pods for ever.
    lifecycle: Option<Lifecycle>,
    /// Seconds that a Pod must be ready for to be available.
    pub min_ready: i32,
    /// The claims that are not being deleted, by the id of their Pod.
    pub claims: BTreeMap<&'a str, Vec<&'a Claim>>,
    /// The Pods that count: ours, neither ended nor being deleted.
    pub pods: Vec<Seen<'a>>,
    /// Names in `podsToDelete`; the list may be as long as there are Pods.
    named: BTreeSet<&'a str>,
}

/// How many Pods one plan makes, patches or deletes at most: there is news by the time that these requests are sent, and the
/// rest would be planned anew in each pass.
pub const AT_ONCE: usize = 500;
/// The memory that what a plan makes or patches may take, in bytes. All passes that run have theirs at the same time.
const MEMORY: usize = 16 << 20;

impl<'a> View<'a> {
    /// How many Pods this plan makes, patches or deletes at most: fewer of those that take much memory.
    pub fn room(&self) -> usize {
        (MEMORY / self.observed.memory.max(1)).clamp(1, AT_ONCE)
    }

    pub fn new(observed: &'a Observed, now: Timestamp) -> Self {
        let spec = &observed.set.spec;
        let mut claims: BTreeMap<&str, Vec<&Claim>> = BTreeMap::new();
        for claim in observed.claims.iter().filter(|claim| !claim.deleting) {
            claims.entry(&claim.instance).or_default().push(claim);
        }
        let named = spec.scale_strategy.iter().map(|scale| &scale.pods_to_delete);
        Self {
            observed,
            spec,
            now,
            limits: Limits::of(spec, &observed.switches),
            lifecycle: spec.lifecycle.as_ref().map(possible),
            min_ready: spec.min_ready_seconds.unwrap_or_default(),
            claims,
            pods: Vec::with_capacity(observed.pods.len()),
            named: named.flatten().map(String::as_str).collect(),
        }
    }

    pub fn revision(&self, name: &str) -> Option<&'a Revision> {
        self.observed
            .revisions
            .iter()
            .find(|r| r.name == name)
            .map(AsRef::as_ref)
    }

    /// The revision that a Pod has.
    pub fn revision_of(&self, pod: &Pod) -> Option<&'a Revision> {
        let revisions = self.observed.revisions.iter();
        let mut same = revisions.filter(|revision| pods::at(pod, &revision.name));
        same.next().map(AsRef::as_ref)
    }

    /// Whether the revision that a Pod has takes too much memory to be read.
    pub fn unread(&self, pod: &Pod) -> bool {
        self.observed.unread.iter().any(|name| pods::at(pod, name))
    }

    /// The Pod template of a revision, for what is written into Pods.
    pub fn template(&self, revision: &str) -> Template<'a> {
        let revision = self.revision(revision);
        revision.map_or_else(Template::unknown, |revision| Template::of(&revision.data))
    }

    /// The same of the revision that a Pod has.
    pub fn template_of(&self, pod: &Pod) -> Template<'a> {
        let revision = self.revision_of(pod);
        revision.map_or_else(Template::unknown, |revision| Template::of(&revision.data))
    }

    /// The CloneSet as the controller of its Pods.
    pub fn owner(&self) -> Owner {
        Owner::clone_set(&self.observed.set.metadata)
    }

    /// The reference of the CloneSet to itself as the controller of what it makes.
    pub fn owner_reference(&self) -> Value {
        let meta = &self.observed.set.metadata;
        json!({
            "apiVersion": "apps.kruise.io/v1beta1",
            "kind": "CloneSet",
            "name": meta.name,
            "uid": meta.uid,
            "controller": true,
            "blockOwnerDeletion": true,
        })
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

    /// Whether nothing is known to update Pods to: what the CloneSet asks for cannot be used.
    pub fn held(&self) -> bool {
        self.observed.template != types::Template::Taken
    }

    /// Takes in a Pod that counts.
    pub fn count(&mut self, pod: &'a Pod) {
        self.pods.push(Seen {
            pod,
            state: pods::state(pod),
            updated: pods::at(pod, &self.observed.update),
            specified: pod.labels.contains_key(keys::SPECIFIED_DELETE)
                || self.named.contains(pod.name.as_str()),
            ready: pods::ready(pod, 0, self.now),
            available: pods::available(pod, self.min_ready, self.now),
            rests: pods::at_rest(pod),
        });
    }

    /// Whether the Pod counts as updated when scaling.
    pub fn scaled_as_updated(&self, pod: &Seen<'_>) -> bool {
        let prepared = self.observed.switches.preparing_update_as_update;
        pod.updated || (prepared && pod.state == State::PreparingUpdate)
    }

    /// The ten numbers; `updated` says which Pods count as updated.
    pub fn numbers(&self, updated: impl Fn(&Seen<'_>) -> bool) -> Numbers {
        let counted = self.pods.iter().map(|pod| Counted {
            new: updated(pod),
            preparing_delete: pod.state == State::PreparingDelete,
            specified: pod.specified,
            available: pod.available,
        });
        numbers(
            counted,
            &self.limits,
            self.observed.current == self.observed.update,
        )
    }

    /// Whether what concerns this failed, and would again.
    pub fn given_up(&self, subject: &Subject) -> bool {
        self.observed.failures.get(subject).is_some_and(|f| f.lasting)
    }

    /// Until when an act that failed is not to be tried again.
    pub fn delayed(&self, subject: &Subject) -> Option<Timestamp> {
        let failure = self.observed.failures.get(subject)?;
        Some(failure.until).filter(|until| *until > self.now)
    }
}

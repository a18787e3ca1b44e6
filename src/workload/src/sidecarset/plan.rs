//! One reconcile of a SidecarSet: what is written to its revisions, its status and its Pods, and what it waits for.
//!
//! In:  the SidecarSet, its matched Pods ([`super::matching`]), the ControllerRevisions of Kruise's namespace, the time.
//! Out: a [`Plan`]. The revision is written first, because status and Pods name it; then the status, then the Pods.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use kruise_api::sidecarset::{
    SidecarSetPatchPodMetadata, SidecarSetPatchPolicy, SidecarSetSpec, SidecarSetStatus,
    SidecarSetUpdateStrategyType,
};
use serde_json::Value;

use super::history::{self, HistoryOwner, HistoryPlan, ListedRevision};
use super::hot_upgrade::{is_flip_due, is_idle_container_running, pairs};
use super::pod_metadata::{PatchError, patch_annotations};
use super::select::{Selection, select};
use super::set::SetView;
use super::status::{Counters, PodState};
use super::upgradable::upgradable_condition;
use super::upgrade::{PodChanges, flip, upgrade};
use crate::in_place::Pod;
use crate::revision::Revision;

/// Pods that one plan updates: those that it cannot write soon would be planned again.
pub(super) const MAX_UPGRADES: usize = 1000;

/// Event reason on the SidecarSet: Pods of this round cannot be updated in place.
pub const EVENT_NOT_UPGRADABLE: &str = "NotUpgradablePods";
/// Event reason on a Pod: the container from which another one took over has the empty image.
pub const EVENT_RESET_SUCCEEDED: &str = "ResetContainerSucceed";
/// Event reason on a Pod: the empty image could not be set.
pub const EVENT_RESET_FAILED: &str = "ResetContainerFailed";

/// What a reconcile observes of a SidecarSet.
#[derive(Clone, Copy, Debug)]
pub struct Observed<'a> {
    /// Name of the SidecarSet.
    pub name: &'a str,
    /// Its UID.
    pub uid: &'a str,
    /// Generation of its spec.
    pub generation: i64,
    /// Its `resourceVersion`.
    pub resource_version: &'a str,
    /// Its labels.
    pub labels: &'a BTreeMap<String, String>,
    /// Its annotations.
    pub annotations: &'a BTreeMap<String, String>,
    /// Its spec.
    pub spec: &'a SidecarSetSpec,
    /// Its status as last written.
    pub status: &'a SidecarSetStatus,
    /// UIDs of Pods whose update or condition the API server refused a moment ago: they are left alone.
    pub refused: &'a BTreeSet<String>,
    /// UIDs of Pods for which that was so before: they are tried after all others.
    pub failed: &'a BTreeSet<String>,
}

/// What to do. Pods are indexes into the given ones.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Revisions.
    pub history: HistoryPlan,
    /// New status, if it differs.
    pub status: Option<SidecarSetStatus>,
    /// Pods in which containers are switched off after a hot upgrade. Each gets event [`EVENT_RESET_SUCCEEDED`] or
    /// [`EVENT_RESET_FAILED`].
    pub flips: Vec<(usize, PodChanges)>,
    /// Pods to update, in this order; the next reconcile plans what is too much for one.
    pub upgrades: Vec<(usize, PodChanges)>,
    /// Condition [`kruise_api::keys::SIDECAR_SET_UPGRADABLE`] of Pods. That of a Pod to update is written after the
    /// update.
    pub conditions: Vec<(usize, Value)>,
    /// Number of Pods for event [`EVENT_NOT_UPGRADABLE`]; 0 for none.
    pub not_upgradable_event: usize,
    /// What the rollout waits for, the most important first.
    pub waits: Vec<Wait>,
}

/// What a rollout waits for. Pods are indexes into the given ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The strategy is `NotUpdate`: these Pods keep what they have.
    NotUpdate {
        /// Pods that are not updated.
        outdated: Vec<usize>,
    },
    /// The update is paused.
    Paused {
        /// Pods that are not updated.
        outdated: Vec<usize>,
    },
    /// Only new Pods get the current containers, because more than images differ.
    NotUpgradable(Vec<usize>),
    /// Annotations of these Pods cannot be merged with those of the set.
    InvalidAnnotation(Vec<(usize, PatchError)>),
    /// Containers of these Pods must become ready before the ones from which they take over are switched off.
    HotUpgrade(Vec<usize>),
    /// Kubelet has not replaced the containers of these Pods since their previous update.
    PreviousUpdate(Vec<usize>),
    /// As many Pods are unavailable as may be.
    MaxUnavailable {
        /// Pods that wait.
        held: Vec<usize>,
        /// Pods that are unavailable, with those that are updated now.
        unavailable: usize,
        /// How many may be.
        limit: usize,
    },
    /// These updated Pods are not ready, or kubelet has not replaced their containers.
    UpdatedNotReady(Vec<usize>),
    /// The partition keeps these Pods.
    Partition(Vec<usize>),
    /// The selector of the update strategy leaves these Pods out.
    NotSelected(Vec<usize>),
    /// The API server refused the update of these Pods a moment ago.
    Refused(Vec<usize>),
}

/// Plans one reconcile. `pods` are the matched ones by namespace and name, and `revisions` those of Kruise's namespace.
#[must_use]
pub fn plan<R: Borrow<Revision>>(
    observed: &Observed<'_>,
    pods: &[&Pod],
    revisions: &[ListedRevision<R>],
    now: Timestamp,
) -> Plan {
    let owner = HistoryOwner {
        set: observed.view(""),
        uid: observed.uid,
        labels: observed.labels,
        collisions: observed.status.collision_count,
    };
    let history = history::plan(&owner, revisions, pods);
    let latest = history.latest.clone();
    let set = observed.view(&latest);
    let states: Vec<PodState> = pods.iter().map(|pod| PodState::new(&set, pod)).collect();
    let status = new_status(observed, Counters::new(&states), &history);
    let mut plan = Plan {
        status: status_differs(observed.status, &status).then_some(status),
        history,
        flips: Vec::new(),
        upgrades: Vec::new(),
        conditions: Vec::new(),
        not_upgradable_event: 0,
        waits: Vec::new(),
    };
    plan_pods(observed, &set, pods, &states, now, &mut plan);
    plan
}

fn plan_pods(
    observed: &Observed<'_>,
    set: &SetView<'_>,
    pods: &[&Pod],
    states: &[PodState],
    now: Timestamp,
    plan: &mut Plan,
) {
    let outdated = || indexes(states, |state| !state.updated);
    let strategy = set.spec.update_strategy.as_ref();
    if strategy.and_then(|s| s.type_.as_ref()) == Some(&SidecarSetUpdateStrategyType::NotUpdate) {
        push_pods(plan, outdated(), |outdated| Wait::NotUpdate { outdated });
        return;
    }
    if strategy.is_some_and(|s| s.paused) {
        push_pods(plan, outdated(), |outdated| Wait::Paused { outdated });
        return;
    }
    for (at, pod) in pods.iter().enumerate() {
        if is_flip_due(set, pod) && !observed.refused.contains(&pod.uid) {
            plan.flips.push((at, flip(set, pod, now)));
        }
    }
    if !plan.flips.is_empty() {
        // Their Pods change, and the next reconcile selects.
        return;
    }
    if !outdated().is_empty() {
        plan_upgrades(observed, set, pods, states, now, plan);
    }
    let hot_upgrading = |at: &usize| {
        let pod = pods.get(*at);
        pod.is_some_and(|pod| {
            let mut pairs = pairs(set, pod).into_iter();
            pairs.any(|(container, pair)| is_idle_container_running(container, &pair, pod))
        })
    };
    let broken = indexes(states, |state| state.updated && !state.available());
    let (flipping, broken): (Vec<usize>, Vec<usize>) = broken.into_iter().partition(hot_upgrading);
    push_pods(plan, flipping, Wait::HotUpgrade);
    push_pods(plan, broken, Wait::UpdatedNotReady);
    plan.waits.sort_by_key(Wait::rank);
}

/// Outdated Pods with an annotation that cannot be merged with that of the set.
fn invalid_annotations(
    set: &SetView<'_>,
    pods: &[&Pod],
    states: &[PodState],
) -> BTreeMap<String, (usize, PatchError)> {
    let patches = set.spec.patch_pod_metadata.as_deref().unwrap_or_default();
    let merges = |patch: &SidecarSetPatchPodMetadata| {
        patch.patch_policy == Some(SidecarSetPatchPolicy::MergePatchJson)
    };
    if !patches.iter().any(merges) {
        return BTreeMap::new();
    }
    let outdated = pods.iter().zip(states).enumerate();
    let outdated = outdated.filter(|(_, (_, state))| !state.updated);
    let invalid = outdated.filter_map(|(at, (pod, _))| {
        let why = patch_annotations(&mut pod.annotations.clone(), patches).err()?;
        Some((pod.uid.clone(), (at, why)))
    });
    invalid.collect()
}

fn plan_upgrades(
    observed: &Observed<'_>,
    set: &SetView<'_>,
    pods: &[&Pod],
    states: &[PodState],
    now: Timestamp,
    plan: &mut Plan,
) {
    // They take no place of others.
    let mut invalid = invalid_annotations(set, pods, states);
    let left_alone: BTreeSet<String> = observed.refused.iter().chain(invalid.keys()).cloned().collect();
    let Selection {
        upgrade: upgraded,
        not_upgradable,
        not_selected,
        in_progress,
        refused: left_alone,
        kept,
        held,
        unavailable,
        max_unavailable,
    } = select(set, pods, states, &left_alone, observed.failed);
    let with_pod = |at: &usize| Some((*at, *pods.get(*at)?));
    for (at, pod) in not_upgradable.iter().filter_map(with_pod) {
        if observed.refused.contains(&pod.uid) {
            continue;
        }
        let condition = upgradable_condition(set.name, pod, false, now);
        plan.conditions.extend(condition.map(|condition| (at, condition)));
    }
    plan.not_upgradable_event = not_upgradable.len();
    let (mut invalid_pods, mut refused) = (Vec::new(), Vec::new());
    for (at, pod) in left_alone.iter().filter_map(with_pod) {
        match invalid.remove(&pod.uid) {
            Some(why) => invalid_pods.push(why),
            None => refused.push(at),
        }
    }
    for (at, pod) in upgraded.iter().filter_map(with_pod) {
        if plan.upgrades.len() == MAX_UPGRADES {
            break;
        }
        match upgrade(set, pod, now) {
            Ok(changes) => {
                plan.upgrades.push((at, changes));
                let condition = upgradable_condition(set.name, pod, true, now);
                plan.conditions.extend(condition.map(|condition| (at, condition)));
            }
            Err(why) => invalid_pods.push((at, why)),
        }
    }
    push_pods(plan, not_upgradable, Wait::NotUpgradable);
    push_pods(plan, invalid_pods, Wait::InvalidAnnotation);
    push_pods(plan, refused, Wait::Refused);
    push_pods(plan, in_progress, Wait::PreviousUpdate);
    push_pods(plan, held, |held| Wait::MaxUnavailable {
        held,
        unavailable,
        limit: max_unavailable,
    });
    push_pods(plan, kept, Wait::Partition);
    push_pods(plan, not_selected, Wait::NotSelected);
}

fn push_pods<T>(plan: &mut Plan, pods: Vec<T>, wait: impl FnOnce(Vec<T>) -> Wait) {
    if !pods.is_empty() {
        plan.waits.push(wait(pods));
    }
}

fn indexes(states: &[PodState], counts: fn(&PodState) -> bool) -> Vec<usize> {
    let states = states.iter().enumerate();
    states
        .filter(|(_, state)| counts(state))
        .map(|(at, _)| at)
        .collect()
}

fn new_status(observed: &Observed<'_>, counters: Counters, history: &HistoryPlan) -> SidecarSetStatus {
    SidecarSetStatus {
        observed_generation: Some(observed.generation),
        matched_pods: counters.matched,
        updated_pods: counters.updated,
        ready_pods: counters.ready,
        updated_ready_pods: counters.updated_ready,
        latest_revision: history.latest.clone(),
        collision_count: Some(history.collisions),
        // These two are ours, and the controller's.
        not_injected_pods: observed.status.not_injected_pods,
        conditions: observed.status.conditions.clone(),
    }
}

/// Whether the status is to be written. A generation that is not newer does not count.
fn status_differs(old: &SidecarSetStatus, new: &SidecarSetStatus) -> bool {
    let SidecarSetStatus {
        observed_generation,
        matched_pods,
        updated_pods,
        ready_pods,
        updated_ready_pods,
        latest_revision,
        collision_count,
        not_injected_pods: _,
        conditions: _,
    } = new;
    *observed_generation > old.observed_generation
        || *matched_pods != old.matched_pods
        || *updated_pods != old.updated_pods
        || *ready_pods != old.ready_pods
        || *updated_ready_pods != old.updated_ready_pods
        || *latest_revision != old.latest_revision
        || *collision_count != old.collision_count
}

impl<'a> Observed<'a> {
    /// The SidecarSet for decisions about Pods, with this revision as the current one.
    #[must_use]
    pub fn view<'b>(&self, latest_revision: &'b str) -> SetView<'b>
    where
        'a: 'b,
    {
        SetView {
            name: self.name,
            resource_version: self.resource_version,
            annotations: self.annotations,
            latest_revision,
            spec: self.spec,
        }
    }
}

impl Wait {
    /// The order of importance: what a user must change comes first, what a user asked for last.
    fn rank(&self) -> u8 {
        match self {
            Self::InvalidAnnotation(_) | Self::Refused(_) => 0,
            Self::MaxUnavailable { .. } => 1,
            Self::UpdatedNotReady(_) => 2,
            Self::HotUpgrade(_) => 3,
            Self::PreviousUpdate(_) => 4,
            // It often lasts, and must not hide what is wrong now.
            Self::NotUpgradable(_) => 5,
            Self::Paused { .. } => 6,
            Self::NotUpdate { .. } => 7,
            Self::Partition(_) => 8,
            Self::NotSelected(_) => 9,
        }
    }
}

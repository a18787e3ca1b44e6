//! Every decision about a CloneSet: how many Pods, which of them are updated and how, what to tell.
//!
//! [`plan`] looks at what is there and says what to do next; done and looked at again, it comes to rest in the
//! state that the CloneSet asks for. In one pass:
//!
//! 1. Pods are adopted and released, claims of Pods that are gone cleaned up (`ownership`, `claims`).
//! 2. Pods are made, kept or deleted (`scale`).
//! 3. Every Pod gets the next step of its update in place and of its lifecycle (`refresh`).
//! 4. If the number of Pods is right, Pods are updated within the limits, or get their size back where an update ended
//!    halfway (`update`).
//! 5. New images are pulled ahead (`predownload`); status and conditions are told (`status`).
//!
//! A failure delays what it concerns, until a time, and nothing else.
//!
//! # Where OpenKruise is odd
//!
//! Kept, for somebody may count on it: while any deletion is planned, ordinary scaling in waits; Pods that are ready
//! for less than `minReadySeconds` count against the limit of deletions; a Pod whose deletion is cancelled is
//! `PreparingNormal` first; order priority puts Pods without any listed label first; deletions are not cancelled where
//! a hook marks Pods not ready; claims alone change nothing; the progress deadline counts from the last update of its
//! condition, not from the beginning of the rollout.
//!
//! Mended: `OnDelete` counts with the `maxUnavailable` of its `rollingUpdate`, which our CRD fills in for every type
//! (20 %, rounded up), and makes no Pods ahead of an update that is for others to begin; a new CloneSet adopts orphans
//! with their claims; conditions of failures go when they are over; fractions of percents count; Pods that cannot be made do not stop
//! deletions that are due; Pods that are both unavailable and marked for deletion, or wait for their hook, count as
//! unavailable when others are deleted; a Pod that is marked for deletion takes its place first among
//! those to update, so that no other is taken for it; a Pod that is unavailable anyway is updated also while Pods are
//! missing; claims that no Pod has wait for no Pod that is going; claims without an id are nobody's; claims of a Pod
//! that is refused stay for the next try, which has the same name; claims are given to their Pod before it is deleted,
//! so that they go with it and to nobody else, whatever happens in between; volumes keep the order of their templates;
//! keys that are removed, or the first of their map, are seen as environment; a last batch of resources is done; a Pod
//! prepared for an update that it is not to have any more goes back, also when it was prepared for a roll-back; a Pod
//! in use is held by none of our keys; a Pod whose deletion is cancelled in mid-update goes on with the update, and
//! with the hook after it; claims keep owners that are neither the CloneSet nor a Pod, and stay with them; a registry's
//! port is no tag; resizing and updating do not collide; what is marked for deletion already is not marked, nor told,
//! again; changes of metadata alone do not make a Pod unready.

mod builder;
mod claims;
mod conditions;
mod create;
mod instance_ids;
mod launch_barriers;
mod lifecycle;
pub mod limits;
mod ownership;
mod pre_download;
mod refresh;
pub mod replica_counts;
mod scale;
mod status;
#[cfg(test)]
mod tests;
pub mod types;
mod update;
mod view;
mod waiting;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::json;

pub use builder::truncate;
use builder::{PendingWrites, PlanBuilder};
use kruise_workload::in_place::Pod;
pub use types::{
    Action, ActionFailure, ActionOutcome, ActionPurpose, ClaimPatch, CloneSetEvent, FailureSubject, Features,
    ImagePullJobRef, Observed, OrphanClaim, ParsedRevision, PatchReason, Plan, TemplateStatus,
    UnfinishedCreations,
};
use view::PlanView;
pub use waiting::WAITING;

/// What to do at `now` about a CloneSet that is not being deleted, given what is observed of it. The same observation
/// gives the same plan.
#[must_use]
pub fn plan(observed: &Observed, now: Timestamp) -> Plan {
    let mut builder = PlanBuilder::default();
    let mut view = PlanView::new(observed, now);
    let claimed = ownership::claim_pods(&mut view, &mut builder);
    let mut status = status::counters(&view);
    if claimed.has_orphans {
        // It stays new until it has them all.
        status.observed_generation = observed.set.status.as_ref().and_then(|s| s.observed_generation);
    }
    plan_pods(&view, claimed.adoption_pending, &mut builder);
    pre_download::pre_download(&view, status.updated_ready_replicas, &mut builder);
    prune_pods_to_delete(&view, &mut builder);
    status::set_conditions(&view, &mut status, &mut builder);
    let changed = observed.set.status.as_ref() != Some(&status);
    let mut plan = builder.build();
    plan.status = changed.then_some(status);
    plan
}

/// Scales, refreshes and updates.
fn plan_pods(view: &PlanView<'_>, adoption_pending: bool, builder: &mut PlanBuilder) {
    let claims = claims::clean_up(view, builder);
    let scaled = adoption_pending || scale::scale(view, &claims, builder);
    claims::reclaim(view, builder);
    let mut pending: BTreeMap<String, PendingWrites> = BTreeMap::new();
    let mut room = view.pod_limit();
    for pod in &view.pods {
        if pod.settled || builder.has_action(pod) {
            continue;
        }
        if let Some(needed) = refresh::refresh(view, pod, builder) {
            let delayed = view.retry_at(&FailureSubject::Pod(pod.uid.clone())).is_some();
            room -= usize::from(!delayed);
            pending.insert(pod.uid.clone(), needed);
        }
        if room == 0 {
            break;
        }
    }
    // What the Pods need comes first: about those that were not looked at, nothing can be decided.
    if !scaled && room > 0 {
        update::plan_updates(view, &mut pending, room, builder);
    }
    for pod in &view.pods {
        if let Some(needed) = pending.remove(&pod.uid) {
            let to = view.pod_revision(pod).map(|revision| revision.name.as_str());
            builder.push_update(view, pod, to, (needed.reason, needed.writes));
        }
    }
}

/// Takes the names of Pods that are gone off `podsToDelete`.
fn prune_pods_to_delete(view: &PlanView<'_>, builder: &mut PlanBuilder) {
    let scale = view.spec.scale_strategy.as_ref();
    let Some(scale) = scale.filter(|scale| !scale.pods_to_delete.is_empty()) else {
        return;
    };
    // Also those that are yet to be adopted: what somebody asked for of them holds when they are.
    let (owner, adopts) = (view.owner(), ownership::adopts_orphans(view));
    let ours = |pod: &&Arc<Pod>| match &pod.controller {
        Some(controller) => *controller == owner,
        None => adopts,
    };
    let active = view.observed.pods.iter().filter(|pod| pod.active()).filter(ours);
    let names: BTreeSet<&str> = active.map(|pod| pod.name.as_str()).collect();
    let exists = |name: &&String| names.contains(name.as_str());
    let remaining: Vec<&String> = scale.pods_to_delete.iter().filter(exists).collect();
    if remaining.len() == scale.pods_to_delete.len() {
        return;
    }
    let remaining = if remaining.is_empty() {
        json!(null)
    } else {
        json!(remaining)
    };
    let version = &view.observed.set.metadata.resource_version;
    let patch = json!({
        "metadata": { "resourceVersion": version },
        "spec": { "scaleStrategy": { "podsToDelete": remaining } },
    });
    builder.push(view, Action::PatchCloneSet(patch));
}

//! Every decision about a CloneSet: the number of Pods, which of them are updated and how, and what to report.
//!
//! [`plan`] reads the observed objects and returns the next actions. Executed and repeated, it converges to the state
//! that the CloneSet requests. One call:
//!
//! 1. Adopts and releases Pods and cleans up the claims of deleted Pods (`ownership`, `claims`).
//! 2. Creates, keeps or deletes Pods (`scale`).
//! 3. Plans the next step of the in-place update and the lifecycle of every Pod (`refresh`).
//! 4. If the number of Pods is right, updates Pods within the limits, or restores their size if an update stopped
//!    halfway (`update`).
//! 5. Pre-pulls new images (`pre_download`) and reports status and conditions (`status`).
//!
//! A failure delays only what it concerns, until a time.
//!
//! # Differences from OpenKruise
//!
//! Kept quirks, because users may depend on them: while any deletion is planned, ordinary scale-down waits; Pods that
//! are ready for less than `minReadySeconds` count against the limit of deletions; a Pod whose deletion is cancelled is
//! `PreparingNormal` first; order priority puts Pods without any listed label first; deletions are not cancelled if a
//! hook marks Pods not ready; a change of claim templates alone changes nothing; the progress deadline counts from the
//! last update of its condition, not from the beginning of the rollout.
//!
//! Fixed:
//!
//! * `OnDelete` counts with the `maxUnavailable` of its `rollingUpdate`, which our CRD adds for every type (20 %,
//!   rounded up), and creates no surge Pods for an update that users must begin.
//! * A new CloneSet adopts orphans with their claims.
//! * Conditions of failures are removed when the failures are over.
//! * Fractions of percents count.
//! * Pods that cannot be created do not block deletions that are due.
//! * Pods that are both unavailable and marked for deletion, or wait for their hook, count as unavailable when others
//!   are deleted.
//! * A Pod that is marked for deletion is first among those to update, so that no other is chosen for it.
//! * A Pod that is already unavailable is updated also while Pods are missing.
//! * Unused claims do not wait for terminating Pods.
//! * Claims without an ID belong to no Pod.
//! * Claims of a refused Pod are kept for the retry, which has the same name.
//! * Claims are transferred to their Pod before it is deleted, so that they are deleted with it and no other Pod gets
//!   them, whatever happens in between.
//! * Volumes keep the order of their templates.
//! * Keys that are removed, or the first of their map, are detected as environment.
//! * A last batch of resources completes.
//! * A Pod prepared for an update that is no longer requested returns to its state, also if it was prepared for a
//!   rollback.
//! * No key of ours blocks a Pod in use.
//! * A Pod whose deletion is cancelled during an update continues with the update, and with the hook after it.
//! * Claims keep owners other than the CloneSet or a Pod, and remain with them.
//! * A registry's port is not taken for a tag.
//! * Resizing and updating do not collide.
//! * A Pod already marked for deletion is neither marked nor reported again.
//! * Changes of metadata alone do not make a Pod unready.

mod builder;
mod claims;
mod conditions;
mod create;
mod early_ends;
mod instance_ids;
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

/// The plan at `now` for a CloneSet that is not terminating, from the observed objects. The same observation gives the
/// same plan.
#[must_use]
pub fn plan(observed: &Observed, now: Timestamp) -> Plan {
    let mut builder = PlanBuilder::default();
    let mut view = PlanView::new(observed, now);
    let claimed = ownership::claim_pods(&mut view, &mut builder);
    let mut status = status::counters(&view);
    if claimed.has_orphans {
        // The CloneSet counts as new until it has adopted all of them.
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
    // The writes that Pods need come first: no decision is possible about Pods that were not refreshed.
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

/// Removes the names of deleted Pods from `podsToDelete`.
fn prune_pods_to_delete(view: &PlanView<'_>, builder: &mut PlanBuilder) {
    let scale = view.spec.scale_strategy.as_ref();
    let Some(scale) = scale.filter(|scale| !scale.pods_to_delete.is_empty()) else {
        return;
    };
    // Keep the names of Pods that are still to be adopted: the request applies once they are.
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

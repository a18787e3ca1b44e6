//! The number of Pods: creating, keeping and deleting them.

use std::collections::BTreeSet;

use super::builder::{PlanBuilder, WaitReason};
use super::early_ends::{EarlyEnds, early_ends};
use super::lifecycle;
use super::replica_counts::ReplicaCounts;
use super::types::{Action, CloneSetEvent, FailureSubject, PatchReason};
use super::view::{MAX_PODS_PER_PLAN, ObservedPod, PlanView};
use super::{claims, create, update, waiting};
use kruise_api::lifecycle::LifecycleStateType as State;
use kruise_workload::in_place::Pod;
use kruise_workload::order::{self, DeletionCriteria, TopologySpread};
use kruise_workload::pods;

/// Plans the first of these steps that applies: cancel deletions that are not needed any more, create Pods, delete Pods
/// whose hook released them, delete Pods that a user named, delete surplus Pods. Returns whether one applied.
///
/// Unlike upstream, Pods that cannot be created now (a quota, a limit of the scale strategy) do not block the deletion
/// of Pods that wait for it.
pub(super) fn scale(view: &PlanView<'_>, claims: &BTreeSet<&str>, builder: &mut PlanBuilder) -> bool {
    if cancel_deletions(view, builder) {
        return true;
    }
    let numbers = view.replica_counts(|pod| view.counts_as_updated(pod));
    // Without any revision there is no template for Pods.
    if numbers.scale_up > 0 && view.revision(&view.observed.update_revision).is_some() {
        report_scale_up_limit(&numbers, builder);
        let ended = early_ends(view);
        report_early_ends(ended.as_ref(), builder);
        let not_replaced: Vec<&Pod> = ended.map(|ended| ended.pods).unwrap_or_default();
        let deleted_terminal = delete_terminal_pods(view, claims, &not_replaced, builder);
        if create_pods(view, claims, &numbers, &not_replaced, builder) || deleted_terminal {
            return true;
        }
    }
    let waiting = view.pods.iter().filter(|p| p.state == State::PreparingDelete);
    let unlimited = DeletionBudget {
        ready: i64::MAX,
        available: i64::MAX,
    };
    if delete_pods(view, waiting.map(|seen| seen.pod), unlimited, builder) {
        return true;
    }
    let specified_only = |pod: &&ObservedPod<'_>| pod.specified && pod.state != State::PreparingDelete;
    let specified = view.pods.iter().filter(specified_only).map(|seen| seen.pod);
    let specified = refused_last(view, specified.collect());
    let budget = deletion_budget(view, &numbers);
    let none_specified = specified.is_empty();
    if delete_pods(view, specified, budget, builder) {
        return true;
    }
    let too_many = numbers.scale_down > 0 && none_specified && !any_preparing_delete(view);
    let surplus = || refused_last(view, choose_for_deletion(view, &numbers));
    too_many && delete_pods(view, surplus(), budget, builder)
}

/// The Pods, those whose last change or deletion was refused behind the others: retries must not use up the budget.
fn refused_last<'a>(view: &PlanView<'_>, mut pods: Vec<&'a Pod>) -> Vec<&'a Pod> {
    let failure = |pod: &&Pod| view.observed.failures.get(&FailureSubject::Pod(pod.uid.clone()));
    pods.sort_by_cached_key(|pod| failure(pod).is_some_and(|failure| failure.permanent));
    pods
}

/// Deletes Pods that have ended and whose claims are kept: the Pods that replace them get the same names and claims.
/// These are mostly Pods that kubelet evicted and left for inspection. Returns whether something is done about one.
fn delete_terminal_pods(
    view: &PlanView<'_>,
    kept_claims: &BTreeSet<&str>,
    not_replaced: &[&Pod],
    builder: &mut PlanBuilder,
) -> bool {
    let not_replaced: BTreeSet<&str> = not_replaced.iter().map(|pod| pod.uid.as_str()).collect();
    let ended = create::ended_with_claims(view, kept_claims).into_iter();
    let mut planned = false;
    for pod in ended.filter(|pod| !not_replaced.contains(pod.uid.as_str())) {
        planned |= match pods::is_hooked(view.pre_delete(), pod) {
            true => prepare_delete(view, pod, builder),
            false => builder.push(
                view,
                Action::DeletePod {
                    uid: pod.uid.clone(),
                    name: pod.name.clone(),
                    version: Some(pod.resource_version.clone()),
                    claims: Vec::new(),
                },
            ),
        };
    }
    planned
}

/// Lets the hook know that the Pod is to be deleted; returns whether that is news.
fn prepare_delete(view: &PlanView<'_>, pod: &Pod, builder: &mut PlanBuilder) -> bool {
    if pods::lifecycle_state(pod) == State::PreparingDelete {
        return false;
    }
    let write = lifecycle::state_write(view, pod, Some(State::PreparingDelete), None);
    builder.push_patch(view, pod, PatchReason::PrepareDelete, write.into_iter().collect())
}

fn any_preparing_delete(view: &PlanView<'_>) -> bool {
    view.pods.iter().any(|p| p.state == State::PreparingDelete)
}

/// Cancels the deletion of Pods that are needed again, unless a hook marks Pods not ready.
fn cancel_deletions(view: &PlanView<'_>, builder: &mut PlanBuilder) -> bool {
    let marked = [view.pre_delete(), view.in_place_update()];
    if marked.into_iter().flatten().any(|hook| hook.mark_pod_not_ready) {
        return false;
    }
    let preparing_delete = |pod: &ObservedPod<'_>| pod.state == State::PreparingDelete;
    let count = |pods: usize| i64::try_from(pods).unwrap_or(i64::MAX);
    let planned = view
        .pods
        .iter()
        .filter(|p| preparing_delete(p) || p.specified)
        .count();
    let mut needed = view.limits.replicas - count(view.pods.len()) + count(planned);
    let mut cancelled = false;
    for pod in view.pods.iter().filter(|p| preparing_delete(p) && !p.specified) {
        if needed <= 0 {
            break;
        }
        let write = lifecycle::state_write(view, pod, Some(lifecycle::state_after_cancel(view, pod)), None);
        if builder.push_patch(
            view,
            pod,
            PatchReason::CancelDeletion,
            write.into_iter().collect(),
        ) {
            needed -= 1;
            cancelled = true;
        }
    }
    cancelled
}

/// Records why fewer Pods are created than are missing.
fn report_scale_up_limit(numbers: &ReplicaCounts, builder: &mut PlanBuilder) {
    if numbers.scale_up <= numbers.scale_up_limit {
        return;
    }
    let message = format!(
        "{} Pods are missing, of which scaleStrategy.maxUnavailable allows {} to be made now",
        numbers.scale_up, numbers.scale_up_limit
    );
    builder.events.push(CloneSetEvent {
        warning: true,
        reason: "ScaleUpLimited",
        message: format!(
            "scaleUp is limited because of scaleStrategy.maxUnavailable, limit: {}",
            numbers.scale_up_limit
        ),
        wait_since: None,
    });
    builder.scale_up_limited = Some(message);
}

/// Reports Pods that are not replaced yet, because they ended soon after their creation.
fn report_early_ends(ended: Option<&EarlyEnds<'_>>, builder: &mut PlanBuilder) {
    let Some(ended) = ended else { return };
    builder.requeue_at(ended.until);
    for pod in &ended.pods {
        let why = "to be replaced after a pause, because they ended within a minute of their creation";
        builder.add_wait(WaitReason::PodsEnded, why, pod);
    }
}

/// Creates the missing Pods, except as many as are `not_replaced` yet.
fn create_pods(
    view: &PlanView<'_>,
    kept_claims: &BTreeSet<&str>,
    numbers: &ReplicaCounts,
    not_replaced: &[&Pod],
    builder: &mut PlanBuilder,
) -> bool {
    if let Some(until) = view.retry_at(&FailureSubject::PodCreation) {
        builder.requeue_at(until);
        return false;
    }
    let size = |number: i64| usize::try_from(number).unwrap_or_default();
    // Those whose claims are kept are left out below.
    let with_claims = create::ended_with_claims(view, kept_claims);
    let with_claims: BTreeSet<&str> = with_claims.iter().map(|pod| pod.uid.as_str()).collect();
    let held_back = not_replaced
        .iter()
        .filter(|pod| !with_claims.contains(pod.uid.as_str()));
    // A Pod that was replaced by one that ended as well counts, too, until the pause is over.
    let missing = size(numbers.scale_up).saturating_sub(held_back.count());
    let count = size(numbers.scale_up_limit).min(missing);
    let room = view.pod_limit();
    let actions = create::plan_creations(view, kept_claims, count, size(numbers.scale_up_old));
    if actions.len() == room && room < count {
        builder.requeue_at(view.now);
    } else if actions.len() < count {
        for pod in create::unusable_with_claims(view, kept_claims) {
            builder.add_wait(
                WaitReason::ClaimsInUse,
                "to terminate, so that its PVCs can be reused",
                pod,
            );
        }
    }
    let planned = !actions.is_empty();
    for action in actions {
        builder.push(view, action);
    }
    planned
}

/// How many Pods in use may be deleted.
#[derive(Clone, Copy)]
struct DeletionBudget {
    /// Ready Pods, as upstream counts them.
    ready: i64,
    /// Of these, Pods that have been ready for `minReadySeconds`. One that has not consumes none of this budget.
    available: i64,
}

/// How many Pods in use may be deleted now.
///
/// The limit of upstream counts Pods that are specified for deletion as available. They may not be, so available Pods
/// are counted too.
fn deletion_budget(view: &PlanView<'_>, numbers: &ReplicaCounts) -> DeletionBudget {
    let available = view.pods.iter().filter(|p| p.available).count();
    let min_available = view.limits.replicas - view.limits.max_unavailable;
    let available = i64::try_from(available).unwrap_or(i64::MAX);
    DeletionBudget {
        ready: numbers.delete_ready_limit,
        available: available - min_available,
    }
}

/// Chooses the surplus Pods.
fn choose_for_deletion<'a>(view: &PlanView<'a>, numbers: &ReplicaCounts) -> Vec<&'a Pod> {
    let (new, old): (Vec<&ObservedPod<'_>>, Vec<&ObservedPod<'_>>) =
        view.pods.iter().partition(|p| view.counts_as_updated(p));
    let pods = |seen: Vec<&ObservedPod<'a>>| -> Vec<&'a Pod> { seen.into_iter().map(|s| s.pod).collect() };
    let (new, old) = (pods(new), pods(old));
    let constraints = view.revision(&view.observed.update_revision).map(|r| {
        let spec = &r.data["spec"]["template"]["spec"];
        spec["topologySpreadConstraints"]
            .as_array()
            .cloned()
            .unwrap_or_default()
    });
    let keys = constraints.unwrap_or_default();
    let spread = TopologySpread {
        keys: keys
            .iter()
            .filter_map(|c| c["topologyKey"].as_str().map(str::to_owned))
            .collect(),
        nodes: Some(&view.observed.nodes),
    };
    let choice = DeletionCriteria {
        min_ready_seconds: view.min_ready,
        now: view.now,
        spread: &spread,
    };
    let size = |number: i64| usize::try_from(number).unwrap_or_default();
    order::pick_for_scale_down(
        &old,
        &new,
        size(numbers.scale_down),
        size(numbers.scale_down_old),
        &choice,
    )
}

/// Deletes Pods, or marks them so that their hook prepares the deletion: unavailable ones at once, others within the
/// budget. Returns whether anything was planned.
fn delete_pods<'a>(
    view: &PlanView<'_>,
    pods: impl IntoIterator<Item = &'a Pod>,
    mut budget: DeletionBudget,
    builder: &mut PlanBuilder,
) -> bool {
    let mut planned_any = false;
    let mut room = MAX_PODS_PER_PLAN;
    for pod in pods {
        if room == 0 {
            builder.requeue_at(view.now);
            break;
        }
        // One whose deletion is refused leaves its part of the budget to the others meanwhile.
        if update::requeue_if_delayed(view, pod, builder) {
            continue;
        }
        if pods::available(pod, 0, view.now) {
            let is_available = pods::available(pod, view.min_ready, view.now);
            if budget.ready <= 0 || (is_available && budget.available <= 0) {
                builder.add_wait(
                    WaitReason::MaxUnavailable,
                    format!("to be deleted: {}", waiting::unavailable_limit_text(view)),
                    pod,
                );
                continue;
            }
            budget.ready -= 1;
            budget.available -= i64::from(is_available);
        }
        if !pods::is_hooked(view.pre_delete(), pod) {
            let act = Action::DeletePod {
                uid: pod.uid.clone(),
                name: pod.name.clone(),
                version: view.pre_delete().map(|_| pod.resource_version.clone()),
                claims: claims::pod_claims(view, pod),
            };
            let planned = builder.push(view, act);
            room -= usize::from(planned);
            planned_any |= planned;
        } else {
            // Not limited by `room`: no more are chosen while Pods wait for their hook, which may take hours.
            planned_any |= prepare_delete(view, pod, builder);
        }
    }
    planned_any
}

//! What every Pod needs in every reconcile: the next step of its in-place update, its next state, its gates.

use jiff::SignedDuration;

use super::builder::{PendingWrites, PlanBuilder, WaitReason};
use super::lifecycle;
use super::types::{CloneSetEvent, PatchReason};
use super::update;
use super::view::{ObservedPod, PlanView};
use super::waiting;
use kruise_api::cloneset::PodUpdateStrategyType as Policy;
use kruise_api::lifecycle::{LifecycleHook, LifecycleStateType as State};
use kruise_workload::in_place::completion::WaitingFor;
use kruise_workload::in_place::{RefreshResult, patch, ready, resize};
use kruise_workload::not_ready_reason::container_error;
use kruise_workload::pods;

/// How long kubelet may defer a resize before the Pod is recreated.
const MAX_RESIZE_DEFERRAL: SignedDuration = SignedDuration::from_mins(5);

/// The writes that `pod` needs now, if any; records what it waits for.
pub(super) fn refresh(
    view: &PlanView<'_>,
    pod: &ObservedPod<'_>,
    builder: &mut PlanBuilder,
) -> Option<PendingWrites> {
    let mut update_done = pods::is_idle(pod);
    if !update_done && view.is_unread(pod) {
        let reason = "its revision to be read, which takes too much memory beside those of other Pods";
        builder.add_wait(WaitReason::Stuck, reason, pod);
        return None;
    }
    let has_revision = |revision: &str| pods::has_revision(pod, revision);
    let next = || kruise_workload::in_place::refresh(pod, has_revision, view.pod_template(pod), view.now);
    match if update_done { RefreshResult::Done } else { next() } {
        RefreshResult::Patch(mut writes) => {
            update::set_fallbacks(view, pod, false, &mut writes);
            let reason = PatchReason::ContinueUpdate;
            return Some(PendingWrites {
                writes,
                reason,
                exclusive: true,
            });
        }
        RefreshResult::Wait(waiting) => {
            let message = match &waiting {
                // A time for each Pod would give each Pod its own reason.
                WaitingFor::GracePeriod(Some(until)) => {
                    builder.requeue_at(*until);
                    WaitingFor::GracePeriod(None).to_string()
                }
                other => other.to_string(),
            };
            if let Some(needed) = resolve_failed_resize(view, pod, &waiting, builder) {
                return Some(needed);
            }
            let kind = match &waiting {
                WaitingFor::GracePeriod(_) => WaitReason::GracePeriod,
                _ => WaitReason::PodsNotReady,
            };
            match container_error(pod) {
                Some(trouble) => builder.add_wait(WaitReason::PodsNotReady, trouble, pod),
                None => builder.add_wait(kind, message, pod),
            }
        }
        // The Pod stays out of its Services until no container has to be restarted.
        RefreshResult::Done => update_done = !resize::resize_in_progress(pod),
    }
    let next = next_state(view, pod, update_done, builder);
    let gate = update_done && pod.node.is_some();
    let ready = gate.then(|| ready::ready_condition(pod, view.now)).flatten();
    let first = next.is_some();
    let write = lifecycle::state_write(view, pod, next, ready)?;
    let (writes, reason) = (vec![write], PatchReason::SyncLifecycle);
    Some(PendingWrites {
        writes,
        reason,
        exclusive: first,
    })
}

/// Handles a resize that kubelet cannot do: the Pod is recreated if the policy allows it; otherwise its update
/// completes without the size, which kubelet keeps trying to apply.
fn resolve_failed_resize(
    view: &PlanView<'_>,
    pod: &ObservedPod<'_>,
    waiting: &WaitingFor,
    builder: &mut PlanBuilder,
) -> Option<PendingWrites> {
    let pending = resize::resize_condition(pod)?;
    if pod.specified || !matches!(waiting, WaitingFor::Resources(..)) {
        return None;
    }
    let policy = view
        .spec
        .rolling_update()
        .and_then(|r| r.pod_update_policy.as_ref());
    if policy == Some(&Policy::InPlaceOnly) {
        builder.events.push(CloneSetEvent {
            warning: true,
            reason: "FailedUpdatePodInPlace",
            message: format!("{}: resize is {}: {}", pod.name, pending.reason, pending.message),
            wait_since: None,
        });
        return Some(PendingWrites {
            writes: vec![patch::stop_waiting_for_resize(pod)?],
            reason: PatchReason::ContinueUpdate,
            exclusive: true,
        });
    }
    let recreate_at = match pending.reason.as_str() {
        "Infeasible" => Some(view.now),
        "Deferred" | resize::RESIZE_ERROR => pending
            .since
            .and_then(|since| since.checked_add(MAX_RESIZE_DEFERRAL).ok()),
        _ => None,
    }
    .filter(|_| update::may_recreate(view))?;
    if recreate_at > view.now {
        builder.requeue_at(recreate_at);
        return None;
    }
    let (reason, writes) = update::mark_for_recreate(pod)?;
    Some(PendingWrites {
        writes,
        reason,
        exclusive: true,
    })
}

/// The next state of the Pod without a change of the spec. `update_done` means that no in-place update is in progress.
fn next_state(
    view: &PlanView<'_>,
    pod: &ObservedPod<'_>,
    update_done: bool,
    builder: &mut PlanBuilder,
) -> Option<State> {
    let mut wait_for_hook = |name: &str, hook: &LifecycleHook, present: bool| {
        let expected = if present { "to be removed" } else { "to be added" };
        let items = waiting::hook_items(hook, pod, present);
        let message = format!("hook {name}: {items} {expected}");
        // A hook adds its items when the Pod is healthy.
        let trouble = container_error(pod).filter(|_| !present);
        match trouble {
            Some(trouble) => builder.add_wait(WaitReason::PodsNotReady, trouble, pod),
            None => builder.add_wait(WaitReason::LifecycleHook, message, pod),
        }
        None
    };
    let is_hooked = |hook| pods::is_hooked(hook, pod);
    match &pod.state {
        State::PreparingNormal => match view.lifecycle().and_then(|l| l.pre_normal.as_ref()) {
            Some(hook) if pods::is_all_hooked(hook, pod) => Some(State::Normal),
            Some(hook) if pod.node.is_some() => wait_for_hook("preNormal", hook, false),
            None if pod.node.is_some() => Some(State::Normal),
            _ => {
                builder.add_wait(
                    WaitReason::PodsNotScheduled,
                    waiting::not_scheduled_reason(view, pod),
                    pod,
                );
                None
            }
        },
        State::Updating if update_done => Some(lifecycle::state_after_update(view, pod)),
        State::Updated => match view.in_place_update() {
            Some(hook) if !pods::is_all_hooked(hook, pod) => wait_for_hook("inPlaceUpdate", hook, false),
            _ => Some(State::Normal),
        },
        State::PreparingUpdate if is_hooked(view.in_place_update()) => view
            .in_place_update()
            .and_then(|hook| wait_for_hook("inPlaceUpdate", hook, true)),
        State::PreparingDelete if is_hooked(view.pre_delete()) => view
            .pre_delete()
            .and_then(|hook| wait_for_hook("preDelete", hook, true)),
        _ => None,
    }
}

//! What every Pod needs in every pass: the next step of its update in place, its next state, its gates.

use jiff::SignedDuration;

use super::draft::{Draft, Kind, Pending};
use super::lifecycle;
use super::types::{Event, Why};
use super::update;
use super::view::{Seen, View};
use super::waiting;
use kruise_api::cloneset::PodUpdateStrategyType as Policy;
use kruise_api::lifecycle::{LifecycleHook, LifecycleStateType as State};
use kruise_workload::in_place::complete::Waiting;
use kruise_workload::in_place::{Refresh, patch, ready, resize};
use kruise_workload::pods;

/// How long kubelet may put a resize off before another Pod takes the place.
const DEFERRED: SignedDuration = SignedDuration::from_mins(5);

/// What `pod` needs now, if anything; says what it waits for.
pub(super) fn refresh(view: &View<'_>, pod: &Seen<'_>, draft: &mut Draft) -> Option<Pending> {
    let mut settled = pods::idle(pod);
    if !settled && view.unread(pod) {
        let why = "its revision to be read, which takes too much memory beside those of other Pods";
        draft.wait(Kind::Stuck, why, pod);
        return None;
    }
    let at = |revision: &str| pods::at(pod, revision);
    let next = || kruise_workload::in_place::refresh(pod, at, view.template_of(pod), view.now);
    match if settled { Refresh::Done } else { next() } {
        Refresh::Act(mut writes) => {
            update::fall_back(view, pod, false, &mut writes);
            let why = Why::GoOn;
            return Some(Pending {
                writes,
                why,
                first: true,
            });
        }
        Refresh::Wait(waiting) => {
            let why = match &waiting {
                // One time for each Pod would be one reason for each.
                Waiting::Grace(Some(until)) => {
                    draft.wake_at(*until);
                    Waiting::Grace(None).to_string()
                }
                other => other.to_string(),
            };
            if let Some(needed) = cannot_resize(view, pod, &waiting, draft) {
                return Some(needed);
            }
            let kind = match &waiting {
                Waiting::Grace(_) => Kind::GracePeriod,
                _ => Kind::PodsNotReady,
            };
            match waiting::trouble(pod) {
                Some(trouble) => draft.wait(Kind::PodsNotReady, trouble, pod),
                None => draft.wait(kind, why, pod),
            }
        }
        // It stays out of its Services until no container is to be restarted any more.
        Refresh::Done => settled = !resize::under_way(pod),
    }
    let next = next_state(view, pod, settled, draft);
    let gate = settled && pod.node.is_some();
    let ready = gate.then(|| ready::ready(pod, view.now)).flatten();
    let first = next.is_some();
    let write = lifecycle::write(view, pod, next, ready)?;
    let (writes, why) = (vec![write], Why::State);
    Some(Pending { writes, why, first })
}

/// What becomes of a Pod that kubelet cannot give its new size: another takes its place, where the policy allows that, or
/// else its update ends without the size, which kubelet goes on trying for.
fn cannot_resize(view: &View<'_>, pod: &Seen<'_>, waiting: &Waiting, draft: &mut Draft) -> Option<Pending> {
    let pending = resize::pending(pod)?;
    if pod.specified || !matches!(waiting, Waiting::Resources(..)) {
        return None;
    }
    let policy = view
        .spec
        .rolling_update()
        .and_then(|r| r.pod_update_policy.as_ref());
    if policy == Some(&Policy::InPlaceOnly) {
        draft.events.push(Event {
            warning: true,
            reason: "FailedUpdatePodInPlace",
            message: format!("{}: resize is {}: {}", pod.name, pending.reason, pending.message),
            since: None,
        });
        return Some(Pending {
            writes: vec![patch::without_sizes(pod)?],
            why: Why::GoOn,
            first: true,
        });
    }
    let until = match pending.reason.as_str() {
        "Infeasible" => Some(view.now),
        "Deferred" | resize::FAILS => pending.since.and_then(|since| since.checked_add(DEFERRED).ok()),
        _ => None,
    }
    .filter(|_| update::may_replace(view))?;
    if until > view.now {
        draft.wake_at(until);
        return None;
    }
    let (why, writes) = update::recreate(pod)?;
    Some(Pending {
        writes,
        why,
        first: true,
    })
}

/// The state that the Pod goes over to by itself. `settled` says that no update in place is under way.
fn next_state(view: &View<'_>, pod: &Seen<'_>, settled: bool, draft: &mut Draft) -> Option<State> {
    let mut held = |name: &str, hook: &LifecycleHook, there: bool| {
        let lets = if there { "to be removed" } else { "to be added" };
        let items = waiting::items(hook, pod, there);
        let why = format!("hook {name}: {items} {lets}");
        // What a hook is to put onto a Pod comes when the Pod is well.
        let trouble = waiting::trouble(pod).filter(|_| !there);
        match trouble {
            Some(trouble) => draft.wait(Kind::PodsNotReady, trouble, pod),
            None => draft.wait(Kind::LifecycleHook, why, pod),
        }
        None
    };
    let hooked = |hook| pods::hooked(hook, pod);
    match &pod.state {
        State::PreparingNormal => match view.lifecycle().and_then(|l| l.pre_normal.as_ref()) {
            Some(hook) if pods::all_hooked(hook, pod) => Some(State::Normal),
            Some(hook) if pod.node.is_some() => held("preNormal", hook, false),
            None if pod.node.is_some() => Some(State::Normal),
            _ => {
                draft.wait(Kind::PodsNotScheduled, waiting::no_node(view, pod), pod);
                None
            }
        },
        State::Updating if settled => Some(lifecycle::after_update(view, pod)),
        State::Updated => match view.in_place_update() {
            Some(hook) if !pods::all_hooked(hook, pod) => held("inPlaceUpdate", hook, false),
            _ => Some(State::Normal),
        },
        State::PreparingUpdate if hooked(view.in_place_update()) => view
            .in_place_update()
            .and_then(|hook| held("inPlaceUpdate", hook, true)),
        State::PreparingDelete if hooked(view.pre_delete()) => {
            view.pre_delete().and_then(|hook| held("preDelete", hook, true))
        }
        _ => None,
    }
}

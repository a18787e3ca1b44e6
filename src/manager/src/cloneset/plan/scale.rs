//! How many Pods there are: making, keeping and deleting them.

use std::collections::BTreeSet;

use super::draft::{Draft, Kind};
use super::lifecycle;
use super::numbers::Numbers;
use super::types::{Act, Event, Subject, Why};
use super::view::{AT_ONCE, Seen, View};
use super::{claims, create, waiting};
use kruise_api::lifecycle::LifecycleStateType as State;
use kruise_workload::in_place::Pod;
use kruise_workload::order::{self, Choice, Spread};
use kruise_workload::pods;

/// Plans the first of these that there is anything to do for, and says whether there was: Pods that need not be
/// deleted after all, new Pods, Pods whose hook let go, Pods that somebody named, Pods that are too many.
///
/// Unlike upstream, Pods that cannot be made now (a quota, a limit of the scale strategy) do not stop the deletion
/// of Pods that wait for it.
pub(super) fn scale(view: &View<'_>, claims: &BTreeSet<&str>, draft: &mut Draft) -> bool {
    if keep(view, draft) {
        return true;
    }
    let numbers = view.numbers(|pod| view.scaled_as_updated(pod));
    // Without any revision there is nothing to make Pods of.
    if numbers.scale_up > 0 && view.revision(&view.observed.update).is_some() {
        limited(&numbers, draft);
        let cleared = clear(view, claims, draft);
        if make(view, claims, &numbers, draft) || cleared {
            return true;
        }
    }
    let waiting = view.pods.iter().filter(|p| p.state == State::PreparingDelete);
    let unlimited = Limit {
        ready: i64::MAX,
        available: i64::MAX,
    };
    if delete(view, waiting.map(|seen| seen.pod), unlimited, draft) {
        return true;
    }
    let named = |pod: &&Seen<'_>| pod.specified && pod.state != State::PreparingDelete;
    let specified: Vec<&Pod> = view.pods.iter().filter(named).map(|seen| seen.pod).collect();
    let limit = limit(view, &numbers);
    let none = specified.is_empty();
    if delete(view, specified, limit, draft) {
        return true;
    }
    let too_many = numbers.scale_down > 0 && none && !preparing(view);
    too_many && delete(view, choose(view, &numbers), limit, draft)
}

/// Deletes Pods that have ended and whose claims stay: the Pods that take their places, and names, have these claims.
/// Kubelet evicts Pods so, and leaves them to be looked at. Whether there were any.
fn clear(view: &View<'_>, claims: &BTreeSet<&str>, draft: &mut Draft) -> bool {
    let acts = create::ended(view, claims).into_iter().map(|pod| Act::DeletePod {
        uid: pod.uid.clone(),
        name: pod.name.clone(),
        version: Some(pod.resource_version.clone()),
        claims: Vec::new(),
    });
    let planned: Vec<bool> = acts.map(|act| draft.act(view, act)).collect();
    planned.contains(&true)
}

fn preparing(view: &View<'_>) -> bool {
    view.pods.iter().any(|p| p.state == State::PreparingDelete)
}

/// Keeps Pods that were to be deleted and are needed again. One that its hook took out of its Services is not.
fn keep(view: &View<'_>, draft: &mut Draft) -> bool {
    let marked = [view.pre_delete(), view.in_place_update()];
    if marked.into_iter().flatten().any(|hook| hook.mark_pod_not_ready) {
        return false;
    }
    let waits = |pod: &Seen<'_>| pod.state == State::PreparingDelete;
    let count = |pods: usize| i64::try_from(pods).unwrap_or(i64::MAX);
    let planned = view.pods.iter().filter(|p| waits(p) || p.specified).count();
    let mut needed = view.limits.replicas - count(view.pods.len()) + count(planned);
    let mut kept = false;
    for pod in view.pods.iter().filter(|p| waits(p) && !p.specified) {
        if needed <= 0 {
            break;
        }
        let write = lifecycle::write(view, pod, Some(lifecycle::after_cancel(view, pod)), None);
        if draft.patch(view, pod, Why::KeepAfterAll, write.into_iter().collect()) {
            needed -= 1;
            kept = true;
        }
    }
    kept
}

/// Says that fewer Pods are made than are missing.
fn limited(numbers: &Numbers, draft: &mut Draft) {
    if numbers.scale_up <= numbers.scale_up_limit {
        return;
    }
    let message = format!(
        "{} Pods are missing, of which scaleStrategy.maxUnavailable allows {} to be made now",
        numbers.scale_up, numbers.scale_up_limit
    );
    draft.events.push(Event {
        warning: true,
        reason: "ScaleUpLimited",
        message: format!(
            "scaleUp is limited because of scaleStrategy.maxUnavailable, limit: {}",
            numbers.scale_up_limit
        ),
        since: None,
    });
    draft.limited = Some(message);
}

fn make(view: &View<'_>, claims: &BTreeSet<&str>, numbers: &Numbers, draft: &mut Draft) -> bool {
    if let Some(until) = view.delayed(&Subject::Creation) {
        draft.wake_at(until);
        return false;
    }
    let size = |number: i64| usize::try_from(number).unwrap_or_default();
    let (count, room) = (size(numbers.scale_up_limit), view.room());
    let acts = create::create(view, claims, count, size(numbers.scale_up_old));
    if acts.len() == room && room < count {
        draft.wake_at(view.now);
    } else if acts.len() < count {
        for pod in create::leaving(view, claims) {
            draft.wait(
                Kind::ClaimsInUse,
                "to terminate, so that its PVCs can be reused",
                pod,
            );
        }
    }
    let made = !acts.is_empty();
    for act in acts {
        draft.act(view, act);
    }
    made
}

/// How many Pods may go that are in use.
#[derive(Clone, Copy)]
struct Limit {
    /// Pods that are ready, as upstream counts them.
    ready: i64,
    /// Of these, Pods that were ready for as long as they must be. One that was not serves nobody's budget.
    available: i64,
}

/// How many Pods in use may go now.
///
/// The limit that upstream goes by counts Pods that are specified for deletion as available; as they need not be, what
/// is available is counted too.
fn limit(view: &View<'_>, numbers: &Numbers) -> Limit {
    let there = view.pods.iter().filter(|p| p.available).count();
    let least = view.limits.replicas - view.limits.unavailable;
    let there = i64::try_from(there).unwrap_or(i64::MAX);
    Limit {
        ready: numbers.delete_ready_limit,
        available: there - least,
    }
}

/// The Pods that are too many.
fn choose<'a>(view: &View<'a>, numbers: &Numbers) -> Vec<&'a Pod> {
    let (new, old): (Vec<&Seen<'_>>, Vec<&Seen<'_>>) =
        view.pods.iter().partition(|p| view.scaled_as_updated(p));
    let pods = |seen: Vec<&Seen<'a>>| -> Vec<&'a Pod> { seen.into_iter().map(|s| s.pod).collect() };
    let (new, old) = (pods(new), pods(old));
    let constraints = view.revision(&view.observed.update).map(|r| {
        let spec = &r.data["spec"]["template"]["spec"];
        spec["topologySpreadConstraints"]
            .as_array()
            .cloned()
            .unwrap_or_default()
    });
    let keys = constraints.unwrap_or_default();
    let spread = Spread {
        keys: keys
            .iter()
            .filter_map(|c| c["topologyKey"].as_str().map(str::to_owned))
            .collect(),
        nodes: Some(&view.observed.nodes),
    };
    let choice = Choice {
        min_ready_seconds: view.min_ready,
        now: view.now,
        spread: &spread,
    };
    let size = |number: i64| usize::try_from(number).unwrap_or_default();
    order::split(
        &old,
        &new,
        size(numbers.scale_down),
        size(numbers.scale_down_old),
        &choice,
    )
}

/// Deletes Pods, or lets their hook prepare that: unavailable ones at once, others while the limit lasts. Whether it did
/// either.
fn delete<'a>(
    view: &View<'_>,
    pods: impl IntoIterator<Item = &'a Pod>,
    mut limit: Limit,
    draft: &mut Draft,
) -> bool {
    let mut done = false;
    let mut room = AT_ONCE;
    for pod in pods {
        if room == 0 {
            draft.wake_at(view.now);
            break;
        }
        if pods::available(pod, 0, view.now) {
            let counts = pods::available(pod, view.min_ready, view.now);
            if limit.ready <= 0 || (counts && limit.available <= 0) {
                draft.wait(
                    Kind::MaxUnavailable,
                    format!("to be deleted: {}", waiting::budget(view)),
                    pod,
                );
                continue;
            }
            limit.ready -= 1;
            limit.available -= i64::from(counts);
        }
        if !pods::hooked(view.pre_delete(), pod) {
            let act = Act::DeletePod {
                uid: pod.uid.clone(),
                name: pod.name.clone(),
                version: view.pre_delete().map(|_| pod.resource_version.clone()),
                claims: claims::of_pod(view, pod),
            };
            let planned = draft.act(view, act);
            room -= usize::from(planned);
            done |= planned;
        } else if pods::state(pod) != State::PreparingDelete {
            let write = lifecycle::write(view, pod, Some(State::PreparingDelete), None);
            done |= draft.patch(view, pod, Why::PrepareDelete, write.into_iter().collect());
        }
    }
    done
}

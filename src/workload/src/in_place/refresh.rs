//! The next step for a Pod, whether it is being updated or not.

use jiff::{Timestamp, ToSpan};

use super::completion::{WaitingFor, check_containers};
use super::pod::Pod;
use super::template::Template;
use super::write::PodWrite;
use super::{annotations, patch};
use kruise_api::time::MAX_CLOCK_CORRECTION;

/// The next step for a Pod.
#[derive(Clone, Debug, PartialEq)]
pub enum RefreshResult {
    /// Nothing blocks the Pod: its gate may be True.
    Done,
    /// Wait until a time or a change of the Pod.
    Wait(WaitingFor),
    /// Send these writes.
    Patch(Vec<PodWrite>),
}

/// The next step for `pod`. `has_revision` tests whether it has a revision, whose template is `template`.
#[must_use]
pub fn refresh(
    pod: &Pod,
    has_revision: impl Fn(&str) -> bool,
    template: Template<'_>,
    now: Timestamp,
) -> RefreshResult {
    let invalid = |why| RefreshResult::Wait(WaitingFor::InvalidAnnotation(why));
    let (grace, state) = match (annotations::grace_spec(pod), annotations::update_state(pod)) {
        (Err(why), _) | (_, Err(why)) => return invalid(why),
        (Ok(grace), Ok(state)) => (grace, state),
    };
    if let Some(grace) = grace {
        let Some(state) = state else {
            return invalid("a grace period is given, but no update".to_owned());
        };
        if !has_revision(&grace.revision) {
            return RefreshResult::Patch(vec![patch::clear_grace(pod)]);
        }
        let began = state.update_timestamp.as_ref().map_or(now, |t| t.0);
        let until = began
            .saturating_add(i64::from(grace.grace_seconds).seconds())
            .unwrap_or(now);
        // A beginning that is further ahead is from before the clock was set back.
        if now < until && began.duration_since(now) <= MAX_CLOCK_CORRECTION {
            return RefreshResult::Wait(WaitingFor::GracePeriod(Some(until)));
        }
        return RefreshResult::Patch(patch::continue_update(pod, grace, template, &state, now));
    }
    let Some(state) = state else {
        return RefreshResult::Done;
    };
    if let Err(waiting) = check_containers(pod, &state) {
        return RefreshResult::Wait(waiting);
    }
    if !annotations::has_next_batches(&state) {
        return RefreshResult::Done;
    }
    let required = state
        .pre_check_before_next
        .iter()
        .flat_map(|check| &check.containers_required_ready);
    let unready = required
        .into_iter()
        .find(|name| !pod.container_status(name).is_some_and(|s| s.ready));
    if let Some(name) = unready {
        return RefreshResult::Wait(WaitingFor::ContainerReady(name.clone()));
    }
    let next = patch::next_batches(&state);
    RefreshResult::Patch(patch::continue_update(pod, next, template, &state, now))
}

//! What is to be done next about a Pod, whether it is being updated or not.

use jiff::{Timestamp, ToSpan};

use super::complete::{Waiting, containers};
use super::pod::Pod;
use super::template::Template;
use super::write::Write;
use super::{patch, state};

/// What is next.
#[derive(Clone, Debug, PartialEq)]
pub enum Refresh {
    /// Nothing holds the Pod: its gate may be true.
    Done,
    /// Nothing to do but to wait; until a time, or for the Pod to change.
    Wait(Waiting),
    /// These writes.
    Act(Vec<Write>),
}

/// What is next for `pod`; `is_at` says whether it has a revision, whose template is `template`.
#[must_use]
pub fn refresh(pod: &Pod, is_at: impl Fn(&str) -> bool, template: Template<'_>, now: Timestamp) -> Refresh {
    let unreadable = |why| Refresh::Wait(Waiting::Unreadable(why));
    let (grace, state) = match (state::grace(pod), state::state(pod)) {
        (Err(why), _) | (_, Err(why)) => return unreadable(why),
        (Ok(grace), Ok(state)) => (grace, state),
    };
    if let Some(grace) = grace {
        let Some(state) = state else {
            return unreadable("a grace period is given, but no update".to_owned());
        };
        if !is_at(&grace.revision) {
            return Refresh::Act(vec![patch::forget_grace(pod)]);
        }
        let began = state.update_timestamp.as_ref().map_or(now, |t| t.0);
        let until = began
            .saturating_add(i64::from(grace.grace_seconds).seconds())
            .unwrap_or(now);
        if now < until {
            return Refresh::Wait(Waiting::Grace(Some(until)));
        }
        return Refresh::Act(patch::go_on(pod, grace, template, &state, now));
    }
    let Some(state) = state else {
        return Refresh::Done;
    };
    if let Err(waiting) = containers(pod, &state) {
        return Refresh::Wait(waiting);
    }
    if !state::has_next(&state) {
        return Refresh::Done;
    }
    let required = state
        .pre_check_before_next
        .iter()
        .flat_map(|check| &check.containers_required_ready);
    let unready = required
        .into_iter()
        .find(|name| !pod.status(name).is_some_and(|s| s.ready));
    if let Some(name) = unready {
        return Refresh::Wait(Waiting::Ready(name.clone()));
    }
    let rest = patch::rest(&state);
    Refresh::Act(patch::go_on(pod, rest, template, &state, now))
}

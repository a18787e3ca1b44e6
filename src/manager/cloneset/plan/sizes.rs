//! Which Pods get the size of their revision: the update that they were resized for did not begin, or their resize was
//! refused.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use super::refresh::Pending;
use super::types::{Subject, Why};
use super::view::{Draft, Seen, View};
use super::waits::Kind;
use super::{lifecycle, update, waits};
use crate::api::lifecycle::LifecycleStateType as State;
use crate::in_place::{self, resize};

/// Gives Pods the size of their revision: those that were resized for an update which they are not to have any more, or
/// not now, and those whose resize was refused; of these, one at a time while it still is.
pub(super) fn take_back(
    view: &View<'_>,
    turns: &BTreeSet<usize>,
    pending: &mut BTreeMap<String, Pending>,
    mut room: usize,
    draft: &mut Draft,
) {
    let left = |at: &usize| resize::announced(&view.pods[*at]) && !turns.contains(at);
    let mut left: Vec<usize> = (0..view.pods.len()).filter(left).collect();
    if left.is_empty() {
        return;
    }
    // The one that was tried longest ago comes first.
    let last_try = |at: &usize| {
        let subject = Subject::Pod(view.pods[*at].uid.clone());
        view.observed.failures.get(&subject).map(|failure| failure.until)
    };
    left.sort_by_key(last_try);
    let failure = view.observed.failures.get(&Subject::Sizes);
    let mut tries = failure.map_or(usize::MAX, |_| 1);
    if let Some(until) = view.delayed(&Subject::Sizes) {
        draft.wake_at(until);
        tries = 0;
    }
    let limit = update::spare(view).max(view.limits.unavailable);
    let gone = |pod: &&Seen<'_>| !pod.available || draft.touched(pod);
    let mut lost = update::count(view.pods.iter().filter(gone).count());
    for pod in left.into_iter().map(|at| &view.pods[at]) {
        let goes = pod.specified || pod.state == State::PreparingDelete;
        let busy = draft.touched(pod) || pending.get(&pod.uid).is_some_and(|p| p.first);
        if goes || busy || room == 0 || in_place::graced(pod) || update::delayed(view, pod, draft) {
            continue;
        }
        let refused = resize::refused(pod);
        if refused && (tries == 0 || pod.state != State::Normal) {
            continue;
        }
        if pod.available && resize::disturbs(pod, view.template_of(pod)) {
            if lost >= limit {
                draft.wait(
                    Kind::MaxUnavailable,
                    format!("to be resized: {}", waits::budget(view)),
                    pod,
                );
                continue;
            }
            lost += 1;
        }
        room -= 1;
        tries -= usize::from(refused);
        // A hook let go of it, and is to take it back into use when that is over.
        let marks = match pod.state {
            State::PreparingUpdate => lifecycle::marks(&State::Updating, view.now),
            _ => json!({}),
        };
        let map = |part: &str| marks[part].as_object().cloned().unwrap_or_default();
        let mut writes = resize::take_back(
            pod,
            view.template_of(pod),
            &map("labels"),
            &map("annotations"),
            view.now,
        );
        // It is announced already what the Pod is to get.
        writes.iter_mut().for_each(|write| write.fallback = None);
        let (why, first) = (Why::GoOn, true);
        pending.insert(pod.uid.clone(), Pending { writes, why, first });
    }
}

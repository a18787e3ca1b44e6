//! Which of a Pod's requests has its turn, and which ones end before their time.

use std::sync::Arc;
use std::time::Duration;

use super::time;
use super::types::{Memory, Now, Observed, PodSight, Request, RuntimeSight, Stage};
use super::words::Wait;
use kruise_api::container_recreate_request::ContainerRecreateRequestPhase as Phase;
use kruise_api::container_recreate_request::{DEADLINE, GONE, NO_RUNTIME};

/// What a request may do now.
#[derive(Clone, Debug, PartialEq)]
pub enum Turn {
    /// It is carried out.
    Next,
    /// It waits for the request of this name.
    Behind(String),
    /// It ends now.
    Over(End),
}

/// Why a request ends before its containers do.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    /// Its `activeDeadlineSeconds` have passed.
    Deadline,
    /// Its Pod is no longer there, or is on its way out.
    PodGone,
    /// Its containers belong to no runtime that could be asked.
    NoRuntime(String),
}

impl End {
    /// The request's message.
    pub fn message(&self) -> String {
        match self {
            Self::Deadline => DEADLINE.to_owned(),
            Self::PodGone => GONE.to_owned(),
            Self::NoRuntime(why) => format!("{NO_RUNTIME}{why}"),
        }
    }
}

/// The requests that are not over for the API server, each with what it may do. A request in progress stays in
/// turn; otherwise the oldest goes first. None has its turn while a container is still being stopped for a request
/// that is over.
pub fn turns(seen: &Observed, now: Now) -> Vec<(Arc<Request>, Turn)> {
    let mut live: Vec<&Arc<Request>> = seen
        .requests
        .iter()
        .filter(|request| !request.deleting && request.status.completion_time.is_none())
        .filter(|request| request.status.phase != Phase::Completed)
        .collect();
    live.sort_by_key(|request| {
        let begun = request.status.phase == Phase::Recreating || has_begun(seen, request);
        (!begun, request.created, request.name.clone(), request.uid.clone())
    });
    let ends: Vec<_> = live.iter().map(|request| end(seen, request, now)).collect();
    let goes_on = |uid: &str| {
        let mut both = live.iter().zip(&ends);
        both.any(|(request, end)| request.uid == uid && end.is_none())
    };
    let mut attempts = seen.memory.attempts.iter();
    let unfinished = attempts
        .find(|(key, attempt)| attempt.live && attempt.stage != Stage::Queued && !goes_on(&key.request))
        .map(|(_, attempt)| attempt.request.clone());
    let mut turns = Vec::with_capacity(live.len());
    let mut first = unfinished;
    for (request, end) in live.into_iter().zip(ends) {
        let turn = match (end, &first) {
            (Some(end), _) => Turn::Over(end),
            (None, Some(first)) => Turn::Behind(first.clone()),
            (None, None) => {
                first = Some(request.name.clone());
                Turn::Next
            }
        };
        turns.push((Arc::clone(request), turn));
    }
    turns
}

/// Whether we have begun it, though the API server may not know it yet.
fn has_begun(seen: &Observed, request: &Request) -> bool {
    seen.memory.attempts.keys().any(|key| key.request == request.uid)
}

fn end(seen: &Observed, request: &Request, now: Now) -> Option<End> {
    if time::deadline(request).is_some_and(|at| now.api >= at) {
        return Some(End::Deadline);
    }
    match &seen.pod {
        PodSight::Gone => return Some(End::PodGone),
        PodSight::Here(pod) => {
            let other = request.pod_uid.as_ref().is_some_and(|uid| *uid != pod.uid);
            if other || pod.deleting {
                return Some(End::PodGone);
            }
        }
        PodSight::Unknown(_) => {}
    }
    match &seen.runtime {
        RuntimeSight::Impossible(why) => Some(End::NoRuntime(why.clone())),
        _ => None,
    }
}

/// What the request waits for before anything is stopped, where its Pod is to be not ready first, and
/// when that can be expected to be over.
pub fn unready(request: &Request, memory: &Memory, now: Now) -> Option<(Wait, Option<Duration>)> {
    let grace = time::seconds(request.unready_seconds?);
    let Some(since) = request.status.unready_since() else {
        return Some((Wait::Unready, None));
    };
    let spent = time::unready_for(
        since,
        memory.unready_seen.get(&request.uid).copied(),
        request,
        now,
    );
    let left = grace.checked_sub(spent).filter(|left| !left.is_zero())?;
    let until = since.checked_add(grace).unwrap_or(now.api);
    Some((Wait::UnreadyGrace { until }, Some(now.mono + left)))
}

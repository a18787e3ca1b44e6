//! Which of a Pod's requests has its turn, and which ones end early.

use std::sync::Arc;
use std::time::Duration;

use super::steps::WaitReason;
use super::time;
use super::types::{Clocks, Observed, RecreateRequest, RecreateState, RuntimeObservation, StopStage};
use kruise_api::container_recreate_request::ContainerRecreateRequestPhase as Phase;
use kruise_api::container_recreate_request::{DEADLINE_MESSAGE, NO_RUNTIME_PREFIX, POD_GONE_MESSAGE};

/// The turn of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestTurn {
    /// It runs.
    Next,
    /// It waits for others; the next in the queue for the one of this name.
    Behind(Option<String>),
    /// It ends now.
    Over(EndReason),
}

/// Why a request ends before its containers are done.
#[derive(Clone, Debug, PartialEq)]
pub enum EndReason {
    /// Its `activeDeadlineSeconds` have passed.
    Deadline,
    /// Its Pod is deleted or terminating.
    PodDeleted,
    /// Its containers belong to no available runtime.
    NoRuntime(String),
}

impl EndReason {
    /// The request's message.
    pub fn message(&self) -> String {
        match self {
            Self::Deadline => DEADLINE_MESSAGE.to_owned(),
            Self::PodDeleted => POD_GONE_MESSAGE.to_owned(),
            Self::NoRuntime(why) => format!("{NO_RUNTIME_PREFIX}{why}"),
        }
    }
}

/// The requests that are not completed in the API server, each with its turn. A request in progress keeps its turn;
/// otherwise the oldest is first. No request has its turn while a container is still being stopped for one that has
/// ended.
pub fn request_turns(observed: &Observed, now: Clocks) -> Vec<(Arc<RecreateRequest>, RequestTurn)> {
    let active = observed.requests.iter().filter(|request| !request.is_finished());
    let mut active: Vec<_> = active
        .map(|request| (request, end_reason(observed, request, now)))
        .collect();
    active.sort_by_cached_key(|(request, _)| {
        // We may have started it although the API server does not have that status yet.
        let has_attempt = observed.state.has_attempt(&request.uid);
        let in_progress = request.status.phase == Phase::Recreating || has_attempt;
        (
            !in_progress,
            request.created_at,
            request.name.clone(),
            request.uid.clone(),
        )
    });
    let continues = |uid: &str| {
        let mut pairs = active.iter();
        pairs.any(|(request, end)| request.uid == uid && end.is_none())
    };
    let unfinished = observed.state.attempts.iter().find(|(key, attempt)| {
        attempt.in_progress && attempt.stage != StopStage::Queued && !continues(&key.request_uid)
    });
    let mut is_free = unfinished.is_none();
    // Only one request names it: at each change of turn, the messages of all others stay.
    let mut first = unfinished.map(|(_, attempt)| attempt.request_name.clone());
    let turns = active.into_iter().map(|(request, end)| {
        let turn = match end {
            Some(end) => RequestTurn::Over(end),
            None if is_free => {
                is_free = false;
                first = Some(request.name.clone());
                RequestTurn::Next
            }
            None => RequestTurn::Behind(first.take()),
        };
        (Arc::clone(request), turn)
    });
    turns.collect()
}

fn end_reason(observed: &Observed, request: &RecreateRequest, now: Clocks) -> Option<EndReason> {
    if time::deadline(request).is_some_and(|at| now.api >= at) {
        return Some(EndReason::Deadline);
    }
    match &observed.runtime {
        _ if observed.is_pod_deleted(request) => Some(EndReason::PodDeleted),
        RuntimeObservation::Unavailable(why) => Some(EndReason::NoRuntime(why.clone())),
        _ => None,
    }
}

/// What the request waits for before the first stop, if its Pod must be not ready first, and when that wait ends.
pub fn unready_wait(
    request: &RecreateRequest,
    state: &RecreateState,
    now: Clocks,
) -> Option<(WaitReason, Option<Duration>)> {
    let grace = time::bounded_seconds(request.strategy.unready_grace_period_seconds?);
    let Some(since) = request.status.unready_since() else {
        return Some((WaitReason::Unready, None));
    };
    let elapsed = time::unready_for(
        since,
        state.unready_observed_at.get(&request.uid).copied(),
        request,
        now,
    );
    let remaining = grace.checked_sub(elapsed).filter(|left| !left.is_zero())?;
    let until = since.checked_add(grace).unwrap_or(now.api);
    Some((WaitReason::UnreadyGrace { until }, Some(now.mono + remaining)))
}

//! Keeps the API server informed: one status write per request at a time, each on top of the version that
//! it was decided on; transitions that come together go together.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use super::RecreateContext;
use super::plan::{Clocks, RecreateRequest, StatusWrite, Urgency};
use super::report::{self, StatusWriteResult};
use kruise_api::backoff::Backoff;
use kruise_api::unconfirmed::Unconfirmed;
use kruise_cluster as cluster;
use kruise_ops::panics::catch_panic;

/// How long a transition waits for company.
const COALESCE_DELAY: Duration = Duration::from_millis(100);
/// How long a step must last before its message alone is worth a write.
const MESSAGE_ONLY_DELAY: Duration = Duration::from_secs(3);
/// After failed writes.
const RETRY_BACKOFF: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
/// After a write that cannot succeed before somebody changes something.
const REJECTED_RETRY_DELAY: Duration = Duration::from_secs(60);

/// Writes the statuses of one Pod's requests.
pub struct StatusWriter {
    shared: Arc<RecreateContext>,
    unconfirmed: BTreeMap<String, Unconfirmed<Arc<RecreateRequest>>>,
    pending: BTreeMap<String, PendingStatusWrite>,
    write_tasks: JoinSet<(StatusWrite, StatusWriteResult)>,
    in_flight: BTreeSet<String>,
    /// Failed writes in a row, and when the next may be tried.
    backoffs: BTreeMap<String, (u32, Duration)>,
    /// Requests that the API server does not have any more.
    deleted: BTreeSet<String>,
}

struct PendingStatusWrite {
    write: StatusWrite,
    /// What it is decided on.
    base: Arc<RecreateRequest>,
    /// Since when the API server's view has differed.
    since: Duration,
}

impl PendingStatusWrite {
    fn due_at(&self) -> Duration {
        self.since
            + match self.write.urgency {
                Urgency::Now => Duration::ZERO,
                Urgency::Soon => COALESCE_DELAY,
                Urgency::IfUnchanged => MESSAGE_ONLY_DELAY,
            }
    }
}

impl StatusWriter {
    /// A writer that has nothing to do yet.
    pub fn new(shared: Arc<RecreateContext>) -> Self {
        Self {
            shared,
            unconfirmed: BTreeMap::new(),
            pending: BTreeMap::new(),
            write_tasks: JoinSet::new(),
            in_flight: BTreeSet::new(),
            backoffs: BTreeMap::new(),
            deleted: BTreeSet::new(),
        }
    }

    /// Whether nothing is being written, and the watch has shown all that was.
    pub fn idle(&self) -> bool {
        self.in_flight.is_empty() && self.unconfirmed.is_empty()
    }

    /// Whether a status of that request is being written.
    pub fn is_writing(&self, uid: &str) -> bool {
        self.in_flight.contains(uid)
    }

    /// Whether the API server has said that the request does not exist any more.
    pub fn is_deleted(&self, uid: &str) -> bool {
        self.deleted.contains(uid)
    }

    /// The watched requests, each in its newest version: ours where the watch is behind.
    pub fn latest(&mut self, watched: Vec<Arc<RecreateRequest>>) -> Vec<Arc<RecreateRequest>> {
        let now = self.shared.now().mono;
        let mut latest = Vec::with_capacity(watched.len());
        let mut still_unconfirmed = BTreeMap::new();
        for request in watched {
            match self.unconfirmed.remove(&request.uid) {
                Some(own) if !own.has_expired(now) && is_newer(own.written(), &request) => {
                    latest.push(Arc::clone(own.written()));
                    still_unconfirmed.insert(request.uid.clone(), own);
                }
                _ => latest.push(request),
            }
        }
        self.unconfirmed = still_unconfirmed;
        latest
    }

    /// Replaces what is to be written.
    pub fn set_pending(&mut self, writes: &[StatusWrite], requests: &[Arc<RecreateRequest>], now: Clocks) {
        let mut pending = BTreeMap::new();
        for write in writes {
            let Some(base) = requests.iter().find(|request| request.uid == write.request_uid) else {
                continue;
            };
            let since = self
                .pending
                .get(&write.request_uid)
                .map_or(now.mono, |previous| previous.since);
            pending.insert(
                write.request_uid.clone(),
                PendingStatusWrite {
                    write: write.clone(),
                    base: Arc::clone(base),
                    since,
                },
            );
        }
        self.pending = pending;
        self.backoffs.retain(|uid, _| self.pending.contains_key(uid));
    }

    /// Starts what is due; returns when the next is.
    pub fn start_due(&mut self, now: Clocks) -> Option<Duration> {
        let mut next = self.unconfirmed.values().map(Unconfirmed::expires_at).min();
        for (uid, pending) in &self.pending {
            if self.in_flight.contains(uid) {
                continue;
            }
            let retry_at = self.backoffs.get(uid).map_or(Duration::ZERO, |(_, until)| *until);
            let due = pending.due_at().max(retry_at);
            if due > now.mono {
                next = Some(next.map_or(due, |next| next.min(due)));
                continue;
            }
            spawn_write(&mut self.write_tasks, &mut self.in_flight, &self.shared, pending);
        }
        next
    }

    /// Waits for a write to end; for ever where there is none. Returns what the API server has taken, and the
    /// request as it is now.
    pub async fn next_written(&mut self) -> Option<(StatusWrite, Arc<RecreateRequest>)> {
        match self.write_tasks.join_next().await {
            Some(Ok((write, written))) => self
                .on_written(&write.request_uid, written)
                .map(|request| (write, request)),
            // Only what was stopped ends without a result.
            Some(Err(_)) => None,
            None => std::future::pending().await,
        }
    }

    fn on_written(&mut self, uid: &str, result: StatusWriteResult) -> Option<Arc<RecreateRequest>> {
        self.in_flight.remove(uid);
        let now = self.shared.now().mono;
        match result {
            StatusWriteResult::Stored(request) => {
                self.pending.remove(uid);
                self.backoffs.remove(uid);
                let request: Arc<RecreateRequest> = Arc::from(request);
                self.unconfirmed
                    .insert(uid.to_owned(), Unconfirmed::new(Arc::clone(&request), now));
                Some(request)
            }
            StatusWriteResult::Stale(request) => {
                self.unconfirmed
                    .insert(uid.to_owned(), Unconfirmed::new(Arc::from(request), now));
                None
            }
            StatusWriteResult::NotFound => {
                self.deleted.insert(uid.to_owned());
                self.back_off(uid, now, None);
                None
            }
            StatusWriteResult::Failed(error) => {
                tracing::warn!(request = uid, %error, "status not written");
                let rejected_delay = error.permanent().then_some(REJECTED_RETRY_DELAY);
                self.back_off(uid, now, error.retry_after().or(rejected_delay));
                None
            }
        }
    }

    fn back_off(&mut self, uid: &str, now: Duration, at_least: Option<Duration>) {
        let entry = self.backoffs.entry(uid.to_owned()).or_default();
        let pause = RETRY_BACKOFF.delay(entry.0);
        *entry = (entry.0 + 1, now + at_least.unwrap_or_default().max(pause));
    }

    /// Writes at once what is wanted for more than its message, and waits for all writes to end.
    pub async fn flush(&mut self) {
        for (uid, pending) in &self.pending {
            if pending.write.urgency != Urgency::IfUnchanged && !self.in_flight.contains(uid) {
                spawn_write(&mut self.write_tasks, &mut self.in_flight, &self.shared, pending);
            }
        }
        while let Some(result) = self.write_tasks.join_next().await {
            if let Ok((write, StatusWriteResult::Failed(error))) = result {
                tracing::warn!(request = write.request_uid, %error, "the last status was not written");
            }
        }
    }
}

fn spawn_write(
    write_tasks: &mut JoinSet<(StatusWrite, StatusWriteResult)>,
    in_flight: &mut BTreeSet<String>,
    shared: &Arc<RecreateContext>,
    pending: &PendingStatusWrite,
) {
    in_flight.insert(pending.write.request_uid.clone());
    let (shared, base, write) = (
        Arc::clone(shared),
        Arc::clone(&pending.base),
        pending.write.clone(),
    );
    let description = format!("writing the status of request {}/{}", base.namespace, base.name);
    // The patch, and where somebody was faster a read.
    let timeout = cluster::write::REQUEST_TIMEOUT * 2;
    let step = shared
        .ctx
        .health
        .progress
        .begin(super::NAME, description, timeout);
    write_tasks.spawn(async move {
        let _step = step;
        let written = report::write_status(&shared.ctx.cluster, &shared.ctx.node_name, &base, &write);
        let written = catch_panic(super::NAME, &write.request_uid, written).await;
        let written = written.unwrap_or_else(|panicked| StatusWriteResult::Failed(panicked.into()));
        (write, written)
    });
}

/// Whether `own` is a later version than `watched`. Versions of one kind are numbers that grow; where an API
/// server has others, the watch is believed.
fn is_newer(cached: &RecreateRequest, watched: &RecreateRequest) -> bool {
    let version = |request: &RecreateRequest| request.resource_version.parse::<u64>().ok();
    matches!((version(cached), version(watched)), (Some(own), Some(watched)) if own > watched)
}

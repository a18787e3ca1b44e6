//! Writes the status of requests: one write per request at a time, each on top of the resource version that the
//! decision was based on. Transitions that are close in time share one write. A version of ours that the watch does not
//! show in time is read from the API server.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::context::{NAME, RecreateContext};
use super::plan::{Clocks, RecreateRequest, StatusWrite, Urgency};
use super::report::{self, StatusWriteResult};
use kruise_api::backoff::Backoff;
use kruise_api::unconfirmed::Unconfirmed;
use kruise_cluster as cluster;
use kruise_ops::panics::catch_panic;

/// The delay after failed writes.
const RETRY_BACKOFF: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
/// The delay after a permanent error: the write cannot succeed until something changes.
const REJECTED_RETRY_DELAY: Duration = Duration::from_secs(60);

/// Writes and reads at once of one Pod's requests: each has its own connection.
const MAX_WRITES_IN_FLIGHT: usize = 8;

/// What the API server has stored, and the request as it is now.
pub type Written = (StatusWrite, Arc<RecreateRequest>);
/// The request before a task, the write unless the task was a read, and the result.
type TaskResult = (Arc<RecreateRequest>, Option<StatusWrite>, StatusWriteResult);

/// Writes the statuses of one Pod's requests.
pub struct StatusWriter {
    shared: Arc<RecreateContext>,
    unconfirmed: BTreeMap<String, Unconfirmed<Arc<RecreateRequest>>>,
    pending: BTreeMap<String, PendingStatusWrite>,
    result_tx: mpsc::UnboundedSender<TaskResult>,
    result_rx: mpsc::UnboundedReceiver<TaskResult>,
    /// UIDs of the requests that are being written (`true`) or read.
    in_flight: BTreeSet<(String, bool)>,
    /// The number of consecutive failed writes, and the earliest time of the next attempt.
    backoffs: BTreeMap<String, (u32, Duration)>,
    /// Requests that no longer exist in the API server.
    deleted: BTreeSet<String>,
}

struct PendingStatusWrite {
    write: StatusWrite,
    /// Since when the status in the API server has differed.
    since: Duration,
}

impl StatusWriter {
    /// Creates a writer without pending writes.
    pub fn new(shared: Arc<RecreateContext>) -> Self {
        let (result_tx, result_rx) = mpsc::unbounded_channel();
        Self {
            shared,
            unconfirmed: BTreeMap::new(),
            pending: BTreeMap::new(),
            result_tx,
            result_rx,
            in_flight: BTreeSet::new(),
            backoffs: BTreeMap::new(),
            deleted: BTreeSet::new(),
        }
    }

    /// Whether no write is in flight and the watch has shown all our writes.
    pub fn idle(&self) -> bool {
        self.in_flight.is_empty() && self.unconfirmed.is_empty()
    }

    /// Whether a status write or a read of the request is in flight.
    pub fn is_writing(&self, uid: &str) -> bool {
        self.in_flight.iter().any(|(requested, _)| requested == uid)
    }

    /// Whether the API server has reported that the request no longer exists.
    pub fn is_deleted(&self, uid: &str) -> bool {
        self.deleted.contains(uid)
    }

    /// The watched requests, each in its newest version: ours if the watch is behind, for however long. Otherwise a
    /// completed request would be executed again. One that the API server no longer has is terminating.
    pub fn latest(&mut self, watched: Vec<Arc<RecreateRequest>>) -> Vec<Arc<RecreateRequest>> {
        let mut latest = Vec::with_capacity(watched.len());
        let (mut unconfirmed, deleted) = (mem::take(&mut self.unconfirmed), mem::take(&mut self.deleted));
        for mut request in watched {
            let uid = request.uid.clone();
            let own = unconfirmed.remove(&uid);
            if let Some(own) = own.filter(|own| is_newer(own.written(), &request)) {
                request = Arc::clone(own.written());
                self.unconfirmed.insert(uid.clone(), own);
            }
            if deleted.contains(&uid) {
                Arc::make_mut(&mut request).terminating = true;
                self.deleted.insert(uid);
            }
            latest.push(request);
        }
        latest
    }

    /// Replaces the pending writes.
    pub fn set_pending(&mut self, writes: &[StatusWrite], now: Clocks) {
        let mut pending = BTreeMap::new();
        for write in writes {
            let uid = &write.request.uid;
            if self.deleted.contains(uid) {
                continue;
            }
            let since = self.pending.get(uid).map_or(now.mono, |previous| previous.since);
            let write = write.clone();
            pending.insert(uid.clone(), PendingStatusWrite { write, since });
        }
        self.pending = pending;
        self.backoffs.retain(|uid, _| self.pending.contains_key(uid));
    }

    /// Starts the writes that are due and then the reads, as many as there may be at once; returns when to call it
    /// again. It is called whenever one of them has ended, too.
    pub fn start_due(&mut self, now: Clocks) -> Option<Duration> {
        let expiries = self.unconfirmed.values().map(Unconfirmed::expires_at);
        let mut next = expiries.filter(|at| *at > now.mono).min();
        let mut due = Vec::new();
        for (uid, PendingStatusWrite { write, since }) in &self.pending {
            if self.is_writing(uid) {
                continue;
            }
            let retry_at = self.backoffs.get(uid).map_or(Duration::ZERO, |(_, until)| *until);
            let due_at = (*since + write.urgency.delay()).max(retry_at);
            if due_at > now.mono {
                next = Some(next.map_or(due_at, |next| next.min(due_at)));
            } else {
                due.push((write.urgency, due_at, write));
            }
        }
        due.sort_by_key(|(urgency, due_at, _)| (*urgency, *due_at));
        let free = MAX_WRITES_IN_FLIGHT.saturating_sub(self.in_flight.len());
        let due: Vec<_> = due
            .into_iter()
            .take(free)
            .map(|(.., write)| write.clone())
            .collect();
        for write in due {
            self.spawn(Arc::clone(&write.request), Some(write));
        }
        let expired = self.unconfirmed.values().filter(|own| own.has_expired(now.mono));
        let expired: Vec<_> = expired.map(|own| Arc::clone(own.written())).collect();
        for request in expired {
            if self.in_flight.len() >= MAX_WRITES_IN_FLIGHT || self.is_writing(&request.uid) {
                continue;
            }
            // If it fails, the next read is as late as this one.
            let own = Unconfirmed::new(Arc::clone(&request), now.mono);
            self.unconfirmed.insert(request.uid.clone(), own);
            self.spawn(request, None);
        }
        next
    }

    /// Starts this write of the request's status, or else a read of the request. The Pod is reconciled at its end.
    fn spawn(&mut self, request: Arc<RecreateRequest>, write: Option<StatusWrite>) {
        self.in_flight.insert((request.uid.clone(), write.is_some()));
        let (shared, result_tx) = (Arc::clone(&self.shared), self.result_tx.clone());
        let verb = if write.is_some() {
            "writing the status of"
        } else {
            "reading"
        };
        let description = format!("{verb} request {}/{}", request.namespace, request.name);
        // Covers the patch, and a read after a conflict.
        let timeout = cluster::write::REQUEST_TIMEOUT * 2;
        let progress = &shared.ctx.health.progress;
        let step = progress.begin(NAME, description, timeout);
        tokio::spawn(async move {
            let _step = step;
            let call = async {
                let cluster = &shared.ctx.cluster;
                match &write {
                    Some(write) => report::write_status(cluster, &shared.ctx.node_name, write).await,
                    None => report::read_request(cluster, &request).await,
                }
            };
            let result = catch_panic(NAME, &request.uid, call).await;
            let result = result.unwrap_or_else(|panicked| StatusWriteResult::Failed(panicked.into()));
            let pod = request.pod_key();
            // The receiver is dropped only when nothing is in flight.
            let _ = result_tx.send((request, write, result));
            shared.enqueue(pod);
        });
    }

    /// Waits for a write or a read to end, forever if none is in flight.
    pub async fn next_written(&mut self) -> Option<Written> {
        let result = self.result_rx.recv().await?;
        self.on_result(result)
    }

    /// The same without waiting; `None` if none has ended.
    pub fn try_next_written(&mut self) -> Option<Option<Written>> {
        let result = self.result_rx.try_recv().ok()?;
        Some(self.on_result(result))
    }

    fn on_result(&mut self, (request, write, result): TaskResult) -> Option<Written> {
        let (uid, now) = (request.uid.clone(), self.shared.now().mono);
        self.in_flight.remove(&(uid.clone(), write.is_some()));
        match result {
            StatusWriteResult::Stored(request) => {
                self.pending.remove(&uid);
                self.backoffs.remove(&uid);
                let own = Unconfirmed::new(Arc::clone(&request), now);
                self.unconfirmed.insert(uid, own);
                return Some((write?, request));
            }
            StatusWriteResult::Stale(request) => {
                self.unconfirmed.insert(uid, Unconfirmed::new(request, now));
            }
            StatusWriteResult::NotFound => {
                self.pending.remove(&uid);
                self.unconfirmed.remove(&uid);
                self.deleted.insert(uid);
            }
            StatusWriteResult::Failed(error) => {
                tracing::warn!(request = uid, %error, "failed to write the status or to read the request");
                let rejected_delay = error.permanent().then_some(REJECTED_RETRY_DELAY);
                let at_least = error.retry_after().or(rejected_delay).unwrap_or_default();
                let (failures, retry_at) = self.backoffs.entry(uid).or_default();
                *retry_at = now + RETRY_BACKOFF.delay(*failures).max(at_least);
                *failures = failures.saturating_add(1);
            }
        }
        None
    }

    /// Writes immediately each pending status that changes more than its message, and waits until all writes have ended,
    /// or `until`. Returns what the API server has stored, and whether that is all.
    pub async fn flush(&mut self, until: Instant) -> (Vec<Written>, bool) {
        let mut left = mem::take(&mut self.pending);
        left.retain(|uid, PendingStatusWrite { write, .. }| {
            write.urgency != Urgency::IfUnchanged && !self.in_flight.contains(&(uid.clone(), true))
        });
        let mut all_written = Vec::new();
        loop {
            while self.in_flight.len() < MAX_WRITES_IN_FLIGHT
                && let Some((_, PendingStatusWrite { write, .. })) = left.pop_first()
            {
                self.spawn(Arc::clone(&write.request), Some(write));
            }
            if self.in_flight.is_empty() {
                return (all_written, true);
            }
            let Ok(written) = timeout_at(until, self.next_written()).await else {
                return (all_written, false);
            };
            all_written.extend(written);
        }
    }
}

/// Whether `cached` is a later version than `watched`. Resource versions of one kind are increasing numbers; if an
/// API server uses other versions, the watch counts as newer.
fn is_newer(cached: &RecreateRequest, watched: &RecreateRequest) -> bool {
    let version = |request: &RecreateRequest| request.resource_version.parse::<u64>().ok();
    matches!((version(cached), version(watched)), (Some(own), Some(watched)) if own > watched)
}

//! Writes the status of requests: one write per request at a time, each on top of the resource version that the
//! decision was based on. Transitions that are close in time share one write. A version of ours that the watch does not
//! show in time is read from the API server.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, timeout_at};

use super::RecreateContext;
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

/// The request before a task, the write unless the task was a read, and the result.
type TaskResult = (Arc<RecreateRequest>, Option<StatusWrite>, StatusWriteResult);

/// Writes the statuses of one Pod's requests.
pub struct StatusWriter {
    shared: Arc<RecreateContext>,
    unconfirmed: BTreeMap<String, Unconfirmed<Arc<RecreateRequest>>>,
    pending: BTreeMap<String, PendingStatusWrite>,
    write_tasks: JoinSet<TaskResult>,
    /// UIDs of the requests that are being written (`true`) or read.
    in_flight: BTreeMap<String, bool>,
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
        Self {
            shared,
            unconfirmed: BTreeMap::new(),
            pending: BTreeMap::new(),
            write_tasks: JoinSet::new(),
            in_flight: BTreeMap::new(),
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
        self.in_flight.contains_key(uid)
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
        let mut ready = Vec::new();
        for (uid, pending) in &self.pending {
            if self.in_flight.contains_key(uid) {
                continue;
            }
            let retry_at = self.backoffs.get(uid).map_or(Duration::ZERO, |(_, until)| *until);
            let due = (pending.since + pending.write.urgency.delay()).max(retry_at);
            if due > now.mono {
                next = Some(next.map_or(due, |next| next.min(due)));
                continue;
            }
            ready.push((due, pending));
        }
        ready.sort_by_key(|(due, pending)| (pending.write.urgency, *due));
        let free = MAX_WRITES_IN_FLIGHT.saturating_sub(self.in_flight.len());
        for (_, PendingStatusWrite { write, .. }) in ready.into_iter().take(free) {
            spawn_task(
                &mut self.write_tasks,
                &mut self.in_flight,
                &self.shared,
                &write.request,
                Some(write.clone()),
            );
        }
        for (uid, own) in &mut self.unconfirmed {
            let is_full = self.in_flight.len() >= MAX_WRITES_IN_FLIGHT;
            if is_full || self.in_flight.contains_key(uid) || !own.has_expired(now.mono) {
                continue;
            }
            // If it fails, the next read is as late as this one.
            *own = Unconfirmed::new(Arc::clone(own.written()), now.mono);
            spawn_task(
                &mut self.write_tasks,
                &mut self.in_flight,
                &self.shared,
                own.written(),
                None,
            );
        }
        next
    }

    /// Waits for a write or a read to end, forever if none is in flight. Returns what the API server has stored, and
    /// the request as it is now.
    pub async fn next_written(&mut self) -> Option<(StatusWrite, Arc<RecreateRequest>)> {
        match self.write_tasks.join_next().await {
            Some(ended) => self.on_ended(ended),
            None => std::future::pending().await,
        }
    }

    /// The same without waiting; `None` if none has ended.
    pub fn try_next_written(&mut self) -> Option<Option<(StatusWrite, Arc<RecreateRequest>)>> {
        let ended = self.write_tasks.try_join_next()?;
        Some(self.on_ended(ended))
    }

    fn on_ended(
        &mut self,
        ended: Result<TaskResult, JoinError>,
    ) -> Option<(StatusWrite, Arc<RecreateRequest>)> {
        // Only a cancelled task ends without a result.
        let (base, write, result) = ended.ok()?;
        let request = self.on_result(&base.uid, result)?;
        Some((write?, request))
    }

    fn on_result(&mut self, uid: &str, result: StatusWriteResult) -> Option<Arc<RecreateRequest>> {
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
                self.pending.remove(uid);
                self.unconfirmed.remove(uid);
                None
            }
            StatusWriteResult::Failed(error) => {
                tracing::warn!(request = uid, %error, "failed to write the status or to read the request");
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

    /// Writes immediately each pending status that changes more than its message, and waits until all writes have ended,
    /// or `until`. Returns what the API server has stored, and whether that is all.
    pub async fn flush(&mut self, until: Instant) -> (Vec<(StatusWrite, Arc<RecreateRequest>)>, bool) {
        let mut left = mem::take(&mut self.pending);
        left.retain(|uid, pending| {
            pending.write.urgency != Urgency::IfUnchanged && self.in_flight.get(uid) != Some(&true)
        });
        let mut all_stored = Vec::new();
        loop {
            while self.write_tasks.len() < MAX_WRITES_IN_FLIGHT
                && let Some((_, PendingStatusWrite { write, .. })) = left.pop_first()
            {
                let request = Arc::clone(&write.request);
                spawn_task(
                    &mut self.write_tasks,
                    &mut self.in_flight,
                    &self.shared,
                    &request,
                    Some(write),
                );
            }
            let Ok(ended) = timeout_at(until, self.write_tasks.join_next()).await else {
                return (all_stored, false);
            };
            match ended {
                None => return (all_stored, true),
                Some(Ok((_, Some(write), StatusWriteResult::Stored(request)))) => {
                    all_stored.push((write, Arc::from(request)));
                }
                Some(Ok((base, Some(_), StatusWriteResult::Failed(error)))) => {
                    tracing::warn!(request = base.uid, %error, "the last status was not written");
                }
                Some(_) => {}
            }
        }
    }
}

/// Starts this write of the request's status, or else a read of the request.
fn spawn_task(
    tasks: &mut JoinSet<TaskResult>,
    in_flight: &mut BTreeMap<String, bool>,
    shared: &Arc<RecreateContext>,
    base: &Arc<RecreateRequest>,
    write: Option<StatusWrite>,
) {
    in_flight.insert(base.uid.clone(), write.is_some());
    let (shared, base) = (Arc::clone(shared), Arc::clone(base));
    let verb = if write.is_some() {
        "writing the status of"
    } else {
        "reading"
    };
    let description = format!("{verb} request {}/{}", base.namespace, base.name);
    // Covers the patch, and a read after a conflict.
    let timeout = cluster::write::REQUEST_TIMEOUT * 2;
    let step = shared
        .ctx
        .health
        .progress
        .begin(super::NAME, description, timeout);
    tasks.spawn(async move {
        let _step = step;
        let call = async {
            let cluster = &shared.ctx.cluster;
            match &write {
                Some(write) => report::write_status(cluster, &shared.ctx.node_name, write).await,
                None => report::read_request(cluster, &base).await,
            }
        };
        let result = catch_panic(super::NAME, &base.uid, call).await;
        let result = result.unwrap_or_else(|panicked| StatusWriteResult::Failed(panicked.into()));
        (base, write, result)
    });
}

/// Whether `cached` is a later version than `watched`. Resource versions of one kind are increasing numbers; if an
/// API server uses other versions, the watch counts as newer.
fn is_newer(cached: &RecreateRequest, watched: &RecreateRequest) -> bool {
    let version = |request: &RecreateRequest| request.resource_version.parse::<u64>().ok();
    matches!((version(cached), version(watched)), (Some(own), Some(watched)) if own > watched)
}

//! Keeps the API server informed: one status write per request at a time, each on top of the version that
//! it was decided on; transitions that come together go together.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use super::Shared;
use super::plan::{Now, Request, Urgency, Write};
use super::report::{self, Written};
use kruise_api::backoff::Backoff;
use kruise_cluster as cluster;
use kruise_ops::panics::isolated;

/// How long a transition waits for company.
const TOGETHER: Duration = Duration::from_millis(100);
/// How long a step must last before its message alone is worth a write.
const LASTS: Duration = Duration::from_secs(3);
/// After failed writes.
const RETRY: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
/// After a write that cannot succeed before somebody changes something.
const REFUSED: Duration = Duration::from_secs(60);
/// How long our own write counts although the watch does not show it.
const UNSEEN: Duration = Duration::from_secs(30);

/// Writes the statuses of one Pod's requests.
pub struct Writer {
    shared: Arc<Shared>,
    /// What our own writes brought and the watch has not shown yet, and since when.
    own: BTreeMap<String, (Arc<Request>, Duration)>,
    wanted: BTreeMap<String, Wanted>,
    busy: JoinSet<(Write, Written)>,
    in_flight: BTreeSet<String>,
    /// Failed writes in a row, and when the next may be tried.
    pauses: BTreeMap<String, (u32, Duration)>,
    /// Requests that the API server does not have any more.
    gone: BTreeSet<String>,
}

struct Wanted {
    write: Write,
    /// What it is decided on.
    base: Arc<Request>,
    /// Since when the API server's view has differed.
    since: Duration,
}

impl Wanted {
    fn due(&self) -> Duration {
        self.since
            + match self.write.urgency {
                Urgency::Now => Duration::ZERO,
                Urgency::Soon => TOGETHER,
                Urgency::IfItLasts => LASTS,
            }
    }
}

impl Writer {
    /// A writer that has nothing to do yet.
    pub fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            own: BTreeMap::new(),
            wanted: BTreeMap::new(),
            busy: JoinSet::new(),
            in_flight: BTreeSet::new(),
            pauses: BTreeMap::new(),
            gone: BTreeSet::new(),
        }
    }

    /// Whether nothing is being written, and the watch has shown all that was.
    pub fn idle(&self) -> bool {
        self.in_flight.is_empty() && self.own.is_empty()
    }

    /// Whether a status of that request is being written.
    pub fn busy_with(&self, uid: &str) -> bool {
        self.in_flight.contains(uid)
    }

    /// Whether the API server has said that the request does not exist any more.
    pub fn is_gone(&self, uid: &str) -> bool {
        self.gone.contains(uid)
    }

    /// The watched requests, each in its newest version: ours where the watch is behind.
    pub fn newest(&mut self, watched: Vec<Arc<Request>>) -> Vec<Arc<Request>> {
        let now = self.shared.now().mono;
        let mut newest = Vec::with_capacity(watched.len());
        let mut kept = BTreeMap::new();
        for request in watched {
            match self.own.remove(&request.uid) {
                Some((own, since)) if now < since + UNSEEN && newer(&own, &request) => {
                    newest.push(Arc::clone(&own));
                    kept.insert(request.uid.clone(), (own, since));
                }
                _ => newest.push(request),
            }
        }
        self.own = kept;
        newest
    }

    /// Replaces what is to be written.
    pub fn want(&mut self, writes: &[Write], requests: &[Arc<Request>], now: Now) {
        let mut wanted = BTreeMap::new();
        for write in writes {
            let Some(base) = requests.iter().find(|request| request.uid == write.request) else {
                continue;
            };
            let since = self.wanted.get(&write.request).map_or(now.mono, |old| old.since);
            wanted.insert(
                write.request.clone(),
                Wanted {
                    write: write.clone(),
                    base: Arc::clone(base),
                    since,
                },
            );
        }
        self.wanted = wanted;
        self.pauses.retain(|uid, _| self.wanted.contains_key(uid));
    }

    /// Starts what is due; returns when the next is.
    pub fn start(&mut self, now: Now) -> Option<Duration> {
        let mut next = self.own.values().map(|(_, since)| *since + UNSEEN).min();
        for (uid, wanted) in &self.wanted {
            if self.in_flight.contains(uid) {
                continue;
            }
            let paused = self.pauses.get(uid).map_or(Duration::ZERO, |(_, until)| *until);
            let due = wanted.due().max(paused);
            if due > now.mono {
                next = Some(next.map_or(due, |next| next.min(due)));
                continue;
            }
            spawn(&mut self.busy, &mut self.in_flight, &self.shared, wanted);
        }
        next
    }

    /// Waits for a write to end; for ever where there is none. Returns what the API server has taken, and the
    /// request as it is now.
    pub async fn finished(&mut self) -> Option<(Write, Arc<Request>)> {
        match self.busy.join_next().await {
            Some(Ok((write, written))) => self.take(&write.request, written).map(|request| (write, request)),
            // Only what was stopped ends without a result.
            Some(Err(_)) => None,
            None => std::future::pending().await,
        }
    }

    fn take(&mut self, uid: &str, written: Written) -> Option<Arc<Request>> {
        self.in_flight.remove(uid);
        let now = self.shared.now().mono;
        match written {
            Written::Stored(request) => {
                self.wanted.remove(uid);
                self.pauses.remove(uid);
                let request: Arc<Request> = Arc::from(request);
                self.own.insert(uid.to_owned(), (Arc::clone(&request), now));
                Some(request)
            }
            Written::Stale(request) => {
                self.own.insert(uid.to_owned(), (Arc::from(request), now));
                None
            }
            Written::Gone => {
                self.gone.insert(uid.to_owned());
                self.pause(uid, now, None);
                None
            }
            Written::Failed(error) => {
                tracing::warn!(request = uid, %error, "status not written");
                let refused = error.lasting().then_some(REFUSED);
                self.pause(uid, now, error.retry_after().or(refused));
                None
            }
        }
    }

    fn pause(&mut self, uid: &str, now: Duration, at_least: Option<Duration>) {
        let entry = self.pauses.entry(uid.to_owned()).or_default();
        let pause = RETRY.pause(entry.0);
        *entry = (entry.0 + 1, now + at_least.unwrap_or_default().max(pause));
    }

    /// Writes at once what is wanted for more than its message, and waits for all writes to end.
    pub async fn flush(&mut self) {
        for (uid, wanted) in &self.wanted {
            if wanted.write.urgency != Urgency::IfItLasts && !self.in_flight.contains(uid) {
                spawn(&mut self.busy, &mut self.in_flight, &self.shared, wanted);
            }
        }
        while let Some(ended) = self.busy.join_next().await {
            if let Ok((write, Written::Failed(error))) = ended {
                tracing::warn!(request = write.request, %error, "the last status was not written");
            }
        }
    }
}

fn spawn(
    busy: &mut JoinSet<(Write, Written)>,
    in_flight: &mut BTreeSet<String>,
    shared: &Arc<Shared>,
    wanted: &Wanted,
) {
    in_flight.insert(wanted.write.request.clone());
    let (shared, base, write) = (Arc::clone(shared), Arc::clone(&wanted.base), wanted.write.clone());
    let what = format!("writing the status of request {}/{}", base.namespace, base.name);
    // The patch, and where somebody was faster a read.
    let limit = cluster::write::DEADLINE * 2;
    let step = shared.ctx.health.progress.begin(super::NAME, what, limit);
    busy.spawn(async move {
        let _step = step;
        let written = report::write(&shared.ctx.cluster, &shared.ctx.node_name, &base, &write);
        let written = isolated(super::NAME, &write.request, written).await;
        let written = written.unwrap_or_else(|panicked| Written::Failed(panicked.into()));
        (write, written)
    });
}

/// Whether `own` is a later version than `watched`. Versions of one kind are numbers that grow; where an API
/// server has others, the watch is believed.
fn newer(own: &Request, watched: &Request) -> bool {
    let number = |request: &Request| request.resource_version.parse::<u64>().ok();
    matches!((number(own), number(watched)), (Some(own), Some(watched)) if own > watched)
}

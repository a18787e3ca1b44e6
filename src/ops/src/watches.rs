//! Which kinds are watched, and when the API server last answered about each.
//!
//! In:  the status that each watch reports.
//! Out: one readiness check for all of them, and gauges for each kind.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

use super::metrics::{Labels, metrics};

/// A kind without contact for longer than this is stale. A working watch has contact at least every 150 s, because a
/// silent one is restarted by then.
pub const STALE_AFTER: Duration = Duration::from_secs(240);

/// All watches of the process; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Watches {
    inner: Arc<Mutex<WatchTable>>,
}

#[derive(Debug, Default)]
struct WatchTable {
    next_id: u64,
    watches: BTreeMap<u64, WatchState>,
}

#[derive(Debug)]
struct WatchState {
    kind: String,
    /// Whether the first list is complete.
    listed: bool,
    /// When the API server last answered or sent something.
    last_contact: Instant,
    /// Size of the stored objects as the API server sent them.
    bytes: usize,
    /// The last failure, if there was no contact since.
    failure: Option<String>,
}

impl WatchState {
    /// Why the store of this kind may be incomplete or stale.
    fn readiness_error(&self) -> Option<String> {
        let Self {
            kind,
            listed,
            last_contact: heard,
            failure,
            bytes: _,
        } = self;
        let since_contact = heard.elapsed();
        let what = if !listed {
            format!("{kind} is not listed yet")
        } else if since_contact > STALE_AFTER {
            format!("{kind} is stale: nothing heard for {} s", since_contact.as_secs())
        } else {
            return None;
        };
        Some(match failure {
            Some(why) => format!("{what}: {why}"),
            None => what,
        })
    }
}

/// One watch; dropping it unregisters the watch.
#[derive(Debug)]
pub struct WatchHandle {
    watches: Watches,
    id: u64,
    labels: Labels<1>,
}

impl Watches {
    /// Adds a watch of `kind`, which has no list yet.
    #[must_use]
    pub fn register(&self, kind: &str) -> WatchHandle {
        let mut table = self.lock();
        let id = table.next_id;
        table.next_id += 1;
        let state = WatchState {
            kind: kind.to_owned(),
            listed: false,
            last_contact: Instant::now(),
            bytes: 0,
            failure: None,
        };
        table.watches.insert(id, state);
        WatchHandle {
            watches: self.clone(),
            id,
            labels: [("kind", kind.to_owned())],
        }
    }

    /// The kinds, or the errors of the failing ones; `None` if there is no watch.
    #[must_use]
    pub fn readiness(&self) -> Option<Result<String, String>> {
        let table = self.lock();
        let problems: BTreeSet<String> = table
            .watches
            .values()
            .filter_map(WatchState::readiness_error)
            .collect();
        let kinds: BTreeSet<&str> = table.watches.values().map(|w| w.kind.as_str()).collect();
        if !problems.is_empty() {
            return Some(Err(Vec::from_iter(problems).join("; ")));
        }
        (!kinds.is_empty()).then(|| Ok(Vec::from_iter(kinds).join(", ")))
    }

    fn lock(&self) -> MutexGuard<'_, WatchTable> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WatchHandle {
    /// The API server answered or sent something.
    pub fn record_contact(&self) {
        self.update(|state| {
            state.last_contact = Instant::now();
            state.failure = None;
        });
        let seconds = Timestamp::now().as_duration().as_secs_f64();
        metrics().watch_contact.get_or_create(&self.labels).set(seconds);
    }

    /// The first list or a relist is complete.
    pub fn mark_listed(&self) {
        self.update(|state| state.listed = true);
    }

    /// Sets the size of the stored objects as the API server sent them.
    pub fn set_stored_bytes(&self, bytes: usize) {
        let mut table = self.watches.lock();
        let Some(state) = table.watches.get_mut(&self.id) else {
            return;
        };
        state.bytes = bytes;
        self.report_bytes(&table);
    }

    fn report_bytes(&self, table: &WatchTable) {
        let of_kind = table.watches.values().filter(|w| w.kind == self.labels[0].1);
        let bytes: usize = of_kind.map(|watch| watch.bytes).sum();
        let gauge = metrics().watch_bytes.get_or_create(&self.labels);
        gauge.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    /// A list or watch failed.
    pub fn record_failure(&self, why: &str) {
        self.update(|state| state.failure = Some(why.to_owned()));
    }

    fn update(&self, change: impl FnOnce(&mut WatchState)) {
        if let Some(state) = self.watches.lock().watches.get_mut(&self.id) {
            change(state);
        }
    }
}

impl Drop for WatchHandle {
    fn drop(&mut self) {
        let mut table = self.watches.lock();
        table.watches.remove(&self.id);
        if table.watches.values().any(|w| w.kind == self.labels[0].1) {
            self.report_bytes(&table);
        } else {
            metrics().watch_contact.remove(&self.labels);
            metrics().watch_bytes.remove(&self.labels);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn readiness_names_unlisted_and_stale_kinds() {
        let watches = Watches::default();
        assert_eq!(watches.readiness(), None);
        let (pods, other_pods) = (watches.register("Pod"), watches.register("Pod"));
        let nodes = watches.register("Node");
        for watch in [&pods, &other_pods] {
            watch.record_contact();
            watch.mark_listed();
        }
        nodes.record_failure("nodes is forbidden");
        let why = "Node is not listed yet: nodes is forbidden".to_owned();
        assert_eq!(watches.readiness(), Some(Err(why)));
        nodes.record_contact();
        nodes.mark_listed();
        assert_eq!(watches.readiness(), Some(Ok("Node, Pod".to_owned())));
        let has_metric = |kind: &str| {
            let text = metrics().render();
            text.contains(&format!(
                "kruise_watch_last_contact_timestamp_seconds{{kind=\"{kind}\"}}"
            ))
        };
        assert!(has_metric("Node"));

        tokio::time::advance(STALE_AFTER).await;
        nodes.record_contact();
        other_pods.record_contact();
        tokio::time::advance(Duration::from_secs(1)).await;
        pods.record_failure("connection refused");
        let why = "Pod is stale: nothing heard for 241 s: connection refused".to_owned();
        assert_eq!(watches.readiness(), Some(Err(why)));
        pods.record_contact();
        assert_eq!(watches.readiness(), Some(Ok("Node, Pod".to_owned())));
        drop((pods, other_pods));
        assert_eq!(watches.readiness(), Some(Ok("Node".to_owned())));
        drop(nodes);
        assert_eq!(watches.readiness(), None);
        assert!(!has_metric("Node"));
    }

    #[test]
    fn bytes_of_all_watches_of_a_kind_are_summed() {
        let watches = Watches::default();
        let (one, other) = (watches.register("Held"), watches.register("Held"));
        let has_bytes = |bytes: &str| {
            let line = format!("kruise_watch_bytes{{kind=\"Held\"}}{bytes}");
            metrics().render().contains(&line)
        };
        one.set_stored_bytes(100);
        other.set_stored_bytes(20);
        assert!(has_bytes(" 120\n"));
        drop(one);
        assert!(has_bytes(" 20\n"));
        drop(other);
        assert!(!has_bytes(""));
    }
}

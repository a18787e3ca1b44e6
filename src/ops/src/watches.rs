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

/// When readiness depends on a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Required {
    /// Always.
    Always,
    /// Once it is listed, and not while it is refused: the kind, or the role to read it, may be missing.
    WhenServed,
    /// Until it is listed or refused: the process also does work that does not need it.
    UntilListed,
}

#[derive(Debug)]
struct WatchState {
    kind: String,
    required: Required,
    /// Whether the first list is complete.
    listed: bool,
    /// Whether the last answer was that the kind does not exist or must not be read.
    refused: bool,
    /// When the API server last answered or sent something, or the watch was registered.
    last_contact: Instant,
    /// The same by the wall clock; `None` before the first list.
    last_contact_time: Option<Timestamp>,
    /// Size of the stored objects as the API server sent them.
    bytes: usize,
    /// The last failure, if there was no contact since.
    failure: Option<String>,
}

impl WatchState {
    /// Whether readiness depends on it.
    fn counts(&self) -> bool {
        match self.required {
            Required::Always => true,
            Required::WhenServed => self.listed && !self.refused,
            Required::UntilListed => !self.listed && !self.refused,
        }
    }

    /// Why the store of this kind may be incomplete or stale.
    fn readiness_error(&self) -> Option<String> {
        let Self {
            kind,
            required: _,
            listed,
            refused: _,
            last_contact: heard,
            last_contact_time: _,
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
        self.insert(kind, Required::Always)
    }

    /// The same for a kind that may be missing, or the role to read it: it counts for readiness once it is listed, and
    /// not while the API server refuses it.
    #[must_use]
    pub fn register_optional(&self, kind: &str) -> WatchHandle {
        self.insert(kind, Required::WhenServed)
    }

    /// The same for a kind that some of the work does not need: it counts for readiness until it is listed, and not if the
    /// API server refuses it.
    #[must_use]
    pub fn register_for_start(&self, kind: &str) -> WatchHandle {
        self.insert(kind, Required::UntilListed)
    }

    fn insert(&self, kind: &str, required: Required) -> WatchHandle {
        let mut table = self.lock();
        let id = table.next_id;
        table.next_id += 1;
        let state = WatchState {
            kind: kind.to_owned(),
            required,
            listed: false,
            refused: false,
            last_contact: Instant::now(),
            last_contact_time: None,
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

    /// The kinds, or the errors of the failing ones; `None` if no watch counts.
    #[must_use]
    pub fn readiness(&self) -> Option<Result<String, String>> {
        let table = self.lock();
        let counting = || table.watches.values().filter(|watch| watch.counts());
        let problems: BTreeSet<String> = counting().filter_map(WatchState::readiness_error).collect();
        let kinds: BTreeSet<&str> = counting().map(|w| w.kind.as_str()).collect();
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
        let mut table = self.watches.lock();
        if let Some(state) = table.watches.get_mut(&self.id) {
            state.last_contact = Instant::now();
            state.last_contact_time = Some(Timestamp::now());
            (state.refused, state.failure) = (false, None);
        }
        self.report_contact(&table);
    }

    /// Of several watches of the kind, the stalest: the others must not hide it.
    fn report_contact(&self, table: &WatchTable) {
        let of_kind = table.watches.values().filter(|w| w.kind == self.labels[0].1);
        match of_kind.filter_map(|watch| watch.last_contact_time).min() {
            Some(time) => {
                let gauge = metrics().watch_contact.get_or_create(&self.labels);
                gauge.set(time.as_duration().as_secs_f64());
            }
            None => {
                metrics().watch_contact.remove(&self.labels);
            }
        }
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

    /// A list or watch failed; `refused`: because the kind does not exist or must not be read.
    pub fn record_failure(&self, why: &str, refused: bool) {
        self.update(|state| {
            state.failure = Some(why.to_owned());
            state.refused = refused;
        });
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
        self.report_contact(&table);
        if table.watches.values().any(|w| w.kind == self.labels[0].1) {
            self.report_bytes(&table);
        } else {
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
        nodes.record_failure("nodes is forbidden", true);
        let why = "Node is not listed yet: nodes is forbidden".to_owned();
        assert_eq!(watches.readiness(), Some(Err(why)));
        nodes.record_contact();
        nodes.mark_listed();
        assert_eq!(watches.readiness(), Some(Ok("Node, Pod".to_owned())));
        assert!(last_contact("Node").is_some());

        tokio::time::advance(STALE_AFTER).await;
        nodes.record_contact();
        other_pods.record_contact();
        tokio::time::advance(Duration::from_secs(1)).await;
        pods.record_failure("connection refused", false);
        let why = "Pod is stale: nothing heard for 241 s: connection refused".to_owned();
        assert_eq!(watches.readiness(), Some(Err(why)));
        pods.record_contact();
        assert_eq!(watches.readiness(), Some(Ok("Node, Pod".to_owned())));
        drop((pods, other_pods));
        assert_eq!(watches.readiness(), Some(Ok("Node".to_owned())));
        drop(nodes);
        assert_eq!(watches.readiness(), None);
        assert_eq!(last_contact("Node"), None);
    }

    /// Seconds in the gauge of the kind, if it is there.
    fn last_contact(kind: &str) -> Option<f64> {
        let text = metrics().render();
        let name = format!("kruise_watch_last_contact_timestamp_seconds{{kind=\"{kind}\"}} ");
        let value = text.lines().find_map(|line| line.strip_prefix(&name))?;
        value.parse().ok()
    }

    /// Conversion must not go out of service because a watch of SidecarSets does.
    #[tokio::test(start_paused = true)]
    async fn kind_for_some_of_the_work_counts_until_it_is_listed() {
        let watches = Watches::default();
        let sets = watches.register_for_start("Set");
        assert!(matches!(watches.readiness(), Some(Err(why)) if why.contains("Set is not listed yet")));
        sets.record_failure("sets is forbidden", true);
        assert_eq!(watches.readiness(), None, "the role may be missing");
        sets.record_contact();
        sets.mark_listed();
        tokio::time::advance(2 * STALE_AFTER).await;
        sets.record_failure("connection refused", false);
        assert_eq!(watches.readiness(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn optional_kind_counts_once_it_is_listed() {
        let watches = Watches::default();
        let (pods, probes) = (watches.register("Pod"), watches.register_optional("Probe"));
        let list = |watch: &WatchHandle| {
            watch.record_contact();
            watch.mark_listed();
        };
        list(&pods);
        probes.record_failure("probes is forbidden", true);
        tokio::time::advance(2 * STALE_AFTER).await;
        pods.record_contact();
        assert_eq!(watches.readiness(), Some(Ok("Pod".to_owned())));
        assert_eq!(last_contact("Probe"), None);

        list(&probes);
        assert_eq!(watches.readiness(), Some(Ok("Pod, Probe".to_owned())));
        assert!(last_contact("Probe").is_some());
        tokio::time::advance(STALE_AFTER + Duration::from_secs(1)).await;
        pods.record_contact();
        probes.record_failure("connection refused", false);
        let why = "Probe is stale: nothing heard for 241 s: connection refused".to_owned();
        assert_eq!(watches.readiness(), Some(Err(why)));

        // Its CRD or role is deleted, perhaps by a tenant: that must not take the webhooks out of service.
        probes.record_failure("not found", true);
        assert_eq!(watches.readiness(), Some(Ok("Pod".to_owned())));
        assert!(last_contact("Probe").is_some(), "its age is still shown");
        probes.record_contact();
        assert_eq!(watches.readiness(), Some(Ok("Pod, Probe".to_owned())));
    }

    #[test]
    fn contact_of_a_kind_is_that_of_its_stalest_watch() {
        let watches = Watches::default();
        let [stale, fresh, unlisted] = [(); 3].map(|()| watches.register_optional("Twice"));
        stale.record_contact();
        let first = last_contact("Twice");
        let seconds = || Some(Timestamp::now().as_duration().as_secs_f64());
        while seconds() <= first {
            std::thread::yield_now();
        }
        fresh.record_contact();
        assert!(first.is_some() && last_contact("Twice") == first);
        drop(stale);
        assert!(last_contact("Twice") > first);
        drop(fresh);
        assert_eq!(last_contact("Twice"), None);
        drop(unlisted);
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

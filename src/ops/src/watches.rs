//! Which kinds are watched, and when the API server was last heard of about each.
//!
//! In:  what each watch reports of itself.
//! Out: one readiness check over all of them, and gauges for each kind.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

use super::metrics::{Labels, metrics};

/// A kind of which nothing was heard for longer than this is stale. A watch that works is heard of at least every
/// 150 s, since a silent one is started again by then.
pub const STALE: Duration = Duration::from_secs(240);

/// All watches of the process; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Watches {
    inner: Arc<Mutex<Register>>,
}

#[derive(Debug, Default)]
struct Register {
    next: u64,
    watches: BTreeMap<u64, State>,
}

#[derive(Debug)]
struct State {
    kind: String,
    /// Whether the first list is complete.
    listed: bool,
    /// When the API server last answered or sent something.
    heard: Instant,
    /// Length of the objects that are held, as the API server sent them.
    bytes: usize,
    /// Why it does not work, since it last did.
    failure: Option<String>,
}

impl State {
    /// Why the kind cannot be relied on, if so.
    fn problem(&self) -> Option<String> {
        let Self {
            kind,
            listed,
            heard,
            failure,
            bytes: _,
        } = self;
        let silent = heard.elapsed();
        let what = if !listed {
            format!("{kind} is not listed yet")
        } else if silent > STALE {
            format!("{kind} is stale: nothing heard for {} s", silent.as_secs())
        } else {
            return None;
        };
        Some(match failure {
            Some(why) => format!("{what}: {why}"),
            None => what,
        })
    }
}

/// One watch; it is forgotten when this is dropped.
#[derive(Debug)]
pub struct Watch {
    watches: Watches,
    id: u64,
    labels: Labels<1>,
}

impl Watches {
    /// Adds a watch of `kind`, which has no list yet.
    #[must_use]
    pub fn begin(&self, kind: &str) -> Watch {
        let mut register = self.lock();
        let id = register.next;
        register.next += 1;
        let state = State {
            kind: kind.to_owned(),
            listed: false,
            heard: Instant::now(),
            bytes: 0,
            failure: None,
        };
        register.watches.insert(id, state);
        Watch {
            watches: self.clone(),
            id,
            labels: [("kind", kind.to_owned())],
        }
    }

    /// The kinds, or what is wrong with some of them; `None` while there is no watch.
    #[must_use]
    pub fn check(&self) -> Option<Result<String, String>> {
        let register = self.lock();
        let problems: BTreeSet<String> = register.watches.values().filter_map(State::problem).collect();
        let kinds: BTreeSet<&str> = register.watches.values().map(|w| w.kind.as_str()).collect();
        if !problems.is_empty() {
            return Some(Err(Vec::from_iter(problems).join("; ")));
        }
        (!kinds.is_empty()).then(|| Ok(Vec::from_iter(kinds).join(", ")))
    }

    fn lock(&self) -> MutexGuard<'_, Register> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watch {
    /// The API server has answered, or sent something.
    pub fn heard(&self) {
        self.change(|state| {
            state.heard = Instant::now();
            state.failure = None;
        });
        let seconds = Timestamp::now().as_duration().as_secs_f64();
        metrics().watch_contact.get_or_create(&self.labels).set(seconds);
    }

    /// The first list, or another one, is complete.
    pub fn listed(&self) {
        self.change(|state| state.listed = true);
    }

    /// The objects that are held have that length, as the API server sent them.
    pub fn holds(&self, bytes: usize) {
        let mut register = self.watches.lock();
        let Some(state) = register.watches.get_mut(&self.id) else {
            return;
        };
        state.bytes = bytes;
        self.show_bytes(&register);
    }

    fn show_bytes(&self, register: &Register) {
        let of_kind = register.watches.values().filter(|w| w.kind == self.labels[0].1);
        let bytes: usize = of_kind.map(|watch| watch.bytes).sum();
        let gauge = metrics().watch_bytes.get_or_create(&self.labels);
        gauge.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    /// A list or watch failed.
    pub fn failed(&self, why: &str) {
        self.change(|state| state.failure = Some(why.to_owned()));
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        if let Some(state) = self.watches.lock().watches.get_mut(&self.id) {
            change(state);
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut register = self.watches.lock();
        register.watches.remove(&self.id);
        if register.watches.values().any(|w| w.kind == self.labels[0].1) {
            self.show_bytes(&register);
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
    async fn readiness_names_what_is_not_listed_and_what_is_stale() {
        let watches = Watches::default();
        assert_eq!(watches.check(), None);
        let (pods, other_pods) = (watches.begin("Pod"), watches.begin("Pod"));
        let nodes = watches.begin("Node");
        for watch in [&pods, &other_pods] {
            watch.heard();
            watch.listed();
        }
        nodes.failed("nodes is forbidden");
        let why = "Node is not listed yet: nodes is forbidden".to_owned();
        assert_eq!(watches.check(), Some(Err(why)));
        nodes.heard();
        nodes.listed();
        assert_eq!(watches.check(), Some(Ok("Node, Pod".to_owned())));
        let kept = |kind: &str| {
            let text = metrics().render();
            text.contains(&format!(
                "kruise_watch_last_contact_timestamp_seconds{{kind=\"{kind}\"}}"
            ))
        };
        assert!(kept("Node"));

        tokio::time::advance(STALE).await;
        nodes.heard();
        other_pods.heard();
        tokio::time::advance(Duration::from_secs(1)).await;
        pods.failed("connection refused");
        let why = "Pod is stale: nothing heard for 241 s: connection refused".to_owned();
        assert_eq!(watches.check(), Some(Err(why)));
        pods.heard();
        assert_eq!(watches.check(), Some(Ok("Node, Pod".to_owned())));
        drop((pods, other_pods));
        assert_eq!(watches.check(), Some(Ok("Node".to_owned())));
        drop(nodes);
        assert_eq!(watches.check(), None);
        assert!(!kept("Node"));
    }

    #[test]
    fn what_all_watches_of_a_kind_hold_is_one_figure() {
        let watches = Watches::default();
        let (one, other) = (watches.begin("Held"), watches.begin("Held"));
        let shown = |bytes: &str| {
            let line = format!("kruise_watch_bytes{{kind=\"Held\"}}{bytes}");
            metrics().render().contains(&line)
        };
        one.holds(100);
        other.holds(20);
        assert!(shown(" 120\n"));
        drop(one);
        assert!(shown(" 20\n"));
        drop(other);
        assert!(!shown(""));
    }
}

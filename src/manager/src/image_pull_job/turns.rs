//! Turns of namespaces: the jobs of one never take all workers.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;

use kruise_cluster::Key;

/// Who has a turn, and who waits for one; clones share it.
#[derive(Clone)]
pub struct Turns {
    /// Keys of one namespace that have a turn at once.
    most: usize,
    shares: Arc<Mutex<HashMap<String, Share>>>,
    /// Gets a key that waited when it may ask again.
    again: mpsc::UnboundedSender<Key>,
}

#[derive(Default)]
struct Share {
    running: usize,
    waiting: VecDeque<Key>,
}

/// A turn, until it is dropped; then the next of its namespace may ask.
pub struct Turn {
    turns: Turns,
    namespace: String,
}

impl Turns {
    /// So many turns for each namespace.
    pub fn new(most: usize, again: mpsc::UnboundedSender<Key>) -> Self {
        let shares = Arc::default();
        Self { most, shares, again }
    }

    /// A turn for a key; where its namespace has all that it may, the key waits and is sent `again` later.
    pub fn take(&self, key: &Key) -> Option<Turn> {
        let namespace = key.namespace.clone().unwrap_or_default();
        let mut shares = self.lock();
        let share = shares.entry(namespace.clone()).or_default();
        let waits = share.waiting.iter().position(|waiting| waiting == key);
        if share.running >= self.most {
            if waits.is_none() {
                share.waiting.push_back(key.clone());
            }
            return None;
        }
        if let Some(at) = waits {
            share.waiting.remove(at);
        }
        share.running += 1;
        let turns = self.clone();
        Some(Turn { turns, namespace })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Share>> {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut shares = self.turns.lock();
        let Some(share) = shares.get_mut(&self.namespace) else {
            return;
        };
        share.running = share.running.saturating_sub(1);
        match share.waiting.pop_front() {
            // Nothing receives any more when the process ends.
            Some(key) => drop(self.turns.again.send(key)),
            None if share.running == 0 => drop(shares.remove(&self.namespace)),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_namespace_has_its_share_of_turns_and_every_key_gets_one() {
        let (again_tx, mut again) = mpsc::unbounded_channel();
        let turns = Turns::new(2, again_tx);
        let key = |namespace: &str, n: usize| Key::namespaced(namespace, n.to_string());
        let mut running: VecDeque<_> = (0..2).map(|n| turns.take(&key("crowd", n)).unwrap()).collect();
        for n in 2..100 {
            assert!(turns.take(&key("crowd", n)).is_none());
            assert!(turns.take(&key("crowd", n)).is_none(), "it waits once");
        }
        assert!(
            turns.take(&key("other", 0)).is_some(),
            "another namespace has its own"
        );
        let mut served = Vec::new();
        while running.pop_front().is_some() {
            if let Ok(next) = again.try_recv() {
                running.push_back(turns.take(&next).unwrap());
                served.push(next);
            }
        }
        let all: Vec<Key> = (2..100).map(|n| key("crowd", n)).collect();
        assert_eq!(served, all);
        assert!(turns.lock().is_empty());
    }
}

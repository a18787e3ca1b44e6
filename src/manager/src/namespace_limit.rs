//! A limit of workers per namespace: the jobs of one namespace never take all workers.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;

use kruise_cluster::Key;

/// Running and waiting keys per namespace; clones share them.
#[derive(Clone)]
pub struct NamespaceLimit {
    /// Keys of one namespace that are processed at once.
    max_per_namespace: usize,
    queues: Arc<Mutex<HashMap<String, NamespaceQueue>>>,
    /// Receives a waiting key when it may try again.
    requeue_tx: mpsc::UnboundedSender<Key>,
}

/// A namespace may have thousands of waiting keys, and each of its changes may let all of them try: none is searched for.
#[derive(Default)]
struct NamespaceQueue {
    running: usize,
    /// Waiting keys by number, the first one first.
    waiting: BTreeMap<u64, Key>,
    /// The number of each.
    numbers: HashMap<Key, u64>,
    next_number: u64,
}

impl NamespaceQueue {
    /// Adds a key, unless it waits already.
    fn wait(&mut self, key: &Key) {
        if self.numbers.contains_key(key) {
            return;
        }
        self.waiting.insert(self.next_number, key.clone());
        self.numbers.insert(key.clone(), self.next_number);
        self.next_number += 1;
    }

    /// Removes a key.
    fn remove(&mut self, key: &Key) {
        if let Some(number) = self.numbers.remove(key) {
            self.waiting.remove(&number);
        }
    }

    /// Removes the key that has waited longest.
    fn pop_first(&mut self) -> Option<Key> {
        let (_, key) = self.waiting.pop_first()?;
        self.numbers.remove(&key);
        Some(key)
    }
}

/// A permit, until it is dropped; then the next key of its namespace may try.
pub struct NamespacePermit {
    limit: NamespaceLimit,
    namespace: String,
}

impl NamespaceLimit {
    /// At most `max_per_namespace` permits for each namespace.
    pub fn new(max_per_namespace: usize, requeue_tx: mpsc::UnboundedSender<Key>) -> Self {
        Self {
            max_per_namespace,
            queues: Arc::default(),
            requeue_tx,
        }
    }

    /// A permit for a key; at the limit of its namespace, the key waits and is sent to `requeue_tx` later.
    pub fn try_acquire(&self, key: &Key) -> Option<NamespacePermit> {
        let namespace = key.namespace.clone().unwrap_or_default();
        let mut queues = self.lock();
        let queue = queues.entry(namespace.clone()).or_default();
        if queue.running >= self.max_per_namespace {
            queue.wait(key);
            return None;
        }
        queue.remove(key);
        queue.running += 1;
        Some(NamespacePermit {
            limit: self.clone(),
            namespace,
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, NamespaceQueue>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
impl NamespaceLimit {
    /// All permits of a namespace, if none is taken.
    pub fn take_all(&self, namespace: &str) -> Option<Vec<NamespacePermit>> {
        let keys = (0..self.max_per_namespace).map(|n| Key::namespaced(namespace, n.to_string()));
        keys.map(|key| self.try_acquire(&key)).collect()
    }
}

impl Drop for NamespacePermit {
    fn drop(&mut self) {
        let mut queues = self.limit.lock();
        let Some(queue) = queues.get_mut(&self.namespace) else {
            return;
        };
        queue.running = queue.running.saturating_sub(1);
        match queue.pop_first() {
            // The receiver is dropped at shutdown.
            Some(key) => drop(self.limit.requeue_tx.send(key)),
            None if queue.running == 0 => drop(queues.remove(&self.namespace)),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::VecDeque;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn namespace_permits_are_capped_and_all_keys_run() {
        let (again_tx, mut again) = mpsc::unbounded_channel();
        let limit = NamespaceLimit::new(2, again_tx);
        let key = |namespace: &str, n: usize| Key::namespaced(namespace, n.to_string());
        let mut running: VecDeque<_> = (0..2)
            .map(|n| limit.try_acquire(&key("crowd", n)).unwrap())
            .collect();
        for n in 2..100 {
            assert!(limit.try_acquire(&key("crowd", n)).is_none());
            assert!(limit.try_acquire(&key("crowd", n)).is_none(), "it is queued once");
        }
        assert!(
            limit.try_acquire(&key("other", 0)).is_some(),
            "another namespace has its own"
        );
        let mut served = Vec::new();
        while running.pop_front().is_some() {
            if let Ok(next) = again.try_recv() {
                running.push_back(limit.try_acquire(&next).unwrap());
                served.push(next);
            }
        }
        let all: Vec<Key> = (2..100).map(|n| key("crowd", n)).collect();
        assert_eq!(served, all);
        assert!(limit.lock().is_empty());
    }

    /// A tenant may have that many jobs, and a change of one Pod may concern all of them.
    #[test]
    fn waiting_keys_are_not_searched() {
        let limit = NamespaceLimit::new(1, mpsc::unbounded_channel().0);
        let keys: Vec<Key> = (0..20_000)
            .map(|n| Key::namespaced("crowd", n.to_string()))
            .collect();
        let permit = limit.try_acquire(&Key::namespaced("crowd", "a")).unwrap();
        let started = Instant::now();
        for key in keys.iter().chain(&keys) {
            assert!(limit.try_acquire(key).is_none());
        }
        let took = started.elapsed();
        assert!(took < Duration::from_secs(5), "{took:?}");
        drop(permit);
        let next = limit.try_acquire(keys.last().unwrap()).unwrap();
        assert_eq!(limit.lock()["crowd"].waiting.len(), 19_998);
        drop(next);
    }
}

//! A limit of workers per namespace: the jobs of one namespace never take all workers.

use std::collections::{HashMap, VecDeque};
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

#[derive(Default)]
struct NamespaceQueue {
    running: usize,
    waiting: VecDeque<Key>,
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
        let position = queue.waiting.iter().position(|waiting| waiting == key);
        if queue.running >= self.max_per_namespace {
            if position.is_none() {
                queue.waiting.push_back(key.clone());
            }
            return None;
        }
        if let Some(at) = position {
            queue.waiting.remove(at);
        }
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

impl Drop for NamespacePermit {
    fn drop(&mut self) {
        let mut queues = self.limit.lock();
        let Some(queue) = queues.get_mut(&self.namespace) else {
            return;
        };
        queue.running = queue.running.saturating_sub(1);
        match queue.waiting.pop_front() {
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
}

//! A limit of workers per namespace: the jobs of one namespace never take all workers.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;

use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Error, Key};

/// Running and waiting keys per namespace; clones share them.
#[derive(Clone)]
pub struct NamespaceLimit {
    /// Keys of one namespace that are processed at once.
    max_per_namespace: usize,
    queues: Arc<Mutex<Queues>>,
    /// Receives a waiting key when it may try again.
    requeue_tx: mpsc::UnboundedSender<Key>,
}

/// By namespace.
type Queues = HashMap<String, NamespaceQueue<Key>>;

/// A namespace may have thousands of waiting keys, and each of its changes may let all of them try: none is searched for.
struct NamespaceQueue<K> {
    running: usize,
    /// Waiting keys by number, the first one first.
    waiting: BTreeMap<u64, K>,
    /// The number of each.
    numbers: HashMap<K, u64>,
    next_number: u64,
}

impl<K> Default for NamespaceQueue<K> {
    fn default() -> Self {
        Self {
            running: 0,
            waiting: BTreeMap::new(),
            numbers: HashMap::new(),
            next_number: 0,
        }
    }
}

impl<K: Clone + Eq + Hash> NamespaceQueue<K> {
    /// Adds a key, unless it waits already.
    fn wait(&mut self, key: &K) {
        if self.numbers.contains_key(key) {
            return;
        }
        self.waiting.insert(self.next_number, key.clone());
        self.numbers.insert(key.clone(), self.next_number);
        self.next_number += 1;
    }

    /// Removes a key.
    fn remove(&mut self, key: &K) {
        if let Some(number) = self.numbers.remove(key) {
            self.waiting.remove(&number);
        }
    }

    /// Removes the key that has waited longest.
    fn pop_first(&mut self) -> Option<K> {
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

    /// Reconciles a key by `work`, unless its namespace is at the limit: then the key comes again after another one.
    ///
    /// # Errors
    /// Those of `work`.
    pub async fn reconcile<F>(self, key: Key, work: impl FnOnce() -> F) -> Result<RequeueAfter, Error>
    where
        F: Future<Output = Result<RequeueAfter, Error>>,
    {
        match self.try_acquire(&key) {
            Some(_permit) => work().await,
            None => Ok(None),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queues> {
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
    use std::cell::Cell;
    use std::collections::VecDeque;
    use std::hash::Hasher;
    use std::rc::Rc;

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

    /// A key that counts how often it and the others are compared.
    #[derive(Clone, Eq)]
    struct CountingKey {
        number: usize,
        compared: Rc<Cell<usize>>,
    }

    impl PartialEq for CountingKey {
        fn eq(&self, other: &Self) -> bool {
            self.compared.set(self.compared.get() + 1);
            self.number == other.number
        }
    }

    impl Hash for CountingKey {
        fn hash<H: Hasher>(&self, state: &mut H) {
            self.number.hash(state);
        }
    }

    /// A tenant may have many jobs, and a change of one Pod may concern all of them.
    #[test]
    fn waiting_keys_are_not_searched() {
        const KEYS: usize = 2000;
        let compared = Rc::new(Cell::new(0));
        let keys: Vec<CountingKey> = (0..KEYS)
            .map(|number| CountingKey {
                number,
                compared: Rc::clone(&compared),
            })
            .collect();
        let mut queue = NamespaceQueue::default();
        for key in keys.iter().chain(&keys) {
            queue.wait(key);
        }
        assert_eq!(queue.waiting.len(), KEYS);
        for key in keys.iter().rev().step_by(2) {
            queue.remove(key);
        }
        let served = std::iter::from_fn(|| queue.pop_first()).count();
        assert_eq!(served, KEYS / 2);
        // A look-up compares one key, and a few others with a similar hash; a search would compare half of all.
        let compared = compared.get();
        assert!(compared < 10 * KEYS, "{compared} comparisons");
    }
}

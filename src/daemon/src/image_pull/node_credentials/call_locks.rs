//! Locks by key: of several callers that need the same result, one calls.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A lock for each key, as long as it is used.
#[derive(Debug)]
pub struct CallLocks<K>(Mutex<HashMap<K, Weak<tokio::sync::Mutex<()>>>>);

impl<K> Default for CallLocks<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash + Clone> CallLocks<K> {
    /// The lock of a key.
    pub fn get(&self, key: &K) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        locks.retain(|_, lock| lock.strong_count() > 0);
        let lock = locks.get(key).and_then(Weak::upgrade).unwrap_or_default();
        locks.insert(key.clone(), Arc::downgrade(&lock));
        lock
    }
}

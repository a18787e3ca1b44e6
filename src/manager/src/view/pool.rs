//! Values that many objects repeat, each kept once.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::{Arc, Weak};

/// The number of values below which unused ones are not looked for.
const MIN_VALUES: usize = 64;

/// Shares equal values. One that is not used any more is dropped at once, because it may be large, and its entry each
/// time the pool has doubled.
pub struct Pool<T> {
    /// By their hashes. Of two values with the same hash, the older one is not shared any more.
    values: HashMap<u64, Weak<T>>,
    hasher: RandomState,
    /// The number of values at which unused ones are looked for.
    full_at: usize,
}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Self {
            values: HashMap::new(),
            hasher: RandomState::new(),
            full_at: MIN_VALUES,
        }
    }
}

impl<T: Eq + Hash> Pool<T> {
    /// The shared value that equals this one.
    pub fn share(&mut self, value: T) -> Arc<T> {
        let hash = self.hasher.hash_one(&value);
        let shared = self.values.get(&hash).and_then(Weak::upgrade);
        if let Some(shared) = shared.filter(|shared| **shared == value) {
            return shared;
        }
        if self.values.len() >= self.full_at {
            self.values.retain(|_, shared| shared.strong_count() > 0);
            self.full_at = self.values.len().saturating_mul(2).max(MIN_VALUES);
        }
        let shared = Arc::new(value);
        self.values.insert(hash, Arc::downgrade(&shared));
        shared
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_are_shared_and_unused_ones_dropped() {
        let mut pool = Pool::default();
        let first = pool.share("first".to_owned());
        assert!(Arc::ptr_eq(&first, &pool.share("first".to_owned())));
        let kept: Vec<_> = (0..MIN_VALUES).map(|n| pool.share(n.to_string())).collect();
        assert_eq!(pool.values.len(), kept.len() + 1);
        drop(kept);
        for n in 0..10 * MIN_VALUES {
            pool.share(format!("unused {n}"));
            assert!(pool.values.len() <= 2 * MIN_VALUES);
        }
        assert!(Arc::ptr_eq(&first, &pool.share("first".to_owned())));
    }

    /// Each of a thousand jobs for one image makes another list of its owners, of up to a thousand.
    #[test]
    fn unused_value_takes_no_memory() {
        let (mut pool, owner) = (Pool::default(), Arc::new("job".to_owned()));
        let shared = pool.share(vec![Arc::clone(&owner)]);
        assert_eq!(Arc::strong_count(&owner), 2);
        drop(shared);
        assert_eq!(Arc::strong_count(&owner), 1);
    }
}

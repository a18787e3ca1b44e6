//! Values that many objects repeat, each kept once.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::Arc;

/// The number of values below which unused ones are not looked for.
const MIN_VALUES: usize = 64;

/// Shares equal values. Unused ones are dropped each time the pool has doubled.
pub struct Pool<T> {
    values: HashSet<Arc<T>>,
    /// The number of values at which unused ones are dropped.
    full_at: usize,
}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Self {
            values: HashSet::new(),
            full_at: MIN_VALUES,
        }
    }
}

impl<T: Eq + Hash> Pool<T> {
    /// The shared value that equals this one.
    pub fn share(&mut self, value: T) -> Arc<T> {
        if let Some(shared) = self.values.get(&value) {
            return Arc::clone(shared);
        }
        if self.values.len() >= self.full_at {
            self.values.retain(|shared| Arc::strong_count(shared) > 1);
            self.full_at = self.values.len().saturating_mul(2).max(MIN_VALUES);
        }
        let shared = Arc::new(value);
        self.values.insert(Arc::clone(&shared));
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
}

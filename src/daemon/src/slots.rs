//! Slots for stops of containers: a number at once on the node, of which each namespace has a share.
//!
//! What costs is the beginning: commands in containers, signals, calls of the runtime. To wait for a container that takes
//! its time costs next to nothing, so a stop that lasts gives its slot to other namespaces and keeps only its part of its
//! own namespace's share.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// How many containers are stopped at once on the node, their preStop hooks included.
pub const ALL: usize = 100;
/// How many of them on behalf of one namespace.
pub const SHARE: usize = 90;
/// How long a stop keeps its slot from other namespaces.
const KEPT: Duration = Duration::from_secs(30);

/// The slots of a node.
#[derive(Debug)]
pub struct Slots {
    node: Arc<Semaphore>,
    shares: Mutex<HashMap<String, Weak<Semaphore>>>,
}

/// The right to stop one container.
#[derive(Debug)]
pub struct Slot {
    node: OwnedSemaphorePermit,
    share: OwnedSemaphorePermit,
}

impl Default for Slots {
    fn default() -> Self {
        Self {
            node: Arc::new(Semaphore::new(ALL)),
            shares: Mutex::default(),
        }
    }
}

impl Slots {
    /// A slot for that namespace, if there is one.
    #[must_use]
    pub fn try_take(&self, namespace: &str) -> Option<Slot> {
        let share = self.share(namespace).try_acquire_owned().ok()?;
        let node = Arc::clone(&self.node).try_acquire_owned().ok()?;
        Some(Slot { node, share })
    }

    /// A slot for that namespace as soon as there is one; none only where the semaphores are closed, which they never
    /// are.
    pub async fn take(&self, namespace: &str) -> Option<Slot> {
        // The share first: what waits for that stands in no other namespace's way.
        let share = self.share(namespace).acquire_owned().await.ok()?;
        let node = Arc::clone(&self.node).acquire_owned().await.ok()?;
        Some(Slot { node, share })
    }

    fn share(&self, namespace: &str) -> Arc<Semaphore> {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(share) = shares.get(namespace).and_then(Weak::upgrade) {
            return share;
        }
        let share = Arc::new(Semaphore::new(SHARE));
        shares.retain(|_, share| share.strong_count() > 0);
        shares.insert(namespace.to_owned(), Arc::downgrade(&share));
        share
    }
}

impl Slot {
    /// Does what the slot is for.
    pub async fn during<T>(self, work: impl Future<Output = T>) -> T {
        let Self { node, share: _share } = self;
        let mut work = pin!(work);
        if let Ok(done) = timeout(KEPT, &mut work).await {
            return done;
        }
        drop(node);
        work.await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So many slots at most.
    fn take(slots: &Slots, namespace: &str, most: usize) -> Vec<Slot> {
        std::iter::from_fn(|| slots.try_take(namespace))
            .take(most)
            .collect()
    }

    #[test]
    fn one_namespace_leaves_slots_to_the_others() {
        let slots = Slots::default();
        let greedy = take(&slots, "greedy", ALL);
        assert_eq!(greedy.len(), SHARE);
        let other = take(&slots, "other", ALL);
        assert_eq!(other.len(), ALL - SHARE);
        drop(greedy);
        assert_eq!(take(&slots, "greedy", ALL).len(), SHARE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stop_that_lasts_keeps_its_slot_from_its_own_namespace_alone() {
        let slots = Slots::default();
        let mut stops = tokio::task::JoinSet::new();
        for slot in take(&slots, "a", SHARE).into_iter().chain(take(&slots, "b", ALL)) {
            stops.spawn(slot.during(std::future::pending::<()>()));
        }
        assert!(slots.try_take("c").is_none(), "all are taken");
        let waited = slots.take("c").await;
        assert!(waited.is_some());
        assert!(slots.try_take("a").is_none(), "its share is taken");
        stops.shutdown().await;
        assert_eq!(take(&slots, "a", ALL).len(), SHARE);
    }
}

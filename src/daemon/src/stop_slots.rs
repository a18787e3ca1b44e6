//! Slots for stops of containers: a maximum on the node, of which each namespace has a share.
//!
//! The start is what costs: commands in containers, signals, runtime calls. Waiting for a slow container costs next to
//! nothing, so a long stop releases its slot to other namespaces and keeps only its part of its own namespace's share.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Maximum number of concurrent stops on the node, including their preStop hooks.
pub const MAX_CONCURRENT_STOPS: usize = 100;
/// Maximum of them on behalf of one namespace.
pub const MAX_STOPS_PER_NAMESPACE: usize = 90;
/// How long a stop keeps its slot from other namespaces.
const NODE_SLOT_TIMEOUT: Duration = Duration::from_secs(30);

/// The slots of a node.
#[derive(Debug)]
pub struct StopSlots {
    node_semaphore: Arc<Semaphore>,
    namespace_semaphores: Mutex<HashMap<String, Weak<Semaphore>>>,
}

/// The right to stop one container.
#[derive(Debug)]
pub struct StopSlot {
    node_permit: OwnedSemaphorePermit,
    namespace_permit: OwnedSemaphorePermit,
}

impl Default for StopSlots {
    fn default() -> Self {
        Self {
            node_semaphore: Arc::new(Semaphore::new(MAX_CONCURRENT_STOPS)),
            namespace_semaphores: Mutex::default(),
        }
    }
}

impl StopSlots {
    /// A slot for that namespace, if one is free.
    #[must_use]
    pub fn try_acquire(&self, namespace: &str) -> Option<StopSlot> {
        let share = self.namespace_semaphore(namespace).try_acquire_owned().ok()?;
        let node = Arc::clone(&self.node_semaphore).try_acquire_owned().ok()?;
        Some(StopSlot {
            node_permit: node,
            namespace_permit: share,
        })
    }

    /// Waits for a slot for that namespace; none only if the semaphores are closed, which never happens.
    pub async fn acquire(&self, namespace: &str) -> Option<StopSlot> {
        // The share first: waiting for it does not block other namespaces.
        let share = self.namespace_semaphore(namespace).acquire_owned().await.ok()?;
        let node = Arc::clone(&self.node_semaphore).acquire_owned().await.ok()?;
        Some(StopSlot {
            node_permit: node,
            namespace_permit: share,
        })
    }

    fn namespace_semaphore(&self, namespace: &str) -> Arc<Semaphore> {
        let mut semaphores = self
            .namespace_semaphores
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(share) = semaphores.get(namespace).and_then(Weak::upgrade) {
            return share;
        }
        let share = Arc::new(Semaphore::new(MAX_STOPS_PER_NAMESPACE));
        semaphores.retain(|_, share| share.strong_count() > 0);
        semaphores.insert(namespace.to_owned(), Arc::downgrade(&share));
        share
    }
}

impl StopSlot {
    /// Runs the future with the slot.
    pub async fn run<T>(self, future: impl Future<Output = T>) -> T {
        let Self {
            node_permit: node,
            namespace_permit: _share,
        } = self;
        let mut work = pin!(future);
        if let Ok(output) = timeout(NODE_SLOT_TIMEOUT, &mut work).await {
            return output;
        }
        drop(node);
        work.await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Acquires at most `max` slots.
    fn acquire_up_to(slots: &StopSlots, namespace: &str, max: usize) -> Vec<StopSlot> {
        std::iter::from_fn(|| slots.try_acquire(namespace))
            .take(max)
            .collect()
    }

    #[test]
    fn one_namespace_leaves_stop_slots_to_others() {
        let slots = StopSlots::default();
        let greedy = acquire_up_to(&slots, "greedy", MAX_CONCURRENT_STOPS);
        assert_eq!(greedy.len(), MAX_STOPS_PER_NAMESPACE);
        let other = acquire_up_to(&slots, "other", MAX_CONCURRENT_STOPS);
        assert_eq!(other.len(), MAX_CONCURRENT_STOPS - MAX_STOPS_PER_NAMESPACE);
        drop(greedy);
        assert_eq!(
            acquire_up_to(&slots, "greedy", MAX_CONCURRENT_STOPS).len(),
            MAX_STOPS_PER_NAMESPACE
        );
    }

    #[tokio::test(start_paused = true)]
    async fn long_stop_counts_only_against_its_own_namespace() {
        let slots = StopSlots::default();
        let mut stops = tokio::task::JoinSet::new();
        for slot in acquire_up_to(&slots, "a", MAX_STOPS_PER_NAMESPACE)
            .into_iter()
            .chain(acquire_up_to(&slots, "b", MAX_CONCURRENT_STOPS))
        {
            stops.spawn(slot.run(std::future::pending::<()>()));
        }
        assert!(slots.try_acquire("c").is_none(), "all are taken");
        let waited = slots.acquire("c").await;
        assert!(waited.is_some());
        assert!(slots.try_acquire("a").is_none(), "its share is taken");
        stops.shutdown().await;
        assert_eq!(
            acquire_up_to(&slots, "a", MAX_CONCURRENT_STOPS).len(),
            MAX_STOPS_PER_NAMESPACE
        );
    }
}

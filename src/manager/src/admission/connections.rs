//! Limits connections to the public webhook port: a total, and a limit for each client address, so that no client
//! blocks others.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kruise_ops::http::client_network;
use kruise_ops::metrics::metrics;
use tokio_util::sync::CancellationToken;

/// The client of a connection.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    /// The client's IP address; of an IPv6 address only the network, because one machine has all addresses of it.
    pub address: IpAddr,
    /// Sequence number of the last review that was answered on this connection; 0 for none.
    last_review: Arc<AtomicU64>,
}

/// Sequence number of the last answered review.
static REVIEWS: AtomicU64 = AtomicU64::new(0);

impl Caller {
    pub fn new(address: IpAddr) -> Self {
        Self {
            address: client_network(address),
            last_review: Arc::default(),
        }
    }

    /// Records an answered review.
    pub fn note_review(&self) {
        let number = REVIEWS.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        self.last_review.store(number, Ordering::Relaxed);
    }

    /// Whether a review was answered on this connection.
    pub fn has_reviewed(&self) -> bool {
        self.last_review() > 0
    }

    fn last_review(&self) -> u64 {
        self.last_review.load(Ordering::Relaxed)
    }
}

/// All open connections; clones share them.
#[derive(Clone)]
pub(super) struct Connections {
    open: Arc<Mutex<OpenConnections>>,
    max_total: usize,
    max_per_client: usize,
}

#[derive(Default)]
struct OpenConnections {
    next_id: u64,
    /// In the order of their arrival.
    by_id: BTreeMap<u64, (Caller, CancellationToken)>,
}

/// The slot of one connection, free again when it is dropped.
pub(super) struct ConnectionSlot {
    id: u64,
    connections: Connections,
    /// Cancelled when another client gets the slot.
    pub evicted: CancellationToken,
}

impl Connections {
    /// At most `max_total` connections, of which `max_per_client` may come from one client.
    pub fn new(max_total: usize, max_per_client: usize) -> Self {
        Self {
            open: Arc::default(),
            max_total,
            max_per_client,
        }
    }

    /// A slot for a connection. When all are in use, the clients with the most connections lose the one whose last
    /// review is the oldest; `None` when this client is at its limit, or has a connection already and would then have
    /// as many as they.
    pub fn admit(&self, caller: &Caller) -> Option<ConnectionSlot> {
        let slot = self.find_slot(caller);
        if slot.is_none() {
            count_closed("limit");
        }
        slot
    }

    fn find_slot(&self, caller: &Caller) -> Option<ConnectionSlot> {
        let mut open = self.lock();
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        for (caller, _) in open.by_id.values() {
            *counts.entry(caller.address).or_default() += 1;
        }
        let own_count = counts.get(&caller.address).copied().unwrap_or_default();
        if own_count >= self.max_per_client {
            return None;
        }
        if open.by_id.len() >= self.max_total {
            let largest = counts.values().copied().max()?;
            if own_count > 0 && largest <= own_count.saturating_add(1) {
                return None;
            }
            let candidates = open.by_id.iter();
            let candidates = candidates.filter(|(_, (one, _))| counts.get(&one.address) == Some(&largest));
            let least_recent = candidates.min_by_key(|(id, (one, _))| (one.last_review(), **id));
            let least_recent = least_recent.map(|(id, _)| *id)?;
            if let Some((_, evicted)) = open.by_id.remove(&least_recent) {
                evicted.cancel();
                count_closed("evicted");
            }
        }
        let (id, evicted) = (open.next_id, CancellationToken::new());
        open.next_id += 1;
        open.by_id.insert(id, (caller.clone(), evicted.clone()));
        let connections = self.clone();
        Some(ConnectionSlot {
            id,
            connections,
            evicted,
        })
    }

    fn lock(&self) -> MutexGuard<'_, OpenConnections> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts a connection that is closed for that reason.
fn count_closed(reason: &str) {
    let labels = [("reason", reason.to_owned())];
    metrics().webhook_connections_closed.get_or_create(&labels).inc();
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.connections.lock().by_id.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn caller(last_octet: u8) -> Caller {
        Caller::new([10, 0, 0, last_octet].into())
    }

    #[test]
    fn new_client_evicts_the_least_recent_reviewer() {
        let connections = Connections::new(3, 2);
        let callers: Vec<Caller> = (1..=3).map(caller).collect();
        let slots: Vec<_> = callers
            .iter()
            .map(|one| connections.admit(one).unwrap())
            .collect();
        callers[0].note_review();
        callers[2].note_review();
        let newcomer = caller(4);
        assert!(connections.admit(&newcomer).is_some());
        let evicted: Vec<_> = slots.iter().map(|place| place.evicted.is_cancelled()).collect();
        assert_eq!(evicted, [false, true, false]);
    }

    #[test]
    fn ipv6_clients_count_by_network() {
        let address = |text: &str| Caller::new(text.parse().unwrap()).address;
        assert_eq!(address("2001:db8:1:2::1"), address("2001:db8:1:2:ffff::9"));
        assert_ne!(address("2001:db8:1:2::1"), address("2001:db8:1:3::1"));
        assert_ne!(address("::ffff:10.0.0.1"), address("::ffff:10.0.0.2"));
    }

    #[test]
    fn client_connections_are_capped() {
        let connections = Connections::new(8, 3);
        let mut slots: Vec<_> = (0..3).map(|_| connections.admit(&caller(1)).unwrap()).collect();
        assert!(connections.admit(&caller(1)).is_none());
        assert!(connections.admit(&caller(2)).is_some());
        slots.pop();
        assert!(connections.admit(&caller(1)).is_some(), "a slot is free again");
    }

    #[test]
    fn largest_client_is_evicted_first() {
        let connections = Connections::new(6, 6);
        let crowd: Vec<_> = (0..4).map(|_| connections.admit(&caller(1)).unwrap()).collect();
        let some: Vec<_> = (0..2).map(|_| connections.admit(&caller(2)).unwrap()).collect();
        let newcomer = connections.admit(&caller(3)).unwrap();
        let evicted: Vec<_> = crowd.iter().map(|place| place.evicted.is_cancelled()).collect();
        assert_eq!(evicted, [true, false, false, false], "the oldest of the largest");
        assert!(
            some.iter()
                .chain([&newcomer])
                .all(|place| !place.evicted.is_cancelled())
        );
        assert!(
            connections.admit(&caller(1)).is_none(),
            "who holds the most gets no more"
        );
        assert!(connections.lock().by_id.len() <= 6);
        drop((crowd, some, newcomer));
        assert!(connections.lock().by_id.is_empty());
    }
}

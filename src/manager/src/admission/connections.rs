//! Limits connections to the public webhook port: a total, and a limit for each client network, so that no client
//! blocks others. Within its network, an address without a connection gets one as well: several API servers may be in
//! one IPv6 network, and so may Pods.

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
    /// The client's IP address.
    pub address: IpAddr,
    /// What the limits count: of an IPv6 address only the network, because one machine can have all addresses of it.
    pub network: IpAddr,
    /// Sequence number of the last review that was answered on this connection; 0 for none.
    last_review: Arc<AtomicU64>,
}

/// Sequence number of the last answered review.
static REVIEWS: AtomicU64 = AtomicU64::new(0);

impl Caller {
    pub fn new(address: IpAddr) -> Self {
        Self {
            address: address.to_canonical(),
            network: client_network(address),
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
    /// At most `max_total` connections, of which `max_per_client` may come from one network.
    pub fn new(max_total: usize, max_per_client: usize) -> Self {
        Self {
            open: Arc::default(),
            max_total,
            max_per_client,
        }
    }

    /// A slot for a connection. When all are in use, the networks with the most connections lose one; when those of the
    /// client's network are, that network does. Of a network, the addresses with the most connections lose the one whose
    /// last review is the oldest. `None` when this address has a connection already and would then have as many as they.
    pub fn admit(&self, caller: &Caller) -> Option<ConnectionSlot> {
        let slot = self.find_slot(caller);
        if slot.is_none() {
            count_closed("limit");
        }
        slot
    }

    fn find_slot(&self, caller: &Caller) -> Option<ConnectionSlot> {
        let mut open = self.lock();
        let networks = count(open.callers().map(|one| one.network));
        let own = networks.get(&caller.network).copied().unwrap_or_default();
        let own_is_full = own >= self.max_per_client;
        if own_is_full || open.by_id.len() >= self.max_total {
            let largest = networks.values().copied().max()?;
            let takes_own = own_is_full || (own > 0 && largest <= own.saturating_add(1));
            open.evict(caller, |one| match takes_own {
                true => one.network == caller.network,
                false => networks.get(&one.network) == Some(&largest),
            })?;
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

impl OpenConnections {
    fn callers(&self) -> impl Iterator<Item = &Caller> {
        self.by_id.values().map(|(caller, _)| caller)
    }

    /// Closes one of these connections for that of `newcomer`; `None` if it has as many as the others.
    fn evict(&mut self, newcomer: &Caller, is_candidate: impl Fn(&Caller) -> bool) -> Option<()> {
        let addresses = count(
            self.callers()
                .filter(|one| is_candidate(one))
                .map(|one| one.address),
        );
        let own = addresses.get(&newcomer.address).copied().unwrap_or_default();
        let largest = addresses.values().copied().max()?;
        if own > 0 && largest <= own.saturating_add(1) {
            return None;
        }
        let has_most = |one: &Caller| is_candidate(one) && addresses.get(&one.address) == Some(&largest);
        let candidates = self.by_id.iter().filter(|(_, (one, _))| has_most(one));
        let least_recent = candidates.min_by_key(|(id, (one, _))| (one.last_review(), **id));
        let least_recent = least_recent.map(|(id, _)| *id)?;
        let (_, evicted) = self.by_id.remove(&least_recent)?;
        evicted.cancel();
        count_closed("evicted");
        Some(())
    }
}

fn count(clients: impl Iterator<Item = IpAddr>) -> HashMap<IpAddr, usize> {
    let mut counts = HashMap::new();
    for client in clients {
        *counts.entry(client).or_default() += 1;
    }
    counts
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
        let network = |text: &str| Caller::new(text.parse().unwrap()).network;
        assert_eq!(network("2001:db8:1:2::1"), network("2001:db8:1:2:ffff::9"));
        assert_ne!(network("2001:db8:1:2::1"), network("2001:db8:1:3::1"));
        assert_ne!(network("::ffff:10.0.0.1"), network("::ffff:10.0.0.2"));
    }

    #[test]
    fn address_of_a_full_network_gets_a_slot_of_the_largest() {
        let caller = |text: &str| Caller::new(text.parse().unwrap());
        let (crowd, newcomer) = (caller("2001:db8::1"), caller("2001:db8::2"));
        let connections = Connections::new(768, 600);
        let slots: Vec<_> = (0..600).map(|_| connections.admit(&crowd).unwrap()).collect();
        let other = connections.admit(&caller("2001:db8:0:1::1")).unwrap();
        let new = connections.admit(&newcomer).unwrap();
        let evicted = slots.iter().filter(|slot| slot.evicted.is_cancelled());
        assert_eq!(evicted.count(), 1);
        assert!(!new.evicted.is_cancelled() && !other.evicted.is_cancelled());
        assert!(connections.admit(&crowd).is_none(), "it holds the most");
        assert_eq!(connections.lock().by_id.len(), 601);
    }

    /// Whatever others of its network have.
    #[test]
    fn new_address_gets_a_slot_when_all_are_used() {
        let caller = |text: &str| Caller::new(text.parse().unwrap());
        let connections = Connections::new(4, 3);
        let crowd: Vec<_> = (0..2)
            .map(|_| connections.admit(&caller("2001:db8::1")).unwrap())
            .collect();
        let other: Vec<_> = (0..2)
            .map(|_| connections.admit(&caller("2001:db8:0:1::1")).unwrap())
            .collect();
        let new = connections.admit(&caller("2001:db8::2")).unwrap();
        let evicted = |slots: &[ConnectionSlot]| {
            let evicted = slots.iter().filter(|slot| slot.evicted.is_cancelled());
            evicted.count()
        };
        assert_eq!((evicted(&crowd), evicted(&other)), (1, 0));
        assert!(!new.evicted.is_cancelled());
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

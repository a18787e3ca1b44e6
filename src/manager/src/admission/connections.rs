//! Connections to the port that anybody may reach: a bounded number in all, of which no address takes the place of
//! others.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

/// The first 64 bits of an address of IPv6.
const NETWORK: u128 = u128::MAX << 64;

/// Who asks.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    /// Its address; of one of IPv6 the network, as a machine has all addresses of it.
    pub address: IpAddr,
    /// When it got the answer to a review last, as a number that grows with each; 0 for never.
    reviewed: Arc<AtomicU64>,
}

/// The number of the last review that was answered.
static REVIEWS: AtomicU64 = AtomicU64::new(0);

impl Caller {
    pub fn new(address: IpAddr) -> Self {
        Self {
            // A client of IPv4 is the same whichever socket it came in by.
            address: match address.to_canonical() {
                IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & NETWORK).into(),
                address => address,
            },
            reviewed: Arc::default(),
        }
    }

    /// Notes that it asked for a review and got an answer.
    pub fn note_review(&self) {
        let number = REVIEWS.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        self.reviewed.store(number, Ordering::Relaxed);
    }

    /// Whether it ever got the answer to a review on this connection.
    pub fn has_reviewed(&self) -> bool {
        self.last_review() > 0
    }

    fn last_review(&self) -> u64 {
        self.reviewed.load(Ordering::Relaxed)
    }
}

/// All open connections; clones share them.
#[derive(Clone)]
pub(super) struct Connections {
    open: Arc<Mutex<Open>>,
    most: usize,
    most_of_one: usize,
}

#[derive(Default)]
struct Open {
    next: u64,
    /// In the order in which they came.
    all: BTreeMap<u64, (Caller, CancellationToken)>,
}

/// The place of one connection, until it is dropped.
pub(super) struct Place {
    id: u64,
    connections: Connections,
    /// Cancelled when the place is given to another address.
    pub taken: CancellationToken,
}

impl Connections {
    /// Room for `most` connections, and for `most_of_one` from one address.
    pub fn new(most: usize, most_of_one: usize) -> Self {
        Self {
            open: Arc::default(),
            most,
            most_of_one,
        }
    }

    /// A place for a connection. Where there is none, the addresses with the most connections lose the one that got
    /// the answer to a review least lately; `None` when this address would have as many then, and has one already.
    pub fn admit(&self, caller: &Caller) -> Option<Place> {
        let mut open = self.lock();
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        for (caller, _) in open.all.values() {
            *counts.entry(caller.address).or_default() += 1;
        }
        let own = counts.get(&caller.address).copied().unwrap_or_default();
        if own >= self.most_of_one {
            return None;
        }
        if open.all.len() >= self.most {
            let most = counts.values().copied().max()?;
            if own > 0 && most <= own.saturating_add(1) {
                return None;
            }
            let of_the_largest = open.all.iter();
            let of_the_largest =
                of_the_largest.filter(|(_, (one, _))| counts.get(&one.address) == Some(&most));
            let idlest = of_the_largest.min_by_key(|(id, (one, _))| (one.last_review(), **id));
            let idlest = idlest.map(|(id, _)| *id)?;
            if let Some((_, taken)) = open.all.remove(&idlest) {
                taken.cancel();
            }
        }
        let (id, taken) = (open.next, CancellationToken::new());
        open.next += 1;
        open.all.insert(id, (caller.clone(), taken.clone()));
        let connections = self.clone();
        Some(Place {
            id,
            connections,
            taken,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.connections.lock().all.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn caller(last: u8) -> Caller {
        Caller::new([10, 0, 0, last].into())
    }

    #[test]
    fn an_address_with_no_connection_gets_the_place_of_the_one_that_asked_least_lately() {
        let connections = Connections::new(3, 2);
        let callers: Vec<Caller> = (1..=3).map(caller).collect();
        let places: Vec<_> = callers
            .iter()
            .map(|one| connections.admit(one).unwrap())
            .collect();
        callers[0].note_review();
        callers[2].note_review();
        let newcomer = caller(4);
        assert!(connections.admit(&newcomer).is_some());
        let taken: Vec<_> = places.iter().map(|place| place.taken.is_cancelled()).collect();
        assert_eq!(taken, [false, true, false]);
    }

    #[test]
    fn a_network_of_ipv6_is_one_address() {
        let address = |text: &str| Caller::new(text.parse().unwrap()).address;
        assert_eq!(address("2001:db8:1:2::1"), address("2001:db8:1:2:ffff::9"));
        assert_ne!(address("2001:db8:1:2::1"), address("2001:db8:1:3::1"));
        assert_ne!(address("::ffff:10.0.0.1"), address("::ffff:10.0.0.2"));
    }

    #[test]
    fn an_address_gets_its_share_and_no_more() {
        let connections = Connections::new(8, 3);
        let mut places: Vec<_> = (0..3).map(|_| connections.admit(&caller(1)).unwrap()).collect();
        assert!(connections.admit(&caller(1)).is_none());
        assert!(connections.admit(&caller(2)).is_some());
        places.pop();
        assert!(connections.admit(&caller(1)).is_some(), "a place came back");
    }

    #[test]
    fn who_holds_the_most_makes_room_for_who_holds_less() {
        let connections = Connections::new(6, 6);
        let crowd: Vec<_> = (0..4).map(|_| connections.admit(&caller(1)).unwrap()).collect();
        let some: Vec<_> = (0..2).map(|_| connections.admit(&caller(2)).unwrap()).collect();
        let newcomer = connections.admit(&caller(3)).unwrap();
        let taken: Vec<_> = crowd.iter().map(|place| place.taken.is_cancelled()).collect();
        assert_eq!(taken, [true, false, false, false], "the oldest of the largest");
        assert!(
            some.iter()
                .chain([&newcomer])
                .all(|place| !place.taken.is_cancelled())
        );
        assert!(
            connections.admit(&caller(1)).is_none(),
            "who holds the most gets no more"
        );
        assert!(connections.lock().all.len() <= 6);
        drop((crowd, some, newcomer));
        assert!(connections.lock().all.is_empty());
    }
}

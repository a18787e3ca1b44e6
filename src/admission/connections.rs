//! Connections to the port that anybody may reach: a bounded number in all, of which no address takes the place of
//! others.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

/// Who asks.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    /// Its address.
    pub address: IpAddr,
    reviewed: Arc<AtomicBool>,
}

impl Caller {
    pub fn new(address: IpAddr) -> Self {
        Self {
            // A client of IPv4 is the same whichever socket it came in by.
            address: address.to_canonical(),
            reviewed: Arc::default(),
        }
    }

    /// Notes that it asked for a review and got an answer.
    pub fn note_review(&self) {
        self.reviewed.store(true, Ordering::Relaxed);
    }

    /// Whether it ever got the answer to a review on this connection.
    pub fn has_reviewed(&self) -> bool {
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
    all: BTreeMap<u64, (IpAddr, CancellationToken)>,
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

    /// A place for a connection from `address`. Where there is none, the address with the most connections loses its
    /// oldest; `None` when that is this one.
    pub fn admit(&self, address: IpAddr) -> Option<Place> {
        let mut open = self.lock();
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        for (address, _) in open.all.values() {
            *counts.entry(*address).or_default() += 1;
        }
        let own = counts.get(&address).copied().unwrap_or_default();
        if own >= self.most_of_one {
            return None;
        }
        if open.all.len() >= self.most {
            let (largest, count) = counts.into_iter().max_by_key(|(_, count)| *count)?;
            if count <= own.saturating_add(1) {
                return None;
            }
            let oldest = open.all.iter().find(|(_, (address, _))| *address == largest);
            let oldest = oldest.map(|(id, _)| *id)?;
            if let Some((_, taken)) = open.all.remove(&oldest) {
                taken.cancel();
            }
        }
        let (id, taken) = (open.next, CancellationToken::new());
        open.next += 1;
        open.all.insert(id, (address, taken.clone()));
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

    fn address(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    #[test]
    fn an_address_gets_its_share_and_no_more() {
        let connections = Connections::new(8, 3);
        let mut places: Vec<_> = (0..3).map(|_| connections.admit(address(1)).unwrap()).collect();
        assert!(connections.admit(address(1)).is_none());
        assert!(connections.admit(address(2)).is_some());
        places.pop();
        assert!(connections.admit(address(1)).is_some(), "a place came back");
    }

    #[test]
    fn who_holds_the_most_makes_room_for_who_holds_less() {
        let connections = Connections::new(6, 6);
        let crowd: Vec<_> = (0..4).map(|_| connections.admit(address(1)).unwrap()).collect();
        let some: Vec<_> = (0..2).map(|_| connections.admit(address(2)).unwrap()).collect();
        let newcomer = connections.admit(address(3)).unwrap();
        let taken: Vec<_> = crowd.iter().map(|place| place.taken.is_cancelled()).collect();
        assert_eq!(taken, [true, false, false, false], "the oldest of the largest");
        assert!(
            some.iter()
                .chain([&newcomer])
                .all(|place| !place.taken.is_cancelled())
        );
        assert!(
            connections.admit(address(1)).is_none(),
            "who holds the most gets no more"
        );
        assert!(connections.lock().all.len() <= 6);
        drop((crowd, some, newcomer));
        assert!(connections.lock().all.is_empty());
    }
}

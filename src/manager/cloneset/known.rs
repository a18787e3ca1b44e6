//! What is known of one kind of object: what the watch has brought, and what our own writes returned.
//!
//! A watch is behind our writes. So an object that a write returned stands until the watch has brought it or a newer
//! one, and one that we deleted counts as being deleted. What the watch has not confirmed within [`CONFIRM`] is to be
//! read from the API server itself. Nothing ever waits for a confirmation.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cluster::Key;

/// How long the watch may take to bring what we wrote.
pub const CONFIRM: Duration = Duration::from_secs(30);

/// An object at one of its versions.
#[derive(Debug)]
pub struct At<T> {
    /// Identity of the object.
    pub uid: String,
    /// Its resource version.
    pub version: String,
    /// Whom it belongs to: the controller's UID, or a namespace.
    pub group: String,
    /// Whether it is being deleted.
    pub deleting: bool,
    /// The object.
    pub object: Arc<T>,
}

struct Item<T> {
    at: At<T>,
    version: u64,
    /// We deleted it.
    doomed: bool,
    /// Since when a write of ours is not confirmed by the watch.
    unseen: Option<Instant>,
}

/// All objects of one kind.
pub struct Known<T> {
    items: HashMap<Key, Item<T>>,
    groups: HashMap<String, BTreeSet<Key>>,
}

impl<T> Default for Known<T> {
    fn default() -> Self {
        Self {
            items: HashMap::new(),
            groups: HashMap::new(),
        }
    }
}

impl<T> Known<T> {
    /// The watch brought an object. While a write of ours is not confirmed, an older version is no news; versions of
    /// one kind are numbers that grow, unless somebody restores a backup.
    pub fn watched(&mut self, key: &Key, at: At<T>) {
        let (mut doomed, mut unseen) = (false, None);
        let version = number(&at.version);
        if let Some(known) = self.items.get(key) {
            if known.unseen.is_some() && version < known.version {
                return;
            }
            if known.doomed && known.at.uid == at.uid && !at.deleting {
                (doomed, unseen) = (true, known.unseen);
            }
        }
        self.put(key, at, doomed, unseen);
    }

    /// The watch says that the object of that UID is gone.
    pub fn gone(&mut self, key: &Key, uid: &str) {
        if self.items.get(key).is_some_and(|known| known.at.uid == uid) {
            self.remove(key);
        }
    }

    /// A write of ours returned the object.
    pub fn wrote(&mut self, key: &Key, at: At<T>, now: Instant) {
        let version = number(&at.version);
        let known = self.items.get(key);
        if known.is_some_and(|known| known.version >= version) {
            return;
        }
        let doomed = known.is_some_and(|known| known.doomed && known.at.uid == at.uid);
        let unseen = Some(now);
        self.put(key, at, doomed, unseen);
    }

    /// We deleted the object of that UID.
    pub fn doom(&mut self, key: &Key, uid: &str, now: Instant) {
        if let Some(known) = self.items.get_mut(key).filter(|known| known.at.uid == uid) {
            known.doomed = true;
            known.unseen = Some(now);
        }
    }

    /// The API server itself was asked.
    pub fn read(&mut self, key: &Key, found: Option<At<T>>, now: Instant) {
        let Some(at) = found else {
            return self.remove(key);
        };
        let version = number(&at.version);
        let known = self.items.get(key);
        let watched = known.is_some_and(|known| known.unseen.is_none() && known.version >= version);
        let unseen = (!watched).then_some(now);
        self.put(key, at, false, unseen);
    }

    /// The object of that key, whether we deleted it or not.
    pub fn get(&self, key: &Key) -> Option<&Arc<T>> {
        self.items.get(key).map(|known| &known.at.object)
    }

    /// The UID of the object of that key.
    pub fn uid(&self, key: &Key) -> Option<&str> {
        self.items.get(key).map(|known| known.at.uid.as_str())
    }

    /// What belongs to `group`, by name, and whether it goes: it is being deleted, or we deleted it.
    pub fn of<'a>(&'a self, group: &str) -> impl Iterator<Item = (&'a Key, &'a Arc<T>, bool)> {
        let keys = self.groups.get(group).into_iter().flatten();
        keys.filter_map(|key| {
            let known = self.items.get(key)?;
            Some((key, &known.at.object, known.doomed || known.at.deleting))
        })
    }

    /// Our writes in `group` that are not confirmed: those to read now, and how long the next one has still.
    pub fn unconfirmed(&self, group: &str, now: Instant) -> (Vec<Key>, Option<Duration>) {
        let mut due = Vec::new();
        let mut next: Option<Duration> = None;
        for key in self.groups.get(group).into_iter().flatten() {
            let Some(since) = self.items.get(key).and_then(|known| known.unseen) else {
                continue;
            };
            match (since + CONFIRM).checked_duration_since(now) {
                Some(left) if !left.is_zero() => next = Some(next.map_or(left, |n| n.min(left))),
                _ => due.push(key.clone()),
            }
        }
        (due, next)
    }

    fn put(&mut self, key: &Key, at: At<T>, doomed: bool, unseen: Option<Instant>) {
        let version = number(&at.version);
        let group = &at.group;
        if self
            .items
            .get(key)
            .is_some_and(|before| before.at.group != *group)
        {
            self.leave_group(key);
        }
        self.groups.entry(group.clone()).or_default().insert(key.clone());
        let item = Item {
            at,
            version,
            doomed,
            unseen,
        };
        self.items.insert(key.clone(), item);
    }

    fn remove(&mut self, key: &Key) {
        self.leave_group(key);
        self.items.remove(key);
    }

    fn leave_group(&mut self, key: &Key) {
        let Some(group) = self.items.get(key).map(|known| &known.at.group) else {
            return;
        };
        if let Some(keys) = self.groups.get_mut(group) {
            keys.remove(key);
            if keys.is_empty() {
                self.groups.remove(group);
            }
        }
    }
}

/// A version that is no number is as good as none: whatever comes later is newer.
fn number(version: &str) -> u64 {
    version.parse().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(uid: &str, version: &str, group: &str, deleting: bool) -> At<String> {
        At {
            uid: uid.to_owned(),
            version: version.to_owned(),
            group: group.to_owned(),
            deleting,
            object: Arc::new(format!("{uid}@{version}")),
        }
    }

    fn told(known: &Known<String>, group: &str) -> Vec<String> {
        let mark = |going| if going { " goes" } else { "" };
        known
            .of(group)
            .map(|(_, object, going)| format!("{object}{}", mark(going)))
            .collect()
    }

    #[test]
    fn the_watch_does_not_take_back_what_was_written() {
        let (mut known, key, now) = (Known::default(), Key::namespaced("n", "p"), Instant::now());
        known.wrote(&key, at("a", "20", "g", false), now);
        known.watched(&key, at("a", "19", "g", false));
        assert_eq!(told(&known, "g"), ["a@20"]);
        assert_eq!(
            known.unconfirmed("g", now + CONFIRM).0,
            std::slice::from_ref(&key)
        );
        known.watched(&key, at("a", "20", "g", false));
        assert_eq!(known.unconfirmed("g", now + CONFIRM), (vec![], None));
        known.wrote(&key, at("a", "18", "g", false), now);
        assert_eq!(told(&known, "g"), ["a@20"]);
    }

    #[test]
    fn what_was_deleted_stays_so_until_the_watch_says_it() {
        let (mut known, key, now) = (Known::default(), Key::namespaced("n", "p"), Instant::now());
        known.watched(&key, at("a", "1", "g", false));
        known.doom(&key, "other", now);
        assert_eq!(told(&known, "g"), ["a@1"]);
        known.doom(&key, "a", now);
        known.watched(&key, at("a", "2", "g", false));
        assert_eq!(told(&known, "g"), ["a@2 goes"]);
        assert_eq!(known.unconfirmed("g", now), (vec![], Some(CONFIRM)));
        known.watched(&key, at("a", "3", "g", true));
        assert_eq!(told(&known, "g"), ["a@3 goes"]);
        assert_eq!(known.unconfirmed("g", now + CONFIRM), (vec![], None));
        known.wrote(&key, at("b", "5", "g", false), now);
        known.gone(&key, "a");
        assert_eq!(told(&known, "g"), ["b@5"], "another of the same name");
        known.read(&key, None, now);
        assert_eq!(told(&known, "g"), Vec::<String>::new());
    }

    #[test]
    fn what_was_read_stands_until_the_watch_is_as_far() {
        let (mut known, key, now) = (Known::default(), Key::namespaced("n", "p"), Instant::now());
        known.watched(&key, at("a", "20", "g", false));
        known.read(&key, Some(at("a", "20", "g", false)), now);
        assert_eq!(known.unconfirmed("g", now), (vec![], None), "it is so far");
        known.read(&key, Some(at("a", "22", "g", false)), now);
        known.watched(&key, at("a", "21", "g", false));
        assert_eq!(told(&known, "g"), ["a@22"]);
        known.watched(&key, at("a", "22", "g", false));
        known.watched(&key, at("a", "5", "g", false));
        assert_eq!(told(&known, "g"), ["a@5"], "from a backup");
    }

    #[test]
    fn who_changes_hands_is_known_once() {
        let (mut known, key) = (Known::default(), Key::namespaced("n", "p"));
        known.watched(&key, at("a", "1", "g", false));
        known.watched(&key, at("a", "2", "h", false));
        assert_eq!(told(&known, "g"), Vec::<String>::new());
        assert_eq!(told(&known, "h"), ["a@2"]);
        assert_eq!(known.groups.len(), 1);
    }
}

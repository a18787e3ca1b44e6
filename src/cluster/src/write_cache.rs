//! What is known of one kind of object: what the watch has brought, and what our own writes returned.
//!
//! A watch is behind our writes. So an object that a write returned stands until the watch has brought it or a newer
//! one, and one that we deleted counts as being deleted. What the watch has not confirmed within [`CONFIRM`] is to be
//! read from the API server itself, and so is at once what a write without an answer was about. Nothing ever waits for
//! a confirmation.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::Key;

/// How long the watch may take to bring what we wrote.
pub const CONFIRM: Duration = Duration::from_secs(30);

/// An object at one of its versions.
#[derive(Debug)]
pub struct Versioned<T> {
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
    uid: String,
    version: u64,
    deleting: bool,
    object: Arc<T>,
    /// We deleted it.
    deleted: bool,
    /// Since when a write of ours is not confirmed by the watch.
    unconfirmed_since: Option<Instant>,
    /// A write of ours had no answer, so that this may be old.
    unknown: bool,
}

impl<T> Item<T> {
    /// How long the watch has still to confirm our write.
    fn left(&self, now: Instant) -> Option<Duration> {
        Some((self.unconfirmed_since? + CONFIRM).saturating_duration_since(now))
    }
}

/// All objects of one kind. Those of a group are together, for they are looked at together.
pub struct WriteCache<T> {
    groups: HashMap<Arc<str>, BTreeMap<Key, Item<T>>>,
    group_of: HashMap<Key, Arc<str>>,
    /// How many were looked at, group by group.
    #[cfg(any(test, feature = "testing"))]
    pub looks: std::cell::Cell<usize>,
}

impl<T> Default for WriteCache<T> {
    fn default() -> Self {
        Self {
            groups: HashMap::new(),
            group_of: HashMap::new(),
            #[cfg(any(test, feature = "testing"))]
            looks: std::cell::Cell::default(),
        }
    }
}

impl<T> WriteCache<T> {
    /// The watch brought an object. While a write of ours is not confirmed, an older version is no news; versions of
    /// one kind are numbers that grow, unless somebody restores a backup.
    pub fn watched(&mut self, key: &Key, at: Versioned<T>) {
        let (mut deleted, mut unconfirmed_since, mut unknown) = (false, None, false);
        let version = number(&at.version);
        if let Some(known) = self.item(key) {
            // This may be somebody else's write from before ours.
            unknown = known.unknown && known.uid == at.uid;
            if known.unconfirmed_since.is_some() && version < known.version {
                return;
            }
            if known.deleted && known.uid == at.uid && !at.deleting {
                (deleted, unconfirmed_since) = (true, known.unconfirmed_since);
            }
        }
        self.put(key, at, deleted, unconfirmed_since);
        if unknown {
            self.mark_unknown(key);
        }
    }

    /// The watch says that the object of that UID is gone.
    pub fn gone(&mut self, key: &Key, uid: &str) {
        if self.item(key).is_some_and(|known| known.uid == uid) {
            self.remove(key);
        }
    }

    /// A write of ours returned the object.
    pub fn wrote(&mut self, key: &Key, at: Versioned<T>, now: Instant) {
        let version = number(&at.version);
        let known = self.item(key);
        if known.is_some_and(|known| known.version >= version) {
            return;
        }
        let deleted = known.is_some_and(|known| known.deleted && known.uid == at.uid);
        let unconfirmed_since = Some(now);
        self.put(key, at, deleted, unconfirmed_since);
    }

    /// We deleted the object of that UID. Where the watch has shown that already, there is nothing to wait for: it may
    /// take its time to go.
    pub fn mark_deleted(&mut self, key: &Key, uid: &str, now: Instant) {
        let known = self.item_mut(key).filter(|known| known.uid == uid);
        if let Some(known) = known.filter(|known| !known.deleting) {
            known.deleted = true;
            known.unconfirmed_since = Some(now);
        }
    }

    /// A write of ours had no answer: it may have been done.
    pub fn mark_unknown(&mut self, key: &Key) {
        if let Some(known) = self.item_mut(key) {
            known.unknown = true;
        }
    }

    /// The API server itself was asked.
    pub fn read(&mut self, key: &Key, found: Option<Versioned<T>>, now: Instant) {
        let Some(at) = found else {
            return self.remove(key);
        };
        let version = number(&at.version);
        let known = self.item(key);
        let watched =
            known.is_some_and(|known| known.unconfirmed_since.is_none() && known.version >= version);
        // All that there is left to see of one that is being deleted is that it is gone, which may take long.
        let unconfirmed_since = (!watched && !at.deleting).then_some(now);
        self.put(key, at, false, unconfirmed_since);
    }

    /// The object of that key, whether we deleted it or not.
    pub fn get(&self, key: &Key) -> Option<&Arc<T>> {
        self.item(key).map(|known| &known.object)
    }

    /// The UID of the object of that key.
    pub fn uid(&self, key: &Key) -> Option<&str> {
        self.item(key).map(|known| known.uid.as_str())
    }

    /// What belongs to `group`, by name, and whether it goes: it is being deleted, or we deleted it.
    pub fn of<'a>(&'a self, group: &str) -> impl Iterator<Item = (&'a Key, &'a Arc<T>, bool)> {
        let items = self.members(group);
        items.map(|(key, known)| (key, &known.object, known.deleted || known.deleting))
    }

    /// The one of that key, if it belongs to `group`, and whether it goes.
    pub fn find<'a>(&'a self, group: &str, key: &Key) -> Option<(&'a Key, &'a Arc<T>, bool)> {
        let (key, known) = self.groups.get(group)?.get_key_value(key)?;
        Some((key, &known.object, known.deleted || known.deleting))
    }

    /// Our writes in `group` that are not confirmed: what is to be read now, and how long the next one has still.
    pub fn unconfirmed(&self, group: &str, now: Instant) -> (Vec<Key>, Option<Duration>) {
        let mut due = Vec::new();
        let mut next: Option<Duration> = None;
        for (key, known) in self.members(group) {
            if known.unknown {
                due.push(key.clone());
                continue;
            }
            let Some(left) = known.left(now) else { continue };
            match left {
                Duration::ZERO => due.push(key.clone()),
                left => next = Some(next.map_or(left, |n| n.min(left))),
            }
        }
        (due, next)
    }

    /// How long it is until this one is to be read, where a write of ours is not confirmed.
    pub fn unconfirmed_for(&self, key: &Key, now: Instant) -> Option<Duration> {
        self.item(key)?.left(now)
    }

    fn members<'a>(&'a self, group: &str) -> impl Iterator<Item = (&'a Key, &'a Item<T>)> {
        let members = self.groups.get(group).into_iter().flatten();
        #[cfg(any(test, feature = "testing"))]
        let members = members.inspect(|_| self.looks.set(self.looks.get() + 1));
        members
    }

    fn item(&self, key: &Key) -> Option<&Item<T>> {
        self.groups.get(self.group_of.get(key)?)?.get(key)
    }

    fn item_mut(&mut self, key: &Key) -> Option<&mut Item<T>> {
        self.groups.get_mut(self.group_of.get(key)?)?.get_mut(key)
    }

    fn put(&mut self, key: &Key, at: Versioned<T>, deleted: bool, unconfirmed_since: Option<Instant>) {
        let item = Item {
            version: number(&at.version),
            uid: at.uid,
            deleting: at.deleting,
            object: at.object,
            deleted,
            unconfirmed_since,
            unknown: false,
        };
        if let Some(there) = self.group_of.get(key).filter(|group| ***group == *at.group)
            && let Some(items) = self.groups.get_mut(there)
        {
            items.insert(key.clone(), item);
            return;
        }
        self.remove(key);
        let known = self.groups.get_key_value(at.group.as_str());
        let group = known.map_or_else(|| at.group.as_str().into(), |(group, _)| Arc::clone(group));
        self.group_of.insert(key.clone(), Arc::clone(&group));
        self.groups.entry(group).or_default().insert(key.clone(), item);
    }

    fn remove(&mut self, key: &Key) {
        let Some(group) = self.group_of.remove(key) else {
            return;
        };
        if let Some(items) = self.groups.get_mut(&group) {
            items.remove(key);
            if items.is_empty() {
                self.groups.remove(&group);
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

    fn at(uid: &str, version: &str, group: &str, deleting: bool) -> Versioned<String> {
        Versioned {
            uid: uid.to_owned(),
            version: version.to_owned(),
            group: group.to_owned(),
            deleting,
            object: Arc::new(format!("{uid}@{version}")),
        }
    }

    fn told(known: &WriteCache<String>, group: &str) -> Vec<String> {
        let mark = |going| if going { " goes" } else { "" };
        known
            .of(group)
            .map(|(_, object, going)| format!("{object}{}", mark(going)))
            .collect()
    }

    #[test]
    fn the_watch_does_not_take_back_what_was_written() {
        let (mut known, key, now) = (WriteCache::default(), Key::namespaced("n", "p"), Instant::now());
        known.wrote(&key, at("a", "20", "g", false), now);
        known.watched(&key, at("a", "19", "g", false));
        assert_eq!(told(&known, "g"), ["a@20"]);
        assert_eq!(
            known.unconfirmed("g", now + CONFIRM).0,
            std::slice::from_ref(&key)
        );
        assert_eq!(known.unconfirmed_for(&key, now), Some(CONFIRM));
        assert_eq!(known.unconfirmed_for(&key, now + CONFIRM), Some(Duration::ZERO));
        known.watched(&key, at("a", "20", "g", false));
        assert_eq!(known.unconfirmed("g", now + CONFIRM), (vec![], None));
        assert_eq!(known.unconfirmed_for(&key, now), None);
        known.wrote(&key, at("a", "18", "g", false), now);
        assert_eq!(told(&known, "g"), ["a@20"]);
    }

    #[test]
    fn what_was_deleted_stays_so_until_the_watch_says_it() {
        let (mut known, key, now) = (WriteCache::default(), Key::namespaced("n", "p"), Instant::now());
        known.watched(&key, at("a", "1", "g", false));
        known.mark_deleted(&key, "other", now);
        assert_eq!(told(&known, "g"), ["a@1"]);
        known.mark_deleted(&key, "a", now);
        known.watched(&key, at("a", "2", "g", false));
        assert_eq!(told(&known, "g"), ["a@2 goes"]);
        assert_eq!(known.unconfirmed("g", now), (vec![], Some(CONFIRM)));
        known.watched(&key, at("a", "3", "g", true));
        assert_eq!(told(&known, "g"), ["a@3 goes"]);
        assert_eq!(known.unconfirmed("g", now + CONFIRM), (vec![], None));
        known.mark_deleted(&key, "a", now);
        assert_eq!(known.unconfirmed("g", now), (vec![], None), "it is seen to go");
        known.read(&key, Some(at("a", "4", "g", true)), now);
        assert_eq!(
            known.unconfirmed("g", now),
            (vec![], None),
            "however long that takes"
        );
        known.wrote(&key, at("b", "5", "g", false), now);
        known.gone(&key, "a");
        assert_eq!(told(&known, "g"), ["b@5"], "another of the same name");
        known.read(&key, None, now);
        assert_eq!(told(&known, "g"), Vec::<String>::new());
    }

    #[test]
    fn what_was_read_stands_until_the_watch_is_as_far() {
        let (mut known, key, now) = (WriteCache::default(), Key::namespaced("n", "p"), Instant::now());
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
    fn what_a_write_without_an_answer_was_about_is_read_at_once() {
        let (mut known, key, now) = (WriteCache::default(), Key::namespaced("n", "p"), Instant::now());
        known.mark_unknown(&key);
        known.watched(&key, at("a", "20", "g", false));
        assert_eq!(known.unconfirmed("g", now), (vec![], None));
        known.mark_unknown(&key);
        known.watched(&key, at("a", "21", "g", false));
        assert_eq!(known.unconfirmed("g", now), (vec![key.clone()], None));
        known.read(&key, Some(at("a", "22", "g", false)), now);
        assert_eq!(known.unconfirmed("g", now), (vec![], Some(CONFIRM)));
        known.mark_unknown(&key);
        known.wrote(&key, at("a", "23", "g", false), now);
        assert_eq!(known.unconfirmed("g", now), (vec![], Some(CONFIRM)), "answered");
        known.mark_unknown(&key);
        known.watched(&key, at("b", "24", "g", false));
        assert_eq!(
            known.unconfirmed("g", now),
            (vec![], None),
            "another of the same name"
        );
    }

    #[test]
    fn who_changes_hands_is_known_once() {
        let (mut known, key) = (WriteCache::default(), Key::namespaced("n", "p"));
        known.watched(&key, at("a", "1", "g", false));
        known.watched(&key, at("a", "2", "h", false));
        assert_eq!(told(&known, "g"), Vec::<String>::new());
        assert_eq!(told(&known, "h"), ["a@2"]);
        assert_eq!(known.groups.len(), 1);
    }
}

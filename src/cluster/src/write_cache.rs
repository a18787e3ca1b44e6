//! Cached objects of one kind: what the watch delivered, and what our own writes returned.
//!
//! A watch lags behind our writes. So an object that a write returned stays cached until the watch delivers it or a
//! newer version, and one that we deleted counts as terminating. What the watch has not confirmed within
//! [`CONFIRM_TIMEOUT`] must be read from the API server; after a write without an answer, at once. Nothing ever waits
//! for a confirmation.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::Resource;

use crate::Key;

use kruise_api::unconfirmed::CONFIRM_TIMEOUT;

/// An object at one of its versions.
#[derive(Debug)]
pub struct Versioned<T> {
    /// UID of the object.
    pub uid: String,
    /// Resource version of the object.
    pub resource_version: String,
    /// Group key: of its controller (`Owner::group_key`), or of the orphans of its namespace.
    pub group: String,
    /// Whether it is being deleted.
    pub terminating: bool,
    /// The object itself.
    pub object: Arc<T>,
}

impl<K: Resource> Versioned<K> {
    /// A whole object, in this group.
    pub fn from_object(object: Arc<K>, group: String) -> Self {
        let metadata = object.meta();
        Self {
            uid: metadata.uid.clone().unwrap_or_default(),
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
            group,
            terminating: metadata.deletion_timestamp.is_some(),
            object,
        }
    }
}

/// What a write of ours did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// It created the object, or found it created.
    Created,
    /// It changed an object that was cached.
    Changed,
}

struct CacheEntry<T> {
    uid: String,
    version: u64,
    terminating: bool,
    object: Arc<T>,
    /// We deleted it.
    deleted: bool,
    /// Since when the watch has not confirmed our write.
    unconfirmed_since: Option<Instant>,
    /// A write had no answer, so this may be outdated.
    unknown: bool,
}

impl<T> CacheEntry<T> {
    /// How much longer the watch may take to confirm our write.
    fn time_left(&self, now: Instant) -> Option<Duration> {
        Some((self.unconfirmed_since? + CONFIRM_TIMEOUT).saturating_duration_since(now))
    }
}

/// All objects of one kind. Those of a group are stored together, because they are read together.
pub struct WriteCache<T> {
    groups: HashMap<Arc<str>, BTreeMap<Key, CacheEntry<T>>>,
    group_of: HashMap<Key, Arc<str>>,
    /// Number of entries visited in groups.
    #[cfg(any(test, feature = "testing"))]
    pub visited: std::cell::Cell<usize>,
}

impl<T> Default for WriteCache<T> {
    fn default() -> Self {
        Self {
            groups: HashMap::new(),
            group_of: HashMap::new(),
            #[cfg(any(test, feature = "testing"))]
            visited: std::cell::Cell::default(),
        }
    }
}

impl<T> WriteCache<T> {
    /// Whether no object is cached.
    pub fn is_empty(&self) -> bool {
        self.group_of.is_empty()
    }

    /// The watch delivered an object. While our write is not confirmed, an older version is ignored; versions of one
    /// kind are increasing numbers, unless a backup was restored.
    pub fn apply_watch(&mut self, key: &Key, observed: Versioned<T>) {
        let (mut deleted, mut unconfirmed_since, mut unknown) = (false, None, false);
        let version = parse_version(&observed.resource_version);
        if let Some(entry) = self.entry(key) {
            // This may be another writer's change from before ours.
            unknown = entry.unknown && entry.uid == observed.uid;
            if entry.unconfirmed_since.is_some() && version < entry.version {
                return;
            }
            if entry.deleted && entry.uid == observed.uid && !observed.terminating {
                (deleted, unconfirmed_since) = (true, entry.unconfirmed_since);
            }
        }
        self.insert(key, observed, deleted, unconfirmed_since);
        if unknown {
            self.mark_unknown(key);
        }
    }

    /// The watch reported the deletion of the object with that UID.
    pub fn apply_watch_delete(&mut self, key: &Key, uid: &str) {
        if self.entry(key).is_some_and(|entry| entry.uid == uid) {
            self.remove(key);
        }
    }

    /// A write of ours returned the object. What we changed and is no longer cached was deleted meanwhile: the watch
    /// will not report that again.
    pub fn apply_write(&mut self, key: &Key, written: Versioned<T>, what: Written, now: Instant) {
        let version = parse_version(&written.resource_version);
        let entry = self.entry(key);
        if what == Written::Changed && entry.is_none_or(|entry| entry.uid != written.uid) {
            return;
        }
        if entry.is_some_and(|entry| entry.version >= version) {
            return;
        }
        let deleted = entry.is_some_and(|entry| entry.deleted && entry.uid == written.uid);
        let unconfirmed_since = Some(now);
        self.insert(key, written, deleted, unconfirmed_since);
    }

    /// We deleted the object with that UID. If the watch has already shown it as terminating, there is nothing to wait
    /// for: the deletion may take long.
    pub fn mark_deleted(&mut self, key: &Key, uid: &str, now: Instant) {
        let entry = self.entry_mut(key).filter(|entry| entry.uid == uid);
        if let Some(entry) = entry.filter(|entry| !entry.terminating) {
            entry.deleted = true;
            entry.unconfirmed_since = Some(now);
        }
    }

    /// A write had no answer: it may have been done.
    pub fn mark_unknown(&mut self, key: &Key) {
        if let Some(entry) = self.entry_mut(key) {
            entry.unknown = true;
        }
    }

    /// The object was read from the API server. While the answer was on its way, the watch may have shown a later object or
    /// version, which it will not show again.
    pub fn apply_read(&mut self, key: &Key, found: Option<Versioned<T>>, now: Instant) {
        let watched = self
            .entry_mut(key)
            .filter(|entry| entry.unconfirmed_since.is_none());
        let Some(observed) = found else {
            return match watched.filter(|entry| !entry.unknown && !entry.terminating) {
                // Only another read can decide whether the answer is older than the watch.
                Some(entry) => entry.unknown = true,
                None => self.remove(key),
            };
        };
        let version = parse_version(&observed.resource_version);
        if let Some(entry) = watched.filter(|entry| entry.version > version) {
            entry.unknown = false;
            return;
        }
        let entry = self.entry(key);
        let watched =
            entry.is_some_and(|entry| entry.unconfirmed_since.is_none() && entry.version >= version);
        // The only change left for a terminating object is its deletion, which may take long.
        let unconfirmed_since = (!watched && !observed.terminating).then_some(now);
        self.insert(key, observed, false, unconfirmed_since);
    }

    /// The object of that key, even if we deleted it.
    pub fn get(&self, key: &Key) -> Option<&Arc<T>> {
        self.entry(key).map(|entry| &entry.object)
    }

    /// The UID of the object of that key.
    pub fn uid(&self, key: &Key) -> Option<&str> {
        self.entry(key).map(|entry| entry.uid.as_str())
    }

    /// The objects of `group`, by name, and whether each is being deleted or was deleted by us.
    pub fn group_entries<'a>(&'a self, group: &str) -> impl Iterator<Item = (&'a Key, &'a Arc<T>, bool)> {
        let items = self.members(group);
        items.map(|(key, entry)| (key, &entry.object, entry.deleted || entry.terminating))
    }

    /// The object of that key, if it belongs to `group`, and whether it is being deleted or was deleted by us.
    pub fn find_in_group<'a>(&'a self, group: &str, key: &Key) -> Option<(&'a Key, &'a Arc<T>, bool)> {
        let (key, entry) = self.groups.get(group)?.get_key_value(key)?;
        Some((key, &entry.object, entry.deleted || entry.terminating))
    }

    /// Unconfirmed writes in `group`: the keys to read now, and the time until the next one is due.
    pub fn unconfirmed(&self, group: &str, now: Instant) -> (Vec<Key>, Option<Duration>) {
        let mut due = Vec::new();
        let mut next: Option<Duration> = None;
        for (key, entry) in self.members(group) {
            if entry.unknown {
                due.push(key.clone());
                continue;
            }
            let Some(left) = entry.time_left(now) else {
                continue;
            };
            match left {
                Duration::ZERO => due.push(key.clone()),
                left => next = Some(next.map_or(left, |n| n.min(left))),
            }
        }
        (due, next)
    }

    /// How long until this object must be read; `None` if no write is unconfirmed.
    pub fn confirm_time_left(&self, key: &Key, now: Instant) -> Option<Duration> {
        self.entry(key)?.time_left(now)
    }

    /// Whether a write of this object was not confirmed in time, or had no answer.
    pub fn must_be_read(&self, key: &Key, now: Instant) -> bool {
        let entry = self.entry(key);
        entry.is_some_and(|entry| entry.unknown || entry.time_left(now) == Some(Duration::ZERO))
    }

    fn members<'a>(&'a self, group: &str) -> impl Iterator<Item = (&'a Key, &'a CacheEntry<T>)> {
        let members = self.groups.get(group).into_iter().flatten();
        #[cfg(any(test, feature = "testing"))]
        let members = members.inspect(|_| self.visited.set(self.visited.get() + 1));
        members
    }

    fn entry(&self, key: &Key) -> Option<&CacheEntry<T>> {
        self.groups.get(self.group_of.get(key)?)?.get(key)
    }

    fn entry_mut(&mut self, key: &Key) -> Option<&mut CacheEntry<T>> {
        self.groups.get_mut(self.group_of.get(key)?)?.get_mut(key)
    }

    fn insert(
        &mut self,
        key: &Key,
        observed: Versioned<T>,
        deleted: bool,
        unconfirmed_since: Option<Instant>,
    ) {
        let entry = CacheEntry {
            version: parse_version(&observed.resource_version),
            uid: observed.uid,
            terminating: observed.terminating,
            object: observed.object,
            deleted,
            unconfirmed_since,
            unknown: false,
        };
        if let Some(current_group) = self.group_of.get(key).filter(|group| ***group == *observed.group)
            && let Some(entries) = self.groups.get_mut(current_group)
        {
            entries.insert(key.clone(), entry);
            return;
        }
        self.remove(key);
        let existing = self.groups.get_key_value(observed.group.as_str());
        let group = existing.map_or_else(|| observed.group.as_str().into(), |(group, _)| Arc::clone(group));
        self.group_of.insert(key.clone(), Arc::clone(&group));
        self.groups.entry(group).or_default().insert(key.clone(), entry);
    }

    fn remove(&mut self, key: &Key) {
        let Some(group) = self.group_of.remove(key) else {
            return;
        };
        if let Some(entries) = self.groups.get_mut(&group) {
            entries.remove(key);
            if entries.is_empty() {
                self.groups.remove(&group);
            }
        }
    }
}

/// A version that is not a number counts as the lowest: any later one is newer.
fn parse_version(version: &str) -> u64 {
    version.parse().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn versioned(uid: &str, version: &str, group: &str, terminating: bool) -> Versioned<String> {
        Versioned {
            uid: uid.to_owned(),
            resource_version: version.to_owned(),
            group: group.to_owned(),
            terminating,
            object: Arc::new(format!("{uid}@{version}")),
        }
    }

    fn group_state(cache: &WriteCache<String>, group: &str) -> Vec<String> {
        let mark = |terminating| if terminating { " goes" } else { "" };
        cache
            .group_entries(group)
            .map(|(_, object, terminating)| format!("{object}{}", mark(terminating)))
            .collect()
    }

    #[test]
    fn older_watch_event_does_not_undo_a_write() {
        let (mut cache, key, now) = (WriteCache::default(), Key::namespaced("n", "p"), Instant::now());
        cache.apply_write(&key, versioned("a", "20", "g", false), Written::Created, now);
        cache.apply_watch(&key, versioned("a", "19", "g", false));
        assert_eq!(group_state(&cache, "g"), ["a@20"]);
        assert_eq!(
            cache.unconfirmed("g", now + CONFIRM_TIMEOUT).0,
            std::slice::from_ref(&key)
        );
        assert_eq!(cache.confirm_time_left(&key, now), Some(CONFIRM_TIMEOUT));
        assert_eq!(
            cache.confirm_time_left(&key, now + CONFIRM_TIMEOUT),
            Some(Duration::ZERO)
        );
        cache.apply_watch(&key, versioned("a", "20", "g", false));
        assert_eq!(cache.unconfirmed("g", now + CONFIRM_TIMEOUT), (vec![], None));
        assert_eq!(cache.confirm_time_left(&key, now), None);
        cache.apply_write(&key, versioned("a", "18", "g", false), Written::Changed, now);
        assert_eq!(group_state(&cache, "g"), ["a@20"]);
    }

    #[test]
    fn deleted_stays_deleted_until_the_watch_confirms() {
        let (mut cache, key, now) = (WriteCache::default(), Key::namespaced("n", "p"), Instant::now());
        cache.apply_watch(&key, versioned("a", "1", "g", false));
        cache.mark_deleted(&key, "other", now);
        assert_eq!(group_state(&cache, "g"), ["a@1"]);
        cache.mark_deleted(&key, "a", now);
        cache.apply_watch(&key, versioned("a", "2", "g", false));
        assert_eq!(group_state(&cache, "g"), ["a@2 goes"]);
        assert_eq!(cache.unconfirmed("g", now), (vec![], Some(CONFIRM_TIMEOUT)));
        cache.apply_watch(&key, versioned("a", "3", "g", true));
        assert_eq!(group_state(&cache, "g"), ["a@3 goes"]);
        assert_eq!(cache.unconfirmed("g", now + CONFIRM_TIMEOUT), (vec![], None));
        cache.mark_deleted(&key, "a", now);
        assert_eq!(
            cache.unconfirmed("g", now),
            (vec![], None),
            "observed as terminating"
        );
        cache.apply_read(&key, Some(versioned("a", "4", "g", true)), now);
        assert_eq!(
            cache.unconfirmed("g", now),
            (vec![], None),
            "however long that takes"
        );
        cache.apply_write(&key, versioned("b", "5", "g", false), Written::Created, now);
        cache.apply_watch_delete(&key, "a");
        assert_eq!(group_state(&cache, "g"), ["b@5"], "a new object of the same name");
        cache.apply_read(&key, None, now);
        assert_eq!(group_state(&cache, "g"), Vec::<String>::new());
    }

    /// Otherwise it would exist until it is read, or for ever where it is not.
    #[test]
    fn answer_after_the_deletion_is_dropped() {
        let (mut cache, key, now) = (WriteCache::default(), Key::namespaced("n", "p"), Instant::now());
        cache.apply_watch(&key, versioned("a", "1", "g", false));
        cache.apply_watch_delete(&key, "a");
        cache.apply_write(&key, versioned("a", "2", "g", false), Written::Changed, now);
        assert_eq!(cache.uid(&key), None);
        cache.apply_watch(&key, versioned("b", "4", "g", false));
        cache.apply_write(&key, versioned("a", "2", "g", false), Written::Changed, now);
        assert_eq!(group_state(&cache, "g"), ["b@4"], "a new object of the same name");
        cache.apply_write(&key, versioned("b", "5", "g", false), Written::Changed, now);
        assert_eq!(group_state(&cache, "g"), ["b@5"]);
    }

    #[test]
    fn read_result_stays_until_the_watch_catches_up() {
        let (mut cache, key, now) = (WriteCache::default(), Key::namespaced("n", "p"), Instant::now());
        cache.apply_watch(&key, versioned("a", "20", "g", false));
        cache.apply_read(&key, Some(versioned("a", "20", "g", false)), now);
        assert_eq!(
            cache.unconfirmed("g", now),
            (vec![], None),
            "confirmed by the watch"
        );
        cache.apply_read(&key, Some(versioned("a", "22", "g", false)), now);
        cache.apply_watch(&key, versioned("a", "21", "g", false));
        assert_eq!(group_state(&cache, "g"), ["a@22"]);
        cache.apply_watch(&key, versioned("a", "22", "g", false));
        cache.apply_watch(&key, versioned("a", "5", "g", false));
        assert_eq!(group_state(&cache, "g"), ["a@5"], "restored from a backup");
    }

    /// The watch does not show a version again that an earlier answer has overwritten.
    #[test]
    fn answer_that_is_older_than_the_watch_is_dropped() {
        let (mut cache, key, now) = (WriteCache::default(), Key::namespaced("n", "p"), Instant::now());
        cache.apply_watch(&key, versioned("a", "20", "g", false));
        cache.mark_unknown(&key);
        cache.apply_watch(&key, versioned("a", "22", "g", false));
        cache.apply_read(&key, Some(versioned("a", "21", "g", false)), now);
        assert_eq!(group_state(&cache, "g"), ["a@22"]);
        assert_eq!(cache.unconfirmed("g", now), (vec![], None));
    }

    #[test]
    fn answer_that_is_older_than_a_new_object_is_dropped() {
        let (mut cache, key, now) = (WriteCache::default(), Key::namespaced("n", "p"), Instant::now());
        cache.apply_watch(&key, versioned("a", "10", "g", false));
        cache.apply_watch_delete(&key, "a");
        cache.apply_watch(&key, versioned("b", "12", "g", false));
        cache.apply_read(&key, Some(versioned("a", "10", "g", false)), now);
        assert_eq!(group_state(&cache, "g"), ["b@12"]);
        cache.apply_read(&key, None, now);
        assert_eq!(cache.uid(&key), Some("b"));
        assert_eq!(cache.unconfirmed("g", now), (vec![key.clone()], None));
        cache.apply_read(&key, Some(versioned("b", "12", "g", false)), now);
        assert_eq!(cache.unconfirmed("g", now), (vec![], None));
        cache.apply_read(&key, Some(versioned("c", "13", "g", false)), now);
        assert_eq!(group_state(&cache, "g"), ["c@13"], "a later object");
    }

    /// Even before the watch shows its deletion.
    #[test]
    fn object_that_is_not_found_twice_is_removed() {
        let (mut cache, key, now) = (WriteCache::default(), Key::namespaced("n", "p"), Instant::now());
        cache.apply_watch(&key, versioned("a", "1", "g", false));
        cache.apply_read(&key, None, now);
        cache.apply_read(&key, None, now);
        assert_eq!(cache.uid(&key), None);
        cache.apply_watch(&key, versioned("a", "1", "g", true));
        cache.apply_read(&key, None, now);
        assert_eq!(cache.uid(&key), None, "terminating");
    }

    #[test]
    fn write_without_answer_is_read_back_at_once() {
        let (mut cache, key, now) = (WriteCache::default(), Key::namespaced("n", "p"), Instant::now());
        cache.mark_unknown(&key);
        cache.apply_watch(&key, versioned("a", "20", "g", false));
        assert_eq!(cache.unconfirmed("g", now), (vec![], None));
        cache.mark_unknown(&key);
        cache.apply_watch(&key, versioned("a", "21", "g", false));
        assert_eq!(cache.unconfirmed("g", now), (vec![key.clone()], None));
        cache.apply_read(&key, Some(versioned("a", "22", "g", false)), now);
        assert_eq!(cache.unconfirmed("g", now), (vec![], Some(CONFIRM_TIMEOUT)));
        cache.mark_unknown(&key);
        cache.apply_write(&key, versioned("a", "23", "g", false), Written::Changed, now);
        assert_eq!(
            cache.unconfirmed("g", now),
            (vec![], Some(CONFIRM_TIMEOUT)),
            "answered"
        );
        cache.mark_unknown(&key);
        cache.apply_watch(&key, versioned("b", "24", "g", false));
        assert_eq!(
            cache.unconfirmed("g", now),
            (vec![], None),
            "a new object of the same name"
        );
    }

    #[test]
    fn who_changes_hands_is_known_once() {
        let (mut known, key) = (WriteCache::default(), Key::namespaced("n", "p"));
        known.apply_watch(&key, versioned("a", "1", "g", false));
        known.apply_watch(&key, versioned("a", "2", "h", false));
        assert_eq!(group_state(&known, "g"), Vec::<String>::new());
        assert_eq!(group_state(&known, "h"), ["a@2"]);
        assert_eq!(known.groups.len(), 1);
    }
}

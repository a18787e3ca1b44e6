//! Stores: the objects of one kind, reduced to what we need, in memory.
//!
//! A store keeps the projection of each object and sends each change to its subscribers. The objects themselves are
//! dropped at the watch, so a node of a thousand Pods costs kilobytes.

mod key;
mod lenient;
mod reflector;

use std::collections::{BTreeMap, HashSet};
use std::marker::PhantomData;
use std::sync::{Arc, PoisonError, RwLock};

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::ListParams;
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use tokio::sync::{mpsc, watch};

pub use self::key::Key;
pub(super) use self::lenient::Lenient;
use self::lenient::ObjectIdentity;
pub use self::lenient::ObjectView;
use self::reflector::{ObjectSink, Reflector};
use super::{EventRecorder, EventType};
use kruise_api::keys;
use kruise_ops::panics::{Panicked, catch_panic_sync};
use kruise_ops::watches::WatchHandle;

/// One object was added, changed or deleted. In the first list, and for what a reconnect delivers again, `old` is
/// `None`.
#[derive(Debug)]
pub struct Change<T> {
    /// Key of the object.
    pub key: Key,
    /// The previous state, `None` when it is new.
    pub old: Option<Arc<T>>,
    /// The current state, `None` when it is deleted.
    pub new: Option<Arc<T>>,
}

impl<T> Clone for Change<T> {
    fn clone(&self) -> Self {
        Self {
            key: self.key.clone(),
            old: self.old.clone(),
            new: self.new.clone(),
        }
    }
}

struct State<T> {
    /// Sorted, so that those of a namespace are found without the others.
    objects: BTreeMap<Key, StoreEntry<T>>,
    /// Size of all objects as the API server sent them.
    bytes: usize,
    subscribers: Vec<mpsc::UnboundedSender<Change<T>>>,
}

impl<T> State<T> {
    fn new() -> Self {
        Self {
            objects: BTreeMap::new(),
            bytes: 0,
            subscribers: Vec::new(),
        }
    }
}

struct StoreEntry<T> {
    object: Arc<T>,
    /// Size of the object as the API server sent it.
    bytes: usize,
}

/// The stored objects of a kind; clones share them.
pub struct Store<T> {
    state: Arc<RwLock<State<T>>>,
    synced: watch::Receiver<bool>,
}

impl<T> Clone for Store<T> {
    fn clone(&self) -> Self {
        Self {
            state: Arc::clone(&self.state),
            synced: self.synced.clone(),
        }
    }
}

impl<T> Store<T> {
    /// The object of that key.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<Arc<T>> {
        self.read()
            .objects
            .get(key)
            .map(|entry| Arc::clone(&entry.object))
    }

    /// All objects, in no particular order.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<T>> {
        self.read()
            .objects
            .values()
            .map(|entry| Arc::clone(&entry.object))
            .collect()
    }

    /// All objects with their keys, in no particular order.
    #[must_use]
    pub fn entries(&self) -> Vec<(Key, Arc<T>)> {
        self.read()
            .objects
            .iter()
            .map(|(key, entry)| (key.clone(), Arc::clone(&entry.object)))
            .collect()
    }

    /// The objects of a namespace with their keys, by name.
    #[must_use]
    pub fn entries_of(&self, namespace: Option<&str>) -> Vec<(Key, Arc<T>)> {
        let first = Key {
            namespace: namespace.map(str::to_owned),
            name: String::new(),
        };
        let state = self.read();
        let entries = state.objects.range(first..);
        entries
            .take_while(|(key, _)| key.namespace.as_deref() == namespace)
            .map(|(key, entry)| (key.clone(), Arc::clone(&entry.object)))
            .collect()
    }

    /// Number of stored objects.
    #[must_use]
    pub fn len(&self) -> usize {
        self.read().objects.len()
    }

    /// Whether the store is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Every change from now on, preceded by one change for each object that is already stored.
    #[must_use]
    pub fn subscribe(&self) -> mpsc::UnboundedReceiver<Change<T>> {
        let (tx, rx) = mpsc::unbounded_channel();
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        for (key, entry) in &state.objects {
            // The receiver still exists, so the send cannot fail.
            let _ = tx.send(Change {
                key: key.clone(),
                old: None,
                new: Some(Arc::clone(&entry.object)),
            });
        }
        state.subscribers.push(tx);
        rx
    }

    /// Whether the first list is complete.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        *self.synced.borrow()
    }

    /// Waits until the first list is complete. Without a deadline: callers serve health meanwhile.
    pub async fn wait_until_synced(&self) {
        // The sender lives in the watch task; when that has ended the process is ending.
        let _ = self.synced.clone().wait_for(|synced| *synced).await;
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, State<T>> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(any(test, feature = "testing"))]
impl<T> Store<T> {
    /// A store with these objects, which never change.
    pub fn from_objects(objects: impl IntoIterator<Item = (Key, T)>) -> Self {
        let objects = objects.into_iter().map(|(key, object)| {
            let object = Arc::new(object);
            (key, StoreEntry { object, bytes: 0 })
        });
        let state = State {
            objects: objects.collect(),
            ..State::new()
        };
        Self {
            state: Arc::new(RwLock::new(state)),
            synced: watch::channel(true).1,
        }
    }
}

/// A store of what `api` and `list_params` select (labels, fields, objects per page), as `project` maps it (`None`
/// leaves an object out), and the task that keeps it up to date. The task never ends: failures are retried, after 0.2 s
/// at first and 30 s at most, or when the API server requests it. `watch` gets the status, and `events` the objects
/// that cannot be read.
pub(super) fn new_reflector<R, T, F>(
    api: Api<R::Kind>,
    list_params: ListParams,
    events: Option<EventRecorder>,
    watch: WatchHandle,
    project: F,
) -> (Store<T>, BoxFuture<'static, ()>)
where
    R: ObjectView + DeserializeOwned + 'static,
    T: PartialEq + Send + Sync + 'static,
    F: Fn(R) -> Option<T> + Send + 'static,
{
    let state = Arc::new(RwLock::new(State::new()));
    let (synced_tx, synced) = watch::channel(false);
    let store = Store {
        state: Arc::clone(&state),
        synced,
    };
    let sink = Box::new(ObjectDecoder {
        writer: StoreWriter {
            state,
            project,
            listed_keys: HashSet::new(),
        },
        events,
        form: PhantomData::<fn() -> R>,
    });
    // Boxed, because it is large, and often part of another future.
    let task = Box::pin(Reflector::new(api, list_params, sink, synced_tx, watch).run());
    (store, task)
}

/// Reads objects as an `R`, and reports those that cannot be used.
struct ObjectDecoder<R, T, F> {
    writer: StoreWriter<T, F>,
    events: Option<EventRecorder>,
    form: PhantomData<fn() -> R>,
}

impl<R: ObjectView, T, F> ObjectDecoder<R, T, F> {
    /// The object. One that cannot be read is left out, with a log line and a warning event on it.
    fn ok_or_report(&self, named: &ObjectIdentity, object: Lenient<R>) -> Option<R> {
        let why = match object.into_result() {
            Ok(object) => return Some(object),
            Err(why) => why,
        };
        self.report_unreadable(
            named,
            format!("cannot parse this object, so it is ignored until it is changed: {why}"),
        );
        None
    }

    fn report_panic(&self, named: &ObjectIdentity, result: Result<(), Panicked>) {
        if let Err(panic) = result {
            self.report_unreadable(
                named,
                format!("cannot process this object, so it counts as it was until it is changed: {panic}"),
            );
        }
    }

    /// Reports why the object cannot be used, in the log and as a warning event on it.
    fn report_unreadable(&self, named: &ObjectIdentity, why: String) {
        let kind = R::Kind::kind(&());
        tracing::warn!(%kind, name = named.name, namespace = named.namespace, why, "object is unreadable");
        let reference = ObjectReference {
            api_version: Some(R::Kind::api_version(&()).into_owned()),
            kind: Some(kind.into_owned()),
            name: Some(named.name.clone()),
            namespace: named.namespace.clone(),
            uid: named.uid.clone(),
            ..ObjectReference::default()
        };
        if let Some(events) = &self.events {
            events.publish(
                reference,
                EventType::Warning,
                keys::EVENT_UNREADABLE,
                "Reading",
                why,
            );
        }
    }
}

impl<R, T, F> ObjectSink for ObjectDecoder<R, T, F>
where
    R: ObjectView + DeserializeOwned,
    T: PartialEq + Send + Sync,
    F: Fn(R) -> Option<T> + Send,
{
    fn begin_list(&mut self) {
        self.writer.begin_list();
    }

    fn add_listed(&mut self, text: &RawValue) -> serde_json::Result<()> {
        let object: Lenient<R> = serde_json::from_str(text.get())?;
        let (key, named, bytes) = (object.key(), object.identity(), object.bytes());
        let object = self.ok_or_report(&named, object);
        let result = self.writer.add_listed(key, object, bytes);
        self.report_panic(&named, result);
        Ok(())
    }

    fn end_list(&mut self) {
        self.writer.end_list();
    }

    fn upsert(&mut self, text: &RawValue) -> serde_json::Result<Option<String>> {
        let object: Lenient<R> = serde_json::from_str(text.get())?;
        let (key, named, bytes) = (object.key(), object.identity(), object.bytes());
        let version = object.version();
        let object = self.ok_or_report(&named, object);
        let result = self.writer.upsert(key, object, bytes);
        self.report_panic(&named, result);
        Ok(version)
    }

    fn remove(&mut self, text: &RawValue) -> serde_json::Result<Option<String>> {
        let object: Lenient<R> = serde_json::from_str(text.get())?;
        self.writer.set(object.key(), None, 0);
        Ok(object.version())
    }

    fn bytes(&self) -> usize {
        self.writer.bytes()
    }
}

/// Applies watch events to the store.
struct StoreWriter<T, F> {
    state: Arc<RwLock<State<T>>>,
    project: F,
    /// The keys of the list in progress; stored objects that are not among them at its end were deleted meanwhile.
    listed_keys: HashSet<Key>,
}

impl<T: PartialEq, F> StoreWriter<T, F> {
    fn begin_list(&mut self) {
        self.listed_keys.clear();
    }

    /// The list in progress contains this object.
    fn add_listed<K>(&mut self, key: Key, object: Option<K>, bytes: usize) -> Result<(), Panicked>
    where
        F: Fn(K) -> Option<T>,
    {
        self.listed_keys.insert(key.clone());
        self.upsert(key, object, bytes)
    }

    /// The list is complete: objects that were not in it are deleted.
    fn end_list(&mut self) {
        let deleted: Vec<Key> = {
            let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
            state
                .objects
                .keys()
                .filter(|key| !self.listed_keys.contains(key))
                .cloned()
                .collect()
        };
        for key in deleted {
            self.set(key, None, 0);
        }
        self.listed_keys = HashSet::new();
    }

    /// An object of that size was added or changed; `None` if it cannot be read. After a panic the stored state is
    /// kept: the object exists, and no subscriber may get a deletion.
    fn upsert<K>(&self, key: Key, object: Option<K>, bytes: usize) -> Result<(), Panicked>
    where
        F: Fn(K) -> Option<T>,
    {
        let projected = match object {
            Some(object) => catch_panic_sync("watch", &key, || (self.project)(object))?,
            None => None,
        };
        self.set(key, projected, bytes);
        Ok(())
    }

    /// Stores the object and notifies the subscribers, unless nothing that we keep has changed.
    fn set(&self, key: Key, object: Option<T>, bytes: usize) {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        let (old, old_bytes) = match state.objects.get(&key) {
            Some(entry) => (Some(Arc::clone(&entry.object)), entry.bytes),
            None => (None, 0),
        };
        let new_bytes = object.as_ref().map_or(0, |_| bytes);
        state.bytes = state.bytes.saturating_sub(old_bytes).saturating_add(new_bytes);
        if old.as_deref() == object.as_ref() {
            if let Some(entry) = state.objects.get_mut(&key) {
                entry.bytes = new_bytes;
            }
            return;
        }
        let new = object.map(Arc::new);
        match &new {
            Some(new) => {
                let object = Arc::clone(new);
                state.objects.insert(key.clone(), StoreEntry { object, bytes });
            }
            None => drop(state.objects.remove(&key)),
        }
        let change = Change { key, old, new };
        state.subscribers.retain(|tx| tx.send(change.clone()).is_ok());
    }

    /// Size of all stored objects as the API server sent them.
    fn bytes(&self) -> usize {
        self.state.read().unwrap_or_else(PoisonError::into_inner).bytes
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use k8s_openapi::api::core::v1::ConfigMap;

    fn config_map(name: &str, value: &str) -> ConfigMap {
        let mut object = ConfigMap::default();
        object.metadata.name = Some(name.into());
        object.data = Some([("v".to_owned(), value.to_owned())].into());
        object
    }

    /// The stored object is kept, and no change is sent, in a list and in a watch.
    #[test]
    fn panicking_projection_does_not_delete_the_object() {
        let state = Arc::new(RwLock::new(State::new()));
        let (_tx, synced) = watch::channel(false);
        let store = Store {
            state: Arc::clone(&state),
            synced,
        };
        let mut writer = StoreWriter {
            state,
            listed_keys: HashSet::new(),
            project: |o: ConfigMap| o.data.unwrap().remove("v"),
        };
        let without_data = |name: &str| {
            let mut object = config_map(name, "");
            object.data = None;
            object
        };
        let mut results = Vec::new();
        let mut changes = store.subscribe();
        for list in [
            [config_map("a", "1"), without_data("never"), config_map("b", "1")],
            [without_data("a"), without_data("never"), config_map("b", "1")],
        ] {
            writer.begin_list();
            for object in list {
                results.push(
                    writer
                        .add_listed(Key::from_object(&object), Some(object), 1)
                        .is_ok(),
                );
            }
            writer.end_list();
        }
        results.push(
            writer
                .upsert(Key::cluster_scoped("a"), Some(without_data("a")), 1)
                .is_ok(),
        );
        assert_eq!(results, [true, false, true, false, false, true, false]);
        let stored = |name: &str| {
            store
                .get(&Key::cluster_scoped(name))
                .map(|known| (*known).clone())
        };
        assert_eq!(stored("a").as_deref(), Some("1"));
        assert_eq!((stored("never"), store.len()), (None, 2));
        let events = std::iter::from_fn(|| changes.try_recv().ok());
        assert_eq!(events.filter(|change| change.new.is_none()).count(), 0);
        assert!(
            writer
                .upsert(Key::cluster_scoped("a"), Some(config_map("a", "2")), 1)
                .is_ok()
        );
        assert_eq!(stored("a").as_deref(), Some("2"), "readable again");
        writer.set(Key::cluster_scoped("a"), None, 0);
        assert_eq!(stored("a"), None, "deleted");
    }

    #[test]
    fn objects_of_a_namespace_come_by_name_and_without_others() {
        let names: Vec<String> = (10..60).map(|n| format!("p{n}")).collect();
        let keys = ["a", "aa", "b"].map(|namespace| {
            let keys = names.iter().map(|name| Key::namespaced(namespace, name.as_str()));
            keys.collect::<Vec<_>>()
        });
        let store = Store::from_objects(keys.concat().into_iter().map(|key| (key, ())));
        let found = |namespace| {
            let entries = store.entries_of(Some(namespace)).into_iter();
            entries.map(|(key, _)| key).collect::<Vec<_>>()
        };
        assert_eq!(["a", "aa", "b"].map(found), keys);
        assert_eq!((found(""), found("c")), (Vec::new(), Vec::new()));
        assert!(store.entries_of(None).is_empty());
    }

    #[test]
    fn relist_reports_changes_and_deletions() {
        let state = Arc::new(RwLock::new(State::new()));
        let (_tx, synced) = watch::channel(false);
        let store = Store {
            state: Arc::clone(&state),
            synced,
        };
        let mut writer = StoreWriter {
            state,
            listed_keys: HashSet::new(),
            project: |o: ConfigMap| o.data.and_then(|mut d| d.remove("v")),
        };
        let mut changes = store.subscribe();
        let lists = [
            (vec![("a", "1", 10), ("b", "1", 20)], 30),
            (vec![("a", "1", 15), ("c", "1", 30)], 45),
            (vec![("c", "2", 5)], 5),
        ];
        for (list, bytes) in lists {
            writer.begin_list();
            for (name, value, bytes) in list {
                let object = Some(config_map(name, value));
                writer
                    .add_listed(Key::cluster_scoped(name), object, bytes)
                    .unwrap();
            }
            writer.end_list();
            assert_eq!(writer.bytes(), bytes);
        }
        let mut reported = Vec::new();
        while let Ok(change) = changes.try_recv() {
            reported.push(format!(
                "{} {:?}→{:?}",
                change.key,
                change.old.as_deref(),
                change.new.as_deref()
            ));
        }
        let expected = [
            "a None→Some(\"1\")",
            "b None→Some(\"1\")",
            "c None→Some(\"1\")",
            "b Some(\"1\")→None",
            "c Some(\"1\")→Some(\"2\")",
            "a Some(\"1\")→None",
        ];
        assert_eq!(reported, expected);
        assert_eq!(store.len(), 1);
    }
}

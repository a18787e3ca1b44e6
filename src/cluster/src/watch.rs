//! Mirrors: what the API server holds of one kind, reduced to what we need, in memory.
//!
//! A mirror keeps the projection of each object and tells its subscribers of each change. The objects
//! themselves are dropped at the watch, so a node of a thousand Pods costs kilobytes.

mod follow;
mod readable;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, PoisonError, RwLock};

use futures::future::BoxFuture;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use tokio::sync::{mpsc, watch};

use self::follow::Follower;
pub use self::readable::Form;
use self::readable::Named;
pub(super) use self::readable::Readable;
use super::Events;
use kruise_ops::panics::{Panicked, isolated_now};
use kruise_ops::watches::Watch;

/// Names an object of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The namespace, `None` for cluster-wide kinds.
    pub namespace: Option<String>,
    /// The name.
    pub name: String,
}

impl Key {
    /// The key of a namespaced object.
    pub fn namespaced(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            namespace: Some(namespace.into()),
            name: name.into(),
        }
    }

    /// The key of a cluster-wide object.
    pub fn cluster(name: impl Into<String>) -> Self {
        Self {
            namespace: None,
            name: name.into(),
        }
    }

    /// The key of `object`.
    pub fn of<K: kube::Resource>(object: &K) -> Self {
        Self {
            namespace: object.namespace(),
            name: object.name_any(),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{namespace}/{}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

/// One object has come, changed or gone. In the first list, and for what a reconnect brings anew, `old` is `None`.
#[derive(Debug)]
pub struct Change<T> {
    /// Which object.
    pub key: Key,
    /// What it was, `None` when it is new.
    pub old: Option<Arc<T>>,
    /// What it is, `None` when it is gone.
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
    objects: HashMap<Key, Kept<T>>,
    /// Length of all of them.
    bytes: usize,
    subscribers: Vec<mpsc::UnboundedSender<Change<T>>>,
}

impl<T> State<T> {
    fn new() -> Self {
        Self {
            objects: HashMap::new(),
            bytes: 0,
            subscribers: Vec::new(),
        }
    }
}

struct Kept<T> {
    object: Arc<T>,
    /// Length of the object as the API server sent it.
    bytes: usize,
}

/// What is known of a kind; clones share it.
pub struct Mirror<T> {
    state: Arc<RwLock<State<T>>>,
    synced: watch::Receiver<bool>,
}

impl<T> Clone for Mirror<T> {
    fn clone(&self) -> Self {
        Self {
            state: Arc::clone(&self.state),
            synced: self.synced.clone(),
        }
    }
}

impl<T> Mirror<T> {
    /// The object of that key.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<Arc<T>> {
        self.read().objects.get(key).map(|kept| Arc::clone(&kept.object))
    }

    /// All objects, in no order.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<T>> {
        self.read()
            .objects
            .values()
            .map(|kept| Arc::clone(&kept.object))
            .collect()
    }

    /// All objects with their keys, in no order.
    #[must_use]
    pub fn entries(&self) -> Vec<(Key, Arc<T>)> {
        self.read()
            .objects
            .iter()
            .map(|(key, kept)| (key.clone(), Arc::clone(&kept.object)))
            .collect()
    }

    /// How many objects there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.read().objects.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Every change from now on, preceded by one change for each object that is there already.
    #[must_use]
    pub fn subscribe(&self) -> mpsc::UnboundedReceiver<Change<T>> {
        let (tx, rx) = mpsc::unbounded_channel();
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        for (key, kept) in &state.objects {
            // The receiver is in our hands, so the send cannot fail.
            let _ = tx.send(Change {
                key: key.clone(),
                old: None,
                new: Some(Arc::clone(&kept.object)),
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
    pub async fn synced(&self) {
        // The sender lives in the watch task; when that is gone the process is ending.
        let _ = self.synced.clone().wait_for(|synced| *synced).await;
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, State<T>> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(any(test, feature = "testing"))]
impl<T> Mirror<T> {
    /// A mirror that holds these for ever.
    pub fn of(objects: impl IntoIterator<Item = (Key, T)>) -> Self {
        let objects = objects.into_iter().map(|(key, object)| {
            let object = Arc::new(object);
            (key, Kept { object, bytes: 0 })
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

/// A mirror of what `api` and `selected` select (labels, fields, objects per page), as `project` sees it (`None` leaves
/// an object out), and the task that keeps it up to date. The task never ends: what fails is tried again, after 0.2 s at
/// first and 30 s at most, or when the API server asks for it. `watch` is told how it goes, and `events` of objects that
/// cannot be read.
pub(super) fn mirror<R, T, F>(
    api: Api<R::Kind>,
    selected: ListParams,
    events: Option<Events>,
    watch: Option<Watch>,
    project: F,
) -> (Mirror<T>, BoxFuture<'static, ()>)
where
    R: Form + DeserializeOwned + 'static,
    T: PartialEq + Send + Sync + 'static,
    F: Fn(R) -> Option<T> + Send + 'static,
{
    let state = Arc::new(RwLock::new(State::new()));
    let (synced_tx, synced) = watch::channel(false);
    let mirror = Mirror {
        state: Arc::clone(&state),
        synced,
    };
    let store = Box::new(Intake {
        keeper: Keeper {
            state,
            project,
            seen: HashSet::new(),
        },
        events,
        form: PhantomData::<fn() -> R>,
    });
    // Boxed, for it is large, and often part of another future.
    let task = Box::pin(Follower::new(api, selected, store, synced_tx, watch).run());
    (mirror, task)
}

/// What the objects of a list and its watches are written into, as the API server sends them. One [`Follower`] serves all
/// kinds.
trait Store: Send {
    /// A list begins.
    fn begin_list(&mut self);
    /// The list in progress has this object.
    fn listed(&mut self, text: &RawValue) -> serde_json::Result<()>;
    /// The list is complete: what was not in it has gone.
    fn end_list(&mut self);
    /// An object has come or changed; its version.
    fn put(&mut self, text: &RawValue) -> serde_json::Result<Option<String>>;
    /// An object has gone; its version.
    fn remove(&mut self, text: &RawValue) -> serde_json::Result<Option<String>>;
    /// Length of all objects that are kept, as the API server sent them.
    fn bytes(&self) -> usize;
}

/// Reads objects as an `R`, and says of those that cannot be taken in.
struct Intake<R, T, F> {
    keeper: Keeper<T, F>,
    events: Option<Events>,
    form: PhantomData<fn() -> R>,
}

impl<R: Form, T, F> Intake<R, T, F> {
    fn check(&self, named: &Named, taken: Result<(), Panicked>) {
        if let Err(panic) = taken {
            named.unreadable::<R>(
                self.events.as_ref(),
                &format!("cannot process this object, so it counts as it was until it is changed: {panic}"),
            );
        }
    }
}

impl<R, T, F> Store for Intake<R, T, F>
where
    R: Form + DeserializeOwned,
    T: PartialEq + Send + Sync,
    F: Fn(R) -> Option<T> + Send,
{
    fn begin_list(&mut self) {
        self.keeper.begin_list();
    }

    fn listed(&mut self, text: &RawValue) -> serde_json::Result<()> {
        let object: Readable<R> = serde_json::from_str(text.get())?;
        let (key, named, bytes) = (object.key(), object.named(), object.bytes());
        let taken = self.keeper.listed(key, object.read(self.events.as_ref()), bytes);
        self.check(&named, taken);
        Ok(())
    }

    fn end_list(&mut self) {
        self.keeper.end_list();
    }

    fn put(&mut self, text: &RawValue) -> serde_json::Result<Option<String>> {
        let object: Readable<R> = serde_json::from_str(text.get())?;
        let (key, named, bytes) = (object.key(), object.named(), object.bytes());
        let version = object.version();
        let taken = self.keeper.put(key, object.read(self.events.as_ref()), bytes);
        self.check(&named, taken);
        Ok(version)
    }

    fn remove(&mut self, text: &RawValue) -> serde_json::Result<Option<String>> {
        let object: Readable<R> = serde_json::from_str(text.get())?;
        self.keeper.set(object.key(), None, 0);
        Ok(object.version())
    }

    fn bytes(&self) -> usize {
        self.keeper.bytes()
    }
}

/// Applies watch events to the state.
struct Keeper<T, F> {
    state: Arc<RwLock<State<T>>>,
    project: F,
    /// The keys of the list in progress; what is not among them at its end has gone meanwhile.
    seen: HashSet<Key>,
}

impl<T: PartialEq, F> Keeper<T, F> {
    /// A list begins.
    fn begin_list(&mut self) {
        self.seen.clear();
    }

    /// The list in progress has this object.
    fn listed<K>(&mut self, key: Key, object: Option<K>, bytes: usize) -> Result<(), Panicked>
    where
        F: Fn(K) -> Option<T>,
    {
        self.seen.insert(key.clone());
        self.put(key, object, bytes)
    }

    /// The list is complete: what was not in it has gone.
    fn end_list(&mut self) {
        let gone: Vec<Key> = {
            let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
            state
                .objects
                .keys()
                .filter(|key| !self.seen.contains(key))
                .cloned()
                .collect()
        };
        for key in gone {
            self.set(key, None, 0);
        }
        self.seen = HashSet::new();
    }

    /// An object of that length has come or changed; `None` where it cannot be read. After a panic what was known of it
    /// stays: it is there, and nobody may hear that it has gone.
    fn put<K>(&self, key: Key, object: Option<K>, bytes: usize) -> Result<(), Panicked>
    where
        F: Fn(K) -> Option<T>,
    {
        let projected = match object {
            Some(object) => isolated_now("watch", &key, || (self.project)(object))?,
            None => None,
        };
        self.set(key, projected, bytes);
        Ok(())
    }

    /// Stores the object and tells the subscribers, unless nothing that we keep has changed.
    fn set(&self, key: Key, object: Option<T>, bytes: usize) {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        let (old, before) = match state.objects.get(&key) {
            Some(kept) => (Some(Arc::clone(&kept.object)), kept.bytes),
            None => (None, 0),
        };
        let after = object.as_ref().map_or(0, |_| bytes);
        state.bytes = state.bytes.saturating_sub(before).saturating_add(after);
        if old.as_deref() == object.as_ref() {
            if let Some(kept) = state.objects.get_mut(&key) {
                kept.bytes = after;
            }
            return;
        }
        let new = object.map(Arc::new);
        match &new {
            Some(new) => {
                let object = Arc::clone(new);
                state.objects.insert(key.clone(), Kept { object, bytes });
            }
            None => drop(state.objects.remove(&key)),
        }
        let change = Change { key, old, new };
        state.subscribers.retain(|tx| tx.send(change.clone()).is_ok());
    }

    /// Length of all objects that are kept, as the API server sent them.
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

    /// What is known of the object stays, and nothing is told, in a list and in a watch.
    #[test]
    fn an_object_whose_projection_panics_is_not_reported_gone() {
        let state = Arc::new(RwLock::new(State::new()));
        let (_tx, synced) = watch::channel(false);
        let mirror = Mirror {
            state: Arc::clone(&state),
            synced,
        };
        let mut keeper = Keeper {
            state,
            seen: HashSet::new(),
            project: |o: ConfigMap| o.data.unwrap().remove("v"),
        };
        let bad = |name: &str| {
            let mut object = config_map(name, "");
            object.data = None;
            object
        };
        let mut results = Vec::new();
        let mut changes = mirror.subscribe();
        for list in [
            [config_map("a", "1"), bad("never"), config_map("b", "1")],
            [bad("a"), bad("never"), config_map("b", "1")],
        ] {
            keeper.begin_list();
            for object in list {
                results.push(keeper.listed(Key::of(&object), Some(object), 1).is_ok());
            }
            keeper.end_list();
        }
        results.push(keeper.put(Key::cluster("a"), Some(bad("a")), 1).is_ok());
        assert_eq!(results, [true, false, true, false, false, true, false]);
        let known = |name: &str| mirror.get(&Key::cluster(name)).map(|known| (*known).clone());
        assert_eq!(known("a").as_deref(), Some("1"));
        assert_eq!((known("never"), mirror.len()), (None, 2));
        let told = std::iter::from_fn(|| changes.try_recv().ok());
        assert_eq!(told.filter(|change| change.new.is_none()).count(), 0);
        assert!(
            keeper
                .put(Key::cluster("a"), Some(config_map("a", "2")), 1)
                .is_ok()
        );
        assert_eq!(known("a").as_deref(), Some("2"), "once it can be read");
        keeper.set(Key::cluster("a"), None, 0);
        assert_eq!(known("a"), None, "once it has gone");
    }

    #[test]
    fn a_new_list_tells_of_changes_and_of_what_has_gone() {
        let state = Arc::new(RwLock::new(State::new()));
        let (_tx, synced) = watch::channel(false);
        let mirror = Mirror {
            state: Arc::clone(&state),
            synced,
        };
        let mut keeper = Keeper {
            state,
            seen: HashSet::new(),
            project: |o: ConfigMap| o.data.and_then(|mut d| d.remove("v")),
        };
        let mut changes = mirror.subscribe();
        let lists = [
            (vec![("a", "1", 10), ("b", "1", 20)], 30),
            (vec![("a", "1", 15), ("c", "1", 30)], 45),
            (vec![("c", "2", 5)], 5),
        ];
        for (list, bytes) in lists {
            keeper.begin_list();
            for (name, value, bytes) in list {
                let object = Some(config_map(name, value));
                keeper.listed(Key::cluster(name), object, bytes).unwrap();
            }
            keeper.end_list();
            assert_eq!(keeper.bytes(), bytes);
        }
        let mut told = Vec::new();
        while let Ok(change) = changes.try_recv() {
            told.push(format!(
                "{} {:?}→{:?}",
                change.key,
                change.old.as_deref(),
                change.new.as_deref()
            ));
        }
        let want = [
            "a None→Some(\"1\")",
            "b None→Some(\"1\")",
            "c None→Some(\"1\")",
            "b Some(\"1\")→None",
            "c Some(\"1\")→Some(\"2\")",
            "a Some(\"1\")→None",
        ];
        assert_eq!(told, want);
        assert_eq!(mirror.len(), 1);
    }
}

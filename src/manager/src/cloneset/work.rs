//! What a pass over one CloneSet works with.

use std::hash::RandomState;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use k8s_openapi::NamespaceResourceScope;
use kube::{Api, Resource};
use tokio::sync::Semaphore;

use super::memory::Memories;
use super::observe::{Index, set_at};
use super::plan::Switches;
use crate::Context;
use crate::view::CloneSetView;
use kruise_api::cloneset::CloneSet;
use kruise_api::owner::Owner;
use kruise_cluster::{Error, Key, write};

/// What all passes share.
pub struct Shared {
    pub ctx: Context,
    pub index: Mutex<Index>,
    pub memories: Memories,
    pub writes: Semaphore,
    pub switches: Switches,
    pub chance: RandomState,
}

/// One CloneSet, and the means to work on it.
pub struct Work<'a> {
    pub shared: &'a Shared,
    pub ctx: &'a Context,
    pub writes: &'a Semaphore,
    pub name: &'a Key,
    pub set: &'a Arc<CloneSet>,
    /// The CloneSet as the owner of what belongs to it.
    pub owner: Owner,
    /// What the index calls it.
    pub group: String,
}

impl Shared {
    pub fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Work<'_> {
    pub fn index(&self) -> MutexGuard<'_, Index> {
        self.shared.index()
    }

    /// Whether the spec is still the one that this pass is about.
    pub fn current(&self) -> bool {
        let index = self.index();
        let now = index.sets.get(self.name).map(|set| &set.metadata);
        let then = &self.set.metadata;
        now.is_some_and(|now| now.generation == then.generation && now.uid == then.uid)
    }

    pub fn namespace(&self) -> &str {
        self.name.namespace.as_deref().unwrap_or_default()
    }

    /// The key of another object of its namespace.
    pub fn key(&self, name: &str) -> Key {
        Key::namespaced(self.namespace(), name)
    }

    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.ctx.cluster.client.clone(), self.namespace())
    }

    /// Takes note of the CloneSet as a write of ours returned it.
    pub fn keep_set(&self, stored: CloneSet) {
        let at = set_at(Arc::new(CloneSetView::from(&stored)));
        self.index().sets.wrote(self.name, at, Instant::now());
    }

    /// Whether the API server itself knows the CloneSet, and that it stays.
    ///
    /// # Errors
    /// When it does not say.
    pub async fn alive(&self) -> Result<bool, Error> {
        let set = write::get(&self.api::<CloneSet>(), &self.name.name).await?;
        Ok(set.is_some_and(|set| {
            set.metadata.deletion_timestamp.is_none()
                && set.metadata.uid.as_deref() == Some(self.owner.uid.as_str())
        }))
    }
}

//! What a pass over one CloneSet works with.

use std::hash::RandomState;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use k8s_openapi::NamespaceResourceScope;
use kube::{Api, Resource};
use tokio::sync::Semaphore;

use super::observe::{Index, versioned_clone_set};
use super::plan::Features;
use super::reconcile_state::ReconcileStates;
use crate::Context;
use crate::view::CloneSetView;
use kruise_api::cloneset::CloneSet;
use kruise_api::owner::Owner;
use kruise_cluster::{Error, Key, write};

/// What all passes share.
pub struct ControllerState {
    pub manager: Context,
    pub index: Mutex<Index>,
    pub states: ReconcileStates,
    pub write_permits: Semaphore,
    pub features: Features,
    pub rng_seed: RandomState,
}

/// One CloneSet, and the means to work on it.
pub struct CloneSetContext<'a> {
    pub shared: &'a ControllerState,
    pub manager: &'a Context,
    pub write_permits: &'a Semaphore,
    pub name: &'a Key,
    pub set: &'a Arc<CloneSet>,
    /// The CloneSet as the owner of what belongs to it.
    pub owner: Owner,
    /// What the index calls it.
    pub group: String,
}

impl ControllerState {
    pub fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CloneSetContext<'_> {
    pub fn index(&self) -> MutexGuard<'_, Index> {
        self.shared.index()
    }

    /// Whether the spec is still the one that this pass is about.
    pub fn is_current(&self) -> bool {
        let index = self.index();
        let cached = index.sets.get(self.name).map(|set| &set.metadata);
        let reconciled = &self.set.metadata;
        cached.is_some_and(|now| now.generation == reconciled.generation && now.uid == reconciled.uid)
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
        Api::namespaced(self.manager.cluster.client.clone(), self.namespace())
    }

    /// Takes note of the CloneSet as a write of ours returned it.
    pub fn cache_clone_set(&self, stored: CloneSet) {
        let entry = versioned_clone_set(Arc::new(CloneSetView::from(&stored)));
        self.index().sets.apply_write(self.name, entry, Instant::now());
    }

    /// Whether the API server itself knows the CloneSet, and that it stays.
    ///
    /// # Errors
    /// When it does not say.
    pub async fn owner_exists(&self) -> Result<bool, Error> {
        let set = write::get(&self.api::<CloneSet>(), &self.name.name).await?;
        Ok(set.is_some_and(|set| {
            set.metadata.deletion_timestamp.is_none()
                && set.metadata.uid.as_deref() == Some(self.owner.uid.as_str())
        }))
    }
}

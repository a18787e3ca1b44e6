//! The context of reconciling one CloneSet.

use std::hash::RandomState;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use k8s_openapi::NamespaceResourceScope;
use kube::{Api, Resource};
use tokio::sync::Semaphore;

use super::observe::{Index, clone_set_group, versioned_clone_set};
use super::plan::Features;
use super::reconcile_state::{MAX_CONCURRENT_WRITES, ReconcileStates};
use crate::view::CloneSetView;
use crate::{Context, FeatureGate, FeatureGates};
use kruise_api::cloneset::CloneSet;
use kruise_api::owner::Owner;
use kruise_cluster::write_cache::Written;
use kruise_cluster::{Error, Key, write};
use kruise_workload::in_place::normalize::TemplateStorage;

/// State shared by all reconciles.
pub struct ControllerState {
    pub manager: Context,
    pub index: Mutex<Index>,
    pub states: ReconcileStates,
    pub write_permits: Semaphore,
    pub features: Features,
    pub rng_seed: RandomState,
}

/// One CloneSet with the clients and state to reconcile it.
pub struct CloneSetContext<'a> {
    pub shared: &'a ControllerState,
    pub manager: &'a Context,
    pub write_permits: &'a Semaphore,
    pub name: &'a Key,
    pub set: &'a Arc<CloneSet>,
    /// The owner that its objects refer to.
    pub owner: Owner,
    /// Its group key in the index.
    pub group: String,
}

impl ControllerState {
    pub fn new(manager: Context) -> Self {
        let features = Features {
            exclude_preparing_delete: manager.options.cloneset_scaling_exclude_preparing_delete,
            ..features(&manager.options.feature_gates)
        };
        Self {
            index: Mutex::default(),
            states: ReconcileStates::default(),
            write_permits: Semaphore::new(MAX_CONCURRENT_WRITES),
            features,
            rng_seed: RandomState::new(),
            manager,
        }
    }

    pub fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<'a> CloneSetContext<'a> {
    pub fn new(shared: &'a ControllerState, name: &'a Key, set: &'a Arc<CloneSet>) -> Self {
        Self {
            shared,
            manager: &shared.manager,
            write_permits: &shared.write_permits,
            name,
            set,
            owner: Owner::clone_set(&set.metadata),
            group: clone_set_group(&set.metadata),
        }
    }
}

impl CloneSetContext<'_> {
    pub fn index(&self) -> MutexGuard<'_, Index> {
        self.shared.index()
    }

    /// Whether the spec has not changed since the reconcile began.
    pub fn is_current(&self) -> bool {
        let index = self.index();
        let cached = index.sets.get(self.name).map(|set| &set.metadata);
        let reconciled = &self.set.metadata;
        cached.is_some_and(|now| now.generation == reconciled.generation && now.uid == reconciled.uid)
    }

    pub fn namespace(&self) -> &str {
        self.name.namespace.as_deref().unwrap_or_default()
    }

    /// The key of another object in its namespace.
    pub fn key(&self, name: &str) -> Key {
        Key::namespaced(self.namespace(), name)
    }

    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.manager.cluster.client.clone(), self.namespace())
    }

    /// Caches the CloneSet that one of our writes returned.
    pub fn cache_clone_set(&self, stored: CloneSet) {
        let entry = versioned_clone_set(Arc::new(CloneSetView::from(&stored)));
        let now = Instant::now();
        self.index()
            .sets
            .apply_write(self.name, entry, Written::Changed, now);
    }

    /// Whether the CloneSet exists and is not terminating, by a live read.
    ///
    /// # Errors
    /// If the API server does not answer.
    pub async fn owner_exists(&self) -> Result<bool, Error> {
        let set = write::get(&self.api::<CloneSet>(), &self.name.name).await?;
        Ok(set.is_some_and(|set| {
            set.metadata.deletion_timestamp.is_none()
                && set.metadata.uid.as_deref() == Some(self.owner.uid.as_str())
        }))
    }
}

/// The features that the gates enable.
fn features(gates: &FeatureGates) -> Features {
    Features {
        short_hash: gates.enabled(FeatureGate::CloneSetShortHash),
        partition_rollback: gates.enabled(FeatureGate::CloneSetPartitionRollback),
        preparing_update_as_update: gates.enabled(FeatureGate::PreparingUpdateAsUpdate),
        recreate_for_claims: gates.enabled(FeatureGate::RecreatePodWhenChangeVCTInCloneSetGate),
        env_from_metadata: gates.enabled(FeatureGate::InPlaceUpdateEnvFromMetadata),
        vertical: gates.enabled(FeatureGate::InPlaceWorkloadVerticalScaling),
        pre_download: gates.enabled(FeatureGate::PreDownloadImageForInPlaceUpdate),
        template_storage: TemplateStorage::from_gate(gates.enabled(FeatureGate::TemplateNoDefaults)),
        exclude_preparing_delete: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_features_match_openkruise() {
        let expected = Features {
            short_hash: false,
            partition_rollback: false,
            preparing_update_as_update: false,
            recreate_for_claims: false,
            env_from_metadata: true,
            vertical: false,
            pre_download: false,
            template_storage: TemplateStorage::WithDefaults,
            exclude_preparing_delete: false,
        };
        assert_eq!(features(&FeatureGates::default()), expected);
    }
}

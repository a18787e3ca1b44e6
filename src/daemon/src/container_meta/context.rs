//! What all reconciles share, and what is remembered of each Pod.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::error::Error;
use super::plan::{HookProgress, PodMetaState};
use crate::Context;
use crate::pods::{DesiredContainer, NodePod};
use kruise_cluster::{Key, Store};
use kruise_cri::Runtime;

/// The controller's name in logs and in liveness.
pub(super) const NAME: &str = "container meta";

/// What all reconciles share.
pub(super) struct MetaController {
    pub(super) ctx: Context,
    pub(super) pods: Store<NodePod>,
    /// Whether environment from labels and annotations is reconciled.
    pub(super) env_from_metadata: bool,
    pub(super) pod_states: Mutex<HashMap<Key, PodMetaState>>,
    pub(super) started_at: Instant,
    pub(super) queue_tx: mpsc::UnboundedSender<Key>,
}

impl MetaController {
    pub(super) fn now(&self) -> Duration {
        self.started_at.elapsed()
    }

    pub(super) fn pod_states(&self) -> MutexGuard<'_, HashMap<Key, PodMetaState>> {
        self.pod_states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn runtime(&self, scheme: &str) -> Result<Arc<dyn Runtime>, Error> {
        let runtime = self.ctx.runtimes.by_name(scheme);
        runtime.ok_or_else(|| Error::NoRuntime(scheme.to_owned()))
    }

    /// Whether the restart is still needed: the Pod has the same UID, is not terminating and is being updated, and the
    /// container's environment is not the desired one again.
    pub(super) fn restart_still_needed(&self, key: &Key, uid: &str, name: &str, id: &str) -> bool {
        let pod = self
            .pods
            .get(key)
            .filter(|pod| pod.uid == uid && !pod.terminating);
        let Some(pod) = pod else { return false };
        let Some(meta) = pod.meta.as_ref().filter(|meta| meta.updating) else {
            return false;
        };
        let desired = meta.containers.iter().find(|wanted| wanted.name == name);
        let states = self.pod_states();
        let facts = states.get(key).and_then(|state| state.facts.get(id));
        let actual = facts.and_then(|facts| facts.env_hash);
        actual.is_none() || actual != desired.map(DesiredContainer::env_hash)
    }

    pub(super) fn hook_progress(&self, key: &Key, id: &str) -> HookProgress {
        let states = self.pod_states();
        let hook = states.get(key).and_then(|state| state.hooks.get(id));
        hook.copied().unwrap_or_default()
    }

    pub(super) fn set_hook_progress(&self, key: &Key, id: &str, progress: HookProgress) {
        self.update_state(key, |state| {
            state.hooks.insert(id.to_owned(), progress);
        });
    }

    /// Changes the state of a Pod, if the Pod still has one.
    pub(super) fn update_state(&self, key: &Key, update: impl FnOnce(&mut PodMetaState)) {
        if let Some(memory) = self.pod_states().get_mut(key) {
            update(memory);
        }
    }
}

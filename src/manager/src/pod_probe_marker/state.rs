//! What all reconciles share.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::mpsc;

use super::observe::{Index, Work};
use super::plan::{Part, PodChange, Results};
use crate::Context;
use crate::status_pacer::StatusPacer;
use kruise_api::node_pod_probe::NodePodProbe;
use kruise_api::pod_probe_marker::PodProbeMarker;
use kruise_cluster::{Key, Store};

/// What all reconciles share.
pub struct ControllerState {
    pub manager: Context,
    pub markers: Store<PodProbeMarker>,
    pub node_pod_probes: Store<NodePodProbe>,
    /// What is to be reconciled.
    pub work: mpsc::UnboundedSender<Work>,
    pub index: Mutex<Index>,
    /// For each Pod, the results and markers that its marks are of.
    pub applied: Mutex<HashMap<Key, Results>>,
    /// Marks of Pods that the API server refuses.
    pub refused: Mutex<HashMap<(Key, Part), RefusedMarks>>,
    /// Pods that are being marked, and how often at once.
    pub being_marked: Mutex<HashMap<Key, usize>>,
    /// UIDs of PodProbeMarkers that are being deleted, and of Pods from which their marks are removed.
    pub unmarked_pods: Mutex<HashMap<Key, HashSet<(String, String)>>>,
    /// When the status of each PodProbeMarker was written.
    pub pacers: Mutex<HashMap<Key, StatusPacer>>,
}

impl ControllerState {
    pub fn new(
        manager: Context,
        markers: Store<PodProbeMarker>,
        node_pod_probes: Store<NodePodProbe>,
        work: mpsc::UnboundedSender<Work>,
    ) -> Arc<Self> {
        let index = Index::new(&manager.options.feature_gates);
        Arc::new(Self {
            manager,
            markers,
            node_pod_probes,
            work,
            index: Mutex::new(index),
            applied: Mutex::default(),
            refused: Mutex::default(),
            being_marked: Mutex::default(),
            unmarked_pods: Mutex::default(),
            pacers: Mutex::default(),
        })
    }

    pub fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn pacers(&self) -> MutexGuard<'_, HashMap<Key, StatusPacer>> {
        self.pacers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn unmarked_pods(&self) -> MutexGuard<'_, HashMap<Key, HashSet<(String, String)>>> {
        self.unmarked_pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn applied(&self) -> MutexGuard<'_, HashMap<Key, Results>> {
        self.applied.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a Pod is being marked, until the guard is dropped; its PodProbeMarkers are read after this. The
    /// removal of a deleted one waits for the guard, because they may have been read before the deletion.
    pub fn begin_marking(&self, key: &Key) -> MarkingGuard<'_> {
        *self.being_marked().entry(key.clone()).or_default() += 1;
        MarkingGuard {
            shared: self,
            key: key.clone(),
        }
    }

    pub fn is_being_marked(&self, key: &Key) -> bool {
        self.being_marked().contains_key(key)
    }

    pub fn being_marked(&self) -> MutexGuard<'_, HashMap<Key, usize>> {
        self.being_marked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn refused(&self) -> MutexGuard<'_, HashMap<(Key, Part), RefusedMarks>> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A Pod is being marked, also if the reconcile is cancelled meanwhile.
pub struct MarkingGuard<'a> {
    shared: &'a ControllerState,
    key: Key,
}

impl Drop for MarkingGuard<'_> {
    fn drop(&mut self) {
        let mut all = self.shared.being_marked();
        if let Some(count) = all.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.key);
            }
        }
    }
}

/// A part of the marks of a Pod that the API server has refused.
pub struct RefusedMarks {
    pub change: PodChange,
    /// Number of refusals before the last one.
    pub refusals: u32,
    pub retry_at: Instant,
}

impl RefusedMarks {
    /// Whether it is the same. The messages and times of conditions do not count: each result may have others.
    pub fn is_of(&self, change: &PodChange) -> bool {
        self.change.condition_states().eq(change.condition_states())
            && self.change.labels == change.labels
            && self.change.annotations == change.annotations
    }
}

//! What all reconciles share.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::index::{Index, WorkloadKey};
use crate::Context;
use kruise_api::unconfirmed::Unconfirmed;
use kruise_cluster::Key;
use kruise_ops::metrics::metrics;

/// Name in logs and metrics.
pub const NAME: &str = "enhancedliveness";

/// What all reconciles share.
pub struct ControllerState {
    pub manager: Context,
    pub index: Mutex<Index>,
    /// The containers whose restart waits, by UID of the Pod and container ID: each has had its event.
    pub waiting: Mutex<BTreeMap<WorkloadKey, BTreeSet<(String, String)>>>,
    /// UIDs of the Pods whose annotation has had an event, because a part of it cannot be used.
    pub reported: Mutex<BTreeMap<WorkloadKey, BTreeSet<String>>>,
    /// Requests that were created and that the watch has not shown yet, by Pod.
    pub unconfirmed: Mutex<HashMap<Key, Unconfirmed<Key>>>,
    /// Until when restarts that were refused are not tried again, by UID of the Pod and container ID: the budget is for
    /// others until then.
    pub refused: Mutex<HashMap<(String, String), Instant>>,
    pub started_at: Instant,
}

impl ControllerState {
    pub fn new(manager: Context) -> Self {
        Self {
            manager,
            index: Mutex::default(),
            waiting: Mutex::default(),
            reported: Mutex::default(),
            unconfirmed: Mutex::default(),
            refused: Mutex::default(),
            started_at: Instant::now(),
        }
    }
}

impl Drop for ControllerState {
    /// A former leader makes no restart wait.
    fn drop(&mut self) {
        metrics().liveness_restarts_waiting.set(0);
    }
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

//! What all reconciles share, and what is kept of a job between them.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::observe::Index;
use crate::Context;
use crate::status_pacer::StatusPacer;
use kruise_cluster::Key;

/// What all reconciles share.
pub struct ControllerState {
    pub manager: Context,
    pub index: Mutex<Index>,
    pub states: Mutex<HashMap<Key, Arc<tokio::sync::Mutex<ListState>>>>,
}

/// What is kept of a job between reconciles.
#[derive(Default)]
pub struct ListState {
    pub uid: String,
    pub status_pacer: StatusPacer,
    /// Images whose ImagePullJob could not be created.
    pub refused: BTreeMap<String, Refusal>,
}

/// Why an ImagePullJob could not be created.
pub struct Refusal {
    /// Generation of the spec.
    pub generation: Option<i64>,
    pub message: String,
    pub retry_at: Instant,
}

impl ControllerState {
    pub fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn states(&self) -> MutexGuard<'_, HashMap<Key, Arc<tokio::sync::Mutex<ListState>>>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

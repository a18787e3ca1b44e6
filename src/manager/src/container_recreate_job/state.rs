//! What all reconciles share, and what is kept of a job between them.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::observe::Index;
use super::plan::Memory;
use crate::Context;
use crate::status_pacer::StatusPacer;
use kruise_api::owner::OwnerKind;
use kruise_cluster::Key;

/// What all reconciles share.
pub struct ControllerState {
    pub manager: Context,
    pub index: Mutex<Index>,
    pub states: Mutex<HashMap<Key, Arc<tokio::sync::Mutex<JobState>>>>,
}

/// What is kept of a job between reconciles.
#[derive(Default)]
pub struct JobState {
    pub uid: String,
    pub status_pacer: StatusPacer,
    pub memory: Memory,
    /// Names of requests whose creation had no answer.
    pub unknown: BTreeSet<String>,
    pub workload: Option<Workload>,
    /// When the workload and the Pods were read last before the end of the job, if it could not end.
    pub looked_at: Option<Instant>,
}

impl ControllerState {
    pub fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn states(&self) -> MutexGuard<'_, HashMap<Key, Arc<tokio::sync::Mutex<JobState>>>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The workload of a job, and the controllers of its Pods.
#[derive(Clone, Debug, Default)]
pub struct Workload {
    pub uid: String,
    /// Kind and UID of the controllers of its Pods.
    pub owners: BTreeSet<(OwnerKind, Box<str>)>,
    /// UIDs of ReplicaSets that were looked for.
    pub known: BTreeSet<Box<str>>,
}

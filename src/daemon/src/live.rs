//! What the daemon is doing right now, as the node control API shows it.
//!
//! Each duty replaces its list whenever something in it changes; nobody has to listen.

use jiff::Timestamp;
use tokio::sync::watch;

/// The duties' present state; clones share it.
#[derive(Clone, Debug, Default)]
pub struct LiveState {
    /// The image pulls that the node was asked for.
    pub pulls: watch::Sender<Vec<PullStatus>>,
    /// The container recreate requests that are not over.
    pub recreates: watch::Sender<Vec<RecreateStatus>>,
    /// The containers that are restarted for their environment.
    pub restarts: watch::Sender<Vec<RestartStatus>>,
    /// The container runtimes.
    pub runtimes: watch::Sender<Vec<RuntimeStatus>>,
}

/// One image pull.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PullStatus {
    /// The full reference, with tag or digest.
    pub image: String,
    /// Where it stands.
    pub phase: PullPhase,
    /// `namespace/name` of the jobs that asked for it.
    pub owners: Vec<String>,
    /// What it waits for, in words.
    pub waits_for: Option<String>,
    /// Bytes that have arrived.
    pub bytes_done: u64,
    /// Bytes in all, as far as that is known.
    pub bytes_total: Option<u64>,
    /// Bytes a second over the last seconds.
    pub bytes_per_second: Option<u64>,
    /// The number of the attempt, from 1; 0 before the first.
    pub attempt: u32,
    /// When the pull began, in the API server's time.
    pub started_at: Option<Timestamp>,
    /// When it succeeded or was given up, in the API server's time.
    pub ended_at: Option<Timestamp>,
    /// The last error, or what happened.
    pub message: String,
}

impl PullStatus {
    /// Seconds until the end at the present speed.
    #[must_use]
    pub fn seconds_left(&self) -> Option<u64> {
        let speed = self.bytes_per_second.filter(|s| *s > 0)?;
        Some(self.bytes_total?.saturating_sub(self.bytes_done).div_ceil(speed))
    }
}

/// Where a pull stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PullPhase {
    /// It has not begun.
    #[default]
    Waiting,
    /// The runtime pulls, or the next attempt is due.
    Pulling,
    /// The image is on the node.
    Succeeded,
    /// It was given up.
    Failed,
}

/// One container recreate request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecreateStatus {
    /// The namespace of request and Pod.
    pub namespace: String,
    /// The request's name.
    pub name: String,
    /// The Pod's name.
    pub pod: String,
    /// The request's phase, as in its status.
    pub phase: String,
    /// What it waits for, in words.
    pub waits_for: Option<String>,
    /// Its containers in the order of the request.
    pub containers: Vec<RecreateContainerStatus>,
    /// When this process first saw it.
    pub first_seen_at: Option<Timestamp>,
    /// When it ends whatever happens.
    pub deadline: Option<Timestamp>,
}

/// One container of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecreateContainerStatus {
    /// The container's name.
    pub name: String,
    /// The step it is in.
    pub step: String,
    /// What it waits for, in words.
    pub waits_for: Option<String>,
    /// The container that is to go.
    pub old_container_id: Option<String>,
    /// The container that has taken its place.
    pub new_container_id: Option<String>,
}

/// One container that is restarted for its environment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RestartStatus {
    /// The namespace of its Pod.
    pub namespace: String,
    /// The name of its Pod.
    pub pod: String,
    /// Its own name.
    pub container: String,
    /// The container that is to go, as `RUNTIME://ID`.
    pub container_id: String,
    /// The step it is in.
    pub step: String,
    /// What it waits for, in words.
    pub waits_for: Option<String>,
}

/// One container runtime.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuntimeStatus {
    /// Its own name; empty before it has answered.
    pub name: String,
    /// Its version; empty before it has answered.
    pub version: String,
    /// Its socket.
    pub socket: String,
    /// Whether it answers.
    pub healthy: bool,
    /// In words.
    pub message: String,
}

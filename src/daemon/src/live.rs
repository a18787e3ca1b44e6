//! The current state of the daemon, as the node control API returns it.
//!
//! Each controller replaces its list whenever the list changes; a receiver is optional.

use jiff::Timestamp;
use tokio::sync::watch;

/// The controllers' current state; clones share it.
#[derive(Clone, Debug, Default)]
pub struct LiveState {
    /// The image pulls that the NodeImage lists.
    pub pulls: watch::Sender<Vec<PullStatus>>,
    /// The container recreate requests that are not completed.
    pub recreates: watch::Sender<Vec<RecreateStatus>>,
    /// The containers that are being restarted for their environment.
    pub restarts: watch::Sender<Vec<RestartStatus>>,
    /// The container runtimes.
    pub runtimes: watch::Sender<Vec<RuntimeStatus>>,
}

/// Replaces the rows of one Pod in a list with `rows`, and returns whether that changes the list.
pub fn replace_rows<R: PartialEq>(all: &mut Vec<R>, rows: Vec<R>, is_of_pod: impl Fn(&R) -> bool) -> bool {
    if all.iter().filter(|row| is_of_pod(row)).eq(&rows) {
        return false;
    }
    all.retain(|row| !is_of_pod(row));
    all.extend(rows);
    true
}

/// One image pull.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PullStatus {
    /// The full reference, with tag or digest.
    pub image: String,
    /// Phase of the pull.
    pub phase: PullPhase,
    /// The jobs that requested it, as `namespace/name`.
    pub owners: Vec<String>,
    /// What the pull waits for, as text.
    pub waits_for: Option<String>,
    /// Bytes already on the node.
    pub bytes_done: u64,
    /// Total bytes, if reported.
    pub bytes_total: Option<u64>,
    /// Transfer rate over the last seconds.
    pub bytes_per_second: Option<u64>,
    /// Number of the attempt, from 1; 0 before the first.
    pub attempt: u32,
    /// When the pull started, in the API server's time.
    pub started_at: Option<Timestamp>,
    /// When it succeeded or was given up, in the API server's time.
    pub ended_at: Option<Timestamp>,
    /// The last error or note.
    pub message: String,
}

impl PullStatus {
    /// Seconds until the end at the current transfer rate.
    #[must_use]
    pub fn seconds_left(&self) -> Option<u64> {
        let speed = self.bytes_per_second.filter(|s| *s > 0)?;
        Some(self.bytes_total?.saturating_sub(self.bytes_done).div_ceil(speed))
    }
}

/// Phase of a pull.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PullPhase {
    /// The pull has not started.
    #[default]
    Waiting,
    /// The runtime pulls, or the next attempt is pending.
    Pulling,
    /// The image is on the node.
    Succeeded,
    /// The tag was given up.
    Failed,
}

/// One container recreate request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecreateStatus {
    /// Namespace of the request and its Pod.
    pub namespace: String,
    /// The request's name.
    pub name: String,
    /// The Pod's name.
    pub pod: String,
    /// The request's phase, as in its status.
    pub phase: String,
    /// What the request waits for, as text.
    pub waits_for: Option<String>,
    /// Its containers, in the order of the request.
    pub containers: Vec<RecreateContainerStatus>,
    /// When this process first saw it.
    pub first_seen_at: Option<Timestamp>,
    /// When the request ends in any case.
    pub deadline: Option<Timestamp>,
}

/// One container of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecreateContainerStatus {
    /// The container's name.
    pub name: String,
    /// The current step.
    pub step: String,
    /// What the container waits for, as text.
    pub waits_for: Option<String>,
    /// The container to be replaced.
    pub old_container_id: Option<String>,
    /// The container that replaced it.
    pub new_container_id: Option<String>,
    /// Whether the preStop hook of the container to be replaced has ended, so that it must not run again.
    pub hook_done: bool,
}

/// A container that is being restarted for its environment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RestartStatus {
    /// The namespace of its Pod.
    pub namespace: String,
    /// The name of its Pod.
    pub pod: String,
    /// Its own name.
    pub container: String,
    /// The container to be replaced, as `RUNTIME://ID`.
    pub container_id: String,
    /// The current step.
    pub step: String,
    /// What the restart waits for, as text.
    pub waits_for: Option<String>,
    /// Whether its preStop hook has ended, so that it must not run again.
    pub hook_done: bool,
}

/// One container runtime.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RuntimeStatus {
    /// Name reported by the runtime; empty before its first answer.
    pub name: String,
    /// Version reported by the runtime; empty before its first answer.
    pub version: String,
    /// Its socket.
    pub socket: String,
    /// Whether it answers.
    pub healthy: bool,
    /// State or error of the socket, as text.
    pub message: String,
}

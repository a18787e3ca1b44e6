//! Decides for one Pod which containers to inspect, what to write and which containers to restart.
//!
//! A container is identified by its ID. The annotation's entry for an ID is valid for as long as that container
//! lives, so in a steady state there are no inspections and no writes.

#[cfg(test)]
mod fake_pod;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::pods::{
    DesiredContainer, NodePod, PodContainerMeta, PodContainerStatus, STOP_BACKOFF, bounded_seconds,
};
use kruise_api::in_place::{RuntimeContainerHashes, RuntimeContainerMeta, RuntimeContainerMetaSet};
use kruise_api::unconfirmed::Unconfirmed;

/// How long the first write for a Pod waits for containers that are still being created, so that one write
/// reports all of them.
pub const FIRST_WRITE_DELAY: Duration = Duration::from_secs(10);
/// How long kubelet has, beyond the grace period, to replace a container that it seems to be replacing anyway,
/// before we restart it because of its environment.
pub const KUBELET_REPLACE_DELAY: Duration = Duration::from_secs(3);
/// How long after a change of the environment kubelet may still compare an older version of the Pod with its
/// containers: it waits for its next check of them, once per second. A container that is stopped in this time starts
/// with its old environment, and kubelet then delays the next start by ten seconds.
pub const KUBELET_RESYNC_DELAY: Duration = Duration::from_secs(2);
/// How long a new entry of a Pod under in-place update waits for the readiness gate to become True. When the
/// annotation changes, kubelet syncs that version of the Pod, and sees a gate that changes afterwards a second later:
/// without this delay, one of twelve Pods came back a second later.
pub const GATE_DELAY: Duration = Duration::from_millis(200);

/// What the runtime reports about a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContainerFacts {
    /// Kubelet's hash of the container; 0 if kubelet set none.
    pub plain_hash: u64,
    /// The hash of its environment from labels and annotations; `None` if it cannot be determined.
    pub env_hash: Option<u64>,
}

/// Times that `env` is run in a container without end.
pub const MAX_ENV_TIMEOUTS: u32 = 3;

/// How far the preStop hook of a container is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HookProgress {
    /// How much of its grace period the container has used, once the hook has ended.
    pub used_grace: Option<Duration>,
    /// How often the runtime disconnected during the hook.
    pub interrupted: u32,
}

/// The progress of a container restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestartState {
    /// The container is being stopped, after this number of failed attempts.
    Stopping(u32),
    /// The container has stopped.
    Stopped,
    /// The stop failed this number of times; the time of the next attempt.
    Failed(u32, Duration),
}

/// The state of a Pod between reconciles. Keys are container IDs (`RUNTIME://ID`); times are those of the process's
/// own clock.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodMetaState {
    /// UID of the Pod that the state belongs to.
    pub pod_uid: String,
    /// What the runtime reported about containers.
    pub facts: BTreeMap<String, ContainerFacts>,
    /// Restarts that are in progress or have ended.
    pub restarts: BTreeMap<String, RestartState>,
    /// The preStop hooks of containers that must be restarted: a hook runs once, although the stop after it is retried.
    pub hooks: BTreeMap<String, HookProgress>,
    /// How often `env` did not end in a container. After [`MAX_ENV_TIMEOUTS`] its environment is unknown, until another
    /// one is desired.
    pub env_timeouts: BTreeMap<String, u32>,
    /// Containers that were read in this order of turns: a pass may end before the last one.
    pub read_turns: usize,
    /// Our last write that the watch has not shown yet, and when it expires.
    pub unconfirmed_write: Option<Unconfirmed<RuntimeContainerMetaSet>>,
    /// Start times of the current waits.
    pub waiting_since: WaitingSince,
    /// The desired environment of the containers; `None` until the Pod was observed.
    pub desired_environment: Option<DesiredEnvironment>,
}

/// The desired environment of a Pod's containers.
#[derive(Clone, Debug, PartialEq)]
pub struct DesiredEnvironment {
    /// The last resource version of the Pod that it was read from.
    resource_version: String,
    /// The hash for each container.
    hashes: Vec<u64>,
    /// When these hashes were first observed.
    since: Duration,
}

/// Start times of the current waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WaitingSince {
    /// The first write waits for containers that are being created.
    pub first_write: Option<Duration>,
    /// A later write waits for the readiness gate to become True.
    pub readiness_gate: Option<Duration>,
    /// A restart waits for kubelet to replace the container.
    pub kubelet_replace: BTreeMap<String, Duration>,
}

/// What to do about a Pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Containers to inspect in the runtime: name and `RUNTIME://ID`.
    pub inspect: Vec<(String, String)>,
    /// The new value of the annotation.
    pub write: Option<RuntimeContainerMetaSet>,
    /// Containers to stop so that kubelet starts them with their new environment: name and `RUNTIME://ID`.
    pub restart: Vec<(String, String)>,
    /// Replaces [`PodMetaState::waiting_since`].
    pub waiting_since: WaitingSince,
    /// When to requeue the Pod even if nothing changes.
    pub requeue_at: Option<Duration>,
}

impl Plan {
    /// Requeues the Pod at `at` or earlier.
    pub fn requeue_by(&mut self, at: Duration) {
        self.requeue_at = Some(self.requeue_at.map_or(at, |current| current.min(at)));
    }
}

/// Decides what to do about a Pod. `env_enabled` is whether environment from labels and annotations is handled.
#[must_use]
pub fn plan(
    pod: &NodePod,
    meta: &PodContainerMeta,
    state: &PodMetaState,
    env_enabled: bool,
    now: Duration,
) -> Plan {
    let mut plan = Plan::default();
    if pod.terminating || pod.terminal {
        return plan;
    }
    // Our own write counts as published until the watch shows it or the write expires.
    let unconfirmed = state
        .unconfirmed_write
        .as_ref()
        .filter(|own| !own.has_expired(now));
    if let Some(own) = unconfirmed {
        plan.requeue_by(own.expires_at());
    }
    let published = unconfirmed.map(Unconfirmed::written).or(meta.published.as_ref());
    let mut entries = Vec::new();
    for desired in &meta.containers {
        let mut previous = published.iter().flat_map(|published| &published.containers);
        let previous = previous.find(|entry| entry.name == desired.name);
        let created = created_status(pod, &desired.name);
        let entry = match created {
            Some(status) => container_meta(&mut plan, desired, status, previous, state, env_enabled),
            None => None,
        };
        if let (Some(entry), true) = (&entry, env_enabled && meta.updating) {
            let replace_delay = KUBELET_REPLACE_DELAY + bounded_seconds(pod.grace_period_seconds);
            plan_restart(
                &mut plan,
                desired,
                entry,
                (state, &meta.resource_version),
                replace_delay,
                now,
            );
        }
        // A published entry is kept until there is a newer one.
        entries.extend(entry.or_else(|| previous.cloned()));
    }
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    plan_write(&mut plan, entries, published, (pod, meta), state, now);
    plan
}

/// Kubelet's status of a container, if the container was created.
fn created_status<'a>(pod: &'a NodePod, name: &str) -> Option<&'a PodContainerStatus> {
    let status = pod.container(name)?.status.as_ref()?;
    (!status.container_id.is_empty()).then_some(status)
}

/// The entry to publish for a container: the published one of the same ID, else what the runtime reports.
fn container_meta(
    plan: &mut Plan,
    desired: &DesiredContainer,
    status: &PodContainerStatus,
    previous: Option<&RuntimeContainerMeta>,
    state: &PodMetaState,
    env_enabled: bool,
) -> Option<RuntimeContainerMeta> {
    let same = previous.filter(|old| old.container_id == status.container_id);
    if let Some(same) = same
        && (!env_enabled || same.hashes.extracted_env_from_metadata_hash != 0)
    {
        return Some(same.clone());
    }
    let Some(facts) = state.facts.get(&status.container_id) else {
        plan.inspect
            .push((desired.name.clone(), status.container_id.clone()));
        return same.cloned();
    };
    Some(RuntimeContainerMeta {
        name: desired.name.clone(),
        container_id: status.container_id.clone(),
        restart_count: status.restart_count,
        hashes: RuntimeContainerHashes {
            plain_hash: facts.plain_hash,
            extracted_env_from_metadata_hash: facts.env_hash.filter(|_| env_enabled).unwrap_or_default(),
        },
    })
}

/// Restarts a container whose environment differs from the Pod's metadata.
fn plan_restart(
    plan: &mut Plan,
    desired: &DesiredContainer,
    entry: &RuntimeContainerMeta,
    (state, resource_version): (&PodMetaState, &str),
    replace_delay: Duration,
    now: Duration,
) {
    let RuntimeContainerHashes {
        plain_hash,
        extracted_env_from_metadata_hash: current,
    } = entry.hashes;
    if current == 0 || current == desired.env_hash() {
        return;
    }
    let id = &entry.container_id;
    // Either its image has changed, so kubelet is already replacing it and its hooks must not run twice, or this
    // kubelet computes the hash in a way that we do not support. The wait goes on during a restart, for its retry.
    let replaced_at = if desired.plain_hashes.contains(&plain_hash) {
        now
    } else {
        let since = *state.waiting_since.kubelet_replace.get(id).unwrap_or(&now);
        plan.waiting_since.kubelet_replace.insert(id.clone(), since);
        since + replace_delay
    };
    let due = match state.restarts.get(id) {
        Some(RestartState::Stopping(_) | RestartState::Stopped) => return,
        Some(RestartState::Failed(_, retry_at)) => replaced_at.max(*retry_at),
        None => replaced_at,
    };
    let due = match &state.desired_environment {
        Some(environment) if environment.resource_version == resource_version => {
            due.max(environment.since + KUBELET_RESYNC_DELAY)
        }
        // There is a newer version of the Pod; the next reconcile handles it.
        _ => return,
    };
    if due <= now {
        plan.restart.push((desired.name.clone(), id.clone()));
    } else {
        plan.requeue_by(due);
    }
}

/// Plans a write, unless nothing has changed or it should wait for more changes.
fn plan_write(
    plan: &mut Plan,
    entries: Vec<RuntimeContainerMeta>,
    published: Option<&RuntimeContainerMetaSet>,
    (pod, meta): (&NodePod, &PodContainerMeta),
    state: &PodMetaState,
    now: Duration,
) {
    let same = published.is_some_and(|published| {
        let mut old_entries: Vec<_> = published.containers.iter().collect();
        old_entries.sort_by(|a, b| a.name.cmp(&b.name));
        old_entries.into_iter().eq(&entries)
    });
    if entries.is_empty() || same {
        return;
    }
    let (previous, waiting_since) = (&state.waiting_since, &mut plan.waiting_since);
    let write_delay = match published {
        Some(_) if meta.updating => Some((
            previous.readiness_gate,
            &mut waiting_since.readiness_gate,
            GATE_DELAY,
        )),
        None if has_creating_containers(pod, meta) && !meta.updating => Some((
            previous.first_write,
            &mut waiting_since.first_write,
            FIRST_WRITE_DELAY,
        )),
        _ => None,
    };
    if let Some((before, waiting, delay)) = write_delay {
        let since = before.unwrap_or(now);
        *waiting = Some(since);
        if now < since + delay {
            return plan.requeue_by(since + delay);
        }
    }
    plan.write = Some(RuntimeContainerMetaSet { containers: entries });
}

/// Whether a container is about to get its first ID.
fn has_creating_containers(pod: &NodePod, meta: &PodContainerMeta) -> bool {
    meta.containers.iter().any(|container| {
        let status = pod
            .container(&container.name)
            .and_then(|view| view.status.as_ref());
        let Some(status) = status else { return true };
        let reason = status.waiting.as_ref().map_or("", |(reason, _)| reason);
        status.container_id.is_empty() && matches!(reason, "" | "ContainerCreating" | "PodInitializing")
    })
}

impl PodMetaState {
    /// Records the start of a container restart.
    pub fn begin_restart(&mut self, id: &str) {
        let attempts = match self.restarts.get(id) {
            Some(RestartState::Failed(tries, _)) => *tries,
            _ => 0,
        };
        self.restarts
            .insert(id.to_owned(), RestartState::Stopping(attempts));
    }

    /// Records whether the container stopped.
    pub fn finish_restart(&mut self, id: String, stopped: bool, now: Duration) {
        let attempts = match self.restarts.get(&id) {
            Some(RestartState::Stopping(tries)) => *tries,
            _ => 0,
        };
        let pause = STOP_BACKOFF.delay(attempts);
        let state = if stopped {
            RestartState::Stopped
        } else {
            RestartState::Failed(attempts + 1, now + pause)
        };
        self.restarts.insert(id, state);
    }

    /// Records that the preStop hook of a container has ended elsewhere. All of its grace period is left.
    pub fn record_hook_end(&mut self, id: &str) {
        let hook = self.hooks.entry(id.to_owned()).or_default();
        hook.used_grace.get_or_insert(Duration::ZERO);
    }

    /// Records a change of the Pod.
    pub fn record_change(&mut self, pod: &NodePod, meta: &PodContainerMeta, now: Duration) {
        if self.pod_uid != pod.uid {
            *self = Self {
                pod_uid: pod.uid.clone(),
                ..Self::default()
            };
        }
        let hashes: Vec<u64> = meta.containers.iter().map(DesiredContainer::env_hash).collect();
        let unchanged = self
            .desired_environment
            .as_ref()
            .filter(|known| known.hashes == hashes);
        let since = unchanged.map_or(now, |previous| previous.since);
        if unchanged.is_none() {
            for id in std::mem::take(&mut self.env_timeouts).into_keys() {
                self.facts.remove(&id);
            }
        }
        self.desired_environment = Some(DesiredEnvironment {
            resource_version: meta.resource_version.clone(),
            hashes,
            since,
        });
    }

    /// Drops state that no longer applies to the current Pod.
    pub fn prune(&mut self, pod: &NodePod, meta: &PodContainerMeta, now: Duration) {
        if self.desired_environment.is_none() || self.pod_uid != pod.uid {
            self.record_change(pod, meta, now);
        }
        let statuses = pod.containers.iter().filter_map(|view| view.status.as_ref());
        let ids: BTreeSet<&str> = statuses.map(|status| status.container_id.as_str()).collect();
        self.facts.retain(|id, _| ids.contains(id.as_str()));
        self.env_timeouts.retain(|id, _| ids.contains(id.as_str()));
        // Nothing is left to restart where the desired environment is the actual one again.
        let containers = pod.containers.iter();
        let current = containers.filter_map(|container| {
            let id = &container.status.as_ref()?.container_id;
            let desired = meta.containers.iter().find(|one| one.name == container.name)?;
            let actual = self.facts.get(id)?.env_hash?;
            (actual == desired.env_hash()).then_some(id.as_str())
        });
        let current: BTreeSet<&str> = current.collect();
        self.hooks
            .retain(|id, _| ids.contains(id.as_str()) && !current.contains(id.as_str()));
        self.restarts
            .retain(|id, state| !matches!(state, RestartState::Failed(..)) || !current.contains(id.as_str()));
        self.restarts
            .retain(|id, state| matches!(state, RestartState::Stopping(_)) || ids.contains(id.as_str()));
        if self
            .unconfirmed_write
            .as_ref()
            .is_some_and(|own| meta.published.as_ref() == Some(own.written()))
        {
            self.unconfirmed_write = None;
        }
    }
}

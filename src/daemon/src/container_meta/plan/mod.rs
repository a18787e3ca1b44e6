//! What to ask the runtime, to write and to restart for one Pod.
//!
//! A container is known by its ID. What the annotation tells of an ID stays true for as long as that container
//! lives, so in a steady state nothing is asked and nothing is written.

#[cfg(test)]
mod fake_pod;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::pods::{DesiredContainer, NodePod, PodContainerMeta, PodContainerStatus, bounded_seconds};
use kruise_api::backoff::Backoff;
use kruise_api::in_place::{RuntimeContainerHashes, RuntimeContainerMeta, RuntimeContainerMetaSet};
use kruise_api::unconfirmed::Unconfirmed;

/// How long the first writing about a Pod waits for containers that are still being made, so that all of them
/// come in one.
pub const FIRST_WRITE_DELAY: Duration = Duration::from_secs(10);
/// How long kubelet is given, beyond the grace period, to replace a container that it seems to be replacing
/// anyway, before that is done for the environment.
pub const KUBELET_REPLACE_DELAY: Duration = Duration::from_secs(3);
/// How long kubelet may be about to compare an older version of a Pod with its containers, after its environment has
/// changed: it waits for its next look at them, which it takes every second. A container that is stopped meanwhile is
/// started with its old environment, and the next start is then held back by ten seconds.
pub const KUBELET_RESYNC_DELAY: Duration = Duration::from_secs(2);
/// How long what is new of a container that is being updated waits for the gate to be opened. Kubelet looks at a Pod
/// whose annotation changes as it was then, and so a second later at the gate that is opened after that: without this
/// wait one of twelve Pods came back a second later.
pub const GATE_DELAY: Duration = Duration::from_millis(200);
/// How long after a failed stop the runtime is asked again.
const STOP_BACKOFF: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));

/// What the runtime says of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContainerFacts {
    /// Kubelet's hash of it; 0 where kubelet has left none.
    pub plain_hash: u64,
    /// The hash of its environment from labels and annotations; none where that cannot be known.
    pub env_hash: Option<u64>,
}

/// How far the restart of a container is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestartState {
    /// It is being stopped, after so many tries that failed.
    Stopping(u32),
    /// It has stopped.
    Stopped,
    /// The runtime would not, so many times; try again then.
    Failed(u32, Duration),
}

/// What is remembered of a Pod between passes. Containers go by `RUNTIME://ID`, times by the process's own count.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodMetaState {
    /// UID of the Pod that this is about.
    pub pod_uid: String,
    /// What the runtime said of containers.
    pub facts: BTreeMap<String, ContainerFacts>,
    /// Containers that are being restarted, or were.
    pub restarts: BTreeMap<String, RestartState>,
    /// Our last write that the watch has not shown yet, and when it was made.
    pub unconfirmed_write: Option<Unconfirmed<RuntimeContainerMetaSet>>,
    /// Since when something waits.
    pub waiting_since: WaitingSince,
    /// The environment that the containers are to have; none until that was noticed.
    pub desired_environment: Option<DesiredEnvironment>,
}

/// The environment that the containers of a Pod are to have.
#[derive(Clone, Debug, PartialEq)]
pub struct DesiredEnvironment {
    /// The version of the Pod that it was read from last.
    resource_version: String,
    /// The hash for each container.
    hashes: Vec<u64>,
    /// Since when it has been so.
    since: Duration,
}

/// Since when something waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WaitingSince {
    /// The first writing, for containers that are being made.
    pub first_write: Option<Duration>,
    /// A later one, for the gate to be opened.
    pub readiness_gate: Option<Duration>,
    /// A restart, for kubelet to do it.
    pub kubelet_replace: BTreeMap<String, Duration>,
}

/// What to do about a Pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Containers that the runtime is to be asked about: name and `RUNTIME://ID`.
    pub inspect: Vec<(String, String)>,
    /// What the annotation is to say.
    pub write: Option<RuntimeContainerMetaSet>,
    /// Containers to stop so that kubelet starts them with their new environment: name and `RUNTIME://ID`.
    pub restart: Vec<(String, String)>,
    /// Replaces [`PodMetaState::waiting_since`].
    pub waiting_since: WaitingSince,
    /// When to look again although nothing has happened.
    pub requeue_at: Option<Duration>,
}

impl Plan {
    /// At the latest then.
    pub fn requeue_by(&mut self, at: Duration) {
        self.requeue_at = Some(self.requeue_at.map_or(at, |current| current.min(at)));
    }
}

/// Decides on a Pod. `env` is whether environment from labels and annotations is looked after.
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
    // Our own write counts as told until the watch shows it, or should have.
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
        // What was told stays until there is something newer to tell.
        entries.extend(entry.or_else(|| previous.cloned()));
    }
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    plan_write(&mut plan, entries, published, (pod, meta), state, now);
    plan
}

/// Kubelet's status of a container that has been made.
fn created_status<'a>(pod: &'a NodePod, name: &str) -> Option<&'a PodContainerStatus> {
    let status = pod.container(name)?.status.as_ref()?;
    (!status.container_id.is_empty()).then_some(status)
}

/// What is to be told of a container: what was told of the same ID, else what the runtime says of it.
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

/// Restarts a container whose environment is not what the Pod's metadata says.
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
    let due = match state.restarts.get(id) {
        Some(RestartState::Stopping(_) | RestartState::Stopped) => return,
        Some(RestartState::Failed(_, retry_at)) => *retry_at,
        None if desired.plain_hashes.contains(&plain_hash) => now,
        // Its image has changed, so kubelet is at it already, and its hooks must not run twice; or the kubelet
        // takes the hash in a way that we do not know.
        None => {
            let since = *state.waiting_since.kubelet_replace.get(id).unwrap_or(&now);
            plan.waiting_since.kubelet_replace.insert(id.clone(), since);
            since + replace_delay
        }
    };
    let due = match &state.desired_environment {
        Some(environment) if environment.resource_version == resource_version => {
            due.max(environment.since + KUBELET_RESYNC_DELAY)
        }
        // There is a newer version, and the next pass is about that.
        _ => return,
    };
    if due <= now {
        plan.restart.push((desired.name.clone(), id.clone()));
    } else {
        plan.requeue_by(due);
    }
}

/// Writes, unless nothing has changed, or more will be known in a moment.
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

/// Whether some container is about to get its first ID.
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
    /// Takes in that the restart of a container begins.
    pub fn begin_restart(&mut self, id: &str) {
        let attempts = match self.restarts.get(id) {
            Some(RestartState::Failed(tries, _)) => *tries,
            _ => 0,
        };
        self.restarts
            .insert(id.to_owned(), RestartState::Stopping(attempts));
    }

    /// Takes in what became of it.
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

    /// Takes in one change of the Pod.
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
        self.desired_environment = Some(DesiredEnvironment {
            resource_version: meta.resource_version.clone(),
            hashes,
            since,
        });
    }

    /// Forgets what no longer concerns the Pod as it is now.
    pub fn prune(&mut self, pod: &NodePod, meta: &PodContainerMeta, now: Duration) {
        if self.desired_environment.is_none() || self.pod_uid != pod.uid {
            self.record_change(pod, meta, now);
        }
        let statuses = pod.containers.iter().filter_map(|view| view.status.as_ref());
        let ids: BTreeSet<&str> = statuses.map(|status| status.container_id.as_str()).collect();
        self.facts.retain(|id, _| ids.contains(id.as_str()));
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

//! What to ask the runtime, to write and to restart for one Pod.
//!
//! A container is known by its ID. What the annotation tells of an ID stays true for as long as that container
//! lives, so in a steady state nothing is asked and nothing is written.

#[cfg(test)]
mod tests;
#[cfg(test)]
mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::pods::{MetaView, PodView, StatusView, Wanted, seconds};
use kruise_api::backoff::Backoff;
use kruise_api::in_place::{RuntimeContainerHashes, RuntimeContainerMeta, RuntimeContainerMetaSet};

/// How long the first writing about a Pod waits for containers that are still being made, so that all of them
/// come in one.
pub const BIRTH: Duration = Duration::from_secs(10);
/// How long kubelet is given, beyond the grace period, to replace a container that it seems to be replacing
/// anyway, before that is done for the environment.
pub const KUBELET: Duration = Duration::from_secs(3);
/// How long kubelet may be about to compare an older version of a Pod with its containers, after its environment has
/// changed: it waits for its next look at them, which it takes every second. A container that is stopped meanwhile is
/// started with its old environment, and the next start is then held back by ten seconds.
pub const SETTLE: Duration = Duration::from_secs(2);
/// How long what is new of a container that is being updated waits for the gate to be opened. Kubelet looks at a Pod
/// whose annotation changes as it was then, and so a second later at the gate that is opened after that: without this
/// wait one of twelve Pods came back a second later.
pub const GATE: Duration = Duration::from_millis(200);
/// How long our own write is waited for to come back from the watch.
pub const UNSEEN: Duration = Duration::from_secs(30);
/// How long after a failed stop the runtime is asked again.
const STOP_TRIES: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(30));

/// What the runtime says of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Kubelet's hash of it; 0 where kubelet has left none.
    pub plain_hash: u64,
    /// The hash of its environment from labels and annotations; none where that cannot be known.
    pub env_hash: Option<u64>,
}

/// How far the restart of a container is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restart {
    /// It is being stopped, after so many tries that failed.
    Running(u32),
    /// It has stopped.
    Done,
    /// The runtime would not, so many times; try again then.
    Failed(u32, Duration),
}

/// What is remembered of a Pod between passes. Containers go by `RUNTIME://ID`, times by the process's own count.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    /// UID of the Pod that this is about.
    pub pod_uid: String,
    /// What the runtime said of containers.
    pub facts: BTreeMap<String, Facts>,
    /// Containers that are being restarted, or were.
    pub restarts: BTreeMap<String, Restart>,
    /// Our last write that the watch has not shown yet, and when it was made.
    pub written: Option<(RuntimeContainerMetaSet, Duration)>,
    /// Since when something waits.
    pub waits: Waits,
    /// The environment that the containers are to have; none until that was noticed.
    pub environment: Option<Environment>,
}

/// The environment that the containers of a Pod are to have.
#[derive(Clone, Debug, PartialEq)]
pub struct Environment {
    /// The version of the Pod that it was read from last.
    version: String,
    /// The hash for each container.
    hashes: Vec<u64>,
    /// Since when it has been so.
    since: Duration,
}

/// Since when something waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// The first writing, for containers that are being made.
    pub birth: Option<Duration>,
    /// A later one, for the gate to be opened.
    pub gate: Option<Duration>,
    /// A restart, for kubelet to do it.
    pub kubelet: BTreeMap<String, Duration>,
}

/// What to do about a Pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Containers that the runtime is to be asked about: name and `RUNTIME://ID`.
    pub read: Vec<(String, String)>,
    /// What the annotation is to say.
    pub write: Option<RuntimeContainerMetaSet>,
    /// Containers to stop so that kubelet starts them with their new environment: name and `RUNTIME://ID`.
    pub restart: Vec<(String, String)>,
    /// Replaces [`Memory::waits`].
    pub waits: Waits,
    /// When to look again although nothing has happened.
    pub wake: Option<Duration>,
}

impl Plan {
    /// At the latest then.
    pub fn wake_at(&mut self, at: Duration) {
        self.wake = Some(self.wake.map_or(at, |wake| wake.min(at)));
    }
}

/// Decides on a Pod. `env` is whether environment from labels and annotations is looked after.
#[must_use]
pub fn plan(pod: &PodView, meta: &MetaView, memory: &Memory, env: bool, now: Duration) -> Plan {
    let mut plan = Plan::default();
    if pod.deleting || pod.ended {
        return plan;
    }
    // Our own write counts as told until the watch shows it, or should have.
    let own = memory.written.as_ref().filter(|(_, at)| now < *at + UNSEEN);
    if let Some((_, at)) = own {
        plan.wake_at(*at + UNSEEN);
    }
    let told = own.map(|(written, _)| written).or(meta.told.as_ref());
    let mut entries = Vec::new();
    for wanted in &meta.containers {
        let mut old = told.iter().flat_map(|told| &told.containers);
        let old = old.find(|entry| entry.name == wanted.name);
        let running = status(pod, &wanted.name);
        let entry = match running {
            Some(status) => of_container(&mut plan, wanted, status, old, memory, env),
            None => None,
        };
        if let (Some(entry), true) = (&entry, env && meta.updating) {
            let kubelet = KUBELET + seconds(pod.grace_seconds);
            look_at_environment(&mut plan, wanted, entry, (memory, &meta.version), kubelet, now);
        }
        // What was told stays until there is something newer to tell.
        entries.extend(entry.or_else(|| old.cloned()));
    }
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    say(&mut plan, entries, told, (pod, meta), memory, now);
    plan
}

/// Kubelet's status of a container that has been made.
fn status<'a>(pod: &'a PodView, name: &str) -> Option<&'a StatusView> {
    let status = pod.container(name)?.status.as_ref()?;
    (!status.container_id.is_empty()).then_some(status)
}

/// What is to be told of a container: what was told of the same ID, else what the runtime says of it.
fn of_container(
    plan: &mut Plan,
    wanted: &Wanted,
    status: &StatusView,
    old: Option<&RuntimeContainerMeta>,
    memory: &Memory,
    env: bool,
) -> Option<RuntimeContainerMeta> {
    let same = old.filter(|old| old.container_id == status.container_id);
    if let Some(same) = same
        && (!env || same.hashes.extracted_env_from_metadata_hash != 0)
    {
        return Some(same.clone());
    }
    let Some(facts) = memory.facts.get(&status.container_id) else {
        plan.read.push((wanted.name.clone(), status.container_id.clone()));
        return same.cloned();
    };
    Some(RuntimeContainerMeta {
        name: wanted.name.clone(),
        container_id: status.container_id.clone(),
        restart_count: status.restart_count,
        hashes: RuntimeContainerHashes {
            plain_hash: facts.plain_hash,
            extracted_env_from_metadata_hash: facts.env_hash.filter(|_| env).unwrap_or_default(),
        },
    })
}

/// Restarts a container whose environment is not what the Pod's metadata says.
fn look_at_environment(
    plan: &mut Plan,
    wanted: &Wanted,
    entry: &RuntimeContainerMeta,
    (memory, version): (&Memory, &str),
    kubelet: Duration,
    now: Duration,
) {
    let RuntimeContainerHashes {
        plain_hash,
        extracted_env_from_metadata_hash: current,
    } = entry.hashes;
    if current == 0 || current == wanted.env_hash() {
        return;
    }
    let id = &entry.container_id;
    let due = match memory.restarts.get(id) {
        Some(Restart::Running(_) | Restart::Done) => return,
        Some(Restart::Failed(_, again)) => *again,
        None if wanted.plain_hashes.contains(&plain_hash) => now,
        // Its image has changed, so kubelet is at it already, and its hooks must not run twice; or the kubelet
        // takes the hash in a way that we do not know.
        None => {
            let since = *memory.waits.kubelet.get(id).unwrap_or(&now);
            plan.waits.kubelet.insert(id.clone(), since);
            since + kubelet
        }
    };
    let due = match &memory.environment {
        Some(environment) if environment.version == version => due.max(environment.since + SETTLE),
        // There is a newer version, and the next pass is about that.
        _ => return,
    };
    if due <= now {
        plan.restart.push((wanted.name.clone(), id.clone()));
    } else {
        plan.wake_at(due);
    }
}

/// Writes, unless nothing has changed, or more will be known in a moment.
fn say(
    plan: &mut Plan,
    entries: Vec<RuntimeContainerMeta>,
    told: Option<&RuntimeContainerMetaSet>,
    (pod, meta): (&PodView, &MetaView),
    memory: &Memory,
    now: Duration,
) {
    let same = told.is_some_and(|told| {
        let mut told: Vec<_> = told.containers.iter().collect();
        told.sort_by(|a, b| a.name.cmp(&b.name));
        told.into_iter().eq(&entries)
    });
    if entries.is_empty() || same {
        return;
    }
    let (known, waits) = (&memory.waits, &mut plan.waits);
    let wait = match told {
        Some(_) if meta.updating => Some((known.gate, &mut waits.gate, GATE)),
        None if being_made(pod, meta) && !meta.updating => Some((known.birth, &mut waits.birth, BIRTH)),
        _ => None,
    };
    if let Some((known, wait, limit)) = wait {
        let since = known.unwrap_or(now);
        *wait = Some(since);
        if now < since + limit {
            return plan.wake_at(since + limit);
        }
    }
    plan.write = Some(RuntimeContainerMetaSet { containers: entries });
}

/// Whether some container is about to get its first ID.
fn being_made(pod: &PodView, meta: &MetaView) -> bool {
    meta.containers.iter().any(|wanted| {
        let status = pod.container(&wanted.name).and_then(|view| view.status.as_ref());
        let Some(status) = status else { return true };
        let reason = status.waiting.as_ref().map_or("", |(reason, _)| reason);
        status.container_id.is_empty() && matches!(reason, "" | "ContainerCreating" | "PodInitializing")
    })
}

impl Memory {
    /// Takes in that the restart of a container begins.
    pub fn restarting(&mut self, id: &str) {
        let tries = match self.restarts.get(id) {
            Some(Restart::Failed(tries, _)) => *tries,
            _ => 0,
        };
        self.restarts.insert(id.to_owned(), Restart::Running(tries));
    }

    /// Takes in what became of it.
    pub fn restarted(&mut self, id: String, stopped: bool, now: Duration) {
        let tries = match self.restarts.get(&id) {
            Some(Restart::Running(tries)) => *tries,
            _ => 0,
        };
        let pause = STOP_TRIES.pause(tries);
        let state = if stopped {
            Restart::Done
        } else {
            Restart::Failed(tries + 1, now + pause)
        };
        self.restarts.insert(id, state);
    }

    /// Takes in one change of the Pod.
    pub fn notice(&mut self, pod: &PodView, meta: &MetaView, now: Duration) {
        if self.pod_uid != pod.uid {
            *self = Self {
                pod_uid: pod.uid.clone(),
                ..Self::default()
            };
        }
        let hashes: Vec<u64> = meta.containers.iter().map(Wanted::env_hash).collect();
        let known = self.environment.as_ref().filter(|known| known.hashes == hashes);
        let since = known.map_or(now, |known| known.since);
        self.environment = Some(Environment {
            version: meta.version.clone(),
            hashes,
            since,
        });
    }

    /// Forgets what no longer concerns the Pod as it is now.
    pub fn look(&mut self, pod: &PodView, meta: &MetaView, now: Duration) {
        if self.environment.is_none() || self.pod_uid != pod.uid {
            self.notice(pod, meta, now);
        }
        let statuses = pod.containers.iter().filter_map(|view| view.status.as_ref());
        let ids: BTreeSet<&str> = statuses.map(|status| status.container_id.as_str()).collect();
        self.facts.retain(|id, _| ids.contains(id.as_str()));
        self.restarts
            .retain(|id, state| matches!(state, Restart::Running(_)) || ids.contains(id.as_str()));
        if self
            .written
            .as_ref()
            .is_some_and(|(written, _)| meta.told.as_ref() == Some(written))
        {
            self.written = None;
        }
    }
}

//! Fakes for the plan's tests: a Pod, its kubelet and its runtime.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;
use crate::pods::{EnvVar, PodContainer};
use kruise_api::container_hash::{env_hash, plain_hash};

/// A container of the fake Pod: its spec, and what runs.
#[derive(Clone, Debug)]
pub struct FakePodContainer {
    pub name: &'static str,
    /// Whether its environment follows the Pod's label.
    pub env_follows_label: bool,
    pub image: u8,
    /// How often it was created; 0 means not yet.
    creations: u32,
    pub created_with: (u8, u8),
}

/// A Pod, its kubelet and its runtime.
#[derive(Clone, Debug)]
pub struct FakePod {
    pub containers: Vec<FakePodContainer>,
    pub label: u8,
    pub updating: bool,
    /// A label that no environment comes from.
    pub unrelated_label: u8,
    /// Whether the runtime answers.
    runtime_answers: bool,
    /// Whether the API server accepts writes.
    api_accepts_writes: bool,
    pub published: Option<RuntimeContainerMetaSet>,
    /// The annotation that the watch will deliver.
    pub stored: Option<RuntimeContainerMetaSet>,
    pub state: PodMetaState,
    pub now: Duration,
    pub writes: usize,
    pub starts: usize,
    /// How many of our writes expired before the watch showed them.
    pub expired_writes: usize,
    pub stopped: Vec<String>,
}

fn env_hash_with(container: &FakePodContainer, label: u8) -> u64 {
    let value = label.to_string();
    env_hash(container.env_follows_label.then_some(("V", value.as_str())))
}

impl FakePodContainer {
    pub fn id(&self) -> String {
        match self.creations {
            0 => String::new(),
            made => format!("rt://{}-{made}", self.name),
        }
    }

    fn plain_hash(&self, image: u8) -> u64 {
        plain_hash(self.name, &image.to_string())
    }
}

impl FakePod {
    pub fn new(env_follows_label: &[bool]) -> Self {
        let names = ["c", "a", "b"];
        let containers = names
            .iter()
            .zip(env_follows_label)
            .map(|(&name, &follows)| FakePodContainer {
                name,
                env_follows_label: follows,
                image: 0,
                creations: 0,
                created_with: (0, 0),
            });
        Self {
            containers: containers.collect(),
            label: 0,
            updating: false,
            unrelated_label: 0,
            runtime_answers: true,
            api_accepts_writes: true,
            published: None,
            stored: None,
            state: PodMetaState::default(),
            now: Duration::ZERO,
            writes: 0,
            starts: 0,
            expired_writes: 0,
            stopped: Vec::new(),
        }
    }

    pub fn pod(&self) -> (NodePod, PodContainerMeta) {
        let views = self.containers.iter().map(|c| PodContainer {
            name: c.name.to_owned(),
            status: Some(PodContainerStatus {
                container_id: c.id(),
                restart_count: i32::try_from(c.creations).unwrap(),
                ..PodContainerStatus::default()
            }),
            ..PodContainer::default()
        });
        let desired = self.containers.iter().map(|c| DesiredContainer {
            name: c.name.to_owned(),
            plain_hashes: [c.plain_hash(c.image), 1],
            env: c
                .env_follows_label
                .then(|| EnvVar {
                    name: "V".to_owned(),
                    value: self.label.to_string(),
                    shadowed: false,
                })
                .into_iter()
                .collect(),
        });
        let pod = NodePod {
            uid: "u".to_owned(),
            grace_period_seconds: 5,
            containers: views.rev().collect(),
            ..NodePod::default()
        };
        let meta = PodContainerMeta {
            published: self.published.clone(),
            updating: self.updating,
            resource_version: self.resource_version(),
            containers: desired.collect(),
        };
        (pod, meta)
    }

    /// A different value for each state.
    fn resource_version(&self) -> String {
        let made: Vec<_> = self.containers.iter().map(|c| (c.image, c.creations)).collect();
        format!(
            "{:?}",
            (
                self.label,
                self.unrelated_label,
                made,
                self.updating,
                &self.published
            )
        )
    }

    /// A watch event for the Pod.
    pub fn record_change(&mut self) {
        let (pod, meta) = self.pod();
        self.state.record_change(&pod, &meta, self.now);
    }

    pub fn plan(&mut self) -> Plan {
        self.record_change();
        let (pod, meta) = self.pod();
        self.state.prune(&pod, &meta, self.now);
        let plan = plan(&pod, &meta, &self.state, true, self.now);
        assert_eq!(
            plan,
            super::plan(&pod, &meta, &self.state, true, self.now),
            "the same again"
        );
        self.state.waiting_since = plan.waiting_since.clone();
        plan
    }

    /// One reconcile, as the controller runs it. Returns whether it did anything, and when to requeue.
    pub fn reconcile(&mut self) -> (bool, Option<Duration>) {
        let mut plan = self.plan();
        if !plan.inspect.is_empty() && self.runtime_answers {
            for (name, id) in &plan.inspect {
                let c = self.container(name);
                assert_eq!(*id, c.id(), "only running containers are inspected");
                let facts = ContainerFacts {
                    plain_hash: c.plain_hash(c.created_with.0),
                    env_hash: Some(env_hash_with(c, c.created_with.1)),
                };
                self.state.facts.insert(id.clone(), facts);
            }
            plan = self.plan();
            assert!(plan.inspect.is_empty(), "no container is inspected twice");
        }
        let acted = !plan.restart.is_empty() || plan.write.is_some();
        for (name, id) in plan.restart {
            let c = self.container(&name);
            assert!(
                self.updating && c.env_follows_label && c.created_with.1 != self.label,
                "{name} is as it should be"
            );
            assert!(!self.stopped.contains(&id), "{id} is restarted twice");
            self.state.begin_restart(&id);
            self.state.finish_restart(id.clone(), true, self.now);
            self.stopped.push(id);
        }
        if let Some(set) = plan.write.filter(|_| self.api_accepts_writes) {
            self.check_meta(&set);
            let written = self.state.unconfirmed_write.as_ref();
            let expired = written.is_some_and(|own| *own.written() == set && own.has_expired(self.now));
            assert!(
                expired || self.stored.as_ref() != Some(&set),
                "written a second time"
            );
            // The API server creates no new version of an unchanged object.
            self.writes += usize::from(self.stored.as_ref() != Some(&set));
            self.state.unconfirmed_write = Some(Unconfirmed::new(set.clone(), self.now));
            self.stored = Some(set);
        }
        (acted, plan.requeue_at)
    }

    fn container(&self, name: &str) -> &FakePodContainer {
        self.containers.iter().find(|c| c.name == name).unwrap()
    }

    /// Everything published about running containers is true, and names are sorted.
    pub fn check_meta(&self, set: &RuntimeContainerMetaSet) {
        assert!(set.containers.is_sorted_by(|a, b| a.name < b.name), "{set:?}");
        for entry in &set.containers {
            let c = self.container(&entry.name);
            if entry.container_id == c.id() {
                let true_hashes = RuntimeContainerHashes {
                    plain_hash: c.plain_hash(c.created_with.0),
                    extracted_env_from_metadata_hash: env_hash_with(c, c.created_with.1),
                };
                assert_eq!(entry.hashes, true_hashes);
            }
        }
    }

    pub fn start_container(&mut self, index: usize) {
        let (label, len) = (self.label, self.containers.len());
        let c = &mut self.containers[index % len];
        c.creations += 1;
        c.created_with = (c.image, label);
        self.starts += 1;
    }

    pub fn apply(&mut self, event: &PodEvent) {
        match *event {
            PodEvent::Start(index) => self.start_container(index),
            PodEvent::Label(value) => self.label = value,
            PodEvent::Image(index, image) => {
                let len = self.containers.len();
                self.containers[index % len].image = image;
            }
            PodEvent::Updating(updating) => self.updating = updating,
            PodEvent::RuntimeAnswers(answers) => self.runtime_answers = answers,
            PodEvent::ApiAcceptsWrites(takes) => self.api_accepts_writes = takes,
            PodEvent::WatchUpdate => self.published = self.stored.clone(),
            PodEvent::Crash => self.state = PodMetaState::default(),
            PodEvent::Wait(seconds) => {
                self.now += Duration::from_secs(seconds);
                let expired = |own: &Unconfirmed<_>| own.has_expired(self.now);
                self.expired_writes +=
                    usize::from(self.state.unconfirmed_write.as_ref().is_some_and(expired));
            }
        }
        // After a crash, a stopped container that has no successor yet may be restarted once more; the runtime then
        // reports that it does not run.
        if matches!(event, PodEvent::Crash) {
            self.stopped.clear();
            self.published = self.stored.clone();
        }
        self.reconcile();
    }

    /// No more events happen; kubelet starts stopped containers, and recreates those with a different image.
    pub fn converge(&mut self) {
        (self.runtime_answers, self.api_accepts_writes, self.updating) = (true, true, true);
        for _ in 0..40 {
            self.published = self.stored.clone();
            for index in 0..self.containers.len() {
                let c = &self.containers[index];
                if c.creations == 0 || c.image != c.created_with.0 || self.stopped.contains(&c.id()) {
                    self.start_container(index);
                }
            }
            let (acted, requeue_at) = self.reconcile();
            if !acted && requeue_at.is_none() {
                return;
            }
            self.now = self.now.max(requeue_at.unwrap_or_default());
        }
        panic!("never at rest: {self:#?}");
    }
}

/// What happens to a fake Pod.
#[derive(Clone, Debug)]
pub enum PodEvent {
    Start(usize),
    Label(u8),
    Image(usize, u8),
    Updating(bool),
    RuntimeAnswers(bool),
    ApiAcceptsWrites(bool),
    WatchUpdate,
    Crash,
    Wait(u64),
}

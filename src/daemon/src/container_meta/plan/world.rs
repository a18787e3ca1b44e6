//! A world for the plan's tests: a Pod, its kubelet and its runtime.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;
use crate::pods::{ContainerView, Variable};
use kruise_api::container_hash::{env_hash, plain_hash};

/// A container of the world: what it is to be, and what runs.
#[derive(Clone, Debug)]
pub struct Container {
    pub name: &'static str,
    /// Whether its environment follows the Pod's label.
    pub follows: bool,
    pub image: u8,
    /// How often it was made; 0 is not yet.
    made: u32,
    pub made_with: (u8, u8),
}

/// A Pod, its kubelet and its runtime.
#[derive(Clone, Debug)]
pub struct World {
    pub containers: Vec<Container>,
    pub label: u8,
    pub updating: bool,
    /// A label that no environment comes from.
    pub note: u8,
    /// The runtime answers.
    answers: bool,
    /// The API server takes writes.
    takes: bool,
    pub told: Option<RuntimeContainerMetaSet>,
    /// What the watch will show.
    pub stored: Option<RuntimeContainerMetaSet>,
    pub memory: Memory,
    pub now: Duration,
    pub writes: usize,
    pub starts: usize,
    /// How often a write of ours was given up as unseen.
    pub lapses: usize,
    pub stopped: Vec<String>,
}

fn hash_of(container: &Container, label: u8) -> u64 {
    let value = label.to_string();
    env_hash(container.follows.then_some(("V", value.as_str())))
}

impl Container {
    pub fn id(&self) -> String {
        match self.made {
            0 => String::new(),
            made => format!("rt://{}-{made}", self.name),
        }
    }

    fn plain(&self, image: u8) -> u64 {
        plain_hash(self.name, &image.to_string())
    }
}

impl World {
    pub fn new(follows: &[bool]) -> Self {
        let names = ["c", "a", "b"];
        let containers = names.iter().zip(follows).map(|(&name, &follows)| Container {
            name,
            follows,
            image: 0,
            made: 0,
            made_with: (0, 0),
        });
        Self {
            containers: containers.collect(),
            label: 0,
            updating: false,
            note: 0,
            answers: true,
            takes: true,
            told: None,
            stored: None,
            memory: Memory::default(),
            now: Duration::ZERO,
            writes: 0,
            starts: 0,
            lapses: 0,
            stopped: Vec::new(),
        }
    }

    pub fn pod(&self) -> (PodView, MetaView) {
        let views = self.containers.iter().map(|c| ContainerView {
            name: c.name.to_owned(),
            status: Some(StatusView {
                container_id: c.id(),
                restart_count: i32::try_from(c.made).unwrap(),
                ..StatusView::default()
            }),
            ..ContainerView::default()
        });
        let wanted = self.containers.iter().map(|c| Wanted {
            name: c.name.to_owned(),
            plain_hashes: [c.plain(c.image), 1],
            env: c
                .follows
                .then(|| Variable {
                    name: "V".to_owned(),
                    value: self.label.to_string(),
                    hidden: false,
                })
                .into_iter()
                .collect(),
        });
        let pod = PodView {
            uid: "u".to_owned(),
            grace_seconds: 5,
            containers: views.rev().collect(),
            ..PodView::default()
        };
        let meta = MetaView {
            told: self.told.clone(),
            updating: self.updating,
            version: self.version(),
            containers: wanted.collect(),
        };
        (pod, meta)
    }

    /// Another one for each state.
    fn version(&self) -> String {
        let made: Vec<_> = self.containers.iter().map(|c| (c.image, c.made)).collect();
        format!("{:?}", (self.label, self.note, made, self.updating, &self.told))
    }

    /// A watch tells of the Pod.
    pub fn notice(&mut self) {
        let (pod, meta) = self.pod();
        self.memory.notice(&pod, &meta, self.now);
    }

    pub fn plan(&mut self) -> Plan {
        self.notice();
        let (pod, meta) = self.pod();
        self.memory.look(&pod, &meta, self.now);
        let plan = plan(&pod, &meta, &self.memory, true, self.now);
        assert_eq!(
            plan,
            super::plan(&pod, &meta, &self.memory, true, self.now),
            "the same again"
        );
        self.memory.waits = plan.waits.clone();
        plan
    }

    /// One pass, as the duty makes it. Returns whether anything was done, and when to look again.
    pub fn pass(&mut self) -> (bool, Option<Duration>) {
        let mut plan = self.plan();
        if !plan.read.is_empty() && self.answers {
            for (name, id) in &plan.read {
                let c = self.container(name);
                assert_eq!(*id, c.id(), "only what runs is asked about");
                let facts = Facts {
                    plain_hash: c.plain(c.made_with.0),
                    env_hash: Some(hash_of(c, c.made_with.1)),
                };
                self.memory.facts.insert(id.clone(), facts);
            }
            plan = self.plan();
            assert!(plan.read.is_empty(), "an answer is not asked for twice");
        }
        let acted = !plan.restart.is_empty() || plan.write.is_some();
        for (name, id) in plan.restart {
            let c = self.container(&name);
            assert!(
                self.updating && c.follows && c.made_with.1 != self.label,
                "{name} is as it should be"
            );
            assert!(!self.stopped.contains(&id), "{id} is restarted twice");
            self.memory.restarting(&id);
            self.memory.restarted(id.clone(), true, self.now);
            self.stopped.push(id);
        }
        if let Some(set) = plan.write.filter(|_| self.takes) {
            self.check(&set);
            let written = self.memory.written.as_ref();
            let unseen = written.is_some_and(|(written, at)| *written == set && self.now >= *at + UNSEEN);
            assert!(
                unseen || self.stored.as_ref() != Some(&set),
                "written a second time"
            );
            // The API server makes no new version of an object that stays the same.
            self.writes += usize::from(self.stored.as_ref() != Some(&set));
            self.memory.written = Some((set.clone(), self.now));
            self.stored = Some(set);
        }
        (acted, plan.wake)
    }

    fn container(&self, name: &str) -> &Container {
        self.containers.iter().find(|c| c.name == name).unwrap()
    }

    /// What is told of the containers that run is true, and names are sorted.
    pub fn check(&self, set: &RuntimeContainerMetaSet) {
        assert!(set.containers.is_sorted_by(|a, b| a.name < b.name), "{set:?}");
        for entry in &set.containers {
            let c = self.container(&entry.name);
            if entry.container_id == c.id() {
                let true_hashes = RuntimeContainerHashes {
                    plain_hash: c.plain(c.made_with.0),
                    extracted_env_from_metadata_hash: hash_of(c, c.made_with.1),
                };
                assert_eq!(entry.hashes, true_hashes);
            }
        }
    }

    pub fn start(&mut self, at: usize) {
        let (label, len) = (self.label, self.containers.len());
        let c = &mut self.containers[at % len];
        c.made += 1;
        c.made_with = (c.image, label);
        self.starts += 1;
    }

    pub fn step(&mut self, op: &Op) {
        match *op {
            Op::Start(at) => self.start(at),
            Op::Label(value) => self.label = value,
            Op::Image(at, image) => {
                let len = self.containers.len();
                self.containers[at % len].image = image;
            }
            Op::Updating(updating) => self.updating = updating,
            Op::Answers(answers) => self.answers = answers,
            Op::Takes(takes) => self.takes = takes,
            Op::Watch => self.told = self.stored.clone(),
            Op::Crash => self.memory = Memory::default(),
            Op::Wait(seconds) => {
                self.now += Duration::from_secs(seconds);
                let unseen = |(_, at): &(_, Duration)| self.now >= *at + UNSEEN;
                self.lapses += usize::from(self.memory.written.as_ref().is_some_and(unseen));
            }
        }
        // After a crash a container that was stopped and has no successor yet may be looked at once more; the
        // runtime says then that it does not run.
        if matches!(op, Op::Crash) {
            self.stopped.clear();
            self.told = self.stored.clone();
        }
        self.pass();
    }

    /// The world stops changing; kubelet starts what was stopped, and what has another image.
    pub fn settle(&mut self) {
        (self.answers, self.takes, self.updating) = (true, true, true);
        for _ in 0..40 {
            self.told = self.stored.clone();
            for at in 0..self.containers.len() {
                let c = &self.containers[at];
                if c.made == 0 || c.image != c.made_with.0 || self.stopped.contains(&c.id()) {
                    self.start(at);
                }
            }
            let (acted, wake) = self.pass();
            if !acted && wake.is_none() {
                return;
            }
            self.now = self.now.max(wake.unwrap_or_default());
        }
        panic!("never at rest: {self:#?}");
    }
}

/// What happens to a world.
#[derive(Clone, Debug)]
pub enum Op {
    Start(usize),
    Label(u8),
    Image(usize, u8),
    Updating(bool),
    Answers(bool),
    Takes(bool),
    Watch,
    Crash,
    Wait(u64),
}

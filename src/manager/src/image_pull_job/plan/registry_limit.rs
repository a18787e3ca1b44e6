//! A limit of the nodes that pull from one registry at a time, for all jobs together.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::num::NonZeroUsize;
use std::sync::Arc;

use super::job::{PullJob, Uid};
use super::quota::is_within_share;

/// Why no further node of a job may pull from its registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegistryFull {
    /// As many nodes pull as may.
    Total {
        /// The limit of all namespaces.
        limit: usize,
    },
    /// The rest is reserved for other namespaces.
    NamespaceShare {
        /// Nodes that pull for this namespace.
        mine: usize,
        /// The limit of all namespaces.
        limit: usize,
    },
}

/// The pulls of each job by registry, and the jobs that wait until a registry has room.
#[derive(Default)]
pub struct RegistryLimit {
    max: Option<NonZeroUsize>,
    jobs: HashMap<Uid, JobPulls>,
    registries: HashMap<Arc<str>, RegistryPulls>,
}

struct JobPulls {
    registry: Arc<str>,
    namespace: String,
    pulls: usize,
}

#[derive(Default)]
struct RegistryPulls {
    total: usize,
    by_namespace: BTreeMap<String, usize>,
    waiting: BTreeSet<Uid>,
}

impl RegistryLimit {
    /// At most `max` nodes for each registry; 0 for any number.
    #[must_use]
    pub fn new(max: usize) -> Self {
        Self {
            max: NonZeroUsize::new(max),
            ..Self::default()
        }
    }

    /// The limit, if there is one.
    #[must_use]
    pub fn max(&self) -> Option<usize> {
        self.max.map(NonZeroUsize::get)
    }

    /// Sets on how many nodes a job pulls.
    pub fn set_pulls(&mut self, uid: &Uid, job: &PullJob, pulls: usize) {
        let (Some(_), Some(host)) = (self.max, job.registry.as_ref()) else {
            return;
        };
        if self.jobs.get(uid).is_none_or(|known| known.registry != *host) {
            self.remove(uid);
        }
        let namespace = job.key.namespace.as_deref().unwrap_or_default();
        let known = self.jobs.entry(Arc::clone(uid)).or_insert_with(|| JobPulls {
            registry: Arc::clone(host),
            namespace: namespace.to_owned(),
            pulls: 0,
        });
        let old = std::mem::replace(&mut known.pulls, pulls);
        let registry = self.registries.entry(Arc::clone(host)).or_default();
        registry.replace(namespace, old, pulls);
    }

    /// Removes a job.
    pub fn remove(&mut self, uid: &Uid) {
        let Some(job) = self.jobs.remove(uid) else { return };
        let Some(registry) = self.registries.get_mut(&job.registry) else {
            return;
        };
        registry.replace(&job.namespace, job.pulls, 0);
        registry.waiting.remove(uid);
        if registry.total == 0 && registry.waiting.is_empty() {
            self.registries.remove(&job.registry);
        }
    }

    fn registry_of(&self, uid: &Uid) -> Option<(&JobPulls, &RegistryPulls)> {
        let job = self.jobs.get(uid)?;
        Some((job, self.registries.get(&job.registry)?))
    }

    /// Why the job gets no further node at its registry, if so.
    #[must_use]
    pub fn full(&self, uid: &Uid) -> Option<RegistryFull> {
        let limit = self.max()?;
        let (job, registry) = self.registry_of(uid)?;
        let mine = registry.of_namespace(&job.namespace);
        if registry.total >= limit {
            Some(RegistryFull::Total { limit })
        } else if !is_within_share(mine + 1, registry.total + 1, limit) {
            Some(RegistryFull::NamespaceShare { mine, limit })
        } else {
            None
        }
    }

    /// The job waits until its registry has room; true when that is news.
    pub fn wait(&mut self, uid: &Uid) -> bool {
        let registry = self.jobs.get(uid).map(|job| &job.registry);
        let registry = registry.and_then(|host| self.registries.get_mut(host));
        registry.is_some_and(|registry| registry.waiting.insert(Arc::clone(uid)))
    }

    /// Whether the job waits.
    #[must_use]
    pub fn is_waiting(&self, uid: &Uid) -> bool {
        self.registry_of(uid)
            .is_some_and(|(_, registry)| registry.waiting.contains(uid))
    }

    /// Ends the wait of as many jobs as the registries have room for.
    pub fn take_ready(&mut self) -> Vec<Uid> {
        let Some(max) = self.max() else { return Vec::new() };
        let mut ready = Vec::new();
        for registry in self.registries.values() {
            let room = max.saturating_sub(registry.total);
            if room == 0 {
                continue;
            }
            let waiting = registry.waiting.iter();
            let mut waiting: Vec<&Uid> = waiting.filter(|uid| self.full(uid).is_none()).collect();
            waiting.sort_by_cached_key(|uid| self.turn(uid));
            ready.extend(waiting.into_iter().take(room).cloned());
        }
        for uid in &ready {
            let registry = self.jobs.get(uid).map(|job| &job.registry);
            if let Some(registry) = registry.and_then(|host| self.registries.get_mut(host)) {
                registry.waiting.remove(uid);
            }
        }
        ready
    }

    /// Whose turn it is first: the namespace, and of that the job, with the fewest pulls from the registry.
    #[must_use]
    pub fn turn(&self, uid: &Uid) -> (usize, usize) {
        let registry = self.registry_of(uid);
        registry.map_or((0, 0), |(job, registry)| {
            (registry.of_namespace(&job.namespace), job.pulls)
        })
    }
}

impl RegistryPulls {
    fn of_namespace(&self, namespace: &str) -> usize {
        self.by_namespace.get(namespace).copied().unwrap_or_default()
    }

    fn replace(&mut self, namespace: &str, old: usize, new: usize) {
        self.total = self.total.saturating_sub(old).saturating_add(new);
        let of_namespace = self.by_namespace.entry(namespace.to_owned()).or_default();
        *of_namespace = of_namespace.saturating_sub(old).saturating_add(new);
        if *of_namespace == 0 {
            self.by_namespace.remove(namespace);
        }
    }
}

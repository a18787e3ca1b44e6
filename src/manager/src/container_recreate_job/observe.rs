//! Index of ContainerRecreateJobs, of the requests that they control, and of the Pods of their namespaces.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedReceiver;

use super::plan::{JobSelectors, is_unfinished, job_of};
use crate::restarts::is_finished;
use crate::view::PodView;
use kruise_api::container_recreate_job::ContainerRecreateJob;
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::owner::{Owner, OwnerKind};
use kruise_cluster::write_cache::{Versioned, WriteCache};
use kruise_cluster::{Change, Key, Store, WatchEvents};

/// Name in logs and metrics.
pub const NAME: &str = "containerrecreatejob";

/// All observed objects.
#[derive(Default)]
pub struct Index {
    /// ContainerRecreateJobs, in one group.
    pub jobs: WriteCache<ContainerRecreateJob>,
    /// Requests with such a controller, by its group key.
    pub requests: WriteCache<ContainerRecreateRequest>,
    /// Jobs that have not ended.
    unfinished: BTreeMap<Key, UnfinishedJob>,
    /// Names of all Pods, of namespaces with such a job: the jobs share them, however many there are.
    pods: BTreeMap<Option<String>, BTreeSet<Box<str>>>,
}

/// A job that can be matched with many Pods.
struct UnfinishedJob {
    uid: Option<String>,
    generation: Option<i64>,
    selectors: Arc<JobSelectors>,
}

impl UnfinishedJob {
    fn has_spec_of(&self, job: &ContainerRecreateJob) -> bool {
        self.uid == job.metadata.uid && self.generation == job.metadata.generation
    }
}

/// The cache entry of a job.
pub fn versioned_job(job: Arc<ContainerRecreateJob>) -> Versioned<ContainerRecreateJob> {
    Versioned::from_object(job, String::new())
}

/// The cache entry of a request; `None` if no job controls it.
pub fn versioned_request(
    request: Arc<ContainerRecreateRequest>,
) -> Option<Versioned<ContainerRecreateRequest>> {
    let group = job_of(&request)?.group_key(request.metadata.namespace.as_deref());
    Some(Versioned::from_object(request, group))
}

fn group_of(job: &ContainerRecreateJob) -> String {
    let owner = Owner {
        kind: OwnerKind::ContainerRecreateJob,
        name: job.metadata.name.clone().unwrap_or_default(),
        uid: job.metadata.uid.clone().unwrap_or_default(),
    };
    owner.group_key(job.metadata.namespace.as_deref())
}

/// A job as it is cached.
pub struct CachedJob {
    /// The job.
    pub job: Arc<ContainerRecreateJob>,
    /// What its spec says about Pods.
    pub selectors: Arc<JobSelectors>,
    /// The requests that it controls.
    pub requests: Vec<Arc<ContainerRecreateRequest>>,
    /// All Pods of its namespace.
    pub pods: Vec<Key>,
    /// Time until an unconfirmed write must be read.
    pub next_fetch: Option<Duration>,
}

impl Index {
    /// The job of that key.
    pub fn job(&self, key: &Key, now: Instant) -> Option<CachedJob> {
        let job = Arc::clone(self.jobs.get(key)?);
        let group = group_of(&job);
        let next_fetch = [
            self.requests.unconfirmed(&group, now).1,
            self.jobs.confirm_time_left(key, now),
        ];
        let pods = self.pods.get(&key.namespace).into_iter().flatten();
        let pods = pods.map(|name| Key {
            namespace: key.namespace.clone(),
            name: name.to_string(),
        });
        Some(CachedJob {
            requests: self
                .requests
                .group_entries(&group)
                .map(|(_, request, _)| Arc::clone(request))
                .collect(),
            selectors: self.selectors(key, &job),
            pods: pods.collect(),
            next_fetch: next_fetch.into_iter().flatten().min(),
            job,
        })
    }

    /// The selectors of a job: of each spec, they are compiled once.
    fn selectors(&self, key: &Key, job: &ContainerRecreateJob) -> Arc<JobSelectors> {
        if !is_unfinished(job) {
            return Arc::default();
        }
        match self.unfinished.get(key).filter(|one| one.has_spec_of(job)) {
            Some(unfinished) => Arc::clone(&unfinished.selectors),
            None => Arc::new(JobSelectors::from(&job.spec)),
        }
    }

    /// Whether the job of that key must be read, and which of its requests.
    pub fn unconfirmed(&self, key: &Key, now: Instant) -> (bool, Vec<Key>) {
        let group = self.jobs.get(key).map(|job| group_of(job));
        let requests = group.map(|group| self.requests.unconfirmed(&group, now).0);
        (self.jobs.must_be_read(key, now), requests.unwrap_or_default())
    }

    /// Applies one change; returns the affected jobs.
    pub fn apply(&mut self, event: &WatchEvent, pods_store: &Store<PodView>) -> Vec<Key> {
        match event {
            WatchEvent::Job(Change { key, old, new }) => {
                match (old, new) {
                    (_, Some(new)) => self.jobs.apply_watch(key, versioned_job(Arc::clone(new))),
                    (Some(old), None) => {
                        let uid = old.metadata.uid.as_deref().unwrap_or_default();
                        self.jobs.apply_watch_delete(key, uid);
                    }
                    (None, None) => {}
                }
                self.track_pods(key, new.as_ref(), pods_store);
                vec![key.clone()]
            }
            WatchEvent::Request(Change { key, old, new }) => {
                let entry = new.clone().and_then(versioned_request);
                let uid = |request: &ContainerRecreateRequest| request.metadata.uid.clone();
                match (entry, old) {
                    (Some(entry), _) => self.requests.apply_watch(key, entry),
                    (None, Some(old)) => self
                        .requests
                        .apply_watch_delete(key, &uid(old).unwrap_or_default()),
                    (None, None) => {}
                }
                let owners = [old, new]
                    .into_iter()
                    .flatten()
                    .filter_map(|request| job_of(request));
                let jobs = owners.map(|owner| Key {
                    namespace: key.namespace.clone(),
                    name: owner.name,
                });
                let mut jobs: Vec<Key> = jobs.collect();
                // Its Pod counts as unavailable meanwhile, for other jobs that select it as well.
                let in_progress =
                    |request: &Option<Arc<_>>| request.as_deref().is_some_and(|one| !is_finished(one));
                if in_progress(old) != in_progress(new) {
                    let pods = [old, new].into_iter().flatten();
                    let pods =
                        pods.filter_map(|request| pods_store.get(&key.with_name(&request.spec.pod_name)));
                    let pods: Vec<_> = pods.collect();
                    jobs.extend(self.jobs_that_may_select(&key.namespace, pods.iter()));
                }
                jobs
            }
            WatchEvent::Pod(change) => self.apply_pod(change),
        }
    }

    /// Begins or ends to track the Pods of the namespace of a job.
    fn track_pods(&mut self, key: &Key, job: Option<&Arc<ContainerRecreateJob>>, pods: &Store<PodView>) {
        let namespace = &key.namespace;
        if let Some(job) = job.filter(|job| is_unfinished(job)) {
            let unfinished = UnfinishedJob {
                uid: job.metadata.uid.clone(),
                generation: job.metadata.generation,
                selectors: self.selectors(key, job),
            };
            self.unfinished.insert(key.clone(), unfinished);
            self.pods.entry(namespace.clone()).or_insert_with(|| {
                let own = pods.entries_of(namespace.as_deref()).into_iter();
                own.map(|(pod, _)| pod.name.into_boxed_str()).collect()
            });
            return;
        }
        self.unfinished.remove(key);
        if self.jobs_of(namespace).next().is_none() {
            self.pods.remove(namespace);
        }
    }

    /// The jobs of a namespace that have not ended.
    fn jobs_of(&self, namespace: &Option<String>) -> impl Iterator<Item = (&Key, &UnfinishedJob)> {
        let first = Key {
            namespace: namespace.clone(),
            name: String::new(),
        };
        let jobs = self.unfinished.range(first..);
        jobs.take_while(move |(key, _)| key.namespace == *namespace)
    }

    fn apply_pod(&mut self, Change { key, old, new }: &Change<PodView>) -> Vec<Key> {
        let Some(names) = self.pods.get_mut(&key.namespace) else {
            return Vec::new();
        };
        match new {
            Some(_) => names.insert(key.name.as_str().into()),
            None => names.remove(key.name.as_str()),
        };
        let pods = [old, new].into_iter().flatten();
        self.jobs_that_may_select(&key.namespace, pods)
    }

    fn jobs_that_may_select<'a>(
        &self,
        namespace: &Option<String>,
        pods: impl Iterator<Item = &'a Arc<PodView>> + Clone,
    ) -> Vec<Key> {
        let is_affected = |job: &UnfinishedJob| pods.clone().any(|pod| job.selectors.may_select(pod));
        let affected = self.jobs_of(namespace).filter(|(_, job)| is_affected(job));
        affected.map(|(job, _)| job.clone()).collect()
    }
}

/// A change of one object.
pub enum WatchEvent {
    Job(Change<ContainerRecreateJob>),
    Request(Change<ContainerRecreateRequest>),
    Pod(Change<PodView>),
}

impl std::fmt::Display for WatchEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Job(change) => write!(f, "ContainerRecreateJob {}", change.key),
            Self::Request(change) => write!(f, "ContainerRecreateRequest {}", change.key),
            Self::Pod(change) => write!(f, "Pod {}", change.key),
        }
    }
}

/// All existing objects, and every change from now on; requests come first, so that none is created twice.
pub fn watch_events(
    pods: UnboundedReceiver<Change<PodView>>,
    requests: UnboundedReceiver<Change<ContainerRecreateRequest>>,
    jobs: UnboundedReceiver<Change<ContainerRecreateJob>>,
) -> WatchEvents<WatchEvent> {
    WatchEvents::new(NAME)
        .with(requests, WatchEvent::Request)
        .with(pods, WatchEvent::Pod)
        .with(jobs, WatchEvent::Job)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::{Value, json};

    use super::*;

    fn key(namespace: &str, name: &str) -> Key {
        Key::namespaced(namespace, name)
    }

    fn job(namespace: &str, name: &str, spec: &Value, status: &Value) -> WatchEvent {
        let job = json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "ContainerRecreateJob",
            "metadata": { "name": name, "namespace": namespace, "uid": name, "resourceVersion": "1" },
            "spec": spec, "status": status });
        WatchEvent::Job(Change {
            key: key(namespace, name),
            old: None,
            new: Some(Arc::new(serde_json::from_value(job).unwrap())),
        })
    }

    fn pod(labels: &[(&str, &str)], controller: Option<(OwnerKind, &str)>) -> PodView {
        let labels = labels
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        PodView {
            labels: Arc::new(labels.collect()),
            controller: controller.map(|(kind, uid)| (kind, uid.into())),
            ..PodView::default()
        }
    }

    #[test]
    fn pods_of_a_namespace_are_tracked_until_its_jobs_end() {
        let (web, of_set) = (
            pod(&[("app", "web")], None),
            pod(&[], Some((OwnerKind::StatefulSet, "s"))),
        );
        let pods = Store::from_objects([
            (key("a", "web"), web.clone()),
            (key("b", "web"), web.clone()),
            (key("a", "set-0"), of_set.clone()),
        ]);
        let mut index = Index::default();
        let by_label = json!({ "selector": { "matchLabels": { "app": "web" } }, "containers": [] });
        let target = json!({ "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "set" });
        let by_target = json!({ "targetRef": target, "containers": [] });
        for (name, spec) in [("label", &by_label), ("target", &by_target)] {
            index.apply(&job("a", name, spec, &json!({})), &pods);
        }
        let tracked = |index: &Index, name: &str| index.job(&key("a", name), Instant::now()).unwrap().pods;
        assert_eq!(tracked(&index, "label"), [key("a", "set-0"), key("a", "web")]);
        let mut change = |namespace: &str, name: &str, old: Option<&PodView>, new: Option<&PodView>| {
            let change = WatchEvent::Pod(Change {
                key: key(namespace, name),
                old: old.map(|pod| Arc::new(pod.clone())),
                new: new.map(|pod| Arc::new(pod.clone())),
            });
            index.apply(&change, &pods)
        };
        let plain = pod(&[], None);
        assert_eq!(change("a", "web-2", None, Some(&web)), [key("a", "label")]);
        assert_eq!(
            change("a", "set-0", Some(&of_set), Some(&of_set)),
            [key("a", "target")]
        );
        assert_eq!(change("b", "web", None, Some(&web)), []);
        assert_eq!(change("a", "plain", None, Some(&plain)), []);
        // One that no longer matches, or is gone, concerns the job a last time.
        assert_eq!(
            change("a", "web-2", Some(&web), Some(&plain)),
            [key("a", "label")]
        );
        assert_eq!(change("a", "web", Some(&web), None), [key("a", "label")]);
        let names = ["plain", "set-0", "web-2"].map(|name| key("a", name));
        assert_eq!(tracked(&index, "label"), names);
        let ended = json!({ "completionTime": "2026-11-26T12:00:00Z" });
        index.apply(&job("a", "target", &by_target, &ended), &pods);
        assert_eq!(tracked(&index, "label"), names, "the other job has not ended");
        index.apply(&job("a", "label", &by_label, &ended), &pods);
        assert_eq!(tracked(&index, "label"), []);
    }

    #[test]
    fn selectors_are_compiled_once_for_each_spec() {
        let mut index = Index::default();
        let mut selectors = |generation: i64, app: &str, status: &Value| {
            let spec = json!({ "selector": { "matchLabels": { "app": app } }, "containers": [] });
            let mut event = job("a", "j", &spec, status);
            if let WatchEvent::Job(Change { new: Some(job), .. }) = &mut event {
                Arc::make_mut(job).metadata.generation = Some(generation);
            }
            index.apply(&event, &Store::from_objects([]));
            index.job(&key("a", "j"), Instant::now()).unwrap().selectors
        };
        let web = pod(&[("app", "web")], None);
        let first = selectors(1, "web", &json!({}));
        assert!(first.may_select(&web));
        let active = selectors(1, "web", &json!({ "active": 1 }));
        assert!(Arc::ptr_eq(&first, &active));
        assert!(!selectors(2, "other", &json!({})).may_select(&web));
    }

    /// Only jobs whose budgets count the Pod are woken by the request of another job.
    #[test]
    fn request_concerns_the_jobs_that_select_its_pod() {
        let pods = Store::from_objects([(key("a", "web-0"), pod(&[("app", "web")], None))]);
        let mut index = Index::default();
        for app in ["web", "other"] {
            let spec = json!({ "selector": { "matchLabels": { "app": app } }, "containers": [] });
            index.apply(&job("a", app, &spec, &json!({})), &pods);
        }
        let mut concerned = |pod_name: &str| {
            let request = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
                "metadata": { "name": "r", "namespace": "a" }, "spec": { "podName": pod_name, "containers": [] } });
            let change = Change {
                key: key("a", "r"),
                old: None,
                new: Some(Arc::new(serde_json::from_value(request).unwrap())),
            };
            index.apply(&WatchEvent::Request(change), &pods)
        };
        assert_eq!(concerned("web-0"), [key("a", "web")]);
        assert_eq!(concerned("gone"), []);
    }

    #[test]
    fn requests_of_other_owners_are_not_cached() {
        let request = |kind: &str, version: &str, uid: &str| {
            let owner = json!({ "apiVersion": version, "kind": kind, "name": "reload", "uid": uid, "controller": true });
            let request = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
                "metadata": { "name": format!("{kind}-{uid}"), "namespace": "a", "uid": "u", "resourceVersion": "1",
                    "ownerReferences": [owner] },
                "spec": { "podName": "p", "containers": [] } });
            let request: ContainerRecreateRequest = serde_json::from_value(request).unwrap();
            versioned_request(Arc::new(request)).map(|entry| entry.group)
        };
        let (kind, version) = ("ContainerRecreateJob", "apps.kruise.io/v1alpha1");
        let own = request(kind, version, "j");
        assert_eq!(own.as_deref(), Some("a/ContainerRecreateJob/reload/j"));
        assert_ne!(own, request(kind, version, "other"));
        for (kind, version) in [
            ("Pod", "v1"),
            ("ContainerRecreateJob", "example.com/v1alpha1"),
            ("ContainerRecreateJob", "apps.kruise.io/v1beta1"),
        ] {
            assert_eq!(request(kind, version, "j"), None);
        }
    }
}

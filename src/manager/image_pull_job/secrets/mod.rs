//! Copies the pull secrets of jobs to the namespace that the daemons read, and keeps them up to date.
//!
//! In:  which Secrets each job names; those Secrets and the copies (watches).
//! Out: copies, with the jobs that they are for; the name that a NodeImage is told.
//!
//! The manager watches the named sources and the copies, never all secrets of the cluster.

pub mod plan;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::runtime::watcher;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};

use super::plan::job::Job;
use crate::api::keys;
use crate::api::node_image::ReferenceObject;
use crate::cluster::{Cluster, Error, Key, Mirror, mirror, write};
use plan::{CopyView, Step, wanted, without};

/// The copies of one job's pull secrets.
#[derive(Default)]
pub struct Provided {
    /// What to write into NodeImages; also for a source that is missing, so that daemons say so.
    pub references: Vec<ReferenceObject>,
    /// The sources that do not exist.
    pub missing: Vec<Key>,
}

/// Sources and copies; cheap to clone.
#[derive(Clone)]
pub struct Secrets {
    cluster: Cluster,
    into: Arc<str>,
    copies: Mirror<CopyView>,
}

impl Secrets {
    /// Starts the watch of the copies in namespace `into`.
    pub fn start(cluster: &Cluster, into: &str, tasks: &mut JoinSet<()>) -> Self {
        let api = Api::<Secret>::namespaced(cluster.client.clone(), into);
        let (copies, task) = mirror(api, watcher::Config::default(), |s| CopyView::read(&s));
        tasks.spawn(task);
        Self {
            cluster: cluster.clone(),
            into: into.into(),
            copies,
        }
    }

    /// The sources that a job names; none for a job that lives where the daemons read anyway.
    pub fn sources(&self, job: &Job) -> BTreeSet<Key> {
        let namespace = job.key.namespace.as_deref().unwrap_or_default();
        let names = job.spec.pull_secrets.iter().filter(|_| *namespace != *self.into);
        names.map(|name| Key::namespaced(namespace, name)).collect()
    }

    /// Brings the copies for a job up to date and returns what to write into NodeImages.
    pub async fn provide(&self, job: &Job) -> Result<Provided, Error> {
        let namespace = job.key.namespace.as_deref().unwrap_or_default();
        if *namespace == *self.into {
            let names = job.spec.pull_secrets.iter();
            return Ok(Provided {
                references: names.map(|name| reference(namespace, name, None)).collect(),
                missing: Vec::new(),
            });
        }
        self.copies.synced().await;
        let mut done = Provided::default();
        for name in &job.spec.pull_secrets {
            let source = Key::namespaced(namespace, name);
            let (copy, found) = self.copy(&source, &job.key.to_string()).await?;
            let copied = reference(&self.into, &copy, Some(keys::MODE_BATCH));
            if !done.references.contains(&copied) {
                done.references.push(copied);
            }
            if !found {
                done.missing.push(source);
            }
        }
        Ok(done)
    }

    /// The name of the copy, and whether there is a source to copy.
    async fn copy(&self, source: &Key, job: &str) -> Result<(String, bool), Error> {
        let namespace = source.namespace.as_deref().unwrap_or_default();
        let from = Api::<Secret>::namespaced(self.cluster.client.clone(), namespace);
        let into = Api::<Secret>::namespaced(self.cluster.client.clone(), &self.into);
        let found = write::get(&from, &source.name).await?;
        let copies = self.copies.list();
        let known: Vec<&CopyView> = copies.iter().map(AsRef::as_ref).collect();
        let plan = wanted(source, found.as_ref(), &known, job, &self.into);
        match plan.step {
            Step::Nothing => {}
            Step::Create(secret) => {
                write::create(&into, &secret).await?;
            }
            Step::Replace(secret) => {
                write::replace(&into, &secret).await?;
            }
            Step::Delete => write::delete(&into, &plan.copy, None).await?,
        }
        Ok((plan.copy, found.is_some()))
    }

    /// A job no longer needs its copies. That the namespace or a copy has gone is fine.
    pub async fn release(&self, job: &Key) -> Result<(), Error> {
        self.copies.synced().await;
        let into = Api::<Secret>::namespaced(self.cluster.client.clone(), &self.into);
        let job = job.to_string();
        for copy in self.copies.list() {
            if !copy.references.contains(&job) {
                continue;
            }
            let done = match without(&copy, &job) {
                None => write::delete(&into, &copy.name, None).await,
                Some(rest) => {
                    let body = json!({ "metadata": {
                        "resourceVersion": copy.resource_version,
                        "annotations": { (keys::SECRET_REFERENCES): rest },
                    }});
                    write::patch_merge(&into, &copy.name, &body).await.map(|_| ())
                }
            };
            match done {
                Err(error) if !error.not_found() => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether a job has copies.
    pub fn holds(&self, job: &Key) -> bool {
        let job = job.to_string();
        self.copies.list().iter().any(|c| c.references.contains(&job))
    }

    /// The jobs whose copies changed, whoever changed them.
    pub fn copies(&self) -> mpsc::UnboundedReceiver<crate::cluster::Change<CopyView>> {
        self.copies.subscribe()
    }
}

fn reference(namespace: &str, name: &str, mode: Option<&str>) -> ReferenceObject {
    ReferenceObject {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        mode: mode.map(str::to_owned),
    }
}

/// One watch a source, for as long as a job needs it.
pub struct Sources {
    cluster: Cluster,
    wake: mpsc::UnboundedSender<Key>,
    needed: HashMap<Key, BTreeSet<Key>>,
    watches: HashMap<Key, AbortHandle>,
    tasks: JoinSet<()>,
}

impl Sources {
    /// No watch yet; `wake` is told the source that changed.
    pub fn new(cluster: &Cluster, wake: mpsc::UnboundedSender<Key>) -> Self {
        Self {
            cluster: cluster.clone(),
            wake,
            needed: HashMap::new(),
            watches: HashMap::new(),
            tasks: JoinSet::new(),
        }
    }

    /// A job needs these sources from now on, and no others.
    pub fn need(&mut self, job: &Key, sources: &BTreeSet<Key>) {
        while self.tasks.try_join_next().is_some() {}
        for source in sources {
            self.needed.entry(source.clone()).or_default().insert(job.clone());
            if !self.watches.contains_key(source) {
                let task = follow(self.cluster.clone(), source.clone(), self.wake.clone());
                let handle = self.tasks.spawn(task);
                self.watches.insert(source.clone(), handle);
            }
        }
        let watches = &mut self.watches;
        self.needed.retain(|source, jobs| {
            if !sources.contains(source) {
                jobs.remove(job);
            }
            if jobs.is_empty()
                && let Some(watch) = watches.remove(source)
            {
                watch.abort();
            }
            !jobs.is_empty()
        });
    }

    /// The jobs that need a source.
    pub fn jobs(&self, source: &Key) -> impl Iterator<Item = &Key> {
        self.needed.get(source).into_iter().flatten()
    }
}

/// Watches one Secret by name. Only its version is kept, not its data.
async fn follow(cluster: Cluster, source: Key, wake: mpsc::UnboundedSender<Key>) {
    let namespace = source.namespace.as_deref().unwrap_or_default();
    let api = Api::<Secret>::namespaced(cluster.client.clone(), namespace);
    let config = watcher::Config::default().fields(&format!("metadata.name={}", source.name));
    let (versions, task) = mirror(api, config, |s| s.metadata.resource_version);
    let mut changes = versions.subscribe();
    let tell = async {
        while changes.recv().await.is_some() {
            if wake.send(source.clone()).is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = task => {}
        () = tell => {}
    }
}

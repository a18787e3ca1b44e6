//! Copies the pull secrets of jobs to the namespace that the daemons read, and keeps them up to date.
//!
//! In:  which Secrets each job names; those Secrets by name; the metadata of Secrets in the jobs' namespaces, and the
//!      copies (watches).
//! Out: copies, with the jobs that they are for; the names that are written into NodeImages.

pub mod plan;
mod sources;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::{Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::ListParams;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::plan::job::Job;
use kruise_api::keys;
use kruise_api::node_image::ReferenceObject;
use kruise_cluster::queue::{Again, Failure};
use kruise_cluster::{self as cluster, Cluster, Key, Mirror, optional_mirror, write};
use plan::{CopyView, LINGER, Plan, Step, wanted, without};
pub use sources::Sources;

/// Why copies cannot be made or removed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The copies are not known.
    #[error(
        "Secrets in namespace {namespace} were not listed yet; may kruise-manager list and watch them there?"
    )]
    NotListed {
        /// The namespace of the copies.
        namespace: Arc<str>,
    },
    /// A read or a write failed.
    #[error(transparent)]
    Api(#[from] cluster::Error),
}

impl Error {
    /// Whether the same call may succeed later without anyone changing anything.
    pub fn retryable(&self) -> bool {
        match self {
            Self::NotListed { .. } => false,
            Self::Api(error) => error.retryable() || error.already_exists(),
        }
    }

    /// Somebody else wrote at the same time; the next look knows more.
    pub fn outrun(&self) -> bool {
        matches!(self, Self::Api(error) if error.conflict() || error.already_exists())
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::Api(error) => error.into(),
            Error::NotListed { .. } => Self::new(error.to_string()),
        }
    }
}

/// Sources of one job that are read at once: each may have 1 MiB.
const READ_AT_ONCE: usize = 2;

/// Sources and copies; cheap to clone.
#[derive(Clone)]
pub struct Secrets {
    cluster: Cluster,
    into: Arc<str>,
    copies: Mirror<CopyView>,
    /// Copies that no job needs, by name: their version, and since when.
    idle: Arc<Mutex<Idle>>,
}

impl Secrets {
    /// Starts the watch of the copies in namespace `into`.
    pub fn start(cluster: &Cluster, into: &str, tasks: &mut JoinSet<()>) -> Self {
        let api = Api::<Secret>::namespaced(cluster.client.clone(), into);
        let (copies, task) = optional_mirror(api, ListParams::default(), |s| CopyView::read(&s));
        tasks.spawn(task);
        Self {
            cluster: cluster.clone(),
            into: into.into(),
            copies,
            idle: Arc::default(),
        }
    }

    /// Waits until the copies are known; not for longer than `at_most`, for they may be out of reach.
    pub async fn listed(&self, at_most: Duration) {
        if tokio::time::timeout(at_most, self.copies.synced()).await.is_err() {
            let namespace = &self.into;
            tracing::warn!(%namespace, "Secrets were not listed yet; jobs with pullSecrets wait");
        }
    }

    /// All copies that are known.
    fn known(&self) -> Result<Vec<Arc<CopyView>>, Error> {
        if self.copies.is_synced() {
            return Ok(self.copies.list());
        }
        let namespace = Arc::clone(&self.into);
        Err(Error::NotListed { namespace })
    }

    /// The sources that a job names; none for a job that lives where the daemons read anyway.
    pub fn sources(&self, job: &Job) -> Vec<Key> {
        let namespace = job.key.namespace.as_deref().unwrap_or_default();
        let mut seen = BTreeSet::new();
        let names = job.spec.pull_secrets.iter().filter(|_| *namespace != *self.into);
        let names = names.filter(|name| seen.insert(*name));
        names.map(|name| Key::namespaced(namespace, name)).collect()
    }

    /// What a job that lives where the daemons read writes into NodeImages: its Secrets as they are.
    pub fn in_place(&self, job: &Job) -> Vec<ReferenceObject> {
        let namespace = job.key.namespace.as_deref().unwrap_or_default();
        let names = job.spec.pull_secrets.iter().filter(|_| *namespace == *self.into);
        names.map(|name| reference(namespace, name, None)).collect()
    }

    /// What a job writes into NodeImages for a copy; also for one whose source is missing, so that daemons say so.
    pub fn copied(&self, plan: &Plan) -> ReferenceObject {
        reference(&self.into, &plan.copy, Some(keys::MODE_BATCH))
    }

    /// Looks what has to be done for each source of a job. Nothing is written yet.
    pub fn plans(&self, job: &Job) -> impl Stream<Item = Result<(Key, Plan), Error>> {
        let reads = self.sources(job).into_iter().map(|source| {
            let (this, job) = (self.clone(), job.key.to_string());
            async move {
                let namespace = source.namespace.as_deref().unwrap_or_default();
                let from = Api::<Secret>::namespaced(this.cluster.client.clone(), namespace);
                // Without the copies nothing can be done with what is read.
                this.known()?;
                let found = write::get(&from, &source.name).await?;
                let copies = this.known()?;
                let known: Vec<&CopyView> = copies.iter().map(AsRef::as_ref).collect();
                let plan = wanted(&source, found.as_ref(), &known, &job, &this.into);
                Ok((source, plan))
            }
        });
        stream::iter(reads).buffered(READ_AT_ONCE)
    }

    /// Brings a copy up to date.
    pub async fn carry_out(&self, plan: &Plan) -> Result<(), Error> {
        let into = Api::<Secret>::namespaced(self.cluster.client.clone(), &self.into);
        match &plan.step {
            Step::Nothing => {}
            Step::Create(secret) => {
                write::create(&into, secret).await?;
                tracing::info!(copy = plan.copy, "pull secret copied");
            }
            Step::Replace(secret) => {
                write::replace(&into, secret).await?;
            }
            Step::Delete(uid) => write::delete(&into, &plan.copy, uid).await?,
        }
        Ok(())
    }

    /// A job no longer needs its copies. That the namespace or a copy has gone is fine; of several errors the last is
    /// returned.
    pub async fn release(&self, job: &Key) -> Result<(), Error> {
        let into = Api::<Secret>::namespaced(self.cluster.client.clone(), &self.into);
        let (job, mut released) = (job.to_string(), Ok(()));
        for copy in self.known()? {
            if !copy.references.contains(&job) {
                continue;
            }
            let body = json!({ "metadata": {
                "resourceVersion": copy.resource_version,
                "annotations": { (keys::SECRET_REFERENCES): without(&copy, &job) },
            }});
            match write::patch_merge(&into, &copy.name, &body).await {
                Err(error) if !error.not_found() => released = Err(error.into()),
                _ => {}
            }
        }
        released
    }

    /// Deletes a copy that no job has needed for a while; says when to look again at one that may be needed yet.
    pub async fn remove_idle(&self, name: &str) -> Result<Again, Error> {
        let copy = self.copies.get(&Key::namespaced(&*self.into, name));
        let Some(copy) = copy.filter(|copy| copy.references.is_empty()) else {
            self.idle().0.remove(name);
            return Ok(None);
        };
        let left = self.idle().left(name, &copy.resource_version, Instant::now());
        if !left.is_zero() {
            return Ok(Some(left));
        }
        let into = Api::<Secret>::namespaced(self.cluster.client.clone(), &self.into);
        write::delete_seen(&into, name, &copy.uid, Some(&copy.resource_version)).await?;
        self.idle().0.remove(name);
        tracing::info!(
            copy = name,
            "copy of a pull secret deleted: no ImagePullJob needs it"
        );
        Ok(None)
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a job has copies.
    pub fn holds(&self, job: &Key) -> bool {
        let job = job.to_string();
        self.copies.list().iter().any(|c| c.references.contains(&job))
    }

    /// The jobs whose copies changed, whoever changed them.
    pub fn copies(&self) -> mpsc::UnboundedReceiver<kruise_cluster::Change<CopyView>> {
        self.copies.subscribe()
    }
}

/// Copies that no job needs: the version in which each was seen so, and when first.
#[derive(Debug, Default)]
struct Idle(HashMap<String, (String, Instant)>);

impl Idle {
    /// How long a copy that no job needs stays.
    fn left(&mut self, name: &str, version: &str, now: Instant) -> Duration {
        let (seen, since) = self
            .0
            .entry(name.to_owned())
            .or_insert_with(|| (version.to_owned(), now));
        if seen != version {
            // It was needed in between.
            (*seen, *since) = (version.to_owned(), now);
        }
        LINGER.saturating_sub(now.duration_since(*since))
    }
}

fn reference(namespace: &str, name: &str, mode: Option<&str>) -> ReferenceObject {
    ReferenceObject {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        mode: mode.map(str::to_owned),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_stays_a_while_after_the_last_job_that_needs_it() {
        let (mut idle, start) = (Idle::default(), Instant::now());
        let mut left =
            |version: &str, after: u64| idle.left("copy", version, start + Duration::from_secs(after));
        let seconds = Duration::from_secs;
        assert_eq!([left("1", 0), left("1", 2)], [seconds(5), seconds(3)]);
        // A job needed it in between.
        assert_eq!([left("2", 4), left("2", 8)], [seconds(5), seconds(1)]);
        assert_eq!(left("2", 9), Duration::ZERO);
    }
}

//! Copies the pull secrets of jobs to the namespace that the daemons read, and keeps the copies current.
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

use super::plan::job::PullJob;
use kruise_api::keys;
use kruise_api::node_image::ReferenceObject;
use kruise_cluster::queue::{ReconcileError, RequeueAfter};
use kruise_cluster::{self as cluster, Cluster, Key, Store, write};
use plan::{CopyPlan, CopyStep, CopyView, UNUSED_COPY_TTL, plan_copy, references_without};
pub use sources::SourceWatches;

/// Why copies cannot be created or removed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The copies are not listed yet.
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
    /// Whether the same call may succeed later without any change.
    pub fn retryable(&self) -> bool {
        match self {
            Self::NotListed { .. } => false,
            // A webhook chooses the code of its denial.
            Self::Api(error) => (error.retryable() && !error.denied()) || error.already_exists(),
        }
    }

    /// Another writer wrote at the same time; the next reconcile sees its change.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Api(error) if error.conflict() || error.already_exists())
    }
}

impl From<Error> for ReconcileError {
    fn from(error: Error) -> Self {
        match error {
            Error::Api(error) => error.into(),
            Error::NotListed { .. } => Self::new(error.to_string()),
        }
    }
}

/// Sources of one job that are read at once: each may have 1 MiB.
const MAX_CONCURRENT_READS: usize = 2;

/// Sources and copies; cheap to clone.
#[derive(Clone)]
pub struct PullSecretCopies {
    cluster: Cluster,
    copy_namespace: Arc<str>,
    copies: Store<CopyView>,
    /// Copies that no job needs, by name: their version, and since when.
    unused: Arc<Mutex<UnusedCopies>>,
}

impl PullSecretCopies {
    /// Starts the watch of the copies in `copy_namespace`.
    pub fn start(cluster: &Cluster, copy_namespace: &str, tasks: &mut JoinSet<()>) -> Self {
        let api = Api::<Secret>::namespaced(cluster.client.clone(), copy_namespace);
        let (copies, task) =
            cluster.optional_reflector(api, ListParams::default(), |s| CopyView::from_secret(&s));
        tasks.spawn(task);
        Self {
            cluster: cluster.clone(),
            copy_namespace: copy_namespace.into(),
            copies,
            unused: Arc::default(),
        }
    }

    /// Waits until the copies are listed, at most `timeout`, because the list may fail.
    pub async fn wait_synced(&self, timeout: Duration) {
        if tokio::time::timeout(timeout, self.copies.wait_until_synced())
            .await
            .is_err()
        {
            let namespace = &self.copy_namespace;
            tracing::warn!(%namespace, "Secrets were not listed yet; jobs with pullSecrets wait");
        }
    }

    /// All copies in the store.
    fn all_copies(&self) -> Result<Vec<Arc<CopyView>>, Error> {
        if self.copies.is_synced() {
            return Ok(self.copies.list());
        }
        let namespace = Arc::clone(&self.copy_namespace);
        Err(Error::NotListed { namespace })
    }

    /// The sources that a job names; none for a job in the daemons' own namespace.
    pub fn sources_of(&self, job: &PullJob) -> Vec<Key> {
        let namespace = job.key.namespace.as_deref().unwrap_or_default();
        let mut unique = BTreeSet::new();
        let names = job
            .spec
            .pull_secrets
            .iter()
            .filter(|_| *namespace != *self.copy_namespace);
        let names = names.filter(|name| unique.insert(*name));
        names.map(|name| Key::namespaced(namespace, name)).collect()
    }

    /// What a job in the daemons' own namespace writes into NodeImages: its Secrets themselves.
    pub fn uncopied_references(&self, job: &PullJob) -> Vec<ReferenceObject> {
        let namespace = job.key.namespace.as_deref().unwrap_or_default();
        let names = job
            .spec
            .pull_secrets
            .iter()
            .filter(|_| *namespace == *self.copy_namespace);
        names.map(|name| reference(namespace, name, None)).collect()
    }

    /// What a job writes into NodeImages for a copy; also if the source is missing, so that daemons report it.
    pub fn copy_reference(&self, plan: &CopyPlan) -> ReferenceObject {
        reference(&self.copy_namespace, &plan.copy, Some(keys::MODE_BATCH))
    }

    /// Plans the copy of each source of a job. Writes nothing.
    pub fn plan_copies(&self, job: &PullJob) -> impl Stream<Item = Result<(Key, CopyPlan), Error>> {
        let reads = self.sources_of(job).into_iter().map(|source| {
            let (this, job) = (self.clone(), job.key.to_string());
            async move {
                let namespace = source.namespace.as_deref().unwrap_or_default();
                let source_api = Api::<Secret>::namespaced(this.cluster.client.clone(), namespace);
                // Without the copies no plan is possible.
                this.all_copies()?;
                let source_secret = write::get(&source_api, &source.name).await?;
                let copies = this.all_copies()?;
                let views: Vec<&CopyView> = copies.iter().map(AsRef::as_ref).collect();
                let plan = plan_copy(
                    &source,
                    source_secret.as_ref(),
                    &views,
                    &job,
                    &this.copy_namespace,
                );
                Ok((source, plan))
            }
        });
        stream::iter(reads).buffered(MAX_CONCURRENT_READS)
    }

    /// Executes the plan of one copy.
    pub async fn execute(&self, plan: &CopyPlan) -> Result<(), Error> {
        let copies_api = Api::<Secret>::namespaced(self.cluster.client.clone(), &self.copy_namespace);
        match &plan.step {
            CopyStep::Nothing => {}
            CopyStep::Create(secret) => {
                write::create(&copies_api, secret).await?;
                tracing::info!(copy = plan.copy, "pull secret copied");
            }
            CopyStep::Replace(secret) => {
                write::replace(&copies_api, secret).await?;
            }
            CopyStep::Delete(uid) => write::delete(&copies_api, &plan.copy, uid).await?,
        }
        Ok(())
    }

    /// Removes a job from its copies. A missing namespace or copy is no error; of several errors the last is returned.
    pub async fn release(&self, job: &Key) -> Result<(), Error> {
        let copies_api = Api::<Secret>::namespaced(self.cluster.client.clone(), &self.copy_namespace);
        let (job, mut result) = (job.to_string(), Ok(()));
        for copy in self.all_copies()? {
            if !copy.references.contains(&job) {
                continue;
            }
            let body = json!({ "metadata": {
                "resourceVersion": copy.resource_version,
                "annotations": { (keys::SECRET_REFERENCES): references_without(&copy, &job) },
            }});
            match write::patch_merge(&copies_api, &copy.name, &body).await {
                Err(error) if !error.not_found() => result = Err(error.into()),
                _ => {}
            }
        }
        result
    }

    /// Deletes a copy that no job has needed for a while; returns when to check a newer one again.
    pub async fn delete_unused(&self, name: &str) -> Result<RequeueAfter, Error> {
        let copy = self.copies.get(&Key::namespaced(&*self.copy_namespace, name));
        let Some(copy) = copy.filter(|copy| copy.references.is_empty()) else {
            self.lock_unused().0.remove(name);
            return Ok(None);
        };
        let remaining = self
            .lock_unused()
            .remaining(name, &copy.resource_version, Instant::now());
        if !remaining.is_zero() {
            return Ok(Some(remaining));
        }
        let copies_api = Api::<Secret>::namespaced(self.cluster.client.clone(), &self.copy_namespace);
        write::delete_if_unchanged(&copies_api, name, &copy.uid, Some(&copy.resource_version)).await?;
        self.lock_unused().0.remove(name);
        tracing::info!(
            copy = name,
            "copy of a pull secret deleted: no ImagePullJob needs it"
        );
        Ok(None)
    }

    fn lock_unused(&self) -> MutexGuard<'_, UnusedCopies> {
        self.unused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a job has copies.
    pub fn has_copies(&self, job: &Key) -> bool {
        let job = job.to_string();
        self.copies.list().iter().any(|c| c.references.contains(&job))
    }

    /// Changes of the copies by any writer.
    pub fn subscribe(&self) -> mpsc::UnboundedReceiver<kruise_cluster::Change<CopyView>> {
        self.copies.subscribe()
    }
}

/// Copies that no job needs: the version of each, and when it was first seen.
#[derive(Debug, Default)]
struct UnusedCopies(HashMap<String, (String, Instant)>);

impl UnusedCopies {
    /// How long an unneeded copy is kept.
    fn remaining(&mut self, name: &str, version: &str, now: Instant) -> Duration {
        let (last_version, since) = self
            .0
            .entry(name.to_owned())
            .or_insert_with(|| (version.to_owned(), now));
        if last_version != version {
            // A job needed it in between.
            (*last_version, *since) = (version.to_owned(), now);
        }
        UNUSED_COPY_TTL.saturating_sub(now.duration_since(*since))
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
    fn unused_copy_is_kept_for_the_ttl() {
        let (mut idle, start) = (UnusedCopies::default(), Instant::now());
        let mut left =
            |version: &str, after: u64| idle.remaining("copy", version, start + Duration::from_secs(after));
        let seconds = Duration::from_secs;
        assert_eq!([left("1", 0), left("1", 2)], [seconds(5), seconds(3)]);
        // A job needed it in between.
        assert_eq!([left("2", 4), left("2", 8)], [seconds(5), seconds(1)]);
        assert_eq!(left("2", 9), Duration::ZERO);
    }

    /// A policy that protects a copy must not hold a deleted job.
    #[test]
    fn denial_is_not_retried_whatever_its_code() {
        let error = |code: u16, message: &str| {
            let status = kube::core::Status::failure(message, "Some").with_code(code);
            Error::Api(cluster::Error::Api(Box::new(status)))
        };
        assert!(error(503, "no endpoints").retryable());
        for code in [403, 503] {
            assert!(!error(code, "admission webhook \"w\" denied the request: no").retryable());
        }
    }
}

//! Watches the Secrets that jobs name: one watch per namespace, for any number of names.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::{ListParams, PartialObjectMeta};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};

use kruise_cluster::{Cluster, Key, metadata_client};

/// Namespaces that are watched at once: each watch is a connection.
const MAX_WATCHED_NAMESPACES: usize = 200;
/// Secrets per page of a list. Their metadata may have 256 KiB of annotations each.
const PAGE_SIZE: u32 = 20;

/// The namespaces of unfinished jobs with pull secrets.
pub struct SourceWatches {
    cluster: Cluster,
    /// Requests metadata only.
    client: kube::Client,
    changed_tx: mpsc::UnboundedSender<Key>,
    namespaces: BTreeMap<String, WatchedNamespace>,
    tasks: JoinSet<()>,
}

#[derive(Default)]
struct WatchedNamespace {
    /// The names that each job needs, by the job's name.
    jobs: HashMap<String, BTreeSet<String>>,
    watch: Option<AbortHandle>,
}

impl SourceWatches {
    /// No watches yet; `changed_tx` gets the key of each changed Secret.
    pub fn new(cluster: &Cluster, changed_tx: mpsc::UnboundedSender<Key>) -> Self {
        Self {
            cluster: cluster.clone(),
            client: metadata_client(&cluster.client),
            changed_tx,
            namespaces: BTreeMap::new(),
            tasks: JoinSet::new(),
        }
    }

    /// Sets the sources that a job needs of its namespace, and removes others.
    pub fn set_needed(&mut self, job: &Key, sources: Vec<Key>) {
        while self.tasks.try_join_next().is_some() {}
        let name = job.namespace.clone().unwrap_or_default();
        if sources.is_empty() {
            let Some(namespace) = self.namespaces.get_mut(&name) else {
                return;
            };
            namespace.jobs.remove(&job.name);
            if namespace.jobs.is_empty()
                && let Some(WatchedNamespace {
                    watch: Some(watch), ..
                }) = self.namespaces.remove(&name)
            {
                watch.abort();
            }
        } else {
            let names = sources.into_iter().map(|source| source.name).collect();
            let namespace = self.namespaces.entry(name).or_default();
            namespace.jobs.insert(job.name.clone(), names);
        }
        self.start_watches();
    }

    /// Starts watches, up to the limit.
    fn start_watches(&mut self) {
        let watched = self.namespaces.values().filter(|n| n.watch.is_some()).count();
        let unwatched = self.namespaces.iter_mut().filter(|(_, n)| n.watch.is_none());
        for (name, namespace) in unwatched.take(MAX_WATCHED_NAMESPACES.saturating_sub(watched)) {
            let api = Api::namespaced(self.client.clone(), name);
            let task = watch_namespace(self.cluster.clone(), api, self.changed_tx.clone());
            namespace.watch = Some(self.tasks.spawn(task));
        }
    }

    /// The jobs that need a source.
    pub fn jobs_using(&self, source: &Key) -> impl Iterator<Item = Key> {
        let namespace = source.namespace.as_deref().unwrap_or_default();
        let jobs = self.namespaces.get(namespace).into_iter().flat_map(|n| &n.jobs);
        let needing = jobs.filter(|(_, names)| names.contains(&source.name));
        needing.map(move |(job, _)| Key::namespaced(namespace, job))
    }

    /// The jobs of namespaces that are not watched.
    pub fn unwatched_jobs(&self) -> impl Iterator<Item = Key> {
        let unwatched = self.namespaces.iter().filter(|(_, n)| n.watch.is_none());
        unwatched.flat_map(|(name, n)| n.jobs.keys().map(move |job| Key::namespaced(name, job)))
    }
}

/// Watches the metadata of a namespace's Secrets, and keeps only their versions.
async fn watch_namespace(
    cluster: Cluster,
    api: Api<PartialObjectMeta<Secret>>,
    changed_tx: mpsc::UnboundedSender<Key>,
) {
    let (versions, task) = cluster.optional_reflector(
        api,
        ListParams::default().limit(PAGE_SIZE),
        |s: PartialObjectMeta<Secret>| s.metadata.resource_version,
    );
    let mut changes = versions.subscribe();
    let send = async {
        while let Some(change) = changes.recv().await {
            if changed_tx.send(change.key).is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = task => {}
        () = send => {}
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use std::convert::Infallible;
    use std::sync::{Arc, Mutex};

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;
    use tower::service_fn;

    use super::*;

    /// The requests: path with query, and the `Accept` header.
    type RecordedRequests = Arc<Mutex<Vec<(String, String)>>>;

    /// An API server with one Secret.
    fn server() -> (Cluster, RecordedRequests) {
        let requests = RecordedRequests::default();
        let log = Arc::clone(&requests);
        let service = service_fn(move |request: Request<Body>| {
            let accepted = request.headers()["accept"].to_str().unwrap().to_owned();
            log.lock().unwrap().push((request.uri().to_string(), accepted));
            let watch = request.uri().to_string().contains("watch=true");
            async move {
                if watch {
                    std::future::pending::<()>().await;
                }
                let item = json!({ "metadata": { "name": "s", "namespace": "n", "resourceVersion": "1" } });
                let list = json!({ "metadata": { "resourceVersion": "1" }, "items": [item] });
                Ok::<_, Infallible>(Response::new(Body::from(list.to_string().into_bytes())))
            }
        });
        let cluster = Cluster::from_client(kube::Client::new(service, "default"));
        (cluster, requests)
    }

    fn names(namespace: &str, names: impl IntoIterator<Item = String>) -> Vec<Key> {
        let names = names.into_iter();
        names.map(|name| Key::namespaced(namespace, name)).collect()
    }

    #[tokio::test]
    async fn namespace_is_watched_once_as_metadata() {
        let (cluster, requests) = server();
        let (wake_tx, mut wake_rx) = mpsc::unbounded_channel();
        let mut sources = SourceWatches::new(&cluster, wake_tx);
        for job in 0..50 {
            let job = Key::namespaced("n", format!("j{job}"));
            let own = (0..64)
                .map(|n| format!("{}-{n}", job.name))
                .chain(["s".to_owned()]);
            sources.set_needed(&job, names("n", own));
        }
        let changed = wake_rx.recv().await.unwrap();
        assert_eq!(sources.jobs_using(&changed).count(), 50, "{changed}");
        assert_eq!(sources.jobs_using(&Key::namespaced("n", "j7-3")).count(), 1);
        assert_eq!(sources.jobs_using(&Key::namespaced("other", "s")).count(), 0);
        while requests.lock().unwrap().len() < 2 {
            tokio::task::yield_now().await;
        }
        let requests = requests.lock().unwrap().clone();
        let [(list, as_list), (watch, as_watch)] = requests.as_slice() else {
            panic!("{requests:?}")
        };
        assert!(list.starts_with("/api/v1/namespaces/n/secrets?"), "{list}");
        assert!(as_list.contains("as=PartialObjectMetadataList;"), "{as_list}");
        assert!(watch.contains("watch=true"), "{watch}");
        assert!(as_watch.contains("as=PartialObjectMetadata;"), "{as_watch}");
    }

    #[tokio::test]
    async fn watched_namespaces_are_bounded() {
        let (cluster, _) = server();
        let mut sources = SourceWatches::new(&cluster, mpsc::unbounded_channel().0);
        let job = |n: usize| Key::namespaced(format!("n{n:03}"), "job");
        let some = |n: usize| names(&format!("n{n:03}"), ["s".to_owned()]);
        for n in 0..MAX_WATCHED_NAMESPACES + 2 {
            sources.set_needed(&job(n), some(n));
        }
        assert_eq!(sources.tasks.len(), MAX_WATCHED_NAMESPACES);
        let unwatched: Vec<Key> = sources.unwatched_jobs().collect();
        assert_eq!(
            unwatched,
            [job(MAX_WATCHED_NAMESPACES), job(MAX_WATCHED_NAMESPACES + 1)]
        );
        sources.set_needed(&job(3), Vec::new());
        sources.set_needed(&job(MAX_WATCHED_NAMESPACES + 1), Vec::new());
        assert_eq!(sources.unwatched_jobs().count(), 0);
        assert_eq!(sources.jobs_using(&Key::namespaced("n003", "s")).count(), 0);
    }
}

//! Where the Secrets that jobs name are watched: one watch a namespace, whatever number of names jobs give.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::{ListParams, PartialObjectMeta};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};

use kruise_cluster::{Key, metadata_client, optional_mirror};

/// Namespaces that are watched at a time: each watch is a connection.
const MOST_WATCHED: usize = 200;
/// Secrets per page of a list. Their metadata may have 256 KiB of annotations each.
const PAGE: u32 = 20;

/// The namespaces of unfinished jobs with pull secrets.
pub struct Sources {
    client: kube::Client,
    wake: mpsc::UnboundedSender<Key>,
    namespaces: BTreeMap<String, Namespace>,
    tasks: JoinSet<()>,
}

#[derive(Default)]
struct Namespace {
    /// The names that each job needs, by the job's name.
    jobs: HashMap<String, BTreeSet<String>>,
    watch: Option<AbortHandle>,
}

impl Sources {
    /// No watch yet; `wake` gets the key of each Secret that changed.
    pub fn new(client: &kube::Client, wake: mpsc::UnboundedSender<Key>) -> Self {
        Self {
            client: metadata_client(client),
            wake,
            namespaces: BTreeMap::new(),
            tasks: JoinSet::new(),
        }
    }

    /// A job needs these sources of its namespace from now on, and no others.
    pub fn need(&mut self, job: &Key, sources: Vec<Key>) {
        while self.tasks.try_join_next().is_some() {}
        let name = job.namespace.clone().unwrap_or_default();
        if sources.is_empty() {
            let Some(namespace) = self.namespaces.get_mut(&name) else {
                return;
            };
            namespace.jobs.remove(&job.name);
            if namespace.jobs.is_empty()
                && let Some(Namespace {
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
        self.watch();
    }

    /// Watches as many namespaces as it may.
    fn watch(&mut self) {
        let watched = self.namespaces.values().filter(|n| n.watch.is_some()).count();
        let unwatched = self.namespaces.iter_mut().filter(|(_, n)| n.watch.is_none());
        for (name, namespace) in unwatched.take(MOST_WATCHED.saturating_sub(watched)) {
            let task = follow(self.client.clone(), name.clone(), self.wake.clone());
            namespace.watch = Some(self.tasks.spawn(task));
        }
    }

    /// The jobs that need a source.
    pub fn jobs(&self, source: &Key) -> impl Iterator<Item = Key> {
        let namespace = source.namespace.as_deref().unwrap_or_default();
        let jobs = self.namespaces.get(namespace).into_iter().flat_map(|n| &n.jobs);
        let needing = jobs.filter(|(_, names)| names.contains(&source.name));
        needing.map(move |(job, _)| Key::namespaced(namespace, job))
    }

    /// The jobs of namespaces that are not watched.
    pub fn unwatched(&self) -> impl Iterator<Item = Key> {
        let unwatched = self.namespaces.iter().filter(|(_, n)| n.watch.is_none());
        unwatched.flat_map(|(name, n)| n.jobs.keys().map(move |job| Key::namespaced(name, job)))
    }
}

/// Watches the metadata of a namespace's Secrets, and keeps their versions only.
async fn follow(client: kube::Client, namespace: String, wake: mpsc::UnboundedSender<Key>) {
    let api = Api::<PartialObjectMeta<Secret>>::namespaced(client, &namespace);
    let (versions, task) = optional_mirror(
        api,
        ListParams::default().limit(PAGE),
        |s: PartialObjectMeta<Secret>| s.metadata.resource_version,
    );
    let mut changes = versions.subscribe();
    let send = async {
        while let Some(change) = changes.recv().await {
            if wake.send(change.key).is_err() {
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

    /// What was asked: path with query, and `Accept`.
    type Asked = Arc<Mutex<Vec<(String, String)>>>;

    /// An API server with one Secret.
    fn server() -> (kube::Client, Asked) {
        let asked = Asked::default();
        let log = Arc::clone(&asked);
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
        (kube::Client::new(service, "default"), asked)
    }

    fn names(namespace: &str, names: impl IntoIterator<Item = String>) -> Vec<Key> {
        let names = names.into_iter();
        names.map(|name| Key::namespaced(namespace, name)).collect()
    }

    #[tokio::test]
    async fn a_namespace_is_watched_once_whatever_its_jobs_name_and_as_metadata() {
        let (client, asked) = server();
        let (wake_tx, mut wake_rx) = mpsc::unbounded_channel();
        let mut sources = Sources::new(&client, wake_tx);
        for job in 0..50 {
            let job = Key::namespaced("n", format!("j{job}"));
            let own = (0..64)
                .map(|n| format!("{}-{n}", job.name))
                .chain(["s".to_owned()]);
            sources.need(&job, names("n", own));
        }
        let changed = wake_rx.recv().await.unwrap();
        assert_eq!(sources.jobs(&changed).count(), 50, "{changed}");
        assert_eq!(sources.jobs(&Key::namespaced("n", "j7-3")).count(), 1);
        assert_eq!(sources.jobs(&Key::namespaced("other", "s")).count(), 0);
        while asked.lock().unwrap().len() < 2 {
            tokio::task::yield_now().await;
        }
        let asked = asked.lock().unwrap().clone();
        let [(list, as_list), (watch, as_watch)] = asked.as_slice() else {
            panic!("{asked:?}")
        };
        assert!(list.starts_with("/api/v1/namespaces/n/secrets?"), "{list}");
        assert!(as_list.contains("as=PartialObjectMetadataList;"), "{as_list}");
        assert!(watch.contains("watch=true"), "{watch}");
        assert!(as_watch.contains("as=PartialObjectMetadata;"), "{as_watch}");
    }

    #[tokio::test]
    async fn a_bounded_number_of_namespaces_is_watched_and_the_next_takes_a_free_place() {
        let (client, _) = server();
        let mut sources = Sources::new(&client, mpsc::unbounded_channel().0);
        let job = |n: usize| Key::namespaced(format!("n{n:03}"), "job");
        let some = |n: usize| names(&format!("n{n:03}"), ["s".to_owned()]);
        for n in 0..MOST_WATCHED + 2 {
            sources.need(&job(n), some(n));
        }
        assert_eq!(sources.tasks.len(), MOST_WATCHED);
        let unwatched: Vec<Key> = sources.unwatched().collect();
        assert_eq!(unwatched, [job(MOST_WATCHED), job(MOST_WATCHED + 1)]);
        sources.need(&job(3), Vec::new());
        sources.need(&job(MOST_WATCHED + 1), Vec::new());
        assert_eq!(sources.unwatched().count(), 0);
        assert_eq!(sources.jobs(&Key::namespaced("n003", "s")).count(), 0);
    }
}

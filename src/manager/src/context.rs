//! The context that every controller gets.

use std::sync::Arc;

use futures::{StreamExt, TryStreamExt, future, stream};
use k8s_openapi::NamespaceResourceScope;
use kube::{Api, Resource};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::restarts::Restarts;
use super::{Options, Stores};
use kruise_cluster::queue::{self, QueueKey, ReconcileFuture};
use kruise_cluster::{Change, Cluster, Error, Key};
use kruise_ops::Progress;
use kruise_ops::panics::catch_panic_sync;

/// The context of every controller; cheap to clone.
#[derive(Clone)]
pub struct Context {
    /// Client, clock and events.
    pub cluster: Cluster,
    /// Stores of the watched objects.
    pub stores: Stores,
    /// The command line.
    pub options: Arc<Options>,
    /// What the controllers that restart containers share.
    pub restarts: Arc<Restarts>,
    /// Where controllers report their current step.
    pub progress: Progress,
    /// Cancelled at shutdown or when the Lease is lost.
    pub shutdown: CancellationToken,
}

impl Context {
    /// The API of a kind in the namespace of `key`.
    pub fn api<K>(&self, key: &Key) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        let namespace = key.namespace.as_deref().unwrap_or_default();
        Api::namespaced(self.cluster.client.clone(), namespace)
    }

    /// Processes the keys that `enqueue` sends, at most `workers` at once, until shutdown or until `enqueue` ends.
    pub async fn run_workers<K, W, F>(
        &self,
        name: &'static str,
        workers: usize,
        keys: mpsc::UnboundedReceiver<K>,
        enqueue: impl Future<Output = ()>,
        work: W,
    ) where
        K: QueueKey,
        W: Fn(K) -> F,
        F: ReconcileFuture,
    {
        let shutdown = self.shutdown.clone();
        tokio::select! {
            () = queue::run(name, keys, workers, &self.progress, shutdown, work) => {}
            () = enqueue => {}
        }
    }
}

/// Objects of a reconcile that are read in parallel.
const MAX_READS: usize = 8;

/// Reads objects, some at a time: one after the other, they could take longer than a reconcile may.
///
/// # Errors
/// The first error.
pub async fn fetch_all<F, T>(reads: impl IntoIterator<Item = F>) -> Result<(), Error>
where
    F: Future<Output = Result<T, Error>>,
{
    let reads = stream::iter(reads).buffer_unordered(MAX_READS);
    reads.try_for_each(|_| future::ok(())).await
}

/// Sends the keys of relevant changes. After a panic the key is sent too, and its reconcile decides.
pub async fn enqueue_changes<T>(
    name: &'static str,
    mut changes: mpsc::UnboundedReceiver<Change<T>>,
    keys: mpsc::UnboundedSender<Key>,
    is_relevant: impl Fn(&Change<T>) -> bool,
) {
    while let Some(change) = changes.recv().await {
        let object = format_args!("change of {}", change.key);
        let relevant = catch_panic_sync(name, object, || is_relevant(&change)).unwrap_or(true);
        if relevant && keys.send(change.key).is_err() {
            return;
        }
    }
}

#[cfg(test)]
impl Context {
    /// A context of an empty cluster.
    pub fn for_test(client: kube::Client) -> Self {
        Self {
            cluster: Cluster::from_client(client),
            stores: Stores::empty(),
            options: Arc::default(),
            restarts: Arc::default(),
            progress: Progress::default(),
            shutdown: CancellationToken::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn panicking_change_is_enqueued_and_delays_no_other() {
        let (changes_tx, changes) = mpsc::unbounded_channel();
        let (keys_tx, mut keys) = mpsc::unbounded_channel();
        let key = |name| Key::namespaced("n", name);
        for name in ["panics", "plain", "concerned"] {
            let (old, new) = (None::<Arc<()>>, None);
            let _ = changes_tx.send(Change {
                key: key(name),
                old,
                new,
            });
        }
        drop(changes_tx);
        enqueue_changes("test", changes, keys_tx, |change| {
            assert_ne!(change.key.name, "panics");
            change.key.name == "concerned"
        })
        .await;
        assert_eq!(keys.recv().await, Some(key("panics")));
        assert_eq!(keys.recv().await, Some(key("concerned")));
        assert_eq!(keys.recv().await, None);
    }
}

//! What every controller is given.

use std::sync::Arc;

use k8s_openapi::NamespaceResourceScope;
use kube::{Api, Resource};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{Options, Stores};
use kruise_cluster::queue::{self, Named, Pass};
use kruise_cluster::{Cluster, Key};
use kruise_ops::Progress;

/// What every controller is given; cheap to clone.
#[derive(Clone)]
pub struct Context {
    /// The connection to the cluster.
    pub cluster: Cluster,
    /// What is known of the cluster.
    pub stores: Stores,
    /// The command line.
    pub options: Arc<Options>,
    /// Where controllers say what they are in the middle of.
    pub progress: Progress,
    /// Cancelled when the process ends or the Lease is lost.
    pub shutdown: CancellationToken,
}

impl Context {
    /// The objects of a kind in the namespace of `key`.
    pub fn api<K>(&self, key: &Key) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        let namespace = key.namespace.as_deref().unwrap_or_default();
        Api::namespaced(self.cluster.client.clone(), namespace)
    }

    /// Works on the keys that `wake` sends, `workers` at once at most, until shutdown or until `wake` ends.
    pub async fn work<K, W, F>(
        &self,
        name: &'static str,
        workers: usize,
        keys: mpsc::UnboundedReceiver<K>,
        wake: impl Future<Output = ()>,
        work: W,
    ) where
        K: Named,
        W: Fn(K) -> F,
        F: Pass,
    {
        let shutdown = self.shutdown.clone();
        tokio::select! {
            () = queue::run(name, keys, workers, &self.progress, shutdown, work) => {}
            () = wake => {}
        }
    }
}

#[cfg(test)]
impl Context {
    /// A context of a cluster in which there is nothing.
    pub fn of(client: kube::Client) -> Self {
        Self {
            cluster: Cluster::of(client),
            stores: Stores::empty(),
            options: Arc::default(),
            progress: Progress::default(),
            shutdown: CancellationToken::new(),
        }
    }
}

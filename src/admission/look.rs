//! What answers need to know of the cluster.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use kube::runtime::watcher;
use serde_json::Value;

use super::container_recreate_request::Seen;
use super::review::Request;
use crate::api::keys;
use crate::cluster::{Cluster, Key, Mirror, mirror, write};

/// What we read for an answer must be there by then; the API server waits 10 s for us.
const READ: Duration = Duration::from_secs(5);
/// The same where it is only for a warning; such a webhook is waited for 5 s.
const GLANCE: Duration = Duration::from_secs(2);
/// Nodes that are looked up for a warning.
const LOOKED_UP: usize = 16;

/// Looks at the cluster for answers; clones share what is known.
#[derive(Clone)]
pub(super) struct Look {
    /// The connection.
    pub cluster: Cluster,
    virtual_nodes: Mirror<()>,
}

impl Look {
    /// Also gives the task that keeps it up to date. Only virtual nodes are watched, of which there are
    /// few or none, so that an answer need not ask for the Pod's node.
    pub fn new(cluster: &Cluster) -> (Self, impl Future<Output = ()>) {
        let nodes: Api<Node> = Api::all(cluster.client.clone());
        let only =
            watcher::Config::default().labels(&format!("{}={}", keys::TYPE, keys::TYPE_VIRTUAL_KUBELET));
        let (virtual_nodes, watching) = mirror(nodes, only, |_: Node| Some(()));
        (
            Self {
                cluster: cluster.clone(),
                virtual_nodes,
            },
            watching,
        )
    }

    /// The Pod of a request to be created, and whether its node is a virtual one.
    ///
    /// # Errors
    /// In words, when it cannot be said in time.
    pub async fn at_pod(&self, asked: &Request) -> Result<Seen, String> {
        let name = asked.object["spec"]["podName"].as_str().unwrap_or_default();
        if name.is_empty() {
            return Ok(Seen::default());
        }
        let pods: Api<Pod> = Api::namespaced(self.cluster.client.clone(), &asked.namespace);
        let looking = async {
            self.virtual_nodes.synced().await;
            write::get(&pods, name).await
        };
        let pod = match tokio::time::timeout(READ, looking).await {
            Ok(pod) => pod.map_err(|why| why.to_string())?,
            Err(_) => return Err(format!("no answer within {READ:?}")),
        };
        let node = pod
            .as_ref()
            .and_then(|pod| pod.spec.as_ref()?.node_name.as_deref());
        let virtual_node = node.is_some_and(|node| self.virtual_nodes.get(&Key::cluster(node)).is_some());
        Ok(Seen { pod, virtual_node })
    }

    /// Those of a job's nodes that do not exist, if that can be said in time; it is only for a warning.
    pub async fn unknown_nodes(&self, asked: &Request) -> Vec<String> {
        let named = asked.object["spec"]["selector"]["names"].as_array();
        let names = named
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .take(LOOKED_UP);
        let nodes: Api<Node> = Api::all(self.cluster.client.clone());
        let lookups = names.map(|name| {
            let nodes = &nodes;
            async move { matches!(write::get(nodes, name).await, Ok(None)).then(|| name.to_owned()) }
        });
        let all = tokio::time::timeout(GLANCE, futures::future::join_all(lookups)).await;
        all.unwrap_or_default().into_iter().flatten().collect()
    }
}

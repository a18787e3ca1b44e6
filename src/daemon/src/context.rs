//! What every controller depends on.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::live::LiveState;
use super::options::Options;
use super::stop_slots::StopSlots;
use kruise_cluster::Cluster;
use kruise_cri::Runtimes;
use kruise_ops::Health;

/// The dependencies of every controller; cheap to clone.
#[derive(Clone)]
pub struct Context {
    /// The node's name in the cluster.
    pub node_name: String,
    /// The connection to the cluster.
    pub cluster: Cluster,
    /// The container runtimes of this node.
    pub runtimes: Runtimes,
    /// Limits the containers that are stopped at once.
    pub stop_slots: Arc<StopSlots>,
    /// Where the controller publishes its current state.
    pub live: LiveState,
    /// Where the controller reports its health.
    pub health: Health,
    /// The options of the process.
    pub options: Arc<Options>,
    /// Cancelled when the process must stop; a write in progress is finished first.
    pub shutdown: CancellationToken,
}

#[cfg(test)]
impl Context {
    /// A context of node `n`, whose runtime panics.
    pub(crate) fn for_test(client: kube::Client) -> Self {
        Self {
            node_name: "n".to_owned(),
            cluster: Cluster::from_client(client),
            runtimes: Runtimes::from_runtime(kruise_cri::panicking::PanickingRuntime("containerd")),
            stop_slots: Arc::default(),
            live: LiveState::default(),
            health: Health::default(),
            options: Arc::default(),
            shutdown: CancellationToken::new(),
        }
    }
}

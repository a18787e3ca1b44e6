//! The daemon: one directory per controller, each with its own entry point.
//!
//! In:  options from the command line, the node's name, the runtime's sockets, the API server.
//! Out: the actions of the controllers; health, metrics and the control API for them.

pub mod container_meta;
pub mod control;
mod fence;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod hook;
pub mod image_pull;
pub mod live;
mod options;
pub mod pod_probe;
pub mod pods;
pub mod pull_command;
pub mod recreate;
mod run;
pub mod stop_slots;
mod yaml;

use tokio_util::sync::CancellationToken;

use kruise_cluster::Cluster;
use kruise_cri::Runtimes;
use kruise_ops::Health;

pub use live::LiveState;
pub use options::Options;
pub use run::{Error, run};

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
    pub stop_slots: std::sync::Arc<stop_slots::StopSlots>,
    /// Where the controller publishes its current state.
    pub live: LiveState,
    /// Where the controller reports its health.
    pub health: Health,
    /// The options of the process.
    pub options: std::sync::Arc<Options>,
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
            stop_slots: std::sync::Arc::default(),
            live: LiveState::default(),
            health: Health::default(),
            options: std::sync::Arc::default(),
            shutdown: CancellationToken::new(),
        }
    }
}

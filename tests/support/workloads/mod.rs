//! A node with what users install, our daemon and our manager as processes of it, and CloneSets on it.
//!
//! * here: the bed that the tests of a target share, and exclusive or shared access to it.
//! * `node_namespace`: a namespace of one test, with CloneSets, and helpers for them.
//! * `pod_monitor`: observes Pods during a whole test, for states that must never occur.

mod node_namespace;
mod pod_monitor;

use testbed::cluster::{Component, Node};
use tokio::sync::{OnceCell, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::manager::Manager;
use super::programs;

pub use node_namespace::{NodeNamespace, template};
pub use pod_monitor::{ObservedPods, PodMonitor};

static CLUSTER: OnceCell<RwLock<TestCluster>> = OnceCell::const_new();

/// The node and our programs on it.
pub struct TestCluster {
    pub node: Node,
    pub daemon: Component,
    pub manager: Manager,
}

impl TestCluster {
    /// Starts the node and our programs.
    fn start() -> Self {
        let (node, daemon) = programs::start_node();
        let manager = programs::start_manager(&node);
        Self {
            node,
            daemon,
            manager,
        }
    }
}

async fn test_cluster() -> &'static RwLock<TestCluster> {
    let start = || async {
        let cluster = tokio::task::spawn_blocking(TestCluster::start).await;
        RwLock::new(cluster.expect("the bed starts"))
    };
    CLUSTER.get_or_init(start).await
}

/// For a test that leaves node and programs alone; such tests run in parallel.
pub async fn shared_cluster() -> NodeNamespace<RwLockReadGuard<'static, TestCluster>> {
    NodeNamespace::new(test_cluster().await.read().await).await
}

/// For a test that stops parts of the bed: runs alone.
pub async fn exclusive_cluster() -> NodeNamespace<RwLockWriteGuard<'static, TestCluster>> {
    let mut cluster = test_cluster().await.write().await;
    // A failed test may have left them stopped or frozen.
    if !cluster.node.plane.apiserver.is_running() {
        cluster
            .node
            .plane
            .apiserver
            .start()
            .expect("the API server starts");
    }
    if cluster.manager.is_running() {
        cluster.manager.thaw().expect("it runs");
    } else {
        cluster.manager.start().expect("the manager starts");
    }
    cluster.manager.wait_for_readyz_text("leading");
    NodeNamespace::new(cluster).await
}

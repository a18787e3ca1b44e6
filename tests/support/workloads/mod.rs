//! A node with what users install, our daemon and our manager as processes of it, and CloneSets on it.
//!
//! * here: the bed that the tests of a target share, and who may use it when.
//! * `space`: a namespace of one test, with CloneSets, and what tests do there.
//! * `witness`: one who watches Pods through a whole test, for what must never be.

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
    /// Starts everything.
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

/// A test that leaves node and programs alone; such tests run side by side.
pub async fn shared_cluster() -> NodeNamespace<RwLockReadGuard<'static, TestCluster>> {
    NodeNamespace::new(test_cluster().await.read().await).await
}

/// A test that ends or stops parts of the bed: alone.
pub async fn exclusive_cluster() -> NodeNamespace<RwLockWriteGuard<'static, TestCluster>> {
    let mut cluster = test_cluster().await.write().await;
    // A test that failed may have left them ended, or stopped.
    if !cluster.node.plane.apiserver.running() {
        cluster
            .node
            .plane
            .apiserver
            .start()
            .expect("the API server starts");
    }
    if cluster.manager.running() {
        cluster.manager.thaw().expect("it runs");
    } else {
        cluster.manager.start().expect("the manager starts");
    }
    cluster.manager.wait_for_readyz_text("leading");
    NodeNamespace::new(cluster).await
}

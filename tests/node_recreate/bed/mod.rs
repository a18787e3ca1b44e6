//! What the tests of this target stand on: one node for all of them, with the daemon on it.
//!
//! * here: the node, and who may use it when.
//! * `test`: a namespace of one test, to make things in and to ask what happened.

mod test;

use testbed::cluster::{Component, Node};
use tokio::sync::{OnceCell, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::programs;

pub use test::{Test, assert_succeeded, statuses};

static NODE: OnceCell<RwLock<Bed>> = OnceCell::const_new();

/// The node and the daemon that runs on it.
pub struct Bed {
    pub node: Node,
    pub daemon: Component,
}

impl Bed {
    /// The ends of the logs of our programs.
    pub fn tail(&self) -> String {
        programs::tail(&self.node)
    }
}

async fn bed() -> &'static RwLock<Bed> {
    NODE.get_or_init(|| async {
        let start = || {
            let (node, daemon) = programs::node();
            RwLock::new(Bed { node, daemon })
        };
        tokio::task::spawn_blocking(start).await.expect("no panic")
    })
    .await
}

/// A test that leaves the daemon and the cluster alone; such tests run side by side.
pub async fn shared() -> Test<RwLockReadGuard<'static, Bed>> {
    Test::new(bed().await.read().await).await
}

/// A test that ends parts of the bed: alone.
pub async fn alone() -> Test<RwLockWriteGuard<'static, Bed>> {
    let mut bed = bed().await.write().await;
    if !bed.daemon.running() {
        bed.daemon.start().expect("the daemon starts");
    }
    Test::new(bed).await
}

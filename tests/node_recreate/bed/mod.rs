//! What the tests of this target stand on: one node for all of them, with the daemon on it.
//!
//! * here: the node, and who may use it when.
//! * `test`: a namespace of one test, to make things in and to ask what happened.
//! * `daemon`: the daemon as a process.

mod daemon;
mod test;

use std::path::Path;
use std::time::Duration;

use tokio::sync::{OnceCell, RwLock, RwLockReadGuard, RwLockWriteGuard};
use xtask::cluster::Node;

pub use daemon::{Daemon, account, end};
pub use test::{Test, assert_succeeded, statuses};

/// Longer than anything here takes on a slow machine.
pub const LONG: Duration = Duration::from_secs(60);

static NODE: OnceCell<RwLock<Bed>> = OnceCell::const_new();

/// The node and the daemon that runs on it.
pub struct Bed {
    pub node: Node,
    pub daemon: Daemon,
}

async fn bed() -> &'static RwLock<Bed> {
    NODE.get_or_init(|| async {
        let start = || {
            let node = Node::start().expect("the node starts");
            install(&node, "default/namespaces.yaml");
            for folder in ["crds", "rbac", "policies"] {
                install(&node, folder);
            }
            let daemon = Daemon::start(&node, &[]);
            RwLock::new(Bed { node, daemon })
        };
        tokio::task::spawn_blocking(start).await.expect("no panic")
    })
    .await
}

/// Applies a file or folder of `deploy`.
pub fn install(node: &Node, what: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(what);
    let how = if path.is_dir() { "-k" } else { "-f" };
    node.plane
        .kubectl(&["apply", how, &path.display().to_string()])
        .expect("deploy/ can be applied");
}

/// A test that leaves the daemon and the cluster alone; such tests run side by side.
pub async fn shared() -> Test<RwLockReadGuard<'static, Bed>> {
    Test::new(bed().await.read().await).await
}

/// A test that ends parts of the bed: alone.
pub async fn alone() -> Test<RwLockWriteGuard<'static, Bed>> {
    let mut bed = bed().await.write().await;
    if !bed.daemon.running() {
        bed.daemon = Daemon::start(&bed.node, &[]);
    }
    Test::new(bed).await
}

//! A node with what users install, our daemon and our manager as processes of it, and CloneSets on it.
//!
//! * here: the bed that the tests of a target share, and who may use it when.
//! * `program`: the daemon and managers as processes.
//! * `space`: a namespace of one test, with CloneSets, and what tests do and see there.
//! * `witness`: one who watches Pods through a whole test, for what must never be.

mod program;
mod space;
mod witness;

use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::time::Duration;

use tokio::sync::{OnceCell, RwLock, RwLockReadGuard, RwLockWriteGuard};
use xtask::cluster::{Component, Node};

pub use program::Manager;
pub use space::{Space, template};
pub use witness::{Seen, Witness};

/// Longer than anything here takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

static BED: OnceCell<RwLock<Bed>> = OnceCell::const_new();

/// The node and our programs on it.
pub struct Bed {
    pub node: Node,
    pub daemon: Component,
    pub manager: Manager,
}

impl Bed {
    /// Starts everything.
    fn start() -> Self {
        let node = Node::start().expect("the node starts");
        install(&node, "default/namespaces.yaml");
        // Not `default` itself: our programs run as processes here, and its Pods would have no image.
        for folder in ["crds", "rbac", "policies", "webhooks"] {
            install(&node, folder);
        }
        node.plane.apply(STORAGE).expect("a storage class");
        let daemon = program::daemon(&node);
        let mut manager = Manager::new(&node, "kruise-manager", 0);
        manager.start().expect("the manager starts");
        manager.until_it_says("leading");
        Self {
            node,
            daemon,
            manager,
        }
    }

    /// The ends of the logs of our programs.
    pub fn tail(&self) -> String {
        format!(
            "==> manager\n{}\n==> daemon\n{}",
            self.manager.tail(),
            self.daemon.tail()
        )
    }
}

/// What claims that name no class get: kube-controller-manager makes the volumes.
const STORAGE: &str = r#"{"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
    "metadata": {"name": "folders", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
    "provisioner": "kubernetes.io/host-path"}"#;

async fn bed() -> &'static RwLock<Bed> {
    let start = || async {
        let bed = tokio::task::spawn_blocking(Bed::start).await;
        RwLock::new(bed.expect("the bed starts"))
    };
    BED.get_or_init(start).await
}

/// Applies a file or folder of `deploy`.
fn install(node: &Node, what: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(what);
    let how = if path.is_dir() { "-k" } else { "-f" };
    let applied = node.plane.kubectl(&["apply", how, &path.display().to_string()]);
    applied.expect("deploy/ can be applied");
}

/// A test that leaves node and programs alone; such tests run side by side.
pub async fn shared() -> Space<RwLockReadGuard<'static, Bed>> {
    Space::new(bed().await.read().await).await
}

/// A test that ends or stops parts of the bed: alone.
pub async fn alone() -> Space<RwLockWriteGuard<'static, Bed>> {
    let mut bed = bed().await.write().await;
    // A test that failed may have left them ended, or stopped.
    if !bed.node.plane.apiserver.running() {
        bed.node.plane.apiserver.start().expect("the API server starts");
    }
    if bed.manager.running() {
        bed.manager.thaw().expect("it runs");
    } else {
        bed.manager.start().expect("the manager starts");
    }
    bed.manager.until_it_says("leading");
    Space::new(bed).await
}

impl Deref for Manager {
    type Target = Component;
    fn deref(&self) -> &Component {
        &self.program
    }
}

impl Drop for Manager {
    /// One that a failed test made must not lead for the next test.
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.program.kill();
    }
}

impl DerefMut for Manager {
    fn deref_mut(&mut self) -> &mut Component {
        &mut self.program
    }
}

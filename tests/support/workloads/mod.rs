//! A node with what users install, our daemon and our manager as processes of it, and CloneSets on it.
//!
//! * here: the bed that the tests of a target share, and who may use it when.
//! * `space`: a namespace of one test, with CloneSets, and what tests do there.
//! * `witness`: one who watches Pods through a whole test, for what must never be.

mod space;
mod witness;

use testbed::cluster::{Component, Node};
use tokio::sync::{OnceCell, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::manager::Manager;
use super::programs;

pub use space::{Space, template};
pub use witness::{Seen, Witness};

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
        let (node, daemon) = programs::node();
        let manager = programs::manage(&node);
        Self {
            node,
            daemon,
            manager,
        }
    }
}

async fn bed() -> &'static RwLock<Bed> {
    let start = || async {
        let bed = tokio::task::spawn_blocking(Bed::start).await;
        RwLock::new(bed.expect("the bed starts"))
    };
    BED.get_or_init(start).await
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

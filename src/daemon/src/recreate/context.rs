//! What all Pods share.

use jiff::Timestamp;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::plan::{Clocks, RecreateRequest};
use super::runtime_queue::RuntimeQueue;
use crate::Context;
use crate::pods::NodePod;
use kruise_cluster::{Key, Store};

/// The controller's name in `/healthz`.
pub(super) const NAME: &str = "recreate";

/// What all Pods share.
pub(super) struct RecreateContext {
    pub(super) ctx: Context,
    pub(super) requests: Store<RecreateRequest>,
    pub(super) pods: Store<NodePod>,
    pub(super) started_at: Instant,
    pub(super) runtime_queue: RuntimeQueue,
    pub(super) queue_tx: mpsc::UnboundedSender<Key>,
}

impl RecreateContext {
    pub(super) fn now(&self) -> Clocks {
        Clocks {
            api: self.ctx.cluster.clock.now(),
            wall: Timestamp::now(),
            mono: self.started_at.elapsed(),
        }
    }

    /// Lets the Pod of that key be reconciled.
    pub(super) fn enqueue(&self, pod: Key) {
        // The receiver lives until shutdown.
        let _ = self.queue_tx.send(pod);
    }
}

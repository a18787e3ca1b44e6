//! What every controller is given.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::{Options, Stores};
use crate::cluster::Cluster;
use crate::ops::Progress;

/// What every controller is given; cheap to clone.
#[derive(Clone)]
pub struct Context {
    /// The connection to the cluster.
    pub cluster: Cluster,
    /// What is known of the cluster.
    pub stores: Stores,
    /// The command line.
    pub options: Arc<Options>,
    /// Where controllers say what they are in the middle of.
    pub progress: Progress,
    /// Cancelled when the process ends or the Lease is lost.
    pub shutdown: CancellationToken,
}

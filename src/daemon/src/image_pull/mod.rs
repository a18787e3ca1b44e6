//! Pulls the images that this node's NodeImage lists.
//!
//! In:  our NodeImage (watch), pull secrets (by name), the node's own credentials, the runtime's image service.
//! Out: NodeImage status, events on the NodeImage and the tags' owners, metrics `image_pull_*`, live bytes.
//!
//! One task per tag; at most `--max-workers-for-pull-image` attempts at once, and `--max-workers-per-registry` at one
//! registry, shared fairly between namespaces and owners. See [`plan`] for every decision. After a crash of the daemon
//! the runtime keeps what it has fetched, unfinished tags start again and keep their deadline, and finished ones are not
//! repeated; the attempt counter starts again.

pub mod act;
mod controller;
mod disk;
pub(crate) mod node_credentials;
mod observe;
mod pins;
pub mod plan;
mod report;

use std::sync::Arc;

use kube::Api;
use kube::api::ListParams;

use super::Context;
use kruise_api::node_image::NodeImage;
use kruise_ops::flag_values::non_empty_path;
use node_credentials::NodeCredentials;
#[cfg(any(test, feature = "fuzzing"))]
pub(super) use observe::parse_and_plan;
use pins::PinRequests;

/// Why the controller ended early.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The watch on the NodeImage ended, although it never should.
    #[error("the watch on the NodeImage ended")]
    WatchEnded,
}

impl Error {
    /// Whether a restart may help.
    #[must_use]
    pub fn retryable(&self) -> bool {
        true
    }

    /// The value of the metric label and reason.
    #[must_use]
    pub fn category(&self) -> &'static str {
        match self {
            Self::WatchEnded => "watch_ended",
        }
    }
}

/// Pulls until shutdown; the current status is written before this returns.
///
/// # Errors
/// When the watch ends.
pub async fn run(mut ctx: Context) -> Result<(), Error> {
    // OpenKruise's source component of these events; clients may use it in field selectors.
    ctx.cluster.events = ctx.cluster.events.with_component("kruise-daemon-imagepuller");
    let api: Api<NodeImage> = Api::all(ctx.cluster.client.clone());
    let selector = ListParams::default().fields(&format!("metadata.name={}", ctx.node_name));
    let (node_image, watch) = ctx
        .cluster
        .reflector(api, selector, |image| Some(observe::observe(image)));
    let changes = node_image.subscribe();
    let pull = async {
        let config_file = non_empty_path(ctx.options.plugin_config_file.as_ref());
        let plugins = non_empty_path(ctx.options.plugin_bin_dir.as_ref());
        let credentials = NodeCredentials::load(config_file.as_deref(), plugins.as_deref()).await;
        let requests = Arc::new(PinRequests::new(ctx.options.max_pin_seconds));
        let pins = Arc::clone(&requests);
        let controller = controller::ImagePullController::new(ctx.clone(), changes, credentials, pins);
        tokio::select! {
            () = controller.run() => {}
            () = pins::run(&ctx, &requests) => {}
        }
    };
    tokio::select! {
        () = watch => Err(Error::WatchEnded),
        () = pull => Ok(()),
    }
}

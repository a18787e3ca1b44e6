//! Signals that end the command before all images are pulled.

use tokio::signal::ctrl_c;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signals that end the command; results so far are still printed.
pub(super) struct StopSignal {
    sigterm: Option<Signal>,
}

impl StopSignal {
    pub(super) fn new() -> Self {
        Self {
            sigterm: signal(SignalKind::terminate()).ok(),
        }
    }

    /// Returns at SIGINT or SIGTERM. If no signal handler can be installed, it stops at once, which is safer.
    pub(super) async fn received(&mut self) {
        match &mut self.sigterm {
            Some(term) => tokio::select! {
                _ = term.recv() => {}
                _ = ctrl_c() => {}
            },
            None => drop(ctrl_c().await),
        }
    }
}

//! What ends the command before all is pulled.

use tokio::signal::ctrl_c;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signals that end the command: what it knows is still told.
pub(super) struct StopSignal {
    sigterm: Option<Signal>,
}

impl StopSignal {
    pub(super) fn new() -> Self {
        Self {
            sigterm: signal(SignalKind::terminate()).ok(),
        }
    }

    /// Returns at SIGINT or SIGTERM. Where these cannot be waited for, stopping is the safer side.
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

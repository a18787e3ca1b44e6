//! What ends the command before all is pulled.

use tokio::signal::ctrl_c;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signals that end the command: what it knows is still told.
pub(super) struct Stop {
    term: Option<Signal>,
}

impl Stop {
    pub(super) fn new() -> Self {
        Self {
            term: signal(SignalKind::terminate()).ok(),
        }
    }

    /// Returns at SIGINT or SIGTERM. Where these cannot be waited for, stopping is the safer side.
    pub(super) async fn asked(&mut self) {
        match &mut self.term {
            Some(term) => tokio::select! {
                _ = term.recv() => {}
                _ = ctrl_c() => {}
            },
            None => drop(ctrl_c().await),
        }
    }
}

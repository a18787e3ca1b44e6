//! Signals that end a wait.

use tokio::signal::unix::{SignalKind, signal};

/// Returns at SIGINT or SIGTERM; never if they cannot be handled, so that they end the process as by default.
pub async fn interrupted() {
    let signals = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()));
    let (Ok(mut interrupt), Ok(mut terminate)) = signals else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
}

//! The HTTP listener for probes and metrics.

use std::net::SocketAddr;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::Health;
use super::health::Answer;
use super::metrics::metrics;

/// Why the listener could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The text is no address.
    #[error("address {given:?} is not valid: expected HOST:PORT or :PORT")]
    Address {
        /// What was given.
        given: String,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The reason.
        source: std::io::Error,
    },
}

/// What a listener serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serve {
    /// `/healthz` and `/readyz`.
    Health,
    /// `/metrics`.
    Metrics,
    /// All of them.
    Both,
}

/// Opens `address` (`HOST:PORT`, or `:PORT` for all interfaces).
///
/// # Errors
/// When the address is malformed or taken.
pub async fn listen(address: &str) -> Result<TcpListener, Error> {
    let full = if address.starts_with(':') {
        format!("0.0.0.0{address}")
    } else {
        address.replace("localhost", "127.0.0.1")
    };
    let parsed: SocketAddr = full.parse().map_err(|_| Error::Address {
        given: address.to_owned(),
    })?;
    TcpListener::bind(parsed).await.map_err(|source| Error::Listen {
        address: parsed,
        source,
    })
}

/// Serves until shutdown.
///
/// # Errors
/// When the listener breaks.
pub async fn serve(
    listener: TcpListener,
    what: Serve,
    health: Health,
    shutdown: CancellationToken,
) -> Result<(), std::io::Error> {
    let mut router = Router::new();
    if what != Serve::Metrics {
        router = router
            .route(
                "/healthz",
                get(|State(health): State<Health>| async move { answer(health.live()) }),
            )
            .route(
                "/readyz",
                get(|State(health): State<Health>| async move { answer(health.readiness()) }),
            );
    }
    if what != Serve::Health {
        router = router.route("/metrics", get(render));
    }
    axum::serve(listener, router.with_state(health))
        .with_graceful_shutdown(async move { shutdown.cancelled().await })
        .await
}

async fn render() -> impl IntoResponse {
    (
        [(
            CONTENT_TYPE,
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
        )],
        metrics().render(),
    )
}

fn answer(answer: Answer) -> (StatusCode, String) {
    (
        if answer.ok {
            StatusCode::OK
        } else {
            StatusCode::SERVICE_UNAVAILABLE
        },
        answer.text,
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    async fn get(at: SocketAddr) -> String {
        let mut stream = TcpStream::connect(at).await.unwrap();
        let request = "GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        let read = tokio::time::timeout(Duration::from_secs(30), stream.read_to_string(&mut text));
        read.await.unwrap().unwrap();
        text
    }

    #[tokio::test]
    async fn a_duty_that_hangs_makes_the_process_dead_until_it_goes_on() {
        let health = Health::default();
        let hour = Duration::from_secs(3600);
        let step = health.progress.begun(
            "recreate",
            "looking at Pod ns/web-0",
            Duration::from_secs(12),
            hour,
        );
        let listener = listen("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let serving = tokio::spawn(serve(listener, Serve::Health, health, CancellationToken::new()));
        let dead = get(at).await;
        assert!(dead.starts_with("HTTP/1.1 503 "), "{dead}");
        let words =
            "recreate: looking at Pod ns/web-0 takes 3600 s already, and by its own limits 12 s at most";
        assert!(dead.contains(words), "{dead}");
        step.idle(None);
        let alive = get(at).await;
        assert!(
            alive.starts_with("HTTP/1.1 200 ") && alive.ends_with("ok"),
            "{alive}"
        );
        serving.abort();
    }
}

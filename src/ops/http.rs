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
            StatusCode::INTERNAL_SERVER_ERROR
        },
        answer.text,
    )
}

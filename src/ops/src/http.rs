//! The HTTP listener for probes and metrics.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::task::{AbortHandle, JoinSet};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::Health;
use super::health::HealthResponse;
use super::metrics::metrics;

/// Why the listener could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The text is not an address.
    #[error("address {given:?} is not valid: expected HOST:PORT or :PORT")]
    Address {
        /// The given text.
        given: String,
    },
    /// No certificate could be made.
    #[error("cannot make a certificate: {0}")]
    Certificate(String),
    /// The process cannot listen on the address.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The requested address.
        address: SocketAddr,
        /// The operating system's error.
        source: std::io::Error,
    },
}

/// What a listener serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoints {
    /// `/healthz` and `/readyz`.
    Health,
    /// `/metrics`.
    Metrics,
    /// All of them.
    Both,
}

/// Opens `address`: `HOST:PORT` with an IP address or `localhost`, or `:PORT` for all addresses of both IP versions.
///
/// # Errors
/// When the address is malformed or in use.
pub async fn listen(address: &str) -> Result<TcpListener, Error> {
    let invalid = || Error::Address {
        given: address.to_owned(),
    };
    let (host, port) = address.rsplit_once(':').ok_or_else(invalid)?;
    let addresses = match host {
        "" => all_interfaces(port.parse().map_err(|_| invalid())?).to_vec(),
        "localhost" => {
            let port = port.parse().map_err(|_| invalid())?;
            vec![
                (Ipv4Addr::LOCALHOST, port).into(),
                (Ipv6Addr::LOCALHOST, port).into(),
            ]
        }
        _ => vec![address.parse().map_err(|_| invalid())?],
    };
    bind(&addresses).await
}

/// Whether an address is a way to ask for no listener, as in controller-runtime.
#[must_use]
pub fn is_disabled(address: &str) -> bool {
    ["", "0"].contains(&address)
}

/// All addresses of both IP versions; only IPv4 if the machine has no IPv6.
#[must_use]
pub fn all_interfaces(port: u16) -> [SocketAddr; 2] {
    [
        (Ipv6Addr::UNSPECIFIED, port).into(),
        (Ipv4Addr::UNSPECIFIED, port).into(),
    ]
}

/// What counts as one client: its address, the same on an IPv4 and on an IPv6 socket; of IPv6 its network (/64), because
/// one machine can have all addresses of it.
#[must_use]
pub fn client_network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address @ IpAddr::V4(_) => address,
    }
}

/// Opens the first of `addresses` that this machine has.
///
/// # Errors
/// When it is in use, or the machine has none of them.
pub async fn bind(addresses: &[SocketAddr]) -> Result<TcpListener, Error> {
    let mut last = None;
    for &address in addresses {
        match TcpListener::bind(address).await {
            Ok(listener) => return Ok(listener),
            Err(source) => {
                let taken = [ErrorKind::AddrInUse, ErrorKind::PermissionDenied].contains(&source.kind());
                last = Some(Error::Listen { address, source });
                if taken {
                    break;
                }
            }
        }
    }
    Err(last.unwrap_or(Error::Address { given: String::new() }))
}

/// Maximum number of connections. When it is exceeded, the oldest one of the client with the most is closed, so that no
/// client can block kubelet's probes or Prometheus by keeping all of them open.
const MAX_CONNECTIONS: usize = 64;
/// Maximum length of a request, in bytes.
const MAX_REQUEST_BYTES: usize = 16 << 10;
/// How long a client may take to send its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a connection may last: one request, with a response from memory.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(30);

/// Serves until shutdown, one request per connection.
///
/// # Errors
/// None; the type is that of the other long-lived tasks.
pub async fn serve(
    listener: TcpListener,
    endpoints: Endpoints,
    health: Health,
    shutdown: CancellationToken,
) -> Result<(), std::io::Error> {
    let mut router = Router::new();
    if endpoints != Endpoints::Metrics {
        router = router
            .route(
                "/healthz",
                get(|State(health): State<Health>| async move { health_response(health.liveness()) }),
            )
            .route(
                "/readyz",
                get(|State(health): State<Health>| async move { health_response(health.readiness()) }),
            );
    }
    if endpoints != Endpoints::Health {
        router = router.route(
            "/metrics",
            get(|State(health): State<Health>| async move { render_metrics(&health) }),
        );
    }
    accept(listener, None, router.with_state(health), shutdown).await;
    Ok(())
}

/// Accepts connections, each for one request.
pub(super) async fn accept(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    router: Router,
    shutdown: CancellationToken,
) {
    let mut connections = JoinSet::new();
    let mut open: Vec<(IpAddr, AbortHandle)> = Vec::new();
    loop {
        let accepted = tokio::select! {
            // Connections that have ended make room first.
            biased;
            () = shutdown.cancelled() => return,
            _ = connections.join_next(), if !connections.is_empty() => {
                open.retain(|(_, connection)| !connection.is_finished());
                continue;
            }
            accepted = listener.accept() => accepted,
        };
        let (stream, peer) = match accepted {
            Ok((stream, peer)) => (stream, peer.ip()),
            Err(error) => {
                // Out of file descriptors, for example; other connections must end first.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        if open.len() >= MAX_CONNECTIONS
            && let Some(index) = oldest_of_busiest(&open)
        {
            open.remove(index).1.abort();
        }
        let service = TowerToHyperService::new(router.clone().layer(Extension(peer)));
        let connection = match tls.clone() {
            None => connections.spawn(handle_connection(stream, service)),
            Some(tls) => connections.spawn(async move {
                match tokio::time::timeout(REQUEST_TIMEOUT, tls.accept(stream)).await {
                    Ok(Ok(stream)) => handle_connection(stream, service).await,
                    _ => tracing::debug!("a client of the metrics port finished no TLS handshake"),
                }
            }),
        };
        open.push((peer, connection));
    }
}

/// Index of the oldest connection of the address that has the most, in the network that has the most: one machine may
/// have all addresses of its network.
fn oldest_of_busiest<C>(open: &[(IpAddr, C)]) -> Option<usize> {
    let count = |is_same: &dyn Fn(IpAddr) -> bool| open.iter().filter(|(other, _)| is_same(*other)).count();
    let counts = |address: IpAddr| {
        let network = client_network(address);
        let of_network = count(&|other| client_network(other) == network);
        (of_network, count(&|other| other == address))
    };
    // Of equal ones, the last in this order counts.
    (0..open.len())
        .rev()
        .max_by_key(|&index| open.get(index).map(|(address, _)| counts(*address)))
}

/// Answers one request; a client that disconnects or is too slow gets no response.
async fn handle_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    service: TowerToHyperService<Router>,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(REQUEST_TIMEOUT)
        .max_buf_size(MAX_REQUEST_BYTES)
        .keep_alive(false);
    let answered = http.serve_connection(TokioIo::new(stream), service);
    if !matches!(
        tokio::time::timeout(CONNECTION_TIMEOUT, answered).await,
        Ok(Ok(()))
    ) {
        tracing::debug!("a client of the health and metrics port got no answer");
    }
}

pub(super) fn render_metrics(health: &Health) -> Response {
    // Some checks fail by time alone, and the metrics include them.
    let _ = health.readiness();
    (
        [(
            CONTENT_TYPE,
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
        )],
        metrics().render(),
    )
        .into_response()
}

fn health_response(answer: HealthResponse) -> (StatusCode, String) {
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
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;

    async fn get_healthz(address: SocketAddr) -> String {
        get_path(address, "/healthz").await
    }

    async fn get_path(address: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        let read = tokio::time::timeout(Duration::from_secs(30), stream.read_to_string(&mut text));
        read.await.unwrap().unwrap();
        text
    }

    #[tokio::test]
    async fn empty_host_listens_on_both_ip_versions() {
        let listener = listen(":0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
        if std::fs::exists("/proc/net/if_inet6").unwrap() {
            assert!(listener.local_addr().unwrap().is_ipv6());
            TcpStream::connect((Ipv6Addr::LOCALHOST, port)).await.unwrap();
        }
        listen("localhost:0").await.unwrap();
        let taken = listen(&format!(":{port}")).await.unwrap_err().to_string();
        assert!(taken.contains("cannot listen on"), "{taken}");
        for wrong in ["", "8000", "host:", ":http", "example.com:80", ":99999", "[::1]"] {
            let why = listen(wrong).await.unwrap_err().to_string();
            assert!(why.contains("is not valid"), "{wrong}: {why}");
        }
    }

    #[test]
    fn busiest_address_loses_its_oldest_connection() {
        let open = |addresses: &[u8]| -> Vec<(IpAddr, ())> {
            let address = |last: &u8| (IpAddr::from([10, 0, 0, *last]), ());
            addresses.iter().map(address).collect()
        };
        assert_eq!(oldest_of_busiest(&open(&[1, 2, 3, 2])), Some(1));
        assert_eq!(oldest_of_busiest(&open(&[1, 2])), Some(0));
        assert_eq!(oldest_of_busiest(&open(&[])), None);
    }

    #[test]
    fn addresses_of_one_network_count_together() {
        let open = |addresses: &[&str]| -> Vec<(IpAddr, ())> {
            let address = |text: &&str| (text.parse::<IpAddr>().unwrap(), ());
            addresses.iter().map(address).collect()
        };
        let machine = ["2001:db8:1::1", "2001:db8:2::1", "2001:db8:2::2"];
        assert_eq!(oldest_of_busiest(&open(&machine)), Some(1));
        // Pods of one node share a network.
        let neighbours = ["2001:db8:1::1", "2001:db8:1::2", "2001:db8:1::2"];
        assert_eq!(oldest_of_busiest(&open(&neighbours)), Some(1));
    }

    #[tokio::test]
    async fn bind_falls_back_to_the_next_address() {
        // A documentation address, which no machine has.
        let absent: SocketAddr = "[2001:db8::1]:0".parse().unwrap();
        let listener = bind(&[absent, (Ipv4Addr::LOCALHOST, 0).into()]).await.unwrap();
        assert!(listener.local_addr().unwrap().is_ipv4());
        bind(&[absent]).await.unwrap_err();
    }

    #[tokio::test]
    async fn idle_connections_do_not_block_probes() {
        let listener = listen("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let health = Health::default();
        let serving = tokio::spawn(serve(
            listener,
            Endpoints::Health,
            health,
            CancellationToken::new(),
        ));
        let mut idle = Vec::new();
        for _ in 0..2 * MAX_CONNECTIONS {
            idle.push(TcpStream::connect(address).await.unwrap());
        }
        let answered = get_healthz(address).await;
        assert!(answered.starts_with("HTTP/1.1 200 "), "{answered}");
        // The oldest is closed.
        let mut byte = [0];
        let ended = tokio::time::timeout(Duration::from_secs(30), idle[0].read(&mut byte));
        assert!(matches!(ended.await.unwrap(), Ok(0) | Err(_)));
        serving.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn incomplete_request_times_out() {
        let (near, mut far) = tokio::io::duplex(1024);
        far.write_all(b"GET /healthz HTTP/1.1\r\nHost: ").await.unwrap();
        let start = tokio::time::Instant::now();
        let router = TowerToHyperService::new(Router::new());
        handle_connection(near, router).await;
        assert_eq!(start.elapsed().as_secs(), REQUEST_TIMEOUT.as_secs());
    }

    #[tokio::test]
    async fn metrics_include_checks_that_change_by_time_alone() {
        let health = Health::default();
        let watch = health.watches.register("Node");
        let listener = listen("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(serve(
            listener,
            Endpoints::Metrics,
            health,
            CancellationToken::new(),
        ));
        let line = |value: u8| format!("kruise_readiness_check{{check=\"watches\"}} {value}\n");
        let before = get_path(address, "/metrics").await;
        assert!(before.contains(&line(0)), "{before}");
        watch.mark_listed();
        let after = get_path(address, "/metrics").await;
        assert!(after.contains(&line(1)), "{after}");
        serving.abort();
    }

    #[tokio::test]
    async fn hanging_step_fails_liveness_until_it_ends() {
        let health = Health::default();
        let hour = Duration::from_secs(3600);
        let step = health.progress.begin_ago(
            "recreate",
            "looking at Pod ns/web-0",
            Duration::from_secs(12),
            hour,
        );
        let listener = listen("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(serve(
            listener,
            Endpoints::Health,
            health,
            CancellationToken::new(),
        ));
        let dead = get_healthz(address).await;
        assert!(dead.starts_with("HTTP/1.1 503 "), "{dead}");
        let message = "recreate: looking at Pod ns/web-0 has been running for 3600 s (limit 12 s)";
        assert!(dead.contains(message), "{dead}");
        step.set_idle(None);
        let alive = get_healthz(address).await;
        assert!(
            alive.starts_with("HTTP/1.1 200 ") && alive.ends_with("ok"),
            "{alive}"
        );
        serving.abort();
    }
}

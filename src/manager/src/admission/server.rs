//! The HTTPS server: accepts connections with the current certificate and passes reviews on.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::middleware::AddExtension;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::server::{ClientHello, ResolvesServerCert, ServerConfig};
use rustls::sign::CertifiedKey;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::Layer;

use super::Error;
use super::bundle::{Bundle, certified_key};
use super::connections::{Caller, Connections};
use super::write_timeout::{WriteTimeoutStream, WriteTimeouts};
use kruise_cluster::Clock;
use kruise_ops::http;

/// A client that has not finished the TLS handshake by then is disconnected.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// A client that got no answer to a review by then is disconnected. API servers connect to send a review, and wait at
/// most 10 s for the answer, or 30 s for that to a conversion.
const FIRST_REVIEW_TIMEOUT: Duration = Duration::from_secs(35);
/// Time to finish an answer on a connection whose slot another client gets.
const EVICTION_GRACE: Duration = Duration::from_secs(1);
/// A client without requests for this time is disconnected, because it uses a slot. API servers close an idle
/// connection after 90 s, so none is closed while they send a request.
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);
/// How long a client may take to read an answer. API servers wait 10 s for a review and 30 s for a conversion.
const WRITE_TIMEOUTS: WriteTimeouts = WriteTimeouts {
    stalled: Duration::from_secs(5),
    total: Duration::from_secs(30),
};
/// Send buffer of one connection, in bytes; the kernel doubles the value. Its own choice grows to some 4 MiB, which no
/// limit counts.
const SEND_BUFFER_BYTES: usize = 256 << 10;
/// Memory for what a connection has read of a request's head or of its next part. The heads of API servers have about 1
/// KiB.
const READ_BUFFER_BYTES: usize = 64 << 10;
/// Maximum number of connections; less than the 1,024 file descriptors that some nodes allow a container.
const MAX_CONNECTIONS: usize = 768;
/// Maximum number of connections of one client network. An API server uses one for each concurrent review, and by default has at
/// most 600 requests in progress.
const MAX_CLIENT_CONNECTIONS: usize = 600;

/// Opens the port on all addresses.
pub(super) async fn listen(port: u16) -> Result<TcpListener, Error> {
    Ok(http::bind(&http::all_interfaces(port)).await?)
}

/// Serves until `shutdown` is cancelled, then answers the reviews in flight.
pub(super) async fn serve(
    listener: TcpListener,
    router: axum::Router,
    bundle: watch::Receiver<Bundle>,
    clock: Clock,
    shutdown: &CancellationToken,
) {
    let acceptor = TlsAcceptor::from(Arc::new(tls_config(bundle, clock)));
    let connections = Connections::new(MAX_CONNECTIONS, MAX_CLIENT_CONNECTIONS);
    let tasks = TaskTracker::new();
    while let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await {
        let (stream, caller) = match accepted {
            Ok((stream, peer)) => (stream, Caller::new(peer.ip())),
            Err(why) => {
                // For example no file descriptors are left; other connections must end first.
                tracing::warn!(%why, "cannot take a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Some(slot) = connections.admit(&caller) else {
            tracing::debug!(address = %caller.address, "refused a connection: this address has its share");
            continue;
        };
        let (acceptor, router, shutdown) = (acceptor.clone(), router.clone(), shutdown.clone());
        tasks.spawn(async move {
            tokio::select! {
                () = serve_connection(stream, acceptor, router, caller, &slot.evicted, shutdown) => {}
                () = eviction_grace_over(&slot.evicted) => {}
            }
        });
    }
    // New connections are refused, and the API server tries another replica.
    drop(listener);
    tasks.close();
    tasks.wait().await;
}

async fn serve_connection(
    stream: TcpStream,
    acceptor: TlsAcceptor,
    router: axum::Router,
    caller: Caller,
    evicted: &CancellationToken,
    shutdown: CancellationToken,
) {
    if let Err(why) = SockRef::from(&stream).set_send_buffer_size(SEND_BUFFER_BYTES) {
        tracing::debug!(%why, "cannot bound what is unsent on a connection");
    }
    let stream = match tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(why)) => return tracing::debug!(%why, "a client did not speak TLS with us"),
        Err(_) => return tracing::debug!("a client did not finish its handshake"),
    };
    let no_review = first_review_timeout(&caller, FIRST_REVIEW_TIMEOUT);
    let service = TowerToHyperService::new(Extension(caller.clone()).layer(router));
    let connection = http_connection(stream, service, IDLE_TIMEOUT, WRITE_TIMEOUTS);
    tokio::pin!(connection);
    let result = tokio::select! {
        ended = connection.as_mut() => ended,
        () = no_review => return tracing::debug!(address = %caller.address, "a client sent no review"),
        () = either_cancelled(&shutdown, evicted) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(why) = result {
        tracing::debug!(%why, "a webhook connection broke");
    }
}

/// Ends when the client got no answer to a review within `timeout` of its connection.
async fn first_review_timeout(caller: &Caller, timeout: Duration) {
    tokio::time::sleep(timeout).await;
    if caller.has_reviewed() {
        std::future::pending::<()>().await;
    }
}

async fn either_cancelled(one: &CancellationToken, other: &CancellationToken) {
    tokio::select! {
        () = one.cancelled() => {}
        () = other.cancelled() => {}
    }
}

/// Ends [`EVICTION_GRACE`] after another client got the slot.
async fn eviction_grace_over(evicted: &CancellationToken) {
    evicted.cancelled().await;
    tokio::time::sleep(EVICTION_GRACE).await;
}

type ReviewService = TowerToHyperService<AddExtension<axum::Router, Caller>>;

/// Serves one connection, until it is idle for `idle` or its client does not read an answer.
fn http_connection<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    service: ReviewService,
    idle: Duration,
    timeouts: WriteTimeouts,
) -> http1::Connection<TokioIo<WriteTimeoutStream<S>>, ReviewService> {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(idle);
    builder.max_buf_size(READ_BUFFER_BYTES);
    // Answers are sent without a copy: a copy would not keep the permits of its review.
    builder.writev(true);
    builder.serve_connection(TokioIo::new(WriteTimeoutStream::new(stream, timeouts)), service)
}

fn tls_config(bundle: watch::Receiver<Bundle>, clock: Clock) -> ServerConfig {
    let resolver = Arc::new(CertificateResolver {
        bundle,
        clock,
        cached: std::sync::Mutex::default(),
    });
    let mut config = ServerConfig::builder()
        .with_no_client_auth()
        .with_cert_resolver(resolver);
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    config
}

/// How long the previous certificate is served at least after a renewal: until the leader, or the next one, has published
/// the new CA to the API servers.
const CA_ROLLOUT_DELAY: Duration = Duration::from_secs(60);

/// Returns the current certificate, or the previous one while that is as good: API servers trust it for sure.
#[derive(Debug)]
struct CertificateResolver {
    bundle: watch::Receiver<Bundle>,
    clock: Clock,
    cached: std::sync::Mutex<Option<ServedCertificate>>,
}

#[derive(Debug)]
struct ServedCertificate {
    bundle: Bundle,
    /// Parsed once.
    key: Arc<CertifiedKey>,
    /// The newest certificate, if it is another one, and when it was first available.
    renewed: Option<(String, Instant)>,
}

impl ServedCertificate {
    /// How long the certificate of `newest` has been available.
    fn renewed_for(&mut self, newest: &Bundle) -> Duration {
        let renewed = self.renewed.take();
        let known = renewed.filter(|(certificate, _)| *certificate == newest.certificate);
        let (_, since) = self
            .renewed
            .insert(known.unwrap_or_else(|| (newest.certificate.clone(), Instant::now())));
        since.elapsed()
    }
}

impl ResolvesServerCert for CertificateResolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.current_key()
    }
}

impl CertificateResolver {
    fn current_key(&self) -> Option<Arc<CertifiedKey>> {
        let bundle = self.bundle.borrow();
        let mut cached = self
            .cached
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(served) = cached.as_mut() {
            if served.bundle.certificate == bundle.certificate {
                served.renewed = None;
                return Some(Arc::clone(&served.key));
            }
            let is_recent = served.renewed_for(&bundle) < CA_ROLLOUT_DELAY;
            let is_trusted = bundle.ca.contains(served.bundle.current_ca());
            if is_trusted && (is_recent || served.bundle.can_replace(&bundle, self.clock.now())) {
                return Some(Arc::clone(&served.key));
            }
        }
        let Some(key) = certified_key(&bundle).map(Arc::new) else {
            return cached.as_ref().map(|served| Arc::clone(&served.key));
        };
        *cached = Some(ServedCertificate {
            bundle: bundle.clone(),
            key: Arc::clone(&key),
            renewed: None,
        });
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::net::SocketAddr;

    use axum::body::Bytes;
    use axum::middleware::from_fn_with_state;
    use axum::routing::{get, post};
    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::sync::mpsc;

    use super::super::body_limits::{BodyLimit, limit_body};
    use super::*;

    /// A certificate for a new name is served after its CA is published, and one that only replaces an older one when
    /// that expires soon; one with an unrelated CA at once, because nothing else is trusted.
    #[tokio::test(start_paused = true)]
    async fn new_ca_is_announced_before_it_is_served() {
        const DAY: Duration = Duration::from_secs(24 * 3600);
        let now = jiff::Timestamp::from_second(1_800_000_000).unwrap();
        let names = |all: &[&str]| {
            let all = all.iter().map(|name| (*name).to_owned());
            all.collect::<std::collections::BTreeSet<_>>()
        };
        let first = Bundle::generate(&names(&["a"]), now).unwrap();
        let (bundle_tx, bundle) = watch::channel(first.clone());
        let resolver = CertificateResolver {
            bundle,
            clock: Clock::starting_at(now),
            cached: std::sync::Mutex::default(),
        };
        let served = || resolver.current_key().unwrap().cert.clone();
        let at_first = served();
        tokio::time::advance(245 * DAY).await;
        let second = first.renew(&names(&["a"]), resolver.clock.now()).unwrap();
        bundle_tx.send_replace(second.clone());
        assert_eq!(served(), at_first);
        tokio::time::advance(DAY).await;
        assert_eq!(served(), at_first, "no manager may have published the new CA");
        tokio::time::advance(90 * DAY).await;
        let at_second = served();
        assert_ne!(at_second, at_first, "it expires in 29 days");

        bundle_tx.send_replace(second.renew(&names(&["b"]), resolver.clock.now()).unwrap());
        assert_eq!(served(), at_second);
        tokio::time::advance(CA_ROLLOUT_DELAY - Duration::from_millis(1)).await;
        assert_eq!(served(), at_second);
        tokio::time::advance(Duration::from_millis(1)).await;
        let renewed = served();
        assert_ne!(renewed, at_second);
        bundle_tx.send_replace(Bundle::generate(&names(&["a"]), now).unwrap());
        assert_ne!(served(), renewed);
    }

    #[tokio::test(start_paused = true)]
    async fn clients_without_review_are_closed_early() {
        let caller = Caller::new([127, 0, 0, 1].into());
        first_review_timeout(&caller, FIRST_REVIEW_TIMEOUT).await;
        caller.note_review();
        let waited = tokio::time::timeout(
            FIRST_REVIEW_TIMEOUT * 2,
            first_review_timeout(&caller, FIRST_REVIEW_TIMEOUT),
        )
        .await;
        assert!(waited.is_err());
    }

    /// A rollout of the webhook aborts no review.
    #[tokio::test]
    async fn in_flight_reviews_finish_at_shutdown() {
        let names = std::collections::BTreeSet::from(["localhost".to_owned()]);
        let bundle = Bundle::generate(&names, jiff::Timestamp::now()).unwrap();
        let mut roots = rustls::RootCertStore::empty();
        let authority = CertificateDer::from_pem_slice(bundle.current_ca().as_bytes()).unwrap();
        roots.add(authority).unwrap();
        let (asked_tx, mut request_arrived) = mpsc::channel(1);
        let answer = Arc::new(tokio::sync::Notify::new());
        let waits = Arc::clone(&answer);
        let router = axum::Router::new().route(
            "/",
            get(move || async move {
                asked_tx.send(()).await.unwrap();
                waits.notified().await;
                "here"
            }),
        );
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (_bundle_tx, bundle) = watch::channel(bundle);
        let shutdown = CancellationToken::new();
        let end = shutdown.clone();
        let serving = tokio::spawn(async move { serve(listener, router, bundle, Clock::new(), &end).await });

        let config = rustls::ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect(address).await.unwrap();
        let name = "localhost".try_into().unwrap();
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let mut stream = connector.connect(name, stream).await.unwrap();
        let request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
        stream.write_all(request).await.unwrap();
        request_arrived.recv().await.unwrap();
        shutdown.cancel();
        while TcpStream::connect(address).await.is_ok() {
            tokio::task::yield_now().await;
        }
        assert!(!serving.is_finished(), "one review is in flight");
        answer.notify_one();
        let mut answered = String::new();
        // The connection ends, with or without a TLS close.
        let _ = stream.read_to_string(&mut answered).await;
        assert!(answered.starts_with("HTTP/1.1 200"), "{answered}");
        serving.await.unwrap();
    }

    #[tokio::test]
    async fn idle_connections_are_closed() {
        for sent in ["", "GET / HTT", "GET / HTTP/1.1\r\nHost: x\r\n\r\n"] {
            let router = axum::Router::new().route("/", get(|| async { "here" }));
            let (mut ours, theirs) = duplex(1024);
            ours.write_all(sent.as_bytes()).await.unwrap();
            let answers = http_connection(
                theirs,
                TowerToHyperService::new(Extension(Caller::new([127, 0, 0, 1].into())).layer(router)),
                Duration::from_millis(200),
                WRITE_TIMEOUTS,
            );
            let ended = tokio::time::timeout(Duration::from_secs(60), answers).await;
            assert!(ended.is_ok(), "{sent:?} keeps the connection open");
            let mut text = String::new();
            ours.read_to_string(&mut text).await.unwrap();
            assert_eq!(text.ends_with("here"), sent.ends_with("\r\n\r\n"), "{text:?}");
        }
    }

    /// Connections without a review must not hold much memory.
    #[tokio::test]
    async fn huge_heads_are_refused() {
        let router = axum::Router::new().route("/", get(|| async { "here" }));
        let (mut ours, theirs) = duplex(1024);
        let caller = Extension(Caller::new([127, 0, 0, 1].into()));
        let service = TowerToHyperService::new(caller.layer(router));
        let served = tokio::spawn(http_connection(theirs, service, IDLE_TIMEOUT, WRITE_TIMEOUTS));
        let head = format!("GET / HTTP/1.1\r\nHost: {}", "x".repeat(2 * READ_BUFFER_BYTES));
        // The rest cannot be written once the connection is closed.
        let _ = ours.write_all(head.as_bytes()).await;
        let mut text = String::new();
        let _ = ours.read_to_string(&mut text).await;
        assert!(text.starts_with("HTTP/1.1 431"), "{text:?}");
        assert!(served.await.unwrap().is_err());
    }

    /// Sends a review of four bytes.
    async fn send_review(address: SocketAddr, path: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request =
            format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nConnection: close\r\n\r\ntext");
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    #[tokio::test]
    async fn unread_answer_frees_its_permits() {
        // More than the kernel buffers for both ends.
        const LARGE: usize = 64 << 20;
        let large = Bytes::from(vec![b'x'; LARGE]);
        let limit = BodyLimit::new(2 * LARGE, LARGE);
        let router = axum::Router::new()
            .route("/large", post(async move || large.clone()))
            .route("/small", post(async || "small"));
        let router = router.layer(from_fn_with_state(limit.clone(), limit_body));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (ended_tx, mut ended) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let timeouts = WriteTimeouts {
                stalled: Duration::from_secs(2),
                total: Duration::from_secs(60),
            };
            for client in 1.. {
                let (stream, _) = listener.accept().await.unwrap();
                let caller = Extension(Caller::new([127, 0, 0, client].into()));
                let service = TowerToHyperService::new(caller.layer(router.clone()));
                let (answers, ended_tx) = (
                    http_connection(stream, service, IDLE_TIMEOUT, timeouts),
                    ended_tx.clone(),
                );
                tokio::spawn(async move { ended_tx.send((client, answers.await.is_ok())) });
            }
        });
        let silent = send_review(address, "/large").await;
        silent.readable().await.unwrap();
        assert!(limit.available() <= LARGE + 4, "the answer is not sent");
        let mut text = String::new();
        send_review(address, "/small")
            .await
            .read_to_string(&mut text)
            .await
            .unwrap();
        assert!(text.ends_with("small"), "{text}");
        assert_eq!(
            [ended.recv().await.unwrap(), ended.recv().await.unwrap()],
            [(2, true), (1, false)]
        );
        assert_eq!(limit.available(), 2 * LARGE);
        drop(silent);
    }
}

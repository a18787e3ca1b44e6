//! The HTTPS server: takes connections with the certificate of the moment and hands reviews on.

use std::io::Cursor;
use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::middleware::AddExtension;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
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
use super::bundle::Bundle;
use super::connections::{Caller, Connections};
use super::sending::{Patience, Sending};
use kruise_ops::http;

/// A client that has not shaken hands by then is let go.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// A client that has not had the answer to a review by then is let go. API servers connect to send one, and wait 10 s
/// for the answer at most.
const FIRST: Duration = Duration::from_secs(20);
/// What is being answered on a connection whose place another address gets may take so long.
const FAREWELL: Duration = Duration::from_secs(1);
/// A client that has asked nothing for so long is let go, for it takes the place of others. API servers let go of an idle
/// connection after 90 s themselves, so none is ended as they ask.
const IDLE: Duration = Duration::from_secs(120);
/// How long a client may take to read an answer. API servers wait for a review 10 s, for a conversion 30 s.
const PATIENCE: Patience = Patience {
    stalled: Duration::from_secs(5),
    whole: Duration::from_secs(30),
};
/// Bytes of answers that the kernel holds for one connection; it doubles them. What it would choose itself grows to some
/// 4 MiB, which nothing counts.
const UNSENT: usize = 256 << 10;
/// Connections at a time; an API server opens few and keeps them.
const CONNECTIONS: usize = 512;
/// Connections of one address at a time. An API server has one for each review that it waits for.
const SHARE: usize = 256;

/// Opens the port on all addresses.
pub(super) async fn listen(port: u16) -> Result<TcpListener, Error> {
    Ok(http::bind(&http::any(port)).await?)
}

/// Answers until `shutdown` begins, and then what was asked by then.
pub(super) async fn serve(
    listener: TcpListener,
    router: axum::Router,
    bundle: watch::Receiver<Bundle>,
    shutdown: &CancellationToken,
) {
    let acceptor = TlsAcceptor::from(Arc::new(configuration(bundle)));
    let connections = Connections::new(CONNECTIONS, SHARE);
    let conversations = TaskTracker::new();
    while let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await {
        let (stream, caller) = match accepted {
            Ok((stream, peer)) => (stream, Caller::new(peer.ip())),
            Err(why) => {
                // Out of file descriptors, for example; others must end first.
                tracing::warn!(%why, "cannot take a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Some(place) = connections.admit(&caller) else {
            tracing::debug!(address = %caller.address, "refused a connection: this address has its share");
            continue;
        };
        let (acceptor, router, shutdown) = (acceptor.clone(), router.clone(), shutdown.clone());
        conversations.spawn(async move {
            tokio::select! {
                () = converse(stream, acceptor, router, caller, &place.taken, shutdown) => {}
                () = farewell(&place.taken) => {}
            }
        });
    }
    // Who connects now is refused, and asks another replica.
    drop(listener);
    conversations.close();
    conversations.wait().await;
}

async fn converse(
    stream: TcpStream,
    acceptor: TlsAcceptor,
    router: axum::Router,
    caller: Caller,
    taken: &CancellationToken,
    shutdown: CancellationToken,
) {
    if let Err(why) = SockRef::from(&stream).set_send_buffer_size(UNSENT) {
        tracing::debug!(%why, "cannot bound what is unsent on a connection");
    }
    let stream = match tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(why)) => return tracing::debug!(%why, "a client did not speak TLS with us"),
        Err(_) => return tracing::debug!("a client did not finish its handshake"),
    };
    let idle = without_review(&caller, FIRST);
    let service = TowerToHyperService::new(Extension(caller.clone()).layer(router));
    let connection = answers(stream, service, IDLE, PATIENCE);
    tokio::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = idle => return tracing::debug!(address = %caller.address, "a client asked for no review"),
        () = either(&shutdown, taken) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(why) = ended {
        tracing::debug!(%why, "a webhook connection broke");
    }
}

/// Ends when the client got the answer to no review for so long from its beginning on.
async fn without_review(caller: &Caller, first: Duration) {
    tokio::time::sleep(first).await;
    if caller.has_reviewed() {
        std::future::pending::<()>().await;
    }
}

async fn either(one: &CancellationToken, other: &CancellationToken) {
    tokio::select! {
        () = one.cancelled() => {}
        () = other.cancelled() => {}
    }
}

/// Ends a while after the place was given to another address.
async fn farewell(taken: &CancellationToken) {
    taken.cancelled().await;
    tokio::time::sleep(FAREWELL).await;
}

/// What answers one client.
type Answering = TowerToHyperService<AddExtension<axum::Router, Caller>>;

/// Answers on one connection, until nothing is asked for so long, or an answer is not read.
fn answers<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    service: Answering,
    idle: Duration,
    patience: Patience,
) -> http1::Connection<TokioIo<Sending<S>>, Answering> {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(idle);
    // Answers are sent from where they are: a copy would not keep the room of its review.
    builder.writev(true);
    builder.serve_connection(TokioIo::new(Sending::new(stream, patience)), service)
}

fn configuration(bundle: watch::Receiver<Bundle>) -> ServerConfig {
    let resolver = Arc::new(Current {
        bundle,
        cached: std::sync::Mutex::default(),
    });
    let mut config = ServerConfig::builder()
        .with_no_client_auth()
        .with_cert_resolver(resolver);
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    config
}

/// How long the certificate before is served after a renewal: until the leader, or the next one, has announced the new
/// authority to the API servers.
const ANNOUNCED: Duration = Duration::from_secs(60);

/// Hands out the certificate of the moment, read once per renewal.
#[derive(Debug)]
struct Current {
    bundle: watch::Receiver<Bundle>,
    cached: std::sync::Mutex<Option<Served>>,
}

/// A certificate that is served.
#[derive(Debug)]
struct Served {
    certificate: String,
    authority: String,
    key: Arc<CertifiedKey>,
    /// When there was another one first.
    renewed: Option<Instant>,
}

impl ResolvesServerCert for Current {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.key()
    }
}

impl Current {
    fn key(&self) -> Option<Arc<CertifiedKey>> {
        let bundle = self.bundle.borrow();
        let mut cached = self
            .cached
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(served) = cached.as_mut() {
            if served.certificate == bundle.certificate {
                served.renewed = None;
                return Some(Arc::clone(&served.key));
            }
            let renewed = *served.renewed.get_or_insert_with(Instant::now);
            if bundle.ca.contains(&served.authority) && renewed.elapsed() < ANNOUNCED {
                return Some(Arc::clone(&served.key));
            }
        }
        let key = Arc::new(certified(&bundle)?);
        *cached = Some(Served {
            certificate: bundle.certificate.clone(),
            authority: bundle.authority().to_owned(),
            key: Arc::clone(&key),
            renewed: None,
        });
        Some(key)
    }
}

fn certified(bundle: &Bundle) -> Option<CertifiedKey> {
    let chain: Result<Vec<_>, _> =
        CertificateDer::pem_reader_iter(Cursor::new(&bundle.certificate)).collect();
    let key = PrivateKeyDer::from_pem_slice(bundle.key.as_bytes()).ok()?;
    Some(CertifiedKey::new(chain.ok()?, any_supported_type(&key).ok()?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::net::SocketAddr;

    use axum::body::Bytes;
    use axum::middleware::from_fn_with_state;
    use axum::routing::{get, post};
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::sync::mpsc;

    use super::super::room::{Room, held};
    use super::*;

    /// What is renewed is announced meanwhile; what is made from nothing is all that there is to be trusted.
    #[tokio::test(start_paused = true)]
    async fn a_new_authority_is_announced_before_it_is_served() {
        let now = jiff::Timestamp::from_second(1_800_000_000).unwrap();
        let names = std::collections::BTreeSet::from(["a".to_owned()]);
        let first = Bundle::make(&names, now).unwrap();
        let (bundle_tx, bundle) = watch::channel(first.clone());
        let current = Current {
            bundle,
            cached: std::sync::Mutex::default(),
        };
        let served = || current.key().unwrap().cert.clone();
        let at_first = served();
        bundle_tx.send_replace(first.renew(&names, now).unwrap());
        assert_eq!(served(), at_first);
        tokio::time::advance(ANNOUNCED - Duration::from_millis(1)).await;
        assert_eq!(served(), at_first);
        tokio::time::advance(Duration::from_millis(1)).await;
        let renewed = served();
        assert_ne!(renewed, at_first);
        bundle_tx.send_replace(Bundle::make(&names, now).unwrap());
        assert_ne!(served(), renewed);
    }

    #[tokio::test(start_paused = true)]
    async fn who_asks_for_no_review_is_let_go_early() {
        let caller = Caller::new([127, 0, 0, 1].into());
        without_review(&caller, FIRST).await;
        caller.note_review();
        let stays = tokio::time::timeout(FIRST * 2, without_review(&caller, FIRST)).await;
        assert!(stays.is_err());
    }

    /// A rollout of the webhook cuts off no review.
    #[tokio::test]
    async fn what_was_asked_before_the_end_is_answered() {
        let names = std::collections::BTreeSet::from(["localhost".to_owned()]);
        let bundle = Bundle::make(&names, jiff::Timestamp::now()).unwrap();
        let mut roots = rustls::RootCertStore::empty();
        let authority = CertificateDer::from_pem_slice(bundle.authority().as_bytes()).unwrap();
        roots.add(authority).unwrap();
        let (asked_tx, mut asked) = mpsc::channel(1);
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
        let serving = tokio::spawn(async move { serve(listener, router, bundle, &end).await });

        let config = rustls::ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect(address).await.unwrap();
        let name = "localhost".try_into().unwrap();
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        let mut stream = connector.connect(name, stream).await.unwrap();
        let request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
        stream.write_all(request).await.unwrap();
        asked.recv().await.unwrap();
        shutdown.cancel();
        while TcpStream::connect(address).await.is_ok() {
            tokio::task::yield_now().await;
        }
        assert!(!serving.is_finished(), "one waits for its answer");
        answer.notify_one();
        let mut answered = String::new();
        // The end of the connection, with or without a farewell.
        let _ = stream.read_to_string(&mut answered).await;
        assert!(answered.starts_with("HTTP/1.1 200"), "{answered}");
        serving.await.unwrap();
    }

    #[tokio::test]
    async fn who_asks_nothing_is_let_go() {
        for said in ["", "GET / HTT", "GET / HTTP/1.1\r\nHost: x\r\n\r\n"] {
            let router = axum::Router::new().route("/", get(|| async { "here" }));
            let (mut ours, theirs) = duplex(1024);
            ours.write_all(said.as_bytes()).await.unwrap();
            let answers = answers(
                theirs,
                TowerToHyperService::new(Extension(Caller::new([127, 0, 0, 1].into())).layer(router)),
                Duration::from_millis(200),
                PATIENCE,
            );
            let ended = tokio::time::timeout(Duration::from_secs(60), answers).await;
            assert!(ended.is_ok(), "{said:?} holds the connection");
            let mut text = String::new();
            ours.read_to_string(&mut text).await.unwrap();
            assert_eq!(text.ends_with("here"), said.ends_with("\r\n\r\n"), "{text:?}");
        }
    }

    /// Sends a review of four bytes.
    async fn ask(at: SocketAddr, path: &str) -> TcpStream {
        let mut stream = TcpStream::connect(at).await.unwrap();
        let request =
            format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nConnection: close\r\n\r\ntext");
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    #[tokio::test]
    async fn a_client_that_does_not_read_its_answer_is_ended_and_its_room_comes_back() {
        // More than the kernel holds for both ends.
        const LARGE: usize = 64 << 20;
        let large = Bytes::from(vec![b'x'; LARGE]);
        let room = Room::new(2 * LARGE, LARGE);
        let router = axum::Router::new()
            .route("/large", post(async move || large.clone()))
            .route("/small", post(async || "small"));
        let router = router.layer(from_fn_with_state(room.clone(), held));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let (ended_tx, mut ended) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let patience = Patience {
                stalled: Duration::from_secs(2),
                whole: Duration::from_secs(60),
            };
            for client in 1.. {
                let (stream, _) = listener.accept().await.unwrap();
                let caller = Extension(Caller::new([127, 0, 0, client].into()));
                let service = TowerToHyperService::new(caller.layer(router.clone()));
                let (answers, ended_tx) = (answers(stream, service, IDLE, patience), ended_tx.clone());
                tokio::spawn(async move { ended_tx.send((client, answers.await.is_ok())) });
            }
        });
        let silent = ask(at, "/large").await;
        silent.readable().await.unwrap();
        assert!(room.left() <= LARGE + 4, "its answer is not sent");
        let mut text = String::new();
        ask(at, "/small").await.read_to_string(&mut text).await.unwrap();
        assert!(text.ends_with("small"), "{text}");
        assert_eq!(
            [ended.recv().await.unwrap(), ended.recv().await.unwrap()],
            [(2, true), (1, false)]
        );
        assert_eq!(room.left(), 2 * LARGE);
        drop(silent);
    }
}

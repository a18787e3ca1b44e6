//! The HTTPS server: takes connections with the certificate of the moment and hands reviews on.

use std::io::Cursor;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert, ServerConfig};
use rustls::sign::CertifiedKey;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::Error;
use super::bundle::Bundle;

/// A client that has not shaken hands by then is let go.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Connections at a time; an API server opens few and keeps them.
const CONNECTIONS: usize = 512;

/// Opens the port on all addresses.
pub(super) async fn listen(port: u16) -> Result<TcpListener, Error> {
    let any = std::net::SocketAddr::from((std::net::Ipv6Addr::UNSPECIFIED, port));
    match TcpListener::bind(any).await {
        Ok(listener) => Ok(listener),
        // No IPv6 on this machine.
        Err(_) => TcpListener::bind((std::net::Ipv4Addr::UNSPECIFIED, port))
            .await
            .map_err(|source| Error::Listen { port, source }),
    }
}

/// Answers until dropped. Connections in use may finish their request when `shutdown` begins.
pub(super) async fn serve(
    listener: TcpListener,
    router: axum::Router,
    bundle: watch::Receiver<Bundle>,
    shutdown: &CancellationToken,
) {
    let acceptor = TlsAcceptor::from(Arc::new(configuration(bundle)));
    let service = TowerToHyperService::new(router);
    let slots = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(why) => {
                // Out of file descriptors, for example; others must end first.
                tracing::warn!(%why, "cannot take a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (acceptor, service, shutdown) = (acceptor.clone(), service.clone(), shutdown.clone());
        tokio::spawn(async move {
            converse(stream, acceptor, service, shutdown).await;
            drop(slot);
        });
    }
}

async fn converse(
    stream: TcpStream,
    acceptor: TlsAcceptor,
    service: TowerToHyperService<axum::Router>,
    shutdown: CancellationToken,
) {
    let stream = match tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(why)) => return tracing::debug!(%why, "a client did not speak TLS with us"),
        Err(_) => return tracing::debug!("a client did not finish its handshake"),
    };
    let builder = auto::Builder::new(TokioExecutor::new());
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = shutdown.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(why) = ended {
        tracing::debug!(%why, "a webhook connection broke");
    }
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

/// Hands out the certificate of the moment, read once per renewal.
#[derive(Debug)]
struct Current {
    bundle: watch::Receiver<Bundle>,
    cached: std::sync::Mutex<Option<(String, Arc<CertifiedKey>)>>,
}

impl ResolvesServerCert for Current {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let bundle = self.bundle.borrow();
        let mut cached = self
            .cached
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some((certificate, key)) = cached.as_ref()
            && *certificate == bundle.certificate
        {
            return Some(Arc::clone(key));
        }
        let key = Arc::new(certified(&bundle)?);
        *cached = Some((bundle.certificate.clone(), Arc::clone(&key)));
        Some(key)
    }
}

fn certified(bundle: &Bundle) -> Option<CertifiedKey> {
    let chain: Result<Vec<_>, _> =
        CertificateDer::pem_reader_iter(Cursor::new(&bundle.certificate)).collect();
    let key = PrivateKeyDer::from_pem_slice(bundle.key.as_bytes()).ok()?;
    Some(CertifiedKey::new(chain.ok()?, any_supported_type(&key).ok()?))
}

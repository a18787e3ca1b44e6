//! The HTTPS server: takes connections with the certificate of the moment and hands reviews on.

use std::io::Cursor;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert, ServerConfig};
use rustls::sign::CertifiedKey;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::Error;
use super::bundle::Bundle;
use crate::ops::http;

/// A client that has not shaken hands by then is let go.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// A client that has asked nothing for so long is let go, for it takes the place of others. API servers let go of an idle
/// connection after 90 s themselves, so none is ended as they ask.
const IDLE: Duration = Duration::from_secs(120);
/// Connections at a time; an API server opens few and keeps them.
const CONNECTIONS: usize = 512;

/// Opens the port on all addresses.
pub(super) async fn listen(port: u16) -> Result<TcpListener, Error> {
    Ok(http::bind(&http::any(port)).await?)
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
    let connection = answers(stream, service, IDLE);
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

/// Answers on one connection, until nothing is asked for so long.
fn answers<S: AsyncRead + AsyncWrite + Unpin>(
    stream: S,
    service: TowerToHyperService<axum::Router>,
    idle: Duration,
) -> http1::Connection<TokioIo<S>, TowerToHyperService<axum::Router>> {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(idle);
    builder.serve_connection(TokioIo::new(stream), service)
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test]
    async fn who_asks_nothing_is_let_go() {
        for said in ["", "GET / HTT", "GET / HTTP/1.1\r\nHost: x\r\n\r\n"] {
            let router = axum::Router::new().route("/", get(|| async { "here" }));
            let (mut ours, theirs) = duplex(1024);
            ours.write_all(said.as_bytes()).await.unwrap();
            let answers = answers(
                theirs,
                TowerToHyperService::new(router),
                Duration::from_millis(200),
            );
            let ended = tokio::time::timeout(Duration::from_secs(60), answers).await;
            assert!(ended.is_ok(), "{said:?} holds the connection");
            let mut text = String::new();
            ours.read_to_string(&mut text).await.unwrap();
            assert_eq!(text.ends_with("here"), said.ends_with("\r\n\r\n"), "{text:?}");
        }
    }
}

//! A TLS listener with a self-signed certificate, for servers that the API server calls.

use std::net::SocketAddr;
use std::sync::Arc;

use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

pub struct TlsListener {
    tcp: TcpListener,
    acceptor: TlsAcceptor,
    certificate: String,
}

impl TlsListener {
    /// Listens on a free port. The certificate is for this address.
    pub async fn listen(address: &str) -> Self {
        let certificate = rcgen::generate_simple_self_signed(vec![address.to_owned()]).unwrap();
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(certificate.signing_key.serialize_der()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.cert.der().clone()], key)
            .unwrap();
        Self {
            tcp: TcpListener::bind((address, 0)).await.unwrap(),
            acceptor: TlsAcceptor::from(Arc::new(config)),
            certificate: certificate.cert.pem(),
        }
    }

    pub fn local_addr(&self) -> SocketAddr {
        self.tcp.local_addr().unwrap()
    }

    /// PEM of the certificate.
    pub fn certificate(&self) -> &str {
        &self.certificate
    }
}

impl axum::serve::Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let Ok((stream, peer)) = self.tcp.accept().await else {
                continue;
            };
            // A client that only probes the port sends nothing.
            if let Ok(stream) = self.acceptor.accept(stream).await {
                return (stream, peer);
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        self.tcp.local_addr()
    }
}

//! The API server's readiness, asked without a process: kubectl takes a tenth of a second of a core each time.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

/// Longest time of one read.
const READ_TIMEOUT: Duration = Duration::from_secs(2);

/// Asks one API server.
pub(super) struct Readyz {
    host: String,
    port: u16,
    config: Arc<ClientConfig>,
}

impl Readyz {
    /// `ca` is the PEM file of the authority that signed the server's certificate.
    pub(super) fn new(host: &str, port: u16, ca: &Path) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(ca).context("the authority of the API server")?)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self {
            host: host.to_owned(),
            port,
            config: Arc::new(config),
        })
    }

    /// Whether it is ready. Anybody may ask, once the API server has made its roles.
    pub(super) fn is_ready(&self) -> bool {
        self.response().is_ok_and(|text| text.starts_with("HTTP/1.0 200"))
    }

    fn response(&self) -> Result<String> {
        let stream = TcpStream::connect((self.host.as_str(), self.port))?;
        stream.set_read_timeout(Some(READ_TIMEOUT))?;
        let name = ServerName::try_from(self.host.clone())?;
        let connection = ClientConnection::new(Arc::clone(&self.config), name)?;
        let mut stream = StreamOwned::new(connection, stream);
        stream.write_all(b"GET /readyz HTTP/1.0\r\n\r\n")?;
        let mut status = [0; 12];
        stream.read_exact(&mut status)?;
        Ok(String::from_utf8_lossy(&status).into_owned())
    }
}

//! The HTTP requests of preStop hooks and probes, by kubelet's rules: the server's certificate is not checked. For a
//! hook, any response counts as delivered, and if it uses HTTPS but the server speaks plain HTTP, the request is
//! repeated in plain HTTP. Redirects are followed within the same server only: the daemon is on the host's network, and
//! no Pod's response may redirect it elsewhere.

use std::convert::Infallible;
use std::error::Error as _;
use std::future::pending;
use std::io;
use std::sync::{Arc, LazyLock};

use http_body_util::{BodyExt, Empty};
use hyper::body::{Body, Bytes};
use hyper::client::conn::http1;
use hyper::header::{
    ACCEPT, AUTHORIZATION, CONTENT_LENGTH, HOST, HeaderName, HeaderValue, LOCATION, TRANSFER_ENCODING,
    USER_AGENT,
};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::read_limit::ReadLimit;

/// Maximum number of redirects that are followed.
const MAX_REDIRECTS: usize = 10;
/// Maximum bytes of a response head that are read: hooks of all containers of the node may receive a response at the
/// same time.
const MAX_RESPONSE_HEAD: usize = 16 * 1024;
/// The signatures that Go's TLS clients accept, kubelet's among them.
const SIGNATURE_SCHEMES: [SignatureScheme; 12] = [
    SignatureScheme::RSA_PSS_SHA256,
    SignatureScheme::ECDSA_NISTP256_SHA256,
    SignatureScheme::ED25519,
    SignatureScheme::RSA_PSS_SHA384,
    SignatureScheme::RSA_PSS_SHA512,
    SignatureScheme::RSA_PKCS1_SHA256,
    SignatureScheme::RSA_PKCS1_SHA384,
    SignatureScheme::RSA_PKCS1_SHA512,
    SignatureScheme::ECDSA_NISTP384_SHA384,
    SignatureScheme::ECDSA_NISTP521_SHA512,
    SignatureScheme::RSA_PKCS1_SHA1,
    SignatureScheme::ECDSA_SHA1_Legacy,
];

/// An HTTP request of a hook or a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HookRequest {
    /// Whether to use TLS.
    pub tls: bool,
    /// Host name or address.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Path, with query if there is one; a missing leading slash is added.
    pub path: String,
    /// Headers, in order.
    pub headers: Vec<(String, String)>,
}

/// The response to a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpResponse {
    /// Its status code.
    pub status: StatusCode,
    /// Header `Location`.
    pub location: Option<String>,
    /// The first bytes of its body.
    pub body: Vec<u8>,
}

/// Why no response arrived.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection failed.
    #[error("connecting to {host}:{port}: {why}")]
    Connect {
        /// The host.
        host: String,
        /// The port.
        port: u16,
        /// The network error.
        why: String,
    },
    /// The TLS handshake failed.
    #[error("TLS handshake with {host}:{port} failed: {why}")]
    Tls {
        /// Whether the server does not speak TLS.
        plain: bool,
        /// The host.
        host: String,
        /// The port.
        port: u16,
        /// The TLS error.
        why: String,
    },
    /// The hook's request is invalid.
    #[error("httpGet cannot be sent: {0}")]
    Invalid(String),
    /// The connection failed during the request.
    #[error("request to {host}:{port} failed: {why}")]
    RequestFailed {
        /// The host.
        host: String,
        /// The port.
        port: u16,
        /// The connection error.
        why: String,
    },
}

/// Sends the request and waits for the head of the response.
///
/// # Errors
/// See [`Error`].
pub async fn get(request: &HookRequest) -> Result<(), Error> {
    let mut request = request.clone();
    for _ in 0..=MAX_REDIRECTS {
        let response = match send_once(&request, 0).await {
            Err(Error::Tls { plain: true, .. }) => {
                request.tls = false;
                request
                    .headers
                    .retain(|(name, _)| !name.eq_ignore_ascii_case(AUTHORIZATION.as_str()));
                send_once(&request, 0).await?
            }
            answer => answer?,
        };
        match response.and_then(|response| redirect_path(&request, &response)) {
            Some(path) => request.path = path,
            None => return Ok(()),
        }
    }
    Ok(())
}

/// Sends the request and reads at most `max_body` bytes of the response; `None` if its head is longer than the maximum.
/// It is a redirect if that leads to another server.
///
/// # Errors
/// See [`Error`]; if there were too many redirects, or the body ended before the length that its head announces.
pub async fn get_response(request: &HookRequest, max_body: usize) -> Result<Option<HttpResponse>, Error> {
    let mut request = request.clone();
    let mut response = send_once(&request, max_body).await?;
    let mut redirects = 0;
    while let Some(path) = response
        .as_ref()
        .and_then(|response| redirect_path(&request, response))
    {
        if redirects == MAX_REDIRECTS {
            return Err(Error::RequestFailed {
                host: request.host,
                port: request.port,
                why: format!("stopped after {MAX_REDIRECTS} redirects"),
            });
        }
        redirects += 1;
        request.path = path;
        response = send_once(&request, max_body).await?;
    }
    Ok(response)
}

/// The path to request next, if the response is a redirect that stays on the same server.
fn redirect_path(request: &HookRequest, response: &HttpResponse) -> Option<String> {
    let location = response.location.as_deref();
    let location = location.filter(|_| response.status.is_redirection())?;
    same_host_redirect(request, location)
}

/// The path of a redirect that stays on the same server: same scheme, host and port. `location` is resolved as in
/// section 5.2 of RFC 3986; an empty one is none, as in Go.
pub(crate) fn same_host_redirect(request: &HookRequest, location: &str) -> Option<String> {
    if location.is_empty() {
        return None;
    }
    let (own_scheme, default_port) = if request.tls { ("https", 443) } else { ("http", 80) };
    let location = without_fragment(location);
    let reference = match split_scheme(location) {
        Some((scheme, rest)) => {
            let names_server = scheme.eq_ignore_ascii_case(own_scheme) && rest.starts_with("//");
            names_server.then_some(rest)?
        }
        None => location,
    };
    if let Some(rest) = reference.strip_prefix("//") {
        let (authority, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        return is_same_server(request, authority, default_port).then(|| without_dot_segments(path));
    }
    let base = without_fragment(&request.path);
    let base_path = base.split('?').next().unwrap_or_default();
    let path = match reference.chars().next() {
        // Only a fragment.
        None => base.to_owned(),
        Some('/') => reference.to_owned(),
        Some('?') => format!("{base_path}{reference}"),
        Some(_) => {
            let folder = base_path.rsplit_once('/').map_or("", |(folder, _)| folder);
            format!("{folder}/{reference}")
        }
    };
    Some(without_dot_segments(&path))
}

/// The scheme of a URL, and what follows it; `None` if the URL is relative.
fn split_scheme(url: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = url.split_once(':')?;
    let is_scheme = scheme.starts_with(|first: char| first.is_ascii_alphabetic())
        && scheme
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
    is_scheme.then_some((scheme, rest))
}

/// Whether `HOST[:PORT]` is the server of the request.
fn is_same_server(request: &HookRequest, authority: &str, default_port: u16) -> bool {
    let (host, port) = match authority.rsplit_once(':') {
        // Otherwise the colon is part of an IPv6 address.
        Some((host, port)) if !port.ends_with(']') => (host, port),
        _ => (authority, ""),
    };
    let port = match port {
        "" => Some(default_port),
        port => port.parse().ok(),
    };
    without_brackets(host).eq_ignore_ascii_case(without_brackets(&request.host)) && port == Some(request.port)
}

/// A path with a leading slash and without the segments `.` and `..`; its query stays as it is.
fn without_dot_segments(path_and_query: &str) -> String {
    let (path, query) = path_and_query.split_at(path_and_query.find('?').unwrap_or(path_and_query.len()));
    let path = path.strip_prefix('/').unwrap_or(path);
    let mut kept: Vec<&str> = Vec::new();
    for segment in path.split('/') {
        match segment {
            "." => {}
            ".." => {
                kept.pop();
            }
            other => kept.push(other),
        }
    }
    // They name a folder: the path ends with a slash.
    if matches!(path.rsplit('/').next(), Some("." | "..")) {
        kept.push("");
    }
    format!("/{}{query}", kept.join("/"))
}

fn without_fragment(url: &str) -> &str {
    url.split('#').next().unwrap_or_default()
}

/// An IPv6 address without its brackets, or another host.
fn without_brackets(host: &str) -> &str {
    host.trim_matches(['[', ']'])
}

fn authority(request: &HookRequest) -> String {
    host_and_port(&request.host, request.port)
}

/// `HOST:PORT`, with brackets around an IPv6 address.
pub(crate) fn host_and_port(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

/// One response, or `None` if its head is longer than the maximum.
async fn send_once(request: &HookRequest, max_body: usize) -> Result<Option<HttpResponse>, Error> {
    let host = without_brackets(&request.host).to_owned();
    let stream = TcpStream::connect((host.as_str(), request.port))
        .await
        .map_err(|error| Error::Connect {
            host: host.clone(),
            port: request.port,
            why: error.to_string(),
        })?;
    if !request.tls {
        return exchange(request, stream, max_body).await;
    }
    let tls = |plain, why: String| Error::Tls {
        plain,
        host: host.clone(),
        port: request.port,
        why,
    };
    // Names of Pods and Services may contain characters that TLS does not allow; then the server's address is used.
    let name = match (ServerName::try_from(host.clone()), stream.peer_addr()) {
        (Ok(name), _) => name,
        (Err(_), Ok(address)) => ServerName::IpAddress(address.ip().into()),
        (Err(error), Err(_)) => return Err(tls(false, error.to_string())),
    };
    let stream = TlsConnector::from(tls_config()?)
        .connect(name, stream)
        .await
        .map_err(|error| tls(is_plaintext_response(&error), error.to_string()))?;
    exchange(request, stream, max_body).await
}

/// Whether the server answered with something that is not TLS.
fn is_plaintext_response(error: &std::io::Error) -> bool {
    let inner = error
        .get_ref()
        .and_then(|inner| inner.downcast_ref::<rustls::Error>());
    matches!(inner, Some(rustls::Error::InvalidMessage(_)))
}

async fn exchange<S>(request: &HookRequest, stream: S, max_body: usize) -> Result<Option<HttpResponse>, Error>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let message = build_request(request)?;
    let request_failed = |error: hyper::Error| Error::RequestFailed {
        host: request.host.clone(),
        port: request.port,
        why: error.to_string(),
    };
    // Hyper skips any number of interim responses, and a body in chunks of one byte is sent as six times its length.
    let stream = ReadLimit {
        stream,
        left: 4 * MAX_RESPONSE_HEAD + 8 * max_body,
    };
    let (mut sender, connection) = http1::Builder::new()
        .max_buf_size(MAX_RESPONSE_HEAD)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(request_failed)?;
    let answer = async {
        let response = match sender.send_request(message).await {
            Ok(response) => response,
            Err(error) if is_too_long(&error) => return Ok(None),
            Err(error) => return Err(request_failed(error)),
        };
        let (head, body) = response.into_parts();
        let headers = &head.headers;
        // A body without a length ends with the connection, for which servers with TLS do not always sign off.
        let has_length = headers.contains_key(CONTENT_LENGTH) || headers.contains_key(TRANSFER_ENCODING);
        let location = headers.get(LOCATION).and_then(|value| value.to_str().ok());
        match read_start(body, max_body).await {
            (_, Some(error)) if has_length && !head.status.is_redirection() && !is_too_long(&error) => {
                Err(request_failed(error))
            }
            (body, _) => Ok(Some(HttpResponse {
                status: head.status,
                location: location.map(str::to_owned),
                body,
            })),
        }
    };
    tokio::select! {
        // The request first: a connection on which something arrives before it is closed.
        biased;
        answer = answer => answer,
        // The connection ends only after the response, or with an error that the request returns as well. The
        // connection is driven here; the request returns its result as well.
        never = async { let _ = connection.await; pending::<Infallible>().await } => match never {},
    }
}

/// Whether the head of a response, all the interim responses before it (100 to 199), or what surrounds the parts of its
/// body, are longer than the maximum.
fn is_too_long(error: &hyper::Error) -> bool {
    let source = error
        .source()
        .and_then(|source| source.downcast_ref::<io::Error>());
    error.is_parse_too_large() || source.is_some_and(|source| source.kind() == io::ErrorKind::FileTooLarge)
}

/// The first `max` bytes of a body, and the error that ended it before.
async fn read_start<B: Body<Data = Bytes> + Unpin>(mut body: B, max: usize) -> (Vec<u8>, Option<B::Error>) {
    let mut start = Vec::new();
    while start.len() < max {
        let frame = match body.frame().await {
            None => break,
            Some(Err(error)) => return (start, Some(error)),
            Some(Ok(frame)) => frame,
        };
        let data = frame.into_data().unwrap_or_default();
        start.extend(data.into_iter().take(max - start.len()));
    }
    (start, None)
}

/// The path as sent: characters that are allowed in a URL are kept, as are escape sequences, and a fragment is not
/// sent.
fn escape_path(path: &str) -> String {
    let path = without_fragment(path);
    let bytes = path.as_bytes();
    let mut text = String::with_capacity(path.len());
    for (index, byte) in bytes.iter().enumerate() {
        let escape = bytes
            .get(index + 1..index + 3)
            .is_some_and(|hex| hex.iter().all(u8::is_ascii_hexdigit));
        match byte {
            b'%' if escape => text.push('%'),
            b'%' | b'"' | b'<' | b'>' | b'\\' | b'^' | b'`' | b'{' | b'|' | b'}' => {
                text.push_str(&format!("%{byte:02X}"))
            }
            byte if byte.is_ascii_graphic() => text.push(char::from(*byte)),
            byte => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}

fn build_request(hook: &HookRequest) -> Result<Request<Empty<Bytes>>, Error> {
    let invalid = |error: &dyn std::fmt::Display| Error::Invalid(error.to_string());
    let slash = if hook.path.starts_with('/') { "" } else { "/" };
    let mut request = Request::get(format!("{slash}{}", escape_path(&hook.path)))
        .body(Empty::<Bytes>::new())
        .map_err(|error| Error::Invalid(format!("its path: {error}")))?;
    let headers = request.headers_mut();
    for (name, value) in &hook.headers {
        let name = HeaderName::from_bytes(name.as_bytes())
            .map_err(|error| Error::Invalid(format!("header {name:?}: {error}")))?;
        let value = HeaderValue::from_str(value)
            .map_err(|error| Error::Invalid(format!("header {name}: {error}")))?;
        headers.append(name, value);
    }
    if !headers.contains_key(HOST) {
        headers.insert(
            HOST,
            HeaderValue::from_str(&authority(hook)).map_err(|error| invalid(&error))?,
        );
    }
    let agent = HeaderValue::from_static(concat!("kruise-daemon/", env!("CARGO_PKG_VERSION")));
    headers.entry(USER_AGENT).or_insert(agent);
    headers.entry(ACCEPT).or_insert(HeaderValue::from_static("*/*"));
    Ok(request)
}

/// The same for all connections: many probes run each second.
static TLS_CONFIG: LazyLock<Result<Arc<ClientConfig>, rustls::Error>> = LazyLock::new(build_tls_config);

fn build_tls_config() -> Result<Arc<ClientConfig>, rustls::Error> {
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AcceptAnyCertificate))
        .with_no_client_auth();
    // As in kubelet. The next server at an address may be another Pod.
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

fn tls_config() -> Result<Arc<ClientConfig>, Error> {
    match &*TLS_CONFIG {
        Ok(config) => Ok(Arc::clone(config)),
        Err(error) => Err(Error::Invalid(error.to_string())),
    }
}

/// Accepts any certificate, as kubelet does for hooks and probes: the target is a Pod, by its address. Signatures are
/// not checked, either: with a certificate that any server can make they prove nothing, and rustls refuses certificates
/// that kubelet accepts, such as X.509 v1, an unknown critical extension, or an RSA key of less than 2048 bits.
#[derive(Debug)]
struct AcceptAnyCertificate;

impl ServerCertVerifier for AcceptAnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        SIGNATURE_SCHEMES.to_vec()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used)]
    use super::*;
    use rustls::ServerConfig;
    use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
    use rustls::server::ParsedCertificate;
    use rustls::sign::{CertifiedKey, SingleCertAndKey};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    /// Answers each connection with the next of `responses` and returns the requests it received.
    async fn server(responses: Vec<&'static str>) -> (u16, tokio::task::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let task = tokio::spawn(async move {
            let mut requests = Vec::new();
            for answer in responses {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut text = vec![0; 4096];
                let length = stream.read(&mut text).await.unwrap();
                requests.push(String::from_utf8_lossy(&text[..length]).into_owned());
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
            requests
        });
        (port, task)
    }

    fn hook(port: u16, tls: bool) -> HookRequest {
        HookRequest {
            tls,
            host: "127.0.0.1".into(),
            port,
            path: "bye?now=1".into(),
            headers: vec![
                ("Authorization".into(), "secret".into()),
                ("X-A".into(), "1".into()),
            ],
        }
    }

    #[test]
    fn tls_configuration_is_built_once() {
        assert!(Arc::ptr_eq(&tls_config().unwrap(), &tls_config().unwrap()));
    }

    const RESPONSE: &str = "HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n";

    #[tokio::test]
    async fn any_response_counts_as_delivered() {
        let (port, requests) = server(vec![RESPONSE]).await;
        get(&hook(port, false)).await.unwrap();
        let request = requests.await.unwrap().remove(0).to_lowercase();
        assert!(request.starts_with("get /bye?now=1 http/1.1\r\n"), "{request}");
        for header in [
            format!("host: 127.0.0.1:{port}"),
            "x-a: 1".into(),
            "authorization: secret".into(),
        ] {
            assert!(request.contains(&header), "{header} in {request}");
        }
    }

    /// No more of it is read, and the hook does not wait for its end.
    #[tokio::test]
    async fn endless_response_head_counts_as_delivered() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(b"HTTP/1.1 200 OK\r\nx: ").await.unwrap();
            let mut sent = 0;
            while stream.write_all(&[b'a'; 1024]).await.is_ok() && sent < 4 * MAX_RESPONSE_HEAD {
                sent += 1024;
            }
            // Kept open until the other end closes.
            let _ = stream.read_to_end(&mut Vec::new()).await;
        });
        let hook = hook(port, false);
        let answered = tokio::time::timeout(std::time::Duration::from_secs(60), get(&hook));
        answered.await.expect("waits for the end of the head").unwrap();
        server.await.unwrap();
    }

    /// A server that sends this text, and then the other one until the client closes the connection.
    async fn endless_server(
        start: &'static [u8],
        repeated: &'static [u8],
    ) -> (u16, tokio::task::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let task = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
            stream.write_all(start).await.unwrap();
            while stream.write_all(repeated).await.is_ok() {}
        });
        (port, task)
    }

    #[tokio::test]
    async fn endless_interim_responses_count_as_delivered() {
        let (port, server) = endless_server(b"", b"HTTP/1.1 100 Continue\r\n\r\n").await;
        let hook = hook(port, false);
        let answered = tokio::time::timeout(std::time::Duration::from_secs(60), get(&hook));
        answered.await.expect("waits for a final response").unwrap();
        server.await.unwrap();
    }

    #[tokio::test]
    async fn endless_chunk_size_ends_the_body_of_a_probe() {
        let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n";
        let (port, server) = endless_server(head, b"0").await;
        let hook = hook(port, false);
        let answered = tokio::time::timeout(std::time::Duration::from_secs(60), get_response(&hook, 4));
        let response = answered.await.expect("waits for the size").unwrap().unwrap();
        assert_eq!(response.body, b"ab");
        server.await.unwrap();
    }

    #[tokio::test]
    async fn body_in_small_chunks_is_read_up_to_the_maximum() {
        let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
        let (port, server) = endless_server(head, b"1\r\na\r\n").await;
        let response = get_response(&hook(port, false), 64 << 10).await.unwrap().unwrap();
        assert_eq!(response.body.len(), 64 << 10);
        server.await.unwrap();
    }

    #[tokio::test]
    async fn https_falls_back_to_http_without_credentials() {
        let (port, requests) = server(vec!["HTTP/1.0 400 Bad Request\r\n\r\n", RESPONSE]).await;
        get(&hook(port, true)).await.unwrap();
        let second = requests.await.unwrap().remove(1).to_lowercase();
        assert!(
            second.starts_with("get /bye") && !second.contains("secret"),
            "{second}"
        );
    }

    #[tokio::test]
    async fn hook_redirects_stay_on_the_same_server() {
        let (port, requests) = server(vec![
            "HTTP/1.1 301 M\r\nlocation: /else\r\ncontent-length: 0\r\n\r\n",
            RESPONSE,
        ])
        .await;
        get(&hook(port, false)).await.unwrap();
        assert!(requests.await.unwrap()[1].starts_with("GET /else "));
        let hook_request = hook(80, false);
        assert_eq!(
            same_host_redirect(&hook_request, "http://127.0.0.1:80/x").as_deref(),
            Some("/x")
        );
        for location in [
            "http://169.254.169.254/latest",
            "//evil/x",
            "http://127.0.0.1:800/x",
            "https://127.0.0.1:80/x",
        ] {
            assert_eq!(same_host_redirect(&hook_request, location), None, "{location}");
        }
    }

    #[test]
    fn location_is_resolved_against_the_url_of_the_request() {
        let request = |host: &str, port, tls| HookRequest {
            host: host.to_owned(),
            path: "/a/b?now=1#top".to_owned(),
            ..hook(port, tls)
        };
        let (http, https) = (request("10.0.0.9", 80, false), request("10.0.0.9", 443, true));
        let ipv6 = request("fd00::9", 80, false);
        for (request, location, path) in [
            (&http, "http://10.0.0.9/health/", "/health/"),
            (&http, "HTTP://10.0.0.9:/x?y=/../z", "/x?y=/../z"),
            (&http, "http://10.0.0.9", "/"),
            (&http, "http://10.0.0.9?x", "/?x"),
            (&http, "//10.0.0.9:80/x#end", "/x"),
            (&https, "https://10.0.0.9/x", "/x"),
            (&https, "//10.0.0.9/x", "/x"),
            (&ipv6, "http://[FD00::9]/x", "/x"),
            (&ipv6, "http://[fd00::9]:80/x", "/x"),
            (&http, "/x:y/./z/..", "/x:y/"),
            (&http, "health/", "/a/health/"),
            (&http, "./c?x", "/a/c?x"),
            (&http, "../../../c", "/c"),
            (&http, ".", "/a/"),
            (&http, "?x=2", "/a/b?x=2"),
            (&http, "#end", "/a/b?now=1"),
        ] {
            assert_eq!(
                same_host_redirect(request, location).as_deref(),
                Some(path),
                "{location}"
            );
        }
        let other_port = request("10.0.0.9", 8080, false);
        for (request, location) in [
            (&other_port, "http://10.0.0.9/x"),
            (&other_port, "//10.0.0.9/x"),
            (&http, "https://10.0.0.9/x"),
            (&https, "http://10.0.0.9:443/x"),
            (&http, "http://10.0.0.9@192.0.2.1/x"),
            (&http, "http://10.0.0.9:80@192.0.2.1/x"),
            (&http, "http://10.0.0.99/x"),
            (&http, "http:/x"),
            (&http, "mailto:a"),
            (&http, ""),
        ] {
            assert_eq!(same_host_redirect(request, location), None, "{location}");
        }
        // A path of a hook may lack its slash.
        for (location, path) in [("health/", "/health/"), ("?x", "/bye?x")] {
            assert_eq!(
                same_host_redirect(&hook(80, false), location).as_deref(),
                Some(path)
            );
        }
    }

    #[tokio::test]
    async fn relative_redirect_of_a_probe_is_followed() {
        let (port, requests) = server(vec![
            "HTTP/1.1 301 M\r\nlocation: health/\r\ncontent-length: 0\r\n\r\n",
            RESPONSE,
        ])
        .await;
        let response = get_response(&hook(port, false), 4).await.unwrap().unwrap();
        assert_eq!(response.status.as_u16(), 500);
        assert!(requests.await.unwrap()[1].starts_with("GET /health/ "));
    }

    #[tokio::test]
    async fn certificate_that_rustls_refuses_is_accepted() {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut extension = rcgen::CustomExtension::from_oid_content(&[1, 2, 3, 4], vec![5, 0]);
        extension.set_criticality(true);
        let mut params = rcgen::CertificateParams::default();
        params.custom_extensions.push(extension);
        let certificate = params.self_signed(&key).unwrap().der().clone();
        assert!(ParsedCertificate::try_from(&certificate).is_err());
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let key = rustls::crypto::ring::sign::any_supported_type(&key).unwrap();
        let certified = Arc::new(CertifiedKey::new(vec![certificate], key));
        for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let config = ServerConfig::builder_with_provider(provider)
                .with_protocol_versions(&[version])
                .unwrap()
                .with_no_client_auth()
                .with_cert_resolver(Arc::new(SingleCertAndKey::from(Arc::clone(&certified))));
            let acceptor = TlsAcceptor::from(Arc::new(config));
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let port = listener.local_addr().unwrap().port();
            let server = tokio::spawn(async move {
                let (stream, _) = listener.accept().await.unwrap();
                // The client may refuse the certificate.
                let Ok(mut stream) = acceptor.accept(stream).await else {
                    return;
                };
                assert!(stream.read(&mut [0; 4096]).await.unwrap() > 0);
                stream.write_all(RESPONSE.as_bytes()).await.unwrap();
                stream.flush().await.unwrap();
            });
            let response = get_response(&hook(port, true), 4).await;
            let status = response.map(|response| response.map(|response| response.status.as_u16()));
            assert!(matches!(status, Ok(Some(500))), "{version:?}: {status:?}");
            server.await.unwrap();
        }
    }

    /// A server without any of them ends the handshake.
    #[test]
    fn signatures_that_the_crypto_provider_cannot_verify_are_offered_as_in_kubelet() {
        let offered = AcceptAnyCertificate.supported_verify_schemes();
        for scheme in [
            SignatureScheme::ECDSA_NISTP521_SHA512,
            SignatureScheme::RSA_PKCS1_SHA1,
        ] {
            let verified = rustls::crypto::ring::default_provider().signature_verification_algorithms;
            assert!(!verified.supported_schemes().contains(&scheme), "{scheme:?}");
            assert!(offered.contains(&scheme), "{scheme:?}");
        }
    }

    #[test]
    fn hook_paths_are_escaped_like_kubelet() {
        for (path, sent) in [
            ("/a b?c=é", "/a%20b?c=%C3%A9"),
            ("/50%/%41#x", "/50%25/%41"),
            ("a\"b\n", "a%22b%0A"),
        ] {
            assert_eq!(escape_path(path), sent);
            let get = HookRequest {
                path: path.to_owned(),
                ..hook(80, false)
            };
            assert!(build_request(&get).is_ok());
        }
    }

    #[tokio::test]
    async fn probe_response_has_status_and_the_start_of_the_body() {
        let (port, requests) = server(vec![
            "HTTP/1.1 302 F\r\nlocation: /ok\r\ncontent-length: 0\r\n\r\n",
            "HTTP/1.1 503 No\r\ncontent-length: 10\r\n\r\n0123456789",
            "HTTP/1.1 302 F\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n",
            "HTTP/1.0 400 plain\r\n\r\n",
        ])
        .await;
        let response = get_response(&hook(port, false), 4).await.unwrap().unwrap();
        assert_eq!(
            (response.status.as_u16(), &response.body[..]),
            (503, &b"0123"[..])
        );
        let redirected = get_response(&hook(port, false), 4).await.unwrap().unwrap();
        assert_eq!(redirected.status.as_u16(), 302);
        // Unlike a hook, a probe does not fall back to plain HTTP.
        let tls = get_response(&hook(port, true), 4).await;
        assert!(matches!(tls, Err(Error::Tls { .. })), "{tls:?}");
        assert!(requests.await.unwrap()[1].starts_with("GET /ok "));
    }

    /// As in kubelet: a server that dies while it answers has not answered.
    #[tokio::test]
    async fn response_of_a_probe_that_is_cut_short_is_a_failure() {
        let cut_short = [
            "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nab",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n",
        ];
        let (port, requests) = server(cut_short.to_vec()).await;
        for response in cut_short {
            let result = get_response(&hook(port, false), 4).await;
            assert!(
                matches!(result, Err(Error::RequestFailed { .. })),
                "{response:?}: {result:?}"
            );
        }
        requests.await.unwrap();
        // This one ends with its connection, and of the last one enough was read.
        let (port, requests) = server(vec!["HTTP/1.0 200 OK\r\n\r\nab", cut_short[0]]).await;
        for max_body in [4, 2] {
            let response = get_response(&hook(port, false), max_body).await.unwrap().unwrap();
            assert_eq!(response.body, b"ab");
        }
        requests.await.unwrap();
    }

    /// As kubelet's probes.
    #[tokio::test]
    async fn redirect_loop_of_a_probe_is_a_failure() {
        let answer = "HTTP/1.1 302 F\r\nlocation: /again\r\ncontent-length: 0\r\n\r\n";
        let (port, requests) = server(vec![answer; 11]).await;
        let error = get_response(&hook(port, false), 4).await.unwrap_err().to_string();
        assert!(error.ends_with("stopped after 10 redirects"), "{error}");
        assert_eq!(requests.await.unwrap().len(), 11);
    }

    #[tokio::test]
    async fn refused_hook_connection_is_reported() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let error = get(&hook(port, false))
            .await
            .expect_err("no server listens")
            .to_string();
        assert!(
            error.starts_with(&format!("connecting to 127.0.0.1:{port}:")),
            "{error}"
        );
    }
}

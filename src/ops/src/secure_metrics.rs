//! Metrics on a network that others use: over HTTPS, for clients that show a token.

use std::net::IpAddr;
use std::sync::Arc;

use axum::http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use futures::future::BoxFuture;
use rcgen::{CertificateParams, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use super::Health;
use super::http::{Error, accept, listen, render_metrics};

/// Maximum length of a token, in bytes. Those of service accounts have about 1,200.
const MAX_TOKEN_BYTES: usize = 8 << 10;

/// Whether the holder of a token may read metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It may.
    Allowed,
    /// The token is not valid.
    Unauthorized,
    /// The token is valid, but its holder may not read metrics.
    Forbidden,
    /// It could not be checked.
    Unknown,
}

/// Who may read metrics.
pub trait MetricsAccess: Send + Sync {
    /// Checks a token, which has visible ASCII characters only, of the client at `peer`.
    fn check(self: Arc<Self>, token: String, peer: IpAddr) -> BoxFuture<'static, Access>;
}

/// Opens `address`, and serves `/metrics` there over HTTPS until shutdown, for clients whose token `access` allows.
///
/// # Errors
/// See [`listen`]; or no certificate can be made. The task itself has none: its type is that of the other long-lived
/// tasks.
pub async fn serve(
    address: &str,
    access: Arc<dyn MetricsAccess>,
    health: Health,
    shutdown: CancellationToken,
) -> Result<impl Future<Output = Result<(), std::io::Error>> + use<>, Error> {
    let listener = listen(address).await?;
    let tls = TlsAcceptor::from(self_signed_tls()?);
    let answer = move |Extension(peer): Extension<IpAddr>, headers: HeaderMap| async move {
        match refusal(access, peer, &headers).await {
            Some(refused) => refused,
            None => render_metrics(&health),
        }
    };
    let router = Router::new().route("/metrics", get(answer));
    Ok(async move {
        accept(listener, Some(tls), router, shutdown).await;
        Ok(())
    })
}

/// The answer to a client that may not read metrics.
async fn refusal(access: Arc<dyn MetricsAccess>, peer: IpAddr, headers: &HeaderMap) -> Option<Response> {
    let access = match bearer_token(headers) {
        Some(token) => access.check(token.to_owned(), peer).await,
        None => Access::Unauthorized,
    };
    let (status, why) = match access {
        Access::Allowed => return None,
        Access::Unauthorized => (StatusCode::UNAUTHORIZED, "a valid bearer token is needed\n"),
        Access::Forbidden => (
            StatusCode::FORBIDDEN,
            "RBAC does not allow verb get on the non-resource URL /metrics\n",
        ),
        Access::Unknown => (
            StatusCode::SERVICE_UNAVAILABLE,
            "the token is not reviewed yet, or cannot be: see the log of this program\n",
        ),
    };
    let header = (status == StatusCode::UNAUTHORIZED).then_some([(WWW_AUTHENTICATE, "Bearer")]);
    Some(match header {
        Some(header) => (status, header, why).into_response(),
        None => (status, why).into_response(),
    })
}

fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let token = token.trim();
    let valid = (1..=MAX_TOKEN_BYTES).contains(&token.len()) && token.bytes().all(|c| c.is_ascii_graphic());
    (valid && scheme.eq_ignore_ascii_case("bearer")).then_some(token)
}

/// A TLS configuration with a key and a certificate that exist only in this process. No client can verify it: it keeps
/// tokens from those who listen on the network, not from those who redirect connections.
///
/// # Errors
/// When no key can be made.
fn self_signed_tls() -> Result<Arc<ServerConfig>, Error> {
    let failed = |why: &dyn std::error::Error| Error::Certificate(why.to_string());
    let key = KeyPair::generate().map_err(|why| failed(&why))?;
    let params = CertificateParams::new(vec!["localhost".to_owned()]).map_err(|why| failed(&why))?;
    let certificate = params.self_signed(&key).map_err(|why| failed(&why))?;
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let mut config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .map_err(|why| failed(&why))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use axum::http::HeaderValue;

    use super::*;

    /// Allows one token.
    struct OneToken;

    impl MetricsAccess for OneToken {
        fn check(self: Arc<Self>, token: String, _: IpAddr) -> BoxFuture<'static, Access> {
            Box::pin(async move {
                match token.as_str() {
                    "good" => Access::Allowed,
                    "weak" => Access::Forbidden,
                    "slow" => Access::Unknown,
                    _ => Access::Unauthorized,
                }
            })
        }
    }

    async fn refused(headers: &HeaderMap) -> Option<Response> {
        refusal(Arc::new(OneToken), IpAddr::from([127, 0, 0, 1]), headers).await
    }

    async fn status(authorization: &[u8]) -> u16 {
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, HeaderValue::from_bytes(authorization).unwrap());
        let refused = refused(&headers).await;
        refused.map_or(200, |response| response.status().as_u16())
    }

    #[tokio::test]
    async fn only_allowed_tokens_read_metrics() {
        for (authorization, expected) in [
            ("Bearer good", 200),
            ("bearer  good", 200),
            ("Bearer weak", 403),
            ("Bearer slow", 503),
            ("Bearer other", 401),
            ("Basic good", 401),
            ("good", 401),
            ("Bearer", 401),
            ("Bearer ", 401),
            ("Bearer go od", 401),
        ] {
            assert_eq!(
                status(authorization.as_bytes()).await,
                expected,
                "{authorization:?}"
            );
        }
        assert_eq!(status(b"Bearer good\xff").await, 401);
        let long = format!("Bearer {}", "g".repeat(MAX_TOKEN_BYTES + 1));
        assert_eq!(status(long.as_bytes()).await, 401);
        let refused = refused(&HeaderMap::new()).await.unwrap();
        assert_eq!(refused.status(), 401);
        assert_eq!(refused.headers()[WWW_AUTHENTICATE], "Bearer");
    }
}

//! The bearer token of a service account, from a file that kubelet replaces.
//!
//! Own code rather than kube's: that reads the file again by the wall clock, so that after a step back it goes on with a
//! token that has expired, for as long as the step was, and a 401 does not make it look.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use http::header::AUTHORIZATION;
use http::{HeaderValue, Request, Response, StatusCode};
use tokio::time::Instant;
use tower::{BoxError, Layer, Service};

/// How long a token is used before the file is read again, as in client-go. Kubelet replaces it minutes before it expires.
const RELOAD_AFTER: Duration = Duration::from_secs(60);

/// Adds the token to requests.
#[derive(Clone)]
pub(super) struct TokenFileLayer(Arc<TokenFile>);

struct TokenFile {
    path: PathBuf,
    cached: Mutex<CachedToken>,
}

struct CachedToken {
    header: HeaderValue,
    /// From when on the file is read again.
    reload_at: Instant,
}

impl TokenFileLayer {
    /// # Errors
    /// If the file holds no token.
    pub fn new(path: &Path) -> Result<Self, String> {
        let cached = Mutex::new(CachedToken {
            header: read(path)?,
            reload_at: Instant::now() + RELOAD_AFTER,
        });
        let path = path.to_owned();
        Ok(Self(Arc::new(TokenFile { path, cached })))
    }
}

impl TokenFile {
    /// A file that cannot be read leaves the last token: it may be removed after the start.
    fn header(&self) -> HeaderValue {
        let mut cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        if Instant::now() >= cached.reload_at {
            match read(&self.path) {
                Ok(header) => cached.header = header,
                Err(why) => tracing::warn!("keeping the last service account token: {why}"),
            }
            cached.reload_at = Instant::now() + RELOAD_AFTER;
        }
        cached.header.clone()
    }

    /// The API server rejected this token: the file may have a newer one.
    fn on_rejected(&self, header: &HeaderValue) {
        let mut cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        if cached.header == *header {
            cached.reload_at = Instant::now();
        }
    }
}

fn read(path: &Path) -> Result<HeaderValue, String> {
    let token = fs::read_to_string(path).map_err(|why| format!("{}: {why}", path.display()))?;
    let token = token.trim();
    if token.is_empty() {
        return Err(format!("{} is empty", path.display()));
    }
    let mut header = HeaderValue::try_from(format!("Bearer {token}"))
        .map_err(|_| format!("{} has characters that a token has not", path.display()))?;
    header.set_sensitive(true);
    Ok(header)
}

impl<S> Layer<S> for TokenFileLayer {
    type Service = TokenFileService<S>;
    fn layer(&self, inner: S) -> Self::Service {
        TokenFileService {
            inner,
            token: Arc::clone(&self.0),
        }
    }
}

#[derive(Clone)]
pub(super) struct TokenFileService<S> {
    inner: S,
    token: Arc<TokenFile>,
}

impl<S, A, B> Service<Request<A>> for TokenFileService<S>
where
    S: Service<Request<A>, Response = Response<B>>,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
{
    type Response = Response<B>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<A>) -> Self::Future {
        let header = self.token.header();
        request.headers_mut().insert(AUTHORIZATION, header.clone());
        let response = self.inner.call(request);
        let token = Arc::clone(&self.token);
        Box::pin(async move {
            let response = response.await?;
            if response.status() == StatusCode::UNAUTHORIZED {
                token.on_rejected(&header);
            }
            Ok(response)
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use tower::{ServiceBuilder, ServiceExt};

    /// A file with this token.
    fn file(token: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("kruise-token-{}-{token}", std::process::id()));
        fs::write(&path, format!("{token}\n")).unwrap();
        path
    }

    /// Sends a request to a server that accepts only `valid`.
    async fn request(layer: &TokenFileLayer, valid: &str) -> StatusCode {
        let valid = format!("Bearer {valid}");
        let server = tower::service_fn(move |request: Request<()>| {
            let accepted = request.headers()[AUTHORIZATION] == *valid;
            let status = if accepted {
                StatusCode::OK
            } else {
                StatusCode::UNAUTHORIZED
            };
            let response = Response::builder().status(status).body(()).unwrap();
            async { Ok::<_, BoxError>(response) }
        });
        let client = ServiceBuilder::new().layer(layer.clone()).service(server);
        client.oneshot(Request::new(())).await.unwrap().status()
    }

    #[tokio::test(start_paused = true)]
    async fn a_rejected_token_is_read_again_at_once() {
        let path = file("first");
        let layer = TokenFileLayer::new(&path).unwrap();
        assert_eq!(request(&layer, "first").await, StatusCode::OK);
        fs::write(&path, "second").unwrap();
        // Still in use until it is rejected.
        assert_eq!(request(&layer, "first").await, StatusCode::OK);
        assert_eq!(request(&layer, "second").await, StatusCode::UNAUTHORIZED);
        assert_eq!(request(&layer, "second").await, StatusCode::OK);
        fs::remove_file(&path).unwrap();
    }

    /// By the monotonic clock alone: it is the only one that this test moves.
    #[tokio::test(start_paused = true)]
    async fn a_token_is_read_again_each_minute() {
        let path = file("old");
        let layer = TokenFileLayer::new(&path).unwrap();
        fs::write(&path, "new").unwrap();
        tokio::time::advance(RELOAD_AFTER / 2).await;
        assert_eq!(request(&layer, "old").await, StatusCode::OK);
        tokio::time::advance(RELOAD_AFTER / 2).await;
        assert_eq!(request(&layer, "new").await, StatusCode::OK);
        // Neither a removed file nor an empty one takes the token away.
        fs::write(&path, " \n").unwrap();
        tokio::time::advance(RELOAD_AFTER).await;
        assert_eq!(request(&layer, "new").await, StatusCode::OK);
        fs::remove_file(&path).unwrap();
        tokio::time::advance(RELOAD_AFTER).await;
        assert_eq!(request(&layer, "new").await, StatusCode::OK);
        assert!(TokenFileLayer::new(&path).is_err());
    }
}

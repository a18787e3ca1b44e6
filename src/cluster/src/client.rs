//! The Kubernetes client: configuration, user agent, and a layer that learns the API server's time.

use std::path::PathBuf;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use http::{HeaderValue, Request, Response};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::client::{Body, ConfigExt};
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use tokio::time::Instant;
use tower::retry::RetryLayer;
use tower::{BoxError, Layer, Service, ServiceBuilder, ServiceExt};

use super::fence::FencedConnector;
use super::overload::{OverloadRetry, to_status};
use super::token_file::TokenFileLayer;
use super::{Clock, Error, Fence};

/// How to reach the cluster.
#[derive(Clone, Debug, Default)]
pub struct ClientOptions {
    /// A kubeconfig file; without it `KUBECONFIG`, the default file or the Pod's service account is used.
    pub kubeconfig: Option<PathBuf>,
    /// User agent and event source, for example `kruise-daemon`.
    pub component: String,
    /// Event source host: the node's name on a daemon.
    pub host: Option<String>,
}

/// Configuration that all clients of one cluster share.
pub(super) struct ClientConfig {
    config: Config,
    clock: Clock,
    token_file: Option<TokenFileLayer>,
}

impl ClientConfig {
    /// A client with its own connections, behind `fence` if there is one. No request is sent.
    pub(super) fn client(&self, fence: Option<Fence>) -> Result<kube::Client, Error> {
        build_client(self, fence).map_err(|e| Error::Config(e.to_string()))
    }
}

#[cfg(any(test, feature = "testing"))]
impl ClientConfig {
    /// For tests that create no second client.
    pub(super) fn for_tests(clock: Clock) -> Self {
        let config = Config::new(http::Uri::from_static("http://192.0.2.1"));
        Self {
            config,
            clock,
            token_file: None,
        }
    }
}

/// Reads the configuration.
pub(super) async fn load_client_config(options: &ClientOptions, clock: Clock) -> Result<ClientConfig, Error> {
    let mut config = load_config(options).await?;
    tracing::info!(server = %config.cluster_url, "using API server");
    config.connect_timeout = Some(Duration::from_secs(5));
    let agent = HeaderValue::from_str(&options.component).map_err(|_| {
        Error::Config(format!(
            "user agent {:?} is not a valid header",
            options.component
        ))
    })?;
    config.headers.push((http::header::USER_AGENT, agent));
    let token_file = take_token_file(&mut config)?;
    Ok(ClientConfig {
        config,
        clock,
        token_file,
    })
}

/// The client as kube itself builds it, except for the connection: without `TCP_NODELAY` every write waits some 40 ms
/// for the acknowledgement of its own headers. A server that has vanished is noticed within half a minute: by
/// keep-alive on an idle connection, by the limit for unacknowledged data on a busy one.
fn build_client(client: &ClientConfig, fence: Option<Fence>) -> Result<kube::Client, kube::Error> {
    let config = &client.config;
    let tcp = connector(config);
    let tls = config.rustls_https_connector_with_connector(FencedConnector { inner: tcp, fence })?;
    let connect = tls.map_future(|connecting| Box::pin(connect_with_timeout(connecting)));
    let http = hyper_util::client::legacy::Builder::new(TokioExecutor::new())
        .http1_max_buf_size(MAX_BUFFER_SIZE)
        .build::<_, Body>(connect);
    let service = ServiceBuilder::new()
        .map_response(to_status)
        .layer(ServerTimeLayer {
            clock: client.clock.clone(),
        })
        .layer(config.base_uri_layer())
        .layer(RetryLayer::new(OverloadRetry::new()))
        .option_layer(client.token_file.clone())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(http);
    Ok(kube::Client::new(service, config.default_namespace.clone()))
}

/// The token file of a configuration, which kube's own layer then does not use. An inline token has precedence over it.
fn take_token_file(config: &mut Config) -> Result<Option<TokenFileLayer>, Error> {
    let auth = &mut config.auth_info;
    if auth.token.is_some() || auth.auth_provider.is_some() || auth.username.is_some() {
        return Ok(None);
    }
    let file = auth.token_file.take().map(PathBuf::from);
    file.map(|path| TokenFileLayer::new(&path))
        .transpose()
        .map_err(|why| Error::Config(format!("service account token {why}")))
}

fn connector(config: &Config) -> HttpConnector {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(config.connect_timeout);
    tcp.set_keepalive(Some(TCP_KEEPALIVE));
    tcp.set_keepalive_interval(Some(TCP_KEEPALIVE / 3));
    tcp.set_keepalive_retries(Some(3));
    #[cfg(target_os = "linux")]
    tcp.set_tcp_user_timeout(Some(TCP_USER_TIMEOUT));
    tcp
}

/// How long a connection may be silent before a keep-alive probe is sent.
const TCP_KEEPALIVE: Duration = Duration::from_secs(15);
/// How long sent data may remain unacknowledged. Without it the kernel tries for some 15 minutes. macOS, for which there
/// is a plugin, has no such option.
#[cfg(target_os = "linux")]
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of a connection, including its TLS handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The most that a connection buffers, in bytes: by itself it grows to 408 KiB with a long list, and keeps that as long
/// as the watch that follows is open.
const MAX_BUFFER_SIZE: usize = 64 << 10;

async fn connect_with_timeout<C>(
    connecting: impl Future<Output = Result<C, BoxError>>,
) -> Result<C, BoxError> {
    let Ok(connected) = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await else {
        return Err(format!("no connection within {CONNECT_TIMEOUT:?}, TLS handshake included").into());
    };
    connected
}

async fn load_config(options: &ClientOptions) -> Result<Config, Error> {
    let Some(path) = &options.kubeconfig else {
        return Config::infer().await.map_err(|e| {
            Error::Config(format!(
                "no kubeconfig (--kubeconfig, KUBECONFIG) and no service account: {e}"
            ))
        });
    };
    let file = Kubeconfig::read_from(path)
        .map_err(|e| Error::Config(format!("kubeconfig {}: {e}", path.display())))?;
    Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .map_err(|e| Error::Config(format!("kubeconfig {}: {e}", path.display())))
}

/// Passes the `Date` header of every response to the clock.
struct ServerTimeLayer {
    clock: Clock,
}

impl<S> Layer<S> for ServerTimeLayer {
    type Service = ServerTimeService<S>;
    fn layer(&self, inner: S) -> Self::Service {
        ServerTimeService {
            inner,
            clock: self.clock.clone(),
        }
    }
}

#[derive(Clone)]
struct ServerTimeService<S> {
    inner: S,
    clock: Clock,
}

impl<S, B> Service<Request<Body>> for ServerTimeService<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
    S::Error: 'static,
    B: 'static,
{
    type Response = Response<B>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let clock = self.clock.clone();
        let sent = Instant::now();
        let response = self.inner.call(request);
        Box::pin(async move {
            let response = response.await?;
            if let Some(date) = response
                .headers()
                .get(http::header::DATE)
                .and_then(|d| d.to_str().ok())
            {
                clock.observe_date(date, sent, Instant::now());
            }
            Ok(response)
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn tls_handshake_times_out() {
        let start = Instant::now();
        let why = connect_with_timeout::<()>(std::future::pending())
            .await
            .unwrap_err()
            .to_string();
        assert!(why.contains("TLS handshake"), "{why}");
        assert_eq!(start.elapsed(), CONNECT_TIMEOUT);
        connect_with_timeout(async { Ok(()) }).await.unwrap();
    }

    #[tokio::test]
    async fn dead_connections_are_detected_by_keepalive() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let uri: http::Uri = format!("http://{}", listener.local_addr().unwrap())
            .parse()
            .unwrap();
        let mut connector = connector(&Config::new(uri.clone()));
        let connection = tower::Service::call(&mut connector, uri)
            .await
            .unwrap()
            .into_inner();
        let socket = socket2::SockRef::from(&connection);
        // Idle, and with unacknowledged data.
        assert!(socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), TCP_KEEPALIVE);
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(TCP_USER_TIMEOUT));
    }
}

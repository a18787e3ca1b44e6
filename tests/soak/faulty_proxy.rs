//! The network between one of our programs and the API server, with the faults of real networks.
//!
//! The program sends plain HTTP to the proxy, with its own token; the proxy sends TLS to the API server.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use http::{Request, Response, StatusCode, Uri};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioIo};
use kube::client::ConfigExt;
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type Body = UnsyncBoxBody<Bytes, BoxError>;
type ForwardedResponse = BoxFuture<'static, Result<Response<Incoming>, hyper_util::client::legacy::Error>>;
type Forward = Box<dyn Fn(Request<Incoming>) -> ForwardedResponse + Send + Sync>;

/// Fault of connections and requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkMode {
    Open,
    /// Connections are reset, and new ones too.
    Reset,
    /// Connections are kept open but transfer nothing any more, even later; new ones are accepted and never answered.
    Silent,
    /// Requests reach the API server, and their responses are lost.
    LostResponses,
    /// Requests are lost, while running watches still receive events.
    LostRequests,
    /// Each request is answered with 429 and a Retry-After of one second.
    Busy,
    /// Each request is answered with 500.
    Broken,
    /// Each request takes three seconds longer.
    Slow,
}

/// All but [`NetworkMode::Open`].
pub const NETWORK_FAULTS: [NetworkMode; 7] = [
    NetworkMode::Reset,
    NetworkMode::Silent,
    NetworkMode::LostResponses,
    NetworkMode::LostRequests,
    NetworkMode::Busy,
    NetworkMode::Broken,
    NetworkMode::Slow,
];

/// A silent connection is closed after this time: longer than the timeout of any program.
const SILENT_TIMEOUT: Duration = Duration::from_secs(900);

/// The network of one program; it exists until the process ends.
pub struct FaultyProxy {
    mode: watch::Sender<NetworkMode>,
}

impl FaultyProxy {
    /// Listens at `host` in front of the API server of the kubeconfig file, and writes its own address into the file.
    pub fn in_front_of(kubeconfig: &Path, host: &str) -> Self {
        let (mode, (ready_tx, ready_rx)) =
            (watch::Sender::new(NetworkMode::Open), std::sync::mpsc::channel());
        let (file, host, modes) = (kubeconfig.to_owned(), host.to_owned(), mode.clone());
        // A thread of its own: the test's thread is blocked while programs are started and stopped.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let file = Kubeconfig::read_from(&file).unwrap();
                let current = KubeConfigOptions::default();
                let config = Config::from_custom_kubeconfig(file, &current).await.unwrap();
                let connector = config.rustls_https_connector().unwrap();
                let client = Client::builder(TokioExecutor::new()).build(connector);
                let forward: Forward = Box::new(move |request| client.request(request).boxed());
                let listener = TcpListener::bind((host, 0)).await.unwrap();
                ready_tx.send(listener.local_addr().unwrap()).unwrap();
                serve(listener, config.cluster_url.clone(), Arc::new(forward), modes).await;
            });
        });
        rewrite_server(kubeconfig, ready_rx.recv().expect("the network is there"));
        Self { mode }
    }

    /// Sets the fault for all requests from now on.
    pub fn set(&self, mode: NetworkMode) {
        self.mode.send_replace(mode);
    }
}

fn rewrite_server(kubeconfig: &Path, address: SocketAddr) {
    let mut config: Value = serde_json::from_slice(&std::fs::read(kubeconfig).unwrap()).unwrap();
    config["clusters"][0]["cluster"] = json!({ "server": format!("http://{address}") });
    std::fs::write(kubeconfig, config.to_string()).unwrap();
}

async fn serve(listener: TcpListener, server: Uri, forward: Arc<Forward>, mode: watch::Sender<NetworkMode>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            continue;
        };
        if *mode.borrow() == NetworkMode::Reset {
            continue;
        }
        tokio::spawn(connection(
            stream,
            server.clone(),
            Arc::clone(&forward),
            mode.subscribe(),
        ));
    }
}

async fn connection(
    stream: TcpStream,
    server: Uri,
    forward: Arc<Forward>,
    mode: watch::Receiver<NetworkMode>,
) {
    // If that fails, the connection still works.
    let _ = stream.set_nodelay(true);
    let (mut reset, mut silent) = (mode.clone(), mode.clone());
    let service = service_fn(move |request| {
        let mode = *mode.borrow();
        proxy_request(mode, server.clone(), Arc::clone(&forward), request)
    });
    let mut serving = std::pin::pin!(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    let silenced = tokio::select! {
        // It ends with an error if a request does.
        _ = &mut serving => false,
        () = until(&mut reset, NetworkMode::Reset) => false,
        () = until(&mut silent, NetworkMode::Silent) => true,
    };
    if silenced {
        // The connection is kept open, and is not polled any more.
        tokio::time::sleep(SILENT_TIMEOUT).await;
    }
}

async fn until(mode: &mut watch::Receiver<NetworkMode>, wanted: NetworkMode) {
    // The sender exists until the process ends.
    let _ = mode.wait_for(|mode| *mode == wanted).await;
}

async fn proxy_request(
    mode: NetworkMode,
    server: Uri,
    forward: Arc<Forward>,
    request: Request<Incoming>,
) -> Result<Response<Body>, BoxError> {
    match mode {
        NetworkMode::Busy => return error_response(StatusCode::TOO_MANY_REQUESTS),
        NetworkMode::Broken => return error_response(StatusCode::INTERNAL_SERVER_ERROR),
        NetworkMode::Slow => tokio::time::sleep(Duration::from_secs(3)).await,
        NetworkMode::LostRequests => std::future::pending().await,
        _ => {}
    }
    let (mut parts, body) = request.into_parts();
    let mut target = server.into_parts();
    target.path_and_query = parts.uri.path_and_query().cloned();
    parts.uri = Uri::from_parts(target)?;
    let response = forward(Request::from_parts(parts, body)).await?;
    if mode == NetworkMode::LostResponses {
        drop(response.into_body().collect().await);
        std::future::pending::<()>().await;
        return Err("never".into());
    }
    Ok(response.map(|body| body.map_err(BoxError::from).boxed_unsync()))
}

fn error_response(code: StatusCode) -> Result<Response<Body>, BoxError> {
    let text = Full::from("the network is broken on purpose\n")
        .map_err(|never| match never {})
        .boxed_unsync();
    Ok(Response::builder()
        .status(code)
        .header("retry-after", "1")
        .body(text)?)
}

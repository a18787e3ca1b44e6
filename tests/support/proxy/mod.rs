//! A proxy between a manager and the API server that forwards everything except for the injected faults.
//!
//! The manager sends plain HTTP with its token; the proxy sends TLS to the API server with the same headers. So the
//! API server sees what the manager sent, and as whom, or nothing.

mod watch_stream;

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::pending;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};

use futures::FutureExt;
use futures::future::BoxFuture;
use http::{Request, Response, Uri};
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
use tokio::sync::{oneshot, watch};

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type Body = UnsyncBoxBody<Bytes, BoxError>;
type ForwardFuture = BoxFuture<'static, Result<Response<Incoming>, hyper_util::client::legacy::Error>>;
type Forward = Box<dyn Fn(Request<Full<Bytes>>) -> ForwardFuture + Send + Sync>;

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkFault {
    /// It is executed, and its connection is closed instead of a response.
    DropResponse,
    /// Its connection is closed before the API server receives it.
    DropRequest,
    /// It is executed, and there is no response for as long as the client waits.
    NoResponse,
    /// No response; it reaches the API server after a retry of the same request was answered.
    Delay,
    /// It is executed, and then the API server is unreachable.
    Outage,
    /// It is answered 429, as an overloaded API server does.
    TooManyRequests,
    /// It is forwarded when the client has received a CloneSet or SidecarSet that contains this text.
    HoldUntil(&'static str),
}

/// A fault to inject.
#[derive(Clone, Debug)]
struct FaultRule {
    namespace: String,
    /// Such as `create pods`, with a subresource after a slash, or `watch pods`.
    what: &'static str,
    fault: NetworkFault,
    /// The last of this many requests is affected.
    every: usize,
    /// How many more times; later requests pass.
    times: usize,
    matched: usize,
}

/// What a request is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ProxiedRequest {
    pub namespace: String,
    /// Such as `create pods`.
    pub what: String,
    /// Name of the object.
    pub name: String,
}

struct ProxyState {
    server: Uri,
    forward: Forward,
    rules: Mutex<Vec<FaultRule>>,
    faulted: Mutex<Vec<ProxiedRequest>>,
    /// Number of responses for each request.
    responses: watch::Sender<HashMap<ProxiedRequest, usize>>,
    /// Markers that a request waits for and that were delivered.
    seen_markers: watch::Sender<Vec<&'static str>>,
    reachable: watch::Sender<bool>,
}

/// The proxy; it serves until the process ends.
pub struct Proxy {
    address: SocketAddr,
    state: Arc<ProxyState>,
}

impl Proxy {
    /// Listens in front of the API server of the kubeconfig file, and writes its own address into the file.
    pub fn in_front_of(kubeconfig: &Path) -> Self {
        let (ready_tx, ready_rx) = std::sync::mpsc::channel();
        let file = kubeconfig.to_owned();
        // Each test has its own runtime, which ends with the test.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let state = Arc::new(ProxyState::new(&file).await);
                let listener = TcpListener::bind(("127.0.0.1", testbed::port::reserve().unwrap()))
                    .await
                    .unwrap();
                let address = listener.local_addr().unwrap();
                let proxy = Self {
                    address,
                    state: Arc::clone(&state),
                };
                ready_tx.send(proxy).unwrap();
                serve(state, listener).await;
            });
        });
        let proxy = ready_rx.recv().expect("the proxy listens");
        let text = std::fs::read_to_string(kubeconfig).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        config["clusters"][0]["cluster"] = json!({ "server": format!("http://{}", proxy.address) });
        std::fs::write(kubeconfig, config.to_string()).unwrap();
        proxy
    }

    /// Injects a fault into the last of every `every` such requests in the namespace, `times` times in total. For
    /// `watch pods`, all events are lost.
    pub fn inject(
        &self,
        namespace: &str,
        what: &'static str,
        fault: NetworkFault,
        every: usize,
        times: usize,
    ) {
        let namespace = namespace.to_owned();
        let rule = FaultRule {
            namespace,
            what,
            fault,
            every,
            times,
            matched: 0,
        };
        self.state.rules.lock().unwrap().push(rule);
    }

    /// Requests of this namespace that a fault hit; those that the API server should receive, it has received.
    pub fn faulted_requests(&self, namespace: &str) -> Vec<ProxiedRequest> {
        let mut all = self.state.faulted.lock().unwrap().clone();
        all.retain(|request| request.namespace == namespace);
        all
    }

    /// How often the API server answered this request in this namespace.
    pub fn response_count(&self, namespace: &str, what: &str) -> usize {
        let all = self.state.responses.borrow();
        let matching = all
            .iter()
            .filter(|(proxied, _)| proxied.namespace == namespace && proxied.what == what);
        matching.map(|(_, times)| times).sum()
    }

    /// Ends an outage.
    pub fn end_outage(&self) {
        self.state.reachable.send_replace(true);
    }
}

impl ProxyState {
    async fn new(kubeconfig: &Path) -> Self {
        let file = Kubeconfig::read_from(kubeconfig).unwrap();
        let current = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(file, &current).await.unwrap();
        let connector = config.rustls_https_connector().unwrap();
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Self {
            server: config.cluster_url.clone(),
            forward: Box::new(move |request| client.request(request).boxed()),
            rules: Mutex::default(),
            faulted: Mutex::default(),
            responses: watch::Sender::new(HashMap::new()),
            seen_markers: watch::Sender::new(Vec::new()),
            reachable: watch::Sender::new(true),
        }
    }

    /// The fault to apply to this request.
    fn next_fault(&self, proxied: &ProxiedRequest) -> Option<NetworkFault> {
        let mut rules = self.rules.lock().unwrap();
        let mut matching = rules.iter_mut().filter(|rule| {
            rule.namespace == proxied.namespace && rule.what == proxied.what && rule.times > 0
        });
        let rule = matching.next()?;
        rule.matched += 1;
        if rule.matched % rule.every != 0 {
            return None;
        }
        rule.times -= 1;
        Some(rule.fault)
    }

    fn record_fault(&self, proxied: &ProxiedRequest) {
        self.faulted.lock().unwrap().push(proxied.clone());
    }

    /// The same URI at the API server.
    fn upstream_uri(&self, original: &Uri) -> Result<Uri, http::uri::InvalidUriParts> {
        let mut to = self.server.clone().into_parts();
        to.path_and_query = original.path_and_query().cloned();
        Uri::from_parts(to)
    }

    /// Forwards a request; returns the response as a stream.
    async fn forward(
        &self,
        proxied: &ProxiedRequest,
        request: Request<Bytes>,
    ) -> Result<Response<Incoming>, BoxError> {
        let answer = (self.forward)(request.map(Full::new)).await?;
        self.responses
            .send_modify(|all| *all.entry(proxied.clone()).or_default() += 1);
        Ok(answer)
    }
}

/// Accepts connections while the proxy is open.
async fn serve(state: Arc<ProxyState>, listener: TcpListener) {
    let address = listener.local_addr().unwrap();
    let mut reachable = state.reachable.subscribe();
    let mut listener = Some(listener);
    loop {
        if !*reachable.borrow_and_update() {
            // New connections are refused.
            listener = None;
            reachable.changed().await.unwrap();
            continue;
        }
        if listener.is_none() {
            listener = Some(TcpListener::bind(address).await.unwrap());
        }
        tokio::select! {
            changed = reachable.changed() => changed.unwrap(),
            Ok((stream, _)) = listener.as_ref().unwrap().accept() => {
                tokio::spawn(serve_connection(Arc::clone(&state), stream));
            }
        }
    }
}

async fn serve_connection(state: Arc<ProxyState>, stream: TcpStream) {
    stream.set_nodelay(true).unwrap();
    let mut reachable = state.reachable.subscribe();
    let service = service_fn(move |request| handle(Arc::clone(&state), request));
    tokio::select! {
        // It ends with an error if a request or response is lost.
        _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service) => {}
        _ = reachable.wait_for(|reachable| !reachable) => {}
    }
}

/// Answers a request, or fails, which closes its connection.
async fn handle(state: Arc<ProxyState>, request: Request<Incoming>) -> Result<Response<Body>, BoxError> {
    let (mut parts, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let proxied = ProxiedRequest::parse(&parts, &body);
    let watches = parts.uri.query().is_some_and(|q| q.contains("watch=true"));
    let watched = parts.uri.path().rsplit('/').next().filter(|_| watches);
    let watched = watched.unwrap_or_default().to_owned();
    parts.uri = state.upstream_uri(&parts.uri)?;
    let request = Request::from_parts(parts, body);
    let fault = state.next_fault(&proxied);
    if let Some(NetworkFault::HoldUntil(marker)) = fault {
        state.record_fault(&proxied);
        let mut markers = state.seen_markers.subscribe();
        markers.wait_for(|markers| markers.contains(&marker)).await?;
    }
    match fault {
        None | Some(NetworkFault::HoldUntil(_)) => {
            let answer = state.forward(&proxied, request).await?;
            Ok(answer.map(|body| watch_stream::watch_body(state, &watched, body)))
        }
        Some(NetworkFault::DropRequest) => {
            state.record_fault(&proxied);
            Err("lost before it arrived".into())
        }
        Some(NetworkFault::TooManyRequests) => {
            state.record_fault(&proxied);
            Ok(too_many_requests()?)
        }
        Some(NetworkFault::Delay) => {
            state.record_fault(&proxied);
            let (caller_tx, caller_rx) = oneshot::channel::<Infallible>();
            tokio::spawn(forward_delayed(state, proxied, request, caller_rx));
            let _waits_tx = caller_tx;
            pending().await
        }
        Some(fault) => {
            state
                .forward(&proxied, request)
                .await?
                .into_body()
                .collect()
                .await?;
            state.record_fault(&proxied);
            match fault {
                NetworkFault::NoResponse => pending().await,
                NetworkFault::Outage => {
                    state.reachable.send_replace(false);
                    pending().await
                }
                _ => Err("its answer is lost".into()),
            }
        }
    }
}

/// The response of an overloaded API server.
fn too_many_requests() -> Result<Response<Body>, http::Error> {
    let response_body = Full::from("Too many requests, please try again later.\n");
    let response_body = response_body.map_err(|never| match never {}).boxed_unsync();
    let answer = Response::builder().status(429).header("retry-after", "1");
    answer.body(response_body)
}

/// Forwards a request when the client no longer waits for it and the retry was answered.
async fn forward_delayed(
    state: Arc<ProxyState>,
    proxied: ProxiedRequest,
    request: Request<Bytes>,
    caller_closed: oneshot::Receiver<Infallible>,
) {
    let count = |all: &HashMap<ProxiedRequest, usize>| all.get(&proxied).copied().unwrap_or_default();
    let mut answered = state.responses.subscribe();
    // The waiting client holds the other end.
    let _ = caller_closed.await;
    let before = count(&answered.borrow());
    answered.wait_for(|all| count(all) > before).await.unwrap();
    let answer = state.forward(&proxied, request).await.unwrap();
    answer.into_body().collect().await.unwrap();
}

impl ProxiedRequest {
    /// Parses `/api/v1/namespaces/NAMESPACE/RESOURCE/NAME/SUBRESOURCE`, or the same path of another group.
    fn parse(parts: &http::request::Parts, body: &Bytes) -> Self {
        let mut path = parts
            .uri
            .path()
            .split('/')
            .skip_while(|word| *word != "namespaces")
            .skip(1);
        let mut next = || path.next().unwrap_or_default().to_owned();
        let (namespace, resource, named, sub) = (next(), next(), next(), next());
        let verb = match parts.method.as_str() {
            "POST" => "create",
            "PATCH" => "patch",
            "DELETE" => "delete",
            "PUT" => "update",
            _ => "get",
        };
        let slash = if sub.is_empty() { "" } else { "/" };
        let name_in_body = || {
            let object: Value = serde_json::from_slice(body).unwrap_or_default();
            object["metadata"]["name"].as_str().unwrap_or_default().to_owned()
        };
        Self {
            namespace,
            what: format!("{verb} {resource}{slash}{sub}"),
            name: if named.is_empty() { name_in_body() } else { named },
        }
    }
}

//! Stands between a manager and the API server, passes everything on, and loses what it is told to.
//!
//! The manager speaks plain HTTP to it, with its token, and it speaks TLS to the API server with the same headers. So
//! the API server sees what the manager sent, from whom it came, or nothing.

mod news;

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

type Fault = Box<dyn std::error::Error + Send + Sync>;
type Body = UnsyncBoxBody<Bytes, Fault>;
type Passed = BoxFuture<'static, Result<Response<Incoming>, hyper_util::client::legacy::Error>>;
type Onward = Box<dyn Fn(Request<Full<Bytes>>) -> Passed + Send + Sync>;

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// It is carried out, and its connection ends instead of the answer.
    Answer,
    /// Its connection ends before the API server hears of it.
    Request,
    /// It is carried out, and there is no answer while anybody waits for one.
    Silence,
    /// There is no answer, and it arrives when another one like it has been answered.
    Late,
    /// It is carried out, and then nobody can be reached any more.
    Outage,
    /// It is answered as an API server does that has too much to do.
    Busy,
    /// It is passed on when whoever sent it has been told of a CloneSet that has these words in it.
    Until(&'static str),
}

/// What to lose.
#[derive(Clone, Debug)]
struct Rule {
    namespace: String,
    /// As `create pods`, with the subresource after a slash, or `watch pods`.
    what: &'static str,
    loss: Loss,
    /// One of so many is lost, the last of them.
    every: usize,
    /// How many more of them; the rest passes.
    times: usize,
    seen: usize,
}

/// What a request asks for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Asked {
    pub namespace: String,
    /// As `create pods`.
    pub what: String,
    /// Name of the object.
    pub name: String,
}

struct Shared {
    server: Uri,
    onward: Onward,
    rules: Mutex<Vec<Rule>>,
    lost: Mutex<Vec<Asked>>,
    /// How often what was asked for has been answered.
    answered: watch::Sender<HashMap<Asked, usize>>,
    /// The words that somebody waits for and that were told.
    told: watch::Sender<Vec<&'static str>>,
    open: watch::Sender<bool>,
}

/// The proxy; it serves until the process ends.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl Proxy {
    /// Stands before the API server that the kubeconfig file names, and has the file name the proxy instead.
    pub fn before(kubeconfig: &Path) -> Self {
        let (ready_tx, ready_rx) = std::sync::mpsc::channel();
        let file = kubeconfig.to_owned();
        // Tests have runtimes of their own, which end with them.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let shared = Arc::new(Shared::new(&file).await);
                let listener = TcpListener::bind(("127.0.0.1", testbed::port::reserve().unwrap()))
                    .await
                    .unwrap();
                let address = listener.local_addr().unwrap();
                let proxy = Self {
                    address,
                    shared: Arc::clone(&shared),
                };
                ready_tx.send(proxy).unwrap();
                serve(shared, listener).await;
            });
        });
        let proxy = ready_rx.recv().expect("the proxy listens");
        let text = std::fs::read_to_string(kubeconfig).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        config["clusters"][0]["cluster"] = json!({ "server": format!("http://{}", proxy.address) });
        std::fs::write(kubeconfig, config.to_string()).unwrap();
        proxy
    }

    /// Loses the last of every `every` requests of that sort in the namespace, `times` of them in all. Of `watch pods`, all
    /// news is lost.
    pub fn lose(&self, namespace: &str, what: &'static str, loss: Loss, every: usize, times: usize) {
        let namespace = namespace.to_owned();
        let rule = Rule {
            namespace,
            what,
            loss,
            every,
            times,
            seen: 0,
        };
        self.shared.rules.lock().unwrap().push(rule);
    }

    /// What of this namespace was lost; what the API server is to have heard of, it has.
    pub fn lost(&self, namespace: &str) -> Vec<Asked> {
        let mut all = self.shared.lost.lock().unwrap().clone();
        all.retain(|lost| lost.namespace == namespace);
        all
    }

    /// How often what was asked for in this namespace was answered by the API server.
    pub fn answered(&self, namespace: &str, what: &str) -> usize {
        let all = self.shared.answered.borrow();
        let of_this = all
            .iter()
            .filter(|(asked, _)| asked.namespace == namespace && asked.what == what);
        of_this.map(|(_, times)| times).sum()
    }

    /// Ends what an outage began.
    pub fn open(&self) {
        self.shared.open.send_replace(true);
    }
}

impl Shared {
    async fn new(kubeconfig: &Path) -> Self {
        let file = Kubeconfig::read_from(kubeconfig).unwrap();
        let current = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(file, &current).await.unwrap();
        let connector = config.rustls_https_connector().unwrap();
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Self {
            server: config.cluster_url.clone(),
            onward: Box::new(move |request| client.request(request).boxed()),
            rules: Mutex::default(),
            lost: Mutex::default(),
            answered: watch::Sender::new(HashMap::new()),
            told: watch::Sender::new(Vec::new()),
            open: watch::Sender::new(true),
        }
    }

    /// What is to become of this one.
    fn loss(&self, asked: &Asked) -> Option<Loss> {
        let mut rules = self.rules.lock().unwrap();
        let mut of_this = rules
            .iter_mut()
            .filter(|rule| rule.namespace == asked.namespace && rule.what == asked.what && rule.times > 0);
        let rule = of_this.next()?;
        rule.seen += 1;
        if rule.seen % rule.every != 0 {
            return None;
        }
        rule.times -= 1;
        Some(rule.loss)
    }

    fn lost(&self, asked: &Asked) {
        self.lost.lock().unwrap().push(asked.clone());
    }

    /// The same at the API server.
    fn uri(&self, here: &Uri) -> Result<Uri, http::uri::InvalidUriParts> {
        let mut to = self.server.clone().into_parts();
        to.path_and_query = here.path_and_query().cloned();
        Uri::from_parts(to)
    }

    /// Passes a request on; the answer as it comes.
    async fn pass(&self, asked: &Asked, request: Request<Bytes>) -> Result<Response<Incoming>, Fault> {
        let answer = (self.onward)(request.map(Full::new)).await?;
        self.answered
            .send_modify(|all| *all.entry(asked.clone()).or_default() += 1);
        Ok(answer)
    }
}

/// Takes connections while it is open.
async fn serve(shared: Arc<Shared>, listener: TcpListener) {
    let address = listener.local_addr().unwrap();
    let mut open = shared.open.subscribe();
    let mut listener = Some(listener);
    loop {
        if !*open.borrow_and_update() {
            // Whoever comes now is refused.
            listener = None;
            open.changed().await.unwrap();
            continue;
        }
        if listener.is_none() {
            listener = Some(TcpListener::bind(address).await.unwrap());
        }
        tokio::select! {
            changed = open.changed() => changed.unwrap(),
            Ok((stream, _)) = listener.as_ref().unwrap().accept() => {
                tokio::spawn(connection(Arc::clone(&shared), stream));
            }
        }
    }
}

async fn connection(shared: Arc<Shared>, stream: TcpStream) {
    stream.set_nodelay(true).unwrap();
    let mut open = shared.open.subscribe();
    let service = service_fn(move |request| answer(Arc::clone(&shared), request));
    tokio::select! {
        // It ends with an error where something is lost.
        _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service) => {}
        _ = open.wait_for(|open| !open) => {}
    }
}

/// Answers a request, or fails, which ends its connection.
async fn answer(shared: Arc<Shared>, request: Request<Incoming>) -> Result<Response<Body>, Fault> {
    let (mut parts, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let asked = Asked::of(&parts, &body);
    let watches = parts.uri.query().is_some_and(|q| q.contains("watch=true"));
    let watched = parts.uri.path().rsplit('/').next().filter(|_| watches);
    let watched = watched.unwrap_or_default().to_owned();
    parts.uri = shared.uri(&parts.uri)?;
    let request = Request::from_parts(parts, body);
    let loss = shared.loss(&asked);
    if let Some(Loss::Until(words)) = loss {
        shared.lost(&asked);
        let mut told = shared.told.subscribe();
        told.wait_for(|told| told.contains(&words)).await?;
    }
    match loss {
        None | Some(Loss::Until(_)) => {
            let answer = shared.pass(&asked, request).await?;
            Ok(answer.map(|body| news::told(shared, &watched, body)))
        }
        Some(Loss::Request) => {
            shared.lost(&asked);
            Err("lost before it arrived".into())
        }
        Some(Loss::Busy) => {
            shared.lost(&asked);
            Ok(busy()?)
        }
        Some(Loss::Late) => {
            shared.lost(&asked);
            let (waits_tx, waits_rx) = oneshot::channel::<Infallible>();
            tokio::spawn(later(shared, asked, request, waits_rx));
            let _waits_tx = waits_tx;
            pending().await
        }
        Some(loss) => {
            shared.pass(&asked, request).await?.into_body().collect().await?;
            shared.lost(&asked);
            match loss {
                Loss::Silence => pending().await,
                Loss::Outage => {
                    shared.open.send_replace(false);
                    pending().await
                }
                _ => Err("its answer is lost".into()),
            }
        }
    }
}

/// What API servers say that have too much to do.
fn busy() -> Result<Response<Body>, http::Error> {
    let words = Full::from("Too many requests, please try again later.\n");
    let words = words.map_err(|never| match never {}).boxed_unsync();
    let answer = Response::builder().status(429).header("retry-after", "1");
    answer.body(words)
}

/// Passes a request on when nobody waits for it any more, and the next try has had its answer.
async fn later(
    shared: Arc<Shared>,
    asked: Asked,
    request: Request<Bytes>,
    waits: oneshot::Receiver<Infallible>,
) {
    let count = |all: &HashMap<Asked, usize>| all.get(&asked).copied().unwrap_or_default();
    let mut answered = shared.answered.subscribe();
    // Whoever waits holds the other end.
    let _ = waits.await;
    let before = count(&answered.borrow());
    answered.wait_for(|all| count(all) > before).await.unwrap();
    let answer = shared.pass(&asked, request).await.unwrap();
    answer.into_body().collect().await.unwrap();
}

impl Asked {
    /// What a request to `/api/v1/namespaces/NAMESPACE/RESOURCE/NAME/SUBRESOURCE`, or the like of another group, asks.
    fn of(parts: &http::request::Parts, body: &Bytes) -> Self {
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
        let of_body = || {
            let object: Value = serde_json::from_slice(body).unwrap_or_default();
            object["metadata"]["name"].as_str().unwrap_or_default().to_owned()
        };
        Self {
            namespace,
            what: format!("{verb} {resource}{slash}{sub}"),
            name: if named.is_empty() { of_body() } else { named },
        }
    }
}

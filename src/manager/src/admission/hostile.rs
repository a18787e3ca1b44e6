//! Reviews that mean harm, answered on a stack far smaller than any thread of ours has.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::convert::Infallible;
use std::future::pending;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use axum::Router;
use axum::body::{Body, to_bytes};
use futures::{StreamExt, future, stream};
use http::{Request, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tower::ServiceExt;

#[path = "../../../../tests/support/shapes.rs"]
mod shapes;

use shapes::{DELETION, admission_reviews, conversion_reviews, deletion_review, every_shape, full, wrong};

use super::connections::Caller;
use super::look::Look;
use super::{Options, router};
use kruise_api::{Kind, keys, names};
use kruise_cluster::pod_template::Defaults;
use kruise_cluster::{self as cluster, Cluster};

/// Where it is exceeded, the process of the tests aborts. The main thread has 8 MiB.
const STACK: usize = 512 << 10;

/// What is looked at of an answer; the object in it may be deeper than can be read.
#[derive(Debug, Default, Deserialize)]
struct Said {
    response: Response,
}

#[derive(Debug, Default, Deserialize)]
struct Response {
    uid: String,
    allowed: Option<bool>,
    #[serde(alias = "result")]
    status: Option<kube::core::Status>,
}

impl Said {
    fn message(&self) -> &str {
        self.response.status.as_ref().map_or("", |status| &status.message)
    }
}

/// What the webhook server answers to these bodies, one after the other.
fn answers(bodies: Vec<(String, String)>) -> Vec<(u16, Said)> {
    let all = async |router: Router| {
        let mut answers = Vec::new();
        for (path, body) in bodies {
            answers.push(answer(&router, &path, Body::from(body)).await);
        }
        answers
    };
    on_a_small_stack(all)
}

/// Asks the webhook server, with no API server for it to ask.
fn on_a_small_stack<T: Send + 'static>(ask: impl AsyncFnOnce(Router) -> T + Send + 'static) -> T {
    let small = std::thread::Builder::new().stack_size(STACK);
    let thread = small.spawn(move || {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().unwrap();
        runtime.block_on(Box::pin(async { ask(router().await).await }))
    });
    thread.unwrap().join().unwrap()
}

async fn router() -> Router {
    router_to("127.0.0.1:1".parse().unwrap()).await.0
}

/// The webhook server that asks the API server at this address; and its look at that, to be kept up to date.
async fn router_to(server: SocketAddr) -> (Router, impl Future<Output = ()>) {
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = folder.path().join("config");
    let config = json!({
        "current-context": "c", "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u" } }],
        "clusters": [{ "name": "c", "cluster": { "server": format!("http://{server}") } }],
        "users": [{ "name": "u", "user": {} }],
    });
    std::fs::write(&kubeconfig, config.to_string()).unwrap();
    let to = cluster::Options {
        kubeconfig: Some(kubeconfig),
        component: "test".into(),
        host: None,
    };
    let cluster = Cluster::connect(&to).await.unwrap();
    let options = Options {
        serve: true,
        manage: true,
        namespace: "ns".into(),
        host: None,
        port: 0,
        defaults: Defaults::default(),
        vertical: false,
        off: Vec::new(),
    };
    let (look, looking) = Look::new(&cluster, &options);
    (router::router(look, &options), looking)
}

/// Requests that are being answered.
#[derive(Default)]
struct InFlight {
    now: AtomicUsize,
    most: AtomicUsize,
}

/// One of them, until it is dropped.
struct OneInFlight(Arc<InFlight>);

impl OneInFlight {
    fn new(all: &Arc<InFlight>) -> Self {
        let now = all.now.fetch_add(1, Ordering::Relaxed) + 1;
        all.most.fetch_max(now, Ordering::Relaxed);
        Self(Arc::clone(all))
    }
}

impl Drop for OneInFlight {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Every request that an API server was asked, as method, path and query.
type Recorded = Arc<Mutex<Vec<String>>>;

/// A bound claim as large as etcd takes them, of a tenant's making: with 50,000 labels, and with managed fields of a time that
/// no type of ours holds.
static CLAIM: LazyLock<String> = LazyLock::new(|| {
    let labels = |value: &str, prefix: &str| {
        let labels: Vec<_> = (0..50_000)
            .map(|n| format!(r#""{prefix}l{n}":{value}"#))
            .collect();
        labels.join(",")
    };
    format!(
        r#"{{"metadata":{{"name":"c","labels":{{{}}},"managedFields":[{{"time":"9999-12-31T23:59:59Z","fieldsV1":
            {{"f:metadata":{{"f:labels":{{{}}}}}}}}}]}},"status":{{"phase":"Bound"}}}}"#,
        labels("\"\"", ""),
        labels("{}", "f:"),
    )
});

/// Asks the webhook server, which asks an API server that records what it is asked. It has no nodes, in every namespace one
/// Pod that is read by its name, `me`, and a bound claim; in `ns` as many large ones as are asked for.
fn on_an_api_server<T: Send + 'static>(
    ask: impl AsyncFnOnce(Router) -> T + Send + 'static,
) -> (T, Vec<String>) {
    let recorded = Recorded::default();
    let record = Arc::clone(&recorded);
    let ended = on_a_small_stack(async move |_| {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (router, looking) = router_to(listener.local_addr().unwrap()).await;
        let server = Router::new().fallback(async move |request: axum::extract::Request| {
            let asked = format!("{} {}", request.method(), request.uri());
            record.lock().unwrap().push(asked.clone());
            let body = to_bytes(request.into_body(), usize::MAX).await.unwrap();
            api_server(&asked, body.into()).await
        });
        tokio::select! {
            ended = ask(router) => ended,
            () = looking => panic!("the mirror ended"),
            served = axum::serve(listener, server) => panic!("{served:?}"),
        }
    });
    let recorded = recorded.lock().unwrap().clone();
    (ended, recorded)
}

async fn api_server(asked: &str, body: Vec<u8>) -> (StatusCode, Vec<u8>) {
    let good = |object: Value| (StatusCode::OK, object.to_string().into_bytes());
    if asked.contains("watch=true") {
        return pending().await;
    }
    if asked.starts_with("GET /api/v1/nodes?") {
        return good(
            json!({ "kind": "NodeList", "apiVersion": "v1", "metadata": { "resourceVersion": "1" }, "items": [] }),
        );
    }
    if asked.contains("/pods?") {
        return good(json!({ "metadata": {}, "items": [] }));
    }
    if let Some((_, query)) = asked.split_once("/persistentvolumeclaims?") {
        let limit = query.split('&').find_map(|pair| pair.strip_prefix("limit="));
        let claims = match asked.contains("/namespaces/ns/") {
            true => vec![CLAIM.as_str(); limit.unwrap().parse().unwrap()],
            false => vec![r#"{"status":{"phase":"Bound"}}"#],
        };
        let list = format!(r#"{{"metadata":{{}},"items":[{}]}}"#, claims.join(","));
        return (StatusCode::OK, list.into_bytes());
    }
    if asked.starts_with("GET ") && asked.ends_with("/pods/me") {
        return good(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "me", "namespace": "ns", "uid": "u",
                "managedFields": [{ "time": "9999-12-31T23:59:59Z" }] },
            "spec": { "nodeName": "n", "containers": [{ "name": "c" }] },
            "status": { "phase": "Running", "containerStatuses": [{ "name": "c", "containerID": "containerd://1",
                "restartCount": 0, "ready": true, "image": "", "imageID": "" }] },
        }));
    }
    if asked.starts_with("POST ") {
        return (StatusCode::CREATED, body);
    }
    let status = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404, "reason": "NotFound",
        "message": "not found" });
    (StatusCode::NOT_FOUND, status.to_string().into_bytes())
}

async fn answer(router: &Router, path: &str, body: Body) -> (u16, Said) {
    answer_to(1, router, path, body).await
}

async fn answer_to(client: u8, router: &Router, path: &str, body: Body) -> (u16, Said) {
    let request = Request::post(path).header("content-type", "application/json");
    let request = request.extension(Caller::new([10, 0, 0, client].into()));
    let request = request.body(body).unwrap();
    let answer = Box::pin(router.clone().oneshot(request)).await.unwrap();
    let status = answer.status().as_u16();
    let text = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
    (status, serde_json::from_slice(&text).unwrap_or_default())
}

/// The reviews of an update from `old` to `object` (JSON texts), as both webhooks of the kind get them.
fn reviews(kind: &str, object: &str, old: &str) -> Vec<(String, String)> {
    let body = format!(
        r#"{{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{{"uid":"u",
            "kind":{{"version":"v1beta1"}},"namespace":"ns","object":{object},"oldObject":{old}}}}}"#
    );
    ["mutate", "validate"]
        .map(|step| (format!("/{step}-apps-kruise-io-{kind}"), body.clone()))
        .into()
}

/// The review of the deletion of a Namespace that is protected by what is in it.
fn deletion() -> (String, String) {
    (DELETION.into(), deletion_review("ns").to_string())
}

fn conversion(objects: &[&str], to: &str) -> (String, String) {
    let body = format!(
        r#"{{"apiVersion":"apiextensions.k8s.io/v1","kind":"ConversionReview","request":{{"uid":"u",
            "desiredAPIVersion":"apps.kruise.io/{to}","objects":[{}]}}}}"#,
        objects.join(",")
    );
    (keys::CONVERT_PATH.into(), body)
}

/// Lists and objects in turn around `inmost`.
fn nested(levels: usize, inmost: &str) -> String {
    let (open, close) = (r#"[{"a":"#, "}]");
    format!("{}{inmost}{}", open.repeat(levels / 2), close.repeat(levels / 2))
}

/// A CloneSet with these JSON texts in its template and its annotations.
fn clone_set(template: &str, annotations: &str) -> String {
    format!(
        r#"{{"apiVersion":"apps.kruise.io/v1beta1","kind":"CloneSet",
            "metadata":{{"name":"web","uid":"u","annotations":{annotations}}},
            "spec":{{"selector":{{"matchLabels":{{"app":"web"}}}},
                "updateStrategy":{{"rollingUpdate":{{"podUpdatePolicy":"InPlaceOnly"}}}},
                "template":{{"metadata":{{"labels":{{"app":"web"}}}},"spec":{template}}}}}}}"#
    )
}

#[test]
fn the_deepest_that_can_be_read_is_compared_and_answered() {
    // Five levels are around it: review, request, object, spec and template.
    let [one, other] = ["1", "2"].map(|inmost| clone_set(&nested(122, inmost), "{}"));
    for (status, said) in answers(reviews("cloneset", &one, &other)) {
        assert_eq!((status, said.response.uid.as_str()), (200, "u"));
        let message = said.message();
        assert!(message.is_empty() || message.contains("InPlaceOnly"), "{message}");
    }
}

#[test]
fn what_is_deeper_is_refused_whatever_it_is() {
    let deep = clone_set(&nested(20_000, "1"), "{}");
    let mut bodies = reviews("cloneset", &deep, "null");
    bodies.extend(reviews("imagepulljob", "null", &deep));
    bodies.extend(reviews("containerrecreaterequest", &deep, &deep));
    for (status, said) in answers(bodies) {
        assert_eq!((status, said.response.uid.as_str()), (200, "u"));
        assert_eq!(said.response.allowed, Some(false));
        assert!(said.message().contains("nested"), "{said:?}");
    }
    let bodies = vec![
        conversion(&[&deep], "v1alpha1"),
        ("/convert".into(), nested(200_000, "1")),
    ];
    let answers = answers(bodies);
    assert_eq!((answers[0].0, answers[1].0), (200, 400));
    assert!(answers[0].1.message().contains("recursion"), "{answers:?}");
}

/// What annotations carry between the versions becomes part of the object, and may be as deep by itself.
#[test]
fn depth_that_comes_out_of_annotations_is_converted() {
    let list = nested(124, "1");
    let text = json!({ keys::CRR_CONDITIONS: list, keys::CRR_SYNC_CONTAINER_STATUSES: list });
    let request = format!(
        r#"{{"apiVersion":"apps.kruise.io/v1alpha1","kind":"ContainerRecreateRequest",
            "metadata":{{"name":"r","annotations":{text}}},"spec":{{"podName":"p"}}}}"#
    );
    let set = clone_set(&nested(120, "1"), "{}");
    let bodies = vec![
        conversion(&[&request], "v1beta1"),
        conversion(&[&set, &set], "v1alpha1"),
    ];
    for (status, said) in answers(bodies) {
        assert_eq!(status, 200);
        let result = said.response.status.unwrap();
        assert!(result.is_success(), "{result:?}");
    }
}

#[test]
fn size_is_no_depth() {
    let many =
        |count: usize, one: &dyn Fn(usize) -> String| (0..count).map(one).collect::<Vec<_>>().join(",");
    let containers = many(5_000, &|n| format!(r#"{{"name":"c{n}","image":"image:{n}"}}"#));
    let containers = clone_set(&format!(r#"{{"containers":[{containers}]}}"#), "{}");
    let labels = many(20_000, &|n| format!(r#""l{n}":"{n}""#));
    let labels = clone_set(&format!(r#"{{"nodeSelector":{{{labels}}}}}"#), "{}");
    let names = many(20_000, &|n| format!(r#""n{n}""#));
    let names =
        format!(r#"{{"kind":"ImagePullJob","spec":{{"image":"i","selector":{{"names":[{names}]}}}}}}"#);
    let mut bodies = reviews("cloneset", &containers, &labels);
    bodies.extend(reviews("imagepulljob", &names, "null"));
    bodies.push(conversion(&[&containers, &labels], "v1alpha1"));
    for (status, said) in answers(bodies) {
        assert_eq!((status, said.response.uid.as_str()), (200, "u"));
    }
}

#[test]
fn a_large_conversion_keeps_no_other_request_waiting() {
    let set = clone_set(r#"{"containers":[{"name":"app","image":"i"}]}"#, "{}");
    let (path, large) = conversion(&vec![set.as_str(); 4000], "v1alpha1");
    let (_, small) = conversion(&[&set], "v1alpha1");
    assert!(large.len() > 1 << 20);
    on_a_small_stack(async move |router| {
        tokio::select! {
            biased;
            _ = answer_to(1, &router, &path, Body::from(large)) => panic!("the small one waited"),
            (status, _) = answer_to(2, &router, &path, Body::from(small)) => assert_eq!(status, 200),
        }
    });
}

/// Where the API server cannot be asked for the stored template, unknown fields are compared as they are.
#[test]
fn a_key_as_long_as_an_object_is_not_repeated_for_each_field_below_it() {
    let long = "k".repeat(1 << 17);
    let [one, other] = ["1", "2"].map(|value| {
        let fields: Vec<_> = (0..2_000).map(|n| format!(r#""f{n}":{value}"#)).collect();
        clone_set(&format!(r#"{{"{long}":{{{}}}}}"#, fields.join(",")), "{}")
    });
    let answers = answers(reviews("cloneset", &one, &other));
    let why = answers[1].1.message();
    assert!(
        why.contains("InPlaceOnly") && why.len() < 2 << 20,
        "{}",
        why.len()
    );
}

/// Names the test whose process has little memory.
const LITTLE_MEMORY: &str = "KRUISE_TEST_LITTLE_MEMORY";
/// What it may have besides the program itself: what the container has.
const MEMORY: u64 = 512 << 20;

/// Bytes of addresses that this process has.
fn addresses() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    pages * 4096
}

#[test]
fn reviews_that_would_take_much_memory_leave_the_server_alive() {
    if std::env::var_os(LITTLE_MEMORY).is_some() {
        return with_little_memory();
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "--nocapture"]);
    child.arg("admission::hostile::reviews_that_would_take_much_memory_leave_the_server_alive");
    let ended = child.env(LITTLE_MEMORY, "1").output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{}: {said}", ended.status);
    assert!(said.contains("all were answered"), "{said}");
}

fn with_little_memory() {
    on_an_api_server(async |router| {
        use nix::sys::resource::{Resource, setrlimit};
        let most = addresses() + MEMORY;
        setrlimit(Resource::RLIMIT_AS, most, most).unwrap();
        let few = |one: &str, times: usize| vec![one; times].join(",");
        let set = |template: &str| clone_set(template, "{}");
        let deep = format!("{}0{}", r#"{"":"#.repeat(100), "}".repeat(100));
        let image = |name: &str, tags: &str| {
            format!(r#"{{"metadata":{{"name":"n"}},"spec":{{"images":{{"{name}":{{"tags":[{tags}]}}}}}}}}"#)
        };
        let texts: [&dyn Fn() -> Vec<(String, String)>; 7] = [
            &|| vec![conversion(&[&few(r#"{"":0}"#, 2_000_000)], "v1alpha1")],
            &|| vec![conversion(&[&few(&deep, 42_000)], "v1alpha1")],
            &|| {
                vec![conversion(
                    &[&set(&format!(r#"{{"x":[{}]}}"#, few(r#"{"":0}"#, 2_000_000)))],
                    "v1alpha1",
                )]
            },
            &|| vec![conversion(&[&few("0", 16_000_000)], "v1alpha1")],
            &|| reviews("nodeimage", &image("nginx", &few("{}", 262_000)), "null"),
            &|| {
                reviews(
                    "nodeimage",
                    &image(&"k".repeat(1 << 20), &few("{}", 1_000)),
                    "null",
                )
            },
            &|| {
                let many = format!(r#"{{"x":[{}]}}"#, few(r#"{"":0}"#, 40_000));
                let all = format!(r#"{{"x":[{}]}}"#, few(r#"{"":0}"#, 250_000));
                [
                    reviews("cloneset", &set(&many), &set("{}")),
                    reviews("cloneset", &set(&all), "null"),
                ]
                .concat()
            },
        ];
        for text in texts {
            for (path, body) in text() {
                let length = body.len();
                let (status, _) = answer(&router, &path, Body::from(body)).await;
                assert!(
                    [200, 400, 413].contains(&status),
                    "{status} to {length} bytes at {path}"
                );
            }
        }
        let (path, body) = deletion();
        let many = (1..=64).map(|client| answer_to(client, &router, &path, Body::from(body.clone())));
        let counted = future::join_all(many).await;
        let counted = counted.iter().filter(|(status, said)| {
            assert_eq!(*status, 200);
            assert!(said.message().contains("ResourcesProtectionDeletion"), "{said:?}");
            said.message().contains("status pvc 3>0")
        });
        assert!(counted.count() > 0);
        for (path, body) in reviews("cloneset", &set("{}"), "null") {
            assert_eq!(answer(&router, &path, Body::from(body)).await.0, 200);
        }
        eprintln!("all were answered");
    });
}

/// Claims of any size and shape are counted in pages of bounded size, so that the Namespace can be deleted once they are gone.
#[test]
fn claims_are_counted_in_bounded_pages_whatever_is_in_them() {
    let ((status, said), asked) = on_an_api_server(async |router| {
        let (path, body) = deletion();
        answer(&router, &path, Body::from(body)).await
    });
    assert_eq!((status, said.response.allowed), (200, Some(false)));
    assert!(said.message().contains("\"Bound\" status pvc 3>0"), "{said:?}");
    let limits = asked
        .iter()
        .filter_map(|asked| asked.split_once("/persistentvolumeclaims?"));
    let limits: Vec<_> = limits.map(|(_, query)| query.trim_start_matches('&')).collect();
    assert_eq!(limits, ["limit=50", "limit=12", "limit=3"]);
}

/// However many reviews come at once, the API server is asked for a bounded number of things at a time, and no address keeps
/// another from asking.
#[test]
fn what_reviews_ask_of_the_api_server_is_bounded_for_each_address_and_for_all() {
    let in_flight = Arc::<InFlight>::default();
    let seen = Arc::clone(&in_flight);
    on_a_small_stack(async move |_| {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (router, looking) = router_to(listener.local_addr().unwrap()).await;
        let (asked_tx, mut asked) = mpsc::unbounded_channel();
        // Pods of namespace `slow` are never answered.
        let server = Router::new().fallback(async move |request: axum::extract::Request| {
            let asked = format!("{} {}", request.method(), request.uri());
            let _one = (!asked.contains("/nodes")).then(|| OneInFlight::new(&seen));
            if asked.contains("/slow/") {
                asked_tx.send(()).unwrap();
                return pending().await;
            }
            api_server(&asked, Vec::new()).await
        });
        let names: Vec<_> = (0..500).map(|n| format!("p{n}")).collect();
        let set = json!({ "metadata": { "name": "web", "uid": "u" }, "spec": { "scaleStrategy": { "podsToDelete": names } } });
        let recreate = json!({ "metadata": { "name": "r" }, "spec": { "podName": "me", "containers": [{ "name": "c" }] } });
        let review = |namespace: &str, object: &Value| {
            let request = json!({ "uid": "u", "kind": { "version": "v1beta1" }, "namespace": namespace, "object": object });
            json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request })
                .to_string()
        };
        let many = |client, path, body: String, times| {
            let router = &router;
            future::join_all(
                (0..times).map(move |_| answer_to(client, router, path, Body::from(body.clone()))),
            )
        };
        let (validate, mutate) = (
            "/validate-apps-kruise-io-cloneset",
            "/mutate-apps-kruise-io-containerrecreaterequest",
        );
        let attack = async {
            let other = async {
                for _ in 0..8 {
                    asked.recv().await.unwrap();
                }
                answer_to(2, &router, mutate, Body::from(review("ns", &recreate)))
                    .await
                    .1
            };
            let (_, other) = tokio::join!(many(1, validate, review("slow", &set), 50), other);
            assert_eq!(other.response.allowed, Some(true), "{other:?}");
            while asked.try_recv().is_ok() {}
            let later = async {
                for _ in 0..4 {
                    asked.recv().await.unwrap();
                }
                let (path, body) = deletion();
                answer_to(1, &router, &path, Body::from(body)).await.1
            };
            let (_, later) = tokio::join!(many(1, mutate, review("slow", &recreate), 8), later);
            assert_eq!(later.response.allowed, Some(false));
            assert!(
                later.message().contains("too many requests are waiting"),
                "{later:?}"
            );
        };
        tokio::select! {
            () = attack => {}
            () = looking => panic!("the mirror ended"),
            served = axum::serve(listener, server) => panic!("{served:?}"),
        }
    });
    // Eight of one address, and what another one asks for meanwhile.
    let most = in_flight.most.load(Ordering::Relaxed);
    assert!((8..=16).contains(&most), "{most}");
}

#[test]
fn each_sort_of_review_has_a_room_of_its_own() {
    on_a_small_stack(async |router| {
        let padded = |text: String, bytes: usize| Body::from(" ".repeat(bytes - text.len()) + &text);
        let [_, (admit, review)] = reviews("cloneset", &clone_set("{}", "{}"), "null")
            .try_into()
            .unwrap();
        let (convert, objects) = conversion(&[&clone_set("{}", "{}")], "v1alpha1");
        let ask = async |path: &str, text: &String, bytes| {
            let (status, _) = answer(&router, path, padded(text.clone(), bytes)).await;
            status
        };
        assert_eq!(ask(&admit, &review, 16 << 20).await, 200);
        assert_eq!(ask(&admit, &review, (16 << 20) + 1).await, 413);
        // Two of the largest texts have arrived, and do not end.
        let (taken, mut news) = mpsc::unbounded_channel();
        for client in 1..=2 {
            let (router, admit, taken) = (router.clone(), admit.clone(), taken.clone());
            let end = stream::once(async move {
                taken.send(()).unwrap();
                pending().await
            });
            let text = stream::iter([Ok::<_, Infallible>(vec![b' '; 16 << 20])]).chain(end);
            tokio::spawn(async move { answer_to(client, &router, &admit, Body::from_stream(text)).await });
            news.recv().await.unwrap();
        }
        assert_eq!(ask(&admit, &review, review.len()).await, 429);
        let (other, _) = answer_to(3, &router, &admit, Body::from(review.clone())).await;
        assert_eq!(other, 429);
        assert_eq!(ask(&convert, &objects, 64 << 20).await, 200);
        assert_eq!(ask(&convert, &objects, (64 << 20) + 1).await, 413);
    });
}

#[test]
fn a_crowd_of_lists_of_one_address_keeps_no_other_waiting() {
    const CROWD: usize = 200;
    on_a_small_stack(async |router| {
        let done = Arc::new(AtomicUsize::new(0));
        let ask = |client| {
            let (router, (convert, objects)) =
                (router.clone(), conversion(&[&clone_set("{}", "{}")], "v1alpha1"));
            async move { answer_to(client, &router, &convert, Body::from(objects)).await.0 }
        };
        let mut crowd = tokio::task::JoinSet::new();
        for _ in 0..CROWD {
            let (list, done) = (ask(1), Arc::clone(&done));
            crowd.spawn(async move {
                assert_eq!(list.await, 200);
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
        let other = tokio::spawn(ask(2));
        assert_eq!(other.await.unwrap(), 200);
        let before = done.load(Ordering::Relaxed);
        assert!(before <= 5, "{before} of the crowd came first");
        crowd.join_all().await;
        assert_eq!(done.load(Ordering::Relaxed), CROWD);
    });
}

#[test]
fn a_review_of_any_shape_is_answered() {
    let (count, asked) = on_an_api_server(async |router| {
        let mut count = 0;
        let wrong = wrong();
        for kind in Kind::ALL.map(|kind| kind.row().lower) {
            let shapes = admission_reviews(kind)
                .map(|review| every_shape(&review, &wrong))
                .concat();
            for step in ["mutate", "validate"] {
                let path = format!("/{step}-apps-kruise-io-{kind}");
                for body in &shapes {
                    let (status, said) = answer(&router, &path, Body::from(body.clone())).await;
                    assert!(
                        [200, 400].contains(&status),
                        "{status} {said:?} to {body} at {path}"
                    );
                    count += 1;
                }
            }
            for body in conversion_reviews(kind)
                .iter()
                .flat_map(|review| every_shape(review, &wrong))
            {
                let (status, said) = answer(&router, keys::CONVERT_PATH, Body::from(body.clone())).await;
                assert!([200, 400].contains(&status), "{status} {said:?} to {body}");
                count += 1;
            }
        }
        for body in every_shape(&deletion_review("web"), &wrong) {
            let (status, said) = answer(&router, DELETION, Body::from(body.clone())).await;
            assert!([200, 400].contains(&status), "{status} {said:?} to {body}");
            count += 1;
        }
        count
    });
    assert!(count > 1000, "{count}");
    assert!(asked.iter().any(|asked| asked.contains("/namespaces/web/pods?")));
    only_good_requests(&asked);
}

/// Nothing was asked but what reviews need, each of good names, and nothing was written.
fn only_good_requests(asked: &[String]) {
    for asked in asked {
        let (method, path) = asked.split_once(' ').unwrap();
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let steps: Vec<&str> = path.split('/').collect();
        let good = match (method, &steps[..]) {
            ("GET", ["", "api", "v1", "nodes"]) => query.contains("labelSelector="),
            ("GET", ["", "api", "v1", "nodes", name]) => names::is_subdomain(name) && query.is_empty(),
            ("GET", ["", "api", "v1", "namespaces", namespace, "pods", name]) => {
                names::is_label(namespace) && names::is_subdomain(name) && query.is_empty()
            }
            (
                "GET",
                [
                    "",
                    "api",
                    "v1",
                    "namespaces",
                    namespace,
                    "pods" | "persistentvolumeclaims",
                ],
            ) => names::is_label(namespace) && query.contains("limit="),
            ("POST", ["", "api", "v1", "namespaces", namespace, "podtemplates"]) => {
                names::is_label(namespace) && query.trim_start_matches('&') == "dryRun=All"
            }
            _ => false,
        };
        assert!(good, "{asked}");
    }
}

#[test]
fn hostile_names_never_become_part_of_a_request() {
    let hostile = [
        "x?y=",
        "?",
        "default/podtemplates?x=",
        "default/podtemplates#",
        "kube-system/secrets?x=",
        "../x",
        "a/b",
        "a#b",
        "%2e",
        "",
        ".",
        "A",
        "a b",
        "a\nb",
        "\u{0}",
    ];
    let (answers, asked) = on_an_api_server(async move |router| {
        let mut answers = Vec::new();
        for text in hostile.into_iter().chain(["me"]) {
            for kind in Kind::ALL.map(|kind| kind.row().lower) {
                for (namespace, name) in [(text, "me"), ("ns", text), (text, text)] {
                    let mut object = full(kind);
                    json_patch::merge(
                        &mut object,
                        &json!({ "metadata": { "name": name, "namespace": namespace, "uid": name },
                        "spec": { "podName": name, "selector": { "names": [name] }, "scaleStrategy": { "podsToDelete": [name] } } }),
                    );
                    let body = json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
                        "uid": "u", "kind": { "version": "v1beta1" }, "namespace": namespace, "name": name, "object": object } });
                    for step in ["mutate", "validate"] {
                        let path = format!("/{step}-apps-kruise-io-{kind}");
                        let said = answer(&router, &path, Body::from(body.to_string())).await;
                        answers.push((path, namespace, name, said));
                    }
                }
            }
            let body = Body::from(deletion_review(text).to_string());
            answers.push((DELETION.into(), "", text, answer(&router, DELETION, body).await));
        }
        answers
    });
    for (path, namespace, name, (status, said)) in answers {
        assert_eq!(status, 200, "{path}");
        if !namespace.is_empty() && !names::is_label(namespace) {
            assert!(
                said.message().contains("request.namespace: Invalid value"),
                "{path} {namespace:?}: {said:?}"
            );
        }
        if path == "/mutate-apps-kruise-io-containerrecreaterequest" {
            let good = names::is_label(namespace) && names::is_subdomain(name);
            assert_eq!(said.response.allowed, Some(good), "{said:?}");
        }
        if path == DELETION {
            // A name that no Namespace has protects none.
            let asks = names::is_label(name);
            assert_eq!(said.response.allowed, Some(!asks), "{said:?}");
        }
    }
    assert!(
        asked.iter().any(|asked| asked.contains("podtemplates"))
            && asked.iter().any(|asked| asked.contains("/pods/me"))
            && asked.iter().any(|asked| asked.contains("/namespaces/me/pods?"))
    );
    only_good_requests(&asked);
}

//! Malicious reviews, answered on a stack far smaller than that of any of our threads.
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

#[path = "../../../../tests/support/malformed_reviews.rs"]
mod malformed_reviews;

use malformed_reviews::{
    NAMESPACE_DELETION_PATH, admission_reviews, conversion_reviews, deletion_review, full_object,
    invalid_values, mutations,
};

use super::connections::Caller;
use super::lookups::Lookups;
use super::{Options, router};
use kruise_api::{Kind, keys, names};
use kruise_cluster::{self as cluster, Cluster};
use kruise_ops::FeatureGates;

/// If this is exceeded, the test process aborts. The main thread has 8 MiB.
const STACK_BYTES: usize = 512 << 10;

/// The fields of an answer that tests read; the object in it may be nested deeper than can be parsed.
#[derive(Debug, Default, Deserialize)]
struct ParsedAnswer {
    response: Response,
}

#[derive(Debug, Default, Deserialize)]
struct Response {
    uid: String,
    allowed: Option<bool>,
    #[serde(alias = "result")]
    status: Option<kube::core::Status>,
}

impl ParsedAnswer {
    fn message(&self) -> &str {
        self.response.status.as_ref().map_or("", |status| &status.message)
    }
}

/// Answers of the webhook server to these bodies, one after the other.
fn send_all(bodies: Vec<(String, String)>) -> Vec<(u16, ParsedAnswer)> {
    let send_each = async |router: Router| {
        let mut answers = Vec::new();
        for (path, body) in bodies {
            answers.push(send(&router, &path, Body::from(body)).await);
        }
        answers
    };
    with_small_stack(send_each)
}

/// Runs the webhook server without an API server.
fn with_small_stack<T: Send + 'static>(send: impl AsyncFnOnce(Router) -> T + Send + 'static) -> T {
    let small = std::thread::Builder::new().stack_size(STACK_BYTES);
    let thread = small.spawn(move || {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().unwrap();
        runtime.block_on(Box::pin(async { send(router().await).await }))
    });
    thread.unwrap().join().unwrap()
}

async fn router() -> Router {
    router_with_api_server("127.0.0.1:1".parse().unwrap()).await.0
}

/// The webhook server with the API server at this address, and the task that keeps its store current.
async fn router_with_api_server(server: SocketAddr) -> (Router, impl Future<Output = ()>) {
    let folder = tempfile::tempdir().unwrap();
    let kubeconfig = folder.path().join("config");
    let config = json!({
        "current-context": "c", "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u" } }],
        "clusters": [{ "name": "c", "cluster": { "server": format!("http://{server}") } }],
        "users": [{ "name": "u", "user": {} }],
    });
    std::fs::write(&kubeconfig, config.to_string()).unwrap();
    let cluster_options = cluster::ClientOptions {
        kubeconfig: Some(kubeconfig),
        component: "test".into(),
        host: None,
    };
    let cluster = Cluster::connect(&cluster_options).await.unwrap();
    let options = Options {
        serve: true,
        manage: true,
        namespace: "ns".into(),
        host: None,
        port: 0,
        gates: FeatureGates::default(),
    };
    let (lookups, watching) = Lookups::new(&cluster, &options);
    (router::router(lookups, &options), watching)
}

/// Number of requests in flight.
#[derive(Default)]
struct InFlight {
    now: AtomicUsize,
    max: AtomicUsize,
}

/// One request in flight, until it is dropped.
struct InFlightGuard(Arc<InFlight>);

impl InFlightGuard {
    fn new(all: &Arc<InFlight>) -> Self {
        let now = all.now.fetch_add(1, Ordering::Relaxed) + 1;
        all.max.fetch_max(now, Ordering::Relaxed);
        Self(Arc::clone(all))
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Every request to the API server, as method, path and query.
type RecordedRequests = Arc<Mutex<Vec<String>>>;

/// A tenant's bound claim of the maximum size in etcd: with 50,000 labels, and with managed fields whose time no type
/// of ours can hold.
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

/// Runs the webhook server with an API server that records its requests. It has no nodes; in every namespace one Pod
/// that is read by its name, `me`, and a bound claim; in `ns` the given number of large claims.
fn with_api_server<T: Send + 'static>(
    send: impl AsyncFnOnce(Router) -> T + Send + 'static,
) -> (T, Vec<String>) {
    let recorded = RecordedRequests::default();
    let record = Arc::clone(&recorded);
    let result = with_small_stack(async move |_| {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (router, watching) = router_with_api_server(listener.local_addr().unwrap()).await;
        let server = Router::new().fallback(async move |request: axum::extract::Request| {
            let request_line = format!("{} {}", request.method(), request.uri());
            record.lock().unwrap().push(request_line.clone());
            let body = to_bytes(request.into_body(), usize::MAX).await.unwrap();
            api_server(&request_line, body.into()).await
        });
        tokio::select! {
            ended = send(router) => ended,
            () = watching => panic!("the watch ended"),
            served = axum::serve(listener, server) => panic!("{served:?}"),
        }
    });
    let recorded = recorded.lock().unwrap().clone();
    (result, recorded)
}

async fn api_server(request_line: &str, body: Vec<u8>) -> (StatusCode, Vec<u8>) {
    let ok = |object: Value| (StatusCode::OK, object.to_string().into_bytes());
    if request_line.contains("watch=true") {
        return pending().await;
    }
    if request_line.starts_with("GET /api/v1/nodes?") {
        return ok(
            json!({ "kind": "NodeList", "apiVersion": "v1", "metadata": { "resourceVersion": "1" }, "items": [] }),
        );
    }
    let watched = ["/sidecarsets?", "/v1/namespaces?", "/controllerrevisions?"];
    if watched.iter().any(|list| request_line.contains(list)) {
        return ok(json!({ "metadata": { "resourceVersion": "1" }, "items": [] }));
    }
    if request_line.contains("/pods?") {
        return ok(json!({ "metadata": {}, "items": [] }));
    }
    if let Some((_, query)) = request_line.split_once("/persistentvolumeclaims?") {
        let limit = query.split('&').find_map(|pair| pair.strip_prefix("limit="));
        let claims = match request_line.contains("/namespaces/ns/") {
            true => vec![CLAIM.as_str(); limit.unwrap().parse().unwrap()],
            false => vec![r#"{"status":{"phase":"Bound"}}"#],
        };
        let list = format!(r#"{{"metadata":{{}},"items":[{}]}}"#, claims.join(","));
        return (StatusCode::OK, list.into_bytes());
    }
    if request_line.starts_with("GET ") && request_line.ends_with("/pods/me") {
        return ok(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "me", "namespace": "ns", "uid": "u",
                "managedFields": [{ "time": "9999-12-31T23:59:59Z" }] },
            "spec": { "nodeName": "n", "containers": [{ "name": "c" }] },
            "status": { "phase": "Running", "containerStatuses": [{ "name": "c", "containerID": "containerd://1",
                "restartCount": 0, "ready": true, "image": "", "imageID": "" }] },
        }));
    }
    if request_line.ends_with("/sidecarsets/late") {
        return ok(json!({ "metadata": { "name": "late", "resourceVersion": "2" } }));
    }
    if request_line.starts_with("POST ") {
        return (StatusCode::CREATED, body);
    }
    let status = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404, "reason": "NotFound",
        "message": "not found" });
    (StatusCode::NOT_FOUND, status.to_string().into_bytes())
}

async fn send(router: &Router, path: &str, body: Body) -> (u16, ParsedAnswer) {
    send_as(1, router, path, body).await
}

async fn send_as(client: u8, router: &Router, path: &str, body: Body) -> (u16, ParsedAnswer) {
    let request = Request::post(path).header("content-type", "application/json");
    let request = request.extension(Caller::new([10, 0, 0, client].into()));
    let request = request.body(body).unwrap();
    let answer = Box::pin(router.clone().oneshot(request)).await.unwrap();
    let status = answer.status().as_u16();
    let text = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
    (status, serde_json::from_slice(&text).unwrap_or_default())
}

/// The reviews of an update from `old` to `object` (JSON), for both webhooks of the kind.
fn reviews(kind: &str, object: &str, old: &str) -> Vec<(String, String)> {
    let body = format!(
        r#"{{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{{"uid":"u",
            "kind":{{"version":"v1beta1"}},"namespace":"ns","object":{object},"oldObject":{old}}}}}"#
    );
    ["mutate", "validate"]
        .map(|step| (format!("/{step}-apps-kruise-io-{kind}"), body.clone()))
        .into()
}

/// The review of the deletion of a Namespace with protection `Cascading`.
fn deletion() -> (String, String) {
    (NAMESPACE_DELETION_PATH.into(), deletion_review("ns").to_string())
}

fn conversion(objects: &[&str], to: &str) -> (String, String) {
    let body = format!(
        r#"{{"apiVersion":"apiextensions.k8s.io/v1","kind":"ConversionReview","request":{{"uid":"u",
            "desiredAPIVersion":"apps.kruise.io/{to}","objects":[{}]}}}}"#,
        objects.join(",")
    );
    (keys::CONVERT_PATH.into(), body)
}

/// Nested lists and objects around `innermost`.
fn nested(levels: usize, innermost: &str) -> String {
    let (open, close) = (r#"[{"a":"#, "}]");
    format!(
        "{}{innermost}{}",
        open.repeat(levels / 2),
        close.repeat(levels / 2)
    )
}

/// A CloneSet with these JSON values in its template and its annotations.
fn clone_set(template: &str, annotations: &str) -> String {
    format!(
        r#"{{"apiVersion":"apps.kruise.io/v1beta1","kind":"CloneSet",
            "metadata":{{"name":"web","uid":"u","annotations":{annotations}}},
            "spec":{{"selector":{{"matchLabels":{{"app":"web"}}}},
                "updateStrategy":{{"rollingUpdate":{{"podUpdatePolicy":"InPlaceOnly"}}}},
                "template":{{"metadata":{{"labels":{{"app":"web"}}}},"spec":{template}}}}}}}"#
    )
}

/// Failure policy `Fail` holds for a set that the watch has not shown yet; one that is deleted refuses nothing.
#[test]
fn pod_review_fails_for_a_set_that_is_not_cached() {
    let body = r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u",
        "kind":{"version":"v1"},"namespace":"ns","oldObject":null,
        "object":{"metadata":{"name":"p"},"spec":{"containers":[{"name":"c"}]}}}}"#;
    let paths = ["", "/late", "/deleted", "/no%20name", "/x%2Fpods%3Fy="];
    let (answers, requests) = with_api_server(async move |router| {
        let mut answers = Vec::new();
        for path in paths {
            let path = format!("{}{path}", keys::MUTATE_POD_PATH);
            let (status, answer) = send(&router, &path, body.into()).await;
            answers.push((status, answer.response.allowed));
        }
        answers
    });
    let allowed = (200, Some(true));
    assert_eq!(answers, [allowed, (500, None), allowed, allowed, allowed]);
    let mut gets: Vec<_> = requests
        .iter()
        .filter(|line| line.contains("/sidecarsets/"))
        .collect();
    gets.dedup();
    let names = gets.iter().filter_map(|line| line.rsplit('/').next());
    assert_eq!(names.collect::<Vec<_>>(), ["late", "deleted"]);
}

#[test]
fn deepest_readable_objects_are_compared() {
    // Five levels are around it: review, request, object, spec and template.
    let [one, other] = ["1", "2"].map(|inmost| clone_set(&nested(122, inmost), "{}"));
    for (status, answer) in send_all(reviews("cloneset", &one, &other)) {
        assert_eq!((status, answer.response.uid.as_str()), (200, "u"));
        let message = answer.message();
        assert!(message.is_empty() || message.contains("InPlaceOnly"), "{message}");
    }
}

#[test]
fn deeper_nesting_is_refused() {
    let deep = clone_set(&nested(20_000, "1"), "{}");
    let mut bodies = reviews("cloneset", &deep, "null");
    bodies.extend(reviews("imagepulljob", "null", &deep));
    bodies.extend(reviews("containerrecreaterequest", &deep, &deep));
    for (status, answer) in send_all(bodies) {
        assert_eq!((status, answer.response.uid.as_str()), (200, "u"));
        assert_eq!(answer.response.allowed, Some(false));
        assert!(answer.message().contains("nested"), "{answer:?}");
    }
    // Conversion reads the strategy, not the template: what is stored must be readable.
    let strategy = format!(
        r#"{{"apiVersion":"apps.kruise.io/v1beta1","kind":"CloneSet","metadata":{{}},"spec":{{"updateStrategy":{}}}}}"#,
        nested(20_000, "1")
    );
    let bodies = vec![
        conversion(&[&strategy], "v1alpha1"),
        conversion(&[&deep], "v1alpha1"),
        ("/convert".into(), nested(200_000, "1")),
    ];
    let answers = send_all(bodies);
    assert_eq!((answers[0].0, answers[1].0, answers[2].0), (200, 200, 400));
    assert!(answers[0].1.message().contains("recursion"), "{answers:?}");
    let result = answers[1].1.response.status.as_ref().unwrap();
    assert!(result.is_success(), "{answers:?}");
}

/// An error would let the object be stored unchecked, and then no list that contains it could be read.
#[test]
fn objects_that_take_much_memory_are_denied_and_converted() {
    let large = clone_set(
        &format!(r#"{{"x":[{}]}}"#, vec![r#"{"a":1}"#; 50_000].join(",")),
        "{}",
    );
    assert!(large.len() < 1 << 19);
    let deleted = large.replacen(
        r#""metadata":{"#,
        r#""metadata":{"deletionTimestamp":"2026-01-01T00:00:00Z","#,
        1,
    );
    let kinds = ["cloneset", "imagepulljob", "containerrecreaterequest"];
    let denied = kinds.map(|kind| reviews(kind, &large, "null")).concat();
    let count = denied.len();
    let mut bodies = denied;
    bodies.extend(reviews("cloneset", &deleted, &deleted));
    bodies.extend([
        conversion(&[&large], "v1alpha1"),
        conversion(&[&large, &deleted], "v1alpha1"),
    ]);
    // An error, so that the failure policies of the sets apply.
    bodies.push((
        keys::MUTATE_POD_PATH.into(),
        reviews("cloneset", &large, "null").remove(0).1,
    ));
    let mut answers = send_all(bodies);
    assert_eq!(answers.pop().unwrap().0, 413);
    for (status, answer) in &answers {
        assert_eq!((*status, answer.response.uid.as_str()), (200, "u"), "{answer:?}");
    }
    let (denied, others) = answers.split_at(count);
    for (_, answer) in denied {
        assert_eq!(answer.response.allowed, Some(false), "{answer:?}");
        assert!(answer.message().contains("too large"), "{answer:?}");
        assert_eq!(
            answer.response.status.as_ref().map(|status| status.code),
            Some(413)
        );
    }
    for (_, answer) in others {
        let converted = answer
            .response
            .status
            .as_ref()
            .map(kube::core::Status::is_success);
        assert!(
            answer.response.allowed == Some(true) || converted == Some(true),
            "{answer:?}"
        );
    }
}

/// Annotations become part of the converted object, and may themselves have the maximum depth.
#[test]
fn deep_annotations_are_converted() {
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
    for (status, answer) in send_all(bodies) {
        assert_eq!(status, 200);
        let result = answer.response.status.unwrap();
        assert!(result.is_success(), "{result:?}");
    }
}

#[test]
fn large_flat_objects_are_admitted() {
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
    for (status, answer) in send_all(bodies) {
        assert_eq!((status, answer.response.uid.as_str()), (200, "u"));
    }
}

#[test]
fn large_conversion_does_not_delay_small_ones() {
    let set = clone_set(r#"{"containers":[{"name":"app","image":"i"}]}"#, "{}");
    let (path, large) = conversion(&vec![set.as_str(); 4000], "v1alpha1");
    let (_, small) = conversion(&[&set], "v1alpha1");
    assert!(large.len() > 1 << 20);
    with_small_stack(async move |router| {
        tokio::select! {
            biased;
            _ = send_as(1, &router, &path, Body::from(large)) => panic!("the small review waited"),
            (status, _) = send_as(2, &router, &path, Body::from(small)) => assert_eq!(status, 200),
        }
    });
}

/// If the API server gives no answer for the stored template, unknown fields are compared as they are.
#[test]
fn long_keys_are_not_repeated_in_messages() {
    let long = "k".repeat(1 << 17);
    let [one, other] = ["1", "2"].map(|value| {
        let fields: Vec<_> = (0..2_000).map(|n| format!(r#""f{n}":{value}"#)).collect();
        clone_set(&format!(r#"{{"{long}":{{{}}}}}"#, fields.join(",")), "{}")
    });
    let answers = send_all(reviews("cloneset", &one, &other));
    let why = answers[1].1.message();
    assert!(
        why.contains("InPlaceOnly") && why.len() < 2 << 20,
        "{}",
        why.len()
    );
}

/// Name of the test that runs in a process with limited memory.
const LOW_MEMORY_ENV: &str = "KRUISE_TEST_LITTLE_MEMORY";
/// Limit in addition to the program itself: that of the container.
const MEMORY_LIMIT: u64 = 512 << 20;

/// Bytes of virtual memory of this process.
fn virtual_memory_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    pages * 4096
}

#[test]
fn reviews_that_would_take_much_memory_leave_the_server_alive() {
    if std::env::var_os(LOW_MEMORY_ENV).is_some() {
        return with_little_memory();
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "--nocapture"]);
    child.arg("admission::malformed::reviews_that_would_take_much_memory_leave_the_server_alive");
    let output = child.env(LOW_MEMORY_ENV, "1").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {stderr}", output.status);
    assert!(stderr.contains("all were answered"), "{stderr}");
}

/// A SidecarSet whose container has the resources of those that this regular expression matches.
fn set_with_regex(regex: &str) -> String {
    let policy = json!({ "targetContainersMode": "sum", "targetContainersNameRegex": regex,
        "resourcesExpr": { "limits": { "cpu": "cpu" } } });
    let container = json!({ "name": "c", "image": "i", "resourcesPolicy": policy });
    json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet", "metadata": { "name": "s" },
        "spec": { "selector": { "matchLabels": { "app": "web" } }, "containers": [container] } })
    .to_string()
}

fn with_little_memory() {
    with_api_server(async |router| {
        use nix::sys::resource::{Resource, setrlimit};
        let limit = virtual_memory_bytes() + MEMORY_LIMIT;
        setrlimit(Resource::RLIMIT_AS, limit, limit).unwrap();
        let repeated = |one: &str, times: usize| vec![one; times].join(",");
        let set = |template: &str| clone_set(template, "{}");
        let deep = format!("{}0{}", r#"{"":"#.repeat(100), "}".repeat(100));
        let image = |name: &str, tags: &str| {
            format!(r#"{{"metadata":{{"name":"n"}},"spec":{{"images":{{"{name}":{{"tags":[{tags}]}}}}}}}}"#)
        };
        let texts: [&dyn Fn() -> Vec<(String, String)>; 9] = [
            &|| vec![conversion(&[&repeated(r#"{"":0}"#, 2_000_000)], "v1alpha1")],
            &|| vec![conversion(&[&repeated(&deep, 42_000)], "v1alpha1")],
            &|| {
                vec![conversion(
                    &[&set(&format!(
                        r#"{{"x":[{}]}}"#,
                        repeated(r#"{"":0}"#, 2_000_000)
                    ))],
                    "v1alpha1",
                )]
            },
            &|| vec![conversion(&[&repeated("0", 16_000_000)], "v1alpha1")],
            &|| reviews("nodeimage", &image("nginx", &repeated("{}", 262_000)), "null"),
            &|| {
                reviews(
                    "nodeimage",
                    &image(&"k".repeat(1 << 20), &repeated("{}", 1_000)),
                    "null",
                )
            },
            &|| {
                let many = format!(r#"{{"x":[{}]}}"#, repeated(r#"{"":0}"#, 40_000));
                let all = format!(r#"{{"x":[{}]}}"#, repeated(r#"{"":0}"#, 250_000));
                [
                    reviews("cloneset", &set(&many), &set("{}")),
                    reviews("cloneset", &set(&all), "null"),
                ]
                .concat()
            },
            &|| reviews("sidecarset", &set_with_regex(&r"\pL".repeat(200_000)), "null"),
            &|| {
                let text = format!("[{}]", repeated(r#"{"":0}"#, 2_000_000));
                let request = json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "ContainerRecreateRequest",
                    "metadata": { "name": "n", "annotations": { keys::CRR_CONDITIONS: text } } });
                vec![conversion(&[&request.to_string()], "v1beta1")]
            },
        ];
        for text in texts {
            for (path, body) in text() {
                let length = body.len();
                let (status, _) = send(&router, &path, Body::from(body)).await;
                assert!(
                    [200, 400, 413].contains(&status),
                    "{status} to {length} bytes at {path}"
                );
            }
        }
        let (path, body) = deletion();
        let many = (1..=64).map(|client| send_as(client, &router, &path, Body::from(body.clone())));
        let counted = future::join_all(many).await;
        let counted = counted.iter().filter(|(status, answer)| {
            assert_eq!(*status, 200);
            assert!(
                answer.message().contains("ResourcesProtectionDeletion"),
                "{answer:?}"
            );
            answer.message().contains("status pvc 3>0")
        });
        assert!(counted.count() > 0);
        for (path, body) in reviews("cloneset", &set("{}"), "null") {
            assert_eq!(send(&router, &path, Body::from(body)).await.0, 200);
        }
        eprintln!("all were answered");
    });
}

/// Claims of any size are counted in pages of bounded size, so that the Namespace can be deleted when they are deleted.
#[test]
fn claims_are_counted_in_bounded_pages() {
    let ((status, answer), requests) = with_api_server(async |router| {
        let (path, body) = deletion();
        send(&router, &path, Body::from(body)).await
    });
    assert_eq!((status, answer.response.allowed), (200, Some(false)));
    assert!(
        answer.message().contains("\"Bound\" status pvc 3>0"),
        "{answer:?}"
    );
    let limits = requests
        .iter()
        .filter_map(|asked| asked.split_once("/persistentvolumeclaims?"));
    let limits: Vec<_> = limits.map(|(_, query)| query.trim_start_matches('&')).collect();
    assert_eq!(limits, ["limit=50", "limit=12", "limit=3"]);
}

/// Concurrent requests to the API server are bounded for any number of reviews, and no client blocks those of another.
#[test]
fn api_requests_are_bounded_per_client_and_total() {
    let in_flight = Arc::<InFlight>::default();
    let in_flight_of_server = Arc::clone(&in_flight);
    with_small_stack(async move |_| {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (router, watching) = router_with_api_server(listener.local_addr().unwrap()).await;
        let (asked_tx, mut asked) = mpsc::unbounded_channel();
        // Pods of namespace `slow` are never returned.
        let server = Router::new().fallback(async move |request: axum::extract::Request| {
            let request_line = format!("{} {}", request.method(), request.uri());
            let _one = (!request_line.contains("/nodes")).then(|| InFlightGuard::new(&in_flight_of_server));
            if request_line.contains("/slow/") {
                asked_tx.send(()).unwrap();
                return pending().await;
            }
            api_server(&request_line, Vec::new()).await
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
            future::join_all((0..times).map(move |_| send_as(client, router, path, Body::from(body.clone()))))
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
                send_as(2, &router, mutate, Body::from(review("ns", &recreate)))
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
                send_as(1, &router, &path, Body::from(body)).await.1
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
            () = watching => panic!("the watch ended"),
            served = axum::serve(listener, server) => panic!("{served:?}"),
        }
    });
    // Eight requests of one client, plus those of another client at the same time.
    let max = in_flight.max.load(Ordering::Relaxed);
    assert!((8..=16).contains(&max), "{max}");
}

#[test]
fn admission_and_conversion_have_own_limits() {
    with_small_stack(async |router| {
        let padded = |text: String, bytes: usize| Body::from(" ".repeat(bytes - text.len()) + &text);
        let [_, (admit, review)] = reviews("cloneset", &clone_set("{}", "{}"), "null")
            .try_into()
            .unwrap();
        let (convert, objects) = conversion(&[&clone_set("{}", "{}")], "v1alpha1");
        let send_padded = async |path: &str, text: &String, bytes| {
            let (status, _) = send(&router, path, padded(text.clone(), bytes)).await;
            status
        };
        assert_eq!(send_padded(&admit, &review, 16 << 20).await, 200);
        assert_eq!(send_padded(&admit, &review, (16 << 20) + 1).await, 413);
        // Two of the largest bodies have arrived but do not end.
        let (sent_tx, mut sent) = mpsc::unbounded_channel();
        for client in 1..=2 {
            let (router, admit, taken) = (router.clone(), admit.clone(), sent_tx.clone());
            let end = stream::once(async move {
                taken.send(()).unwrap();
                pending().await
            });
            let text = stream::iter([Ok::<_, Infallible>(vec![b' '; 16 << 20])]).chain(end);
            tokio::spawn(async move { send_as(client, &router, &admit, Body::from_stream(text)).await });
            sent.recv().await.unwrap();
        }
        assert_eq!(send_padded(&admit, &review, review.len()).await, 429);
        let (other, _) = send_as(3, &router, &admit, Body::from(review.clone())).await;
        assert_eq!(other, 429);
        assert_eq!(send_padded(&convert, &objects, 64 << 20).await, 200);
        assert_eq!(send_padded(&convert, &objects, (64 << 20) + 1).await, 413);
    });
}

#[test]
fn conversion_flood_of_one_client_delays_no_other() {
    const CROWD: usize = 200;
    with_small_stack(async |router| {
        let done = Arc::new(AtomicUsize::new(0));
        let send_list = |client| {
            let (router, (convert, objects)) =
                (router.clone(), conversion(&[&clone_set("{}", "{}")], "v1alpha1"));
            async move { send_as(client, &router, &convert, Body::from(objects)).await.0 }
        };
        let mut crowd = tokio::task::JoinSet::new();
        for _ in 0..CROWD {
            let (list, done) = (send_list(1), Arc::clone(&done));
            crowd.spawn(async move {
                assert_eq!(list.await, 200);
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
        let other = tokio::spawn(send_list(2));
        assert_eq!(other.await.unwrap(), 200);
        let done_before = done.load(Ordering::Relaxed);
        assert!(done_before <= 5, "{done_before} others came first");
        crowd.join_all().await;
        assert_eq!(done.load(Ordering::Relaxed), CROWD);
    });
}

#[test]
fn reviews_of_every_shape_are_answered() {
    let (count, requests) = with_api_server(async |router| {
        let mut count = 0;
        let wrong = invalid_values();
        for kind in Kind::reviewed().map(|kind| kind.info().lowercase) {
            let shapes = admission_reviews(kind)
                .map(|review| mutations(&review, &wrong))
                .concat();
            for step in ["mutate", "validate"] {
                let path = format!("/{step}-apps-kruise-io-{kind}");
                for body in &shapes {
                    let (status, answer) = send(&router, &path, Body::from(body.clone())).await;
                    assert!(
                        [200, 400].contains(&status),
                        "{status} {answer:?} to {body} at {path}"
                    );
                    count += 1;
                }
            }
            for body in conversion_reviews(kind)
                .iter()
                .flat_map(|review| mutations(review, &wrong))
            {
                let (status, answer) = send(&router, keys::CONVERT_PATH, Body::from(body.clone())).await;
                assert!([200, 400].contains(&status), "{status} {answer:?} to {body}");
                count += 1;
            }
        }
        for body in mutations(&deletion_review("web"), &wrong) {
            let (status, answer) = send(&router, NAMESPACE_DELETION_PATH, Body::from(body.clone())).await;
            assert!([200, 400].contains(&status), "{status} {answer:?} to {body}");
            count += 1;
        }
        count
    });
    assert!(count > 1000, "{count}");
    assert!(
        requests
            .iter()
            .any(|asked| asked.contains("/namespaces/web/pods?"))
    );
    assert_only_expected_requests(&requests);
}

/// Only the requests that reviews need were sent, with valid names, and nothing was written.
fn assert_only_expected_requests(requests: &[String]) {
    for request in requests {
        let (method, path) = request.split_once(' ').unwrap();
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let segments: Vec<&str> = path.split('/').collect();
        let expected = match (method, &segments[..]) {
            ("GET", ["", "api", "v1", "nodes"])
            | (
                "GET",
                [
                    "",
                    "apis",
                    "apps",
                    "v1",
                    "namespaces",
                    "ns",
                    "controllerrevisions",
                ],
            ) => query.contains("labelSelector="),
            ("GET", ["", "api", "v1", "namespaces"])
            | ("GET", ["", "apis", "apps.kruise.io", "v1beta1", "sidecarsets"])
            | (
                "GET",
                [
                    "",
                    "api",
                    "v1",
                    "namespaces",
                    "ns",
                    "configmaps",
                    "kruise-configuration",
                ],
            ) => true,
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
        assert!(expected, "{request}");
    }
}

#[test]
fn hostile_names_never_reach_api_paths() {
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
    let (answers, requests) = with_api_server(async move |router| {
        let mut answers = Vec::new();
        for text in hostile.into_iter().chain(["me"]) {
            for kind in Kind::reviewed().map(|kind| kind.info().lowercase) {
                for (namespace, name) in [(text, "me"), ("ns", text), (text, text)] {
                    let mut object = full_object(kind);
                    json_patch::merge(
                        &mut object,
                        &json!({ "metadata": { "name": name, "namespace": namespace, "uid": name },
                        "spec": { "podName": name, "selector": { "names": [name] }, "scaleStrategy": { "podsToDelete": [name] } } }),
                    );
                    let body = json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
                        "uid": "u", "kind": { "version": "v1beta1" }, "namespace": namespace, "name": name, "object": object } });
                    for step in ["mutate", "validate"] {
                        let path = format!("/{step}-apps-kruise-io-{kind}");
                        let answer = send(&router, &path, Body::from(body.to_string())).await;
                        answers.push((path, namespace, name, answer));
                    }
                }
            }
            let body = Body::from(deletion_review(text).to_string());
            answers.push((
                NAMESPACE_DELETION_PATH.into(),
                "",
                text,
                send(&router, NAMESPACE_DELETION_PATH, body).await,
            ));
        }
        answers
    });
    for (path, namespace, name, (status, answer)) in answers {
        assert_eq!(status, 200, "{path}");
        if !namespace.is_empty() && !names::is_label(namespace) {
            assert!(
                answer.message().contains("request.namespace: Invalid value"),
                "{path} {namespace:?}: {answer:?}"
            );
        }
        if path == "/mutate-apps-kruise-io-containerrecreaterequest" {
            let valid = names::is_label(namespace) && names::is_subdomain(name);
            assert_eq!(answer.response.allowed, Some(valid), "{answer:?}");
        }
        if path == NAMESPACE_DELETION_PATH {
            // A name that is not valid for a Namespace is not protected.
            let protected = names::is_label(name);
            assert_eq!(answer.response.allowed, Some(!protected), "{answer:?}");
        }
    }
    assert!(
        requests.iter().any(|asked| asked.contains("podtemplates"))
            && requests.iter().any(|asked| asked.contains("/pods/me"))
            && requests
                .iter()
                .any(|asked| asked.contains("/namespaces/me/pods?"))
    );
    assert_only_expected_requests(&requests);
}

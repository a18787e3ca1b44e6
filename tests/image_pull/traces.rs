//! One trace from the creation of an ImagePullJob to containerd's own spans of the pull.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, Uri};
use kruise_api::image_pull_job::ImagePullJob;
use kube::ResourceExt;
use kube::api::Api;
use serde_json::{Value, json};
use testbed::FEATURE_GATES;
use testbed::cluster::Runtime;

use crate::daemon::Daemon;
use crate::pull_node::{PullNode, start_control_plane};
use support::manager::Manager;
use support::waits;

/// What was sent to a collector: the path and content type, and the body.
type Received = Arc<Mutex<Vec<(String, Bytes)>>>;

/// A collector that keeps everything. It ends with the test's runtime.
async fn start_collector() -> (u16, Received) {
    async fn receive(State(received): State<Received>, uri: Uri, headers: HeaderMap, body: Bytes) {
        let content_type = headers["content-type"].to_str().unwrap();
        let kind = format!("{} {content_type}", uri.path());
        received.lock().unwrap().push((kind, body));
    }
    let received = Received::default();
    let router = Router::new().fallback(receive).with_state(Arc::clone(&received));
    let listener = tokio::net::TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move { axum::serve(listener, router).await });
    (port, received)
}

/// Our spans of a trace by name.
fn spans(received: &Received, trace: &str) -> BTreeMap<String, Value> {
    let mut spans = BTreeMap::new();
    for (kind, body) in received.lock().unwrap().iter() {
        if kind != "/v1/traces application/json" {
            continue;
        }
        let body: Value = serde_json::from_slice(body).unwrap();
        let resource = &body["resourceSpans"][0];
        let service = &resource["resource"]["attributes"][0]["value"]["stringValue"];
        for span in resource["scopeSpans"][0]["spans"].as_array().unwrap() {
            assert_eq!(span["traceId"], trace);
            let mut span = span.clone();
            span["service"] = service.clone();
            spans.insert(span["name"].as_str().unwrap().to_owned(), span);
        }
    }
    spans
}

/// Whether containerd, which speaks protobuf, sent spans of that trace.
fn has_runtime_spans(received: &Received, trace: &str) -> bool {
    let id = u128::from_str_radix(trace, 16).unwrap().to_be_bytes();
    let received = received.lock().unwrap();
    let mut of_runtime = received
        .iter()
        .filter(|(kind, _)| kind == "/v1/traces application/x-protobuf");
    of_runtime.any(|(_, body)| body.windows(id.len()).any(|part| part == id))
}

#[tokio::test]
async fn trace_follows_a_job_to_the_runtime() {
    let dir = tempfile::tempdir().unwrap();
    let (port, received) = start_collector().await;
    // Series 2 is configured by OpenTelemetry's own variables.
    let start_cluster = move || {
        let (plane, mut runtime) = (start_control_plane(), Runtime::start("forky").unwrap());
        let collector = format!("http://{}:{port}", runtime.host_address());
        runtime
            .containerd
            .set_env("OTEL_EXPORTER_OTLP_ENDPOINT", collector);
        runtime.containerd.kill().unwrap();
        runtime.containerd.start().unwrap();
        (plane, runtime)
    };
    let (plane, runtime) = tokio::task::spawn_blocking(start_cluster).await.unwrap();
    let node = PullNode::on_plane(&plane, "n1").await;
    node.set_ready(&plane);
    let flag = format!("--tracing-endpoint=http://127.0.0.1:{port}");
    let args = [FEATURE_GATES.to_owned(), flag.clone()];
    let mut manager = Manager::on_free_ports_with(&plane, "kruise-manager", &args);
    manager.start().unwrap();
    node.logs.lock().unwrap().push(manager.log().to_owned());
    let _daemon = Daemon::start(&node, &runtime.socket(), dir.path(), &[&flag]);

    let image = "docker.io/kruise-test/term:1";
    let job = json!({"apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob",
        "metadata": {"name": "traced", "namespace": "default"},
        "spec": {"image": image, "completionPolicy": {"type": "Always"}}});
    plane.apply(&job.to_string()).unwrap();
    let jobs: Api<ImagePullJob> = Api::namespaced(node.client.clone(), "default");
    let is_complete = |job: &ImagePullJob| job.status.as_ref().is_some_and(|s| s.completion_time.is_some());
    let job = node.wait_object(&jobs, "traced", "complete", is_complete).await;
    let trace = job.uid().unwrap().replace('-', "");

    let what = "the spans of manager, daemon and containerd";
    let names = [
        "ImagePullJob",
        "PullImage",
        "add image to NodeImage",
        "pull image",
    ];
    let seen = || {
        let received = received.lock().unwrap();
        let seen: Vec<String> = received
            .iter()
            .map(|(kind, body)| format!("{kind}: {}", String::from_utf8_lossy(body)))
            .collect();
        seen.join("\n")
    };
    let poll = || async {
        let spans = spans(&received, &trace);
        (spans.keys().eq(names) && has_runtime_spans(&received, &trace)).then_some(spans)
    };
    let spans = waits::poll_until(what, &seen, poll).await;

    let root = &spans["ImagePullJob"];
    assert_eq!(root["parentSpanId"], Value::Null);
    for (name, parent, service) in [
        ("ImagePullJob", "", "kruise-manager"),
        ("add image to NodeImage", "ImagePullJob", "kruise-manager"),
        ("pull image", "ImagePullJob", "kruise-daemon"),
        ("PullImage", "pull image", "kruise-daemon"),
    ] {
        assert_eq!(spans[name]["service"], service);
        assert_eq!(spans[name]["status"], Value::Null, "{name}");
        if !parent.is_empty() {
            assert_eq!(spans[name]["parentSpanId"], spans[parent]["spanId"], "{name}");
        }
    }
}

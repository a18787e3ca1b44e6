//! The test's own metrics API: an aggregated API server that reports the CPU usage of the Pods of a namespace.

use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use axum::extract::{Path, Query, State};
use axum::routing::get;
use axum::{Json, Router};
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, PostParams};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use support::tls_listener::TlsListener;

use crate::untyped::untyped;
use crate::workloads::{NodeNamespace, TestCluster};

const GROUP: &str = "metrics.k8s.io";
const NAME: &str = "v1beta1.metrics.k8s.io";

/// The API, while it is served.
pub struct MetricsApi {
    metrics: ServedMetrics,
    registrations: Api<DynamicObject>,
    server: JoinHandle<()>,
}

#[derive(Clone)]
struct ServedMetrics {
    pods: Api<DynamicObject>,
    /// Of all Pods together, in millicores.
    millicores: Arc<AtomicU32>,
}

impl MetricsApi {
    /// Serves it on the host, and registers it with the API server behind a Service of this namespace.
    pub async fn serve(ns: &NodeNamespace<impl Deref<Target = TestCluster>>) -> Self {
        let metrics = ServedMetrics {
            pods: ns.pods(),
            millicores: Arc::default(),
        };
        let listener = TlsListener::listen(&ns.cluster.node.runtime.host_address()).await;
        let address = listener.local_addr();
        let router = Router::new()
            .route("/apis", get(async || Json(api_groups())))
            .route(&format!("/apis/{GROUP}"), get(async || Json(api_group())))
            .route(
                &format!("/apis/{GROUP}/v1beta1"),
                get(async || Json(api_resources())),
            )
            .route(
                &format!("/apis/{GROUP}/v1beta1/namespaces/{{namespace}}/pods"),
                get(pod_metrics),
            )
            .with_state(metrics.clone());
        let server = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        let registrations = register(ns, address).await;
        Self {
            metrics,
            registrations,
            server,
        }
    }

    /// Sets the CPU usage of all Pods together, in millicores, divided equally among them.
    pub fn set_cpu_usage(&self, millicores: u32) {
        self.metrics.millicores.store(millicores, Ordering::SeqCst);
    }

    /// Unregisters it: a registered API without a server disturbs other clients.
    pub async fn shut_down(self) {
        self.registrations
            .delete(NAME, &DeleteParams::default())
            .await
            .unwrap();
        self.server.abort();
    }
}

/// Creates a Service in front of the address, and registers it with the API server.
async fn register(
    ns: &NodeNamespace<impl Deref<Target = TestCluster>>,
    address: SocketAddr,
) -> Api<DynamicObject> {
    let service = json!({ "metadata": { "name": "metrics" }, "spec": { "ports": [{ "port": 443, "targetPort": address.port() }] } });
    ns.create(&ns.api("", "v1", "Service"), service).await;
    let slice = json!({
        "metadata": { "name": "metrics", "labels": { "kubernetes.io/service-name": "metrics" } },
        "addressType": "IPv4",
        "endpoints": [{ "addresses": [address.ip().to_string()], "conditions": { "ready": true } }],
        "ports": [{ "name": "", "port": address.port(), "protocol": "TCP" }],
    });
    ns.create(&ns.api("discovery.k8s.io", "v1", "EndpointSlice"), slice)
        .await;
    let registrations = untyped(&ns.admin, "apiregistration.k8s.io", "v1", "APIService", None);
    let registration = json!({ "metadata": { "name": NAME }, "spec": {
        "group": GROUP, "version": "v1beta1", "groupPriorityMinimum": 100, "versionPriority": 100,
        "insecureSkipTLSVerify": true, "service": { "namespace": ns.namespace, "name": "metrics" } } });
    let registration = serde_json::from_value(registration).unwrap();
    registrations
        .create(&PostParams::default(), &registration)
        .await
        .unwrap();
    let is_available = |object: &DynamicObject| {
        let conditions = object.data["status"]["conditions"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        conditions
            .iter()
            .any(|c| c["type"] == "Available" && c["status"] == "True")
    };
    ns.poll_until("the metrics API to be available", || async {
        let object = registrations.get(NAME).await.unwrap();
        is_available(&object).then_some(())
    })
    .await;
    registrations
}

fn api_version() -> Value {
    json!({ "groupVersion": format!("{GROUP}/v1beta1"), "version": "v1beta1" })
}

fn api_group() -> Value {
    json!({ "kind": "APIGroup", "apiVersion": "v1", "name": GROUP, "versions": [api_version()], "preferredVersion": api_version() })
}

fn api_groups() -> Value {
    json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": [api_group()] })
}

fn api_resources() -> Value {
    json!({ "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": format!("{GROUP}/v1beta1"), "resources": [
        { "name": "pods", "singularName": "", "namespaced": true, "kind": "PodMetrics", "verbs": ["get", "list"] }] })
}

/// Usage of the Pods that match a selector.
async fn pod_metrics(
    State(metrics): State<ServedMetrics>,
    Path(namespace): Path<String>,
    Query(query): Query<std::collections::HashMap<String, String>>,
) -> Json<Value> {
    let selector = query.get("labelSelector").map_or("", String::as_str);
    let pods = metrics
        .pods
        .list(&ListParams::default().labels(selector))
        .await
        .unwrap();
    let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let pods: Vec<_> = pods
        .iter()
        .filter(|pod| pod.metadata.deletion_timestamp.is_none())
        .collect();
    let count = u32::try_from(pods.len().max(1)).unwrap();
    let cpu = format!("{}m", metrics.millicores.load(Ordering::SeqCst) / count);
    let item = |pod: &DynamicObject| {
        let containers = pod.data["spec"]["containers"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let container_usage: Vec<Value> = containers
            .iter()
            .map(|c| json!({ "name": c["name"], "usage": { "cpu": cpu, "memory": "1Mi" } }))
            .collect();
        json!({ "metadata": { "name": pod.metadata.name, "namespace": namespace, "labels": pod.metadata.labels },
            "timestamp": now, "window": "0s", "containers": container_usage })
    };
    let items: Vec<Value> = pods.into_iter().map(item).collect();
    Json(
        json!({ "kind": "PodMetricsList", "apiVersion": format!("{GROUP}/v1beta1"), "metadata": {}, "items": items }),
    )
}

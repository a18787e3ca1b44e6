//! A fake scheduler and kubelet for the Pods of one namespace.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};

use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use serde_json::{Value, json};

use super::waits::watch_events;

/// An image that cannot be pulled.
pub const NO_IMAGE: &str = "nowhere.example/none:1";
/// The node of all Pods.
const NODE: &str = "node";
/// A resize of a running container to this CPU request is deferred.
pub const DEFERRED_CPU: &str = "333";
/// Pods with this node selector are not scheduled.
pub const NO_NODE: &str = "no-node";

/// A running container.
struct RunningContainer {
    image: String,
    id: String,
    restarts: u32,
    /// The old container stops before the new image is pulled.
    stopped: bool,
}

/// Runs the Pods until dropped: a scheduled Pod runs, is ready when its readiness gates are, and is removed when it is
/// deleted.
pub async fn run_kubelet(pods: Api<DynamicObject>) {
    create_node_with_capacity(pods.clone().into_client()).await;
    let mut containers: HashMap<(String, String), RunningContainer> = HashMap::new();
    let mut events = std::pin::pin!(watch_events(pods.clone(), watcher::Config::default()));
    while let Some(event) = events.next().await {
        let (watcher::Event::Apply(pod) | watcher::Event::InitApply(pod)) = event else {
            continue;
        };
        // A failure is retried at the next event; the API server may be down.
        let _ = reconcile_pod(&pods, &json!(pod), &mut containers).await;
    }
}

/// Creates the Pods' node if it is missing: from Kubernetes 1.37 on, the API server accepts a resize only if the node
/// has room. The node is never ready, so no controller acts on it.
async fn create_node_with_capacity(client: kube::Client) {
    let nodes: Api<Node> = Api::all(client);
    let node = json!({ "metadata": { "name": NODE, "labels": { "kubernetes.io/os": "linux" } } });
    let node: Node = serde_json::from_value(node).unwrap();
    // The fake kubelet of another namespace may have created it.
    let _ = nodes.create(&PostParams::default(), &node).await;
    let capacity = json!({ "cpu": "1000", "memory": "1Ti", "pods": "10000" });
    let capacity = Patch::Merge(json!({ "status": { "capacity": capacity, "allocatable": capacity } }));
    let _ = nodes.patch_status(NODE, &PatchParams::default(), &capacity).await;
}

/// Assigns a Pod to a node.
pub async fn bind_pod(pods: &Api<DynamicObject>, pod: &str, node: &str) -> kube::Result<Value> {
    let binding = json!({ "apiVersion": "v1", "kind": "Binding", "metadata": { "name": pod },
        "target": { "kind": "Node", "name": node } });
    pods.create_subresource("binding", pod, &PostParams::default(), &binding)
        .await
}

async fn reconcile_pod(
    pods: &Api<DynamicObject>,
    pod: &Value,
    containers: &mut HashMap<(String, String), RunningContainer>,
) -> kube::Result<()> {
    let name = pod["metadata"]["name"].as_str().unwrap_or_default();
    if pod["metadata"]["deletionTimestamp"].is_string() {
        let now = DeleteParams::default().grace_period(0);
        pods.delete(name, &now).await?;
        return Ok(());
    }
    // The Pod was evicted.
    if pod["status"]["phase"] == "Failed" {
        return Ok(());
    }
    if pod["spec"]["nodeName"].is_null() {
        if pod["spec"]["nodeSelector"][NO_NODE].is_null() {
            bind_pod(pods, name, NODE).await?;
        }
        return Ok(());
    }
    let status = pod_status(pod, containers);
    if differs(&status, &pod["status"]) {
        let patch = Patch::Strategic(json!({ "status": status }));
        pods.patch_status(name, &PatchParams::default(), &patch).await?;
    }
    Ok(())
}

/// Whether any field of `desired` differs in `actual`.
fn differs(desired: &Value, actual: &Value) -> bool {
    let condition = |type_: &Value| {
        actual["conditions"]
            .as_array()?
            .iter()
            .find(|c| c["type"] == *type_)
    };
    let mut conditions = desired["conditions"].as_array().unwrap().iter();
    let normalized = |v: &Value| {
        let mut v = v.clone();
        for container in v.as_array_mut().into_iter().flatten() {
            container["state"]["running"] = json!(container["state"]["running"].is_object());
            for absent in ["lastState", "started"] {
                container.as_object_mut().unwrap().remove(absent);
            }
        }
        v
    };
    desired["phase"] != actual["phase"]
        || normalized(&desired["containerStatuses"]) != normalized(&actual["containerStatuses"])
        || conditions.any(|c| condition(&c["type"]).is_none_or(|current| current["status"] != c["status"]))
}

fn pod_status(pod: &Value, containers: &mut HashMap<(String, String), RunningContainer>) -> Value {
    let uid = pod["metadata"]["uid"].as_str().unwrap_or_default();
    let mut statuses = Vec::new();
    let (mut all_ready, mut deferred) = (true, false);
    for container in pod["spec"]["containers"].as_array().into_iter().flatten() {
        let text = |key: &str| container[key].as_str().unwrap_or_default().to_owned();
        let image_available = text("image") != NO_IMAGE;
        all_ready &= image_available;
        let mut status = start_container(uid, &text("name"), &text("image"), image_available, containers);
        // Without resources in the status, the API server assumes a kubelet that cannot resize.
        status["resources"] = match &container["resources"] {
            Value::Null => json!({}),
            resources => resources.clone(),
        };
        if container["resources"]
            .as_object()
            .is_some_and(|all_ready| !all_ready.is_empty())
        {
            status["resources"] = container["resources"].clone();
        }
        let before = pod["status"]["containerStatuses"]
            .as_array()
            .into_iter()
            .flatten();
        let before = before.into_iter().find(|s| s["name"] == text("name"));
        if container["resources"]["requests"]["cpu"] == DEFERRED_CPU
            && let Some(before) = before
        {
            status["resources"] = before["resources"].clone();
            deferred = true;
        }
        statuses.push(status);
    }
    let is_true = |type_: &Value| {
        let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
        conditions
            .into_iter()
            .any(|c| c["type"] == *type_ && c["status"] == "True")
    };
    let gates = pod["spec"]["readinessGates"].as_array().into_iter().flatten();
    let gates_ready = gates.into_iter().all(|gate| is_true(&gate["conditionType"]));
    let started = statuses.iter().all(|s| s["containerID"].is_string());
    let mut conditions = vec![
        condition("ContainersReady", all_ready),
        condition("Ready", all_ready && gates_ready),
    ];
    if deferred {
        let mut pending = condition("PodResizePending", true);
        pending["reason"] = json!("Deferred");
        pending["message"] = json!("Node didn't have enough resource: cpu");
        conditions.push(pending);
    }
    json!({
        "phase": if started { "Running" } else { "Pending" },
        "containerStatuses": statuses,
        "conditions": conditions,
    })
}

/// Status of the container; a new container if the image differs.
fn start_container(
    uid: &str,
    name: &str,
    image: &str,
    image_available: bool,
    containers: &mut HashMap<(String, String), RunningContainer>,
) -> Value {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let key = (uid.to_owned(), name.to_owned());
    if image_available && containers.get(&key).is_none_or(|r| r.stopped || r.image != image) {
        let started = RunningContainer {
            image: image.to_owned(),
            id: format!("containerd://{}", NEXT.fetch_add(1, Ordering::SeqCst)),
            restarts: containers.get(&key).map_or(0, |r| r.restarts + 1),
            stopped: false,
        };
        containers.insert(key.clone(), started);
    } else if let Some(running) = containers.get_mut(&key) {
        running.stopped = !image_available;
    }
    let running = containers.get(&key);
    let image_id = running.map_or(String::new(), |r| format!("example.com/id@{}", r.image));
    let mut status = json!({ "name": name, "ready": image_available, "image": running.map_or(image, |r| &r.image),
        "imageID": image_id, "restartCount": running.map_or(0, |r| r.restarts),
        "state": { "running": { "startedAt": "2026-01-01T00:00:00Z" } } });
    if let Some(running) = running {
        status["containerID"] = json!(running.id);
    }
    if !image_available {
        status["state"] = json!({ "waiting": { "reason": "ImagePullBackOff" } });
    }
    status
}

fn condition(type_: &str, is_true: bool) -> Value {
    json!({ "type": type_, "status": if is_true { "True" } else { "False" },
        "lastTransitionTime": jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string() })
}

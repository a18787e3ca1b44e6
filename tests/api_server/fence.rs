//! Each daemon writes about its own node only, proven with tokens that the API server bound to nodes.

use std::time::{Duration, Instant};

use kruise_cluster::Cluster;
use serde_json::{Value, json};
use testbed::cluster::{Bound, ControlPlane};

use crate::world::{
    PATIENCE, connect, create, merge, merge_status, refused, running, typed, world, would_create,
};

const BETA: &str = "apps.kruise.io/v1beta1";

fn node_image(name: &str) -> Value {
    json!({ "apiVersion": BETA, "kind": "NodeImage", "metadata": { "name": name } })
}

/// Nodes `a` and `b`, and the daemon of `a`.
async fn daemon_of(a: &str, b: &str) -> Cluster {
    let nodes = typed(&world().admin().await, "v1", "Node", None);
    for name in [a, b] {
        let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name } });
        create(&nodes, node).await.unwrap();
    }
    world().account("kruise-daemon", Bound::Node(a)).await
}

#[tokio::test]
async fn a_daemon_writes_the_status_of_its_own_node_image_only() {
    let daemon = daemon_of("images-a", "images-b").await;
    let images = typed(&world().admin().await, BETA, "NodeImage", None);
    create(&images, node_image("images-a")).await.unwrap();
    create(&images, node_image("images-b")).await.unwrap();
    let images = typed(&daemon, BETA, "NodeImage", None);
    let status = json!({ "status": { "desired": 1 } });
    let foreign = || merge_status(&images, "images-b", status.clone());
    heeded(foreign, "may not write NodeImage images-b").await;
    merge_status(&images, "images-a", status.clone()).await.unwrap();
    let spec = merge(&images, "images-a", json!({ "spec": { "images": {} } })).await;
    refused(spec, "cannot patch resource");
}

#[tokio::test]
async fn a_daemon_writes_the_status_of_its_own_requests_only() {
    let daemon = daemon_of("requests-a", "requests-b").await;
    let requests = typed(
        &world().admin().await,
        BETA,
        "ContainerRecreateRequest",
        Some("default"),
    );
    for node in ["requests-a", "requests-b"] {
        world().pod(&format!("on-{node}"), Some(node), running()).await;
        let request = json!({
            "apiVersion": BETA, "kind": "ContainerRecreateRequest", "metadata": { "name": format!("for-{node}") },
            "spec": { "podName": format!("on-{node}"), "containers": [{ "name": "app" }] },
        });
        create(&requests, request).await.unwrap();
    }
    let requests = typed(&daemon, BETA, "ContainerRecreateRequest", Some("default"));
    let status = json!({ "status": { "phase": "Recreating" } });
    let foreign = || merge_status(&requests, "for-requests-b", status.clone());
    heeded(
        foreign,
        "ContainerRecreateRequest for-requests-b, which is for node requests-b",
    )
    .await;
    merge_status(&requests, "for-requests-a", status.clone())
        .await
        .unwrap();
    // The older version is no way around it.
    let old = typed(
        &daemon,
        "apps.kruise.io/v1alpha1",
        "ContainerRecreateRequest",
        Some("default"),
    );
    let foreign = merge_status(&old, "for-requests-b", status).await;
    refused(foreign, "which is for node requests-b");
}

/// The annotation that tells of containers, on Pods of the own node; not a word more of any Pod.
#[tokio::test]
async fn a_daemon_writes_one_annotation_of_its_own_pods_only() {
    const META: &str = "apps.kruise.io/runtime-containers-meta";
    let daemon = daemon_of("pods-a", "pods-b").await;
    let admins = typed(&world().admin().await, "v1", "Pod", Some("default"));
    for node in ["pods-a", "pods-b"] {
        let name = format!("on-{node}");
        world().pod(&name, Some(node), running()).await;
        let metadata = json!({ "labels": { "l": "1" }, "annotations": { "a": "1", "b": "1" } });
        merge(&admins, &name, json!({ "metadata": metadata }))
            .await
            .unwrap();
    }
    let pods = typed(&daemon, "v1", "Pod", Some("default"));
    let annotations = |values: Value| json!({ "metadata": { "annotations": values } });
    let told = || annotations(json!({ META: "{}" }));
    heeded(
        || merge_status(&pods, "on-pods-b", told()),
        "node pods-a may not write Pod on-pods-b",
    )
    .await;
    merge_status(&pods, "on-pods-a", told()).await.unwrap();
    merge_status(
        &pods,
        "on-pods-a",
        annotations(json!({ META: "{\"containers\":[]}" })),
    )
    .await
    .unwrap();
    let more = [
        annotations(json!({ META: "{}", "a": "2" })),
        annotations(json!({ META: "{}", "a": null })),
        annotations(json!({ META: "{}", "c": "1" })),
        annotations(json!({ META: null, "b": null })),
        json!({ "metadata": { "labels": { "l": "2" } } }),
        json!({ "metadata": { "labels": null } }),
        json!({ "metadata": { "finalizers": ["test/held"] } }),
        json!({ "metadata": { "generateName": "other-" } }),
        json!({ "status": { "phase": "Failed" } }),
        json!({ "status": { "conditions": [{ "type": "Ready", "status": "False" }] } }),
        json!({ "metadata": { "annotations": { META: "{}" } }, "status": { "podIP": "10.0.0.1" } }),
    ];
    for patch in more {
        let words = "may change nothing of a Pod but annotation";
        refused(merge_status(&pods, "on-pods-a", patch).await, words);
    }
    let whole = merge(&pods, "on-pods-a", told()).await;
    refused(whole, "cannot patch resource \"pods\"");
    let pod = admins.get("on-pods-a").await.unwrap();
    let want = [("a", "1"), (META, "{\"containers\":[]}"), ("b", "1")];
    let want = want.map(|(key, value)| (key.to_owned(), value.to_owned()));
    assert_eq!(pod.metadata.annotations, Some(want.into()));
}

#[tokio::test]
async fn a_daemon_publishes_events_of_its_own_host_only() {
    let daemon = daemon_of("events-a", "events-b").await;
    let events = typed(&daemon, "v1", "Event", Some("default"));
    let event = |host: &str| {
        json!({
            "apiVersion": "v1", "kind": "Event", "metadata": { "generateName": "fence-" },
            "involvedObject": { "kind": "Pod", "namespace": "default", "name": "p" },
            "type": "Normal", "reason": "Test", "source": { "component": "kruise-daemon", "host": host },
        })
    };
    let foreign = || create(&events, event("events-b"));
    heeded(foreign, "may not publish events as host \"events-b\"").await;
    create(&events, event("events-a")).await.unwrap();
    for (pointer, value, words) in [
        ("/source/component", "kubelet", "as another component"),
        ("/reportingComponent", "kubelet", "as another component"),
        ("/reportingInstance", "events-b", "as instance \"events-b\""),
    ] {
        let mut forged = event("events-a");
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        forged.pointer_mut(parent).unwrap()[key] = json!(value);
        refused(create(&events, forged).await, words);
    }
    let kubelets = typed(&world().admin().await, "v1", "Event", Some("default"));
    let mut theirs = event("events-b");
    theirs["metadata"] = json!({ "name": "theirs" });
    create(&kubelets, theirs).await.unwrap();
    let taken = json!({ "source": { "host": "events-a" }, "message": "forged" });
    refused(
        merge(&events, "theirs", taken).await,
        "may not change event theirs of host \"events-b\"",
    );
}

/// As deploy/README.md says how to install into another namespace; and the webhooks' account is that of the overlay.
#[tokio::test]
async fn an_installation_in_another_namespace_is_fenced() {
    let plane = ControlPlane::start().unwrap();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/default");
    let manifests = plane.kubectl(&["kustomize", folder]).unwrap();
    plane
        .apply(&manifests.replace("kruise-system", "elsewhere"))
        .unwrap();
    let admin = connect(plane.kubeconfig()).await;
    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1" } });
    create(&typed(&admin, "v1", "Node", None), node).await.unwrap();
    let images = typed(&admin, BETA, "NodeImage", None);
    for name in ["n1", "n2"] {
        create(&images, node_image(name)).await.unwrap();
    }
    let daemon = plane
        .kubeconfig_for("elsewhere", "kruise-daemon", Bound::Node("n1"))
        .unwrap();
    let images = typed(&connect(&daemon).await, BETA, "NodeImage", None);
    let status = json!({ "status": { "desired": 1 } });
    let foreign = || merge_status(&images, "n2", status.clone());
    heeded(foreign, "may not write NodeImage n2").await;
    merge_status(&images, "n1", status.clone()).await.unwrap();
    let manager = plane
        .kubeconfig_for("elsewhere", "kruise-manager", Bound::Nothing)
        .unwrap();
    let secrets = typed(&connect(&manager).await, "v1", "Secret", Some("elsewhere"));
    let secret = |name| json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": name } });
    let another = || async { would_create(&secrets, secret("another")).await };
    heeded(another, "may write no Secret but").await;
    create(&secrets, secret("kruise-manager-webhook-certs"))
        .await
        .unwrap();
    // What kustomize itself would do, it refuses: it puts everything into one namespace.
    let overlay = plane.dir().join("overlay");
    std::fs::create_dir_all(&overlay).unwrap();
    let text = json!({ "resources": [pathdiff(&overlay, folder)], "namespace": "elsewhere" }).to_string();
    std::fs::write(overlay.join("kustomization.yaml"), text).unwrap();
    let refused = plane
        .kubectl(&["kustomize", overlay.to_str().unwrap()])
        .unwrap_err();
    assert!(refused.to_string().contains("ID conflict"), "{refused}");
}

/// How `to` is reached from the folder `from`: kustomize takes no absolute path.
fn pathdiff(from: &std::path::Path, to: &str) -> String {
    let from = std::fs::canonicalize(from).unwrap();
    format!(
        "{}{}",
        "../".repeat(from.components().count() - 1),
        to.trim_start_matches('/')
    )
}

#[tokio::test]
async fn a_token_of_no_node_writes_nothing() {
    let world = world();
    let admin = world.admin().await;
    create(&typed(&admin, BETA, "NodeImage", None), node_image("fence-none"))
        .await
        .unwrap();
    let daemon = world.account("kruise-daemon", Bound::Nothing).await;
    let images = typed(&daemon, BETA, "NodeImage", None);
    let status = json!({ "status": { "desired": 1 } });
    heeded(
        || merge_status(&images, "fence-none", status.clone()),
        "token of kruise-daemon names no node",
    )
    .await;
}

/// As the daemon's Pods have them: the claim comes from the Pod's node.
#[tokio::test]
async fn a_token_of_a_pod_carries_its_node() {
    let world = world();
    let admin = world.admin().await;
    let nodes = typed(&admin, "v1", "Node", None);
    create(
        &nodes,
        json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "fence-pod" } }),
    )
    .await
    .unwrap();
    create(&typed(&admin, BETA, "NodeImage", None), node_image("fence-pod"))
        .await
        .unwrap();
    let pods = typed(&admin, "v1", "Pod", Some("kruise-system"));
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "daemon-fence-pod" },
        "spec": { "nodeName": "fence-pod", "serviceAccountName": "kruise-daemon",
            "containers": [{ "name": "c", "image": "i" }] },
    });
    create(&pods, pod).await.unwrap();
    let daemon = world
        .account("kruise-daemon", Bound::Pod("daemon-fence-pod"))
        .await;
    let images = typed(&daemon, BETA, "NodeImage", None);
    merge_status(&images, "fence-pod", json!({ "status": { "desired": 1 } }))
        .await
        .unwrap();
}

/// A policy takes a moment after its creation until the API server heeds it; then it refuses with `message`.
pub async fn heeded<F: Future<Output = Result<Value, String>>>(attempt: impl Fn() -> F, message: &str) {
    let start = Instant::now();
    loop {
        match attempt().await {
            Ok(_) if start.elapsed() < PATIENCE => tokio::time::sleep(Duration::from_millis(100)).await,
            outcome => return refused(outcome, message),
        }
    }
}

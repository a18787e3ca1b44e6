//! Each daemon writes about its own node only, proven with tokens that the API server bound to nodes.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use xtask::cluster::Bound;

use crate::world::{PATIENCE, create, merge, merge_status, refused, running, typed, world};

const BETA: &str = "apps.kruise.io/v1beta1";

fn node_image(name: &str) -> Value {
    json!({ "apiVersion": BETA, "kind": "NodeImage", "metadata": { "name": name } })
}

#[tokio::test]
async fn a_daemon_writes_about_its_own_node_only() {
    let world = world();
    let admin = world.admin().await;
    let nodes = typed(&admin, "v1", "Node", None);
    let images = typed(&admin, BETA, "NodeImage", None);
    for name in ["fence-a", "fence-b"] {
        create(
            &nodes,
            json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name } }),
        )
        .await
        .unwrap();
        create(&images, node_image(name)).await.unwrap();
        world.pod(&format!("on-{name}"), Some(name), running()).await;
        let requests = typed(&admin, BETA, "ContainerRecreateRequest", Some("default"));
        let request = json!({
            "apiVersion": BETA, "kind": "ContainerRecreateRequest", "metadata": { "name": format!("for-{name}") },
            "spec": { "podName": format!("on-{name}"), "containers": [{ "name": "app" }] },
        });
        create(&requests, request).await.unwrap();
    }
    let daemon = world.account("kruise-daemon", Bound::Node("fence-a")).await;
    let images = typed(&daemon, BETA, "NodeImage", None);
    let status = json!({ "status": { "desired": 1 } });
    heeded(
        || merge_status(&images, "fence-b", status.clone()),
        "may not write NodeImage fence-b",
    )
    .await;
    merge_status(&images, "fence-a", status).await.unwrap();
    refused(
        merge(&images, "fence-a", json!({ "spec": { "images": {} } })).await,
        "cannot patch resource",
    );

    let requests = typed(&daemon, BETA, "ContainerRecreateRequest", Some("default"));
    let status = json!({ "status": { "phase": "Recreating" } });
    heeded(
        || merge_status(&requests, "for-fence-b", status.clone()),
        "may not write ContainerRecreateRequest for-fence-b, which is for node fence-b",
    )
    .await;
    merge_status(&requests, "for-fence-a", status.clone())
        .await
        .unwrap();
    // The older version is no way around it.
    let old = typed(
        &daemon,
        "apps.kruise.io/v1alpha1",
        "ContainerRecreateRequest",
        Some("default"),
    );
    refused(
        merge_status(&old, "for-fence-b", status).await,
        "which is for node fence-b",
    );

    let events = typed(&daemon, "v1", "Event", Some("default"));
    let event = |host: &str| {
        json!({
            "apiVersion": "v1", "kind": "Event", "metadata": { "generateName": "fence-" },
            "involvedObject": { "kind": "Pod", "namespace": "default", "name": "p" },
            "type": "Normal", "reason": "Test", "source": { "component": "kruise-daemon", "host": host },
        })
    };
    heeded(
        || create(&events, event("fence-b")),
        "may not publish events as host \"fence-b\"",
    )
    .await;
    create(&events, event("fence-a")).await.unwrap();

    let pods = typed(&daemon, "v1", "Pod", Some("default"));
    let status = json!({ "status": { "message": "x" } });
    refused(
        merge_status(&pods, "on-fence-a", status).await,
        "cannot patch resource \"pods/status\"",
    );
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
async fn heeded<F: Future<Output = Result<Value, String>>>(attempt: impl Fn() -> F, message: &str) {
    let start = Instant::now();
    loop {
        match attempt().await {
            Ok(_) if start.elapsed() < PATIENCE => tokio::time::sleep(Duration::from_millis(100)).await,
            outcome => return refused(outcome, message),
        }
    }
}

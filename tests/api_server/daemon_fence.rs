//! Each daemon may only write about its own node; tested with tokens that the API server bound to nodes.

use std::time::{Duration, Instant};

use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::ServiceAccount;
use kruise_cluster::Cluster;
use kube::api::{Api, PostParams};
use serde_json::{Value, json};
use testbed::cluster::{ControlPlane, TokenBinding};

use crate::webhook_cluster::{
    WAIT_TIMEOUT, assert_denied, connect, create, dry_run_create, dynamic_api, merge, merge_status,
    running_status, shared_cluster,
};

const BETA: &str = "apps.kruise.io/v1beta1";

fn node_image(name: &str) -> Value {
    json!({ "apiVersion": BETA, "kind": "NodeImage", "metadata": { "name": name } })
}

/// Creates nodes `a` and `b`, and returns the client of the daemon on `a`.
async fn create_nodes_and_daemon(a: &str, b: &str) -> Cluster {
    let nodes = dynamic_api(&shared_cluster().admin().await, "v1", "Node", None);
    for name in [a, b] {
        let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name } });
        create(&nodes, node).await.unwrap();
    }
    shared_cluster()
        .account("kruise-daemon", TokenBinding::Node(a))
        .await
}

#[tokio::test]
async fn daemon_writes_only_its_own_node_image_status() {
    let daemon = create_nodes_and_daemon("images-a", "images-b").await;
    let images = dynamic_api(&shared_cluster().admin().await, BETA, "NodeImage", None);
    create(&images, node_image("images-a")).await.unwrap();
    create(&images, node_image("images-b")).await.unwrap();
    let images = dynamic_api(&daemon, BETA, "NodeImage", None);
    let status = json!({ "status": { "desired": 1 } });
    let write_foreign = || merge_status(&images, "images-b", status.clone());
    wait_until_denied(write_foreign, "may not write NodeImage images-b").await;
    merge_status(&images, "images-a", status.clone()).await.unwrap();
    let spec = merge(&images, "images-a", json!({ "spec": { "images": {} } })).await;
    assert_denied(spec, "cannot patch resource");
}

#[tokio::test]
async fn daemon_writes_only_its_own_node_pod_probe_status() {
    let daemon = create_nodes_and_daemon("probes-a", "probes-b").await;
    let alpha = "apps.kruise.io/v1alpha1";
    let probes = dynamic_api(&shared_cluster().admin().await, alpha, "NodePodProbe", None);
    for name in ["probes-a", "probes-b"] {
        let object = json!({ "apiVersion": alpha, "kind": "NodePodProbe", "metadata": { "name": name } });
        create(&probes, object).await.unwrap();
    }
    let probes = dynamic_api(&daemon, alpha, "NodePodProbe", None);
    let status = json!({ "status": { "podProbeStatuses": [{ "name": "p", "namespace": "n", "uid": "u" }] } });
    let write_foreign = || merge_status(&probes, "probes-b", status.clone());
    wait_until_denied(write_foreign, "may not write NodePodProbe probes-b").await;
    merge_status(&probes, "probes-a", status.clone()).await.unwrap();
    let spec = merge(&probes, "probes-a", json!({ "spec": { "podProbes": [] } })).await;
    assert_denied(spec, "cannot patch resource");
}

#[tokio::test]
async fn daemon_writes_only_its_own_request_status() {
    let daemon = create_nodes_and_daemon("requests-a", "requests-b").await;
    let requests = dynamic_api(
        &shared_cluster().admin().await,
        BETA,
        "ContainerRecreateRequest",
        Some("default"),
    );
    for node in ["requests-a", "requests-b"] {
        shared_cluster()
            .create_pod(&format!("on-{node}"), Some(node), running_status())
            .await;
        let request = json!({
            "apiVersion": BETA, "kind": "ContainerRecreateRequest", "metadata": { "name": format!("for-{node}") },
            "spec": { "podName": format!("on-{node}"), "containers": [{ "name": "app" }] },
        });
        create(&requests, request).await.unwrap();
    }
    let requests = dynamic_api(&daemon, BETA, "ContainerRecreateRequest", Some("default"));
    let status = json!({ "status": { "phase": "Recreating" } });
    let write_foreign = || merge_status(&requests, "for-requests-b", status.clone());
    wait_until_denied(
        write_foreign,
        "ContainerRecreateRequest for-requests-b, which is for node requests-b",
    )
    .await;
    merge_status(&requests, "for-requests-a", status.clone())
        .await
        .unwrap();
    // The older version does not bypass the fence.
    let old = dynamic_api(
        &daemon,
        "apps.kruise.io/v1alpha1",
        "ContainerRecreateRequest",
        Some("default"),
    );
    let write_foreign = merge_status(&old, "for-requests-b", status).await;
    assert_denied(write_foreign, "which is for node requests-b");
}

/// The daemon may write the annotation with container metadata on Pods of its own node, and nothing else of any Pod.
#[tokio::test]
async fn daemon_writes_one_annotation_of_its_own_pods_only() {
    const META: &str = "apps.kruise.io/runtime-containers-meta";
    let daemon = create_nodes_and_daemon("pods-a", "pods-b").await;
    let admins = dynamic_api(&shared_cluster().admin().await, "v1", "Pod", Some("default"));
    for node in ["pods-a", "pods-b"] {
        let name = format!("on-{node}");
        shared_cluster()
            .create_pod(&name, Some(node), running_status())
            .await;
        let metadata = json!({ "labels": { "l": "1" }, "annotations": { "a": "1", "b": "1" } });
        merge(&admins, &name, json!({ "metadata": metadata }))
            .await
            .unwrap();
    }
    let pods = dynamic_api(&daemon, "v1", "Pod", Some("default"));
    let annotations = |values: Value| json!({ "metadata": { "annotations": values } });
    let meta_patch = || annotations(json!({ META: "{}" }));
    wait_until_denied(
        || merge_status(&pods, "on-pods-b", meta_patch()),
        "node pods-a may not write Pod on-pods-b",
    )
    .await;
    merge_status(&pods, "on-pods-a", meta_patch()).await.unwrap();
    merge_status(
        &pods,
        "on-pods-a",
        annotations(json!({ META: "{\"containers\":[]}" })),
    )
    .await
    .unwrap();
    let denied_patches = [
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
    for patch in denied_patches {
        let denial = "may change nothing of a Pod but annotation";
        assert_denied(merge_status(&pods, "on-pods-a", patch).await, denial);
    }
    let pod_patch = merge(&pods, "on-pods-a", meta_patch()).await;
    assert_denied(pod_patch, "cannot patch resource \"pods\"");
    let pod = admins.get("on-pods-a").await.unwrap();
    let expected = [("a", "1"), (META, "{\"containers\":[]}"), ("b", "1")];
    let expected = expected.map(|(key, value)| (key.to_owned(), value.to_owned()));
    assert_eq!(pod.metadata.annotations, Some(expected.into()));
}

#[tokio::test]
async fn daemon_publishes_events_of_its_own_host_only() {
    let daemon = create_nodes_and_daemon("events-a", "events-b").await;
    let events = dynamic_api(&daemon, "v1", "Event", Some("default"));
    let event = |host: &str| {
        json!({
            "apiVersion": "v1", "kind": "Event", "metadata": { "generateName": "fence-" },
            "involvedObject": { "kind": "Pod", "namespace": "default", "name": "p" },
            "type": "Normal", "reason": "Test", "source": { "component": "kruise-daemon", "host": host },
        })
    };
    let write_foreign = || create(&events, event("events-b"));
    wait_until_denied(write_foreign, "may not publish events as host \"events-b\"").await;
    create(&events, event("events-a")).await.unwrap();
    for (pointer, value, denial) in [
        ("/source/component", "kubelet", "as another component"),
        ("/reportingComponent", "kubelet", "as another component"),
        ("/reportingInstance", "events-b", "as instance \"events-b\""),
    ] {
        let mut forged = event("events-a");
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        forged.pointer_mut(parent).unwrap()[key] = json!(value);
        assert_denied(create(&events, forged).await, denial);
    }
    let kubelets = dynamic_api(&shared_cluster().admin().await, "v1", "Event", Some("default"));
    let mut other_event = event("events-b");
    other_event["metadata"] = json!({ "name": "theirs" });
    create(&kubelets, other_event).await.unwrap();
    let stolen = json!({ "source": { "host": "events-a" }, "message": "forged" });
    assert_denied(
        merge(&events, "theirs", stolen).await,
        "may not change event theirs of host \"events-b\"",
    );
}

/// With `deploy/credential-providers`, and the audience `registry`.
#[tokio::test]
async fn daemon_requests_tokens_of_its_node_and_audiences_only() {
    let plane = ControlPlane::start().unwrap();
    let deploy = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy");
    plane
        .kubectl(&["apply", "-k", &format!("{deploy}/default")])
        .unwrap();
    let admin = connect(plane.kubeconfig()).await;
    let nodes = dynamic_api(&admin, "v1", "Node", None);
    for name in ["tokens-a", "tokens-b"] {
        let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name } });
        create(&nodes, node).await.unwrap();
    }
    let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": "puller" } });
    let accounts = dynamic_api(&admin, "v1", "ServiceAccount", Some("default"));
    create(&accounts, account).await.unwrap();
    let daemon = plane
        .kubeconfig_for("kruise-system", "kruise-daemon", TokenBinding::Node("tokens-a"))
        .unwrap();
    let daemon = connect(&daemon).await;
    let request = |change: Value| {
        let api: Api<ServiceAccount> = Api::namespaced(daemon.client.clone(), "default");
        let mut spec = json!({ "audiences": ["registry"], "expirationSeconds": 600,
            "boundObjectRef": { "apiVersion": "v1", "kind": "Node", "name": "tokens-a" } });
        json_patch::merge(&mut spec, &change);
        let token_request: TokenRequest = serde_json::from_value(json!({ "spec": spec })).unwrap();
        async move {
            let params = PostParams::default();
            let answer = api.create_token_request("puller", &params, &token_request).await;
            answer
                .map(|answer| json!(answer))
                .map_err(|error| error.to_string())
        }
    };
    assert_denied(
        request(json!({})).await,
        "cannot create resource \"serviceaccounts/token\"",
    );
    let rbac = format!("{deploy}/credential-providers/rbac.yaml");
    plane.kubectl(&["apply", "-f", &rbac]).unwrap();
    let only_named = "only for the audiences that policy kruise-daemon-tokens names";
    wait_until(|| request(json!({})), |answer| has_text(answer, only_named)).await;
    let audiences = r#"[{"op":"replace","path":"/spec/variables/0/expression",
        "value":"['registry', 'https://kubernetes.default.svc']"}]"#;
    let policy = "validatingadmissionpolicy/kruise-daemon-tokens";
    plane
        .kubectl(&["patch", policy, "--type=json", "--patch", audiences])
        .unwrap();
    wait_until(|| request(json!({})), Result::is_ok).await;
    let bound_to_node = "on node tokens-a may request only tokens that are bound to this node";
    for (change, denial) in [
        (json!({ "audiences": ["other"] }), only_named),
        (json!({ "audiences": ["registry", "other"] }), only_named),
        (
            json!({ "audiences": ["https://kubernetes.default.svc"] }),
            "no tokens for the API server",
        ),
        (json!({ "expirationSeconds": 3601 }), "for an hour at most"),
        (json!({ "boundObjectRef": null }), bound_to_node),
        (json!({ "boundObjectRef": { "name": "tokens-b" } }), bound_to_node),
    ] {
        assert_denied(request(change).await, denial);
    }
    // Those of others are not fenced.
    plane
        .kubectl(&[
            "create",
            "token",
            "puller",
            "--namespace=default",
            "--duration=2h",
        ])
        .unwrap();
    let accounts = dynamic_api(&daemon, "v1", "ServiceAccount", Some("default"));
    let changed = merge(
        &accounts,
        "puller",
        json!({ "metadata": { "labels": { "a": "b" } } }),
    )
    .await;
    assert_denied(changed, "cannot patch resource \"serviceaccounts\"");
}

fn has_text(answer: &Result<Value, String>, text: &str) -> bool {
    answer.as_ref().is_err_and(|error| error.contains(text))
}

/// Waits until roles and policies are in force, which takes a moment.
async fn wait_until<F: Future<Output = Result<Value, String>>>(
    attempt: impl Fn() -> F,
    expected: impl Fn(&Result<Value, String>) -> bool,
) {
    let start = Instant::now();
    loop {
        let answer = attempt().await;
        if expected(&answer) {
            return;
        }
        let error = answer.err();
        assert!(start.elapsed() < WAIT_TIMEOUT, "{error:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Follows the steps of deploy/README.md to install into another namespace; the webhooks' account is that of the
/// overlay.
#[tokio::test]
async fn installation_in_another_namespace_is_fenced() {
    let plane = ControlPlane::start().unwrap();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/default");
    let manifests = plane.kubectl(&["kustomize", folder]).unwrap();
    plane
        .apply(&manifests.replace("kruise-system", "elsewhere"))
        .unwrap();
    let admin = connect(plane.kubeconfig()).await;
    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1" } });
    create(&dynamic_api(&admin, "v1", "Node", None), node)
        .await
        .unwrap();
    let images = dynamic_api(&admin, BETA, "NodeImage", None);
    for name in ["n1", "n2"] {
        create(&images, node_image(name)).await.unwrap();
    }
    let daemon = plane
        .kubeconfig_for("elsewhere", "kruise-daemon", TokenBinding::Node("n1"))
        .unwrap();
    let images = dynamic_api(&connect(&daemon).await, BETA, "NodeImage", None);
    let status = json!({ "status": { "desired": 1 } });
    let write_foreign = || merge_status(&images, "n2", status.clone());
    wait_until_denied(write_foreign, "may not write NodeImage n2").await;
    merge_status(&images, "n1", status.clone()).await.unwrap();
    let manager = plane
        .kubeconfig_for("elsewhere", "kruise-manager", TokenBinding::Unbound)
        .unwrap();
    let secrets = dynamic_api(&connect(&manager).await, "v1", "Secret", Some("elsewhere"));
    let secret = |name| json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": name } });
    let create_another = || async { dry_run_create(&secrets, secret("another")).await };
    wait_until_denied(create_another, "may write no Secret but").await;
    create(&secrets, secret("kruise-manager-webhook-certs"))
        .await
        .unwrap();
    // kustomize's own namespace field does not work: it puts everything into one namespace.
    let overlay = plane.dir().join("overlay");
    std::fs::create_dir_all(&overlay).unwrap();
    let text =
        json!({ "resources": [relative_path(&overlay, folder)], "namespace": "elsewhere" }).to_string();
    std::fs::write(overlay.join("kustomization.yaml"), text).unwrap();
    let refused = plane
        .kubectl(&["kustomize", overlay.to_str().unwrap()])
        .unwrap_err();
    assert!(refused.to_string().contains("ID conflict"), "{refused}");
}

/// Relative path from folder `from` to `to`: kustomize accepts no absolute path.
fn relative_path(from: &std::path::Path, to: &str) -> String {
    let from = std::fs::canonicalize(from).unwrap();
    format!(
        "{}{}",
        "../".repeat(from.components().count() - 1),
        to.trim_start_matches('/')
    )
}

#[tokio::test]
async fn token_without_node_writes_nothing() {
    let cluster = shared_cluster();
    let admin = cluster.admin().await;
    create(
        &dynamic_api(&admin, BETA, "NodeImage", None),
        node_image("fence-none"),
    )
    .await
    .unwrap();
    let daemon = cluster.account("kruise-daemon", TokenBinding::Unbound).await;
    let images = dynamic_api(&daemon, BETA, "NodeImage", None);
    let status = json!({ "status": { "desired": 1 } });
    wait_until_denied(
        || merge_status(&images, "fence-none", status.clone()),
        "token of kruise-daemon names no node",
    )
    .await;
}

/// As for the daemon's Pods: the claim comes from the Pod's node.
#[tokio::test]
async fn pod_token_carries_its_node() {
    let cluster = shared_cluster();
    let admin = cluster.admin().await;
    let nodes = dynamic_api(&admin, "v1", "Node", None);
    create(
        &nodes,
        json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "fence-pod" } }),
    )
    .await
    .unwrap();
    create(
        &dynamic_api(&admin, BETA, "NodeImage", None),
        node_image("fence-pod"),
    )
    .await
    .unwrap();
    let pods = dynamic_api(&admin, "v1", "Pod", Some("kruise-system"));
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "daemon-fence-pod" },
        "spec": { "nodeName": "fence-pod", "serviceAccountName": "kruise-daemon",
            "containers": [{ "name": "c", "image": "i" }] },
    });
    create(&pods, pod).await.unwrap();
    let daemon = cluster
        .account("kruise-daemon", TokenBinding::Pod("daemon-fence-pod"))
        .await;
    let images = dynamic_api(&daemon, BETA, "NodeImage", None);
    merge_status(&images, "fence-pod", json!({ "status": { "desired": 1 } }))
        .await
        .unwrap();
}

/// Waits until a new policy is enforced, which takes a moment; then the denial has `message`.
pub async fn wait_until_denied<F: Future<Output = Result<Value, String>>>(
    attempt: impl Fn() -> F,
    message: &str,
) {
    let start = Instant::now();
    loop {
        match attempt().await {
            Ok(_) if start.elapsed() < WAIT_TIMEOUT => tokio::time::sleep(Duration::from_millis(100)).await,
            result => return assert_denied(result, message),
        }
    }
}

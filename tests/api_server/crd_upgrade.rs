//! Objects stored under upstream's CRDs, after ours were applied over them.

use std::time::{Duration, Instant};

use kruise_api::Kind;
use serde_json::{Value, json};
use testbed::cluster::{ControlPlane, wait};

use crate::webhook_cluster::{
    WAIT_TIMEOUT, WebhookReplica, assert_denied, connect, create, dry_run_merge, dynamic_api, get, install,
    merge, merge_status, wait_for_webhooks,
};

const BETA: &str = "apps.kruise.io/v1beta1";

/// The kinds that have more than one version.
fn plurals() -> Vec<&'static str> {
    let kinds = Kind::ALL.map(Kind::info).into_iter();
    let upgraded = kinds.filter(|kind| kind.versions.len() > 1);
    upgraded.map(|kind| kind.plural).collect()
}

/// Installs upstream's CRDs, with `stored` as the storage version.
fn install_upstream(plane: &ControlPlane, stored: &str) {
    for plural in plurals() {
        let file = format!(
            "{}/../tests/data/crds/apps.kruise.io_{plural}.yaml",
            env!("CARGO_MANIFEST_DIR")
        );
        let mut crd: Value = serde_yaml::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        for version in crd["spec"]["versions"].as_array_mut().unwrap() {
            version["storage"] = json!(version["name"] == stored);
        }
        plane.apply(&crd.to_string()).unwrap();
        // `kubectl wait` fails at once if there are no conditions yet.
        let name = format!("crd/{plural}.apps.kruise.io");
        let path = r#"-o=jsonpath={.status.conditions[?(@.type=="Established")].status}"#;
        let established = || plane.kubectl(&["get", &name, path]).is_ok_and(|s| s == "True");
        wait::until(&format!("{name} is established"), WAIT_TIMEOUT, || {
            Ok(established().then_some(()))
        })
        .unwrap();
    }
}

fn old_object(version: &str, kind: &str, spec: Value) -> Value {
    json!({ "apiVersion": version, "kind": kind, "metadata": { "name": "old" }, "spec": spec })
}

/// Retries until the API server rejects the attempt: a new schema or policy takes a moment to be enforced. The attempt
/// must not be stored, as a stored error is tolerated.
async fn wait_until_rejected(description: &str, attempt: impl AsyncFn() -> Result<Value, String>) {
    let started = Instant::now();
    while attempt().await.is_ok() {
        assert!(
            started.elapsed() < WAIT_TIMEOUT,
            "{description} is not refused after {WAIT_TIMEOUT:?}"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// A stored value that our rules would reject today can be kept by updates.
#[tokio::test]
async fn stored_invalid_job_can_be_updated() {
    let plane = ControlPlane::start().unwrap();
    install_upstream(&plane, "v1beta1");
    let jobs = dynamic_api(
        &connect(plane.kubeconfig()).await,
        BETA,
        "ImagePullJob",
        Some("default"),
    );
    let spec = json!({
        "image": "nginx", "parallelism": "110%", "selector": { "names": ["a", "a", "?"] }, "podSelector": {},
        "imagePullPolicy": "Never", "pullSecrets": ["", "?x"],
        "sandboxConfig": { "labels": { "k".repeat(400): "v".repeat(5000) } },
        "pullPolicy": { "backoffLimit": -1, "timeoutSeconds": 0 },
        "completionPolicy": { "type": "Never", "ttlSecondsAfterFinished": 3 },
    });
    create(&jobs, old_object(BETA, "ImagePullJob", spec))
        .await
        .unwrap();
    install(&plane, "crds");
    let invalid = json!({ "spec": { "parallelism": "120%" } });
    wait_until_rejected("a new mistake", async || {
        dry_run_merge(&jobs, "old", invalid.clone()).await
    })
    .await;
    for patch in [
        json!({ "metadata": { "finalizers": ["example.com/mark"] } }),
        json!({ "spec": { "image": "nginx:2", "parallelism": 2 } }),
        json!({ "metadata": { "finalizers": [] } }),
    ] {
        merge(&jobs, "old", patch).await.unwrap();
    }
    merge_status(&jobs, "old", json!({ "status": { "desired": 1 } }))
        .await
        .unwrap();
    let invalid_again = merge(&jobs, "old", json!({ "spec": { "parallelism": "110%" } })).await;
    assert_denied(invalid_again, "spec.parallelism is 110%");
}

#[tokio::test]
async fn stored_invalid_node_image_can_be_updated() {
    let plane = ControlPlane::start().unwrap();
    install_upstream(&plane, "v1beta1");
    let images = dynamic_api(&connect(plane.kubeconfig()).await, BETA, "NodeImage", None);
    let invalid_image = json!({ "tags": [{ "tag": "", "version": -1, "imagePullPolicy": "Never" }],
        "pullSecrets": vec![json!({}); 10_001] });
    let spec = json!({ "images": { "": invalid_image, "i".repeat(1025): invalid_image } });
    create(&images, old_object(BETA, "NodeImage", spec))
        .await
        .unwrap();
    install(&plane, "crds");
    let invalid = json!({ "spec": { "images": { "more": invalid_image } } });
    wait_until_rejected("a new mistake", async || {
        dry_run_merge(&images, "old", invalid.clone()).await
    })
    .await;
    let finalizers = json!({ "metadata": { "finalizers": ["example.com/mark"] } });
    merge(&images, "old", finalizers).await.unwrap();
    merge_status(&images, "old", json!({ "status": { "desired": 1 } }))
        .await
        .unwrap();
    let good = json!({ "spec": { "images": { "nginx": { "tags": [{ "tag": "1" }] } } } });
    merge(&images, "old", good).await.unwrap();
    assert_eq!(get(&images, "old").await["spec"]["images"][""], invalid_image);
}

#[tokio::test]
async fn stored_invalid_cloneset_can_be_updated() {
    let plane = ControlPlane::start().unwrap();
    install_upstream(&plane, "v1beta1");
    let admin = connect(plane.kubeconfig()).await;
    let sets = dynamic_api(&admin, BETA, "CloneSet", Some("default"));
    let twice = json!([{ "key": "a", "value": "b" }, { "key": "a", "value": "b" }]);
    let spec = json!({
        "replicas": 3, "minReadySeconds": 9, "progressDeadlineSeconds": 5, "revisionHistoryLimit": -1,
        "selector": { "matchLabels": { "app": "a" }, "matchExpressions": [{ "key": "app", "operator": "Like" }] },
        "template": { "metadata": { "labels": { "app": "a" } }, "spec": { "restartPolicy": "Never" } },
        "lifecycle": { "preDelete": { "finalizersHandler": ["plain"], "labelsHandler": { "k".repeat(400): "v".repeat(400) } } },
        "volumeClaimTemplates": vec![json!({}); 101],
        "scaleStrategy": { "maxUnavailable": "20", "podsToDelete": ["a", "a", "?"] },
        "updateStrategy": { "rollingUpdate": { "maxUnavailable": 0, "maxSurge": "0.5%", "scatterStrategy": twice } },
    });
    create(&sets, old_object(BETA, "CloneSet", spec)).await.unwrap();
    install(&plane, "crds");
    let invalid = json!({ "spec": { "scaleStrategy": { "maxUnavailable": "30" } } });
    wait_until_rejected("a new mistake", async || {
        dry_run_merge(&sets, "old", invalid.clone()).await
    })
    .await;
    for patch in [
        json!({ "metadata": { "finalizers": ["example.com/mark"] } }),
        json!({ "spec": { "replicas": 5 } }),
        json!({ "spec": { "scaleStrategy": { "excludePreparingDelete": true } } }),
        json!({ "spec": { "updateStrategy": { "rollingUpdate": { "paused": true } } } }),
        json!({ "metadata": { "finalizers": [] } }),
    ] {
        merge(&sets, "old", patch).await.unwrap();
    }
    let counts = json!({ "replicas": 0, "readyReplicas": 0, "availableReplicas": 0, "updatedReplicas": 0,
        "updatedReadyReplicas": 0 });
    merge_status(&sets, "old", json!({ "status": counts }))
        .await
        .unwrap();
}

/// The manager's certificate authority is in a field that the manifests do not have, so that applying them again keeps
/// it.
#[test]
fn reapplying_manifests_keeps_the_ca_bundle() {
    let plane = ControlPlane::start().unwrap();
    let authority = ca_bundle(&plane);
    let crd = "nodeimages.apps.kruise.io";
    let hooks = "validatingwebhookconfiguration/kruise-validating-webhook-configuration";
    plane.kubectl(&["create", "namespace", "kruise-system"]).unwrap();
    for _ in 0..2 {
        install(&plane, "crds");
        install(&plane, "webhooks");
        let path = "/spec/conversion/webhook/clientConfig/caBundle";
        let add = json!([{ "op": "add", "path": path, "value": authority }]).to_string();
        plane
            .kubectl(&["patch", "crd", crd, "--type=json", "--patch", &add])
            .unwrap();
        let add = json!([{ "op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": authority }]);
        plane
            .kubectl(&["patch", hooks, "--type=json", "--patch", &add.to_string()])
            .unwrap();
    }
    install(&plane, "crds");
    install(&plane, "webhooks");
    let read = |what: &str, path: &str| {
        plane
            .kubectl(&["get", what, &format!("--output=jsonpath={path}")])
            .unwrap()
    };
    assert_eq!(
        read(
            &format!("crd/{crd}"),
            "{.spec.conversion.webhook.clientConfig.caBundle}"
        ),
        authority
    );
    assert_eq!(read(hooks, "{.webhooks[0].clientConfig.caBundle}"), authority);
}

/// A manager on the host writes a URL instead of the Service. Applying removes it and keeps the authority, and the
/// manager sets the URL again.
#[test]
fn reapplying_manifests_with_a_manager_on_the_host() {
    let plane = ControlPlane::start().unwrap();
    install(&plane, "default");
    let replica = WebhookReplica::start(&plane);
    replica.leading_tx.send(true).unwrap();
    wait_for_webhooks(&plane);
    let path = format!("{}/../deploy/default", env!("CARGO_MANIFEST_DIR"));
    for apply_args in [&[][..], &["--server-side", "--force-conflicts"], &[]] {
        plane
            .kubectl(&[&["apply", "-k", &path], apply_args].concat())
            .unwrap();
        wait_for_webhooks(&plane);
    }
    replica.leading_tx.send(false).unwrap();
    install(&plane, "default");
    for (what, config) in [
        (
            "crd/nodeimages.apps.kruise.io",
            ".spec.conversion.webhook.clientConfig",
        ),
        (
            "mutatingwebhookconfiguration/kruise-mutating-webhook-configuration",
            ".webhooks[0].clientConfig",
        ),
        (
            "validatingwebhookconfiguration/kruise-validating-webhook-configuration",
            ".webhooks[0].clientConfig",
        ),
    ] {
        let read = |field: &str| {
            let path = format!("--output=jsonpath={{{config}.{field}}}");
            plane.kubectl(&["get", what, &path]).unwrap()
        };
        assert_eq!(read("service.name"), "kruise-webhook-service", "{what}");
        assert_eq!(read("url"), "", "{what}");
        assert_ne!(read("caBundle"), "", "{what}");
    }
    replica.shutdown.cancel();
}

/// A certificate authority that the API server accepts in a CRD: any valid one.
fn ca_bundle(plane: &ControlPlane) -> String {
    use base64::Engine;
    base64::prelude::BASE64_STANDARD.encode(std::fs::read(plane.ca()).unwrap())
}

/// The spec of a CloneSet in v1alpha1.
fn in_place_only_spec() -> Value {
    json!({
        "selector": { "matchLabels": { "app": "a" } },
        "template": { "metadata": { "labels": { "app": "a" } } },
        "updateStrategy": { "type": "InPlaceOnly", "partition": 2 },
    })
}

/// Objects stored as v1alpha1 are stored as v1beta1 once our manager is leader, and the CRDs' status says so; the API
/// server then need not convert them at each write for field managers that wrote v1alpha1.
#[tokio::test]
async fn storage_version_migration_rewrites_v1alpha1_objects() {
    let plane = ControlPlane::start().unwrap();
    install_upstream(&plane, "v1alpha1");
    let node_image_spec = json!({ "images": { "nginx": { "tags": [{ "tag": "1" }] } } });
    for (kind, spec) in [
        ("CloneSet", in_place_only_spec()),
        ("NodeImage", node_image_spec.clone()),
        (
            "ImagePullJob",
            json!({ "image": "nginx", "completionPolicy": {} }),
        ),
        (
            "ImageListPullJob",
            json!({ "images": ["nginx"], "completionPolicy": {} }),
        ),
        (
            "ContainerRecreateRequest",
            json!({ "podName": "p", "containers": [{ "name": "c" }] }),
        ),
        (
            "SidecarSet",
            json!({ "selector": { "matchLabels": { "a": "b" } }, "containers": [{ "name": "c", "image": "i" }] }),
        ),
    ] {
        let object = old_object("apps.kruise.io/v1alpha1", kind, spec);
        plane.apply(&object.to_string()).unwrap();
    }
    let path = "--output=jsonpath={.metadata.resourceVersion}";
    let revision = |kind: &str| plane.kubectl(&["get", kind, "old", path]).unwrap();
    let before: Vec<String> = plurals().into_iter().map(revision).collect();

    install(&plane, "default");
    let replica = WebhookReplica::start(&plane);
    replica.leading_tx.send(true).unwrap();
    for kind in plurals() {
        wait::until("only v1beta1 is stored", WAIT_TIMEOUT, || {
            let name = format!("{kind}.apps.kruise.io");
            let stored =
                plane.kubectl(&["get", "crd", &name, "--output=jsonpath={.status.storedVersions}"])?;
            Ok((stored == r#"["v1beta1"]"#).then_some(()))
        })
        .unwrap();
    }
    for (kind, before) in plurals().iter().zip(before) {
        assert_ne!(revision(kind), before, "{kind} was not written again");
        let versions = "--output=jsonpath={.metadata.managedFields[*].apiVersion}";
        let versions = plane
            .kubectl(&["get", kind, "old", "--show-managed-fields", versions])
            .unwrap();
        assert!(
            !versions.contains("v1alpha1"),
            "{kind} has managed fields of {versions}"
        );
    }
    let images = dynamic_api(&connect(plane.kubeconfig()).await, BETA, "NodeImage", None);
    assert_eq!(get(&images, "old").await["spec"], node_image_spec);
    let sets = dynamic_api(
        &connect(plane.kubeconfig()).await,
        BETA,
        "CloneSet",
        Some("default"),
    );
    let update = get(&sets, "old").await["spec"]["updateStrategy"]["rollingUpdate"].clone();
    assert_eq!(
        (&update["podUpdatePolicy"], &update["partition"]),
        (&json!("InPlaceOnly"), &json!(2))
    );
    replica.shutdown.cancel();
}

/// A client that writes v1alpha1 after everything is stored as v1beta1 leaves v1alpha1 managedFields, which make each
/// later write depend on the conversion webhook. The next leader drops them, except for those of server-side apply.
#[test]
fn next_leader_drops_v1alpha1_managed_fields() {
    let plane = ControlPlane::start().unwrap();
    install(&plane, "default");
    let replica = WebhookReplica::start(&plane);
    replica.leading_tx.send(true).unwrap();
    wait_for_webhooks(&plane);
    let file = plane.dir().join("set.json");
    let path = file.to_string_lossy().into_owned();
    for (name, apply_args) in [("applied", "--server-side=true"), ("made", "--server-side=false")] {
        let mut object = old_object("apps.kruise.io/v1alpha1", "CloneSet", in_place_only_spec());
        object["metadata"] = json!({ "name": name });
        object["spec"]["template"]["spec"] = json!({ "containers": [{ "name": "app", "image": "i" }] });
        std::fs::write(&file, object.to_string()).unwrap();
        plane.kubectl(&["apply", apply_args, "-f", &path]).unwrap();
    }
    let versions = |name: &str| {
        let versions = "--output=jsonpath={.metadata.managedFields[*].apiVersion}";
        let get = ["get", "clonesets", name, "--show-managed-fields", versions];
        plane.kubectl(&get).unwrap()
    };
    for name in ["applied", "made"] {
        assert!(versions(name).contains("v1alpha1"), "{}", versions(name));
    }
    replica.shutdown.cancel();
    let next = WebhookReplica::start(&plane);
    next.leading_tx.send(true).unwrap();
    wait::until("managed fields of v1alpha1 are dropped", WAIT_TIMEOUT, || {
        Ok((!versions("made").contains("v1alpha1")).then_some(()))
    })
    .unwrap();
    assert!(versions("applied").contains("v1alpha1"));
    next.shutdown.cancel();
}

/// A request created before our webhooks existed gets its labels once; from then on they cannot be removed.
#[tokio::test]
async fn request_labels_can_be_set_once() {
    let plane = ControlPlane::start().unwrap();
    install(&plane, "crds");
    install(&plane, "policies");
    let requests = dynamic_api(
        &connect(plane.kubeconfig()).await,
        BETA,
        "ContainerRecreateRequest",
        Some("default"),
    );
    let new_request = |name: &str, labels: Value| {
        let mut object = old_object(
            BETA,
            "ContainerRecreateRequest",
            json!({ "podName": "p", "containers": [{ "name": "app" }] }),
        );
        object["metadata"] = json!({ "name": name, "labels": labels });
        object
    };
    let labels = |uid: &str, node: &str| json!({ "crr.apps.kruise.io/pod-uid": uid, "crr.apps.kruise.io/node-name": node });
    let labelled = new_request("labelled", labels("uid-1", "n1"));
    create(&requests, labelled).await.unwrap();
    create(&requests, new_request("bare", json!({}))).await.unwrap();
    let label = |name: &'static str, uid: &str| {
        let labels = json!({ "metadata": { "labels": labels(uid, "n1") } });
        merge(&requests, name, labels)
    };
    let other_labels = json!({ "metadata": { "labels": labels("uid-2", "n1") } });
    wait_until_rejected("another label", async || {
        dry_run_merge(&requests, "labelled", other_labels.clone()).await
    })
    .await;
    label("bare", "uid-1").await.unwrap();
    for label in ["pod-uid", "node-name"] {
        let key = format!("crr.apps.kruise.io/{label}");
        for value in [json!("other"), Value::Null] {
            let change = json!({ "metadata": { "labels": { &key: value } } });
            let answer = merge(&requests, "bare", change).await;
            assert_denied(answer, &format!("metadata.labels[{key}] cannot be changed"));
        }
    }
}

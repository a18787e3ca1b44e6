//! Objects that were stored under upstream's CRDs, after ours were applied over them.

use serde_json::{Value, json};
use xtask::cluster::{ControlPlane, wait};

use crate::world::{PATIENCE, Replica, connect, create, get, install, merge, merge_status, refused, typed};

const BETA: &str = "apps.kruise.io/v1beta1";
const KINDS: [&str; 3] = ["nodeimages", "imagepulljobs", "containerrecreaterequests"];

/// Upstream's CRDs, with `stored` as the version that is stored.
fn install_upstream(plane: &ControlPlane, stored: &str) {
    for plural in KINDS {
        let file = format!(
            "{}/tests/data/crds/apps.kruise.io_{plural}.yaml",
            env!("CARGO_MANIFEST_DIR")
        );
        let mut crd: Value = serde_yaml::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        for version in crd["spec"]["versions"].as_array_mut().unwrap() {
            version["storage"] = json!(version["name"] == stored);
        }
        plane.apply(&crd.to_string()).unwrap();
        let name = format!("crd/{plural}.apps.kruise.io");
        plane
            .kubectl(&["wait", "--for=condition=Established", "--timeout=60s", &name])
            .unwrap();
    }
}

fn old(version: &str, kind: &str, spec: Value) -> Value {
    json!({ "apiVersion": version, "kind": kind, "metadata": { "name": "old" }, "spec": spec })
}

/// What our rules would refuse today stays updatable, as long as the update leaves it alone.
#[tokio::test]
async fn a_job_with_stored_mistakes_can_be_updated() {
    let plane = ControlPlane::start().unwrap();
    install_upstream(&plane, "v1beta1");
    let jobs = typed(
        &connect(plane.kubeconfig()).await,
        BETA,
        "ImagePullJob",
        Some("default"),
    );
    let spec = json!({
        "image": "nginx", "parallelism": "10%", "selector": { "names": ["a", "a"] }, "podSelector": {},
        "imagePullPolicy": "Never", "pullSecrets": [""],
        "pullPolicy": { "backoffLimit": -1, "timeoutSeconds": 0 },
        "completionPolicy": { "type": "Never", "ttlSecondsAfterFinished": 3 },
    });
    create(&jobs, old(BETA, "ImagePullJob", spec)).await.unwrap();
    install(&plane, "crds");
    let settled = std::time::Instant::now();
    // The API server takes a moment to serve the new schema: then a new mistake is refused.
    while merge(&jobs, "old", json!({ "spec": { "parallelism": "20%" } }))
        .await
        .is_ok()
    {
        assert!(settled.elapsed() < PATIENCE, "the new schema is not served");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
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
    let worse = merge(&jobs, "old", json!({ "spec": { "parallelism": "10%" } })).await;
    refused(worse, "spec.parallelism is 10%");
}

#[tokio::test]
async fn a_node_image_with_stored_mistakes_can_be_updated() {
    let plane = ControlPlane::start().unwrap();
    install_upstream(&plane, "v1beta1");
    let images = typed(&connect(plane.kubeconfig()).await, BETA, "NodeImage", None);
    let bad = json!({ "tags": [{ "tag": "", "version": -1, "imagePullPolicy": "Never" }] });
    let spec = json!({ "images": { "": bad } });
    create(&images, old(BETA, "NodeImage", spec)).await.unwrap();
    install(&plane, "crds");
    let settled = std::time::Instant::now();
    while merge(&images, "old", json!({ "spec": { "images": { "more": bad } } }))
        .await
        .is_ok()
    {
        assert!(settled.elapsed() < PATIENCE, "the new schema is not served");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    let finalizers = json!({ "metadata": { "finalizers": ["example.com/mark"] } });
    merge(&images, "old", finalizers).await.unwrap();
    merge_status(&images, "old", json!({ "status": { "desired": 1 } }))
        .await
        .unwrap();
    let good = json!({ "spec": { "images": { "nginx": { "tags": [{ "tag": "1" }] } } } });
    merge(&images, "old", good).await.unwrap();
    assert_eq!(get(&images, "old").await["spec"]["images"][""], bad);
}

/// The manager's authority is in a field that the manifests do not have, so that applying them again
/// leaves it alone.
#[test]
fn applying_again_keeps_the_authority() {
    let plane = ControlPlane::start().unwrap();
    let authority = authority(&plane);
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

/// A certificate authority, as the API server wants it in a CRD: any will do.
fn authority(plane: &ControlPlane) -> String {
    use base64::Engine;
    base64::prelude::BASE64_STANDARD.encode(std::fs::read(plane.ca()).unwrap())
}

/// What was stored as v1alpha1 is stored as v1beta1 once our manager leads, and the CRDs say so.
#[tokio::test]
async fn objects_of_the_older_version_are_stored_anew() {
    let plane = ControlPlane::start().unwrap();
    install_upstream(&plane, "v1alpha1");
    let alpha = "apps.kruise.io/v1alpha1";
    let asked = json!({ "images": { "nginx": { "tags": [{ "tag": "1" }] } } });
    for object in [
        old(alpha, "NodeImage", asked.clone()),
        old(
            alpha,
            "ImagePullJob",
            json!({ "image": "nginx", "completionPolicy": {} }),
        ),
        old(
            alpha,
            "ContainerRecreateRequest",
            json!({ "podName": "p", "containers": [{ "name": "c" }] }),
        ),
    ] {
        plane.apply(&object.to_string()).unwrap();
    }
    let revision = |kind: &str| {
        plane
            .kubectl(&[
                "get",
                kind,
                "old",
                "--output=jsonpath={.metadata.resourceVersion}",
            ])
            .unwrap()
    };
    let before = KINDS.map(revision);

    install(&plane, "default");
    let replica = Replica::start(&plane);
    replica.leading.send(true).unwrap();
    for kind in KINDS {
        wait::until("only v1beta1 is stored", PATIENCE, || {
            let name = format!("{kind}.apps.kruise.io");
            let stored =
                plane.kubectl(&["get", "crd", &name, "--output=jsonpath={.status.storedVersions}"])?;
            Ok((stored == r#"["v1beta1"]"#).then_some(()))
        })
        .unwrap();
    }
    for (kind, before) in KINDS.iter().zip(before) {
        assert_ne!(revision(kind), before, "{kind} was not written again");
    }
    let images = typed(&connect(plane.kubeconfig()).await, BETA, "NodeImage", None);
    assert_eq!(get(&images, "old").await["spec"], asked);
    replica.shutdown.cancel();
}

/// A request that was made before our webhooks were there gets its labels once; from then on they stay.
#[tokio::test]
async fn labels_that_admission_did_not_set_can_be_set_once() {
    let plane = ControlPlane::start().unwrap();
    install(&plane, "crds");
    install(&plane, "policies");
    let requests = typed(
        &connect(plane.kubeconfig()).await,
        BETA,
        "ContainerRecreateRequest",
        Some("default"),
    );
    let made = |name: &str, labels: Value| {
        json!({ "apiVersion": BETA, "kind": "ContainerRecreateRequest", "metadata": { "name": name, "labels": labels },
                "spec": { "podName": "p", "containers": [{ "name": "app" }] } })
    };
    let labels = |uid: &str, node: &str| json!({ "crr.apps.kruise.io/pod-uid": uid, "crr.apps.kruise.io/node-name": node });
    create(&requests, made("labelled", labels("uid-1", "n1")))
        .await
        .unwrap();
    create(&requests, made("bare", json!({}))).await.unwrap();
    let begun = std::time::Instant::now();
    // The API server takes a moment to heed a new policy.
    while merge(
        &requests,
        "labelled",
        json!({ "metadata": { "labels": labels("uid-2", "n1") } }),
    )
    .await
    .is_ok()
    {
        assert!(begun.elapsed() < PATIENCE, "the policy is not heeded");
        merge(
            &requests,
            "labelled",
            json!({ "metadata": { "labels": labels("uid-1", "n1") } }),
        )
        .await
        .ok();
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    merge(
        &requests,
        "bare",
        json!({ "metadata": { "labels": labels("uid-1", "n1") } }),
    )
    .await
    .unwrap();
    for label in ["pod-uid", "node-name"] {
        let key = format!("crr.apps.kruise.io/{label}");
        for value in [json!("other"), Value::Null] {
            let change = json!({ "metadata": { "labels": { &key: value } } });
            refused(
                merge(&requests, "bare", change).await,
                &format!("metadata.labels[{key}] cannot be changed"),
            );
        }
    }
}

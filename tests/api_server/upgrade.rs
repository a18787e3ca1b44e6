//! Objects that were stored under upstream's CRDs, after ours were applied over them.

use serde_json::{Value, json};
use xtask::cluster::{ControlPlane, wait};

use crate::world::{PATIENCE, Replica, connect, create, get, install, merge, merge_status, refused, typed};

const BETA: &str = "apps.kruise.io/v1beta1";

/// What our rules would refuse today stays updatable, as long as the update leaves it alone.
#[tokio::test]
async fn stored_mistakes_do_not_stop_updates() {
    let plane = ControlPlane::start().unwrap();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/crds");
    plane.kubectl(&["apply", "-f", folder]).unwrap();
    plane
        .kubectl(&[
            "wait",
            "--for=condition=Established",
            "--timeout=60s",
            "-f",
            folder,
        ])
        .unwrap();
    let admin = connect(plane.kubeconfig()).await;
    let jobs = typed(&admin, BETA, "ImagePullJob", Some("default"));
    let images = typed(&admin, BETA, "NodeImage", None);
    create(
        &jobs,
        json!({ "apiVersion": BETA, "kind": "ImagePullJob", "metadata": { "name": "old" }, "spec": {
            "image": "nginx", "parallelism": "10%", "selector": { "names": ["a", "a"] }, "podSelector": {},
            "imagePullPolicy": "Never",
            "pullPolicy": { "backoffLimit": -1, "timeoutSeconds": 0 }, "pullSecrets": [""],
            "completionPolicy": { "type": "Never", "ttlSecondsAfterFinished": 3 },
        } }),
    )
    .await
    .unwrap();
    create(
        &images,
        json!({ "apiVersion": BETA, "kind": "NodeImage", "metadata": { "name": "old" }, "spec": { "images": {
            "": { "tags": [{ "tag": "", "version": -1, "imagePullPolicy": "Never" }] },
        } } }),
    )
    .await
    .unwrap();

    install(&plane, "crds");
    let mark = json!({ "metadata": { "finalizers": ["example.com/mark"] } });
    let settled = std::time::Instant::now();
    // The API server takes a moment to serve the new schema: then a new mistake is refused.
    while merge(&jobs, "old", json!({ "spec": { "parallelism": "20%" } }))
        .await
        .is_ok()
    {
        assert!(settled.elapsed() < PATIENCE, "the new schema is not served");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    merge(&jobs, "old", mark.clone()).await.unwrap();
    merge(
        &jobs,
        "old",
        json!({ "spec": { "image": "nginx:2", "parallelism": 2 } }),
    )
    .await
    .unwrap();
    merge_status(&jobs, "old", json!({ "status": { "desired": 1 } }))
        .await
        .unwrap();
    merge(&jobs, "old", json!({ "metadata": { "finalizers": [] } }))
        .await
        .unwrap();
    refused(
        merge(&jobs, "old", json!({ "spec": { "parallelism": "10%" } })).await,
        "spec.parallelism is 10%",
    );

    merge(&images, "old", mark).await.unwrap();
    merge_status(&images, "old", json!({ "status": { "desired": 1 } }))
        .await
        .unwrap();
    merge(
        &images,
        "old",
        json!({ "spec": { "images": { "nginx": { "tags": [{ "tag": "1" }] } } } }),
    )
    .await
    .unwrap();
    assert_eq!(
        get(&images, "old").await["spec"]["images"][""]["tags"][0]["version"],
        -1
    );
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
    for plural in ["nodeimages", "imagepulljobs", "containerrecreaterequests"] {
        let file = format!(
            "{}/tests/data/crds/apps.kruise.io_{plural}.yaml",
            env!("CARGO_MANIFEST_DIR")
        );
        let mut crd: Value = serde_yaml::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        for version in crd["spec"]["versions"].as_array_mut().unwrap() {
            version["storage"] = json!(version["name"] == "v1alpha1");
        }
        plane.apply(&crd.to_string()).unwrap();
        let name = format!("crd/{plural}.apps.kruise.io");
        plane
            .kubectl(&["wait", "--for=condition=Established", "--timeout=60s", &name])
            .unwrap();
    }
    let object = |kind: &str, spec: Value| json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": kind, "metadata": { "name": "old" }, "spec": spec });
    let old = [
        object(
            "NodeImage",
            json!({ "images": { "nginx": { "tags": [{ "tag": "1" }] } } }),
        ),
        object(
            "ImagePullJob",
            json!({ "image": "nginx", "completionPolicy": {} }),
        ),
        object(
            "ContainerRecreateRequest",
            json!({ "podName": "p", "containers": [{ "name": "c" }] }),
        ),
    ];
    let revision = |what: &str| {
        plane.kubectl(&[
            "get",
            what,
            "old",
            "--output=jsonpath={.metadata.resourceVersion}",
        ])
    };
    for object in &old {
        plane.apply(&object.to_string()).unwrap();
    }
    let kinds = ["nodeimages", "imagepulljobs", "containerrecreaterequests"];
    let before = kinds.map(|kind| revision(kind).unwrap());

    install(&plane, "default");
    let replica = Replica::start(&plane);
    replica.leading.send(true).unwrap();
    for kind in kinds {
        wait::until("only v1beta1 is stored", PATIENCE, || {
            let name = format!("{kind}.apps.kruise.io");
            let stored =
                plane.kubectl(&["get", "crd", &name, "--output=jsonpath={.status.storedVersions}"])?;
            Ok((stored == r#"["v1beta1"]"#).then_some(()))
        })
        .unwrap();
    }
    for (kind, before) in kinds.iter().zip(before) {
        assert_ne!(revision(kind).unwrap(), before, "{kind} was not written again");
    }
    let admin = connect(plane.kubeconfig()).await;
    let image = get(&typed(&admin, BETA, "NodeImage", None), "old").await;
    assert_eq!(image["spec"], old[0]["spec"]);
    replica.shutdown.cancel();
}

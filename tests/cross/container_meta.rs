//! A daemon's container metadata, and its restarts for the environment: the same for both implementations.

use k8s_openapi::api::core::v1::Pod;
use kruise_api::container_hash::{env_hash, plain_hash};
use kruise_api::in_place::{RuntimeContainerMeta, RuntimeContainerMetaSet};
use kube::api::{Api, Patch, PatchParams};
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};
use testbed::cluster::NODE_NAME;

use crate::interop_cluster::{InteropCluster, create};

const IMAGE: &str = "busybox:1.36";

/// The metadata of a Pod's containers, if it is about the running ones.
pub fn runtime_container_meta(pod: &Pod) -> Option<Vec<RuntimeContainerMeta>> {
    let text = pod.annotations().get("apps.kruise.io/runtime-containers-meta")?;
    let set: RuntimeContainerMetaSet = serde_json::from_str(text).ok()?;
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    let is_current = |entry: &RuntimeContainerMeta| {
        let status = statuses.iter().find(|status| status.name == entry.name);
        status.is_some_and(|status| {
            status.container_id.as_ref() == Some(&entry.container_id)
                && status.restart_count == entry.restart_count
        })
    };
    set.containers.iter().all(is_current).then_some(set.containers)
}

/// Whether there is metadata of both containers, the one that follows the annotation with `value`.
fn has_expected_meta(pod: &Pod, value: &str, restarts: i32) -> bool {
    let Some(entries) = runtime_container_meta(pod) else {
        return false;
    };
    let hashes = |name: &str| {
        let entry = entries.iter().find(|entry| entry.name == name);
        entry.map(|e| {
            (
                e.hashes.plain_hash,
                e.hashes.extracted_env_from_metadata_hash,
                e.restart_count,
            )
        })
    };
    hashes("follows") == Some((plain_hash("follows", IMAGE), env_hash([("CFG", value)]), restarts))
        && hashes("plain") == Some((plain_hash("plain", IMAGE), env_hash([]), 0))
}

/// A Pod with environment from its annotation, which then changes in an update.
pub async fn check_meta_and_restart(cluster: &InteropCluster) {
    let path = json!({ "fieldRef": { "fieldPath": "metadata.annotations['cfg']" } });
    let container = |name: &str, env: Value| {
        let sleep = [
            "sh",
            "-c",
            "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done",
        ];
        json!({ "name": name, "image": IMAGE, "imagePullPolicy": "IfNotPresent", "command": sleep, "env": env })
    };
    let containers = [
        container("plain", json!([])),
        container("follows", json!([{ "name": "CFG", "valueFrom": path }])),
    ];
    let pods: Api<Pod> = cluster.api();
    let metadata =
        json!({ "name": "told", "annotations": { "cfg": "a<b>&c", "kruise.io/sidecarset-hash": "{}" } });
    create(
        &pods,
        json!({ "metadata": metadata, "spec": { "nodeName": NODE_NAME, "containers": containers } }),
    )
    .await;
    cluster
        .wait_until(pods.clone(), "told", "told of", |pod| {
            has_expected_meta(pod, "a<b>&c", 0)
        })
        .await;

    let condition =
        json!({ "type": "InPlaceUpdateReady", "status": "False", "reason": "StartInPlaceUpdate" });
    let status = Patch::Strategic(json!({ "status": { "conditions": [condition] } }));
    pods.patch_status("told", &PatchParams::default(), &status)
        .await
        .unwrap();
    let annotation = Patch::Merge(json!({ "metadata": { "annotations": { "cfg": "2" } } }));
    let changed = pods
        .patch("told", &PatchParams::default(), &annotation)
        .await
        .unwrap();
    let new = cluster
        .wait_until(pods, "told", "restarted and told of", |pod| {
            has_expected_meta(pod, "2", 1)
        })
        .await;
    assert_eq!(new.meta().uid, changed.meta().uid);
}

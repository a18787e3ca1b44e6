//! A CloneSet rollout that one implementation starts and the other finishes, with a Pod in mid-update.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::Pod;
use kruise_api::cloneset::{CloneSet, CloneSetStatus};
use kruise_workload::revision::same_revision;
use kube::ResourceExt;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::json;
use testbed::cluster::Image;

use crate::interop_cluster::{InteropCluster, create};

const PODS: i32 = 3;

/// A rollout in progress.
pub struct Rollout {
    name: &'static str,
    image: String,
    update_revision: String,
    before: BTreeMap<String, String>,
}

async fn pods(cluster: &InteropCluster, name: &str) -> Vec<Pod> {
    let label_selector = ListParams::default().labels(&format!("app={name}"));
    cluster.api::<Pod>().list(&label_selector).await.unwrap().items
}

fn identities(pods: &[Pod]) -> BTreeMap<String, String> {
    pods.iter().map(|p| (p.name_any(), p.uid().unwrap())).collect()
}

/// Whether all Pods are ready, and `updated` of them updated.
fn is_at(set: &CloneSet, updated: i32) -> bool {
    let counts_match = |s: &CloneSetStatus| {
        let counts = [s.replicas, s.ready_replicas, s.available_replicas];
        counts == [PODS; 3] && s.updated_ready_replicas == updated
    };
    let status = set.status.as_ref();
    status.is_some_and(|s| s.observed_generation == set.metadata.generation && counts_match(s))
}

/// Creates a CloneSet, and sets an image that does not exist yet, so that its first Pod is in mid-update.
pub async fn start_rollout(cluster: &InteropCluster, name: &'static str) -> Rollout {
    let image = format!("cross/late-{name}:1");
    let container =
        |image: &str| json!([{ "name": "app", "image": image, "imagePullPolicy": "IfNotPresent" }]);
    let template = |image: &str| json!({ "metadata": { "labels": { "app": name } }, "spec": { "containers": container(image) } });
    let sets = cluster.api::<CloneSet>();
    let spec = json!({
        "replicas": PODS,
        "selector": { "matchLabels": { "app": name } },
        "template": template("kruise-test/term:1"),
        "updateStrategy": { "type": "RollingUpdate", "rollingUpdate": {
            "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1 } },
    });
    create(&sets, json!({ "metadata": { "name": name }, "spec": spec })).await;
    cluster
        .wait_until(sets.clone(), name, "all ready", |set| is_at(set, PODS))
        .await;
    let before = identities(&pods(cluster, name).await);

    let mut next = sets.get(name).await.unwrap().spec.template;
    next["spec"]["containers"][0]["image"] = json!(image);
    let patch = Patch::Merge(json!({ "spec": { "template": next } }));
    sets.patch(name, &PatchParams::default(), &patch).await.unwrap();
    let mid_update = |set: &CloneSet| {
        let status = set.status.as_ref().unwrap();
        (status.updated_replicas, status.ready_replicas) == (1, PODS - 1)
    };
    let set = cluster
        .wait_until(sets, name, "one in mid-update", mid_update)
        .await;
    Rollout {
        name,
        image,
        update_revision: set.status.unwrap().update_revision,
        before,
    }
}

/// Provides the image: the running programs finish the rollout, with the same Pods and revisions.
pub async fn finish_rollout(cluster: &InteropCluster, rollout: Rollout) {
    let Rollout {
        name,
        image,
        update_revision,
        before,
    } = rollout;
    let term = Image::busybox().script("trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done");
    cluster.node.runtime.registry.push(&image, &term).unwrap();
    let set = cluster
        .wait_until(cluster.api::<CloneSet>(), name, "all updated", |set| {
            let status = set.status.as_ref().unwrap();
            is_at(set, PODS) && status.current_revision == status.update_revision
        })
        .await;
    assert_eq!(
        set.status.unwrap().update_revision,
        update_revision,
        "{name}: the template is the same"
    );
    let pods = pods(cluster, name).await;
    assert_eq!(identities(&pods), before, "{name}");
    for pod in &pods {
        let status = &pod.status.as_ref().unwrap().container_statuses.as_ref().unwrap()[0];
        // With the Go manager's feature gates, the label is only the hash.
        let label = &pod.labels()["controller-revision-hash"];
        assert!(same_revision(label, &update_revision), "{name}: {label}");
        assert!(
            status.ready && status.image.ends_with(&image) && status.restart_count == 1,
            "{status:?}"
        );
    }
    let revisions = cluster.api::<ControllerRevision>();
    let label_selector = ListParams::default().labels(&format!("app={name}"));
    let revisions_left = revisions.list(&label_selector).await.unwrap().items;
    assert_eq!(revisions_left.len(), 2, "{name}: {revisions_left:?}");
}

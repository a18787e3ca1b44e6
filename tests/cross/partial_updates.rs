//! In-place updates that one implementation leaves unfinished, in the annotations of their Pods, and the other
//! finishes: batches by launch priority with environment from metadata, a resize, a grace period.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kruise_api::cloneset::CloneSet;
use kruise_api::container_hash::env_hash;
use kube::ResourceExt;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use testbed::cluster::Image;

use crate::container_meta;
use crate::interop_cluster::{InteropCluster, create};

const STATE_ANNOTATION: &str = "apps.kruise.io/inplace-update-state";
const GRACE_ANNOTATION: &str = "apps.kruise.io/inplace-update-grace";
/// Seconds that do not pass during the test.
const NEVER_SECONDS: i32 = 3600;

/// A CloneSet of one Pod that is in mid-update.
pub struct PartialUpdate {
    kind: UpdateKind,
    set: String,
    /// The image that it waits for.
    image: String,
    pod: (String, String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UpdateKind {
    Batches,
    Resize,
    Grace,
}

impl UpdateKind {
    /// The template, before or after the update.
    fn template(self, set: &str, image: &str, round: u8) -> Value {
        let container = |name: &str, image: &str| json!({ "name": name, "image": image, "imagePullPolicy": "IfNotPresent" });
        let mut app = container("app", image);
        let mut metadata = json!({ "labels": { "app": set } });
        match self {
            Self::Grace => {}
            Self::Resize => {
                let cpu = format!("{}0m", round);
                app["resources"] = json!({ "requests": { "cpu": cpu }, "limits": { "cpu": "200m" } });
            }
            Self::Batches => {
                let mut side = container("side", "kruise-test/term:1");
                for (priority, container) in [("5", &mut app), ("1", &mut side)] {
                    let name = container["name"].as_str().unwrap().to_owned();
                    let path = format!("metadata.annotations['{name}']");
                    container["env"] = json!([
                        { "name": "KRUISE_CONTAINER_PRIORITY", "value": priority },
                        { "name": "CFG", "valueFrom": { "fieldRef": { "fieldPath": path } } },
                    ]);
                    metadata["annotations"][&name] = json!(round.to_string());
                }
                let containers = json!([app, side]);
                return json!({ "metadata": metadata, "spec": { "containers": containers } });
            }
        }
        json!({ "metadata": metadata, "spec": { "containers": [app] } })
    }

    /// Whether a Pod shows an unfinished update.
    fn is_half_done(self, pod: &Pod, image: &str) -> bool {
        let state = annotation(pod, STATE_ANNOTATION);
        let patched = images(pod)[0] == image;
        match self {
            Self::Batches => patched && state["nextContainerRefMetadata"]["side"].is_object(),
            Self::Resize => patched && state["updateResources"] == true && cpu_request(pod) == "20m",
            Self::Grace => !patched && annotation(pod, GRACE_ANNOTATION)["graceSeconds"] == NEVER_SECONDS,
        }
    }
}

fn annotation(pod: &Pod, key: &str) -> Value {
    let text = pod.annotations().get(key);
    text.and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default()
}

fn images(pod: &Pod) -> Vec<String> {
    let containers = &pod.spec.as_ref().unwrap().containers;
    containers.iter().map(|c| c.image.clone().unwrap()).collect()
}

fn cpu_request(pod: &Pod) -> Value {
    json!(pod.spec)["containers"][0]["resources"]["requests"]["cpu"].clone()
}

/// Restart count of each container.
fn restarts(pod: &Pod) -> BTreeMap<String, i32> {
    let statuses = pod
        .status
        .as_ref()
        .and_then(|s: &PodStatus| s.container_statuses.clone());
    let all = statuses.into_iter().flatten();
    all.map(|s| (s.name, s.restart_count)).collect()
}

async fn get_pod(cluster: &InteropCluster, set: &str) -> Pod {
    let label_selector = ListParams::default().labels(&format!("app={set}"));
    let mut pods = cluster.api::<Pod>().list(&label_selector).await.unwrap().items;
    assert_eq!(pods.len(), 1, "{set}");
    pods.remove(0)
}

/// Whether the Pod is updated and available.
fn updated(set: &CloneSet) -> bool {
    let status = set.status.as_ref();
    status.is_some_and(|s| {
        s.observed_generation == set.metadata.generation
            && s.update_revision == s.current_revision
            && [
                s.replicas,
                s.updated_replicas,
                s.updated_ready_replicas,
                s.available_replicas,
            ] == [1; 4]
    })
}

/// Creates the CloneSets, named after `side`, and starts the update of each.
pub async fn start_updates(cluster: &InteropCluster, side: &str) -> Vec<PartialUpdate> {
    let kinds = [UpdateKind::Batches, UpdateKind::Resize, UpdateKind::Grace];
    let sets = cluster.api::<CloneSet>();
    let name = |kind: UpdateKind| format!("{side}-{}", format!("{kind:?}").to_lowercase());
    for kind in kinds {
        let set = name(kind);
        let rolling = json!({ "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1,
            "inPlaceUpdateStrategy": { "gracePeriodSeconds": if kind == UpdateKind::Grace { NEVER_SECONDS } else { 0 } } });
        let spec = json!({
            "replicas": 1, "selector": { "matchLabels": { "app": set } },
            "template": kind.template(&set, "kruise-test/term:1", 1),
            "updateStrategy": { "type": "RollingUpdate", "rollingUpdate": rolling },
        });
        create(&sets, json!({ "metadata": { "name": set }, "spec": spec })).await;
    }
    let mut updates = Vec::new();
    for kind in kinds {
        let set = name(kind);
        cluster.wait_until(sets.clone(), &set, "available", updated).await;
        let pod = get_pod(cluster, &set).await;
        let pod = (pod.name_any(), pod.uid().unwrap());
        let image = format!("cross/late-{set}:1");
        let patch = Patch::Merge(json!({ "spec": { "template": kind.template(&set, &image, 2) } }));
        sets.patch(&set, &PatchParams::default(), &patch).await.unwrap();
        updates.push(PartialUpdate {
            kind,
            set,
            image,
            pod,
        });
    }
    for update in &updates {
        wait_until_half_done(cluster, update).await;
    }
    updates
}

async fn wait_until_half_done(cluster: &InteropCluster, update: &PartialUpdate) {
    let is_half_done = |pod: &Pod| update.kind.is_half_done(pod, &update.image);
    cluster
        .wait_until(cluster.api::<Pod>(), &update.pod.0, "half updated", is_half_done)
        .await;
}

/// Provides what the updates wait for. kubelet retries a missing image after 10, 20, 40 seconds and so on.
pub async fn unblock_updates(cluster: &InteropCluster, updates: &[PartialUpdate]) {
    let term = Image::busybox().script("trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done");
    for update in updates {
        wait_until_half_done(cluster, update).await;
        cluster.node.runtime.registry.push(&update.image, &term).unwrap();
        if update.kind == UpdateKind::Grace {
            expire_grace_period(cluster, update).await;
        }
    }
}

/// Waits until the running programs have finished the updates.
pub async fn finish_updates(cluster: &InteropCluster, updates: Vec<PartialUpdate>) {
    for update in updates {
        cluster
            .wait_until(cluster.api::<CloneSet>(), &update.set, "updated", updated)
            .await;
        assert_finished(&update, &get_pod(cluster, &update.set).await);
    }
}

/// Backdates the update, so that its grace period is over.
async fn expire_grace_period(cluster: &InteropCluster, update: &PartialUpdate) {
    let mut state = annotation(&get_pod(cluster, &update.set).await, STATE_ANNOTATION);
    state["updateTimestamp"] = json!("2024-01-02T03:04:05Z");
    let patch =
        Patch::Merge(json!({ "metadata": { "annotations": { (STATE_ANNOTATION): state.to_string() } } }));
    let pods = cluster.api::<Pod>();
    pods.patch(&update.pod.0, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

/// It is the same Pod, with everything updated, and its containers were restarted once.
fn assert_finished(update: &PartialUpdate, pod: &Pod) {
    let set = &update.set;
    assert_eq!((pod.name_any(), pod.uid().unwrap()), update.pod, "{set}");
    assert_eq!(images(pod)[0], update.image, "{set}");
    assert!(!pod.annotations().contains_key(GRACE_ANNOTATION), "{set}");
    let state = annotation(pod, STATE_ANNOTATION);
    let pending_keys = [
        "nextContainerImages",
        "nextContainerRefMetadata",
        "nextContainerResources",
    ];
    assert!(pending_keys.iter().all(|key| state.get(key).is_none()), "{state}");
    let statuses = json!(pod.status)["containerStatuses"].clone();
    let mut restarted = vec![("app".to_owned(), 1)];
    if update.kind == UpdateKind::Batches {
        restarted.push(("side".to_owned(), 1));
        let batches = state["containerBatchesRecord"].as_array().unwrap().iter();
        let batches: Vec<&Value> = batches.map(|batch| &batch["containers"]).collect();
        assert_eq!(batches, [&json!(["app"]), &json!(["side"])], "{state}");
        let meta = container_meta::runtime_container_meta(pod).expect("the daemon tells of its containers");
        let hashes: Vec<u64> = meta
            .iter()
            .map(|t| t.hashes.extracted_env_from_metadata_hash)
            .collect();
        assert_eq!(hashes, [env_hash([("CFG", "2")]); 2], "{set}");
    }
    assert_eq!(restarts(pod), restarted.into_iter().collect(), "{set}");
    if update.kind == UpdateKind::Resize {
        assert_eq!(statuses[0]["resources"]["requests"]["cpu"], "20m", "{statuses}");
    }
}

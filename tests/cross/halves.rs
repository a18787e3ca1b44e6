//! Updates in place that one implementation leaves half done, in the annotations of their Pods, and the other ends:
//! batches by launch priority with environment from metadata, a resize, a grace period.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kruise_api::cloneset::CloneSet;
use kruise_api::container_hash::env_hash;
use kube::ResourceExt;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use testbed::cluster::Image;

use crate::bed::{Bed, create};
use crate::told;

const STATE: &str = "apps.kruise.io/inplace-update-state";
const GRACE: &str = "apps.kruise.io/inplace-update-grace";
/// So many seconds do not pass by themselves.
const LONG: i32 = 3600;

/// A CloneSet of one Pod that is in mid-update.
pub struct Half {
    kind: Kind,
    set: String,
    /// The image that it waits for.
    image: String,
    pod: (String, String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Batches,
    Resize,
    Grace,
}

impl Kind {
    /// The template, before the update or after it.
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

    /// Whether a Pod shows that the update is half done.
    fn half_done(self, pod: &Pod, image: &str) -> bool {
        let state = annotation(pod, STATE);
        let patched = images(pod)[0] == image;
        match self {
            Self::Batches => patched && state["nextContainerRefMetadata"]["side"].is_object(),
            Self::Resize => patched && state["updateResources"] == true && requested(pod) == "20m",
            Self::Grace => !patched && annotation(pod, GRACE)["graceSeconds"] == LONG,
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

fn requested(pod: &Pod) -> Value {
    json!(pod.spec)["containers"][0]["resources"]["requests"]["cpu"].clone()
}

/// How often each container was restarted.
fn restarts(pod: &Pod) -> BTreeMap<String, i32> {
    let statuses = pod
        .status
        .as_ref()
        .and_then(|s: &PodStatus| s.container_statuses.clone());
    let all = statuses.into_iter().flatten();
    all.map(|s| (s.name, s.restart_count)).collect()
}

async fn the_pod(bed: &Bed, set: &str) -> Pod {
    let mine = ListParams::default().labels(&format!("app={set}"));
    let mut pods = bed.api::<Pod>().list(&mine).await.unwrap().items;
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

/// Makes the CloneSets, named after `side`, and updates each halfway.
pub async fn begin(bed: &Bed, side: &str) -> Vec<Half> {
    let kinds = [Kind::Batches, Kind::Resize, Kind::Grace];
    let sets = bed.api::<CloneSet>();
    let name = |kind: Kind| format!("{side}-{}", format!("{kind:?}").to_lowercase());
    for kind in kinds {
        let set = name(kind);
        let rolling = json!({ "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1,
            "inPlaceUpdateStrategy": { "gracePeriodSeconds": if kind == Kind::Grace { LONG } else { 0 } } });
        let spec = json!({
            "replicas": 1, "selector": { "matchLabels": { "app": set } },
            "template": kind.template(&set, "kruise-test/term:1", 1),
            "updateStrategy": { "type": "RollingUpdate", "rollingUpdate": rolling },
        });
        create(&sets, json!({ "metadata": { "name": set }, "spec": spec })).await;
    }
    let mut halves = Vec::new();
    for kind in kinds {
        let set = name(kind);
        bed.until(sets.clone(), &set, "available", updated).await;
        let pod = the_pod(bed, &set).await;
        let pod = (pod.name_any(), pod.uid().unwrap());
        let image = format!("cross/late-{set}:1");
        let patch = Patch::Merge(json!({ "spec": { "template": kind.template(&set, &image, 2) } }));
        sets.patch(&set, &PatchParams::default(), &patch).await.unwrap();
        halves.push(Half {
            kind,
            set,
            image,
            pod,
        });
    }
    for half in &halves {
        half_done(bed, half).await;
    }
    halves
}

async fn half_done(bed: &Bed, half: &Half) {
    let wanted = |pod: &Pod| half.kind.half_done(pod, &half.image);
    bed.until(bed.api::<Pod>(), &half.pod.0, "half updated", wanted)
        .await;
}

/// Gives the updates what they wait for. kubelet looks for a missing image after 10, 20, 40 seconds and so on.
pub async fn let_go(bed: &Bed, halves: &[Half]) {
    let term = Image::busybox().script("trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done");
    for half in halves {
        half_done(bed, half).await;
        bed.node.runtime.registry.push(&half.image, &term).unwrap();
        if half.kind == Kind::Grace {
            its_time_has_passed(bed, half).await;
        }
    }
}

/// Sees whoever is there now end them.
pub async fn end(bed: &Bed, halves: Vec<Half>) {
    for half in halves {
        bed.until(bed.api::<CloneSet>(), &half.set, "updated", updated)
            .await;
        ended(&half, &the_pod(bed, &half.set).await);
    }
}

/// The update began so long ago that its grace period is over.
async fn its_time_has_passed(bed: &Bed, half: &Half) {
    let mut state = annotation(&the_pod(bed, &half.set).await, STATE);
    state["updateTimestamp"] = json!("2024-01-02T03:04:05Z");
    let patch = Patch::Merge(json!({ "metadata": { "annotations": { (STATE): state.to_string() } } }));
    let pods = bed.api::<Pod>();
    pods.patch(&half.pod.0, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

/// It is the same Pod, with all that it was to have, and its containers were restarted once.
fn ended(half: &Half, pod: &Pod) {
    let set = &half.set;
    assert_eq!((pod.name_any(), pod.uid().unwrap()), half.pod, "{set}");
    assert_eq!(images(pod)[0], half.image, "{set}");
    assert!(!pod.annotations().contains_key(GRACE), "{set}");
    let state = annotation(pod, STATE);
    let left = [
        "nextContainerImages",
        "nextContainerRefMetadata",
        "nextContainerResources",
    ];
    assert!(left.iter().all(|key| state.get(key).is_none()), "{state}");
    let statuses = json!(pod.status)["containerStatuses"].clone();
    let mut restarted = vec![("app".to_owned(), 1)];
    if half.kind == Kind::Batches {
        restarted.push(("side".to_owned(), 1));
        let batches = state["containerBatchesRecord"].as_array().unwrap().iter();
        let batches: Vec<&Value> = batches.map(|batch| &batch["containers"]).collect();
        assert_eq!(batches, [&json!(["app"]), &json!(["side"])], "{state}");
        let told = told::told(pod).expect("the daemon tells of its containers");
        let hashes: Vec<u64> = told
            .iter()
            .map(|t| t.hashes.extracted_env_from_metadata_hash)
            .collect();
        assert_eq!(hashes, [env_hash([("CFG", "2")]); 2], "{set}");
    }
    assert_eq!(restarts(pod), restarted.into_iter().collect(), "{set}");
    if half.kind == Kind::Resize {
        assert_eq!(statuses[0]["resources"]["requests"]["cpu"], "20m", "{statuses}");
    }
}

//! Rows on in-place updates with a real kubelet.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use jiff::Timestamp;
use kruise_cri::Runtime as _;
use kruise_cri::client::CriClient as Cri;
use kube::api::{DynamicObject, Patch, PatchParams};
use serde_json::{Value, json};

use crate::cluster::{self, CLONE_SET, NAMESPACE, ObjectKind, POD, median, ready};
use crate::side::Side;

const RUNS: usize = 5;
/// The initial image of Pods.
pub const OLD_IMAGE: &str = "kruise-test/term:1";
const NEW_IMAGE: &str = "kruise-test/term:2";

/// Medians of several image changes.
#[derive(Clone, Copy, Debug, Default)]
pub struct InPlaceTimes {
    /// From the change of the CloneSet until a watching client observes the changed image in the Pod.
    pub pod_patched: Duration,
    /// From the change of the CloneSet until the new container has started.
    pub container_started: Duration,
    /// From the change of a Pod without a controller until its new container has started.
    pub kubelet_alone: Duration,
}

/// Image changes of single Pods.
pub async fn measure(side: &Side) -> Result<InPlaceTimes> {
    let (mut patch_times, mut start_times, mut kubelet_times) = (vec![], vec![], vec![]);
    // The first pulls the images.
    time_image_change(side, POD, "first").await?;
    for run in 0..RUNS {
        kubelet_times.push(time_image_change(side, POD, &format!("alone-{run}")).await?.1);
        let (patched, started) = time_image_change(side, CLONE_SET, &format!("single-{run}")).await?;
        patch_times.push(patched);
        start_times.push(started);
    }
    eprintln!("image changes: own {patch_times:.3?}, total {start_times:.3?}, kubelet {kubelet_times:.3?}");
    Ok(InPlaceTimes {
        pod_patched: median(patch_times),
        container_started: median(start_times),
        kubelet_alone: median(kubelet_times),
    })
}

/// Changes the image of a new Pod, alone or of a CloneSet: time until the change of the Pod is observed, and until the
/// new container has started.
async fn time_image_change(side: &Side, kind: ObjectKind, name: &str) -> Result<(Duration, Duration)> {
    let mut pods = cluster::watch(&side.client, POD, Some(NAMESPACE)).await?;
    let labels = json!({ "app": name });
    let (spec, patch) = if kind == POD {
        (
            pod_spec(OLD_IMAGE),
            Patch::Strategic(json!({ "spec": pod_spec(NEW_IMAGE) })),
        )
    } else {
        let patch = json!({ "spec": { "template": template(&labels, NEW_IMAGE) } });
        (clone_set_spec(&labels, 1, OLD_IMAGE), Patch::Merge(patch))
    };
    let object = json!({ "metadata": { "name": name, "labels": labels }, "spec": spec });
    cluster::create(&side.client, kind, Some(NAMESPACE), object).await?;
    let is_of_app = |pod: &DynamicObject| {
        let labels = pod.metadata.labels.as_ref();
        labels.and_then(|l| l.get("app")).is_some_and(|app| app == name)
    };
    let (_, before) = cluster::next_matching(&mut pods, |p| is_of_app(p) && ready(&p.data)).await?;
    // Kubelet syncs a Pod again at each relist until nothing of it changes any more; and the change must not come just
    // after a relist, which is when the Pod was observed ready.
    tokio::time::sleep(Duration::from_millis(4500)).await;
    let api = cluster::api(&side.client, kind, Some(NAMESPACE));
    let (start, clock) = (Instant::now(), Timestamp::now());
    api.patch(name, &PatchParams::default(), &patch)
        .await
        .with_context(|| format!("cannot change {name}"))?;
    let image = |p: &Value| p["spec"]["containers"][0]["image"] == NEW_IMAGE;
    let (patched_at, _) = cluster::next_matching(&mut pods, |p| is_of_app(p) && image(&p.data)).await?;
    let old = container_id(&before);
    let is_restarted = |p: &Value| container_id(p).is_some() && container_id(p) != old && is_running(p);
    let (_, after) = cluster::next_matching(&mut pods, |p| is_of_app(p) && is_restarted(&p.data)).await?;
    let started_at = container_started_at(side, container_id(&after).unwrap_or_default()).await?;
    api.delete(name, &Default::default()).await?;
    Ok((
        patched_at - start,
        Duration::try_from(started_at.duration_since(clock))?,
    ))
}

/// The ID of a Pod's container, as the runtime has it.
pub fn container_id(pod: &Value) -> Option<&str> {
    let id = pod["status"]["containerStatuses"][0]["containerID"].as_str()?;
    Some(id.rsplit_once("://")?.1)
}

fn is_running(pod: &Value) -> bool {
    pod["status"]["containerStatuses"][0]["state"]["running"].is_object()
}

/// When a container was started, by the clock of this machine.
async fn container_started_at(side: &Side, id: &str) -> Result<Timestamp> {
    let (cri, _) = Cri::connect(&side.node.runtime.socket()).await?;
    let status = cri.container_status(id).await?.context("the container is gone")?;
    status.started_at.context("the container has not started")
}

fn pod_spec(image: &str) -> Value {
    let containers = json!([{ "name": "app", "image": image }]);
    json!({ "containers": containers, "terminationGracePeriodSeconds": 1 })
}

pub fn template(labels: &Value, image: &str) -> Value {
    json!({ "metadata": { "labels": labels }, "spec": pod_spec(image) })
}

pub fn clone_set_spec(labels: &Value, replicas: usize, image: &str) -> Value {
    json!({
        "replicas": replicas,
        "selector": { "matchLabels": labels },
        "template": template(labels, image),
        "updateStrategy": { "rollingUpdate": { "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1 } },
    })
}

//! Rows on in-place updates with a real kubelet.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use jiff::Timestamp;
use kruise_cri::Runtime as _;
use kruise_cri::client::CriClient as Cri;
use kube::api::{DynamicObject, Patch, PatchParams};
use serde_json::{Value, json};

use crate::cluster::{self, CLONE_SET, NAMESPACE, ObjectKind, ObjectStream, POD, SIDECAR_SET, median, ready};
use crate::inject::wait_injected;
use crate::side::Side;
use crate::sidecar_set::SIDECAR;

const RUNS: usize = 5;
/// The initial image of Pods.
pub const OLD_IMAGE: &str = "kruise-test/term:1";
const NEW_IMAGE: &str = "kruise-test/term:2";

/// Medians of several image changes: of a CloneSet or a SidecarSet, the controller.
#[derive(Clone, Copy, Debug, Default)]
pub struct InPlaceTimes {
    /// From the change of the controller until a watching client observes the changed image in the Pod.
    pub pod_patched: Duration,
    /// From the change of the controller until the new container has started.
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

/// Image changes of the sidecar of single Pods.
pub async fn measure_sidecar(side: &Side) -> Result<InPlaceTimes> {
    let (mut patch_times, mut start_times, mut kubelet_times) = (vec![], vec![], vec![]);
    time_sidecar_change(side, POD, "sidecar-first").await?;
    for run in 0..RUNS {
        let (_, alone) = time_sidecar_change(side, POD, &format!("sidecar-alone-{run}")).await?;
        kubelet_times.push(alone);
        let name = format!("sidecar-{run}");
        let (patched, started) = time_sidecar_change(side, SIDECAR_SET, &name).await?;
        patch_times.push(patched);
        start_times.push(started);
    }
    eprintln!("sidecar changes: own {patch_times:.3?}, total {start_times:.3?}, kubelet {kubelet_times:.3?}");
    Ok(InPlaceTimes {
        pod_patched: median(patch_times),
        container_started: median(start_times),
        kubelet_alone: median(kubelet_times),
    })
}

/// Changes the image of a new Pod, alone or of a CloneSet: time until the change of the Pod is observed, and until the
/// new container has started.
async fn time_image_change(side: &Side, kind: ObjectKind, name: &str) -> Result<(Duration, Duration)> {
    let pods = cluster::watch(&side.client, POD, Some(NAMESPACE)).await?;
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
    let api = cluster::api(&side.client, kind, Some(NAMESPACE));
    let params = PatchParams::default();
    let times = time_container_change(side, pods, name, "app", || api.patch(name, &params, &patch)).await?;
    api.delete(name, &Default::default()).await?;
    Ok(times)
}

/// The same for the image of a new Pod's sidecar, alone or of a SidecarSet.
async fn time_sidecar_change(side: &Side, kind: ObjectKind, name: &str) -> Result<(Duration, Duration)> {
    let sidecar = |image: &str| json!([{ "name": SIDECAR, "image": image }]);
    let labels = json!({ "app": name });
    let mut pod = json!({ "metadata": { "name": name, "labels": labels }, "spec": pod_spec(OLD_IMAGE) });
    let patch = json!({ "spec": { "containers": sidecar(NEW_IMAGE) } });
    let (patch, namespace) = if kind == POD {
        let containers = pod["spec"]["containers"].as_array_mut();
        containers
            .context("no containers")?
            .extend(sidecar(OLD_IMAGE).as_array().cloned().into_iter().flatten());
        (Patch::Strategic(patch), Some(NAMESPACE))
    } else {
        let spec = json!({ "selector": { "matchLabels": labels }, "containers": sidecar(OLD_IMAGE) });
        let set = json!({ "metadata": { "name": name }, "spec": spec });
        cluster::create(&side.client, SIDECAR_SET, None, set).await?;
        wait_injected(side, &pod, 1).await?;
        (Patch::Merge(patch), None)
    };
    let pods = cluster::watch(&side.client, POD, Some(NAMESPACE)).await?;
    cluster::create(&side.client, POD, Some(NAMESPACE), pod).await?;
    let api = cluster::api(&side.client, kind, namespace);
    let params = PatchParams::default();
    let times = time_container_change(side, pods, name, SIDECAR, || api.patch(name, &params, &patch)).await?;
    api.delete(name, &Default::default()).await?;
    if kind != POD {
        let pods = cluster::api(&side.client, POD, Some(NAMESPACE));
        pods.delete(name, &Default::default()).await?;
    }
    Ok(times)
}

/// Waits until the Pod with label `app: name` is ready and kubelet is idle, then sends `change`: time until the new
/// image of the container is observed in the Pod, and until its new container has started.
async fn time_container_change<F>(
    side: &Side,
    mut pods: ObjectStream,
    name: &str,
    container: &str,
    change: impl FnOnce() -> F,
) -> Result<(Duration, Duration)>
where
    F: Future<Output = kube::Result<DynamicObject>>,
{
    let is_of_app = |pod: &DynamicObject| {
        let labels = pod.metadata.labels.as_ref();
        labels.and_then(|l| l.get("app")).is_some_and(|app| app == name)
    };
    let (_, before) = cluster::next_matching(&mut pods, |p| is_of_app(p) && ready(&p.data)).await?;
    // Kubelet syncs a Pod again at each relist until nothing of it changes any more; and the change must not come just
    // after a relist, which is when the Pod was observed ready.
    tokio::time::sleep(Duration::from_millis(4500)).await;
    let (start, clock) = (Instant::now(), Timestamp::now());
    change().await.with_context(|| format!("cannot change {name}"))?;
    let has_image = |p: &Value| named(&p["spec"]["containers"], container)["image"] == NEW_IMAGE;
    let (patched_at, _) = cluster::next_matching(&mut pods, |p| is_of_app(p) && has_image(&p.data)).await?;
    let status = |p: &Value| named(&p["status"]["containerStatuses"], container).clone();
    let old = id_of(&status(&before)).map(str::to_owned);
    let is_restarted = |p: &Value| {
        let status = status(p);
        let id = id_of(&status);
        id.is_some() && id != old.as_deref() && status["state"]["running"].is_object()
    };
    let (_, after) = cluster::next_matching(&mut pods, |p| is_of_app(p) && is_restarted(&p.data)).await?;
    let started_at = container_started_at(side, id_of(&status(&after)).unwrap_or_default()).await?;
    Ok((
        patched_at - start,
        Duration::try_from(started_at.duration_since(clock))?,
    ))
}

/// The item of that name.
fn named<'a>(list: &'a Value, name: &str) -> &'a Value {
    let items = list.as_array().into_iter().flatten();
    let mut items = items.filter(|item| item["name"] == name);
    items.next().unwrap_or(&Value::Null)
}

/// The ID of the container of a Pod with one, as the runtime has it.
pub fn container_id(pod: &Value) -> Option<&str> {
    id_of(&pod["status"]["containerStatuses"][0])
}

fn id_of(status: &Value) -> Option<&str> {
    Some(status["containerID"].as_str()?.rsplit_once("://")?.1)
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

//! Rows on updates in place with a real kubelet.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use jiff::Timestamp;
use kruise_cri::Runtime as _;
use kruise_cri::client::Client as Cri;
use kube::api::{DynamicObject, Patch, PatchParams};
use serde_json::{Value, json};

use crate::cluster::{self, CLONE_SET, Kind, NAMESPACE, POD, median, ready};
use crate::side::Side;

const RUNS: usize = 5;
/// The image that Pods are made with.
pub const OLD: &str = "kruise-test/term:1";
const NEW: &str = "kruise-test/term:2";

/// Medians of several image changes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Restarts {
    /// From the change of the CloneSet until a watching client sees the Pod's image changed.
    pub own: Duration,
    /// From the change of the CloneSet until the new container has started.
    pub total: Duration,
    /// From the change of a Pod that nobody controls until its new container has started.
    pub kubelet: Duration,
}

/// Image changes of single Pods.
pub async fn restarts(side: &Side) -> Result<Restarts> {
    let (mut own, mut total, mut kubelet) = (vec![], vec![], vec![]);
    // The first pulls the images.
    change(side, POD, "first").await?;
    for run in 0..RUNS {
        kubelet.push(change(side, POD, &format!("alone-{run}")).await?.1);
        let (patched, started) = change(side, CLONE_SET, &format!("single-{run}")).await?;
        own.push(patched);
        total.push(started);
    }
    eprintln!("image changes: own {own:.3?}, total {total:.3?}, kubelet {kubelet:.3?}");
    Ok(Restarts {
        own: median(own),
        total: median(total),
        kubelet: median(kubelet),
    })
}

/// Changes the image of a fresh Pod, alone or of a CloneSet: time until the Pod is seen changed, and until the new
/// container has started.
async fn change(side: &Side, kind: Kind, name: &str) -> Result<(Duration, Duration)> {
    let mut pods = cluster::watch(&side.client, POD, Some(NAMESPACE)).await?;
    let labels = json!({ "app": name });
    let (spec, patch) = if kind == POD {
        (pod(OLD), Patch::Strategic(json!({ "spec": pod(NEW) })))
    } else {
        let patch = json!({ "spec": { "template": template(&labels, NEW) } });
        (set(&labels, 1, OLD), Patch::Merge(patch))
    };
    let object = json!({ "metadata": { "name": name, "labels": labels }, "spec": spec });
    cluster::create(&side.client, kind, Some(NAMESPACE), object).await?;
    let of_it = |pod: &DynamicObject| {
        let labels = pod.metadata.labels.as_ref();
        labels.and_then(|l| l.get("app")).is_some_and(|app| app == name)
    };
    let (_, before) = cluster::next(&mut pods, |p| of_it(p) && ready(&p.data)).await?;
    // Kubelet looks at a Pod once more with each of its relists until nothing of it changes any more; and is not to
    // be met just after a relist, which is when the Pod was seen ready.
    tokio::time::sleep(Duration::from_millis(4500)).await;
    let api = cluster::api(&side.client, kind, Some(NAMESPACE));
    let (start, clock) = (Instant::now(), Timestamp::now());
    api.patch(name, &PatchParams::default(), &patch)
        .await
        .with_context(|| format!("cannot change {name}"))?;
    let image = |p: &Value| p["spec"]["containers"][0]["image"] == NEW;
    let (at, _) = cluster::next(&mut pods, |p| of_it(p) && image(&p.data)).await?;
    let old = id(&before);
    let fresh = |p: &Value| id(p).is_some() && id(p) != old && running(p);
    let (_, after) = cluster::next(&mut pods, |p| of_it(p) && fresh(&p.data)).await?;
    let started = started(side, id(&after).unwrap_or_default()).await?;
    api.delete(name, &Default::default()).await?;
    Ok((at - start, Duration::try_from(started.duration_since(clock))?))
}

/// The ID of a Pod's container, as the runtime has it.
pub fn id(pod: &Value) -> Option<&str> {
    let id = pod["status"]["containerStatuses"][0]["containerID"].as_str()?;
    Some(id.rsplit_once("://")?.1)
}

fn running(pod: &Value) -> bool {
    pod["status"]["containerStatuses"][0]["state"]["running"].is_object()
}

/// When a container was started, by the clock of this machine.
async fn started(side: &Side, id: &str) -> Result<Timestamp> {
    let (cri, _) = Cri::connect(&side.node.runtime.socket()).await?;
    let status = cri.container_status(id).await?.context("the container is gone")?;
    status.started_at.context("the container has not started")
}

fn pod(image: &str) -> Value {
    let containers = json!([{ "name": "app", "image": image }]);
    json!({ "containers": containers, "terminationGracePeriodSeconds": 1 })
}

pub fn template(labels: &Value, image: &str) -> Value {
    json!({ "metadata": { "labels": labels }, "spec": pod(image) })
}

pub fn set(labels: &Value, replicas: usize, image: &str) -> Value {
    json!({
        "replicas": replicas,
        "selector": { "matchLabels": labels },
        "template": template(labels, image),
        "updateStrategy": { "rollingUpdate": { "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1 } },
    })
}

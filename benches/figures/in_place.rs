//! Rows on updates in place with a real kubelet.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use kruise::cri::Runtime as _;
use kruise::cri::client::Client as Cri;
use kube::api::{DynamicObject, Patch, PatchParams};
use serde_json::{Value, json};
use xtask::cluster::Image;

use crate::clone_set::NAMESPACE;
use crate::cluster::{self, CLONE_SET, JOB, Kind, POD, Seen, median, ready};
use crate::side::Side;

const RUNS: usize = 5;
const OLD: &str = "kruise-test/term:1";
const NEW: &str = "kruise-test/term:2";
const MEBIBYTES: usize = 300;
/// Up to three, nothing is pulled ahead.
const PODS: usize = 4;
const UNTIL_TERM: &str = "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done";

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

/// The longest time that a Pod was not ready in a rollout to a large image, and the whole rollout.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rollout {
    pub outage: Duration,
    pub total: Duration,
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
fn id(pod: &Value) -> Option<&str> {
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

fn template(labels: &Value, image: &str) -> Value {
    json!({ "metadata": { "labels": labels }, "spec": pod(image) })
}

fn set(labels: &Value, replicas: usize, image: &str) -> Value {
    json!({
        "replicas": replicas,
        "selector": { "matchLabels": labels },
        "template": template(labels, image),
        "updateStrategy": { "rollingUpdate": { "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1 } },
    })
}

/// A rollout to an image that the node has not, pulled ahead or not.
pub async fn rollout(side: &Side, ahead: bool) -> Result<Rollout> {
    let name = if ahead { "ahead" } else { "not-ahead" };
    let image = format!("bench/{name}:1");
    let large = Image::busybox().script(UNTIL_TERM).random(MEBIBYTES);
    side.node.runtime.registry.push(&image, &large)?;
    let labels = json!({ "app": name });
    let mut spec = set(&labels, PODS, OLD);
    // Without any updated Pod there is no reason to pull ahead yet, so with this it comes too late to matter.
    let least = if ahead { 0 } else { PODS };
    spec["updateStrategy"]["rollingUpdate"]["inPlaceUpdateStrategy"] =
        json!({ "imagePreDownloadMinUpdatedReadyPods": least });
    cluster::create(
        &side.client,
        CLONE_SET,
        Some(NAMESPACE),
        json!({ "metadata": { "name": name }, "spec": spec }),
    )
    .await?;
    let available = |set: &Value| set["status"]["updatedAvailableReplicas"] == PODS;
    cluster::until(&side.client, CLONE_SET, Some(NAMESPACE), name, available).await?;
    let api = cluster::api(&side.client, CLONE_SET, Some(NAMESPACE));
    let change = async |partition: usize| {
        let patch = json!({ "spec": { "template": template(&labels, &image),
            "updateStrategy": { "rollingUpdate": { "partition": partition } } } });
        api.patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await
    };
    if ahead {
        change(PODS).await?;
        pulled(side, &image).await?;
    }
    let mut pods = cluster::watch(&side.client, POD, Some(NAMESPACE)).await?;
    let start = Instant::now();
    change(0).await?;
    let rollout = outages(&mut pods, &image, start).await?;
    api.delete(name, &Default::default()).await?;
    Ok(rollout)
}

/// Waits until a job has pulled the image.
async fn pulled(side: &Side, image: &str) -> Result<()> {
    let jobs = cluster::api(&side.client, JOB, Some(NAMESPACE));
    let start = Instant::now();
    loop {
        let all = jobs.list(&Default::default()).await?;
        let mut jobs = all.items.iter().filter(|job| job.data["spec"]["image"] == image);
        if jobs.any(|job| job.data["status"]["completionTime"].is_string()) {
            return Ok(());
        }
        ensure!(
            start.elapsed() < Duration::from_secs(120),
            "no job has pulled {image}"
        );
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Follows the Pods until all are ready with the new image.
async fn outages(pods: &mut Seen, image: &str, start: Instant) -> Result<Rollout> {
    let mut out: BTreeMap<String, Instant> = BTreeMap::new();
    let mut back: BTreeMap<String, Duration> = BTreeMap::new();
    loop {
        let event = tokio::time::timeout(Duration::from_secs(180), pods.recv()).await;
        let (at, pod) = event
            .with_context(|| format!("{} Pods are updated", back.len()))?
            .context("the watch of Pods ended")?;
        let name = pod.metadata.name.unwrap_or_default();
        if !ready(&pod.data) {
            out.entry(name).or_insert(at);
        } else if pod.data["spec"]["containers"][0]["image"] == image
            && let Some(since) = out.get(&name)
        {
            back.entry(name).or_insert(at - *since);
        }
        if back.len() == PODS {
            let outage = back.into_values().max().unwrap_or_default();
            return Ok(Rollout {
                outage,
                total: at - start,
            });
        }
    }
}

//! Rows on a rollout to a large image, pre-downloaded or not.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use kruise_cri::Runtime as _;
use kruise_cri::client::CriClient as Cri;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use testbed::cluster::Image;

use crate::cluster::{self, CLONE_SET, NAMESPACE, ObjectStream, POD, PULL_JOB, median, ready};
use crate::in_place::{OLD_IMAGE, clone_set_spec, container_id, template};
use crate::side::Side;

const MEBIBYTES: usize = 300;
/// With three Pods or fewer, nothing is pre-downloaded.
const PODS: usize = 4;
const RUNS: usize = 3;
/// Kubelet works on a new Pod for a few relists; a rollout must start with idle Pods.
const IDLE_TIME: Duration = Duration::from_secs(5);
const UNTIL_TERM: &str = "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done";

/// Medians of several rollouts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rollout {
    /// The longest time that a Pod could not serve: from the end of its old container, or from when it was observed not
    /// ready if that was before, until it was observed ready with the new image.
    pub outage: Duration,
    /// From the change of the CloneSet until the last Pod was ready.
    pub total: Duration,
}

/// Rollouts to images that the node does not have, pre-downloaded or not.
pub async fn measure(side: &Side, ahead: bool) -> Result<Rollout> {
    let (mut outages, mut totals) = (vec![], vec![]);
    for run in 0..RUNS {
        let name = format!("{}-{run}", if ahead { "ahead" } else { "not-ahead" });
        let one = rollout(side, &name, ahead).await?;
        outages.push(one.outage);
        totals.push(one.total);
    }
    eprintln!("rollouts, ahead: {ahead}; longest outages {outages:.1?}, in all {totals:.1?}");
    Ok(Rollout {
        outage: median(outages),
        total: median(totals),
    })
}

async fn rollout(side: &Side, name: &str, ahead: bool) -> Result<Rollout> {
    let image = format!("bench/{name}:1");
    let large_image = Image::busybox().script(UNTIL_TERM).random(MEBIBYTES);
    side.node.runtime.registry.push(&image, &large_image)?;
    let labels = json!({ "app": name });
    let mut spec = clone_set_spec(&labels, PODS, OLD_IMAGE);
    // Without an updated Pod nothing is pre-downloaded yet, so with this value it comes too late to matter.
    let min_updated_ready = if ahead { 0 } else { PODS };
    spec["updateStrategy"]["rollingUpdate"]["inPlaceUpdateStrategy"] =
        json!({ "imagePreDownloadMinUpdatedReadyPods": min_updated_ready });
    let object = json!({ "metadata": { "name": name }, "spec": spec });
    cluster::create(&side.client, CLONE_SET, Some(NAMESPACE), object).await?;
    let available = |set: &Value| set["status"]["updatedAvailableReplicas"] == PODS;
    cluster::wait_until(&side.client, CLONE_SET, Some(NAMESPACE), name, available).await?;
    let api = cluster::api(&side.client, CLONE_SET, Some(NAMESPACE));
    let update_template = async |partition: usize| {
        let patch = json!({ "spec": { "template": template(&labels, &image),
            "updateStrategy": { "rollingUpdate": { "partition": partition } } } });
        api.patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await
    };
    if ahead {
        update_template(PODS).await?;
        wait_pulled(side, &image).await?;
    }
    tokio::time::sleep(IDLE_TIME).await;
    let old = container_ids(side, name).await?;
    let mut pods = cluster::watch(&side.client, POD, Some(NAMESPACE)).await?;
    let clock = (Instant::now(), Timestamp::now());
    update_template(0).await?;
    let (not_ready_since, ready_since) = watch_rollout(&mut pods, &image, &old).await?;
    api.delete(name, &Default::default()).await?;
    let outage = longest_outage(side, clock, &old, &not_ready_since, &ready_since).await?;
    let last_ready = ready_since.into_values().max().unwrap_or(clock.0);
    Ok(Rollout {
        outage,
        total: last_ready - clock.0,
    })
}

/// Waits until a job has pulled the image.
async fn wait_pulled(side: &Side, image: &str) -> Result<()> {
    let jobs = cluster::api(&side.client, PULL_JOB, Some(NAMESPACE));
    let start = Instant::now();
    loop {
        let all = jobs.list(&ListParams::default()).await?;
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

/// The containers of the Pods of one CloneSet, by the Pod's name.
async fn container_ids(side: &Side, app: &str) -> Result<BTreeMap<String, String>> {
    let params = ListParams::default().labels(&format!("app={app}"));
    let pods = cluster::api(&side.client, POD, Some(NAMESPACE))
        .list(&params)
        .await?;
    let container = |pod: kube::api::DynamicObject| {
        let id = container_id(&pod.data)
            .context("a Pod has no container")?
            .to_owned();
        Ok((pod.metadata.name.unwrap_or_default(), id))
    };
    pods.items.into_iter().map(container).collect()
}

/// Follows the Pods until all are ready with the new image: when each was first observed not ready, and ready again.
async fn watch_rollout(
    pods: &mut ObjectStream,
    image: &str,
    old: &BTreeMap<String, String>,
) -> Result<(BTreeMap<String, Instant>, BTreeMap<String, Instant>)> {
    let (mut not_ready_since, mut ready_since) = (BTreeMap::new(), BTreeMap::new());
    while ready_since.len() < old.len() {
        let event = tokio::time::timeout(Duration::from_secs(180), pods.recv()).await;
        let (observed_at, pod) = event
            .with_context(|| format!("{} of {} Pods are updated", ready_since.len(), old.len()))?
            .context("the watch of Pods ended")?;
        let name = pod.metadata.name.unwrap_or_default();
        let Some(before) = old.get(&name) else { continue };
        let has_new_container = container_id(&pod.data).is_some_and(|id| id != before);
        if !ready(&pod.data) {
            not_ready_since.entry(name).or_insert(observed_at);
        } else if has_new_container && pod.data["spec"]["containers"][0]["image"] == image {
            ready_since.entry(name).or_insert(observed_at);
        }
    }
    Ok((not_ready_since, ready_since))
}

/// The longest time that a Pod could not serve.
async fn longest_outage(
    side: &Side,
    (start, clock): (Instant, Timestamp),
    old: &BTreeMap<String, String>,
    not_ready_since: &BTreeMap<String, Instant>,
    ready_since: &BTreeMap<String, Instant>,
) -> Result<Duration> {
    let (cri, _) = Cri::connect(&side.node.runtime.socket()).await?;
    let mut longest = Duration::ZERO;
    for (name, back) in ready_since {
        let status = cri.container_status(&old[name]).await?;
        let status = status.with_context(|| format!("the old container of {name} is gone"))?;
        let ended_at = status.finished_at.context("an old container still runs")?;
        let ended_at = start + Duration::try_from(ended_at.duration_since(clock))?;
        let since = not_ready_since
            .get(name)
            .map_or(ended_at, |out| ended_at.min(*out));
        longest = longest.max(*back - since);
    }
    Ok(longest)
}

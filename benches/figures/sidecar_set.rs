//! A SidecarSet over Pods on kwok's nodes: all of them updated in place.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::bare;
use crate::clone_set::{PhaseCosts, measure_phase, wait_idle};
use crate::cluster::{self, NAMESPACE, POD, SIDECAR_SET};
use crate::inject::{containers_of_set, delete_pods, set_spec, wait_injected};
use crate::kwok::{self, MAX_IN_FLIGHT, REPLACE_IMAGES};
use crate::side::Side;
use crate::usage::memory;

const NAME: &str = "sidecars";
/// Name of the container that the sets inject.
pub const SIDECAR: &str = "sidecar";
/// Timeout for all Pods to have an image.
const TIMEOUT: Duration = Duration::from_secs(240);

/// Costs of the update of all Pods.
#[derive(Clone, Copy, Debug, Default)]
pub struct SidecarUpdate {
    pub update: PhaseCosts,
    /// The manager's memory while all Pods exist.
    pub rss: u64,
}

/// Updates `pods` Pods on `nodes` nodes by a SidecarSet, then does the same with a plain client.
pub async fn measure(side: &mut Side, nodes: usize, pods: usize) -> Result<SidecarUpdate> {
    kwok::ensure_nodes(side, nodes).await?;
    let side = &*side;
    let set = json!({ "metadata": { "name": NAME }, "spec": set_spec(NAME, SIDECAR, 1) });
    cluster::create(&side.client, SIDECAR_SET, None, set).await?;
    wait_injected(side, &pod("probe", NAME), 1).await?;
    let names: Vec<String> = (0..pods).map(|n| format!("{NAME}-{n}")).collect();
    create_pods(side, names.iter().map(|name| pod(name, NAME))).await?;
    let is_total = |count: &Value| count.as_u64() == u64::try_from(pods).ok();
    let all_ready = |set: &Value| is_total(&set["status"]["readyPods"]);
    cluster::wait_until(&side.client, SIDECAR_SET, None, NAME, all_ready).await?;
    wait_idle(side).await?;

    let updated = |status: &Value| is_total(&status["updatedReadyPods"]);
    let mut update = measure_phase(side, pods, update_and_wait(side, NAME, 2, updated)).await?;
    let rss = memory(side, side.manager, "VmRSS")?;
    let sets = cluster::api(&side.client, SIDECAR_SET, None);
    sets.delete(NAME, &DeleteParams::default()).await?;
    wait_idle(side).await?;

    update.bare = measure_bare(side, &names, 3).await?;
    let deletion = bare::watch_deletion(side).await?;
    delete_pods(side, NAMESPACE, names.into_iter()).await?;
    deletion.await?;
    let costs = SidecarUpdate { update, rss };
    eprintln!("{costs:.2?}");
    Ok(costs)
}

/// A Pod on kwok's nodes whose container statuses follow its images.
pub fn pod(name: &str, app: &str) -> Value {
    let labels = json!({ "app": app, REPLACE_IMAGES: "true" });
    json!({ "metadata": { "name": name, "labels": labels }, "spec": kwok::pod_spec("bench/app:1") })
}

/// Creates Pods.
pub async fn create_pods(side: &Side, pods: impl Iterator<Item = Value>) -> Result<()> {
    let creations = stream::iter(pods).map(|pod| cluster::create(&side.client, POD, Some(NAMESPACE), pod));
    let created = creations.buffer_unordered(MAX_IN_FLIGHT);
    created.try_for_each(|_| async { Ok(()) }).await
}

/// Changes the image of a set; returns when the request was sent, and when a watching client sees a status of this
/// change for which `predicate` holds.
pub async fn update_and_wait(
    side: &Side,
    name: &str,
    version: u32,
    predicate: impl Fn(&Value) -> bool,
) -> Result<(Instant, Instant)> {
    let mut watch = cluster::watch(&side.client, SIDECAR_SET, None).await?;
    let sets = cluster::api(&side.client, SIDECAR_SET, None);
    let patch = json!({ "spec": { "containers": containers_of_set(SIDECAR, version) } });
    let start = Instant::now();
    let set = sets
        .patch(name, &PatchParams::default(), &Patch::Merge(patch))
        .await?;
    let generation = set.metadata.generation.context("no generation")?;
    let observed = |set: &Value| {
        let status = &set["status"];
        status["observedGeneration"].as_i64() >= Some(generation) && predicate(status)
    };
    let (end, _) = cluster::wait_for(&mut watch, name, observed).await?;
    Ok((start, end))
}

/// Time that a plain client needs to change the image and a condition of each Pod, and to see all Pods run the image.
async fn measure_bare(side: &Side, names: &[String], version: u32) -> Result<Duration> {
    let image = format!("bench/sidecar:{version}");
    let patch = json!({ "spec": { "containers": [{ "name": SIDECAR, "image": image }] } });
    let mut watch = cluster::watch(&side.client, POD, Some(NAMESPACE)).await?;
    let api = cluster::api(&side.client, POD, Some(NAMESPACE));
    let condition = json!({ "type": "Bench", "status": "True", "reason": "Bench" });
    let status = &Patch::Strategic(json!({ "status": { "conditions": [condition] } }));
    let (api, patch, params) = (&api, &Patch::Strategic(patch), &PatchParams::default());
    let start = Instant::now();
    let patches = stream::iter(names).map(|name| async move {
        api.patch(name, params, patch).await?;
        api.patch_status(name, params, status).await
    });
    let patched = patches.buffer_unordered(MAX_IN_FLIGHT);
    patched.try_for_each(|_| async { Ok(()) }).await?;
    let mut pending: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    let runs_image = |pod: &Value| {
        let statuses = pod["status"]["containerStatuses"].as_array();
        let mut statuses = statuses.into_iter().flatten();
        statuses.any(|status| status["name"] == SIDECAR && status["image"] == image.as_str())
    };
    while !pending.is_empty() {
        let (_, pod) = tokio::time::timeout(TIMEOUT, watch.recv())
            .await
            .with_context(|| format!("{} Pods do not run {image}", pending.len()))?
            .context("the watch of Pods ended")?;
        if runs_image(&pod.data) {
            pending.remove(pod.metadata.name.as_deref().unwrap_or_default());
        }
    }
    Ok(start.elapsed())
}

//! Our programs only, at sizes that take minutes: each on a cluster of its own.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::clone_set::{self, LifecycleCosts, PhaseCosts, spec, template};
use crate::cluster::{self, CLONE_SET, NAMESPACE, POD, RECREATE_REQUEST, ready};
use crate::fan_out::{self, FanOut};
use crate::kwok::{self, MAX_IN_FLIGHT};
use crate::side::Side;
use crate::sidecar_set::{self, SidecarUpdate};
use crate::usage::memory;

/// Nodes that run the Pods.
const NODES: usize = 100;
const SETS: usize = 1000;
const PODS: usize = 10;

/// Pods of one node, with a container each.
const NODE_PODS: usize = 500;
/// For kubelet and the runtime to start them.
const NODE_PODS_TIMEOUT: Duration = Duration::from_secs(900);

/// The daemon of a node with 500 Pods.
#[derive(Clone, Copy, Debug)]
pub struct FullNode {
    /// Resident memory without work, in bytes.
    pub rss: u64,
    /// The most resident memory so far, after the Pods were started and a container was recreated.
    pub peak: u64,
}

/// A real node with 500 Pods.
pub async fn full_node(side: &Side) -> Result<FullNode> {
    let pods = (0..NODE_PODS).map(|index| {
        // Pods of the host's network need no address of the small Pod network.
        json!({ "metadata": { "name": format!("full-{index}"), "labels": { "app": "full" } },
            "spec": { "hostNetwork": true, "terminationGracePeriodSeconds": 0, "containers": [
                { "name": "app", "image": "busybox:1.36", "command": ["sleep", "infinity"] },
            ] } })
    });
    let created = stream::iter(pods).map(|pod| cluster::create(&side.client, POD, Some(NAMESPACE), pod));
    created
        .buffer_unordered(MAX_IN_FLIGHT)
        .try_collect::<Vec<_>>()
        .await?;
    let api = cluster::api(&side.client, POD, Some(NAMESPACE));
    let start = Instant::now();
    loop {
        let pods = api.list(&Default::default()).await?;
        let ready = pods.iter().filter(|pod| ready(&pod.data)).count();
        if ready == NODE_PODS {
            break;
        }
        ensure!(
            start.elapsed() < NODE_PODS_TIMEOUT,
            "only {ready} of {NODE_PODS} Pods are ready"
        );
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    tokio::time::sleep(Duration::from_secs(30)).await;
    let rss = memory(side, side.daemon, "VmRSS")?;
    let request = json!({ "metadata": { "name": "full" },
        "spec": { "podName": "full-0", "containers": [{ "name": "app" }] } });
    cluster::create(&side.client, RECREATE_REQUEST, Some(NAMESPACE), request).await?;
    cluster::wait_until(
        &side.client,
        RECREATE_REQUEST,
        Some(NAMESPACE),
        "full",
        |request| request["status"]["phase"] == "Completed",
    )
    .await?;
    let peak = memory(side, side.daemon, "VmHWM")?;
    Ok(FullNode { rss, peak })
}

/// A job over ten thousand nodes; returns also the manager's memory afterwards.
pub async fn nodes(side: &mut Side) -> Result<(FanOut, u64)> {
    let job = fan_out::measure(side, 10_000).await?;
    Ok((job, memory(side, side.manager, "VmRSS")?))
}

/// Ten thousand Pods in one CloneSet.
pub async fn pods(side: &mut Side) -> Result<LifecycleCosts> {
    clone_set::measure(side, NODES, SETS * PODS).await
}

/// Ten thousand Pods with one SidecarSet.
pub async fn sidecars(side: &mut Side) -> Result<SidecarUpdate> {
    sidecar_set::measure(side, NODES, SETS * PODS).await
}

/// A thousand CloneSets of ten Pods.
pub async fn sets(side: &mut Side) -> Result<LifecycleCosts> {
    kwok::ensure_nodes(side, NODES).await?;
    let side = &*side;
    let up = measure_phase(side, 1, ("availableReplicas", PODS), |name| async move {
        let set = json!({ "metadata": { "name": name }, "spec": spec(&name, PODS, 1) });
        cluster::create(&side.client, CLONE_SET, Some(NAMESPACE), set)
            .await
            .map(drop)
    })
    .await?;
    let update = measure_phase(side, 2, ("updatedReplicas", PODS), |name| async move {
        let image = json!({ "spec": { "template": template(&name, 2) } });
        patch_set(side, &name, image).await
    })
    .await?;
    let rss = memory(side, side.manager, "VmRSS")?;
    let none = json!({ "spec": { "replicas": 0 } });
    let down = measure_phase(side, 3, ("replicas", 0), |name| {
        let none = none.clone();
        async move { patch_set(side, &name, none).await }
    })
    .await?;
    let costs = LifecycleCosts {
        up,
        update,
        down,
        rss,
    };
    eprintln!("{costs:.2?}");
    Ok(costs)
}

async fn patch_set(side: &Side, name: &str, patch: Value) -> Result<()> {
    let api = cluster::api(&side.client, CLONE_SET, Some(NAMESPACE));
    let patch = Patch::Merge(patch);
    api.patch(name, &PatchParams::default(), &patch)
        .await
        .map(drop)
        .context("a CloneSet cannot be changed")
}

/// Calls `write` for each CloneSet, which results in this generation, and waits until a status counter of each reaches
/// `pods`.
async fn measure_phase<F>(
    side: &Side,
    generation: i64,
    (counter, pods): (&str, usize),
    write: impl Fn(String) -> F,
) -> Result<PhaseCosts>
where
    F: Future<Output = Result<()>>,
{
    let mut sets = cluster::watch(&side.client, CLONE_SET, Some(NAMESPACE)).await?;
    let names: Vec<String> = (0..SETS).map(|n| format!("set-{n}")).collect();
    let mut pending: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    let reached = |set: &Value| {
        let status = &set["status"];
        status["observedGeneration"] == generation && status[counter] == pods
    };
    let rollout = async {
        let start = Instant::now();
        let writes = stream::iter(names.clone()).map(write);
        writes
            .buffer_unordered(MAX_IN_FLIGHT)
            .try_collect::<Vec<_>>()
            .await?;
        while !pending.is_empty() {
            let (_, set) = tokio::time::timeout(Duration::from_secs(240), sets.recv())
                .await
                .with_context(|| format!("{} CloneSets are not as wanted", pending.len()))?
                .context("the watch of CloneSets ended")?;
            if reached(&set.data) {
                pending.remove(set.metadata.name.as_deref().unwrap_or_default());
            }
        }
        Ok((start, Instant::now()))
    };
    clone_set::measure_phase(side, SETS * PODS, rollout).await
}

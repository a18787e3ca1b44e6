//! Nodes that kwok plays, and the Pods on them.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use kube::api::ListParams;
use serde_json::{Value, json};
use testbed::cluster::{Cache, prepare, run_command};

use crate::cluster::{self, NODE, NODE_IMAGE};
use crate::side::Side;

/// Requests in flight of a plain client.
pub const MAX_IN_FLIGHT: usize = 32;
/// Label and taint of kwok's nodes.
const KEY: &str = "bench";
const VALUE: &str = "kwok";
/// How kwok simulates nodes and Pods; the files are in its module.
const STAGES: [&str; 3] = [
    "node/fast/node-initialize",
    "pod/fast/pod-ready",
    "pod/fast/pod-delete",
];
/// Stage that runs the new images of Pods with label [`REPLACE_IMAGES`].
const IMAGE_STAGE: &str = include_str!("pod-image.yaml");
/// Label of Pods whose container statuses follow the images of their specs, with value `true`.
pub const REPLACE_IMAGES: &str = "bench/replace-images";
/// Timeout for nodes to become ready, per thousand.
const TIMEOUT_PER_THOUSAND: Duration = Duration::from_secs(120);

/// Ensures that kwok plays `count` nodes, each with its NodeImage; returns the names of the NodeImages.
pub async fn ensure_nodes(side: &mut Side, count: usize) -> Result<Vec<String>> {
    if !std::mem::replace(&mut side.kwok, true) {
        start_kwok(side)?;
    }
    let existing = node_images(side).await?.len();
    let nodes = (existing..count).map(|n| node(&format!("kwok-{n}")));
    let creations = stream::iter(nodes).map(|n| cluster::create(&side.client, NODE, None, n));
    creations
        .buffer_unordered(MAX_IN_FLIGHT)
        .try_collect::<Vec<_>>()
        .await?;
    let timeout = TIMEOUT_PER_THOUSAND * u32::try_from(count.div_ceil(1000))?;
    let begin = Instant::now();
    loop {
        let names = node_images(side).await?;
        if names.len() >= count && schedulable_nodes(side).await? >= count {
            return Ok(names);
        }
        ensure!(
            begin.elapsed() < timeout,
            "only {} NodeImages of {count}",
            names.len()
        );
        tokio::time::sleep(timeout / 120).await;
    }
}

/// Names of the NodeImages of kwok's nodes.
async fn node_images(side: &Side) -> Result<Vec<String>> {
    let selected = ListParams::default().labels(&format!("{KEY}={VALUE}"));
    let list = cluster::api(&side.client, NODE_IMAGE, None)
        .list_metadata(&selected)
        .await?;
    Ok(list.items.into_iter().filter_map(|i| i.metadata.name).collect())
}

/// Number of nodes without other taints than ours, which can run Pods.
async fn schedulable_nodes(side: &Side) -> Result<usize> {
    let selected = ListParams::default().labels(&format!("{KEY}={VALUE}"));
    let list = cluster::api(&side.client, NODE, None).list(&selected).await?;
    let taints = |node: &Value| node["spec"]["taints"].as_array().map_or(0, Vec::len);
    Ok(list.items.iter().filter(|n| taints(&n.data) == 1).count())
}

fn start_kwok(side: &mut Side) -> Result<()> {
    disable_node_eviction(side)?;
    let cache = Cache::open()?;
    prepare::ensure(&cache, &[prepare::Part::Kwok])?;
    let module = format!("sigs.k8s.io/kwok@{}", testbed::cluster::KWOK);
    let text = run_command(Command::new("go").args(["mod", "download", "-json", &module]))?;
    let module: Value = serde_json::from_str(&text)?;
    let dir = module["Dir"]
        .as_str()
        .context("go does not say where kwok's module is")?;
    let image_stage = side.node.plane.dir().join("pod-image.yaml");
    std::fs::write(&image_stage, IMAGE_STAGE)?;
    let stages = STAGES.map(|stage| format!("{dir}/kustomize/stage/{stage}.yaml"));
    let stages = stages.into_iter().chain([image_stage.display().to_string()]);
    let stages: Vec<String> = stages.map(|file| format!("--config={file}")).collect();
    let script = format!(
        "{} --kubeconfig={} --manage-nodes-with-label-selector={KEY}={VALUE} --node-lease-duration-seconds=0 \
         {} > {}/kwok.log 2>&1 < /dev/null &",
        cache.kwok().display(),
        side.node.plane.kubeconfig().display(),
        stages.join(" "),
        side.node.plane.dir().display(),
    );
    run_command(side.node.runtime.command("bash").args(["-c", &script])).map(drop)
}

/// The nodes send no heartbeats, whose load would disturb the measurement; no controller may miss them.
fn disable_node_eviction(side: &mut Side) -> Result<()> {
    let manager = side.node.plane.controller_manager.take();
    let mut manager = manager.context("the control plane has no controller manager")?;
    manager.stop()?;
    let mut manager = manager.args(["--node-monitor-grace-period=2h"]);
    manager.start()?;
    side.node.plane.controller_manager = Some(manager);
    Ok(())
}

fn node(name: &str) -> Value {
    // The taint keeps real Pods away.
    let taints = json!([{ "key": KEY, "value": VALUE, "effect": "NoSchedule" }]);
    json!({ "metadata": { "name": name, "labels": { KEY: VALUE } }, "spec": { "taints": taints } })
}

/// What the spec of a Pod needs to be scheduled to these nodes, and to no other.
pub fn pod_spec(image: &str) -> Value {
    json!({
        "nodeSelector": { KEY: VALUE },
        "tolerations": [{ "key": KEY, "operator": "Exists" }],
        "containers": [{ "name": "app", "image": image }],
    })
}

//! The row on a job over a thousand nodes that kwok plays and whose daemons answer at once.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use kube::api::{DynamicObject, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use xtask::cluster::{Cache, finish, prepare};

use crate::cluster::{self, JOB, NODE, NODE_IMAGE, Seen};
use crate::footprint::cpu;
use crate::report::Figures;
use crate::side::Side;

const NODES: usize = 1000;
/// Requests in flight of the plain client.
const AT_ONCE: usize = 32;
const LABEL: &str = "bench=kwok";
const IMAGE: &str = "bench-fan-out";

pub async fn measure(side: &Side, figures: &mut Figures) -> Result<()> {
    start_kwok(side)?;
    let nodes = (0..NODES).map(|n| node(&format!("kwok-{n}")));
    let made = stream::iter(nodes).map(|n| cluster::create(&side.client, NODE, None, n));
    made.buffer_unordered(AT_ONCE).try_collect::<Vec<_>>().await?;
    let names = node_images(side).await?;

    figures.fan_out_bare = Some(bare(side, &names).await?);
    let answers = tokio::spawn(answer(
        side.client.clone(),
        cluster::watch(&side.client, NODE_IMAGE, None).await?,
    ));
    // What the thousand new nodes cost is not the job's.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let before = cpu(side, side.manager)?;
    let mut jobs = cluster::watch(&side.client, JOB, Some("default")).await?;
    let spec = json!({
        "image": format!("{IMAGE}:1"),
        "parallelism": NODES,
        "selector": { "matchLabels": { "bench": "kwok" } },
        "completionPolicy": { "type": "Always", "activeDeadlineSeconds": 600 },
    });
    let start = Instant::now();
    let job = json!({ "metadata": { "name": "fan-out" }, "spec": spec });
    cluster::create(&side.client, JOB, Some("default"), job).await?;
    let ended = |j: &Value| j["status"]["completionTime"].is_string();
    let (at, job) = cluster::seen(&mut jobs, "fan-out", ended).await?;
    answers.abort();
    ensure!(
        job["status"]["succeeded"] == NODES,
        "not all nodes succeeded: {}",
        job["status"]
    );
    figures.fan_out = Some(at - start);
    figures.fan_out_cpu = Some(cpu(side, side.manager)?.saturating_sub(before));
    figures.fan_out_writes = Some(spec_writes(side)? as f64 / NODES as f64);
    Ok(())
}

fn start_kwok(side: &Side) -> Result<()> {
    let cache = Cache::open()?;
    prepare::ensure(&cache, &[prepare::Part::Kwok])?;
    let module = format!("sigs.k8s.io/kwok@{}", xtask::cluster::KWOK);
    let text = finish(Command::new("go").args(["mod", "download", "-json", &module]))?;
    let module: Value = serde_json::from_str(&text)?;
    let dir = module["Dir"]
        .as_str()
        .context("go does not say where kwok's module is")?;
    let script = format!(
        "{} --kubeconfig={} --manage-nodes-with-label-selector={LABEL} --node-lease-duration-seconds=0 \
         --config={dir}/kustomize/stage/node/fast/node-initialize.yaml > {}/kwok.log 2>&1 < /dev/null &",
        cache.kwok().display(),
        side.node.plane.kubeconfig().display(),
        side.node.plane.dir().display(),
    );
    finish(side.node.runtime.command("bash").args(["-c", &script])).map(drop)
}

fn node(name: &str) -> Value {
    // Tainted, so that nothing real is scheduled there.
    let taints = json!([{ "key": "bench", "value": "kwok", "effect": "NoSchedule" }]);
    json!({ "metadata": { "name": name, "labels": { "bench": "kwok" } }, "spec": { "taints": taints } })
}

/// Waits until each of the nodes has its NodeImage; their names.
async fn node_images(side: &Side) -> Result<Vec<String>> {
    let api = cluster::api(&side.client, NODE_IMAGE, None);
    let start = Instant::now();
    loop {
        let list = api.list_metadata(&ListParams::default().labels(LABEL)).await?;
        if list.items.len() >= NODES {
            return Ok(list.items.into_iter().filter_map(|i| i.metadata.name).collect());
        }
        ensure!(
            start.elapsed() < Duration::from_secs(300),
            "only {} NodeImages of {NODES}",
            list.items.len()
        );
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// What a plain client needs for one spec and one status write of each NodeImage.
async fn bare(side: &Side, names: &[String]) -> Result<Duration> {
    let api = cluster::api(&side.client, NODE_IMAGE, None);
    let (api, params) = (&api, &PatchParams::default());
    let spec = json!({ "metadata": { "annotations": { "bench": "bare" } } });
    let status = json!({ "status": { "desired": 0, "succeeded": 0, "failed": 0, "pulling": 1 } });
    let start = Instant::now();
    for (patch, of_status) in [(&spec, false), (&status, true)] {
        let all = stream::iter(names).map(|name| async move {
            if of_status {
                api.patch_status(name, params, &Patch::Merge(patch)).await
            } else {
                api.patch(name, params, &Patch::Merge(patch)).await
            }
        });
        all.buffer_unordered(AT_ONCE).try_collect::<Vec<_>>().await?;
    }
    Ok(start.elapsed())
}

/// The daemons of the thousand nodes: each reports success for what its NodeImage asks, at once.
async fn answer(client: kube::Client, mut seen: Seen) {
    let api = cluster::api(&client, NODE_IMAGE, None);
    let work =
        stream::poll_fn(|cx| seen.poll_recv(cx)).filter_map(|(_, object)| async move { succeeded(&object) });
    work.for_each_concurrent(AT_ONCE, |(name, status)| {
        let api = api.clone();
        async move {
            let patch = Patch::Merge(json!({ "status": status }));
            if let Err(error) = api.patch_status(&name, &PatchParams::default(), &patch).await {
                eprintln!("NodeImage {name}: {error}");
            }
        }
    })
    .await;
}

/// The status that says that all is pulled, where the object does not say so yet.
fn succeeded(object: &DynamicObject) -> Option<(String, Value)> {
    let name = object.metadata.name.clone().filter(|n| n.starts_with("kwok-"))?;
    let tags = object.data["spec"]["images"][IMAGE]["tags"].as_array()?;
    let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let tags: Vec<Value> = tags
        .iter()
        .map(|t| {
            json!({ "tag": t["tag"], "version": t["version"].as_i64().unwrap_or_default(), "phase": "Succeeded",
                    "progress": 100, "startTime": now, "completionTime": now })
        })
        .collect();
    let told = object.data["status"]["imageStatuses"][IMAGE]["tags"]
        .as_array()
        .map_or(0, Vec::len);
    let count = tags.len();
    let statuses = json!({ IMAGE: { "tags": tags } });
    (count > told).then(|| {
        (name, json!({ "desired": count, "succeeded": count, "failed": 0, "pulling": 0, "imageStatuses": statuses }))
    })
}

/// Accepted writes of the manager to specs of NodeImages since the job was made.
fn spec_writes(side: &Side) -> Result<usize> {
    let all = side.node.plane.writes()?;
    let of_job = |w: &&Value| w["objectRef"]["resource"] == "imagepulljobs" && w["verb"] == "create";
    let last = all
        .iter()
        .rposition(|w| of_job(&w))
        .context("the job is not in the audit log")?;
    let theirs = |w: &&Value| {
        w["objectRef"]["resource"] == "nodeimages"
            && w["objectRef"]["subresource"].is_null()
            && w["responseStatus"]["code"].as_i64() < Some(300)
    };
    Ok(all[last..].iter().filter(theirs).count())
}

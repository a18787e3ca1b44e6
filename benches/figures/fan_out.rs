//! A job over many nodes that kwok plays and whose daemons respond at once.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use kube::api::{DynamicObject, Patch, PatchParams};
use serde_json::{Value, json};

use crate::cluster::{self, NAMESPACE, NODE_IMAGE, ObjectStream, PULL_JOB};
use crate::kwok::{self, MAX_IN_FLIGHT};
use crate::side::Side;
use crate::usage::cpu;

const IMAGE: &str = "bench-fan-out";
/// How often a report is written until it is accepted.
const MAX_ATTEMPTS: usize = 10;

/// Costs of a job over many nodes.
#[derive(Clone, Copy, Debug)]
pub struct FanOut {
    pub time: Duration,
    /// Time that a plain client needs for the same writes.
    pub bare: Duration,
    pub cpu: Duration,
    /// Writes to the spec of each NodeImage.
    pub writes: f64,
}

/// A job over `count` nodes.
pub async fn measure(side: &mut Side, count: usize) -> Result<FanOut> {
    let names = kwok::ensure_nodes(side, count).await?;
    let bare = measure_bare(side, &names).await?;
    let daemons = tokio::spawn(play_daemons(
        side.client.clone(),
        cluster::watch(&side.client, NODE_IMAGE, None).await?,
    ));
    // The work for new nodes is not part of the job's cost.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let before = cpu(side, side.manager)?;
    let mut jobs = cluster::watch(&side.client, PULL_JOB, Some(NAMESPACE)).await?;
    let spec = json!({
        "image": format!("{IMAGE}:1"),
        "parallelism": count,
        "selector": { "matchLabels": { "bench": "kwok" } },
        "completionPolicy": { "type": "Always", "activeDeadlineSeconds": 600 },
    });
    let start = Instant::now();
    let job = json!({ "metadata": { "name": "fan-out" }, "spec": spec });
    cluster::create(&side.client, PULL_JOB, Some(NAMESPACE), job).await?;
    let ended = |j: &Value| j["status"]["completionTime"].is_string();
    let (completed_at, job) = cluster::wait_for(&mut jobs, "fan-out", ended).await?;
    daemons.abort();
    ensure!(
        job["status"]["succeeded"] == count,
        "not all nodes succeeded: {}",
        job["status"]
    );
    Ok(FanOut {
        time: completed_at - start,
        bare,
        cpu: cpu(side, side.manager)?.saturating_sub(before),
        writes: spec_writes(side)? as f64 / count as f64,
    })
}

/// Time that a plain client needs for one spec and one status write of each NodeImage, of the size that a job writes.
async fn measure_bare(side: &Side, names: &[String]) -> Result<Duration> {
    let api = cluster::api(&side.client, NODE_IMAGE, None);
    let (api, params) = (&api, &PatchParams::default());
    let image = "bench-bare";
    let tag = json!({ "tag": "1", "version": 1, "pullPolicy": { "timeoutSeconds": 600, "backoffLimit": 3, "ttlSecondsAfterFinished": 300 } });
    let spec = json!({ "spec": { "images": { image: { "tags": [tag] } } } });
    let status = json!({ "status": { "desired": 1, "succeeded": 1, "failed": 0, "pulling": 0,
        "imageStatuses": { image: success_of_tags(&[tag]) } } });
    let start = Instant::now();
    for (patch, of_status) in [(&spec, false), (&status, true)] {
        let all = stream::iter(names).map(|name| async move {
            if of_status {
                api.patch_status(name, params, &Patch::Merge(patch)).await
            } else {
                api.patch(name, params, &Patch::Merge(patch)).await
            }
        });
        all.buffer_unordered(MAX_IN_FLIGHT)
            .try_collect::<Vec<_>>()
            .await?;
    }
    Ok(start.elapsed())
}

/// The daemons of kwok's nodes: each reports success at once for what its NodeImage requests.
pub async fn play_daemons(client: kube::Client, mut node_images: ObjectStream) {
    let api = cluster::api(&client, NODE_IMAGE, None);
    let pending = stream::poll_fn(|cx| node_images.poll_recv(cx))
        .filter_map(|(_, object)| async move { missing_success(&object) });
    pending
        .for_each_concurrent(MAX_IN_FLIGHT, |(name, status)| {
            let api = api.clone();
            async move {
                let patch = Patch::Merge(json!({ "status": status }));
                // As a daemon does. The node is not seen again if its report is lost, and no job ends without it.
                for _ in 0..MAX_ATTEMPTS {
                    let Err(error) = api.patch_status(&name, &PatchParams::default(), &patch).await else {
                        return;
                    };
                    eprintln!("NodeImage {name}: {error}");
                }
            }
        })
        .await;
}

/// The status in which everything is pulled, if the object does not have it yet.
fn missing_success(object: &DynamicObject) -> Option<(String, Value)> {
    let name = object.metadata.name.clone().filter(|n| n.starts_with("kwok-"))?;
    let images = object.data["spec"]["images"].as_object()?;
    let requested = images
        .iter()
        .filter_map(|(image, spec)| Some((image, spec["tags"].as_array()?)))
        .filter(|(image, tags)| {
            let reported = object.data["status"]["imageStatuses"][image.as_str()]["tags"].as_array();
            tags.len() > reported.map_or(0, Vec::len)
        });
    let mut status = json!({ "desired": 0, "succeeded": 0, "failed": 0, "pulling": 0 });
    for (image, tags) in requested {
        status["imageStatuses"][image] = success_of_tags(tags);
    }
    let pulled: usize = images
        .values()
        .filter_map(|spec| spec["tags"].as_array())
        .map(Vec::len)
        .sum();
    status["desired"] = pulled.into();
    status["succeeded"] = pulled.into();
    status.get("imageStatuses").is_some().then_some((name, status))
}

/// The state of an image whose tags are pulled.
fn success_of_tags(tags: &[Value]) -> Value {
    let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let tag = |t: &Value| {
        json!({ "tag": t["tag"], "version": t["version"].as_i64().unwrap_or_default(), "phase": "Succeeded",
                "progress": 100, "startTime": now, "completionTime": now })
    };
    json!({ "tags": tags.iter().map(tag).collect::<Vec<_>>() })
}

/// Accepted writes of the manager to specs of NodeImages since the job was created.
fn spec_writes(side: &Side) -> Result<usize> {
    let all = side.node.plane.audited_writes()?;
    let creates_job = |w: &&Value| w["objectRef"]["resource"] == "imagepulljobs" && w["verb"] == "create";
    let job_created = all
        .iter()
        .rposition(|w| creates_job(&w))
        .context("the job is not in the audit log")?;
    let is_spec_write = |w: &&Value| {
        w["objectRef"]["resource"] == "nodeimages"
            && w["objectRef"]["subresource"].is_null()
            && w["responseStatus"]["code"].as_i64() < Some(300)
    };
    Ok(all[job_created..].iter().filter(is_spec_write).count())
}

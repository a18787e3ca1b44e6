//! A thousand jobs over a thousand nodes that kwok plays: a million tags, which daemons report at once.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use serde_json::{Value, json};

use crate::cluster::{self, NODE_IMAGE, PULL_JOB};
use crate::fan_out::{IMAGE, play_daemons};
use crate::kwok::{self, MAX_IN_FLIGHT};
use crate::side::Side;
use crate::usage::{cpu, memory};

const NODES: usize = 1000;
const JOBS: usize = 1000;
/// One namespace may not fill a NodeImage.
const NAMESPACES: usize = 8;
/// Timeout without the end of a job.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Costs of the jobs.
#[derive(Clone, Copy, Debug)]
pub struct ManyTags {
    /// From the first job's creation to the last one's end.
    pub time: Duration,
    pub cpu: Duration,
    /// The manager's resident memory afterwards, in bytes.
    pub rss: u64,
    /// The most of it.
    pub peak: u64,
}

/// All jobs at once, each with a tag of its own.
pub async fn measure(side: &mut Side) -> Result<ManyTags> {
    kwok::ensure_nodes(side, NODES).await?;
    for index in 0..NAMESPACES {
        side.node
            .plane
            .kubectl(&["create", "namespace", &namespace(index)])?;
    }
    let daemons = tokio::spawn(play_daemons(
        side.client.clone(),
        cluster::watch(&side.client, NODE_IMAGE, None).await?,
    ));
    let mut jobs = cluster::watch(&side.client, PULL_JOB, None).await?;
    let before = cpu(side, side.manager)?;
    let start = Instant::now();
    let created = (0..JOBS).map(|index| create_job(side, index));
    stream::iter(created)
        .buffer_unordered(MAX_IN_FLIGHT)
        .try_collect::<Vec<_>>()
        .await?;
    let mut pending: BTreeSet<String> = (0..JOBS).map(name).collect();
    while !pending.is_empty() {
        let (_, job) = tokio::time::timeout(TIMEOUT, jobs.recv())
            .await
            .with_context(|| format!("{} jobs have not ended", pending.len()))?
            .context("the watch of jobs ended")?;
        let status = &job.data["status"];
        if status["completionTime"].is_string() {
            ensure!(status["succeeded"] == NODES, "not all nodes succeeded: {status}");
            pending.remove(job.metadata.name.as_deref().unwrap_or_default());
        }
    }
    let time = start.elapsed();
    daemons.abort();
    Ok(ManyTags {
        time,
        cpu: cpu(side, side.manager)?.saturating_sub(before),
        rss: memory(side, side.manager, "VmRSS")?,
        peak: memory(side, side.manager, "VmHWM")?,
    })
}

fn namespace(index: usize) -> String {
    format!("tags-{index}")
}

fn name(index: usize) -> String {
    format!("tag-{index}")
}

async fn create_job(side: &Side, index: usize) -> Result<()> {
    let spec: Value = json!({
        "image": format!("{IMAGE}:{index}"),
        "parallelism": NODES,
        "selector": { "matchLabels": { "bench": "kwok" } },
        "completionPolicy": { "type": "Always", "activeDeadlineSeconds": 3600 },
    });
    let job = json!({ "metadata": { "name": name(index) }, "spec": spec });
    let namespace = namespace(index % NAMESPACES);
    cluster::create(&side.client, PULL_JOB, Some(&namespace), job).await?;
    Ok(())
}

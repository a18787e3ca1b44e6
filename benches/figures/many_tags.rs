//! A thousand ImagePullJobs over a thousand nodes that kwok plays: a million tags.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use serde_json::json;

use crate::cluster::{self, NODE_IMAGE, PULL_JOB};
use crate::fan_out::play_daemons;
use crate::kwok::{self, MAX_IN_FLIGHT};
use crate::side::Side;
use crate::usage::{cpu, memory};

const NODES: usize = 1000;
const JOBS: usize = 1000;
/// Each has ten tags: a NodeImage has at most 256 images.
const IMAGES: usize = 100;
/// Namespaces of the jobs.
const NAMESPACES: usize = 8;
const TIMEOUT: Duration = Duration::from_secs(1800);

/// Costs of all jobs.
#[derive(Clone, Copy, Debug)]
pub struct ManyTags {
    pub time: Duration,
    pub cpu: Duration,
    /// The manager's memory afterwards, in bytes.
    pub rss: u64,
}

/// Creates the jobs and waits until all nodes of all of them have succeeded.
pub async fn measure(side: &mut Side) -> Result<ManyTags> {
    kwok::ensure_nodes(side, NODES).await?;
    let side = &*side;
    let node_images = cluster::watch(&side.client, NODE_IMAGE, None).await?;
    let daemons = tokio::spawn(play_daemons(side.client.clone(), node_images));
    let namespace = |job: usize| format!("tags-{}", job % NAMESPACES);
    for n in 0..NAMESPACES {
        let object = json!({ "metadata": { "name": namespace(n) } });
        cluster::create(&side.client, ("", "v1", "Namespace"), None, object).await?;
    }
    let mut jobs = cluster::watch(&side.client, PULL_JOB, None).await?;
    let before = cpu(side, side.manager)?;
    let start = Instant::now();
    let created = (0..JOBS).map(|n| {
        let spec = json!({
            "image": format!("bench-fan-out-{}:{n}", n % IMAGES),
            "parallelism": NODES,
            "selector": { "matchLabels": { "bench": "kwok" } },
            "completionPolicy": { "type": "Always", "activeDeadlineSeconds": TIMEOUT.as_secs() },
        });
        let job = json!({ "metadata": { "name": format!("tag-{n}") }, "spec": spec });
        let namespace = namespace(n);
        async move { cluster::create(&side.client, PULL_JOB, Some(&namespace), job).await }
    });
    let created = stream::iter(created).buffer_unordered(MAX_IN_FLIGHT);
    created.try_for_each(|_| async { Ok(()) }).await?;

    let (mut done, mut failed) = (BTreeSet::new(), BTreeSet::new());
    while done.len() < JOBS {
        let left = TIMEOUT.saturating_sub(start.elapsed());
        let next = tokio::time::timeout(left, jobs.recv()).await;
        let next = next.with_context(|| format!("only {} of {JOBS} jobs have ended", done.len()))?;
        let (_, job) = next.context("the watch ended")?;
        let status = &job.data["status"];
        let name = job.metadata.name.unwrap_or_default();
        if status["completionTime"].is_string() && done.insert(name.clone()) && status["succeeded"] != NODES {
            failed.insert(format!("{name}: {status}"));
        }
    }
    let time = start.elapsed();
    daemons.abort();
    let first = failed.first();
    ensure!(
        failed.is_empty(),
        "{} jobs did not succeed: {first:?}",
        failed.len()
    );
    let costs = ManyTags {
        time,
        cpu: cpu(side, side.manager)?.saturating_sub(before),
        rss: memory(side, side.manager, "VmRSS")?,
    };
    eprintln!("{costs:.3?}");
    Ok(costs)
}

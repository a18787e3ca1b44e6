//! Image rows: a job for a present image, and one that really pulls.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use kruise_cri::client::CriClient as Cri;
use kruise_cri::{PullRequest, Runtime as _};
use serde_json::json;
use testbed::cluster::Image;

use crate::cluster::{self, NAMESPACE, PULL_JOB, median};
use crate::rows::Figures;
use crate::side::Side;

const RUNS: usize = 5;
const MEBIBYTES: usize = 32;

pub async fn measure(side: &Side, figures: &mut Figures) -> Result<()> {
    time_job(side, "warm", "busybox:1.36").await?;
    let mut present = Vec::new();
    for run in 0..RUNS {
        present.push(time_job(side, &format!("present-{run}"), "busybox:1.36").await?);
    }
    figures.job_present = Some(median(present));

    let registry = &side.node.runtime.registry;
    let (cri, _) = Cri::connect(&side.node.runtime.socket()).await?;
    let mut overhead = Vec::new();
    for run in 0..RUNS {
        // Two images of one size: a present image would not be pulled.
        for part in ["bare", "job"] {
            registry.push(
                &format!("bench/{part}:{run}"),
                &Image::scratch().random(MEBIBYTES).cmd(["none"]),
            )?;
        }
        let start = Instant::now();
        cri.pull_image(&pull_request(&format!("docker.io/bench/bare:{run}")))
            .await?;
        let bare = start.elapsed();
        let image = format!("docker.io/bench/job:{run}");
        let pulled = time_job(side, &format!("pull-{run}"), &image).await?;
        overhead.push(pulled.saturating_sub(bare));
    }
    figures.job_pull_above_bare = Some(median(overhead));
    Ok(())
}

/// Time from create to the completion that a watching client observes.
async fn time_job(side: &Side, name: &str, image: &str) -> Result<Duration> {
    let mut watch = cluster::watch(&side.client, PULL_JOB, Some(NAMESPACE)).await?;
    let spec = json!({
        "image": image,
        "parallelism": 1,
        "selector": { "names": [side.node.name()] },
        "completionPolicy": { "type": "Always" },
    });
    let start = Instant::now();
    cluster::create(
        &side.client,
        PULL_JOB,
        Some(NAMESPACE),
        json!({ "metadata": { "name": name }, "spec": spec }),
    )
    .await?;
    let is_complete = |job: &serde_json::Value| job["status"]["completionTime"].is_string();
    let (completed_at, job) = cluster::wait_for(&mut watch, name, is_complete).await?;
    ensure!(
        job["status"]["succeeded"] == 1,
        "{name} did not succeed: {}",
        job["status"]
    );
    Ok(completed_at - start)
}

fn pull_request(image: &str) -> PullRequest {
    PullRequest {
        image: image.to_owned(),
        auth: None,
        labels: BTreeMap::new(),
        annotations: BTreeMap::new(),
        timeout: Duration::from_secs(60),
        traceparent: None,
    }
}

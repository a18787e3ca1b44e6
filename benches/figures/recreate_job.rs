//! A ContainerRecreateJob, one Pod at a time. OpenKruise has no such kind.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use serde_json::{Value, json};

use crate::cluster::{self, NAMESPACE, POD, RECREATE_JOB, ready};
use crate::kwok::MAX_IN_FLIGHT;
use crate::side::Side;

const PODS: u32 = 10;
const NAME: &str = "recreate-job";

/// Time for one of the Pods, kubelet's part included.
pub async fn measure(side: &Side) -> Result<Duration> {
    let names: Vec<String> = (0..PODS).map(|n| format!("{NAME}-{n}")).collect();
    let create_pod = |name: &String| {
        let spec = json!({ "containers": [{ "name": "c", "image": "kruise-test/term:1" }] });
        let pod = json!({ "metadata": { "name": name, "labels": { "app": NAME } }, "spec": spec });
        cluster::create(&side.client, POD, Some(NAMESPACE), pod)
    };
    let created = stream::iter(names.iter().map(create_pod)).buffer_unordered(MAX_IN_FLIGHT);
    created.try_for_each(|_| async { Ok(()) }).await?;
    for name in &names {
        cluster::wait_until(&side.client, POD, Some(NAMESPACE), name, ready).await?;
    }
    // The shells in the images set their traps a moment after the start.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut jobs = cluster::watch(&side.client, RECREATE_JOB, Some(NAMESPACE)).await?;
    let spec = json!({
        "selector": { "matchLabels": { "app": NAME } },
        "containers": [{ "name": "c" }],
        "maxUnavailable": 1,
    });
    let job = json!({ "metadata": { "name": NAME }, "spec": spec });
    let start = Instant::now();
    cluster::create(&side.client, RECREATE_JOB, Some(NAMESPACE), job).await?;
    let has_ended = |job: &Value| job["status"]["completionTime"].is_string();
    let (ended_at, job) = cluster::wait_for(&mut jobs, NAME, has_ended).await?;
    ensure!(job["status"]["restarted"] == PODS, "{}", job["status"]);
    let pods = cluster::api(&side.client, POD, Some(NAMESPACE));
    for name in &names {
        pods.delete(name, &Default::default()).await?;
    }
    Ok((ended_at - start) / PODS)
}

//! A CloneSet on kwok's nodes: its Pods created, updated in place and deleted.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::bare;
use crate::cluster::{self, CLONE_SET, NAMESPACE};
use crate::kwok;
use crate::side::Side;
use crate::usage::{cpu, memory};

const NAME: &str = "many";

/// Costs of one phase of a CloneSet.
#[derive(Clone, Copy, Debug, Default)]
pub struct PhaseCosts {
    pub time: Duration,
    /// Time that a plain client needs for the same.
    pub bare: Duration,
    /// The manager's CPU time.
    pub cpu: Duration,
    /// The manager's writes to each Pod, rejected ones included.
    pub writes: f64,
}

/// A CloneSet's Pods created, all updated, and deleted.
#[derive(Clone, Copy, Debug, Default)]
pub struct LifecycleCosts {
    pub up: PhaseCosts,
    pub update: PhaseCosts,
    pub down: PhaseCosts,
    /// The manager's memory while all Pods exist.
    pub rss: u64,
}

/// Runs a CloneSet of `pods` Pods on `nodes` nodes, then does the same with a plain client.
pub async fn measure(side: &mut Side, nodes: usize, pods: usize) -> Result<LifecycleCosts> {
    kwok::ensure_nodes(side, nodes).await?;
    let side = &*side;
    let mut costs = LifecycleCosts::default();
    let set = json!({ "metadata": { "name": NAME }, "spec": spec(NAME, 0, 1) });
    cluster::create(&side.client, CLONE_SET, Some(NAMESPACE), set).await?;
    let has_revision = |status: &Value| status["updateRevision"].is_string();
    wait_status(side, NAME, has_revision).await?;
    let is_total = move |count: &Value| count.as_u64() == u64::try_from(pods).ok();

    let available = move |status: &Value| is_total(&status["availableReplicas"]);
    let scale_up = json!({ "spec": { "replicas": pods } });
    costs.up = measure_phase(side, pods, patch_and_wait(side, scale_up, available)).await?;
    let updated = move |status: &Value| is_total(&status["updatedReplicas"]);
    let image = json!({ "spec": { "template": template(NAME, 2) } });
    costs.update = measure_phase(side, pods, patch_and_wait(side, image, updated)).await?;
    costs.rss = memory(side, side.manager, "VmRSS")?;
    let scale_down = json!({ "spec": { "replicas": 0 } });
    let down = async {
        let deletion = bare::watch_deletion(side).await?;
        let (start, _) = patch_and_wait(side, scale_down, |_| true).await?;
        Ok((start, deletion.await?))
    };
    costs.down = measure_phase(side, pods, down).await?;
    let sets = cluster::api(&side.client, CLONE_SET, Some(NAMESPACE));
    sets.delete(NAME, &Default::default()).await?;

    let bare = bare::measure(side, pods).await?;
    (costs.up.bare, costs.update.bare, costs.down.bare) = (bare.up, bare.update, bare.down);
    eprintln!("{costs:.2?}");
    Ok(costs)
}

pub fn spec(name: &str, replicas: usize, version: u32) -> Value {
    json!({
        "replicas": replicas,
        "selector": { "matchLabels": { "app": name } },
        "template": template(name, version),
        "updateStrategy": { "rollingUpdate": { "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": "100%" } },
    })
}

pub fn template(name: &str, version: u32) -> Value {
    let spec = kwok::pod_spec(&format!("bench/app:{version}"));
    json!({ "metadata": { "labels": { "app": name } }, "spec": spec })
}

/// Waits until `predicate` holds for the status of a CloneSet.
async fn wait_status(side: &Side, name: &str, predicate: impl Fn(&Value) -> bool) -> Result<()> {
    let matches = |set: &Value| predicate(&set["status"]);
    cluster::wait_until(&side.client, CLONE_SET, Some(NAMESPACE), name, matches)
        .await
        .map(drop)
}

/// Changes the CloneSet; returns when the request was sent, and when a watching client sees a status of this change for
/// which `predicate` holds.
async fn patch_and_wait(
    side: &Side,
    patch: Value,
    predicate: impl Fn(&Value) -> bool,
) -> Result<(Instant, Instant)> {
    let mut sets = cluster::watch(&side.client, CLONE_SET, Some(NAMESPACE)).await?;
    let api = cluster::api(&side.client, CLONE_SET, Some(NAMESPACE));
    let start = Instant::now();
    let set = api
        .patch(NAME, &PatchParams::default(), &Patch::Merge(patch))
        .await?;
    let generation = set.metadata.generation.context("no generation")?;
    let observed = |set: &Value| {
        let status = &set["status"];
        status["observedGeneration"].as_i64() >= Some(generation) && predicate(status)
    };
    let (end, _) = cluster::wait_for(&mut sets, NAME, observed).await?;
    Ok((start, end))
}

/// Costs of `work`, including what the manager does for it afterwards.
pub async fn measure_phase(
    side: &Side,
    pods: usize,
    operation: impl Future<Output = Result<(Instant, Instant)>>,
) -> Result<PhaseCosts> {
    let (writes_before, cpu_before) = (pod_writes(side)?, cpu(side, side.manager)?);
    let (start, end) = operation.await?;
    let writes = wait_idle(side).await? - writes_before;
    Ok(PhaseCosts {
        time: end - start,
        bare: Duration::ZERO,
        cpu: cpu(side, side.manager)?.saturating_sub(cpu_before),
        writes: writes as f64 / pods as f64,
    })
}

/// Waits until the manager has written to no Pod for three seconds; returns its number of writes so far.
pub async fn wait_idle(side: &Side) -> Result<usize> {
    let begin = Instant::now();
    let mut last_write = (pod_writes(side)?, Instant::now());
    while last_write.1.elapsed() < Duration::from_secs(3) {
        ensure!(
            begin.elapsed() < Duration::from_secs(240),
            "the manager does not come to rest"
        );
        tokio::time::sleep(Duration::from_millis(500)).await;
        let now = pod_writes(side)?;
        if now != last_write.0 {
            last_write = (now, Instant::now());
        }
    }
    Ok(last_write.0)
}

/// Number of the manager's writes to Pods so far.
fn pod_writes(side: &Side) -> Result<usize> {
    let all = side.node.plane.audited_writes()?;
    let by_manager = all.iter().filter(|w| {
        w["objectRef"]["resource"] == "pods"
            && w["user"]["username"] == "system:serviceaccount:kruise-system:kruise-manager"
    });
    Ok(by_manager.count())
}

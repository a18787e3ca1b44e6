//! A CloneSet on kwok's nodes: its Pods made, updated in place and deleted again.

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

/// What one thing that a CloneSet does to its Pods came to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Phase {
    pub time: Duration,
    /// What a plain client needs for the same.
    pub bare: Duration,
    /// The manager's processor time.
    pub cpu: Duration,
    /// The manager's writes to each Pod, refused ones included.
    pub writes: f64,
}

/// A CloneSet's Pods from none to all, all updated, and to none again.
#[derive(Clone, Copy, Debug, Default)]
pub struct Life {
    pub up: Phase,
    pub update: Phase,
    pub down: Phase,
    /// The manager's memory while all Pods are there.
    pub rss: u64,
}

/// Runs a CloneSet of `pods` Pods on `nodes` nodes, then does the same with a plain client.
pub async fn measure(side: &mut Side, nodes: usize, pods: usize) -> Result<Life> {
    kwok::nodes(side, nodes).await?;
    let side = &*side;
    let mut life = Life::default();
    let set = json!({ "metadata": { "name": NAME }, "spec": spec(NAME, 0, 1) });
    cluster::create(&side.client, CLONE_SET, Some(NAMESPACE), set).await?;
    let started = |status: &Value| status["updateRevision"].is_string();
    until(side, NAME, started).await?;
    let all = move |count: &Value| count.as_u64() == u64::try_from(pods).ok();

    let available = move |status: &Value| all(&status["availableReplicas"]);
    let more = json!({ "spec": { "replicas": pods } });
    life.up = phase(side, pods, change(side, more, available)).await?;
    let updated = move |status: &Value| all(&status["updatedReplicas"]);
    let image = json!({ "spec": { "template": template(NAME, 2) } });
    life.update = phase(side, pods, change(side, image, updated)).await?;
    life.rss = memory(side, side.manager, "VmRSS")?;
    let none = json!({ "spec": { "replicas": 0 } });
    let down = async {
        let gone = bare::gone(side).await?;
        let (start, _) = change(side, none, |_| true).await?;
        Ok((start, gone.await?))
    };
    life.down = phase(side, pods, down).await?;
    let sets = cluster::api(&side.client, CLONE_SET, Some(NAMESPACE));
    sets.delete(NAME, &Default::default()).await?;

    let bare = bare::measure(side, pods).await?;
    (life.up.bare, life.update.bare, life.down.bare) = (bare.up, bare.update, bare.down);
    eprintln!("{life:.2?}");
    Ok(life)
}

/// A CloneSet's spec.
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

/// Waits until the status of a CloneSet is as wanted.
async fn until(side: &Side, name: &str, wanted: impl Fn(&Value) -> bool) -> Result<()> {
    let holds = |set: &Value| wanted(&set["status"]);
    cluster::until(&side.client, CLONE_SET, Some(NAMESPACE), name, holds)
        .await
        .map(drop)
}

/// Changes the CloneSet: when that was asked for, and when a watching client sees a status that is of this change
/// and as wanted.
async fn change(side: &Side, patch: Value, wanted: impl Fn(&Value) -> bool) -> Result<(Instant, Instant)> {
    let mut sets = cluster::watch(&side.client, CLONE_SET, Some(NAMESPACE)).await?;
    let api = cluster::api(&side.client, CLONE_SET, Some(NAMESPACE));
    let start = Instant::now();
    let set = api
        .patch(NAME, &PatchParams::default(), &Patch::Merge(patch))
        .await?;
    let generation = set.metadata.generation.context("no generation")?;
    let of_this = |set: &Value| {
        let status = &set["status"];
        status["observedGeneration"].as_i64() >= Some(generation) && wanted(status)
    };
    let (end, _) = cluster::seen(&mut sets, NAME, of_this).await?;
    Ok((start, end))
}

/// What `work` takes, with what the manager does for it afterwards.
pub async fn phase(
    side: &Side,
    pods: usize,
    work: impl Future<Output = Result<(Instant, Instant)>>,
) -> Result<Phase> {
    let (before, spent) = (pod_writes(side)?, cpu(side, side.manager)?);
    let (start, end) = work.await?;
    let writes = settled(side).await? - before;
    Ok(Phase {
        time: end - start,
        bare: Duration::ZERO,
        cpu: cpu(side, side.manager)?.saturating_sub(spent),
        writes: writes as f64 / pods as f64,
    })
}

/// Waits until the manager has written to no Pod for three seconds; how often it has in all.
pub async fn settled(side: &Side) -> Result<usize> {
    let begin = Instant::now();
    let mut last = (pod_writes(side)?, Instant::now());
    while last.1.elapsed() < Duration::from_secs(3) {
        ensure!(
            begin.elapsed() < Duration::from_secs(240),
            "the manager does not come to rest"
        );
        tokio::time::sleep(Duration::from_millis(500)).await;
        let now = pod_writes(side)?;
        if now != last.0 {
            last = (now, Instant::now());
        }
    }
    Ok(last.0)
}

/// The manager's writes to Pods so far.
fn pod_writes(side: &Side) -> Result<usize> {
    let all = side.node.plane.writes()?;
    let theirs = all.iter().filter(|w| {
        w["objectRef"]["resource"] == "pods"
            && w["user"]["username"] == "system:serviceaccount:kruise-system:kruise-manager"
    });
    Ok(theirs.count())
}

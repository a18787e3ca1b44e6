//! The lower bound for a workload: what a plain client needs for its Pods, with a bounded number of requests in flight.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::runtime::{WatchStreamExt, watcher};
use serde_json::{Value, json};

use crate::cluster::{self, NAMESPACE, POD};
use crate::kwok::{self, MAX_IN_FLIGHT};
use crate::side::Side;

/// Timeout for the deletion of Pods.
const TIMEOUT: Duration = Duration::from_secs(240);
const GATE: &str = "InPlaceUpdateReady";

/// Times for Pods from none to all ready, for a spec and a status write to each, and for their deletion.
pub struct BareLimits {
    pub up: Duration,
    pub update: Duration,
    pub down: Duration,
}

/// Does with Pods the minimum that a CloneSet has to do.
pub async fn measure(side: &Side, count: usize) -> Result<BareLimits> {
    let api = cluster::api(&side.client, POD, Some(NAMESPACE));
    let names: Vec<String> = (0..count).map(|n| format!("bare-{n}")).collect();
    let mut pods = cluster::watch(&side.client, POD, Some(NAMESPACE)).await?;
    let start = Instant::now();
    let creations =
        stream::iter(&names).map(|name| cluster::create(&side.client, POD, Some(NAMESPACE), pod(name)));
    creations
        .buffer_unordered(MAX_IN_FLIGHT)
        .try_collect::<Vec<_>>()
        .await?;
    let mut not_running: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    while !not_running.is_empty() {
        let (_, pod) = pods.recv().await.context("the watch of Pods ended")?;
        if pod.data["status"]["phase"] == "Running" {
            not_running.remove(pod.metadata.name.as_deref().unwrap_or_default());
        }
    }
    patch(&api, &names, &[(true, status("True"))]).await?;
    let up = start.elapsed();
    let start = Instant::now();
    let image = json!({ "spec": { "containers": [{ "name": "app", "image": "bench/app:2" }] } });
    patch(&api, &names, &[(true, status("False")), (false, image)]).await?;
    let update = start.elapsed();
    let deletion = watch_deletion(side).await?;
    let start = Instant::now();
    let (api, params) = (&api, &Default::default());
    let deletions = stream::iter(&names).map(|name| api.delete(name, params));
    deletions
        .buffer_unordered(MAX_IN_FLIGHT)
        .try_collect::<Vec<_>>()
        .await?;
    let down = deletion.await? - start;
    Ok(BareLimits { up, update, down })
}

fn pod(name: &str) -> Value {
    let mut spec = kwok::pod_spec("bench/app:1");
    // Not the readiness gate that controllers maintain even in Pods without an owner.
    spec["readinessGates"] = json!([{ "conditionType": GATE }]);
    json!({ "metadata": { "name": name, "labels": { "app": "bare" } }, "spec": spec })
}

fn status(gate: &str) -> Value {
    json!({ "status": { "conditions": [{ "type": GATE, "status": gate, "reason": "Bench" }] } })
}

/// Patches each Pod, one patch after the other: the status if the flag is set.
async fn patch(api: &Api<DynamicObject>, names: &[String], patches: &[(bool, Value)]) -> Result<()> {
    let params = &PatchParams::default();
    let all = stream::iter(names).map(|name| async move {
        for (of_status, patch) in patches {
            let patch = Patch::Strategic(patch);
            if *of_status {
                api.patch_status(name, params, &patch).await?;
            } else {
                api.patch(name, params, &patch).await?;
            }
        }
        Ok::<(), kube::Error>(())
    });
    all.buffer_unordered(MAX_IN_FLIGHT)
        .try_collect::<Vec<_>>()
        .await?;
    Ok(())
}

/// The moment at which all currently existing Pods are deleted; the watch is established when this returns.
pub async fn watch_deletion(side: &Side) -> Result<impl Future<Output = Result<Instant>> + use<>> {
    let api = cluster::api(&side.client, POD, Some(NAMESPACE));
    // Restarted if it ends: the API server ends the watch of a client that reads too slowly.
    let mut events = watcher(api, watcher::Config::default()).default_backoff().boxed();
    let (mut listed, mut remaining) = (BTreeSet::new(), None);
    while remaining.is_none() {
        let event = events.try_next().await?.context("the watch ended")?;
        track_deletions(event, &mut listed, &mut remaining);
    }
    let wait_for_last = tokio::spawn(async move {
        while remaining.as_ref().is_none_or(|left| !left.is_empty()) {
            if let Some(Ok(event)) = events.next().await {
                track_deletions(event, &mut listed, &mut remaining);
            }
        }
        Ok::<_, anyhow::Error>(Instant::now())
    });
    Ok(async move {
        let finished = tokio::time::timeout(TIMEOUT, wait_for_last).await;
        finished.context("the Pods do not go")??
    })
}

/// Applies the watch's events to the Pods that are `left`, which is complete once they are `listed`.
fn track_deletions(
    event: watcher::Event<DynamicObject>,
    listed: &mut BTreeSet<String>,
    remaining: &mut Option<BTreeSet<String>>,
) {
    let name = |pod: DynamicObject| pod.metadata.name.unwrap_or_default();
    match event {
        watcher::Event::Init => listed.clear(),
        watcher::Event::InitApply(pod) => drop(listed.insert(name(pod))),
        watcher::Event::InitDone => *remaining = Some(std::mem::take(listed)),
        watcher::Event::Delete(pod) => {
            remaining.get_or_insert_default().remove(&name(pod));
        }
        watcher::Event::Apply(_) => {}
    }
}

//! Ten thousand Pods and up to 500 SidecarSets: what the change of one set costs.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use kube::api::{DeleteParams, ListParams};
use serde_json::{Value, json};

use crate::cluster::{self, SIDECAR_SET, median};
use crate::inject::{set_spec, wait_injected};
use crate::kwok::{self, MAX_IN_FLIGHT};
use crate::side::Side;
use crate::sidecar_set::{SIDECAR, create_pods, pod, update_and_wait};
use crate::usage::{cpu, memory};

const NODES: usize = 100;
/// Numbers of sets that exist while one of them is changed; all Pods exist all the time.
const SETS: [usize; 3] = [500, 50, 1];
/// Pods that each of the 500 sets selects.
const PODS_PER_SET: usize = 20;
/// Changes of the first set, one after the other.
const CHANGES: u32 = 10;
/// The manager is at rest if it has written nothing for this time.
const QUIET: Duration = Duration::from_secs(3);
const TIMEOUT: Duration = Duration::from_secs(300);

/// Costs of one change of one set.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChangeCosts {
    /// Median time until the status shows that all Pods run the new image.
    pub time: Duration,
    /// The manager's CPU time.
    pub cpu: Duration,
    /// The manager's writes to all objects but events and Leases.
    pub writes: f64,
}

/// Costs of many sets.
#[derive(Clone, Copy, Debug, Default)]
pub struct ManySidecarSets {
    /// The manager's CPU time for the creation of all Pods.
    pub creation_cpu: Duration,
    /// Of a change among 500 sets, among 50, and of the only one.
    pub changes: [ChangeCosts; 3],
    /// The manager's memory with all sets and Pods.
    pub rss: u64,
}

/// Creates all sets and Pods, and changes one set while all, some and none of the other sets exist.
pub async fn measure(side: &mut Side) -> Result<ManySidecarSets> {
    kwok::ensure_nodes(side, NODES).await?;
    let side = &*side;
    let sets = SETS.into_iter().max().unwrap_or_default();
    let creations = (0..sets).map(|n| {
        let set = json!({ "metadata": { "name": name(n) }, "spec": set_spec(&name(n), SIDECAR, 1) });
        cluster::create(&side.client, SIDECAR_SET, None, set)
    });
    let created = stream::iter(creations).buffer_unordered(MAX_IN_FLIGHT);
    created.try_for_each(|_| async { Ok(()) }).await?;
    wait_injected(side, &pod("probe", &name(sets - 1)), 1).await?;
    wait_at_rest(side).await?;
    let before = cpu(side, side.manager)?;
    let pods = (0..sets * PODS_PER_SET).map(|n| pod(&format!("pod-{n}"), &name(n % sets)));
    create_pods(side, pods).await?;
    wait_all_ready(side).await?;
    wait_at_rest(side).await?;
    let mut costs = ManySidecarSets {
        creation_cpu: cpu(side, side.manager)?.saturating_sub(before),
        ..ManySidecarSets::default()
    };
    let mut version = 1;
    for (existing, change) in SETS.into_iter().zip(&mut costs.changes) {
        delete_from(side, existing).await?;
        wait_at_rest(side).await?;
        *change = measure_changes(side, &mut version).await?;
        if existing == sets {
            costs.rss = memory(side, side.manager, "VmRSS")?;
        }
        eprintln!("{existing} sets: {change:.3?}");
    }
    eprintln!("{costs:.3?}");
    Ok(costs)
}

fn name(n: usize) -> String {
    format!("set-{n}")
}

fn all_ready(set: &Value) -> bool {
    set["status"]["readyPods"] == PODS_PER_SET
}

/// Waits until all Pods run.
async fn wait_all_ready(side: &Side) -> Result<()> {
    let sets = cluster::api(&side.client, SIDECAR_SET, None);
    let begin = Instant::now();
    loop {
        let list = sets.list(&ListParams::default()).await?;
        let ready = list.items.iter().filter(|set| all_ready(&set.data)).count();
        if ready == list.items.len() {
            return Ok(());
        }
        let all = list.items.len();
        ensure!(
            begin.elapsed() < TIMEOUT,
            "the Pods of only {ready} of {all} sets are ready"
        );
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// Deletes the sets from this one on.
async fn delete_from(side: &Side, first: usize) -> Result<()> {
    let api = cluster::api(&side.client, SIDECAR_SET, None);
    let listed = api.list_metadata(&ListParams::default()).await?;
    let listed = listed.items.into_iter().filter_map(|set| set.metadata.name);
    let kept: Vec<String> = (0..first).map(name).collect();
    let surplus: Vec<String> = listed.filter(|name| !kept.contains(name)).collect();
    let (api, params) = (&api, &DeleteParams::default());
    let deletions = stream::iter(&surplus).map(|name| api.delete(name, params));
    let deleted = deletions.buffer_unordered(MAX_IN_FLIGHT);
    Ok(deleted.try_for_each(|_| async { Ok(()) }).await?)
}

/// Changes the first set's image several times.
async fn measure_changes(side: &Side, version: &mut u32) -> Result<ChangeCosts> {
    let updated = |status: &Value| status["updatedReadyPods"] == PODS_PER_SET;
    let mut change = async || {
        *version += 1;
        update_and_wait(side, &name(0), *version, updated).await
    };
    // The first change adds a condition to each Pod.
    change().await?;
    let (writes_before, cpu_before) = (wait_at_rest(side).await?, cpu(side, side.manager)?);
    let mut times = Vec::new();
    for _ in 0..CHANGES {
        let (start, end) = change().await?;
        times.push(end - start);
        // A status may follow.
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let writes = wait_at_rest(side).await? - writes_before;
    let cpu = cpu(side, side.manager)?.saturating_sub(cpu_before);
    Ok(ChangeCosts {
        time: median(times),
        cpu: cpu / CHANGES,
        writes: writes as f64 / f64::from(CHANGES),
    })
}

/// Waits until the manager writes nothing; returns its number of writes so far.
async fn wait_at_rest(side: &Side) -> Result<usize> {
    let begin = Instant::now();
    let mut last = writes(side)?;
    loop {
        tokio::time::sleep(QUIET).await;
        let now = writes(side)?;
        if now == last {
            return Ok(now);
        }
        last = now;
        ensure!(begin.elapsed() < TIMEOUT, "the manager does not come to rest");
    }
}

/// Number of the manager's writes so far, without those of events and Leases.
fn writes(side: &Side) -> Result<usize> {
    let all = side.node.plane.audited_writes().context("no audit log")?;
    let counts = |write: &&Value| {
        write["user"]["username"] == "system:serviceaccount:kruise-system:kruise-manager"
            && write["objectRef"]["resource"] != "events"
    };
    Ok(all.iter().filter(counts).count())
}

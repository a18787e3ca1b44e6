//! Creation of Pods that SidecarSets select, of Pods that none selects, and of Pods that no webhook sees.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use kube::api::{DeleteParams, DynamicObject, PostParams};
use serde_json::{Value, json};

use crate::cluster::{self, NAMESPACE, ObjectKind, POD, SIDECAR_SET, median};
use crate::kwok::MAX_IN_FLIGHT;
use crate::side::Side;

/// Sets, each with one container.
const SETS: usize = 3;
const ROUNDS: usize = 3;
/// Namespace whose Pods no webhook of either implementation sees, because it has the label.
const BARE_NAMESPACE: &str = "bare";
const NO_WEBHOOK_LABEL: &str = "control-plane";
/// Label value of the Pods that the sets select.
const SELECTED: &str = "selected";
/// After the deletion of Pods, the work for it is done after this time.
const IDLE_TIME: Duration = Duration::from_secs(3);
/// Timeout for the sets to be known.
const TIMEOUT: Duration = Duration::from_secs(60);
const SERVICE_ACCOUNT: ObjectKind = ("", "v1", "ServiceAccount");
const NAMESPACES: ObjectKind = ("", "v1", "Namespace");

/// Pods that are created one at a time, in each round.
const ALONE: usize = 200;

/// The creation of many Pods, 32 at a time.
#[derive(Clone, Copy, Debug, Default)]
pub struct CreationTimes {
    /// All of them.
    pub total: Duration,
    /// Median of one.
    pub median: Duration,
    /// 99th percentile of one.
    pub p99: Duration,
    /// Median of one when no other is created at the same time.
    pub alone: Duration,
}

/// Medians of several rounds.
#[derive(Clone, Copy, Debug, Default)]
pub struct InjectionCosts {
    /// Pods in a namespace without webhooks.
    pub bare: CreationTimes,
    /// Pods that get three sidecars.
    pub selected: CreationTimes,
    /// Pods that no set selects, in a namespace with webhooks.
    pub unselected: CreationTimes,
}

/// Creates the namespace without webhooks.
pub async fn prepare(side: &Side) -> Result<()> {
    let labels = json!({ NO_WEBHOOK_LABEL: "bench" });
    let bare = json!({ "metadata": { "name": BARE_NAMESPACE, "labels": labels } });
    cluster::create(&side.client, NAMESPACES, None, bare).await?;
    let account = Some(BARE_NAMESPACE);
    cluster::wait_until(&side.client, SERVICE_ACCOUNT, account, "default", |_| true).await?;
    Ok(())
}

/// Creates `count` Pods of each kind several times, the kinds by turns; the sidecars come by policy, or by webhook.
pub async fn measure(side: &Side, count: usize, by_policy: bool) -> Result<InjectionCosts> {
    let names: Vec<String> = (0..SETS).map(|n| format!("inject-{n}")).collect();
    for name in &names {
        let set = json!({ "metadata": { "name": name }, "spec": set_spec(SELECTED, name, 1) });
        cluster::create(&side.client, SIDECAR_SET, None, set).await?;
    }
    for name in names.iter().filter(|_| by_policy) {
        let has_policy = |set: &Value| {
            let conditions = set["status"]["conditions"].as_array();
            let mut conditions = conditions.into_iter().flatten();
            conditions.any(|one| one["type"] == "InjectedByPolicy" && one["status"] == "True")
        };
        cluster::wait_until(&side.client, SIDECAR_SET, None, name, has_policy).await?;
    }
    if by_policy {
        // The API server looks for policies once a second.
        tokio::time::sleep(IDLE_TIME).await;
    }
    wait_injected(side, &pod("probe", SELECTED), SETS).await?;

    let kinds = [
        (BARE_NAMESPACE, SELECTED, 0),
        (NAMESPACE, SELECTED, SETS),
        (NAMESPACE, "unselected", 0),
    ];
    // The first requests open connections.
    for (namespace, app, _) in kinds {
        create_all(side, namespace, app, MAX_IN_FLIGHT * 4, MAX_IN_FLIGHT).await?;
    }
    let mut times = kinds.map(|_| Vec::new());
    for _ in 0..ROUNDS {
        for ((namespace, app, sidecars), times) in kinds.iter().zip(&mut times) {
            let (mut creation, pods) = create_all(side, namespace, app, count, MAX_IN_FLIGHT).await?;
            let complete = |pod: &DynamicObject| containers(&pod.data) == sidecars + 1;
            ensure!(
                pods.iter().all(complete),
                "a Pod in {namespace} with label {app} does not have {sidecars} sidecars"
            );
            let (alone, _) = create_all(side, namespace, app, ALONE, 1).await?;
            creation.alone = alone.median;
            times.push(creation);
        }
    }
    for name in &names {
        let sets = cluster::api(&side.client, SIDECAR_SET, None);
        sets.delete(name, &DeleteParams::default()).await?;
    }
    eprintln!("bare, selected, unselected: {times:.3?}");
    let [bare, selected, unselected] = times.map(|rounds| medians(&rounds));
    Ok(InjectionCosts {
        bare,
        selected,
        unselected,
    })
}

/// A set with one container, for Pods with this label `app`, which are all updated at once.
pub fn set_spec(app: &str, container: &str, version: u32) -> Value {
    json!({
        "selector": { "matchLabels": { "app": app } },
        "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": NAMESPACE } },
        "containers": containers_of_set(container, version),
        "volumes": [{ "name": "log", "emptyDir": {} }],
        "updateStrategy": { "type": "RollingUpdate", "maxUnavailable": "100%" },
    })
}

/// The containers of such a set.
pub fn containers_of_set(container: &str, version: u32) -> Value {
    json!([{
        "name": container,
        "image": format!("bench/sidecar:{version}"),
        "env": [{ "name": "TARGET", "value": "collector.example:4317" }],
        "resources": { "requests": { "cpu": "10m", "memory": "16Mi" }, "limits": { "memory": "64Mi" } },
        "volumeMounts": [{ "name": "log", "mountPath": "/var/log/app" }],
    }])
}

/// Waits until a new Pod would get that many sidecars.
pub async fn wait_injected(side: &Side, pod: &Value, sidecars: usize) -> Result<()> {
    let mut probe = pod.clone();
    (probe["apiVersion"], probe["kind"]) = ("v1".into(), "Pod".into());
    let probe: DynamicObject = serde_json::from_value(probe)?;
    let dry_run = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let pods = cluster::api(&side.client, POD, Some(NAMESPACE));
    let begin = Instant::now();
    let own = containers(&probe.data);
    loop {
        let created = pods.create(&dry_run, &probe).await?;
        if containers(&created.data) == own + sidecars {
            return Ok(());
        }
        ensure!(begin.elapsed() < TIMEOUT, "the sets are not injected");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn containers(pod: &Value) -> usize {
    pod["spec"]["containers"].as_array().map_or(0, Vec::len)
}

/// A Pod that no scheduler schedules, so that nothing but its creation is measured.
fn pod(name: &str, app: &str) -> Value {
    json!({
        "metadata": { "name": name, "labels": { "app": app } },
        "spec": { "schedulerName": "none", "containers": [{ "name": "app", "image": "bench/app:1" }] },
    })
}

/// Creates Pods and deletes them; returns how long the creation took, and the Pods.
async fn create_all(
    side: &Side,
    namespace: &str,
    app: &str,
    count: usize,
    in_flight: usize,
) -> Result<(CreationTimes, Vec<DynamicObject>)> {
    let start = Instant::now();
    let creations = stream::iter(0..count).map(|n| async move {
        let start = Instant::now();
        let created = cluster::create(
            &side.client,
            POD,
            Some(namespace),
            pod(&format!("{app}-{n}"), app),
        );
        created.await.map(|pod| (start.elapsed(), pod))
    });
    let created = creations.buffer_unordered(in_flight);
    let created: Vec<(Duration, DynamicObject)> = created.try_collect().await?;
    let total = start.elapsed();
    let (mut times, pods): (Vec<Duration>, Vec<_>) = created.into_iter().unzip();
    times.sort_unstable();
    let p99 = times.get(times.len() * 99 / 100).copied();
    let p99 = p99.context("no Pods were created")?;
    let median = median(times);
    // They are on no node, so they are gone at once.
    delete_pods(side, namespace, (0..count).map(|n| format!("{app}-{n}"))).await?;
    tokio::time::sleep(IDLE_TIME).await;
    let alone = Duration::ZERO;
    Ok((
        CreationTimes {
            total,
            median,
            p99,
            alone,
        },
        pods,
    ))
}

/// Deletes Pods; each one separately, because the deletion of a collection may take longer than a request may.
pub async fn delete_pods(side: &Side, namespace: &str, names: impl Iterator<Item = String>) -> Result<()> {
    let api = cluster::api(&side.client, POD, Some(namespace));
    let api = &api;
    let deletions = stream::iter(names).map(|name| async move {
        let params = DeleteParams::default();
        api.delete(&name, &params).await.map(drop)
    });
    let deleted = deletions.buffer_unordered(MAX_IN_FLIGHT);
    Ok(deleted.try_collect().await?)
}

fn medians(rounds: &[CreationTimes]) -> CreationTimes {
    let of = |read: fn(&CreationTimes) -> Duration| median(rounds.iter().map(read).collect());
    CreationTimes {
        total: of(|times| times.total),
        median: of(|times| times.median),
        p99: of(|times| times.p99),
        alone: of(|times| times.alone),
    }
}

//! Rows on container recreation.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use kruise_cri::Runtime as _;
use kruise_cri::client::CriClient as Cri;
use serde_json::{Value, json};

use crate::cluster::{self, POD, RECREATE_REQUEST, median, ready};
use crate::rows::Figures;
use crate::side::Side;

const RUNS: usize = 5;
const DEFAULT: Option<&str> = Some(cluster::NAMESPACE);

pub async fn measure(side: &Side, figures: &mut Figures) -> Result<()> {
    let (mut exits, mut completed, mut own_times, mut writes) = (vec![], vec![], vec![], vec![]);
    let mut kubelet = vec![];
    for run in 0..RUNS {
        kubelet.push(kubelet_restart(side, &format!("kubelet-{run}")).await?);
        let one = recreate(side, &format!("one-{run}"), "kruise-test/term:1", 1).await?;
        exits.push(one.first_exit);
        completed.push(one.completed);
        own_times.push(one.without_kubelet);
        if one.writes.len() > writes.len() {
            writes = one.writes;
        }
    }
    figures.kubelet_restart = Some(median(kubelet));
    figures.recreate_exit = Some(median(exits));
    figures.recreate_completed = Some(median(completed));
    figures.recreate_own = Some(median(own_times));
    eprintln!("writes of a request: {}", writes.join(", "));
    figures.recreate_writes = Some(writes.len());
    let mut three = vec![];
    for run in 0..3 {
        three.push(
            recreate(side, &format!("three-{run}"), "kruise-test/slow-stop:1", 3)
                .await?
                .completed,
        );
    }
    figures.recreate_three = Some(median(three));
    Ok(())
}

struct RecreateTimes {
    /// From create until the first task exited.
    first_exit: Duration,
    /// From create until the request's phase is Completed.
    completed: Duration,
    /// The part of that without kubelet's: before the exit, and after the Pod was observed Ready again.
    without_kubelet: Duration,
    /// Writes of all but kubelet, the user's create included, without events.
    writes: Vec<String>,
}

/// Creates a new Pod, as kubelet delays a container's second restart; returns the IDs of its containers.
async fn create_pod(side: &Side, name: &str, image: &str, containers: &[String]) -> Result<Vec<String>> {
    let container_specs: Vec<Value> = containers
        .iter()
        .map(|n| json!({ "name": n, "image": image }))
        .collect();
    let pod = json!({ "metadata": { "name": name }, "spec": { "containers": container_specs, "terminationGracePeriodSeconds": 1 } });
    cluster::create(&side.client, POD, DEFAULT, pod).await?;
    let pod = cluster::wait_until(&side.client, POD, DEFAULT, name, ready).await?;
    // The shells in the images set their traps a moment after the start.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let statuses = pod.data["status"]["containerStatuses"].as_array().cloned();
    let id = |s: &Value| Some(s["containerID"].as_str()?.rsplit_once("://")?.1.to_owned());
    Ok(statuses.iter().flatten().filter_map(id).collect())
}

/// Kubelet's part: from the stop of a container that no request recreates until its Pod is observed Ready again.
async fn kubelet_restart(side: &Side, name: &str) -> Result<Duration> {
    let ids = create_pod(side, name, "kruise-test/term:1", &["c0".to_owned()]).await?;
    let id = ids.first().context("a Pod without container")?;
    let mut pods = cluster::watch(&side.client, POD, DEFAULT).await?;
    let (cri, _) = Cri::connect(&side.node.runtime.socket()).await?;
    cri.stop_container(id, Duration::from_secs(10)).await?;
    let stopped = Instant::now();
    let (ready_at, _) = cluster::wait_for(&mut pods, name, restarted).await?;
    delete(side, name).await?;
    Ok(ready_at - stopped)
}

async fn delete(side: &Side, name: &str) -> Result<()> {
    let pods = cluster::api(&side.client, POD, DEFAULT);
    pods.delete(name, &Default::default()).await?;
    Ok(())
}

async fn recreate(side: &Side, name: &str, image: &str, containers: usize) -> Result<RecreateTimes> {
    let names: Vec<String> = (0..containers).map(|n| format!("c{n}")).collect();
    let ids = create_pod(side, name, image, &names).await?;
    let mut requests = cluster::watch(&side.client, RECREATE_REQUEST, DEFAULT).await?;
    let mut pods = cluster::watch(&side.client, POD, DEFAULT).await?;
    let container_list: Vec<Value> = names.iter().map(|n| json!({ "name": n })).collect();
    let spec = json!({ "podName": name, "containers": container_list, "strategy": { "terminationGracePeriodSeconds": 10 } });
    // The runtime reports the end by the same machine's clock.
    let (start, clock) = (Instant::now(), Timestamp::now());
    cluster::create(
        &side.client,
        RECREATE_REQUEST,
        DEFAULT,
        json!({ "metadata": { "name": name }, "spec": spec }),
    )
    .await?;
    let is_complete = |r: &Value| r["status"]["completionTime"].is_string();
    let (completed_at, request) = cluster::wait_for(&mut requests, name, is_complete).await?;
    ensure!(
        request["status"]["phase"] == "Completed",
        "{name}: {}",
        request["status"]
    );
    let (ready_at, _) = cluster::wait_for(&mut pods, name, restarted).await?;
    let first_exit = Duration::try_from(first_exit_time(side, &ids).await?.duration_since(clock))?;
    let completed = completed_at - start;
    let without_kubelet = first_exit + completed_at.saturating_duration_since(ready_at);
    // Late writes count too.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let writes = request_writes(side, name)?;
    delete(side, name).await?;
    Ok(RecreateTimes {
        first_exit,
        completed,
        without_kubelet,
        writes,
    })
}

fn restarted(pod: &Value) -> bool {
    ready(pod) && pod["status"]["containerStatuses"][0]["restartCount"].as_i64() >= Some(1)
}

/// When the first of these containers ended, from the runtime.
async fn first_exit_time(side: &Side, containers: &[String]) -> Result<Timestamp> {
    let (cri, _) = Cri::connect(&side.node.runtime.socket()).await?;
    let mut finished = vec![];
    for id in containers {
        finished.extend(cri.container_status(id).await?.and_then(|s| s.finished_at));
    }
    finished.into_iter().min().context("no container ended")
}

/// Accepted writes to the request and, while it existed, to its Pod, without those of kubelet and the control plane.
fn request_writes(side: &Side, name: &str) -> Result<Vec<String>> {
    let all = side.node.plane.audited_writes()?;
    let user = |w: &Value| w["user"]["username"].as_str().unwrap_or_default().to_owned();
    let mut request_exists = false;
    let mut found = Vec::new();
    for write in &all {
        let object = &write["objectRef"];
        let resource = object["resource"].as_str().unwrap_or_default();
        request_exists |= resource == "containerrecreaterequests" && object["name"] == name;
        let excluded_users = [
            "system:node:",
            "system:serviceaccount:kube-system:",
            "system:kube-",
        ];
        let is_counted_user =
            !excluded_users.iter().any(|t| user(write).starts_with(t)) && user(write) != "admin";
        let is_counted = is_counted_user && ["containerrecreaterequests", "pods"].contains(&resource);
        if request_exists
            && is_counted
            && object["name"] == name
            && write["responseStatus"]["code"].as_i64() < Some(300)
        {
            let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
            let (verb, part) = (text(&write["verb"]), text(&object["subresource"]));
            found.push(format!("{} {verb} {resource}/{part}", user(write)));
        }
    }
    Ok(found)
}

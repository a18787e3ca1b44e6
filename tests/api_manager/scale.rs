//! A job over a thousand nodes whose daemons respond at once: it completes, with a limited number of writes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::node_image::NodeImage;
use kruise_cluster::Cluster;
use kube::ResourceExt;
use kube::api::{Api, PostParams};
use kube::runtime::watcher;
use serde_json::json;
use testbed::cluster::Component;

use crate::test_cluster::{
    PullOutcome, TestCluster, completed, create, job, jobs, report_pull_of, set_node_ready, wait_until,
};
use crate::waits::watch_events;

const NODES: usize = 1000;

fn node_name(n: usize) -> String {
    format!("scale-{n:04}")
}

/// Creates `count` ready Nodes and waits for their NodeImages.
async fn create_nodes(admin: &Cluster, count: usize) {
    let nodes = Api::<Node>::all(admin.client.clone());
    let images = Api::<NodeImage>::all(admin.client.clone());
    futures::stream::iter(0..count)
        .for_each_concurrent(32, |n| {
            let nodes = &nodes;
            async move {
                let node = serde_json::from_value(json!({ "metadata": { "name": node_name(n) } })).unwrap();
                nodes.create(&PostParams::default(), &node).await.unwrap();
                set_node_ready(admin, &node_name(n), true).await;
            }
        })
        .await;
    for n in 0..count {
        wait_until(&images, &node_name(n), "there", |_: &NodeImage| true).await;
    }
}

/// Number of writes of each NodeImage, as the watch shows them.
type WriteCounts = Arc<Mutex<HashMap<String, usize>>>;

#[tokio::test]
async fn thousand_node_job_writes_each_spec_once() {
    let cluster = TestCluster::new();
    let mut manager = cluster.manager("kruise-manager");
    manager.start().unwrap();
    let admin = cluster.admin().await;
    create_nodes(&admin, NODES).await;
    let writes = WriteCounts::default();
    let daemons = tokio::spawn(run_fake_daemons(admin.clone(), Arc::clone(&writes)));
    let job_writes = tokio::spawn(count_job_writes(jobs(&admin)));
    let (start, cpu) = (Instant::now(), cpu_seconds(&manager));
    create(
        &jobs(&admin),
        job("scale", json!({ "image": "nginx:scale", "parallelism": NODES })),
    )
    .await;
    let ended = wait_until(&jobs(&admin), "scale", "ended", completed).await;
    let took = start.elapsed();
    let status = ended.status.unwrap();
    assert_eq!(
        (status.desired, status.succeeded, status.failed, status.active),
        (1000, 1000, 0, 0)
    );
    let job_writes = job_writes.await.unwrap();
    daemons.abort();
    let max_writes = writes.lock().unwrap().values().copied().max().unwrap();
    let cpu = cpu_seconds(&manager) - cpu;
    println!("1,000 nodes in {took:?}, {cpu:.2} s of CPU, {job_writes} writes of the job's status");
    assert_eq!(max_writes, 1, "spec writes of one node");
    // One write whenever nothing changes for 100 ms, and at least one each second; a busy machine needs more of both.
    assert!(
        job_writes <= NODES / 10,
        "{job_writes} writes of the job's status"
    );
}

#[tokio::test]
async fn leader_crash_during_job_repeats_no_spec_write() {
    const NODE_COUNT: usize = 200;
    let cluster = TestCluster::new();
    let admin = cluster.admin().await;
    let mut first = cluster.manager("kruise-manager-1");
    first.start().unwrap();
    first.wait_for_readyz_text("leading");
    let mut second = cluster.manager("kruise-manager-2");
    second.start().unwrap();
    create_nodes(&admin, NODE_COUNT).await;
    let writes = WriteCounts::default();
    let daemons = tokio::spawn(run_fake_daemons(admin.clone(), Arc::clone(&writes)));
    let spec = json!({ "image": "nginx:scale", "parallelism": 4 });
    create(&jobs(&admin), job("scale", spec)).await;
    wait_until(&jobs(&admin), "scale", "begun", |j: &ImagePullJob| {
        j.status.as_ref().is_some_and(|s| s.succeeded >= 8)
    })
    .await;
    first.kill().unwrap();
    let ended = wait_until(&jobs(&admin), "scale", "ended", completed).await;
    daemons.abort();
    let status = ended.status.unwrap();
    assert_eq!((status.desired, status.succeeded, status.failed), (200, 200, 0));
    let (made, started) = (ended.metadata.creation_timestamp, status.start_time);
    assert!(started >= made, "started at {started:?}, made at {made:?}");
    let writes = writes.lock().unwrap();
    assert_eq!(writes.len(), NODE_COUNT);
    assert!(writes.values().all(|n| *n == 1), "{writes:?}");
}

/// CPU time of the manager.
fn cpu_seconds(manager: &Component) -> f64 {
    /// Ticks per second in `/proc`, on every Linux.
    const TICKS: f64 = 100.0;
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", manager.pid().unwrap())).unwrap();
    // After the name, which may contain spaces: utime and stime are fields 14 and 15 of the line.
    let fields = stat.rsplit_once(')').unwrap().1.split_whitespace();
    fields
        .skip(11)
        .take(2)
        .map(|f| f.parse::<f64>().unwrap())
        .sum::<f64>()
        / TICKS
}

/// Reports success for every NodeImage with a request, and counts the writes of its spec.
async fn run_fake_daemons(admin: Cluster, writes: WriteCounts) {
    let images = Api::<NodeImage>::all(admin.client.clone());
    watch_events(images, watcher::Config::default())
        .filter_map(async |event| match event {
            watcher::Event::Apply(image) | watcher::Event::InitApply(image) => {
                Some(image).filter(|image| !image.spec.images.is_empty())
            }
            _ => None,
        })
        .for_each_concurrent(32, |image| {
            let (admin, writes) = (&admin, &writes);
            async move {
                // Each write of the spec raises the generation, which begins at 1.
                let generation = image.metadata.generation.unwrap_or(1);
                let written = usize::try_from(generation - 1).unwrap();
                let previous = writes.lock().unwrap().insert(image.name_any(), written);
                if previous.is_none() {
                    report_pull_of(admin, &image, PullOutcome::Succeeded).await;
                }
            }
        })
        .await;
}

/// Counts the writes of the job's status until it ends.
async fn count_job_writes(jobs: Api<ImagePullJob>) -> usize {
    let mut events = std::pin::pin!(watch_events(jobs, watcher::Config::default()));
    let mut writes = 0;
    while let Some(event) = events.next().await {
        if let watcher::Event::Apply(job) | watcher::Event::InitApply(job) = event
            && job.name_any() == "scale"
            && job.status.is_some()
        {
            writes += 1;
            if completed(&job) {
                return writes;
            }
        }
    }
    panic!("the watch of the job ended")
}

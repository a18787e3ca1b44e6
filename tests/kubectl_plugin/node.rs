//! `node`: pulls, requests and probes of one node.

use k8s_openapi::api::core::v1::Node;
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::node_image::NodeImage;
use kruise_api::node_pod_probe::NodePodProbe;
use kube::Api;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::ChildStdout;

use crate::plugin::{cluster_without_manager, run, start, wait};
use crate::test_cluster::{WAIT_TIMEOUT, api, create, merge_status};

#[tokio::test]
async fn node_shows_pulls_recreates_and_probes() {
    let cluster = cluster_without_manager();
    let admin = cluster.admin().await;
    create(
        &Api::<Node>::all(admin.client.clone()),
        json!({ "metadata": { "name": "busy" } }),
    )
    .await;
    let images = Api::<NodeImage>::all(admin.client.clone());
    let tag = |tag: &str| json!({ "tag": tag, "version": 0 });
    let spec = json!({ "images": { "nginx": { "tags": [tag("1"), tag("2"), tag("3")] } } });
    create(&images, json!({ "metadata": { "name": "busy" }, "spec": spec })).await;
    let state = |tag: &str, phase: &str, progress: i32, message: &str| json!({ "tag": tag, "version": 0, "phase": phase, "progress": progress, "message": message });
    let tags = [
        state("1", "Succeeded", 100, ""),
        state("2", "Pulling", 40, ""),
        state("3", "Failed", 0, "no\u{1b}[2J such image"),
    ];
    merge_status(
        &images,
        "busy",
        json!({ "desired": 3, "imageStatuses": { "nginx": { "tags": tags } } }),
    )
    .await;
    let requests: Api<ContainerRecreateRequest> = api(&admin);
    for (name, node) in [("here", "busy"), ("elsewhere", "other")] {
        let labels = json!({ "crr.apps.kruise.io/node-name": node, "crr.apps.kruise.io/active": "true" });
        let spec = json!({ "podName": "web-1", "containers": [{ "name": "app" }] });
        create(
            &requests,
            json!({ "metadata": { "name": name, "labels": labels }, "spec": spec }),
        )
        .await;
    }
    let probe =
        json!({ "name": "m#p", "containerName": "app", "probe": { "exec": { "command": ["true"] } } });
    let pod = json!({ "name": "web-1", "namespace": "default", "uid": "u", "IP": "", "probes": [probe] });
    let probes = Api::<NodePodProbe>::all(admin.client.clone());
    create(
        &probes,
        json!({ "metadata": { "name": "busy" }, "spec": { "podProbes": [pod] } }),
    )
    .await;
    let results = json!([{ "name": "m#p", "state": "Failed" }]);
    let pod = json!({ "name": "web-1", "namespace": "default", "uid": "u", "probeStates": results });
    merge_status(&probes, "busy", json!({ "podProbeStatuses": [pod] })).await;

    let text = run(cluster, &["node", "busy", "-A"]).await.expect(0).stdout;
    assert!(text.contains("nginx:2   Pulling   40%        -\n"), "{text}");
    assert!(
        text.contains("nginx:3   Failed    0%         no\\u{1b}[2J such image\n"),
        "{text}"
    );
    assert!(text.contains("1 more image(s) are on the node.\n"), "{text}");
    assert!(
        text.contains("default     here      web-1   app          Pending   -\n"),
        "{text}"
    );
    assert!(
        text.contains("Pod probes: 1 in 1 Pod(s): 0 succeeded, 1 failed, 0 unknown.\n"),
        "{text}"
    );
    assert!(!text.contains("elsewhere"), "{text}");

    let status = run(cluster, &["node", "busy", "-o", "json"])
        .await
        .expect(0)
        .json();
    assert_eq!(
        (&status["pulled"], &status["pulls"][0]["progress"]),
        (&json!(1), &json!(40))
    );
    assert_eq!(status["recreates"][0]["containers"], json!(["app"]));
    assert_eq!(
        status["probes"],
        json!({ "pods": 1, "total": 1, "succeeded": 0, "failed": 1, "unknown": 0 })
    );
}

/// The lines that the plugin prints, up to one that contains `text`.
async fn read_until(lines: &mut Lines<BufReader<ChildStdout>>, text: &str) -> Vec<String> {
    let reading = async {
        let mut read = Vec::new();
        loop {
            let line = lines.next_line().await.unwrap().expect("the plugin has ended");
            let found = line.contains(text);
            read.push(line);
            if found {
                return read;
            }
        }
    };
    let read = tokio::time::timeout(WAIT_TIMEOUT, reading).await;
    read.unwrap_or_else(|_| panic!("no line with {text:?}"))
}

#[tokio::test]
async fn watched_node_is_printed_at_every_change() {
    let cluster = cluster_without_manager();
    let admin = cluster.admin().await;
    let images = Api::<NodeImage>::all(admin.client.clone());
    let spec = json!({ "images": { "redis": { "tags": [{ "tag": "1", "version": 0 }] } } });
    create(
        &images,
        json!({ "metadata": { "name": "watched" }, "spec": spec }),
    )
    .await;
    let pulling = |progress: i32| {
        let tag = json!({ "tag": "1", "version": 0, "phase": "Pulling", "progress": progress });
        json!({ "desired": 1, "imageStatuses": { "redis": { "tags": [tag] } } })
    };
    merge_status(&images, "watched", pulling(10)).await;
    let mut follower = start(cluster, &["node", "watched", "--watch"]);
    let mut lines = BufReader::new(follower.stdout.take().unwrap()).lines();
    read_until(&mut lines, "redis:1   Pulling   10%").await;
    merge_status(&images, "watched", pulling(60)).await;
    let second = read_until(&mut lines, "redis:1   Pulling   60%").await;
    let headers = second.iter().filter(|line| line.starts_with("IMAGE")).count();
    assert_eq!(headers, 1, "printed only when something changed: {second:?}");
    let pid = Pid::from_raw(i32::try_from(follower.id().unwrap()).unwrap());
    kill(pid, Signal::SIGINT).unwrap();
    wait(follower).await.expect(130);
}

/// As with `| head -1`, also if the node does not change any more.
#[tokio::test]
async fn watch_ends_when_nothing_reads_it() {
    let cluster = cluster_without_manager();
    let images = Api::<NodeImage>::all(cluster.admin().await.client.clone());
    create(&images, json!({ "metadata": { "name": "unread" }, "spec": {} })).await;
    let mut follower = start(cluster, &["node", "unread", "--watch"]);
    let mut lines = BufReader::new(follower.stdout.take().unwrap()).lines();
    read_until(&mut lines, "Pod probes: none.").await;
    drop(lines);
    let output = wait(follower).await.expect(0);
    assert_eq!(output.stderr, "");
}

#[tokio::test]
async fn unknown_node_is_not_found() {
    let cluster = cluster_without_manager();
    let output = run(cluster, &["node", "nowhere"]).await.expect(1);
    assert_eq!(
        output.stderr,
        "Error from server (NotFound): nodes \"nowhere\" not found\n"
    );
    let admin = cluster.admin().await;
    create(
        &Api::<Node>::all(admin.client.clone()),
        json!({ "metadata": { "name": "fresh" } }),
    )
    .await;
    let output = run(cluster, &["node", "fresh", "-o", "json"]).await.expect(1);
    let errors: Value = output.json()["errors"].clone();
    assert!(
        errors[0].as_str().unwrap().starts_with("NodeImage: not found"),
        "{errors}"
    );
}

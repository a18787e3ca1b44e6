//! `restart`: requests for one Pod and for the Pods of a CloneSet, with our manager.

use std::time::Duration;

use futures::StreamExt;
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_cluster::Cluster;
use kube::api::{ListParams, PostParams};
use kube::runtime::watcher;
use kube::{Api, ResourceExt};
use serde_json::json;
use tokio::task::JoinHandle;

use crate::fixture::Fixture;
use crate::plugin::{run, start, wait};
use crate::test_cluster::{WAIT_TIMEOUT, api, create_pod, merge_status, shared_cluster};
use crate::waits::watch_events;

/// Waits until requests are admitted: without a webhook they are refused.
async fn wait_for_admission(admin: &Cluster, pod: &str) {
    let requests: Api<ContainerRecreateRequest> = api(admin);
    let spec = json!({ "podName": pod, "containers": [{ "name": "app" }] });
    let request = json!({ "metadata": { "name": "probe" }, "spec": spec });
    let request = serde_json::from_value(request).unwrap();
    let params = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let admitted = async {
        while requests.create(&params, &request).await.is_err() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(WAIT_TIMEOUT, admitted)
        .await
        .expect("requests are refused");
}

/// Plays the daemon: ends each request of a namespace; `fails` are the Pods whose requests fail.
fn play_daemon(admin: &Cluster, namespace: &str, fails: Vec<String>) -> JoinHandle<()> {
    let requests = Api::<ContainerRecreateRequest>::namespaced(admin.client.clone(), namespace);
    let now = admin.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    tokio::spawn(async move {
        let mut events = std::pin::pin!(watch_events(requests.clone(), watcher::Config::default()));
        while let Some(event) = events.next().await {
            let (watcher::Event::Apply(request) | watcher::Event::InitApply(request)) = event else {
                continue;
            };
            if request
                .status
                .as_ref()
                .is_some_and(|status| status.completion_time.is_some())
            {
                continue;
            }
            let failed = fails.contains(&request.spec.pod_name);
            let (phase, message) = if failed {
                ("Failed", "no\u{1b}[2J runtime")
            } else {
                ("Succeeded", "")
            };
            let states = json!([{ "name": "app", "phase": phase, "message": message, "isKilled": true }]);
            let status =
                json!({ "phase": "Completed", "completionTime": now, "containerRecreateStates": states });
            merge_status(&requests, &request.name_any(), status).await;
        }
    })
}

#[tokio::test]
async fn restart_of_a_pod_is_followed() {
    let cluster = shared_cluster();
    let admin = cluster.admin().await;
    create_pod(&admin, "plugin-pod", "n-plugin", json!({}), false).await;
    wait_for_admission(&admin, "plugin-pod").await;

    let output = run(cluster, &["restart", "none", "-c", "app"]).await.expect(1);
    assert_eq!(
        output.stderr,
        "Error from server (NotFound): pods \"none\" not found\n"
    );
    let output = run(cluster, &["restart", "plugin-pod", "-c", "other"])
        .await
        .expect(1);
    assert!(
        output
            .stderr
            .starts_with("error: container other is not in pod plugin-pod"),
        "{output:?}"
    );

    let silent = run(
        cluster,
        &["restart", "plugin-pod", "-c", "app", "--timeout", "1s"],
    )
    .await
    .expect(2);
    assert!(silent.stderr.contains("pod/plugin-pod: waiting"), "{silent:?}");
    assert!(
        silent
            .stderr
            .contains("0 of 1 Pod(s) restarted, 1 in progress. Requests in progress continue"),
        "{silent:?}"
    );

    let daemon = play_daemon(&admin, "default", Vec::new());
    let output = run(cluster, &["restart", "pod/plugin-pod", "-c", "app"])
        .await
        .expect(0);
    let lines: Vec<&str> = output.stdout.lines().collect();
    assert!(
        lines[0].starts_with("containerrecreaterequest.apps.kruise.io/plugin-pod-"),
        "{output:?}"
    );
    assert_eq!(lines[1..], ["pod/plugin-pod restarted"]);
    daemon.abort();
}

#[tokio::test]
async fn restart_of_a_cloneset_stops_at_the_first_failure() {
    let fixture = Fixture::new(shared_cluster(), "plugin-restart").await;
    fixture.create_cloneset("web", json!({})).await;
    fixture.wait_settled("web").await;
    let pods = fixture.pods_of("web").await;
    let second = pods[1]["metadata"]["name"].as_str().unwrap().to_owned();
    create_pod(&fixture.admin, "plugin-admission", "n-plugin", json!({}), false).await;
    wait_for_admission(&fixture.admin, "plugin-admission").await;

    let daemon = play_daemon(&fixture.admin, "plugin-restart", vec![second.clone()]);
    let restart = ["restart", "clone/web", "-c", "app", "-n", "plugin-restart"];
    let output = run(fixture.cluster, &restart).await.expect(1);
    assert!(
        output
            .stderr
            .contains(&format!("pod/{second}: error: restart failed: ")),
        "{output:?}"
    );
    assert!(output.stderr.contains("no\\u{1b}[2J runtime"), "{output:?}");
    assert!(
        output
            .stderr
            .ends_with("error: 1 of 3 Pod(s) restarted, 1 failed, 1 not started\n"),
        "{output:?}"
    );
    let child = start(
        fixture.cluster,
        &[&restart[..], &["--continue-on-failure", "--max-unavailable", "2"]].concat(),
    );
    let output = wait(child).await.expect(1);
    assert!(
        output
            .stderr
            .ends_with("error: 2 of 3 Pod(s) restarted, 1 failed\n"),
        "{output:?}"
    );
    daemon.abort();
    let requests =
        Api::<ContainerRecreateRequest>::namespaced(fixture.admin.client.clone(), "plugin-restart");
    let count = requests.list(&ListParams::default()).await.unwrap().items.len();
    assert_eq!(count, 5);

    let _daemon = play_daemon(&fixture.admin, "plugin-restart", Vec::new());
    let output = run(fixture.cluster, &restart).await.expect(0);
    assert!(output.stdout.ends_with("3 of 3 Pod(s) restarted\n"), "{output:?}");
    let output = run(fixture.cluster, &["restart", "clone/none", "-c", "app"])
        .await
        .expect(1);
    assert_eq!(
        output.stderr,
        "Error from server (NotFound): clonesets.apps.kruise.io \"none\" not found\n"
    );
}

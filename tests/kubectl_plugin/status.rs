//! `status`: components, CRDs, and objects that wait.

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use kruise_api::Kind;
use kruise_api::cloneset::CloneSet;
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::image_pull_job::ImagePullJob;
use kruise_cluster::Cluster;
use kube::Api;
use serde_json::{Value, json};

use crate::plugin::{cluster_without_manager, run, run_as};
use crate::test_cluster::{TestCluster, api, create, merge_status};

/// Text with which a tenant would clear the screen of an administrator and write a line of its own.
const HOSTILE: &str = "\u{1b}[2J\u{9b}31m\r\nmanager   2/2   Ready\u{202e}";

fn condition(type_: &str, message: &str) -> Value {
    json!({ "type": type_, "status": "True", "reason": "Test", "message": message,
        "lastTransitionTime": "2026-01-01T00:00:00Z" })
}

fn system<K: crate::test_cluster::Namespaced>(admin: &Cluster) -> Api<K> {
    Api::namespaced(admin.client.clone(), "kruise-system")
}

#[tokio::test]
async fn status_shows_components_and_what_waits() {
    let cluster: &TestCluster = cluster_without_manager();
    let admin = cluster.admin().await;
    let lease =
        json!({ "metadata": { "name": "kruise-manager" }, "spec": { "holderIdentity": "manager-1_x" } });
    create(&system::<Lease>(&admin), lease).await;
    let daemons = json!({ "desiredNumberScheduled": 2, "numberReady": 1, "currentNumberScheduled": 2,
        "numberMisscheduled": 0 });
    merge_status(&system::<DaemonSet>(&admin), "kruise-daemon", daemons).await;
    let pods = system::<Pod>(&admin);
    let daemon = json!({ "metadata": { "name": "kruise-daemon-a", "labels": { "control-plane": "daemon" } },
        "spec": { "nodeName": "node-a", "containers": [{ "name": "daemon", "image": "i" }],
            "automountServiceAccountToken": false, "serviceAccountName": "kruise-daemon" } });
    create(&pods, daemon).await;
    let set = json!({ "metadata": { "name": "web" }, "spec": { "selector": { "matchLabels": { "a": "b" } },
        "template": { "metadata": { "labels": { "a": "b" } },
            "spec": { "containers": [{ "name": "c", "image": "i" }] } } } });
    let sets: Api<CloneSet> = api(&admin);
    create(&sets, set).await;
    let status = json!({ "replicas": 0, "readyReplicas": 0, "availableReplicas": 0, "updatedReplicas": 0,
        "updatedReadyReplicas": 0, "conditions": [condition("Waiting", HOSTILE)] });
    merge_status(&sets, "web", status).await;
    let jobs: Api<ImagePullJob> = api(&admin);
    for (name, conditions) in [
        ("busy", json!([])),
        ("bad", json!([condition("Failed", "node-a: no such image")])),
    ] {
        let job =
            json!({ "metadata": { "name": name }, "spec": { "image": "nginx:1", "completionPolicy": {} } });
        create(&jobs, job).await;
        merge_status(
            &jobs,
            name,
            json!({ "desired": 3, "succeeded": 1, "conditions": conditions }),
        )
        .await;
    }
    let requests: Api<ContainerRecreateRequest> = api(&admin);
    let request = json!({ "metadata": { "name": "again" }, "spec": { "podName": "p", "containers": [{ "name": "c" }] } });
    create(&requests, request).await;

    let text = run(cluster, &["status"]).await.expect(0).stdout;
    assert!(
        text.contains("daemon      1/2     NotReady   not ready on 1 node(s), 0 of 2 updated"),
        "{text}"
    );
    assert!(text.contains("node-a   kruise-daemon-a   Pending"), "{text}");
    assert!(
        text.contains("manager     0/2     NotReady   leader is manager-1_x"),
        "{text}"
    );
    let kinds = Kind::ALL.len();
    assert!(
        text.contains(&format!("CRDs        {kinds}/{kinds}     Ready")),
        "{text}"
    );
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
    assert!(
        text.contains("\\u{1b}[2J\\u{9b}31m\\r\\nmanager   2/2   Ready\\u{202e}"),
        "{text}"
    );

    let output = run(cluster, &["status", "-o", "json"]).await.expect(0);
    assert!(
        output.stdout.chars().all(|c| c == '\n' || !c.is_control()),
        "{output:?}"
    );
    let status = output.json();
    assert_eq!(status["leader"], "manager-1_x");
    let expected = json!({ "desired": 2, "ready": 1, "updated": 0,
        "notReady": [{ "node": "node-a", "pod": "kruise-daemon-a", "reason": "Pending" }] });
    assert_eq!(status["daemon"], expected);
    assert_eq!(
        (&status["webhook"]["desired"], &status["errors"]),
        (&json!(2), &json!([]))
    );
    let waiting = status["waiting"].as_array().unwrap();
    let find = |name: &str| waiting.iter().find(|object| object["name"] == name).unwrap();
    assert_eq!(find("web")["message"], HOSTILE);
    assert_eq!(
        (&find("bad")["state"], &find("bad")["message"]),
        (&json!("Failed"), &json!("node-a: no such image"))
    );
    assert_eq!(
        (&find("busy")["state"], &find("again")["state"]),
        (&json!("Active"), &json!("Pending"))
    );

    let other = run(cluster, &["status", "-o", "json", "-n", "kube-system"])
        .await
        .expect(0);
    assert_eq!(other.json()["waiting"], json!([]));
    let all = run(cluster, &["status", "-A", "-o", "json", "-n", "kube-system"])
        .await
        .expect(0);
    assert_ne!(all.json()["waiting"], json!([]));
}

#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = std::process::Command::new(support::binaries::kubectl_plugin())
        .arg("--help")
        .stdout(full)
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.starts_with("error: cannot write: "), "{stderr}");
}

#[tokio::test]
async fn forbidden_parts_are_named() {
    let cluster = cluster_without_manager();
    let kubeconfig = cluster
        .plane
        .kubeconfig_as("plugin-tenant", "tenant", &[])
        .unwrap();
    let output = run_as(&kubeconfig, &["status", "-o", "json"]).await.expect(1);
    let errors = output.json()["errors"].as_array().unwrap().clone();
    assert!(errors.len() >= 9, "{errors:?}");
    assert!(errors.iter().all(|error| {
        error
            .as_str()
            .unwrap()
            .contains("Error from server (Forbidden): ")
    }));
    assert!(
        output.stderr.contains("part(s) of the status could not be read"),
        "{}",
        output.stderr
    );
    let output = run_as(&kubeconfig, &["pull", "nginx:1"]).await.expect(1);
    assert!(
        output
            .stderr
            .starts_with("Error from server (Forbidden): imagepulljobs"),
        "{output:?}"
    );
}

#[tokio::test]
async fn unreachable_server_and_bad_arguments_are_errors() {
    let cluster = cluster_without_manager();
    let output = run(cluster, &["status", "--context", "none"]).await.expect(1);
    assert!(output.stderr.starts_with("error: kubeconfig"), "{output:?}");
    for args in [
        &["status", "-n", "a/b"][..],
        &["node", "../x"],
        &["pull", "NOT VALID"],
        &["pull", "nginx", "--nodes", "a", "--selector", "b=c"],
        &["restart", "web"],
        &["restart", "sidecarset/a", "-c", "b"],
        &["rollout", "pause", "pod/a"],
        &["rollout", "undo", "clone/a", "--to-revision", "x\u{1b}[2J"],
    ] {
        let output = run(cluster, args).await.expect(2);
        assert!(output.stderr.starts_with("error: "), "{args:?}: {output:?}");
        assert!(!output.stderr.contains('\u{1b}'), "{output:?}");
    }
    let text = std::fs::read_to_string(cluster.plane.kubeconfig()).unwrap();
    let nowhere = text.replace(cluster.plane.server(), "https://127.0.0.1:1");
    let file = cluster.plane.dir().join("nowhere.kubeconfig");
    std::fs::write(&file, nowhere).unwrap();
    let output = run_as(&file, &["rollout", "history", "clone/web"])
        .await
        .expect(1);
    assert!(
        output.stderr.starts_with("Unable to connect to the server: "),
        "{output:?}"
    );
}

/// kubectl finds the plugin on PATH, and hands its own environment on.
#[tokio::test]
async fn kubectl_runs_the_plugin() {
    let cluster = cluster_without_manager();
    let folder = std::path::Path::new(support::binaries::kubectl_plugin())
        .parent()
        .unwrap();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
    let mut command = cluster.plane.kubectl_command();
    command.env("PATH", path).args(["kruise", "status", "-o", "json"]);
    let output = tokio::task::spawn_blocking(move || command.output())
        .await
        .unwrap()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let status: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(status["crds"].as_array().unwrap().len(), Kind::ALL.len());
}

//! What happens while the daemon is away.

use std::ops::Deref;

use kruise_api::container_hash::env_hash;
use serde_json::{Value, json};
use testbed::cluster::run_command;

use crate::fixture::{DaemonCluster, TestNamespace, exclusive_cluster};
use crate::pod_meta::{PodMetaOps, container, env_from_annotation};

#[tokio::test]
async fn daemon_kill_during_restart_causes_one_restart() {
    let mut test = exclusive_cluster().await;
    let mut main = container("main", &[env_from_annotation("CFG", "cfg")]);
    let seconds = json!({"name": "SECONDS_TO_STOP", "value": "3"});
    main["env"].as_array_mut().unwrap().push(seconds);
    test.create_meta_pod("web", json!([main]), json!({})).await;
    test.wait_meta("web", "it is told of", |_, _| true).await;
    test.begin_update("web").await;
    test.patch_pod("web", json!({"metadata": {"annotations": {"cfg": "2"}}}))
        .await;
    test.wait_for_file("main.term").await;
    let restart_row = restart_status(&test);
    assert_eq!(
        (
            &restart_row["pod"],
            &restart_row["container"],
            &restart_row["step"]
        ),
        (&json!("web"), &json!("main"), &json!("stopping"))
    );
    test.cluster.daemon.kill().unwrap();
    test.cluster.daemon.start().unwrap();
    let pod = test.wait_restarted("web", "main", 1).await;
    assert_eq!(pod.hashes("main").1, env_hash([("CFG", "2")]));
    assert_eq!(test.recorded_env("web-main"), ["1", "2"]);
    assert_eq!(test.daemon_writes("web"), 2);
}

/// Restart count and status of the one restart in this test's namespace, from the daemon.
fn restart_status<G: Deref<Target = DaemonCluster>>(test: &TestNamespace<G>) -> Value {
    let runtime = &test.cluster.node.runtime;
    let mut command = runtime.command(support::binaries::daemon());
    command.args(["status", "--output", "json", "--control-socket"]);
    let status = run_command(command.arg(runtime.dir().join("control.sock"))).unwrap();
    let status: Value = serde_json::from_str(&status).unwrap();
    let rows = status["restarts"].as_array().unwrap();
    let ours: Vec<_> = rows
        .iter()
        .filter(|row| row["namespace"] == test.namespace.as_str())
        .collect();
    assert_eq!(ours.len(), 1, "{status}");
    ours[0].clone()
}

#[tokio::test]
async fn daemon_catches_up_after_downtime() {
    let mut test = exclusive_cluster().await;
    let containers = || json!([container("main", &[env_from_annotation("CFG", "cfg")])]);
    test.create_meta_pod("before", containers(), json!({})).await;
    test.wait_meta("before", "it is told of", |_, _| true).await;
    test.cluster.daemon.kill().unwrap();
    test.create_meta_pod("born", containers(), json!({})).await;
    test.begin_update("before").await;
    test.patch_pod("before", json!({"metadata": {"annotations": {"cfg": "2"}}}))
        .await;
    test.cluster.daemon.start().unwrap();
    let created_meanwhile = test.wait_meta("born", "it is told of", |_, _| true).await;
    assert_eq!(created_meanwhile.hashes("main").1, env_hash([("CFG", "1")]));
    let updated_meanwhile = test.wait_restarted("before", "main", 1).await;
    assert_eq!(updated_meanwhile.hashes("main").1, env_hash([("CFG", "2")]));
    assert_eq!([test.daemon_writes("born"), test.daemon_writes("before")], [1, 2]);
}

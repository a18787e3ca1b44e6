//! Programs that are stopped, unreachable or wrong while containers are recreated.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::api::DeleteParams;
use serde_json::json;
use testbed::cluster::Component;

use super::container;
use super::fixture::{assert_succeeded, container_statuses, exclusive_cluster};
use super::programs::{daemon, daemon_kubeconfig, daemon_with_kubeconfig};

#[tokio::test]
async fn daemon_kill_stops_no_container_twice() {
    let mut test = exclusive_cluster().await;
    let pod = test
        .create_pod("web", json!([container("a", 3), container("b", 3)]), json!({}))
        .await;
    let spec = json!({"strategy": {"forceRecreate": true}});
    test.create_request("robust", &pod, &["a", "b"], spec).await;
    test.wait_for_file("a.term").await;
    test.cluster.daemon.kill().unwrap();
    test.cluster.daemon.start().unwrap();
    let (status, _) = test.wait_completed("robust").await;
    assert_succeeded(&status);
    let new = container_statuses(&test.get_pod("web").await);
    assert_eq!((new["a"].restarts, new["b"].restarts), (1, 1));
}

#[tokio::test]
async fn sigterm_hands_request_over_to_next_daemon() {
    let mut test = exclusive_cluster().await;
    let pod = test
        .create_pod("web", json!([container("main", 4)]), json!({}))
        .await;
    test.create_request("handed-over", &pod, &["main"], json!({}))
        .await;
    test.wait_for_file("main.term").await;
    let start = Instant::now();
    test.cluster.daemon.stop().unwrap();
    let elapsed = start.elapsed();
    assert!(elapsed < Duration::from_secs(5), "it took {elapsed:?}");
    let states = test
        .api::<kruise_api::container_recreate_request::ContainerRecreateRequest>()
        .get("handed-over")
        .await;
    let states = states
        .unwrap()
        .status
        .expect("what was begun has been written")
        .container_recreate_states;
    assert!(states[0].is_killed, "{states:?}");
    test.cluster.daemon.start().unwrap();
    let (status, _) = test.wait_completed("handed-over").await;
    assert_succeeded(&status);
    assert_eq!(container_statuses(&test.get_pod("web").await)["main"].restarts, 1);
}

#[tokio::test]
async fn recreate_survives_api_server_outage() {
    let mut test = exclusive_cluster().await;
    let pod = test
        .create_pod("web", json!([container("main", 2)]), json!({}))
        .await;
    test.create_request("patient", &pod, &["main"], json!({})).await;
    test.wait_for_file("main.term").await;
    let outage_start = Instant::now();
    test.cluster.node.plane.apiserver.kill().unwrap();
    std::fs::remove_file(test.log_dir.join("main.up")).unwrap();
    test.wait_for_file("main.up").await;
    let remaining_outage = Duration::from_secs(20).saturating_sub(outage_start.elapsed());
    tokio::time::sleep(remaining_outage).await;
    test.cluster.node.plane.apiserver.start().unwrap();
    let (status, _) = test.wait_completed("patient").await;
    assert_succeeded(&status);
    assert_eq!(container_statuses(&test.get_pod("web").await)["main"].restarts, 1);
    // Otherwise it takes up to a minute to come back, and other tests need the objects that it creates in their
    // namespaces.
    let controllers = test.cluster.node.plane.controller_manager.as_mut();
    controllers.expect("a node has one").restart().unwrap();
    test.cluster.node.wait_ready().unwrap();
}

#[tokio::test]
async fn recreate_survives_containerd_restart() {
    let mut test = exclusive_cluster().await;
    let pod = test
        .create_pod("web", json!([container("main", 3)]), json!({}))
        .await;
    test.create_request("robust", &pod, &["main"], json!({})).await;
    test.wait_for_file("main.term").await;
    test.cluster.node.runtime.containerd.kill().unwrap();
    test.cluster.node.runtime.containerd.start().unwrap();
    let (status, _) = test.wait_completed("robust").await;
    assert_succeeded(&status);
    assert_eq!(container_statuses(&test.get_pod("web").await)["main"].restarts, 1);
    test.cluster.node.wait_ready().unwrap();
}

#[tokio::test]
async fn wrong_clock_does_not_affect_deadlines() {
    let mut test = exclusive_cluster().await;
    let clock_library = build_clock_library(test.cluster.node.runtime.dir());
    test.create_pod("web", json!([container("main", 0)]), json!({}))
        .await;
    let insecure_kubeconfig = without_ca_check(&daemon_kubeconfig(&test.cluster.node));
    for (name, by, restarts) in [("ahead", 3600_i64, 1), ("behind", -3600, 2)] {
        test.cluster.daemon.kill().unwrap();
        let logged_bytes = read_log(&test.cluster.daemon).len();
        test.cluster.daemon = daemon_with_kubeconfig(&test.cluster.node, &insecure_kubeconfig)
            .env("LD_PRELOAD", clock_library.as_os_str())
            .env("WRONG_BY_SECONDS", by.to_string());
        test.cluster.daemon.start().unwrap();
        let start = Instant::now();
        let pod = test.get_pod("web").await;
        let spec = json!({"activeDeadlineSeconds": 60, "strategy": {"minStartedSeconds": 3}});
        test.create_request(name, &pod, &["main"], spec).await;
        let (status, versions) = test.wait_completed(name).await;
        assert_succeeded(&status);
        assert!(
            start.elapsed() > Duration::from_secs(3),
            "minStartedSeconds counted by a wrong clock"
        );
        let created_at = versions[0].metadata.creation_timestamp.as_ref().unwrap().0;
        let seconds = status
            .completion_time
            .unwrap()
            .0
            .duration_since(created_at)
            .as_secs();
        assert!(
            (3..60).contains(&seconds),
            "completionTime is the API server's time, {seconds} s after creation"
        );
        assert_eq!(
            container_statuses(&test.get_pod("web").await)["main"].restarts,
            restarts
        );
        let new_log = read_log(&test.cluster.daemon).split_off(logged_bytes);
        let log_time: jiff::Timestamp = new_log.split_whitespace().next().unwrap().parse().unwrap();
        let clock_error = log_time.duration_since(jiff::Timestamp::now()).as_secs() - by;
        assert!(
            clock_error.abs() < 300,
            "the daemon's own clock was not wrong by {by} s: {log_time}"
        );
    }
    test.cluster.daemon.kill().unwrap();
    // The tests that share the bed expect a daemon there.
    test.cluster.daemon = daemon(&test.cluster.node);
    test.cluster.daemon.start().unwrap();
}

/// The log of this daemon and of those before it.
fn read_log(daemon: &Component) -> String {
    std::fs::read_to_string(daemon.log()).unwrap()
}

/// The kubeconfig without verification of the server's certificate: the bed's is minutes old, so a slow clock takes it
/// for not yet valid.
fn without_ca_check(kubeconfig: &Path) -> PathBuf {
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(kubeconfig).unwrap()).unwrap();
    let cluster = config["clusters"][0]["cluster"].as_object_mut().unwrap();
    cluster.remove("certificate-authority").unwrap();
    cluster.insert("insecure-skip-tls-verify".to_owned(), true.into());
    let path = kubeconfig.with_extension("trusting");
    std::fs::write(&path, config.to_string()).unwrap();
    path
}

/// Builds a library that shifts the wall clock of the process that loads it.
fn build_clock_library(dir: &Path) -> PathBuf {
    let source = dir.join("wrong-clock.c");
    let library = dir.join("wrong-clock.so");
    std::fs::write(
        &source,
        "#define _GNU_SOURCE\n#include <stdlib.h>\n#include <time.h>\n#include <unistd.h>\n#include <sys/syscall.h>\n\
         int clock_gettime(clockid_t clock, struct timespec *at) {\n\
           int result = syscall(SYS_clock_gettime, clock, at);\n\
           const char *by = getenv(\"WRONG_BY_SECONDS\");\n\
           if (result == 0 && clock == CLOCK_REALTIME && by) at->tv_sec += atol(by);\n\
           return result;\n}\n",
    )
    .unwrap();
    let status = Command::new("gcc")
        .args(["-O1", "-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(&source)
        .status();
    assert!(status.unwrap().success(), "gcc makes the library");
    library
}

#[tokio::test]
async fn pod_deletion_fails_its_requests() {
    let test = exclusive_cluster().await;
    let pod = test
        .create_pod("web", json!([container("main", 8)]), json!({}))
        .await;
    test.create_request("orphan", &pod, &["main"], json!({})).await;
    test.wait_for_file("main.term").await;
    test.api::<Pod>()
        .delete("web", &DeleteParams::default())
        .await
        .unwrap();
    let (status, _) = test.wait_completed("orphan").await;
    assert_eq!(status.message.as_deref(), Some("pod has gone"));
}

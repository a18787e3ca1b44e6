//! What is ended, away or wrong while containers are recreated.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::api::DeleteParams;
use serde_json::json;
use testbed::cluster::Component;

use super::bed::{alone, assert_succeeded, statuses};
use super::container;
use super::programs::{daemon, daemon_account, daemon_as};

#[tokio::test]
async fn kill_9_of_the_daemon_loses_nothing_and_stops_nothing_twice() {
    let mut test = alone().await;
    let pod = test
        .pod("web", json!([container("a", 3), container("b", 3)]), json!({}))
        .await;
    let spec = json!({"strategy": {"forceRecreate": true}});
    test.request("robust", &pod, &["a", "b"], spec).await;
    test.mark("a.term").await;
    test.bed.daemon.kill().unwrap();
    test.bed.daemon.start().unwrap();
    let (status, _) = test.completed("robust").await;
    assert_succeeded(&status);
    let new = statuses(&test.get_pod("web").await);
    assert_eq!((new["a"].restarts, new["b"].restarts), (1, 1));
}

#[tokio::test]
async fn sigterm_ends_it_soon_and_the_next_daemon_goes_on() {
    let mut test = alone().await;
    let pod = test.pod("web", json!([container("main", 4)]), json!({})).await;
    test.request("handed-over", &pod, &["main"], json!({})).await;
    test.mark("main.term").await;
    let begun = Instant::now();
    test.bed.daemon.stop().unwrap();
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(5), "it took {took:?}");
    let said = test
        .api::<kruise_api::container_recreate_request::ContainerRecreateRequest>()
        .get("handed-over")
        .await;
    let said = said
        .unwrap()
        .status
        .expect("what was begun has been written")
        .container_recreate_states;
    assert!(said[0].is_killed, "{said:?}");
    test.bed.daemon.start().unwrap();
    let (status, _) = test.completed("handed-over").await;
    assert_succeeded(&status);
    assert_eq!(statuses(&test.get_pod("web").await)["main"].restarts, 1);
}

#[tokio::test]
async fn the_api_server_may_be_away_for_20_seconds() {
    let mut test = alone().await;
    let pod = test.pod("web", json!([container("main", 2)]), json!({})).await;
    test.request("patient", &pod, &["main"], json!({})).await;
    test.mark("main.term").await;
    let away = Instant::now();
    test.bed.node.plane.apiserver.kill().unwrap();
    std::fs::remove_file(test.log.join("main.up")).unwrap();
    test.mark("main.up").await;
    let back = Duration::from_secs(20).saturating_sub(away.elapsed());
    tokio::time::sleep(back).await;
    test.bed.node.plane.apiserver.start().unwrap();
    let (status, _) = test.completed("patient").await;
    assert_succeeded(&status);
    assert_eq!(statuses(&test.get_pod("web").await)["main"].restarts, 1);
    // By itself it takes up to a minute to come back, and other tests need what it makes in their namespaces.
    let controllers = test.bed.node.plane.controller_manager.as_mut();
    controllers.expect("a node has one").restart().unwrap();
    test.bed.node.wait_ready().unwrap();
}

#[tokio::test]
async fn containerd_may_restart_in_mid_stop() {
    let mut test = alone().await;
    let pod = test.pod("web", json!([container("main", 3)]), json!({})).await;
    test.request("robust", &pod, &["main"], json!({})).await;
    test.mark("main.term").await;
    test.bed.node.runtime.containerd.kill().unwrap();
    test.bed.node.runtime.containerd.start().unwrap();
    let (status, _) = test.completed("robust").await;
    assert_succeeded(&status);
    assert_eq!(statuses(&test.get_pod("web").await)["main"].restarts, 1);
    test.bed.node.wait_ready().unwrap();
}

#[tokio::test]
async fn a_clock_that_is_wrong_by_an_hour_changes_nothing() {
    let mut test = alone().await;
    let library = wrong_clock(test.bed.node.runtime.dir());
    test.pod("web", json!([container("main", 0)]), json!({})).await;
    let account = trusting(&daemon_account(&test.bed.node));
    for (name, by, restarts) in [("ahead", 3600_i64, 1), ("behind", -3600, 2)] {
        test.bed.daemon.kill().unwrap();
        let told = log(&test.bed.daemon).len();
        test.bed.daemon = daemon_as(&test.bed.node, &account)
            .env("LD_PRELOAD", library.as_os_str())
            .env("WRONG_BY_SECONDS", by.to_string());
        test.bed.daemon.start().unwrap();
        let begun = Instant::now();
        let pod = test.get_pod("web").await;
        let spec = json!({"activeDeadlineSeconds": 60, "strategy": {"minStartedSeconds": 3}});
        test.request(name, &pod, &["main"], spec).await;
        let (status, versions) = test.completed(name).await;
        assert_succeeded(&status);
        assert!(
            begun.elapsed() > Duration::from_secs(3),
            "minStartedSeconds counted by a wrong clock"
        );
        let made = versions[0].metadata.creation_timestamp.as_ref().unwrap().0;
        let took = status.completion_time.unwrap().0.duration_since(made).as_secs();
        assert!(
            (3..60).contains(&took),
            "completionTime is the API server's time, {took} s after creation"
        );
        assert_eq!(statuses(&test.get_pod("web").await)["main"].restarts, restarts);
        let said = log(&test.bed.daemon).split_off(told);
        let stamp: jiff::Timestamp = said.split_whitespace().next().unwrap().parse().unwrap();
        let off = stamp.duration_since(jiff::Timestamp::now()).as_secs() - by;
        assert!(
            off.abs() < 300,
            "the daemon's own clock was not wrong by {by} s: {stamp}"
        );
    }
    test.bed.daemon.kill().unwrap();
    // The tests that share the bed look for a daemon there.
    test.bed.daemon = daemon(&test.bed.node);
    test.bed.daemon.start().unwrap();
}

/// All that this daemon and those before it have logged.
fn log(daemon: &Component) -> String {
    std::fs::read_to_string(daemon.log()).unwrap()
}

/// The kubeconfig without the check of the server's certificate, which a clock that is behind takes for one of the
/// future: the bed's is minutes old.
fn trusting(account: &Path) -> PathBuf {
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(account).unwrap()).unwrap();
    let cluster = config["clusters"][0]["cluster"].as_object_mut().unwrap();
    cluster.remove("certificate-authority").unwrap();
    cluster.insert("insecure-skip-tls-verify".to_owned(), true.into());
    let path = account.with_extension("trusting");
    std::fs::write(&path, config.to_string()).unwrap();
    path
}

/// A library that moves the wall clock of the process that loads it.
fn wrong_clock(dir: &Path) -> PathBuf {
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
async fn a_pod_that_goes_ends_its_requests() {
    let test = alone().await;
    let pod = test.pod("web", json!([container("main", 8)]), json!({})).await;
    test.request("orphan", &pod, &["main"], json!({})).await;
    test.mark("main.term").await;
    test.api::<Pod>()
        .delete("web", &DeleteParams::default())
        .await
        .unwrap();
    let (status, _) = test.completed("orphan").await;
    assert_eq!(status.message.as_deref(), Some("pod has gone"));
}

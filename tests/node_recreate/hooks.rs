//! preStop hooks, grace periods, deadlines and the unready grace.

use std::time::{Duration, SystemTime};

use k8s_openapi::api::core::v1::Pod;
use kruise_api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestPhase as Phase,
};
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::bed::{assert_succeeded, shared, statuses};
use super::container;

#[tokio::test]
async fn hooks_run_before_term() {
    let test = shared().await;
    let hook = |name: &str, hook: serde_json::Value| {
        let mut one = container(name, 0);
        one["lifecycle"] = json!({"preStop": hook});
        one
    };
    let mut http = hook("http", json!({"httpGet": {"path": "/bye?now=1", "port": "web"}}));
    http["ports"] = json!([{"name": "web", "containerPort": 8080}]);
    http["command"] = json!([
        "sh",
        "-c",
        // It answers only once it has been asked: an answer that is early is no HTTP.
        "trap 'touch /log/http.term; exit 0' TERM; mkfifo /tmp/answer; \
         nc -l -p 8080 <> /tmp/answer | { read line; echo \"$line\" >> /log/asked; \
         printf 'HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\n\\r\\n' > /tmp/answer; } & \
         while :; do sleep 3600 & wait $!; done"
    ]);
    let listens =
        json!({"exec": {"command": ["sh", "-c", "netstat -ltn | grep -q :8080"]}, "periodSeconds": 1});
    http["readinessProbe"] = listens;
    let containers = json!([
        hook(
            "exec",
            json!({"exec": {"command": ["sh", "-c", "sleep 1; touch /log/exec.hook"]}})
        ),
        http,
        hook("nap", json!({"sleep": {"seconds": 2}})),
        hook("tcp", json!({"tcpSocket": {"port": 1}})),
    ]);
    let pod = test.pod("web", containers, json!({})).await;
    let begun = SystemTime::now();
    test.request("hooks", &pod, &["exec", "http", "nap", "tcp"], json!({}))
        .await;
    let stopped = test.mark("tcp.term").await;
    let (status, _) = test.completed("hooks").await;
    assert_succeeded(&status);
    assert!(test.mark("exec.hook").await <= test.mark("exec.term").await);
    let asked = std::fs::read_to_string(test.log.join("asked")).unwrap();
    assert!(asked.starts_with("GET /bye?now=1 HTTP/1.1"), "{asked}");
    let woke = test.mark("nap.term").await;
    let napped = woke.duration_since(begun).unwrap();
    let longer = woke.duration_since(stopped).unwrap();
    assert!(
        napped >= Duration::from_secs(2) && longer < Duration::from_secs(4),
        "slept {napped:?}, {longer:?} longer than who had no hook"
    );
    let said = test.event("FailedPreStopHook", "tcp").await;
    assert!(said.contains("tcpSocket is not a hook that can be run"), "{said}");
}

/// As kubelet does: whoever answers HTTPS in plain HTTP is asked again in plain HTTP.
#[tokio::test]
async fn a_hook_over_https_reaches_a_server_that_speaks_plain_http() {
    let test = shared().await;
    let mut plain = container("plain", 0);
    let hook = json!({"path": "/cgi-bin/bye?now=1", "port": 8443, "scheme": "HTTPS"});
    plain["lifecycle"] = json!({"preStop": {"httpGet": hook}});
    plain["command"] = json!([
        "sh",
        "-c",
        "trap 'touch /log/plain.term; exit 0' TERM; mkdir -p /tmp/www/cgi-bin; \
         printf '#!/bin/sh\necho \"$REQUEST_METHOD $REQUEST_URI\" >> /log/asked\nprintf \"\\r\\n\"\n' > /tmp/www/cgi-bin/bye; \
         chmod +x /tmp/www/cgi-bin/bye; httpd -p 8443 -h /tmp/www; while :; do sleep 3600 & wait $!; done"
    ]);
    let listens =
        json!({"exec": {"command": ["sh", "-c", "netstat -ltn | grep -q :8443"]}, "periodSeconds": 1});
    plain["readinessProbe"] = listens;
    let pod = test.pod("web", json!([plain]), json!({})).await;
    test.request("plain", &pod, &["plain"], json!({})).await;
    let (status, _) = test.completed("plain").await;
    assert_succeeded(&status);
    let asked = std::fs::read_to_string(test.log.join("asked")).unwrap();
    assert_eq!(asked, "GET /cgi-bin/bye?now=1\n", "asked once, before TERM");
    assert!(test.marked("plain.term"));
}

#[tokio::test]
async fn a_hook_that_fails_or_hangs_does_not_save_the_container() {
    let test = shared().await;
    let mut fails = container("fails", 0);
    fails["lifecycle"] = json!({"preStop": {"exec": {"command": ["sh", "-c", "echo no luck; exit 3"]}}});
    let mut hangs = container("hangs", 0);
    hangs["lifecycle"] = json!({"preStop": {"exec": {"command": ["sleep", "3600"]}}});
    let pod = test.pod("web", json!([fails, hangs]), json!({})).await;
    let quick = json!({"strategy": {"terminationGracePeriodSeconds": 3}});
    test.request("hooks", &pod, &["fails", "hangs"], quick).await;
    let (status, _) = test.completed("hooks").await;
    assert_succeeded(&status);
    let said = test.event("FailedPreStopHook", "fails").await;
    assert!(said.contains("exit code 3"), "{said}");
    assert!(!said.contains("luck") && !said.contains("echo"), "{said}");
    let said = test.event("FailedPreStopHook", "hangs").await;
    assert!(
        said.contains("3s, the grace period") || said.contains("did not"),
        "{said}"
    );
}

#[tokio::test]
async fn at_the_deadline_hook_and_stop_are_finished_and_told() {
    let test = shared().await;
    let deaf = json!({"name": "deaf", "image": "busybox:1.36", "command":
        ["sh", "-c", "trap 'touch /log/deaf.term' TERM; while :; do sleep 1; done"]});
    let mut napper = container("napper", 0);
    napper["lifecycle"] = json!({"preStop": {"sleep": {"seconds": 16}}});
    let grace = json!({"terminationGracePeriodSeconds": 18});
    let pod = test.pod("web", json!([deaf, napper]), grace).await;
    let deadline = json!({"activeDeadlineSeconds": 12});
    test.request("hurried", &pod, &["deaf", "napper"], deadline).await;
    let (status, versions) = test.completed("hurried").await;
    assert_eq!(
        status.message.as_deref(),
        Some("recreating has exceeded the activeDeadlineSeconds")
    );
    let [deaf, napper] = status.container_recreate_states.as_slice() else {
        panic!("{status:#?}")
    };
    for (state, words) in [(deaf, "TERM had been sent"), (napper, "preStop hook was running")] {
        let message = state.message.as_deref().unwrap_or_default();
        assert!(
            state.phase == Phase::Failed && message.contains(words),
            "{state:?}"
        );
    }
    assert!(test.marked("deaf.term"));
    let last = versions.last().unwrap();
    let made = last.metadata.creation_timestamp.as_ref().unwrap().0;
    let lived = status.completion_time.as_ref().unwrap().0.duration_since(made);
    // Every request is looked at each 10 s at the latest, and should not have to wait for that.
    assert!((12..=19).contains(&lived.as_secs()), "it ended after {lived}");
    let told = |request: &ContainerRecreateRequest| {
        let states = request
            .status
            .iter()
            .flat_map(|status| &status.container_recreate_states);
        let mut messages = states.map(|state| state.message.as_deref().unwrap_or_default());
        messages.all(|message| message.contains("was stopped after that"))
    };
    let (now, _) = test.follow("hurried", "how both stops ended", told).await;
    assert_eq!(now.status.unwrap().completion_time, status.completion_time);
    assert!(test.marked("napper.term"), "TERM follows the hook");
    test.follow("web", "both have been restarted", |pod: &Pod| {
        statuses(pod)
            .values()
            .all(|status| status.restarts == 1 && status.ready)
    })
    .await;
}

#[tokio::test]
async fn min_started_seconds_are_waited_for_and_not_longer() {
    let test = shared().await;
    let pod = test.pod("web", json!([container("main", 0)]), json!({})).await;
    test.request(
        "patient",
        &pod,
        &["main"],
        json!({"strategy": {"minStartedSeconds": 4}}),
    )
    .await;
    let (status, _) = test.completed("patient").await;
    assert_succeeded(&status);
    let pod = test.get_pod("web").await;
    let state = pod
        .status
        .unwrap()
        .container_statuses
        .unwrap()
        .remove(0)
        .state
        .unwrap();
    let started = state.running.unwrap().started_at.unwrap().0;
    let age = status
        .completion_time
        .unwrap()
        .0
        .duration_since(started)
        .as_secs();
    // Both stamps are cut to seconds.
    assert!((3..=9).contains(&age), "it counted after {age} s");
}

#[tokio::test]
async fn the_endpoint_has_left_before_term() {
    let test = shared().await;
    test.service("web").await;
    let gate = json!({"readinessGates": [{"conditionType": "KruisePodReady"}]});
    let pod = test.pod("web", json!([container("main", 0)]), gate).await;
    let gate =
        |status: &str| json!({"status": {"conditions": [{"type": "KruisePodReady", "status": status}]}});
    test.patch_status::<Pod>("web", gate("True")).await;
    test.until_endpoint("a ready endpoint", true).await;
    let grace = json!({"strategy": {"unreadyGracePeriodSeconds": 10}});
    test.request("drained", &pod, &["main"], grace).await;
    let told = |request: &ContainerRecreateRequest| {
        let message = request
            .status
            .as_ref()
            .and_then(|status| status.message.as_deref());
        message.is_some_and(|words| words.contains("PreRecreateGrace"))
    };
    let (waiting, _) = test.follow("drained", "it says what it waits for", told).await;
    assert_eq!(waiting.status.unwrap().phase, Phase::Recreating);
    assert!(
        !test.marked("main.term"),
        "nothing is stopped before the manager has spoken"
    );
    // What the manager does: the Pod is not ready, then the request is told.
    test.patch_status::<Pod>("web", gate("False")).await;
    let condition = json!({"status": {"conditions": [{
        "type": "PreRecreateGrace", "status": "True", "reason": "PreRecreateGrace", "message": "",
        "lastTransitionTime": jiff::Timestamp::now(),
    }]}});
    let told = std::time::SystemTime::now();
    test.api::<ContainerRecreateRequest>()
        .patch_status("drained", &PatchParams::default(), &Patch::Merge(condition))
        .await
        .unwrap();
    test.until_endpoint("the endpoint's leaving", false).await;
    assert!(
        !test.marked("main.term"),
        "the endpoint has left and the container still serves"
    );
    let term = test.mark("main.term").await;
    let grace = term.duration_since(told).unwrap();
    assert!(
        grace > Duration::from_millis(9900) && grace < Duration::from_secs(60),
        "TERM came after {grace:?}"
    );
    assert_succeeded(&test.completed("drained").await.0);
}

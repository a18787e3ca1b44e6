//! preStop hooks, grace periods, deadlines and the unready grace period.

use std::time::{Duration, SystemTime};

use k8s_openapi::api::core::v1::Pod;
use kruise_api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestPhase as Phase,
};
use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::container;
use super::fixture::{assert_succeeded, container_statuses, shared_cluster};

#[tokio::test]
async fn pre_stop_hooks_run_before_term() {
    let test = shared_cluster().await;
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
        // It responds only after the request: an earlier response is not valid HTTP.
        "trap 'touch /log/http.term; exit 0' TERM; mkfifo /tmp/answer; \
         nc -l -p 8080 <> /tmp/answer | { read line; echo \"$line\" >> /log/asked; \
         printf 'HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\n\\r\\n' > /tmp/answer; } & \
         while :; do sleep 3600 & wait $!; done"
    ]);
    let port_probe =
        json!({"exec": {"command": ["sh", "-c", "netstat -ltn | grep -q :8080"]}, "periodSeconds": 1});
    http["readinessProbe"] = port_probe;
    let containers = json!([
        hook(
            "exec",
            json!({"exec": {"command": ["sh", "-c", "sleep 1; touch /log/exec.hook"]}})
        ),
        http,
        hook("nap", json!({"sleep": {"seconds": 2}})),
        hook("tcp", json!({"tcpSocket": {"port": 1}})),
    ]);
    let pod = test.create_pod("web", containers, json!({})).await;
    let start = SystemTime::now();
    test.create_request("hooks", &pod, &["exec", "http", "nap", "tcp"], json!({}))
        .await;
    let tcp_stopped_at = test.wait_for_file("tcp.term").await;
    let (status, _) = test.wait_completed("hooks").await;
    assert_succeeded(&status);
    assert!(test.wait_for_file("exec.hook").await <= test.wait_for_file("exec.term").await);
    let requests = std::fs::read_to_string(test.log_dir.join("asked")).unwrap();
    assert!(requests.starts_with("GET /bye?now=1 HTTP/1.1"), "{requests}");
    let sleep_hook_end = test.wait_for_file("nap.term").await;
    let slept = sleep_hook_end.duration_since(start).unwrap();
    let after_others = sleep_hook_end.duration_since(tcp_stopped_at).unwrap();
    assert!(
        slept >= Duration::from_secs(2) && after_others < Duration::from_secs(4),
        "slept {slept:?}, {after_others:?} longer than who had no hook"
    );
    let event_message = test.wait_event("FailedPreStopHook", "tcp").await;
    assert!(
        event_message.contains("tcpSocket is not a hook that can be run"),
        "{event_message}"
    );
}

/// As kubelet does: if the server responds to HTTPS in plain HTTP, the request is repeated in plain HTTP.
#[tokio::test]
async fn https_hook_falls_back_to_plain_http() {
    let test = shared_cluster().await;
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
    let port_probe =
        json!({"exec": {"command": ["sh", "-c", "netstat -ltn | grep -q :8443"]}, "periodSeconds": 1});
    plain["readinessProbe"] = port_probe;
    let pod = test.create_pod("web", json!([plain]), json!({})).await;
    test.create_request("plain", &pod, &["plain"], json!({})).await;
    let (status, _) = test.wait_completed("plain").await;
    assert_succeeded(&status);
    let requests = std::fs::read_to_string(test.log_dir.join("asked")).unwrap();
    assert_eq!(requests, "GET /cgi-bin/bye?now=1\n", "asked once, before TERM");
    assert!(test.file_exists("plain.term"));
}

#[tokio::test]
async fn failing_or_hanging_hook_does_not_prevent_stop() {
    let test = shared_cluster().await;
    let mut fails = container("fails", 0);
    fails["lifecycle"] = json!({"preStop": {"exec": {"command": ["sh", "-c", "echo no luck; exit 3"]}}});
    let mut hangs = container("hangs", 0);
    hangs["lifecycle"] = json!({"preStop": {"exec": {"command": ["sleep", "3600"]}}});
    let pod = test.create_pod("web", json!([fails, hangs]), json!({})).await;
    let short_grace = json!({"strategy": {"terminationGracePeriodSeconds": 3}});
    test.create_request("hooks", &pod, &["fails", "hangs"], short_grace)
        .await;
    let (status, _) = test.wait_completed("hooks").await;
    assert_succeeded(&status);
    let event_message = test.wait_event("FailedPreStopHook", "fails").await;
    assert!(event_message.contains("exit code 3"), "{event_message}");
    assert!(
        !event_message.contains("luck") && !event_message.contains("echo"),
        "{event_message}"
    );
    let event_message = test.wait_event("FailedPreStopHook", "hangs").await;
    assert!(
        event_message.contains("3s, the grace period") || event_message.contains("did not"),
        "{event_message}"
    );
}

#[tokio::test]
async fn active_deadline_finishes_hook_and_stop() {
    let test = shared_cluster().await;
    let ignores_term = json!({"name": "deaf", "image": "busybox:1.36", "command":
        ["sh", "-c", "trap 'touch /log/deaf.term' TERM; while :; do sleep 1; done"]});
    let mut sleeps_in_hook = container("napper", 0);
    sleeps_in_hook["lifecycle"] = json!({"preStop": {"sleep": {"seconds": 16}}});
    let grace = json!({"terminationGracePeriodSeconds": 18});
    let pod = test
        .create_pod("web", json!([ignores_term, sleeps_in_hook]), grace)
        .await;
    let deadline = json!({"activeDeadlineSeconds": 12});
    test.create_request("hurried", &pod, &["deaf", "napper"], deadline)
        .await;
    let (status, versions) = test.wait_completed("hurried").await;
    assert_eq!(
        status.message.as_deref(),
        Some("recreating has exceeded the activeDeadlineSeconds")
    );
    let [ignores_term, sleeps_in_hook] = status.container_recreate_states.as_slice() else {
        panic!("{status:#?}")
    };
    for (state, words) in [
        (ignores_term, "TERM had been sent"),
        (sleeps_in_hook, "preStop hook was running"),
    ] {
        let message = state.message.as_deref().unwrap_or_default();
        assert!(
            state.phase == Phase::Failed && message.contains(words),
            "{state:?}"
        );
    }
    assert!(test.file_exists("deaf.term"));
    let last = versions.last().unwrap();
    let created_at = last.metadata.creation_timestamp.as_ref().unwrap().0;
    let lifetime = status
        .completion_time
        .as_ref()
        .unwrap()
        .0
        .duration_since(created_at);
    // Every request is reconciled after 10 s at the latest; the test must not depend on that.
    assert!(
        (12..=19).contains(&lifetime.as_secs()),
        "it ended after {lifetime}"
    );
    let stops_reported = |request: &ContainerRecreateRequest| {
        let states = request
            .status
            .iter()
            .flat_map(|status| &status.container_recreate_states);
        let mut messages = states.map(|state| state.message.as_deref().unwrap_or_default());
        messages.all(|message| message.contains("was stopped after that"))
    };
    let (updated, _) = test
        .watch_until("hurried", "how both stops ended", stops_reported)
        .await;
    assert_eq!(updated.status.unwrap().completion_time, status.completion_time);
    assert!(test.file_exists("napper.term"), "TERM follows the hook");
    test.watch_until("web", "both have been restarted", |pod: &Pod| {
        container_statuses(pod)
            .values()
            .all(|status| status.restarts == 1 && status.ready)
    })
    .await;
}

#[tokio::test]
async fn min_started_seconds_delay_completion() {
    let test = shared_cluster().await;
    let pod = test
        .create_pod("web", json!([container("main", 0)]), json!({}))
        .await;
    test.create_request(
        "patient",
        &pod,
        &["main"],
        json!({"strategy": {"minStartedSeconds": 4}}),
    )
    .await;
    let (status, _) = test.wait_completed("patient").await;
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
    // Both timestamps are truncated to seconds.
    assert!((3..=9).contains(&age), "it counted after {age} s");
}

#[tokio::test]
async fn endpoint_is_removed_before_term() {
    let test = shared_cluster().await;
    test.create_service("web").await;
    let gate = json!({"readinessGates": [{"conditionType": "KruisePodReady"}]});
    let pod = test.create_pod("web", json!([container("main", 0)]), gate).await;
    let gate =
        |status: &str| json!({"status": {"conditions": [{"type": "KruisePodReady", "status": status}]}});
    test.patch_status::<Pod>("web", gate("True")).await;
    test.wait_endpoint("a ready endpoint", true).await;
    let grace = json!({"strategy": {"unreadyGracePeriodSeconds": 10}});
    test.create_request("drained", &pod, &["main"], grace).await;
    let waits_for_grace = |request: &ContainerRecreateRequest| {
        let message = request
            .status
            .as_ref()
            .and_then(|status| status.message.as_deref());
        message.is_some_and(|words| words.contains("PreRecreateGrace"))
    };
    let (waiting, _) = test
        .watch_until("drained", "it says what it waits for", waits_for_grace)
        .await;
    assert_eq!(waiting.status.unwrap().phase, Phase::Recreating);
    assert!(
        !test.file_exists("main.term"),
        "a container was stopped before the manager set the condition"
    );
    // What the manager does: first the Pod becomes not ready, then the request gets the condition.
    test.patch_status::<Pod>("web", gate("False")).await;
    let condition = json!({"status": {"conditions": [{
        "type": "PreRecreateGrace", "status": "True", "reason": "PreRecreateGrace", "message": "",
        "lastTransitionTime": jiff::Timestamp::now(),
    }]}});
    let grace_start = std::time::SystemTime::now();
    test.api::<ContainerRecreateRequest>()
        .patch_status("drained", &PatchParams::default(), &Patch::Merge(condition))
        .await
        .unwrap();
    test.wait_endpoint("the endpoint's leaving", false).await;
    assert!(
        !test.file_exists("main.term"),
        "the endpoint has left and the container still serves"
    );
    let term_at = test.wait_for_file("main.term").await;
    let actual_grace = term_at.duration_since(grace_start).unwrap();
    assert!(
        actual_grace > Duration::from_millis(9900) && actual_grace < Duration::from_secs(60),
        "TERM came after {actual_grace:?}"
    );
    assert_succeeded(&test.wait_completed("drained").await.0);
}

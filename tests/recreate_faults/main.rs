//! Recreate requests while the container runtime misbehaves: the daemon as it is built, a real API server, and a
//! runtime made of faults. Each test is a node of its own; the test itself says what kubelet would say.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod environment;
mod node;

use std::time::Duration;

use kruise_api::container_recreate_request::{
    ContainerRecreateRequestPhase as Phase, ContainerRecreateRequestStatus,
};
use kruise_daemon::slots::SHARE;
use kube::api::{DeleteParams, Patch, PatchParams};
use node::{Node, message};
use serde_json::{Value, json};
use support::fault_cri::Fault;

#[tokio::test]
async fn a_stop_that_hangs_at_the_deadline_is_told_when_it_ends() {
    let mut node = Node::start("hang-stop").await;
    let pod = node.pod("hang-stop").await;
    node.runs(&pod, "hs", 0).await;
    node.runtime.fault("StopContainer", Fault::Hang);
    node.request(
        "hang-stop",
        &pod,
        "containerd://hs",
        json!({"activeDeadlineSeconds": 3}),
    )
    .await;
    let status = node.completed("hang-stop").await;
    assert!(
        message(&status).contains("TERM had been sent; KILL follows"),
        "{status:#?}"
    );
    let failed = status.conditions.first().expect("a condition");
    assert_eq!(
        (failed.type_.as_str(), failed.reason.as_str()),
        ("Failed", "DeadlineExceeded")
    );
    assert!(
        failed.message.contains("hang-stop: ") && failed.message.contains("TERM"),
        "{failed:?}"
    );
    // Every request is looked at after 10 s at the latest, and should not have to wait for that.
    assert!((3..=9).contains(&node.lived("hang-stop").await));
    node.runtime.heal("StopContainer");
    node.runtime.kill().await;
    node.runtime.listen();
    let told = node
        .status("hang-stop", "how the stop ended", |status| {
            message(status).contains("which failed after that")
        })
        .await;
    assert_eq!(
        (told.completion_time, told.message),
        (status.completion_time, status.message)
    );
    assert_eq!(node.runtime.calls("StopContainer"), 1, "nothing more is begun");
    node.still_works().await;
}

#[tokio::test]
async fn a_runtime_that_hangs_does_not_delay_the_deadline() {
    let node = Node::start("hang-list").await;
    let pod = node.pod("hang-list").await;
    node.runs(&pod, "hl", 0).await;
    node.runtime.fault("ListContainers", Fault::Hang);
    node.request(
        "hang-list",
        &pod,
        "containerd://hl",
        json!({"activeDeadlineSeconds": 3}),
    )
    .await;
    let status = node.completed("hang-list").await;
    assert_eq!(status.container_recreate_states[0].phase, Phase::Failed);
    assert!(message(&status).contains("runtime did not answer"), "{status:#?}");
    assert!(node.lived("hang-list").await >= 3);
    assert_eq!(node.runtime.calls("StopContainer"), 0);
    node.runtime.heal("ListContainers");
    node.still_works().await;
}

#[tokio::test]
async fn each_act_is_one_line_of_the_log_and_the_request_has_its_events() {
    let node = Node::start("log").await;
    let hook = hooked("true");
    let pod = node.pod_with("log-pod", hook).await;
    node.runs(&pod, "l0", 0).await;
    node.request("log-request", &pod, "containerd://l0", json!({}))
        .await;
    node.runtime
        .until("the stop", |state| !state.containers["l0"].running)
        .await;
    node.runs(&pod, "l1", 1).await;
    node.succeeded("log-request").await;
    for words in [
        "recreating containers",
        "stopping container",
        "preStop hook succeeded",
        "stopped container",
        "request completed",
    ] {
        assert_eq!(node.logged(words, "log-pod").await, 1, "{words}: {}", node.tail());
    }
    let begun = node.event_on_request("log-request", "Recreating").await;
    assert_eq!(begun, "Recreating containers main of Pod log-pod");
    node.event_on_request("log-request", "Complete").await;
}

/// However many Pods have requests, a slow runtime is asked for the containers of some at a time.
#[tokio::test]
async fn a_slow_runtime_is_not_asked_for_the_containers_of_all_pods_at_once() {
    let node = Node::start("slow").await;
    node.runtime
        .fault("ListContainers", Fault::Slow(Duration::from_secs(2)));
    let names: Vec<_> = (0..24).map(|n| format!("slow-{n}")).collect();
    let mut pods = Vec::new();
    for name in &names {
        let pod = node.pod(name).await;
        node.runs(&pod, name, 0).await;
        pods.push((name, pod, format!("containerd://{name}")));
    }
    let requests = pods
        .iter()
        .map(|(name, pod, id)| node.request(name, pod, id, json!({})));
    futures::future::join_all(requests).await;
    node.runtime
        .until("all are stopped", |state| {
            names.iter().all(|name| !state.containers[name].running)
        })
        .await;
    let (_, most) = node.runtime.state().under_way["ListContainers"];
    assert!(most <= 16, "{most} at once");
}

/// The answer of a slow runtime is not acted on for a request or a Pod that was deleted meanwhile.
#[tokio::test]
async fn what_is_deleted_while_the_runtime_is_asked_is_left_alone() {
    let node = Node::start("late").await;
    let names = ["late-request", "late-pod"];
    let mut pods = Vec::new();
    for name in names {
        let pod = node.pod(name).await;
        node.runs(&pod, name, 0).await;
        pods.push(pod);
    }
    let last = node.pod("late-last").await;
    node.runtime.fault("ListContainers", Fault::Held);
    for (pod, name) in pods.iter().zip(names) {
        node.request(name, pod, &format!("containerd://{name}"), json!({}))
            .await;
    }
    node.runtime
        .until("both Pods are asked for", |state| {
            state
                .under_way
                .get("ListContainers")
                .is_some_and(|(now, _)| *now >= names.len())
        })
        .await;
    node.delete_request("late-request").await;
    for name in ["late-pod", "late-last"] {
        node.pods().delete(name, &DeleteParams::default()).await.unwrap();
    }
    // None of its containers has started, so it ends without the runtime, and after all that was before it.
    node.request("late-last", &last, "containerd://late-last", json!({}))
        .await;
    node.completed("late-last").await;
    node.runtime.heal("ListContainers");
    node.completed("late-pod").await;
    node.still_works().await;
    assert_eq!(node.runtime.calls("StopContainer"), 1, "{}", node.tail());
}

#[tokio::test]
async fn a_runtime_that_dies_in_mid_stop_is_asked_again_when_it_is_back() {
    let mut node = Node::start("die").await;
    let pod = node.pod("die").await;
    node.runs(&pod, "d0", 0).await;
    node.runtime.fault("StopContainer", Fault::Hang);
    node.request("die", &pod, "containerd://d0", json!({})).await;
    node.runtime
        .until("the stop", |state| state.calls.contains_key("StopContainer"))
        .await;
    node.runtime.kill().await;
    node.status("die", "it says that the runtime is away", |status| {
        message(status).contains("tried again")
            || status.message.as_deref().unwrap_or_default().contains("runtime")
    })
    .await;
    node.runtime.heal("StopContainer");
    node.runtime.listen();
    node.runtime
        .until("the second stop", |state| !state.containers["d0"].running)
        .await;
    let grace = node.runtime.state().containers["d0"].stopped_with;
    assert_eq!(
        grace,
        Some(30),
        "what never reached the container uses up no grace"
    );
    node.runs(&pod, "d1", 1).await;
    node.succeeded("die").await;
}

/// The spec of a Pod whose container has that preStop hook.
fn hooked(command: &str) -> Value {
    json!({"containers": [{"name": "main", "image": "i",
        "lifecycle": {"preStop": {"exec": {"command": [command]}}}}]})
}

/// As by kubelet: the hook comes first, whatever became of the runtime, and the time that it lost is given once more.
#[tokio::test]
async fn a_hook_that_the_runtimes_end_broke_off_runs_again() {
    let mut node = Node::start("hook").await;
    let pod = node.pod_with("hook", hooked("drain")).await;
    node.runs(&pod, "h0", 0).await;
    node.runtime.fault("ExecSync", Fault::Hang);
    node.request("hook", &pod, "containerd://h0", json!({})).await;
    node.runtime
        .until("the hook", |state| state.calls.get("ExecSync") >= Some(&1))
        .await;
    node.runtime.kill().await;
    node.status("hook", "it says that the runtime is away", |status| {
        message(status).contains("will retry")
    })
    .await;
    node.runtime.heal("ExecSync");
    node.runtime.listen();
    node.runtime
        .until("the stop", |state| !state.containers["h0"].running)
        .await;
    assert_eq!(node.runtime.calls("ExecSync"), 2, "{}", node.tail());
    assert_eq!(node.runtime.calls("StopContainer"), 1, "{}", node.tail());
    let grace = node.runtime.state().containers["h0"].stopped_with;
    assert_eq!(grace, Some(30));
    node.runs(&pod, "h1", 1).await;
    node.succeeded("hook").await;
}

#[tokio::test]
async fn a_hook_that_always_ends_the_runtimes_connection_keeps_no_container() {
    let node = Node::start("ends").await;
    let pod = node.pod_with("ends", hooked("kill-it")).await;
    node.runs(&pod, "e0", 0).await;
    node.runtime.fault("ExecSync", Fault::Die);
    node.request("ends", &pod, "containerd://e0", json!({})).await;
    node.runtime
        .until("the stop", |state| !state.containers["e0"].running)
        .await;
    assert_eq!(node.runtime.calls("ExecSync"), 3, "{}", node.tail());
    node.runs(&pod, "e1", 1).await;
    node.succeeded("ends").await;
}

/// Neither the daemon nor the runtime overflows, and the container is stopped.
#[tokio::test]
async fn no_grace_period_is_too_long() {
    let node = Node::start("ages").await;
    let ages = json!({"terminationGracePeriodSeconds": i64::MAX});
    let pod = node.pod_with("ages", ages).await;
    node.runs(&pod, "a0", 0).await;
    node.request("ages", &pod, "containerd://a0", json!({})).await;
    node.runtime
        .until("the stop", |state| !state.containers["a0"].running)
        .await;
    let grace = node.runtime.state().containers["a0"].stopped_with;
    assert_eq!(grace, Some(365 * 86_400));
    node.runs(&pod, "a1", 1).await;
    node.succeeded("ages").await;
}

#[tokio::test]
async fn a_runtime_that_refuses_fails_the_container_in_words() {
    let node = Node::start("refuse").await;
    let pod = node.pod("refuse").await;
    node.runs(&pod, "r0", 0).await;
    node.runtime.fault("StopContainer", Fault::Unimplemented);
    node.request("refuse", &pod, "containerd://r0", json!({})).await;
    let status = node.completed("refuse").await;
    assert!(
        message(&status).starts_with("kill container error: "),
        "{status:#?}"
    );
    assert!(
        message(&status).contains("does not implement StopContainer"),
        "{status:#?}"
    );
    assert_eq!(status.message, None, "as OpenKruise has it");
    node.runtime.heal("StopContainer");
    node.runtime.fault("ListContainers", Fault::Garbage);
    node.runs(&pod, "r1", 1).await;
    node.request("garbage", &pod, "containerd://r1", json!({})).await;
    let said = node
        .status("garbage", "it says what is wrong", |status| {
            status.message.is_some()
        })
        .await;
    assert!(
        said.message.unwrap().contains("cannot be used"),
        "the runtime's answer is named"
    );
    node.runtime.heal("ListContainers");
    node.runtime
        .until("the stop", |state| !state.containers["r1"].running)
        .await;
    node.runs(&pod, "r2", 2).await;
    node.succeeded("garbage").await;
}

#[tokio::test]
async fn a_container_that_is_gone_already_counts_as_stopped() {
    let node = Node::start("gone").await;
    let pod = node.pod("gone").await;
    node.runs(&pod, "g0", 0).await;
    node.runtime.state().containers.remove("g0");
    node.request("gone", &pod, "containerd://g0", json!({})).await;
    node.status(
        "gone",
        "what the runtime does not list is not stopped while kubelet says that it runs",
        |status| message(status).contains("does not list it"),
    )
    .await;
    node.ended(&pod, "g0").await;
    let status = node
        .status("gone", "it waits for kubelet", |status| {
            message(status).contains("waiting for kubelet")
        })
        .await;
    assert!(
        !status.container_recreate_states[0].is_killed,
        "nothing was stopped: {status:#?}"
    );
    node.runs(&pod, "g1", 1).await;
    node.succeeded("gone").await;
    assert_eq!(node.runtime.calls("StopContainer"), 0);
}

#[tokio::test]
async fn a_runtime_that_nobody_has_ends_the_request() {
    let node = Node::start("docker").await;
    let pod = node.pod("docker").await;
    node.runs(&pod, "x0", 0).await;
    let status = json!({"status": {"containerStatuses": [{"name": "main", "image": "i", "imageID": "",
        "ready": true, "restartCount": 0, "containerID": "docker://x0", "state": {"running": {}}}]}});
    node.pods()
        .patch_status("docker", &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
    node.request("docker", &pod, "docker://x0", json!({})).await;
    let status = node.completed("docker").await;
    let words = status.message.unwrap();
    assert!(words.starts_with("failed to find runtime service: "), "{words}");
    assert!(words.contains("named \"docker\"; there is containerd"), "{words}");
}

/// More Pods than one namespace may have stopped at once: the others wait in words, every one of them ends, and another
/// namespace waits for none.
#[tokio::test]
async fn a_crowd_of_requests_is_bounded_and_all_end() {
    const PODS: usize = SHARE + 20;
    let mut node = Node::start("crowd").await;
    let mut pods = Vec::new();
    for number in 0..PODS {
        let pod = node.pod(&format!("crowd-{number}")).await;
        node.runs(&pod, &format!("c{number}-0"), 0).await;
        pods.push(pod);
    }
    node.runtime.fault("StopContainer", Fault::Hang);
    for (number, pod) in pods.iter().enumerate() {
        let spec = json!({"activeDeadlineSeconds": 60});
        node.request(
            &format!("crowd-{number}"),
            pod,
            &format!("containerd://c{number}-0"),
            spec,
        )
        .await;
    }
    node.runtime
        .until("all of the share taken", |state| {
            state.calls.get("StopContainer") >= Some(&SHARE)
        })
        .await;
    let waits = |status: &ContainerRecreateRequestStatus| {
        message(status).contains("waiting for a free slot to stop containers")
    };
    // Which of them got no slot is chance.
    node.any_status("a request says that it waits for a slot", waits)
        .await;
    assert_eq!(
        node.runtime.calls("StopContainer"),
        SHARE,
        "no more than the share at once"
    );
    node.namespace = "kube-public";
    let pod = node.pod("not-crowded").await;
    node.runs(&pod, "n0", 0).await;
    node.request("not-crowded", &pod, "containerd://n0", json!({}))
        .await;
    node.runtime
        .until("a stop for another namespace", |state| {
            state.calls.get("StopContainer") > Some(&SHARE)
        })
        .await;
    node.namespace = "default";
    for number in 0..PODS {
        let status = node.completed(&format!("crowd-{number}")).await;
        assert_eq!(status.container_recreate_states[0].phase, Phase::Failed);
    }
}

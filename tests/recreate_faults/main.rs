//! Recreate requests while the container runtime misbehaves: the daemon's real binary, a real API server, and a
//! fault-injecting runtime. Each test has its own node; the test plays kubelet.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod container_env;
mod fault_node;
mod probes;

use std::time::Duration;

use fault_node::{FaultNode, container_message};
use kruise_api::container_recreate_request::{
    ContainerRecreateRequestPhase as Phase, ContainerRecreateRequestStatus,
};
use kruise_daemon::stop_slots::MAX_STOPS_PER_NAMESPACE;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use support::fault_cri::{FakeContainer, Fault};

#[tokio::test]
async fn hanging_stop_is_reported_after_the_deadline() {
    let mut node = FaultNode::start("hang-stop").await;
    let pod = node.create_pod("hang-stop").await;
    node.set_running(&pod, "hs", 0).await;
    node.runtime.inject_fault("StopContainer", Fault::Hang);
    node.create_request(
        "hang-stop",
        &pod,
        "containerd://hs",
        json!({"activeDeadlineSeconds": 3}),
    )
    .await;
    let status = node.wait_completed("hang-stop").await;
    assert!(
        container_message(&status).contains("TERM had been sent; KILL follows"),
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
    // Every request is reconciled after 10 s at the latest; the test must not depend on that.
    assert!((3..=9).contains(&node.lifetime_seconds("hang-stop").await));
    node.runtime.clear_fault("StopContainer");
    node.runtime.kill().await;
    node.runtime.listen();
    let updated = node
        .wait_status("hang-stop", "how the stop ended", |status| {
            container_message(status).contains("which failed after that")
        })
        .await;
    assert_eq!(
        (updated.completion_time, updated.message),
        (status.completion_time, status.message)
    );
    assert_eq!(node.runtime.calls("StopContainer"), 1, "nothing more is begun");
    node.assert_still_works().await;
}

#[tokio::test]
async fn hanging_runtime_does_not_delay_deadline() {
    let node = FaultNode::start("hang-list").await;
    let pod = node.create_pod("hang-list").await;
    node.set_running(&pod, "hl", 0).await;
    node.runtime.inject_fault("ListContainers", Fault::Hang);
    node.create_request(
        "hang-list",
        &pod,
        "containerd://hl",
        json!({"activeDeadlineSeconds": 3}),
    )
    .await;
    let status = node.wait_completed("hang-list").await;
    assert_eq!(status.container_recreate_states[0].phase, Phase::Failed);
    assert!(
        container_message(&status).contains("runtime did not answer"),
        "{status:#?}"
    );
    assert!(node.lifetime_seconds("hang-list").await >= 3);
    assert_eq!(node.runtime.calls("StopContainer"), 0);
    node.runtime.clear_fault("ListContainers");
    node.assert_still_works().await;
}

#[tokio::test]
async fn each_step_is_logged_once_and_has_events() {
    let node = FaultNode::start("log").await;
    let hook = spec_with_pre_stop_hook("true");
    let pod = node.create_pod_with("log-pod", hook).await;
    node.set_running(&pod, "l0", 0).await;
    node.create_request("log-request", &pod, "containerd://l0", json!({}))
        .await;
    node.runtime
        .wait_until("the stop", |state| !state.containers["l0"].running)
        .await;
    node.set_running(&pod, "l1", 1).await;
    node.wait_succeeded("log-request").await;
    for words in [
        "recreating containers",
        "stopping container",
        "preStop hook succeeded",
        "stopped container",
        "request completed",
    ] {
        assert_eq!(
            node.wait_for_log(words, "log-pod").await,
            1,
            "{words}: {}",
            node.log_tail()
        );
    }
    let event_message = node.wait_request_event("log-request", "Recreating").await;
    assert_eq!(event_message, "Recreating containers main of Pod log-pod");
    node.wait_request_event("log-request", "Complete").await;
}

/// However many Pods have requests, a slow runtime gets calls for only some of their containers at a time.
#[tokio::test]
async fn list_calls_to_slow_runtime_are_limited() {
    let node = FaultNode::start("slow").await;
    node.runtime
        .inject_fault("ListContainers", Fault::Slow(Duration::from_secs(2)));
    let names: Vec<_> = (0..24).map(|n| format!("slow-{n}")).collect();
    let mut pods = Vec::new();
    for name in &names {
        let pod = node.create_pod(name).await;
        node.set_running(&pod, name, 0).await;
        pods.push((name, pod, format!("containerd://{name}")));
    }
    let requests = pods
        .iter()
        .map(|(name, pod, id)| node.create_request(name, pod, id, json!({})));
    futures::future::join_all(requests).await;
    node.runtime
        .wait_until("all are stopped", |state| {
            names.iter().all(|name| !state.containers[name].running)
        })
        .await;
    let (_, max_in_flight) = node.runtime.state().in_flight["ListContainers"];
    assert!(max_in_flight <= 16, "{max_in_flight} at once");
}

/// The response of a slow runtime is ignored for a request or a Pod that was deleted meanwhile.
#[tokio::test]
async fn request_deleted_during_list_call_is_ignored() {
    let node = FaultNode::start("late").await;
    let names = ["late-request", "late-pod"];
    let mut pods = Vec::new();
    for name in names {
        let pod = node.create_pod(name).await;
        node.set_running(&pod, name, 0).await;
        pods.push(pod);
    }
    let last = node.create_pod("late-last").await;
    node.runtime.inject_fault("ListContainers", Fault::Blocked);
    for (pod, name) in pods.iter().zip(names) {
        node.create_request(name, pod, &format!("containerd://{name}"), json!({}))
            .await;
    }
    node.runtime
        .wait_until("both Pods are asked for", |state| {
            state
                .in_flight
                .get("ListContainers")
                .is_some_and(|(now, _)| *now >= names.len())
        })
        .await;
    node.delete_request("late-request").await;
    for name in ["late-pod", "late-last"] {
        node.pods().delete(name, &DeleteParams::default()).await.unwrap();
    }
    // None of its containers has started, so it completes without the runtime, and after all earlier requests.
    node.create_request("late-last", &last, "containerd://late-last", json!({}))
        .await;
    node.wait_completed("late-last").await;
    node.runtime.clear_fault("ListContainers");
    node.wait_completed("late-pod").await;
    node.assert_still_works().await;
    assert_eq!(node.runtime.calls("StopContainer"), 1, "{}", node.log_tail());
}

#[tokio::test]
async fn stop_is_retried_after_runtime_restart() {
    let mut node = FaultNode::start("die").await;
    let pod = node.create_pod("die").await;
    node.set_running(&pod, "d0", 0).await;
    node.runtime.inject_fault("StopContainer", Fault::Hang);
    node.create_request("die", &pod, "containerd://d0", json!({}))
        .await;
    node.runtime
        .wait_until("the stop", |state| state.calls.contains_key("StopContainer"))
        .await;
    node.runtime.kill().await;
    node.wait_status("die", "it says that the runtime is away", |status| {
        container_message(status).contains("tried again")
            || status.message.as_deref().unwrap_or_default().contains("runtime")
    })
    .await;
    node.runtime.clear_fault("StopContainer");
    node.runtime.listen();
    node.runtime
        .wait_until("the second stop", |state| !state.containers["d0"].running)
        .await;
    let grace = node.runtime.state().containers["d0"].stop_grace_seconds;
    assert_eq!(
        grace,
        Some(30),
        "what never reached the container uses up no grace"
    );
    node.set_running(&pod, "d1", 1).await;
    node.wait_succeeded("die").await;
}

/// Spec of a Pod whose container has that preStop hook.
fn spec_with_pre_stop_hook(command: &str) -> Value {
    json!({"containers": [{"name": "main", "image": "i",
        "lifecycle": {"preStop": {"exec": {"command": [command]}}}}]})
}

/// As with kubelet: the hook runs first, whatever happened to the runtime, and the lost time is granted once more.
#[tokio::test]
async fn hook_interrupted_by_runtime_crash_runs_again() {
    let mut node = FaultNode::start("hook").await;
    let pod = node
        .create_pod_with("hook", spec_with_pre_stop_hook("drain"))
        .await;
    node.set_running(&pod, "h0", 0).await;
    node.runtime.inject_fault("ExecSync", Fault::Hang);
    node.create_request("hook", &pod, "containerd://h0", json!({}))
        .await;
    node.runtime
        .wait_until("the hook", |state| state.calls.get("ExecSync") >= Some(&1))
        .await;
    node.runtime.kill().await;
    // What the daemon finds out first: that the hook failed, or that the runtime is away.
    node.wait_status("hook", "it says that the runtime is away", |status| {
        let says = |text: &str| {
            status
                .message
                .as_deref()
                .is_some_and(|message| message.contains(text))
        };
        container_message(status).contains("will retry") || says("container runtime")
    })
    .await;
    node.runtime.clear_fault("ExecSync");
    node.runtime.listen();
    node.runtime
        .wait_until("the stop", |state| !state.containers["h0"].running)
        .await;
    assert_eq!(node.runtime.calls("ExecSync"), 2, "{}", node.log_tail());
    assert_eq!(node.runtime.calls("StopContainer"), 1, "{}", node.log_tail());
    let grace = node.runtime.state().containers["h0"].stop_grace_seconds;
    assert_eq!(grace, Some(30));
    node.set_running(&pod, "h1", 1).await;
    node.wait_succeeded("hook").await;
}

#[tokio::test]
async fn hook_that_always_disconnects_does_not_prevent_stop() {
    let node = FaultNode::start("ends").await;
    let pod = node
        .create_pod_with("ends", spec_with_pre_stop_hook("kill-it"))
        .await;
    node.set_running(&pod, "e0", 0).await;
    node.runtime.inject_fault("ExecSync", Fault::Disconnect);
    node.create_request("ends", &pod, "containerd://e0", json!({}))
        .await;
    node.runtime
        .wait_until("the stop", |state| !state.containers["e0"].running)
        .await;
    assert_eq!(node.runtime.calls("ExecSync"), 3, "{}", node.log_tail());
    node.set_running(&pod, "e1", 1).await;
    node.wait_succeeded("ends").await;
}

/// Neither the daemon nor the runtime overflows, and the container is stopped.
#[tokio::test]
async fn huge_grace_period_is_clamped() {
    let node = FaultNode::start("ages").await;
    let long_grace = json!({"terminationGracePeriodSeconds": i64::MAX});
    let pod = node.create_pod_with("ages", long_grace).await;
    node.set_running(&pod, "a0", 0).await;
    node.create_request("ages", &pod, "containerd://a0", json!({}))
        .await;
    node.runtime
        .wait_until("the stop", |state| !state.containers["a0"].running)
        .await;
    let grace = node.runtime.state().containers["a0"].stop_grace_seconds;
    assert_eq!(grace, Some(365 * 86_400));
    node.set_running(&pod, "a1", 1).await;
    node.wait_succeeded("ages").await;
}

#[tokio::test]
async fn unimplemented_stop_fails_the_container() {
    let node = FaultNode::start("refuse").await;
    let pod = node.create_pod("refuse").await;
    node.set_running(&pod, "r0", 0).await;
    node.runtime.inject_fault("StopContainer", Fault::Unimplemented);
    node.create_request("refuse", &pod, "containerd://r0", json!({}))
        .await;
    let status = node.wait_completed("refuse").await;
    assert!(
        container_message(&status).starts_with("kill container error: "),
        "{status:#?}"
    );
    assert!(
        container_message(&status).contains("does not implement StopContainer"),
        "{status:#?}"
    );
    assert_eq!(status.message, None, "as OpenKruise has it");
    node.runtime.clear_fault("StopContainer");
    node.runtime.inject_fault("ListContainers", Fault::Garbage);
    node.set_running(&pod, "r1", 1).await;
    node.create_request("garbage", &pod, "containerd://r1", json!({}))
        .await;
    let failing = node
        .wait_status("garbage", "it says what is wrong", |status| {
            status.message.is_some()
        })
        .await;
    assert!(
        failing.message.unwrap().contains("cannot be used"),
        "the runtime's answer is named"
    );
    node.runtime.clear_fault("ListContainers");
    node.runtime
        .wait_until("the stop", |state| !state.containers["r1"].running)
        .await;
    node.set_running(&pod, "r2", 2).await;
    node.wait_succeeded("garbage").await;
}

#[tokio::test]
async fn removed_container_counts_as_stopped() {
    let node = FaultNode::start("gone").await;
    let pod = node.create_pod("gone").await;
    node.set_running(&pod, "g0", 0).await;
    node.runtime.state().containers.remove("g0");
    node.create_request("gone", &pod, "containerd://g0", json!({}))
        .await;
    node.wait_status(
        "gone",
        "what the runtime does not list is not stopped while kubelet says that it runs",
        |status| container_message(status).contains("does not list it"),
    )
    .await;
    node.set_terminated(&pod, "g0").await;
    let status = node
        .wait_status("gone", "it waits for kubelet", |status| {
            container_message(status).contains("waiting for kubelet")
        })
        .await;
    assert!(
        !status.container_recreate_states[0].is_killed,
        "nothing was stopped: {status:#?}"
    );
    node.set_running(&pod, "g1", 1).await;
    node.wait_succeeded("gone").await;
    assert_eq!(node.runtime.calls("StopContainer"), 0);
}

#[tokio::test]
async fn unknown_runtime_fails_the_request() {
    let node = FaultNode::start("docker").await;
    let pod = node.create_pod("docker").await;
    node.set_running(&pod, "x0", 0).await;
    let status = json!({"status": {"containerStatuses": [{"name": "main", "image": "i", "imageID": "",
        "ready": true, "restartCount": 0, "containerID": "docker://x0", "state": {"running": {}}}]}});
    node.pods()
        .patch_status("docker", &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
    node.create_request("docker", &pod, "docker://x0", json!({}))
        .await;
    let status = node.wait_completed("docker").await;
    let message = status.message.unwrap();
    assert!(
        message.starts_with("failed to find runtime service: "),
        "{message}"
    );
    assert!(
        message.contains("named \"docker\"; there is containerd"),
        "{message}"
    );
}

/// More Pods than may be stopped at once for one namespace: the others report that they wait, each of them completes,
/// and another namespace waits for none.
#[tokio::test]
async fn stops_per_namespace_are_limited() {
    const PODS: usize = MAX_STOPS_PER_NAMESPACE + 20;
    let mut node = FaultNode::start("crowd").await;
    let mut pods = Vec::new();
    for number in 0..PODS {
        let pod = node.create_pod(&format!("crowd-{number}")).await;
        node.set_running(&pod, &format!("c{number}-0"), 0).await;
        pods.push(pod);
    }
    node.runtime.inject_fault("StopContainer", Fault::Hang);
    for (number, pod) in pods.iter().enumerate() {
        let spec = json!({"activeDeadlineSeconds": 60});
        node.create_request(
            &format!("crowd-{number}"),
            pod,
            &format!("containerd://c{number}-0"),
            spec,
        )
        .await;
    }
    node.runtime
        .wait_until("all of the share taken", |state| {
            state.calls.get("StopContainer") >= Some(&MAX_STOPS_PER_NAMESPACE)
        })
        .await;
    let waits_for_slot = |status: &ContainerRecreateRequestStatus| {
        container_message(status).contains("waiting for a free slot to stop containers")
    };
    // Which of them got no slot is random.
    node.wait_any_status("a request says that it waits for a slot", waits_for_slot)
        .await;
    assert_eq!(
        node.runtime.calls("StopContainer"),
        MAX_STOPS_PER_NAMESPACE,
        "no more than the share at once"
    );
    let hook = spec_with_pre_stop_hook("drain");
    let late = node.create_pod_with("crowd-late", hook).await;
    node.set_running(&late, "late0", 0).await;
    node.create_request("crowd-late", &late, "containerd://late0", json!({}))
        .await;
    node.wait_status("crowd-late", "it waits for a slot", waits_for_slot)
        .await;
    // It crashes meanwhile: a hook would be for its successor.
    node.runtime.state().containers.get_mut("late0").unwrap().running = false;
    node.namespace = "kube-public";
    let pod = node.create_pod("not-crowded").await;
    node.set_running(&pod, "n0", 0).await;
    node.create_request("not-crowded", &pod, "containerd://n0", json!({}))
        .await;
    node.runtime
        .wait_until("a stop for another namespace", |state| {
            state.calls.get("StopContainer") > Some(&MAX_STOPS_PER_NAMESPACE)
        })
        .await;
    node.namespace = "default";
    for number in 0..PODS {
        let status = node.wait_completed(&format!("crowd-{number}")).await;
        assert_eq!(status.container_recreate_states[0].phase, Phase::Failed);
    }
    node.runtime.clear_fault("StopContainer");
    node.set_running(&late, "late1", 1).await;
    node.wait_succeeded("crowd-late").await;
    assert_eq!(node.runtime.calls("ExecSync"), 0, "{}", node.log_tail());
}

/// A request is over and deleted while the hooks of two containers run: both run to their end, and both containers are
/// stopped.
#[tokio::test]
async fn deletion_of_a_request_cuts_no_hook() {
    let node = FaultNode::start("cut").await;
    let container = |name: &str, seconds: u32| {
        let hook = json!({"preStop": {"sleep": {"seconds": seconds}}});
        json!({"name": name, "image": "i", "lifecycle": hook})
    };
    let spec = json!({"containers": [container("main", 7), container("slow", 14)]});
    let pod = node.create_pod_with("cut", spec).await;
    node.set_running(&pod, "cut-main", 0).await;
    let slow = FakeContainer {
        name: "slow".into(),
        ..node.runtime.state().containers["cut-main"].clone()
    };
    node.runtime
        .state()
        .containers
        .insert("cut-slow".to_owned(), slow);
    let running = |name: &str| {
        json!({"name": name, "image": "i", "imageID": "", "ready": true, "restartCount": 0,
            "containerID": format!("containerd://cut-{name}"), "state": {"running": {}}})
    };
    let status = json!({"status": {"containerStatuses": [running("main"), running("slow")]}});
    node.pods()
        .patch_status("cut", &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
    let target = |name: &str| {
        let id = format!("containerd://cut-{name}");
        json!({"name": name, "statusContext": {"containerID": id, "restartCount": 0}})
    };
    let both = json!({"activeDeadlineSeconds": 3, "containers": [target("main"), target("slow")]});
    node.create_request("cut", &pod, "containerd://cut-main", both)
        .await;
    node.wait_status("cut", "both hooks run", |status| {
        let states = &status.container_recreate_states;
        let hooks = states.iter().filter(|state| {
            state
                .message
                .as_deref()
                .is_some_and(|message| message.contains("preStop hook"))
        });
        hooks.count() == 2
    })
    .await;
    node.wait_completed("cut").await;
    node.delete_request("cut").await;
    for id in ["cut-main", "cut-slow"] {
        node.runtime
            .wait_until(id, |state| !state.containers[id].running)
            .await;
    }
    node.assert_still_works().await;
}

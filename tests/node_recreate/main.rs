//! ContainerRecreateRequests on a real node: kubelet, containerd, runc, and the daemon's real binary, with its own
//! service account behind the fence. Except for `with_manager` no manager runs, so the tests also show that the daemon
//! needs none; requests are created as admission would store them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod enhanced_liveness;
mod faults;
mod fixture;
mod hooks;
mod recreate_job;
mod restart_rules;
mod sidecar_terminator;
mod with_manager;

use std::time::Duration;
use support::{connect, manager, programs, waits};

use fixture::{assert_succeeded, container_statuses, shared_cluster};
use kruise_api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestPhase as Phase,
};
use serde_json::{Value, json};

/// A container that records TERM in `/log/NAME.term` and then ends after `seconds`.
fn container(name: &str, seconds: u32) -> Value {
    let script = format!(
        "trap 'touch /log/{name}.term; sleep {seconds}; exit 0' TERM; touch /log/{name}.up; \
         while :; do sleep 3600 & wait $!; done"
    );
    json!({"name": name, "image": "busybox:1.36", "command": ["sh", "-c", script]})
}

/// Number of changes of a finished request, by its versions: after 3 s its message changes in between.
fn count_steps(versions: &[ContainerRecreateRequest]) -> usize {
    let last = versions.last().unwrap();
    let created_at = last.metadata.creation_timestamp.as_ref().unwrap().0;
    let completed_at = last.status.as_ref().unwrap().completion_time.as_ref().unwrap().0;
    // Both are truncated to seconds.
    if completed_at.duration_since(created_at).as_secs() < 3 {
        return versions.len();
    }
    let mut without_messages = versions.to_vec();
    for request in &mut without_messages {
        request.metadata.resource_version = None;
        request.metadata.managed_fields = None;
        if let Some(status) = &mut request.status {
            status.message = None;
            for state in &mut status.container_recreate_states {
                state.message = None;
            }
        }
    }
    without_messages.dedup_by_key(|request| json!(request));
    without_messages.len()
}

#[tokio::test]
async fn recreate_one_container_takes_two_writes() {
    let test = shared_cluster().await;
    let pod = test
        .create_pod("web", json!([container("main", 0)]), json!({}))
        .await;
    let old = container_statuses(&pod)["main"].clone();
    let completed = |request: &ContainerRecreateRequest| {
        let status = request.status.as_ref();
        status.is_some_and(|status| status.completion_time.is_some())
    };
    let creation = test.create_request("one", &pod, &["main"], json!({}));
    let ((request, versions), _) = test
        .watch_until_with("one", "completed", completed, creation)
        .await;
    let status = request.status.unwrap();
    assert_succeeded(&status);
    let state = &status.container_recreate_states[0];
    assert!(
        state.is_killed && state.message.is_none() && status.message.is_none(),
        "{status:#?}"
    );
    assert_eq!(
        count_steps(&versions),
        3,
        "creation and two writes: {versions:#?}"
    );
    let new = container_statuses(&test.get_pod("web").await)["main"].clone();
    assert_ne!(new.id, old.id);
    assert_eq!((new.restarts, new.ready), (1, true));
    let snapshot = &status.container_status_snapshot[0];
    assert_eq!(
        (snapshot.container_id.as_deref(), snapshot.ready),
        (Some(new.id.as_str()), true)
    );
    let event_message = test.wait_event("Killing", "main").await;
    assert_eq!(
        event_message,
        "Stopping container main by ContainerRecreateRequest one"
    );
}

#[tokio::test]
async fn containers_are_stopped_in_parallel() {
    let test = shared_cluster().await;
    let names = ["a", "b", "c"];
    let containers: Vec<Value> = names.iter().map(|name| container(name, 2)).collect();
    let pod = test.create_pod("web", json!(containers), json!({})).await;
    test.create_request("three", &pod, &names, json!({})).await;
    let (status, _) = test.wait_completed("three").await;
    assert_succeeded(&status);
    let mut term_times = Vec::new();
    for name in names {
        term_times.push(test.wait_for_file(&format!("{name}.term")).await);
    }
    term_times.sort();
    let spread = term_times[2].duration_since(term_times[0]).unwrap();
    assert!(
        spread < Duration::from_secs(3),
        "TERM came within {spread:?}; one after another would be 4 s and more"
    );
}

#[tokio::test]
async fn ordered_recreate_follows_request_order() {
    let test = shared_cluster().await;
    let pod = test
        .create_pod("web", json!([container("a", 1), container("b", 0)]), json!({}))
        .await;
    test.create_request(
        "ordered",
        &pod,
        &["b", "a"],
        json!({"strategy": {"orderedRecreate": true}}),
    )
    .await;
    let (_, versions) = test.wait_completed("ordered").await;
    let status = versions.last().unwrap().status.clone().unwrap();
    assert_succeeded(&status);
    for request in &versions {
        let states = request
            .status
            .iter()
            .flat_map(|status| &status.container_recreate_states);
        let phases: Vec<_> = states.map(|state| (state.name.as_str(), &state.phase)).collect();
        if let [("b", b), ("a", a)] = phases.as_slice() {
            assert!(**a == Phase::Pending || **b == Phase::Succeeded, "{phases:?}");
        }
    }
}

#[tokio::test]
async fn second_request_waits_for_the_first() {
    let test = shared_cluster().await;
    let pod = test
        .create_pod("web", json!([container("main", 0)]), json!({}))
        .await;
    let force = json!({"strategy": {"forceRecreate": true}});
    test.create_request("first", &pod, &["main"], force.clone()).await;
    test.create_request("second", &pod, &["main"], force).await;
    let (waiting, _) = test
        .watch_until("second", "it waits", |request: &ContainerRecreateRequest| {
            request
                .status
                .as_ref()
                .is_some_and(|status| status.phase == Phase::Pending)
        })
        .await;
    let wait_message = waiting.status.unwrap().message.unwrap_or_default();
    assert_eq!(wait_message, "waiting for ContainerRecreateRequest first to end");
    let (first, _) = test.wait_completed("first").await;
    assert_succeeded(&first);
    let (second, versions) = test.wait_completed("second").await;
    assert_succeeded(&second);
    assert_eq!(container_statuses(&test.get_pod("web").await)["main"].restarts, 2);
    let messages: Vec<_> = versions
        .iter()
        .filter_map(|version| {
            version
                .status
                .as_ref()?
                .container_recreate_states
                .first()?
                .message
                .clone()
        })
        .collect();
    assert!(
        messages
            .iter()
            .any(|text| text.starts_with("kubelet ") && text.contains("back until 20")),
        "{messages:#?}"
    );
}

#[tokio::test]
async fn already_replaced_container_succeeds_unless_forced() {
    let test = shared_cluster().await;
    let mut pod = test
        .create_pod("web", json!([container("main", 0)]), json!({}))
        .await;
    let running = container_statuses(&pod)["main"].id.clone();
    pod.status.as_mut().unwrap().container_statuses.as_mut().unwrap()[0].container_id =
        Some("containerd://gone".into());
    test.create_request("accepts", &pod, &["main"], json!({})).await;
    let (status, _) = test.wait_completed("accepts").await;
    assert_succeeded(&status);
    assert!(!status.container_recreate_states[0].is_killed);
    assert_eq!(
        container_statuses(&test.get_pod("web").await)["main"].id,
        running,
        "nothing was stopped"
    );
    test.create_request(
        "forces",
        &pod,
        &["main"],
        json!({"strategy": {"forceRecreate": true}}),
    )
    .await;
    let (status, _) = test.wait_completed("forces").await;
    assert_succeeded(&status);
    assert_eq!(
        status.container_recreate_states[0].container_id.as_deref(),
        Some(running.as_str())
    );
    assert_ne!(container_statuses(&test.get_pod("web").await)["main"].id, running);
}

#[tokio::test]
async fn native_sidecar_is_recreated() {
    let test = shared_cluster().await;
    let mut sidecar = container("mesh", 0);
    sidecar["restartPolicy"] = json!("Always");
    let init_containers =
        json!({"initContainers": [{"name": "setup", "image": "busybox:1.36", "command": ["true"]}, sidecar]});
    let pod = test
        .create_pod("web", json!([container("main", 0)]), init_containers)
        .await;
    let old = container_statuses(&pod);
    test.create_request("sidecar", &pod, &["mesh"], json!({})).await;
    let (status, _) = test.wait_completed("sidecar").await;
    assert_succeeded(&status);
    let new = container_statuses(&test.get_pod("web").await);
    assert_ne!(new["mesh"].id, old["mesh"].id);
    assert_eq!(new["main"], old["main"]);
    test.create_request("setup", &pod, &["setup"], json!({})).await;
    let (status, _) = test.wait_completed("setup").await;
    let message = status.container_recreate_states[0]
        .message
        .clone()
        .unwrap_or_default();
    assert!(message.contains("init container that runs once"), "{status:#?}");
}

#[tokio::test]
async fn request_for_missing_container_or_pod_fails() {
    let test = shared_cluster().await;
    let pod = test
        .create_pod("web", json!([container("main", 0)]), json!({}))
        .await;
    test.create_request(
        "unknown",
        &pod,
        &["nowhere", "main"],
        json!({"strategy": {"failurePolicy": "Ignore"}}),
    )
    .await;
    let (status, _) = test.wait_completed("unknown").await;
    let [unknown, main] = status.container_recreate_states.as_slice() else {
        panic!("{status:#?}")
    };
    assert!(
        unknown
            .message
            .as_deref()
            .unwrap_or_default()
            .contains("no container \"nowhere\"; it has main")
    );
    assert_eq!((&unknown.phase, &main.phase), (&Phase::Failed, &Phase::Succeeded));
    let mut missing_pod = pod.clone();
    missing_pod.metadata.name = Some("nobody".into());
    missing_pod.metadata.uid = Some("00000000-0000-0000-0000-000000000000".into());
    test.create_request("gone", &missing_pod, &["main"], json!({}))
        .await;
    let (status, _) = test.wait_completed("gone").await;
    assert_eq!(status.message.as_deref(), Some("pod has gone"));
    // The name is right, but the UID is another Pod's: nothing of this Pod may be touched.
    let before = container_statuses(&test.get_pod("web").await);
    missing_pod.metadata.name = Some("web".into());
    test.create_request("other", &missing_pod, &["main"], json!({}))
        .await;
    assert_eq!(
        test.wait_completed("other").await.0.message.as_deref(),
        Some("pod has gone")
    );
    assert_eq!(container_statuses(&test.get_pod("web").await), before);
}

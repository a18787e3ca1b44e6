//! ContainerRecreateRequests on a real node: kubelet, containerd, runc, and the daemon as it is built, as its
//! own service account behind the fence. But for `together` no manager runs, so these also show that the daemon
//! needs none; requests are made as admission leaves them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bed;
mod faults;
mod hooks;
mod rules;
mod together;

use std::time::Duration;
use support::{connect, manager, programs, waits};

use bed::{assert_succeeded, shared, statuses};
use kruise_api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestPhase as Phase,
};
use serde_json::{Value, json};

/// A container that notes TERM in `/log/NAME.term` and then ends after `seconds`.
fn container(name: &str, seconds: u32) -> Value {
    let script = format!(
        "trap 'touch /log/{name}.term; sleep {seconds}; exit 0' TERM; touch /log/{name}.up; \
         while :; do sleep 3600 & wait $!; done"
    );
    json!({"name": name, "image": "busybox:1.36", "command": ["sh", "-c", script]})
}

/// How often something happened to a request that has ended, by its versions: what takes 3 s has another message meanwhile.
fn turns(versions: &[ContainerRecreateRequest]) -> usize {
    let last = versions.last().unwrap();
    let made = last.metadata.creation_timestamp.as_ref().unwrap().0;
    let ended = last.status.as_ref().unwrap().completion_time.as_ref().unwrap().0;
    // Both are cut to seconds.
    if ended.duration_since(made).as_secs() < 3 {
        return versions.len();
    }
    let mut silent = versions.to_vec();
    for request in &mut silent {
        request.metadata.resource_version = None;
        request.metadata.managed_fields = None;
        if let Some(status) = &mut request.status {
            status.message = None;
            for state in &mut status.container_recreate_states {
                state.message = None;
            }
        }
    }
    silent.dedup_by_key(|request| json!(request));
    silent.len()
}

#[tokio::test]
async fn one_container_is_restarted_in_place_with_two_writes() {
    let test = shared().await;
    let pod = test.pod("web", json!([container("main", 0)]), json!({})).await;
    let old = statuses(&pod)["main"].clone();
    let completed = |request: &ContainerRecreateRequest| {
        let status = request.status.as_ref();
        status.is_some_and(|status| status.completion_time.is_some())
    };
    let made = test.request("one", &pod, &["main"], json!({}));
    let ((request, versions), _) = test.follow_from("one", "completed", completed, made).await;
    let status = request.status.unwrap();
    assert_succeeded(&status);
    let state = &status.container_recreate_states[0];
    assert!(
        state.is_killed && state.message.is_none() && status.message.is_none(),
        "{status:#?}"
    );
    assert_eq!(turns(&versions), 3, "creation and two writes: {versions:#?}");
    let new = statuses(&test.get_pod("web").await)["main"].clone();
    assert_ne!(new.id, old.id);
    assert_eq!((new.restarts, new.ready), (1, true));
    let snapshot = &status.container_status_snapshot[0];
    assert_eq!(
        (snapshot.container_id.as_deref(), snapshot.ready),
        (Some(new.id.as_str()), true)
    );
    let said = test.event("Killing", "main").await;
    assert_eq!(said, "Stopping container main by ContainerRecreateRequest one");
}

#[tokio::test]
async fn three_slow_containers_stop_at_the_same_time() {
    let test = shared().await;
    let names = ["a", "b", "c"];
    let containers: Vec<Value> = names.iter().map(|name| container(name, 2)).collect();
    let pod = test.pod("web", json!(containers), json!({})).await;
    test.request("three", &pod, &names, json!({})).await;
    let (status, _) = test.completed("three").await;
    assert_succeeded(&status);
    let mut terms = Vec::new();
    for name in names {
        terms.push(test.mark(&format!("{name}.term")).await);
    }
    terms.sort();
    let spread = terms[2].duration_since(terms[0]).unwrap();
    assert!(
        spread < Duration::from_secs(3),
        "TERM came within {spread:?}; one after another would be 4 s and more"
    );
}

#[tokio::test]
async fn ordered_means_one_after_the_other_in_the_order_of_the_request() {
    let test = shared().await;
    let pod = test
        .pod("web", json!([container("a", 1), container("b", 0)]), json!({}))
        .await;
    test.request(
        "ordered",
        &pod,
        &["b", "a"],
        json!({"strategy": {"orderedRecreate": true}}),
    )
    .await;
    let (_, versions) = test.completed("ordered").await;
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
async fn the_second_request_starts_when_the_first_ends_and_says_what_kubelet_waits_for() {
    let test = shared().await;
    let pod = test.pod("web", json!([container("main", 0)]), json!({})).await;
    let force = json!({"strategy": {"forceRecreate": true}});
    test.request("first", &pod, &["main"], force.clone()).await;
    test.request("second", &pod, &["main"], force).await;
    let (waiting, _) = test
        .follow("second", "it waits", |request: &ContainerRecreateRequest| {
            request
                .status
                .as_ref()
                .is_some_and(|status| status.phase == Phase::Pending)
        })
        .await;
    let waits = waiting.status.unwrap().message.unwrap_or_default();
    assert_eq!(waits, "waiting for ContainerRecreateRequest first to end");
    let (first, _) = test.completed("first").await;
    assert_succeeded(&first);
    let (second, versions) = test.completed("second").await;
    assert_succeeded(&second);
    assert_eq!(statuses(&test.get_pod("web").await)["main"].restarts, 2);
    let said: Vec<_> = versions
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
        said.iter()
            .any(|text| text.starts_with("kubelet ") && text.contains("back until 20")),
        "{said:#?}"
    );
}

#[tokio::test]
async fn a_container_replaced_before_is_accepted_unless_forced() {
    let test = shared().await;
    let mut pod = test.pod("web", json!([container("main", 0)]), json!({})).await;
    let running = statuses(&pod)["main"].id.clone();
    pod.status.as_mut().unwrap().container_statuses.as_mut().unwrap()[0].container_id =
        Some("containerd://gone".into());
    test.request("accepts", &pod, &["main"], json!({})).await;
    let (status, _) = test.completed("accepts").await;
    assert_succeeded(&status);
    assert!(!status.container_recreate_states[0].is_killed);
    assert_eq!(
        statuses(&test.get_pod("web").await)["main"].id,
        running,
        "nothing was stopped"
    );
    test.request(
        "forces",
        &pod,
        &["main"],
        json!({"strategy": {"forceRecreate": true}}),
    )
    .await;
    let (status, _) = test.completed("forces").await;
    assert_succeeded(&status);
    assert_eq!(
        status.container_recreate_states[0].container_id.as_deref(),
        Some(running.as_str())
    );
    assert_ne!(statuses(&test.get_pod("web").await)["main"].id, running);
}

#[tokio::test]
async fn a_native_sidecar_is_recreated() {
    let test = shared().await;
    let mut sidecar = container("mesh", 0);
    sidecar["restartPolicy"] = json!("Always");
    let more =
        json!({"initContainers": [{"name": "setup", "image": "busybox:1.36", "command": ["true"]}, sidecar]});
    let pod = test.pod("web", json!([container("main", 0)]), more).await;
    let old = statuses(&pod);
    test.request("sidecar", &pod, &["mesh"], json!({})).await;
    let (status, _) = test.completed("sidecar").await;
    assert_succeeded(&status);
    let new = statuses(&test.get_pod("web").await);
    assert_ne!(new["mesh"].id, old["mesh"].id);
    assert_eq!(new["main"], old["main"]);
    test.request("setup", &pod, &["setup"], json!({})).await;
    let (status, _) = test.completed("setup").await;
    let message = status.container_recreate_states[0]
        .message
        .clone()
        .unwrap_or_default();
    assert!(message.contains("init container that runs once"), "{status:#?}");
}

#[tokio::test]
async fn a_request_for_what_is_not_there_ends_in_words() {
    let test = shared().await;
    let pod = test.pod("web", json!([container("main", 0)]), json!({})).await;
    test.request(
        "unknown",
        &pod,
        &["nowhere", "main"],
        json!({"strategy": {"failurePolicy": "Ignore"}}),
    )
    .await;
    let (status, _) = test.completed("unknown").await;
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
    let mut gone = pod.clone();
    gone.metadata.name = Some("nobody".into());
    gone.metadata.uid = Some("00000000-0000-0000-0000-000000000000".into());
    test.request("gone", &gone, &["main"], json!({})).await;
    let (status, _) = test.completed("gone").await;
    assert_eq!(status.message.as_deref(), Some("pod has gone"));
    // The name is right, the UID is another Pod's: nothing of this Pod may be touched.
    let before = statuses(&test.get_pod("web").await);
    gone.metadata.name = Some("web".into());
    test.request("other", &gone, &["main"], json!({})).await;
    assert_eq!(
        test.completed("other").await.0.message.as_deref(),
        Some("pod has gone")
    );
    assert_eq!(statuses(&test.get_pod("web").await), before);
}

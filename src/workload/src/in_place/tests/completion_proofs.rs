use serde_json::{Value, json};

use super::*;
use crate::in_place::completion::WaitingFor;
use kruise_api::container_hash::{deep_hash, plain_hash};
use kruise_api::keys;

/// A new container of `main`.
fn restart_container(pod: &mut Value, id: &str, image: &str, image_id: &str) {
    let status = &mut pod["status"]["containerStatuses"][0];
    status["containerID"] = json!(id);
    status["image"] = json!(image);
    status["imageID"] = json!(image_id);
    status["restartCount"] = json!(1);
}

pub(super) fn report_runtime_hashes(pod: &mut Value, id: &str, plain: u64, env: u64) {
    let meta = json!({ "containers": [{
        "name": "main", "containerID": id, "restartCount": 0,
        "hashes": { "plainHash": plain, "extractedEnvFromMetadataHash": env },
    }]});
    pod["metadata"]["annotations"][keys::RUNTIME_CONTAINERS_META] = json!(meta.to_string());
}

fn updating_pod() -> Value {
    let mut pod = pod(&["main"]);
    start(&mut pod, &images(&[("main", "main:2")]));
    pod
}

fn assert_waits(pod: &Value, why: &str) {
    match progress(&Pod::from_json(pod)) {
        UpdateProgress::Waiting(waiting) => assert!(waiting.to_string().contains(why), "{waiting}"),
        UpdateProgress::Done => panic!("complete, although {why}"),
    }
}

fn assert_done(pod: &Value) {
    assert_eq!(progress(&Pod::from_json(pod)), UpdateProgress::Done);
}

#[test]
fn previous_container_is_no_proof() {
    assert_waits(&updating_pod(), "not been replaced yet");
}

#[test]
fn waiting_reason_is_that_of_kubelet() {
    let mut pod = updating_pod();
    pod["status"]["containerStatuses"][0]["state"] = json!({ "waiting": { "reason": "ImagePullBackOff" } });
    assert_waits(&pod, "container main: ImagePullBackOff");
}

#[test]
fn new_container_id_alone_is_no_proof() {
    let mut pod = updating_pod();
    restart_container(
        &mut pod,
        "containerd://crashed",
        "docker.io/library/main:1",
        "sha256:main-1",
    );
    assert_waits(&pod, "the new image is not confirmed yet");
    // The daemon knows that it was started with the old image, whatever else is reported.
    restart_container(
        &mut pod,
        "containerd://crashed",
        "docker.io/library/main:2",
        "sha256:main-2",
    );
    report_runtime_hashes(&mut pod, "containerd://crashed", plain_hash("main", "main:1"), 0);
    assert_waits(&pod, "the image from before");
    // A hash that is neither may have the form of a later kubelet, and proves nothing.
    report_runtime_hashes(&mut pod, "containerd://crashed", 12345, 0);
    assert_done(&pod);
}

#[test]
fn new_container_id_and_image_are_proof() {
    let mut pod = updating_pod();
    restart_container(&mut pod, "containerd://new", "whatever", "sha256:main-2");
    assert_done(&pod);
    // A new image for the old container is no proof: status and spec may be of different times.
    restart_container(&mut pod, "containerd://main-0", "whatever", "sha256:main-2");
    assert_waits(&pod, "not been replaced yet");
}

#[test]
fn update_between_tags_of_one_digest_completes() {
    let mut pod = updating_pod();
    restart_container(
        &mut pod,
        "containerd://new",
        "docker.io/library/main:2",
        "sha256:main-1",
    );
    assert_done(&pod);
    // containerd may report the other tag; then the daemon's report is needed.
    restart_container(
        &mut pod,
        "containerd://new",
        "docker.io/library/main:1",
        "sha256:main-1",
    );
    assert_waits(&pod, "the new image is not confirmed yet");
    report_runtime_hashes(&mut pod, "containerd://new", plain_hash("main", "main:2"), 0);
    assert_done(&pod);
}

#[test]
fn runtime_hash_counts_for_running_container() {
    let mut pod = updating_pod();
    report_runtime_hashes(&mut pod, "containerd://other", plain_hash("main", "main:2"), 0);
    assert_waits(&pod, "not been replaced yet");
    report_runtime_hashes(&mut pod, "containerd://main-0", plain_hash("main", "main:2"), 0);
    assert_done(&pod);
    let old_kubelet = Pod::from_json(&pod).containers[0].plain_before_131.unwrap();
    report_runtime_hashes(&mut pod, "containerd://main-0", old_kubelet, 0);
    assert_done(&pod);
    pod["metadata"]["annotations"][keys::RUNTIME_CONTAINERS_META] = json!("{");
    assert_waits(&pod, "cannot be read");
}

#[test]
fn go_manager_update_completes_as_in_go() {
    let mut pod = updating_pod();
    pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_STATE] = json!(
        r#"{"revision":"r2","updateTimestamp":"2024-01-02T03:04:05Z","lastContainerStatuses":{"main":{"imageID":"sha256:main-1"}}}"#
    );
    assert_waits(&pod, "the new image is not confirmed yet");
    restart_container(
        &mut pod,
        "containerd://main-0",
        "docker.io/library/main:2",
        "sha256:main-1",
    );
    assert_done(&pod);
    // A registry's port is no tag.
    pod["spec"]["containers"][0]["image"] = json!("host:5000/main");
    restart_container(
        &mut pod,
        "containerd://main-0",
        "host:5000/main:latest",
        "sha256:main-1",
    );
    assert_done(&pod);
}

#[test]
fn rollback_before_kubelet_observed_it_completes() {
    let mut pod = updating_pod();
    start(&mut pod, &images(&[("main", "main:1")]));
    assert_done(&pod);
    // Rolled back after the new container failed: it must be replaced.
    let mut pod = updating_pod();
    restart_container(
        &mut pod,
        "containerd://bad",
        "docker.io/library/main:2",
        "sha256:main-2",
    );
    start(&mut pod, &images(&[("main", "main:1")]));
    assert_waits(&pod, "not been replaced yet");
    restart_container(
        &mut pod,
        "containerd://good",
        "docker.io/library/main:1",
        "sha256:main-1",
    );
    assert_done(&pod);
}

#[test]
fn unfinished_update_is_merged_into_the_next() {
    let mut pod = updating_pod();
    let mut spec = images(&[]);
    let patch = r#"{"metadata":{"labels":{"b":"1"}}}"#;
    let patch = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, patch);
    spec.meta_data_patch = Some(patch);
    start(&mut pod, &spec);
    assert_waits(&pod, "not been replaced yet");
    restart_container(
        &mut pod,
        "containerd://new",
        "docker.io/library/main:2",
        "sha256:main-2",
    );
    assert_done(&pod);
    // An image that already runs restarts nothing.
    start(&mut pod, &images(&[("main", "main:2")]));
    assert_done(&pod);
}

#[test]
fn env_update_needs_runtime_hash_of_all_containers() {
    let mut pod = pod(&["main"]);
    pod["spec"]["containers"][0]["env"] = json!([{
        "name": "V", "valueFrom": { "fieldRef": { "fieldPath": "metadata.labels['v']" } },
    }]);
    let mut spec = images(&[]);
    spec.update_env_from_metadata = true;
    spec.container_ref_metadata
        .entry("main".into())
        .or_default()
        .labels
        .insert("v".into(), "2".into());
    start(&mut pod, &spec);
    assert_eq!(pod["metadata"]["labels"]["v"], "2");
    assert!(!condition_is_true(&pod, keys::IN_PLACE_UPDATE_READY));
    assert_waits(&pod, "environment");
    report_runtime_hashes(
        &mut pod,
        "containerd://main-0",
        1,
        deep_hash(r#"[{"name":"V","value":"1"}]"#),
    );
    assert_waits(&pod, "environment");
    report_runtime_hashes(
        &mut pod,
        "containerd://main-0",
        1,
        deep_hash(r#"[{"name":"V","value":"2"}]"#),
    );
    assert_done(&pod);
}

#[test]
fn resize_needs_kubelet_status_and_no_restart() {
    let mut pod = pod(&["main"]);
    pod["spec"]["containers"][0]["resources"] = json!({ "requests": { "cpu": "1" } });
    let mut spec = images(&[]);
    let cpu = json!({ "main": { "requests": { "cpu": "2" } } });
    spec.container_resources = serde_json::from_value(cpu).unwrap();
    let writes = start(&mut pod, &spec);
    assert_eq!(
        writes.iter().map(|w| w.target).collect::<Vec<_>>(),
        [PatchTarget::Status, PatchTarget::Resize, PatchTarget::Pod]
    );
    assert!(condition_is_true(&pod, "Ready"));
    assert_waits(&pod, "resources");
    let pending =
        json!({ "type": "PodResizePending", "status": "True", "reason": "Infeasible", "message": "no CPU" });
    pod["status"]["conditions"].as_array_mut().unwrap().push(pending);
    assert_waits(&pod, "are not in effect: Infeasible: no CPU");
    pod["status"]["containerStatuses"][0]["resources"] = json!({ "requests": { "cpu": "2000m" } });
    assert_done(&pod);
    pod["spec"]["containers"][0]["resizePolicy"] =
        json!([{ "resourceName": "cpu", "restartPolicy": "RestartContainer" }]);
    assert_eq!(start(&mut pod, &spec)[0].target, PatchTarget::Status);
}

#[test]
fn pod_is_not_ready_only_while_containers_restart() {
    let mut pod = updating_pod();
    assert!(!condition_is_true(&pod, keys::IN_PLACE_UPDATE_READY) && !condition_is_true(&pod, "Ready"));
    assert!(matches!(
        refresh_at(&pod, 1),
        RefreshResult::Wait(WaitingFor::NewContainer(..))
    ));
    restart_container(&mut pod, "containerd://new", "main:2", "sha256:main-2");
    assert_eq!(refresh_at(&pod, 1), RefreshResult::Done);
    let back = ready::ready_condition(&Pod::from_json(&pod), timestamp(2)).unwrap();
    apply(&mut pod, &json!({ "status": { "conditions": [back] } }));
    assert_eq!(ready::ready_condition(&Pod::from_json(&pod), timestamp(3)), None);

    let mut plain = super::pod(&["main"]);
    let mut spec = images(&[]);
    let patch = r#"{"metadata":{"labels":{"app":null,"b":"1"}}}"#;
    spec.meta_data_patch = Some(base64::Engine::encode(
        &base64::engine::general_purpose::STANDARD,
        patch,
    ));
    let writes = start(&mut plain, &spec);
    assert_eq!(writes.len(), 1);
    assert_eq!(plain["metadata"]["labels"], json!({ "b": "1" }));
    assert_eq!(plain["metadata"]["annotations"]["ours"], "not");
    assert_done(&plain);
}

/// The daemon restarts a container for its environment only while the Pod is out of its Services.
#[test]
fn missing_readiness_gate_is_reported() {
    let mut pod = updating_pod();
    let text = pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_STATE]
        .as_str()
        .unwrap();
    let mut state: Value = serde_json::from_str(text).unwrap();
    state["updateEnvFromMetadata"] = json!(true);
    pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_STATE] = json!(state.to_string());
    assert_waits(
        &pod,
        "container main: the change of its environment is not confirmed yet",
    );
    pod["spec"]["readinessGates"] = json!([]);
    assert_waits(
        &pod,
        "only in a Pod with readiness gate InPlaceUpdateReady; delete the Pod",
    );
}

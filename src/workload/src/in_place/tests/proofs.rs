use serde_json::{Value, json};

use super::*;
use crate::in_place::complete::Waiting;
use kruise_api::container_hash::{deep_hash, plain_hash};
use kruise_api::keys;

/// A new container of `main`.
fn restarted(pod: &mut Value, id: &str, image: &str, image_id: &str) {
    let status = &mut pod["status"]["containerStatuses"][0];
    status["containerID"] = json!(id);
    status["image"] = json!(image);
    status["imageID"] = json!(image_id);
    status["restartCount"] = json!(1);
}

pub(super) fn daemon_says(pod: &mut Value, id: &str, plain: u64, env: u64) {
    let meta = json!({ "containers": [{
        "name": "main", "containerID": id, "restartCount": 0,
        "hashes": { "plainHash": plain, "extractedEnvFromMetadataHash": env },
    }]});
    pod["metadata"]["annotations"][keys::RUNTIME_CONTAINERS_META] = json!(meta.to_string());
}

fn updating() -> Value {
    let mut pod = pod(&["main"]);
    start(&mut pod, &images(&[("main", "main:2")]));
    pod
}

fn waits(pod: &Value, why: &str) {
    match progress(&Pod::of(pod)) {
        Progress::Waiting(waiting) => assert!(waiting.to_string().contains(why), "{waiting}"),
        Progress::Done => panic!("it is done, though {why}"),
    }
}

fn done(pod: &Value) {
    assert_eq!(progress(&Pod::of(pod)), Progress::Done);
}

#[test]
fn the_container_from_before_is_no_proof() {
    waits(&updating(), "not been replaced yet");
}

#[test]
fn why_nothing_runs_is_said_in_kubelets_words() {
    let mut pod = updating();
    pod["status"]["containerStatuses"][0]["state"] = json!({ "waiting": { "reason": "ImagePullBackOff" } });
    waits(&pod, "container main: ImagePullBackOff");
}

#[test]
fn a_new_id_alone_is_no_proof() {
    let mut pod = updating();
    restarted(
        &mut pod,
        "containerd://crashed",
        "docker.io/library/main:1",
        "sha256:main-1",
    );
    waits(&pod, "the new image is not confirmed yet");
    // Whatever else is said: the daemon knows that it was started as of old.
    restarted(
        &mut pod,
        "containerd://crashed",
        "docker.io/library/main:2",
        "sha256:main-2",
    );
    daemon_says(&mut pod, "containerd://crashed", plain_hash("main", "main:1"), 0);
    waits(&pod, "the image from before");
    // A hash that is neither may be of a form that a later kubelet has, and is no word.
    daemon_says(&mut pod, "containerd://crashed", 12345, 0);
    done(&pod);
}

#[test]
fn a_new_id_with_a_new_image_is_proof() {
    let mut pod = updating();
    restarted(&mut pod, "containerd://new", "whatever", "sha256:main-2");
    done(&pod);
    // A new image for the old container is none: status and spec may be of different times.
    restarted(&mut pod, "containerd://main-0", "whatever", "sha256:main-2");
    waits(&pod, "not been replaced yet");
}

#[test]
fn two_tags_of_one_digest_finish() {
    let mut pod = updating();
    restarted(
        &mut pod,
        "containerd://new",
        "docker.io/library/main:2",
        "sha256:main-1",
    );
    done(&pod);
    // containerd may report the other tag; then the daemon's word is needed.
    restarted(
        &mut pod,
        "containerd://new",
        "docker.io/library/main:1",
        "sha256:main-1",
    );
    waits(&pod, "the new image is not confirmed yet");
    daemon_says(&mut pod, "containerd://new", plain_hash("main", "main:2"), 0);
    done(&pod);
}

#[test]
fn the_daemons_hash_counts_for_the_container_that_runs() {
    let mut pod = updating();
    daemon_says(&mut pod, "containerd://other", plain_hash("main", "main:2"), 0);
    waits(&pod, "not been replaced yet");
    daemon_says(&mut pod, "containerd://main-0", plain_hash("main", "main:2"), 0);
    done(&pod);
    let old_kubelet = Pod::of(&pod).containers[0].plain_before_131.unwrap();
    daemon_says(&mut pod, "containerd://main-0", old_kubelet, 0);
    done(&pod);
    pod["metadata"]["annotations"][keys::RUNTIME_CONTAINERS_META] = json!("{");
    waits(&pod, "cannot be read");
}

#[test]
fn an_update_of_the_go_manager_is_judged_as_it_would() {
    let mut pod = updating();
    pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_STATE] = json!(
        r#"{"revision":"r2","updateTimestamp":"2024-01-02T03:04:05Z","lastContainerStatuses":{"main":{"imageID":"sha256:main-1"}}}"#
    );
    waits(&pod, "the new image is not confirmed yet");
    restarted(
        &mut pod,
        "containerd://main-0",
        "docker.io/library/main:2",
        "sha256:main-1",
    );
    done(&pod);
    // A registry's port is no tag.
    pod["spec"]["containers"][0]["image"] = json!("host:5000/main");
    restarted(
        &mut pod,
        "containerd://main-0",
        "host:5000/main:latest",
        "sha256:main-1",
    );
    done(&pod);
}

#[test]
fn taken_back_before_kubelet_saw_it_is_done() {
    let mut pod = updating();
    start(&mut pod, &images(&[("main", "main:1")]));
    done(&pod);
    // Taken back after the new container failed: it must go.
    let mut pod = updating();
    restarted(
        &mut pod,
        "containerd://bad",
        "docker.io/library/main:2",
        "sha256:main-2",
    );
    start(&mut pod, &images(&[("main", "main:1")]));
    waits(&pod, "not been replaced yet");
    restarted(
        &mut pod,
        "containerd://good",
        "docker.io/library/main:1",
        "sha256:main-1",
    );
    done(&pod);
}

#[test]
fn an_update_that_did_not_end_is_not_forgotten_by_the_next() {
    let mut pod = updating();
    let mut spec = images(&[]);
    let patch = r#"{"metadata":{"labels":{"b":"1"}}}"#;
    let patch = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, patch);
    spec.meta_data_patch = Some(patch);
    start(&mut pod, &spec);
    waits(&pod, "not been replaced yet");
    restarted(
        &mut pod,
        "containerd://new",
        "docker.io/library/main:2",
        "sha256:main-2",
    );
    done(&pod);
    // What is there already restarts nothing.
    start(&mut pod, &images(&[("main", "main:2")]));
    done(&pod);
}

#[test]
fn environment_needs_the_daemons_word_on_all_containers() {
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
    assert!(!holds(&pod, keys::IN_PLACE_UPDATE_READY));
    waits(&pod, "environment");
    daemon_says(
        &mut pod,
        "containerd://main-0",
        1,
        deep_hash(r#"[{"name":"V","value":"1"}]"#),
    );
    waits(&pod, "environment");
    daemon_says(
        &mut pod,
        "containerd://main-0",
        1,
        deep_hash(r#"[{"name":"V","value":"2"}]"#),
    );
    done(&pod);
}

#[test]
fn resources_need_kubelets_word_and_no_restart() {
    let mut pod = pod(&["main"]);
    pod["spec"]["containers"][0]["resources"] = json!({ "requests": { "cpu": "1" } });
    let mut spec = images(&[]);
    let cpu = json!({ "main": { "requests": { "cpu": "2" } } });
    spec.container_resources = serde_json::from_value(cpu).unwrap();
    let writes = start(&mut pod, &spec);
    assert_eq!(
        writes.iter().map(|w| w.to).collect::<Vec<_>>(),
        [Target::Status, Target::Resize, Target::Pod]
    );
    assert!(holds(&pod, "Ready"));
    waits(&pod, "resources");
    let pending =
        json!({ "type": "PodResizePending", "status": "True", "reason": "Infeasible", "message": "no CPU" });
    pod["status"]["conditions"].as_array_mut().unwrap().push(pending);
    waits(&pod, "are not in effect: Infeasible: no CPU");
    pod["status"]["containerStatuses"][0]["resources"] = json!({ "requests": { "cpu": "2000m" } });
    done(&pod);
    pod["spec"]["containers"][0]["resizePolicy"] =
        json!([{ "resourceName": "cpu", "restartPolicy": "RestartContainer" }]);
    assert_eq!(start(&mut pod, &spec)[0].to, Target::Status);
}

#[test]
fn a_pod_is_out_of_its_services_only_while_something_restarts() {
    let mut pod = updating();
    assert!(!holds(&pod, keys::IN_PLACE_UPDATE_READY) && !holds(&pod, "Ready"));
    assert!(matches!(next(&pod, 1), Refresh::Wait(Waiting::NewContainer(..))));
    restarted(&mut pod, "containerd://new", "main:2", "sha256:main-2");
    assert_eq!(next(&pod, 1), Refresh::Done);
    let back = ready::ready(&Pod::of(&pod), at(2)).unwrap();
    apply(&mut pod, &json!({ "status": { "conditions": [back] } }));
    assert_eq!(ready::ready(&Pod::of(&pod), at(3)), None);

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
    done(&plain);
}

/// The daemon restarts a container for its environment only while the Pod is out of its Services.
#[test]
fn a_pod_without_the_gate_says_so() {
    let mut pod = updating();
    let text = pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_STATE]
        .as_str()
        .unwrap();
    let mut state: Value = serde_json::from_str(text).unwrap();
    state["updateEnvFromMetadata"] = json!(true);
    pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_STATE] = json!(state.to_string());
    waits(
        &pod,
        "container main: the change of its environment is not confirmed yet",
    );
    pod["spec"]["readinessGates"] = json!([]);
    waits(
        &pod,
        "only in a Pod with readiness gate InPlaceUpdateReady; delete the Pod",
    );
}

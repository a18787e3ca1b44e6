//! Updates while no daemon reports how containers were started: an update that can be confirmed without it finishes,
//! any other waits and says so. Container hooks block kubelet at the states that the tests need.

use std::ops::Deref;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Value, json};

use crate::clone_set_ops::{
    CloneSetOps, assert_container_untouched, assert_restarted_once, assert_same_pod, condition_is_true,
    container, container_status, exclusive_cluster,
};
use crate::fixture::{DaemonCluster, TestNamespace};
use crate::pod_meta::{self, env_from_annotation};

const IMAGE_A: &str = "kruise-test/term:1";
/// The same image as `IMAGE_A`.
const IMAGE_A_OTHER_TAG: &str = "kruise-test/term:1-again";
const IMAGE_B: &str = "kruise-test/term:2";
const IMAGE_C: &str = "busybox:1.36";

#[tokio::test]
async fn in_place_update_without_daemon_waits_for_evidence() {
    let mut test = exclusive_cluster().await;
    test.cluster.daemon.kill().unwrap();
    tokio::join!(
        image_change_completes(&test),
        crash_during_image_change(&test),
        third_image_during_update(&test),
        rollback_during_update(&test),
        second_tag_stays_unconfirmed(&test),
        reported_tag_is_confirmed(&test),
        env_change_stays_unconfirmed(&test),
    );
    let waiting = test.single_pod("twin").await;
    test.cluster.daemon.start().unwrap();
    test.wait_settled("env").await;
    test.wait_settled("twin").await;
    let after = test.single_pod("twin").await;
    assert_same_pod(&waiting, &after);
    assert_container_untouched(&waiting, &after, "app");
}

/// Creates a CloneSet of one Pod, whose container can be made to crash, and whose starts can be blocked.
async fn create_crashable_set<G: Deref<Target = DaemonCluster>>(test: &TestNamespace<G>, name: &str) -> Pod {
    let mut app = container("app", IMAGE_A);
    let script = format!(
        "trap 'exit 0' TERM; while :; do [ -e /log/{name}.crash ] && rm /log/{name}.crash && exit 1; sleep 0.1; done"
    );
    app["command"] = json!(["sh", "-c", script]);
    let hook = format!("echo start >> /log/{name}.starts; while [ -e /log/{name}.hold ]; do sleep 0.1; done");
    app["lifecycle"] = json!({"postStart": {"exec": {"command": ["sh", "-c", hook]}}});
    test.create_set(name, 1, json!([app]), json!({})).await;
    test.single_pod(name).await
}

fn create_log_file<G: Deref<Target = DaemonCluster>>(test: &TestNamespace<G>, file: String) {
    std::fs::write(test.log_dir.join(file), "").unwrap();
}

/// Waits until the container has been started `times` times; kubelet is then in the hook, if that blocks.
async fn wait_for_starts<G: Deref<Target = DaemonCluster>>(
    test: &TestNamespace<G>,
    name: &str,
    times: usize,
) {
    let path = test.log_dir.join(format!("{name}.starts"));
    test.poll_until(&format!("start {times} of {name}"), || async {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        (text.lines().count() >= times).then_some(())
    })
    .await;
}

fn spec_image_is(pod: &Pod, image: &str) -> bool {
    pod.spec.as_ref().unwrap().containers[0].image.as_deref() == Some(image)
}

/// Waits until the Pod's spec has that image.
async fn wait_for_spec_image<G: Deref<Target = DaemonCluster>>(
    test: &TestNamespace<G>,
    pod: &Pod,
    image: &str,
) {
    let predicate = |pod: &Pod| spec_image_is(pod, image);
    test.watch_until(&pod.name_any(), "the new image in its spec", predicate)
        .await;
}

/// Unblocks kubelet, and follows the Pod until it serves with that image: no version for which `is_unconfirmed` holds
/// may serve, and at least one must have been seen.
async fn release_start_hook<G: Deref<Target = DaemonCluster>>(
    test: &TestNamespace<G>,
    pod: &Pod,
    image: &str,
    set: &str,
    is_unconfirmed: impl Fn(&Pod) -> bool,
) -> Pod {
    let name = pod.name_any();
    let is_in_service = |pod: &Pod| {
        spec_image_is(pod, image)
            && condition_is_true(pod, "InPlaceUpdateReady")
            && condition_is_true(pod, "Ready")
    };
    let hold = test.log_dir.join(format!("{set}.hold"));
    let remove_hold = async { std::fs::remove_file(hold).unwrap() };
    let ((_, history), ()) = test
        .watch_until_with(&name, "in use again", is_in_service, remove_hold)
        .await;
    let unconfirmed: Vec<&Pod> = history.iter().filter(|pod| is_unconfirmed(pod)).collect();
    assert!(!unconfirmed.is_empty(), "no unconfirmed version was observed");
    for pod in unconfirmed {
        assert!(
            !condition_is_true(pod, "InPlaceUpdateReady"),
            "{:#?}",
            container_status(pod, "app")
        );
        assert_ne!(pod.labels()["lifecycle.apps.kruise.io/state"], "Normal");
    }
    test.wait_settled(set).await;
    test.get_pod(&name).await
}

async fn image_change_completes<G: Deref<Target = DaemonCluster>>(test: &TestNamespace<G>) {
    let before = create_crashable_set(test, "plain").await;
    test.set_image("plain", 0, IMAGE_B).await;
    test.wait_settled("plain").await;
    let after = test.single_pod("plain").await;
    assert_same_pod(&before, &after);
    assert_restarted_once(&before, &after, "app");
}

/// The container crashes, and kubelet is about to start the old image again when the new one is requested.
async fn crash_during_image_change<G: Deref<Target = DaemonCluster>>(test: &TestNamespace<G>) {
    let before = create_crashable_set(test, "crash").await;
    create_log_file(test, "crash.hold".into());
    create_log_file(test, "crash.crash".into());
    wait_for_starts(test, "crash", 2).await;
    test.set_image("crash", 0, IMAGE_B).await;
    wait_for_spec_image(test, &before, IMAGE_B).await;
    let old = container_status(&before, "app").clone();
    let restarted_with_old_image = |pod: &Pod| {
        let now = container_status(pod, "app");
        spec_image_is(pod, IMAGE_B) && now.container_id != old.container_id && now.image_id == old.image_id
    };
    let after = release_start_hook(test, &before, IMAGE_B, "crash", restarted_with_old_image).await;
    assert_same_pod(&before, &after);
    assert_ne!(container_status(&after, "app").image_id, old.image_id);
    assert_eq!(
        container_status(&after, "app").restart_count,
        old.restart_count + 2
    );
}

/// A third image is requested while kubelet starts the second.
async fn third_image_during_update<G: Deref<Target = DaemonCluster>>(test: &TestNamespace<G>) {
    let before = create_crashable_set(test, "late").await;
    create_log_file(test, "late.hold".into());
    test.set_image("late", 0, IMAGE_B).await;
    wait_for_starts(test, "late", 2).await;
    test.set_image("late", 0, IMAGE_C).await;
    wait_for_spec_image(test, &before, IMAGE_C).await;
    let runs_second_image =
        |pod: &Pod| spec_image_is(pod, IMAGE_C) && container_status(pod, "app").image.ends_with(IMAGE_B);
    let after = release_start_hook(test, &before, IMAGE_C, "late", runs_second_image).await;
    assert_same_pod(&before, &after);
    assert!(container_status(&after, "app").image.ends_with(IMAGE_C));
    assert_eq!(container_status(&after, "app").restart_count, 2);
}

/// The update is rolled back while kubelet starts the new image.
async fn rollback_during_update<G: Deref<Target = DaemonCluster>>(test: &TestNamespace<G>) {
    let before = create_crashable_set(test, "back").await;
    create_log_file(test, "back.hold".into());
    test.set_image("back", 0, IMAGE_B).await;
    wait_for_starts(test, "back", 2).await;
    test.set_image("back", 0, IMAGE_A).await;
    wait_for_spec_image(test, &before, IMAGE_A).await;
    let runs_second_image =
        |pod: &Pod| spec_image_is(pod, IMAGE_A) && container_status(pod, "app").image.ends_with(IMAGE_B);
    let after = release_start_hook(test, &before, IMAGE_A, "back", runs_second_image).await;
    assert_same_pod(&before, &after);
    assert_eq!(
        container_status(&after, "app").image_id,
        container_status(&before, "app").image_id
    );
    assert_eq!(container_status(&after, "app").restart_count, 2);
}

/// The runtime reports both tags by the same name, and the image ID is the same.
async fn second_tag_stays_unconfirmed<G: Deref<Target = DaemonCluster>>(test: &TestNamespace<G>) {
    let before = create_crashable_set(test, "twin").await;
    test.set_image("twin", 0, IMAGE_A_OTHER_TAG).await;
    let blocked = test
        .wait_waiting_message("twin", "the new image is not confirmed yet")
        .await;
    assert_eq!(blocked.status.unwrap().updated_available_replicas, Some(0));
    let after = test.single_pod("twin").await;
    assert_restarted_but_not_ready(&before, &after);
}

/// The opposite case: the runtime reports the new one of the two tags.
async fn reported_tag_is_confirmed<G: Deref<Target = DaemonCluster>>(test: &TestNamespace<G>) {
    let containers = json!([container("app", IMAGE_A_OTHER_TAG)]);
    test.create_set("tag", 1, containers, json!({})).await;
    let before = test.single_pod("tag").await;
    test.set_image("tag", 0, IMAGE_A).await;
    test.wait_settled("tag").await;
    let after = test.single_pod("tag").await;
    assert_same_pod(&before, &after);
    assert_restarted_once(&before, &after, "app");
    assert_eq!(
        container_status(&before, "app").image_id,
        container_status(&after, "app").image_id
    );
}

/// Only the daemon restarts a container for its environment.
async fn env_change_stays_unconfirmed<G: Deref<Target = DaemonCluster>>(test: &TestNamespace<G>) {
    let app = pod_meta::container("app", &[env_from_annotation("CFG", "cfg")]);
    let metadata = json!({"labels": {"app": "env"}, "annotations": {"cfg": "one"}});
    test.create_set(
        "env",
        1,
        json!([app]),
        json!({"template": {"metadata": metadata}}),
    )
    .await;
    let before = test.single_pod("env").await;
    let change = |template: &mut Value| template["metadata"]["annotations"]["cfg"] = json!("two");
    test.update_template("env", change).await;
    test.wait_waiting_message("env", "the change of its environment is not confirmed yet")
        .await;
    assert_container_untouched(&before, &test.single_pod("env").await, "app");
}

fn assert_restarted_but_not_ready(before: &Pod, after: &Pod) {
    assert_same_pod(before, after);
    assert_ne!(
        container_status(before, "app").container_id,
        container_status(after, "app").container_id
    );
    assert!(!condition_is_true(after, "InPlaceUpdateReady") && !condition_is_true(after, "Ready"));
    let lifecycle_state: Value = json!(after.labels()["lifecycle.apps.kruise.io/state"]);
    assert_eq!(lifecycle_state, "Updating");
}

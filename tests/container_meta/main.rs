//! Container metadata, and restarts for changed environment, on a real node: kubelet, containerd, runc, and the daemon
//! with its own service account behind the fence. No manager runs: the test starts in-place updates by the condition
//! that a workload sets.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod daemon_outage;
#[path = "../node_recreate/fixture/mod.rs"]
#[allow(dead_code, unused_imports)]
mod fixture;
mod pod_meta;

use fixture::{container_statuses, shared_cluster};
use k8s_openapi::api::core::v1::Pod;
use kruise_api::container_hash::{env_hash, plain_hash};
use kruise_api::image_pull_job::ImagePullJob;
use kube::ResourceExt;
use kube::api::PostParams;
use pod_meta::{META_ANNOTATION, PodMetaOps, container, env_from_annotation, env_from_label};
use serde_json::json;
use support::{connect, programs, waits};

#[tokio::test]
async fn metadata_of_owned_pods_is_written_once() {
    let test = shared_cluster().await;
    let follows = container(
        "follows",
        &[env_from_annotation("CFG", "cfg"), env_from_label("VER", "ver")],
    );
    let created = test
        .create_meta_pod("web", json!([follows, container("plain", &[])]), json!({}))
        .await;
    let hashes = |name: &str, env: u64| (plain_hash(name, "busybox:1.36"), env);
    let env = env_hash([("CFG", "1"), ("VER", "v1")]);
    let pod = test
        .wait_meta("web", "both are told of", |_, told| told.containers.len() == 2)
        .await;
    assert_eq!(pod.hashes("follows"), hashes("follows", env));
    assert_eq!(pod.hashes("plain"), hashes("plain", env_hash([])));
    assert_eq!(pod.pod.uid(), created.uid());

    // It depends on the Pod's controller; once the second Pod has metadata, the first would have it, too.
    test.create_plain_pod("other", json!({})).await;
    let job = json!({"apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob", "metadata": {"name": "owner"},
        "spec": {"image": "busybox:1.36", "completionPolicy": {"type": "Never"}}});
    let job: ImagePullJob = serde_json::from_value(job).unwrap();
    let job = test.api().create(&PostParams::default(), &job).await.unwrap();
    let owner = json!({"apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob", "name": "owner",
        "uid": job.uid(), "controller": true});
    test.create_plain_pod("owned", json!({"ownerReferences": [owner]}))
        .await;
    test.wait_meta("owned", "it is told of", |_, _| true).await;
    assert!(
        !test
            .get_pod("other")
            .await
            .annotations()
            .contains_key(META_ANNOTATION)
    );
    assert_eq!(
        [
            test.daemon_writes("web"),
            test.daemon_writes("owned"),
            test.daemon_writes("other")
        ],
        [1, 1, 0]
    );
}

#[tokio::test]
async fn env_change_restarts_one_container_during_update_only() {
    let test = shared_cluster().await;
    let containers = json!([
        container("plain", &[]),
        container("follows", &[env_from_annotation("CFG", "cfg")])
    ]);
    let old = container_statuses(&test.create_meta_pod("web", containers.clone(), json!({})).await);
    test.create_meta_pod("later", containers, json!({})).await;
    for pod in ["web", "later"] {
        test.wait_meta(pod, "both are told of", |_, told| told.containers.len() == 2)
            .await;
        let edit = json!({"metadata": {"annotations": {"cfg": "two\nlines=2"}}});
        if pod == "web" {
            // No update is in progress: the metadata of the other Pod shows that nothing happens here.
            test.patch_pod(pod, edit).await;
        } else {
            test.begin_update(pod).await;
            test.patch_pod(pod, edit).await;
            test.wait_restarted(pod, "follows", 1).await;
        }
    }
    assert_eq!(container_statuses(&test.get_pod("web").await), old);
    test.begin_update("web").await;
    let pod = test.wait_restarted("web", "follows", 1).await;
    assert_eq!(pod.hashes("follows").1, env_hash([("CFG", "two\nlines=2")]));
    let new = container_statuses(&pod.pod);
    assert_eq!(new["plain"], old["plain"]);
    assert_ne!(new["follows"].id, old["follows"].id);
    let event_message = test.wait_event("Killing", "follows").await;
    assert_eq!(
        event_message,
        "Stopping containerID containerd://follows by container meta restarter"
    );
    assert_eq!(test.recorded_env("web-follows"), ["1", "two\nlines=2"]);
    assert_eq!(
        test.daemon_writes("web"),
        2,
        "one for the birth, one for the container that took its place"
    );
}

/// An image of one file: it has no program that could print the environment.
#[tokio::test]
async fn env_is_read_from_image_without_shell() {
    let test = shared_cluster().await;
    let bare =
        json!({"name": "bare", "image": "registry.k8s.io/pause:3.10", "env": [env_from_label("VER", "ver")]});
    test.create_meta_pod("web", json!([bare]), json!({})).await;
    let pod = test.wait_meta("web", "it is told of", |_, _| true).await;
    assert_eq!(pod.hashes("bare").1, env_hash([("VER", "v1")]));
    test.begin_update("web").await;
    test.patch_pod("web", json!({"metadata": {"labels": {"ver": "v2"}}}))
        .await;
    let pod = test.wait_restarted("web", "bare", 1).await;
    assert_eq!(pod.hashes("bare").1, env_hash([("VER", "v2")]));
    // A removed label leaves an empty value.
    test.patch_pod("web", json!({"metadata": {"labels": {"ver": null}}}))
        .await;
    let pod = test.wait_restarted("web", "bare", 2).await;
    assert_eq!(pod.hashes("bare").1, env_hash([("VER", "")]));
}

/// Kubelet restarts a container whose image changes; its hook must not run again for the environment.
#[tokio::test]
async fn image_and_env_change_is_one_restart_with_one_hook() {
    let test = shared_cluster().await;
    let mut main = container("main", &[env_from_annotation("CFG", "cfg")]);
    main["lifecycle"] =
        json!({"preStop": {"exec": {"command": ["sh", "-c", "echo hook >> /log/hooks; sleep 2"]}}});
    test.create_meta_pod("web", json!([main]), json!({})).await;
    test.wait_meta("web", "it is told of", |_, _| true).await;
    test.begin_update("web").await;
    let image_and_env = json!({"metadata": {"annotations": {"cfg": "2"}},
        "spec": {"containers": [{"name": "main", "image": "kruise-test/term:1"}]}});
    test.patch_pod("web", image_and_env).await;
    let pod = test.wait_restarted("web", "main", 1).await;
    assert_eq!(
        pod.hashes("main"),
        (plain_hash("main", "kruise-test/term:1"), env_hash([("CFG", "2")]))
    );
    assert_eq!(test.recorded_env("web-main"), ["1", "2"]);
    assert_eq!(test.log_lines("hooks"), ["hook"]);
    assert_eq!(test.daemon_writes("web"), 2);
}

/// The preStop hook also runs for a restart for the environment alone, and foreign annotations are kept.
#[tokio::test]
async fn pre_stop_hook_runs_and_other_annotations_stay() {
    let test = shared_cluster().await;
    let mut main = container("main", &[env_from_annotation("CFG", "cfg")]);
    main["lifecycle"] = json!({"preStop": {"exec": {"command": ["sh", "-c", "echo $CFG >> /log/hooks"]}}});
    let created: Pod = test
        .create_meta_pod("web", json!([main]), json!({"annotations": {"mine": "kept"}}))
        .await;
    test.begin_update("web").await;
    test.patch_pod("web", json!({"metadata": {"annotations": {"cfg": "2"}}}))
        .await;
    let pod = test.wait_restarted("web", "main", 1).await;
    assert_eq!(test.log_lines("hooks"), ["1"]);
    assert_eq!(
        (pod.pod.annotations()["mine"].as_str(), pod.pod.uid()),
        ("kept", created.uid())
    );
}

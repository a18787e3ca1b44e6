//! What is told of containers, and restarts for the environment, on a real node: kubelet, containerd, runc, and
//! the daemon as its own service account behind the fence. No manager runs: the test begins updates in place by
//! the condition that a workload sets.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../node_recreate/bed/mod.rs"]
#[allow(dead_code, unused_imports)]
mod bed;
mod outage;
mod pod;

use bed::{shared, statuses};
use k8s_openapi::api::core::v1::Pod;
use kruise_api::container_hash::{env_hash, plain_hash};
use kruise_api::image_pull_job::ImagePullJob;
use kube::ResourceExt;
use kube::api::PostParams;
use pod::{META, Told, container, from_annotation, from_label};
use serde_json::json;
use support::{connect, programs, waits};

#[tokio::test]
async fn containers_are_told_of_in_one_write_and_only_those_of_our_workloads() {
    let test = shared().await;
    let follows = container(
        "follows",
        &[from_annotation("CFG", "cfg"), from_label("VER", "ver")],
    );
    let made = test
        .make("web", json!([follows, container("plain", &[])]), json!({}))
        .await;
    let hashes = |name: &str, env: u64| (plain_hash(name, "busybox:1.36"), env);
    let env = env_hash([("CFG", "1"), ("VER", "v1")]);
    let pod = test
        .told("web", "both are told of", |_, told| told.containers.len() == 2)
        .await;
    assert_eq!(pod.told("follows"), hashes("follows", env));
    assert_eq!(pod.told("plain"), hashes("plain", env_hash([])));
    assert_eq!(pod.pod.uid(), made.uid());

    // By its controller; the first of these two Pods is as good as told of when the second is.
    test.bare("other", json!({})).await;
    let job = json!({"apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob", "metadata": {"name": "owner"},
        "spec": {"image": "busybox:1.36", "completionPolicy": {"type": "Never"}}});
    let job: ImagePullJob = serde_json::from_value(job).unwrap();
    let job = test.api().create(&PostParams::default(), &job).await.unwrap();
    let owner = json!({"apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob", "name": "owner",
        "uid": job.uid(), "controller": true});
    test.bare("owned", json!({"ownerReferences": [owner]})).await;
    test.told("owned", "it is told of", |_, _| true).await;
    assert!(!test.get_pod("other").await.annotations().contains_key(META));
    assert_eq!(
        [test.writes("web"), test.writes("owned"), test.writes("other")],
        [1, 1, 0]
    );
}

#[tokio::test]
async fn only_the_container_whose_environment_changes_is_restarted_and_only_in_an_update() {
    let test = shared().await;
    let containers = json!([
        container("plain", &[]),
        container("follows", &[from_annotation("CFG", "cfg")])
    ]);
    let old = statuses(&test.make("web", containers.clone(), json!({})).await);
    test.make("later", containers, json!({})).await;
    for pod in ["web", "later"] {
        test.told(pod, "both are told of", |_, told| told.containers.len() == 2)
            .await;
        let edit = json!({"metadata": {"annotations": {"cfg": "two\nlines=2"}}});
        if pod == "web" {
            // Outside an update: what follows in the other Pod shows that nothing comes of it.
            test.patch(pod, edit).await;
        } else {
            test.begin_update(pod).await;
            test.patch(pod, edit).await;
            test.restarted(pod, "follows", 1).await;
        }
    }
    assert_eq!(statuses(&test.get_pod("web").await), old);
    test.begin_update("web").await;
    let pod = test.restarted("web", "follows", 1).await;
    assert_eq!(pod.told("follows").1, env_hash([("CFG", "two\nlines=2")]));
    let new = statuses(&pod.pod);
    assert_eq!(new["plain"], old["plain"]);
    assert_ne!(new["follows"].id, old["follows"].id);
    let said = test.event("Killing", "follows").await;
    assert_eq!(
        said,
        "Stopping containerID containerd://follows by container meta restarter"
    );
    assert_eq!(test.environments("web-follows"), ["1", "two\nlines=2"]);
    assert_eq!(
        test.writes("web"),
        2,
        "one for the birth, one for the container that took its place"
    );
}

/// An image of one file: nothing in it could print an environment.
#[tokio::test]
async fn an_image_without_any_program_to_ask_is_no_obstacle() {
    let test = shared().await;
    let bare =
        json!({"name": "bare", "image": "registry.k8s.io/pause:3.10", "env": [from_label("VER", "ver")]});
    test.make("web", json!([bare]), json!({})).await;
    let pod = test.told("web", "it is told of", |_, _| true).await;
    assert_eq!(pod.told("bare").1, env_hash([("VER", "v1")]));
    test.begin_update("web").await;
    test.patch("web", json!({"metadata": {"labels": {"ver": "v2"}}}))
        .await;
    let pod = test.restarted("web", "bare", 1).await;
    assert_eq!(pod.told("bare").1, env_hash([("VER", "v2")]));
    // A label that goes leaves an empty value.
    test.patch("web", json!({"metadata": {"labels": {"ver": null}}}))
        .await;
    let pod = test.restarted("web", "bare", 2).await;
    assert_eq!(pod.told("bare").1, env_hash([("VER", "")]));
}

/// Kubelet restarts a container whose image changes; its hook must not run for the environment once more.
#[tokio::test]
async fn image_and_environment_together_are_one_restart_with_one_hook() {
    let test = shared().await;
    let mut main = container("main", &[from_annotation("CFG", "cfg")]);
    main["lifecycle"] =
        json!({"preStop": {"exec": {"command": ["sh", "-c", "echo hook >> /log/hooks; sleep 2"]}}});
    test.make("web", json!([main]), json!({})).await;
    test.told("web", "it is told of", |_, _| true).await;
    test.begin_update("web").await;
    let both = json!({"metadata": {"annotations": {"cfg": "2"}},
        "spec": {"containers": [{"name": "main", "image": "kruise-test/term:1"}]}});
    test.patch("web", both).await;
    let pod = test.restarted("web", "main", 1).await;
    assert_eq!(
        pod.told("main"),
        (plain_hash("main", "kruise-test/term:1"), env_hash([("CFG", "2")]))
    );
    assert_eq!(test.environments("web-main"), ["1", "2"]);
    assert_eq!(test.lines("hooks"), ["hook"]);
    assert_eq!(test.writes("web"), 2);
}

/// The hook of a restart for the environment alone, and the unknown fields of a Pod that somebody else has told of.
#[tokio::test]
async fn a_hook_runs_before_the_stop_and_other_annotations_stay() {
    let test = shared().await;
    let mut main = container("main", &[from_annotation("CFG", "cfg")]);
    main["lifecycle"] = json!({"preStop": {"exec": {"command": ["sh", "-c", "echo $CFG >> /log/hooks"]}}});
    let made: Pod = test
        .make("web", json!([main]), json!({"annotations": {"mine": "kept"}}))
        .await;
    test.begin_update("web").await;
    test.patch("web", json!({"metadata": {"annotations": {"cfg": "2"}}}))
        .await;
    let pod = test.restarted("web", "main", 1).await;
    assert_eq!(test.lines("hooks"), ["1"]);
    assert_eq!(
        (pod.pod.annotations()["mine"].as_str(), pod.pod.uid()),
        ("kept", made.uid())
    );
}

//! Updates of labels and annotations that set environment variables of containers.

use kruise_api::container_hash::env_hash;
use kube::ResourceExt;
use serde_json::json;

use crate::clone_set_ops::{
    CloneSetOps, assert_container_untouched, assert_restarted_once, assert_same_pod, container,
    shared_cluster,
};
use crate::pod_meta::{self, PodMetaOps, env_from_annotation, env_from_label};

/// One of the images has no program at all that could print the environment.
#[tokio::test]
async fn env_change_restarts_only_affected_containers() {
    let test = shared_cluster().await;
    let shellless =
        json!({"name": "bare", "image": "registry.k8s.io/pause:3.10", "env": [env_from_label("VER", "ver")]});
    let env_container = pod_meta::container("follows", &[env_from_annotation("CFG", "cfg")]);
    let containers = json!([env_container, container("plain", "kruise-test/term:1"), shellless]);
    let metadata = json!({"labels": {"app": "web", "ver": "v1"}, "annotations": {"cfg": "one"}});
    test.create_set("web", 1, containers, json!({"template": {"metadata": metadata}}))
        .await;
    let before = test.single_pod("web").await;
    let change = |template: &mut serde_json::Value| {
        template["metadata"]["annotations"]["cfg"] = json!("two\nlines");
        template["metadata"]["labels"]["ver"] = json!("v2");
    };
    test.update_template("web", change).await;
    test.wait_settled("web").await;
    let after = test.single_pod("web").await;
    assert_same_pod(&before, &after);
    assert_restarted_once(&before, &after, "follows");
    assert_restarted_once(&before, &after, "bare");
    assert_container_untouched(&before, &after, "plain");
    let name = after.name_any();
    assert_eq!(
        test.recorded_env(&format!("{name}-follows")),
        ["one", "two\nlines"]
    );
    let meta = test.wait_meta(&name, "it is told of", |_, _| true).await;
    assert_eq!(meta.hashes("follows").1, env_hash([("CFG", "two\nlines")]));
    assert_eq!(meta.hashes("bare").1, env_hash([("VER", "v2")]));
}

/// There is hardly any wait then, and kubelet must have observed the change all the same.
#[tokio::test]
async fn env_change_of_long_idle_pod_restarts_once() {
    let test = shared_cluster().await;
    let env_container = pod_meta::container("follows", &[env_from_annotation("CFG", "cfg")]);
    let metadata = json!({"labels": {"app": "web"}, "annotations": {"cfg": "one"}});
    let spec = json!({"minReadySeconds": 8, "template": {"metadata": metadata}});
    test.create_set("web", 1, json!([env_container]), spec).await;
    let before = test.single_pod("web").await;
    test.update_template("web", |template| {
        template["metadata"]["annotations"]["cfg"] = json!("two")
    })
    .await;
    test.wait_settled("web").await;
    let after = test.single_pod("web").await;
    assert_same_pod(&before, &after);
    assert_restarted_once(&before, &after, "follows");
    assert_eq!(
        test.recorded_env(&format!("{}-follows", after.name_any())),
        ["one", "two"]
    );
}

#[tokio::test]
async fn image_and_env_change_in_one_restart() {
    let test = shared_cluster().await;
    let mut app = pod_meta::container("app", &[env_from_annotation("CFG", "cfg")]);
    app["image"] = json!("kruise-test/term:1");
    let metadata = json!({"labels": {"app": "web"}, "annotations": {"cfg": "one"}});
    test.create_set(
        "web",
        1,
        json!([app]),
        json!({"template": {"metadata": metadata}}),
    )
    .await;
    let before = test.single_pod("web").await;
    let change = |template: &mut serde_json::Value| {
        template["metadata"]["annotations"]["cfg"] = json!("two");
        template["spec"]["containers"][0]["image"] = json!("kruise-test/term:2");
    };
    test.update_template("web", change).await;
    test.wait_settled("web").await;
    let after = test.single_pod("web").await;
    assert_same_pod(&before, &after);
    assert_restarted_once(&before, &after, "app");
    assert_eq!(
        test.recorded_env(&format!("{}-app", after.name_any())),
        ["one", "two"]
    );
}

//! Updates of labels and annotations that containers take their environment from.

use kruise_api::container_hash::env_hash;
use kube::ResourceExt;
use serde_json::json;

use crate::field::{Field, container, restarted_once, same_container, same_pod, shared};
use crate::pod::{self, Told, from_annotation, from_label};

/// One of the images has no program at all that could print an environment.
#[tokio::test]
async fn containers_get_their_new_environment_and_the_others_go_on() {
    let test = shared().await;
    let bare =
        json!({"name": "bare", "image": "registry.k8s.io/pause:3.10", "env": [from_label("VER", "ver")]});
    let follows = pod::container("follows", &[from_annotation("CFG", "cfg")]);
    let containers = json!([follows, container("plain", "kruise-test/term:1"), bare]);
    let metadata = json!({"labels": {"app": "web", "ver": "v1"}, "annotations": {"cfg": "one"}});
    test.set("web", 1, containers, json!({"template": {"metadata": metadata}}))
        .await;
    let before = test.pod_of("web").await;
    let change = |template: &mut serde_json::Value| {
        template["metadata"]["annotations"]["cfg"] = json!("two\nlines");
        template["metadata"]["labels"]["ver"] = json!("v2");
    };
    test.template("web", change).await;
    test.settled("web").await;
    let after = test.pod_of("web").await;
    same_pod(&before, &after);
    restarted_once(&before, &after, "follows");
    restarted_once(&before, &after, "bare");
    same_container(&before, &after, "plain");
    let name = after.name_any();
    assert_eq!(
        test.environments(&format!("{name}-follows")),
        ["one", "two\nlines"]
    );
    let told = test.told(&name, "it is told of", |_, _| true).await;
    assert_eq!(told.told("follows").1, env_hash([("CFG", "two\nlines")]));
    assert_eq!(told.told("bare").1, env_hash([("VER", "v2")]));
}

/// Hardly anything is waited for then, and kubelet is to have heard of the change all the same.
#[tokio::test]
async fn a_pod_that_was_left_alone_for_long_is_restarted_once_too() {
    let test = shared().await;
    let follows = pod::container("follows", &[from_annotation("CFG", "cfg")]);
    let metadata = json!({"labels": {"app": "web"}, "annotations": {"cfg": "one"}});
    let spec = json!({"minReadySeconds": 8, "template": {"metadata": metadata}});
    test.set("web", 1, json!([follows]), spec).await;
    let before = test.pod_of("web").await;
    test.template("web", |template| {
        template["metadata"]["annotations"]["cfg"] = json!("two")
    })
    .await;
    test.settled("web").await;
    let after = test.pod_of("web").await;
    same_pod(&before, &after);
    restarted_once(&before, &after, "follows");
    assert_eq!(
        test.environments(&format!("{}-follows", after.name_any())),
        ["one", "two"]
    );
}

#[tokio::test]
async fn image_and_environment_change_in_one_restart() {
    let test = shared().await;
    let mut app = pod::container("app", &[from_annotation("CFG", "cfg")]);
    app["image"] = json!("kruise-test/term:1");
    let metadata = json!({"labels": {"app": "web"}, "annotations": {"cfg": "one"}});
    test.set(
        "web",
        1,
        json!([app]),
        json!({"template": {"metadata": metadata}}),
    )
    .await;
    let before = test.pod_of("web").await;
    let change = |template: &mut serde_json::Value| {
        template["metadata"]["annotations"]["cfg"] = json!("two");
        template["spec"]["containers"][0]["image"] = json!("kruise-test/term:2");
    };
    test.template("web", change).await;
    test.settled("web").await;
    let after = test.pod_of("web").await;
    same_pod(&before, &after);
    restarted_once(&before, &after, "app");
    assert_eq!(
        test.environments(&format!("{}-app", after.name_any())),
        ["one", "two"]
    );
}

//! What the API server itself validates and defaults, without any webhook.

use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::node_image::NodeImage;
use kube::Api;
use serde_json::{Value, json};
use testbed::cluster::ControlPlane;

use crate::webhook_cluster::{
    assert_denied, connect, create, dynamic_api, install, merge, merge_status, running_status, shared_cluster,
};

fn job(spec: Value) -> Value {
    let mut job = json!({
        "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob", "metadata": { "generateName": "rules-" },
        "spec": { "image": "nginx", "completionPolicy": {} },
    });
    json_patch::merge(&mut job["spec"], &spec);
    job
}

fn invalid_selection() -> Vec<(Value, &'static str)> {
    vec![
        (json!({ "image": "" }), "spec.image"),
        (
            json!({ "selector": {}, "podSelector": {} }),
            "spec.selector and spec.podSelector exclude each other",
        ),
        (
            json!({ "selector": { "names": ["a"], "matchLabels": { "a": "b" } } }),
            "spec.selector.names excludes matchLabels",
        ),
        (
            json!({ "selector": { "names": ["a", "b", "a"] } }),
            "spec.selector.names[2]: Duplicate value: \"a\"",
        ),
        (
            json!({ "selector": { "names": ["n1", "?1"] } }),
            "spec.selector.names[1]: Invalid value: \"?1\"",
        ),
        (
            json!({ "pullSecrets": ["?x"] }),
            "spec.pullSecrets[0]: Invalid value: \"?x\"",
        ),
        (
            json!({ "image": "i".repeat(1025) }),
            "spec.image: Too long: may not be more than 1024 bytes",
        ),
        (
            json!({ "sandboxConfig": { "annotations": { "a": "b".repeat(65_537) } } }),
            "spec.sandboxConfig.annotations.a: Too long: may not be more than 65536 bytes",
        ),
        (
            json!({ "sandboxConfig": { "labels": { "k".repeat(318): "b" } } }),
            "a key is longer than 317 characters",
        ),
        (
            json!({ "selector": { "matchLabels": { "a": "b".repeat(64) } } }),
            "spec.selector.matchLabels.a: Too long: may not be more than 63 bytes",
        ),
        (
            json!({ "podSelector": { "matchLabels": { "k".repeat(318): "b" } } }),
            "a key is longer than 317 characters",
        ),
        (
            json!({ "podSelector": { "matchExpressions": [{ "key": "k".repeat(318), "operator": "Exists" }] } }),
            "spec.podSelector.matchExpressions[0].key: Too long: may not be more than 317 bytes",
        ),
        (
            json!({ "selector": { "matchExpressions": [{ "key": "a", "operator": "In", "values": ["b".repeat(64)] }] } }),
            "spec.selector.matchExpressions[0].values[0]: Too long: may not be more than 63 bytes",
        ),
        (
            json!({ "parallelism": -1 }),
            "spec.parallelism is -1; give a number of nodes, 0 or greater",
        ),
        (
            json!({ "parallelism": 5_000_000_000_i64 }),
            "spec.parallelism is 5000000000; give a number of nodes",
        ),
        (
            json!({ "parallelism": "110%" }),
            "spec.parallelism is 110%; give a number of nodes",
        ),
        (
            json!({ "parallelism": "many" }),
            "spec.parallelism is many; give a number of nodes",
        ),
    ]
}

fn invalid_limits() -> Vec<(Value, &'static str)> {
    vec![
        (
            json!({ "imagePullPolicy": "Never" }),
            "spec.imagePullPolicy: Unsupported value: \"Never\"",
        ),
        (
            json!({ "pullPolicy": { "timeoutSeconds": 0 } }),
            "spec.pullPolicy.timeoutSeconds: Invalid value: 0",
        ),
        (
            json!({ "pullPolicy": { "timeoutSeconds": 2_147_483_648_i64 } }),
            "spec.pullPolicy.timeoutSeconds: Invalid value: 2147483648",
        ),
        (
            json!({ "completionPolicy": { "activeDeadlineSeconds": 9_223_372_036_854_775_807_i64 } }),
            "spec.completionPolicy.activeDeadlineSeconds: Invalid value",
        ),
        (
            json!({ "pullPolicy": { "backoffLimit": -2 } }),
            "spec.pullPolicy.backoffLimit: Invalid value: -2",
        ),
        (
            json!({ "pullPolicy": { "pinSeconds": 0 } }),
            "spec.pullPolicy.pinSeconds: Invalid value: 0",
        ),
        (
            json!({ "pullPolicy": { "pinSeconds": 2_592_001 } }),
            "spec.pullPolicy.pinSeconds: Invalid value: 2592001",
        ),
        (
            json!({ "serviceAccountName": "a/b" }),
            "spec.serviceAccountName: Invalid value: \"a/b\"",
        ),
        (
            json!({ "serviceAccountName": "" }),
            "spec.serviceAccountName: Invalid value: \"\"",
        ),
        (
            json!({ "completionPolicy": { "type": "Maybe" } }),
            "Unsupported value: \"Maybe\"",
        ),
        (
            json!({ "completionPolicy": { "ttlSecondsAfterFinished": -1 } }),
            "spec.completionPolicy.ttlSecondsAfterFinished: Invalid value: -1",
        ),
        (
            json!({ "completionPolicy": { "type": "Never", "activeDeadlineSeconds": 9 } }),
            "spec.completionPolicy.type is Never, so the job never ends",
        ),
        (
            json!({ "schedule": "0 2 * * *" }),
            "spec.schedule needs spec.completionPolicy.type Never",
        ),
        (
            json!({ "schedule": "0 2 * * * Europe/Berlin", "completionPolicy": { "type": "Never" } }),
            "spec.schedule: Invalid value: \"0 2 * * * Europe/Berlin\"",
        ),
        (
            json!({ "completionPolicy": { "activeDeadlineSeconds": 9 }, "pullPolicy": { "timeoutSeconds": 10 } }),
            "spec.completionPolicy.activeDeadlineSeconds is 9, less than spec.pullPolicy.timeoutSeconds, which is 10",
        ),
    ]
}

/// Invalid specs of a job, and text of the error.
fn invalid_job_specs() -> Vec<(Value, &'static str)> {
    let mut all = invalid_selection();
    all.extend(invalid_limits());
    all
}

#[tokio::test]
async fn invalid_jobs_are_rejected_with_a_message() {
    let admin = shared_cluster().admin().await;
    for version in ["v1beta1", "v1alpha1"] {
        let jobs = dynamic_api(
            &admin,
            &format!("apps.kruise.io/{version}"),
            "ImagePullJob",
            Some("default"),
        );
        for (spec, message) in invalid_job_specs() {
            let mut object = job(spec);
            object["apiVersion"] = json!(format!("apps.kruise.io/{version}"));
            assert_denied(create(&jobs, object).await, message);
        }
    }
}

#[tokio::test]
async fn valid_jobs_pass_and_credentials_are_immutable() {
    let jobs = dynamic_api(
        &shared_cluster().admin().await,
        "apps.kruise.io/v1beta1",
        "ImagePullJob",
        Some("default"),
    );
    for parallelism in [
        json!(0),
        json!(7),
        json!("12"),
        json!("0%"),
        json!("10%"),
        json!("100%"),
    ] {
        create(&jobs, job(json!({ "parallelism": parallelism, "selector": {} })))
            .await
            .unwrap();
    }
    let nightly = json!({ "schedule": "30 2 * * MON-FRI", "completionPolicy": { "type": "Never" } });
    create(&jobs, job(nightly)).await.unwrap();
    let pinned = json!({ "pullPolicy": { "pinSeconds": 2_592_000 } });
    create(&jobs, job(pinned)).await.unwrap();
    let created = create(&jobs, job(json!({ "pullSecrets": ["one"] })))
        .await
        .unwrap();
    let name = created["metadata"]["name"].as_str().unwrap();
    assert_denied(
        merge(&jobs, name, json!({ "spec": { "pullSecrets": ["one", "two"] } })).await,
        r#"spec.pullSecrets cannot be changed: it was ["one"] and would be ["one", "two"]"#,
    );
    assert_denied(
        merge(&jobs, name, json!({ "spec": { "pullSecrets": null } })).await,
        r#"it was ["one"] and would be []"#,
    );
    for account in [Some("one"), None] {
        let named = account.map_or_else(|| json!({}), |name| json!({ "serviceAccountName": name }));
        let created = create(&jobs, job(named)).await.unwrap();
        let name = created["metadata"]["name"].as_str().unwrap();
        assert_denied(
            merge(&jobs, name, json!({ "spec": { "serviceAccountName": "two" } })).await,
            "spec.serviceAccountName cannot be changed; create another job instead",
        );
        merge(&jobs, name, json!({ "spec": { "parallelism": 3 } }))
            .await
            .unwrap();
    }
    merge(&jobs, name, json!({ "spec": { "parallelism": 3 } }))
        .await
        .unwrap();
}

#[tokio::test]
async fn invalid_node_images_are_rejected_with_a_message() {
    let images = dynamic_api(
        &shared_cluster().admin().await,
        "apps.kruise.io/v1beta1",
        "NodeImage",
        None,
    );
    let good = json!({ "tag": "1", "pullPolicy": { "ttlSecondsAfterFinished": 1 } });
    let images_with = |change: Value| {
        let mut tag = good.clone();
        json_patch::merge(&mut tag, &change);
        json!({ "nginx": { "tags": [tag] } })
    };
    let too_many_images: Value = (0..257)
        .map(|at| (format!("image{at}"), json!({ "tags": [] })))
        .collect::<serde_json::Map<_, _>>()
        .into();
    for (spec, message) in [
        (
            too_many_images,
            "spec.images: Too many: 257: must have at most 256 items",
        ),
        (
            json!({ "": { "tags": [good] } }),
            "an image in spec.images has an empty name",
        ),
        (
            json!({ "i".repeat(1025): { "tags": [good] } }),
            "the name of an image may not be longer than 1024 characters",
        ),
        (
            json!({ "nginx": { "tags": vec![json!({ "tag": "1" }); 10_001] } }),
            "Too many: 10001: must have at most 10000 items",
        ),
        (
            json!({ "nginx": { "tags": [good], "pullSecrets": vec![json!({}); 10_001] } }),
            "spec.images.nginx.pullSecrets: Too many: 10001: must have at most 10000 items",
        ),
        (
            json!({ "nginx": { "tags": [good], "serviceAccounts": [{ "namespace": "a", "name": "b/c" }] } }),
            "spec.images.nginx.serviceAccounts[0].name: Invalid value: \"b/c\"",
        ),
        (
            images_with(json!({ "ownerReferences": vec![json!({}); 10_001] })),
            "spec.images.nginx.tags[0].ownerReferences: Too many: 10001: must have at most 10000 items",
        ),
        (images_with(json!({ "tag": "" })), "spec.images.nginx.tags[0].tag"),
        (
            images_with(json!({ "version": -1 })),
            "spec.images.nginx.tags[0].version: Invalid value: -1",
        ),
        (
            images_with(json!({ "imagePullPolicy": "Often" })),
            "Unsupported value: \"Often\"",
        ),
        (
            images_with(json!({ "pullPolicy": { "backoffLimit": -1 } })),
            "tags[0].pullPolicy.backoffLimit: Invalid value: -1",
        ),
        (
            images_with(json!({ "pullPolicy": { "timeoutSeconds": 0 } })),
            "tags[0].pullPolicy.timeoutSeconds: Invalid value: 0",
        ),
    ] {
        let object = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "NodeImage",
            "metadata": { "name": "rules" }, "spec": { "images": spec } });
        assert_denied(create(&images, object).await, message);
    }
}

/// A job with only an image is valid, with or without a webhook to set the defaults.
#[tokio::test]
async fn job_without_completion_policy_is_valid_without_webhook() {
    let plane = ControlPlane::start().unwrap();
    install(&plane, "crds");
    let jobs = dynamic_api(
        &connect(plane.kubeconfig()).await,
        "apps.kruise.io/v1beta1",
        "ImagePullJob",
        Some("default"),
    );
    let job = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob", "metadata": { "name": "plain" },
        "spec": { "image": "busybox:1.36" } });
    let created = create(&jobs, job).await.unwrap();
    assert_eq!(created["spec"]["completionPolicy"], json!({}));
    let explained = plane
        .kubectl(&["explain", "imagepulljob.spec.completionPolicy"])
        .unwrap();
    assert!(!explained.contains("-required-"), "{explained}");
}

/// Both programs parse these types; an empty object must not stop their watches.
#[tokio::test]
async fn empty_objects_can_be_deserialized() {
    let admin = shared_cluster().admin().await;
    let images = dynamic_api(&admin, "apps.kruise.io/v1beta1", "NodeImage", None);
    let empty = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "NodeImage", "metadata": { "name": "empty" } });
    create(&images, empty).await.unwrap();
    let images: Api<NodeImage> = Api::all(admin.client.clone());
    assert!(images.get("empty").await.unwrap().spec.images.is_empty());

    let jobs = dynamic_api(&admin, "apps.kruise.io/v1beta1", "ImagePullJob", Some("default"));
    let created = create(&jobs, job(json!({ "selector": { "matchExpressions": [] } })))
        .await
        .unwrap();
    let jobs: Api<ImagePullJob> = Api::namespaced(admin.client, "default");
    let read = jobs
        .get(created["metadata"]["name"].as_str().unwrap())
        .await
        .unwrap();
    assert_eq!(read.spec.image, "nginx");
}

#[tokio::test]
async fn printer_columns_and_short_names() {
    let cluster = shared_cluster();
    cluster.create_pod("columns", Some("n1"), running_status()).await;
    let timestamp = "2026-01-01T00:00:00Z";
    let condition = |type_: &str, reason: &str, message: &str| {
        json!({ "conditions": [{ "type": type_, "status": "True", "lastTransitionTime": timestamp, "reason": reason,
            "message": message }] })
    };
    let tag = json!({ "tag": "1", "phase": "Failed", "progress": 0, "version": 1, "startTime": timestamp, "completionTime": timestamp,
        "message": "no such tag" });
    let images = json!({ "desired": 1, "pulling": 0, "succeeded": 0, "failed": 1,
        "imageStatuses": { "nginx": { "tags": [tag] } } });
    let counts = json!({ "replicas": 7, "readyReplicas": 0, "availableReplicas": 0, "updatedReplicas": 0,
        "updatedReadyReplicas": 0 });
    let set = json!({ "selector": { "matchLabels": { "a": "b" } }, "template": {
        "metadata": { "labels": { "a": "b" } }, "spec": { "containers": [{ "name": "app", "image": "i" }] } } });
    // Kind, short name, spec, status; columns and values of the row; columns that are only shown with `-o wide`.
    let cases = [
        (
            ("NodeImage", "nodeimages"),
            json!({}),
            images,
            ["DESIRED", "PULLING", "SUCCEED", "FAILED", "AGE"].as_slice(),
            [("MESSAGE", "no such tag")].as_slice(),
        ),
        (
            ("ImagePullJob", "imagepulljobs"),
            json!({ "image": "nginx:columns", "completionPolicy": {} }),
            condition("Failed", "PullFailed", "failed on n1"),
            &["TOTAL", "ACTIVE", "SUCCEED", "FAILED", "AGE"],
            &[
                ("IMAGE", "nginx:columns"),
                ("REASON", "PullFailed"),
                ("MESSAGE", "failed on n1"),
            ],
        ),
        (
            ("ImageListPullJob", "imagelistpulljobs"),
            json!({ "images": ["nginx:columns"], "completionPolicy": {} }),
            condition("Failed", "ImagesFailed", "failed for nginx"),
            &["TOTAL", "SUCCEEDED", "COMPLETED", "AGE"],
            &[("REASON", "ImagesFailed"), ("MESSAGE", "failed for nginx")],
        ),
        (
            ("ContainerRecreateRequest", "crr"),
            json!({ "podName": "columns", "containers": [{ "name": "app" }] }),
            condition("Complete", "Recreated", "app: restarted"),
            &["PHASE", "POD", "NODE", "AGE"],
            &[("RESULT", "Complete"), ("MESSAGE", "app: restarted")],
        ),
        (
            ("CloneSet", "clone"),
            set,
            condition("Waiting", "Partition", "held by the partition"),
            &[
                "DESIRED",
                "UPDATED",
                "UPDATED_READY",
                "UPDATED_AVAILABLE",
                "READY",
                "TOTAL",
                "AGE",
            ],
            &[("REASON", "Partition"), ("MESSAGE", "held by the partition")],
        ),
    ];
    let admin = cluster.admin().await;
    for ((kind, short), spec, mut status, columns, wide) in cases {
        let namespace = (kind != "NodeImage").then_some("default");
        let api = dynamic_api(&admin, "apps.kruise.io/v1beta1", kind, namespace);
        let object = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": kind, "metadata": { "name": "columns" },
            "spec": spec });
        create(&api, object).await.unwrap();
        let required = match kind {
            "CloneSet" => &counts,
            "ImagePullJob" | "ImageListPullJob" => &json!({ "desired": 1 }),
            "ContainerRecreateRequest" => &json!({ "phase": "Completed" }),
            _ => &json!({}),
        };
        json_patch::merge(&mut status, required);
        merge_status(&api, "columns", json!({ "status": status }))
            .await
            .unwrap();
        let table = |more: &[&str]| {
            let get = [&["get", short, "columns"], more].concat();
            cluster.plane.kubectl(&get).unwrap()
        };
        let (plain, all) = (table(&[]), table(&["--output=wide"]));
        for column in columns {
            assert!(plain.contains(column), "{column} is missing in {plain}");
        }
        for (column, value) in wide {
            assert!(!plain.contains(column), "{column} is in {plain}");
            assert!(
                all.contains(column) && all.contains(value),
                "{column} {value} is missing in {all}"
            );
        }
    }
}

#[test]
fn deploy_examples_are_valid() {
    for example in [
        "containerrecreatejob",
        "imagepulljob",
        "imagelistpulljob",
        "pod",
        "podprobemarker",
    ] {
        let file = format!("{}/../deploy/examples/{example}.yaml", env!("CARGO_MANIFEST_DIR"));
        shared_cluster()
            .plane
            .kubectl(&["create", "--dry-run=server", "-f", &file])
            .unwrap();
    }
}

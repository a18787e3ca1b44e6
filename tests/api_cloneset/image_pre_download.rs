//! The pre-download annotations of v1alpha1 end up in the job.

use kruise_api::cloneset::CloneSet;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::fixture::Fixture;
use crate::test_cluster::shared_cluster;

/// A v1alpha1 CloneSet with these annotations and one Pod to update.
fn v1alpha1_cloneset(annotations: Value) -> Value {
    let template = json!({
        "metadata": { "labels": { "app": "web" }, "annotations": { "example.com/mirror": "near" } },
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "imagePullSecrets": [{ "name": "one" }, { "name": "two" }],
            "containers": [{ "name": "app", "image": "example.com/app:1" }],
        },
    });
    json!({
        "apiVersion": "apps.kruise.io/v1alpha1", "kind": "CloneSet",
        "metadata": { "name": "web", "annotations": annotations },
        "spec": {
            "replicas": 4, "selector": { "matchLabels": { "app": "web" } }, "template": template,
            "updateStrategy": { "type": "InPlaceIfPossible", "maxUnavailable": 1, "partition": 3 },
        },
    })
}

#[tokio::test]
async fn v1alpha1_annotations_set_image_pre_download_options() {
    let fixture = Fixture::new(shared_cluster(), "ahead").await;
    let annotations = json!({
        "apps.kruise.io/image-predownload-parallelism": "3",
        "apps.kruise.io/image-predownload-timeout-seconds": "77",
        "apps.kruise.io/image-predownload-min-updated-ready-pods": "1",
    });
    let sets = fixture.api("apps.kruise.io", "v1alpha1", "CloneSet");
    fixture.create(&sets, v1alpha1_cloneset(annotations)).await;
    fixture.wait_settled("web").await;
    let containers = json!([{ "name": "app", "image": "example.com/app:2" }]);
    let patch = Patch::Merge(json!({ "spec": { "template": { "spec": { "containers": containers } } } }));
    sets.patch("web", &PatchParams::default(), &patch).await.unwrap();
    fixture.wait_event("CreatedImagePullJob", "web").await;

    let jobs = fixture.api("apps.kruise.io", "v1beta1", "ImagePullJob");
    let jobs = jobs.list(&Default::default()).await.unwrap().items;
    let jobs: Vec<Value> = jobs.into_iter().map(|job| json!(job)).collect();
    assert_eq!(jobs.len(), 1, "{jobs:#?}");
    let (labels, spec) = (&jobs[0]["metadata"]["labels"], &jobs[0]["spec"]);
    assert_eq!(spec["image"], "example.com/app:2");
    assert_eq!(spec["parallelism"], 3);
    assert_eq!(
        spec["pullPolicy"],
        json!({ "timeoutSeconds": 77, "backoffLimit": 1 })
    );
    assert_eq!(spec["pullSecrets"], json!(["one", "two"]));
    assert_eq!(
        spec["sandboxConfig"],
        json!({ "labels": labels, "annotations": { "example.com/mirror": "near" } })
    );
    assert_eq!(labels["app"], "web");
    let has_new_revision = |set: &CloneSet| {
        let status = set.status.as_ref();
        status.is_some_and(|s| s.update_revision != s.current_revision)
    };
    let status = fixture
        .wait_status("web", "another revision", has_new_revision)
        .await
        .status
        .unwrap();
    let hash = status.update_revision.strip_prefix("web-").unwrap();
    assert_eq!(labels["controller.kubernetes.io/hash"], hash);
}

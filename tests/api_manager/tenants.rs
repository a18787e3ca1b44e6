//! Two tenants on one node: one must not keep the other's jobs from ending.

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::core::v1::{Event, Namespace};
use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::node_image::NodeImage;
use kruise_cluster::Cluster;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};

use crate::jobs::wait_for_event;
use crate::test_cluster::{
    PullOutcome, TestCluster, WAIT_TIMEOUT, completed, create, create_nodes, report_pull, shared_cluster,
    wait_for_tag, wait_until, wait_until_deleted,
};

/// Creates a tenant's namespace; returns its jobs API.
async fn create_tenant(admin: &Cluster, name: &str) -> Api<ImagePullJob> {
    let namespaces = Api::<Namespace>::all(admin.client.clone());
    create(&namespaces, json!({ "metadata": { "name": name } })).await;
    Api::namespaced(admin.client.clone(), name)
}

fn job(name: &str, image: &str, node: &str) -> Value {
    json!({ "metadata": { "name": name },
        "spec": { "image": image, "selector": { "names": [node] }, "completionPolicy": {} } })
}

/// Makes the API server deny NodeImages with images of `refused/`, and fail on those of `broken/`.
async fn deny_node_image_entries(admin: &Cluster) {
    let rules = json!([{ "apiGroups": ["apps.kruise.io"], "apiVersions": ["v1beta1"], "operations": ["UPDATE"],
        "resources": ["nodeimages"] }]);
    let policy = json!({ "metadata": { "name": "entries" }, "spec": {
        "matchConstraints": { "resourceRules": rules },
        "validations": [{ "expression": "!has(object.spec.images) || !object.spec.images.exists(name, name.startsWith('refused/'))" }],
    }});
    let policies = Api::<ValidatingAdmissionPolicy>::all(admin.client.clone());
    create(&policies, policy).await;
    let bindings = Api::<ValidatingAdmissionPolicyBinding>::all(admin.client.clone());
    let binding = json!({ "metadata": { "name": "entries" },
        "spec": { "policyName": "entries", "validationActions": ["Deny"] } });
    create(&bindings, binding).await;
    let hooks = Api::<ValidatingWebhookConfiguration>::all(admin.client.clone());
    let condition = "has(object.spec.images) && object.spec.images.exists(name, name.startsWith('broken/'))";
    let hook = json!({ "metadata": { "name": "entries" }, "webhooks": [{
        "name": "entries.example.com", "admissionReviewVersions": ["v1"], "sideEffects": "None", "rules": rules,
        "clientConfig": { "url": "https://127.0.0.1:1/" }, "failurePolicy": "Fail",
        "matchConditions": [{ "name": "broken", "expression": condition }],
    }] });
    create(&hooks, hook).await;
    let images = Api::<NodeImage>::all(admin.client.clone());
    let dry = PatchParams {
        dry_run: true,
        ..PatchParams::default()
    };
    let start = std::time::Instant::now();
    for (image, denied_by) in [
        ("refused/x", "Policy 'entries'"),
        ("broken/x", "entries.example.com"),
    ] {
        let tag = json!({ "tag": "1", "createdAt": "2026-01-01T00:00:00Z", "version": 0,
            "pullPolicy": { "ttlSecondsAfterFinished": 300 } });
        let entry = json!({ "spec": { "images": { image: { "tags": [tag] } } } });
        // Policies and webhooks are enforced a moment after their creation.
        loop {
            let answer = images.patch("tenants-1", &dry, &Patch::Merge(&entry)).await;
            if format!("{answer:?}").contains(denied_by) {
                break;
            }
            assert!(
                start.elapsed() < WAIT_TIMEOUT,
                "{image} is not refused by {denied_by}: {answer:?}"
            );
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    }
}

#[tokio::test]
async fn unwritable_entry_does_not_block_other_tenants() {
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["tenants-1"], json!({})).await;
    deny_node_image_entries(&admin).await;
    let (hostile, plain) = (
        create_tenant(&admin, "hostile").await,
        create_tenant(&admin, "plain").await,
    );
    create(&hostile, job("broken", "broken/x:1", "tenants-1")).await;
    // It is tried, and fails, before any other job is created.
    wait_until(&hostile, "broken", "taken up", |j: &ImagePullJob| {
        j.status.as_ref().is_some_and(|s| s.active == 1)
    })
    .await;
    create(&hostile, job("refused", "refused/x:1", "tenants-1")).await;
    let mut large = job("large", "nginx:large", "tenants-1");
    large["spec"]["sandboxConfig"] = json!({ "annotations": { "a": "x".repeat(900_000) } });
    let large = hostile
        .create(&Default::default(), &serde_json::from_value(large).unwrap())
        .await;
    create(&plain, job("plain", "nginx:plain", "tenants-1")).await;

    wait_for_tag(&admin, "tenants-1", "nginx", "plain").await;
    report_pull(&admin, "tenants-1", PullOutcome::Succeeded).await;
    let ended = wait_until(&plain, "plain", "ended", completed).await;
    assert_eq!(ended.status.unwrap().succeeded, 1);
    let refused = wait_until(&hostile, "refused", "ended", completed).await;
    assert_eq!(refused.status.unwrap().failed_nodes, ["tenants-1"]);
    // The schema may reject it; otherwise the manager does.
    if large.is_ok() {
        let large = wait_until(&hostile, "large", "ended", completed).await;
        assert_eq!(large.status.unwrap().failed, 1);
    }
    let broken = hostile.get("broken").await.unwrap();
    assert!(!completed(&broken), "the API server may be mended yet");
    let conditions = broken.status.unwrap().conditions;
    assert_eq!(conditions[0].reason, "NodeImageNotWritten", "{conditions:?}");
    hostile.delete("broken", &DeleteParams::default()).await.unwrap();
    wait_until_deleted(&hostile, "broken").await;
}

/// A runtime may fail because of it. A merge patch keeps the keys of other jobs, unless it names them.
#[tokio::test]
async fn sandbox_config_of_another_tenant_is_removed() {
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["sandbox-1"], json!({})).await;
    let (first, second) = (
        create_tenant(&admin, "sandbox-first").await,
        create_tenant(&admin, "sandbox-second").await,
    );
    let labels: serde_json::Map<String, Value> =
        (0..64).map(|n| (format!("first-{n}"), json!("yes"))).collect();
    let mut full = job("full", "sandbox:1", "sandbox-1");
    full["spec"]["sandboxConfig"] = json!({ "labels": labels, "annotations": { "first": "yes" } });
    create(&first, full).await;
    wait_for_tag(&admin, "sandbox-1", "sandbox", "1").await;
    let mut other = job("other", "sandbox:2", "sandbox-1");
    other["spec"]["sandboxConfig"] = json!({ "labels": { "second": "yes" } });
    create(&second, other).await;
    wait_for_tag(&admin, "sandbox-1", "sandbox", "2").await;
    let images = Api::<NodeImage>::all(admin.client.clone());
    let image = images.get("sandbox-1").await.unwrap();
    let config = json!(image.spec.images["sandbox"].sandbox_config);
    assert_eq!(config, Value::Null);
}

#[tokio::test]
async fn image_limit_per_namespace_leaves_room_for_others() {
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["crowded-1"], json!({})).await;
    let (greedy, modest) = (
        create_tenant(&admin, "greedy").await,
        create_tenant(&admin, "modest").await,
    );
    let mut paused_job = job("waits", "nginx:waits", "crowded-1");
    paused_job["spec"]["parallelism"] = json!(0);
    let owner = create(&greedy, paused_job).await;
    let owner = json!([{ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob", "namespace": "greedy",
        "name": "waits", "uid": owner.metadata.uid }]);
    let created = admin.clock.now().to_string();
    let tag = json!([{ "tag": "1", "createdAt": created, "ownerReferences": owner,
        "pullPolicy": { "ttlSecondsAfterFinished": 3600 } }]);
    let entries: serde_json::Map<String, Value> = (0..192)
        .map(|n| (format!("image-{n}"), json!({ "tags": tag })))
        .collect();
    let images = Api::<NodeImage>::all(admin.client.clone());
    let patch = json!({ "spec": { "images": entries } });
    images
        .patch("crowded-1", &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .unwrap();

    create(&greedy, job("one-more", "one-more:1", "crowded-1")).await;
    let ended = wait_until(&greedy, "one-more", "ended", completed).await;
    assert_eq!(ended.status.unwrap().failed_nodes, ["crowded-1"]);
    let events = Api::<Event>::namespaced(admin.client.clone(), "greedy");
    let event = wait_for_event(&events, "one-more", "FailedUpdateNodeImage").await;
    let message = event.message.unwrap_or_default();
    assert!(
        message.contains("namespace greedy would hold 193 of its 256 images"),
        "{message}"
    );

    create(&modest, job("modest", "nginx:modest", "crowded-1")).await;
    wait_for_tag(&admin, "crowded-1", "nginx", "modest").await;
    report_pull(&admin, "crowded-1", PullOutcome::Succeeded).await;
    let ended = wait_until(&modest, "modest", "ended", completed).await;
    assert_eq!(ended.status.unwrap().succeeded, 1);
}

/// managedFields are written by the object's writer, and so may contain a time that our types cannot hold.
#[tokio::test]
async fn managed_fields_of_year_9999_do_not_stop_watches() {
    let cluster = TestCluster::new();
    let admin = cluster.admin().await;
    let forge = |what: &str| {
        let time = json!([{ "op": "add", "path": "/metadata/annotations", "value": { "a": "b" } },
            { "op": "replace", "path": "/metadata/managedFields/0/time", "value": "9999-12-31T23:59:59Z" }]);
        let forged = [
            "patch",
            what,
            "--type=json",
            "--field-manager=other",
            "--patch",
            &time.to_string(),
        ]
        .map(str::to_owned);
        cluster
            .plane
            .kubectl(&forged.each_ref().map(String::as_str))
            .unwrap();
        let read = [
            "get",
            what,
            "--show-managed-fields",
            "--output=jsonpath={.metadata.managedFields[*].time}",
        ];
        let times = cluster.plane.kubectl(&read).unwrap();
        assert!(times.contains("9999"), "{what}: {times}");
    };
    let claim = json!({ "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": { "name": "forged", "labels": { "apps.kruise.io/cloneset-instance-id": "x" } },
        "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Mi" } } } });
    let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "forged" },
        "spec": { "containers": [{ "name": "app", "image": "nginx" }] } });
    for object in [claim, pod] {
        cluster.plane.apply(&object.to_string()).unwrap();
    }
    for what in ["persistentvolumeclaim/forged", "pod/forged"] {
        forge(what);
    }

    // All watches finish their initial list before a controller starts, and this waits for one.
    let mut manager = cluster.manager("kruise-manager");
    manager.start().unwrap();
    create_nodes(&admin, &["forged"], json!({})).await;
}

#[tokio::test]
async fn job_waits_for_another_tenants_pull_and_pulls_again() {
    let admin = shared_cluster().admin().await;
    create_nodes(&admin, &["waited-1"], json!({})).await;
    let (early, late) = (
        create_tenant(&admin, "early").await,
        create_tenant(&admin, "late").await,
    );
    create(&early, job("early", "nginx:waited", "waited-1")).await;
    wait_for_tag(&admin, "waited-1", "nginx", "waited").await;
    report_pull(&admin, "waited-1", PullOutcome::Pulling).await;
    let mut always_pull_job = job("late", "nginx:waited", "waited-1");
    always_pull_job["spec"]["imagePullPolicy"] = json!("Always");
    create(&late, always_pull_job).await;
    wait_until(&late, "late", "waiting for the pull", |j: &ImagePullJob| {
        let conditions = j.status.iter().flat_map(|s| &s.conditions);
        conditions
            .into_iter()
            .any(|c| c.type_ == "Waiting" && c.reason == "PullInProgress" && c.message.ends_with(" waited-1"))
    })
    .await;
    report_pull(&admin, "waited-1", PullOutcome::Succeeded).await;
    wait_until(&early, "early", "ended", completed).await;
    let images = Api::<NodeImage>::all(admin.client.clone());
    wait_until(&images, "waited-1", "asked again", |i: &NodeImage| {
        i.spec.images["nginx"].tags[0].version == 1
    })
    .await;
    report_pull(&admin, "waited-1", PullOutcome::Succeeded).await;
    let ended = wait_until(&late, "late", "ended", completed)
        .await
        .status
        .unwrap();
    assert_eq!((ended.succeeded, &*ended.conditions[0].reason), (1, "Completed"));
}

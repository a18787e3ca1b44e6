//! ContainerRecreateJobs: what the API server validates, and the requests that the manager may create for them.

use serde_json::{Value, json};
use testbed::cluster::TokenBinding;

use crate::daemon_fence::wait_until_denied;
use crate::webhook_cluster::{
    assert_denied, create, dry_run_create, dry_run_merge, dynamic_api, merge_status, shared_cluster,
};

const VERSION: &str = "apps.kruise.io/v1alpha1";
const KIND: &str = "ContainerRecreateJob";

fn job(spec: &Value) -> Value {
    let mut job = json!({ "apiVersion": VERSION, "kind": KIND, "metadata": { "name": "rules" },
        "spec": { "selector": { "matchLabels": { "app": "web" } }, "containers": [{ "name": "main" }] } });
    json_patch::merge(&mut job["spec"], spec);
    job
}

fn target(api_version: &str, kind: &str) -> Value {
    json!({ "selector": null, "targetRef": { "apiVersion": api_version, "kind": kind, "name": "web" } })
}

#[tokio::test]
async fn malformed_recreate_jobs_are_refused() {
    let api = dynamic_api(&shared_cluster().admin().await, VERSION, KIND, Some("default"));
    for valid in [
        json!({}),
        json!({ "maxUnavailable": "100%", "partition": "12.5%", "maxFailures": 3, "podDeadlineSeconds": 3,
            "strategy": { "unreadyGracePeriodSeconds": 10, "failurePolicy": "Ignore" },
            "priorityStrategy": { "orderPriority": [{ "orderedKey": "zone" }] } }),
        target("apps/v1", "StatefulSet"),
        target("apps.kruise.io/v1beta1", "CloneSet"),
    ] {
        dry_run_create(&api, job(&valid)).await.unwrap();
    }
    let both = json!({ "targetRef": target("apps/v1", "Deployment")["targetRef"] });
    for (spec, message) in [
        (both, "give spec.selector or spec.targetRef, and not both"),
        (
            json!({ "selector": null }),
            "give spec.selector or spec.targetRef, and not both",
        ),
        (
            json!({ "selector": { "matchLabels": null } }),
            "an empty selector matches every Pod",
        ),
        (
            target("apps/v1beta1", "Deployment"),
            "apiVersion must be apps/v1, or that of CloneSet",
        ),
        (
            target("apps/v1", "CloneSet"),
            "apiVersion must be apps/v1, or that of CloneSet",
        ),
        (
            target("batch/v1", "Job"),
            "spec.targetRef.kind: Unsupported value: \"Job\"",
        ),
        (json!({ "containers": [] }), "spec.containers: Invalid value"),
        (
            json!({ "containers": [{ "name": "a" }, { "name": "a" }] }),
            "spec.containers[1]: Duplicate value",
        ),
        (
            json!({ "maxUnavailable": 0 }),
            "it is 0; give a number of Pods, 1 or greater",
        ),
        (
            json!({ "maxUnavailable": "101%" }),
            "spec.maxUnavailable: Invalid value",
        ),
        (json!({ "partition": "x" }), "spec.partition: Invalid value"),
        (json!({ "maxFailures": -1 }), "spec.maxFailures: Invalid value"),
        (
            json!({ "podDeadlineSeconds": 2 }),
            "spec.podDeadlineSeconds: Invalid value",
        ),
        (
            json!({ "activeDeadlineSeconds": 0 }),
            "spec.activeDeadlineSeconds: Invalid value",
        ),
        (
            json!({ "priorityStrategy": { "orderPriority": [{ "orderedKey": "a" }],
                "weightPriority": [{ "weight": 1, "matchSelector": { "matchLabels": { "a": "b" } } }] } }),
            "orderPriority and weightPriority exclude each other",
        ),
    ] {
        assert_denied(dry_run_create(&api, job(&spec)).await, message);
    }
}

#[tokio::test]
async fn selection_of_a_recreate_job_cannot_be_changed() {
    let api = dynamic_api(&shared_cluster().admin().await, VERSION, KIND, Some("default"));
    let mut fixed = job(&json!({ "strategy": { "minStartedSeconds": 1 } }));
    fixed["metadata"]["name"] = json!("fixed");
    create(&api, fixed).await.unwrap();
    let change = |spec: Value| dry_run_merge(&api, "fixed", json!({ "spec": spec }));
    let valid = json!({ "paused": true, "maxUnavailable": 5, "partition": "50%", "maxFailures": 1 });
    change(valid).await.unwrap();
    let target = target("apps/v1", "Deployment");
    for (spec, message) in [
        (
            json!({ "selector": { "matchLabels": { "app": "other" } } }),
            "this field of a ContainerRecreateJob cannot be changed",
        ),
        (
            json!({ "containers": [{ "name": "other" }] }),
            "this field of a ContainerRecreateJob cannot be changed",
        ),
        (
            json!({ "strategy": { "minStartedSeconds": 2 } }),
            "this field of a ContainerRecreateJob cannot be changed",
        ),
        (json!({ "strategy": null }), "cannot be added or removed"),
        (target, "cannot be added or removed"),
    ] {
        assert_denied(change(spec).await, message);
    }
}

/// The fence lets the manager create the requests of jobs, and admission refuses those for a Pod of another UID.
#[tokio::test]
async fn manager_creates_requests_of_recreate_jobs() {
    let manager = shared_cluster()
        .account("kruise-manager", TokenBinding::Unbound)
        .await;
    let admin = shared_cluster().admin().await;
    let pods = dynamic_api(&admin, "v1", "Pod", Some("default"));
    let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "crj-pod" },
        "spec": { "nodeName": "crj-node", "containers": [{ "name": "app", "image": "i" }] } });
    let pod = create(&pods, pod).await.unwrap();
    let statuses = json!([{ "name": "app", "containerID": "containerd://1", "image": "i", "imageID": "i",
        "ready": true, "restartCount": 0, "state": { "running": {} } }]);
    let status = json!({ "status": { "phase": "Running", "containerStatuses": statuses } });
    merge_status(&pods, "crj-pod", status).await.unwrap();
    let version = "apps.kruise.io/v1beta1";
    let api = dynamic_api(&manager, version, "ContainerRecreateRequest", Some("default"));
    let request = |kind: &str, uid: &Value| {
        let owner =
            json!({ "apiVersion": VERSION, "kind": kind, "name": "reload", "uid": "u", "controller": true });
        json!({ "apiVersion": version, "kind": "ContainerRecreateRequest",
            "metadata": { "name": "crj-request", "ownerReferences": [owner],
                "labels": { "crr.apps.kruise.io/pod-uid": uid } },
            "spec": { "podName": "crj-pod", "containers": [{ "name": "app" }] } })
    };
    let uid = &pod["metadata"]["uid"];
    let denial = "only for a Pod of the ContainerRecreateJob that controls it";
    wait_until_denied(|| dry_run_create(&api, request("Other", uid)), denial).await;
    dry_run_create(&api, request(KIND, uid)).await.unwrap();
    let replaced = dry_run_create(&api, request(KIND, &json!("gone"))).await;
    assert_denied(replaced, "another Pod has this name now");
    // It deletes only jobs that have ended.
    let jobs = dynamic_api(&manager, VERSION, KIND, Some("default"));
    let mut unfinished = job(&json!({}));
    unfinished["metadata"]["name"] = json!("unfinished");
    create(&dynamic_api(&admin, VERSION, KIND, Some("default")), unfinished)
        .await
        .unwrap();
    let params = kube::api::DeleteParams::default();
    let delete = || jobs.delete("unfinished", &params);
    let denial = delete().await.unwrap_err().to_string();
    assert!(denial.contains("which has not completed"), "{denial}");
    let ended = json!({ "status": { "completionTime": "2026-11-26T12:00:00Z" } });
    merge_status(&jobs, "unfinished", ended).await.unwrap();
    delete().await.unwrap();
}

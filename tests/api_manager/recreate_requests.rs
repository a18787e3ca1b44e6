//! ContainerRecreateRequests on nodes with a daemon that the tests play, or with none.

use k8s_openapi::api::core::v1::Pod;
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::pod_readiness::condition;
use crate::test_cluster::{
    WAIT_TIMEOUT, api, create_pod, merge_status, run_container, shared_cluster, wait_until,
    wait_until_deleted,
};

type Requests = Api<ContainerRecreateRequest>;

/// Creates a request; the API server rejects it until it reaches our webhooks.
pub async fn create(
    requests: &Requests,
    name: &str,
    pod: &str,
    extra_spec: Value,
) -> ContainerRecreateRequest {
    let mut spec = json!({ "podName": pod, "containers": [{ "name": "app" }] });
    spec.as_object_mut()
        .unwrap()
        .extend(extra_spec.as_object().unwrap().clone());
    let object = json!({ "metadata": { "name": name }, "spec": spec });
    let object: ContainerRecreateRequest = serde_json::from_value(object).unwrap();
    let start = std::time::Instant::now();
    loop {
        match requests.create(&PostParams::default(), &object).await {
            Ok(created) => return created,
            Err(why) => assert!(start.elapsed() < WAIT_TIMEOUT, "{name}: {why}"),
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
}

fn phase_and_message(request: &ContainerRecreateRequest) -> (String, String) {
    let status = request.status.clone().unwrap_or_default();
    (status.phase.to_string(), status.message.unwrap_or_default())
}

/// Status that a daemon writes when it stops a container.
fn recreating_status(killed: bool) -> Value {
    json!({ "phase": "Recreating",
        "containerRecreateStates": [{ "name": "app", "phase": "Recreating", "isKilled": killed }] })
}

#[tokio::test]
async fn unready_request_has_finalizer_and_is_deleted_after_ttl() {
    let admin = shared_cluster().admin().await;
    let requests: Requests = api(&admin);
    let pods: Api<Pod> = api(&admin);
    create_pod(&admin, "held", "n-held", json!({}), true).await;
    wait_until(&pods, "held", "condition made", |p: &Pod| {
        condition(p, "KruisePodReady").is_some()
    })
    .await;
    let strategy = json!({ "strategy": { "unreadyGracePeriodSeconds": 1 }, "ttlSecondsAfterFinished": 1 });
    create(&requests, "held", "held", strategy).await;
    merge_status(&requests, "held", json!({ "phase": "Recreating" })).await;

    let with_grace = wait_until(
        &requests,
        "held",
        "grace begun",
        |r: &ContainerRecreateRequest| {
            r.status.as_ref().is_some_and(|s| {
                s.conditions
                    .iter()
                    .any(|c| c.type_ == "PreRecreateGrace" && c.status == "True")
            })
        },
    )
    .await;
    assert_eq!(with_grace.finalizers(), ["crr.apps.kruise.io/unready-acquired"]);
    let unready = pods.get("held").await.unwrap();
    let keys = r#"[{"userAgent":"ContainerRecreateRequest","key":"default/held"}]"#;
    assert_eq!(
        condition(&unready, "KruisePodReady"),
        Some(("False".into(), keys.into()))
    );
    assert_eq!(condition(&unready, "Ready").unwrap().0, "False");

    let now = admin.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    merge_status(
        &requests,
        "held",
        json!({ "phase": "Completed", "completionTime": now }),
    )
    .await;
    wait_until(&pods, "held", "KruisePodReady is True again", |p: &Pod| {
        condition(p, "KruisePodReady").is_some_and(|c| c == ("True".into(), String::new()))
    })
    .await;
    wait_until_deleted(&requests, "held").await;
}

/// Runs `kubectl wait` in the version that kubectl prefers; OpenKruise's daemon writes only the phase.
#[tokio::test]
async fn kubectl_wait_for_recreate_request_conditions() {
    let admin = shared_cluster().admin().await;
    let requests: Requests = api(&admin);
    create_pod(&admin, "waited", "n-waited", json!({}), false).await;
    for (name, ended, condition) in [
        ("wait-good", "Succeeded", "Complete"),
        ("wait-bad", "Failed", "Failed"),
    ] {
        create(&requests, name, "waited", json!({})).await;
        let (condition, request) = (format!("--for=condition={condition}"), format!("crr/{name}"));
        let wait = ["wait", "--timeout=60s", &condition, &request].map(str::to_owned);
        let waiter = tokio::task::spawn_blocking(move || {
            let wait = wait.each_ref().map(String::as_str);
            shared_cluster().plane.kubectl(&wait)
        });
        let now = admin.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let states = json!([{ "name": "app", "phase": ended }]);
        let status =
            json!({ "phase": "Completed", "completionTime": now, "containerRecreateStates": states });
        merge_status(&requests, name, status).await;
        let output = waiter.await.unwrap().unwrap();
        assert!(output.contains("condition met"), "{name}: {output}");
    }
}

#[tokio::test]
async fn deleted_request_makes_its_pod_ready_again() {
    let admin = shared_cluster().admin().await;
    let requests: Requests = api(&admin);
    let pods: Api<Pod> = api(&admin);
    create_pod(&admin, "freed", "n-freed", json!({}), true).await;
    create(
        &requests,
        "freed",
        "freed",
        json!({ "strategy": { "unreadyGracePeriodSeconds": 1 } }),
    )
    .await;
    merge_status(&requests, "freed", json!({ "phase": "Recreating" })).await;
    wait_until(&pods, "freed", "held", |p: &Pod| {
        condition(p, "KruisePodReady").is_some_and(|c| c.0 == "False")
    })
    .await;
    requests.delete("freed", &DeleteParams::default()).await.unwrap();
    wait_until_deleted(&requests, "freed").await;
    assert_eq!(
        condition(&pods.get("freed").await.unwrap(), "KruisePodReady")
            .unwrap()
            .0,
        "True"
    );
}

#[tokio::test]
async fn status_snapshot_is_written_by_the_manager() {
    let admin = shared_cluster().admin().await;
    let requests: Requests = api(&admin);
    create_pod(&admin, "snapped", "n-snapped", json!({}), false).await;
    create(&requests, "snapped", "snapped", json!({})).await;
    merge_status(&requests, "snapped", recreating_status(true)).await;
    run_container(&admin, "snapped", "containerd://two", 1).await;
    let request = wait_until(
        &requests,
        "snapped",
        "snapshot written",
        |r: &ContainerRecreateRequest| {
            r.status
                .as_ref()
                .is_some_and(|s| !s.container_status_snapshot.is_empty())
        },
    )
    .await;
    let snapshot = &request.status.unwrap().container_status_snapshot[0];
    assert_eq!(snapshot.container_id.as_deref(), Some("containerd://two"));
    assert!(snapshot.ready);
}

#[tokio::test]
async fn request_ends_with_deleted_pod_and_at_deadline() {
    let admin = shared_cluster().admin().await;
    let requests: Requests = api(&admin);
    let pods: Api<Pod> = api(&admin);
    create_pod(&admin, "leaves", "n-leaves", json!({}), false).await;
    create_pod(&admin, "slow", "n-slow", json!({}), false).await;
    create(&requests, "leaves", "leaves", json!({})).await;
    create(&requests, "slow", "slow", json!({ "activeDeadlineSeconds": 3 })).await;
    merge_status(&requests, "slow", recreating_status(true)).await;
    pods.delete("leaves", &DeleteParams::default().grace_period(0))
        .await
        .unwrap();
    let completed = wait_until(&requests, "leaves", "ended", |r: &ContainerRecreateRequest| {
        phase_and_message(r).0 == "Completed"
    })
    .await;
    assert_eq!(phase_and_message(&completed).1, "pod has gone");
    shared_cluster()
        .wait_for_log("ended the request", "default/leaves")
        .await;
    let ended = wait_until(&requests, "slow", "ended", |r: &ContainerRecreateRequest| {
        phase_and_message(r).0 == "Completed"
    })
    .await;
    assert_eq!(
        phase_and_message(&ended).1,
        "recreating has exceeded the activeDeadlineSeconds"
    );
    assert_eq!(
        ended.status.unwrap().container_recreate_states[0].phase.as_str(),
        "Failed"
    );
    wait_until(&requests, "slow", "inactive", |r: &ContainerRecreateRequest| {
        !r.labels().contains_key("crr.apps.kruise.io/active")
    })
    .await;
}

#[tokio::test]
async fn missing_request_labels_are_added() {
    let admin = shared_cluster().admin().await;
    let requests: Requests = api(&admin);
    let pod_object = create_pod(&admin, "bare", "n-bare", json!({}), false).await;
    create(&requests, "bare", "bare", json!({})).await;
    // A request that was created while admission was down.
    let remove_label = json!({ "metadata": { "labels": { "crr.apps.kruise.io/active": null } } });
    requests
        .patch("bare", &PatchParams::default(), &Patch::Merge(&remove_label))
        .await
        .unwrap();
    let labelled = wait_until(&requests, "bare", "labelled", |r: &ContainerRecreateRequest| {
        r.labels()
            .get("crr.apps.kruise.io/active")
            .is_some_and(|v| v == "true")
    })
    .await;
    assert_eq!(
        labelled.labels().get("crr.apps.kruise.io/pod-uid"),
        pod_object.metadata.uid.as_ref()
    );
    assert_eq!(
        labelled
            .labels()
            .get("crr.apps.kruise.io/node-name")
            .map(String::as_str),
        Some("n-bare")
    );
}

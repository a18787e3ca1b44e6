//! Writes of Pods that fail: an obstacle for one Pod delays no other, and is tried again rarely.

use std::time::Duration;

use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use testbed::port;

use crate::denied_updates::{LOCK_MESSAGE, allow_updates, deny_updates, lock_pod};
use crate::fixture::shared_cluster;
use crate::namespace::SidecarNamespace;
use crate::pods::condition;
use crate::proxy::NetworkFault;
use support::untyped::untyped;

/// The manager's patches have the Pod's resourceVersion, because they change annotations that hold records of several
/// sets.
#[tokio::test]
async fn conflict_with_another_writer_delays_no_other_pod() {
    let shared = shared_cluster().await;
    let test = SidecarNamespace::new(&shared.cluster.plane, "conflict").await;
    test.create_set(json!({ "updateStrategy": { "maxUnavailable": "100%" } }))
        .await;
    let pods = test.create_pods(4).await;
    // The manager has seen the last version of each Pod.
    test.wait_counts([4, 4, 4, 0]).await;
    let marker = "other-writer-was-first";
    let fault = NetworkFault::HoldUntil(marker);
    shared
        .proxy
        .inject("conflict", "patch pods", fault, 1, usize::MAX);
    test.set_image("side:2").await;
    let all_sent = || async { (shared.proxy.faulted_requests("conflict").len() >= pods.len()).then_some(()) };
    test.poll_until("all Pods are patched at once", all_sent).await;
    let note =
        |text: &str| Patch::Merge(json!({ "metadata": { "annotations": { "example.com/note": text } } }));
    let params = PatchParams::default();
    test.pods().patch(&pods[0], &params, &note("kept")).await.unwrap();
    test.sidecar_sets()
        .patch("conflict", &params, &note(marker))
        .await
        .unwrap();

    let updated = test.wait_sidecars("side:2", &pods).await;
    assert_eq!(updated[0]["metadata"]["annotations"]["example.com/note"], "kept");
    let codes: Vec<Vec<i64>> = pods.iter().map(|pod| test.patch_codes("pods", pod)).collect();
    assert_eq!(codes, [vec![409, 200], vec![200], vec![200], vec![200]]);
}

/// kubelet writes the status of a Pod at any moment, also between the manager's decision and its write of the condition.
#[tokio::test]
async fn condition_survives_a_conflict_with_another_writer() {
    let shared = shared_cluster().await;
    let test = SidecarNamespace::new(&shared.cluster.plane, "conflict-status").await;
    test.create_set(json!({ "updateStrategy": { "maxUnavailable": "100%" } }))
        .await;
    let pods = test.create_pods(2).await;
    test.wait_counts([2, 2, 2, 0]).await;
    let name = &test.namespace;
    let marker = "kubelet-was-first";
    let fault = NetworkFault::HoldUntil(marker);
    shared.proxy.inject(name, "patch pods/status", fault, 1, 2);
    test.set_image("side:2").await;
    let all_sent = || async { (shared.proxy.faulted_requests(name).len() >= pods.len()).then_some(()) };
    test.poll_until("the conditions are on their way", all_sent).await;
    let params = PatchParams::default();
    let of_kubelet = json!({ "type": "ContainersReady", "status": "True", "message": "kubelet" });
    let of_kubelet = Patch::Strategic(json!({ "status": { "conditions": [of_kubelet] } }));
    test.pods()
        .patch_status(&pods[0], &params, &of_kubelet)
        .await
        .unwrap();
    let note = Patch::Merge(json!({ "metadata": { "annotations": { "example.com/note": marker } } }));
    test.sidecar_sets().patch(name, &params, &note).await.unwrap();

    test.wait_sidecars("side:2", &pods).await;
    let type_ = "SidecarSetUpgradable";
    let all_have = |pods: &[&Value]| pods.iter().all(|pod| condition(pod, type_)["status"] == "True");
    test.wait_pods(name, "both have the condition", all_have).await;
    let codes: Vec<Vec<i64>> = pods
        .iter()
        .map(|pod| test.patch_codes("pods/status", pod))
        .collect();
    assert_eq!(codes, [vec![409, 200], vec![200]]);
}

/// The answer to an update is lost: it may have been made, so the Pod is read before it is decided again.
#[tokio::test]
async fn lost_answer_updates_no_pod_twice() {
    let shared = shared_cluster().await;
    let test = SidecarNamespace::new(&shared.cluster.plane, "lost-answer").await;
    test.create_set(json!({})).await;
    let pods = test.create_pods(3).await;
    shared
        .proxy
        .inject("lost-answer", "patch pods", NetworkFault::DropResponse, 1, 2);
    test.set_image("side:2").await;
    test.wait_sidecars("side:2", &pods).await;
    assert_eq!(shared.proxy.faulted_requests("lost-answer").len(), 2);
    for pod in &pods {
        assert_eq!(test.updates(pod), 1, "{pod}");
    }
}

/// A webhook for updates of Pods with this label, without a server.
async fn create_broken_webhook(test: &SidecarNamespace, label: &str) -> Api<DynamicObject> {
    let kind = "ValidatingWebhookConfiguration";
    let webhooks = untyped(&test.admin, "admissionregistration.k8s.io", "v1", kind, None);
    let url = format!("https://127.0.0.1:{}/", port::reserve().unwrap());
    let rule =
        json!({ "apiGroups": [""], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": ["pods"] });
    let namespace = json!({ "matchLabels": { "kubernetes.io/metadata.name": test.namespace } });
    let webhook = json!({ "name": "broken.example.com", "admissionReviewVersions": ["v1"], "sideEffects": "None",
        "failurePolicy": "Fail", "clientConfig": { "url": url }, "rules": [rule],
        "namespaceSelector": namespace, "objectSelector": { "matchLabels": { label: "yes" } } });
    let object = json!({ "metadata": { "name": test.namespace }, "webhooks": [webhook] });
    test.create(&webhooks, object).await;
    webhooks
}

/// Messages of the events about Pods of the set that could not be updated.
async fn failure_messages(test: &SidecarNamespace) -> Vec<String> {
    let events = untyped(&test.admin, "", "v1", "Event", None);
    let fields = format!(
        "reason=FailedUpdatePodInPlace,involvedObject.name={}",
        test.namespace
    );
    let list = events.list(&ListParams::default().fields(&fields)).await.unwrap();
    let messages = list
        .items
        .iter()
        .map(|event| event.data["message"].as_str().unwrap_or_default());
    messages.map(str::to_owned).collect()
}

#[tokio::test]
async fn pods_that_cannot_be_updated_are_named_and_delay_no_others() {
    let shared = shared_cluster().await;
    let test = SidecarNamespace::new(&shared.cluster.plane, "denied").await;
    test.create_set(json!({ "updateStrategy": { "maxUnavailable": 1 } }))
        .await;
    let pods = test.create_pods(6).await;
    // In the order of updates these come first, and only one Pod may be unavailable at a time.
    let (locked, unreachable) = (&pods[5], &pods[4]);
    lock_pod(&test, locked).await;
    let label = "example.com/unreachable";
    test.set_labels(unreachable, json!({ label: "yes" })).await;
    let webhooks = create_broken_webhook(&test, label).await;
    let probe = PatchParams::default().dry_run();
    let note = Patch::Merge(json!({ "metadata": { "annotations": { "example.com/note": "x" } } }));
    test.poll_until("the webhook is in effect", || async {
        test.pods().patch(unreachable, &probe, &note).await.err()
    })
    .await;

    test.set_image("side:2").await;
    let others = pods[..4].to_vec();
    test.wait_sidecars("side:2", &others).await;
    test.wait_counts([6, 4, 6, 0]).await;
    let message = "2 of 6 Pods cannot be updated, because the API server refuses it, as events show: denied/web-4, denied/web-5";
    test.wait_waiting("UpdateRefused", message).await;
    test.poll_until("events with both messages", || async {
        let messages = failure_messages(&test).await;
        let is_reported = |pod: &str, why: &str| {
            let begin = format!("cannot update the containers of pod {pod}: ");
            let mut messages = messages.iter();
            messages.any(|message| message.starts_with(&begin) && message.contains(why))
        };
        (is_reported(locked, LOCK_MESSAGE) && is_reported(unreachable, "broken.example.com")).then_some(())
    })
    .await;

    // What is repaired is found without a change of the set.
    webhooks.delete("denied", &Default::default()).await.unwrap();
    test.wait_sidecars("side:2", std::slice::from_ref(unreachable))
        .await;
    allow_updates(&test).await;
    test.wait_sidecars("side:2", &pods).await;
    test.wait_counts([6, 6, 6, 0]).await;
    test.wait_set("it waits for nothing", |set| condition(set, "Waiting").is_null())
        .await;
    for pod in &pods {
        assert_eq!(test.updates(pod), 1, "{pod}");
    }
    for (pod, seconds) in [(locked, 59), (unreachable, 9)] {
        let pause = test.shortest_pause("pods", pod).unwrap();
        assert!(pause > Duration::from_secs(seconds), "{pod}: {pause:?}");
    }
}

/// Pods that cannot be updated in place get a condition; one whose status may not be written is not tried all the time.
#[tokio::test]
async fn denied_condition_is_not_retried_at_once() {
    let shared = shared_cluster().await;
    let test = SidecarNamespace::new(&shared.cluster.plane, "denied-status").await;
    test.create_set(json!({})).await;
    let pods = test.create_pods(2).await;
    let (pod, type_) = (&pods[0], "SidecarSetUpgradable");
    let has_condition = format!("object.status.?conditions.orValue([]).exists(c, c.type == '{type_}')");
    let allowed = format!("object.metadata.name != '{pod}' || !{has_condition}");
    deny_updates(&test, "pods/status", (&allowed, "no such condition")).await;
    let denied = json!({ "type": type_, "status": "True" });
    let denied = Patch::Strategic(json!({ "status": { "conditions": [denied] } }));
    let probe = PatchParams::default().dry_run();
    test.poll_until("the policy is in effect", || async {
        test.pods().patch_status(pod, &probe, &denied).await.err()
    })
    .await;
    test.patch_set(json!({ "containers": [{ "name": "side", "image": "side:1",
        "env": [{ "name": "NEW", "value": "x" }] }] }))
        .await;
    let has_condition = |pod: &&&Value| condition(pod, type_)["status"] == "False";
    let one_has = |pods: &[&Value]| pods.iter().filter(has_condition).count() == 1;
    test.wait_pods("denied-status", "the other Pod has its condition", one_has)
        .await;
    test.wait_waiting("NotUpgradable", "2 of 2 Pods keep").await;

    // While another set is updated, there is time for many retries.
    let clock = SidecarNamespace::new(&shared.cluster.plane, "denied-status-clock").await;
    clock.create_set(json!({})).await;
    let others = clock.create_pods(4).await;
    clock.set_image("side:2").await;
    clock.wait_sidecars("side:2", &others).await;
    let codes = test.patch_codes("pods/status", pod);
    assert!(
        !codes.is_empty() && codes.iter().all(|code| *code == 422),
        "{codes:?}"
    );
    // A slow machine may take more than a minute.
    let pause = test.shortest_pause("pods/status", pod);
    assert!(
        pause.is_none_or(|pause| pause > Duration::from_secs(59)),
        "{pause:?}"
    );
}

//! A rejected template stops only the update.

use jiff::ToSpan;
use serde_json::{Value, json};

use super::fake_cluster::FakeCluster;
use super::random_histories::{clone_set_spec, edit_container, edit_rolling_update};
use super::scenarios::{condition, progressing_reason, run_kubelets, settle};
use crate::cloneset::plan::{Action, TemplateStatus};
use kruise_api::keys;

/// Three Pods that run `app:1`, all of which may be updated at once.
fn three_replicas() -> FakeCluster {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    cluster.edit(&json!({ "replicas": 3 }));
    edit_rolling_update(&mut cluster, json!({ "maxUnavailable": "100%" }));
    settle(&mut cluster);
    cluster
}

/// A user requests a template that is refused.
fn reject_template(cluster: &mut FakeCluster) {
    cluster.set_templates_refused(true);
    edit_container(cluster, "image", json!("app:3"));
    assert!(matches!(cluster.template_status, TemplateStatus::Rejected(_)));
}

fn images(cluster: &FakeCluster) -> Vec<&Value> {
    let image = |pod: &'_ Value| pod["spec"]["containers"][0]["image"].is_string();
    let pods = cluster.pods.values().filter(|pod| image(pod));
    pods.map(|pod| &pod["spec"]["containers"][0]["image"]).collect()
}

fn gate_is_true(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    let mut gate = conditions.filter(|c| c["type"] == keys::IN_PLACE_UPDATE_READY);
    gate.all(|c| c["status"] == "True")
}

#[test]
fn rejected_template_lets_running_updates_finish() {
    let mut cluster = three_replicas();
    edit_container(&mut cluster, "image", json!("app:2"));
    cluster.reconcile();
    assert!(
        cluster.pods.values().all(|pod| !gate_is_true(pod)),
        "the update has begun"
    );
    cluster.reconcile();
    assert_eq!(cluster.set["status"]["readyReplicas"], 0);
    let observed_generation = cluster.set["status"]["observedGeneration"].clone();
    reject_template(&mut cluster);
    settle(&mut cluster);
    assert!(cluster.pods.values().all(gate_is_true), "all Pods serve again");
    assert_eq!(images(&cluster), ["app:2"; 3]);
    let status = cluster.set["status"].clone();
    assert_eq!(
        (&status["readyReplicas"], &status["availableReplicas"]),
        (&json!(3), &json!(3))
    );
    assert_eq!(
        status["observedGeneration"], observed_generation,
        "a rejected template is not observed"
    );
    assert_eq!(
        condition(&cluster, "FailedUpdate").unwrap().message,
        "no such field"
    );
    let waiting = condition(&cluster, "Waiting").unwrap();
    assert_eq!(waiting.message, "CloneSet cannot be updated: no such field");
    assert_eq!(
        (waiting.status.as_str(), waiting.reason.as_str()),
        ("True", "TemplateRefused")
    );

    cluster.set_templates_refused(false);
    settle(&mut cluster);
    assert_eq!(images(&cluster), ["app:3"; 3]);
    assert_eq!(condition(&cluster, "FailedUpdate"), None);
    assert_eq!(condition(&cluster, "Waiting"), None);
}

/// As in OpenKruise: the condition does not change, and the deadline continues.
#[test]
fn rejected_template_leaves_progressing_unchanged() {
    for (under_way, expected_reason) in [(false, "CloneSetAvailable"), (true, "CloneSetUpdated")] {
        let mut cluster = three_replicas();
        cluster.edit(&json!({ "progressDeadlineSeconds": 60 }));
        settle(&mut cluster);
        if under_way {
            edit_container(&mut cluster, "image", json!("app:2"));
            cluster.reconcile();
        }
        let before = condition(&cluster, "Progressing").unwrap();
        assert_eq!(before.reason, expected_reason);
        reject_template(&mut cluster);
        settle(&mut cluster);
        cluster.now = cluster.now.checked_add(61.seconds()).unwrap();
        cluster.reconcile();
        assert_eq!(condition(&cluster, "Progressing"), Some(before));
        assert_eq!(
            condition(&cluster, "Waiting").unwrap().reason,
            "TemplateRefused",
            "alerts use this condition meanwhile"
        );

        cluster.set_templates_refused(false);
        cluster.reconcile();
        assert_eq!(progressing_reason(&cluster), "ProgressDeadlineExceeded");
    }
}

#[test]
fn unknown_template_status_changes_nothing() {
    let mut cluster = three_replicas();
    reject_template(&mut cluster);
    settle(&mut cluster);
    let status = cluster.set["status"].clone();
    cluster.template_status = TemplateStatus::Unknown;
    let (_, plan) = cluster.reconcile();
    assert_eq!(
        (plan.actions, plan.events.len(), plan.status),
        (Vec::new(), 0, None)
    );
    assert_eq!(
        cluster.set["status"], status,
        "the previous status may still be true"
    );
    let name = cluster.pods.keys().next().unwrap().clone();
    cluster.delete_pod(&name);
    settle(&mut cluster);
    assert_eq!(images(&cluster), ["app:1"; 3]);
}

#[test]
fn rejected_template_still_scales_with_last_revision() {
    let mut cluster = three_replicas();
    reject_template(&mut cluster);
    let name = cluster.pods.keys().next().unwrap().clone();
    cluster.delete_pod(&name);
    settle(&mut cluster);
    assert_eq!(images(&cluster), ["app:1"; 3]);
    for replicas in [5, 1] {
        cluster.edit(&json!({ "replicas": replicas }));
        settle(&mut cluster);
        assert_eq!(images(&cluster).len(), replicas);
    }
    assert_eq!(images(&cluster), ["app:1"]);
}

#[test]
fn rejected_template_stops_the_rollout() {
    let mut cluster = three_replicas();
    edit_rolling_update(&mut cluster, json!({ "maxUnavailable": 1 }));
    edit_container(&mut cluster, "image", json!("app:2"));
    cluster.reconcile();
    reject_template(&mut cluster);
    settle(&mut cluster);
    let mut running = images(&cluster);
    running.sort_by_key(|image| image.to_string());
    assert_eq!(running, ["app:1", "app:1", "app:2"]);
}

#[test]
fn no_revision_creates_nothing_and_reports_why() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, true));
    cluster.revisions.clear();
    cluster.templates_refused = true;
    cluster.edit(&json!({ "replicas": 1000 }));
    let (_, plan) = cluster.reconcile();
    assert_eq!((plan.actions.len(), plan.requeue_at), (0, None));
    assert_eq!(plan.events.len(), 1);
    assert_eq!(
        condition(&cluster, "FailedUpdate").unwrap().message,
        "no such field"
    );
}

/// The mistake may be in the selector: Pods that it does not match are not released, and not created again and again.
#[test]
fn rejected_selector_releases_no_pods() {
    let mut cluster = three_replicas();
    cluster.set_templates_refused(true);
    cluster.edit(&json!({ "selector": { "matchLabels": { "app": "y" } }, "template": { "x": 1 } }));
    run_kubelets(&mut cluster);
    let (_, plan) = cluster.reconcile();
    assert_eq!(plan.actions, Vec::<Action>::new());
    assert_eq!(cluster.set["status"]["replicas"], 3);
}

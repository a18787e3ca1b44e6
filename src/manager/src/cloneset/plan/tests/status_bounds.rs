//! The size of a status is bounded, whatever the number of Pods and the length of their messages.

use jiff::ToSpan;
use proptest::prelude::*;
use serde_json::json;

use super::fake_cluster::FakeCluster;
use super::random_histories::{clone_set_spec, edit_container, edit_rolling_update};
use super::scenarios::settle;
use crate::cloneset::plan::{ActionFailure, ActionPurpose, FailureSubject, TemplateStatus};
use kruise_api::keys;
use kruise_workload::testing::apply;

/// Maximum bytes of all texts of a status together.
const MAX_STATUS_BYTES: usize = 16_000;

/// Breaks a Pod, with a long message that no other Pod has.
fn break_pod(cluster: &mut FakeCluster, name: &str, kind: u8, text: &str) {
    let pod = cluster.pods.get_mut(name).unwrap();
    let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
    let unready = json!({ "type": "Ready", "status": "False" });
    let mut add_failure = |purpose: ActionPurpose| {
        let until = cluster.now.checked_add(5.seconds()).unwrap();
        let message = text.to_owned();
        let failure = ActionFailure {
            purpose,
            retry_at: until,
            permanent: false,
            resize_rejected: false,
            answered: true,
            message,
        };
        cluster.failures.insert(FailureSubject::Pod(uid.clone()), failure);
    };
    match kind {
        0 => pod["metadata"]["labels"][keys::LIFECYCLE_STATE] = json!(text),
        1 => {
            let failing = json!({ "type": text, "status": "False", "message": text });
            let gates = json!({ "readinessGates": [{ "conditionType": text }] });
            apply(
                pod,
                &json!({ "spec": gates, "status": { "conditions": [unready, failing] } }),
            );
        }
        2 => {
            let state = json!({ "waiting": { "reason": format!("Image{text}") } });
            let statuses = json!([{ "name": "app", "ready": false, "state": state }]);
            apply(pod, &json!({ "status": { "conditions": [unready] } }));
            pod["status"]["containerStatuses"] = statuses;
        }
        3 => {
            let scheduled = json!({ "type": "PodScheduled", "status": "False", "message": text });
            apply(pod, &json!({ "status": { "conditions": [unready, scheduled] } }));
            pod["spec"]["nodeName"] = json!(null);
        }
        4 => pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_STATE] = json!(text),
        5 => add_failure(ActionPurpose::Update),
        6 => add_failure(ActionPurpose::Scale),
        _ => {}
    }
}

fn message_bytes(cluster: &FakeCluster) -> usize {
    let status = cluster.observe().set.status.clone().unwrap();
    status
        .conditions
        .iter()
        .map(|c| c.message.len() + c.reason.len())
        .sum()
}

#[test]
fn status_message_bytes_are_bounded() {
    let mut settled = FakeCluster::new(clone_set_spec(false, false));
    settled.edit(&json!({ "replicas": 60 }));
    edit_rolling_update(&mut settled, json!({ "maxUnavailable": "100%" }));
    settle(&mut settled);
    let config = ProptestConfig {
        cases: 64,
        ..ProptestConfig::default()
    };
    let kinds = prop::collection::vec(0_u8..8, 60);
    proptest!(config, |(kinds in kinds, long in 0_usize..4000, update: bool, refused: bool, only: bool)| {
        let mut cluster = settled.clone();
        if only {
            edit_rolling_update(&mut cluster, json!({ "podUpdatePolicy": "InPlaceOnly" }));
        }
        if update {
            edit_container(&mut cluster, "image", json!("app:2"));
        }
        let names: Vec<String> = cluster.pods.keys().cloned().collect();
        for (name, kind) in names.iter().zip(kinds) {
            break_pod(&mut cluster, name, kind, &format!("{name}{}", "\u{e9}".repeat(long)));
        }
        if refused {
            cluster.template_status = TemplateStatus::Rejected("no such field; ".repeat(long));
        }
        cluster.reconcile();
        prop_assert!(message_bytes(&cluster) <= MAX_STATUS_BYTES, "{} bytes: {:#}", message_bytes(&cluster), cluster.set["status"]);
    });
}

//! Idle Pods are skipped.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::fake_cluster::FakeCluster;
use super::random_histories::clone_set_spec;
use super::scenarios::settle;
use crate::cloneset::plan::builder::PlanBuilder;
use crate::cloneset::plan::view::PlanView;
use crate::cloneset::plan::{Observed, ownership, refresh};
use kruise_api::keys;

/// Asserts that skipped Pods need nothing; returns how many there are.
pub(super) fn count_settled_pods(observed: &Observed, now: Timestamp) -> usize {
    let (mut view, mut builder) = (PlanView::new(observed, now), PlanBuilder::default());
    ownership::claim_pods(&mut view, &mut builder);
    let settled = view.pods.iter().filter(|pod| pod.settled);
    let checked = settled.map(|pod| {
        let needed = refresh::refresh(&view, pod, &mut builder);
        assert!(needed.is_none() && builder.waits.is_empty(), "{:#?}", pod.pod);
    });
    checked.count()
}

/// A change of a Pod in use, to its conditions and its metadata.
type PodChange = fn(&mut Vec<Value>, &mut Value);

fn set_condition_field(conditions: &mut [Value], type_: &str, field: &str, value: &str) {
    let condition = conditions.iter_mut().find(|c| c["type"] == type_).unwrap();
    condition[field] = json!(value);
}

const POD_CHANGES: [(&str, PodChange); 7] = [
    ("a grace period", |_, meta| {
        meta["annotations"][keys::IN_PLACE_UPDATE_GRACE] = json!("{");
    }),
    ("no short hash", |_, meta| {
        meta["labels"]
            .as_object_mut()
            .unwrap()
            .remove(keys::POD_TEMPLATE_HASH);
    }),
    ("a state", |_, meta| {
        meta["labels"][keys::LIFECYCLE_STATE] = json!("Updated");
    }),
    ("a gate that says something", |conditions, _| {
        set_condition_field(conditions, keys::IN_PLACE_UPDATE_READY, "message", "left over");
    }),
    ("a gate with a reason", |conditions, _| {
        set_condition_field(
            conditions,
            keys::IN_PLACE_UPDATE_READY,
            "reason",
            "StartInPlaceUpdate",
        );
    }),
    ("a key of ours that holds it", |conditions, _| {
        let message = json!([{ "userAgent": keys::LIFECYCLE_USER_AGENT, "key": keys::PRE_DELETE_HOOK }]);
        set_condition_field(
            conditions,
            keys::KRUISE_POD_READY,
            "message",
            &message.to_string(),
        );
        set_condition_field(conditions, keys::KRUISE_POD_READY, "status", "False");
    }),
    ("no condition for the readiness gate", |conditions, _| {
        conditions.retain(|c| c["type"] != keys::KRUISE_POD_READY);
    }),
];

#[test]
fn pod_with_pending_work_is_not_settled() {
    for (what, change) in POD_CHANGES {
        let mut cluster = FakeCluster::new(clone_set_spec(false, false));
        settle(&mut cluster);
        assert_eq!(count_settled_pods(&cluster.observe(), cluster.now), 5, "{what}");
        let name = cluster.pods.keys().next().unwrap().clone();
        let pod = cluster.pods.get_mut(&name).unwrap();
        let mut conditions = pod["status"]["conditions"].as_array().unwrap().clone();
        change(&mut conditions, &mut pod["metadata"]);
        pod["status"]["conditions"] = Value::Array(conditions);
        assert_eq!(count_settled_pods(&cluster.observe(), cluster.now), 4, "{what}");
        let (_, plan) = cluster.reconcile();
        let status_changed = plan.status.is_some();
        assert!(
            plan.actions.len() == 1 || status_changed,
            "{what}: {:?}",
            plan.actions
        );
    }
}

//! Pods that need nothing are not looked at.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::cases::settle;
use super::histories::spec;
use super::world::World;
use crate::cloneset::plan::draft::Draft;
use crate::cloneset::plan::view::View;
use crate::cloneset::plan::{Observed, ownership, refresh};
use kruise_api::keys;

/// Pods that the plan does not look at would come to nothing if it did. How many there are.
pub(super) fn what_rests_needs_nothing(observed: &Observed, now: Timestamp) -> usize {
    let (mut view, mut draft) = (View::new(observed, now), Draft::default());
    ownership::claim(&mut view, &mut draft);
    let resting = view.pods.iter().filter(|pod| pod.rests);
    let looked_at = resting.map(|pod| {
        let needed = refresh::refresh(&view, pod, &mut draft);
        assert!(needed.is_none() && draft.waits.is_empty(), "{:#?}", pod.pod);
    });
    looked_at.count()
}

/// A change to a Pod that is in use, by its conditions and its metadata.
type Change = fn(&mut Vec<Value>, &mut Value);

fn set(conditions: &mut [Value], type_: &str, field: &str, value: &str) {
    let condition = conditions.iter_mut().find(|c| c["type"] == type_).unwrap();
    condition[field] = json!(value);
}

const CHANGES: [(&str, Change); 7] = [
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
        set(conditions, keys::IN_PLACE_UPDATE_READY, "message", "left over");
    }),
    ("a gate with a reason", |conditions, _| {
        set(
            conditions,
            keys::IN_PLACE_UPDATE_READY,
            "reason",
            "StartInPlaceUpdate",
        );
    }),
    ("a key of ours that holds it", |conditions, _| {
        let message = json!([{ "userAgent": keys::LIFECYCLE_USER_AGENT, "key": keys::PRE_DELETE_HOOK }]);
        set(
            conditions,
            keys::KRUISE_POD_READY,
            "message",
            &message.to_string(),
        );
        set(conditions, keys::KRUISE_POD_READY, "status", "False");
    }),
    ("a gate that nobody has opened", |conditions, _| {
        conditions.retain(|c| c["type"] != keys::KRUISE_POD_READY);
    }),
];

#[test]
fn a_pod_that_needs_anything_does_not_rest() {
    for (what, change) in CHANGES {
        let mut world = World::new(spec(false, false));
        settle(&mut world);
        assert_eq!(what_rests_needs_nothing(&world.observe(), world.now), 5, "{what}");
        let name = world.pods.keys().next().unwrap().clone();
        let pod = world.pods.get_mut(&name).unwrap();
        let mut conditions = pod["status"]["conditions"].as_array().unwrap().clone();
        change(&mut conditions, &mut pod["metadata"]);
        pod["status"]["conditions"] = Value::Array(conditions);
        assert_eq!(what_rests_needs_nothing(&world.observe(), world.now), 4, "{what}");
        let (_, plan) = world.reconcile();
        let told = plan.status.is_some();
        assert!(plan.acts.len() == 1 || told, "{what}: {:?}", plan.acts);
    }
}

//! However many Pods there are, and whatever they and others say: a status has an end.

use jiff::ToSpan;
use proptest::prelude::*;
use serde_json::json;

use super::cases::settle;
use super::histories::{container, rolling, spec};
use super::world::World;
use crate::cloneset::plan::{Concern, Failure, Subject, Template};
use kruise_api::keys;
use kruise_workload::testing::apply;

/// All texts of a status together have no more bytes.
const BOUND: usize = 16_000;

/// Something is wrong with a Pod, and said in many words that no other Pod has.
fn spoil(world: &mut World, name: &str, kind: u8, words: &str) {
    let pod = world.pods.get_mut(name).unwrap();
    let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
    let unready = json!({ "type": "Ready", "status": "False" });
    let mut failed = |of: Concern| {
        let until = world.now.checked_add(5.seconds()).unwrap();
        let message = words.to_owned();
        let failure = Failure {
            of,
            until,
            lasting: false,
            of_resize: false,
            answered: true,
            message,
        };
        world.failures.insert(Subject::Pod(uid.clone()), failure);
    };
    match kind {
        0 => pod["metadata"]["labels"][keys::LIFECYCLE_STATE] = json!(words),
        1 => {
            let shut = json!({ "type": words, "status": "False", "message": words });
            let gates = json!({ "readinessGates": [{ "conditionType": words }] });
            apply(
                pod,
                &json!({ "spec": gates, "status": { "conditions": [unready, shut] } }),
            );
        }
        2 => {
            let state = json!({ "waiting": { "reason": format!("Image{words}") } });
            let statuses = json!([{ "name": "app", "ready": false, "state": state }]);
            apply(pod, &json!({ "status": { "conditions": [unready] } }));
            pod["status"]["containerStatuses"] = statuses;
        }
        3 => {
            let scheduled = json!({ "type": "PodScheduled", "status": "False", "message": words });
            apply(pod, &json!({ "status": { "conditions": [unready, scheduled] } }));
            pod["spec"]["nodeName"] = json!(null);
        }
        4 => pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_STATE] = json!(words),
        5 => failed(Concern::Update),
        6 => failed(Concern::Scale),
        _ => {}
    }
}

fn length(world: &World) -> usize {
    let status = world.observe().set.status.clone().unwrap();
    status
        .conditions
        .iter()
        .map(|c| c.message.len() + c.reason.len())
        .sum()
}

#[test]
fn a_status_has_an_end() {
    let mut calm = World::new(spec(false, false));
    calm.edit(&json!({ "replicas": 60 }));
    rolling(&mut calm, json!({ "maxUnavailable": "100%" }));
    settle(&mut calm);
    let config = ProptestConfig {
        cases: 64,
        ..ProptestConfig::default()
    };
    let kinds = prop::collection::vec(0_u8..8, 60);
    proptest!(config, |(kinds in kinds, long in 0_usize..4000, update: bool, refused: bool, only: bool)| {
        let mut world = calm.clone();
        if only {
            rolling(&mut world, json!({ "podUpdatePolicy": "InPlaceOnly" }));
        }
        if update {
            container(&mut world, "image", json!("app:2"));
        }
        let names: Vec<String> = world.pods.keys().cloned().collect();
        for (name, kind) in names.iter().zip(kinds) {
            spoil(&mut world, name, kind, &format!("{name}{}", "\u{e9}".repeat(long)));
        }
        if refused {
            world.template = Template::Refused("no such field; ".repeat(long));
        }
        world.reconcile();
        prop_assert!(length(&world) <= BOUND, "{} bytes: {:#}", length(&world), world.set["status"]);
    });
}

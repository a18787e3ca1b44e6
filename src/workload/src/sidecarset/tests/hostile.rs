use jiff::Timestamp;
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::cluster::Cluster;
use crate::in_place::Pod;
use crate::sidecarset::changed_field::changed_field;
use crate::sidecarset::history::revision_of;
use crate::sidecarset::hot_upgrade::is_flip_due;
use crate::sidecarset::plan::plan;
use crate::sidecarset::status::PodState;
use crate::sidecarset::upgradable::upgradable_condition;
use crate::sidecarset::upgrade::{flip, upgrade};
use crate::sidecarset::waiting::{MAX_MESSAGE_CHARS, WaitingRollout, condition, first_not_upgradable};

/// Replaces a value somewhere inside: each number of `path` chooses a field or an item.
fn replace(value: &mut Value, path: &[usize], new: Value) {
    let Some((first, rest)) = path.split_first() else {
        *value = new;
        return;
    };
    match value {
        Value::Object(map) if !map.is_empty() => {
            let at = first % map.len();
            let child = map.values_mut().nth(at).unwrap();
            replace(child, rest, new);
        }
        Value::Array(items) if !items.is_empty() => {
            let at = first % items.len();
            replace(&mut items[at], rest, new);
        }
        // A map in an annotation.
        Value::String(text) => match serde_json::from_str::<Map<String, Value>>(text) {
            Ok(map) if !map.is_empty() => {
                let mut inner = Value::Object(map);
                replace(&mut inner, path, new);
                *text = inner.to_string();
            }
            _ => *value = new,
        },
        _ => *value = new,
    }
}

fn any_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        Just(json!("")),
        Just(json!("*")),
        Just(json!("100%")),
        Just(json!(i64::MIN)),
        Just(json!(i32::MAX)),
        Just(json!(-1)),
        Just(json!(1.5)),
        Just(json!(true)),
        Just(json!([])),
        Just(json!([null])),
        Just(json!({})),
        Just(json!({ "S": 1 })),
        Just(json!("{\"S\":[]}")),
        Just(json!("mesh-1")),
        Just(json!("@")),
        Just(json!("://")),
        Just(json!("a@sha256:")),
        "\\PC{0,6}".prop_map(Value::from),
    ]
}

proptest! {
    /// Objects that anyone may have changed make no panic, and a Pod is never changed outside of the set's containers.
    #[test]
    fn any_input_has_a_plan(
        line in 0_usize..160,
        changes in prop::collection::vec((prop::collection::vec(0_usize..64, 1..10), any_value()), 0..6),
    ) {
        let vectors = include_str!("../../../../../tests/data/go/sidecarset-reconcile.jsonl");
        let mut vector: Value = serde_json::from_str(vectors.lines().nth(line).unwrap()).unwrap();
        for (path, new) in changes {
            replace(&mut vector["in"], &path, new);
        }
        let Some(cluster) = Cluster::parse(&vector["in"]) else {
            return Ok(());
        };
        let observed = cluster.observed(&vector["in"]["sidecarSet"]);
        let now = Timestamp::UNIX_EPOCH;
        let matched = cluster.matched();
        for all in [false, true] {
            let every: Vec<usize> = (0..cluster.pods.len()).collect();
            let chosen = if all { &every } else { &matched };
            let pods: Vec<&Pod> = chosen.iter().map(|at| &cluster.pods[*at].1).collect();
            let plan = plan(&observed, &pods, &cluster.revisions(), now);
            for (at, changes) in plan.upgrades.iter().chain(&plan.flips) {
                prop_assert!(*at < pods.len());
                for name in changes.images.keys() {
                    let sidecars = cluster.spec.containers.iter().flatten();
                    let mut names = sidecars.filter_map(|c| c.container.get("name")?.as_str());
                    prop_assert!(names.any(|sidecar| name.starts_with(sidecar)));
                }
            }
            let namespaces: Vec<&str> = chosen.iter().map(|at| cluster.pods[*at].0.as_str()).collect();
            let first = first_not_upgradable(&plan.waits).and_then(|at| pods.get(at));
            let revision = first.and_then(|pod| revision_of(&observed.view(""), pod));
            let revision = cluster.raw_revisions.iter().find(|raw| raw["metadata"]["name"].as_str() == revision.as_deref());
            let changed = revision.and_then(|raw| changed_field(&raw["data"], &cluster.spec));
            let waiting = condition(&WaitingRollout {
                set: observed.view(&plan.history.latest),
                pods: &pods,
                namespaces: &namespaces,
                waits: &plan.waits,
                changed_field: changed.as_ref(),
            });
            prop_assert_eq!(waiting.is_none(), plan.waits.is_empty());
            prop_assert!(waiting.is_none_or(|waiting| waiting.message.chars().count() <= MAX_MESSAGE_CHARS));
        }
        let set = observed.view("r");
        for (_, pod) in &cluster.pods {
            let _ = (PodState::new(&set, pod), is_flip_due(&set, pod), flip(&set, pod, now));
            let _ = upgrade(&set, pod, now);
            let _ = upgradable_condition(set.name, pod, false, now);
        }
    }
}

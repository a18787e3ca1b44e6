#![allow(clippy::unwrap_used, clippy::panic)]
use std::collections::BTreeMap;

use kruise_api::cloneset::RollingUpdateCloneSetStrategy;
use serde_json::{Value, json};

use super::*;

fn pods(vector: &Value) -> Vec<Pod> {
    vector["pods"]
        .as_array()
        .unwrap()
        .iter()
        .map(Pod::from_json)
        .collect()
}

fn number(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

fn update_vector(vector: &Value) -> Value {
    let pods = pods(vector);
    let candidates = vector["candidates"]
        .as_array()
        .into_iter()
        .flatten()
        .map(number)
        .collect();
    let strategy: RollingUpdateCloneSetStrategy = serde_json::from_value(json!({
        "priorityStrategy": vector["priorityStrategy"],
        "scatterStrategy": vector["scatterStrategy"].as_array().cloned().unwrap_or_default(),
    }))
    .unwrap();
    let pods: Vec<_> = pods.iter().collect();
    let priority = strategy.priority_strategy.as_ref();
    let mut order = update_order(&pods, candidates, priority, &strategy.scatter_strategy);
    preparing_first(&pods, &mut order);
    json!(order)
}

fn delete_vector(vector: &Value) -> Value {
    let pods = pods(vector);
    let pods: Vec<&Pod> = pods.iter().collect();
    let choice = DeletionCriteria {
        min_ready_seconds: 0,
        now: Timestamp::UNIX_EPOCH,
        spread: &TopologySpread::default(),
    };
    let (old, new) = pods.split_at(number(&vector["oldCount"]));
    let chosen = pick_for_scale_down(
        old,
        new,
        number(&vector["total"]),
        number(&vector["fromOld"]),
        &choice,
    );
    json!(chosen.iter().map(|pod| &pod.name).collect::<Vec<_>>())
}

#[test]
fn pod_orders_match_go() {
    let vectors = include_str!("../../../../tests/data/go/cloneset-order.jsonl");
    assert_eq!(vectors.lines().count(), 800);
    for (at, line) in vectors.lines().enumerate() {
        let vector: Value = serde_json::from_str(line).unwrap();
        let ours = match vector["kind"].as_str().unwrap() {
            "update" => update_vector(&vector),
            _ => delete_vector(&vector),
        };
        let theirs = if vector["out"].is_null() {
            json!([])
        } else {
            vector["out"].clone()
        };
        assert_eq!(ours, theirs, "line {}", at + 1);
    }
}

fn pod_on_node(name: &str, node: &str) -> Pod {
    Pod {
        name: name.to_owned(),
        node: Some(node.to_owned()),
        phase: "Running".to_owned(),
        ..Pod::default()
    }
}

#[test]
fn fullest_node_loses_pods_first() {
    let pods = [
        pod_on_node("a", "n1"),
        pod_on_node("b", "n1"),
        pod_on_node("c", "n1"),
        pod_on_node("d", "n2"),
    ];
    let pods: Vec<&Pod> = pods.iter().collect();
    assert_eq!(ranks(&pods, &TopologySpread::default()), [2.0, 1.0, 0.0, 0.0]);
}

#[test]
fn fullest_zone_loses_pods_first() {
    let pods = [
        pod_on_node("a", "n1"),
        pod_on_node("b", "n2"),
        pod_on_node("c", "n3"),
        pod_on_node("d", "gone"),
    ];
    let pods: Vec<&Pod> = pods.iter().collect();
    let zone = |zone: &str| BTreeMap::from([("zone".to_owned(), zone.to_owned())]);
    let nodes = [("n1", "x"), ("n2", "y"), ("n3", "x")];
    let nodes = nodes.map(|(node, place)| (node.to_owned(), zone(place))).into();
    let spread = TopologySpread {
        keys: vec!["zone".to_owned()],
        nodes: Some(&nodes),
    };
    let weight = 4.0_f64.ln();
    assert_eq!(ranks(&pods, &spread), [2.0 * weight, weight, weight, 0.0]);
    let choice = DeletionCriteria {
        min_ready_seconds: 0,
        now: Timestamp::UNIX_EPOCH,
        spread: &spread,
    };
    assert_eq!(pick_for_deletion(&pods, 1, &choice)[0].name, "a");
}

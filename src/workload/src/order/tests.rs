#![allow(clippy::unwrap_used, clippy::panic)]
use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::*;

fn pods(vector: &Value) -> Vec<Pod> {
    vector["pods"].as_array().unwrap().iter().map(Pod::of).collect()
}

fn number(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

fn updated(vector: &Value) -> Value {
    let pods = pods(vector);
    let candidates = vector["candidates"]
        .as_array()
        .into_iter()
        .flatten()
        .map(number)
        .collect();
    let mut strategy = json!({});
    for field in ["priorityStrategy", "scatterStrategy"] {
        if !vector[field].is_null() {
            strategy[field] = vector[field].clone();
        }
    }
    let strategy = serde_json::from_value(strategy).unwrap();
    json!(update(
        &pods.iter().collect::<Vec<_>>(),
        candidates,
        Some(&strategy)
    ))
}

fn deleted(vector: &Value) -> Value {
    let pods = pods(vector);
    let pods: Vec<&Pod> = pods.iter().collect();
    let choice = Choice {
        min_ready_seconds: 0,
        now: Timestamp::UNIX_EPOCH,
        spread: &Spread::default(),
    };
    let (old, new) = pods.split_at(number(&vector["oldCount"]));
    let chosen = split(
        old,
        new,
        number(&vector["total"]),
        number(&vector["fromOld"]),
        &choice,
    );
    json!(chosen.iter().map(|pod| &pod.name).collect::<Vec<_>>())
}

#[test]
fn orders_are_those_of_the_go_implementation() {
    let vectors = include_str!("../../../../tests/data/go/cloneset-order.jsonl");
    assert_eq!(vectors.lines().count(), 800);
    for (at, line) in vectors.lines().enumerate() {
        let vector: Value = serde_json::from_str(line).unwrap();
        let ours = match vector["kind"].as_str().unwrap() {
            "update" => updated(&vector),
            _ => deleted(&vector),
        };
        let theirs = if vector["out"].is_null() {
            json!([])
        } else {
            vector["out"].clone()
        };
        assert_eq!(ours, theirs, "line {}", at + 1);
    }
}

fn on(name: &str, node: &str) -> Pod {
    Pod {
        name: name.to_owned(),
        node: Some(node.to_owned()),
        phase: "Running".to_owned(),
        ..Pod::default()
    }
}

#[test]
fn the_fullest_node_gives_first() {
    let pods = [on("a", "n1"), on("b", "n1"), on("c", "n1"), on("d", "n2")];
    let pods: Vec<&Pod> = pods.iter().collect();
    assert_eq!(ranks(&pods, &Spread::default()), [2.0, 1.0, 0.0, 0.0]);
}

#[test]
fn the_fullest_zone_gives_first() {
    let pods = [on("a", "n1"), on("b", "n2"), on("c", "n3"), on("d", "gone")];
    let pods: Vec<&Pod> = pods.iter().collect();
    let zone = |zone: &str| BTreeMap::from([("zone".to_owned(), zone.to_owned())]);
    let nodes = [("n1", "x"), ("n2", "y"), ("n3", "x")];
    let nodes = nodes.map(|(node, place)| (node.to_owned(), zone(place))).into();
    let spread = Spread {
        keys: vec!["zone".to_owned()],
        nodes: Some(&nodes),
    };
    let weight = 4.0_f64.ln();
    assert_eq!(ranks(&pods, &spread), [2.0 * weight, weight, weight, 0.0]);
    let choice = Choice {
        min_ready_seconds: 0,
        now: Timestamp::UNIX_EPOCH,
        spread: &spread,
    };
    assert_eq!(delete(&pods, 1, &choice)[0].name, "a");
}

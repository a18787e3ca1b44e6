#![allow(clippy::unwrap_used, clippy::panic)]
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use kruise_api::cloneset::RollingUpdateCloneSetStrategy;
use kruise_api::selector;
use proptest::prelude::*;
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

fn labels_of(pairs: impl IntoIterator<Item = (String, String)>) -> BTreeMap<String, String> {
    pairs.into_iter().collect()
}

/// A tenant may write many terms. Pods differ in labels of ours, which the terms do not name.
#[test]
fn terms_are_matched_once_for_pods_with_equal_labels() {
    let labels = |shift: usize| (0..180).map(move |at| (format!("k{at}"), format!("v{}", at + shift)));
    let term =
        |weight: i32| json!({ "weight": weight, "matchSelector": { "matchLabels": labels_of(labels(0)) } });
    let terms: Vec<Value> = (0..256).map(|at| term(at % 100)).collect();
    let strategy = serde_json::from_value(json!({ "weightPriority": terms })).unwrap();
    let priority = CompiledPriority::from(&strategy);
    let pod = |at: usize| {
        let ours = [("apps.kruise.io/cloneset-instance-id".to_owned(), at.to_string())];
        labels_of(labels(at % 2).chain(ours))
    };
    let pods: Vec<_> = (0..2000).map(pod).collect();
    let mut known = HashMap::new();
    let weights: Vec<i64> = pods
        .iter()
        .map(|labels| priority.weight(labels, &mut known))
        .collect();
    assert_eq!(known.len(), 2, "two kinds of Pods");
    let total = (0..256).map(|at| at % 100).sum();
    assert!(weights.chunks(2).all(|pair| pair == [total, 0]));
}

proptest! {
    #[test]
    fn pods_are_sorted_by_the_sum_of_their_weights(
        terms in prop::collection::vec((0..100_i32, "[a-c]", "(In|NotIn|Exists|DoesNotExist)", "[12]"), 1..5),
        pods in prop::collection::vec(prop::collection::btree_map("[a-d]", "[123]", 0..4), 0..20),
    ) {
        let weights = terms.iter().map(|(weight, key, operator, value)| {
            let values = if operator.ends_with("In") { json!([value]) } else { json!([]) };
            let requirement = json!({ "key": key, "operator": operator, "values": values });
            json!({ "weight": weight, "matchSelector": { "matchExpressions": [requirement] } })
        });
        let strategy = json!({ "weightPriority": weights.collect::<Vec<_>>() });
        let strategy: UpdatePriorityStrategy = serde_json::from_value(strategy).unwrap();
        let mut order: Vec<usize> = (0..pods.len()).collect();
        let mut expected = order.clone();
        CompiledPriority::from(&strategy).sort(&mut order, |at| &pods[*at]);
        expected.sort_by_key(|at| {
            let terms = strategy.weight_priority.iter();
            let matching = terms.filter(|term| selector::matches(&term.match_selector, &pods[*at]));
            Reverse(matching.map(|term| term.weight).sum::<i32>())
        });
        prop_assert_eq!(order, expected);
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

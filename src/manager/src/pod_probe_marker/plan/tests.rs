#![allow(clippy::unwrap_used)]
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use proptest::prelude::*;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;
use crate::view::{PodView, RawPod};
use kruise_api::keys;
use kruise_api::node_pod_probe::{NodePodProbe, NodePodProbeSpec, liveness_name};

const VECTORS: &str = include_str!("../../../../../tests/data/go/pod-probe-marker.jsonl");

fn parse<T: DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap()
}

fn vectors(kind: &str) -> Vec<Value> {
    let lines = VECTORS.lines().map(|line| serde_json::from_str(line).unwrap());
    lines.filter(|vector: &Value| vector["kind"] == kind).collect()
}

/// A PodProbeMarker of a vector, which has no status.
fn marker(object: &Value) -> Arc<PodProbeMarker> {
    Arc::new(parse(object))
}

fn marks(pod: &Value) -> PodMarks {
    let pod: Pod = parse(pod);
    PodMarks {
        conditions: pod
            .status
            .and_then(|status| status.conditions)
            .unwrap_or_default(),
        labels: pod.metadata.labels.unwrap_or_default(),
        annotations: pod.metadata.annotations.unwrap_or_default(),
    }
}

fn apply_change(pod: &mut PodMarks, change: &PodChange) {
    for condition in &change.conditions {
        pod.conditions.retain(|old| old.type_ != condition.type_);
        pod.conditions.push(condition.clone());
    }
    pod.conditions
        .retain(|condition| !change.removed_conditions.contains(&condition.type_));
    for (map, changes) in [
        (&mut pod.labels, &change.labels),
        (&mut pod.annotations, &change.annotations),
    ] {
        for (key, value) in changes {
            match value {
                Some(value) => map.insert(key.clone(), value.clone()),
                None => map.remove(key),
            };
        }
    }
}

/// Conditions, labels and annotations as the vectors write them.
fn written(pod: &PodMarks) -> Value {
    let conditions = pod.conditions.iter().map(|condition| {
        let message = condition.message.clone().unwrap_or_default();
        (condition.type_.clone(), json!([condition.status, message]))
    });
    json!([
        conditions.collect::<BTreeMap<_, _>>(),
        pod.labels,
        pod.annotations
    ])
}

#[test]
fn results_mark_pods_as_in_openkruise() {
    let mut compared = 0;
    for vector in vectors("probe-status") {
        let input = &vector["in"];
        if !vector["out"]["pods"].is_object() || input["nodeExists"] != true {
            continue;
        }
        let markers: Vec<_> = input["markers"]
            .as_array()
            .into_iter()
            .flatten()
            .map(marker)
            .collect();
        let object: NodePodProbe = parse(&input["nodePodProbe"]);
        for pod in input["pods"].as_array().unwrap() {
            let name = pod["metadata"]["name"].as_str().unwrap();
            let expected = &vector["out"]["pods"][name];
            let namespace = &pod["metadata"]["namespace"];
            let uid = pod["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
            let is_listed = object
                .spec
                .pod_probes
                .iter()
                .any(|entry| entry.uid == uid && entry.name == name);
            let status = object.status.clone().unwrap_or_default();
            let states = status.pod_probe_statuses.into_iter().find(|one| one.uid == uid);
            let is_active = PodView::from(&RawPod::from(pod.clone())).active();
            let (Some(states), true) = (states, is_active && is_listed && expected.is_object()) else {
                continue;
            };
            let active = markers.iter().filter(|one| {
                one.metadata.deletion_timestamp.is_none() && json!(one.metadata.namespace) == *namespace
            });
            let results = Results {
                uid,
                states: states.probe_states,
                markers: active.cloned().collect(),
                sets_conditions: true,
            };
            // Of the labels of several other states, OpenKruise removes those of the last one only.
            let is_defect = results.states.iter().any(|state| {
                state.state == ProbeState::Unknown
                    && find_probe(&results.markers, &state.name)
                        .is_some_and(|probe| probe.marker_policy.len() > 1)
            });
            // It also sets the condition types that are reserved here.
            let mut after = marks(pod);
            let change = pod_change(&after, &results);
            apply_change(&mut after, &change);
            assert_eq!(pod_change(&after, &results), PodChange::default(), "{vector}");
            // A Pod without labels, or annotations, makes it panic.
            if is_defect || vector["out"]["panic"].is_string() {
                continue;
            }
            let conditions = expected["conditions"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|condition| {
                    let type_ = condition["type"].as_str().unwrap().to_owned();
                    let message = condition["message"].as_str().unwrap_or_default();
                    (type_, json!([condition["status"], message]))
                });
            let map = |value: &Value| if value.is_null() { json!({}) } else { value.clone() };
            let expected = json!([
                conditions.collect::<BTreeMap<_, _>>(),
                map(&expected["labels"]),
                map(&expected["annotations"])
            ]);
            assert_eq!(written(&after), expected, "{vector}");
            compared += 1;
        }
    }
    assert!(compared > 60, "{compared} Pods were compared");
}

#[test]
fn probes_are_distributed_as_in_openkruise() {
    let mut compared = 0;
    for vector in vectors("marker-sync") {
        let input = &vector["in"];
        let marker = marker(&input["marker"]);
        if marker.metadata.deletion_timestamp.is_some() || !vector["out"]["nodePodProbes"].is_object() {
            continue;
        }
        for pod in input["pods"].as_array().unwrap() {
            let view = PodView::from(&RawPod::from(pod.clone()));
            let name = pod["metadata"]["name"].as_str().unwrap();
            let selected = crate::view::matches(&marker.spec.selector, &view.labels)
                && pod["metadata"]["namespace"] == json!(marker.metadata.namespace);
            let Some(node) = view
                .node
                .clone()
                .filter(|_| selected && view.active() && view.initialized)
            else {
                continue;
            };
            let nodes = input["nodes"].as_array().unwrap();
            let node_exists = nodes.iter().any(|one| one["metadata"]["name"] == *node);
            let spec = &vector["out"]["nodePodProbes"][&node];
            if !spec.is_object() || !node_exists {
                continue;
            }
            let spec: NodePodProbeSpec = parse(spec);
            let probed = ProbedPod {
                uid: view.uid.clone(),
                node,
                ip: view.ip.to_string(),
                ports: view.ports.to_vec(),
                markers: vec![Arc::clone(&marker)],
                liveness: Arc::default(),
                reported: None,
            };
            let key = Key::namespaced(marker.metadata.namespace.clone().unwrap(), name);
            let ours = node_probes(&[], &[(key, probed)]);
            let entry = spec.pod_probes.iter().find(|entry| entry.uid == view.uid);
            let theirs = entry.map(|entry| &entry.probes);
            for probe in ours.iter().flat_map(|entry| &entry.probes) {
                let their = theirs.and_then(|probes| probes.iter().find(|one| one.name == probe.name));
                assert_eq!(Some(probe), their, "{vector}");
                compared += 1;
            }
        }
    }
    assert!(compared > 10, "{compared} probes were compared");
}

/// The provider of a virtual node sets the conditions, and we the marks of their states.
#[test]
fn virtual_nodes_report_by_conditions_as_in_openkruise() {
    let mut compared = 0;
    for vector in vectors("marker-sync") {
        let input = &vector["in"];
        let marker = marker(&input["marker"]);
        if input["serverlessGate"] != true || marker.metadata.deletion_timestamp.is_some() {
            continue;
        }
        let nodes = input["nodes"].as_array().unwrap();
        let is_virtual = |name: &Value| {
            let node = nodes.iter().find(|node| node["metadata"]["name"] == *name);
            node.is_some_and(|node| node["metadata"]["labels"]["type"] == "virtual-kubelet")
        };
        for pod in input["pods"].as_array().unwrap() {
            let mut annotated = pod.clone();
            annotated["metadata"]["annotations"] =
                json!({ keys::POD_PROBE: "[]", keys::POD_PROBE_MARKER_LIST: "other,m1" });
            let view = PodView::from(&RawPod::from(annotated));
            let selected = crate::view::matches(&marker.spec.selector, &view.labels)
                && pod["metadata"]["namespace"] == json!(marker.metadata.namespace);
            let is_probed = selected && view.active() && view.initialized;
            if !is_probed || !is_virtual(&pod["spec"]["nodeName"]) {
                continue;
            }
            let (_, probed) = self::pod("u", &[&marker]);
            let reported = view.reported_probes.unwrap();
            let results = Results::reported(probed, &reported);
            let mut after = marks(pod);
            let change = pod_change(&after, &results);
            assert_eq!(change.conditions, []);
            apply_change(&mut after, &change);
            let mut all = vector["out"]["pods"].as_array().unwrap().iter();
            let theirs = all.find(|one| one["name"] == pod["metadata"]["name"]).unwrap();
            let map = |value: &Value| if value.is_null() { json!({}) } else { value.clone() };
            assert_eq!(json!(after.labels), map(&theirs["labels"]), "{vector}");
            assert_eq!(json!(after.annotations), map(&theirs["annotations"]), "{vector}");
            compared += 1;
        }
    }
    assert_eq!(compared, 2, "Pods compared");
}

#[test]
fn reported_condition_takes_the_marks_of_the_other_state_away() {
    let policies = json!([policy("Succeeded", "yes"), policy("Failed", "no")]);
    let probes = json!([
        probe("p", "x/p", policies.clone()),
        probe("ready", "Ready", policies)
    ]);
    let (given, later) = (marker_of("given", probes.clone()), marker_of("later", probes));
    let mut marks = PodMarks::default();
    for (status, expected) in [
        ("True", Some("yes")),
        ("False", Some("no")),
        ("Unknown", None),
        ("True", Some("yes")),
        // Until the provider has a result, the last one counts.
        ("", Some("yes")),
    ] {
        let mut conditions = vec![json!({ "type": "Ready", "status": "False" })];
        if !status.is_empty() {
            conditions.push(json!({ "type": "x/p", "status": status }));
        }
        let annotations = json!({ keys::POD_PROBE: "[]", keys::POD_PROBE_MARKER_LIST: "given" });
        let object =
            json!({ "metadata": { "annotations": annotations }, "status": { "conditions": conditions } });
        let view = PodView::from(&RawPod::from(object));
        let (_, probed) = pod("u", &[&given, &later]);
        let results = Results::reported(probed, &view.reported_probes.unwrap());
        let change = pod_change(&marks, &results);
        apply_change(&mut marks, &change);
        let labels: Vec<&str> = marks.labels.keys().map(String::as_str).collect();
        assert_eq!(labels, expected.into_iter().collect::<Vec<_>>(), "{status:?}");
    }
}

fn probe(name: &str, condition: &str, policies: Value) -> Value {
    json!({ "name": name, "containerName": "c", "probe": { "tcpSocket": { "port": "http" } },
        "podConditionType": condition, "markerPolicy": policies })
}

fn marker_of(name: &str, probes: Value) -> Arc<PodProbeMarker> {
    marker(
        &json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "PodProbeMarker",
        "metadata": { "name": name, "namespace": "n" }, "spec": { "selector": {}, "probes": probes } }),
    )
}

fn pod(uid: &str, markers: &[&Arc<PodProbeMarker>]) -> (Key, ProbedPod) {
    let port = |container: &str, number| NamedPort {
        container: container.into(),
        name: "http".into(),
        number,
    };
    let pod = ProbedPod {
        uid: uid.to_owned(),
        node: "node".to_owned(),
        ip: "10.0.0.1".to_owned(),
        ports: vec![port("other", 1), port("c", 2)],
        markers: markers.iter().map(|marker| Arc::clone(marker)).collect(),
        liveness: Arc::default(),
        reported: None,
    };
    (Key::namespaced("n", uid), pod)
}

fn names(entries: &[PodProbe]) -> Vec<(&str, Vec<&str>)> {
    let entries = entries.iter().map(|entry| {
        let probes = entry.probes.iter().map(|probe| probe.name.as_str());
        (entry.uid.as_str(), probes.collect())
    });
    entries.collect()
}

#[test]
fn removed_probes_and_pods_leave_and_the_order_stays() {
    let way = marker_of(
        "way",
        json!([probe("b", "x", json!([])), probe("a", "y", json!([]))]),
    );
    let gateway = marker_of("gateway", json!([probe("a", "x", json!([]))]));
    let both = [&gateway, &way];
    let all = node_probes(&[], &[pod("u1", &both), pod("u2", &both)]);
    let expected = vec!["gateway#a", "way#b", "way#a"];
    assert_eq!(names(&all), [("u1", expected.clone()), ("u2", expected)]);
    let mut reversed: Vec<PodProbe> = all.iter().rev().cloned().collect();
    reversed[0].probes.reverse();
    assert_eq!(
        node_probes(&reversed, &[pod("u1", &both), pod("u2", &both)]),
        reversed
    );
    let left = node_probes(&reversed, &[pod("u1", &[&gateway]), pod("u3", &both)]);
    let expected = vec!["gateway#a", "way#b", "way#a"];
    assert_eq!(names(&left), [("u1", vec!["gateway#a"]), ("u3", expected)]);
    let port = |entry: &PodProbe| entry.probes[0].probe.tcp_socket.clone().unwrap().port;
    assert_eq!(port(&left[0]), IntOrString::Int(2), "of its own container");
}

fn state(name: &str, state: ProbeState) -> ContainerProbeState {
    ContainerProbeState {
        name: name.to_owned(),
        state,
        last_probe_time: None,
        last_transition_time: None,
        message: "m".to_owned(),
        container_id: None,
    }
}

fn policy(state: &str, key: &str) -> Value {
    json!({ "state": state, "labels": { key: "1" }, "annotations": { format!("a/{key}"): "1" } })
}

#[test]
fn removed_marker_takes_its_marks_along() {
    let policies = json!([policy("Succeeded", "yes"), policy("Failed", "no")]);
    let marker = marker_of(
        "m",
        json!([probe("p", "x/gate", policies), probe("q", "x/plain", json!([]))]),
    );
    let mut pod = PodMarks {
        labels: [("app".to_owned(), "a".to_owned())].into(),
        ..PodMarks::default()
    };
    let before = pod.clone();
    let states = vec![
        state("m#p", ProbeState::Failed),
        state("m#q", ProbeState::Succeeded),
    ];
    let results = Results {
        uid: String::new(),
        states,
        markers: vec![Arc::clone(&marker)],
        sets_conditions: true,
    };
    let change = pod_change(&pod, &results);
    apply_change(&mut pod, &change);
    assert_eq!(pod.labels.keys().collect::<Vec<_>>(), ["app", "no"]);
    // This value is not the marker's.
    let foreign = ("a/yes".to_owned(), "by a user".to_owned());
    pod.annotations.extend([foreign.clone()]);
    let removal = removal(&pod, &marker, &[], &["x/gate".to_owned()]);
    apply_change(&mut pod, &removal);
    let types: Vec<&str> = pod
        .conditions
        .iter()
        .map(|condition| condition.type_.as_str())
        .collect();
    assert_eq!(types, ["x/gate"], "a readiness gate requires it");
    assert_eq!(
        (pod.labels, pod.annotations),
        (before.labels, BTreeMap::from([foreign]))
    );
}

#[test]
fn new_message_matters_only_to_a_condition() {
    let marker = marker_of(
        "m",
        json!([
            probe("p", "", json!([policy("Succeeded", "yes")])),
            probe("q", "x/q", json!([]))
        ]),
    );
    let results = |name: &str, message: &str| {
        let state = ContainerProbeState {
            message: message.to_owned(),
            ..state(name, ProbeState::Succeeded)
        };
        Results::new("u".to_owned(), &[state], vec![Arc::clone(&marker)])
    };
    assert_eq!(results("m#p", "1"), results("m#p", "2"));
    assert_ne!(results("m#q", "1"), results("m#q", "2"));
    assert_eq!(results("EnhancedLivenessProbe#c", "1").states, []);
}

/// A second one with the same marks takes over from the first.
#[test]
fn removed_marker_leaves_what_another_one_sets() {
    let policies = json!([policy("Succeeded", "shared"), policy("Failed", "own")]);
    let first = marker_of("first", json!([probe("p", "x/shared", policies)]));
    let policies = json!([policy("Succeeded", "shared")]);
    let second = marker_of("second", json!([probe("q", "x/shared", policies)]));
    let mut pod = PodMarks::default();
    let results = Results {
        uid: String::new(),
        states: vec![state("first#p", ProbeState::Succeeded)],
        markers: vec![Arc::clone(&first)],
        sets_conditions: true,
    };
    let change = pod_change(&pod, &results);
    apply_change(&mut pod, &change);
    assert_eq!(removal(&pod, &first, &[second], &[]), PodChange::default());
    assert_ne!(removal(&pod, &first, &[], &[]), PodChange::default());
}

/// All tenants of a node share the object.
#[test]
fn probes_of_a_pod_and_of_a_node_are_bounded() {
    let many = |name: &str, command: &str| {
        let probes = (0..32).map(|index| {
            json!({ "name": format!("p{index}"), "containerName": "c", "podConditionType": format!("x/{index}"),
                "probe": { "exec": { "command": [command] } } })
        });
        marker_of(name, json!(probes.collect::<Vec<_>>()))
    };
    let small: Vec<_> = (0..4).map(|index| many(&format!("m{index}"), "c")).collect();
    let entries = node_probes(&[], &[pod("u", &small.iter().collect::<Vec<_>>())]);
    assert_eq!(entries[0].probes.len(), MAX_PROBES_OF_POD);
    let large = many("large", &"c".repeat(10_000));
    let neighbour = marker_of("n", json!([probe("a", "x", json!([]))]));
    let mut pods: Vec<_> = (0..110)
        .map(|index| pod(&format!("u{index:03}"), &[&large]))
        .collect();
    pods.push(pod("v", &[&neighbour]));
    let entries = node_probes(&[], &pods);
    let bytes = |entries: &[PodProbe]| serde_json::to_string(entries).unwrap().len();
    assert!(bytes(&entries) < MAX_NODE_BYTES);
    assert!(
        entries.iter().any(|entry| entry.uid == "v"),
        "large ones do not take its place"
    );
    let escaped = many("escaped", &"<".repeat(8_000));
    assert_eq!(node_probes(&[], &[pod("u", &[&escaped])]), []);
    // What small ones leave is for the others.
    let medium = many("medium", &"c".repeat(500));
    let pods = (0..250).map(|index| pod(&format!("u{index:03}"), &[&neighbour]));
    let pods: Vec<_> = pods.chain([pod("v", &[&medium])]).collect();
    let entries = node_probes(&[], &pods);
    let large = entries.iter().find(|entry| entry.uid == "v").unwrap();
    assert_eq!(large.probes.len(), 32);
    // The object with its status, as long as it can be.
    let pods = (0..250).map(|index| pod(&format!("u{index:03}"), &small.iter().collect::<Vec<_>>()));
    let entries = node_probes(&[], &pods.collect::<Vec<_>>());
    let time = "2026-01-02T00:00:00Z";
    let statuses = entries.iter().map(|entry| {
        let states = entry.probes.iter().map(|probe| {
            json!({ "name": probe.name, "state": "Succeeded", "lastProbeTime": time, "lastTransitionTime": time,
                "message": "", "containerID": format!("containerd://{}", "f".repeat(64)) })
        });
        json!({ "name": entry.name, "namespace": entry.namespace, "uid": entry.uid,
            "probeStates": states.collect::<Vec<_>>() })
    });
    let statuses = serde_json::to_string(&statuses.collect::<Vec<_>>())
        .unwrap()
        .len();
    let sum = bytes(&entries) + statuses;
    assert!(sum < MAX_NODE_BYTES && sum > MAX_NODE_BYTES / 2, "{sum}");
    let long = marker(
        &json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "PodProbeMarker",
        "metadata": { "name": "long", "namespace": "n" }, "spec": { "selector": {}, "probes": [
            { "name": "a", "containerName": "c".repeat(65), "probe": { "tcpSocket": { "port": 1 } } }] } }),
    );
    assert_eq!(node_probes(&[], &[pod("u", &[&long])]), []);
}

#[test]
fn liveness_probes_stand_beside_those_of_markers() {
    let liveness = ContainerProbe {
        name: liveness_name("c"),
        container_name: "c".to_owned(),
        probe: parse(&json!({ "tcpSocket": { "port": 1, "host": "" }, "initialDelaySeconds": 0 })),
    };
    let probes = (0..32).map(|index| probe(&format!("p{index}"), &format!("x/{index}"), json!([])));
    let probes: Vec<_> = probes.collect();
    let markers = ["a", "b"].map(|name| marker_of(name, json!(probes)));
    let (key, mut pod) = pod("u", &markers.iter().collect::<Vec<_>>());
    pod.liveness = [liveness].into();
    let entries = node_probes(&[], &[(key.clone(), pod.clone())]);
    let written = &entries[0].probes;
    assert_eq!(written.len(), MAX_PROBES_OF_POD);
    assert_eq!(
        json!(written[0]),
        json!({ "name": "EnhancedLivenessProbe#c", "containerName": "c", "probe": { "tcpSocket": { "port": 1 } } })
    );
    assert_eq!(written[1].name, "a#p0");
    // Its result marks nothing.
    let results = Results {
        uid: String::new(),
        states: vec![state("EnhancedLivenessProbe#c", ProbeState::Failed)],
        markers: pod.markers.clone(),
        sets_conditions: true,
    };
    assert_eq!(pod_change(&PodMarks::default(), &results), PodChange::default());
    pod.markers = Vec::new();
    assert_eq!(node_probes(&entries, &[(key, pod)])[0].probes.len(), 1);
}

#[test]
fn reserved_condition_is_not_set() {
    let marker = marker_of("m", json!([probe("p", "Ready", json!([]))]));
    let states = vec![
        state("m#p", ProbeState::Failed),
        state("no-such", ProbeState::Failed),
    ];
    let results = Results {
        uid: String::new(),
        states,
        markers: vec![marker],
        sets_conditions: true,
    };
    assert_eq!(pod_change(&PodMarks::default(), &results), PodChange::default());
}

proptest! {
    /// For any current list: the result lists each Pod once, with all of its probes and no other, and is stable.
    #[test]
    fn distribution_is_complete_and_stable(
        old in proptest::collection::vec((0..6_u8, proptest::collection::vec(0..4_u8, 0..4)), 0..6),
        pods in proptest::collection::btree_map(0..6_u8, 0..4_u8, 0..6),
    ) {
        let markers: Vec<_> = (0..2)
            .map(|index| marker_of(&format!("m{index}"), json!([probe("a", "x", json!([])), probe("b", "y", json!([]))])))
            .collect();
        let old: Vec<PodProbe> = old.into_iter().map(|(uid, probes)| PodProbe {
            uid: format!("u{uid}"),
            probes: probes.into_iter().map(|probe| ContainerProbe {
                name: format!("m{}#{}", probe % 2, if probe > 1 { "a" } else { "z" }),
                ..ContainerProbe::default()
            }).collect(),
            ..PodProbe::default()
        }).collect();
        let pods: Vec<_> = pods.into_iter().map(|(uid, which)| {
            let selected = markers.iter().enumerate().filter(|(index, _)| which & (1 << index) != 0);
            let selected: Vec<_> = selected.map(|(_, marker)| marker).collect();
            pod(&format!("u{uid}"), &selected)
        }).collect();
        let new = node_probes(&old, &pods);
        let uids: BTreeSet<&str> = new.iter().map(|entry| entry.uid.as_str()).collect();
        prop_assert_eq!(uids.len(), new.len());
        for (_, pod) in &pods {
            let expected: BTreeSet<String> = pod.markers.iter()
                .flat_map(|marker| ["a", "b"].map(|probe| full_name(marker.metadata.name.as_deref().unwrap(), probe)))
                .collect();
            let listed = new.iter().find(|entry| entry.uid == pod.uid);
            let listed: BTreeSet<String> = listed.iter().flat_map(|entry| &entry.probes).map(|probe| probe.name.clone()).collect();
            prop_assert_eq!(listed, expected);
        }
        prop_assert_eq!(node_probes(&new, &pods), new);
    }
}

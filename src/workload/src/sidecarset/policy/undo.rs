//! Takes back what policies did to a new Pod, for sets that the webhook must inject into the same Pod.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use kruise_api::json::set;
use kruise_api::keys;

use crate::sidecarset::inject::is_injected;
use crate::sidecarset::recorded::{
    HashRecord, hot_upgrade_names, injected_list_to_text, parse, parse_injected_list, to_text,
};
use crate::sidecarset::set::{SetView, name};

/// Removes the containers that policies injected of these sets, and their records: the injection then finds the Pod's
/// own containers, and puts those of all sets into their order. Volumes, pull secrets and other annotations stay; the
/// injection finds them by name. A container of the Pod that a sidecar has replaced cannot be restored: the sidecar then
/// lacks what it takes over from that one, and its place.
///
/// Any user may write the records, but they only concern the writer's own Pod.
pub fn undo(pod: &mut Value, sets: &[SetView<'_>]) {
    let text = |pod: &Value, key: &str| {
        let text = pod["metadata"]["annotations"][key].as_str();
        text.unwrap_or_default().to_owned()
    };
    let records = parse(&text(pod, keys::SIDECAR_SET_HASH));
    let by_policy = |set: &&SetView<'_>| {
        records
            .get(set.name)
            .is_some_and(|record| record.update_timestamp.is_none() && !record.hash.is_empty())
    };
    let undone: Vec<&SetView<'_>> = sets.iter().filter(by_policy).collect();
    if undone.is_empty() {
        return;
    }
    let names: BTreeSet<String> = undone
        .iter()
        .flat_map(|set| names_in_pod(set, records.get(set.name)))
        .collect();
    for list in ["containers", "initContainers"] {
        if let Some(containers) = pod["spec"].get_mut(list).and_then(Value::as_array_mut) {
            containers.retain(|container| {
                let named = container["name"]
                    .as_str()
                    .is_some_and(|name| names.contains(name));
                !(named && is_injected(container))
            });
        }
    }
    for key in [keys::SIDECAR_SET_HASH, keys::SIDECAR_SET_HASH_WITHOUT_IMAGE] {
        let mut records = parse(&text(pod, key));
        records.retain(|name, _| undone.iter().all(|set| set.name != name));
        set(pod, &["metadata", "annotations", key], json!(to_text(&records)));
    }
    let listed = text(pod, keys::SIDECAR_SET_INJECTED_LIST);
    let mut listed = parse_injected_list(&listed);
    listed.retain(|name| undone.iter().all(|set| set.name != *name));
    set(
        pod,
        &["metadata", "annotations", keys::SIDECAR_SET_INJECTED_LIST],
        json!(injected_list_to_text(&listed)),
    );
}

/// Names of a set's containers in the Pod: now, and when its policy was written.
fn names_in_pod(set: &SetView<'_>, record: Option<&HashRecord>) -> BTreeSet<String> {
    let containers = [&set.spec.containers, &set.spec.init_containers];
    let now = containers.into_iter().flatten().flatten().map(name);
    let recorded = record.and_then(|record| record.sidecar_list.as_ref());
    let all = now.chain(recorded.into_iter().flatten().map(String::as_str));
    all.flat_map(|name| hot_upgrade_names(name).into_iter().chain([name.to_owned()]))
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeMap;

    use jiff::Timestamp;
    use kruise_api::sidecarset::SidecarSetSpec;

    use super::*;
    use crate::sidecarset::inject::{self, inject};

    fn spec(containers: Value) -> SidecarSetSpec {
        serde_json::from_value(json!({
            "selector": { "matchLabels": { "app": "web" } },
            "containers": containers,
            "initContainers": [{ "name": "first", "image": "i" }],
            "volumes": [{ "name": "logs", "emptyDir": {} }],
        }))
        .unwrap()
    }

    fn injected(pod: &Value, sets: &[SetView<'_>]) -> Value {
        let mut pod = pod.clone();
        let cluster = inject::Cluster {
            sets,
            namespace_labels: None,
            revisions: &[],
        };
        let options = inject::Options {
            sort_containers: false,
            now: Timestamp::UNIX_EPOCH,
        };
        inject(&mut pod, "default", &cluster, &options, &mut || 0).unwrap();
        pod
    }

    /// A Pod as the policy of a set leaves it.
    fn injected_by_policy(pod: &Value, set: &SetView<'_>) -> Value {
        let mut pod = injected(pod, std::slice::from_ref(set));
        for key in [keys::SIDECAR_SET_HASH, keys::SIDECAR_SET_HASH_WITHOUT_IMAGE] {
            let annotation = pod["metadata"]["annotations"].get_mut(key).unwrap();
            let text = annotation
                .as_str()
                .unwrap()
                .replace("\"1970-01-01T00:00:00Z\"", "null");
            *annotation = json!(text);
        }
        pod
    }

    #[test]
    fn webhook_behind_policies_has_the_result_of_the_webhook_alone() {
        let share = json!({ "type": "enabled" });
        let hot = json!({ "upgradeType": "HotUpgrade", "hotUpgradeEmptyImage": "empty" });
        let mount = json!([{ "name": "logs", "mountPath": "/own" }]);
        let specs = [
            spec(json!([
                { "name": "agent", "image": "i", "shareVolumePolicy": share, "volumeMounts": mount },
                { "name": "mesh", "image": "i", "upgradeStrategy": hot, "podInjectPolicy": "AfterAppContainer" },
            ])),
            spec(json!([{ "name": "log", "image": "i", "shareVolumePolicy": share }])),
        ];
        let hashes = BTreeMap::from([(keys::SIDECAR_SET_HASH.to_owned(), "h".to_owned())]);
        let sets: Vec<SetView<'_>> = ["a", "b"]
            .into_iter()
            .zip(&specs)
            .map(|(name, spec)| SetView {
                name,
                resource_version: "1",
                annotations: &hashes,
                latest_revision: "r",
                spec,
            })
            .collect();
        let data = json!([{ "name": "data", "mountPath": "/data" }]);
        let pod = json!({
            "metadata": { "name": "p", "labels": { "app": "web" }, "annotations": { "k": "v" } },
            "spec": { "containers": [{ "name": "app", "image": "i", "volumeMounts": data }] },
        });
        let expected = injected(&pod, &sets);
        for by_policy in [vec![0], vec![1], vec![0, 1], vec![1, 0]] {
            let mut actual = pod.clone();
            for at in &by_policy {
                actual = injected_by_policy(&actual, &sets[*at]);
            }
            undo(&mut actual, &sets);
            assert_eq!(injected(&actual, &sets), expected, "{by_policy:?}");
        }
    }

    #[test]
    fn only_what_a_policy_recorded_is_removed() {
        let spec = spec(json!([{ "name": "agent", "image": "i" }]));
        let annotations = BTreeMap::new();
        let set = SetView {
            name: "a",
            resource_version: "1",
            annotations: &annotations,
            latest_revision: "",
            spec: &spec,
        };
        let env = json!([{ "name": keys::ENV_IS_INJECTED, "value": "true" }]);
        let pod = |record: &str| {
            json!({
                "metadata": { "annotations": { keys::SIDECAR_SET_HASH: record } },
                "spec": { "containers": [{ "name": "app", "env": env }, { "name": "agent" }, { "name": "agent", "env": env }] },
            })
        };
        for (record, removed) in [
            (
                r#"{"a":{"updateTimestamp":null,"hash":"h","sidecarSetName":"a","sidecarList":["agent"]}}"#,
                1,
            ),
            (
                r#"{"a":{"updateTimestamp":null,"hash":"h","sidecarSetName":"a","sidecarList":["app","agent"]}}"#,
                2,
            ),
            (
                r#"{"a":{"updateTimestamp":"2026-01-01T00:00:00Z","hash":"h","sidecarSetName":"a","sidecarList":["agent"]}}"#,
                0,
            ),
            (
                r#"{"b":{"updateTimestamp":null,"hash":"h","sidecarSetName":"b","sidecarList":["agent"]}}"#,
                0,
            ),
            ("broken", 0),
            ("", 0),
        ] {
            let mut actual = pod(record);
            undo(&mut actual, &[set]);
            let left = actual["spec"]["containers"].as_array().unwrap().len();
            assert_eq!(3 - left, removed, "{record}");
            if removed == 0 {
                assert_eq!(actual, pod(record));
            }
        }
        for mut hostile in [json!(null), json!([]), json!({ "metadata": 1, "spec": [] })] {
            undo(&mut hostile, &[set]);
        }
    }
}

//! Invalid CloneSets, and the error messages for them.

use serde_json::{Value, json};

use crate::cloneset::{BETA, update_strategy};

/// Invalid changes of a valid CloneSet's spec, and the error for each.
pub fn invalid_specs(version: &str) -> Vec<(Value, &'static str)> {
    let pre_download = if version == BETA {
        invalid_pre_download()
    } else {
        Vec::new()
    };
    let limits = invalid_limits()
        .into_iter()
        .chain(invalid_update_order())
        .chain(too_many_items())
        .chain(pre_download)
        .map(|(limits, message)| (update_strategy(version, limits), message));
    let policy = if version == BETA {
        "podUpdatePolicy"
    } else {
        "type"
    };
    let strategies = [
        (
            update_strategy(version, json!({ policy: "InPlace" })),
            "Unsupported value: \"InPlace\"",
        ),
        (
            update_strategy(version, json!({ policy: "InPlaceOnly", "maxSurge": 1 })),
            "InPlaceOnly keeps every Pod, so there is nothing to surge with",
        ),
        (
            json!({ "updateStrategy": { "type": "Sometimes" } }),
            "Unsupported value: \"Sometimes\"",
        ),
    ];
    let all = invalid_common_fields()
        .into_iter()
        .chain(invalid_selectors_and_hooks());
    all.chain(limits).chain(strategies).collect()
}

/// Invalid values of fields that both versions have in the same place.
fn invalid_common_fields() -> Vec<(Value, &'static str)> {
    vec![
        (json!({ "replicas": -1 }), "spec.replicas: Invalid value: -1"),
        (
            json!({ "revisionHistoryLimit": -1 }),
            "spec.revisionHistoryLimit: Invalid value: -1",
        ),
        (
            json!({ "minReadySeconds": -1 }),
            "spec.minReadySeconds: Invalid value: -1",
        ),
        (
            json!({ "minReadySeconds": 9, "progressDeadlineSeconds": 9 }),
            "spec.progressDeadlineSeconds is 9, which is not more than spec.minReadySeconds, which is 9",
        ),
        (json!({ "selector": null }), "spec.selector: Required value"),
        (
            json!({ "selector": { "matchLabels": null } }),
            "an empty selector matches every Pod",
        ),
        (json!({ "template": null }), "spec.template: Required value"),
        (
            json!({ "template": { "spec": { "restartPolicy": "Never" } } }),
            "spec.template.spec.restartPolicy: Unsupported value: \"Never\"",
        ),
        (
            json!({ "template": { "spec": { "activeDeadlineSeconds": 9 } } }),
            "activeDeadlineSeconds would end Pods",
        ),
        (
            json!({ "scaleStrategy": { "podsToDelete": ["a", "a"] } }),
            "spec.scaleStrategy.podsToDelete[1]: Duplicate value: \"a\"",
        ),
        (
            json!({ "scaleStrategy": { "maxUnavailable": "20" } }),
            "it is 20; give a number of Pods, 0 or greater, or a percentage such as 20%",
        ),
    ]
}

/// Invalid selectors and hooks.
fn invalid_selectors_and_hooks() -> Vec<(Value, &'static str)> {
    vec![
        (
            json!({ "selector": { "matchExpressions": [{ "key": "app", "operator": "Like" }] } }),
            "spec.selector.matchExpressions[0].operator: Unsupported value: \"Like\"",
        ),
        (
            json!({ "lifecycle": { "preDelete": { "finalizersHandler": ["a.b/c", "plain"] } } }),
            "it is plain; Pods take only finalizers of the form DOMAIN/NAME",
        ),
        (
            json!({ "lifecycle": { "inPlaceUpdate": { "finalizersHandler": ["/c"] } } }),
            "it is /c; Pods take only finalizers",
        ),
        (
            json!({ "lifecycle": { "preNormal": { "finalizersHandler": ["a/b/c"] } } }),
            "it is a/b/c; Pods take only finalizers",
        ),
        (
            json!({ "lifecycle": { "preDelete": { "labelsHandler": { "a": "b".repeat(64) } } } }),
            "spec.lifecycle.preDelete.labelsHandler.a: Too long: may not be more than 63 bytes",
        ),
        (
            json!({ "lifecycle": { "inPlaceUpdate": { "labelsHandler": { "k".repeat(318): "b" } } } }),
            "a key is longer than 317 characters",
        ),
        (
            json!({ "lifecycle": { "preNormal": { "labelsHandler": labels(65) } } }),
            "spec.lifecycle.preNormal.labelsHandler: Too many: 65: must have at most 64 items",
        ),
        (
            json!({ "volumeClaimTemplates": claims(101) }),
            "spec.volumeClaimTemplates: Too many: 101: must have at most 100 items",
        ),
    ]
}

fn claims(count: usize) -> Value {
    let claim = |index| {
        json!({ "metadata": { "name": format!("c{index}") }, "spec": { "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": "1Gi" } } } })
    };
    (0..count).map(claim).collect()
}

fn labels(count: usize) -> Value {
    let labels = (0..count).map(|index| (format!("l{index}"), json!("x")));
    labels.collect::<serde_json::Map<_, _>>().into()
}

/// Invalid values of fields that only v1beta1 has: v1alpha1 has annotations for them, which the schema does not cover.
fn invalid_pre_download() -> Vec<(Value, &'static str)> {
    vec![
        (
            json!({ "inPlaceUpdateStrategy": { "imagePreDownloadParallelism": "10%" } }),
            "it is 10%; give a number of nodes",
        ),
        (
            json!({ "inPlaceUpdateStrategy": { "imagePreDownloadTimeoutSeconds": -1 } }),
            "imagePreDownloadTimeoutSeconds: Invalid value: -1",
        ),
    ]
}

/// Invalid update orders.
fn invalid_update_order() -> Vec<(Value, &'static str)> {
    vec![
        (
            json!({ "priorityStrategy": {
                "orderPriority": [{ "orderedKey": "a" }],
                "weightPriority": [{ "weight": 1, "matchSelector": { "matchLabels": { "a": "b" } } }],
            } }),
            "orderPriority and weightPriority exclude each other",
        ),
        (
            json!({ "priorityStrategy": { "weightPriority": [{ "weight": 101, "matchSelector": { "matchLabels": { "a": "b" } } }] } }),
            "weightPriority[0].weight: Invalid value: 101",
        ),
        (
            json!({ "priorityStrategy": { "weightPriority": [{ "weight": 1, "matchSelector": {} }] } }),
            "an empty selector matches every Pod",
        ),
        (
            json!({ "priorityStrategy": { "weightPriority": [{ "weight": 1, "matchSelector": {
                "matchExpressions": [{ "key": "a", "operator": "Like" }] } }] } }),
            "matchExpressions[0].operator: Unsupported value: \"Like\"",
        ),
        (
            json!({ "priorityStrategy": { "orderPriority": [{ "orderedKey": "" }] } }),
            "orderPriority[0].orderedKey: Invalid value: \"\"",
        ),
        (
            json!({ "scatterStrategy": [{ "key": "a", "value": "b" }, { "key": "a", "value": "b" }] }),
            "scatterStrategy[1]: Duplicate value",
        ),
        (
            json!({ "scatterStrategy": [{ "key": "", "value": "b" }] }),
            "scatterStrategy[0].key: Invalid value: \"\"",
        ),
        (
            json!({ "scatterStrategy": [{ "key": "a", "value": "b".repeat(64) }] }),
            "scatterStrategy[0].value: Too long: may not be more than 63 bytes",
        ),
    ]
}

/// Lists that are one item too long.
fn too_many_items() -> Vec<(Value, &'static str)> {
    let terms = |term: fn(usize) -> Value| (0..257).map(term).collect::<Value>();
    vec![
        (
            json!({ "priorityStrategy": { "orderPriority": terms(|index| json!({ "orderedKey": format!("k{index}") })) } }),
            "priorityStrategy.orderPriority: Too many: 257: must have at most 256 items",
        ),
        (
            json!({ "priorityStrategy": { "weightPriority": terms(|index| {
                json!({ "weight": 1, "matchSelector": { "matchLabels": { "a": index.to_string() } } })
            }) } }),
            "priorityStrategy.weightPriority: Too many: 257: must have at most 256 items",
        ),
        (
            json!({ "scatterStrategy": terms(|index| json!({ "key": "a", "value": index.to_string() })) }),
            "scatterStrategy: Too many: 257: must have at most 256 items",
        ),
    ]
}

/// Invalid limits of an update, which the versions have in different places.
fn invalid_limits() -> Vec<(Value, &'static str)> {
    vec![
        (json!({ "partition": -1 }), "it is -1; give a number of Pods"),
        (
            json!({ "partition": "half" }),
            "it is half; give a number of Pods",
        ),
        (
            json!({ "maxUnavailable": "12.5%" }),
            "it is 12.5%; give a number of Pods",
        ),
        (json!({ "maxSurge": "3" }), "it is 3; give a number of Pods"),
        (
            json!({ "maxUnavailable": 0 }),
            "maxUnavailable and maxSurge are both 0",
        ),
        (
            json!({ "maxUnavailable": "0%", "maxSurge": "0%" }),
            "maxUnavailable and maxSurge are both 0",
        ),
        (
            json!({ "inPlaceUpdateStrategy": { "gracePeriodSeconds": -1 } }),
            "gracePeriodSeconds: Invalid value: -1",
        ),
    ]
}

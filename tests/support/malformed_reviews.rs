//! Reviews with errors: every part of a valid one replaced by every kind of invalid value.

use serde_json::{Value, json};

/// An object of each kind with most of its fields.
pub fn full_object(kind: &str) -> Value {
    match kind {
        "cloneset" => json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet",
            "metadata": { "name": "web", "uid": "u", "labels": { "a": "b" }, "annotations": { "a": "b" } },
            "spec": {
                "replicas": 1, "selector": { "matchLabels": { "app": "web" },
                    "matchExpressions": [{ "key": "app", "operator": "In", "values": ["web"] }] },
                "template": { "metadata": { "labels": { "app": "web" }, "annotations": { "a": "b" } }, "spec": {
                    "containers": [{ "name": "c", "image": "i", "env": [{ "name": "KRUISE_CONTAINER_PRIORITY", "value": "1" }],
                        "resources": { "limits": { "cpu": "1" } } }, { "name": "d" }],
                    "volumes": [{ "name": "v", "emptyDir": {} }] } },
                "volumeClaimTemplates": [{ "metadata": { "name": "v" }, "spec": { "accessModes": ["ReadWriteOnce"] } }],
                "scaleStrategy": { "podsToDelete": ["me"] },
                "updateStrategy": { "type": "RollingUpdate", "rollingUpdate": { "podUpdatePolicy": "InPlaceOnly",
                    "priorityStrategy": { "weightPriority": [{ "weight": 1, "matchSelector": { "matchLabels": { "a": "b" } } }] },
                    "inPlaceUpdateStrategy": { "imagePreDownloadParallelism": 1 } } },
                "lifecycle": { "preDelete": { "labelsHandler": { "a": "b" }, "finalizersHandler": ["a/b"] } },
            },
        }),
        "nodeimage" => json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "NodeImage", "metadata": { "name": "n" },
            "spec": { "images": { "i": { "pullSecrets": [{ "namespace": "ns", "name": "s", "mode": "batch" }],
                "tags": [{ "tag": "1", "createdAt": "2026-01-01T00:00:00Z",
                    "pullPolicy": { "ttlSecondsAfterFinished": 1, "timeoutSeconds": 1 } }] } } },
        }),
        "imagepulljob" => json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob", "metadata": { "name": "j" },
            "spec": { "image": "i", "selector": { "names": ["n"], "matchLabels": { "a": "b" } },
                "podSelector": { "matchExpressions": [{ "key": "a", "operator": "Exists", "values": [] }] },
                "completionPolicy": { "type": "Always", "activeDeadlineSeconds": 1 }, "pullPolicy": { "timeoutSeconds": 1 } },
        }),
        "imagelistpulljob" => json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImageListPullJob", "metadata": { "name": "l" },
            "spec": { "images": ["i", "j"], "selector": { "names": ["n"], "matchLabels": { "a": "b" } },
                "podSelector": { "matchExpressions": [{ "key": "a", "operator": "Exists", "values": [] }] },
                "completionPolicy": { "type": "Always", "activeDeadlineSeconds": 1 }, "pullPolicy": { "timeoutSeconds": 1 } },
        }),
        _ => json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
            "metadata": { "name": "r", "labels": { "a": "b" }, "annotations": {
                "crr.apps.kruise.io/unready-acquired": "2026-01-01T00:00:00Z",
                "crr.apps.kruise.io/sync-container-statuses": "[{\"name\":\"c\"}]" } },
            "spec": { "podName": "me", "containers": [{ "name": "c" }], "strategy": { "failurePolicy": "Fail" } },
            "status": { "phase": "", "conditions": [{ "type": "t", "status": "True", "lastTransitionTime": "x" }],
                "containerStatusSnapshot": [{ "name": "c" }] },
        }),
    }
}

/// Values that may be in the place of another one.
pub fn invalid_values() -> Vec<Value> {
    vec![
        json!(null),
        json!(""),
        json!("x"),
        json!("\u{0}\n"),
        json!("9999-12-31T23:59:59Z"),
        json!("x?y="),
        json!("../x"),
        json!(0),
        json!(-1),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(1e300),
        json!(true),
        json!([]),
        json!([[]]),
        json!([{}]),
        json!(["x", 1, null]),
        json!({}),
        json!({ "": {} }),
        json!({ "name": 1 }),
    ]
}

/// JSON pointers to everything in `value`.
fn json_pointers(value: &Value, pointer: &str, pointers: &mut Vec<String>) {
    pointers.push(pointer.to_owned());
    let mut descend = |key: &str, value| {
        let key = key.replace('~', "~0").replace('/', "~1");
        json_pointers(value, &format!("{pointer}/{key}"), pointers);
    };
    match value {
        Value::Object(fields) => fields.iter().for_each(|(key, value)| descend(key, value)),
        Value::Array(items) => items
            .iter()
            .enumerate()
            .for_each(|(at, item)| descend(&at.to_string(), item)),
        _ => {}
    }
}

/// The review with each of its parts replaced by every invalid value, and with each part removed.
pub fn mutations(review: &Value, invalid_values: &[Value]) -> Vec<String> {
    let (mut pointers, mut mutated) = (Vec::new(), Vec::new());
    json_pointers(review, "", &mut pointers);
    for place in pointers {
        for value in invalid_values {
            let mut mutant = review.clone();
            *mutant.pointer_mut(&place).unwrap() = value.clone();
            mutated.push(mutant.to_string());
        }
        let (parent, key) = place.rsplit_once('/').unwrap_or_default();
        let mut mutant = review.clone();
        if let Some(Value::Object(fields)) = mutant.pointer_mut(parent) {
            fields.remove(key);
            mutated.push(mutant.to_string());
        }
    }
    mutated
}

/// The reviews of a create and of an update.
pub fn admission_reviews(kind: &str) -> [Value; 2] {
    let mut old = full_object(kind);
    json_patch::merge(
        &mut old,
        &json!({ "spec": { "template": { "spec": { "hostname": "h" } } } }),
    );
    let create = json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
        "uid": "u", "kind": { "version": "v1beta1" }, "requestKind": { "version": "v1alpha1" }, "namespace": "ns",
        "object": full_object(kind) } });
    let mut update = create.clone();
    json_patch::merge(&mut update, &json!({ "request": { "oldObject": old } }));
    [create, update]
}

/// Path of the webhook for deletions of Namespaces.
pub const NAMESPACE_DELETION_PATH: &str = "/validate-namespace";

/// The review of the deletion of a Namespace that is protected by its contents.
pub fn deletion_review(name: &str) -> Value {
    let namespace = json!({ "apiVersion": "v1", "kind": "Namespace",
        "metadata": { "name": name, "labels": { "policy.kruise.io/delete-protection": "Cascading" } } });
    json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": { "uid": "u", "kind": { "version": "v1" }, "name": name, "oldObject": namespace } })
}

/// The reviews of a conversion from each version to the other.
pub fn conversion_reviews(kind: &str) -> [Value; 2] {
    [("v1alpha1", "v1beta1"), ("v1beta1", "v1alpha1")].map(|(from, to)| {
        let mut object = full_object(kind);
        json_patch::merge(
            &mut object,
            &json!({ "apiVersion": format!("apps.kruise.io/{from}") }),
        );
        json!({ "apiVersion": "apiextensions.k8s.io/v1", "kind": "ConversionReview", "request": {
            "uid": "u", "desiredAPIVersion": format!("apps.kruise.io/{to}"), "objects": [object] } })
    })
}

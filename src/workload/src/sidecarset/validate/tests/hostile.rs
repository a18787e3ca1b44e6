//! Objects that no honest client writes.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{Request, Revision, container, set, validate};

/// A set with each field that is read.
fn complete() -> Value {
    let mut one = container("c");
    let more = json!({
        "ports": [{ "name": "p", "containerPort": 1, "hostPort": 2, "protocol": "TCP" }],
        "env": [{ "name": "e", "valueFrom": { "fieldRef": { "apiVersion": "v1", "fieldPath": "metadata.name" } } }],
        "volumeMounts": [{ "name": "v", "mountPath": "/v", "subPath": "a", "subPathExpr": "$(e)" }],
        "volumeDevices": [{ "name": "w", "devicePath": "/w" }],
        "resources": { "limits": { "cpu": "1", "memory": 1 }, "requests": { "cpu": "500m" } },
        "livenessProbe": { "httpGet": { "port": "p", "scheme": "HTTP" }, "successThreshold": 1 },
        "readinessProbe": { "exec": { "command": ["x"] }, "terminationGracePeriodSeconds": 1 },
        "startupProbe": { "grpc": { "port": 1 } },
        "lifecycle": { "preStop": { "tcpSocket": { "port": 1 } } },
        "transferEnv": [{ "sourceContainerNameFrom": { "fieldRef":
            { "apiVersion": "v1", "fieldPath": "metadata.labels['a']" } }, "envName": "x" }],
        "resourcesPolicy": { "targetContainersMode": "sum", "targetContainersNameRegex": ".*",
            "resourcesExpr": { "limits": { "cpu": "cpu*2" }, "requests": { "memory": "memory" } } },
    });
    json_patch::merge(&mut one, &more);
    let mut init = container("i");
    init["restartPolicy"] = json!("Always");
    let expressions =
        json!([{ "key": "a", "operator": "In", "values": ["b"] }, { "key": "c", "operator": "Exists" }]);
    set(&json!({
        "metadata": { "labels": { "a": "b" }, "annotations": {
            "apps.kruise.io/sidecarset-canary": "true", "apps.kruise.io/sidecarset-base": "base" } },
        "spec": {
            "selector": { "matchExpressions": expressions },
            "namespaceSelector": { "matchLabels": { "a": "b" }, "matchExpressions": expressions },
            "containers": [one],
            "initContainers": [init],
            "volumes": [{ "name": "v", "emptyDir": {} }, { "name": "w", "ephemeral": {} }],
            "updateStrategy": {
                "selector": { "matchLabels": { "a": "b" } },
                "priorityStrategy": { "weightPriority": [{ "weight": 1, "matchSelector": { "matchLabels": {} } }],
                    "orderPriority": [{ "orderedKey": "a" }] },
                "scatterStrategy": [{ "key": "a", "value": "b" }],
            },
            "injectionStrategy": { "revision": { "revisionName": "r", "customVersion": "v", "policy": "Always" } },
            "patchPodMetadata": [{ "annotations": { "a": "b" }, "patchPolicy": "Overwrite" }],
            "customVersion": "v",
        },
    }))
}

/// Paths of all values.
fn paths(value: &Value, path: &str, out: &mut Vec<String>) {
    out.push(path.to_owned());
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let key = key.replace('~', "~0").replace('/', "~1");
                paths(value, &format!("{path}/{key}"), out);
            }
        }
        Value::Array(items) => {
            for (at, value) in items.iter().enumerate() {
                paths(value, &format!("{path}/{at}"), out);
            }
        }
        _ => {}
    }
}

fn nested(depth: usize) -> Value {
    (0..depth).fold(json!(1), |inner, at| match at % 2 {
        0 => json!([inner]),
        _ => json!({ "name": inner }),
    })
}

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(json!(null)),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        Just(json!(u64::MAX)),
        Just(json!(1e300)),
        Just(json!(-0.0)),
        "\\PC{0,12}".prop_map(Value::from),
        Just(json!("a".repeat(70_000))),
        Just(json!("(".repeat(5_000))),
        Just(json!("99999999999999999999999999999999999999Ei")),
        Just(json!(["a", "a"])),
        Just(json!([{}, null, [], { "name": {} }])),
        Just(json!({ "": "", "a": {} })),
        // As deep as JSON may be parsed.
        (0..100_usize).prop_map(nested),
    ];
    leaf.prop_recursive(3, 20, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-zA-Z/.]{0,8}", inner, 0..4).prop_map(|map| json!(map)),
        ]
    })
}

/// Reviews the set in all roles, and returns its messages.
fn review(set: &Value, old: &Value, whitelist: &str) -> Vec<String> {
    let base = super::set(&json!({ "metadata": { "name": "base" } }));
    let revisions = [Revision {
        name: "r",
        sidecar_set: "s",
        custom_version: Some("v"),
    }];
    let errors = validate(&Request {
        set,
        old: Some(old),
        stored: &[&base, old, set],
        revisions: &revisions,
        whitelist: Some(whitelist),
        patch_metadata_allowed: true,
    });
    errors.into_messages()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_object_is_reviewed(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any_value()), 1..4),
        whitelist in "\\PC{0,20}|\\{\"rules\":\\[\\{\"allowedAnnotationKeyExprs\":\\[\"[a(){}0-9]{0,9}\"\\]\\}\\]\\}",
    ) {
        let good = complete();
        let mut spoilt = good.clone();
        for (index, value) in changes {
            let mut all = Vec::new();
            paths(&spoilt, "", &mut all);
            let path = index.get(&all);
            *spoilt.pointer_mut(path).unwrap() = value;
        }
        for (set, old) in [(&spoilt, &good), (&good, &spoilt), (&spoilt, &spoilt)] {
            let messages = review(set, old, &whitelist);
            prop_assert!(messages.len() <= 64);
            prop_assert!(messages.iter().all(|message| message.chars().count() < 2000));
        }
    }
}

#[test]
fn each_field_is_of_some_type() {
    let good = complete();
    let mut all = Vec::new();
    paths(&good, "", &mut all);
    for path in all {
        for value in [
            json!(null),
            json!(1),
            json!("x"),
            json!([]),
            json!({}),
            json!([[]]),
            json!(true),
        ] {
            let mut spoilt = good.clone();
            *spoilt.pointer_mut(&path).unwrap() = value;
            review(&spoilt, &good, "{}");
            review(&good, &spoilt, "{}");
        }
    }
}

#[test]
fn the_largest_objects_are_reviewed_quickly() {
    let containers: Value = (0..20_000)
        .map(|at| json!({ "name": format!("c{at}"), "image": "i" }))
        .collect();
    let volumes: Value = (0..20_000)
        .map(|at| json!({ "name": format!("v{at}") }))
        .collect();
    let large = set(&json!({ "spec": { "containers": containers, "volumes": volumes } }));
    let begin = std::time::Instant::now();
    assert_eq!(review(&large, &large, "{}").len(), 64);
    assert!(begin.elapsed().as_secs() < 10, "{:?}", begin.elapsed());
}

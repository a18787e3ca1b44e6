//! Tests with templates from charts, and what OpenKruise and the API server return for each.
#![allow(clippy::unwrap_used, clippy::panic)]

use proptest::prelude::*;
use proptest::sample::Index;

use super::*;

fn normalize_stored(template: &Value) -> Value {
    super::normalize(template, TemplateStorage::WithDefaults)
}

/// The forms of a template: as requested, as the API server returns it, as OpenKruise stores it, with and without
/// defaults.
fn template_forms() -> Vec<[Value; 4]> {
    let recorded = include_str!("../../../../../tests/data/takeover/templates.jsonl");
    let forms = recorded.lines().map(|line| {
        let mut line: Value = serde_json::from_str(line).unwrap();
        let own = line["asked"]["template"]["spec"]["volumes"]
            .as_array()
            .map_or(0, Vec::len);
        let mut answer = line["answer"].take();
        // Volumes of claim templates follow.
        if let Some(volumes) = answer["spec"].get_mut("volumes") {
            volumes.as_array_mut().unwrap().truncate(own);
        }
        [
            line["asked"]["template"].take(),
            answer,
            line["stored"].take(),
            line["storedWithoutDefaults"].take(),
        ]
    });
    forms.collect()
}

/// A mixture of two forms: `choices` decide which of the fields that only one has are included.
fn mix_forms(one: &Value, other: &Value, choices: &mut dyn FnMut() -> bool) -> Value {
    match (one, other) {
        (Value::Object(one), Value::Object(other)) => {
            let names: std::collections::BTreeSet<&String> = one.keys().chain(other.keys()).collect();
            let mixed = names.into_iter().filter_map(|name| {
                let value = match (one.get(name), other.get(name)) {
                    (Some(one), Some(other)) => mix_forms(one, other, choices),
                    (one, other) => one.or(other).filter(|_| choices())?.clone(),
                };
                Some((name.clone(), value))
            });
            Value::Object(mixed.collect())
        }
        (Value::Array(one), Value::Array(other)) if one.len() == other.len() => one
            .iter()
            .zip(other)
            .map(|(one, other)| mix_forms(one, other, choices))
            .collect(),
        (one, other) => if choices() { one } else { other }.clone(),
    }
}

/// JSON pointers of all values that are neither object nor list.
fn leaf_pointers(value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(all) => {
            for (name, inner) in all {
                let name = name.replace('~', "~0").replace('/', "~1");
                leaf_pointers(inner, &format!("{path}/{name}"), found);
            }
        }
        Value::Array(all) => {
            for (at, inner) in all.iter().enumerate() {
                leaf_pointers(inner, &format!("{path}/{at}"), found);
            }
        }
        Value::Null => {}
        _ => found.push(path.to_owned()),
    }
}

#[test]
fn all_forms_normalize_to_the_same_template() {
    let forms = template_forms();
    assert_eq!(forms.len(), 42);
    for [asked, answer, stored, bare] in forms {
        for form in [answer, stored, bare] {
            assert_eq!(normalize_stored(&asked), normalize_stored(&form));
            assert!(same_template(&asked, &form, TemplateStorage::WithDefaults));
        }
    }
}

/// Missing defaults are added, and nothing else changes.
#[test]
fn with_defaults_adds_only_defaults() {
    for [asked, _, stored, bare] in template_forms() {
        for before in [&asked, &bare] {
            let filled = with_defaults(before, &stored).unwrap_or_else(|| before.clone());
            let mut leaf_paths = Vec::new();
            leaf_pointers(&stored, "", &mut leaf_paths);
            leaf_paths.retain(|path| filled.pointer(path).is_none());
            assert_eq!(leaf_paths, [""; 0]);
            leaf_paths.clear();
            leaf_pointers(before, "", &mut leaf_paths);
            leaf_paths.retain(|path| {
                let (field, value) = (path.rsplit('/').next().unwrap(), before.pointer(path));
                filled.pointer(path) != value && !is_empty_field(field, value.unwrap())
            });
            assert_eq!(leaf_paths, [""; 0], "no field of the template is lost");
            assert_eq!(with_defaults(&filled, &stored), None, "nothing is left to add");
        }
    }
    let template_of = |container: Value| json!({ "spec": { "containers": [container] } });
    let plain = template_of(json!({ "name": "c", "unknown": { "a": 1 } }));
    let filled = template_of(json!({ "name": "c", "imagePullPolicy": "Always", "tty": null }));
    let both = template_of(json!({ "name": "c", "unknown": { "a": 1 }, "imagePullPolicy": "Always" }));
    assert_eq!(with_defaults(&plain, &filled), Some(both));
    let probe = |failures: u8| template_of(json!({ "readinessProbe": { "failureThreshold": failures } }));
    assert_eq!(
        with_defaults(&probe(0), &probe(3)),
        Some(probe(3)),
        "Go treats 0 as absent"
    );
    assert_eq!(with_defaults(&probe(4), &probe(3)), None);
    for other in [
        template_of(json!({ "name": "c", "imagePullPolicy": "Never" })),
        template_of(json!({ "name": "c", "restartPolicy": "Never" })),
        json!({ "spec": { "containers": [{ "name": "c" }, { "name": "injected" }] } }),
        json!({ "metadata": { "labels": { "injected": "" } } }),
        json!([]),
    ] {
        assert_eq!(with_defaults(&plain, &other), None, "{other} is not a default");
    }
}

/// If no webhook fills in `Always`, Pods without a policy get the API server's default.
#[test]
fn pull_policy_counts_without_template_defaults() {
    let template_of = |list: &str, container: Value| json!({ "spec": { (list): [container] } });
    for (list, default) in [("containers", "Always"), ("initContainers", "IfNotPresent")] {
        let bare = template_of(list, json!({ "image": "i:1" }));
        let with_policy = template_of(list, json!({ "image": "i:1", "imagePullPolicy": default }));
        assert!(
            same_template(&bare, &with_policy, TemplateStorage::WithDefaults),
            "{list}"
        );
        assert!(
            !same_template(&bare, &with_policy, TemplateStorage::AsWritten),
            "{list}"
        );
        assert!(
            !same_template(&with_policy, &bare, TemplateStorage::AsWritten),
            "{list}"
        );
        assert!(
            same_template(&with_policy, &with_policy, TemplateStorage::AsWritten),
            "{list}"
        );
        let other = template_of(
            list,
            json!({ "image": "i:1", "terminationMessagePolicy": "File" }),
        );
        assert!(
            same_template(&bare, &other, TemplateStorage::AsWritten),
            "other defaults have no effect"
        );
    }
}

#[test]
fn normalize_keeps_fields_that_change_pods() {
    let normalize_spec = |spec: Value| normalize_stored(&json!({ "spec": spec }));
    let container = |fields: Value| {
        let mut container = json!({ "name": "c", "image": "i:1" });
        json_patch::merge(&mut container, &fields);
        normalize_spec(json!({ "containers": [container] }))
    };
    let plain = container(json!({}));
    assert_eq!(
        plain,
        container(json!({ "imagePullPolicy": "Always", "tty": false, "env": [] }))
    );
    for other in [
        json!({ "imagePullPolicy": "IfNotPresent" }),
        json!({ "image": "i" }),
        json!({ "tty": true }),
        json!({ "securityContext": { "runAsNonRoot": false } }),
        json!({ "securityContext": { "runAsUser": 0 } }),
        json!({ "lifecycle": { "preStop": { "sleep": { "seconds": 0 } } } }),
    ] {
        assert_ne!(plain, container(other.clone()), "{other}");
    }
    let disk = |fields: Value| {
        let mut iscsi = json!({ "targetPortal": "10.0.0.1", "iqn": "iqn.2001-04.com.example:disk" });
        json_patch::merge(&mut iscsi, &fields);
        normalize_spec(json!({ "volumes": [{ "name": "v", "iscsi": iscsi }] }))
    };
    assert_eq!(disk(json!({})), disk(json!({ "lun": 0 })), "Go always writes it");
    assert_ne!(disk(json!({})), disk(json!({ "lun": 1 })));
    for (one, other) in [
        (json!({}), json!({ "automountServiceAccountToken": false })),
        (json!({}), json!({ "terminationGracePeriodSeconds": 0 })),
        (json!({ "serviceAccount": "a" }), json!({ "serviceAccount": "b" })),
        (
            json!({ "serviceAccountName": "a" }),
            json!({ "serviceAccountName": "b", "serviceAccount": "a" }),
        ),
        (json!({ "nodeSelector": { "gpu": "" } }), json!({})),
        (
            json!({ "volumes": [{ "name": "v", "secret": {} }] }),
            json!({ "volumes": [{ "name": "v" }] }),
        ),
        (
            json!({ "initContainers": [{ "name": "i", "image": "i:1" }] }),
            json!({ "initContainers": [{ "name": "i", "image": "i:1", "imagePullPolicy": "Always" }] }),
        ),
        (
            json!({ "initContainers": [{ "name": "i", "image": "i" }] }),
            json!({ "initContainers": [{ "name": "i", "image": "i", "restartPolicy": "Always" }] }),
        ),
    ] {
        assert_ne!(
            normalize_spec(one.clone()),
            normalize_spec(other.clone()),
            "{one} {other}"
        );
    }
}

#[test]
fn quantities_normalize_by_value() {
    let with_cpu = |cpu: Value| {
        let limits = json!({ "limits": { "cpu": cpu } });
        normalize_stored(&json!({ "spec": { "containers": [{ "resources": limits }] } }))
    };
    assert_eq!(with_cpu(json!(0.5)), with_cpu(json!("500m")));
    assert_eq!(
        with_cpu(json!("0.0001")),
        with_cpu(json!("1m")),
        "the API server rounds up"
    );
    assert_eq!(with_cpu(json!("1e3")), with_cpu(json!("1k")));
    assert_ne!(with_cpu(json!(1)), with_cpu(json!("1001m")));
    assert_ne!(with_cpu(json!("odd")), with_cpu(json!("1")));
}

#[test]
fn any_template_shape_normalizes() {
    for odd in [
        json!(null),
        json!([]),
        json!({ "spec": "text" }),
        json!({ "spec": { "containers": { "a": 1 }, "volumes": [null, 1, { "emptyDir": "x", "image": [] }] } }),
        json!({ "spec": { "containers": [7, { "env": [{ "valueFrom": [] }], "resources": 1, "lifecycle": [] }] } }),
        json!({ "spec": { "initContainers": [{ "image": 3, "livenessProbe": [] }], "serviceAccount": 9 } }),
    ] {
        let once = normalize_stored(&odd);
        assert_eq!(normalize_stored(&once), once);
    }
}

proptest! {
    /// A form with any part of the defaults is the same template, and normalizing twice changes nothing.
    #[test]
    fn partly_defaulted_templates_are_the_same(
        which in any::<Index>(),
        pair in (0_usize..4, 0_usize..4),
        choices in proptest::collection::vec(any::<bool>(), 1..60),
    ) {
        let forms = template_forms();
        let forms = which.get(&forms);
        let mut at = choices.iter().cycle();
        let mixed = mix_forms(&forms[pair.0], &forms[pair.1], &mut || *at.next().unwrap());
        let once = normalize_stored(&mixed);
        // An alias without the current name is a different template.
        let account = |template: &Value| {
            let spec = &template["spec"];
            spec.get("serviceAccountName").or(spec.get("serviceAccount")).is_some()
        };
        if account(&mixed) == account(&forms[0]) {
            prop_assert_eq!(&once, &normalize_stored(&forms[0]));
        }
        prop_assert_eq!(normalize_stored(&once), once);
    }

    /// A changed value of any field gives a different template.
    #[test]
    fn changed_value_is_another_template(which in any::<Index>(), leaf in any::<Index>()) {
        let forms = template_forms();
        let requested = &which.get(&forms)[0];
        let mut all = Vec::new();
        leaf_pointers(requested, "", &mut all);
        let path = leaf.get(&all);
        // If the current name is set, the alias does not count.
        prop_assume!(path != "/spec/serviceAccount" || requested["spec"].get("serviceAccountName").is_none());
        let mut other = requested.clone();
        let value = other.pointer_mut(path).unwrap();
        *value = match &*value {
            Value::Bool(said) => json!(!said),
            Value::Number(said) => json!(said.as_f64().unwrap() + 1.0),
            said => json!(format!("{}x", said.as_str().unwrap())),
        };
        prop_assert_ne!(normalize_stored(requested), normalize_stored(&other), "{}", path);
    }
}

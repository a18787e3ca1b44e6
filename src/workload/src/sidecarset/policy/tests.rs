#![allow(clippy::unwrap_used)]
use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::apps::v1::ControllerRevision;
use proptest::prelude::*;
use serde::Deserialize;

use kruise_api::cloneset::string_map;
use kruise_api::sidecarset::SidecarSetSpec;

use super::*;

const VECTORS: &str = include_str!("../../../../../tests/data/go/sidecarset-injection.jsonl");

/// A SidecarSet as the cluster has it.
struct Stored {
    name: String,
    annotations: BTreeMap<String, String>,
    spec: SidecarSetSpec,
}

impl Stored {
    fn read(set: &Value) -> Option<Self> {
        Some(Self {
            name: set["metadata"]["name"].as_str()?.to_owned(),
            annotations: string_map(&set["metadata"]["annotations"]),
            spec: SidecarSetSpec::deserialize(&set["spec"]).ok()?,
        })
    }

    fn view(&self) -> SetView<'_> {
        SetView {
            name: &self.name,
            resource_version: "1",
            annotations: &self.annotations,
            latest_revision: "r",
            spec: &self.spec,
        }
    }
}

fn compile_all(
    sets: &[Stored],
    revisions: &[Arc<ControllerRevision>],
) -> Vec<Result<Vec<Value>, Unsupported>> {
    let views: Vec<SetView<'_>> = sets.iter().map(Stored::view).collect();
    let options = Options {
        namespace: "kruise-system",
        sort_containers: false,
        sets: &views,
        revisions,
    };
    views.iter().map(|set| compile(set, &options)).collect()
}

fn set(name: &str, spec: Value) -> Value {
    let mut set = json!({
        "metadata": { "name": name },
        "spec": { "selector": { "matchLabels": { "app": "a" } }, "containers": [{ "name": "log", "image": "i" }] },
    });
    for (field, value) in spec.as_object().unwrap() {
        kruise_api::json::set(&mut set, &["spec", field], value.clone());
    }
    set
}

/// The policies of the first set.
fn compiled(sets: &[Value]) -> Result<Vec<Value>, String> {
    let sets: Vec<Stored> = sets.iter().map(|set| Stored::read(set).unwrap()).collect();
    let first = compile_all(&sets, &[Arc::new(revision())]).remove(0);
    first.map_err(|why| why.to_string())
}

fn revision() -> ControllerRevision {
    serde_json::from_value(json!({
        "metadata": { "name": "old" },
        "revision": 1,
        "data": { "spec": { "$patch": "replace", "containers": [{ "name": "old" }] } },
    }))
    .unwrap()
}

#[test]
fn policy_has_the_selectors_of_its_set() {
    let namespaces = json!({ "matchLabels": { "team": "x" } });
    let objects = compiled(&[set("s", json!({ "namespaceSelector": namespaces }))]).unwrap();
    let [policy, binding] = objects.as_slice() else {
        unreachable!("{objects:?}")
    };
    assert_eq!(
        policy["metadata"],
        json!({ "name": "sidecarset-s", "labels": { "kruise.io/sidecarset-name": "s" } })
    );
    assert_eq!(binding["metadata"], policy["metadata"]);
    assert_eq!(binding["spec"], json!({ "policyName": "sidecarset-s" }));
    let constraints = &policy["spec"]["matchConstraints"];
    assert_eq!(
        constraints["objectSelector"],
        json!({ "matchLabels": { "app": "a" } })
    );
    let namespaces = &constraints["namespaceSelector"];
    assert_eq!(namespaces["matchLabels"], json!({ "team": "x" }));
    let excluded = json!([
        "kruise-system",
        "kruise-daemon-config",
        "kube-system",
        "kube-node-lease"
    ]);
    assert_eq!(namespaces["matchExpressions"][0]["values"], excluded);
    assert_eq!(policy["spec"]["failurePolicy"], "Ignore");
    let mut fail = set("s", json!({}));
    fail["metadata"]["annotations"] = json!({ "apps.kruise.io/sidecarset-failure-policy": "Fail" });
    assert_eq!(compiled(&[fail]).unwrap()[0]["spec"]["failurePolicy"], "Fail");
}

#[test]
fn policy_does_not_change_with_sets_for_other_pods() {
    let init = json!({ "initContainers": [{ "name": "init", "image": "i" }] });
    let front = |name: &str, app: &str| {
        let list = json!([{ "name": name, "image": "i", "podInjectPolicy": "BeforeAppContainer" }]);
        let patches = json!([{ "annotations": { "k": name }, "patchPolicy": "Overwrite" }]);
        let selector = json!({ "matchLabels": { "app": app } });
        set(
            name,
            json!({ "initContainers": list, "selector": selector, "patchPodMetadata": patches }),
        )
    };
    let alone = compiled(&[set("log", init.clone())]);
    let with = |other| compiled(&[set("log", init.clone()), other]);
    assert_eq!(with(front("other", "b")), alone);
    assert_ne!(with(front("other", "a")), alone);
}

#[test]
fn sets_that_inject_nothing_have_no_policy() {
    for spec in [
        json!({ "injectionStrategy": { "paused": true } }),
        json!({ "selector": {} }),
    ] {
        assert_eq!(compiled(&[set("s", spec)]), Ok(Vec::new()));
    }
}

#[test]
fn unsupported_fields_are_reported() {
    let container = |fields: Value| {
        let mut container = json!({ "name": "log", "image": "i" });
        container
            .as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        json!({ "containers": [container] })
    };
    let revision = |named: Value, update: Value| json!({ "injectionStrategy": { "revision": named }, "updateStrategy": update });
    let resources = |expression: &str| {
        container(
            json!({ "resourcesPolicy": { "targetContainersMode": "sum", "targetContainersNameRegex": ".",
            "resourcesExpr": { "limits": { "cpu": expression } } } }),
        )
    };
    let merge = json!([{ "annotations": { "k": "{}" }, "patchPolicy": "MergePatchJson" }]);
    let record = json!([{ "annotations": { "kruise.io/sidecarset-hash": "x" } }]);
    for (spec, why) in [
        (
            json!({ "patchPodMetadata": merge }),
            "spec.patchPodMetadata[0].patchPolicy is MergePatchJson, and policies cannot parse JSON",
        ),
        (
            json!({ "patchPodMetadata": record }),
            "spec.patchPodMetadata[0].annotations[kruise.io/sidecarset-hash] is written by the injection itself",
        ),
        (
            revision(
                json!({ "revisionName": "old", "policy": "Partial" }),
                json!({ "partition": "30%" }),
            ),
            "spec.injectionStrategy.revision is for a percentage of the Pods, and policies have no random numbers",
        ),
        (
            revision(json!({ "revisionName": "none" }), json!({})),
            "spec.injectionStrategy.revision cannot be injected: ControllerRevision \"none\" of SidecarSet \"s\" not found",
        ),
        (
            container(json!({ "upgradeStrategy": { "upgradeType": "HotUpgrade" } })),
            "spec.containers[0].upgradeStrategy.hotUpgradeEmptyImage is empty, and the API server refuses containers without image",
        ),
        (
            container(json!({ "env": [{ "name": keys::ENV_CONTAINER_PRIORITY, "value": "high" }] })),
            "spec.containers[0].env has a launch priority that is not an integer",
        ),
        (
            container(json!({ "newField": true })),
            "spec.containers[0].newField is no field that this release knows",
        ),
        (
            container(json!({ "securityContext": { "runAsUser": 9_007_199_254_740_993_i64 } })),
            "spec.containers[0].securityContext.runAsUser is no integer below 2^53",
        ),
        (
            resources("cpu*cpu"),
            "spec.containers[0].resourcesPolicy.resourcesExpr.limits.cpu has no result: multiplication of two quantities",
        ),
        (json!({ "containers": [] }), "spec.containers is empty"),
        (
            container(json!({ "args": ["x".repeat(100_000)] })),
            "spec is too large for an expression of a policy",
        ),
        (
            json!({ "containers": vec![json!({ "name": "log", "args": ["x".repeat(80_000)] }); 20] }),
            "spec is too large for a policy",
        ),
        (
            json!({ "selector": { "matchLabels": { "a b": "c" } } }),
            "spec has an invalid selector",
        ),
    ] {
        let error = compiled(&[set("s", spec)]).unwrap_err();
        assert!(error.starts_with(why), "{error}");
    }
    assert!(compiled(&[set("no.label", json!({}))]).is_err());
}

/// Names of policies, their conditions, and whether they inject the older revision.
fn summary(spec: Value) -> Vec<(String, String, bool)> {
    let objects = compiled(&[set("s", spec)]).unwrap();
    let policies = objects.iter().step_by(2);
    policies
        .map(|policy| {
            let condition = policy["spec"]["matchConditions"][0]["expression"]
                .as_str()
                .unwrap_or_default();
            let is_old = policy["spec"]["variables"].to_string().contains("'old'");
            (
                policy["metadata"]["name"].as_str().unwrap().to_owned(),
                condition.to_owned(),
                is_old,
            )
        })
        .collect()
}

#[test]
fn revisions_that_do_not_depend_on_chance_are_injected() {
    let named = |policy: &str| json!({ "revision": { "revisionName": "old", "policy": policy } });
    let one = |is_old| vec![("sidecarset-s".to_owned(), String::new(), is_old)];
    for (policy, update, is_old) in [
        ("Always", json!({}), true),
        ("Partial", json!({}), false),
        ("Partial", json!({ "partition": 3 }), false),
        ("Partial", json!({ "partition": "0%" }), false),
        ("Partial", json!({ "partition": "100%" }), true),
        ("Partial", json!({ "paused": true }), true),
    ] {
        let spec = json!({ "injectionStrategy": named(policy), "updateStrategy": update });
        assert_eq!(summary(spec), one(is_old), "{policy} {update}");
    }
    let update = json!({ "selector": { "matchLabels": { "ring": "1" } } });
    let both = summary(json!({ "injectionStrategy": named("Partial"), "updateStrategy": update }));
    let labels = "object.metadata.?labels.orValue({})";
    let condition = format!("(('ring' in {labels} && {labels}['ring'] == '1'))");
    assert_eq!(
        both,
        [
            ("sidecarset-s".to_owned(), condition.clone(), false),
            ("sidecarset-s.older".to_owned(), format!("!{condition}"), true),
        ]
    );
}

#[test]
fn base_does_not_inject_the_pods_of_its_canary() {
    let mut canary = set(
        "canary",
        json!({ "namespaceSelector": { "matchLabels": { "ring": "1" } } }),
    );
    canary["metadata"]["annotations"] = json!({
        "apps.kruise.io/sidecarset-canary": "true", "apps.kruise.io/sidecarset-base": "s",
    });
    let policy = compiled(&[set("s", json!({})), canary.clone()])
        .unwrap()
        .remove(0);
    let condition = &policy["spec"]["matchConditions"][0];
    assert_eq!(condition["name"], "not-replaced");
    let expression = condition["expression"].as_str().unwrap();
    assert!(
        expression.starts_with("!(") && expression.contains("namespaceObject"),
        "{expression}"
    );
    let policy = compiled(&[canary, set("s", json!({}))]).unwrap().remove(0);
    assert_eq!(policy["spec"]["matchConditions"], json!(null));
}

/// Otherwise each would leave the annotation to the other one, which has the last word by its name.
#[test]
fn canary_does_not_leave_its_annotations_to_its_base() {
    for (name, patch_policy) in [("t", "Retain"), ("a", "Overwrite")] {
        let patches = json!([{ "annotations": { "k": "v" }, "patchPolicy": patch_policy }]);
        let spec = json!({ "patchPodMetadata": patches });
        let (mut canary, base) = (set(name, spec.clone()), set("s", spec));
        let base_applies = |canary: &Value| {
            let policy = compiled(&[canary.clone(), base.clone()]).unwrap().remove(0);
            let mut variables = policy["spec"]["variables"].as_array().unwrap().iter();
            let peer = variables.find(|variable| variable["name"] == "peer0").unwrap();
            peer["expression"].clone()
        };
        assert_ne!(base_applies(&canary), "false", "{patch_policy}");
        canary["metadata"]["annotations"] = json!({
            "apps.kruise.io/sidecarset-canary": "true", "apps.kruise.io/sidecarset-base": "s",
        });
        assert_eq!(base_applies(&canary), "false", "{patch_policy}");
    }
}

/// All expressions of objects.
fn expressions(objects: &[Value]) -> Vec<&str> {
    fn collect<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("expression").and_then(Value::as_str));
                fields.values().for_each(|value| collect(value, found));
            }
            Value::Array(items) => items.iter().for_each(|item| collect(item, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    objects.iter().for_each(|object| collect(object, &mut found));
    found
}

#[test]
fn sets_of_the_vectors_have_policies() {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for line in VECTORS.lines() {
        let vector: Value = serde_json::from_str(line).unwrap();
        let input = &vector["in"];
        let sets = input["sidecarSets"].as_array().unwrap().iter();
        let sets: Vec<Stored> = sets.map(|set| Stored::read(set).unwrap()).collect();
        let revisions: Option<Vec<ControllerRevision>> =
            Option::deserialize(&input["controllerRevisions"]).unwrap();
        let revisions: Vec<_> = revisions.into_iter().flatten().map(Arc::new).collect();
        for compiled in compile_all(&sets, &revisions) {
            let what = match compiled {
                Ok(objects) => format!("{} objects", objects.len()),
                Err(why) => why.why.split(':').next().unwrap().to_owned(),
            };
            *counts.entry(what).or_default() += 1;
        }
    }
    let counts: Vec<String> = counts
        .iter()
        .map(|(what, count)| format!("{count} {what}"))
        .collect();
    let expected = [
        "84 0 objects",
        "740 2 objects",
        "11 4 objects",
        "13 cannot be injected",
        "6 has no result",
        "107 is MergePatchJson, and policies cannot parse JSON",
        "29 is empty, and the API server refuses containers without image",
        "1 is invalid",
    ];
    assert_eq!(counts, expected);
}

/// All values inside, as pointers (RFC 6901).
fn pointers(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let name = name.replace('~', "~0").replace('/', "~1");
                pointers(value, &format!("{at}/{name}"), found);
            }
        }
        Value::Array(items) => {
            for (index, value) in items.iter().enumerate() {
                pointers(value, &format!("{at}/{index}"), found);
            }
        }
        _ => {}
    }
}

/// An expression without its string literals.
fn code(expression: &str) -> String {
    let mut code = String::new();
    let mut chars = expression.chars();
    while let Some(c) = chars.next() {
        if c == '\'' {
            while let Some(c) = chars.next() {
                match c {
                    '\\' => drop(chars.next()),
                    '\'' => break,
                    _ => {}
                }
            }
            code.push('_');
        } else {
            code.push(c);
        }
    }
    code
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever is in a set, it is compiled or refused, and no text of it is code.
    #[test]
    fn hostile_sets_are_compiled_or_refused(
        line in 0..500_usize,
        place in any::<prop::sample::Index>(),
        value in prop_oneof![
            Just(json!(null)), Just(json!(-1)), Just(json!([])), Just(json!({})), Just(json!([1, "", null, []])),
            Just(json!({ "": 1 })), Just(json!("HOSTILE")), Just(json!("' + HOSTILE + '")), Just(json!("\\' + HOSTILE")),
            Just(json!("\u{2028}\n' HOSTILE")), Just(json!({ "' HOSTILE": "HOSTILE" })),
        ],
    ) {
        let mut vector: Value = serde_json::from_str(VECTORS.lines().nth(line).unwrap()).unwrap();
        let sets = &mut vector["in"]["sidecarSets"];
        let mut places = Vec::new();
        pointers(sets, "", &mut places);
        *sets.pointer_mut(place.get::<String>(&places)).unwrap() = value;
        let sets: Vec<Stored> = sets.as_array().into_iter().flatten().filter_map(Stored::read).collect();
        for objects in compile_all(&sets, &[]).into_iter().flatten() {
            for expression in expressions(&objects) {
                prop_assert!(expression.chars().all(|c| matches!(c, ' '..='~' | '\n')), "{expression}");
                let code = code(expression);
                prop_assert!(!code.contains("HOSTILE") && !code.contains('\\'), "{expression}");
            }
        }
    }
}

#[test]
fn lists_and_names_stay_as_they_are_in_code() {
    let objects = compiled(&[set(
        "s",
        json!({ "containers": [{ "name": "a'b", "args": ["'"] }] }),
    )])
    .unwrap();
    let all = expressions(&objects).join("\n");
    assert!(all.contains(r"'a\'b'") && all.contains(r"dyn('\'')"), "{all}");
}

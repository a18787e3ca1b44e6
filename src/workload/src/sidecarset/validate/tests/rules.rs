//! The rules, beyond what the recorded results show.

use serde_json::{Value, json};

use super::*;

#[test]
fn a_set_with_defaults_has_no_errors() {
    assert_eq!(found_in(&json!({})), [""; 0]);
}

#[test]
fn a_canary_needs_a_base_and_type_not_update() {
    let annotations = |base: &str| json!({ "apps.kruise.io/sidecarset-canary": "true", "apps.kruise.io/sidecarset-base": base });
    let canary = |base: &str, update: &str| {
        set(&json!({
            "metadata": { "name": "s-canary", "annotations": annotations(base) },
            "spec": { "updateStrategy": { "type": update } },
        }))
    };
    let base = set(&json!({}));
    let other = canary("s", "NotUpdate");
    let found_with = |set: &Value, old: Option<&Value>, stored: &[&Value]| {
        found(&Request {
            old,
            stored,
            ..request(set)
        })
    };
    let good = canary("s", "NotUpdate");
    assert_eq!(found_with(&good, Some(&good), &[&base, &other]), [""; 0]);
    assert_eq!(found_with(&good, None, &[]), ["Invalid metadata"]);
    assert_eq!(
        found_with(&canary("s", "RollingUpdate"), None, &[&base]),
        ["Invalid spec.updateStrategy.type"]
    );
    // The base is a canary, and is not the one from before.
    assert_eq!(
        found_with(&canary("s-canary", "NotUpdate"), Some(&good), &[&base, &other]),
        ["Invalid metadata"; 3]
    );
    // The base does not skip its canary.
    assert_eq!(found_with(&base, None, &[&other]), ["Invalid spec.containers"]);
}

#[test]
fn revisions_are_found_by_name_first() {
    let revisions = [
        Revision {
            name: "of-another",
            sidecar_set: "t",
            custom_version: Some("v2"),
        },
        Revision {
            name: "s-1",
            sidecar_set: "s",
            custom_version: Some("v1"),
        },
    ];
    for (revision, errors) in [
        (json!({ "revisionName": "s-1", "customVersion": "gone" }), vec![]),
        (json!({ "revisionName": "of-another" }), vec![]),
        (json!({ "customVersion": "v1", "policy": "Partial" }), vec![]),
        (json!({ "customVersion": "v2" }), vec!["Invalid revision"]),
        (json!({ "revisionName": "" }), vec!["Invalid revision"]),
        (json!({ "policy": "Partial" }), vec!["Invalid revision"]),
        (
            json!({ "revisionName": "s-1", "policy": "X" }),
            vec!["Invalid revision.policy"],
        ),
    ] {
        let set = set(&json!({ "spec": { "injectionStrategy": { "revision": revision } } }));
        let got = found(&Request {
            revisions: &revisions,
            ..request(&set)
        });
        assert_eq!(got, errors, "{revision}");
    }
}

#[test]
fn the_update_strategy_is_checked_for_rolling_updates_only() {
    let strategies = [
        (json!({ "partition": "200%", "maxUnavailable": "0%" }), vec![]),
        (
            json!({ "partition": 0, "selector": { "matchLabels": { "a": "b" } } }),
            vec![],
        ),
        (
            json!({ "partition": "0%", "selector": { "matchLabels": { "a": "b" } } }),
            vec!["Invalid updateStrategy"],
        ),
        (
            json!({ "partition": -1 }),
            vec!["Invalid spec.updateStrategy.partition"],
        ),
        (
            json!({ "partition": "%" }),
            vec!["Invalid spec.updateStrategy.partition"],
        ),
        (
            json!({ "maxUnavailable": 1e9 }),
            vec!["Invalid spec.updateStrategy.maxUnavailable"],
        ),
        (
            json!({ "priorityStrategy": { "weightPriority": [{ "weight": 100,
                "matchSelector": { "matchLabels": { "a b": "c" } } }] } }),
            vec!["Required spec.updateStrategy.priorityStrategy"],
        ),
        (
            json!({ "scatterStrategy": [{ "key": "a", "value": "b" }, { "key": "a", "value": "c" }] }),
            vec![],
        ),
    ];
    for (strategy, errors) in strategies {
        assert_eq!(
            found_in(&json!({ "spec": { "updateStrategy": strategy } })),
            errors,
            "{strategy}"
        );
        let mut no_update = strategy.clone();
        no_update["type"] = json!("NotUpdate");
        let got = found_in(&json!({ "spec": { "updateStrategy": no_update } }));
        let unreadable = strategy["maxUnavailable"] == 1e9;
        assert_eq!(got, vec!["Invalid spec"; usize::from(unreadable)], "{strategy}");
    }
}

#[test]
fn resources_policies_exclude_resources_and_ordinary_init_containers() {
    let policy = json!({ "targetContainersMode": "sum", "targetContainersNameRegex": ".*",
        "resourcesExpr": { "limits": { "cpu": "max(cpu*50%, 50m)" } } });
    let with = |patch: Value| {
        let mut one = container("c");
        one["resourcesPolicy"] = policy.clone();
        json_patch::merge(&mut one, &patch);
        one
    };
    for (patch, errors) in [
        (json!({}), vec![]),
        (json!({ "resources": { "limits": {}, "requests": {} } }), vec![]),
        (
            json!({ "resources": { "requests": { "cpu": "1" } } }),
            vec!["Invalid spec[0].resourcesPolicy"],
        ),
        (
            json!({ "resourcesPolicy": { "targetContainersNameRegex": "" } }),
            vec!["Required spec[0].resourcesPolicy.targetContainersNameRegex"],
        ),
        (
            json!({ "resourcesPolicy": { "resourcesExpr": { "limits": { "memory": "memory-100Mi" } } } }),
            vec!["Invalid spec[0].resourcesPolicy.resourcesExpr.limits.memory"],
        ),
        // The result is no quantity, but this is noticed later.
        (
            json!({ "resourcesPolicy": { "resourcesExpr": { "limits": { "cpu": "cpu*cpu" } } } }),
            vec![],
        ),
    ] {
        assert_eq!(
            found_in(&json!({ "spec": { "containers": [with(patch.clone())] } })),
            errors,
            "{patch}"
        );
    }
    let init = |patch: Value| {
        found_in(
            &json!({ "spec": { "containers": null, "initContainers": [with(patch)],
            "updateStrategy": { "type": "NotUpdate" } } }),
        )
    };
    assert_eq!(init(json!({})), ["Invalid spec[0].resourcesPolicy"]);
    assert_eq!(init(json!({ "restartPolicy": "Always" })), [""; 0]);
}

#[test]
fn a_set_may_have_a_limited_number_of_regular_expressions() {
    let containers = |different: usize| -> Value {
        (0..100)
            .map(|at| {
                let mut one = container(&format!("c{at}"));
                one["resourcesPolicy"] = json!({ "targetContainersMode": "sum",
                    "targetContainersNameRegex": format!("^{}$", at % different),
                    "resourcesExpr": { "limits": { "cpu": "cpu" } } });
                one
            })
            .collect()
    };
    let count = |containers: Value| found_in(&json!({ "spec": { "containers": containers } })).len();
    assert_eq!(
        [64, 65, 66].map(|different| count(containers(different))),
        [0, 1, 2]
    );
    let padded = |length: usize| -> Value {
        let mut all = containers(5);
        for one in all.as_array_mut().into_iter().flatten() {
            let regex = &mut one["resourcesPolicy"]["targetContainersNameRegex"];
            *regex = format!("{}{}", regex.as_str().unwrap(), "a".repeat(length)).into();
        }
        all
    };
    // The fifth expression does not fit, which 20 containers have; then none does.
    let lengths = [3000, 4000, 5000];
    assert_eq!(lengths.map(|length| count(padded(length))), [0, 20, 64]);
}

#[test]
fn the_whitelist_decides_which_annotations_pods_get() {
    let patch = |key: &str| json!([{ "annotations": { key: "v" }, "patchPolicy": "Retain" }]);
    let for_app =
        r#"{"rules":[{"selector":{"matchLabels":{"app":"x"}},"allowedAnnotationKeyExprs":["^k"]}]}"#;
    let labels = json!({ "app": "x" });
    for (whitelist, gate, labels, key, allowed) in [
        (None, true, json!(null), "any", true),
        (None, false, json!(null), "any", false),
        (Some("null"), true, json!(null), "any", true),
        (Some("{}"), false, json!(null), "any", false),
        (Some(for_app), true, json!(null), "any", true),
        (Some(for_app), false, json!(null), "k", false),
        (Some(for_app), false, labels.clone(), "key", true),
        (Some(for_app), true, labels.clone(), "any", false),
        (
            Some(r#"{"rules":[{"allowedAnnotationKeyExprs":["b","k$"]}]}"#),
            false,
            json!(null),
            "xbx",
            true,
        ),
        (
            Some(r#"{"rules":[{"allowedAnnotationKeyExprs":["("]}]}"#),
            true,
            json!(null),
            "any",
            false,
        ),
        (Some(""), true, json!(null), "any", false),
        (Some("[]]"), true, json!(null), "any", false),
        (
            Some(r#"{"rules":[{"selector":{"matchExpressions":[{"key":"a","operator":"Like"}]}}]}"#),
            true,
            json!(null),
            "any",
            false,
        ),
    ] {
        let set =
            set(&json!({ "metadata": { "labels": labels }, "spec": { "patchPodMetadata": patch(key) } }));
        let got = found(&Request {
            whitelist,
            patch_metadata_allowed: gate,
            ..request(&set)
        });
        let errors = vec!["Required spec.patchPodMetadata"; usize::from(!allowed)];
        assert_eq!(got, errors, "{whitelist:?} {gate} {key}");
    }
    // Without patches there is nothing to check.
    let set = set(&json!({}));
    let got = found(&Request {
        whitelist: Some("no JSON"),
        ..request(&set)
    });
    assert_eq!(got, [""; 0]);
}

#[test]
fn updates_remove_containers_but_do_not_add_them() {
    let containers = |names: &[&str], upgrade: &str| {
        let all: Value = names
            .iter()
            .map(|name| {
                let mut one = container(name);
                one["upgradeStrategy"]["upgradeType"] = json!(upgrade);
                one
            })
            .collect();
        set(&json!({ "spec": { "containers": all } }))
    };
    let old = containers(&["a", "b"], "ColdUpgrade");
    for (names, upgrade, errors) in [
        (["a"].as_slice(), "ColdUpgrade", vec![]),
        (&["b", "a"], "ColdUpgrade", vec![]),
        (&["a", "c"], "ColdUpgrade", vec!["Invalid spec.containers.name"]),
        (
            &["a"],
            "HotUpgrade",
            vec!["Invalid spec.containers.upgradeStrategy.upgradeType"],
        ),
    ] {
        let new = containers(names, upgrade);
        let got = found(&Request {
            old: Some(&old),
            ..request(&new)
        });
        assert_eq!(got, errors, "{names:?} {upgrade}");
    }
}

#[test]
fn conflicts_need_overlapping_scopes() {
    let volume = |name: &str, kind: &str| json!({ "name": name, kind: {} });
    let patch = |policy: &str| json!([{ "annotations": { "k": "v" }, "patchPolicy": policy }]);
    let hot = |name: &str| {
        let mut container = container(name);
        container["upgradeStrategy"] = json!({ "upgradeType": "HotUpgrade", "hotUpgradeEmptyImage": "e" });
        container
    };
    let ours = set(&json!({ "spec": {
        "containers": [container("c"), hot("hot")],
        "initContainers": [container("init")],
        "volumes": [volume("v", "emptyDir")],
        "patchPodMetadata": patch("MergePatchJson"),
    } }));
    let other = |mut spec: Value| {
        if spec.get("containers").is_none() {
            spec["containers"] = json!([]);
        }
        set(&json!({ "metadata": { "name": "other" }, "spec": spec }))
    };
    let cases = [
        (
            json!({ "containers": [container("c")] }),
            vec!["Invalid spec.containers"],
        ),
        (
            json!({ "initContainers": [container("init")] }),
            vec!["Invalid spec.containers"],
        ),
        // A Pod can have a name in one of the lists only.
        (
            json!({ "initContainers": [container("c")], "containers": [container("init")] }),
            vec!["Invalid spec.containers"; 2],
        ),
        (
            json!({ "containers": [hot("c")] }),
            vec!["Invalid spec.containers"],
        ),
        (
            json!({ "containers": [container("hot-1")] }),
            vec!["Invalid spec.containers"],
        ),
        (json!({ "containers": [container("hot-3")] }), vec![]),
        (json!({ "volumes": [volume("v", "emptyDir")] }), vec![]),
        (
            json!({ "volumes": [volume("v", "hostPath")] }),
            vec!["Invalid spec.volumes"],
        ),
        (json!({ "patchPodMetadata": patch("Retain") }), vec![]),
        (json!({ "patchPodMetadata": patch("MergePatchJson") }), vec![]),
        (
            json!({ "patchPodMetadata": patch("Overwrite") }),
            vec!["Invalid spec.patchPodMetadata"],
        ),
    ];
    for (spec, errors) in cases {
        let there = other(spec.clone());
        let got = found(&Request {
            stored: &[&there, &ours],
            ..request(&ours)
        });
        assert_eq!(got, errors, "{spec}");
        let mut elsewhere = spec;
        elsewhere["selector"] = json!({ "matchLabels": { "app": "b" } });
        let elsewhere = SidecarSetSpec::deserialize(&other(elsewhere)["spec"]).unwrap();
        assert!(
            !Concerned::new(&ours).contains("other", &elsewhere),
            "{elsewhere:?}"
        );
    }
}

#[test]
fn a_thousand_other_sets_are_compared_quickly() {
    let others: Vec<Value> = (0..1000)
        .map(|at| {
            let containers: Value = (0..20).map(|nth| container(&format!("c{at}-{nth}"))).collect();
            set(&json!({ "metadata": { "name": format!("s{at}") }, "spec": { "containers": containers } }))
        })
        .collect();
    let stored: Vec<&Value> = others.iter().collect();
    let ours = set(&json!({}));
    let begin = std::time::Instant::now();
    let got = found(&Request {
        stored: &stored,
        ..request(&ours)
    });
    assert_eq!(got, [""; 0]);
    // Some milliseconds; the limit is for slow machines.
    assert!(begin.elapsed().as_secs() < 2, "{:?}", begin.elapsed());
}

#[test]
fn stored_launch_priorities_that_are_no_numbers_stay() {
    let with_priority = |variable: Value| {
        let mut one = container("c");
        one["env"] = json!([{ "name": "A", "value": "x" }, variable]);
        set(&json!({ "spec": { "containers": [one], "initContainers": [] } }))
    };
    let priority = |value: &str| json!({ "name": "KRUISE_CONTAINER_PRIORITY", "value": value });
    let error = |set: &Value, old: Option<&Value>| found(&Request { old, ..request(set) });
    let field = "spec.containers[0].env[1].value";
    for value in ["", "1.5", "high", "99999999999999999999"] {
        let bad = with_priority(priority(value));
        assert_eq!(error(&bad, None), [format!("Invalid {field}")], "{value}");
        assert_eq!(error(&bad, Some(&bad)), [""; 0], "{value}");
        let corrected = with_priority(priority("-1"));
        assert_eq!(error(&bad, Some(&corrected)), [format!("Invalid {field}")]);
        assert_eq!(error(&corrected, Some(&bad)), [""; 0]);
        assert_eq!(warnings(&corrected), [""; 0]);
        let warned = warnings(&bad);
        assert!(
            warned.len() == 1 && warned[0].starts_with(&format!("{field}: Invalid value: ")),
            "{warned:?}"
        );
    }
    let source = json!({ "fieldRef": { "apiVersion": "v1", "fieldPath": "metadata.name" } });
    let by_reference = json!({ "name": "KRUISE_CONTAINER_PRIORITY", "valueFrom": source });
    assert_eq!(
        error(&with_priority(by_reference), None),
        [format!("Required {field}")]
    );

    // Init containers have no barriers.
    let mut init = container("i");
    init["env"] = json!([priority("high")]);
    let init = set(&json!({ "spec": { "initContainers": [init] } }));
    assert_eq!(error(&init, None), [""; 0]);
}

#[test]
fn missing_empty_image_is_warned_about() {
    let mut hot = container("c");
    hot["upgradeStrategy"] = json!({ "upgradeType": "HotUpgrade" });
    let mut init = hot.clone();
    init["name"] = json!("i");
    init["restartPolicy"] = json!("Always");
    let update = json!({ "type": "NotUpdate" });
    let set = |containers: &Value, init: &Value| {
        set(
            &json!({ "spec": { "containers": [containers], "initContainers": [init], "updateStrategy": update } }),
        )
    };
    let field = |list: &str| {
        format!(
            "spec.{list}[0].upgradeStrategy.hotUpgradeEmptyImage: Required value: the SidecarSet cannot be injected without it"
        )
    };
    let bad = set(&hot, &init);
    assert_eq!(found(&request(&bad)), [""; 0]);
    assert_eq!(warnings(&bad), [field("initContainers"), field("containers")]);
    for container in [&mut hot, &mut init] {
        container["upgradeStrategy"]["hotUpgradeEmptyImage"] = json!("empty:1");
    }
    assert_eq!(warnings(&set(&hot, &init)), [""; 0]);
    // An init container that ends is never upgraded.
    init["restartPolicy"] = Value::Null;
    init["upgradeStrategy"]["hotUpgradeEmptyImage"] = Value::Null;
    assert_eq!(warnings(&set(&hot, &init)), [""; 0]);
}

//! What is filled in, refused and warned of, given what the API server said.
#![allow(clippy::unwrap_used, clippy::panic)]

use super::*;
use crate::admission::known_fields::LAST_APPLIED;
use crate::admission::review::Object;
use kruise_api::lifecycle::Lifecycle;
use kruise_api::validation::clone_set::possible;

fn spec() -> Value {
    json!({
        "selector": { "matchLabels": { "app": "a" } },
        "template": {
            "metadata": { "labels": { "app": "a" } },
            "spec": { "containers": [{ "name": "c", "image": "i:1" }] },
        },
    })
}

fn changed(change: Value) -> Value {
    let mut spec = spec();
    json_patch::merge(&mut spec, &change);
    spec
}

fn request(spec: Value, old: Option<Value>) -> Request {
    Request {
        object: Object::of(json!({ "metadata": { "uid": "u" }, "spec": spec })),
        old: old.map(|spec| Object::of(json!({ "metadata": { "uid": "u" }, "spec": spec }))),
        namespace: "ns".into(),
        version: "v1beta1".into(),
        strict: false,
    }
}

fn denied(decision: Decision) -> String {
    match decision {
        Decision::Deny { code: 422, why } => why,
        other => panic!("{other:?}"),
    }
}

fn allowed(decision: Decision) -> (Value, Vec<String>) {
    match decision {
        Decision::Allow { object, warnings } => (object, warnings),
        Decision::Deny { why, .. } => panic!("{why}"),
    }
}

#[test]
fn only_templates_that_change_are_asked_about() {
    assert!(new_templates(&request(spec(), None)).is_some());
    assert!(new_templates(&request(changed(json!({ "replicas": 3 })), Some(spec()))).is_none());
    assert!(new_templates(&request(changed(json!({ "template": null })), None)).is_none());
    let claims = json!({ "volumeClaimTemplates": [{}] });
    assert!(new_templates(&request(changed(claims), Some(spec()))).is_some());
}

#[test]
fn what_the_api_server_makes_of_templates_is_taken_over() {
    let asked = request(changed(json!({ "volumeClaimTemplates": [{ "spec": 1 }] })), None);
    let answer = Answer::Good {
        templates: Templates {
            template: json!({ "filled": "in" }),
            claims: vec![json!({ "spec": 2 })],
            ..Templates::default()
        },
        unknown: vec!["spec.template.spec.typo".into()],
        dropped: vec!["spec.template.spec.volumes[1]".into()],
    };
    let (object, warnings) = allowed(fill_in(&asked, Some(Ok(answer))));
    assert_eq!(object["spec"]["template"], json!({ "filled": "in" }));
    assert_eq!(object["spec"]["volumeClaimTemplates"], json!([{ "spec": 2 }]));
    for (field, what) in [
        ("typo", "is left out"),
        ("volumes[1]", "is stored, but the API server drops it"),
    ] {
        let says = |warning: &String| warning.contains(field) && warning.contains(what);
        assert!(warnings.iter().any(says), "{warnings:?}");
    }

    let bad = Answer::Bad("spec.template.spec.containers: Required value".into());
    assert!(denied(fill_in(&asked, Some(Ok(bad)))).contains("Required value"));
    let gone = cluster::Error::Transport("gone".into());
    let (object, warnings) = allowed(fill_in(&asked, Some(Err(gone))));
    assert_eq!(object, *asked.object);
    assert!(warnings.iter().any(|warning| warning.contains("gone")));
}

/// A manifest that was applied before the check can be applied again.
#[test]
fn unknown_fields_that_were_applied_before_are_not_refused() {
    let containers = |all: Value| changed(json!({ "template": { "spec": { "containers": all } } }));
    let old = containers(json!([{ "name": "a", "readynessProbe": { "httpGetz": 1 } }]));
    let new = containers(json!([{ "name": "b" }, { "name": "a", "readynessProbe": {}, "imagee": "x" }]));
    let field = |at: usize, name: &str| format!("spec.template.spec.containers[{at}].{name}");
    let unknown = [field(1, "readynessProbe"), field(1, "imagee")];
    let update = |last: Option<String>| {
        let annotations = json!({ LAST_APPLIED: last });
        let old = json!({ "metadata": { "annotations": annotations }, "spec": spec() });
        Request {
            old: Some(Object::of(old)),
            ..request(new.clone(), None)
        }
    };
    let applied = update(Some(json!({ "spec": old }).to_string()));
    assert_eq!(
        strictly(&KnownFields::of(&applied), &unknown).unwrap(),
        "strict decoding error: unknown field \"spec.template.spec.containers[1].imagee\""
    );
    assert_eq!(strictly(&KnownFields::of(&applied), &unknown[..1]), None);
    for last in [None, Some("{".to_owned())] {
        assert_eq!(strictly(&KnownFields::of(&update(last)), &unknown), None);
    }
    // Stored while no webhook served.
    let mut stored = update(Some("{}".to_owned()));
    stored.old = Some(Object::of(json!({
        "metadata": { "annotations": { LAST_APPLIED: "{}" } }, "spec": new,
    })));
    assert_eq!(strictly(&KnownFields::of(&stored), &unknown), None);
    let created = KnownFields::of(&request(new.clone(), None));
    let created = strictly(&created, &unknown).unwrap();
    assert!(created.contains("readynessProbe\", unknown field"), "{created}");
}

#[test]
fn mistakes_are_named() {
    let hook = |hook: Value| changed(json!({ "lifecycle": { "preDelete": hook } }));
    for (spec, message) in [
        (
            changed(json!({ "template": { "metadata": { "labels": { "app": "b" } } } })),
            "spec.template.metadata.labels: Invalid value: {\"app\":\"b\"}: spec.selector does not match",
        ),
        (
            changed(json!({ "template": { "metadata": null } })),
            "spec.template.metadata.labels: Invalid value: {}: spec.selector does not match",
        ),
        (
            changed(json!({ "selector": { "matchExpressions": [{ "key": "app", "operator": "like" }] } })),
            "spec.selector.matchExpressions[0].operator: Invalid value: \"like\"",
        ),
        (
            hook(json!({ "finalizersHandler": ["ok.io/a", "plain"] })),
            "spec.lifecycle.preDelete.finalizersHandler[1]: Invalid value: \"plain\"",
        ),
        (
            hook(json!({ "labelsHandler": { "a b": "c" } })),
            "spec.lifecycle.preDelete.labelsHandler[a b]: Invalid value: \"a b\": not a label key",
        ),
        (
            changed(
                json!({ "updateStrategy": { "rollingUpdate": { "priorityStrategy": {
                "weightPriority": [{ "matchSelector": { "matchLabels": { "a": "-" } } }],
            } } } }),
            ),
            "weightPriority[0].matchSelector.matchLabels[a]: Invalid value: \"-\"",
        ),
        (
            changed(
                json!({ "template": { "spec": { "containers": [{ "name": "b" }, { "name": "c", "env": [
                { "name": "KRUISE_CONTAINER_PRIORITY", "value": "first" },
            ] }] } } }),
            ),
            "spec.template.spec.containers[1].env[0].value: Invalid value: \"first\": a launch priority is a whole",
        ),
    ] {
        let why = denied(check(&request(spec.clone(), None), &[], None));
        assert!(why.contains(message), "{message} is not in {why}");
        // What is stored stays updatable.
        let mut scaled = spec.clone();
        scaled["replicas"] = json!(7);
        allowed(check(&request(scaled, Some(spec)), &[], None));
    }
    assert!(validate(&spec()).is_empty());
    let stored = hook(json!({ "finalizersHandler": ["plain"], "labelsHandler": { "a b": "-" } }));
    assert!(validate(&stored).is_empty(), "a stored hook stops no rollout");
}

#[test]
fn hook_items_are_possible_where_they_are_no_mistakes() {
    let long = "a".repeat(64);
    let finalizers = [
        "ok.io/a",
        "plain",
        "",
        "kubernetes",
        "orphan",
        "Not.io/a",
        "a/b/c",
        "a.io/",
        "a.io/-",
    ];
    for finalizer in finalizers {
        for hook in ["preDelete", "inPlaceUpdate", "preNormal"] {
            let stored = json!({ hook: { "finalizersHandler": [finalizer], "markPodNotReady": true } });
            let typed: Lifecycle = serde_json::from_value(stored.clone()).unwrap();
            let possible = possible(&typed);
            assert_eq!(possible == typed, hooks(&stored).is_empty(), "{stored}");
        }
    }
    for (key, value) in [
        ("a", ""),
        ("a.io/b", "c"),
        ("a b", "c"),
        ("a", "-"),
        (&long, "c"),
        ("a", &long),
    ] {
        let stored = json!({ "preNormal": { "labelsHandler": { key: value, "fine": "yes" } } });
        let typed: Lifecycle = serde_json::from_value(stored.clone()).unwrap();
        let possible = possible(&typed);
        assert_eq!(possible == typed, hooks(&stored).is_empty(), "{stored}");
        assert_eq!(possible.pre_normal.unwrap().labels_handler["fine"], "yes");
    }
}

#[test]
fn limits_that_let_nothing_be_updated_are_refused_when_they_or_replicas_are_set() {
    let with = |replicas: i32, limits: Value| {
        changed(json!({ "replicas": replicas, "updateStrategy": { "rollingUpdate": limits } }))
    };
    let none = || json!({ "maxUnavailable": 0, "maxSurge": "0%" });
    let refused = |spec: Value, old: Option<Value>| {
        matches!(check(&request(spec, old), &[], None), Decision::Deny { .. })
    };
    assert!(refused(with(1, none()), None));
    assert!(refused(with(1, none()), Some(with(0, none()))));
    assert!(!refused(with(0, none()), None));
    assert!(
        !refused(with(2, none()), Some(with(1, none()))),
        "what is stored can be scaled"
    );
    assert!(!refused(
        with(1, json!({ "maxUnavailable": 0, "maxSurge": 1 })),
        None
    ));
    assert!(!refused(with(1, json!({})), None));
}

#[test]
fn pre_downloads_that_cannot_be_are_warned_of() {
    let warnings = |fields: Value| {
        let update = json!({ "updateStrategy": { "rollingUpdate": { "inPlaceUpdateStrategy": fields } } });
        allowed(check(&request(changed(update), None), &[], None)).1
    };
    let said =
        warnings(json!({ "imagePreDownloadParallelism": "10%", "imagePreDownloadTimeoutSeconds": -1 }));
    assert_eq!(said.len(), 2);
    assert!(
        said[0].starts_with("imagePreDownloadParallelism is \"10%\""),
        "{said:?}"
    );
    let good = json!({ "imagePreDownloadParallelism": "10", "imagePreDownloadMinUpdatedReadyPods": 0 });
    assert!(warnings(good).is_empty());

    // What v1alpha1 has as an annotation, and no field of v1beta1 can hold.
    for (value, fine) in [("20%", true), ("a few", false), ("a%", false), ("-1%", false)] {
        let key = "apps.kruise.io/image-predownload-min-updated-ready-pods";
        let mut asked = request(spec(), None);
        asked.object = Object::of(json!({ "metadata": { "annotations": { key: value } }, "spec": spec() }));
        let said = allowed(check(&asked, &[], None)).1;
        assert_eq!(said.is_empty(), fine, "{said:?}");
        let begin = format!("imagePreDownloadMinUpdatedReadyPods is {value:?}");
        assert!(said.iter().all(|words| words.starts_with(&begin)), "{said:?}");
    }
}

#[test]
fn pods_that_must_stay_cannot_change_in_everything() {
    let old = json!({ "spec": { "containers": [
        { "name": "c", "image": "i:1", "resources": { "limits": { "cpu": "1", "gpu": "1" } } },
    ] } });
    let before = |vertical: bool| Before {
        template: old.clone(),
        stored: Stored::WithDefaults,
        vertical,
    };
    let template = |change: Value| {
        let mut container = old["spec"]["containers"][0].clone();
        json_patch::merge(&mut container, &change);
        json!({ "template": { "spec": { "containers": [container] } } })
    };
    for good in [
        json!({ "image": "i:2" }),
        json!({ "imagePullPolicy": "Always", "env": [] }),
        json!({ "resources": { "limits": { "cpu": "2" } } }),
    ] {
        allowed(check(
            &request(changed(template(good)), Some(spec())),
            &[],
            Some(&before(true)),
        ));
    }
    for (bad, field) in [
        (json!({ "name": "d" }), "/containers/0/name"),
        (json!({ "env": [{ "name": "E" }] }), "/containers/0/env"),
        (
            json!({ "resources": { "limits": { "memory": "1Gi" } } }),
            "/containers/0/resources/limits/memory",
        ),
        (
            json!({ "resources": { "limits": { "gpu": "2" } } }),
            "/containers/0/resources/limits/gpu",
        ),
    ] {
        let asked = request(changed(template(bad)), Some(spec()));
        let why = denied(check(&asked, &[], Some(&before(true))));
        assert!(why.contains("change images, cpu and memory, labels"), "{why}");
        assert!(
            why.contains(&format!("spec.template.spec{field}: Forbidden")),
            "{why}"
        );
        allowed(check(&asked, &[], None));
    }
}

/// Without its gate a resize is never made, so that Pods would wait for it for ever, and with it for their image.
#[test]
fn sizes_change_in_pods_that_must_stay_with_their_gate_only() {
    let template = |cpu: &str, image: &str| {
        json!({ "spec": { "containers": [
            { "name": "c", "image": image, "resources": { "limits": { "cpu": cpu } } },
        ] } })
    };
    let asked = request(changed(json!({ "template": template("2", "i:2") })), Some(spec()));
    let before = |vertical: bool| Before {
        template: template("1", "i:1"),
        stored: Stored::WithDefaults,
        vertical,
    };
    allowed(check(&asked, &[], Some(&before(true))));
    let why = denied(check(&asked, &[], Some(&before(false))));
    let field = "spec.template.spec/containers/0/resources/limits/cpu: Forbidden";
    assert!(
        why.contains(field) && why.contains("change images, labels and annotations only"),
        "{why}"
    );
}

#[test]
fn a_pull_policy_changes_pods_that_must_stay_where_none_is_filled_in() {
    let container = json!({ "name": "c", "image": "i:1" });
    let mut said = container.clone();
    said["imagePullPolicy"] = json!("Always");
    let template = |container: &Value| json!({ "spec": { "containers": [container] } });
    for (old, new) in [(&container, &said), (&said, &container)] {
        let asked = request(changed(json!({ "template": template(new) })), Some(spec()));
        let before = |stored: Stored| Before {
            template: template(old),
            stored,
            vertical: false,
        };
        allowed(check(&asked, &[], Some(&before(Stored::WithDefaults))));
        let why = denied(check(&asked, &[], Some(&before(Stored::AsAsked))));
        assert!(why.contains("/containers/0/imagePullPolicy"), "{why}");
    }
}

#[test]
fn pods_to_delete_are_those_of_the_cloneset() {
    let names = |names: Value| changed(json!({ "scaleStrategy": { "podsToDelete": names } }));
    let mut asked = request(names(json!(["old", "new"])), Some(names(json!(["old"]))));
    assert_eq!(newly_to_delete(&asked), ["new"]);
    let (_, warnings) = allowed(check(&asked, &["new".into()], None));
    assert!(warnings.iter().any(|warning| warning.contains("\"new\"")));
    asked.version = "v1alpha1".into();
    let why = denied(check(&asked, &["new".into()], None));
    assert!(
        why.contains("spec.scaleStrategy.podsToDelete: Invalid value: \"new\""),
        "{why}"
    );

    let owns = |uid, metadata: Value| {
        let pod = serde_json::from_value(json!({ "metadata": metadata })).unwrap();
        owns(uid, &pod)
    };
    let owners = json!([{ "apiVersion": "v", "kind": "k", "name": "n", "uid": "u", "controller": true }]);
    assert!(!owns("u", json!({ "name": "p" })));
    assert!(owns("u", json!({ "ownerReferences": owners })));
    assert!(!owns("v", json!({ "ownerReferences": owners })));
    let going = json!({ "ownerReferences": owners, "deletionTimestamp": "2026-01-01T00:00:00Z" });
    assert!(!owns("u", going));
}

#[test]
fn a_template_with_lists_longer_than_any_pod_has_is_refused() {
    let containers =
        |count| changed(json!({ "template": { "spec": { "containers": vec![json!({}); count] } } }));
    assert!(too_long(&request(containers(1000), None).object).is_none());
    let why = denied(too_long(&request(containers(1001), None).object).unwrap());
    assert_eq!(
        why,
        "spec.template.spec.containers: Too many: 1001: must have at most 1000 items"
    );
}

//! Defaults, rejections and warnings for different answers of the API server.
#![allow(clippy::unwrap_used, clippy::panic)]

use super::*;
use crate::admission::previous_fields::LAST_APPLIED;
use crate::admission::review::Object;
use kruise_api::lifecycle::Lifecycle;
use kruise_api::owner::OwnerKind;
use kruise_api::validation::cloneset::without_invalid_hooks;

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
        object: Object::for_test(json!({ "metadata": { "uid": "u" }, "spec": spec })),
        old: old.map(|spec| Object::for_test(json!({ "metadata": { "uid": "u" }, "spec": spec }))),
        namespace: "ns".into(),
        version: "v1beta1".into(),
        strict: false,
    }
}

fn denied(decision: Decision) -> String {
    match decision {
        Decision::Deny {
            code: 422,
            message: why,
        } => why,
        other => panic!("{other:?}"),
    }
}

fn allowed(decision: Decision) -> (Value, Vec<String>) {
    match decision {
        Decision::Allow { object, warnings } => (object, warnings),
        Decision::Deny { message: why, .. } => panic!("{why}"),
    }
}

#[test]
fn only_changed_templates_are_defaulted() {
    assert!(changed_templates(&request(spec(), None)).is_some());
    assert!(changed_templates(&request(changed(json!({ "replicas": 3 })), Some(spec()))).is_none());
    assert!(changed_templates(&request(changed(json!({ "template": null })), None)).is_none());
    let claims = json!({ "volumeClaimTemplates": [{}] });
    assert!(changed_templates(&request(changed(claims), Some(spec()))).is_some());
}

#[test]
fn defaulted_templates_replace_the_originals() {
    let review_request = request(changed(json!({ "volumeClaimTemplates": [{ "spec": 1 }] })), None);
    let answer = DryRunResult::Valid {
        templates: Templates {
            template: json!({ "filled": "in" }),
            claims: vec![json!({ "spec": 2 })],
            ..Templates::default()
        },
        unknown_fields: vec!["spec.template.spec.typo".into()],
        dropped: vec!["spec.template.spec.volumes[1]".into()],
    };
    let (object, warnings) = allowed(set_defaults(&review_request, Some(Ok(answer))));
    assert_eq!(object["spec"]["template"], json!({ "filled": "in" }));
    assert_eq!(object["spec"]["volumeClaimTemplates"], json!([{ "spec": 2 }]));
    for (field, what) in [
        ("typo", "is left out"),
        ("volumes[1]", "is stored, but the API server drops it"),
    ] {
        let warns = |warning: &String| warning.contains(field) && warning.contains(what);
        assert!(warnings.iter().any(warns), "{warnings:?}");
    }

    let bad = DryRunResult::Invalid("spec.template.spec.containers: Required value".into());
    assert!(denied(set_defaults(&review_request, Some(Ok(bad)))).contains("Required value"));
    let error = cluster::Error::Transport("gone".into());
    let (object, warnings) = allowed(set_defaults(&review_request, Some(Err(error))));
    assert_eq!(object, *review_request.object);
    assert!(warnings.iter().any(|warning| warning.contains("gone")));
}

/// A manifest that was applied before this check existed can be applied again.
#[test]
fn strict_allows_last_applied_unknown_fields() {
    let containers = |all: Value| changed(json!({ "template": { "spec": { "containers": all } } }));
    let old = containers(json!([{ "name": "a", "readynessProbe": { "httpGetz": 1 } }]));
    let new = containers(json!([{ "name": "b" }, { "name": "a", "readynessProbe": {}, "imagee": "x" }]));
    let field = |index: usize, name: &str| format!("spec.template.spec.containers[{index}].{name}");
    let unknown = [field(1, "readynessProbe"), field(1, "imagee")];
    let update = |last: Option<String>| {
        let annotations = json!({ LAST_APPLIED: last });
        let old = json!({ "metadata": { "annotations": annotations }, "spec": spec() });
        Request {
            old: Some(Object::for_test(old)),
            ..request(new.clone(), None)
        }
    };
    let applied = update(Some(json!({ "spec": old }).to_string()));
    assert_eq!(
        strict_decoding_error(&PreviousFields::from_request(&applied), &unknown).unwrap(),
        "strict decoding error: unknown field \"spec.template.spec.containers[1].imagee\""
    );
    assert_eq!(
        strict_decoding_error(&PreviousFields::from_request(&applied), &unknown[..1]),
        None
    );
    for last in [None, Some("{".to_owned())] {
        assert_eq!(
            strict_decoding_error(&PreviousFields::from_request(&update(last)), &unknown),
            None
        );
    }
    // Stored while no webhook was running.
    let mut stored = update(Some("{}".to_owned()));
    stored.old = Some(Object::for_test(json!({
        "metadata": { "annotations": { LAST_APPLIED: "{}" } }, "spec": new,
    })));
    assert_eq!(
        strict_decoding_error(&PreviousFields::from_request(&stored), &unknown),
        None
    );
    let created = PreviousFields::from_request(&request(new.clone(), None));
    let created = strict_decoding_error(&created, &unknown).unwrap();
    assert!(created.contains("readynessProbe\", unknown field"), "{created}");
}

#[test]
fn invalid_fields_are_refused_by_path() {
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
        let why = denied(validate_request(&request(spec.clone(), None), &[], None));
        assert!(why.contains(message), "{message} is not in {why}");
        // A stored object can still be updated.
        let mut scaled = spec.clone();
        scaled["replicas"] = json!(7);
        allowed(validate_request(&request(scaled, Some(spec)), &[], None));
    }
    assert!(validate(&spec()).is_empty());
    let stored = hook(json!({ "finalizersHandler": ["plain"], "labelsHandler": { "a b": "-" } }));
    assert!(validate(&stored).is_empty(), "a stored hook blocks no rollout");
}

#[test]
fn possible_hooks_match_hook_validation() {
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
            let possible = without_invalid_hooks(&typed);
            assert_eq!(possible == typed, validate_hooks(&stored).is_empty(), "{stored}");
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
        let possible = without_invalid_hooks(&typed);
        assert_eq!(possible == typed, validate_hooks(&stored).is_empty(), "{stored}");
        assert_eq!(possible.pre_normal.unwrap().labels_handler["fine"], "yes");
    }
}

#[test]
fn zero_limits_are_refused_when_changed() {
    let with = |replicas: i32, limits: Value| {
        changed(json!({ "replicas": replicas, "updateStrategy": { "rollingUpdate": limits } }))
    };
    let none = || json!({ "maxUnavailable": 0, "maxSurge": "0%" });
    let refused = |spec: Value, old: Option<Value>| {
        matches!(
            validate_request(&request(spec, old), &[], None),
            Decision::Deny { .. }
        )
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
fn invalid_pre_download_values_warn() {
    let warnings = |fields: Value| {
        let update = json!({ "updateStrategy": { "rollingUpdate": { "inPlaceUpdateStrategy": fields } } });
        allowed(validate_request(&request(changed(update), None), &[], None)).1
    };
    let warned =
        warnings(json!({ "imagePreDownloadParallelism": "10%", "imagePreDownloadTimeoutSeconds": -1 }));
    assert_eq!(warned.len(), 2);
    assert!(
        warned[0].starts_with("imagePreDownloadParallelism is \"10%\""),
        "{warned:?}"
    );
    let valid = json!({ "imagePreDownloadParallelism": "10", "imagePreDownloadMinUpdatedReadyPods": 0 });
    assert!(warnings(valid).is_empty());

    // Annotations of v1alpha1 with values that no field of v1beta1 can have.
    for (value, fine) in [("20%", true), ("a few", false), ("a%", false), ("-1%", false)] {
        let key = "apps.kruise.io/image-predownload-min-updated-ready-pods";
        let mut review_request = request(spec(), None);
        review_request.object =
            Object::for_test(json!({ "metadata": { "annotations": { key: value } }, "spec": spec() }));
        let warned = allowed(validate_request(&review_request, &[], None)).1;
        assert_eq!(warned.is_empty(), fine, "{warned:?}");
        let prefix = format!("imagePreDownloadMinUpdatedReadyPods is {value:?}");
        assert!(
            warned.iter().all(|warning| warning.starts_with(&prefix)),
            "{warned:?}"
        );
    }
}

#[test]
fn in_place_only_refuses_immutable_changes() {
    let old = json!({ "spec": { "containers": [
        { "name": "c", "image": "i:1", "resources": { "limits": { "cpu": "1", "gpu": "1" } } },
    ] } });
    let baseline = |vertical_scaling: bool| InPlaceBaseline {
        template: old.clone(),
        stored: TemplateStorage::WithDefaults,
        vertical_scaling,
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
        allowed(validate_request(
            &request(changed(template(good)), Some(spec())),
            &[],
            Some(&baseline(true)),
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
        let review_request = request(changed(template(bad)), Some(spec()));
        let why = denied(validate_request(&review_request, &[], Some(&baseline(true))));
        assert!(why.contains("change images, cpu and memory, labels"), "{why}");
        assert!(
            why.contains(&format!("spec.template.spec{field}: Forbidden")),
            "{why}"
        );
        allowed(validate_request(&review_request, &[], None));
    }
}

/// Without its gate a resize never happens: Pods would wait for it forever, and so would their image update.
#[test]
fn in_place_only_resize_needs_the_gate() {
    let template = |cpu: &str, image: &str| {
        json!({ "spec": { "containers": [
            { "name": "c", "image": image, "resources": { "limits": { "cpu": cpu } } },
        ] } })
    };
    let review_request = request(changed(json!({ "template": template("2", "i:2") })), Some(spec()));
    let baseline = |vertical_scaling: bool| InPlaceBaseline {
        template: template("1", "i:1"),
        stored: TemplateStorage::WithDefaults,
        vertical_scaling,
    };
    allowed(validate_request(&review_request, &[], Some(&baseline(true))));
    let why = denied(validate_request(&review_request, &[], Some(&baseline(false))));
    let field = "spec.template.spec/containers/0/resources/limits/cpu: Forbidden";
    assert!(
        why.contains(field) && why.contains("change images, labels and annotations only"),
        "{why}"
    );
}

#[test]
fn in_place_only_pull_policy_without_defaults() {
    let container = json!({ "name": "c", "image": "i:1" });
    let mut explicit = container.clone();
    explicit["imagePullPolicy"] = json!("Always");
    let template = |container: &Value| json!({ "spec": { "containers": [container] } });
    for (old, new) in [(&container, &explicit), (&explicit, &container)] {
        let review_request = request(changed(json!({ "template": template(new) })), Some(spec()));
        let baseline = |stored: TemplateStorage| InPlaceBaseline {
            template: template(old),
            stored,
            vertical_scaling: false,
        };
        allowed(validate_request(
            &review_request,
            &[],
            Some(&baseline(TemplateStorage::WithDefaults)),
        ));
        let why = denied(validate_request(
            &review_request,
            &[],
            Some(&baseline(TemplateStorage::AsWritten)),
        ));
        assert!(why.contains("/containers/0/imagePullPolicy"), "{why}");
    }
}

#[test]
fn pods_to_delete_must_belong_to_the_cloneset() {
    let names = |names: Value| changed(json!({ "scaleStrategy": { "podsToDelete": names } }));
    let mut review_request = request(names(json!(["old", "new"])), Some(names(json!(["old"]))));
    assert_eq!(added_pods_to_delete(&review_request), ["new"]);
    let (_, warnings) = allowed(validate_request(&review_request, &["new".into()], None));
    assert!(warnings.iter().any(|warning| warning.contains("\"new\"")));
    review_request.version = "v1alpha1".into();
    let why = denied(validate_request(&review_request, &["new".into()], None));
    assert!(
        why.contains("spec.scaleStrategy.podsToDelete: Invalid value: \"new\""),
        "{why}"
    );

    let owns = |uid: &str, metadata: Value| {
        let set = Owner {
            kind: OwnerKind::CloneSet,
            name: "n".to_owned(),
            uid: uid.to_owned(),
        };
        let pod = serde_json::from_value(json!({ "metadata": metadata })).unwrap();
        is_controlled_by(&set, &pod)
    };
    let owners = json!([{ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "n", "uid": "u",
        "controller": true }]);
    for (field, forged) in [
        ("apiVersion", "apps.kruise.io/v9"),
        ("kind", "SidecarSet"),
        ("name", "m"),
    ] {
        let mut owners = owners.clone();
        owners[0][field] = json!(forged);
        assert!(!owns("u", json!({ "ownerReferences": owners })), "{field}");
    }
    assert!(!owns("u", json!({ "name": "p" })));
    assert!(owns("u", json!({ "ownerReferences": owners })));
    assert!(!owns("v", json!({ "ownerReferences": owners })));
    let terminating = json!({ "ownerReferences": owners, "deletionTimestamp": "2026-01-01T00:00:00Z" });
    assert!(!owns("u", terminating));
}

#[test]
fn oversized_template_lists_are_refused() {
    let containers =
        |count| changed(json!({ "template": { "spec": { "containers": vec![json!({}); count] } } }));
    assert!(reject_oversized(&request(containers(1000), None).object).is_none());
    let why = denied(reject_oversized(&request(containers(1001), None).object).unwrap());
    assert_eq!(
        why,
        "spec.template.spec.containers: Too many: 1001: must have at most 1000 items"
    );
}

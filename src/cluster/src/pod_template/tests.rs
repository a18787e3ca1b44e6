//! Requests, and how responses are read; a real API server's responses are in the cluster tests.
#![allow(clippy::unwrap_used, clippy::panic)]

use super::*;

const WITH_DEFAULTS: Defaulting = Defaulting {
    disabled: false,
    host_ports: false,
};
const WITHOUT_DEFAULTS: Defaulting = Defaulting {
    disabled: true,
    host_ports: false,
};

fn templates() -> Templates {
    Templates {
        template: json!({
            "metadata": { "labels": { "app": "a" } },
            "spec": {
                "containers": [{ "name": "c", "image": "i", "imagee": "typo", "stdin": false }],
                "volumes": [{ "name": "data", "emptyDir": {} }, { "name": "tmp", "emptyDir": {} }],
            },
        }),
        claims: vec![json!({
            "metadata": { "name": "data", "labels": { "l": "1" } },
            "spec": { "accessModes": ["ReadWriteOnce"] },
        })],
        labels: json!({ "team": "a" }),
        annotations: json!({ "owner": "a", "kubectl.kubernetes.io/last-applied-configuration": "{}" }),
    }
}

#[test]
fn claims_replace_volumes_and_come_back_as_claims() {
    let submitted = templates();
    let (body, origins) = build_pod_template(&submitted);
    assert_eq!(origins, [VolumeOrigin::Template(1), VolumeOrigin::Claim(0)]);
    assert_eq!(body["metadata"]["labels"], json!({ "team": "a" }));
    assert_eq!(body["metadata"]["annotations"], json!({ "owner": "a" }));
    let volumes = body["template"]["spec"]["volumes"].as_array().unwrap();
    assert_eq!(volumes[0]["name"], "tmp");
    assert_eq!(
        volumes[1]["ephemeral"]["volumeClaimTemplate"]["metadata"]["labels"],
        json!({ "l": "1" })
    );

    let mut answer = body.clone();
    let spec = &mut answer["template"]["spec"];
    spec["volumes"][0]["emptyDir"] = json!({ "medium": "" });
    let claim = &mut spec["volumes"][1]["ephemeral"]["volumeClaimTemplate"]["spec"];
    claim["volumeMode"] = json!("Filesystem");
    claim["resources"] = json!({ "requests": { "storage": "1Gi" } });
    let container = spec["containers"][0].as_object_mut().unwrap();
    container.remove("imagee");
    container.remove("stdin");
    container.insert("imagePullPolicy".into(), json!("Always"));
    let DryRunResult::Valid {
        templates,
        unknown_fields: unknown,
        dropped,
    } = apply_answer(&submitted, &origins, answer, WITH_DEFAULTS)
    else {
        panic!("bad");
    };
    assert_eq!(unknown, ["spec.template.spec.containers[0].imagee"]);
    assert_eq!(dropped, Vec::<String>::new());
    assert_eq!(
        templates.template["spec"]["volumes"],
        json!([{ "name": "data", "emptyDir": {} }, { "name": "tmp", "emptyDir": { "medium": "" } }])
    );
    assert_eq!(
        templates.template["spec"]["containers"][0]["imagePullPolicy"],
        "Always"
    );
    assert_eq!(
        templates.claims[0],
        json!({
            "metadata": { "name": "data", "labels": { "l": "1" } },
            "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } },
        })
    );
}

#[test]
fn a_template_without_volumes_gets_none() {
    let submitted = Templates {
        template: json!({ "spec": { "containers": [] } }),
        ..Templates::default()
    };
    let (body, origins) = build_pod_template(&submitted);
    assert_eq!(body["template"], submitted.template);
    let DryRunResult::Valid { templates, .. } = apply_answer(&submitted, &origins, body, WITH_DEFAULTS)
    else {
        panic!("bad");
    };
    assert_eq!(templates, submitted);
}

/// A template with an image volume, and the response of an API server that supports them.
fn image_volume() -> (Templates, Vec<VolumeOrigin>, Value) {
    let submitted = Templates {
        template: json!({ "spec": {
            "containers": [{ "name": "c", "image": "i", "imagePullPolicy": "Always",
                "env": [{ "name": "A", "value": "1" }, { "name": "A", "value": "2" }],
                "volumeMounts": [
                    { "name": "model", "mountPath": "/model" },
                    { "name": "cfg", "mountPath": "/cfg" },
                    { "name": "data", "mountPath": "/data" },
                    { "name": "cfg", "mountPath": "/again" },
                ] }],
            "volumes": [
                { "name": "model", "image": { "reference": "m:1" } },
                { "name": "data", "emptyDir": {} },
                { "name": "cfg", "configMap": { "name": "cfg" } },
            ],
        } }),
        claims: vec![
            json!({ "metadata": { "name": "data" }, "spec": { "resources": { "requests": { "storage": "1024Mi" } } } }),
        ],
        ..Templates::default()
    };
    let (mut answer, origins) = build_pod_template(&submitted);
    let volumes = &mut answer["template"]["spec"]["volumes"];
    volumes[0]["configMap"]["defaultMode"] = json!(420);
    volumes[2]["image"]["pullPolicy"] = json!("IfNotPresent");
    volumes[1]["ephemeral"]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"] = json!("1Gi");
    (submitted, origins, answer)
}

/// The templates stored from the response, and the items that it lacks.
fn stored_templates(answer: Value, defaults: Defaulting) -> (Templates, Vec<String>) {
    let (submitted, origins, _) = image_volume();
    let DryRunResult::Valid {
        templates,
        unknown_fields: unknown,
        dropped,
    } = apply_answer(&submitted, &origins, answer, defaults)
    else {
        panic!("bad");
    };
    assert_eq!(unknown, Vec::<String>::new());
    (templates, dropped)
}

#[test]
fn answer_items_are_matched_by_name() {
    let (submitted, _, answer) = image_volume();
    for defaults in [WITH_DEFAULTS, WITHOUT_DEFAULTS] {
        let (complete, dropped) = stored_templates(answer.clone(), defaults);
        assert_eq!(dropped, Vec::<String>::new());
        let mut volumes = submitted.template["spec"]["volumes"].clone();
        if !defaults.disabled {
            volumes[2]["configMap"]["defaultMode"] = json!(420);
        }
        assert_eq!(complete.template["spec"]["volumes"], volumes);
        assert_eq!(
            complete.claims[0]["spec"]["resources"]["requests"]["storage"],
            "1Gi"
        );

        // Its feature gate is off.
        let mut less = answer.clone();
        let remove =
            |of: &mut Value, name: &str| of.as_array_mut().unwrap().retain(|one| one["name"] != name);
        remove(&mut less["template"]["spec"]["volumes"], "model");
        remove(
            &mut less["template"]["spec"]["containers"][0]["volumeMounts"],
            "model",
        );
        let (stored, dropped) = stored_templates(less, defaults);
        assert_eq!(
            stored, complete,
            "the same before and after the gate is switched on"
        );
        assert_eq!(
            dropped,
            [
                "spec.template.spec.volumes[0]",
                "spec.template.spec.containers[0].volumeMounts[0]"
            ]
        );

        // A webhook inserts its own.
        let mut more = answer.clone();
        let insert = |of: &mut Value, one: Value| of.as_array_mut().unwrap().insert(0, one);
        let spec = &mut more["template"]["spec"];
        spec["initContainers"] = json!([{ "name": "theirs", "image": "t" }]);
        insert(&mut spec["volumes"], json!({ "name": "theirs", "emptyDir": {} }));
        insert(
            &mut spec["containers"][0]["volumeMounts"],
            json!({ "name": "theirs", "mountPath": "/t" }),
        );
        insert(
            &mut spec["containers"][0]["env"],
            json!({ "name": "THEIRS", "value": "1" }),
        );
        insert(&mut spec["containers"], json!({ "name": "theirs", "image": "t" }));
        assert_eq!(stored_templates(more, defaults), (complete.clone(), Vec::new()));

        let mut other = answer.clone();
        other["template"]["spec"]["volumes"]
            .as_array_mut()
            .unwrap()
            .reverse();
        assert_eq!(stored_templates(other, defaults), (complete.clone(), Vec::new()));

        // None is left.
        let mut none = answer.clone();
        none["template"]["spec"]
            .as_object_mut()
            .unwrap()
            .remove("volumes");
        none["template"]["spec"]["containers"][0]
            .as_object_mut()
            .unwrap()
            .remove("volumeMounts");
        let (stored, dropped) = stored_templates(none, defaults);
        assert_eq!(stored.claims, submitted.claims);
        // The volume that the claim replaces was not sent.
        assert_eq!(
            stored.template["spec"]["volumes"],
            submitted.template["spec"]["volumes"]
        );
        assert_eq!(
            dropped[..3],
            [
                "spec.volumeClaimTemplates[0]",
                "spec.template.spec.volumes[0]",
                "spec.template.spec.volumes[2]"
            ]
        );
        assert_eq!(dropped.len(), 7);
    }
}

/// The API server empties a source whose feature gate is off.
#[test]
fn dropped_projected_sources_are_restored() {
    let volume = |sources: Value| json!({ "name": "v", "projected": { "sources": sources } });
    let spec = |sources: Value| json!({ "spec": { "containers": [], "volumes": [{ "name": "other", "emptyDir": {} }, volume(sources)] } });
    let source = |kind: &str| json!({ kind: { "path": "p" } });
    let all = json!([source("serviceAccountToken"), source("clusterTrustBundle"), {}, { "secret": null }]);
    let submitted = Templates {
        template: spec(all.clone()),
        ..Templates::default()
    };
    let (mut body, origins) = build_pod_template(&submitted);
    body["template"] = spec(json!([source("serviceAccountToken"), {}, {}, {}]));
    for defaults in [WITH_DEFAULTS, WITHOUT_DEFAULTS] {
        let DryRunResult::Valid {
            templates,
            unknown_fields: unknown,
            dropped,
        } = apply_answer(&submitted, &origins, body.clone(), defaults)
        else {
            panic!("bad");
        };
        let mut stored = submitted.clone();
        stored.template["spec"]["volumes"][1]["projected"]["sources"][3] = json!({});
        assert_eq!(templates, stored);
        assert_eq!(unknown, Vec::<String>::new());
        assert_eq!(dropped, ["spec.template.spec.volumes[1].projected.sources[1]"]);
    }
    // A source that no release has is a mistake.
    let misspelled = Templates {
        template: spec(json!([source("tokenOfAccount")])),
        ..Templates::default()
    };
    body["template"] = spec(json!([{}]));
    let DryRunResult::Valid {
        unknown_fields: unknown,
        dropped,
        ..
    } = apply_answer(&misspelled, &origins, body, WITH_DEFAULTS)
    else {
        panic!("bad");
    };
    let field = "spec.template.spec.volumes[1].projected.sources[0].tokenOfAccount";
    assert_eq!((unknown, dropped), (vec![field.to_owned()], Vec::new()));
}

/// The API server refuses them; if it does not, each is kept.
#[test]
fn volumes_with_duplicate_names_stay_as_they_are() {
    let volume = |path: &str| json!({ "name": "v", "hostPath": { "path": path } });
    let claim = |storage: &str| json!({ "metadata": { "name": "c" }, "spec": { "resources": { "requests": { "storage": storage } } } });
    let submitted = Templates {
        template: json!({ "spec": { "containers": [], "volumes": [volume("/1"), volume("/2"), { "hostPath": {} }] } }),
        claims: vec![claim("1Gi"), claim("2Gi")],
        ..Templates::default()
    };
    let (body, origins) = build_pod_template(&submitted);
    let DryRunResult::Valid { templates, .. } = apply_answer(&submitted, &origins, body, WITH_DEFAULTS)
    else {
        panic!("bad");
    };
    assert_eq!(templates, submitted);
}

#[test]
fn error_fields_use_the_users_field_paths() {
    for (field, expected) in [
        (
            "template.spec.containers[0].image",
            "spec.template.spec.containers[0].image",
        ),
        (
            "template.spec.volumes[0].emptyDir",
            "spec.template.spec.volumes[1].emptyDir",
        ),
        (
            "template.spec.volumes[1].name",
            "spec.volumeClaimTemplates[0].metadata.name",
        ),
        (
            "template.spec.volumes[2].ephemeral.volumeClaimTemplate.spec.accessModes",
            "spec.volumeClaimTemplates[1].spec.accessModes",
        ),
    ] {
        let origins = [
            VolumeOrigin::Template(1),
            VolumeOrigin::Claim(0),
            VolumeOrigin::Claim(1),
        ];
        assert_eq!(user_field_path(field, &origins), expected);
    }
}

/// If it has no image volumes, the API server counts only the others.
#[test]
fn image_volumes_come_last() {
    let (submitted, origins, _) = image_volume();
    let (object, order) = build_pod_template(&submitted);
    assert_eq!(order, origins);
    let volumes = object["template"]["spec"]["volumes"].as_array().unwrap();
    let names: Vec<_> = volumes.iter().map(|volume| &volume["name"]).collect();
    assert_eq!(names, ["cfg", "data", "model"]);
    for (at, expected) in [
        (0, "spec.template.spec.volumes[2].name"),
        (1, "spec.volumeClaimTemplates[0].metadata.name"),
        (2, "spec.template.spec.volumes[0].name"),
    ] {
        let field = format!("template.spec.volumes[{at}].name");
        assert_eq!(user_field_path(&field, &origins), expected);
    }
}

#[test]
fn undecodable_claim_is_reported_as_a_claim() {
    let message = |field: &str| {
        format!(
            "json: cannot unmarshal number into Go struct field PersistentVolumeClaimSpec.{field} of type string"
        )
    };
    let own = json!([{ "name": "a", "emptyDir": {} }, { "name": "e", "ephemeral": {} }]);
    for embedded in ["", "VolumeSource."] {
        let decoded = message(&format!(
            "template.spec.volumes.{embedded}ephemeral.volumeClaimTemplate.spec.volumeName"
        ));
        let claim = message("volumeClaimTemplates.spec.volumeName");
        for (volumes, expected) in [
            (json!([]), format!("spec.volumeClaimTemplates: {claim}")),
            (own.clone(), format!("spec.template: {decoded}")),
        ] {
            let submitted = Templates {
                template: json!({ "spec": { "volumes": volumes } }),
                ..templates()
            };
            assert_eq!(decode_error_message(&decoded, &submitted), expected);
        }
    }
    // If two are not strings the API server names the volume that comes first, which is the template's own.
    let decoded = message("template.spec.volumes.name");
    let claim = message("volumeClaimTemplates.metadata.name");
    for (name, expected) in [
        (json!("a"), format!("spec.volumeClaimTemplates: {claim}")),
        (json!(null), format!("spec.volumeClaimTemplates: {claim}")),
        (json!(7), format!("spec.template: {decoded}")),
    ] {
        let submitted = Templates {
            template: json!({ "spec": { "volumes": [{ "name": name, "emptyDir": {} }] } }),
            ..templates()
        };
        assert_eq!(decode_error_message(&decoded, &submitted), expected);
    }
}

/// What Go writes for zero values of its types.
fn remove_go_zero_values(value: &mut Value) {
    match value {
        Value::Object(all) => {
            all.values_mut().for_each(remove_go_zero_values);
            let nothing = |name: &str| ["metadata", "resources"].contains(&name);
            all.retain(|name, value| !(value.is_null() || nothing(name) && *value == json!({})));
        }
        Value::Array(all) => all.iter_mut().for_each(remove_go_zero_values),
        _ => {}
    }
}

#[test]
fn templates_are_stored_like_the_go_implementation() {
    let recorded = include_str!("../../../../tests/data/takeover/templates.jsonl");
    assert_eq!(recorded.lines().count(), 42);
    for line in recorded.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        for (defaults, field) in [
            (WITH_DEFAULTS, "stored"),
            (WITHOUT_DEFAULTS, "storedWithoutDefaults"),
        ] {
            let mut submitted = Templates {
                template: line["asked"]["template"].clone(),
                claims: line["asked"]["claims"].as_array().unwrap().clone(),
                ..Templates::default()
            };
            defaulting::fill_defaults(&mut submitted.template, defaults);
            let (_, origins) = build_pod_template(&submitted);
            let answer = json!({ "template": line["answer"] });
            let DryRunResult::Valid {
                mut templates,
                unknown_fields: unknown,
                dropped,
            } = apply_answer(&submitted, &origins, answer, defaults)
            else {
                panic!("bad");
            };
            assert_eq!([unknown, dropped].concat(), Vec::<String>::new());
            let mut expected = line[field].clone();
            remove_go_zero_values(&mut expected);
            remove_go_zero_values(&mut templates.template);
            assert_eq!(templates.template, expected, "{field} of {}", line["name"]);
            for (ours, theirs) in templates
                .claims
                .iter()
                .zip(line["storedClaims"].as_array().unwrap())
            {
                assert_eq!(ours["spec"], theirs["spec"], "{}", line["name"]);
            }
        }
    }
}

#[test]
fn host_ports_are_defaulted_by_the_feature_gate() {
    let ports = json!([{ "containerPort": 80 }, { "containerPort": 81, "hostPort": 8081 }]);
    let template =
        |host: bool| json!({ "spec": { "hostNetwork": host, "containers": [{ "ports": ports }] } });
    let host_ports = Defaulting {
        host_ports: true,
        ..WITH_DEFAULTS
    };
    let filled = |mut template: Value, defaults| {
        defaulting::fill_defaults(&mut template, defaults);
        template["spec"]["containers"][0]["ports"][0]["hostPort"].clone()
    };
    assert_eq!(filled(template(true), host_ports), 80);
    assert_eq!(filled(template(false), host_ports), Value::Null);
    assert_eq!(filled(template(true), WITH_DEFAULTS), Value::Null);
    let bare = Defaulting {
        host_ports: true,
        ..WITHOUT_DEFAULTS
    };
    assert_eq!(filled(template(true), bare), Value::Null);
}

#[test]
fn only_template_errors_count_as_invalid() {
    let status = |code: u16, reason: &str, message: &str, fields: &[&str]| -> Status {
        let causes: Vec<_> = fields
            .iter()
            .map(|field| json!({ "field": field, "message": "m", "reason": "r" }))
            .collect();
        serde_json::from_value(
            json!({ "status": "Failure", "code": code, "reason": reason, "message": message,
            "details": { "name": "dry-run-x", "causes": causes } }),
        )
        .unwrap()
    };
    let unread =
        r#"PodTemplate in version "v1" cannot be handled as a PodTemplate: json: cannot unmarshal string"#;
    for (mistake, status) in [
        (
            true,
            status(
                422,
                "Invalid",
                "",
                &["template.spec.containers[0].image", "template.labels"],
            ),
        ),
        (true, status(400, "BadRequest", unread, &[])),
        (
            false,
            status(
                422,
                "Invalid",
                "ValidatingAdmissionPolicy 'team' with binding 'team' denied request: no team",
                &[""],
            ),
        ),
        (
            false,
            status(422, "Invalid", "", &["template.spec", "metadata.labels"]),
        ),
        (false, status(422, "Invalid", "", &[])),
        (
            false,
            status(
                400,
                "BadRequest",
                r#"admission webhook "w" denied the request: no"#,
                &[],
            ),
        ),
        (
            false,
            status(
                400,
                "",
                r#"admission webhook "w" denied the request without explanation"#,
                &[],
            ),
        ),
        (
            false,
            status(
                403,
                "Forbidden",
                "exceeded quota: q, requested: count/podtemplates=1",
                &[],
            ),
        ),
    ] {
        assert_eq!(is_template_error(&status), mistake, "{status:?}");
        assert!(Error::Api(Box::new(status)).rejected());
    }
    for (code, reason) in [
        (401, "Unauthorized"),
        (404, "NotFound"),
        (409, "Conflict"),
        (429, "TooManyRequests"),
        (500, "InternalError"),
        (503, "ServiceUnavailable"),
    ] {
        let error = Error::Api(Box::new(status(code, reason, "", &[])));
        assert!(!error.rejected() && !error.denied(), "{error}");
        // A webhook chooses the code of its refusal: it is no conflict, and nothing is missing.
        let denial = r#"admission webhook "w" denied the request: no"#;
        let error = Error::Api(Box::new(status(code, reason, denial, &[])));
        assert!(
            error.denied() && !error.conflict() && !error.not_found() && !error.throttled(),
            "{error}"
        );
        assert_eq!(error.rejected(), code < 500, "{error}");
    }
    let by_policy =
        "pods \"a\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no";
    assert!(Error::Api(Box::new(status(401, "Unauthorized", by_policy, &[]))).rejected());
    let no_role = r#"podtemplates is forbidden: User "system:serviceaccount:kruise-system:kruise-manager" cannot create resource "podtemplates" in API group "" in the namespace "default""#;
    assert!(!Error::Api(Box::new(status(403, "Forbidden", no_role, &[]))).rejected());
    let mut terminating = status(403, "Forbidden", "", &[""]);
    for cause in terminating
        .details
        .iter_mut()
        .flat_map(|details| &mut details.causes)
    {
        cause.reason = "NamespaceTerminating".to_owned();
    }
    assert!(!Error::Api(Box::new(terminating)).rejected());
    assert!(!Error::Transport("gone".into()).rejected());
}

#[test]
fn strict_decoding_error_names_the_users_fields() {
    let message = "PodTemplate in version \"v1\" cannot be handled as a PodTemplate: strict decoding error: unknown field \
        \"template.spec.containers[0].readynessProbe\", unknown field \
        \"template.spec.volumes[1].ephemeral.volumeClaimTemplate.spec.size\"";
    let origins = [VolumeOrigin::Template(0), VolumeOrigin::Claim(0)];
    assert_eq!(
        parse_unknown_fields(message, &origins),
        [
            "spec.template.spec.containers[0].readynessProbe",
            "spec.volumeClaimTemplates[0].spec.size"
        ]
    );
    for hostile in ["", "unknown field \"", "unknown field \"a", "unknown field x\""] {
        assert_eq!(
            parse_unknown_fields(hostile, &[]),
            Vec::<String>::new(),
            "{hostile}"
        );
    }
}

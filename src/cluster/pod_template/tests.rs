//! What is asked and how the answer is read; a real API server's answers are in the cluster tests.
#![allow(clippy::unwrap_used, clippy::panic)]

use super::*;

const FILLED: Defaults = Defaults {
    none: false,
    host_ports: false,
};
const BARE: Defaults = Defaults {
    none: true,
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
    }
}

#[test]
fn claims_take_the_place_of_volumes_and_come_back_as_claims() {
    let asked = templates();
    let (body, kept) = body(&asked);
    assert_eq!(kept, [1]);
    assert_eq!(body["metadata"]["labels"], json!({ "team": "a" }));
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
    let Answer::Good { templates, unknown } = read_back(&asked, &kept, answer, FILLED) else {
        panic!("bad");
    };
    assert_eq!(unknown, ["spec.template.spec.containers[0].imagee"]);
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
    let asked = Templates {
        template: json!({ "spec": { "containers": [] } }),
        claims: Vec::new(),
        labels: Value::Null,
    };
    let (body, kept) = body(&asked);
    assert_eq!(body["template"], asked.template);
    let Answer::Good { templates, .. } = read_back(&asked, &kept, body, FILLED) else {
        panic!("bad");
    };
    assert_eq!(templates, asked);
}

#[test]
fn fields_are_named_as_the_user_has_them() {
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
        assert_eq!(place(field, &[1]), expected);
    }
}

/// What Go writes for nothing of its types.
fn without_artefacts(value: &mut Value) {
    match value {
        Value::Object(all) => {
            all.values_mut().for_each(without_artefacts);
            let nothing = |name: &str| ["metadata", "resources"].contains(&name);
            all.retain(|name, value| !(value.is_null() || nothing(name) && *value == json!({})));
        }
        Value::Array(all) => all.iter_mut().for_each(without_artefacts),
        _ => {}
    }
}

#[test]
fn templates_are_stored_as_the_go_implementation_stores_them() {
    let recorded = include_str!("../../../tests/data/takeover/templates.jsonl");
    assert_eq!(recorded.lines().count(), 42);
    for line in recorded.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        for (defaults, field) in [(FILLED, "stored"), (BARE, "storedWithoutDefaults")] {
            let mut asked = Templates {
                template: line["asked"]["template"].clone(),
                claims: line["asked"]["claims"].as_array().unwrap().clone(),
                labels: Value::Null,
            };
            stored::prepare(&mut asked.template, defaults);
            let (_, kept) = body(&asked);
            let answer = json!({ "template": line["answer"] });
            let Answer::Good {
                mut templates,
                unknown,
            } = read_back(&asked, &kept, answer, defaults)
            else {
                panic!("bad");
            };
            assert_eq!(unknown, Vec::<String>::new());
            let mut expected = line[field].clone();
            without_artefacts(&mut expected);
            without_artefacts(&mut templates.template);
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
fn ports_of_the_host_are_filled_in_where_the_gate_says_so() {
    let ports = json!([{ "containerPort": 80 }, { "containerPort": 81, "hostPort": 8081 }]);
    let template =
        |host: bool| json!({ "spec": { "hostNetwork": host, "containers": [{ "ports": ports }] } });
    let host_ports = Defaults {
        host_ports: true,
        ..FILLED
    };
    let filled = |mut template: Value, defaults| {
        stored::prepare(&mut template, defaults);
        template["spec"]["containers"][0]["ports"][0]["hostPort"].clone()
    };
    assert_eq!(filled(template(true), host_ports), 80);
    assert_eq!(filled(template(false), host_ports), Value::Null);
    assert_eq!(filled(template(true), FILLED), Value::Null);
    let bare = Defaults {
        host_ports: true,
        ..BARE
    };
    assert_eq!(filled(template(true), bare), Value::Null);
}

#[test]
fn only_what_is_wrong_with_the_template_is_a_mistake() {
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
        assert_eq!(is_mistake(&status), mistake, "{status:?}");
    }
}

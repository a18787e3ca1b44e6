//! What is asked and how the answer is read; a real API server's answers are in the cluster tests.
#![allow(clippy::unwrap_used, clippy::panic)]

use super::*;

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
    }
}

#[test]
fn claims_take_the_place_of_volumes_and_come_back_as_claims() {
    let asked = templates();
    let (body, kept) = body(&asked);
    assert_eq!(kept, [1]);
    let volumes = body["template"]["spec"]["volumes"].as_array().unwrap();
    assert_eq!(volumes[0]["name"], "tmp");
    assert_eq!(
        volumes[1]["ephemeral"]["volumeClaimTemplate"]["metadata"]["labels"],
        json!({ "l": "1" })
    );

    let mut answer = body.clone();
    let spec = &mut answer["template"]["spec"];
    spec["volumes"][0]["emptyDir"] = json!({ "medium": "" });
    spec["volumes"][1]["ephemeral"]["volumeClaimTemplate"]["spec"]["volumeMode"] = json!("Filesystem");
    let container = spec["containers"][0].as_object_mut().unwrap();
    container.remove("imagee");
    container.remove("stdin");
    container.insert("imagePullPolicy".into(), json!("Always"));
    let Answer::Good { templates, unknown } = read_back(&asked, &kept, answer) else {
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
            "spec": { "accessModes": ["ReadWriteOnce"], "volumeMode": "Filesystem" },
        })
    );
}

#[test]
fn a_template_without_volumes_gets_none() {
    let asked = Templates {
        template: json!({ "spec": { "containers": [] } }),
        claims: Vec::new(),
    };
    let (body, kept) = body(&asked);
    assert_eq!(body["template"], asked.template);
    let Answer::Good { templates, .. } = read_back(&asked, &kept, body) else {
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

#[test]
fn always_stays_where_nothing_is_said() {
    let container =
        |policy: Value| json!({ "spec": { "containers": [{ "name": "c", "imagePullPolicy": policy }] } });
    let silent = json!({ "spec": { "containers": [{ "name": "c" }, { "name": "new" }] } });
    let mut after = silent.clone();
    keep_pulling(&mut after, &container(json!("Always")));
    assert_eq!(after["spec"]["containers"][0]["imagePullPolicy"], "Always");
    assert_eq!(after["spec"]["containers"][1], json!({ "name": "new" }));
    let mut after = silent.clone();
    keep_pulling(&mut after, &container(json!("IfNotPresent")));
    assert_eq!(after, silent);
    let mut after = container(json!("Never"));
    keep_pulling(&mut after, &container(json!("Always")));
    assert_eq!(after, container(json!("Never")));
}

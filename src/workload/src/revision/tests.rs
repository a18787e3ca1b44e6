//! Against what upstream returns, and the life of a history.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;

use super::*;
use kruise_cluster::pod_template::{Defaults, Templates, unchecked};

const NOBODY: &BTreeMap<String, String> = &BTreeMap::new();

fn owner(name: &str) -> Owner<'_> {
    Owner {
        kind: "CloneSet",
        namespace: "default",
        name,
        uid: "u",
        annotations: NOBODY,
    }
}

fn template(image: &str) -> Value {
    json!({
        "metadata": { "labels": { "app": "a" } },
        "spec": { "containers": [{ "name": "c", "image": image, "resources": {} }] },
    })
}

/// What the API server makes of a wanted revision.
fn stored(wanted: &Wanted, number: i64) -> Revision {
    let object: ControllerRevision =
        serde_json::from_str(&wanted.body(&owner("n"), number)).expect("a ControllerRevision");
    Revision::from(&object)
}

#[test]
fn revisions_are_those_of_the_go_implementation() {
    let vectors = include_str!("../../../../tests/data/go/cloneset-revision.jsonl");
    assert_eq!(vectors.lines().count(), 150);
    for line in vectors.lines() {
        let vector: Value = serde_json::from_str(line).unwrap();
        let set = &vector["cloneset"];
        let claims = set["spec"]["volumeClaimTemplates"].as_array();
        let collisions = vector["collisionCount"]
            .as_i64()
            .map(|count| i32::try_from(count).unwrap());
        let wanted = wanted(
            &owner(set["metadata"]["name"].as_str().unwrap()),
            &set["spec"]["template"],
            claims.map_or(&[][..], Vec::as_slice),
            collisions,
        );
        assert_eq!(json!(wanted.name), vector["name"], "{line}");
        assert_eq!(json!(wanted.data), vector["data"], "{line}");
        assert_eq!(json!(wanted.labels), vector["labels"], "{line}");
        assert_eq!(json!(wanted.annotations), vector["annotations"], "{line}");
    }
}

/// What OpenKruise stored, and what is left of it when Go's nothings are gone, as in our own answers.
#[test]
fn stored_templates_have_the_revisions_of_the_go_implementation() {
    fn without_nulls(value: &mut Value) {
        match value {
            Value::Object(all) => {
                all.values_mut().for_each(without_nulls);
                all.retain(|name, value| !value.is_null() || name == "apiGroup");
            }
            Value::Array(all) => all.iter_mut().for_each(without_nulls),
            _ => {}
        }
    }
    let recorded = include_str!("../../../../tests/data/takeover/templates.jsonl");
    for line in recorded.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let name = line["name"].as_str().unwrap();
        for (template, revision) in [
            ("stored", "revision"),
            ("storedWithoutDefaults", "revisionWithoutDefaults"),
        ] {
            let mut ours = line[template].clone();
            without_nulls(&mut ours);
            let claims = line["storedClaims"].as_array().unwrap();
            let wanted = wanted(&owner(name), &ours, claims, Some(0));
            assert_eq!(json!(short(&wanted.name)), line[revision], "{template} of {name}");
            let hash = &wanted.annotations[keys::VOLUME_CLAIM_TEMPLATE_HASH];
            assert_eq!(json!(hash), line["claimHash"], "{name}");
        }
    }
}

/// Every template of the takeover with other images, and with what the API server has not been asked about.
#[test]
fn other_images_alone_need_no_dry_run() {
    let recorded = include_str!("../../../../tests/data/takeover/templates.jsonl");
    for line in recorded.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let name = &line["name"];
        let old = &line["stored"];
        let known = [
            Revision {
                unfit: Some("no template".to_owned()),
                ..Revision::default()
            },
            Revision {
                data: data(old),
                claim_hash: Some(String::new()),
                ..Revision::default()
            },
        ];
        let checked = |template: &Value, known: &[Revision]| checked(template, &[], known);
        let with = |field: &str, value: &Value| {
            let mut template = old.clone();
            for list in ["containers", "initContainers"] {
                let containers = template["spec"].get_mut(list).and_then(Value::as_array_mut);
                for container in containers.into_iter().flatten() {
                    container[field] = value.clone();
                }
            }
            template
        };
        assert!(checked(old, &known), "{name}");
        for image in ["example.com/other:2", "?"] {
            assert!(
                checked(&with("image", &json!(image)), &known),
                "{image} of {name}"
            );
        }
        for image in [
            json!(""),
            json!(" a:1"),
            json!("a:1 "),
            json!("a\n"),
            json!("ä"),
            json!(1),
            json!(null),
        ] {
            assert!(!checked(&with("image", &image), &known), "{image} of {name}");
        }
        for (field, value) in [
            ("imagePullPolicy", Value::Null),
            ("imagePullPolicy", json!("Sometimes")),
            ("name", json!("other")),
            ("odd", json!(1)),
        ] {
            assert!(!checked(&with(field, &value), &known), "{field} of {name}");
        }
        let mut more = old.clone();
        let containers = more["spec"]["containers"].as_array_mut().unwrap();
        containers.push(containers[0].clone());
        assert!(!checked(&more, &known), "{name}");
        assert!(!checked(old, &known[..1]), "{name}");
        assert!(!checked(old, &[]), "{name}");
        let claim = json!({ "metadata": { "name": "data" }, "spec": {} });
        assert!(!super::checked(old, &[claim], &known), "{name}");
        for hash in [None, Some("1".to_owned())] {
            let mut known = known.clone();
            known[1].claim_hash = hash;
            assert!(!checked(old, &known), "claims of before: {name}");
        }
    }
}

/// While its dry run is refused, a template's revision is made of it as it is stored, and stays once the dry run is taken.
#[test]
fn the_revision_of_an_unchecked_template_stands_for_the_checked_one() {
    let recorded = include_str!("../../../../tests/data/takeover/templates.jsonl");
    let recorded = recorded.lines().map(|line| serde_json::from_str(line).unwrap());
    let numbers = |cpu: Value, size: Value| {
        let container = json!({ "name": "c", "image": "i", "imagePullPolicy": "Always", "resources": { "limits": { "cpu": cpu } } });
        json!({ "metadata": { "labels": { "limits": "1" } }, "spec": { "containers": [container],
            "volumes": [{ "name": "v", "emptyDir": { "sizeLimit": size } }] } })
    };
    let (asked, checked) = (
        numbers(json!(0.5), json!(1024)),
        numbers(json!("500m"), json!("1Ki")),
    );
    let more = json!({ "asked": { "template": asked }, "stored": checked, "storedWithoutDefaults": checked });
    for line in recorded.chain([more]) {
        for (none, field) in [(false, "stored"), (true, "storedWithoutDefaults")] {
            let asked = Templates {
                template: line["asked"]["template"].clone(),
                ..Templates::default()
            };
            let defaults = Defaults {
                none,
                ..Defaults::default()
            };
            let unchecked = unchecked(asked, defaults).template;
            assert_eq!(no_template(&unchecked), None, "{}", line["name"]);
            let known = [Revision {
                data: data(&unchecked),
                ..Revision::default()
            }];
            let found = stands_for(&line[field], &known, Stored::of(none));
            assert!(found.is_some(), "{field} of {}: {unchecked}", line["name"]);
        }
    }
}

/// Kubernetes 1.34 and later leave out what Go wrote for nothing before.
#[test]
fn what_later_releases_leave_out_is_no_other_revision() {
    let vectors = include_str!("../../../../tests/data/go/cloneset-revision.jsonl");
    for line in vectors.lines() {
        let vector: Value = serde_json::from_str(line).unwrap();
        let mut template = vector["cloneset"]["spec"]["template"].clone();
        template["metadata"]
            .as_object_mut()
            .unwrap()
            .remove("creationTimestamp");
        for container in template["spec"]["containers"].as_array_mut().unwrap() {
            if container["resources"] == json!({}) {
                container.as_object_mut().unwrap().remove("resources");
            }
        }
        assert_eq!(json!(data(&template)), vector["data"]);
    }
}

#[test]
fn claim_templates_hash_as_the_reference_says() {
    let claim = json!({
        "metadata": { "name": "pvc-1", "labels": { "no": "matter" } },
        "spec": {
            "resources": { "requests": { "storage": "1Gi" }, "limits": { "storage": "2Gi" } },
            "accessModes": ["ReadWriteOnce"],
        },
    });
    assert_eq!(claim_hash(std::slice::from_ref(&claim)).unwrap(), "1129974074");
    assert_eq!(claim_hash(&[]), None);
    let mut other = claim.clone();
    other["metadata"]["name"] = json!("a");
    assert_eq!(
        claim_hash(&[claim.clone(), other.clone()]),
        claim_hash(&[other, claim])
    );
}

#[test]
fn the_body_holds_the_bytes_that_go_would_send() {
    let mut template = template("i");
    template["metadata"]["annotations"] = json!({ "note": "a<b>&c" });
    let wanted = wanted(&owner("n"), &template, &[], None);
    let body = wanted.body(&owner("n"), 7);
    assert!(body.contains(&format!("\"data\":{}", wanted.data)), "{body}");
    assert!(wanted.data.contains(r"a\u003cb\u003e\u0026c"));
    let back = stored(&wanted, 7);
    assert_eq!(
        (back.number, &back.data, &back.name),
        (7, &wanted.data, &wanted.name)
    );
    assert_eq!(back.claim_hash.as_deref(), Some(""));
    let mut with_nothing = template;
    with_nothing["metadata"]["creationTimestamp"] = Value::Null;
    assert_eq!(back.template().unwrap(), with_nothing);
}

#[test]
fn a_roll_back_takes_the_old_revision_up_again() {
    let set = owner("n");
    let of = |image: &str, claims: &[Value]| wanted(&set, &template(image), claims, None);
    let mut known = vec![stored(&of("i:1", &[]), 1), stored(&of("i:2", &[]), 2)];
    let name = |image: &str| of(image, &[]).name;
    assert_eq!(plan(&of("i:2", &[]), &known), Step::Use { name: name("i:2") });
    assert_eq!(
        plan(&of("i:1", &[]), &known),
        Step::Promote {
            name: name("i:1"),
            number: 3,
            claim_hash: None
        }
    );
    assert_eq!(plan(&of("i:3", &[]), &known), Step::Create { number: 3 });
    assert_eq!(
        plan(&of("i:3", &[]), &[] as &[Revision]),
        Step::Create { number: 1 }
    );

    let claims = [json!({ "metadata": { "name": "p" }, "spec": {} })];
    let changed = of("i:2", &claims);
    assert_eq!(
        plan(&changed, &known),
        Step::Use { name: name("i:2") },
        "claims alone are no revision"
    );
    let Step::Promote { claim_hash: hash, .. } = plan(&of("i:1", &claims), &known) else {
        panic!("no roll-back");
    };
    assert_eq!(hash, claim_hash(&claims));

    known[0].number = 3;
    sort(&mut known);
    assert_eq!(plan(&of("i:1", &[]), &known), Step::Use { name: name("i:1") });
}

#[test]
fn a_name_that_is_taken_gives_way() {
    let set = owner("n");
    let first = wanted(&set, &template("i"), &[], None);
    let second = first.renamed(&set, 1);
    assert_ne!(first.name, second.name);
    assert_eq!(second.name, wanted(&set, &template("i"), &[], Some(1)).name);
    assert_eq!(first.labels, second.labels, "the label keeps the first hash");
    assert!(second.is(&stored(&first, 1)));
    let mut taken = stored(&first, 1);
    taken.data = "{}".into();
    assert!(!first.is(&taken));
}

#[test]
fn numeric_hashes_of_old_releases_tell_revisions_apart() {
    let mut one = wanted(&owner("n"), &template("i"), &[], None);
    let mut other = stored(&one, 1);
    one.labels.insert(keys::REVISION_HASH.into(), "12".into());
    assert!(one.is(&other), "a word and a number say nothing");
    other.labels.insert(keys::REVISION_HASH.into(), "13".into());
    assert!(!one.is(&other));
}

#[test]
fn long_names_are_cut() {
    let long = "x".repeat(253);
    let name = wanted(&owner(&long), &template("i"), &[], None).name;
    assert!(name.starts_with(&format!("{}-", "x".repeat(223))), "{name}");
    assert!(name.len() <= 253);
    assert_eq!(label(&name), short(&name));
    assert!(same(label(&name), &name));
    assert_eq!(label("n-1"), "n-1");
}

#[test]
fn the_current_revision_is_the_status_s_while_it_is_there() {
    let known = [Revision {
        name: "n-1".into(),
        ..Revision::default()
    }];
    assert_eq!(current("n-1", "n-2", &known), "n-1");
    assert_eq!(current("n-0", "n-2", &known), "n-2");
    assert_eq!(current("", "n-2", &known), "n-2");
}

#[test]
fn a_stored_template_with_defaults_is_found_again() {
    let known = [
        stored(&wanted(&owner("n"), &template("i:1"), &[], None), 1),
        stored(&wanted(&owner("n"), &template("i:2"), &[], None), 2),
    ];
    let stands_for = |template: &Value| stands_for(template, &known, Stored::WithDefaults);
    assert_eq!(stands_for(&template("i:1")), known[0].template());
    assert_eq!(stands_for(&template("i:3")), None);
    let mut filled = template("i:1");
    filled["spec"]["dnsPolicy"] = json!("ClusterFirst");
    filled["spec"]["containers"][0]["imagePullPolicy"] = json!("Always");
    assert_eq!(stands_for(&filled), known[0].template());
    filled["spec"]["containers"][0]["imagePullPolicy"] = json!("IfNotPresent");
    assert_eq!(stands_for(&filled), None);
}

/// Anybody who may write revisions can leave one that is the same but for a field of a type that Pods do not have.
#[test]
fn the_newest_revision_that_can_be_used_stands_for_a_template_or_else_the_one_of_its_bytes() {
    let revision = |template: &Value, number| stored(&wanted(&owner("n"), template, &[], None), number);
    let short = template("i:1");
    let mut long = short.clone();
    long["spec"]["dnsPolicy"] = json!("ClusterFirst");
    let other = revision(&template("i:2"), 3);
    let unfit = Revision {
        unfit: Some("env is no list".to_owned()),
        ..revision(&long, 9)
    };
    let found = |known: &[Revision]| stands_for(&short, known, Stored::WithDefaults);
    let (first, second) = (revision(&short, 1), revision(&long, 2));
    assert_eq!(
        found(&[first.clone(), second.clone()]),
        second.template(),
        "no other is made"
    );
    let known = [first.clone(), second, other];
    assert_eq!(found(&known), first.template(), "its bytes");
    assert_eq!(found(&[first.clone(), unfit.clone()]), first.template());
    assert_eq!(found(&[unfit]), None);
}

/// With gate `TemplateNoDefaults` a pull policy is a change, as it is to OpenKruise; the switch of the gate alone is none.
#[test]
fn a_pull_policy_makes_another_revision_where_none_is_filled_in() {
    let bare = template("i:1");
    let mut said = bare.clone();
    said["spec"]["containers"][0]["imagePullPolicy"] = json!("Always");
    for (one, other) in [(&bare, &said), (&said, &bare)] {
        let known = [stored(&wanted(&owner("n"), one, &[], None), 1)];
        for gate in [Stored::WithDefaults, Stored::AsAsked] {
            assert!(stands_for(one, &known, gate).is_some(), "{gate:?}");
        }
        assert!(stands_for(other, &known, Stored::WithDefaults).is_some());
        assert_eq!(stands_for(other, &known, Stored::AsAsked), None);
    }
}

fn history() -> impl Strategy<Value = Vec<Revision>> {
    proptest::collection::btree_set((0_i64..40, 0_u8..40), 0..12).prop_map(|numbers| {
        let mut all: Vec<_> = numbers
            .into_iter()
            .map(|(number, name)| Revision {
                name: format!("n-{name}"),
                number,
                ..Revision::default()
            })
            .collect();
        all.dedup_by_key(|revision| revision.name.clone());
        sort(&mut all);
        all
    })
}

proptest! {
    /// What is used stays, as many of the rest as the limit says, and those are the newest.
    #[test]
    fn trimming_keeps_what_is_used_and_the_newest(
        known in history(),
        used in proptest::collection::btree_set(0_u8..40, 0..4),
        long in any::<bool>(),
        limit in -1_i32..6,
    ) {
        let used: Vec<String> = used.iter().map(|at| if long { format!("n-{at}") } else { at.to_string() }).collect();
        let used: BTreeSet<&str> = used.iter().map(String::as_str).collect();
        let gone = trim(&known, &used, limit);
        let idle: Vec<_> = known.iter().filter(|one| !used.contains(&*one.name) && !used.contains(short(&one.name))).collect();
        prop_assert_eq!(idle.len() - gone.len(), idle.len().min(usize::try_from(limit).unwrap_or(0)));
        let oldest: Vec<_> = idle.iter().take(gone.len()).map(|one| one.name.clone()).collect();
        prop_assert_eq!(&gone, &oldest);
        let left: Vec<_> = known.into_iter().filter(|one| !gone.contains(&one.name)).collect();
        prop_assert!(trim(&left, &used, limit).is_empty());
    }

    /// Carrying a plan out makes the wanted revision the newest, and nothing more is planned.
    #[test]
    fn a_plan_that_is_carried_out_is_done(images in proptest::collection::vec(0_u8..4, 1..12)) {
        let mut known: Vec<Revision> = Vec::new();
        for image in images {
            let wanted = wanted(&owner("n"), &template(&format!("i:{image}")), &[], None);
            match plan(&wanted, &known) {
                Step::Use { .. } => {}
                Step::Promote { name, number, .. } => {
                    known.iter_mut().find(|one| one.name == name).unwrap().number = number;
                }
                Step::Create { number } => known.push(stored(&wanted, number)),
            }
            sort(&mut known);
            prop_assert_eq!(plan(&wanted, &known), Step::Use { name: wanted.name.clone() });
            prop_assert!(known.len() <= 4);
        }
    }
}

/// The API server stores any object as a revision's data.
#[test]
fn a_revision_that_holds_no_pod_template_is_known_as_such_and_is_not_the_current_one() {
    let stored = |data: Value| {
        let object = json!({ "metadata": { "name": "web-1" }, "revision": 1, "data": data });
        Revision::from(&serde_json::from_value::<ControllerRevision>(object).unwrap())
    };
    let fit = json!({ "metadata": {}, "spec": { "containers": [{ "name": "a", "image": "a:1" }] } });
    let whole = stored(json!({ "spec": { "template": fit } }));
    assert_eq!(
        (
            whole.unfit.as_ref(),
            current("web-1", "web-2", std::slice::from_ref(&whole))
        ),
        (None, "web-1")
    );
    for (data, why) in [
        (json!({}), "spec.template is missing"),
        (json!({ "spec": "x" }), "spec.template is missing"),
        (json!({ "spec": { "template": "x" } }), "invalid type"),
        (json!({ "spec": { "template": {} } }), "no containers"),
        (json!({ "spec": { "template": { "spec": "x" } } }), "invalid type"),
        (
            json!({ "spec": { "template": { "spec": { "containers": [] } } } }),
            "no containers",
        ),
        (
            json!({ "spec": { "template": { "spec": { "containers": ["x"] } } } }),
            "invalid type",
        ),
        (
            json!({ "spec": { "template": { "spec": { "containers": [{ "name": "a", "env": {} }] } } } }),
            "invalid type",
        ),
        (
            json!({ "spec": { "template": { "metadata": { "labels": { "a": 1 } }, "spec": { "containers": [{ "name": "a" }] } } } }),
            "invalid type",
        ),
    ] {
        let odd = stored(data.clone());
        let told = odd.unfit.clone().unwrap_or_default();
        assert!(told.contains(why), "{data}: {told}");
        assert_eq!(current("web-1", "web-2", &[odd]), "web-2", "{data}");
    }
}

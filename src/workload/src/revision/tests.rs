//! Compares with upstream's results, and tests the life of a history.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;

use super::*;
use kruise_cluster::pod_template::{Defaulting, Templates, without_dry_run};

const NO_ANNOTATIONS: &BTreeMap<String, String> = &BTreeMap::new();

fn owner(name: &str) -> RevisionOwner<'_> {
    RevisionOwner {
        kind: "CloneSet",
        namespace: "default",
        name,
        uid: "u",
        annotations: NO_ANNOTATIONS,
    }
}

fn template(image: &str) -> Value {
    json!({
        "metadata": { "labels": { "app": "a" } },
        "spec": { "containers": [{ "name": "c", "image": image, "resources": {} }] },
    })
}

/// The desired revision as the API server stores it.
fn stored_revision(desired: &DesiredRevision, number: i64) -> Revision {
    let object: ControllerRevision =
        serde_json::from_str(&desired.request_body(&owner("n"), number)).expect("a ControllerRevision");
    Revision::from(&object)
}

#[test]
fn revisions_match_go() {
    let vectors = include_str!("../../../../tests/data/go/cloneset-revision.jsonl");
    assert_eq!(vectors.lines().count(), 150);
    for line in vectors.lines() {
        let vector: Value = serde_json::from_str(line).unwrap();
        let set = &vector["cloneset"];
        let claims = set["spec"]["volumeClaimTemplates"].as_array();
        let collisions = vector["collisionCount"]
            .as_i64()
            .map(|count| i32::try_from(count).unwrap());
        let desired = desired_revision(
            &owner(set["metadata"]["name"].as_str().unwrap()),
            &set["spec"]["template"],
            claims.map_or(&[][..], Vec::as_slice),
            collisions,
        );
        assert_eq!(json!(desired.name), vector["name"], "{line}");
        assert_eq!(json!(desired.data), vector["data"], "{line}");
        assert_eq!(json!(desired.labels), vector["labels"], "{line}");
        assert_eq!(json!(desired.annotations), vector["annotations"], "{line}");
    }
}

/// Data that OpenKruise stored, and the same without Go's empty values, as in our own responses.
#[test]
fn stored_template_revisions_match_go() {
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
            let desired = desired_revision(&owner(name), &ours, claims, Some(0));
            assert_eq!(
                json!(short_hash(&desired.name)),
                line[revision],
                "{template} of {name}"
            );
            let hash = &desired.annotations[keys::VOLUME_CLAIM_TEMPLATE_HASH];
            assert_eq!(json!(hash), line["claimHash"], "{name}");
        }
    }
}

/// Every template of the takeover data with other images, and with changes that need a dry run.
#[test]
fn image_change_alone_needs_no_dry_run() {
    let recorded = include_str!("../../../../tests/data/takeover/templates.jsonl");
    for line in recorded.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let name = &line["name"];
        let old = &line["stored"];
        let revisions = [
            Revision {
                invalid_reason: Some("no template".to_owned()),
                ..Revision::default()
            },
            Revision {
                data: encode_template(old),
                claim_hash: Some(String::new()),
                ..Revision::default()
            },
        ];
        let checked = |template: &Value, known: &[Revision]| matches_except_images(template, &[], known);
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
        assert!(checked(old, &revisions), "{name}");
        for image in ["example.com/other:2", "?"] {
            assert!(
                checked(&with("image", &json!(image)), &revisions),
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
            assert!(!checked(&with("image", &image), &revisions), "{image} of {name}");
        }
        for (field, value) in [
            ("imagePullPolicy", Value::Null),
            ("imagePullPolicy", json!("Sometimes")),
            ("name", json!("other")),
            ("odd", json!(1)),
        ] {
            assert!(!checked(&with(field, &value), &revisions), "{field} of {name}");
        }
        let mut more = old.clone();
        let containers = more["spec"]["containers"].as_array_mut().unwrap();
        containers.push(containers[0].clone());
        assert!(!checked(&more, &revisions), "{name}");
        assert!(!checked(old, &revisions[..1]), "{name}");
        assert!(!checked(old, &[]), "{name}");
        let claim = json!({ "metadata": { "name": "data" }, "spec": {} });
        assert!(!super::matches_except_images(old, &[claim], &revisions), "{name}");
        for hash in [None, Some("1".to_owned())] {
            let mut revisions = revisions.clone();
            revisions[1].claim_hash = hash;
            assert!(!checked(old, &revisions), "previous claims: {name}");
        }
    }
}

/// While its dry run is refused, the revision of a template is created as stored, and is kept once the dry run is
/// accepted.
#[test]
fn unchecked_template_is_equivalent_to_checked_one() {
    let recorded = include_str!("../../../../tests/data/takeover/templates.jsonl");
    let recorded = recorded.lines().map(|line| serde_json::from_str(line).unwrap());
    let numbers = |cpu: Value, size: Value| {
        let container = json!({ "name": "c", "image": "i", "imagePullPolicy": "Always", "resources": { "limits": { "cpu": cpu } } });
        json!({ "metadata": { "labels": { "limits": "1" } }, "spec": { "containers": [container],
            "volumes": [{ "name": "v", "emptyDir": { "sizeLimit": size } }] } })
    };
    let (requested, checked) = (
        numbers(json!(0.5), json!(1024)),
        numbers(json!("500m"), json!("1Ki")),
    );
    let more =
        json!({ "asked": { "template": requested }, "stored": checked, "storedWithoutDefaults": checked });
    for line in recorded.chain([more]) {
        for (none, field) in [(false, "stored"), (true, "storedWithoutDefaults")] {
            let requested = Templates {
                template: line["asked"]["template"].clone(),
                ..Templates::default()
            };
            let defaults = Defaulting {
                disabled: none,
                ..Defaulting::default()
            };
            let unchecked = without_dry_run(requested, defaults).template;
            assert_eq!(template_error(&unchecked), None, "{}", line["name"]);
            let revisions = [Revision {
                data: encode_template(&unchecked),
                ..Revision::default()
            }];
            let found = equivalent_template(&line[field], &revisions, TemplateStorage::from_gate(none));
            assert!(found.is_some(), "{field} of {}: {unchecked}", line["name"]);
        }
    }
}

/// Kubernetes 1.34 and later omit fields that Go wrote as empty before.
#[test]
fn fields_later_releases_omit_keep_the_revision() {
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
        assert_eq!(json!(encode_template(&template)), vector["data"]);
    }
}

#[test]
fn claim_template_hash_matches_reference() {
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
fn revision_body_bytes_match_go() {
    let mut template = template("i");
    template["metadata"]["annotations"] = json!({ "note": "a<b>&c" });
    let desired = desired_revision(&owner("n"), &template, &[], None);
    let body = desired.request_body(&owner("n"), 7);
    assert!(body.contains(&format!("\"data\":{}", desired.data)), "{body}");
    assert!(desired.data.contains(r"a\u003cb\u003e\u0026c"));
    let back = stored_revision(&desired, 7);
    assert_eq!(
        (back.number, &back.data, &back.name),
        (7, &desired.data, &desired.name)
    );
    assert_eq!(back.claim_hash.as_deref(), Some(""));
    let mut with_nothing = template;
    with_nothing["metadata"]["creationTimestamp"] = Value::Null;
    assert_eq!(back.template().unwrap(), with_nothing);
}

#[test]
fn rollback_promotes_the_old_revision() {
    let set = owner("n");
    let desired_for = |image: &str, claims: &[Value]| desired_revision(&set, &template(image), claims, None);
    let mut revisions = vec![
        stored_revision(&desired_for("i:1", &[]), 1),
        stored_revision(&desired_for("i:2", &[]), 2),
    ];
    let name = |image: &str| desired_for(image, &[]).name;
    assert_eq!(
        plan(&desired_for("i:2", &[]), &revisions),
        RevisionAction::UseNewest { name: name("i:2") }
    );
    assert_eq!(
        plan(&desired_for("i:1", &[]), &revisions),
        RevisionAction::Promote {
            name: name("i:1"),
            number: 3,
            claim_hash: None
        }
    );
    assert_eq!(
        plan(&desired_for("i:3", &[]), &revisions),
        RevisionAction::Create { number: 3 }
    );
    assert_eq!(
        plan(&desired_for("i:3", &[]), &[] as &[Revision]),
        RevisionAction::Create { number: 1 }
    );

    let claims = [json!({ "metadata": { "name": "p" }, "spec": {} })];
    let changed = desired_for("i:2", &claims);
    assert_eq!(
        plan(&changed, &revisions),
        RevisionAction::UseNewest { name: name("i:2") },
        "claims alone create no revision"
    );
    let RevisionAction::Promote { claim_hash: hash, .. } = plan(&desired_for("i:1", &claims), &revisions)
    else {
        panic!("no roll-back");
    };
    assert_eq!(hash, claim_hash(&claims));

    revisions[0].number = 3;
    sort(&mut revisions);
    assert_eq!(
        plan(&desired_for("i:1", &[]), &revisions),
        RevisionAction::UseNewest { name: name("i:1") }
    );
}

#[test]
fn name_collision_changes_the_revision_name() {
    let set = owner("n");
    let first = desired_revision(&set, &template("i"), &[], None);
    let second = first.with_collisions(set.name, 1);
    assert_ne!(first.name, second.name);
    assert_eq!(
        second.name,
        desired_revision(&set, &template("i"), &[], Some(1)).name
    );
    assert_eq!(first.labels, second.labels, "the label keeps the first hash");
    assert!(second.matches(&stored_revision(&first, 1)));
    let mut existing = stored_revision(&first, 1);
    existing.data = "{}".into();
    assert!(!first.matches(&existing));
}

#[test]
fn numeric_hash_labels_distinguish_revisions() {
    let mut desired = desired_revision(&owner("n"), &template("i"), &[], None);
    let mut other = stored_revision(&desired, 1);
    desired.labels.insert(keys::REVISION_HASH.into(), "12".into());
    assert!(desired.matches(&other), "only numeric hashes are compared");
    other.labels.insert(keys::REVISION_HASH.into(), "13".into());
    assert!(!desired.matches(&other));
}

#[test]
fn long_revision_names_are_truncated() {
    let long = "x".repeat(253);
    let name = desired_revision(&owner(&long), &template("i"), &[], None).name;
    assert!(name.starts_with(&format!("{}-", "x".repeat(223))), "{name}");
    assert!(name.len() <= 253);
    assert_eq!(revision_label(&name), short_hash(&name));
    assert!(same_revision(revision_label(&name), &name));
    assert_eq!(revision_label("n-1"), "n-1");
}

#[test]
fn current_revision_is_that_of_the_status_if_it_exists() {
    let revisions = [Revision {
        name: "n-1".into(),
        ..Revision::default()
    }];
    assert_eq!(current_revision("n-1", "n-2", &revisions), "n-1");
    assert_eq!(current_revision("n-0", "n-2", &revisions), "n-2");
    assert_eq!(current_revision("", "n-2", &revisions), "n-2");
}

#[test]
fn defaulted_template_finds_its_revision() {
    let revisions = [
        stored_revision(&desired_revision(&owner("n"), &template("i:1"), &[], None), 1),
        stored_revision(&desired_revision(&owner("n"), &template("i:2"), &[], None), 2),
    ];
    let stands_for =
        |template: &Value| equivalent_template(template, &revisions, TemplateStorage::WithDefaults);
    assert_eq!(stands_for(&template("i:1")), revisions[0].template());
    assert_eq!(stands_for(&template("i:3")), None);
    let mut filled = template("i:1");
    filled["spec"]["dnsPolicy"] = json!("ClusterFirst");
    filled["spec"]["containers"][0]["imagePullPolicy"] = json!("Always");
    assert_eq!(stands_for(&filled), revisions[0].template());
    filled["spec"]["containers"][0]["imagePullPolicy"] = json!("IfNotPresent");
    assert_eq!(stands_for(&filled), None);
}

/// A user who may write revisions can leave one that only differs in a field of an invalid type.
#[test]
fn equivalent_template_prefers_newest_valid_revision() {
    let revision = |template: &Value, number| {
        stored_revision(&desired_revision(&owner("n"), template, &[], None), number)
    };
    let short = template("i:1");
    let mut long = short.clone();
    long["spec"]["dnsPolicy"] = json!("ClusterFirst");
    let other = revision(&template("i:2"), 3);
    let invalid = Revision {
        invalid_reason: Some("env is no list".to_owned()),
        ..revision(&long, 9)
    };
    let found = |known: &[Revision]| equivalent_template(&short, known, TemplateStorage::WithDefaults);
    let (first, second) = (revision(&short, 1), revision(&long, 2));
    assert_eq!(
        found(&[first.clone(), second.clone()]),
        second.template(),
        "the newest equivalent one is used"
    );
    let revisions = [first.clone(), second, other];
    assert_eq!(found(&revisions), first.template(), "its bytes");
    assert_eq!(found(&[first.clone(), invalid.clone()]), first.template());
    assert_eq!(found(&[invalid]), None);
}

/// With gate `TemplateNoDefaults` a pull policy is a change, as in OpenKruise; switching the gate alone is none.
#[test]
fn pull_policy_changes_revision_without_defaults() {
    let bare = template("i:1");
    let mut with_policy = bare.clone();
    with_policy["spec"]["containers"][0]["imagePullPolicy"] = json!("Always");
    for (one, other) in [(&bare, &with_policy), (&with_policy, &bare)] {
        let revisions = [stored_revision(&desired_revision(&owner("n"), one, &[], None), 1)];
        for gate in [TemplateStorage::WithDefaults, TemplateStorage::AsWritten] {
            assert!(equivalent_template(one, &revisions, gate).is_some(), "{gate:?}");
        }
        assert!(equivalent_template(other, &revisions, TemplateStorage::WithDefaults).is_some());
        assert_eq!(
            equivalent_template(other, &revisions, TemplateStorage::AsWritten),
            None
        );
    }
}

/// Users choose how many revisions are kept, and how large a template is.
#[test]
fn large_template_is_compared_with_many_revisions() {
    let stored = |number: i64| {
        let template = template(&format!("i:{number}"));
        stored_revision(&desired_revision(&owner("n"), &template, &[], None), number)
    };
    let revisions: Vec<Revision> = (0..3_000).map(stored).collect();
    let mut large = template("i:large");
    let selected = (0..20_000).map(|at| (format!("l{at}"), json!("x")));
    large["spec"]["nodeSelector"] = Value::Object(selected.collect());
    let begin = std::time::Instant::now();
    assert_eq!(
        equivalent_template(&large, &revisions, TemplateStorage::WithDefaults),
        None
    );
    assert!(begin.elapsed().as_secs() < 10, "{:?}", begin.elapsed());
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
    /// Revisions in use are kept, and up to `limit` of the others, the newest ones.
    #[test]
    fn trim_keeps_revisions_in_use_and_the_newest(
        known in history(),
        used in proptest::collection::btree_set(0_u8..40, 0..4),
        long in any::<bool>(),
        limit in -1_i32..6,
    ) {
        let used: Vec<String> = used.iter().map(|at| if long { format!("n-{at}") } else { at.to_string() }).collect();
        let used: BTreeSet<&str> = used.iter().map(String::as_str).collect();
        let deleted = revisions_to_delete(&known, &used, limit);
        let unused: Vec<_> = known.iter().filter(|one| !used.contains(&*one.name) && !used.contains(short_hash(&one.name))).collect();
        prop_assert_eq!(unused.len() - deleted.len(), unused.len().min(usize::try_from(limit).unwrap_or(0)));
        let oldest: Vec<_> = unused.iter().take(deleted.len()).map(|one| one.name.clone()).collect();
        prop_assert_eq!(&deleted, &oldest);
        let remaining: Vec<_> = known.into_iter().filter(|one| !deleted.contains(&one.name)).collect();
        prop_assert!(revisions_to_delete(&remaining, &used, limit).is_empty());
    }

    /// After the plan is executed, the desired revision is the newest, and nothing more is planned.
    #[test]
    fn executed_revision_plan_uses_the_newest(images in proptest::collection::vec(0_u8..4, 1..12)) {
        let mut revisions: Vec<Revision> = Vec::new();
        for image in images {
            let desired = desired_revision(&owner("n"), &template(&format!("i:{image}")), &[], None);
            match plan(&desired, &revisions) {
                RevisionAction::UseNewest { .. } => {}
                RevisionAction::Promote { name, number, .. } => {
                    revisions.iter_mut().find(|one| one.name == name).unwrap().number = number;
                }
                RevisionAction::Create { number } => revisions.push(stored_revision(&desired, number)),
            }
            sort(&mut revisions);
            prop_assert_eq!(plan(&desired, &revisions), RevisionAction::UseNewest { name: desired.name.clone() });
            prop_assert!(revisions.len() <= 4);
        }
    }
}

/// The API server stores any object as a revision's data.
#[test]
fn revision_without_pod_template_is_never_current() {
    let stored = |data: Value| {
        let object = json!({ "metadata": { "name": "web-1" }, "revision": 1, "data": data });
        Revision::from(&serde_json::from_value::<ControllerRevision>(object).unwrap())
    };
    let valid = json!({ "metadata": {}, "spec": { "containers": [{ "name": "a", "image": "a:1" }] } });
    let valid_revision = stored(json!({ "spec": { "template": valid } }));
    assert_eq!(
        (
            valid_revision.invalid_reason.as_ref(),
            current_revision("web-1", "web-2", std::slice::from_ref(&valid_revision))
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
        let invalid = stored(data.clone());
        let reason = invalid.invalid_reason.clone().unwrap_or_default();
        assert!(reason.contains(why), "{data}: {reason}");
        assert_eq!(current_revision("web-1", "web-2", &[invalid]), "web-2", "{data}");
    }
}

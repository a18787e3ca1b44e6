//! Against what upstream's converter returns.

use super::super::super::tests::through;
use super::super::super::tests::vectors::{Differing, counts, recorded};
use super::*;
use crate::{cloneset, v1alpha1};

/// In v1beta1 ours keeps the fields of a rolling update of an `OnDelete`.
const ON_DELETE_FIELDS: [usize; 9] = [5, 8, 19, 22, 33, 74, 90, 131, 136];
/// In v1beta1 ours has what the spec of v1alpha1 says of pulling ahead where no annotation does.
const PULLED_AHEAD: [usize; 32] = [
    2, 7, 10, 21, 35, 37, 47, 49, 50, 51, 54, 57, 64, 66, 82, 87, 89, 95, 98, 101, 112, 115, 120, 125, 127,
    128, 133, 134, 145, 148, 150, 151,
];
/// In v1alpha1 ours keeps the policy of an `OnDelete`, as an annotation.
const ON_DELETE_POLICY: [usize; 17] = [
    4, 17, 27, 30, 36, 44, 45, 53, 65, 69, 100, 102, 106, 113, 114, 130, 143,
];
/// In v1alpha1 ours says `excludePreparingDelete` as the label.
const EXCLUDED: [usize; 52] = [
    1, 3, 6, 9, 12, 14, 17, 20, 24, 26, 28, 30, 31, 40, 41, 45, 46, 52, 55, 56, 60, 62, 65, 68, 69, 70, 71,
    72, 73, 75, 77, 79, 80, 81, 84, 86, 88, 91, 93, 103, 104, 105, 106, 109, 110, 113, 121, 122, 135, 137,
    138, 139,
];

fn versioned(object: &Value, version: &Value) -> Value {
    let mut object = object.clone();
    object["kind"] = json!("CloneSet");
    object["apiVersion"] = json!(format!("apps.kruise.io/{}", version.as_str().unwrap()));
    object
}

fn without_on_delete_fields(ours: &mut Value) {
    let update = &mut ours["spec"]["updateStrategy"];
    if update["type"] == ON_DELETE {
        update.as_object_mut().unwrap().remove("rollingUpdate");
    }
}

fn without_pulling_ahead(ours: &mut Value, from: &Value) {
    let fields = ours.pointer_mut("/spec/updateStrategy/rollingUpdate/inPlaceUpdateStrategy");
    for fields in fields.into_iter().filter_map(Value::as_object_mut) {
        let unsaid = |key: &str| annotation(from, key).is_none();
        for (field, _) in keys::PRE_DOWNLOAD.into_iter().filter(|(_, key)| unsaid(key)) {
            fields.remove(field);
        }
    }
}

/// Takes away what ours has more than upstream's, and names the line.
fn less(differing: &mut Differing, mut ours: Value, from: &Value) -> Value {
    if ours["apiVersion"] == BETA {
        differing.even("OnDelete's fields", &mut ours, without_on_delete_fields);
        differing.even("pulled ahead", &mut ours, |ours| {
            without_pulling_ahead(ours, from)
        });
    } else {
        differing.even("OnDelete's policy", &mut ours, |ours| {
            take_annotation(ours, keys::CLONESET_POD_UPDATE_POLICY);
        });
        if entry(from, LABELS, keys::CLONESET_EXCLUDE_PREPARING_DELETE).is_none() {
            differing.even("excluded", &mut ours, |ours| exclude(ours, false));
        }
    }
    plain(&bare(&ours))
}

#[test]
fn upstream_s_conversions_hold() {
    let cases = recorded("cloneset");
    let mut differing = Differing::default();
    for (at, case) in cases.iter().enumerate() {
        differing.on(at + 1);
        let object = versioned(&case["in"], &case["from"]);
        let converted = convert(object.clone(), case["to"].as_str().unwrap()).unwrap();
        let expected = plain(&bare(&versioned(&case["out"], &case["to"])));
        let ours = less(&mut differing, converted.clone(), &object);
        assert_eq!(ours, expected, "line {}", at + 1);
        let back = convert(converted.clone(), case["from"].as_str().unwrap()).unwrap();
        assert_eq!(
            meaning(&back),
            meaning(&object),
            "there and back: line {}",
            at + 1
        );
        assert_eq!(meaning(&converted), meaning(&object), "line {}", at + 1);
    }
    differing.are([
        ("OnDelete's fields", &ON_DELETE_FIELDS),
        ("pulled ahead", &PULLED_AHEAD),
        ("OnDelete's policy", &ON_DELETE_POLICY),
        ("excluded", &EXCLUDED),
    ]);
    let ways = [
        ("CloneSet v1alpha1 v1beta1", 68),
        ("CloneSet v1beta1 v1alpha1", 83),
    ];
    assert_eq!(counts(&cases), ways.map(|(way, count)| (way.to_owned(), count)));
}

#[test]
fn our_types_read_and_write_what_upstream_does() {
    for case in &recorded("cloneset") {
        for (object, version) in [(&case["in"], &case["from"]), (&case["out"], &case["to"])] {
            let mut object = versioned(object, version);
            // The API server refuses null where the schema wants an object; the random objects have it.
            if object["spec"]["selector"].is_null() {
                object["spec"]["selector"] = json!({});
            }
            let back = if version == "v1beta1" {
                through::<cloneset::CloneSet>(&object)
            } else {
                through::<v1alpha1::CloneSet>(&object)
            };
            assert_eq!(back, plain(&bare(&object)), "{version} of {case}");
        }
    }
}

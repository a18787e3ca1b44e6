//! Comparison with the results of upstream's converter.

use super::super::super::tests::round_trip;
use super::super::super::tests::vectors::{KnownDifferences, count_by_conversion, read_cases};
use super::*;
use crate::{cloneset, v1alpha1};

/// In v1beta1 ours keeps the fields of a rolling update of an `OnDelete`.
const ON_DELETE_FIELDS: [usize; 9] = [5, 8, 19, 22, 33, 74, 90, 131, 136];
/// In v1beta1 ours has the pre-download fields of the spec of v1alpha1 if there is no annotation.
const PRE_DOWNLOAD_FROM_SPEC: [usize; 32] = [
    2, 7, 10, 21, 35, 37, 47, 49, 50, 51, 54, 57, 64, 66, 82, 87, 89, 95, 98, 101, 112, 115, 120, 125, 127,
    128, 133, 134, 145, 148, 150, 151,
];
/// In v1alpha1 ours keeps the policy of an `OnDelete`, as an annotation.
const ON_DELETE_POLICY: [usize; 17] = [
    4, 17, 27, 30, 36, 44, 45, 53, 65, 69, 100, 102, 106, 113, 114, 130, 143,
];
/// In v1alpha1 ours writes `excludePreparingDelete` as the label.
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

fn without_pre_download(ours: &mut Value, from: &Value) {
    let fields = ours.pointer_mut("/spec/updateStrategy/rollingUpdate/inPlaceUpdateStrategy");
    for fields in fields.into_iter().filter_map(Value::as_object_mut) {
        let not_annotated = |key: &str| annotation(from, key).is_none();
        for (field, _) in keys::PRE_DOWNLOAD
            .into_iter()
            .filter(|(_, key)| not_annotated(key))
        {
            fields.remove(field);
        }
    }
}

/// Removes what only our result has, and records the line.
fn remove_known_differences(differences: &mut KnownDifferences, mut ours: Value, from: &Value) -> Value {
    if ours["apiVersion"] == BETA {
        differences.remove("OnDelete's fields", &mut ours, without_on_delete_fields);
        differences.remove("pulled ahead", &mut ours, |ours| without_pre_download(ours, from));
    } else {
        differences.remove("OnDelete's policy", &mut ours, |ours| {
            remove_annotation(ours, keys::CLONESET_POD_UPDATE_POLICY);
        });
        if metadata_entry(from, LABELS, keys::CLONESET_EXCLUDE_PREPARING_DELETE).is_none() {
            differences.remove("excluded", &mut ours, |ours| set_exclude_label(ours, false));
        }
    }
    without_empty(&without_zero(&ours))
}

#[test]
fn conversions_match_upstream() {
    let cases = read_cases("cloneset");
    let mut differences = KnownDifferences::default();
    for (at, case) in cases.iter().enumerate() {
        differences.set_line(at + 1);
        let object = versioned(&case["in"], &case["from"]);
        let converted = convert(object.clone(), case["to"].as_str().unwrap()).unwrap();
        let expected = without_empty(&without_zero(&versioned(&case["out"], &case["to"])));
        let ours = remove_known_differences(&mut differences, converted.clone(), &object);
        assert_eq!(ours, expected, "line {}", at + 1);
        let back = convert(converted.clone(), case["from"].as_str().unwrap()).unwrap();
        assert_eq!(
            normalized(&back),
            normalized(&object),
            "there and back: line {}",
            at + 1
        );
        assert_eq!(normalized(&converted), normalized(&object), "line {}", at + 1);
    }
    differences.assert_lines([
        ("OnDelete's fields", &ON_DELETE_FIELDS),
        ("pulled ahead", &PRE_DOWNLOAD_FROM_SPEC),
        ("OnDelete's policy", &ON_DELETE_POLICY),
        ("excluded", &EXCLUDED),
    ]);
    let ways = [
        ("CloneSet v1alpha1 v1beta1", 68),
        ("CloneSet v1beta1 v1alpha1", 83),
    ];
    assert_eq!(
        count_by_conversion(&cases),
        ways.map(|(way, count)| (way.to_owned(), count))
    );
}

#[test]
fn our_types_round_trip_upstream_objects() {
    for case in &read_cases("cloneset") {
        for (object, version) in [(&case["in"], &case["from"]), (&case["out"], &case["to"])] {
            let mut object = versioned(object, version);
            // The API server refuses null where the schema requires an object; the random objects have it.
            if object["spec"]["selector"].is_null() {
                object["spec"]["selector"] = json!({});
            }
            let back = if version == "v1beta1" {
                round_trip::<cloneset::CloneSet>(&object)
            } else {
                round_trip::<v1alpha1::CloneSet>(&object)
            };
            assert_eq!(back, without_empty(&without_zero(&object)), "{version} of {case}");
        }
    }
}

//! Comparison with the results of upstream's converter, and round trips.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::super::tests::vectors::{KnownDifferences, count_by_conversion, read_cases};
use super::super::tests::{round_trip, without_empty, without_zero};
use super::*;
use crate::{sidecarset, v1alpha1};

/// In v1beta1 ours keeps that there was a `namespace`, as an annotation.
const NAMESPACES: [usize; 7] = [1, 7, 23, 37, 67, 69, 73];
/// In v1alpha1 ours keeps that the label was one of v1beta1, as an annotation.
const LABELS_OF_V1BETA1: [usize; 7] = [14, 32, 40, 44, 54, 62, 68];

fn convert(object: &Value, to: &str) -> Value {
    let mut object = object.clone();
    match to {
        "v1beta1" => to_v1beta1(&mut object),
        _ => to_v1alpha1(&mut object),
    }
    object
}

fn normalized(object: &Value) -> Value {
    without_empty(&without_zero(object))
}

#[test]
fn conversions_match_upstream() {
    let cases = read_cases("sidecarset");
    let mut differences = KnownDifferences::default();
    for (at, case) in cases.iter().enumerate() {
        differences.set_line(at + 1);
        let object = &case["in"];
        let converted = convert(object, case["to"].as_str().unwrap());
        let mut ours = converted.clone();
        for key in [
            keys::SIDECAR_SET_NAMESPACE_SELECTOR,
            keys::SIDECAR_SET_V1BETA1_VERSION,
        ] {
            differences.remove(key, &mut ours, |ours| drop(remove_annotation(ours, key)));
        }
        assert_eq!(normalized(&ours), normalized(&case["out"]), "line {}", at + 1);
        let back = convert(&converted, case["from"].as_str().unwrap());
        assert_eq!(
            normalized(&back),
            normalized(object),
            "there and back: line {}",
            at + 1
        );
    }
    differences.assert_lines([
        (keys::SIDECAR_SET_NAMESPACE_SELECTOR, &NAMESPACES),
        (keys::SIDECAR_SET_V1BETA1_VERSION, &LABELS_OF_V1BETA1),
    ]);
    let ways = [
        ("SidecarSet v1alpha1 v1beta1", 37),
        ("SidecarSet v1beta1 v1alpha1", 36),
    ];
    assert_eq!(
        count_by_conversion(&cases),
        ways.map(|(way, count)| (way.to_owned(), count))
    );
}

#[test]
fn our_types_round_trip_upstream_objects() {
    for case in &read_cases("sidecarset") {
        for (object, version) in [(&case["in"], &case["from"]), (&case["out"], &case["to"])] {
            let mut object = object.clone();
            object["kind"] = json!("SidecarSet");
            object["apiVersion"] = json!(format!("apps.kruise.io/{}", version.as_str().unwrap()));
            let back = if version == "v1beta1" {
                round_trip::<sidecarset::SidecarSet>(&object)
            } else {
                round_trip::<v1alpha1::SidecarSet>(&object)
            };
            assert_eq!(back, normalized(&object), "{version} of {case}");
        }
    }
}

fn alpha(spec: Value) -> Value {
    json!({ "metadata": { "name": "s" }, "spec": spec })
}

/// A namespace that a writer of v1beta1 replaced is not restored, but one by name becomes the namespace again.
#[test]
fn namespace_is_restored_while_the_selector_has_its_form() {
    let env = json!({ "matchLabels": { "env": "prod" } });
    let object = alpha(json!({ "namespace": "a", "namespaceSelector": env }));
    let mut beta = convert(&object, "v1beta1");
    assert_eq!(convert(&beta, "v1alpha1"), object);
    beta["spec"]["namespaceSelector"]["matchLabels"][keys::NAMESPACE_NAME] = json!("b");
    assert_eq!(
        convert(&beta, "v1alpha1")["spec"],
        json!({ "namespace": "b", "namespaceSelector": env })
    );
    for other in [
        json!({ "matchLabels": { "env": "test" } }),
        json!({ "matchLabels": { keys::NAMESPACE_NAME: "a", "env": "test" } }),
        json!({ "matchLabels": { keys::NAMESPACE_NAME: "a" }, "matchExpressions": [] }),
        json!({}),
        json!(1),
    ] {
        beta["spec"]["namespaceSelector"] = other.clone();
        assert_eq!(
            convert(&beta, "v1alpha1"),
            alpha(json!({ "namespaceSelector": other }))
        );
    }
}

#[test]
fn custom_version_is_a_label_only_if_it_can_be() {
    let with = |label: Value, version: Value| json!({ "metadata": { "labels": { "a": "b", keys::SIDECAR_SET_CUSTOM_VERSION: label } }, "spec": { "customVersion": version } });
    for (label, version, expected) in [
        (json!(null), json!("v1"), json!("v1")),
        (json!(null), json!("not a label"), json!(null)),
        (json!("own"), json!("v1"), json!("v1")),
        (json!("v1"), json!("v1"), json!("v1")),
        (json!("own"), json!("not a label"), json!("own")),
        (json!("own"), json!(null), json!("own")),
    ] {
        let mut beta = with(label.clone(), version.clone());
        if label.is_null() {
            remove_metadata_entry(&mut beta, LABELS, keys::SIDECAR_SET_CUSTOM_VERSION);
        }
        let mut alpha = convert(&beta, "v1alpha1");
        assert_eq!(
            alpha["metadata"]["labels"][keys::SIDECAR_SET_CUSTOM_VERSION],
            expected
        );
        assert_eq!(normalized(&convert(&alpha, "v1beta1")), normalized(&beta));
        // A writer of v1alpha1 names another version.
        alpha["metadata"]["labels"][keys::SIDECAR_SET_CUSTOM_VERSION] = json!("v2");
        assert_eq!(
            normalized(&convert(&alpha, "v1beta1")),
            normalized(&with(label, json!("v2")))
        );
    }
}

fn any_text() -> impl Strategy<Value = Value> {
    prop_oneof![
        4 => "[ab]{0,2}".prop_map(Value::from),
        1 => Just(json!("no label")),
        1 => Just(json!(null)),
        1 => Just(json!(1)),
        1 => Just(json!({})),
    ]
}

fn any_selector() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(json!(null)),
        Just(json!({})),
        Just(json!({ "matchLabels": { "env": "prod" } })),
        any_text().prop_map(|name| json!({ "matchLabels": { keys::NAMESPACE_NAME: name } })),
    ]
}

fn any_set(only_v1alpha1: bool) -> impl Strategy<Value = Value> {
    (
        any_text(),
        any_selector(),
        any_text(),
        "[ab]{0,2}",
        any::<[bool; 3]>(),
    )
        .prop_map(
            move |(namespace, selector, version, label, [first, second, third])| {
                let mut object =
                    json!({ "metadata": { "name": "s" }, "spec": { "namespaceSelector": selector } });
                if only_v1alpha1 {
                    object["spec"]["namespace"] = namespace;
                } else {
                    object["spec"]["customVersion"] = version;
                }
                if first {
                    object["metadata"]["labels"] = json!({ keys::SIDECAR_SET_CUSTOM_VERSION: label });
                }
                if second {
                    object["metadata"]["annotations"] = json!({ "a": "b" });
                }
                if third && object["spec"]["namespaceSelector"].is_null() {
                    object["spec"] = json!({});
                }
                object
            },
        )
}

proptest! {
    /// Nothing is lost in v1beta1: values that mean something are as before.
    #[test]
    fn v1alpha1_round_trips(object in any_set(true)) {
        let back = convert(&convert(&object, "v1beta1"), "v1alpha1");
        prop_assert_eq!(normalized(&back), normalized(&object));
    }

    /// Nor in v1alpha1.
    #[test]
    fn v1beta1_round_trips(object in any_set(false)) {
        let back = convert(&convert(&object, "v1alpha1"), "v1beta1");
        prop_assert_eq!(normalized(&back), normalized(&object));
    }

    /// Annotations of ours may hold anything.
    #[test]
    fn annotations_may_hold_anything(
        object in any_set(true),
        texts in prop::array::uniform2(prop_oneof![
            ".{0,6}".boxed(), Just("null".to_owned()).boxed(), Just("[]".to_owned()).boxed(),
            Just(r#"{"label":1,"customVersion":["a"]}"#.to_owned()).boxed(),
            Just(r#"{"label":"a","customVersion":"b"}"#.to_owned()).boxed(),
        ]),
    ) {
        let mut object = object;
        let [selector, version] = texts;
        object["metadata"]["annotations"] = json!({
            keys::SIDECAR_SET_NAMESPACE_SELECTOR: selector,
            keys::SIDECAR_SET_V1BETA1_VERSION: version,
        });
        for to in ["v1beta1", "v1alpha1"] {
            let converted = convert(&object, to);
            prop_assert_eq!(&converted["metadata"]["name"], "s");
        }
    }
}

#[test]
fn objects_without_a_spec_are_left_alone() {
    for object in [
        json!({ "metadata": {} }),
        json!(1),
        json!({ "metadata": 1, "spec": [] }),
    ] {
        for to in ["v1beta1", "v1alpha1"] {
            assert_eq!(convert(&object, to), object);
        }
    }
}

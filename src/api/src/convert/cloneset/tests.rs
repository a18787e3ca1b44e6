//! Round trips.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;

use super::super::convert;
use super::super::tests::{without_empty, without_zero};
use super::*;

mod vectors;

const ALPHA: &str = "apps.kruise.io/v1alpha1";
const BETA: &str = "apps.kruise.io/v1beta1";

/// An object in v1beta1: with the defaults that a conversion writes, and without the labels and annotations that have
/// no meaning there.
fn normalized(object: &Value) -> Value {
    let mut object = convert(object.clone(), BETA).unwrap();
    let mut update = take_object(&mut object, "updateStrategy");
    update.entry("type").or_insert(json!(ROLLING_UPDATE));
    let rolling = update.entry("rollingUpdate").or_insert(json!({}));
    if rolling["podUpdatePolicy"].as_str().is_none_or(str::is_empty) {
        rolling["podUpdatePolicy"] = json!(RE_CREATE);
    }
    put_object(&mut object, "updateStrategy", update);
    set_exclude_label(&mut object, true);
    set_exclude_label(&mut object, false);
    for (_, key) in keys::PRE_DOWNLOAD {
        remove_annotation(&mut object, key);
    }
    without_empty(&without_zero(&object))
}

fn cloneset(version: &str, spec: Value) -> Value {
    json!({ "apiVersion": version, "kind": "CloneSet", "metadata": { "name": "n" }, "spec": spec })
}

/// A field that a v1beta1 writer cleared is not restored.
#[test]
fn cleared_fields_stay_cleared() {
    let mut alpha = cloneset(ALPHA, json!({ "updateStrategy": { "type": "InPlaceOnly" } }));
    alpha["metadata"]["labels"] = json!({ keys::CLONESET_EXCLUDE_PREPARING_DELETE: "true", "a": "b" });
    alpha["metadata"]["annotations"] = json!({
        keys::IMAGE_PRE_DOWNLOAD_PARALLELISM: "7",
        keys::IMAGE_PRE_DOWNLOAD_MIN_UPDATED_READY_PODS: "10%",
    });
    let mut beta = convert(alpha, BETA).unwrap();
    assert_eq!(beta["spec"]["scaleStrategy"]["excludePreparingDelete"], true);
    let rolling = beta["spec"]["updateStrategy"]["rollingUpdate"]
        .as_object_mut()
        .unwrap();
    assert_eq!(
        rolling.remove("inPlaceUpdateStrategy"),
        Some(json!({ "imagePreDownloadParallelism": 7 }))
    );
    beta["spec"]["scaleStrategy"]["excludePreparingDelete"] = json!(false);
    let alpha = convert(beta, ALPHA).unwrap();
    assert_eq!(alpha["metadata"]["labels"], json!({ "a": "b" }));
    assert_eq!(
        alpha["metadata"]["annotations"],
        json!({ keys::IMAGE_PRE_DOWNLOAD_MIN_UPDATED_READY_PODS: "10%" }),
        "what v1beta1 has no field for is kept"
    );
}

#[test]
fn on_delete_keeps_its_limits_and_its_policy() {
    let strategy = json!({
        "type": "OnDelete",
        "rollingUpdate": { "partition": 3, "maxUnavailable": 1, "podUpdatePolicy": "InPlaceOnly" },
    });
    let beta = cloneset(BETA, json!({ "updateStrategy": strategy }));
    let mut alpha = convert(beta.clone(), ALPHA).unwrap();
    assert_eq!(
        alpha["spec"]["updateStrategy"],
        json!({ "type": "OnDelete", "partition": 3, "maxUnavailable": 1 })
    );
    assert_eq!(
        convert(alpha.clone(), BETA).unwrap()["spec"]["updateStrategy"],
        beta["spec"]["updateStrategy"]
    );
    alpha["spec"]["updateStrategy"]["type"] = json!("ReCreate");
    let beta = convert(alpha, BETA).unwrap();
    assert_eq!(
        beta["spec"]["updateStrategy"]["rollingUpdate"]["podUpdatePolicy"],
        "ReCreate"
    );
    assert_eq!(beta["metadata"], json!({ "name": "n" }));
}

#[test]
fn objects_without_a_spec_are_left_alone() {
    let object = json!({ "apiVersion": ALPHA, "kind": "CloneSet", "metadata": { "name": "n" } });
    let beta = convert(object.clone(), BETA).unwrap();
    assert_eq!(beta.get("spec"), None);
    assert_eq!(convert(beta, ALPHA).unwrap(), object);
}

fn number() -> impl Strategy<Value = Value> {
    prop_oneof![
        (0_i32..99).prop_map(|number| json!(number)),
        (0_i32..99).prop_map(|number| json!(format!("{number}%")))
    ]
}

fn optional_fields(fields: Vec<(&'static str, BoxedStrategy<Value>)>) -> BoxedStrategy<Value> {
    fields
        .into_iter()
        .map(|(name, value)| proptest::option::of(value).prop_map(move |value| (name, value)))
        .collect::<Vec<_>>()
        .prop_map(|fields| {
            let present = fields
                .into_iter()
                .filter_map(|(name, value)| Some((name.to_owned(), value?)));
            Value::Object(present.collect())
        })
        .boxed()
}

fn in_place() -> BoxedStrategy<Value> {
    optional_fields(vec![
        ("gracePeriodSeconds", (0_i32..99).prop_map(|n| json!(n)).boxed()),
        (keys::PRE_DOWNLOAD[0].0, number().boxed()),
        (
            keys::PRE_DOWNLOAD[1].0,
            (0_i32..99).prop_map(|n| json!(n)).boxed(),
        ),
        (
            keys::PRE_DOWNLOAD[2].0,
            (0_i32..99).prop_map(|n| json!(n)).boxed(),
        ),
    ])
}

fn limits() -> Vec<(&'static str, BoxedStrategy<Value>)> {
    vec![
        ("partition", number().boxed()),
        ("maxUnavailable", number().boxed()),
        ("maxSurge", number().boxed()),
        ("paused", any::<bool>().prop_map(|b| json!(b)).boxed()),
        (
            "scatterStrategy",
            Just(json!([{ "key": "a", "value": "b" }])).boxed(),
        ),
        ("later", Just(json!({ "field": 1 })).boxed()),
        ("inPlaceUpdateStrategy", in_place()),
    ]
}

fn one_of(words: &'static [&'static str]) -> BoxedStrategy<Value> {
    proptest::sample::select(words)
        .prop_map(|word| json!(word))
        .boxed()
}

fn scale(reuse: &'static str) -> BoxedStrategy<Value> {
    optional_fields(vec![
        (reuse, any::<bool>().prop_map(|b| json!(b)).boxed()),
        ("podsToDelete", Just(json!(["a"])).boxed()),
        ("maxUnavailable", number().boxed()),
    ])
}

fn metadata() -> BoxedStrategy<Value> {
    let annotations = optional_fields(vec![
        (
            keys::IMAGE_PRE_DOWNLOAD_PARALLELISM,
            one_of(&["3", "x", "20%", ""]),
        ),
        (
            keys::IMAGE_PRE_DOWNLOAD_TIMEOUT_SECONDS,
            one_of(&["60", "soon", "9999999999"]),
        ),
        (
            keys::IMAGE_PRE_DOWNLOAD_MIN_UPDATED_READY_PODS,
            one_of(&["2", "10%"]),
        ),
        ("note", one_of(&["a"])),
    ]);
    let labels = optional_fields(vec![(
        keys::CLONESET_EXCLUDE_PREPARING_DELETE,
        one_of(&["true", "false"]),
    )]);
    (annotations, labels)
        .prop_map(
            |(annotations, labels)| json!({ "name": "n", "annotations": annotations, "labels": labels }),
        )
        .boxed()
}

fn alpha() -> impl Strategy<Value = Value> {
    let mut fields = limits();
    fields.push((
        "type",
        one_of(&["ReCreate", "InPlaceIfPossible", "InPlaceOnly", "OnDelete"]),
    ));
    (
        metadata(),
        optional_fields(vec![
            ("updateStrategy", optional_fields(fields)),
            ("scaleStrategy", scale("disablePVCReuse")),
        ]),
    )
        .prop_map(|(metadata, spec)| {
            let mut object = cloneset(ALPHA, spec);
            object["metadata"] = metadata;
            object
        })
}

fn beta() -> impl Strategy<Value = Value> {
    let mut fields = limits();
    fields.push((
        "podUpdatePolicy",
        one_of(&["ReCreate", "InPlaceIfPossible", "InPlaceOnly"]),
    ));
    let update = optional_fields(vec![
        ("type", one_of(&["RollingUpdate", "OnDelete"])),
        ("rollingUpdate", optional_fields(fields)),
    ]);
    let excluded = any::<bool>();
    (metadata(), update, scale("enablePVCReuse"), excluded).prop_map(
        |(metadata, update, mut scale, excluded)| {
            scale["excludePreparingDelete"] = json!(excluded);
            let mut object = cloneset(BETA, json!({ "scaleStrategy": scale }));
            // Annotations of an object without the block may be the only remains of v1alpha1's settings.
            if !update["rollingUpdate"].is_null() {
                object["metadata"] = metadata;
            }
            object["spec"]["updateStrategy"] = update;
            object
        },
    )
}

proptest! {
    #[test]
    fn v1alpha1_survives_v1beta1(object in alpha()) {
        let there = convert(object.clone(), BETA).unwrap();
        let back = convert(there.clone(), ALPHA).unwrap();
        prop_assert_eq!(normalized(&back), normalized(&object));
        // A second round trip changes nothing more.
        prop_assert_eq!(convert(convert(back.clone(), BETA).unwrap(), ALPHA).unwrap(), back);
    }

    #[test]
    fn v1beta1_survives_v1alpha1(object in beta()) {
        let back = convert(convert(object.clone(), ALPHA).unwrap(), BETA).unwrap();
        prop_assert_eq!(normalized(&back), normalized(&object));
    }
}

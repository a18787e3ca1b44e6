//! Round trips, and unusual objects.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;

use super::metadata::{ANNOTATIONS, set_metadata_entry};
use super::*;
use crate::validation::labels::MAX_ANNOTATIONS_BYTES;

pub(super) mod vectors;

/// Without Go's empty values: nulls, empty maps, lists and strings.
pub(super) fn without_empty(value: &Value) -> Value {
    let nothing =
        |value: &Value| value.is_null() || *value == json!({}) || *value == json!([]) || *value == json!("");
    match value {
        Value::Object(map) => {
            let kept = map.iter().map(|(key, value)| (key.clone(), without_empty(value)));
            Value::Object(kept.filter(|(_, value)| !nothing(value)).collect())
        }
        Value::Array(list) => list.iter().map(without_empty).collect(),
        other => other.clone(),
    }
}

fn without_annotations(mut object: Value, annotations: &[&str]) -> Value {
    for key in annotations {
        remove_annotation(&mut object, key);
    }
    without_empty(&object)
}

/// What Go omits when it is zero or false, and writes as null if we have a list.
pub(super) fn without_zero(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let kept = map.iter().map(|(key, value)| (key.clone(), without_zero(value)));
            Value::Object(
                kept.filter(|(_, value)| ![json!(0), json!(false)].contains(value))
                    .collect(),
            )
        }
        Value::Array(list) => list.iter().map(without_zero).collect(),
        other => other.clone(),
    }
}

/// Converts to the Rust type and back.
pub(super) fn round_trip<T: serde::de::DeserializeOwned + serde::Serialize>(object: &Value) -> Value {
    let typed: T = serde_json::from_value(object.clone()).unwrap_or_else(|why| panic!("{why}: {object}"));
    without_empty(&without_zero(&serde_json::to_value(typed).unwrap()))
}

/// Upstream's two annotations may be added to an object in a conversion; in v1beta1 they have no meaning.
fn normalized(object: Value) -> Value {
    match object["apiVersion"] == "apps.kruise.io/v1beta1" {
        true => without_annotations(
            object,
            &[keys::CRR_SYNC_CONTAINER_STATUSES, keys::CRR_UNREADY_ACQUIRED],
        ),
        false => without_empty(&object),
    }
}

#[test]
fn invalid_annotations_are_kept() {
    let object = json!({
        "apiVersion": "apps.kruise.io/v1alpha1",
        "kind": "ContainerRecreateRequest",
        "metadata": { "name": "n", "annotations": {
            keys::CRR_SYNC_CONTAINER_STATUSES: "[{\"name\":1}]",
            keys::CRR_UNREADY_ACQUIRED: "yesterday",
        } },
        "spec": { "podName": "p", "containers": [{ "name": "c" }] },
    });
    let beta = convert(object.clone(), "apps.kruise.io/v1beta1").unwrap();
    assert_eq!(beta["status"], Value::Null);
    assert_eq!(convert(beta, "apps.kruise.io/v1alpha1").unwrap(), object);
}

#[test]
fn v1alpha1_secret_replacement_keeps_other_modes() {
    let beta = json!({
        "apiVersion": "apps.kruise.io/v1beta1", "kind": "NodeImage", "metadata": { "name": "n" },
        "spec": { "images": { "a": { "tags": [], "pullSecrets": [
            { "namespace": "x", "name": "one", "mode": "batch" },
            { "namespace": "x", "name": "two", "mode": "batch" },
        ] } } },
    });
    let mut alpha = convert(beta, "v1alpha1").unwrap();
    alpha["spec"]["images"]["a"]["pullSecrets"] =
        json!([{ "namespace": "x", "name": "three" }, { "namespace": "x", "name": "two" }]);
    let beta = convert(alpha, "v1beta1").unwrap();
    assert_eq!(
        beta["spec"]["images"]["a"]["pullSecrets"],
        json!([{ "namespace": "x", "name": "three" }, { "namespace": "x", "name": "two", "mode": "batch" }])
    );
    assert_eq!(beta["metadata"], json!({ "name": "n" }));
}

#[test]
fn unknown_kinds_and_versions_are_rejected() {
    let error_for = |object: Value, to: &str| convert(object, to).unwrap_err().to_string();
    let object = json!({ "kind": "Widget", "apiVersion": "apps.kruise.io/v1beta1", "metadata": {} });
    assert!(error_for(object, "v1alpha1").contains("\"Widget\""));
    let object = json!({ "kind": "NodeImage", "apiVersion": "apps.kruise.io/v1", "metadata": {} });
    assert!(error_for(object, "v1alpha1").contains("apps.kruise.io/v1"));
    assert!(error_for(json!([]), "v1alpha1").contains("kind"));
}

fn word() -> impl Strategy<Value = String> {
    "[a-c<>&é\"]{0,3}"
}

fn second() -> impl Strategy<Value = String> {
    (0_i64..4_000_000_000)
        .prop_map(|second| format_time(&Time(k8s_openapi::jiff::Timestamp::from_second(second).unwrap())))
}

fn condition() -> impl Strategy<Value = Value> {
    let types = prop_oneof![Just(keys::PRE_RECREATE_GRACE.to_owned()), "[A-Z][a-z]{1,2}"];
    let statuses = prop_oneof![Just("True"), Just("False")];
    (types, statuses, second(), word(), any::<bool>()).prop_map(|(type_, status, at, message, canonical)| {
        if canonical && type_ == keys::PRE_RECREATE_GRACE {
            return grace_condition(&parse_time(&at).unwrap());
        }
        json!({ "type": type_, "status": status, "lastTransitionTime": at, "reason": "R", "message": message })
    })
}

fn dedup_by_type(conditions: Vec<Value>) -> Vec<Value> {
    let mut types = std::collections::BTreeSet::new();
    conditions
        .into_iter()
        .filter(|one| types.insert(one["type"].to_string()))
        .collect()
}

fn request() -> impl Strategy<Value = Value> {
    let snapshot = (word(), any::<bool>(), any::<i32>(), word()).prop_map(
        |(name, ready, restarts, id)| json!({ "name": name, "ready": ready, "restartCount": restarts, "containerID": id }),
    );
    let snapshots = proptest::collection::vec(snapshot, 0..3);
    let conditions = proptest::collection::vec(condition(), 0..3).prop_map(dedup_by_type);
    (word(), snapshots, conditions, any::<bool>()).prop_map(|(note, snapshot, conditions, annotated)| {
        let mut object = json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
            "metadata": { "name": "n" },
            "spec": { "podName": "p", "containers": [{ "name": "c" }] },
            "status": { "phase": "Recreating", "containerStatusSnapshot": snapshot, "conditions": conditions },
        });
        if annotated {
            set_annotation(&mut object, "note", note);
        }
        object
    })
}

/// Any JSON, with a bias to the fields that conversions use.
pub(super) fn arbitrary_json() -> impl Strategy<Value = Value> {
    let name = prop_oneof![
        prop::sample::select(vec![
            "metadata",
            "annotations",
            "labels",
            "spec",
            "status",
            "updateStrategy",
            "scaleStrategy",
            "rollingUpdate",
            "inPlaceUpdateStrategy",
            "images",
            "pullSecrets",
            "conditions",
            "type",
            "apps.kruise.io/image-predownload-timeout-seconds",
            keys::CLONESET_EXCLUDE_PREPARING_DELETE,
            "excludePreparingDelete",
            keys::CRR_CONDITIONS,
            keys::NODE_IMAGE_SECRET_MODES,
        ])
        .prop_map(str::to_owned),
        word(),
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(|b| json!(b)),
        any::<i64>().prop_map(|n| json!(n)),
        prop::sample::select(vec!["", "5", "x", "OnDelete", "[{}]", "{\"a\":[1]}"]).prop_map(|t| json!(t)),
    ];
    leaf.prop_recursive(5, 40, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::Array),
            prop::collection::btree_map(name.clone(), inner, 0..6)
                .prop_map(|m| Value::Object(m.into_iter().collect())),
        ]
    })
}

fn node_image() -> impl Strategy<Value = Value> {
    let secret = (word(), word(), proptest::option::of(word())).prop_map(|(namespace, name, mode)| {
        let mut secret = json!({ "namespace": namespace, "name": name });
        if let Some(mode) = mode {
            secret["mode"] = json!(mode);
        }
        secret
    });
    let image = proptest::collection::vec(secret, 0..4)
        .prop_map(|secrets| json!({ "tags": [{ "tag": "1" }], "pullSecrets": secrets }));
    let images = proptest::collection::btree_map("[a-z]{1,2}", image, 0..3);
    let conditions = proptest::collection::vec(condition(), 0..3).prop_map(dedup_by_type);
    (images, conditions).prop_map(|(images, conditions)| {
        json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "NodeImage", "metadata": { "name": "n" },
            "spec": { "images": images },
            "status": { "desired": 0, "conditions": conditions },
        })
    })
}

/// The API server converts before it validates types, and other clients can reach the port.
#[test]
fn values_of_wrong_types_are_kept() {
    let metadata = json!({
        "annotations": { "apps.kruise.io/image-predownload-timeout-seconds": "5" }, "labels": "x",
    });
    for in_place in [json!("x"), json!([1]), json!(null), json!(7)] {
        let spec = json!({ "updateStrategy": { "inPlaceUpdateStrategy": in_place } });
        let set = json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "CloneSet", "metadata": metadata, "spec": spec });
        let beta = convert(set, "v1beta1").unwrap();
        let kept = &beta["spec"]["updateStrategy"]["rollingUpdate"]["inPlaceUpdateStrategy"];
        assert!(
            *kept == in_place || in_place.is_null() && kept["imagePreDownloadTimeoutSeconds"] == 5,
            "{beta}"
        );
        assert_eq!(beta["metadata"]["labels"], "x");
    }
}

proptest! {
    /// Any input gets a response.
    #[test]
    fn any_object_is_converted_or_rejected(
        kind in prop::sample::select(vec!["CloneSet", "NodeImage", "ImagePullJob", "ContainerRecreateRequest"]),
        upwards in any::<bool>(), parts in (arbitrary_json(), arbitrary_json(), arbitrary_json()),
    ) {
        let (from, to) = if upwards { ("v1alpha1", "v1beta1") } else { ("v1beta1", "v1alpha1") };
        let (metadata, spec, status) = parts;
        for metadata in [metadata, json!({ "annotations": { keys::CRR_CONDITIONS: "[1]" } }), json!({})] {
            let object = json!({
                "apiVersion": format!("apps.kruise.io/{from}"), "kind": kind, "metadata": metadata, "spec": spec, "status": status,
            });
            prop_assert_eq!(convert(object, to).is_ok(), metadata.is_object());
        }
    }

    /// Everything in v1beta1 survives the way through v1alpha1.
    #[test]
    fn v1beta1_survives_v1alpha1(object in prop_oneof![request(), node_image()]) {
        let alpha = convert(object.clone(), "apps.kruise.io/v1alpha1").unwrap();
        let has_field = object["kind"] == "NodeImage";
        let conditions = if has_field { object["status"]["conditions"].clone() } else { Value::Null };
        prop_assert_eq!(&alpha["status"]["conditions"], &conditions);
        let back = convert(alpha, "apps.kruise.io/v1beta1").unwrap();
        prop_assert_eq!(normalized(back), normalized(object));
    }

    /// Everything in v1alpha1 survives the way through v1beta1, byte for byte.
    #[test]
    fn v1alpha1_survives_v1beta1(object in prop_oneof![request(), node_image()]) {
        let alpha = convert(object, "apps.kruise.io/v1alpha1").unwrap();
        let beta = convert(alpha.clone(), "apps.kruise.io/v1beta1").unwrap();
        prop_assert_eq!(convert(beta, "apps.kruise.io/v1alpha1").unwrap(), alpha);
    }

    /// Whatever text our annotations have, conversion neither fails nor panics.
    #[test]
    fn any_annotation_text_converts(one in ".{0,20}", two in ".{0,20}", kind in "NodeImage|ContainerRecreateRequest") {
        let object = json!({
            "apiVersion": "apps.kruise.io/v1alpha1", "kind": kind, "metadata": { "name": "n", "annotations": {
                keys::CRR_CONDITIONS: one.clone(), keys::NODE_IMAGE_SECRET_MODES: one,
                keys::CRR_SYNC_CONTAINER_STATUSES: two.clone(), keys::CRR_UNREADY_ACQUIRED: two,
            } },
            "spec": { "images": { "a": { "pullSecrets": [{ "name": "s" }] } } },
        });
        prop_assert!(convert(object, "apps.kruise.io/v1beta1").is_ok());
    }
}

/// An object that the API server would refuse could not be read in that version, nor could any list that contains it.
#[test]
fn annotations_beyond_the_size_limit_are_dropped() {
    let full = "a".repeat(MAX_ANNOTATIONS_BYTES - 2);
    let set = json!({ "kind": "CloneSet", "apiVersion": "apps.kruise.io/v1beta1",
        "metadata": { "name": "web", "annotations": { "k": full } },
        "spec": { "updateStrategy": { "rollingUpdate": { "inPlaceUpdateStrategy": { "imagePreDownloadParallelism": 1 } } } } });
    let condition = json!({ "type": "t", "status": "True", "lastTransitionTime": "x" });
    let request = json!({ "kind": "ContainerRecreateRequest", "apiVersion": "apps.kruise.io/v1beta1",
        "metadata": { "name": "web", "annotations": { "k": full } },
        "status": { "conditions": [condition], "containerStatusSnapshot": [{ "name": "c" }] } });
    for object in [set, request] {
        let old = convert(object.clone(), "v1alpha1").unwrap();
        assert_eq!(old["metadata"], object["metadata"]);
        let mut roomy = object;
        set_metadata_entry(&mut roomy, ANNOTATIONS, "k", full[1000..].to_owned());
        let old = convert(roomy.clone(), "v1alpha1").unwrap();
        assert_ne!(old["metadata"], roomy["metadata"]);
    }
}

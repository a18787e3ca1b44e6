use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::in_place::{Options, RevisionData, spec};

/// Lines, counted from 1, on which our result differs on purpose.
///
/// Upstream treats the first key ever of a map, its last key and every removal as plain metadata, so that containers
/// keep an old environment; and if the whole map is removed, its patch removes all annotations of the Pod, including
/// those of others.
const ENV_DIFFERENCES: [usize; 42] = [
    5, 16, 24, 35, 91, 103, 117, 120, 164, 186, 205, 209, 274, 289, 304, 310, 362, 363, 379, 388, 407, 493,
    504, 507, 508, 517, 521, 532, 542, 554, 573, 595, 618, 623, 637, 638, 657, 714, 717, 721, 728, 772,
];
const MAP_DIFFERENCES: [usize; 22] = [
    135, 171, 176, 193, 213, 214, 241, 337, 424, 446, 460, 490, 547, 631, 672, 691, 695, 724, 726, 732, 750,
    782,
];

fn ours(vector: &Value) -> Value {
    let on = |field: &str| vector[field].as_bool().unwrap();
    let options = Options {
        env_from_metadata: on("gateEnvFromMetadata"),
        vertical: on("gateVerticalScaling"),
        recreate_for_claims: false,
        grace_seconds: i32::try_from(vector["graceSeconds"].as_i64().unwrap()).unwrap(),
        template_storage: crate::in_place::normalize::TemplateStorage::WithDefaults,
    };
    let revision = |name, field: &str| RevisionData {
        name,
        data: &vector[field],
        claim_hash: None,
    };
    let new = vector["newRevision"].as_str().unwrap();
    let made = spec::calculate_spec(&revision("old", "old"), &revision(new, "new"), &options);
    made.map_or(Value::Null, |spec| json!(spec))
}

fn metadata_patch(spec: &Value) -> Value {
    let decoded = STANDARD
        .decode(spec["metaDataPatch"].as_str().unwrap_or_default())
        .unwrap();
    serde_json::from_slice(&decoded).unwrap_or_default()
}

/// Whether a metadata map or one of its keys is new or removed.
fn first_or_removed(vector: &Value) -> bool {
    ["labels", "annotations"].iter().any(|part| {
        let map = |side: &str| {
            vector[side]["spec"]["template"]["metadata"][part]
                .as_object()
                .cloned()
        };
        match (map("old"), map("new")) {
            (Some(old), Some(new)) => old.keys().any(|key| !new.contains_key(key)),
            (old, new) => old.is_some() != new.is_some(),
        }
    })
}

/// A specification without the parts that differ about metadata.
fn without_metadata(spec: &Value) -> Value {
    let mut remaining = spec.clone();
    for field in ["updateEnvFromMetadata", "containerRefMetadata", "metaDataPatch"] {
        remaining.as_object_mut().unwrap().remove(field);
    }
    remaining
}

#[test]
fn in_place_specs_match_go() {
    let vectors = include_str!("../../../../../tests/data/go/in-place-spec.jsonl");
    assert_eq!(vectors.lines().count(), 800);
    let (mut environment, mut whole_map) = (Vec::new(), Vec::new());
    for (at, line) in vectors.lines().enumerate() {
        let vector: Value = serde_json::from_str(line).unwrap();
        let (ours, theirs) = (ours(&vector), &vector["out"]);
        if ours == *theirs {
            continue;
        }
        assert_eq!(
            without_metadata(&ours),
            without_metadata(theirs),
            "line {}",
            at + 1
        );
        if ours["updateEnvFromMetadata"] != theirs["updateEnvFromMetadata"]
            || ours["containerRefMetadata"] != theirs["containerRefMetadata"]
        {
            assert!(first_or_removed(&vector), "line {}: {ours} {theirs}", at + 1);
            environment.push(at + 1);
        } else {
            assert!(
                metadata_patch(theirs)["metadata"]["annotations"].is_null(),
                "line {}: {ours} {theirs}",
                at + 1
            );
            whole_map.push(at + 1);
        }
    }
    assert_eq!(environment, ENV_DIFFERENCES);
    assert_eq!(whole_map, MAP_DIFFERENCES);
}

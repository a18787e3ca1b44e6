#![allow(clippy::unwrap_used)]

use serde_json::Value;

use super::*;

/// Types and fields, sorted.
fn ours(case: &Value) -> Vec<String> {
    let input = &case["in"];
    let stored: Vec<&Value> = input["others"].as_array().unwrap().iter().collect();
    let revisions = [Revision {
        name: "s-1",
        sidecar_set: "s",
        custom_version: Some("v1"),
    }];
    let errors = validate(
        &Request {
            set: &input["sidecarSet"],
            old: input.get("old"),
            stored: &stored,
            revisions: &revisions,
            whitelist: input["whitelist"].as_str(),
            patch_metadata_allowed: input["patchPodMetadataDefaultsAllowed"] == true,
        },
        |_, _| Ok(()),
    );
    let mut got: Vec<_> = errors
        .fields()
        .map(|error| format!("{} {}", error.error_type.as_str(), error.field))
        .collect();
    got.sort();
    got
}

fn theirs(case: &Value) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let errors = case["errors"].as_array().unwrap().iter();
    let mut expected: Vec<_> = errors
        .map(|error| format!("{} {}", text(&error["type"]), text(&error["field"])))
        .collect();
    expected.sort();
    expected
}

#[test]
fn errors_are_those_of_openkruise() {
    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/data/go/sidecarset-validation.jsonl"
    );
    let text = std::fs::read_to_string(file).unwrap();
    let cases: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(cases.len(), 350);
    let mut different = Vec::new();
    for (at, case) in cases.iter().enumerate() {
        let (ours, theirs) = (ours(case), theirs(case));
        if ours != theirs {
            different.push(format!("line {}: {ours:?}, Go: {theirs:?}", at + 1));
        }
    }
    assert!(different.is_empty(), "{}", different.join("\n"));
}

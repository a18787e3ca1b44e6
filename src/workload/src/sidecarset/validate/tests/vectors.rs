//! Comparison with what OpenKruise's function returned.

use kruise_api::sidecarset::SidecarSetSpec;
use serde::Deserialize;
use serde_json::Value;

use super::{Concerned, Request, Revision, found};

fn ours(case: &Value) -> Vec<String> {
    let input = &case["in"];
    let concerned = Concerned::new(&input["sidecarSet"]);
    // As the webhook does, which knows only sets that can be read.
    let stored = input["others"].as_array().unwrap().iter().filter(|other| {
        let spec = SidecarSetSpec::deserialize(&other["spec"]);
        let name = other["metadata"]["name"].as_str().unwrap_or_default();
        spec.is_ok_and(|spec| concerned.contains(name, &spec))
    });
    let stored: Vec<&Value> = stored.collect();
    let revisions = [Revision {
        name: "s-1",
        sidecar_set: "s",
        custom_version: Some("v1"),
    }];
    found(&Request {
        set: &input["sidecarSet"],
        old: input.get("old"),
        stored: &stored,
        revisions: &revisions,
        whitelist: input["whitelist"].as_str(),
        patch_metadata_allowed: input["patchPodMetadataDefaultsAllowed"] == true,
    })
}

fn theirs(case: &Value) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap().replace("FieldValue", "");
    let errors = case["errors"].as_array().unwrap().iter();
    errors
        .map(|error| format!("{} {}", text(&error["type"]), text(&error["field"])))
        .collect()
}

#[test]
fn errors_are_those_of_openkruise() {
    let file = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/data/go/sidecarset-validation.jsonl"
    );
    let text = std::fs::read_to_string(file).unwrap();
    let mut different = Vec::new();
    let mut count = 0;
    for (at, line) in text.lines().enumerate() {
        let case = serde_json::from_str(line).unwrap();
        let [ours, theirs] = [ours(&case), theirs(&case)].map(|mut errors| {
            errors.sort();
            errors
        });
        if ours != theirs {
            different.push(format!("line {}: {ours:?}, Go: {theirs:?}", at + 1));
        }
        count += 1;
    }
    assert!(different.is_empty(), "{}", different.join("\n"));
    assert_eq!(count, 350);
}

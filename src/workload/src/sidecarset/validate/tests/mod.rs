#![allow(clippy::unwrap_used)]

mod hostile;
mod pods;
mod rules;
mod vectors;

use serde_json::{Value, json};

use super::*;

/// A container after its defaults.
fn container(name: &str) -> Value {
    json!({
        "name": name, "image": "i:1", "imagePullPolicy": "Always", "terminationMessagePolicy": "File",
        "podInjectPolicy": "BeforeAppContainer", "upgradeStrategy": { "upgradeType": "ColdUpgrade" },
        "shareVolumePolicy": { "type": "disabled" },
    })
}

/// A SidecarSet without errors, changed by an RFC 7396 patch.
fn set(patch: &Value) -> Value {
    let mut set = json!({
        "metadata": { "name": "s" },
        "spec": {
            "selector": { "matchLabels": { "app": "a" } },
            "containers": [container("c")],
            "updateStrategy": { "type": "RollingUpdate", "partition": 0, "maxUnavailable": 1 },
        },
    });
    json_patch::merge(&mut set, patch);
    set
}

fn request(set: &Value) -> Request<'_> {
    Request {
        set,
        old: None,
        stored: &[],
        revisions: &[],
        whitelist: None,
        patch_metadata_allowed: true,
    }
}

/// Types and fields, as `Invalid spec.selector`.
fn found(request: &Request) -> Vec<String> {
    let errors = validate(request);
    let summary = |error: &kruise_api::validation::FieldError| {
        let error_type = error.error_type.as_str().replace("FieldValue", "");
        format!("{error_type} {}", error.field)
    };
    errors.fields().map(summary).collect()
}

/// The errors of a set alone.
fn found_in(patch: &Value) -> Vec<String> {
    found(&request(&set(patch)))
}

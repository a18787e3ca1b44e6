//! A new conversion webhook takes a moment to be used, separately for each kind's CRD.

use serde_json::{Value, json};
use testbed::cluster::{ControlPlane, wait};
use testbed::wait::WAIT_TIMEOUT;

/// All kinds whose storage version has changed.
pub const CONVERTED_KINDS: [&str; 3] = ["CloneSet", "ImagePullJob", "NodeImage"];

fn minimal_spec(kind: &str) -> Value {
    match kind {
        "CloneSet" => json!({ "selector": { "matchLabels": { "a": "b" } }, "template": {
            "metadata": { "labels": { "a": "b" } }, "spec": { "containers": [{ "name": "c", "image": "i" }] } } }),
        "ImagePullJob" => json!({ "image": "i", "completionPolicy": { "type": "Never" } }),
        _ => json!({}),
    }
}

/// Waits until objects of v1alpha1 are converted; leaves no objects behind.
pub fn wait_for_conversion(plane: &ControlPlane, kinds: &[&str]) {
    let file = plane.dir().join("old.json");
    for kind in kinds {
        let object = json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": kind, "spec": minimal_spec(kind),
            "metadata": { "name": "old", "namespace": "default" } });
        std::fs::write(&file, object.to_string()).unwrap();
        let mut last_error = String::new();
        let path = file.to_string_lossy().into_owned();
        let result = wait::until(
            &format!("a {kind} of v1alpha1 is converted"),
            WAIT_TIMEOUT,
            || {
                let created = plane.kubectl(&["create", "--dry-run=server", "-f", &path]);
                Ok(created.map_err(|why| last_error = why.to_string()).ok())
            },
        );
        assert!(result.is_ok(), "{result:?}: {last_error}");
    }
}

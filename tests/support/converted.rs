//! The API server takes a moment to heed where objects are converted, and each kind's CRD for itself.

use serde_json::{Value, json};
use testbed::cluster::{ControlPlane, wait};
use testbed::wait::PATIENCE;

/// All kinds that are stored in another version than they were first.
pub const ALL: [&str; 3] = ["CloneSet", "ImagePullJob", "NodeImage"];

fn spec(kind: &str) -> Value {
    match kind {
        "CloneSet" => json!({ "selector": { "matchLabels": { "a": "b" } }, "template": {
            "metadata": { "labels": { "a": "b" } }, "spec": { "containers": [{ "name": "c", "image": "i" }] } } }),
        "ImagePullJob" => json!({ "image": "i", "completionPolicy": { "type": "Never" } }),
        _ => json!({}),
    }
}

/// Waits until objects of v1alpha1 are converted; nothing is left of them.
pub fn until_converted(plane: &ControlPlane, kinds: &[&str]) {
    let file = plane.dir().join("old.json");
    for kind in kinds {
        let old = json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": kind, "spec": spec(kind),
            "metadata": { "name": "old", "namespace": "default" } });
        std::fs::write(&file, old.to_string()).unwrap();
        let mut said = String::new();
        let path = file.to_string_lossy().into_owned();
        let done = wait::until(&format!("a {kind} of v1alpha1 is converted"), PATIENCE, || {
            let made = plane.kubectl(&["create", "--dry-run=server", "-f", &path]);
            Ok(made.map_err(|why| said = why.to_string()).ok())
        });
        assert!(done.is_ok(), "{done:?}: {said}");
    }
}

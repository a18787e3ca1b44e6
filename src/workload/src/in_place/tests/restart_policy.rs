use serde_json::{Value, json};

use super::*;

/// The change to another annotation, which container `app` has in its environment.
fn spec_of_annotation(restart: Value, image: &str) -> Result<Spec, MustRecreate> {
    let data = |value: &str, image: &str| {
        let read = json!({ "fieldRef": { "fieldPath": "metadata.annotations['level']" } });
        let mut app =
            json!({ "name": "app", "image": image, "env": [{ "name": "LEVEL", "valueFrom": read }] });
        if !restart.is_null() {
            app["restartPolicy"] = restart.clone();
        }
        json!({ "spec": { "template": {
            "metadata": { "annotations": { "level": value } }, "spec": { "containers": [app] } } } })
    };
    let (old, new) = (data("info", "app:1"), data("debug", image));
    spec_between(&old, &new)
}

#[test]
fn env_update_needs_restart_policy_always() {
    for policy in [json!(null), json!("Always")] {
        assert!(
            spec_of_annotation(policy, "app:1")
                .unwrap()
                .update_env_from_metadata
        );
    }
    let never = spec_of_annotation(json!("Never"), "app:1").unwrap_err();
    assert_eq!(
        never.to_string(),
        "container app cannot get its new environment in place: its restartPolicy is Never"
    );
    assert!(spec_of_annotation(json!("OnFailure"), "app:1").is_err());
    // kubelet replaces a container for its image, whatever the policy is.
    assert!(spec_of_annotation(json!("Never"), "app:2").is_ok());
}

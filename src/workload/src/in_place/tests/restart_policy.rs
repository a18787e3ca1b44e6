use serde_json::{Value, json};

use super::*;

/// The change to another annotation, which container `app` has in its environment.
fn spec_of_annotation(restart: Value, image: &str) -> Result<Spec, MustRecreate> {
    spec_of_change(&restart, json!({ "level": "debug" }), image)
}

/// The change to these annotations.
fn spec_of_change(restart: &Value, annotations: Value, image: &str) -> Result<Spec, MustRecreate> {
    let data = |annotations: Value, image: &str| {
        let read = json!({ "fieldRef": { "fieldPath": "metadata.annotations['level']" } });
        let mut app =
            json!({ "name": "app", "image": image, "env": [{ "name": "LEVEL", "valueFrom": read }] });
        if !restart.is_null() {
            app["restartPolicy"] = restart.clone();
        }
        json!({ "spec": { "template": {
            "metadata": { "annotations": annotations }, "spec": { "containers": [app] } } } })
    };
    let old = data(json!({ "level": "info" }), "app:1");
    let new = data(annotations, image);
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

/// A removed annotation is another environment, too.
#[test]
fn removal_restarts_its_readers() {
    let (never, none) = (json!("Never"), json!({ "other": "x" }));
    assert!(spec_of_change(&never, none.clone(), "app:1").is_err());
    assert!(spec_of_change(&never, none.clone(), "app:2").is_ok());
    let spec = spec_of_change(&json!(null), none, "app:1").unwrap();
    let mut pod = pod(&["app", "other"]);
    let read = json!({ "fieldRef": { "fieldPath": "metadata.annotations['level']" } });
    pod["spec"]["containers"][0]["env"] = json!([{ "name": "LEVEL", "valueFrom": read }]);
    let pod = Pod::from_json(&pod);
    assert_eq!(
        patch::env_readers(&pod, &spec).into_iter().collect::<Vec<_>>(),
        ["app"]
    );
}

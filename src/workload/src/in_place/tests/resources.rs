use serde_json::{Value, json};

use super::*;

/// The change from one size of container `app` to another, beside a container `side` without resources.
fn spec_of_resources(old: Value, new: Value) -> Result<Spec, MustRecreate> {
    let data = |size: &Value| {
        let containers = json!([{ "name": "app", "image": "app:1", "resources": size }, { "name": "side", "image": "side:1" }]);
        json!({ "spec": { "template": { "spec": { "containers": containers } } } })
    };
    let (old, new) = (data(&old), data(&new));
    spec_between(&old, &new)
}

#[test]
fn implied_request_changes_with_its_limit() {
    let size = |cpu: &str| json!({ "limits": { "cpu": cpu, "memory": "64Mi" } });
    let spec = spec_of_resources(size("1"), size("2")).unwrap();
    let new = json!(spec.container_resources["app"]);
    assert_eq!(
        new,
        json!({ "limits": { "cpu": "2" }, "requests": { "cpu": "2" } })
    );
}

#[test]
fn explicit_request_stays() {
    let size = |cpu: &str| json!({ "limits": { "cpu": cpu }, "requests": { "cpu": "1" } });
    let spec = spec_of_resources(size("2"), size("3")).unwrap();
    assert_eq!(
        json!(spec.container_resources["app"]),
        json!({ "limits": { "cpu": "3" } })
    );
}

#[test]
fn container_without_resources_waits_for_none() {
    let mut pod = pod(&["app", "side"]);
    let spec = spec_of_resources(
        json!({ "limits": { "cpu": "1" } }),
        json!({ "limits": { "cpu": "2" } }),
    )
    .unwrap();
    let size = json!({ "limits": { "cpu": "1" }, "requests": { "cpu": "1" } });
    pod["spec"]["containers"][0]["resources"] = size.clone();
    pod["status"]["containerStatuses"][0]["resources"] = size;
    start(&mut pod, &spec);
    let waiting = progress(&Pod::from_json(&pod));
    assert_eq!(
        waiting,
        UpdateProgress::Waiting(completion::WaitingFor::Resources("app".into(), None))
    );
    pod["status"]["containerStatuses"][0]["resources"] =
        json!({ "limits": { "cpu": "2" }, "requests": { "cpu": "2" } });
    assert_eq!(progress(&Pod::from_json(&pod)), UpdateProgress::Done);
}

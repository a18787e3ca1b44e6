//! Pods that get one set by policy and another by the webhook.

use serde_json::{Value, json};

use crate::fixture::{SidecarCluster, image, names, record};

/// A Pod without the times in its records.
fn without_times(pod: &Value) -> Value {
    let mut pod = pod.clone();
    let annotations = pod["metadata"]["annotations"].as_object_mut().unwrap();
    for (key, value) in annotations {
        if key.starts_with("kruise.io/sidecarset-hash") {
            let mut records: Value = serde_json::from_str(value.as_str().unwrap()).unwrap();
            for record in records.as_object_mut().unwrap().values_mut() {
                record["updateTimestamp"] = Value::Null;
            }
            *value = records;
        }
    }
    json!({ "annotations": pod["metadata"]["annotations"], "spec": pod["spec"] })
}

#[tokio::test]
async fn result_is_the_same_whichever_way_a_set_takes() {
    let mut cluster = SidecarCluster::start("");
    let selector = json!({ "matchLabels": { "app": "shop" } });
    let share = json!({ "type": "enabled" });
    let log = |image: &str| json!({ "selector": selector, "containers": [{ "name": "log", "image": image, "shareVolumePolicy": share }] });
    let own = json!([{ "name": "cache", "mountPath": "/cache" }]);
    cluster.create_set(
        "agent",
        json!({ "selector": selector, "volumes": [{ "name": "cache", "emptyDir": {} }], "containers": [
            { "name": "agent", "image": "agent:1", "shareVolumePolicy": share, "volumeMounts": own }] }),
    );
    let old = cluster.create_set("log", log("log:1"))["status"]["latestRevision"].clone();

    // A percentage of the Pods gets the older revision; policies know no chance. 100 of 100 makes the result certain.
    let mut partial = log("log:2");
    partial["injectionStrategy"] = json!({ "revision": { "revisionName": old, "policy": "Partial" } });
    partial["updateStrategy"] = json!({ "partition": "99%" });
    cluster.patch_set("log", &json!({ "spec": partial }));
    if cluster.serves_policies() {
        cluster.wait_injected_by("agent", "True", "PolicyInstalled");
        let condition = cluster.wait_injected_by("log", "False", "Unsupported");
        let message = condition["message"].as_str().unwrap();
        assert!(
            message.contains("spec.injectionStrategy.revision is for a percentage of the Pods"),
            "{message}"
        );
    }
    // A deleted policy acts for another moment.
    let older = |pod: &Value| {
        let by_webhook = ["agent", "log"].map(|set| record(pod, set)["updateTimestamp"].is_string());
        image(pod, "log") == "log:1" && by_webhook == [true, true]
    };
    let both = cluster.wait_dry_run("shop", "both sets, the older image", older);
    assert_eq!(names(&both), ["agent", "log", "app"]);

    cluster.restart_manager("webhook-only", "SidecarSetPolicies=false");
    if cluster.serves_policies() {
        cluster.wait_set("agent", "no condition", |set| {
            crate::fixture::injected_by_policy(set).is_null()
        });
    }
    let by_webhook = cluster.wait_dry_run("shop", "both sets, the older image", older);
    assert_eq!(without_times(&both), without_times(&by_webhook));
}

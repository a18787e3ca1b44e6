//! How much of the manager's memory the objects of one namespace may take.

use kruise_api::cloneset::CloneSet;
use kube::api::DynamicObject;
use serde_json::{Map, Value, json};

use crate::fixture::Fixture;
use crate::manager::Manager;
use crate::test_cluster::TestCluster;
use support::conversion::{CONVERTED_KINDS, wait_for_conversion};

/// The memory limit of its Deployment, 512 MiB, less a quarter for everything else.
const MEMORY_LIMIT: u64 = 384 << 20;

/// Small values that take up to a hundred times their length once parsed.
fn small_values(values: usize) -> Value {
    vec![json!({ "": 0 }); values].into()
}

/// A template with many environment variables, in containers of a hundred each.
fn template_with_env(app: &str, containers: usize, image: &str) -> Value {
    let env: Vec<_> = (0..100)
        .map(|index| json!({ "name": format!("v{index}") }))
        .collect();
    let container = |index: usize| json!({ "name": format!("c{index}"), "image": image, "env": env });
    let containers: Vec<_> = (0..containers).map(container).collect();
    json!({ "metadata": { "labels": { "app": app } },
        "spec": { "terminationGracePeriodSeconds": 0, "containers": containers } })
}

fn cloneset(name: &str, replicas: usize, template: Value) -> Value {
    json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "metadata": { "name": name }, "spec": {
        "replicas": replicas, "selector": { "matchLabels": { "app": name } }, "template": template,
        "updateStrategy": { "rollingUpdate": { "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": "100%" } } } })
}

/// A revision as another client creates it; fields unknown to the kind are left to the API server.
fn owned_revision(owner: &DynamicObject, index: usize, data: Value) -> Value {
    let name = owner.metadata.name.as_deref().unwrap();
    json!({ "apiVersion": "apps/v1", "kind": "ControllerRevision", "revision": index, "data": data, "metadata": {
        "name": format!("{name}-old{index}"), "labels": { "app": name, "controller.kubernetes.io/hash": format!("old{index}") },
        "ownerReferences": [{ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": name,
            "uid": owner.metadata.uid, "controller": true }] } })
}

/// Many objects that take much more memory once parsed than their length: the manager lists and reconciles them, and
/// the CloneSets of other users, within its limit.
#[tokio::test]
async fn objects_of_many_small_values_stay_within_memory_limit() {
    let cluster: &'static TestCluster = Box::leak(Box::new(TestCluster::new()));
    let greedy = Fixture::new(cluster, "greedy").await;
    let other = Fixture::new(cluster, "other").await;
    let sets = greedy.api("apps.kruise.io", "v1beta1", "CloneSet");
    let revisions = greedy.api("apps", "v1", "ControllerRevision");
    for index in 0..60 {
        let name = format!("small-{index}");
        let mut template = template_with_env(&name, 1, "i");
        template["spec"]["odd"] = small_values(9_000);
        greedy.create(&sets, cloneset(&name, 0, template)).await;
    }
    // Too large to be parsed.
    let mut template = template_with_env("large", 1, "i");
    template["spec"]["odd"] = small_values(100_000);
    greedy.create(&sets, cloneset("large", 1, template)).await;
    let large_set = greedy
        .create(&sets, cloneset("many", 40, template_with_env("many", 30, "i:1")))
        .await;
    for index in 0..40 {
        let mut template = template_with_env("many", 1, "i:0");
        template["spec"]["odd"] = small_values(18_000);
        let data = json!({ "spec": { "template": template } });
        greedy
            .create(&revisions, owned_revision(&large_set, index, data))
            .await;
        let labels = json!({ "app": "many", "controller-revision-hash": format!("many-old{index}") });
        let pod = json!({ "metadata": { "name": format!("many-p{index}"), "labels": labels },
            "spec": { "containers": [{ "name": "c0", "image": "i:0" }] } });
        greedy.create(&greedy.pods(), pod).await;
    }
    for index in 0..10 {
        let labels: Map<String, Value> = (0..4_000)
            .map(|index| (format!("l{index:x}"), json!("")))
            .collect();
        let pod = json!({ "metadata": { "name": format!("labels-{index}"), "labels": labels },
            "spec": { "containers": [{ "name": "c", "image": "i" }] } });
        greedy.create(&greedy.pods(), pod).await;
    }
    let mut manager = Manager::unelected(&cluster.plane, "kruise-manager");
    manager.start().unwrap();
    println!("listed: {} MiB", manager.peak_memory() >> 20);
    wait_for_conversion(&cluster.plane, &CONVERTED_KINDS);
    other.create_cloneset("web", json!({})).await;
    other.wait_settled("web").await;
    println!("others: {} MiB", manager.peak_memory() >> 20);
    let all_updated = |set: &CloneSet| {
        set.status
            .as_ref()
            .is_some_and(|status| status.updated_replicas == 40)
    };
    greedy
        .wait_status("many", "all made and updated", all_updated)
        .await;
    println!("made: {} MiB", manager.peak_memory() >> 20);
    let next_template = template_with_env("many", 30, "i:2");
    greedy
        .patch_set("many", json!({ "spec": { "template": next_template } }))
        .await;
    greedy
        .wait_status("many", "all made and updated", all_updated)
        .await;
    other.set_image("web", "example.com/app:2").await;
    other.wait_settled("web").await;
    println!("updated: {} MiB", manager.peak_memory() >> 20);
    let peak = manager.peak_memory();
    assert!(peak < MEMORY_LIMIT, "{} MiB: {}", peak >> 20, manager.tail());
}

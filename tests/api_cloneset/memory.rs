//! What the objects of one namespace may take of the manager's memory.

use kruise_api::cloneset::CloneSet;
use kube::api::DynamicObject;
use serde_json::{Map, Value, json};

use crate::field::Field;
use crate::manager::Manager;
use crate::world::World;
use support::converted::{ALL, until_converted};

/// The limit of its Deployment, 512 MiB, without a quarter that others may need.
const MOST: u64 = 384 << 20;

/// So many values that take up to a hundred times their length.
fn small(values: usize) -> Value {
    vec![json!({ "": 0 }); values].into()
}

/// A template of many environment variables, in containers of a hundred.
fn variables(app: &str, containers: usize, image: &str) -> Value {
    let env: Vec<_> = (0..100).map(|at| json!({ "name": format!("v{at}") })).collect();
    let container = |at: usize| json!({ "name": format!("c{at}"), "image": image, "env": env });
    let containers: Vec<_> = (0..containers).map(container).collect();
    json!({ "metadata": { "labels": { "app": app } },
        "spec": { "terminationGracePeriodSeconds": 0, "containers": containers } })
}

fn set(name: &str, replicas: usize, template: Value) -> Value {
    json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "metadata": { "name": name }, "spec": {
        "replicas": replicas, "selector": { "matchLabels": { "app": name } }, "template": template,
        "updateStrategy": { "rollingUpdate": { "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": "100%" } } } })
}

/// An object as it is made by somebody else's hand; what a kind does not know is left to the API server.
fn revision(of: &DynamicObject, at: usize, data: Value) -> Value {
    let name = of.metadata.name.as_deref().unwrap();
    json!({ "apiVersion": "apps/v1", "kind": "ControllerRevision", "revision": at, "data": data, "metadata": {
        "name": format!("{name}-old{at}"), "labels": { "app": name, "controller.kubernetes.io/hash": format!("old{at}") },
        "ownerReferences": [{ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": name,
            "uid": of.metadata.uid, "controller": true }] } })
}

/// Many objects that take much more memory than their length once they are parsed: the manager lists them, works on them,
/// and on the CloneSets of others, within its limit.
#[tokio::test]
async fn objects_of_many_small_values_do_not_exceed_the_memory_limit() {
    let world: &'static World = Box::leak(Box::new(World::new()));
    let greedy = Field::new(world, "greedy").await;
    let other = Field::new(world, "other").await;
    let sets = greedy.api("apps.kruise.io", "v1beta1", "CloneSet");
    let revisions = greedy.api("apps", "v1", "ControllerRevision");
    for at in 0..60 {
        let name = format!("small-{at}");
        let mut template = variables(&name, 1, "i");
        template["spec"]["odd"] = small(9_000);
        greedy.create(&sets, set(&name, 1, template)).await;
    }
    // What is too large to be read.
    let mut template = variables("large", 1, "i");
    template["spec"]["odd"] = small(100_000);
    greedy.create(&sets, set("large", 1, template)).await;
    let many = greedy
        .create(&sets, set("many", 40, variables("many", 30, "i:1")))
        .await;
    for at in 0..40 {
        let mut template = variables("many", 1, "i:0");
        template["spec"]["odd"] = small(18_000);
        let data = json!({ "spec": { "template": template } });
        greedy.create(&revisions, revision(&many, at, data)).await;
        let labels = json!({ "app": "many", "controller-revision-hash": format!("many-old{at}") });
        let pod = json!({ "metadata": { "name": format!("many-p{at}"), "labels": labels },
            "spec": { "containers": [{ "name": "c0", "image": "i:0" }] } });
        greedy.create(&greedy.pods(), pod).await;
    }
    for at in 0..10 {
        let labels: Map<String, Value> = (0..4_000).map(|at| (format!("l{at:x}"), json!(""))).collect();
        let pod = json!({ "metadata": { "name": format!("labels-{at}"), "labels": labels },
            "spec": { "containers": [{ "name": "c", "image": "i" }] } });
        greedy.create(&greedy.pods(), pod).await;
    }
    let mut manager = Manager::unelected(&world.plane, "kruise-manager");
    manager.start().unwrap();
    println!("listed: {} MiB", manager.peak_memory() >> 20);
    until_converted(&world.plane, &ALL);
    other.set("web", json!({})).await;
    other.settled("web").await;
    println!("others: {} MiB", manager.peak_memory() >> 20);
    let all = |set: &CloneSet| {
        set.status
            .as_ref()
            .is_some_and(|status| status.updated_replicas == 40)
    };
    greedy.status("many", "all made and updated", all).await;
    println!("made: {} MiB", manager.peak_memory() >> 20);
    let again = variables("many", 30, "i:2");
    greedy
        .edit("many", json!({ "spec": { "template": again } }))
        .await;
    greedy.status("many", "all made and updated", all).await;
    other.image("web", "example.com/app:2").await;
    other.settled("web").await;
    println!("updated: {} MiB", manager.peak_memory() >> 20);
    let most = manager.peak_memory();
    assert!(most < MOST, "{} MiB: {}", most >> 20, manager.tail());
}

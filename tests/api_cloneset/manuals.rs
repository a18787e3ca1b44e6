//! The examples of OpenKruise's manual, as printed: applied, and acted upon.

use kruise::api::cloneset::CloneSet;
use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::field::{Field, identities};
use crate::world::{until, world};

/// The finalizer that the manual's hooks are about.
const HOOK: &str = "example.io/unready-blocker";

fn path(file: &str) -> String {
    format!("{}/tests/data/manuals/{file}", env!("CARGO_MANIFEST_DIR"))
}

fn documents(file: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(path(file)).unwrap();
    serde_yaml::Deserializer::from_str(&text)
        .map(|document| Value::deserialize(document).unwrap())
        .collect()
}

#[tokio::test]
async fn the_manual_s_examples_come_up_as_printed() {
    let field = Field::new(world(), "manual").await;
    let namespace = format!("--namespace={}", field.namespace);
    let apply = ["apply", &namespace, "-f", &path("cloneset.yaml")];
    world().plane.kubectl(&apply).unwrap();
    for name in ["sample", "sample-data"] {
        let set = field.settled(name).await;
        let status = set.status.unwrap();
        assert_eq!(
            (status.replicas, status.label_selector.as_str()),
            (5, "app=sample"),
            "{name}"
        );
        assert_eq!(set.spec.template["spec"]["dnsPolicy"], "ClusterFirst");
    }
    // Both select the same Pods, and neither takes those of the other.
    let pods = field.pods_of("sample").await;
    let of = |set: &str| {
        pods.iter()
            .filter(|p| p["metadata"]["ownerReferences"][0]["name"] == set)
            .count()
    };
    assert_eq!((of("sample"), of("sample-data"), pods.len()), (5, 5, 10));
    let claims = field
        .api("", "v1", "PersistentVolumeClaim")
        .list(&Default::default())
        .await
        .unwrap();
    assert_eq!(claims.items.len(), 5);
    let before = identities(&pods);
    world().plane.kubectl(&apply).unwrap();
    field.settled("sample-data").await;
    assert_eq!(
        identities(&field.pods_of("sample").await),
        before,
        "applied once more"
    );
}

/// The base with a name and labels of its own, and the fragment merged onto it.
fn merged(base: &Value, fragment: &Value, name: &str) -> Value {
    let mut object = base.clone();
    json_patch::merge(&mut object, fragment);
    let named = json!({ "metadata": { "name": name }, "spec": {
        "selector": { "matchLabels": { "app": name } },
        "template": { "metadata": { "labels": { "app": name } } },
    } });
    json_patch::merge(&mut object, &named);
    // A fragment that speaks of one field of a container leaves the others as they are.
    let container = &mut object["spec"]["template"]["spec"]["containers"][0];
    if container["image"].is_null() {
        container["image"] = json!("nginx:alpine");
    }
    object
}

/// Waits until the condition has these words.
async fn says(field: &Field, name: &str, words: &'static str) -> CloneSet {
    until(&field.sets(), name, words, move |set: &CloneSet| {
        let status = set.status.iter().flat_map(|s| &s.conditions);
        let mut progressing = status.filter(|c| c.type_ == "Progressing");
        progressing.any(|c| c.message.contains(words))
    })
    .await
}

/// What the user's own controller does for the hook `preNormal`.
async fn take_into_use(field: &Field, name: &str) {
    for (pod, _) in identities(&field.pods_of(name).await) {
        let patch = Patch::Merge(json!({ "metadata": { "finalizers": [HOOK] } }));
        field
            .pods()
            .patch(&pod, &PatchParams::default(), &patch)
            .await
            .unwrap();
    }
}

/// Names one of its Pods to go, as the manual does.
async fn delete_one(field: &Field, sets: &Api<DynamicObject>, name: &str, mut fragment: Value) {
    field.settled(name).await;
    let printed = Patch::Merge(fragment.clone());
    let refused = sets
        .patch(name, &PatchParams::default(), &printed)
        .await
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains("\"sample-9m4hp\": there is no such Pod of this CloneSet"),
        "{refused}"
    );
    let victim = identities(&field.pods_of(name).await)[0].clone();
    fragment["spec"]["scaleStrategy"]["podsToDelete"] = json!([victim.0]);
    sets.patch(name, &PatchParams::default(), &Patch::Merge(fragment))
        .await
        .unwrap();
    let gone =
        |pods: &[&Value]| pods.len() == 4 && pods.iter().all(|p| p["metadata"]["uid"] != victim.1.as_str());
    field
        .until_pods(name, "four, without the one that was named", gone)
        .await;
    field.settled(name).await;
}

#[tokio::test]
async fn the_manual_s_fragments_do_what_they_say() {
    let field = Field::new(world(), "fragments").await;
    let sets = field.api("apps.kruise.io", "v1alpha1", "CloneSet");
    let base = documents("cloneset.yaml")[1].clone();
    let fragments = documents("cloneset-fragments.yaml");
    assert!(fragments.len() >= 22, "{}", fragments.len());
    let named = |at: usize| format!("fragment-{at}");
    let deletes = |fragment: &Value| fragment["spec"]["scaleStrategy"]["podsToDelete"].is_array();
    for (at, fragment) in fragments.iter().enumerate() {
        let nothing = json!({});
        let fragment = if deletes(fragment) { &nothing } else { fragment };
        let object = merged(&base, fragment, &named(at));
        let object: DynamicObject = serde_json::from_value(object).unwrap();
        let made = sets.create(&PostParams::default(), &object).await;
        made.unwrap_or_else(|why| panic!("{why}: {fragment}"));
    }
    for (at, fragment) in fragments.into_iter().enumerate() {
        let name = named(at);
        if deletes(&fragment) {
            delete_one(&field, &sets, &name, fragment).await;
            continue;
        }
        if fragment["spec"]["minReadySeconds"] == 60 {
            says(&field, &name, "allows 0 to be made now").await;
            says(&field, &name, "(to be ready for 60 s, minReadySeconds)").await;
            assert_eq!(field.pods_of(&name).await.len(), 1, "one at a time");
            continue;
        }
        if fragment["spec"]["lifecycle"]["preNormal"].is_object() {
            says(
                &field,
                &name,
                "hook preNormal: finalizer example.io/unready-blocker to be put on",
            )
            .await;
            field.until_pods(&name, "all there", |pods| pods.len() == 5).await;
            take_into_use(&field, &name).await;
        }
        field.settled(&name).await;
    }
}

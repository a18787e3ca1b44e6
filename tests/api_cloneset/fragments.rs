//! The fragments of OpenKruise's manual, each merged onto an example: what it says comes about.

use kruise_api::cloneset::CloneSet;
use kruise_api::keys;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::field::{Field, identities};
use crate::manuals::documents;
use crate::pods::{is, label, name as named, state, text, uid, wanted_image};
use crate::world::{until, world};

mod update;

/// The finalizer that the manual's hooks are about.
const HOOK: &str = "example.io/unready-blocker";
/// The image of the example, and the one that comes after it.
const FIRST: &str = "nginx:alpine";
const NEXT: &str = "nginx:mainline";
/// The example's replicas.
const ALL: usize = 5;

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
        container["image"] = json!(FIRST);
    }
    object
}

/// Waits until the condition has these words.
async fn says(field: &Field, name: &str, words: &'static str) -> CloneSet {
    until(&field.sets(), name, words, move |set: &CloneSet| {
        let status = set.status.iter().flat_map(|s| &s.conditions);
        let mut progressing = status.filter(|c| c.type_ == "Waiting");
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

/// The status has the numbers that the manual prints.
fn as_printed(status: &Value, printed: &Value) -> bool {
    let mut numbers = printed
        .as_object()
        .unwrap()
        .iter()
        .filter(|(_, value)| value.is_i64());
    numbers.all(|(field, value)| status[field] == *value)
}

/// A change that the manual prints with what the status is then.
async fn changed(field: &Field, name: &str, sets: &Api<DynamicObject>, fragment: &Value) {
    let before = field.settled(name).await.status.unwrap();
    let mut change = fragment.clone();
    change["metadata"]["name"] = json!(name);
    change["spec"]["template"]["metadata"]["labels"]["app"] = json!(name);
    let patch = Patch::Merge(change);
    sets.patch(name, &PatchParams::default(), &patch).await.unwrap();
    let printed = &fragment["status"];
    let set = field
        .status(name, "as printed", |set| as_printed(&json!(set.status), printed))
        .await;
    let status = set.status.unwrap();
    assert_eq!(status.current_revision, before.current_revision);
    assert_ne!(status.update_revision, status.current_revision);
    let pods = field.pods_of(name).await;
    let new = pods.iter().filter(|pod| wanted_image(pod, 0) == NEXT).count();
    assert_eq!((new, pods.len()), (2, ALL), "three are kept");
    says(field, name, "Pods are updated, as partition").await;
}

/// The claim of a Pod that somebody deletes goes, and another Pod comes with another.
async fn claims_are_not_reused(field: &Field, name: &str) {
    let pods = field.pods_of(name).await;
    let gone = &pods[0];
    let params = DeleteParams::default();
    field.pods().delete(&named(gone), &params).await.unwrap();
    let another = |pods: &[&Value]| pods.len() == 4 && pods.iter().all(|pod| named(pod) != named(gone));
    field.until_pods(name, "another of another name", another).await;
    let claims = || async {
        let of_set = |claim: &Value| claim["metadata"]["ownerReferences"][0]["name"] == name;
        let mut claims = field.claims().await;
        claims.retain(of_set);
        let id = |object: &Value| label(object, keys::CLONESET_INSTANCE_ID);
        (claims.len() == 4 && claims.iter().all(|claim| id(claim) != id(gone))).then_some(())
    };
    field
        .until("four claims, and not that of the Pod that went", claims)
        .await;
}

/// Jobs of a CloneSet that pull ahead.
async fn jobs(field: &Field, name: &str) -> Vec<Value> {
    let jobs = field.api("apps.kruise.io", "v1beta1", "ImagePullJob");
    let list = jobs.list(&Default::default()).await.unwrap();
    let all = list.items.into_iter().map(|job| json!(job));
    all.filter(|job| job["metadata"]["ownerReferences"][0]["name"] == name)
        .collect()
}

/// Updates so many of the Pods, and waits for them.
async fn updated(field: &Field, name: &str, count: usize) {
    let spec = update::in_place(json!({ "partition": ALL - count }));
    field.image_and(name, NEXT, spec).await;
    let wanted = i32::try_from(count).unwrap();
    let so_many = |set: &CloneSet| {
        let status = set.status.as_ref().unwrap();
        status.update_revision != status.current_revision
            && [status.updated_replicas, status.updated_ready_replicas] == [wanted; 2]
    };
    field.status(name, "as many updated as asked for", so_many).await;
}

/// The image is pulled on so many nodes at a time, once so many Pods have it and are ready.
async fn pulled_ahead(field: &Field, name: &str, annotations: &Value) {
    let number = |key: &str| {
        annotations[key]
            .as_str()
            .map(|text| text.parse::<usize>().unwrap())
    };
    let least = number(keys::IMAGE_PRE_DOWNLOAD_MIN_UPDATED_READY_PODS).unwrap_or_default();
    if least > 0 {
        updated(field, name, least - 1).await;
        assert_eq!(
            jobs(field, name).await,
            Vec::<Value>::new(),
            "before {least} are updated"
        );
    }
    updated(field, name, least).await;
    let some = || async { Some(jobs(field, name).await).filter(|jobs| !jobs.is_empty()) };
    let jobs = field.until("a job that pulls ahead", some).await;
    let parallelism = number(keys::IMAGE_PRE_DOWNLOAD_PARALLELISM).unwrap();
    let asked = |job: &Value| (text(&job["spec"]["image"]), job["spec"]["parallelism"].clone());
    let asked: Vec<(String, Value)> = jobs.iter().map(asked).collect();
    assert_eq!(asked, [(NEXT.to_owned(), json!(parallelism))]);
}

/// What the user's own controller does with a hook: puts onto a Pod what holds it, or takes it off.
async fn held(field: &Field, pod: &Value, hook: &Value, on: bool) {
    let labels = hook["labelsHandler"].as_object().into_iter().flatten();
    let value = |value: &Value| if on { value.clone() } else { Value::Null };
    let labels: serde_json::Map<String, Value> = labels.map(|(k, v)| (k.clone(), value(v))).collect();
    let finalizers = if on {
        hook["finalizersHandler"].clone()
    } else {
        Value::Null
    };
    let patch = Patch::Merge(json!({ "metadata": { "labels": labels, "finalizers": finalizers } }));
    let pods = field.pods();
    let params = PatchParams::default();
    pods.patch(&named(pod), &params, &patch).await.unwrap();
}

/// A Pod is held before its update, and after it until the hook is there again.
async fn hooked(field: &Field, name: &str, hook: &Value) {
    field.image_and(name, NEXT, update::in_place(json!({}))).await;
    let waits = |pod: &&Value| state(pod) == "PreparingUpdate";
    let pods = field
        .until_pods(name, "one held", |pods| pods.iter().any(waits))
        .await;
    let one = pods.iter().find(waits).unwrap();
    let ready = hook["markPodNotReady"] != true;
    let one = field
        .until_pod(&named(one), "ready or not", |pod| is(pod, "Ready") == ready)
        .await;
    assert_eq!(
        (state(&one), wanted_image(&one, 0)),
        ("PreparingUpdate".into(), FIRST.into())
    );
    held(field, &one, hook, false).await;
    let after = |pod: &Value| state(pod) == "Updated" && wanted_image(pod, 0) == NEXT;
    let after = field
        .until_pod(&named(&one), "held after its update", after)
        .await;
    assert_eq!(uid(&after), uid(&one));
    held(field, &one, hook, true).await;
    field
        .until_pod(&named(&one), "in use again", |pod| state(pod) == "Normal")
        .await;
}

/// The Pods have what is printed, and get more of it as they run.
async fn resized(field: &Field, name: &str, printed: &Value) {
    let resources = |pod: &Value| pod["spec"]["containers"][0]["resources"].clone();
    let before = field.pods_of(name).await;
    for pod in &before {
        assert_eq!(resources(pod), *printed);
    }
    let mut template = field.sets().get(name).await.unwrap().spec.template;
    template["spec"]["containers"][0]["resources"]["requests"]["cpu"] = json!("3");
    let mut spec = update::in_place(json!({}));
    spec["template"] = template;
    field.edit(name, json!({ "spec": spec })).await;
    field.settled(name).await;
    let after = field.pods_of(name).await;
    assert_eq!(identities(&before), identities(&after));
    for pod in &after {
        assert_eq!(resources(pod)["requests"]["cpu"], "3");
    }
}

/// Whether the manual prints a change: the fragment is for a CloneSet that is there.
fn is_a_change(fragment: &Value) -> bool {
    fragment["spec"]["scaleStrategy"]["podsToDelete"].is_array() || fragment["metadata"]["generation"] == 2
}

/// The fragment as a CloneSet of its own. Where it names no finalizer for its Pods, the hook for updates is on them all
/// the same, as it is where users want to be asked.
fn whole(base: &Value, fragment: &Value, name: &str) -> Value {
    if is_a_change(fragment) {
        return merged(base, &json!({}), name);
    }
    let mut object = merged(base, fragment, name);
    let hook = &fragment["spec"]["lifecycle"]["inPlaceUpdate"];
    if hook.is_object() && fragment["spec"]["lifecycle"]["preNormal"].is_null() {
        let labels = hook["labelsHandler"].as_object().cloned().unwrap_or_default();
        let on = json!({ "labels": labels, "finalizers": hook["finalizersHandler"] });
        json_patch::merge(&mut object["spec"]["template"]["metadata"], &on);
    }
    object
}

/// What a fragment says comes about.
async fn comes_about(field: &Field, sets: &Api<DynamicObject>, name: &str, fragment: Value) {
    let (metadata, spec) = (&fragment["metadata"], &fragment["spec"]);
    if spec["scaleStrategy"]["podsToDelete"].is_array() {
        return delete_one(field, sets, name, fragment).await;
    }
    if is_a_change(&fragment) {
        return changed(field, name, sets, &fragment).await;
    }
    if spec["minReadySeconds"] == 60 {
        says(field, name, "allows 0 to be made now").await;
        says(field, name, "(to be ready for 60 s, minReadySeconds)").await;
        assert_eq!(field.pods_of(name).await.len(), 1, "one at a time");
        return;
    }
    if spec["lifecycle"]["preNormal"].is_object() {
        let words = "hook preNormal: finalizer example.io/unready-blocker to be added";
        says(field, name, words).await;
        field
            .until_pods(name, "all there", |pods| pods.len() == ALL)
            .await;
        take_into_use(field, name).await;
    }
    let set = field.settled(name).await;
    let container = &spec["template"]["spec"]["containers"][0];
    if spec["updateStrategy"].is_object() {
        update::says_how(field, name, &spec["updateStrategy"]).await;
    } else if spec["lifecycle"].is_object() {
        hooked(field, name, &spec["lifecycle"]["inPlaceUpdate"]).await;
    } else if metadata["annotations"].is_object() {
        pulled_ahead(field, name, &metadata["annotations"]).await;
    } else if container["resources"].is_object() {
        resized(field, name, &container["resources"]).await;
    } else if container["image"].is_string() {
        update::all_run(&field.pods_of(name).await, &text(&container["image"]));
    } else if spec["scaleStrategy"]["disablePVCReuse"] == true {
        claims_are_not_reused(field, name).await;
    } else {
        let status = json!(set.status);
        assert!(as_printed(&status, &fragment["status"]), "{status}");
        assert_eq!(status["currentRevision"], status["updateRevision"]);
    }
}

#[tokio::test]
async fn the_manual_s_fragments_do_what_they_say() {
    let field = Field::new(world(), "fragments").await;
    let sets = field.api("apps.kruise.io", "v1alpha1", "CloneSet");
    let base = documents("cloneset.yaml")[1].clone();
    let fragments = documents("cloneset-fragments.yaml");
    assert_eq!(fragments.len(), 22);
    let named = |at: usize| format!("fragment-{at}");
    for (at, fragment) in fragments.iter().enumerate() {
        let object: DynamicObject = serde_json::from_value(whole(&base, fragment, &named(at))).unwrap();
        let made = sets.create(&PostParams::default(), &object).await;
        made.unwrap_or_else(|why| panic!("{why}: {fragment}"));
    }
    let all = fragments.into_iter().enumerate().map(|(at, fragment)| {
        let (field, sets, name) = (&field, &sets, named(at));
        async move { comes_about(field, sets, &name, fragment).await }
    });
    futures::future::join_all(all).await;
}

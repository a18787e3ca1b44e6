//! The fragments of OpenKruise's manual, each merged onto an example: the described behaviour is observed.

use kruise_api::cloneset::CloneSet;
use kruise_api::keys;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::fixture::{Fixture, identities};
use crate::pods::{condition_is_true, label, lifecycle_state, name as named, spec_image, text, uid};
use crate::test_cluster::{shared_cluster, wait_until};
use crate::upstream_examples::documents;

mod update;

/// The finalizer of the manual's hooks.
const HOOK: &str = "example.io/unready-blocker";
/// The example's image, and the one that follows it.
const OLD_IMAGE: &str = "nginx:alpine";
const NEW_IMAGE: &str = "nginx:mainline";
/// The example's replicas.
const REPLICAS: usize = 5;

/// The base with a name and labels of its own, and the fragment merged onto it.
fn merge_fragment(base: &Value, fragment: &Value, name: &str) -> Value {
    let mut object = base.clone();
    json_patch::merge(&mut object, fragment);
    let identity = json!({ "metadata": { "name": name }, "spec": {
        "selector": { "matchLabels": { "app": name } },
        "template": { "metadata": { "labels": { "app": name } } },
    } });
    json_patch::merge(&mut object, &identity);
    // A fragment with one field of a container keeps the container's other fields.
    let container = &mut object["spec"]["template"]["spec"]["containers"][0];
    if container["image"].is_null() {
        container["image"] = json!(OLD_IMAGE);
    }
    object
}

/// Waits until condition Waiting contains this text.
async fn wait_for_waiting_message(fixture: &Fixture, name: &str, expected: &'static str) -> CloneSet {
    wait_until(&fixture.sets(), name, expected, move |set: &CloneSet| {
        let status = set.status.iter().flat_map(|s| &s.conditions);
        let mut progressing = status.filter(|c| c.type_ == "Waiting");
        progressing.any(|c| c.message.contains(expected))
    })
    .await
}

/// What the user's own controller does for hook `preNormal`.
async fn add_pre_normal_finalizer(fixture: &Fixture, name: &str) {
    for (pod, _) in identities(&fixture.pods_of(name).await) {
        let patch = Patch::Merge(json!({ "metadata": { "finalizers": [HOOK] } }));
        fixture
            .pods()
            .patch(&pod, &PatchParams::default(), &patch)
            .await
            .unwrap();
    }
}

/// Lists one of its Pods in `podsToDelete`, as the manual does.
async fn check_pods_to_delete(fixture: &Fixture, sets: &Api<DynamicObject>, name: &str, mut fragment: Value) {
    fixture.wait_settled(name).await;
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
    let deleted = identities(&fixture.pods_of(name).await)[0].clone();
    fragment["spec"]["scaleStrategy"]["podsToDelete"] = json!([deleted.0]);
    sets.patch(name, &PatchParams::default(), &Patch::Merge(fragment))
        .await
        .unwrap();
    let pod_replaced =
        |pods: &[&Value]| pods.len() == 4 && pods.iter().all(|p| p["metadata"]["uid"] != deleted.1.as_str());
    fixture
        .wait_pods(name, "four, without the one that was named", pod_replaced)
        .await;
    fixture.wait_settled(name).await;
}

/// Whether the status has the numbers that the manual prints.
fn matches_printed_status(status: &Value, printed: &Value) -> bool {
    let mut counters = printed
        .as_object()
        .unwrap()
        .iter()
        .filter(|(_, value)| value.is_i64());
    counters.all(|(fixture, value)| status[fixture] == *value)
}

/// A change that the manual prints together with the resulting status.
async fn check_printed_change(fixture: &Fixture, name: &str, sets: &Api<DynamicObject>, fragment: &Value) {
    let before = fixture.wait_settled(name).await.status.unwrap();
    let mut change = fragment.clone();
    change["metadata"]["name"] = json!(name);
    change["spec"]["template"]["metadata"]["labels"]["app"] = json!(name);
    let patch = Patch::Merge(change);
    sets.patch(name, &PatchParams::default(), &patch).await.unwrap();
    let printed = &fragment["status"];
    let set = fixture
        .wait_status(name, "as printed", |set| {
            matches_printed_status(&json!(set.status), printed)
        })
        .await;
    let status = set.status.unwrap();
    assert_eq!(status.current_revision, before.current_revision);
    assert_ne!(status.update_revision, status.current_revision);
    let pods = fixture.pods_of(name).await;
    let new = pods.iter().filter(|pod| spec_image(pod, 0) == NEW_IMAGE).count();
    assert_eq!((new, pods.len()), (2, REPLICAS), "three are kept");
    wait_for_waiting_message(fixture, name, "Pods are updated, as partition").await;
}

/// When a user deletes a Pod, its claim is deleted, and the new Pod gets a new claim.
async fn check_claims_are_not_reused(fixture: &Fixture, name: &str) {
    let pods = fixture.pods_of(name).await;
    let deleted = &pods[0];
    let params = DeleteParams::default();
    fixture.pods().delete(&named(deleted), &params).await.unwrap();
    let replaced = |pods: &[&Value]| pods.len() == 4 && pods.iter().all(|pod| named(pod) != named(deleted));
    fixture.wait_pods(name, "another of another name", replaced).await;
    let claims = || async {
        let of_set = |claim: &Value| claim["metadata"]["ownerReferences"][0]["name"] == name;
        let mut claims = fixture.owned_claims().await;
        claims.retain(of_set);
        let id = |object: &Value| label(object, keys::CLONESET_INSTANCE_ID);
        (claims.len() == 4 && claims.iter().all(|claim| id(claim) != id(deleted))).then_some(())
    };
    fixture
        .poll_until("four claims, and not that of the Pod that went", claims)
        .await;
}

/// The CloneSet's pre-download jobs.
async fn pre_download_jobs(fixture: &Fixture, name: &str) -> Vec<Value> {
    let jobs = fixture.api("apps.kruise.io", "v1beta1", "ImagePullJob");
    let list = jobs.list(&Default::default()).await.unwrap();
    let all = list.items.into_iter().map(|job| json!(job));
    all.filter(|job| job["metadata"]["ownerReferences"][0]["name"] == name)
        .collect()
}

/// Updates `count` of the Pods, and waits for them.
async fn update_replicas(fixture: &Fixture, name: &str, count: usize) {
    let spec = update::in_place_strategy(json!({ "partition": REPLICAS - count }));
    fixture.set_image_and_spec(name, NEW_IMAGE, spec).await;
    let expected = i32::try_from(count).unwrap();
    let reached = |set: &CloneSet| {
        let status = set.status.as_ref().unwrap();
        status.update_revision != status.current_revision
            && [status.updated_replicas, status.updated_ready_replicas] == [expected; 2]
    };
    fixture
        .wait_status(name, "as many updated as asked for", reached)
        .await;
}

/// The image is pre-downloaded with the given parallelism, once enough updated Pods are ready.
async fn check_image_pre_download(fixture: &Fixture, name: &str, annotations: &Value) {
    let number = |key: &str| {
        annotations[key]
            .as_str()
            .map(|text| text.parse::<usize>().unwrap())
    };
    let min_ready = number(keys::IMAGE_PRE_DOWNLOAD_MIN_UPDATED_READY_PODS).unwrap_or_default();
    if min_ready > 0 {
        update_replicas(fixture, name, min_ready - 1).await;
        assert_eq!(
            pre_download_jobs(fixture, name).await,
            Vec::<Value>::new(),
            "before {min_ready} are updated"
        );
    }
    update_replicas(fixture, name, min_ready).await;
    let any_job = || async { Some(pre_download_jobs(fixture, name).await).filter(|jobs| !jobs.is_empty()) };
    let jobs = fixture.poll_until("a job that pulls ahead", any_job).await;
    let parallelism = number(keys::IMAGE_PRE_DOWNLOAD_PARALLELISM).unwrap();
    let requested = |job: &Value| (text(&job["spec"]["image"]), job["spec"]["parallelism"].clone());
    let requested: Vec<(String, Value)> = jobs.iter().map(requested).collect();
    assert_eq!(requested, [(NEW_IMAGE.to_owned(), json!(parallelism))]);
}

/// What the user's own controller does with a hook: adds to a Pod what blocks it, or removes it.
async fn set_hook(fixture: &Fixture, pod: &Value, hook: &Value, present: bool) {
    let labels = hook["labelsHandler"].as_object().into_iter().flatten();
    let value = |value: &Value| if present { value.clone() } else { Value::Null };
    let labels: serde_json::Map<String, Value> = labels.map(|(k, v)| (k.clone(), value(v))).collect();
    let finalizers = if present {
        hook["finalizersHandler"].clone()
    } else {
        Value::Null
    };
    let patch = Patch::Merge(json!({ "metadata": { "labels": labels, "finalizers": finalizers } }));
    let pods = fixture.pods();
    let params = PatchParams::default();
    pods.patch(&named(pod), &params, &patch).await.unwrap();
}

/// A Pod is blocked before its update, and after it until the hook is set again.
async fn check_in_place_update_hook(fixture: &Fixture, name: &str, hook: &Value) {
    fixture
        .set_image_and_spec(name, NEW_IMAGE, update::in_place_strategy(json!({})))
        .await;
    let preparing = |pod: &&Value| lifecycle_state(pod) == "PreparingUpdate";
    let pods = fixture
        .wait_pods(name, "one held", |pods| pods.iter().any(preparing))
        .await;
    let one = pods.iter().find(preparing).unwrap();
    let ready = hook["markPodNotReady"] != true;
    let one = fixture
        .wait_pod(&named(one), "ready or not", |pod| {
            condition_is_true(pod, "Ready") == ready
        })
        .await;
    assert_eq!(
        (lifecycle_state(&one), spec_image(&one, 0)),
        ("PreparingUpdate".into(), OLD_IMAGE.into())
    );
    set_hook(fixture, &one, hook, false).await;
    let updated = |pod: &Value| lifecycle_state(pod) == "Updated" && spec_image(pod, 0) == NEW_IMAGE;
    let after = fixture
        .wait_pod(&named(&one), "held after its update", updated)
        .await;
    assert_eq!(uid(&after), uid(&one));
    set_hook(fixture, &one, hook, true).await;
    fixture
        .wait_pod(&named(&one), "in use again", |pod| {
            lifecycle_state(pod) == "Normal"
        })
        .await;
}

/// The Pods have the printed resources, and are resized while they run.
async fn check_resize(fixture: &Fixture, name: &str, printed: &Value) {
    let resources = |pod: &Value| pod["spec"]["containers"][0]["resources"].clone();
    let before = fixture.pods_of(name).await;
    for pod in &before {
        assert_eq!(resources(pod), *printed);
    }
    let mut template = fixture.sets().get(name).await.unwrap().spec.template;
    template["spec"]["containers"][0]["resources"]["requests"]["cpu"] = json!("3");
    let mut spec = update::in_place_strategy(json!({}));
    spec["template"] = template;
    fixture.patch_set(name, json!({ "spec": spec })).await;
    fixture.wait_settled(name).await;
    let after = fixture.pods_of(name).await;
    assert_eq!(identities(&before), identities(&after));
    for pod in &after {
        assert_eq!(resources(pod)["requests"]["cpu"], "3");
    }
}

/// Whether the manual prints a change of an existing CloneSet.
fn is_update_of_existing(fragment: &Value) -> bool {
    fragment["spec"]["scaleStrategy"]["podsToDelete"].is_array() || fragment["metadata"]["generation"] == 2
}

/// The fragment as a CloneSet of its own. If it names no finalizer for its Pods, they all have the update hook anyway,
/// as with users who want to confirm updates.
fn merged_cloneset(base: &Value, fragment: &Value, name: &str) -> Value {
    if is_update_of_existing(fragment) {
        return merge_fragment(base, &json!({}), name);
    }
    let mut object = merge_fragment(base, fragment, name);
    let hook = &fragment["spec"]["lifecycle"]["inPlaceUpdate"];
    if hook.is_object() && fragment["spec"]["lifecycle"]["preNormal"].is_null() {
        let labels = hook["labelsHandler"].as_object().cloned().unwrap_or_default();
        let present = json!({ "labels": labels, "finalizers": hook["finalizersHandler"] });
        json_patch::merge(&mut object["spec"]["template"]["metadata"], &present);
    }
    object
}

/// Checks the behaviour that a fragment describes.
async fn check_fragment(fixture: &Fixture, sets: &Api<DynamicObject>, name: &str, fragment: Value) {
    let (metadata, spec) = (&fragment["metadata"], &fragment["spec"]);
    if spec["scaleStrategy"]["podsToDelete"].is_array() {
        return check_pods_to_delete(fixture, sets, name, fragment).await;
    }
    if is_update_of_existing(&fragment) {
        return check_printed_change(fixture, name, sets, &fragment).await;
    }
    if spec["minReadySeconds"] == 60 {
        wait_for_waiting_message(fixture, name, "allows 0 to be made now").await;
        wait_for_waiting_message(fixture, name, "(to be ready for 60 s, minReadySeconds)").await;
        assert_eq!(fixture.pods_of(name).await.len(), 1, "one at a time");
        return;
    }
    if spec["lifecycle"]["preNormal"].is_object() {
        let expected = "hook preNormal: finalizer example.io/unready-blocker to be added";
        wait_for_waiting_message(fixture, name, expected).await;
        fixture
            .wait_pods(name, "all there", |pods| pods.len() == REPLICAS)
            .await;
        add_pre_normal_finalizer(fixture, name).await;
    }
    let set = fixture.wait_settled(name).await;
    let container = &spec["template"]["spec"]["containers"][0];
    if spec["updateStrategy"].is_object() {
        update::check_update_strategy(fixture, name, &spec["updateStrategy"]).await;
    } else if spec["lifecycle"].is_object() {
        check_in_place_update_hook(fixture, name, &spec["lifecycle"]["inPlaceUpdate"]).await;
    } else if metadata["annotations"].is_object() {
        check_image_pre_download(fixture, name, &metadata["annotations"]).await;
    } else if container["resources"].is_object() {
        check_resize(fixture, name, &container["resources"]).await;
    } else if container["image"].is_string() {
        update::assert_all_run(&fixture.pods_of(name).await, &text(&container["image"]));
    } else if spec["scaleStrategy"]["disablePVCReuse"] == true {
        check_claims_are_not_reused(fixture, name).await;
    } else {
        let status = json!(set.status);
        assert!(matches_printed_status(&status, &fragment["status"]), "{status}");
        assert_eq!(status["currentRevision"], status["updateRevision"]);
    }
}

#[tokio::test]
async fn upstream_manual_fragments_take_effect() {
    let fixture = Fixture::new(shared_cluster(), "fragments").await;
    let sets = fixture.api("apps.kruise.io", "v1alpha1", "CloneSet");
    let base = documents("cloneset.yaml")[1].clone();
    let fragments = documents("cloneset-fragments.yaml");
    assert_eq!(fragments.len(), 22);
    let fragment_name = |index: usize| format!("fragment-{index}");
    for (index, fragment) in fragments.iter().enumerate() {
        let object: DynamicObject =
            serde_json::from_value(merged_cloneset(&base, fragment, &fragment_name(index))).unwrap();
        let created = sets.create(&PostParams::default(), &object).await;
        created.unwrap_or_else(|why| panic!("{why}: {fragment}"));
    }
    let all = fragments.into_iter().enumerate().map(|(index, fragment)| {
        let (fixture, sets, name) = (&fixture, &sets, fragment_name(index));
        async move { check_fragment(fixture, sets, &name, fragment).await }
    });
    futures::future::join_all(all).await;
}

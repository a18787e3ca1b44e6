use serde_json::{Value, json};

use super::*;
use crate::in_place::completion::WaitingFor;
use kruise_api::in_place::InPlaceUpdateState;
use kruise_api::keys;

fn with_priority(pod: &mut Value, at: usize, priority: i64) {
    pod["spec"]["containers"][at]["env"] = json!([{
        "name": keys::ENV_CONTAINER_BARRIER,
        "valueFrom": { "configMapKeyRef": { "name": "barrier", "key": format!("p_{priority}") } },
    }]);
}

fn update_state_of(pod: &Value) -> InPlaceUpdateState {
    update_state(&Pod::from_json(pod)).unwrap().unwrap()
}

fn run_new(pod: &mut Value, at: usize, ready: bool) {
    let expected = image(pod, at).to_owned();
    let status = &mut pod["status"]["containerStatuses"][at];
    let name = status["name"].as_str().unwrap().to_owned();
    status["containerID"] = json!(format!("containerd://{name}-new"));
    status["image"] = json!(format!("docker.io/library/{expected}"));
    status["imageID"] = json!(format!("sha256:{name}-2"));
    status["ready"] = json!(ready);
}

fn image(pod: &Value, at: usize) -> &str {
    pod["spec"]["containers"][at]["image"].as_str().unwrap()
}

#[test]
fn higher_launch_priority_updates_first() {
    let mut pod = pod(&["app", "proxy", "log"]);
    with_priority(&mut pod, 0, 1);
    with_priority(&mut pod, 1, 5);
    start(
        &mut pod,
        &images(&[("app", "app:2"), ("proxy", "proxy:2"), ("log", "log:2")]),
    );
    assert_eq!(
        [image(&pod, 0), image(&pod, 1), image(&pod, 2)],
        ["app:1", "proxy:2", "log:2"]
    );
    let state = update_state_of(&pod);
    assert_eq!(
        state.pre_check_before_next.unwrap().containers_required_ready,
        ["log", "proxy"]
    );
    assert_eq!(state.container_batches_record[0].containers, ["log", "proxy"]);
    assert!(matches!(
        refresh_at(&pod, 1),
        RefreshResult::Wait(WaitingFor::NewContainer(..))
    ));
    run_new(&mut pod, 1, false);
    run_new(&mut pod, 2, true);
    assert_eq!(
        refresh_at(&pod, 2),
        RefreshResult::Wait(WaitingFor::ContainerReady("proxy".into()))
    );
    assert!(matches!(
        progress(&Pod::from_json(&pod)),
        UpdateProgress::Waiting(WaitingFor::NextBatch)
    ));
    run_new(&mut pod, 1, true);
    let RefreshResult::Patch(writes) = refresh_at(&pod, 3) else {
        panic!("the next batch is due")
    };
    apply_all(&mut pod, &writes);
    assert_eq!(image(&pod, 0), "app:2");
    let state = update_state_of(&pod);
    assert_eq!(state.pre_check_before_next, None);
    assert_eq!(state.container_batches_record.len(), 2);
    assert_eq!(state.last_container_statuses.len(), 3);
    run_new(&mut pod, 0, true);
    assert_eq!(refresh_at(&pod, 4), RefreshResult::Done);
}

#[test]
fn next_update_includes_pending_batches() {
    let mut pod = pod(&["app", "proxy"]);
    with_priority(&mut pod, 0, 1);
    with_priority(&mut pod, 1, 5);
    start(&mut pod, &images(&[("app", "app:2"), ("proxy", "proxy:2")]));
    start(&mut pod, &images(&[("proxy", "proxy:3")]));
    assert_eq!([image(&pod, 0), image(&pod, 1)], ["app:1", "proxy:3"]);
    run_new(&mut pod, 1, true);
    let RefreshResult::Patch(writes) = refresh_at(&pod, 3) else {
        panic!("the next batch is due");
    };
    apply_all(&mut pod, &writes);
    assert_eq!([image(&pod, 0), image(&pod, 1)], ["app:2", "proxy:3"]);
}

#[test]
fn last_batch_of_resources_only_completes() {
    let mut pod = pod(&["app", "proxy"]);
    with_priority(&mut pod, 0, 1);
    with_priority(&mut pod, 1, 5);
    let mut spec = images(&[("proxy", "proxy:2")]);
    spec.container_resources =
        serde_json::from_value(json!({ "app": { "limits": { "cpu": "2" } } })).unwrap();
    start(&mut pod, &spec);
    run_new(&mut pod, 1, true);
    // A pending change cannot be in effect; it must not be waited for.
    pod["status"]["containerStatuses"][0]["resources"] = json!({});
    pod["status"]["containerStatuses"][1]["resources"] = json!({});
    let RefreshResult::Patch(writes) = refresh_at(&pod, 3) else {
        panic!("{:?}", refresh_at(&pod, 3))
    };
    assert_eq!(writes[0].target, PatchTarget::Resize);
    apply_all(&mut pod, &writes);
    assert_eq!(pod["spec"]["containers"][0]["resources"]["limits"]["cpu"], "2");
    assert!(matches!(
        refresh_at(&pod, 4),
        RefreshResult::Wait(WaitingFor::Resources(..))
    ));
}

#[test]
fn containers_reading_one_label_share_a_batch() {
    let mut pod = pod(&["a", "b", "c"]);
    for (at, priority) in [(0, 9), (1, 5), (2, 1)] {
        with_priority(&mut pod, at, priority);
    }
    let mut spec = images(&[]);
    spec.update_env_from_metadata = true;
    for (name, keys) in [("a", ["k1", "k1"]), ("b", ["k1", "k2"]), ("c", ["k2", "k3"])] {
        let read = spec.container_ref_metadata.entry(name.into()).or_default();
        read.annotations
            .extend(keys.map(|k| (k.to_owned(), "2".to_owned())));
    }
    start(&mut pod, &spec);
    assert_eq!(
        update_state_of(&pod).container_batches_record[0].containers,
        ["a", "b", "c"]
    );
    assert_eq!(pod["metadata"]["annotations"]["k3"], "2");
}

/// It is removed with the first batch, and its readers restart then: a later image would restart them again.
#[test]
fn containers_reading_a_removed_annotation_are_in_the_first_batch() {
    for (env_is_updated, app) in [(true, "app:2"), (false, "app:1")] {
        let mut pod = pod(&["app", "proxy", "log"]);
        for (at, priority) in [(0, 1), (1, 5), (2, 1)] {
            with_priority(&mut pod, at, priority);
        }
        pod["metadata"]["annotations"]["level"] = json!("info");
        let read = json!({ "fieldRef": { "fieldPath": "metadata.annotations['level']" } });
        let env = pod["spec"]["containers"][0]["env"].as_array_mut().unwrap();
        env.push(json!({ "name": "LEVEL", "valueFrom": read }));
        let mut spec = images(&[("app", "app:2"), ("proxy", "proxy:2"), ("log", "log:2")]);
        spec.update_env_from_metadata = env_is_updated;
        spec.meta_data_patch = Some(in_base64(
            &json!({ "metadata": { "annotations": { "level": null } } }),
        ));
        start(&mut pod, &spec);
        assert!(pod["metadata"]["annotations"].get("level").is_none());
        let images = [image(&pod, 0), image(&pod, 1), image(&pod, 2)];
        assert_eq!(images, [app, "proxy:2", "log:1"]);
    }
}

#[test]
fn change_waits_for_grace_period() {
    let mut pod = pod(&["main"]);
    let mut spec = images(&[("main", "main:2")]);
    spec.grace_seconds = 10;
    pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_STATE_OLD] = json!("{}");
    let writes = start(&mut pod, &spec);
    assert_eq!(
        writes.iter().map(|w| w.target).collect::<Vec<_>>(),
        [PatchTarget::Status, PatchTarget::Pod]
    );
    assert_eq!(image(&pod, 0), "main:1");
    assert!(
        pod["metadata"]["annotations"]
            .get(keys::IN_PLACE_UPDATE_STATE_OLD)
            .is_none()
    );
    assert!(!condition_is_true(&pod, "Ready"));
    assert_eq!(
        refresh_at(&pod, 9),
        RefreshResult::Wait(WaitingFor::GracePeriod(Some(timestamp(10))))
    );
    assert!(matches!(
        progress(&Pod::from_json(&pod)),
        UpdateProgress::Waiting(WaitingFor::GracePeriod(None))
    ));
    let refreshed = refresh(
        &Pod::from_json(&pod),
        |_| false,
        Template::unknown(),
        timestamp(1),
    );
    let RefreshResult::Patch(writes) = refreshed else {
        panic!("{refreshed:?}")
    };
    let mut taken_back = pod.clone();
    apply_all(&mut taken_back, &writes);
    assert_eq!(grace_spec(&Pod::from_json(&taken_back)), Ok(None));
    let RefreshResult::Patch(writes) = refresh_at(&pod, 10) else {
        panic!("the grace period is over")
    };
    apply_all(&mut pod, &writes);
    assert_eq!(image(&pod, 0), "main:2");
    assert_eq!(grace_spec(&Pod::from_json(&pod)), Ok(None));
    let last = &update_state_of(&pod).last_container_statuses["main"];
    assert_eq!(last.container_id.as_deref(), Some("containerd://main-0"));
}

/// The Pod would be out of its Services until the clock is there again.
#[test]
fn grace_period_is_over_when_the_clock_is_set_back() {
    let mut pod = pod(&["main"]);
    let mut spec = images(&[("main", "main:2")]);
    spec.grace_seconds = 10;
    start(&mut pod, &spec);
    // Two API servers differ by 2 s.
    assert_eq!(
        refresh_at(&pod, -2),
        RefreshResult::Wait(WaitingFor::GracePeriod(Some(timestamp(10))))
    );
    assert!(matches!(refresh_at(&pod, -3600), RefreshResult::Patch(_)));
}

/// A change that the API server would refuse must not take a Pod out of its Services, even if it comes later.
#[test]
fn change_after_grace_period_can_be_dry_run() {
    let mut pod = pod(&["main"]);
    let mut spec = images(&[("main", "main:2")]);
    let trials = |writes: &[PodWrite]| -> Vec<Option<Value>> {
        let trials = writes.iter().map(|write| write.dry_run.as_deref().cloned());
        trials.collect()
    };
    let writes = start(&mut pod.clone(), &spec);
    assert_eq!(trials(&writes), [None, None]);
    let at_once = writes[1].patch.clone();
    spec.grace_seconds = 10;
    let writes = start(&mut pod, &spec);
    assert_eq!(trials(&writes), [None, Some(at_once)]);
    assert_eq!(image(&pod, 0), "main:1");
}

#[test]
fn new_revision_replaces_a_waiting_grace_period() {
    let mut pod = pod(&["main", "side"]);
    let mut spec = images(&[("main", "main:2")]);
    spec.grace_seconds = 10;
    let labels = |labels: Value| Some(in_base64(&json!({ "metadata": { "labels": labels } })));
    spec.meta_data_patch = labels(json!({ "tier": "b", "old": "x" }));
    start(&mut pod, &spec);
    let mut other = images(&[("side", "side:2")]);
    other.meta_data_patch = labels(json!({ "tier": "c", "old": null }));
    let mut revision = target_revision(&pod, &images(&[("main", "main:2"), ("side", "side:2")]));
    revision["spec"]["template"]["metadata"] = json!({ "labels": { "tier": "c" } });
    // With its own grace period, the annotation holds what OpenKruise would apply.
    other.grace_seconds = 10;
    let waits = begin(&Pod::from_json(&pod), &revision, &other);
    let mut waiting = pod.clone();
    apply_all(&mut waiting, &waits);
    let written = grace_spec(&Pod::from_json(&waiting))
        .unwrap()
        .unwrap()
        .meta_data_patch
        .unwrap();
    let written = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, written).unwrap();
    let written: Value = serde_json::from_slice(&written).unwrap();
    assert_eq!(
        written,
        json!({ "metadata": { "labels": { "tier": "c", "old": null } } })
    );

    other.grace_seconds = 0;
    let writes = begin(&Pod::from_json(&pod), &revision, &other);
    apply_all(&mut pod, &writes);
    assert_eq!([image(&pod, 0), image(&pod, 1)], ["main:2", "side:2"]);
    let labels = &pod["metadata"]["labels"];
    assert_eq!([&labels["tier"], &labels["old"]], [&json!("c"), &Value::Null]);
    assert_eq!(grace_spec(&Pod::from_json(&pod)), Ok(None));
}

#[test]
fn unknown_pod_fields_survive_patches() {
    let mut pod = pod(&["main"]);
    pod["spec"]["containers"][0]["ofNextYear"] = json!({ "a": 1 });
    pod["spec"]["alsoNew"] = json!(true);
    let before = pod.clone();
    start(&mut pod, &images(&[("main", "main:2")]));
    assert_eq!(
        pod["spec"]["containers"][0]["ofNextYear"],
        before["spec"]["containers"][0]["ofNextYear"]
    );
    assert_eq!(pod["spec"]["alsoNew"], true);
    assert_eq!(pod["metadata"]["annotations"]["ours"], "not");
}

/// A Pod whose annotation, which other users may write, requests this update after the grace period.
fn pod_in_grace_period(grace: &Value) -> Value {
    let mut pod = pod(&["app", "side"]);
    pod["revision"] = target_revision(&pod, &images(&[("app", "app:2")]));
    let metadata =
        json!({ "labels": { "tier": "a" }, "annotations": {}, "finalizers": ["example.com/ours"] });
    pod["revision"]["spec"]["template"]["metadata"] = metadata;
    pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_STATE] = json!(r#"{"revision":"r2"}"#);
    pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_GRACE] = json!(grace.to_string());
    pod
}

fn in_base64(patch: &Value) -> String {
    use base64::Engine;
    base64::engine::general_purpose::STANDARD.encode(patch.to_string())
}

#[test]
fn metadata_after_grace_comes_from_the_revision() {
    let hostile = [
        json!("x"),
        json!({ "metadata": "x" }),
        json!({ "metadata": { "annotations": 1, "labels": ["x"], "finalizers": "x", "name": "other" } }),
        json!({ "metadata": { "finalizers": ["x"], "$deleteFromPrimitiveList/finalizers": ["example.com/ours", 1] } }),
        json!({ "spec": { "serviceAccountName": "other" }, "metadata": { "labels": { "tier": "b", "x": "y" } } }),
    ];
    for patch in hostile {
        let mut pod = pod_in_grace_period(&json!({ "revision": "r2", "metaDataPatch": in_base64(&patch) }));
        let labelled = patch["spec"].is_object();
        pod["metadata"]["labels"]["x"] = json!("y");
        let RefreshResult::Patch(writes) = refresh_at(&pod, 1) else {
            panic!("no write for {patch}");
        };
        let before = pod.clone();
        apply_all(&mut pod, &writes);
        assert_eq!(pod["spec"], before["spec"]);
        assert_eq!(pod["metadata"]["finalizers"], Value::Null);
        let labels = json!({ "app": "x", "tier": "a" });
        let expected = if labelled {
            &labels
        } else {
            &before["metadata"]["labels"]
        };
        assert_eq!(pod["metadata"]["labels"], *expected, "{patch}");
        assert_eq!(pod["metadata"]["name"], before["metadata"]["name"]);
    }
    let patch = json!({ "metadata": { "finalizers": ["example.com/ours"],
        "$deleteFromPrimitiveList/finalizers": ["example.com/old"] } });
    let mut pod = pod_in_grace_period(&json!({ "revision": "r2", "metaDataPatch": in_base64(&patch) }));
    pod["metadata"]["finalizers"] = json!(["example.com/old"]);
    let RefreshResult::Patch(writes) = refresh_at(&pod, 1) else {
        panic!("the grace period is over");
    };
    apply_all(&mut pod, &writes);
    assert_eq!(pod["metadata"]["finalizers"], json!(["example.com/ours"]));
}

/// Labels and annotations may be written with the status of a Pod; that permission must not select what runs.
#[test]
fn images_after_grace_and_batches_come_from_the_revision() {
    let images = json!({ "app": "evil:1", "side": "evil:2", "other": "evil:3" });
    let sizes = json!({ "app": { "limits": { "cpu": "999", "example.com/gpu": "8" } } });
    let read = json!({ "app": { "annotations": { "x": "evil" }, "labels": { "tier": "evil" } } });
    let grace = json!({ "revision": "r2", "containerImages": images, "containerResources": sizes,
        "containerRefMetadata": read });
    let mut waiting = pod_in_grace_period(&grace);
    let mut batch = pod_in_grace_period(&json!({}));
    batch["metadata"]["annotations"][keys::IN_PLACE_UPDATE_GRACE] = json!("");
    let state = json!({ "revision": "r2", "nextContainerImages": images, "nextContainerResources": sizes,
        "nextContainerRefMetadata": read });
    batch["metadata"]["annotations"][keys::IN_PLACE_UPDATE_STATE] = json!(state.to_string());
    for pod in [&mut waiting, &mut batch] {
        let RefreshResult::Patch(writes) = refresh_at(pod, 1) else {
            panic!("it is due");
        };
        apply_all(pod, &writes);
        assert_eq!([image(pod, 0), image(pod, 1)], ["app:2", "side:1"]);
        assert_eq!(pod["spec"]["containers"][0]["resources"], json!({}));
        assert_eq!(pod["metadata"]["labels"]["tier"], "a");
        assert_eq!(pod["metadata"]["annotations"]["x"], Value::Null);
        let text = json!(writes.iter().map(|write| &write.patch).collect::<Vec<_>>()).to_string();
        assert!(!text.contains("evil") && !text.contains("999"), "{text}");
    }
    // The same if another update takes over what is left of it.
    let mut pod = batch;
    pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_STATE] = json!(state.to_string());
    let writes = start(&mut pod, &super::images(&[("side", "side:2")]));
    assert_eq!([image(&pod, 0), image(&pod, 1)], ["app:2", "side:2"]);
    assert!(
        !json!(writes.iter().map(|write| &write.patch).collect::<Vec<_>>())
            .to_string()
            .contains("evil")
    );
}

#[test]
fn unknown_revision_changes_no_image() {
    let mut pod = pod_in_grace_period(&json!({ "revision": "r2", "containerImages": { "app": "app:2" } }));
    let at_it = |revision: &str| revision == "r2";
    let RefreshResult::Patch(writes) =
        refresh(&Pod::from_json(&pod), at_it, Template::unknown(), timestamp(1))
    else {
        panic!("the grace period is over");
    };
    apply_all(&mut pod, &writes);
    assert_eq!(image(&pod, 0), "app:1");
    assert_eq!(grace_spec(&Pod::from_json(&pod)), Ok(None));
}

#[test]
fn pending_resize_merges_with_a_new_one() {
    let mut pod = pod(&["app", "proxy"]);
    with_priority(&mut pod, 0, 5);
    with_priority(&mut pod, 1, 1);
    let size =
        |requests: Value| serde_json::from_value(json!({ "proxy": { "requests": requests } })).unwrap();
    let mut first = images(&[("app", "app:2")]);
    first.container_resources = size(json!({ "cpu": "2", "memory": "1Gi" }));
    start(&mut pod, &first);
    assert_eq!(pod["spec"]["containers"][1]["resources"]["requests"], Value::Null);
    let mut second = images(&[]);
    second.container_resources = size(json!({ "memory": "2Gi" }));
    start(&mut pod, &second);
    let requests = &pod["spec"]["containers"][1]["resources"]["requests"];
    assert_eq!(*requests, json!({ "cpu": "2", "memory": "2Gi" }));
}

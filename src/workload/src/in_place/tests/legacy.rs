//! Annotations under the keys of old releases: they are read if the new ones are missing, and the next write removes
//! them.

use serde_json::{Value, json};

use super::*;
use crate::in_place::completion::WaitingFor;
use kruise_api::in_place::InPlaceUpdateState;
use kruise_api::keys;

const OLD_STATE: &str = "inplace-update-state";
const OLD_GRACE: &str = "inplace-update-grace";

/// The state that an old release wrote when it changed the image of `main`.
fn legacy_state() -> String {
    let last = json!({ "main": { "imageID": "sha256:main-1" } });
    let state = json!({ "revision": "r2", "updateTimestamp": timestamp(0).to_string(), "lastContainerStatuses": last });
    state.to_string()
}

/// A Pod with annotations of an old release.
fn annotated_pod(state: &str, grace: Option<&Value>) -> Value {
    let mut pod = pod(&["main"]);
    pod["metadata"]["annotations"][OLD_STATE] = json!(state);
    if let Some(grace) = grace {
        pod["metadata"]["annotations"][OLD_GRACE] = json!(grace.to_string());
    }
    pod
}

fn keys_of(pod: &Value) -> Vec<&str> {
    let all = pod["metadata"]["annotations"].as_object().unwrap();
    let ours = all
        .keys()
        .map(String::as_str)
        .filter(|key| key.contains("inplace"));
    ours.collect()
}

#[test]
fn legacy_update_state_is_waited_for() {
    let mut pod = annotated_pod(&legacy_state(), None);
    pod["spec"]["containers"][0]["image"] = json!("main:2");
    assert!(matches!(
        refresh_at(&pod, 1),
        RefreshResult::Wait(WaitingFor::NewContainer(..))
    ));
    let status = &mut pod["status"]["containerStatuses"][0];
    status["containerID"] = json!("containerd://new");
    status["imageID"] = json!("sha256:main-2");
    assert_eq!(refresh_at(&pod, 2), RefreshResult::Done);
    assert_eq!(progress(&Pod::from_json(&pod)), UpdateProgress::Done);
}

#[test]
fn new_annotation_keys_win_over_legacy_ones() {
    let mut pod = annotated_pod("{", Some(&json!("not even an object")));
    pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_STATE] = json!(legacy_state());
    pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_GRACE] = json!("");
    let read: InPlaceUpdateState = update_state(&Pod::from_json(&pod)).unwrap().unwrap();
    assert_eq!(read.revision, "r2");
    assert_eq!(grace_spec(&Pod::from_json(&pod)), Ok(None));
}

#[test]
fn legacy_grace_period_ends_and_keys_are_removed() {
    let waits = json!({ "revision": "r2", "containerImages": { "main": "main:2" }, "graceSeconds": 10 });
    let mut pod = annotated_pod(&legacy_state(), Some(&waits));
    pod["revision"] = target_revision(&pod, &images(&[("main", "main:2")]));
    assert_eq!(
        refresh_at(&pod, 9),
        RefreshResult::Wait(WaitingFor::GracePeriod(Some(timestamp(10))))
    );
    let RefreshResult::Patch(writes) = refresh_at(&pod, 10) else {
        panic!("the grace period is over")
    };
    apply_all(&mut pod, &writes);
    assert_eq!(pod["spec"]["containers"][0]["image"], "main:2");
    assert_eq!(keys_of(&pod), [keys::IN_PLACE_UPDATE_STATE]);
}

#[test]
fn rollback_clears_legacy_grace_period() {
    let waits = json!({ "revision": "r2", "containerImages": { "main": "main:2" }, "graceSeconds": 10 });
    let mut pod = annotated_pod(&legacy_state(), Some(&waits));
    let RefreshResult::Patch(writes) = refresh(
        &Pod::from_json(&pod),
        |_| false,
        Template::unknown(),
        timestamp(1),
    ) else {
        panic!("the cancelled update must be cleared")
    };
    apply_all(&mut pod, &writes);
    assert_eq!(keys_of(&pod), [OLD_STATE], "nothing else is written");

    // Another update replaces both.
    let mut pod = annotated_pod(&legacy_state(), Some(&waits));
    start(&mut pod, &images(&[("main", "main:3")]));
    assert_eq!(keys_of(&pod), [keys::IN_PLACE_UPDATE_STATE]);
}

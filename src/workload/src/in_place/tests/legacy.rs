//! Annotations under the keys of old releases: they are read where the new ones are not there, and go with the next
//! write.

use serde_json::{Value, json};

use super::*;
use crate::in_place::complete::Waiting;
use kruise_api::in_place::InPlaceUpdateState;
use kruise_api::keys;

const OLD_STATE: &str = "inplace-update-state";
const OLD_GRACE: &str = "inplace-update-grace";

/// What an old release wrote when it gave `main` another image.
fn begun() -> String {
    let last = json!({ "main": { "imageID": "sha256:main-1" } });
    let state =
        json!({ "revision": "r2", "updateTimestamp": at(0).to_string(), "lastContainerStatuses": last });
    state.to_string()
}

/// A Pod with annotations of an old release.
fn annotated(state: &str, grace: Option<&Value>) -> Value {
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
fn an_update_that_an_old_release_began_is_waited_for() {
    let mut pod = annotated(&begun(), None);
    pod["spec"]["containers"][0]["image"] = json!("main:2");
    assert!(matches!(next(&pod, 1), Refresh::Wait(Waiting::NewContainer(..))));
    let status = &mut pod["status"]["containerStatuses"][0];
    status["containerID"] = json!("containerd://new");
    status["imageID"] = json!("sha256:main-2");
    assert_eq!(next(&pod, 2), Refresh::Done);
    assert_eq!(progress(&Pod::of(&pod)), Progress::Done);
}

#[test]
fn the_new_keys_count_where_both_are_there() {
    let mut pod = annotated("{", Some(&json!("not even an object")));
    pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_STATE] = json!(begun());
    pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_GRACE] = json!("");
    let read: InPlaceUpdateState = state(&Pod::of(&pod)).unwrap().unwrap();
    assert_eq!(read.revision, "r2");
    assert_eq!(grace(&Pod::of(&pod)), Ok(None));
}

#[test]
fn a_grace_period_that_an_old_release_began_ends_and_the_old_keys_go() {
    let waits = json!({ "revision": "r2", "containerImages": { "main": "main:2" }, "graceSeconds": 10 });
    let mut pod = annotated(&begun(), Some(&waits));
    pod["revision"] = revision(&pod, &images(&[("main", "main:2")]));
    assert_eq!(next(&pod, 9), Refresh::Wait(Waiting::Grace(Some(at(10)))));
    let Refresh::Act(writes) = next(&pod, 10) else {
        panic!("the grace period is over")
    };
    apply_all(&mut pod, &writes);
    assert_eq!(pod["spec"]["containers"][0]["image"], "main:2");
    assert_eq!(keys_of(&pod), [keys::IN_PLACE_UPDATE_STATE]);
}

#[test]
fn a_grace_period_of_an_old_release_is_forgotten_when_the_update_is_taken_back() {
    let waits = json!({ "revision": "r2", "containerImages": { "main": "main:2" }, "graceSeconds": 10 });
    let mut pod = annotated(&begun(), Some(&waits));
    let Refresh::Act(writes) = refresh(&Pod::of(&pod), |_| false, Template::unknown(), at(1)) else {
        panic!("it is not to be updated any more")
    };
    apply_all(&mut pod, &writes);
    assert_eq!(keys_of(&pod), [OLD_STATE], "nothing else is written");

    // Another update takes the place of both.
    let mut pod = annotated(&begun(), Some(&waits));
    start(&mut pod, &images(&[("main", "main:3")]));
    assert_eq!(keys_of(&pod), [keys::IN_PLACE_UPDATE_STATE]);
}

//! What each manager tells of the same acts, and what it does about Pods of nobody.

use std::collections::BTreeSet;
use std::sync::Mutex;

use k8s_openapi::api::core::v1::Event;
use kruise_api::cloneset::CloneSetStatus;
use kube::api::{Api, ListParams};
use serde_json::{Value, json};
use testbed::cluster::ControlPlane;

use crate::bed::Bed;
use crate::charts::{Theirs, take_over};
use support::connect::connect;
use support::sets::Sets;

/// A CloneSet of two Pods, each wanted at once: no kubelet runs them.
async fn made(sets: &Sets) {
    // No controller makes it here.
    let account = json!({ "metadata": { "name": "default" } });
    sets.create(&sets.api("", "v1", "ServiceAccount"), account).await;
    let container = json!({ "name": "app", "image": "example.com/app:1" });
    let template =
        json!({ "metadata": { "labels": { "app": "web" } }, "spec": { "containers": [container] } });
    let spec = json!({ "replicas": 2, "progressDeadlineSeconds": 600 });
    sets.make("web", template, json!("100%"), &spec).await;
    settled(sets, |status| status.replicas == 2).await;
}

async fn settled(sets: &Sets, is: impl Fn(&CloneSetStatus) -> bool) {
    let what = format!("{}: the CloneSet is as wanted", sets.namespace);
    let ask = || async {
        let set = sets.sets().get("web").await.unwrap();
        let status = set.status?;
        (status.observed_generation == set.metadata.generation && is(&status)).then_some(())
    };
    sets.until(&what, ask).await;
}

/// Condition `Progressing` of the CloneSet: status, reason and message.
async fn progressing(sets: &Sets) -> Option<[String; 3]> {
    let set = sets.sets().get("web").await.unwrap();
    let conditions = json!(set.status?.conditions);
    let condition = conditions
        .as_array()?
        .iter()
        .find(|c| c["type"] == "Progressing")?;
    Some(
        ["status", "reason", "message"].map(|field| condition[field].as_str().unwrap_or_default().to_owned()),
    )
}

/// Has the manager update Pods in place and by new ones, make and delete some, make fewer than asked for, and fail. Returns
/// what `Progressing` was in between.
async fn worked_on(sets: &Sets) -> Vec<Option<[String; 3]>> {
    let mut conditions = vec![progressing(sets).await];
    sets.image("web", "example.com/app:2").await;
    settled(sets, |status| status.updated_replicas == 2).await;
    conditions.push(progressing(sets).await);
    let command = json!([{ "name": "app", "image": "example.com/app:2", "command": ["run"] }]);
    let recreate = json!({ "spec": { "template": { "spec": { "containers": command } } } });
    sets.edit("web", recreate).await;
    settled(sets, |status| {
        status.updated_replicas == 2 && status.replicas == 2
    })
    .await;
    conditions.push(progressing(sets).await);
    let paused =
        |paused: bool| json!({ "spec": { "updateStrategy": { "rollingUpdate": { "paused": paused } } } });
    for is in [true, false] {
        sets.edit("web", paused(is)).await;
        settled(sets, |_| true).await;
        conditions.push(progressing(sets).await);
    }
    sets.edit("web", json!({ "spec": { "replicas": 1 } })).await;
    settled(sets, |status| status.replicas == 1).await;
    conditions.push(progressing(sets).await);
    // The Pod that is there is not ready, and the first that is made neither.
    let limited = json!({ "spec": { "replicas": 4, "scaleStrategy": { "maxUnavailable": 2 } } });
    sets.edit("web", limited).await;
    sets.event("ScaleUpLimited", "web").await;
    let container = json!({ "name": "app", "image": "example.com/app:1" });
    let template = json!({ "metadata": { "labels": { "app": "late" } },
        "spec": { "serviceAccountName": "not-there", "containers": [container] } });
    sets.make("late", template, json!(1), &json!({ "replicas": 1 }))
        .await;
    sets.event("FailedCreate", "late").await;
    conditions.push(progressing(sets).await);
    conditions
}

/// Component, type, reason and message of each event of the CloneSet, without what chance made of names.
async fn told(sets: &Sets) -> BTreeSet<[String; 4]> {
    let of_sets = ListParams::default().fields("involvedObject.kind=CloneSet");
    let events = sets.api("", "v1", "Event").list(&of_sets).await.unwrap().items;
    let lines = events.iter().map(|event| {
        let event = json!(event);
        let words = |at: &str| event.pointer(at).and_then(Value::as_str).unwrap_or_default();
        // OpenKruise adds the Pod that it could not make.
        let message = words("/message").split(", pod: {").next().unwrap_or_default();
        [
            words("/source/component").to_owned(),
            words("/type").to_owned(),
            words("/reason").to_owned(),
            nameless(message).replace(&sets.namespace, "NAMESPACE"),
        ]
    });
    lines.collect()
}

/// With `POD` and `REVISION` for names of those.
fn nameless(message: &str) -> String {
    let of_name = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '*';
    let mut text = String::new();
    for word in message.split_inclusive(|c| !of_name(c)) {
        let name = word.trim_end_matches(|c| !of_name(c));
        let made = name.strip_prefix("web-").or(name.strip_prefix("late-"));
        text += match made.map(str::len) {
            Some(1 | 5) => "POD",
            Some(_) => "REVISION",
            None => name,
        };
        text += &word[name.len()..];
    }
    text
}

/// A Pod with the labels of the CloneSet's, which nobody owns.
async fn with_an_orphan(sets: &Sets) {
    let pod = json!({ "metadata": { "name": "beside", "labels": { "app": "web" } },
        "spec": { "containers": [{ "name": "app", "image": "example.com/app:1" }] } });
    sets.create(&sets.pods(), pod).await;
}

async fn the_orphan_is_left_alone(sets: &Sets) {
    let orphan = sets.pods().get("beside").await;
    let events = sets
        .api("", "v1", "Event")
        .list(&ListParams::default())
        .await
        .unwrap();
    let events: Vec<Value> = events
        .items
        .iter()
        .map(|event| json!(event)["message"].clone())
        .collect();
    let orphan = orphan.unwrap_or_else(|why| panic!("{}: {why}: {events:#?}", sets.namespace));
    assert_eq!(orphan.metadata.owner_references, None, "{}", sets.namespace);
    assert_eq!(orphan.metadata.deletion_timestamp, None, "{}", sets.namespace);
}

#[tokio::test]
async fn both_managers_tell_the_same_and_leave_orphans_alone() {
    let plane = &ControlPlane::start().unwrap();
    let admin = &connect(plane.kubeconfig()).await;
    let theirs = Theirs::start(plane);
    let before = Sets::new(
        admin.clone(),
        "under-openkruise".to_owned(),
        vec![plane.dir().join("peer/manager.log")],
    )
    .await;
    made(&before).await;
    with_an_orphan(&before).await;
    let progressed = worked_on(&before).await;
    the_orphan_is_left_alone(&before).await;
    let said = told(&before).await;
    drop(theirs);

    let ours = take_over(plane);
    let after = Sets::new(
        admin.clone(),
        "under-kruise-rs".to_owned(),
        vec![ours.log().to_owned()],
    )
    .await;
    made(&after).await;
    assert_eq!(worked_on(&after).await, progressed);
    let same = told(&after).await;
    assert_eq!(same, said);
    // It is told of at all, and changes.
    println!("{progressed:#?}");
    assert!(
        progressed.iter().any(|one| *one != progressed[0]),
        "{progressed:?}"
    );

    // Neither is new any more: a CloneSet that was the other manager's, and one of ours.
    with_an_orphan(&after).await;
    for sets in [&before, &after] {
        sets.edit("web", json!({ "spec": { "replicas": 1 } })).await;
        settled(sets, |status| status.replicas == 1).await;
        sets.edit("web", json!({ "spec": { "replicas": 2 } })).await;
        settled(sets, |status| status.replicas == 2).await;
        the_orphan_is_left_alone(sets).await;
    }
}

/// What the daemon told that worked first.
static FIRST: Mutex<Option<BTreeSet<[String; 5]>>> = Mutex::new(None);

/// Compares what the daemon of this bed told with what the other implementation's did of the same work: component, kind,
/// type, reason and message.
pub async fn same_of_either_daemon(bed: &Bed) {
    let events = Api::<Event>::all(bed.client.clone());
    let events = events.list(&ListParams::default()).await.unwrap().items;
    let mut told = BTreeSet::new();
    for event in events {
        let component = event
            .source
            .and_then(|source| source.component)
            .unwrap_or_default();
        let message = event.message.unwrap_or_default();
        let about = event.involved_object.kind.unwrap_or_default();
        let reason = event.reason.unwrap_or_default();
        let ours = reason == "PullImageAttemptFailed" || about == "ContainerRecreateRequest";
        // How long it took, and the error, are of this daemon.
        let message = match message.split_once(", ecalpsedTime ") {
            Some((begin, time)) if time.ends_with('s') => format!("{begin}, ecalpsedTime"),
            _ if reason == "PullImageFailed" => message.split_inclusive(' ').take(2).collect(),
            _ => message,
        };
        // The Go daemon pulls none by digest.
        if component.starts_with("kruise-daemon") && !ours && !message.contains("sha256:") {
            told.insert([component, about, event.type_.unwrap_or_default(), reason, message]);
        }
    }
    println!("{told:#?}");
    assert!(told.len() > 4, "{told:?}");
    let mut first = FIRST.lock().unwrap();
    match first.take() {
        Some(first) => assert_eq!(told, first),
        None => *first = Some(told),
    }
}

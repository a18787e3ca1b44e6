//! Events of each manager for the same actions, and what it does with orphaned Pods.

use std::collections::BTreeSet;
use std::sync::Mutex;

use k8s_openapi::api::core::v1::Event;
use kruise_api::cloneset::CloneSetStatus;
use kube::api::{Api, ListParams};
use serde_json::{Value, json};
use testbed::cluster::ControlPlane;

use crate::charts::{GoManager, take_over};
use crate::interop_cluster::InteropCluster;
use support::clone_set_namespace::CloneSetNamespace;
use support::connect::connect;

/// A CloneSet of two Pods, created at once: no kubelet runs them.
async fn create_cloneset(sets: &CloneSetNamespace) {
    // No controller creates it here.
    let account = json!({ "metadata": { "name": "default" } });
    sets.create(&sets.api("", "v1", "ServiceAccount"), account).await;
    let container = json!({ "name": "app", "image": "example.com/app:1" });
    let template =
        json!({ "metadata": { "labels": { "app": "web" } }, "spec": { "containers": [container] } });
    let spec = json!({ "replicas": 2, "progressDeadlineSeconds": 600 });
    sets.create_from_template("web", template, json!("100%"), &spec)
        .await;
    wait_for_status(sets, |status| status.replicas == 2).await;
}

async fn wait_for_status(sets: &CloneSetNamespace, predicate: impl Fn(&CloneSetStatus) -> bool) {
    let what = format!("{}: the CloneSet is as wanted", sets.namespace);
    let check = || async {
        let set = sets.sets().get("web").await.unwrap();
        let status = set.status?;
        (status.observed_generation == set.metadata.generation && predicate(&status)).then_some(())
    };
    sets.poll_until(&what, check).await;
}

/// Condition `Progressing` of the CloneSet: status, reason and message.
async fn progressing(sets: &CloneSetNamespace) -> Option<[String; 3]> {
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

/// Makes the manager update Pods in place and by recreation, create and delete some, create fewer than requested, and
/// fail. Returns the states of `Progressing` in between.
async fn exercise_cloneset(sets: &CloneSetNamespace) -> Vec<Option<[String; 3]>> {
    let mut conditions = vec![progressing(sets).await];
    sets.set_image("web", "example.com/app:2").await;
    wait_for_status(sets, |status| status.updated_replicas == 2).await;
    conditions.push(progressing(sets).await);
    let command = json!([{ "name": "app", "image": "example.com/app:2", "command": ["run"] }]);
    let recreate = json!({ "spec": { "template": { "spec": { "containers": command } } } });
    sets.patch_set("web", recreate).await;
    wait_for_status(sets, |status| {
        status.updated_replicas == 2 && status.replicas == 2
    })
    .await;
    conditions.push(progressing(sets).await);
    let paused =
        |paused: bool| json!({ "spec": { "updateStrategy": { "rollingUpdate": { "paused": paused } } } });
    for value in [true, false] {
        sets.patch_set("web", paused(value)).await;
        wait_for_status(sets, |_| true).await;
        conditions.push(progressing(sets).await);
    }
    sets.patch_set("web", json!({ "spec": { "replicas": 1 } })).await;
    wait_for_status(sets, |status| status.replicas == 1).await;
    conditions.push(progressing(sets).await);
    // The existing Pod is not ready, and neither is the first new one.
    let limited = json!({ "spec": { "replicas": 4, "scaleStrategy": { "maxUnavailable": 2 } } });
    sets.patch_set("web", limited).await;
    sets.wait_event("ScaleUpLimited", "web").await;
    let container = json!({ "name": "app", "image": "example.com/app:1" });
    let template = json!({ "metadata": { "labels": { "app": "late" } },
        "spec": { "serviceAccountName": "not-there", "containers": [container] } });
    sets.create_from_template("late", template, json!(1), &json!({ "replicas": 1 }))
        .await;
    sets.wait_event("FailedCreate", "late").await;
    conditions.push(progressing(sets).await);
    conditions
}

/// Component, type, reason and message of each event of the CloneSet, without generated names.
async fn cloneset_events(sets: &CloneSetNamespace) -> BTreeSet<[String; 4]> {
    let of_sets = ListParams::default().fields("involvedObject.kind=CloneSet");
    let events = sets.api("", "v1", "Event").list(&of_sets).await.unwrap().items;
    let lines = events.iter().map(|event| {
        let event = json!(event);
        let text = |pointer: &str| event.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        // OpenKruise appends the Pod that it could not create.
        let message = text("/message").split(", pod: {").next().unwrap_or_default();
        [
            text("/source/component").to_owned(),
            text("/type").to_owned(),
            text("/reason").to_owned(),
            redact_names(message).replace(&sets.namespace, "NAMESPACE"),
        ]
    });
    lines.collect()
}

/// Replaces names of Pods and revisions by `POD` and `REVISION`.
fn redact_names(message: &str) -> String {
    let in_name = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '*';
    let mut text = String::new();
    for word in message.split_inclusive(|c| !in_name(c)) {
        let name = word.trim_end_matches(|c| !in_name(c));
        let suffix = name.strip_prefix("web-").or(name.strip_prefix("late-"));
        text += match suffix.map(str::len) {
            Some(1 | 5) => "POD",
            Some(_) => "REVISION",
            None => name,
        };
        text += &word[name.len()..];
    }
    text
}

/// A Pod with the CloneSet's labels and without an owner.
async fn create_orphan(sets: &CloneSetNamespace) {
    let pod = json!({ "metadata": { "name": "beside", "labels": { "app": "web" } },
        "spec": { "containers": [{ "name": "app", "image": "example.com/app:1" }] } });
    sets.create(&sets.pods(), pod).await;
}

async fn assert_orphan_is_unchanged(sets: &CloneSetNamespace) {
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
async fn both_managers_create_the_same_events_and_keep_orphans() {
    let plane = &ControlPlane::start().unwrap();
    let admin = &connect(plane.kubeconfig()).await;
    let go_manager = GoManager::start(plane);
    let before = CloneSetNamespace::new(
        admin.clone(),
        "under-openkruise".to_owned(),
        vec![plane.dir().join("peer/manager.log")],
    )
    .await;
    create_cloneset(&before).await;
    create_orphan(&before).await;
    let progressed = exercise_cloneset(&before).await;
    assert_orphan_is_unchanged(&before).await;
    let go_events = cloneset_events(&before).await;
    drop(go_manager);

    let rust_manager = take_over(plane);
    let after = CloneSetNamespace::new(
        admin.clone(),
        "under-kruise-rs".to_owned(),
        vec![rust_manager.log().to_owned()],
    )
    .await;
    create_cloneset(&after).await;
    assert_eq!(exercise_cloneset(&after).await, progressed);
    let rust_events = cloneset_events(&after).await;
    assert_eq!(rust_events, go_events);
    // The condition exists, and changes.
    println!("{progressed:#?}");
    assert!(
        progressed.iter().any(|one| *one != progressed[0]),
        "{progressed:?}"
    );

    // Neither is new any more: a CloneSet of the other manager, and one of ours.
    create_orphan(&after).await;
    for sets in [&before, &after] {
        sets.patch_set("web", json!({ "spec": { "replicas": 1 } })).await;
        wait_for_status(sets, |status| status.replicas == 1).await;
        sets.patch_set("web", json!({ "spec": { "replicas": 2 } })).await;
        wait_for_status(sets, |status| status.replicas == 2).await;
        assert_orphan_is_unchanged(sets).await;
    }
}

/// Events of the daemon that ran first.
static FIRST_DAEMON_EVENTS: Mutex<Option<BTreeSet<[String; 5]>>> = Mutex::new(None);

/// Compares the events of this bed's daemon with those of the other implementation for the same work: component, kind,
/// type, reason and message.
pub async fn assert_same_daemon_events(cluster: &InteropCluster) {
    let events = Api::<Event>::all(cluster.client.clone());
    let events = events.list(&ListParams::default()).await.unwrap().items;
    let mut daemon_events = BTreeSet::new();
    for event in events {
        let component = event
            .source
            .and_then(|source| source.component)
            .unwrap_or_default();
        let message = event.message.unwrap_or_default();
        let about = event.involved_object.kind.unwrap_or_default();
        let reason = event.reason.unwrap_or_default();
        let is_extra = reason == "PullImageAttemptFailed" || about == "ContainerRecreateRequest";
        // Duration and error text are specific to this daemon.
        let message = match message.split_once(", ecalpsedTime ") {
            Some((begin, time)) if time.ends_with('s') => format!("{begin}, ecalpsedTime"),
            _ if reason == "PullImageFailed" => message.split_inclusive(' ').take(2).collect(),
            _ => message,
        };
        // The Go daemon pulls none by digest.
        if component.starts_with("kruise-daemon") && !is_extra && !message.contains("sha256:") {
            daemon_events.insert([component, about, event.type_.unwrap_or_default(), reason, message]);
        }
    }
    println!("{daemon_events:#?}");
    assert!(daemon_events.len() > 4, "{daemon_events:?}");
    let mut first = FIRST_DAEMON_EVENTS.lock().unwrap();
    match first.take() {
        Some(first) => assert_eq!(daemon_events, first),
        None => *first = Some(daemon_events),
    }
}

//! What we cannot mend costs little for as long as it stands.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use futures::StreamExt;
use k8s_openapi::api::apps::v1::ControllerRevision;
use kruise_api::cloneset::CloneSet;
use kruise_api::keys;
use kube::Api;
use kube::runtime::watcher;
use serde_json::{Value, json};
use testbed::cluster::wait;

use crate::errors::{quota, refusals, said, says};
use crate::field::Field;
use crate::kubelet::{NO_IMAGE, NO_NODE};
use crate::world::{PATIENCE, until, world};

/// Writes that the manager asked for in this namespace, whatever became of them: verb and resource.
fn asked(field: &Field) -> Vec<(String, String)> {
    let all = field.asked().into_iter();
    all.map(|((verb, resource, _), _)| (verb, resource)).collect()
}

fn count(field: &Field, verb: &str, resource: &str) -> usize {
    let all = asked(field).into_iter();
    all.filter(|(v, r)| v == verb && r == resource).count()
}

/// Waits until the quota's tries are so many seconds apart: the clock of this test.
fn until_apart(field: &Field, seconds: f64) -> usize {
    let tries = wait::until("the pauses between tries grow", PATIENCE, || {
        let all = refusals(field);
        let mut gaps = all
            .windows(2)
            .map(|two| two[1].duration_since(two[0]).as_secs_f64());
        Ok(gaps.any(|gap| gap > seconds).then_some(all.len()))
    });
    tries.unwrap()
}

fn claim() -> Value {
    json!([{ "metadata": { "name": "data" }, "spec": { "storageClassName": "no-such-class",
        "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } } }])
}

/// Two that wait for somebody else: for a storage class, and for an image.
async fn waiting() -> [Field; 2] {
    let class = Field::new(world(), "standing-class").await;
    let template = json!({ "spec": { "nodeSelector": { (NO_NODE): "true" } } });
    let spec = json!({ "replicas": 2, "template": template, "volumeClaimTemplates": claim() });
    class.set("web", spec).await;
    let image = Field::new(world(), "standing-image").await;
    let template = json!({ "spec": { "containers": [{ "name": "app", "image": NO_IMAGE }] } });
    image
        .set("web", json!({ "replicas": 2, "template": template }))
        .await;
    says(&class, "Waiting", "no-such-class is not bound").await;
    // What is told of the second Pod is another write.
    let both = |set: &CloneSet| {
        let waits = said(set, "Waiting");
        waits.contains("ImagePullBackOff")
            && waits.matches("web-").count() == 2
            && waits.matches('(').count() == 1
    };
    until(&image.sets(), "web", "both Pods wait for the image", both).await;
    [class, image]
}

#[tokio::test]
async fn failures_that_stand_cost_few_writes_and_ever_fewer() {
    let full = Field::new(world(), "standing-quota").await;
    quota(&full, "pods", 1).await;
    let others = waiting().await;
    let spec = json!({ "replicas": 3, "volumeClaimTemplates": claim() });
    full.set("web", spec).await;
    says(&full, "FailedScale", "exceeded quota: few").await;
    until_apart(&full, 1.9);
    let before = others.each_ref().map(asked);
    let tries = until_apart(&full, 7.9);
    assert_eq!(
        others.each_ref().map(asked),
        before,
        "nothing has changed for them"
    );

    assert!(tries <= 12, "{tries} tries in sixteen seconds");
    let status = count(&full, "patch", "clonesets/status");
    assert!(
        status <= 2 * tries + 4,
        "{status} writes of the status, {tries} tries"
    );
    let events = asked(&full).iter().filter(|(_, r)| r == "events").count();
    assert!(events <= tries + 6, "{events} events, {tries} tries");
    let claims = "persistentvolumeclaims";
    assert_eq!(count(&full, "create", claims), 3, "one for each Pod");
    assert_eq!(count(&full, "delete", claims), 0, "they wait for their Pods");

    full.edit("web", json!({ "spec": { "replicas": 1 } })).await;
    full.settled("web").await;
    let gone = wait::until("claims of Pods that are not wanted any more go", PATIENCE, || {
        Ok((count(&full, "delete", claims) == 2).then_some(()))
    });
    gone.unwrap();
}

/// Waits until all images of the CloneSet's update revision are pulled ahead, or never will be.
async fn until_handled(field: &Field, set: &CloneSet) {
    let name = &set.status.as_ref().unwrap().update_revision;
    let revisions: Api<ControllerRevision> = Api::namespaced(field.admin.client.clone(), &field.namespace);
    let handled = |revision: &ControllerRevision| {
        let labels = revision.metadata.labels.iter().flatten();
        labels
            .into_iter()
            .any(|(key, _)| key == keys::IMAGE_PRE_DOWNLOAD_CREATED)
    };
    until(&revisions, name, "handled", handled).await;
}

/// Takes note of the types of all conditions that the CloneSet has at any time.
async fn take_note(sets: Api<CloneSet>, said: Arc<Mutex<BTreeSet<String>>>) {
    let mut events = std::pin::pin!(watcher(sets, watcher::Config::default()));
    while let Some(event) = events.next().await {
        if let Ok(watcher::Event::Apply(set) | watcher::Event::InitApply(set)) = event {
            let conditions = set.status.into_iter().flat_map(|status| status.conditions);
            said.lock().unwrap().extend(conditions.map(|c| c.type_));
        }
    }
}

#[tokio::test]
async fn a_job_that_is_refused_is_told_and_given_up() {
    let field = Field::new(world(), "standing-jobs").await;
    quota(&field, "count/imagepulljobs.apps.kruise.io", 0).await;
    let rolling =
        |partition: u32| json!({ "rollingUpdate": { "partition": partition, "maxUnavailable": 2 } });
    let spec = json!({ "replicas": 5, "updateStrategy": rolling(2) });
    let ever = Arc::default();
    let notes = tokio::spawn(take_note(field.sets(), Arc::clone(&ever)));
    field.set("web", spec).await;
    field.settled("web").await;
    field.image("web", "example.com/app:2").await;
    let event = json!(field.event("FailedCreateImagePullJob", "web").await);
    assert_eq!(event["type"], "Normal", "as OpenKruise has it");
    let half = |set: &CloneSet| {
        set.status
            .as_ref()
            .is_some_and(|s| s.updated_available_replicas == Some(3))
    };
    let set = field.status("web", "as far as the partition lets it", half).await;
    until_handled(&field, &set).await;
    field
        .edit("web", json!({ "spec": { "updateStrategy": rolling(0) } }))
        .await;
    let set = field.settled("web").await;
    assert_eq!(said(&set, "Waiting"), "");
    assert_eq!(count(&field, "create", "imagepulljobs"), 1, "{:?}", asked(&field));
    notes.abort();
    assert_eq!(*ever.lock().unwrap(), BTreeSet::from(["Waiting".to_owned()]));
}

//! A failure that we cannot fix causes few requests for as long as it lasts.

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

use crate::errors::{condition_message, rejected_creations, set_quota, wait_for_condition};
use crate::fake_kubelet::{NO_IMAGE, NO_NODE};
use crate::fixture::Fixture;
use crate::test_cluster::{WAIT_TIMEOUT, shared_cluster, wait_until};

/// The manager's writes in this namespace, successful or not: verb and resource.
fn write_requests(fixture: &Fixture) -> Vec<(String, String)> {
    let all = fixture.write_requests().into_iter();
    all.map(|((verb, resource, _), _)| (verb, resource)).collect()
}

fn request_count(fixture: &Fixture, verb: &str, resource: &str) -> usize {
    let all = write_requests(fixture).into_iter();
    all.filter(|(v, r)| v == verb && r == resource).count()
}

/// Waits until the attempts against the quota are this many seconds apart: the clock of this test.
fn wait_for_backoff(fixture: &Fixture, seconds: f64) -> usize {
    let attempts = wait::until("the pauses between tries grow", WAIT_TIMEOUT, || {
        let all = rejected_creations(fixture);
        let mut gaps = all
            .windows(2)
            .map(|two| two[1].duration_since(two[0]).as_secs_f64());
        Ok(gaps.any(|gap| gap > seconds).then_some(all.len()))
    });
    attempts.unwrap()
}

fn claim_templates() -> Value {
    json!([{ "metadata": { "name": "data" }, "spec": { "storageClassName": "no-such-class",
        "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } } }])
}

/// Two CloneSets that wait for something external: a storage class, and an image.
async fn create_waiting_sets() -> [Fixture; 2] {
    let class_fixture = Fixture::new(shared_cluster(), "standing-class").await;
    let template = json!({ "spec": { "nodeSelector": { (NO_NODE): "true" } } });
    let spec = json!({ "replicas": 2, "template": template, "volumeClaimTemplates": claim_templates() });
    class_fixture.create_cloneset("web", spec).await;
    let image_fixture = Fixture::new(shared_cluster(), "standing-image").await;
    let template = json!({ "spec": { "containers": [{ "name": "app", "image": NO_IMAGE }] } });
    image_fixture
        .create_cloneset("web", json!({ "replicas": 2, "template": template }))
        .await;
    wait_for_condition(&class_fixture, "Waiting", "no-such-class is not bound").await;
    // The second Pod's failure is reported by a separate write.
    let both_waiting = |set: &CloneSet| {
        let waiting_message = condition_message(set, "Waiting");
        waiting_message.contains("ImagePullBackOff")
            && waiting_message.matches("web-").count() == 2
            && waiting_message.matches('(').count() == 1
    };
    wait_until(
        &image_fixture.sets(),
        "web",
        "both Pods wait for the image",
        both_waiting,
    )
    .await;
    [class_fixture, image_fixture]
}

#[tokio::test]
async fn persistent_failures_back_off_and_write_little() {
    let quota_fixture = Fixture::new(shared_cluster(), "standing-quota").await;
    set_quota(&quota_fixture, "pods", 1).await;
    let others = create_waiting_sets().await;
    let spec = json!({ "replicas": 3, "volumeClaimTemplates": claim_templates() });
    quota_fixture.create_cloneset("web", spec).await;
    wait_for_condition(&quota_fixture, "FailedScale", "exceeded quota: few").await;
    wait_for_backoff(&quota_fixture, 1.9);
    let before = others.each_ref().map(write_requests);
    let attempts = wait_for_backoff(&quota_fixture, 7.9);
    assert_eq!(
        others.each_ref().map(write_requests),
        before,
        "nothing has changed for them"
    );

    assert!(attempts <= 12, "{attempts} tries in sixteen seconds");
    let status = request_count(&quota_fixture, "patch", "clonesets/status");
    assert!(
        status <= 2 * attempts + 4,
        "{status} writes of the status, {attempts} tries"
    );
    let events = write_requests(&quota_fixture)
        .iter()
        .filter(|(_, r)| r == "events")
        .count();
    assert!(events <= attempts + 6, "{events} events, {attempts} tries");
    let claims = "persistentvolumeclaims";
    assert_eq!(
        request_count(&quota_fixture, "create", claims),
        3,
        "one for each Pod"
    );
    assert_eq!(
        request_count(&quota_fixture, "delete", claims),
        0,
        "they wait for their Pods"
    );

    quota_fixture
        .patch_set("web", json!({ "spec": { "replicas": 1 } }))
        .await;
    quota_fixture.wait_settled("web").await;
    let unused_claims_deleted = wait::until(
        "claims of Pods that are not wanted any more go",
        WAIT_TIMEOUT,
        || Ok((request_count(&quota_fixture, "delete", claims) == 2).then_some(())),
    );
    unused_claims_deleted.unwrap();
}

/// Waits until every image of the CloneSet's update revision is pre-downloaded or has failed permanently.
async fn wait_for_pre_download(fixture: &Fixture, set: &CloneSet) {
    let name = &set.status.as_ref().unwrap().update_revision;
    let revisions: Api<ControllerRevision> =
        Api::namespaced(fixture.admin.client.clone(), &fixture.namespace);
    let has_label = |revision: &ControllerRevision| {
        let labels = revision.metadata.labels.iter().flatten();
        labels
            .into_iter()
            .any(|(key, _)| key == keys::IMAGE_PRE_DOWNLOAD_CREATED)
    };
    wait_until(&revisions, name, "handled", has_label).await;
}

/// Records the types of all conditions that the CloneSet ever has.
async fn record_condition_types(sets: Api<CloneSet>, types: Arc<Mutex<BTreeSet<String>>>) {
    let mut events = std::pin::pin!(watcher(sets, watcher::Config::default()));
    while let Some(event) = events.next().await {
        if let Ok(watcher::Event::Apply(set) | watcher::Event::InitApply(set)) = event {
            let conditions = set.status.into_iter().flat_map(|status| status.conditions);
            types.lock().unwrap().extend(conditions.map(|c| c.type_));
        }
    }
}

#[tokio::test]
async fn denied_pull_job_is_reported_and_not_retried() {
    let fixture = Fixture::new(shared_cluster(), "standing-jobs").await;
    set_quota(&fixture, "count/imagepulljobs.apps.kruise.io", 0).await;
    let rolling =
        |partition: u32| json!({ "rollingUpdate": { "partition": partition, "maxUnavailable": 2 } });
    let spec = json!({ "replicas": 5, "updateStrategy": rolling(2) });
    let types = Arc::default();
    let recorder = tokio::spawn(record_condition_types(fixture.sets(), Arc::clone(&types)));
    fixture.create_cloneset("web", spec).await;
    fixture.wait_settled("web").await;
    fixture.set_image("web", "example.com/app:2").await;
    let event = json!(fixture.wait_event("FailedCreateImagePullJob", "web").await);
    assert_eq!(event["type"], "Normal", "as OpenKruise has it");
    let partly_updated = |set: &CloneSet| {
        set.status
            .as_ref()
            .is_some_and(|s| s.updated_available_replicas == Some(3))
    };
    let set = fixture
        .wait_status("web", "as far as the partition lets it", partly_updated)
        .await;
    wait_for_pre_download(&fixture, &set).await;
    fixture
        .patch_set("web", json!({ "spec": { "updateStrategy": rolling(0) } }))
        .await;
    let set = fixture.wait_settled("web").await;
    assert_eq!(condition_message(&set, "Waiting"), "");
    assert_eq!(
        request_count(&fixture, "create", "imagepulljobs"),
        1,
        "{:?}",
        write_requests(&fixture)
    );
    recorder.abort();
    assert_eq!(*types.lock().unwrap(), BTreeSet::from(["Waiting".to_owned()]));
}

//! No write without a change; and a manager that crashes is followed by one that continues its work.

use kruise_api::image_pull_job::ImagePullJob;
use kube::api::{Api, Patch};
use serde_json::json;

use crate::fixture::{Fixture, identities};
use crate::test_cluster::{TestCluster, shared_cluster, wait_until};
use crate::waits;

/// The manager's reads in this namespace: verb, resource, name. Without its watches and the initial lists of whole
/// kinds.
fn manager_reads(fixture: &Fixture) -> Vec<String> {
    let all = fixture.cluster.plane.manager_reads().unwrap();
    assert!(!all.is_empty(), "reads are logged");
    let in_namespace =
        |event: &&serde_json::Value| event["objectRef"]["namespace"] == fixture.namespace.as_str();
    let summary = |event: &serde_json::Value| {
        let object = &event["objectRef"];
        format!("{} {} {}", event["verb"], object["resource"], object["name"])
    };
    all.iter().filter(in_namespace).map(summary).collect()
}

/// Each new CloneSet lists Pods once, to adopt orphans.
const ORPHAN_LIST: &str = r#""list" "pods" null"#;

#[tokio::test]
async fn unchanged_cloneset_causes_no_writes_or_reads() {
    let fixture = Fixture::new(shared_cluster(), "steady").await;
    fixture.create_cloneset("web", json!({})).await;
    fixture.wait_settled("web").await;
    let of_web = || {
        let all = fixture.accepted_writes().into_iter();
        all.filter(|(_, resource, name)| resource != "events" && name.contains("web"))
            .collect::<Vec<_>>()
    };
    // The audit log is a moment behind the watch; once it has another CloneSet's writes, it has all earlier ones.
    fixture.create_cloneset("earlier", json!({ "replicas": 1 })).await;
    fixture.wait_settled("earlier").await;
    let before = of_web();
    for pod in fixture.pods_of("web").await {
        let name = pod["metadata"]["name"].as_str().unwrap();
        let annotation = Patch::Merge(json!({ "metadata": { "annotations": { "example.com/note": "x" } } }));
        fixture
            .pods()
            .patch(name, &Default::default(), &annotation)
            .await
            .unwrap();
    }
    fixture
        .patch_set(
            "web",
            json!({ "metadata": { "annotations": { "example.com/note": "x" } } }),
        )
        .await;
    // When this later CloneSet is reconciled, so are the earlier changes.
    fixture.create_cloneset("other", json!({ "replicas": 1 })).await;
    fixture.wait_settled("other").await;
    assert_eq!(of_web(), before);
    assert_eq!(manager_reads(&fixture), [ORPHAN_LIST; 3]);
}

#[tokio::test]
async fn change_of_one_cloneset_reconciles_no_other() {
    const SETS: u64 = 12;
    const CHANGES: u64 = 30;
    let cluster: &'static TestCluster = Box::leak(Box::new(TestCluster::new()));
    let mut manager = cluster.manager("kruise-manager");
    manager.start().unwrap();
    let fixture = Fixture::new(cluster, "others").await;
    for index in 0..SETS {
        fixture
            .create_cloneset(&format!("web-{index}"), json!({ "replicas": 1 }))
            .await;
    }
    for index in 0..SETS {
        fixture.wait_settled(&format!("web-{index}")).await;
    }
    let one = fixture.pods_of("web-1").await.remove(0);
    let name = one["metadata"]["name"].as_str().unwrap();
    let (reconciles_before, read_before) = (
        manager.reconcile_count(),
        cluster.plane.manager_reads().unwrap().len(),
    );
    for change in 1..=CHANGES {
        let before = manager.reconcile_count();
        let annotation = json!({ "metadata": { "annotations": { "example.com/note": change.to_string() } } });
        let annotation = Patch::Merge(annotation);
        fixture
            .pods()
            .patch(name, &Default::default(), &annotation)
            .await
            .unwrap();
        let reconciled = async || (manager.reconcile_count() > before).then_some(());
        waits::poll_until("its CloneSet is looked at", &|| manager.tail(), reconciled).await;
    }
    // Reconciles left over from the start may be among them.
    let reconciles = manager.reconcile_count() - reconciles_before;
    assert!(
        reconciles < SETS * CHANGES / 2,
        "{reconciles} passes over {SETS} CloneSets for {CHANGES} changes of one's Pod"
    );
    assert_eq!(manager_reads(&fixture), [ORPHAN_LIST; SETS as usize]);
    // Restarted watches and certificate checks are not caused by a change.
    let other_reads = cluster.plane.manager_reads().unwrap().split_off(read_before);
    assert!(other_reads.len() < CHANGES as usize, "{other_reads:#?}");
}

#[tokio::test]
async fn restarted_manager_continues_rollout() {
    let cluster: &'static TestCluster = Box::leak(Box::new(TestCluster::new()));
    let mut manager = cluster.manager("kruise-manager");
    manager.start().unwrap();
    let fixture = Fixture::new(cluster, "next").await;
    let rolling = json!({ "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1 });
    let spec = json!({ "replicas": 8, "updateStrategy": { "rollingUpdate": rolling } });
    fixture.create_cloneset("web", spec).await;
    fixture.wait_settled("web").await;
    let before = fixture.pods_of("web").await;
    for (image, from) in [("example.com/app:2", 2), ("example.com/app:3", 5)] {
        fixture.set_image("web", image).await;
        let mid_update = move |set: &kruise_api::cloneset::CloneSet| {
            set.status.as_ref().is_some_and(|s| s.updated_replicas >= from)
        };
        fixture.wait_status("web", "some are updated", mid_update).await;
        manager.kill().unwrap();
        manager.start().unwrap();
        fixture.wait_settled("web").await;
        let after = fixture.pods_of("web").await;
        assert_eq!(identities(&before), identities(&after));
        assert!(
            after
                .iter()
                .all(|pod| pod["spec"]["containers"][0]["image"] == image)
        );
    }
    let revisions = fixture.api("apps", "v1", "ControllerRevision");
    assert_eq!(revisions.list(&Default::default()).await.unwrap().items.len(), 3);
    wait_until(&fixture.sets(), "web", "at its end", |set| {
        let status = set.status.as_ref().unwrap();
        status.current_revision == status.update_revision
    })
    .await;
}

#[tokio::test]
async fn standby_manager_continues_rollout_after_leader_crash() {
    let cluster: &'static TestCluster = Box::leak(Box::new(TestCluster::new()));
    let mut leader = cluster.manager("manager-one");
    leader.start().unwrap();
    leader.wait_for_readyz_text("leading");
    let mut standby = cluster.manager("manager-other");
    standby.start().unwrap();
    standby.wait_for_readyz_text("standing by");
    let fixture = Fixture::new(cluster, "two").await;
    let rolling = json!({ "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": 1 });
    let spec = json!({ "replicas": 6, "updateStrategy": { "rollingUpdate": rolling } });
    fixture.create_cloneset("web", spec).await;
    fixture.wait_settled("web").await;
    let before = identities(&fixture.pods_of("web").await);
    fixture.set_image("web", "example.com/app:2").await;
    let mid_update =
        |set: &kruise_api::cloneset::CloneSet| set.status.as_ref().is_some_and(|s| s.updated_replicas >= 2);
    fixture.wait_status("web", "some are updated", mid_update).await;
    leader.kill().unwrap();
    fixture.wait_settled("web").await;
    standby.wait_for_readyz_text("leading");
    assert_eq!(identities(&fixture.pods_of("web").await), before);
    assert!(fixture.pod_writes().len() <= 6 * 5, "{:?}", fixture.pod_writes());
}

#[tokio::test]
async fn terminating_pull_job_is_deleted_once() {
    let fixture = Fixture::new(shared_cluster(), "slow-job").await;
    let rolling = |partition: i32| json!({ "updateStrategy": { "rollingUpdate": { "partition": partition, "maxUnavailable": 1 } } });
    let mut spec = rolling(3);
    spec["replicas"] = json!(4);
    fixture.create_cloneset("web", spec).await;
    fixture.wait_settled("web").await;
    fixture.set_image("web", "example.com/app:2").await;
    fixture.wait_event("CreatedImagePullJob", "web").await;
    let jobs: Api<ImagePullJob> = Api::namespaced(fixture.admin.client.clone(), &fixture.namespace);
    let job = jobs.list(&Default::default()).await.unwrap().items.remove(0);
    let job = job.metadata.name.unwrap();
    let finalizers = |list: &[&str]| Patch::Merge(json!({ "metadata": { "finalizers": list } }));
    let finalizer = finalizers(&["example.com/hold"]);
    jobs.patch(&job, &Default::default(), &finalizer).await.unwrap();
    fixture.patch_set("web", json!({ "spec": rolling(0) })).await;
    wait_until(&jobs, &job, "being deleted", |job: &ImagePullJob| {
        job.metadata.deletion_timestamp.is_some()
    })
    .await;
    // When this later CloneSet is reconciled, so are the earlier changes.
    fixture.create_cloneset("other", json!({ "replicas": 1 })).await;
    fixture.wait_settled("other").await;
    let deletions = fixture
        .accepted_writes()
        .into_iter()
        .filter(|(verb, resource, name)| verb == "delete" && resource == "imagepulljobs" && *name == job);
    assert_eq!(deletions.count(), 1);
    jobs.patch(&job, &Default::default(), &finalizers(&[]))
        .await
        .unwrap();
}

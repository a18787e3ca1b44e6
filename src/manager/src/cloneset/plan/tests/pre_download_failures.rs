//! Failures of pre-pulling do not block a rollout.

use jiff::ToSpan;
use serde_json::{Value, json};

use super::fake_cluster::FakeCluster;
use super::random_histories::{clone_set_spec, edit_container};
use super::scenarios::{condition, run_kubelets, settle};
use crate::cloneset::plan::{Action, ActionFailure, ActionPurpose, FailureSubject, Plan};
use kruise_api::keys;
use kruise_workload::in_place::Pod;

/// A rollout whose job just failed.
fn with_failed_job(lasting: bool) -> (FakeCluster, Plan) {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    settle(&mut cluster);
    edit_container(&mut cluster, "image", json!("app:2"));
    let failure = ActionFailure {
        purpose: ActionPurpose::PreDownload,
        retry_at: cluster.now.checked_add(5.seconds()).unwrap(),
        permanent: lasting,
        resize_rejected: false,
        answered: true,
        message: "exceeded quota".to_owned(),
    };
    let job = format!("{}-app", cluster.revisions.last().unwrap().name);
    cluster.failures.insert(FailureSubject::Job(job), failure);
    let (_, plan) = cluster.reconcile();
    assert!(
        !plan
            .actions
            .iter()
            .any(|action| matches!(action, Action::CreateJob(_)))
    );
    assert_eq!(condition(&cluster, "FailedUpdate"), None);
    let waiting = condition(&cluster, "Waiting").unwrap_or_default();
    assert!(!waiting.message.contains("quota"), "{}", waiting.message);
    (cluster, plan)
}

#[test]
fn rejected_pre_download_job_is_given_up() {
    let (mut cluster, _) = with_failed_job(true);
    assert!(
        cluster.revisions.last().unwrap().pre_downloaded,
        "there is no more to do"
    );
    settle(&mut cluster);
    assert_eq!(cluster.jobs, Vec::<String>::new());
}

#[test]
fn retryable_pre_download_job_is_retried() {
    let (mut cluster, plan) = with_failed_job(false);
    assert!(
        plan.requeue_at
            .is_some_and(|wake| wake <= cluster.now.checked_add(5.seconds()).unwrap())
    );
    cluster.now = cluster.now.checked_add(5.seconds()).unwrap();
    let (_, plan) = cluster.reconcile();
    assert!(
        plan.actions
            .iter()
            .any(|action| matches!(action, Action::CreateJob(_)))
    );
    cluster.reconcile();
    assert!(cluster.revisions.last().unwrap().pre_downloaded);
}

#[test]
fn pre_download_min_updated_ready_percentage() {
    for (least, pods) in [("50%", 2), ("26%", 2), ("1%", 1), ("0%", 0), ("some", 0)] {
        let mut cluster = FakeCluster::new(clone_set_spec(false, false));
        cluster.edit(&json!({ "replicas": 4 }));
        settle(&mut cluster);
        let key = keys::IMAGE_PRE_DOWNLOAD_MIN_UPDATED_READY_PODS;
        cluster.set["metadata"]["annotations"] = json!({ key: least });
        edit_container(&mut cluster, "image", json!("app:2"));
        let mut updated = 0;
        for _ in 0..50 {
            let (_, plan) = cluster.reconcile();
            if plan
                .actions
                .iter()
                .any(|action| matches!(action, Action::CreateJob(_)))
            {
                break;
            }
            run_kubelets(&mut cluster);
            let ready = |pod: &&Value| {
                pod["spec"]["containers"][0]["image"] == "app:2" && Pod::from_json(pod).condition_ready()
            };
            updated = cluster.pods.values().filter(ready).count();
        }
        assert_eq!(updated, pods, "{least}");
    }
}

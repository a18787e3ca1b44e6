//! The progress deadline is exactly OpenKruise's, which counts from the condition's last update, whatever its reason.

use jiff::{SignedDuration, Timestamp, ToSpan};
use serde_json::json;

use super::fake_cluster::FakeCluster;
use super::random_histories::{clone_set_spec, edit_container, edit_rolling_update};
use super::scenarios::{condition, progressing_reason, run_kubelets, settle};
use crate::cloneset::plan::{Observed, Plan, TemplateStatus};
use kruise_api::cloneset::CloneSetStatus;

/// Every reconcile reports the first of OpenKruise's five reasons that applies.
pub(super) fn assert_progressing(now: Timestamp, observed: &Observed, planned: &Plan) {
    let spec = &observed.set.spec;
    let deadline = spec.progress_deadline_seconds.filter(|d| *d != i32::MAX);
    let Some(deadline) = deadline.filter(|_| observed.template_status == TemplateStatus::Accepted) else {
        return;
    };
    let find = |status: &CloneSetStatus| {
        let mut conditions = status.conditions.iter();
        conditions.find(|c| c.type_ == "Progressing").cloned()
    };
    let before = observed.set.status.as_ref().and_then(find);
    let status = planned.status.as_ref().or(observed.set.status.as_ref()).unwrap();
    let progressing = find(status).unwrap();
    let desired = spec.desired_replicas();
    let available = status.updated_available_replicas.unwrap_or_default();
    let expected = status.expected_updated_replicas.unwrap_or_default();
    let done = status.current_revision == status.update_revision
        && [status.replicas, status.updated_replicas, available] == [desired; 3];
    let since = before
        .as_ref()
        .map_or(now, |c| c.last_update_time.as_ref().unwrap().0);
    let end = since.checked_add(i64::from(deadline).seconds()).unwrap();
    let late = before
        .as_ref()
        .is_some_and(|c| c.reason == "ProgressDeadlineExceeded" || end < now);
    let reason = match () {
        () if done => "CloneSetAvailable",
        () if spec.rolling_update().is_some_and(|r| r.paused) => "CloneSetPaused",
        () if expected < desired && expected <= available => "ProgressPartitionAvailable",
        () if late => "ProgressDeadlineExceeded",
        () => "CloneSetUpdated",
    };
    assert_eq!(
        progressing.reason, reason,
        "after {before:?} at {now}: {status:?}"
    );
    assert_eq!(
        progressing.status,
        if reason.ends_with("Exceeded") {
            "False"
        } else {
            "True"
        }
    );
    let same = before.filter(|before| before.reason == reason);
    assert!(
        same.is_none_or(|before| before == progressing),
        "an unchanged condition is written again"
    );
    let due = end.checked_add(1.second()).unwrap();
    assert!(
        reason != "CloneSetUpdated" || planned.requeue_at.is_some_and(|wake| wake <= due),
        "no requeue at the deadline: {:?}",
        planned.requeue_at
    );
}

const ONE_HOUR: SignedDuration = SignedDuration::from_hours(1);

fn reconcile_after(cluster: &mut FakeCluster, time: SignedDuration) -> Option<Timestamp> {
    cluster.now = cluster.now.checked_add(time).unwrap();
    cluster.reconcile().1.requeue_at
}

fn with_deadline_of_a_minute() -> FakeCluster {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    cluster.edit(&json!({ "progressDeadlineSeconds": 60 }));
    settle(&mut cluster);
    assert_eq!(progressing_reason(&cluster), "CloneSetAvailable");
    cluster
}

/// The rollout begins within the deadline of one minute: it is not late for a minute, and then it is.
fn assert_minute_before_deadline(cluster: &mut FakeCluster) {
    let wake = reconcile_after(cluster, SignedDuration::ZERO);
    assert_eq!(progressing_reason(cluster), "CloneSetUpdated");
    assert!(wake.is_some_and(|wake| wake > cluster.now), "{wake:?}");
    run_kubelets(cluster);
    reconcile_after(cluster, SignedDuration::from_secs(60));
    assert_eq!(progressing_reason(cluster), "CloneSetUpdated", "60 s");
    reconcile_after(cluster, SignedDuration::from_secs(1));
    assert_deadline_exceeded(cluster, "61 s");
}

fn assert_deadline_exceeded(cluster: &FakeCluster, why: &str) {
    assert_eq!(progressing_reason(cluster), "ProgressDeadlineExceeded", "{why}");
    assert_eq!(
        condition(cluster, "Progressing").unwrap().status,
        "False",
        "{why}"
    );
}

#[test]
fn progress_deadline_of_an_immediate_rollout() {
    let mut cluster = with_deadline_of_a_minute();
    edit_container(&mut cluster, "image", json!("app:bad"));
    assert_minute_before_deadline(&mut cluster);
    let before = condition(&cluster, "Progressing");
    reconcile_after(&mut cluster, ONE_HOUR);
    edit_container(&mut cluster, "image", json!("app:3"));
    reconcile_after(&mut cluster, SignedDuration::ZERO);
    assert_eq!(
        condition(&cluster, "Progressing"),
        before,
        "a new revision is late as well, but the message keeps the first name"
    );
    settle(&mut cluster);
    assert_eq!(progressing_reason(&cluster), "CloneSetAvailable");
}

#[test]
fn progress_deadline_counts_from_last_update() {
    let mut cluster = with_deadline_of_a_minute();
    reconcile_after(&mut cluster, ONE_HOUR);
    edit_container(&mut cluster, "image", json!("app:2"));
    reconcile_after(&mut cluster, SignedDuration::ZERO);
    assert_deadline_exceeded(&cluster, "an hour after it was available");
    settle(&mut cluster);
    assert_eq!(progressing_reason(&cluster), "CloneSetAvailable");
}

#[test]
fn progress_deadline_includes_paused_time() {
    let mut cluster = with_deadline_of_a_minute();
    edit_container(&mut cluster, "image", json!("app:bad"));
    assert_minute_before_deadline(&mut cluster);
    edit_rolling_update(&mut cluster, json!({ "paused": true }));
    reconcile_after(&mut cluster, SignedDuration::ZERO);
    assert_eq!(progressing_reason(&cluster), "CloneSetPaused", "too late or not");
    edit_rolling_update(&mut cluster, json!({ "paused": false }));
    assert_minute_before_deadline(&mut cluster);
    edit_rolling_update(&mut cluster, json!({ "paused": true }));
    reconcile_after(&mut cluster, SignedDuration::ZERO);
    reconcile_after(&mut cluster, ONE_HOUR);
    edit_rolling_update(&mut cluster, json!({ "paused": false }));
    reconcile_after(&mut cluster, SignedDuration::ZERO);
    assert_deadline_exceeded(&cluster, "it was paused for an hour");
}

#[test]
fn progress_deadline_includes_partition_time() {
    let mut cluster = with_deadline_of_a_minute();
    edit_rolling_update(&mut cluster, json!({ "partition": 3 }));
    edit_container(&mut cluster, "image", json!("app:2"));
    settle(&mut cluster);
    assert_eq!(progressing_reason(&cluster), "ProgressPartitionAvailable");
    reconcile_after(&mut cluster, ONE_HOUR);
    edit_rolling_update(&mut cluster, json!({ "partition": 0 }));
    reconcile_after(&mut cluster, SignedDuration::ZERO);
    assert_deadline_exceeded(&cluster, "an hour after the partition was reached");
}

#[test]
fn max_int_is_no_progress_deadline() {
    let mut cluster = with_deadline_of_a_minute();
    cluster.edit(&json!({ "progressDeadlineSeconds": i32::MAX }));
    edit_container(&mut cluster, "image", json!("app:bad"));
    cluster.reconcile();
    run_kubelets(&mut cluster);
    cluster.reconcile();
    assert_eq!(reconcile_after(&mut cluster, ONE_HOUR), None, "nothing is due");
    // This many seconds are 68 years.
    reconcile_after(&mut cluster, SignedDuration::from_secs(i64::from(i32::MAX) + 1));
    assert_eq!(condition(&cluster, "Progressing"), None);
}

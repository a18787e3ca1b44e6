//! Single decisions as scenarios.

use jiff::ToSpan;
use serde_json::{Value, json};

use super::fake_cluster::FakeCluster;
use super::faults::Fault;
use super::random_histories::{clone_set_spec, edit_container, edit_rolling_update};
use crate::cloneset::plan::{Action, ActionFailure, ActionPurpose, FailureSubject, PatchReason, Plan};
use kruise_api::cloneset::CloneSetCondition;
use kruise_api::keys;
use kruise_workload::in_place::PatchTarget;

/// Reconciles and runs kubelets until a reconcile does nothing.
pub(super) fn settle(cluster: &mut FakeCluster) {
    for _ in 0..100 {
        let (_, plan) = cluster.reconcile();
        let before = cluster.pods.clone();
        run_kubelets(cluster);
        if plan.actions.is_empty() && plan.status.is_none() && before == cluster.pods {
            return;
        }
        cluster.now = cluster.now.checked_add(1.second()).unwrap();
    }
    panic!("does not converge: {:#}", cluster.set["status"]);
}

pub(super) fn run_kubelets(cluster: &mut FakeCluster) {
    let names: Vec<String> = cluster.pods.keys().cloned().collect();
    names.iter().for_each(|name| cluster.run_kubelet(name));
}

pub(super) fn condition(cluster: &FakeCluster, type_: &str) -> Option<CloneSetCondition> {
    let conditions = &cluster.set["status"]["conditions"];
    let conditions: Vec<CloneSetCondition> = serde_json::from_value(conditions.clone()).unwrap_or_default();
    conditions.into_iter().find(|c| c.type_ == type_)
}

/// The reason of condition Progressing, which exists only with a deadline.
pub(super) fn progressing_reason(cluster: &FakeCluster) -> String {
    let mut cluster = cluster.clone();
    if cluster.set["spec"]["progressDeadlineSeconds"].is_null() {
        cluster.set["spec"]["progressDeadlineSeconds"] = json!(1_000_000);
        cluster.reconcile();
    }
    condition(&cluster, "Progressing").unwrap().reason
}

/// Message of condition Waiting.
pub(super) fn waiting_message(cluster: &FakeCluster) -> String {
    condition(cluster, "Waiting").unwrap_or_default().message
}

fn patches(plan: &Plan) -> Vec<(PatchReason, Vec<PatchTarget>)> {
    let patches = plan.actions.iter().filter_map(|action| match action {
        Action::PatchPod {
            reason: why, writes, ..
        } => Some((*why, writes.iter().map(|w| w.target).collect())),
        _ => None,
    });
    patches.collect()
}

fn one_replica(spec: Value) -> FakeCluster {
    let mut cluster = FakeCluster::new(spec);
    cluster.edit(&json!({ "replicas": 1 }));
    cluster
}

/// The last priority of a container counts, as for kubelet the last variable of a name does.
#[test]
fn new_pod_has_the_barriers_of_its_launch_priorities() {
    let priority = |value: &str| json!({ "name": keys::ENV_CONTAINER_PRIORITY, "value": value });
    let mut spec = clone_set_spec(false, false);
    spec["template"]["spec"]["containers"] = json!([
        { "name": "app", "image": "app:1" },
        { "name": "proxy", "image": "proxy:1", "env": [priority("1"), priority("2")] },
    ]);
    let (_, plan) = one_replica(spec).reconcile();
    let Action::CreatePod { name, pod, .. } = &plan.actions[0] else {
        panic!("{plan:?}")
    };
    let barriers = [0, 1].map(|at: usize| {
        let env = pod["spec"]["containers"][at]["env"].as_array().unwrap();
        env.last().unwrap()["valueFrom"]["configMapKeyRef"].clone()
    });
    let map = format!("{name}-barrier");
    assert_eq!(
        barriers,
        ["p_0", "p_2"].map(|key| json!({ "name": map, "key": key }))
    );
}

#[test]
fn new_pod_takes_two_writes() {
    let mut cluster = one_replica(clone_set_spec(false, true));
    let (_, plan) = cluster.reconcile();
    let Action::CreatePod { name, pod, claims } = &plan.actions[0] else {
        panic!("{plan:?}")
    };
    let id = name.strip_prefix("s-").unwrap();
    assert_eq!(pod["metadata"]["labels"][keys::CLONESET_INSTANCE_ID], id);
    assert_eq!(
        pod["metadata"]["labels"][keys::LIFECYCLE_STATE],
        "PreparingNormal"
    );
    let update = cluster.revisions.last().unwrap().name.clone();
    assert_eq!(pod["metadata"]["labels"][keys::CONTROLLER_REVISION_HASH], update);
    assert_eq!(
        pod["metadata"]["labels"][keys::POD_TEMPLATE_HASH],
        update.strip_prefix("s-").unwrap()
    );
    assert_eq!(pod["metadata"]["ownerReferences"][0]["kind"], "CloneSet");
    let gates = json!([{ "conditionType": "InPlaceUpdateReady" }, { "conditionType": "KruisePodReady" }]);
    assert_eq!(pod["spec"]["readinessGates"], gates);
    assert_eq!(
        pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"],
        format!("data-s-{id}")
    );
    assert_eq!(claims[0]["metadata"]["labels"]["app"], "x");
    let (_, plan) = cluster.reconcile();
    assert!(
        plan.actions.is_empty(),
        "a Pod without a node needs nothing: {plan:?}"
    );
    run_kubelets(&mut cluster);
    let (_, plan) = cluster.reconcile();
    assert_eq!(
        patches(&plan),
        [(PatchReason::SyncLifecycle, vec![PatchTarget::Status])]
    );
    settle(&mut cluster);
    assert_eq!(progressing_reason(&cluster), "CloneSetAvailable");
}

#[test]
fn claims_copy_their_template_metadata() {
    let mut spec = clone_set_spec(false, true);
    let metadata = json!({ "name": "data", "labels": { "l": "1" }, "annotations": { "a": "2" },
        "finalizers": ["example.io/backup"] });
    spec["volumeClaimTemplates"][0]["metadata"] = metadata;
    let (_, plan) = one_replica(spec).reconcile();
    let Action::CreatePod { claims, .. } = &plan.actions[0] else {
        panic!("{plan:?}")
    };
    let metadata = &claims[0]["metadata"];
    assert_eq!(
        [&metadata["labels"]["l"], &metadata["annotations"]["a"]],
        ["1", "2"]
    );
    assert_eq!(metadata["finalizers"], json!(["example.io/backup"]));
}

#[test]
fn in_place_update_takes_three_writes() {
    let mut cluster = one_replica(clone_set_spec(false, false));
    settle(&mut cluster);
    let uid = cluster.pods.values().next().unwrap()["metadata"]["uid"].clone();
    edit_container(&mut cluster, "image", json!("app:2"));
    let (_, plan) = cluster.reconcile();
    assert_eq!(
        patches(&plan),
        [(
            PatchReason::UpdateInPlace,
            vec![PatchTarget::Status, PatchTarget::Pod]
        )]
    );
    let (_, plan) = cluster.reconcile();
    assert_eq!(patches(&plan), []);
    assert_eq!(plan.status.unwrap().updated_replicas, 1);
    let message = waiting_message(&cluster);
    assert!(
        message.contains("container app: the old one has not been replaced yet"),
        "{message}"
    );
    run_kubelets(&mut cluster);
    let (_, plan) = cluster.reconcile();
    assert_eq!(
        patches(&plan),
        [(PatchReason::SyncLifecycle, vec![PatchTarget::Status])]
    );
    settle(&mut cluster);
    assert_eq!(cluster.pods.values().next().unwrap()["metadata"]["uid"], uid);
    assert_eq!(progressing_reason(&cluster), "CloneSetAvailable");
}

#[test]
fn metadata_update_takes_one_write_and_stays_ready() {
    let mut cluster = one_replica(clone_set_spec(false, false));
    settle(&mut cluster);
    cluster.edit(&json!({ "template": { "metadata": { "labels": { "new": "1" } } } }));
    let (_, plan) = cluster.reconcile();
    assert_eq!(
        patches(&plan),
        [(PatchReason::UpdateInPlace, vec![PatchTarget::Pod])]
    );
    assert_eq!(
        cluster.pods.values().next().unwrap()["metadata"]["labels"]["new"],
        "1"
    );
    let (_, plan) = cluster.reconcile();
    assert!(plan.actions.is_empty());
    assert_eq!(progressing_reason(&cluster), "CloneSetAvailable");
}

#[test]
fn quota_failure_condition_is_set_and_cleared() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    settle(&mut cluster);
    cluster.edit(&json!({ "replicas": 7 }));
    let until = cluster.now.checked_add(5.seconds()).unwrap();
    let failure = ActionFailure {
        purpose: ActionPurpose::Scale,
        retry_at: until,
        permanent: false,
        resize_rejected: false,
        answered: true,
        message: "exceeded quota".to_owned(),
    };
    cluster.failures.insert(FailureSubject::PodCreation, failure);
    edit_container(&mut cluster, "image", json!("app:2"));
    let (_, plan) = cluster.reconcile();
    assert!(
        !plan.actions.iter().any(|a| matches!(a, Action::CreatePod { .. })),
        "it is too early"
    );
    assert_eq!(plan.requeue_at, Some(until));
    assert_eq!(
        condition(&cluster, "FailedScale").unwrap().message,
        "exceeded quota"
    );
    assert!(waiting_message(&cluster).contains("exceeded quota"));
    cluster.now = until;
    let (_, plan) = cluster.reconcile();
    assert_eq!(
        plan.actions
            .iter()
            .filter(|a| matches!(a, Action::CreatePod { .. }))
            .count(),
        2
    );
    assert_eq!(condition(&cluster, "FailedScale"), None);
    settle(&mut cluster);
}

#[test]
fn in_place_only_failure_is_reported() {
    let mut cluster = one_replica(clone_set_spec(false, false));
    edit_rolling_update(&mut cluster, json!({ "podUpdatePolicy": "InPlaceOnly" }));
    settle(&mut cluster);
    edit_container(&mut cluster, "command", json!(["else"]));
    let (_, plan) = cluster.reconcile();
    assert_eq!(patches(&plan), []);
    let message = condition(&cluster, "FailedUpdate").unwrap().message;
    assert!(
        message.contains("template.spec.containers.0.command.0 cannot be changed in place"),
        "{message}"
    );
    edit_container(&mut cluster, "command", json!(["run"]));
    cluster.reconcile();
    assert_eq!(condition(&cluster, "FailedUpdate"), None);
}

#[test]
fn adopted_orphans_are_replaced_within_the_limit() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    settle(&mut cluster);
    for pod in cluster.pods.values_mut() {
        pod["metadata"]["ownerReferences"] = json!([]);
        pod["metadata"]["labels"] = json!({ "app": "x", "pod-template-hash": "of-a-deployment" });
        pod["spec"]["readinessGates"] = json!([]);
    }
    cluster.set["status"] = json!(null);
    let (_, plan) = cluster.reconcile();
    assert_eq!(
        patches(&plan),
        vec![(PatchReason::Adopt, vec![PatchTarget::Pod]); 5]
    );
    assert_eq!(
        plan.actions.len(),
        5,
        "no Pod is created while orphans are adopted"
    );
    let (_, plan) = cluster.reconcile();
    assert_eq!(
        patches(&plan),
        [(PatchReason::UpdateReCreate, vec![PatchTarget::Pod])]
    );
    settle(&mut cluster);
    assert_eq!(progressing_reason(&cluster), "CloneSetAvailable");
    let released = cluster.pods.values_mut().next().unwrap();
    released["metadata"]["labels"]["app"] = json!("y");
    let (_, plan) = cluster.reconcile();
    assert_eq!(patches(&plan), [(PatchReason::Release, vec![PatchTarget::Pod])]);
}

/// As in OpenKruise: a user's Pod with these labels beside a CloneSet is ignored, and so is its name in `podsToDelete`.
#[test]
fn later_orphans_are_not_adopted() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    settle(&mut cluster);
    let before = cluster.pods.clone();
    let orphan = json!({ "metadata": { "labels": { "app": "x" } },
        "spec": { "containers": [{ "name": "app", "image": "app:1" }] } });
    cluster.create_pod("stray", orphan);
    cluster.edit(&json!({ "scaleStrategy": { "podsToDelete": ["stray"] } }));
    settle(&mut cluster);
    assert!(
        cluster
            .pods
            .remove("stray")
            .is_some_and(|pod| pod["metadata"]["ownerReferences"].is_null())
    );
    assert_eq!(cluster.pods, before);
    assert_eq!(cluster.set["spec"]["scaleStrategy"]["podsToDelete"], json!(null));
}

#[test]
fn observed_generation_waits_for_all_adoptions() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    settle(&mut cluster);
    cluster.recreate_without_dependents();
    (cluster.failures_left, cluster.fault) = (2, Fault::Refused);
    cluster.reconcile();
    assert_eq!(cluster.set["status"]["observedGeneration"], json!(null));
    cluster.now += 1.hour();
    settle(&mut cluster);
    assert_eq!(
        cluster.set["status"]["observedGeneration"],
        cluster.set["metadata"]["generation"]
    );
    assert!(
        cluster
            .pods
            .values()
            .all(|pod| pod["metadata"]["ownerReferences"][0]["uid"] == "set")
    );
    assert_eq!(cluster.pods.len(), 5);
}

/// No Pod is created while an adoption is only delayed: that would delete Pods of the Deployment.
#[test]
fn failed_adoption_is_retried_before_scaling() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    settle(&mut cluster);
    let before: Vec<String> = cluster.pods.keys().cloned().collect();
    cluster.recreate_without_dependents();
    (cluster.failures_left, cluster.fault) = (2, Fault::Refused);
    cluster.reconcile();
    assert_eq!(cluster.failures_left, 0);
    let (_, plan) = cluster.reconcile();
    assert!(plan.actions.is_empty(), "{:?}", plan.actions);
    cluster.now = plan.requeue_at.unwrap();
    settle(&mut cluster);
    assert!(
        before.iter().eq(cluster.pods.keys()),
        "{before:?}: {:?}",
        cluster.pods.keys()
    );
    let ours = |pod: &Value| pod["metadata"]["ownerReferences"][0]["uid"] == "set";
    assert!(cluster.pods.values().all(ours));
}

#[test]
fn exceeded_progress_deadline_names_the_reason() {
    let mut cluster = one_replica(clone_set_spec(false, false));
    settle(&mut cluster);
    edit_container(&mut cluster, "image", json!("app:bad"));
    cluster.edit(&json!({ "progressDeadlineSeconds": 60 }));
    let (_, plan) = cluster.reconcile();
    assert_eq!(progressing_reason(&cluster), "CloneSetUpdated");
    assert!(plan.requeue_at.is_some_and(|wake| wake > cluster.now));
    cluster.now = plan.requeue_at.unwrap();
    run_kubelets(&mut cluster);
    cluster.reconcile();
    assert_eq!(progressing_reason(&cluster), "ProgressDeadlineExceeded");
    let message = waiting_message(&cluster);
    assert!(message.contains("ImagePullBackOff of image app:bad"), "{message}");
}

#[test]
fn images_are_pre_downloaded_once() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    let pre_download = json!({ "imagePreDownloadParallelism": 3, "imagePreDownloadMinUpdatedReadyPods": 1 });
    edit_rolling_update(
        &mut cluster,
        json!({ "inPlaceUpdateStrategy": pre_download, "partition": "80%" }),
    );
    settle(&mut cluster);
    edit_container(&mut cluster, "image", json!("app:2"));
    let (_, plan) = cluster.reconcile();
    assert!(
        !plan.actions.iter().any(|a| matches!(a, Action::CreateJob(_))),
        "no Pod is updated yet"
    );
    settle(&mut cluster);
    let update = cluster.revisions.last().unwrap().clone();
    assert_eq!(cluster.jobs, [format!("{}-app", update.name)]);
    assert!(update.pre_downloaded);
    edit_rolling_update(&mut cluster, json!({ "partition": 0 }));
    settle(&mut cluster);
    assert_eq!(cluster.jobs, Vec::<String>::new());
}

#[test]
fn pre_download_job_has_image_and_pod_selector() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    settle(&mut cluster);
    edit_container(&mut cluster, "image", json!("app:2"));
    let (_, plan) = cluster.reconcile();
    let job = plan.actions.iter().find_map(|a| match a {
        Action::CreateJob(job) => Some(json!(job)),
        _ => None,
    });
    let (job, revision) = (job.unwrap(), &cluster.revisions.last().unwrap().name);
    let hash = revision.strip_prefix("s-").unwrap();
    assert_eq!(
        job["metadata"]["labels"],
        json!({ "app": "x", keys::REVISION_HASH: hash })
    );
    assert_eq!(job["spec"]["image"], "app:2");
    assert_eq!(job["spec"]["parallelism"], 1);
    assert_eq!(
        job["spec"]["pullPolicy"],
        json!({ "timeoutSeconds": 300, "backoffLimit": 1 })
    );
    assert_eq!(
        job["spec"]["completionPolicy"],
        json!({ "type": "Always", "ttlSecondsAfterFinished": 600 })
    );
    let not_updated =
        json!([{ "key": keys::CONTROLLER_REVISION_HASH, "operator": "NotIn", "values": [revision, hash] }]);
    assert_eq!(job["spec"]["podSelector"]["matchExpressions"], not_updated);
}

#[test]
fn claims_follow_deleted_pods_unless_reused() {
    for reuse in [false, true] {
        let mut cluster = one_replica(clone_set_spec(false, true));
        cluster.edit(&json!({ "scaleStrategy": { "enablePVCReuse": reuse } }));
        settle(&mut cluster);
        let claim = cluster.claims.keys().next().unwrap().clone();
        let name = cluster.pods.keys().next().unwrap().clone();
        cluster.delete_pod(&name);
        settle(&mut cluster);
        assert_eq!(cluster.claims.contains_key(&claim), reuse);
        assert_eq!(
            cluster.pods.contains_key(&name),
            reuse,
            "a Pod's name follows its claim"
        );
    }
}

#[test]
fn pods_to_delete_are_deleted_and_pruned() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    settle(&mut cluster);
    let name = cluster.pods.keys().next().unwrap().clone();
    cluster.edit(&json!({ "replicas": 4, "scaleStrategy": { "podsToDelete": [name.clone()] } }));
    settle(&mut cluster);
    assert!(!cluster.pods.contains_key(&name) && cluster.pods.len() == 4);
    assert!(cluster.set["spec"]["scaleStrategy"].get("podsToDelete").is_none());
}

/// Pods to delete need not wait for a broken Pod that waits for the same place.
#[test]
fn broken_old_pod_does_not_block_pods_to_delete() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    cluster.edit(&json!({ "replicas": 3 }));
    edit_rolling_update(&mut cluster, json!({ "partition": 1 }));
    settle(&mut cluster);
    edit_container(&mut cluster, "image", json!("app:2"));
    settle(&mut cluster);
    let image_of = |pod: &Value| pod["spec"]["containers"][0]["image"].clone();
    let (old, new) = {
        let find = |image: &str| {
            cluster
                .pods
                .iter()
                .find(|(_, pod)| image_of(pod) == image)
                .unwrap()
                .0
                .clone()
        };
        (find("app:1"), find("app:2"))
    };
    cluster.pods.get_mut(&old).unwrap()["spec"]["containers"][0]["image"] = json!("app:bad");
    run_kubelets(&mut cluster);
    edit_rolling_update(
        &mut cluster,
        json!({ "partition": 0, "maxUnavailable": 0, "maxSurge": 1 }),
    );
    cluster.edit(&json!({ "replicas": 2, "scaleStrategy": { "podsToDelete": [new] } }));
    settle(&mut cluster);
    assert_eq!(progressing_reason(&cluster), "CloneSetAvailable");
    assert!(!cluster.pods.contains_key(&new) && cluster.pods.len() == 2);
}

//! Pods that were resized, or should have been, for an update that does not begin.

use jiff::ToSpan;
use serde_json::{Value, json};

use super::fake_cluster::FakeCluster;
use super::faults::Fault;
use super::random_histories::{clone_set_spec, edit_container, edit_rolling_update};
use super::scenarios::{condition, run_kubelets, settle, waiting_message};
use crate::cloneset::plan::{Action, ActionFailure, ActionPurpose, FailureSubject, Plan, plan};
use kruise_api::keys;
use kruise_workload::in_place::{PatchTarget, Pod, resize};

/// Changes CPU and image together.
fn edit_cpu_and_image(cluster: &mut FakeCluster, cpu: &str, image: &str) {
    let mut app = cluster.set["spec"]["template"]["spec"]["containers"][0].clone();
    (app["resources"], app["image"]) = (json!({ "requests": { "cpu": cpu } }), json!(image));
    cluster.edit(&json!({ "template": { "spec": { "containers": [app] } } }));
}

/// `pods` Pods whose CPU change fails with `fault` in one reconcile.
fn begin_resizes(pods: u8, fault: Fault) -> FakeCluster {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    cluster.edit(&json!({ "replicas": pods }));
    settle(&mut cluster);
    (cluster.failures_left, cluster.fault) = (usize::MAX, fault);
    edit_cpu_and_image(&mut cluster, "2", "app:1");
    cluster.reconcile();
    assert!(
        cluster
            .pods
            .values()
            .any(|pod| resize::has_resize_annotation(&Pod::from_json(pod)))
    );
    cluster
}

/// One Pod that was resized, without the following write.
fn one_resized_pod() -> FakeCluster {
    let mut cluster = begin_resizes(1, Fault::LastWriteRefused);
    assert_eq!(cpu(&cluster), "2");
    cluster.failures_left = 0;
    cluster
}

fn first_pod(cluster: &FakeCluster) -> &Value {
    cluster.pods.values().next().unwrap()
}

fn cpu(cluster: &FakeCluster) -> &Value {
    &first_pod(cluster)["spec"]["containers"][0]["resources"]["requests"]["cpu"]
}

fn reconcile_later(cluster: &mut FakeCluster) -> Plan {
    cluster.now = cluster.now.checked_add(6.seconds()).unwrap();
    cluster.reconcile().1
}

/// Asserts that everything settles once failures may be retried, and that no announcement remains.
fn assert_settles(cluster: &mut FakeCluster) {
    cluster.failures_left = 0;
    reconcile_later(cluster);
    settle(cluster);
    assert!(
        !cluster
            .pods
            .values()
            .any(|pod| resize::has_resize_annotation(&Pod::from_json(pod)))
    );
    assert_eq!(
        cluster.set["status"]["availableReplicas"],
        cluster.set["spec"]["replicas"]
    );
}

/// The (sub)resources that a plan patches.
fn patch_targets(plan: &Plan) -> Vec<PatchTarget> {
    let patches = plan.actions.iter().flat_map(|action| match action {
        Action::PatchPod { writes, .. } => writes.as_slice(),
        _ => &[],
    });
    patches.map(|write| write.target).collect()
}

#[test]
fn rollback_restores_the_resized_cpu() {
    for restart in [false, true] {
        let mut cluster = one_resized_pod();
        if restart {
            cluster.restart_manager();
        }
        edit_cpu_and_image(&mut cluster, "1", "app:1");
        assert_settles(&mut cluster);
        assert_eq!(cpu(&cluster), "1");
    }
    // The same if the update must not continue now, or is superseded.
    let mut cluster = one_resized_pod();
    edit_rolling_update(&mut cluster, json!({ "paused": true }));
    assert_settles(&mut cluster);
    assert_eq!(cpu(&cluster), "1");
    edit_rolling_update(&mut cluster, json!({ "paused": false }));
    settle(&mut cluster);
    assert_eq!(cpu(&cluster), "2");
    let mut cluster = one_resized_pod();
    edit_cpu_and_image(&mut cluster, "1", "app:2");
    assert_settles(&mut cluster);
    assert_eq!(cpu(&cluster), "1");
    assert_eq!(cluster.set["status"]["updatedReadyReplicas"], 1);
}

#[test]
fn unrecorded_resize_is_repeated_on_retry() {
    let mut cluster = one_resized_pod();
    let plan = reconcile_later(&mut cluster);
    assert_eq!(
        patch_targets(&plan),
        [PatchTarget::Resize, PatchTarget::Pod],
        "the resize is already announced"
    );
    settle(&mut cluster);
    assert_eq!(cpu(&cluster), "2");
    assert_eq!(cluster.set["status"]["updatedReadyReplicas"], 1);
}

/// The first size was accepted, the second refused; neither is requested any more.
#[test]
fn two_unrecorded_resizes_restore_the_first_size() {
    let mut cluster = one_resized_pod();
    edit_cpu_and_image(&mut cluster, "9", "app:2");
    (cluster.failures_left, cluster.fault) = (1, Fault::ResizeQuotaExceeded);
    assert_eq!(
        patch_targets(&reconcile_later(&mut cluster))[0],
        PatchTarget::Status
    );
    assert_eq!(cpu(&cluster), "2");
    edit_cpu_and_image(&mut cluster, "1", "app:1");
    assert_settles(&mut cluster);
    assert_eq!(cpu(&cluster), "1");
}

/// A resize that was not done changed nothing; one that was is restored to the revision's size, because the annotation
/// alone proves no size.
#[test]
fn foreign_resizes_are_kept() {
    for (fault, cpu) in [
        (Fault::ResizeQuotaExceeded, "250m"),
        (Fault::LastWriteRefused, "1"),
    ] {
        let mut cluster = FakeCluster::new(clone_set_spec(false, false));
        cluster.edit(&json!({ "replicas": 1 }));
        settle(&mut cluster);
        let pod = cluster.pods.values_mut().next().unwrap();
        pod["spec"]["containers"][0]["resources"] = json!({ "requests": { "cpu": "250m", "memory": "1Gi" } });
        settle(&mut cluster);
        (cluster.failures_left, cluster.fault) = (1, fault);
        edit_cpu_and_image(&mut cluster, "2", "app:1");
        cluster.reconcile();
        edit_cpu_and_image(&mut cluster, "1", "app:1");
        assert_settles(&mut cluster);
        let requests = &first_pod(&cluster)["spec"]["containers"][0]["resources"]["requests"];
        assert_eq!(*requests, json!({ "cpu": cpu, "memory": "1Gi" }));
    }
}

/// A quota may remain full for days.
#[test]
fn rejected_resize_is_annotated_once() {
    let mut cluster = begin_resizes(5, Fault::ResizeQuotaExceeded);
    for _ in 0..20 {
        reconcile_later(&mut cluster);
        run_kubelets(&mut cluster);
    }
    let versions = |cluster: &FakeCluster| -> Vec<Value> {
        let pods = cluster.pods.values();
        pods.map(|pod| pod["metadata"]["resourceVersion"].clone())
            .collect()
    };
    let before = versions(&cluster);
    for _ in 0..20 {
        reconcile_later(&mut cluster);
    }
    assert_eq!(versions(&cluster), before, "nothing is written");
    edit_cpu_and_image(&mut cluster, "1", "app:1");
    let plan = reconcile_later(&mut cluster);
    assert!(
        patch_targets(&plan).iter().all(|to| *to == PatchTarget::Pod),
        "nothing was resized: {plan:?}"
    );
    assert_settles(&mut cluster);
}

/// One Pod whose increase of CPU, requested with another image, is refused.
fn rejected_resize(policy: &str, fault: Fault) -> FakeCluster {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    cluster.edit(&json!({ "replicas": 1 }));
    edit_rolling_update(&mut cluster, json!({ "podUpdatePolicy": policy }));
    settle(&mut cluster);
    (cluster.failures_left, cluster.fault) = (usize::MAX, fault);
    edit_cpu_and_image(&mut cluster, "9", "app:2");
    cluster.reconcile();
    cluster
}

fn first_image(cluster: &FakeCluster) -> &Value {
    &first_pod(cluster)["spec"]["containers"][0]["image"]
}

#[test]
fn rejected_resize_recreates_with_in_place_if_possible() {
    let mut cluster = rejected_resize("InPlaceIfPossible", Fault::ResizeUnsupported);
    let before = first_pod(&cluster)["metadata"].clone();
    assert_eq!(before["labels"][keys::SPECIFIED_DELETE], "true");
    assert_eq!(first_image(&cluster), "app:1", "it is deleted without the update");
    settle(&mut cluster);
    assert_ne!(first_pod(&cluster)["metadata"]["uid"], before["uid"]);
    assert_eq!(
        (cpu(&cluster), first_image(&cluster)),
        (&json!("9"), &json!("app:2"))
    );
}

/// If a quota has no room, the Pod is not recreated either.
#[test]
fn rejected_resize_does_not_block_the_image_update() {
    for (policy, fault) in [
        ("InPlaceOnly", Fault::ResizeUnsupported),
        ("InPlaceOnly", Fault::ResizeQuotaExceeded),
        ("InPlaceIfPossible", Fault::ResizeQuotaExceeded),
    ] {
        let mut cluster = rejected_resize(policy, fault);
        let uid = first_pod(&cluster)["metadata"]["uid"].clone();
        for _ in 0..20 {
            run_kubelets(&mut cluster);
            reconcile_later(&mut cluster);
        }
        assert_eq!(
            (cpu(&cluster), first_image(&cluster)),
            (&json!("1"), &json!("app:2"))
        );
        let status = &cluster.set["status"];
        assert_eq!(
            [&status["updatedReadyReplicas"], &status["availableReplicas"]],
            [1, 1]
        );
        let waiting = condition(&cluster, "Waiting").unwrap();
        assert_eq!(waiting.reason, "ResizeRefused");
        assert!(waiting.message.contains("its resize was refused"), "{waiting:?}");
        // It is retried, and with the next update.
        let mut next = cluster.clone();
        assert_settles(&mut cluster);
        assert_eq!(
            (cpu(&cluster), &first_pod(&cluster)["metadata"]["uid"]),
            (&json!("9"), &uid)
        );
        assert_eq!(condition(&cluster, "Waiting"), None);
        next.failures_left = 0;
        next.failures.clear();
        edit_cpu_and_image(&mut next, "9", "app:3");
        settle(&mut next);
        assert_eq!((cpu(&next), first_image(&next)), (&json!("9"), &json!("app:3")));
    }
}

/// The same if it is refused after its update began: in its second batch, or after a grace period.
#[test]
fn late_rejected_resize_does_not_block_the_image() {
    for (policy, recreated) in [("InPlaceOnly", false), ("InPlaceIfPossible", true)] {
        let mut cluster = launch_ordered_pod();
        edit_rolling_update(&mut cluster, json!({ "podUpdatePolicy": policy }));
        let uid = first_pod(&cluster)["metadata"]["uid"].clone();
        edit_both(&mut cluster, ["2", "2"], ["1", "3"]);
        assert_tags_and_cpu(&cluster, [("2", "1"), ("1", "1")]);
        (cluster.failures_left, cluster.fault) = (1, Fault::ResizeUnsupported);
        settle(&mut cluster);
        reconcile_later(&mut cluster);
        settle(&mut cluster);
        assert_tags_and_cpu(&cluster, [("2", "1"), ("2", "3")]);
        assert_eq!(first_pod(&cluster)["metadata"]["uid"] != uid, recreated);
    }
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    cluster.edit(&json!({ "replicas": 1 }));
    let grace = json!({ "gracePeriodSeconds": 60 });
    let only = json!({ "podUpdatePolicy": "InPlaceOnly", "inPlaceUpdateStrategy": grace });
    edit_rolling_update(&mut cluster, only);
    settle(&mut cluster);
    edit_cpu_and_image(&mut cluster, "9", "app:2");
    settle(&mut cluster);
    assert_eq!(first_image(&cluster), "app:1");
    (cluster.failures_left, cluster.fault) = (usize::MAX, Fault::ResizeUnsupported);
    cluster.now = cluster.now.checked_add(60.seconds()).unwrap();
    for _ in 0..5 {
        run_kubelets(&mut cluster);
        reconcile_later(&mut cluster);
    }
    assert_eq!(
        (cpu(&cluster), first_image(&cluster)),
        (&json!("1"), &json!("app:2"))
    );
    assert_eq!(cluster.set["status"]["availableReplicas"], 1);
}

/// Nothing else changes, so the Pod must not get the revision without the resize.
#[test]
fn rejected_resize_alone_is_no_update() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    cluster.edit(&json!({ "replicas": 1 }));
    edit_rolling_update(&mut cluster, json!({ "podUpdatePolicy": "InPlaceOnly" }));
    settle(&mut cluster);
    (cluster.failures_left, cluster.fault) = (usize::MAX, Fault::ResizeUnsupported);
    edit_cpu_and_image(&mut cluster, "9", "app:1");
    for _ in 0..3 {
        run_kubelets(&mut cluster);
        reconcile_later(&mut cluster);
    }
    cluster.reconcile();
    assert_eq!(cluster.set["status"]["updatedReplicas"], 0);
    assert!(
        waiting_message(&cluster).contains("failed: refused"),
        "{}",
        waiting_message(&cluster)
    );
}

/// While resizes of many Pods are refused, one Pod at a time is retried, in turn.
#[test]
fn rejected_resizes_are_retried_one_at_a_time() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    edit_rolling_update(
        &mut cluster,
        json!({ "podUpdatePolicy": "InPlaceOnly", "maxUnavailable": 5 }),
    );
    settle(&mut cluster);
    (cluster.failures_left, cluster.fault) = (usize::MAX, Fault::ResizeUnsupported);
    edit_cpu_and_image(&mut cluster, "9", "app:2");
    cluster.reconcile();
    run_kubelets(&mut cluster);
    cluster.reconcile();
    let mut observed = cluster.observe();
    let refused = ActionFailure {
        purpose: ActionPurpose::Update,
        retry_at: cluster.now,
        permanent: true,
        resize_rejected: true,
        answered: true,
        message: "refused".to_owned(),
    };
    observed.failures = [(FailureSubject::PendingResizes, refused.clone())].into();
    for _ in 0..5 {
        let plan = plan(&observed, cluster.now);
        let resized = plan.actions.iter().filter_map(|action| match action {
            Action::PatchPod { uid, writes, .. }
                if writes.iter().any(|w| w.target == PatchTarget::Resize) =>
            {
                Some(uid)
            }
            _ => None,
        });
        let resized: Vec<_> = resized.collect();
        assert_eq!(resized.len(), 1, "{plan:?}");
        let again = observed
            .failures
            .insert(FailureSubject::Pod(resized[0].clone()), refused.clone());
        assert_eq!(again, None, "this Pod was already tried");
    }
}

/// kubelet reports that it cannot resize the Pod, cannot do it yet, or fails to do it.
fn set_resize_pending(cluster: &mut FakeCluster, reason: &str) {
    let now = cluster.now.to_string();
    let old = json!({ "requests": { "cpu": "1" } });
    for pod in cluster.pods.values_mut() {
        pod["status"]["containerStatuses"][0]["resources"] = old.clone();
        let kind = if reason == "Error" {
            "PodResizeInProgress"
        } else {
            "PodResizePending"
        };
        let pending = json!({ "type": kind, "status": "True", "reason": reason,
            "message": "Node didn't have enough resource: cpu", "lastTransitionTime": now });
        kruise_workload::testing::apply(pod, &json!({ "status": { "conditions": [pending] } }));
    }
}

#[test]
fn infeasible_resize_recreates_in_place_if_possible() {
    for (reason, minutes) in [("Infeasible", 0), ("Deferred", 5), ("Error", 5)] {
        let mut cluster = FakeCluster::new(clone_set_spec(false, false));
        cluster.edit(&json!({ "replicas": 1 }));
        settle(&mut cluster);
        let uid = first_pod(&cluster)["metadata"]["uid"].clone();
        edit_cpu_and_image(&mut cluster, "9", "app:2");
        cluster.reconcile();
        run_kubelets(&mut cluster);
        set_resize_pending(&mut cluster, reason);
        let end = cluster.now.checked_add(minutes.minutes()).unwrap();
        let mut wake = cluster.reconcile().1.requeue_at;
        while cluster.now < end {
            cluster.now = wake.unwrap_or_else(|| panic!("{reason}: no requeue"));
            wake = cluster.reconcile().1.requeue_at;
        }
        assert_eq!(cluster.now, end, "{reason}");
        settle(&mut cluster);
        assert_ne!(first_pod(&cluster)["metadata"]["uid"], uid, "{reason}");
        assert_eq!(cpu(&cluster), "9");
    }
}

#[test]
fn infeasible_resize_in_place_only_updates_the_image() {
    for reason in ["Infeasible", "Deferred", "Error"] {
        let mut cluster = FakeCluster::new(clone_set_spec(false, false));
        edit_rolling_update(&mut cluster, json!({ "podUpdatePolicy": "InPlaceOnly" }));
        settle(&mut cluster);
        edit_cpu_and_image(&mut cluster, "9", "app:2");
        let mut events = Vec::new();
        for _ in 0..50 {
            events.extend(cluster.reconcile().1.events);
            run_kubelets(&mut cluster);
            set_resize_pending(&mut cluster, reason);
        }
        let status = &cluster.set["status"];
        let (updated, available) = (&status["updatedReadyReplicas"], &status["availableReplicas"]);
        assert_eq!((updated, available), (&json!(5), &json!(5)), "{reason}");
        assert!(
            cluster
                .pods
                .values()
                .all(|p| p["spec"]["containers"][0]["image"] == "app:2")
        );
        let waiting = condition(&cluster, "Waiting").unwrap();
        assert_eq!(waiting.reason, "ResizePending");
        assert!(waiting.message.contains("didn't have enough"), "{waiting:?}");
        assert!(
            events.iter().any(|event| event.message.contains(reason)),
            "{events:?}"
        );
        // Finally there is room.
        for pod in cluster.pods.values_mut() {
            let conditions = pod["status"]["conditions"].as_array_mut().unwrap();
            conditions.retain(|c| !c["type"].as_str().unwrap().starts_with("PodResize"));
        }
        settle(&mut cluster);
        assert_eq!(condition(&cluster, "Waiting"), None);
    }
}

/// kubelet's condition is about the previous size until it has seen the new one.
#[test]
fn stale_resize_pending_recreates_no_pod() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    cluster.counts_generations = true;
    cluster.edit(&json!({ "replicas": 1 }));
    edit_rolling_update(&mut cluster, json!({ "podUpdatePolicy": "InPlaceOnly" }));
    settle(&mut cluster);
    edit_cpu_and_image(&mut cluster, "9", "app:1");
    cluster.reconcile();
    run_kubelets(&mut cluster);
    set_resize_pending(&mut cluster, "Infeasible");
    cluster.reconcile();
    cluster.reconcile();
    let uid = first_pod(&cluster)["metadata"]["uid"].clone();
    edit_rolling_update(&mut cluster, json!({ "podUpdatePolicy": "InPlaceIfPossible" }));
    edit_cpu_and_image(&mut cluster, "2", "app:1");
    let label =
        |cluster: &FakeCluster| first_pod(cluster)["metadata"]["labels"][keys::SPECIFIED_DELETE].clone();
    for _ in 0..3 {
        cluster.reconcile();
    }
    assert_eq!((cpu(&cluster), label(&cluster)), (&json!("2"), Value::Null));
    assert_eq!(first_pod(&cluster)["metadata"]["uid"], uid);
    // kubelet has seen the new size, and has no room for it either.
    run_kubelets(&mut cluster);
    set_resize_pending(&mut cluster, "Infeasible");
    cluster.reconcile();
    assert_eq!(label(&cluster), "true");
}

/// Another client resizes a Pod; the CloneSet neither waits for that nor reacts.
#[test]
fn foreign_pending_resize_is_not_waited_for() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    settle(&mut cluster);
    for pod in cluster.pods.values_mut() {
        pod["spec"]["containers"][0]["resources"] = json!({ "requests": { "cpu": "9" } });
    }
    set_resize_pending(&mut cluster, "Infeasible");
    let (_, plan) = cluster.reconcile();
    assert_eq!((plan.actions, plan.status), (Vec::new(), None));
}

/// Only an annotation of the Pod changed, so no hook runs and the state does not change.
#[test]
fn unresized_pod_keeps_its_lifecycle_state() {
    let mut cluster = begin_resizes(1, Fault::ResizeQuotaExceeded);
    let hook = json!({ "labelsHandler": { "example.com/hold": "yes" } });
    cluster.edit(&json!({ "lifecycle": { "inPlaceUpdate": hook } }));
    edit_cpu_and_image(&mut cluster, "1", "app:1");
    cluster.failures_left = 0;
    let before = first_pod(&cluster)["metadata"]["labels"].clone();
    reconcile_later(&mut cluster);
    assert_eq!(first_pod(&cluster)["metadata"]["labels"], before);
    assert_settles(&mut cluster);
}

#[test]
fn deleted_pod_is_not_resized_back() {
    let mut cluster = one_resized_pod();
    let pod = cluster.pods.values_mut().next().unwrap();
    pod["metadata"]["labels"][keys::SPECIFIED_DELETE] = json!("true");
    let hook = json!({ "labelsHandler": { "app": "x" } });
    cluster.edit(&json!({ "lifecycle": { "preDelete": hook } }));
    edit_cpu_and_image(&mut cluster, "1", "app:1");
    for _ in 0..5 {
        let plan = reconcile_later(&mut cluster);
        assert!(!patch_targets(&plan).contains(&PatchTarget::Resize), "{plan:?}");
    }
}

/// Another implementation keeps annotations that it does not know, and may have recorded the update since.
#[test]
fn recorded_resize_is_not_restored() {
    let mut cluster = one_resized_pod();
    let announced = first_pod(&cluster)["metadata"]["annotations"][keys::IN_PLACE_UPDATE_RESIZING].clone();
    let grace = json!({ "gracePeriodSeconds": 60 });
    edit_rolling_update(&mut cluster, json!({ "inPlaceUpdateStrategy": grace }));
    edit_cpu_and_image(&mut cluster, "2", "app:2");
    reconcile_later(&mut cluster);
    let pod = cluster.pods.values_mut().next().unwrap();
    assert!(pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_GRACE].is_string());
    pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_RESIZING] = announced;
    assert_eq!(patch_targets(&reconcile_later(&mut cluster)), []);
    cluster.now = cluster.now.checked_add(60.seconds()).unwrap();
    assert_settles(&mut cluster);
    assert_eq!(cpu(&cluster), "2");
    assert_eq!(first_pod(&cluster)["spec"]["containers"][0]["image"], "app:2");
}

/// One Pod with two containers; `side` starts when `app` is ready.
fn launch_ordered_pod() -> FakeCluster {
    let mut spec = clone_set_spec(false, false);
    spec["replicas"] = json!(1);
    let order = json!({ (keys::CONTAINER_LAUNCH_PRIORITY): keys::CONTAINER_LAUNCH_ORDERED });
    spec["template"]["metadata"]["annotations"] = order;
    spec["template"]["spec"]["containers"] = containers(["1", "1"], ["1", "1"]);
    let mut cluster = FakeCluster::new(spec);
    settle(&mut cluster);
    cluster
}

/// Both containers with these tags and CPU.
fn containers(tags: [&str; 2], cpu: [&str; 2]) -> Value {
    let one = |at: usize, name: &str| {
        let size = json!({ "requests": { "cpu": cpu[at] } });
        json!({ "name": name, "image": format!("{name}:{}", tags[at]), "resources": size })
    };
    json!([one(0, "app"), one(1, "side")])
}

fn edit_both(cluster: &mut FakeCluster, tags: [&str; 2], cpu: [&str; 2]) {
    cluster.edit(&json!({ "template": { "spec": { "containers": containers(tags, cpu) } } }));
    reconcile_later(cluster);
}

/// Tag and CPU of each container.
fn tags_and_cpu(cluster: &FakeCluster) -> [(String, String); 2] {
    [0, 1].map(|at| {
        let container = &first_pod(cluster)["spec"]["containers"][at];
        let image = container["image"].as_str().unwrap();
        let cpu = container["resources"]["requests"]["cpu"].as_str().unwrap();
        (image.split(':').next_back().unwrap().to_owned(), cpu.to_owned())
    })
}

fn assert_tags_and_cpu(cluster: &FakeCluster, [app, side]: [(&str, &str); 2]) {
    let owned = |(tag, cpu): (&str, &str)| (tag.to_owned(), cpu.to_owned());
    assert_eq!(tags_and_cpu(cluster), [owned(app), owned(side)]);
}

/// The size of a pending batch is newer.
#[test]
fn resize_of_the_next_batch_is_not_restored() {
    for (ready_before, tag) in [(false, "2"), (true, "2"), (false, "3")] {
        let mut cluster = launch_ordered_pod();
        edit_both(&mut cluster, ["2", "1"], ["1", "2"]);
        assert_tags_and_cpu(&cluster, [("2", "1"), ("1", "1")]);
        (cluster.failures_left, cluster.fault) = (1, Fault::LastWriteRefused);
        edit_both(&mut cluster, ["2", "1"], ["1", "3"]);
        assert_tags_and_cpu(&cluster, [("2", "1"), ("1", "3")]);
        if ready_before {
            run_kubelets(&mut cluster);
        }
        edit_both(&mut cluster, [tag, "1"], ["1", "2"]);
        assert_settles(&mut cluster);
        assert_tags_and_cpu(&cluster, [(tag, "1"), ("1", "2")]);
    }
}

/// The batches of the previous update continue.
#[test]
fn rejected_resize_does_not_block_later_batches() {
    for (fault, size) in [(Fault::ResizeQuotaExceeded, "1"), (Fault::LastWriteRefused, "3")] {
        let mut cluster = launch_ordered_pod();
        edit_both(&mut cluster, ["2", "2"], ["1", "1"]);
        assert_tags_and_cpu(&cluster, [("2", "1"), ("1", "1")]);
        (cluster.failures_left, cluster.fault) = (1, fault);
        edit_both(&mut cluster, ["2", "2"], ["3", "1"]);
        assert_tags_and_cpu(&cluster, [("2", size), ("1", "1")]);
        (cluster.failures_left, cluster.fault) = (usize::MAX, Fault::ResizeQuotaExceeded);
        for _ in 0..5 {
            run_kubelets(&mut cluster);
            reconcile_later(&mut cluster);
        }
        assert_tags_and_cpu(&cluster, [("2", size), ("2", "1")]);
        assert_settles(&mut cluster);
        assert_tags_and_cpu(&cluster, [("2", "3"), ("2", "1")]);
    }
}

#[test]
fn sizes_are_restored_together_despite_priority() {
    let mut cluster = launch_ordered_pod();
    for cpu in [["1", "2"], ["2", "1"]] {
        (cluster.failures_left, cluster.fault) = (1, Fault::LastWriteRefused);
        edit_both(&mut cluster, ["1", "1"], cpu);
    }
    let before = tags_and_cpu(&cluster);
    assert!(before.iter().any(|(_, cpu)| cpu == "2"), "{before:?}");
    edit_both(&mut cluster, ["1", "1"], ["1", "1"]);
    assert_settles(&mut cluster);
    assert_tags_and_cpu(&cluster, [("1", "1"), ("1", "1")]);
}

/// A settled CloneSet whose Pods need a restart of their container to get back their size.
fn with_sizes_to_restore() -> FakeCluster {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    let policy = json!([{ "resourceName": "cpu", "restartPolicy": "RestartContainer" }]);
    edit_container(&mut cluster, "resizePolicy", policy);
    settle(&mut cluster);
    // As if another client had opened their gates.
    for pod in cluster.pods.values_mut() {
        let two_cpus = json!({ "requests": { "cpu": "2" } });
        pod["spec"]["containers"][0]["resources"] = two_cpus.clone();
        pod["status"]["containerStatuses"][0]["resources"] = two_cpus;
        let revision = &pod["metadata"]["labels"][keys::CONTROLLER_REVISION_HASH];
        let old = json!({ "revision": revision, "containers": { "app": { "requests": { "cpu": "1" } } } });
        pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_RESIZING] = json!(old.to_string());
    }
    run_kubelets(&mut cluster);
    cluster
}

/// A quota may keep a Pod from being created for long.
#[test]
fn missing_pods_take_the_place_of_restarting_size_restores() {
    let mut cluster = with_sizes_to_restore();
    let missing = cluster.pods.keys().next().unwrap().clone();
    cluster.pods.remove(&missing);
    (cluster.failures_left, cluster.fault) = (1, Fault::Refused);
    let plan = reconcile_later(&mut cluster);
    assert_eq!(patch_targets(&plan), [], "{plan:?}");
    assert_settles(&mut cluster);
}

/// Each restore restarts a container, so the Pods become unavailable one after another.
#[test]
fn restarting_size_restore_keeps_max_unavailable() {
    let mut cluster = with_sizes_to_restore();
    let plan = reconcile_later(&mut cluster);
    assert_eq!(
        patch_targets(&plan),
        [PatchTarget::Status, PatchTarget::Resize, PatchTarget::Pod]
    );
    assert_settles(&mut cluster);
    let sizes = cluster
        .pods
        .values()
        .map(|pod| &pod["spec"]["containers"][0]["resources"]["requests"]["cpu"]);
    assert!(sizes.into_iter().all(|cpu| cpu == "1"));
}

#[test]
fn forged_resize_annotation_is_removed() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    settle(&mut cluster);
    let revision = first_pod(&cluster)["metadata"]["labels"][keys::CONTROLLER_REVISION_HASH].clone();
    let sizes =
        json!({ "app": { "requests": { "cpu": "many", "gpu": "1" } }, "none": { "limits": { "cpu": "1" } } });
    let impossible = json!({ "revision": revision, "containers": sizes });
    let two_cpus = json!({ "app": { "requests": { "cpu": "2" } } });
    let of_another = json!({ "revision": "s-another", "containers": two_cpus });
    for annotation in ["", "nonsense", &impossible.to_string(), &of_another.to_string()] {
        let pod = cluster.pods.values_mut().next().unwrap();
        pod["metadata"]["annotations"][keys::IN_PLACE_UPDATE_RESIZING] = json!(annotation);
        assert_eq!(
            patch_targets(&reconcile_later(&mut cluster)),
            [PatchTarget::Pod],
            "{annotation}"
        );
        assert_settles(&mut cluster);
        assert_eq!(cpu(&cluster), "1");
    }
}

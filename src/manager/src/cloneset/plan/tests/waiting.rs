//! Messages of condition Waiting.

use jiff::ToSpan;
use serde_json::{Value, json};

use super::fake_cluster::{FakeCluster, HOOK};
use super::random_histories::{clone_set_spec, edit_container, edit_rolling_update};
use super::scenarios::{condition, run_kubelets, settle};
use crate::cloneset::plan::{Action, CloneSetEvent};
use kruise_api::keys;
use kruise_workload::testing::apply;

fn waiting_message(cluster: &FakeCluster) -> String {
    condition(cluster, "Waiting").unwrap_or_default().message
}

/// Asserts that the message contains this text.
#[track_caller]
fn assert_message(cluster: &mut FakeCluster, text: &str) {
    cluster.reconcile();
    let message = waiting_message(cluster);
    assert!(message.contains(text), "{text:?} is not in {message:?}");
}

/// Two settled Pods.
fn two_settled_pods(hooks: bool, claims: bool) -> FakeCluster {
    let mut cluster = FakeCluster::new(clone_set_spec(hooks, claims));
    cluster.edit(&json!({ "replicas": 2 }));
    settle(&mut cluster);
    cluster
}

/// The names of the Pods, as a message lists them.
fn listed_names(cluster: &FakeCluster) -> String {
    cluster.pods.keys().cloned().collect::<Vec<_>>().join(", ")
}

fn patch_pods(cluster: &mut FakeCluster, patch: &Value) {
    cluster.pods.values_mut().for_each(|pod| apply(pod, patch));
}

#[test]
fn waiting_names_an_invalid_lifecycle_state() {
    let mut cluster = two_settled_pods(false, false);
    let made_up = json!({ "metadata": { "labels": { (keys::LIFECYCLE_STATE): "Done" } } });
    patch_pods(&mut cluster, &made_up);
    let expected = format!(
        "{} (label lifecycle.apps.kruise.io/state is \"Done\", not a lifecycle state)",
        listed_names(&cluster)
    );
    assert_message(&mut cluster, &expected);
    edit_container(&mut cluster, "image", json!("app:2"));
    assert_message(&mut cluster, &expected);
}

#[test]
fn waiting_names_an_image_pull_failure() {
    let mut cluster = two_settled_pods(false, false);
    edit_container(&mut cluster, "image", json!("app:bad"));
    cluster.reconcile();
    run_kubelets(&mut cluster);
    assert_message(&mut cluster, "(container app: ImagePullBackOff of image app:bad)");
    assert_message(&mut cluster, "(to be updated: maxUnavailable is 1)");
    let before = waiting_message(&cluster);
    for pod in cluster.pods.values_mut() {
        let state = &mut pod["status"]["containerStatuses"][0]["state"];
        if state["waiting"].is_object() {
            *state = json!({ "waiting": { "reason": "ErrImagePull" } });
        }
    }
    assert_message(&mut cluster, &before);
}

#[test]
fn waiting_names_the_scheduler_message() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, true));
    cluster.edit(&json!({ "replicas": 2 }));
    cluster.reconcile();
    assert_message(&mut cluster, "(a node)");
    let unschedulable = json!({ "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims." });
    patch_pods(
        &mut cluster,
        &json!({ "status": { "conditions": [unschedulable] } }),
    );
    let claim = json!({ "status": { "phase": "slow" } });
    cluster
        .claims
        .values_mut()
        .for_each(|c| json_patch::merge(c, &claim));
    let list = listed_names(&cluster);
    assert_message(
        &mut cluster,
        &format!(
            "{list} (a node: 0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.; \
             its claim of storage class slow is not bound)"
        ),
    );
    let long = json!({ "type": "PodScheduled", "message": "é".repeat(900) });
    patch_pods(&mut cluster, &json!({ "status": { "conditions": [long] } }));
    assert_message(&mut cluster, "é…");
    assert!(waiting_message(&cluster).chars().count() < 400);
}

#[test]
fn waiting_names_why_a_running_pod_is_not_ready() {
    let mut cluster = two_settled_pods(false, false);
    let list = listed_names(&cluster);
    let status = |status: Value| json!({ "status": status });
    let ready = json!({ "type": "Ready", "status": "False" });
    patch_pods(&mut cluster, &status(json!({ "conditions": [ready] })));
    let gate = json!({ "spec": { "readinessGates": [{ "conditionType": "example.com/db" }] } });
    patch_pods(&mut cluster, &gate);
    assert_message(&mut cluster, &format!("{list} (readiness gate example.com/db)"));
    let shut = json!({ "type": "example.com/db", "status": "False", "message": "migrating" });
    patch_pods(&mut cluster, &status(json!({ "conditions": [shut] })));
    assert_message(&mut cluster, "(readiness gate example.com/db: migrating)");
    let container = |state: Value| json!([{ "name": "app", "ready": false, "state": state }]);
    for (state, words) in [
        (
            json!({ "running": {} }),
            "(container app: it runs, but is not ready)",
        ),
        (
            json!({ "waiting": { "reason": "CrashLoopBackOff" } }),
            "(container app: CrashLoopBackOff)",
        ),
        (
            json!({ "waiting": { "reason": "ContainerCreating" } }),
            "(container app: ContainerCreating)",
        ),
        (
            json!({ "terminated": { "exitCode": 3, "reason": "Error", "message": "first\nno such table\n" } }),
            "(container app: it does not run (exit code 3: no such table))",
        ),
    ] {
        let statuses = container(state);
        for pod in cluster.pods.values_mut() {
            pod["status"]["containerStatuses"] = statuses.clone();
        }
        assert_message(&mut cluster, words);
    }
    for pod in cluster.pods.values_mut() {
        pod["status"]["containerStatuses"] = json!([{ "name": "app", "ready": false,
            "state": { "waiting": { "reason": "CrashLoopBackOff", "message": "back-off 5m0s" } },
            "lastState": { "terminated": { "exitCode": 137, "reason": "OOMKilled" } } }]);
    }
    assert_message(
        &mut cluster,
        "(container app: CrashLoopBackOff (exit code 137, OOMKilled))",
    );
    let initial = json!([{ "name": "setup", "state": { "waiting": { "reason": "ErrImageNeverPull" } } }]);
    cluster
        .pods
        .values_mut()
        .for_each(|pod| pod["status"]["initContainerStatuses"] = initial.clone());
    assert_message(&mut cluster, "(container setup: ErrImageNeverPull)");
    let initial = json!([{ "name": "done", "state": { "terminated": { "exitCode": 0 } } }, { "name": "setup",
        "state": { "waiting": { "reason": "CrashLoopBackOff", "message": "back-off 40s restarting" } },
        "lastState": { "terminated": { "exitCode": 2, "message": "no route to db" } } }]);
    for pod in cluster.pods.values_mut() {
        pod["status"]["initContainerStatuses"] = initial.clone();
    }
    assert_message(
        &mut cluster,
        "(container setup: CrashLoopBackOff (exit code 2: no route to db))",
    );
    for reason in ["CreateContainerConfigError", "RunContainerError"] {
        let waiting = json!({ "waiting": { "reason": reason, "message": "secret \"x\" not found\nmore" } });
        for pod in cluster.pods.values_mut() {
            pod["status"]["initContainerStatuses"] = json!([]);
            pod["status"]["containerStatuses"] = container(waiting.clone());
        }
        assert_message(
            &mut cluster,
            &format!("(container app: {reason} (secret \"x\" not found))"),
        );
    }
}

#[test]
fn waiting_ignores_containers_behind_a_barrier() {
    let mut cluster = two_settled_pods(false, false);
    for pod in cluster.pods.values_mut() {
        let container = |name: &str, priority: i64| {
            let key = json!({ "configMapKeyRef": { "name": "b", "key": format!("p_{priority}") } });
            json!({ "name": name, "env": [{ "name": keys::ENV_CONTAINER_BARRIER, "valueFrom": key }] })
        };
        pod["spec"]["containers"] = json!([container("app", 0), container("db", 1)]);
        let waiting = json!({ "waiting": { "reason": "CreateContainerConfigError" } });
        pod["status"]["containerStatuses"] = json!([
            { "name": "app", "state": waiting }, { "name": "db", "state": { "running": {} } } ]);
        pod["status"]["conditions"] = json!([]);
    }
    assert_message(&mut cluster, "(container db: it runs, but is not ready)");
    let reason = |cluster: &mut FakeCluster, reason: &str| {
        for pod in cluster.pods.values_mut() {
            pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] = json!(reason);
        }
    };
    reason(&mut cluster, "InvalidImageName");
    assert_message(&mut cluster, "(container app: InvalidImageName");
    reason(&mut cluster, "CreateContainerConfigError");
    for pod in cluster.pods.values_mut() {
        pod["status"]["containerStatuses"][1]["ready"] = json!(true);
    }
    assert_message(&mut cluster, "(container app: CreateContainerConfigError)");
}

#[test]
fn waiting_names_the_not_ready_keys() {
    let mut cluster = two_settled_pods(false, false);
    let not_ready = json!({ "type": keys::KRUISE_POD_READY, "status": "False",
        "message": r#"[{"userAgent":"Someone","key":"reason"}]"# });
    let ready = json!({ "type": "Ready", "status": "False" });
    patch_pods(
        &mut cluster,
        &json!({ "status": { "conditions": [not_ready, ready] } }),
    );
    assert_message(
        &mut cluster,
        "(readiness gate KruisePodReady, held by reason of Someone)",
    );
}

#[test]
fn waiting_names_hooks_and_their_items() {
    let mut cluster = two_settled_pods(true, false);
    let list = listed_names(&cluster);
    assert_message(
        &mut cluster,
        &format!("{list} (hook preNormal: finalizer {HOOK} to be added)"),
    );
    let pods: Vec<String> = cluster.pods.keys().cloned().collect();
    pods.iter().for_each(|name| cluster.run_hook_user(name));
    settle(&mut cluster);
    cluster.edit(&json!({ "replicas": 0 }));
    cluster.reconcile();
    assert_message(
        &mut cluster,
        &format!("hook preDelete: finalizer {HOOK} to be removed"),
    );
}

#[test]
fn waiting_names_max_unavailable_of_a_deletion() {
    let mut cluster = two_settled_pods(false, false);
    edit_rolling_update(&mut cluster, json!({ "maxUnavailable": "50%" }));
    for pod in cluster.pods.values_mut() {
        pod["metadata"]["labels"][keys::SPECIFIED_DELETE] = json!("true");
    }
    assert_message(
        &mut cluster,
        "(to be deleted: maxUnavailable is 50%, 1 of 2 Pods)",
    );
}

#[test]
fn waiting_names_grace_period_and_min_ready() {
    let mut cluster = two_settled_pods(false, false);
    cluster.edit(&json!({ "minReadySeconds": 30 }));
    cluster.now = cluster.now.checked_add(100.seconds()).unwrap();
    settle(&mut cluster);
    edit_rolling_update(
        &mut cluster,
        json!({ "inPlaceUpdateStrategy": { "gracePeriodSeconds": 10 } }),
    );
    edit_container(&mut cluster, "image", json!("app:2"));
    cluster.reconcile();
    assert_message(&mut cluster, "(grace period)");
    for _ in 0..4 {
        run_kubelets(&mut cluster);
        cluster.reconcile();
        cluster.now = cluster.now.checked_add(5.seconds()).unwrap();
    }
    run_kubelets(&mut cluster);
    cluster.reconcile();
    run_kubelets(&mut cluster);
    assert_message(&mut cluster, "(to be ready for 30 s, minReadySeconds)");
}

#[test]
fn waiting_names_pause_partition_and_on_delete() {
    let mut cluster = two_settled_pods(false, true);
    cluster.edit(&json!({ "updateStrategy": { "type": "OnDelete" } }));
    edit_container(&mut cluster, "image", json!("app:2"));
    let list = listed_names(&cluster);
    assert_message(
        &mut cluster,
        &format!("{list} (to be deleted: updateStrategy type is OnDelete)"),
    );

    // A terminating Pod that is blocked, with a claim that the next Pod will reuse.
    let name = cluster.pods.keys().next().unwrap().clone();
    let pod = cluster.pods.get_mut(&name).unwrap();
    pod["metadata"]["finalizers"] = json!(["example.com/slow"]);
    cluster.delete_pod(&name);
    assert_message(
        &mut cluster,
        &format!("{name} (to terminate, so that its PVCs can be reused)"),
    );
}

/// A higher partition asks for Pods of the current revision, of which only the surge Pod is left.
#[test]
fn waiting_names_updated_pods_that_a_user_must_delete() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    edit_rolling_update(&mut cluster, json!({ "maxSurge": 1 }));
    settle(&mut cluster);
    edit_container(&mut cluster, "image", json!("app:2"));
    let is_updated = |pod: &Value| pod["spec"]["containers"][0]["image"] == "app:2";
    let updated = |cluster: &FakeCluster| cluster.pods.values().filter(|pod| is_updated(pod)).count();
    for _ in 0..20 {
        if (updated(&cluster), cluster.pods.len()) == (5, 6) {
            break;
        }
        cluster.reconcile();
        run_kubelets(&mut cluster);
    }
    assert_eq!((updated(&cluster), cluster.pods.len()), (5, 6));
    cluster.edit(&json!({ "updateStrategy": { "type": "OnDelete" } }));
    edit_rolling_update(&mut cluster, json!({ "partition": 2 }));
    settle(&mut cluster);
    assert_eq!(
        (updated(&cluster), cluster.pods.len()),
        (5, 6),
        "the surge Pod is kept"
    );
    let first = cluster
        .pods
        .iter()
        .find(|(_, pod)| is_updated(pod))
        .unwrap()
        .0
        .clone();
    assert_message(
        &mut cluster,
        &format!("{first} (to be deleted: updateStrategy type is OnDelete)"),
    );
}

#[test]
fn paused_rollout_still_reports_errors() {
    let mut cluster = two_settled_pods(false, false);
    edit_rolling_update(&mut cluster, json!({ "paused": true }));
    edit_container(&mut cluster, "image", json!("app:2"));
    settle(&mut cluster);
    assert_eq!(waiting_message(&cluster), "the update is paused");
    assert_eq!(condition(&cluster, "Waiting").unwrap().reason, "Paused");
    let status =
        json!([{ "name": "app", "ready": false, "state": { "waiting": { "reason": "CrashLoopBackOff" } } }]);
    let ready = json!({ "type": "Ready", "status": "False" });
    let pod = cluster.pods.values_mut().next().unwrap();
    pod["status"]["containerStatuses"] = status;
    apply(pod, &json!({ "status": { "conditions": [ready] } }));
    assert_message(&mut cluster, "the update is paused; ");
    assert_eq!(condition(&cluster, "Waiting").unwrap().reason, "PodsNotReady");
    assert_message(&mut cluster, "CrashLoopBackOff");
}

#[test]
fn waiting_counts_reasons_beyond_the_limit() {
    let mut cluster = FakeCluster::new(clone_set_spec(false, false));
    cluster.edit(&json!({ "replicas": 40 }));
    settle(&mut cluster);
    let ready = json!({ "type": "Ready", "status": "False" });
    for (at, pod) in cluster.pods.values_mut().enumerate() {
        let gate = json!({ "readinessGates": [{ "conditionType": format!("example.com/{at}") }] });
        apply(pod, &json!({ "spec": gate, "status": { "conditions": [ready] } }));
    }
    assert_message(&mut cluster, "and others for 34 more reasons");
    assert!(
        waiting_message(&cluster).len() < 600,
        "{}",
        waiting_message(&cluster)
    );
}

/// A Pod that we did not create may lack the gate that takes it out of its Services while a container restarts.
#[test]
fn env_update_without_readiness_gate_is_stuck() {
    for changed in [json!("2"), json!(null)] {
        env_update_is_stuck(&changed);
    }
}

/// Changes a label that is in the environment, or removes it.
fn env_update_is_stuck(changed: &Value) {
    let mut cluster = two_settled_pods(false, false);
    let origin = json!({ "fieldRef": { "fieldPath": "metadata.labels['v']" } });
    edit_rolling_update(&mut cluster, json!({ "podUpdatePolicy": "InPlaceOnly" }));
    let label = |v: &Value| json!({ "template": { "metadata": { "labels": { "v": v } } } });
    cluster.edit(&label(&json!("1")));
    settle(&mut cluster);
    let env = json!([{ "name": "V", "valueFrom": origin }]);
    // The Pods have read the label from the beginning, and so has their revision.
    for revision in &mut cluster.revisions {
        revision.data["spec"]["template"]["spec"]["containers"][0]["env"] = env.clone();
    }
    edit_container(&mut cluster, "env", env.clone());
    for pod in cluster.pods.values_mut() {
        pod["spec"]["containers"][0]["env"] = env.clone();
        pod["spec"]["readinessGates"] = json!([]);
    }
    settle(&mut cluster);
    cluster.edit(&label(changed));
    let patched = |cluster: &mut FakeCluster| {
        let (_, plan) = cluster.reconcile();
        plan.actions
            .iter()
            .any(|action| matches!(action, Action::PatchPod { .. }))
    };
    assert!(!patched(&mut cluster), "the update must not begin");
    let list = listed_names(&cluster);
    let expected =
        "policy is InPlaceOnly, and the Pod lacks readiness gate InPlaceUpdateReady; delete the Pod";
    assert_message(&mut cluster, &format!("stuck: {list} ({expected}"));
    // For another image kubelet restarts the container, with the new environment.
    edit_container(&mut cluster, "image", json!("app:2"));
    assert!(patched(&mut cluster));
}

/// The events of the next reconcile, and the seconds until its requeue.
fn events(cluster: &mut FakeCluster) -> (Vec<CloneSetEvent>, Option<i64>) {
    let plan = cluster.reconcile().1;
    let wake = plan
        .requeue_at
        .map(|at| (at - cluster.now).total(jiff::Unit::Second).unwrap() as i64);
    (plan.events, wake)
}

#[test]
fn lasting_wait_is_reported_by_one_event() {
    let mut cluster = two_settled_pods(false, false);
    cluster.edit(&json!({ "updateStrategy": { "rollingUpdate": { "paused": true } } }));
    edit_container(&mut cluster, "image", json!("app:2"));
    assert_eq!(events(&mut cluster), (vec![], Some(60)));
    let since = condition(&cluster, "Waiting")
        .unwrap()
        .last_update_time
        .unwrap()
        .0;
    cluster.now += 59.seconds();
    assert_eq!(events(&mut cluster), (vec![], Some(1)));
    cluster.now += 1.seconds();
    let paused = CloneSetEvent {
        warning: false,
        reason: "Paused",
        message: "the update is paused".to_owned(),
        wait_since: Some(since),
    };
    assert_eq!(events(&mut cluster), (vec![paused], None));
    cluster.now += 60.seconds();
    assert_eq!(
        events(&mut cluster),
        (vec![], None),
        "a new leader does not repeat it"
    );

    cluster.edit(&json!({ "updateStrategy": { "rollingUpdate": { "paused": false } } }));
    cluster.reconcile();
    assert_eq!(events(&mut cluster).0, [], "the new wait is too short");
    cluster.now += 60.seconds();
    let (reported, _) = events(&mut cluster);
    assert_eq!(
        reported.iter().map(|event| event.reason).collect::<Vec<_>>(),
        ["PodsNotReady"]
    );
    run_kubelets(&mut cluster);
    settle(&mut cluster);
    cluster.now += 60.seconds();
    assert_eq!(events(&mut cluster), (vec![], None));
}

//! ContainerRecreateJobs: the containers of several Pods are restarted, a few Pods at a time.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};
use k8s_openapi::api::core::v1::{Event, Pod};
use kruise_api::container_recreate_job::{ContainerRecreateJob, ContainerRecreateJobStatus};
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, PropagationPolicy};
use serde_json::{Value, json};
use testbed::cluster::NODE_NAME;

use super::fixture::{DaemonCluster, TestNamespace, container_statuses, exclusive_cluster};
use super::with_manager::InstalledManager;

/// The test's namespace on the node.
type Test<'a> = TestNamespace<tokio::sync::RwLockWriteGuard<'a, DaemonCluster>>;

/// Ends at once when it is stopped.
fn script() -> &'static str {
    "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"
}

async fn create_job(test: &Test<'_>, name: &str, spec: Value) {
    let job = json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "ContainerRecreateJob",
        "metadata": { "name": name }, "spec": spec });
    let job: ContainerRecreateJob = serde_json::from_value(job).unwrap();
    test.api().create(&PostParams::default(), &job).await.unwrap();
}

async fn change_job(test: &Test<'_>, name: &str, spec: Value) {
    let patch = Patch::Merge(json!({ "spec": spec }));
    let jobs = test.api::<ContainerRecreateJob>();
    jobs.patch(name, &PatchParams::default(), &patch).await.unwrap();
}

/// Type and reason of the condition of a job.
fn outcome(job: &ContainerRecreateJob) -> Option<(&str, &str)> {
    let condition = job.status.as_ref()?.conditions.first()?;
    Some((&condition.type_, &condition.reason))
}

async fn wait_outcome(test: &Test<'_>, job: &str, expected: (&str, &str)) -> ContainerRecreateJobStatus {
    let is_expected = |job: &ContainerRecreateJob| outcome(job) == Some(expected);
    let (job, _) = test
        .watch_until::<ContainerRecreateJob>(job, expected.1, is_expected)
        .await;
    job.status.unwrap()
}

fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| &status.conditions).flatten();
    let mut ready = conditions.filter(|condition| condition.type_ == "Ready");
    ready.any(|condition| condition.status == "True")
}

async fn pods_of(test: &Test<'_>, app: &str) -> Vec<Pod> {
    let params = ListParams::default().labels(&format!("app={app}"));
    test.api::<Pod>().list(&params).await.unwrap().items
}

/// ID and restarts of each container of a Pod.
type Containers = BTreeMap<String, (String, i32)>;

/// By name of the Pod: its UID, and its containers.
fn identities(pods: &[Pod]) -> BTreeMap<String, (String, Containers)> {
    let containers = |pod: &Pod| {
        let statuses = container_statuses(pod).into_iter();
        statuses
            .map(|(name, status)| (name, (status.id, status.restarts)))
            .collect()
    };
    let identity = |pod: &Pod| (pod.name_any(), (pod.uid().unwrap(), containers(pod)));
    pods.iter().map(identity).collect()
}

#[tokio::test]
async fn pods_of_a_deployment_are_restarted_one_at_a_time() {
    let test = exclusive_cluster().await;
    let manager = InstalledManager::start(&test.cluster.node);
    let container = |name: &str| {
        json!({ "name": name, "image": "busybox:1.36", "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", script()] })
    };
    let mut main = container("main");
    main["readinessProbe"] =
        json!({ "exec": { "command": ["true"] }, "initialDelaySeconds": 2, "periodSeconds": 1 });
    let deployment = |name: &str, replicas: i32| {
        json!({ "metadata": { "name": name }, "spec": { "replicas": replicas,
            "selector": { "matchLabels": { "app": "web", "of": name } },
            "template": { "metadata": { "labels": { "app": "web", "of": name } },
                "spec": { "nodeName": NODE_NAME, "containers": [main, container("side")] } } } })
    };
    // The other one has the same labels, but is not named.
    for (name, replicas) in [("web", 3), ("other", 1)] {
        let deployment: Deployment = serde_json::from_value(deployment(name, replicas)).unwrap();
        test.api()
            .create(&PostParams::default(), &deployment)
            .await
            .unwrap();
    }
    test.poll_until("all Pods are ready", || async {
        let pods = pods_of(&test, "web").await;
        (pods.len() == 4 && pods.iter().all(is_ready)).then_some(())
    })
    .await;
    let before = identities(&pods_of(&test, "web").await);
    create_job(
        &test,
        "reload",
        json!({ "targetRef": { "apiVersion": "apps/v1", "kind": "Deployment", "name": "web" },
            "containers": [{ "name": "main" }] }),
    )
    .await;
    test.poll_until("the job ends", || async {
        let pods = pods_of(&test, "web").await;
        let not_ready: Vec<_> = pods
            .iter()
            .filter(|pod| !is_ready(pod))
            .map(Pod::name_any)
            .collect();
        assert!(not_ready.len() <= 1, "maxUnavailable is 1: {not_ready:?}");
        let job = test.api::<ContainerRecreateJob>().get("reload").await.unwrap();
        job.status.filter(|status| status.completion_time.is_some())
    })
    .await;
    let status = wait_outcome(&test, "reload", ("Complete", "PodsRestarted")).await;
    assert_eq!(
        (status.desired, status.restarted, status.active, status.failed),
        (3, 3, 0, 0)
    );
    assert_eq!(status.conditions[0].message, "restarted main in 3 Pods");
    let table = [
        "get",
        "crj",
        "reload",
        "--output=wide",
        "--namespace",
        &test.namespace,
    ];
    let table = test.cluster.node.plane.kubectl(&table).unwrap();
    assert!(
        table.contains("RESTARTED") && table.contains("PodsRestarted"),
        "{table}"
    );
    let after = identities(&pods_of(&test, "web").await);
    assert_eq!(after.len(), before.len());
    for (name, (uid, containers)) in &before {
        let (new_uid, new) = &after[name];
        let is_named = name.starts_with("web-");
        assert_eq!(uid, new_uid, "the Pod is the same");
        assert_eq!(new["main"].1, i32::from(is_named), "{name}: restarts");
        assert_eq!(new["main"].0 != containers["main"].0, is_named, "{name}");
        assert_eq!(
            new["side"], containers["side"],
            "{name}: the other container runs on"
        );
    }
    test.poll_until("the event", || async {
        let events = test.api::<Event>().list(&ListParams::default()).await.unwrap();
        let mut of_job = events
            .items
            .iter()
            .filter(|event| event.involved_object.kind.as_deref() == Some("ContainerRecreateJob"));
        of_job
            .any(|event| event.message.as_deref() == Some("restarted main in 3 Pods"))
            .then_some(())
    })
    .await;
    // The requests are deleted with the job.
    let requests = test.api::<ContainerRecreateRequest>();
    assert_eq!(
        requests.list(&ListParams::default()).await.unwrap().items.len(),
        3
    );
    let jobs = test.api::<ContainerRecreateJob>();
    jobs.delete("reload", &DeleteParams::default()).await.unwrap();
    test.poll_until("the requests are deleted", || async {
        let left = requests.list(&ListParams::default()).await.unwrap();
        left.items.is_empty().then_some(())
    })
    .await;
    drop(manager);
}

async fn create_pods(test: &Test<'_>, count: usize, more: Value) {
    for number in 0..count {
        let name = format!("db-{number}");
        let mut container =
            json!({ "name": "main", "image": "busybox:1.36", "command": ["sh", "-c", script()] });
        if number + 1 == count {
            json_patch::merge(&mut container, &more);
        }
        let metadata = json!({ "name": name, "labels": { "app": "db" } });
        test.create_pod_with(metadata, json!([container]), json!({}))
            .await;
    }
}

/// Restarts of the Pods, by their order.
async fn restarts(test: &Test<'_>) -> Vec<i32> {
    let pods = pods_of(test, "db").await;
    pods.iter()
        .map(|pod| container_statuses(pod)["main"].restarts)
        .collect()
}

#[tokio::test]
async fn pause_partition_and_deadline_of_a_job() {
    let test = exclusive_cluster().await;
    let manager = InstalledManager::start(&test.cluster.node);
    create_pods(&test, 3, json!({})).await;
    let spec = json!({ "selector": { "matchLabels": { "app": "db" } }, "containers": [{ "name": "main" }],
        "paused": true, "maxUnavailable": 3, "partition": 1 });
    create_job(&test, "reload", spec.clone()).await;
    wait_outcome(&test, "reload", ("Waiting", "Paused")).await;
    assert_eq!(restarts(&test).await, [0, 0, 0]);
    change_job(&test, "reload", json!({ "paused": false })).await;
    let status = wait_outcome(&test, "reload", ("Waiting", "Partition")).await;
    assert_eq!((status.desired, status.restarted), (3, 2));
    assert_eq!(restarts(&test).await, [0, 1, 1], "the last ordinals come first");
    change_job(&test, "reload", json!({ "partition": null })).await;
    wait_outcome(&test, "reload", ("Complete", "PodsRestarted")).await;
    assert_eq!(restarts(&test).await, [1, 1, 1]);
    let mut late = spec;
    late["activeDeadlineSeconds"] = json!(3);
    late["ttlSecondsAfterFinished"] = json!(3);
    create_job(&test, "late", late).await;
    let status = wait_outcome(&test, "late", ("Failed", "DeadlineExceeded")).await;
    assert_eq!((status.desired, status.restarted), (3, 0));
    test.poll_until("the job is deleted after its TTL", || async {
        let late = test.api::<ContainerRecreateJob>().get_opt("late").await.unwrap();
        late.is_none().then_some(())
    })
    .await;
    assert_eq!(restarts(&test).await, [1, 1, 1]);
    drop(manager);
}

#[tokio::test]
async fn pod_that_does_not_become_ready_again_stops_the_job() {
    let test = exclusive_cluster().await;
    let manager = InstalledManager::start(&test.cluster.node);
    // The last Pod is ready only before its first restart.
    let script = format!(
        "[ -e /log/started ] && touch /log/broken; touch /log/started; {}",
        script()
    );
    let broken = json!({ "command": ["sh", "-c", script],
        "readinessProbe": { "exec": { "command": ["test", "!", "-e", "/log/broken"] }, "periodSeconds": 1 } });
    create_pods(&test, 2, broken).await;
    create_job(
        &test,
        "reload",
        json!({ "selector": { "matchLabels": { "app": "db" } }, "containers": [{ "name": "main" }],
            "podDeadlineSeconds": 10 }),
    )
    .await;
    let status = wait_outcome(&test, "reload", ("Failed", "TooManyFailures")).await;
    assert_eq!((status.desired, status.restarted, status.failed), (2, 0, 1));
    assert_eq!(status.failed_pods, ["db-1"]);
    let message = &status.conditions[0].message;
    assert!(
        message.starts_with(
            "1 of 2 Pods were not restarted, because maxFailures is 0; 1 of 2 Pods failed: db-1: "
        ),
        "{message}"
    );
    assert_eq!(restarts(&test).await, [0, 1]);
    drop(manager);
}

/// Its Pods do not show any more that they belong to the job.
#[tokio::test]
async fn job_of_an_orphaned_workload_does_not_complete() {
    let test = exclusive_cluster().await;
    let manager = InstalledManager::start(&test.cluster.node);
    let container = json!({ "name": "main", "image": "busybox:1.36", "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", script()] });
    let set = json!({ "metadata": { "name": "db" }, "spec": { "replicas": 1,
        "selector": { "matchLabels": { "app": "db" } },
        "template": { "metadata": { "labels": { "app": "db" } },
            "spec": { "nodeName": NODE_NAME, "containers": [container] } } } });
    let set: ReplicaSet = serde_json::from_value(set).unwrap();
    let sets = test.api::<ReplicaSet>();
    sets.create(&PostParams::default(), &set).await.unwrap();
    test.poll_until("the Pod is ready", || async {
        let pods = pods_of(&test, "db").await;
        (pods.len() == 1 && pods.iter().all(is_ready)).then_some(())
    })
    .await;
    create_job(
        &test,
        "reload",
        json!({ "targetRef": { "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "db" },
            "containers": [{ "name": "main" }], "paused": true }),
    )
    .await;
    wait_outcome(&test, "reload", ("Waiting", "Paused")).await;
    let orphan = DeleteParams {
        propagation_policy: Some(PropagationPolicy::Orphan),
        ..DeleteParams::default()
    };
    sets.delete("db", &orphan).await.unwrap();
    wait_outcome(&test, "reload", ("Failed", "TargetNotFound")).await;
    assert_eq!(restarts(&test).await, [0]);
    drop(manager);
}

//! Liveness probes that the daemon runs: containers are restarted in place, of one Pod of the workload after the other.

use std::collections::BTreeMap;
use std::ops::Deref;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, Pod};
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kube::ResourceExt;
use kube::api::ListParams;
use serde_json::{Value, json};
use testbed::cluster::NODE_NAME;

use super::fixture::{DaemonCluster, TestNamespace, container_statuses, exclusive_cluster};
use super::waits;
use super::with_manager::InstalledManager;

/// A container whose liveness probe fails while `/log/POD.sick` exists; `script` is run at each start.
fn app(script: &str) -> Value {
    let script = format!("{script}; trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done");
    json!({ "name": "app", "image": "busybox:1.36", "command": ["sh", "-c", script],
        "livenessProbe": {
            "exec": { "command": ["sh", "-c", "test ! -e /log/$(hostname).sick || { echo sick >&2; exit 1; }"] },
            "periodSeconds": 1, "failureThreshold": 1, "timeoutSeconds": 20 } })
}

/// The same; it is not ready either while the file exists.
fn app_with_readiness(script: &str) -> Value {
    let mut app = app(script);
    let probe = app["livenessProbe"].clone();
    app["readinessProbe"] = probe;
    app
}

/// A container without a probe.
fn side() -> Value {
    let script = "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done";
    json!({ "name": "side", "image": "busybox:1.36", "command": ["sh", "-c", script] })
}

trait LivenessOps {
    /// Creates a CloneSet with these containers, and returns its Pods when all are ready.
    async fn create_workload(
        &self,
        name: &str,
        annotations: Value,
        replicas: usize,
        containers: Value,
    ) -> Vec<Pod>;
    /// Waits until an event of that reason is on the Pod; returns its message.
    /// Waits for an event with this text: kubelet's events about all probes have the same reason.
    async fn event_on(&self, pod: &Pod, reason: &str, text: &str) -> String;
    /// The liveness requests of the namespace, by creation.
    async fn requests(&self) -> Vec<ContainerRecreateRequest>;
}

impl<G: Deref<Target = DaemonCluster>> LivenessOps for TestNamespace<G> {
    async fn create_workload(
        &self,
        name: &str,
        annotations: Value,
        replicas: usize,
        containers: Value,
    ) -> Vec<Pod> {
        let mut containers = containers;
        for container in containers.as_array_mut().into_iter().flatten() {
            container["volumeMounts"] = json!([{ "name": "log", "mountPath": "/log" }]);
            container["imagePullPolicy"] = json!("IfNotPresent");
        }
        let set = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet",
            "metadata": { "name": name, "namespace": self.namespace },
            "spec": { "replicas": replicas, "selector": { "matchLabels": { "app": name } },
                "updateStrategy": { "rollingUpdate": { "maxUnavailable": 1 } },
                "template": { "metadata": { "labels": { "app": name }, "annotations": annotations },
                    "spec": { "nodeName": NODE_NAME, "containers": containers,
                        "volumes": [{ "name": "log", "hostPath": { "path": self.log_dir } }] } } } });
        self.cluster.node.plane.apply(&set.to_string()).unwrap();
        let config = kube::runtime::watcher::Config::default().labels(&format!("app={name}"));
        let logs = || self.cluster.log_tails();
        let all_ready = |pods: &[&Pod]| pods.len() == replicas && pods.iter().all(|pod| is_ready(pod));
        let pods = self.api::<Pod>();
        waits::watch_until("all Pods are ready", &logs, pods, config, |pod| pod, all_ready).await
    }

    async fn event_on(&self, pod: &Pod, reason: &str, text: &str) -> String {
        let what = format!("event {reason} on {} with {text:?}", pod.name_any());
        self.poll_until(&what, || async {
            let events = self.api::<Event>().list(&ListParams::default()).await.unwrap();
            let of_pod = events.items.into_iter().filter(|event| {
                event.involved_object.uid == pod.uid() && event.reason.as_deref() == Some(reason)
            });
            let mut messages = of_pod.filter_map(|event| event.message);
            messages.find(|message| message.contains(text))
        })
        .await
    }

    async fn requests(&self) -> Vec<ContainerRecreateRequest> {
        let list = self.api().list(&ListParams::default()).await.unwrap();
        let mut all: Vec<ContainerRecreateRequest> = list.items;
        all.sort_by_key(|request| request.creation_timestamp().unwrap().0);
        all
    }
}

/// Since when the Pod is ready, if it is.
fn ready_since(pod: &Pod) -> Option<Timestamp> {
    let mut conditions = pod.status.iter().flat_map(|status| &status.conditions).flatten();
    let ready = conditions.find(|condition| condition.type_ == "Ready" && condition.status == "True")?;
    Some(ready.last_transition_time.as_ref()?.0)
}

fn is_ready(pod: &Pod) -> bool {
    ready_since(pod).is_some()
}

fn enhanced() -> Value {
    json!({ "apps.kruise.io/using-enhanced-liveness": "true" })
}

#[tokio::test]
async fn failed_container_is_restarted_in_place_with_kubelets_back_off() {
    let test = exclusive_cluster().await;
    let manager = InstalledManager::start(&test.cluster.node);
    let pods = test
        .create_workload("web", enhanced(), 1, json!([app_with_readiness("true"), side()]))
        .await;
    let pod = &pods[0];
    let spec = pod.spec.as_ref().unwrap();
    assert!(spec.containers.iter().all(|one| one.liveness_probe.is_none()));
    let old = container_statuses(pod);
    test.write_file(&format!("{}.sick", pod.name_any()));
    // The file stays, so each container fails.
    let third = |pod: &Pod| container_statuses(pod)["app"].restarts >= 2;
    let (_, versions) = test
        .watch_until::<Pod>(&pod.name_any(), "the container was restarted twice", third)
        .await;
    std::fs::remove_file(test.log_dir.join(format!("{}.sick", pod.name_any()))).unwrap();
    let last = versions.last().unwrap();
    assert_eq!(last.uid(), pod.uid());
    let new = container_statuses(last);
    assert_eq!(new["side"], old["side"]);
    assert_ne!(new["app"].id, old["app"].id);
    let status = last.status.clone().unwrap().container_statuses.unwrap();
    let app = status.into_iter().find(|one| one.name == "app").unwrap();
    let ended = app.last_state.unwrap().terminated.unwrap().finished_at.unwrap().0;
    let started = app.state.unwrap().running.unwrap().started_at.unwrap().0;
    let pause = started.duration_since(ended).as_secs();
    assert!(
        pause >= 9,
        "kubelet waits 10 s before the second restart, this was {pause} s"
    );
    test.event_on(pod, "Unhealthy", "Liveness probe failed: sick")
        .await;
    test.event_on(pod, "Killing", "app").await;

    // The first request waited for a container to be ready that was not, so the second one has replaced it.
    let requests = test.requests().await;
    let uid = pod.uid().unwrap();
    let [request] = requests.as_slice() else {
        panic!("{requests:#?}")
    };
    assert!(request.name_any().starts_with(&format!("liveness-{uid}-")));
    assert_eq!(request.owner_references()[0].uid, uid);
    let id = &request.annotations()["crr.apps.kruise.io/container-id"];
    let ids = versions
        .iter()
        .map(|pod| container_statuses(pod)["app"].id.clone());
    let ids: Vec<String> = ids.collect();
    assert!(
        ids.contains(id) && *id != old["app"].id && *id != new["app"].id,
        "{id} of {ids:?}"
    );
    test.poll_until("the requests end", || async {
        let requests = test.requests().await;
        let has_ended = |request: &ContainerRecreateRequest| {
            let status = request.status.as_ref();
            status.is_some_and(|status| status.completion_time.is_some())
        };
        requests.iter().all(has_ended).then_some(())
    })
    .await;
    drop(manager);
}

#[tokio::test]
async fn pods_that_fail_together_are_restarted_one_after_the_other() {
    let test = exclusive_cluster().await;
    let manager = InstalledManager::start(&test.cluster.node);
    let containers = json!([app("rm -f /log/$(hostname).sick"), side()]);
    let pods = test.create_workload("web", enhanced(), 3, containers).await;
    for pod in &pods {
        test.write_file(&format!("{}.sick", pod.name_any()));
    }
    let config = kube::runtime::watcher::Config::default().labels("app=web");
    let logs = || test.cluster.log_tails();
    let (mut most_unready, mut restarts) = (0, BTreeMap::new());
    let all_restarted = |pods: &[&Pod]| {
        let unready = pods.iter().filter(|pod| !is_ready(pod)).count();
        most_unready = most_unready.max(unready);
        for pod in pods {
            restarts.insert(pod.name_any(), container_statuses(pod)["app"].restarts);
        }
        unready == 0 && restarts.values().all(|restarts| *restarts > 0)
    };
    waits::watch_until(
        "all are restarted",
        &logs,
        test.api::<Pod>(),
        config,
        |pod| pod,
        all_restarted,
    )
    .await;
    assert_eq!(most_unready, 1, "maxUnavailable is 1");
    assert!(restarts.values().all(|restarts| *restarts == 1), "{restarts:?}");
    let requests = test.requests().await;
    assert_eq!(requests.len(), 3, "{requests:#?}");
    let mut restarts = Vec::new();
    for request in &requests {
        let pod = test.get_pod(&request.spec.pod_name).await;
        let created = request.creation_timestamp().unwrap().0;
        restarts.push((ready_since(&pod).unwrap(), created, pod));
    }
    // These times are in seconds, and two restarts may begin within one.
    restarts.sort_by_key(|(ready_at, created, _)| (*ready_at, *created));
    for pair in restarts.windows(2) {
        let [(ready_at, _, _), (_, created, _)] = pair else {
            unreachable!()
        };
        assert!(
            ready_at <= created,
            "the next restart began at {created}, the Pod of the last one was ready at {ready_at}"
        );
    }
    // The last one has waited.
    let (_, _, waited) = &restarts[2];
    let expected = "Container app failed liveness probe; its restart waits for ";
    test.event_on(waited, "LivenessRestartWaiting", expected).await;
    for pod in &pods {
        let now = test.get_pod(&pod.name_any()).await;
        assert_eq!(now.uid(), pod.uid());
        assert_eq!(container_statuses(&now)["side"], container_statuses(pod)["side"]);
    }
    drop(manager);
}

/// Who may create Pods may write anything into the annotation; the Pods of others are still probed.
#[tokio::test]
async fn unusable_annotation_is_reported_and_harms_no_other_pod() {
    let test = exclusive_cluster().await;
    let manager = InstalledManager::start(&test.cluster.node);
    let long = "c".repeat(3000);
    let context = json!([
        { "name": "side", "livenessProbe": { "exec": { "command": [long] }, "periodSeconds": 2_147_483_647 } },
        { "name": "side", "livenessProbe": { "tcpSocket": { "port": 1 } } },
        { "name": "app", "livenessProbe": { "httpGet": { "host": "127.0.0.1", "port": 10250, "path": "/" } } },
        { "name": "/../x", "livenessProbe": { "grpc": { "port": -1 } } }, 7, null,
    ]);
    let mut plain = app("true");
    plain.as_object_mut().unwrap().remove("livenessProbe");
    let annotations = json!({ "apps.kruise.io/container-probe-context": context.to_string() });
    let pods = test
        .create_workload("odd", annotations, 1, json!([plain, side()]))
        .await;
    let message = test.event_on(&pods[0], "InvalidLivenessProbe", "").await;
    for part in [
        "more than one liveness probe",
        "a host is not probed",
        "no such container",
        "invalid type",
    ] {
        assert!(message.contains(part), "{part} is not in {message}");
    }
    let other = test
        .create_workload(
            "web",
            enhanced(),
            1,
            json!([app("rm -f /log/$(hostname).sick"), side()]),
        )
        .await;
    test.write_file(&format!("{}.sick", other[0].name_any()));
    let restarted = |pod: &Pod| container_statuses(pod)["app"].restarts == 1;
    test.watch_until::<Pod>(&other[0].name_any(), "the container was restarted", restarted)
        .await;
    drop(manager);
}

//! Converts watches and runtime answers to the input of the plan.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use tokio::time::timeout;

use super::context::RecreateContext;
use super::plan::{
    ObservedContainer, PodObservation, RecreateRequest, RequestedContainer, RunState, RuntimeObservation,
};
use super::runtime_queue::ObserveLimit;
use crate::live::RestartStatus;
use crate::pods::NodePod;
use kruise_api::container_recreate_request::{ContainerRecreateRequest, MAX_CONTAINER_ID_BYTES};
use kruise_api::keys;
use kruise_api::validation::truncate;
use kruise_cluster::{Key, write};
use kruise_cri::{ContainerState, Runtime};

/// How long to wait for a runtime with an unknown name while another one answers.
const UNKNOWN_RUNTIME_TIMEOUT: Duration = Duration::from_secs(30);

/// Reduces a request to the input of decisions; none if it cannot belong to this node.
pub fn parse_request(object: ContainerRecreateRequest) -> Option<RecreateRequest> {
    let ContainerRecreateRequest {
        metadata,
        spec,
        status,
    } = object;
    let mut strategy = spec.strategy.unwrap_or_default();
    let annotations = metadata.annotations.as_ref();
    let only = annotations.and_then(|annotations| annotations.get(keys::CRR_CONTAINER_ID));
    // Admission records what runs at the creation, which may be the successor of the container that is meant.
    let only = only.filter(|_| spec.containers.len() == 1);
    // One that is longer is of no container; it would be kept and reported for each container.
    let only = only.map(|id| truncate(id, MAX_CONTAINER_ID_BYTES).into_owned());
    // Otherwise a container other than that one could be stopped.
    strategy.force_recreate &= only.is_none();
    let containers = spec.containers.into_iter().map(|container| RequestedContainer {
        name: container.name,
        recorded_id: only
            .clone()
            .or_else(|| Some(container.status_context?.container_id))
            .filter(|id| !id.is_empty()),
    });
    Some(RecreateRequest {
        uid: metadata.uid?,
        namespace: metadata.namespace?,
        name: metadata.name?,
        resource_version: metadata.resource_version.unwrap_or_default(),
        created_at: metadata.creation_timestamp?.0,
        terminating: metadata.deletion_timestamp.is_some(),
        pod_name: spec.pod_name,
        pod_uid: metadata
            .labels
            .and_then(|mut labels| labels.remove(keys::CRR_POD_UID)),
        containers: containers.collect(),
        strategy,
        deadline_seconds: spec.active_deadline_seconds,
        status: status.unwrap_or_default(),
    })
}

/// The Pod from our watch. If the watch has none, or a different one than a request names, the API server is called:
/// the watch may be behind.
pub async fn observe_pod(
    shared: &RecreateContext,
    key: &Key,
    requests: &[Arc<RecreateRequest>],
    limit: ObserveLimit,
) -> PodObservation {
    if let Some(pod) = shared.pods.get(key)
        && requests
            .iter()
            .all(|request| request.pod_uid.as_ref().is_none_or(|uid| *uid == pod.uid))
    {
        return PodObservation::Present(pod);
    }
    let namespace = key.namespace.as_deref().unwrap_or_default();
    let api: Api<Pod> = Api::namespaced(shared.ctx.cluster.client.clone(), namespace);
    let limit = limit.call_timeout();
    match timeout(limit, write::get_as::<NodePod>(api, &key.name)).await {
        Ok(Ok(Some(Ok(view)))) if view.node == shared.ctx.node_name => {
            PodObservation::Present(Arc::new(view))
        }
        Ok(Ok(Some(Ok(_)) | None)) => PodObservation::NotFound,
        Ok(Ok(Some(Err(why)))) => PodObservation::Unknown(why),
        Ok(Err(error)) => PodObservation::Unknown(error.to_string()),
        Err(_) => PodObservation::Unknown(format!("the API server has not answered for {limit:?}")),
    }
}

/// Observes the containers of one Pod, and keeps between observations what the runtime does not.
#[derive(Default)]
pub struct RuntimeObserver {
    /// When each container was first seen running.
    running_since: BTreeMap<String, Duration>,
    /// Since when the runtime of the Pod's containers is missing.
    runtime_missing_since: Option<Duration>,
    /// The runtime of the Pod's containers.
    pub runtime: Option<Arc<dyn Runtime>>,
}

impl RuntimeObserver {
    /// The runtime's answer within `limit`.
    pub async fn observe(
        &mut self,
        shared: &RecreateContext,
        pod: &NodePod,
        requests: &[Arc<RecreateRequest>],
        limit: ObserveLimit,
    ) -> RuntimeObservation {
        let scheme = match runtime_scheme(pod, requests) {
            Ok(scheme) => scheme,
            Err(observation) => return observation,
        };
        let Some(runtime) = shared.ctx.runtimes.by_name(&scheme) else {
            return self.runtime_missing(shared, &scheme);
        };
        self.runtime_missing_since = None;
        self.runtime = Some(Arc::clone(&runtime));
        let list = self.list_containers(runtime.as_ref(), pod, shared);
        match shared.runtime_queue.call(runtime.socket(), limit, list).await {
            Ok(containers) => RuntimeObservation::Listed { scheme, containers },
            Err(why) => RuntimeObservation::Unknown(why),
        }
    }

    fn runtime_missing(&mut self, shared: &RecreateContext, scheme: &str) -> RuntimeObservation {
        self.runtime = None;
        let now = shared.now();
        let health = shared.ctx.runtimes.health();
        let healthy = health.iter().filter(|socket| socket.healthy);
        let others: Vec<&str> = healthy
            .filter_map(|socket| Some(socket.version.as_ref()?.runtime_name.as_str()))
            .collect();
        let since = *self.runtime_missing_since.get_or_insert(now.mono);
        if !others.is_empty() && now.mono.saturating_sub(since) >= UNKNOWN_RUNTIME_TIMEOUT {
            return RuntimeObservation::Unavailable(format!(
                "no runtime on this node is named {scheme:?}; there is {}",
                others.join(", ")
            ));
        }
        let messages: Vec<&str> = health.iter().map(|socket| socket.message.as_str()).collect();
        RuntimeObservation::Unknown(format!(
            "no runtime named {scheme:?} answers: {}",
            messages.join("; ")
        ))
    }

    /// Lists the newest container of each name.
    async fn list_containers(
        &mut self,
        runtime: &dyn Runtime,
        pod: &NodePod,
        shared: &RecreateContext,
    ) -> Result<Vec<ObservedContainer>, kruise_cri::Error> {
        let mut newest: Vec<ObservedContainer> = Vec::new();
        let owned = runtime.list_containers(&pod.runtime_uid).await?;
        // Not before: a container in the answer may have started during the call.
        let now = shared.now();
        let owned = owned
            .into_iter()
            .filter(|container| pod.owns_container(&container.labels));
        for container in owned {
            if newest.iter().any(|listed| listed.name == container.name) {
                continue;
            }
            let state = match container.state {
                ContainerState::Created => RunState::Created,
                ContainerState::Exited => RunState::Exited,
                ContainerState::Running | ContainerState::Unknown => RunState::Running,
            };
            let running_since = (state == RunState::Running).then(|| {
                let since = self.running_since.entry(container.id.clone());
                *since.or_insert(now.mono)
            });
            let (id, name) = (container.id, container.name);
            newest.push(ObservedContainer {
                id,
                name,
                state,
                running_since,
                restarting: false,
                hook_done: false,
            });
        }
        let listed = |id: &str| newest.iter().any(|container| container.id == id);
        self.running_since.retain(|id, _| listed(id));
        Ok(newest)
    }
}

/// Marks the containers that are restarted for their environment. The plan must follow without an await: such a restart
/// may begin meanwhile.
pub fn mark_restarts(observation: &mut RuntimeObservation, restarts: &[RestartStatus]) {
    let RuntimeObservation::Listed { scheme, containers } = observation else {
        return;
    };
    for container in containers {
        let id = format!("{scheme}://{}", container.id);
        for row in restarts.iter().filter(|row| row.container_id == id) {
            container.restarting |= row.step == "stopping";
            container.hook_done |= row.hook_done;
        }
    }
}

/// The scheme of the relevant container IDs.
fn runtime_scheme(pod: &NodePod, requests: &[Arc<RecreateRequest>]) -> Result<String, RuntimeObservation> {
    let requested: BTreeSet<&str> = requests
        .iter()
        .flat_map(|request| &request.containers)
        .map(|container| container.name.as_str())
        .collect();
    let mut schemes = BTreeSet::new();
    for container in &pod.containers {
        let Some(status) = &container.status else { continue };
        let (name, id) = (&container.name, &status.container_id);
        if id.is_empty() || !requested.contains(name.as_str()) {
            continue;
        }
        let scheme = id.split_once("://").map(|(scheme, _)| scheme);
        let Some(scheme) = scheme.filter(|scheme| !scheme.is_empty()) else {
            return Err(RuntimeObservation::Unavailable(format!(
                "ID {id:?} of container {name:?} does not name a runtime"
            )));
        };
        schemes.insert(scheme);
    }
    match Vec::from_iter(schemes).as_slice() {
        [] => Err(RuntimeObservation::Unknown(
            "kubelet has not started any of the containers yet".to_owned(),
        )),
        [one] => Ok((*one).to_owned()),
        [one, two, ..] => Err(RuntimeObservation::Unavailable(format!(
            "the containers belong to several runtimes, {one} and {two}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::pods::{PodContainer, PodContainerStatus};
    use kruise_api::container_recreate_request::{
        ContainerRecreateRequestFailurePolicyType, ContainerRecreateRequestPhase,
        ContainerRecreateRequestStrategy,
    };
    use serde_json::json;

    #[test]
    fn recreate_request_of_any_author_is_parsed() {
        let object = serde_json::from_value(json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
            "metadata": {
                "namespace": "ns", "name": "r", "uid": "u", "resourceVersion": "7",
                "creationTimestamp": "2026-01-02T03:04:05Z", "labels": {"crr.apps.kruise.io/pod-uid": "p"},
            },
            "spec": {
                "podName": "web",
                "containers": [
                    {"name": "a", "statusContext": {"containerID": "containerd://x", "restartCount": 1}},
                    {"name": "b"},
                ],
                "strategy": {"failurePolicy": "Ignore", "minStartedSeconds": 4},
                "activeDeadlineSeconds": 9,
            },
            "status": {
                "phase": "Recreating",
                "containerRecreateStates": [{"name": "a", "phase": "Pending", "isKilled": true}],
                "conditions": [{"type": "PreRecreateGrace", "status": "True", "reason": "PreRecreateGrace",
                    "message": "", "lastTransitionTime": "2026-01-02T03:04:06Z"}],
            },
        }))
        .unwrap();
        let request = parse_request(object).unwrap();
        let strategy = ContainerRecreateRequestStrategy {
            failure_policy: Some(ContainerRecreateRequestFailurePolicyType::Ignore),
            min_started_seconds: 4,
            ..ContainerRecreateRequestStrategy::default()
        };
        assert_eq!((request.strategy, request.deadline_seconds), (strategy, Some(9)));
        assert_eq!(request.pod_uid.as_deref(), Some("p"));
        assert_eq!(
            request.containers[0].recorded_id.as_deref(),
            Some("containerd://x")
        );
        assert_eq!(request.containers[1].recorded_id, None);
        assert_eq!(request.status.phase, ContainerRecreateRequestPhase::Recreating);
        assert!(
            request.status.container_recreate_states[0].is_killed && request.status.unready_since().is_some()
        );
    }

    #[test]
    fn request_may_name_the_only_container_to_stop() {
        let parsed_with = |annotation: &str, names: &[&str]| {
            let containers = names
                .iter()
                .map(|name| json!({"name": name, "statusContext": {"containerID": "containerd://new", "restartCount": 1}}));
            let object = json!({
                "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
                "metadata": {
                    "namespace": "ns", "name": "r", "uid": "u", "creationTimestamp": "2026-01-02T03:04:05Z",
                    "annotations": {"crr.apps.kruise.io/container-id": annotation},
                },
                "spec": {
                    "podName": "web", "containers": containers.collect::<Vec<_>>(),
                    "strategy": {"forceRecreate": true},
                },
            });
            let request = parse_request(serde_json::from_value(object).unwrap()).unwrap();
            let ids = request.containers.into_iter().map(|one| one.recorded_id.unwrap());
            (ids.collect::<Vec<_>>(), request.strategy.force_recreate)
        };
        let parsed = |names: &[&str]| parsed_with("containerd://old", names);
        assert_eq!(parsed(&["a"]), (vec!["containerd://old".to_owned()], false));
        // It is of no container, and must not become large in each row of the status.
        let (long, _) = parsed_with(&"x".repeat(300_000), &["a"]);
        assert!(long[0].len() < 1100 && long[0] != "containerd://new");
        let several = vec!["containerd://new".to_owned(); 2];
        assert_eq!(parsed(&["a", "b"]), (several, true));
    }

    #[test]
    fn container_restarted_for_its_environment_is_marked() {
        let container = |id: &str, restarting, hook_done| ObservedContainer {
            id: id.to_owned(),
            restarting,
            hook_done,
            ..ObservedContainer::default()
        };
        let listed = |containers| RuntimeObservation::Listed {
            scheme: "containerd".to_owned(),
            containers,
        };
        let row = |id: &str, step: &str| RestartStatus {
            container_id: id.to_owned(),
            step: step.to_owned(),
            hook_done: true,
            ..RestartStatus::default()
        };
        let mut observation = listed(["a", "b", "c"].map(|id| container(id, false, false)).to_vec());
        let rows = [
            row("containerd://a", "stopping"),
            row("containerd://b", "waiting"),
            row("docker://c", "stopping"),
        ];
        mark_restarts(&mut observation, &rows);
        let marked = [
            container("a", true, true),
            container("b", false, true),
            container("c", false, false),
        ];
        assert_eq!(observation, listed(marked.to_vec()));
    }

    #[test]
    fn runtime_is_chosen_by_requested_container_ids() {
        let pod = |ids: &[(&str, &str)]| NodePod {
            containers: ids
                .iter()
                .map(|(name, id)| PodContainer {
                    name: (*name).to_owned(),
                    status: Some(PodContainerStatus {
                        container_id: (*id).to_owned(),
                        ..PodContainerStatus::default()
                    }),
                    ..PodContainer::default()
                })
                .collect(),
            ..NodePod::default()
        };
        let requested = |name: &str| RequestedContainer {
            name: name.to_owned(),
            recorded_id: None,
        };
        let requests = [Arc::new(RecreateRequest {
            containers: vec![requested("a"), requested("b")],
            ..RecreateRequest::default()
        })];
        let scheme_of = |ids: &[(&str, &str)]| runtime_scheme(&pod(ids), &requests);
        assert_eq!(
            scheme_of(&[("a", "containerd://1"), ("b", ""), ("c", "docker://1")]),
            Ok("containerd".into())
        );
        assert!(matches!(
            scheme_of(&[("a", "")]),
            Err(RuntimeObservation::Unknown(_))
        ));
        let mixed = scheme_of(&[("a", "containerd://1"), ("b", "docker://1")]);
        assert!(
            matches!(mixed, Err(RuntimeObservation::Unavailable(why)) if why.contains("containerd and docker"))
        );
        assert!(matches!(
            scheme_of(&[("a", "nonsense")]),
            Err(RuntimeObservation::Unavailable(_))
        ));
    }
}

//! Turns watches and the runtime's answers into what the plan looks at.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::Api;

use super::Shared;
use super::plan::{Now, PodSight, Request, RunState, RuntimeSight, Seen, Wanted};
use super::turns::Limit;
use crate::pods::PodView;
use kruise_api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestFailurePolicyType, ContainerRecreateRequestPhase,
    ContainerRecreateRequestStatus,
};
use kruise_api::keys;
use kruise_cluster::{Key, write};
use kruise_cri::{ContainerState, Runtime};
use kruise_ops::progress::Step;

/// How long a runtime of a name that nobody has is waited for, while another one answers.
const NO_SUCH_RUNTIME: Duration = Duration::from_secs(30);

/// Reduces a request to what is decided on; none where it cannot be one of this node's.
pub fn request(object: ContainerRecreateRequest) -> Option<Request> {
    let ContainerRecreateRequest {
        metadata,
        spec,
        status,
    } = object;
    let strategy = spec.strategy.unwrap_or_default();
    let containers = spec.containers.into_iter().map(|container| Wanted {
        name: container.name,
        recorded: container
            .status_context
            .map(|context| context.container_id)
            .filter(|id| !id.is_empty()),
    });
    Some(Request {
        uid: metadata.uid?,
        namespace: metadata.namespace?,
        name: metadata.name?,
        resource_version: metadata.resource_version.unwrap_or_default(),
        created: metadata.creation_timestamp?.0,
        deleting: metadata.deletion_timestamp.is_some(),
        pod_name: spec.pod_name,
        pod_uid: metadata
            .labels
            .and_then(|mut labels| labels.remove(keys::CRR_POD_UID)),
        containers: containers.collect(),
        ignore_failures: strategy.failure_policy == Some(ContainerRecreateRequestFailurePolicyType::Ignore),
        ordered: strategy.ordered_recreate,
        force: strategy.force_recreate,
        grace_seconds: strategy.termination_grace_period_seconds,
        unready_seconds: strategy.unready_grace_period_seconds,
        min_started_seconds: i64::from(strategy.min_started_seconds),
        deadline_seconds: spec.active_deadline_seconds,
        status: status.map(normal).unwrap_or_default(),
    })
}

/// A status as we write it, whoever wrote it: no empty texts, and a state whose phase we do not know counts as Pending.
fn normal(mut status: ContainerRecreateRequestStatus) -> ContainerRecreateRequestStatus {
    let said = |text: &mut Option<String>| *text = text.take().filter(|text| !text.is_empty());
    said(&mut status.message);
    for state in &mut status.container_recreate_states {
        said(&mut state.message);
        if let ContainerRecreateRequestPhase::Other(_) = state.phase {
            state.phase = ContainerRecreateRequestPhase::Pending;
        }
    }
    for container in &mut status.container_status_snapshot {
        said(&mut container.container_id);
    }
    status
}

/// The Pod as our watch has it. Where the watch has none, or another one than a request names, the API
/// server is asked: the watch may be behind.
pub async fn pod(shared: &Shared, key: &Key, requests: &[Arc<Request>]) -> PodSight {
    if let Some(pod) = shared.pods.get(key)
        && requests
            .iter()
            .all(|request| request.pod_uid.as_ref().is_none_or(|uid| *uid == pod.uid))
    {
        return PodSight::Here(pod);
    }
    let namespace = key.namespace.as_deref().unwrap_or_default();
    let api: Api<Pod> = Api::namespaced(shared.ctx.cluster.client.clone(), namespace);
    match write::read::<PodView>(api, &key.name).await {
        Ok(Some(Ok(view))) if view.node == shared.ctx.node_name => PodSight::Here(Arc::new(view)),
        Ok(Some(Ok(_))) => PodSight::Gone,
        Ok(Some(Err(why))) => PodSight::Unknown(why),
        Ok(None) => PodSight::Gone,
        Err(error) => PodSight::Unknown(error.to_string()),
    }
}

/// Looks at the containers of one Pod, and remembers between looks what the runtime does not.
#[derive(Default)]
pub struct Eyes {
    /// When each container was first seen running.
    running_since: BTreeMap<String, Duration>,
    /// When each container was started, by the node's clock.
    started: BTreeMap<String, jiff::Timestamp>,
    /// Since when the runtime of the Pod's containers is not to be found.
    missing_since: Option<Duration>,
    /// The runtime of the Pod's containers.
    pub runtime: Option<Arc<dyn Runtime>>,
}

impl Eyes {
    /// What the runtime says, within `limit`; `step` shows whether it is asked.
    pub async fn look(
        &mut self,
        shared: &Shared,
        pod: &PodView,
        requests: &[Arc<Request>],
        now: Now,
        limit: Limit,
        step: &Step,
    ) -> RuntimeSight {
        let scheme = match scheme(pod, requests) {
            Ok(scheme) => scheme,
            Err(sight) => return sight,
        };
        let Some(runtime) = shared.ctx.runtimes.by_name(&scheme) else {
            return self.missing(shared, &scheme, now);
        };
        self.missing_since = None;
        self.runtime = Some(Arc::clone(&runtime));
        let list = self.list(runtime.as_ref(), pod, requests, shared);
        match shared.turns.ask(runtime.socket(), limit, step, list).await {
            Ok(mut containers) => {
                let restarts = shared.ctx.live.restarts.borrow();
                for seen in &mut containers {
                    let id = format!("{scheme}://{}", seen.id);
                    seen.restarting = restarts
                        .iter()
                        .any(|row| row.container_id == id && row.step == "stopping");
                }
                RuntimeSight::Seen { scheme, containers }
            }
            Err(why) => RuntimeSight::Unknown(why),
        }
    }

    fn missing(&mut self, shared: &Shared, scheme: &str, now: Now) -> RuntimeSight {
        self.runtime = None;
        let health = shared.ctx.runtimes.health();
        let others: Vec<String> = health
            .iter()
            .filter(|socket| socket.healthy)
            .filter_map(|socket| socket.version.as_ref())
            .map(|version| version.runtime_name.clone())
            .collect();
        let since = *self.missing_since.get_or_insert(now.mono);
        if !others.is_empty() && now.mono.saturating_sub(since) >= NO_SUCH_RUNTIME {
            return RuntimeSight::Impossible(format!(
                "no runtime on this node is named {scheme:?}; there is {}",
                others.join(", ")
            ));
        }
        let words: Vec<&str> = health.iter().map(|socket| socket.words.as_str()).collect();
        RuntimeSight::Unknown(format!(
            "no runtime named {scheme:?} answers: {}",
            words.join("; ")
        ))
    }

    /// The newest container of each name.
    async fn list(
        &mut self,
        runtime: &dyn Runtime,
        pod: &PodView,
        requests: &[Arc<Request>],
        shared: &Shared,
    ) -> Result<Vec<Seen>, kruise_cri::Error> {
        let mut newest: Vec<Seen> = Vec::new();
        let now = shared.now();
        let ours = runtime.containers(&pod.runtime_uid).await?;
        let ours = ours.into_iter().filter(|container| pod.owns(&container.labels));
        for container in ours {
            if newest.iter().any(|seen| seen.name == container.name) {
                continue;
            }
            let state = match container.state {
                ContainerState::Created => RunState::Created,
                ContainerState::Exited => RunState::Exited,
                ContainerState::Running | ContainerState::Unknown => RunState::Running,
            };
            let running_since = (state == RunState::Running)
                .then(|| *self.running_since.entry(container.id.clone()).or_insert(now.mono));
            let (id, name) = (container.id, container.name);
            newest.push(Seen {
                id,
                name,
                state,
                started: None,
                running_since,
                restarting: false,
            });
        }
        let ids: BTreeSet<&str> = newest.iter().map(|seen| seen.id.as_str()).collect();
        self.running_since.retain(|id, _| ids.contains(id.as_str()));
        self.started.retain(|id, _| ids.contains(id.as_str()));
        for seen in &mut newest {
            if seen.state == RunState::Running && timed(requests, &seen.name) {
                seen.started = self.started(runtime, &seen.id).await?;
            }
        }
        Ok(newest)
    }

    async fn started(
        &mut self,
        runtime: &dyn Runtime,
        id: &str,
    ) -> Result<Option<jiff::Timestamp>, kruise_cri::Error> {
        if let Some(started) = self.started.get(id) {
            return Ok(Some(*started));
        }
        let started = runtime
            .container_status(id)
            .await?
            .and_then(|status| status.started_at);
        if let Some(started) = started {
            self.started.insert(id.to_owned(), started);
        }
        Ok(started)
    }
}

/// Whether some request wants to know how long the container has been running.
fn timed(requests: &[Arc<Request>], name: &str) -> bool {
    requests
        .iter()
        .any(|request| request.min_started_seconds > 0 && request.containers.iter().any(|c| c.name == name))
}

/// The scheme of the container IDs that matter.
fn scheme(pod: &PodView, requests: &[Arc<Request>]) -> Result<String, RuntimeSight> {
    let wanted = |name: &str| {
        requests
            .iter()
            .flat_map(|r| &r.containers)
            .any(|wanted| wanted.name == name)
    };
    let mut schemes = BTreeSet::new();
    for container in pod.containers.iter().filter(|container| wanted(&container.name)) {
        let id = container
            .status
            .as_ref()
            .map_or("", |status| status.container_id.as_str());
        match id.split_once("://") {
            Some((scheme, _)) if !scheme.is_empty() => schemes.insert(scheme),
            _ if id.is_empty() => continue,
            _ => {
                let why = format!(
                    "ID {id:?} of container {:?} does not name a runtime",
                    container.name
                );
                return Err(RuntimeSight::Impossible(why));
            }
        };
    }
    let mut schemes = schemes.into_iter();
    match (schemes.next(), schemes.next()) {
        (None, _) => Err(RuntimeSight::Unknown(
            "kubelet has not started any of the containers yet".to_owned(),
        )),
        (Some(one), None) => Ok(one.to_owned()),
        (Some(one), Some(two)) => Err(RuntimeSight::Impossible(format!(
            "the containers belong to several runtimes, {one} and {two}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::pods::{ContainerView, StatusView};
    use serde_json::json;

    #[test]
    fn a_request_of_any_make_is_read() {
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
        let request = request(object).unwrap();
        assert!(request.ignore_failures && !request.force && !request.ordered);
        assert_eq!(
            (request.min_started_seconds, request.deadline_seconds),
            (4, Some(9))
        );
        assert_eq!(request.pod_uid.as_deref(), Some("p"));
        assert_eq!(request.containers[0].recorded.as_deref(), Some("containerd://x"));
        assert_eq!(request.containers[1].recorded, None);
        assert_eq!(request.status.phase, ContainerRecreateRequestPhase::Recreating);
        assert!(
            request.status.container_recreate_states[0].is_killed && request.status.unready_since().is_some()
        );
    }

    #[test]
    fn a_status_of_any_make_is_read_as_ours() {
        let read = |status| normal(serde_json::from_value(status).unwrap());
        let theirs = json!({
            "phase": "Recreating", "message": "",
            "containerRecreateStates": [{ "name": "a", "phase": "", "message": "" }],
            "containerStatusSnapshot": [{ "name": "a", "ready": true, "restartCount": 1, "containerID": "" }],
        });
        let ours = json!({
            "phase": "Recreating",
            "containerRecreateStates": [{ "name": "a", "phase": "Pending" }],
            "containerStatusSnapshot": [{ "name": "a", "ready": true, "restartCount": 1 }],
        });
        assert_eq!(read(theirs), read(ours));
    }

    #[test]
    fn the_runtime_is_named_by_the_ids_of_the_containers_asked_for() {
        let pod = |ids: &[(&str, &str)]| PodView {
            containers: ids
                .iter()
                .map(|(name, id)| ContainerView {
                    name: (*name).to_owned(),
                    status: Some(StatusView {
                        container_id: (*id).to_owned(),
                        ..StatusView::default()
                    }),
                    ..ContainerView::default()
                })
                .collect(),
            ..PodView::default()
        };
        let wanted = |name: &str| Wanted {
            name: name.to_owned(),
            recorded: None,
        };
        let requests = [Arc::new(Request {
            containers: vec![wanted("a"), wanted("b")],
            ..Request::default()
        })];
        let of = |ids: &[(&str, &str)]| scheme(&pod(ids), &requests);
        assert_eq!(
            of(&[("a", "containerd://1"), ("b", ""), ("c", "docker://1")]),
            Ok("containerd".into())
        );
        assert!(matches!(of(&[("a", "")]), Err(RuntimeSight::Unknown(_))));
        let mixed = of(&[("a", "containerd://1"), ("b", "docker://1")]);
        assert!(matches!(mixed, Err(RuntimeSight::Impossible(why)) if why.contains("containerd and docker")));
        assert!(matches!(
            of(&[("a", "nonsense")]),
            Err(RuntimeSight::Impossible(_))
        ));
    }
}

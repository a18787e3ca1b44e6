//! The parsers of the daemon, for `kruise-fuzzing`.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use kruise_api::node_pod_probe::NodePodProbe;
use serde_json::json;

use super::hook::http;
use super::image_pull;
use super::image_pull::plan::keyring::{KEY_CFG, KEY_JSON, Keyring, TYPE_CFG, TYPE_JSON};
use super::pod_probe;
use super::pods::{NodePod, PodContainerStatus};
use super::{container_meta, recreate};

/// The redirect of a preStop hook's server: never to another server.
pub fn hook_answer(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (host, location) = text.split_once('\n').unwrap_or((&text, ""));
    for tls in [false, true] {
        let request = http::HookRequest {
            tls,
            host: host.to_owned(),
            port: 80,
            path: "/".to_owned(),
            headers: Vec::new(),
        };
        if let Some(path) = http::same_host_redirect(&request, location) {
            assert!(path.starts_with('/'), "{path:?}");
        }
    }
}

/// Parses a NodeImage.
pub fn node_image(data: &[u8]) {
    image_pull::parse_and_plan(data);
}

/// Parses a NodePodProbe and runs its probes in a container that restarts: none is started twice at a time. Returns how
/// many were run.
pub fn node_pod_probe(data: &[u8]) -> usize {
    use pod_probe::plan::{Now, ObservedContainer, Outcome, ProbeBoard};

    let Ok(object) = serde_json::from_slice::<NodePodProbe>(data) else {
        return 0;
    };
    let mut board = ProbeBoard::default();
    let stored = object.status.clone().unwrap_or_default();
    let mut ended = 0;
    for second in [0, 10, 100, 110, 1_000_000] {
        let restarted = second / 100 * 100;
        let wall = Timestamp::UNIX_EPOCH + Duration::from_secs(second);
        let now = Now {
            mono: Duration::from_secs(second),
            wall,
            node: wall,
        };
        board.sync(pod_probe::spec::parse(&object.spec), &stored, now);
        let container = ObservedContainer {
            id: format!("containerd://{restarted}"),
            running: true,
            starting: false,
            started_at: Some(Timestamp::UNIX_EPOCH + Duration::from_secs(restarted)),
        };
        for key in board.keys() {
            board.observe(&key, now, |_| Some(container.clone()));
        }
        let mut started = BTreeSet::new();
        for start in board.start_due(now) {
            assert!(
                started.insert(start.key.clone()),
                "{:?} overlaps itself",
                start.key
            );
            let outcome = match second {
                110 => Outcome::Failure("no".to_owned()),
                _ => Outcome::Success("yes".to_owned()),
            };
            let _ = board.on_ended(&start.key, start.run, outcome, now);
            ended += 1;
        }
        let _ = pod_probe::plan::status_change(&stored, &board.status());
    }
    ended
}

/// Matches a registry of a Docker configuration against a repository.
pub fn registry(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (registry, repository) = text.split_once('\n').unwrap_or((&text, ""));
    let config = json!({"auths": {registry: {"username": "u"}}}).to_string();
    let mut keyring = Keyring::default();
    let read = keyring.add_config_json(config.as_bytes(), "file");
    assert!(read.is_ok(), "{read:?}");
    assert!(keyring.lookup(repository).len() <= 1);
}

/// Parses the content of a pull secret.
pub fn docker_config(data: &[u8]) {
    for (type_, wanted) in [(TYPE_JSON, KEY_JSON), (TYPE_CFG, KEY_CFG)] {
        let mut keyring = Keyring::default();
        let _ = keyring.add_secret(type_, |key| (key == wanted).then_some(data));
        let _ = keyring.lookup("r.test:5000/team/app");
    }
}

/// Parses a Pod and runs the daemon's decisions on it: publishes metadata of its containers, restarts them for their
/// environment, and recreates them all.
pub fn pod(data: &[u8]) {
    let Ok(pod) = serde_json::from_slice::<NodePod>(data) else {
        return;
    };
    for container in &pod.containers {
        let code = container.status.as_ref().and_then(PodContainerStatus::exit_code);
        for code in [0, 1, i32::MIN].into_iter().chain(code) {
            let _ = pod.will_restart(container, code);
        }
        let _ = (
            pod.container_reference(&container.name),
            container.may_restart_all_containers(),
        );
    }
    let _ = pod.restarts_all_containers();
    for env in [false, true] {
        let _ = report_container_meta(&pod, env);
    }
    let pod = Arc::new(pod);
    for force in [false, true] {
        let _ = recreate_all(&pod, force);
    }
}

/// Publishes the containers' metadata, from a runtime that has created each for a different environment. No fact is
/// read twice, and no container is stopped twice. Returns the number of stopped containers.
fn report_container_meta(pod: &NodePod, env: bool) -> usize {
    use container_meta::plan::{ContainerFacts, PodMetaState, plan};

    let Some(meta) = &pod.meta else { return 0 };
    // The API server rejects two containers of one name.
    let names: BTreeSet<_> = meta.containers.iter().map(|container| &container.name).collect();
    let names_are_unique = names.len() == meta.containers.len();
    let (mut state, mut now) = (PodMetaState::default(), Duration::ZERO);
    state.record_change(pod, meta, now);
    let (mut asked, mut stopped) = (BTreeSet::new(), BTreeSet::new());
    for _ in 0..5 {
        state.prune(pod, meta, now);
        let plan = plan(pod, meta, &state, env, now);
        for (name, id) in plan.inspect {
            let desired = meta.containers.iter().find(|wanted| wanted.name == name);
            let facts = ContainerFacts {
                plain_hash: desired.map_or(0, |container| container.plain_hashes[0]),
                env_hash: desired.map(|container| container.env_hash().wrapping_add(1)),
            };
            state.facts.insert(id.clone(), facts);
            asked.insert((name, id));
        }
        for (name, id) in plan.restart {
            let new = stopped.insert((name, id.clone()));
            assert!(new || !names_are_unique, "{id} is stopped twice");
            state.begin_restart(&id);
            state.finish_restart(id, true, now);
        }
        if let Some(set) = plan.write {
            let text = serde_json::to_string(&set).unwrap_or_default();
            assert_eq!(serde_json::from_str(&text).ok(), Some(set.clone()));
            state.unconfirmed_write = Some(kruise_api::unconfirmed::Unconfirmed::new(set, now));
        }
        state.waiting_since = plan.waiting_since;
        now = plan.requeue_at.unwrap_or(now).max(now + Duration::from_secs(60));
    }
    assert!(asked.len() <= meta.containers.len(), "{asked:?}");
    stopped.len()
}

/// Recreates all containers at unusual times, with a runtime that has the containers named in the Pod's status: no
/// other container is stopped, and each gets its own hook. Returns the number of stops and hooks that were started.
fn recreate_all(pod: &Arc<NodePod>, force: bool) -> (usize, usize) {
    use recreate::plan::{
        Clocks, Observed, ObservedContainer, PodObservation, RecreateRequest, RecreateState,
        RequestedContainer, RunState, RuntimeObservation, plan, strip_scheme,
    };

    let id = |status: &PodContainerStatus| Some(status.container_id.clone()).filter(|id| !id.is_empty());
    let requested_containers = |recorded: bool| {
        let recorded = |status: &PodContainerStatus| id(status).filter(|_| recorded);
        let all = pod.containers.iter().map(|view| RequestedContainer {
            name: view.name.clone(),
            recorded_id: view.status.as_ref().and_then(recorded),
        });
        all.collect()
    };
    let runtime_containers = |state| {
        let all = pod.containers.iter().filter_map(|view| {
            let status = view.status.as_ref()?;
            Some(ObservedContainer {
                id: strip_scheme(&id(status)?).to_owned(),
                name: view.name.clone(),
                state,
                ..ObservedContainer::default()
            })
        });
        all.collect::<Vec<_>>()
    };
    let observations = [RunState::Running, RunState::Exited].map(|state| RuntimeObservation::Listed {
        scheme: "containerd".to_owned(),
        containers: runtime_containers(state),
    });
    let (mut stops, mut hooks) = (0, 0);
    for (runtime, recorded) in observations.into_iter().zip([true, false]) {
        let mut request = RecreateRequest {
            uid: "r".to_owned(),
            namespace: pod.namespace.clone(),
            pod_name: pod.name.clone(),
            pod_uid: Some(pod.uid.clone()),
            containers: requested_containers(recorded),
            strategy: kruise_api::container_recreate_request::ContainerRecreateRequestStrategy {
                force_recreate: force,
                ordered_recreate: recorded,
                ..Default::default()
            },
            deadline_seconds: recorded.then_some(i64::MAX),
            ..RecreateRequest::default()
        };
        let times = [Timestamp::UNIX_EPOCH, Timestamp::MAX, Timestamp::MIN];
        for (index, api) in times.into_iter().enumerate() {
            let now = Clocks {
                api,
                wall: times[(index + 1) % times.len()],
                mono: Duration::from_secs(60),
            };
            let observed = Observed {
                requests: vec![Arc::new(request.clone())],
                pod: PodObservation::Present(Arc::clone(pod)),
                runtime: runtime.clone(),
                state: RecreateState::default(),
            };
            let plan = plan(&observed, now);
            for begin in &plan.stops {
                let named = pod
                    .containers
                    .iter()
                    .filter(|view| view.name == begin.key.container);
                let own = named.clone().filter_map(|view| id(view.status.as_ref()?));
                assert!(
                    own.into_iter().any(|own| strip_scheme(&own) == begin.target),
                    "{begin:?}"
                );
                stops += 1;
                if begin.run_hook {
                    hooks += 1;
                    let mut own = named.filter(|view| view.pre_stop.is_some());
                    assert!(own.next().is_some(), "{begin:?}");
                }
                let _ = begin.termination_grace(begin.grace_period);
            }
            if let Some(write) = plan.writes.into_iter().next_back() {
                request.status = write.status;
            }
        }
    }
    (stops, hooks)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn fuzz_target_runs_probes() {
        let probe = json!({ "exec": { "command": ["true"] } });
        let object = json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "NodePodProbe",
            "metadata": { "name": "n" }, "spec": { "podProbes": [{ "name": "p", "namespace": "n", "uid": "u",
                "probes": [{ "name": "m#a", "containerName": "c", "probe": probe }] }] } });
        assert!(node_pod_probe(object.to_string().as_bytes()) > 1);
    }

    /// The assertions of the fuzz target about stops and hooks must not be vacuous.
    #[test]
    fn fuzz_target_stops_containers_and_runs_hooks() {
        let from = json!({ "fieldRef": { "fieldPath": "metadata.labels['l']" } });
        let owner = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "s", "uid": "u", "controller": true });
        let pod = json!({
            "metadata": { "name": "p", "namespace": "n", "uid": "u", "labels": { "l": "1" }, "ownerReferences": [owner] },
            "spec": { "containers": [{ "name": "a", "image": "i", "env": [{ "name": "L", "valueFrom": from }],
                "lifecycle": { "preStop": { "exec": { "command": ["x"] } } } }] },
            "status": { "conditions": [{ "type": "InPlaceUpdateReady", "status": "False" }],
                "containerStatuses": [{ "name": "a", "image": "i", "imageID": "i", "ready": true, "restartCount": 0,
                    "containerID": "containerd://1", "state": { "running": {} } }] },
        });
        let text = pod.to_string();
        super::pod(text.as_bytes());
        let pod = Arc::new(serde_json::from_str::<NodePod>(&text).unwrap());
        assert_eq!([false, true].map(|env| report_container_meta(&pod, env)), [0, 1]);
        let (stops, hooks) = recreate_all(&pod, false);
        assert!(stops > 0 && hooks > 0, "{stops} {hooks}");
    }
}

//! What the daemon reads, for `kruise-fuzzing`.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use serde_json::json;

use super::hook::http;
use super::image_pull;
use super::image_pull::plan::keyring::{KEY_CFG, KEY_JSON, Keyring, TYPE_CFG, TYPE_JSON};
use super::pods::{PodView, StatusView};
use super::{container_meta, recreate};

/// Where the server of a preStop hook redirects to: never away from it.
pub fn hook_answer(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (host, location) = text.split_once('\n').unwrap_or((&text, ""));
    for tls in [false, true] {
        let request = http::Get {
            tls,
            host: host.to_owned(),
            port: 80,
            path: "/".to_owned(),
            headers: Vec::new(),
        };
        if let Some(path) = http::redirect(&request, location) {
            assert!(path.starts_with('/'), "{path:?}");
        }
    }
}

/// A NodeImage.
pub fn node_image(data: &[u8]) {
    image_pull::read(data);
}

/// A registry of a Docker configuration against a repository.
pub fn registry(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let (registry, repository) = text.split_once('\n').unwrap_or((&text, ""));
    let config = json!({"auths": {registry: {"username": "u"}}}).to_string();
    let mut keyring = Keyring::default();
    let read = keyring.add_config_json(config.as_bytes(), "file");
    assert!(read.is_ok(), "{read:?}");
    assert!(keyring.lookup(repository).len() <= 1);
}

/// The content of a pull secret.
pub fn docker_config(data: &[u8]) {
    for (type_, wanted) in [(TYPE_JSON, KEY_JSON), (TYPE_CFG, KEY_CFG)] {
        let mut keyring = Keyring::default();
        let _ = keyring.add_secret(type_, |key| (key == wanted).then_some(data));
        let _ = keyring.lookup("r.test:5000/team/app");
    }
}

/// A Pod, and what the daemon does about it: it tells of its containers, restarts them for their environment, and
/// recreates them all.
pub fn pod(data: &[u8]) {
    let Ok(pod) = serde_json::from_slice::<PodView>(data) else {
        return;
    };
    for container in &pod.containers {
        let code = container.status.as_ref().and_then(StatusView::exit_code);
        for code in [0, 1, i32::MIN].into_iter().chain(code) {
            let _ = pod.starts_again(container, code);
        }
        let _ = (pod.reference(&container.name), container.may_restart_all());
    }
    let _ = pod.restarts_all();
    for env in [false, true] {
        let _ = told(&pod, env);
    }
    let pod = Arc::new(pod);
    for force in [false, true] {
        let _ = recreated(&pod, force);
    }
}

/// Tells of the containers, as a runtime says of them that has made each for another environment. What it has said is not
/// asked for again, and no container is stopped twice. Returns how many are.
fn told(pod: &PodView, env: bool) -> usize {
    use container_meta::plan::{Facts, Memory, plan};

    let Some(meta) = &pod.meta else { return 0 };
    // The API server takes no two containers of one name.
    let names: BTreeSet<_> = meta.containers.iter().map(|wanted| &wanted.name).collect();
    let each_once = names.len() == meta.containers.len();
    let (mut memory, mut now) = (Memory::default(), Duration::ZERO);
    memory.notice(pod, meta, now);
    let (mut asked, mut stopped) = (BTreeSet::new(), BTreeSet::new());
    for _ in 0..5 {
        memory.look(pod, meta, now);
        let plan = plan(pod, meta, &memory, env, now);
        for (name, id) in plan.read {
            let wanted = meta.containers.iter().find(|wanted| wanted.name == name);
            let facts = Facts {
                plain_hash: wanted.map_or(0, |wanted| wanted.plain_hashes[0]),
                env_hash: wanted.map(|wanted| wanted.env_hash().wrapping_add(1)),
            };
            memory.facts.insert(id.clone(), facts);
            asked.insert((name, id));
        }
        for (name, id) in plan.restart {
            let new = stopped.insert((name, id.clone()));
            assert!(new || !each_once, "{id} is stopped twice");
            memory.restarting(&id);
            memory.restarted(id, true, now);
        }
        if let Some(set) = plan.write {
            let text = serde_json::to_string(&set).unwrap_or_default();
            assert_eq!(serde_json::from_str(&text).ok(), Some(set.clone()));
            memory.written = Some((set, now));
        }
        memory.waits = plan.waits;
        now = plan.wake.unwrap_or(now).max(now + Duration::from_secs(60));
    }
    assert!(asked.len() <= meta.containers.len(), "{asked:?}");
    stopped.len()
}

/// Recreates all containers at odd times, for a runtime that knows those which the Pod's status names: no other is stopped,
/// and each gets its own hook. Returns how many acts and hooks are begun.
fn recreated(pod: &Arc<PodView>, force: bool) -> (usize, usize) {
    use recreate::plan::{
        Memory, Now, Observed, PodSight, Request, RunState, RuntimeSight, Seen, Wanted, bare, plan,
    };

    let id = |status: &StatusView| Some(status.container_id.clone()).filter(|id| !id.is_empty());
    let wanted = |recorded: bool| {
        let recorded = |status: &StatusView| id(status).filter(|_| recorded);
        let all = pod.containers.iter().map(|view| Wanted {
            name: view.name.clone(),
            recorded: view.status.as_ref().and_then(recorded),
        });
        all.collect()
    };
    let seen = |state| {
        let all = pod.containers.iter().filter_map(|view| {
            let status = view.status.as_ref()?;
            Some(Seen {
                id: bare(&id(status)?).to_owned(),
                name: view.name.clone(),
                state,
                started: status.ended.and_then(|ended| ended.finished),
                ..Seen::default()
            })
        });
        all.collect::<Vec<_>>()
    };
    let sights = [RunState::Running, RunState::Exited].map(|state| RuntimeSight::Seen {
        scheme: "containerd".to_owned(),
        containers: seen(state),
    });
    let (mut acts, mut hooks) = (0, 0);
    for (runtime, recorded) in sights.into_iter().zip([true, false]) {
        let mut request = Request {
            uid: "r".to_owned(),
            namespace: pod.namespace.clone(),
            pod_name: pod.name.clone(),
            pod_uid: Some(pod.uid.clone()),
            containers: wanted(recorded),
            force,
            ordered: recorded,
            deadline_seconds: recorded.then_some(i64::MAX),
            ..Request::default()
        };
        let times = [Timestamp::UNIX_EPOCH, Timestamp::MAX, Timestamp::MIN];
        for (at, api) in times.into_iter().enumerate() {
            let now = Now {
                api,
                wall: times[(at + 1) % times.len()],
                mono: Duration::from_secs(60),
            };
            let observed = Observed {
                requests: vec![Arc::new(request.clone())],
                pod: PodSight::Here(Arc::clone(pod)),
                runtime: runtime.clone(),
                memory: Memory::default(),
            };
            let plan = plan(&observed, now);
            for begin in &plan.begin {
                let named = pod
                    .containers
                    .iter()
                    .filter(|view| view.name == begin.key.container);
                let own = named.clone().filter_map(|view| id(view.status.as_ref()?));
                assert!(own.into_iter().any(|own| bare(&own) == begin.target), "{begin:?}");
                acts += 1;
                if let Some(hook) = &begin.act.hook {
                    hooks += 1;
                    let mut own = named.filter_map(|view| view.pre_stop.as_ref());
                    assert!(own.any(|own| *own == hook.handler), "{begin:?}");
                }
                let _ = begin.act.term(begin.act.grace);
            }
            if let Some(write) = plan.writes.into_iter().next_back() {
                request.status = write.status;
            }
        }
    }
    (acts, hooks)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// What the target asserts of stops and hooks is not said of none.
    #[test]
    fn the_target_stops_containers_and_runs_hooks() {
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
        let pod = Arc::new(serde_json::from_str::<PodView>(&text).unwrap());
        assert_eq!([false, true].map(|env| told(&pod, env)), [0, 1]);
        let (acts, hooks) = recreated(&pod, false);
        assert!(acts > 0 && hooks > 0, "{acts} {hooks}");
    }
}

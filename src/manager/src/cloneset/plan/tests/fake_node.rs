//! The node of the fake cluster: its kubelet and what happens to containers.

use serde_json::{Value, json};

use super::fake_cluster::FakeCluster;
use kruise_api::container_hash::{env_from_metadata, env_hash, plain_hash};
use kruise_api::keys;
use kruise_workload::in_place::Pod;
use kruise_workload::testing::apply;

impl FakeCluster {
    /// A container crashes and is restarted unchanged.
    pub fn crash_container(&mut self, name: &str) {
        let id = self.next_id();
        let Some(pod) = self.pods.get_mut(name) else {
            return;
        };
        let env = expected_env(&pod["spec"]["containers"][0], &Pod::from_json(pod));
        if let Some(status) = pod["status"]["containerStatuses"].get_mut(0)
            && let Some(image) = status["started"].as_str().map(str::to_owned)
        {
            start_container(status, &image, id, env);
        }
    }

    /// A Pod ends permanently.
    pub fn end_pod(&mut self, name: &str, phase: &str) {
        let now = self.now.to_string();
        if let Some(pod) = self.pods.get_mut(name) {
            pod["status"]["phase"] = json!(phase);
            let statuses = pod["status"]["containerStatuses"].as_array_mut();
            for status in statuses.into_iter().flatten() {
                status["ready"] = json!(false);
            }
            set_condition(pod, "ContainersReady", false, &now);
            set_condition(pod, "Ready", false, &now);
        }
    }

    /// One sync of a Pod's kubelet.
    pub fn run_kubelet(&mut self, name: &str) {
        let now = self.now.to_string();
        let containers = self.pods.get(name).map(|pod| pod["spec"]["containers"].clone());
        let containers = containers.as_ref().and_then(Value::as_array);
        let ids: Vec<u64> = containers
            .iter()
            .flat_map(|c| c.iter())
            .map(|_| self.next_id())
            .collect();
        let ended = |pod: &Value| pod["status"]["phase"] == "Failed" || pod["status"]["phase"] == "Succeeded";
        let Some(pod) = self.pods.get_mut(name).filter(|pod| !ended(pod)) else {
            return;
        };
        pod["spec"]["nodeName"] = json!("node");
        pod["status"]["phase"] = json!("Running");
        if pod["metadata"]["generation"].is_number() {
            pod["status"]["observedGeneration"] = pod["metadata"]["generation"].clone();
        }
        let mut ready = true;
        let observed = Pod::from_json(pod);
        let gate = observed.condition(keys::IN_PLACE_UPDATE_READY);
        let serves = gate.is_some_and(|c| c.is_true);
        for (at, (container, id)) in containers.into_iter().flatten().zip(ids).enumerate() {
            if pod["status"]["containerStatuses"].is_null() {
                pod["status"]["containerStatuses"] = json!([]);
            }
            let statuses = pod["status"]["containerStatuses"].as_array_mut().unwrap();
            if statuses.len() == at {
                statuses.push(json!({ "name": container["name"], "ready": false, "restartCount": 0 }));
            }
            let before = statuses[at]["started"].is_string().then(|| statuses[at].clone());
            run_container(
                &mut statuses[at],
                container,
                id,
                expected_env(container, &observed),
            );
            let replaced = before.filter(|before| before["containerID"] != statuses[at]["containerID"]);
            assert!(
                !serves || replaced.is_none(),
                "container replaced while its Pod serves: {replaced:?}"
            );
            ready &= statuses[at]["ready"] == true;
        }
        set_condition(pod, "ContainersReady", ready, &now);
        let gates = observed
            .readiness_gates
            .iter()
            .all(|gate| observed.condition(gate).is_some_and(|c| c.is_true));
        set_condition(pod, "Ready", ready && gates, &now);
    }

    /// The daemon of a Pod's node, if there is one: while the Pod is out of its Services, it stops containers with an
    /// outdated environment; it reports what the others were started with.
    pub fn run_daemon(&mut self, name: &str) {
        let Some(pod) = self.pods.get_mut(name).filter(|_| self.has_daemon) else {
            return;
        };
        let observed = Pod::from_json(pod);
        let gate = observed.condition(keys::IN_PLACE_UPDATE_READY);
        let out_of_service = gate.is_some_and(|c| !c.is_true);
        let containers = pod["spec"]["containers"].as_array().cloned().unwrap();
        let mut reported = Vec::new();
        let statuses = pod["status"]["containerStatuses"].as_array_mut();
        for (status, container) in statuses.into_iter().flatten().zip(&containers) {
            let Some(image) = status["started"].as_str() else {
                continue;
            };
            if out_of_service && status["env"] != expected_env(container, &observed) {
                status["started"] = Value::Null;
                status["ready"] = json!(false);
                continue;
            }
            let (name, env) = (
                status["name"].as_str().unwrap(),
                status["env"].as_object().unwrap(),
            );
            let env = env
                .iter()
                .map(|(name, value)| (name.as_str(), value.as_str().unwrap()));
            let hashes = json!({
                "plainHash": plain_hash(name, image), "extractedEnvFromMetadataHash": env_hash(env),
            });
            reported.push(json!({
                "name": name, "containerID": status["containerID"], "restartCount": 0, "hashes": hashes,
            }));
        }
        if !observed.container_statuses.is_empty() {
            let annotation = json!({ "containers": reported }).to_string();
            pod["metadata"]["annotations"][keys::RUNTIME_CONTAINERS_META] = json!(annotation);
        }
    }
}

/// The environment from the Pod's labels and annotations of a container that starts now.
pub(super) fn expected_env(container: &Value, pod: &Pod) -> Value {
    let variables = env_from_metadata(container).into_iter();
    variables
        .map(|(name, origin)| (name, json!(origin.value(&pod.metadata()))))
        .collect()
}

/// Runs a container; one that must be started gets this ID and environment.
fn run_container(status: &mut Value, container: &Value, id: u64, env: Value) {
    let resized = status["resources"] != container["resources"];
    status["resources"] = container["resources"].clone();
    let image = container["image"].as_str().unwrap();
    if status["started"] != image && image.ends_with("bad") {
        // The old container is stopped before the new image is pulled.
        status["started"] = Value::Null;
        status["ready"] = json!(false);
        status["state"] = json!({ "waiting": { "reason": "ImagePullBackOff" } });
        return;
    }
    if status["started"] != image || (resized && container["resizePolicy"].is_array()) {
        start_container(status, image, id, env);
    }
    status["ready"] = json!(true);
    status["state"] = json!({ "running": {} });
}

fn start_container(status: &mut Value, image: &str, id: u64, env: Value) {
    status["started"] = json!(image);
    status["env"] = env;
    status["containerID"] = json!(format!("containerd://{id}"));
    status["image"] = json!(image);
    status["imageID"] = json!(format!("sha256:{image}"));
}

fn set_condition(pod: &mut Value, type_: &str, is_true: bool, now: &str) {
    if Pod::from_json(pod)
        .condition(type_)
        .is_some_and(|c| c.is_true == is_true)
    {
        return;
    }
    let status = if is_true { "True" } else { "False" };
    let new =
        json!({ "type": type_, "status": status, "lastTransitionTime": now, "reason": "", "message": "" });
    apply(pod, &json!({ "status": { "conditions": [new] } }));
}

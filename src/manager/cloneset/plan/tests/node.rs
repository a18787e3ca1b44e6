//! The node of the model: what its kubelet does, and what happens to containers.

use serde_json::{Value, json};

use super::world::World;
use crate::in_place::Pod;
use crate::in_place::tests::apply;

impl World {
    /// A container ends by itself and is started again as it was.
    pub fn crash(&mut self, name: &str) {
        let id = self.fresh();
        let Some(pod) = self.pods.get_mut(name) else {
            return;
        };
        if pod["status"]["containerStatuses"]
            .get(0)
            .is_some_and(|s| s["started"].is_string())
        {
            pod["status"]["containerStatuses"][0]["containerID"] = json!(format!("containerd://{id}"));
        }
    }

    /// The kubelet of a Pod does what there is to do.
    pub fn kubelet(&mut self, name: &str) {
        let now = self.now.to_string();
        let containers = self.pods.get(name).map(|pod| pod["spec"]["containers"].clone());
        let containers = containers.as_ref().and_then(Value::as_array);
        let ids: Vec<u64> = containers
            .iter()
            .flat_map(|c| c.iter())
            .map(|_| self.fresh())
            .collect();
        let Some(pod) = self.pods.get_mut(name) else {
            return;
        };
        pod["spec"]["nodeName"] = json!("node");
        pod["status"]["phase"] = json!("Running");
        let mut ready = true;
        for (at, (container, id)) in containers.into_iter().flatten().zip(ids).enumerate() {
            if pod["status"]["containerStatuses"].is_null() {
                pod["status"]["containerStatuses"] = json!([]);
            }
            let statuses = pod["status"]["containerStatuses"].as_array_mut().unwrap();
            if statuses.len() == at {
                statuses.push(json!({ "name": container["name"], "ready": false, "restartCount": 0 }));
            }
            run(&mut statuses[at], container, id);
            ready &= statuses[at]["ready"] == true;
        }
        condition(pod, "ContainersReady", ready, &now);
        let seen = Pod::of(pod);
        let gates = seen
            .gates
            .iter()
            .all(|gate| seen.condition(gate).is_some_and(|c| c.holds));
        condition(pod, "Ready", ready && gates, &now);
    }
}

/// Runs a container; one that is to be started has this id.
fn run(status: &mut Value, container: &Value, id: u64) {
    status["resources"] = container["resources"].clone();
    let image = container["image"].as_str().unwrap();
    if status["started"] != image && image.ends_with("bad") {
        // The old container is ended before the new image is pulled.
        status["started"] = Value::Null;
        status["ready"] = json!(false);
        status["state"] = json!({ "waiting": { "reason": "ImagePullBackOff" } });
        return;
    }
    if status["started"] != image {
        status["started"] = json!(image);
        status["containerID"] = json!(format!("containerd://{id}"));
        status["image"] = json!(image);
        status["imageID"] = json!(format!("sha256:{image}"));
    }
    status["ready"] = json!(true);
    status["state"] = json!({ "running": {} });
}

fn condition(pod: &mut Value, type_: &str, holds: bool, now: &str) {
    if Pod::of(pod).condition(type_).is_some_and(|c| c.holds == holds) {
        return;
    }
    let status = if holds { "True" } else { "False" };
    let new =
        json!({ "type": type_, "status": status, "lastTransitionTime": now, "reason": "", "message": "" });
    apply(pod, &json!({ "status": { "conditions": [new] } }));
}

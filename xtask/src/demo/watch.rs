//! Watches of the objects that the demo shows.

use std::process::Child;
use std::sync::mpsc::Sender;
use std::thread;

use anyhow::Result;
use serde_json::Value;

use super::spawn_with_output;
use testbed::cluster::Node;

/// One container as the Pod's status shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerSnapshot {
    /// The container ID, with the runtime as scheme.
    pub id: String,
    /// Number of restarts by kubelet.
    pub restarts: i64,
    /// `waiting`, `running` or `terminated`, with the exit code.
    pub state: String,
}

impl ContainerSnapshot {
    /// The first characters of the ID.
    pub fn short_id(&self) -> &str {
        let id = self.id.rsplit('/').next().unwrap_or_default();
        id.get(..12).unwrap_or(id)
    }
}

/// The first container of a Pod.
pub fn first_container(pod: &Value) -> ContainerSnapshot {
    container_snapshot(&pod["status"]["containerStatuses"][0])
}

/// The container that has this status.
pub fn container_snapshot(status: &Value) -> ContainerSnapshot {
    let state = status["state"].as_object().and_then(|s| s.iter().next());
    let state = state.map_or_else(String::new, |(name, detail)| match detail["exitCode"].as_i64() {
        Some(code) => format!("{name} with exit code {code}"),
        None => name.clone(),
    });
    ContainerSnapshot {
        id: status["containerID"].as_str().unwrap_or_default().to_owned(),
        restarts: status["restartCount"].as_i64().unwrap_or_default(),
        state,
    }
}

/// Whether a Pod is ready.
pub fn pod_is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.is_some_and(|all| all.iter().any(|c| c["type"] == "Ready" && c["status"] == "True"))
}

/// Sends each state of the objects that the arguments select, until the returned process is ended.
pub fn watch_objects(node: &Node, arguments: &[&str], events_tx: Sender<Value>) -> Result<Child> {
    let mut kubectl = node.plane.kubectl_command();
    kubectl.arg("get").args(arguments).args(["-o", "json"]);
    let (child, output) = spawn_with_output(&kubectl)?;
    thread::spawn(move || {
        for object in serde_json::Deserializer::from_reader(output)
            .into_iter::<Value>()
            .map_while(Result::ok)
        {
            if events_tx.send(object).is_err() {
                break;
            }
        }
    });
    Ok(child)
}

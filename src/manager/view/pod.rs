//! A Pod, reduced.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};

use crate::api::keys;

/// What the manager knows of a Pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodView {
    /// Identity of the object.
    pub uid: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// The node it is on, once it is.
    pub node: Option<String>,
    /// Whether it is being deleted.
    pub deleting: bool,
    /// Whether it has ended: phase Succeeded or Failed.
    pub ended: bool,
    /// Whether it has readiness gate `KruisePodReady`.
    pub gate: bool,
    /// Status of condition `KruisePodReady`, where there is one.
    pub kruise_ready: Option<bool>,
    /// What is known of its containers, restartable init containers included.
    pub containers: Vec<ContainerView>,
}

/// What the Pod's status says of one container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerView {
    /// Its name.
    pub name: String,
    /// Its ID, as `RUNTIME://ID`; empty while there is none.
    pub id: String,
    /// Whether it is ready.
    pub ready: bool,
    /// Whether it runs.
    pub running: bool,
    /// How often it was restarted.
    pub restarts: i32,
}

impl PodView {
    /// Whether its containers run or will run.
    #[must_use]
    pub fn active(&self) -> bool {
        !self.deleting && !self.ended
    }
}

impl From<Pod> for PodView {
    fn from(pod: Pod) -> Self {
        let spec = pod.spec.unwrap_or_default();
        let status = pod.status.unwrap_or_default();
        let gates = spec.readiness_gates.unwrap_or_default();
        let kruise_ready = status
            .conditions
            .unwrap_or_default()
            .into_iter()
            .find(|c| c.type_ == keys::KRUISE_POD_READY)
            .map(|c| c.status == "True");
        let mut containers = status.container_statuses.unwrap_or_default();
        containers.extend(status.init_container_statuses.unwrap_or_default());
        Self {
            uid: pod.metadata.uid.unwrap_or_default(),
            labels: pod.metadata.labels.unwrap_or_default(),
            node: spec.node_name.filter(|n| !n.is_empty()),
            deleting: pod.metadata.deletion_timestamp.is_some(),
            ended: matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")),
            gate: gates.iter().any(|g| g.condition_type == keys::KRUISE_POD_READY),
            kruise_ready,
            containers: containers.into_iter().map(container).collect(),
        }
    }
}

fn container(status: ContainerStatus) -> ContainerView {
    ContainerView {
        name: status.name,
        id: status.container_id.unwrap_or_default(),
        ready: status.ready,
        running: status.state.is_some_and(|s| s.running.is_some()),
        restarts: status.restart_count,
    }
}

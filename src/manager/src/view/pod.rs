//! A Pod, reduced.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::Value;

use super::job_pod::{by_name, ended_for_good};
use super::ports::{NamedPort, named_ports};
use super::raw_pod::{RawPod, items, text};
use super::{JobPod, LivenessPod, ReportedProbes, Workload};
use kruise_api::cloneset::string_map;
use kruise_api::keys;
use kruise_api::owner::{Owner, OwnerKind};
use kruise_api::restart_policy::RestartPolicy;
use kruise_workload::in_place;
use kruise_workload::not_ready_reason::CONFIG_ERROR;
pub use kruise_workload::pod_admission::launch_priority::{barrier_config_map, barrier_key};

/// What the manager caches of a Pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodView {
    /// UID of the Pod.
    pub uid: String,
    /// When it was created.
    pub created: Option<Timestamp>,
    /// Kind and UID of its controller.
    pub controller: Option<(OwnerKind, Box<str>)>,
    /// Labels of the Pod.
    pub labels: Arc<BTreeMap<String, String>>,
    /// Node that it is assigned to.
    pub node: Option<String>,
    /// Whether it has a `deletionTimestamp`.
    pub terminating: bool,
    /// Whether it has ended: phase Succeeded or Failed.
    pub terminal: bool,
    /// Whether its condition `Ready` is true.
    pub ready: bool,
    /// Whether its init containers have ended.
    pub initialized: bool,
    /// Its address; empty before it has one.
    pub ip: Box<str>,
    /// The ports of its containers that have a name.
    pub ports: Box<[NamedPort]>,
    /// Whether it has readiness gate `KruisePodReady`.
    pub has_readiness_gate: bool,
    /// Status of condition `KruisePodReady`, if it exists.
    pub kruise_ready: Option<bool>,
    /// Statuses of its containers, including restartable init containers.
    pub containers: Vec<ContainerView>,
    /// Containers with a barrier of the Pod's own ConfigMap that have not ended for good, and their launch priorities;
    /// once all may start, those that kubelet cannot create: their ConfigMap may have been deleted.
    pub barriers: Vec<(String, i64)>,
    /// Whether all containers were allowed to start.
    pub launched: bool,
    /// The Pod, if it runs to completion and has sidecars that are terminated after its other containers.
    pub job: Option<Box<JobPod>>,
    /// The workload of our API group that controls it.
    pub workload: Option<Box<Workload>>,
    /// Its liveness probes, if the daemon runs them; such a workload controls it.
    pub liveness: Option<Box<LivenessPod>>,
    /// Its probes, if the provider of a virtual node may run them.
    pub reported_probes: Option<Box<ReportedProbes>>,
    /// What a workload needs; only for Pods that a CloneSet controls, for orphans, and for Pods that record SidecarSets.
    pub workload_pod: Option<Arc<in_place::Pod>>,
}

/// The status of one container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerView {
    /// Name of the container.
    pub name: String,
    /// Container ID, `RUNTIME://ID`; empty before there is one.
    pub id: String,
    /// Whether it is ready.
    pub ready: bool,
    /// Whether it is running.
    pub running: bool,
    /// Number of restarts.
    pub restarts: i32,
}

impl PodView {
    /// Whether its containers run or will run.
    #[must_use]
    pub fn active(&self) -> bool {
        !self.terminating && !self.terminal
    }

    /// Whether a CloneSet controls it.
    #[must_use]
    pub fn controlled_by_clone_set(&self) -> bool {
        self.clone_set_pod().is_some_and(|pod| pod.controller.is_some())
    }

    /// The Pod if a CloneSet controls it, or it is an orphan.
    #[must_use]
    pub fn clone_set_pod(&self) -> Option<&Arc<in_place::Pod>> {
        let pod = self.workload_pod.as_ref()?;
        may_belong_to_clone_set(pod.controller.as_ref()).then_some(pod)
    }
}

impl From<&RawPod> for PodView {
    fn from(pod: &RawPod) -> Self {
        let json = pod.json();
        let (meta, spec, status) = (&json["metadata"], &json["spec"], &json["status"]);
        let mut kruise_ready = items(&status["conditions"])
            .filter(|c| c["type"] == keys::KRUISE_POD_READY)
            .map(|c| c["status"] == "True");
        let of_our_group = Workload::from_references(&meta["ownerReferences"]).map(Box::new);
        let ports = named_ports(spec);
        let containers = items(&status["containerStatuses"]).chain(items(&status["initContainerStatuses"]));
        let controller = Owner::controller_from_json(&meta["ownerReferences"]);
        let is_true =
            |type_: &str| items(&status["conditions"]).any(|c| c["type"] == type_ && c["status"] == "True");
        let workload =
            is_workload_pod(meta, controller.as_ref()).then(|| Arc::new(in_place::Pod::from_json(json)));
        let labels = workload.as_ref().map(|pod| Arc::clone(&pod.labels));
        Self {
            uid: text(&meta["uid"]),
            created: meta["creationTimestamp"]
                .as_str()
                .and_then(|time| time.parse().ok()),
            controller: controller.map(|owner| (owner.kind, owner.uid.into_boxed_str())),
            labels: labels.unwrap_or_else(|| Arc::new(string_map(&meta["labels"]))),
            node: Some(text(&spec["nodeName"])).filter(|n| !n.is_empty()),
            terminating: meta["deletionTimestamp"].is_string(),
            terminal: matches!(status["phase"].as_str(), Some("Succeeded" | "Failed")),
            ready: is_true("Ready"),
            initialized: is_true("Initialized"),
            ip: status["podIP"].as_str().unwrap_or_default().into(),
            has_readiness_gate: items(&spec["readinessGates"])
                .any(|g| g["conditionType"] == keys::KRUISE_POD_READY),
            kruise_ready: kruise_ready.next(),
            containers: containers.map(container).collect(),
            barriers: barriers(json),
            launched: is_launched(meta),
            job: JobPod::from_json(json).map(Box::new),
            liveness: of_our_group
                .as_ref()
                .and_then(|_| LivenessPod::from_json(json, &ports))
                .map(Box::new),
            reported_probes: ReportedProbes::from_json(json).map(Box::new),
            workload: of_our_group,
            ports,
            workload_pod: workload,
        }
    }
}

/// Whether a CloneSet controls the Pod, it is an orphan, or it records SidecarSets.
fn is_workload_pod(meta: &Value, controller: Option<&Owner>) -> bool {
    let recorded = meta["annotations"][keys::SIDECAR_SET_INJECTED_LIST].as_str();
    recorded.is_some_and(|sets| !sets.is_empty()) || may_belong_to_clone_set(controller)
}

fn may_belong_to_clone_set(controller: Option<&Owner>) -> bool {
    controller.is_none_or(|owner| owner.kind == OwnerKind::CloneSet)
}

fn is_launched(meta: &Value) -> bool {
    meta["annotations"][keys::CONTAINER_LAUNCH_COMPLETED] == keys::TRUE
}

fn barriers(pod: &Value) -> Vec<(String, i64)> {
    let meta = &pod["metadata"];
    let is_launched = is_launched(meta);
    let policy = RestartPolicy::parse(pod["spec"]["restartPolicy"].as_str()).unwrap_or(RestartPolicy::Always);
    let statuses = by_name(&pod["status"]["containerStatuses"]);
    let may_wait = |container: &&Value| {
        let status = container["name"].as_str().and_then(|name| statuses.get(name));
        let state = status.map(|status| &status["state"]);
        if is_launched {
            return state.is_some_and(|state| state["waiting"]["reason"] == CONFIG_ERROR);
        }
        // It will not be ready again, and the others would wait for ever.
        state.is_none_or(|state| !ended_for_good(container, policy, state))
    };
    let behind_barrier = |container: &Value| {
        let map = barrier_config_map(meta["name"].as_str()?);
        let barriers = items(&container["env"]).filter(|v| v["name"] == keys::ENV_CONTAINER_BARRIER);
        let from = barriers.map(|v| &v["valueFrom"]["configMapKeyRef"]);
        // Other barriers are not ours to lift.
        let own = from.filter(|from| from["name"] == *map);
        let priorities = own.filter_map(|from| {
            let key = from["key"].as_str()?;
            in_place::barrier_priority(key).filter(|priority| barrier_key(*priority) == key)
        });
        Some((text(&container["name"]), priorities.last()?))
    };
    items(&pod["spec"]["containers"])
        .filter(may_wait)
        .filter_map(behind_barrier)
        .collect()
}

fn container(status: &Value) -> ContainerView {
    ContainerView {
        name: text(&status["name"]),
        id: text(&status["containerID"]),
        ready: status["ready"] == true,
        running: status["state"]["running"].is_object(),
        restarts: status["restartCount"]
            .as_i64()
            .and_then(|count| count.try_into().ok())
            .unwrap_or_default(),
    }
}

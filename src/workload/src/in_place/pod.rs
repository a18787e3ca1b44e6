//! A Pod, reduced to the fields that decisions need.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::Value;

use kruise_api::cloneset::string_map;
use kruise_api::container_hash::{EnvOrigin, PodMetadata, env_from_metadata, plain_hash_before_131};
use kruise_api::keys;
use kruise_api::owner::Owner;

/// What a workload observes of one of its Pods.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pod {
    /// UID of the Pod.
    pub uid: String,
    /// Name of the Pod.
    pub name: String,
    /// Version for conditional writes.
    pub resource_version: String,
    /// Generation of its spec; 0 if the API server does not count it.
    pub generation: i64,
    /// Generation that kubelet's status is of; `None` before Kubernetes 1.34.
    pub observed_generation: Option<i64>,
    /// Labels of the Pod.
    pub labels: Arc<BTreeMap<String, String>>,
    /// Annotations of the Pod.
    pub annotations: BTreeMap<String, String>,
    /// Finalizers of the Pod.
    pub finalizers: Vec<String>,
    /// Time of its creation.
    pub created: Option<Timestamp>,
    /// Whether it has a `deletionTimestamp`.
    pub terminating: bool,
    /// Controller owner reference of the Pod.
    pub controller: Option<Owner>,
    /// Node that it is assigned to.
    pub node: Option<String>,
    /// `status.phase` of the Pod.
    pub phase: String,
    /// Readiness gates of the Pod.
    pub readiness_gates: Vec<String>,
    /// Containers, without init containers.
    pub containers: Vec<Container>,
    /// Conditions of the Pod.
    pub conditions: Vec<Condition>,
    /// What kubelet reports about the containers.
    pub container_statuses: Vec<ContainerStatus>,
    /// The first init container that waits.
    pub waiting_init_container: Option<Box<ContainerStatus>>,
}

/// A container of the Pod's spec.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Container {
    /// Name of the container.
    pub name: String,
    /// Image reference of the container.
    pub image: String,
    /// Resource limits and requests.
    pub resources: Resources,
    /// Resources whose change restarts it.
    pub restart_resources: Vec<String>,
    /// Environment variables from labels and annotations: name and source.
    pub env: Vec<(String, EnvOrigin)>,
    /// Launch priority; the highest starts first.
    pub priority: Option<i64>,
    /// Its hash as kubelet computed it before 1.31; `None` if no in-place update needs it.
    pub plain_before_131: Option<u64>,
}

/// Limits and requests by name; quantities as text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Maximum by resource name.
    pub limits: BTreeMap<String, String>,
    /// Minimum by resource name.
    pub requests: BTreeMap<String, String>,
}

/// A condition of a Pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    /// Type of the condition.
    pub type_: String,
    /// Whether its status is `True`.
    pub is_true: bool,
    /// Reason in CamelCase.
    pub reason: String,
    /// Message for people.
    pub message: String,
    /// Time of the last change of the status.
    pub since: Option<Timestamp>,
}

/// A container as kubelet last reported it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerStatus {
    /// Name of the container.
    pub name: String,
    /// Container ID, `RUNTIME://ID`; empty before there is one.
    pub id: String,
    /// Name of the image that it runs.
    pub image: String,
    /// ID of the image that it runs.
    pub image_id: String,
    /// Whether it is ready.
    pub ready: bool,
    /// Whether it is running.
    pub running: bool,
    /// Number of restarts.
    pub restarts: i64,
    /// kubelet's reason for not running it, if any.
    pub waiting: Option<String>,
    /// kubelet's message for that, if it never varies.
    pub waiting_message: Option<String>,
    /// Its last termination as kubelet reports it.
    pub last_termination: Option<String>,
    /// Resources from the runtime; `None` if kubelet does not report them.
    pub resources: Option<Resources>,
}

impl Pod {
    /// Parses a Pod of the API server. Missing fields are empty.
    #[must_use]
    pub fn from_json(pod: &Value) -> Self {
        let (meta, spec, status) = (&pod["metadata"], &pod["spec"], &pod["status"]);
        let annotations = string_map(&meta["annotations"]);
        let update_keys = [keys::IN_PLACE_UPDATE_STATE, keys::IN_PLACE_UPDATE_STATE_OLD];
        let has_update_state = update_keys.iter().any(|key| annotations.contains_key(*key));
        Self {
            uid: text(&meta["uid"]),
            name: text(&meta["name"]),
            resource_version: text(&meta["resourceVersion"]),
            generation: meta["generation"].as_i64().unwrap_or_default(),
            observed_generation: status["observedGeneration"].as_i64(),
            labels: Arc::new(string_map(&meta["labels"])),
            annotations,
            finalizers: list(&meta["finalizers"], text),
            created: time(&meta["creationTimestamp"]),
            terminating: meta["deletionTimestamp"].is_string(),
            controller: Owner::controller_from_json(&meta["ownerReferences"]),
            node: Some(text(&spec["nodeName"])).filter(|n| !n.is_empty()),
            phase: text(&status["phase"]),
            readiness_gates: list(&spec["readinessGates"], |gate| text(&gate["conditionType"])),
            containers: list(&spec["containers"], |container| Container {
                plain_before_131: has_update_state.then(|| plain_hash_before_131(container)),
                ..Container::from_json(container)
            }),
            conditions: list(&status["conditions"], Condition::from_json),
            container_statuses: list(&status["containerStatuses"], ContainerStatus::from_json),
            waiting_init_container: list(&status["initContainerStatuses"], ContainerStatus::from_json)
                .into_iter()
                .find(|status| status.waiting.is_some())
                .map(Box::new),
        }
    }

    /// Whether it has not ended and is not terminating.
    #[must_use]
    pub fn active(&self) -> bool {
        !self.terminating && !matches!(self.phase.as_str(), "Succeeded" | "Failed")
    }

    /// The condition of this type.
    #[must_use]
    pub fn condition(&self, type_: &str) -> Option<&Condition> {
        self.conditions.iter().find(|c| c.type_ == type_)
    }

    /// Whether the Pod has this readiness gate.
    #[must_use]
    pub fn has_readiness_gate(&self, gate: &str) -> bool {
        self.readiness_gates.iter().any(|g| g == gate)
    }

    /// What kubelet reports about a container.
    #[must_use]
    pub fn container_status(&self, container: &str) -> Option<&ContainerStatus> {
        self.container_statuses.iter().find(|s| s.name == container)
    }

    /// The labels and annotations that its environment is taken from.
    #[must_use]
    pub fn metadata(&self) -> PodMetadata<'_> {
        PodMetadata {
            labels: &self.labels,
            annotations: &self.annotations,
        }
    }

    /// Whether condition Ready is True.
    #[must_use]
    pub fn condition_ready(&self) -> bool {
        self.condition("Ready").is_some_and(|c| c.is_true)
    }
}

impl Container {
    /// Parses a container (raw JSON of `v1.Container`), without its hash.
    #[must_use]
    pub fn from_json(container: &Value) -> Self {
        let restarting = |policy: &Value| {
            (policy["restartPolicy"] == "RestartContainer").then(|| text(&policy["resourceName"]))
        };
        Self {
            name: text(&container["name"]),
            image: text(&container["image"]),
            resources: Resources::from_json(&container["resources"]),
            restart_resources: list(&container["resizePolicy"], restarting)
                .into_iter()
                .flatten()
                .collect(),
            env: env_from_metadata(container),
            priority: priority(container),
            plain_before_131: None,
        }
    }
}

/// The launch priority of a container (raw JSON of `v1.Container`). It is part of the key that the barrier's
/// environment variable reads.
#[must_use]
pub fn priority(container: &Value) -> Option<i64> {
    let variables = container["env"].as_array()?;
    let barrier = variables
        .iter()
        .find(|v| v["name"] == keys::ENV_CONTAINER_BARRIER)?;
    barrier_priority(barrier["valueFrom"]["configMapKeyRef"]["key"].as_str()?)
}

/// The launch priority in a barrier's key.
#[must_use]
pub fn barrier_priority(key: &str) -> Option<i64> {
    key.strip_prefix(keys::CONTAINER_BARRIER_PREFIX)?.parse().ok()
}

impl Resources {
    /// Parses `v1.ResourceRequirements`.
    #[must_use]
    pub fn from_json(resources: &Value) -> Self {
        Self {
            limits: quantities(&resources["limits"]),
            requests: quantities(&resources["requests"]),
        }
    }
}

impl Condition {
    fn from_json(condition: &Value) -> Self {
        Self {
            type_: text(&condition["type"]),
            is_true: condition["status"] == "True",
            reason: text(&condition["reason"]),
            message: text(&condition["message"]),
            since: time(&condition["lastTransitionTime"]),
        }
    }
}

impl ContainerStatus {
    fn from_json(status: &Value) -> Self {
        let (resources, waiting) = (&status["resources"], &status["state"]["waiting"]);
        Self {
            name: text(&status["name"]),
            id: text(&status["containerID"]),
            image: text(&status["image"]),
            image_id: text(&status["imageID"]),
            ready: status["ready"] == true,
            running: status["state"]["running"].is_object(),
            restarts: status["restartCount"].as_i64().unwrap_or_default(),
            waiting: Some(text(&waiting["reason"])).filter(|r| !r.is_empty()),
            waiting_message: waiting_message(waiting),
            last_termination: last_termination(status),
            resources: resources.is_object().then(|| Resources::from_json(resources)),
        }
    }
}

/// kubelet's message about a container that it cannot start. While it retries, messages hold counts and times, which
/// vary.
fn waiting_message(waiting: &Value) -> Option<String> {
    let reason = waiting["reason"].as_str()?;
    if reason.contains("BackOff") || reason.contains("Image") {
        return None;
    }
    let message = waiting["message"].as_str()?;
    let line = message.lines().map(str::trim).find(|line| !line.is_empty())?;
    Some(truncate(line).to_owned())
}

/// The last termination of a container: exit code, reason, and the end of its termination message.
fn last_termination(status: &Value) -> Option<String> {
    let states = [&status["state"]["terminated"], &status["lastState"]["terminated"]];
    let last = states.into_iter().find(|state| state.is_object())?;
    let mut summary = format!("exit code {}", last["exitCode"].as_i64().unwrap_or_default());
    let reason = last["reason"].as_str().unwrap_or_default();
    if !matches!(reason, "" | "Error" | "Completed") {
        summary += &format!(", {}", truncate(reason));
    }
    let message = last["message"].as_str().unwrap_or_default();
    let line = message.lines().rev().map(str::trim).find(|line| !line.is_empty());
    if let Some(line) = line {
        summary += &format!(": {}", truncate(line));
    }
    Some(summary)
}

/// Cuts a text to the length that is kept.
fn truncate(text: &str) -> &str {
    const MAX_BYTES: usize = 120;
    text.get(..text.floor_char_boundary(MAX_BYTES))
        .unwrap_or_default()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn time(value: &Value) -> Option<Timestamp> {
    value.as_str()?.parse().ok()
}

fn list<T>(value: &Value, parse: impl Fn(&Value) -> T) -> Vec<T> {
    value.as_array().into_iter().flatten().map(parse).collect()
}

/// A quantity may also be a JSON number.
fn quantities(map: &Value) -> BTreeMap<String, String> {
    let entries = map.as_object().into_iter().flatten();
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    entries.map(|(name, value)| (name.clone(), text(value))).collect()
}

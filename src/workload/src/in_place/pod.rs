//! A Pod, reduced to what decisions about it need.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::Value;

use kruise_api::cloneset::string_map;
use kruise_api::container_hash::{EnvOrigin, PodMetadata, env_from_metadata, plain_hash_before_131};
use kruise_api::keys;
use kruise_api::owner::Owner;

/// What a workload knows of one of its Pods.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pod {
    /// Identity of the object.
    pub uid: String,
    /// Its name.
    pub name: String,
    /// What a conditional write must name.
    pub resource_version: String,
    /// Generation of its spec; 0 where the API server does not count it.
    pub generation: i64,
    /// Generation of the spec that kubelet's status is of; `None` before Kubernetes 1.34.
    pub observed_generation: Option<i64>,
    /// Its labels.
    pub labels: Arc<BTreeMap<String, String>>,
    /// Its annotations.
    pub annotations: BTreeMap<String, String>,
    /// Its finalizers.
    pub finalizers: Vec<String>,
    /// When it was created.
    pub created: Option<Timestamp>,
    /// Whether it is being deleted.
    pub deleting: bool,
    /// The controller that it belongs to.
    pub controller: Option<Owner>,
    /// Node that it is assigned to.
    pub node: Option<String>,
    /// Its phase.
    pub phase: String,
    /// Its readiness gates.
    pub readiness_gates: Vec<String>,
    /// Its containers, without those that only initialise it.
    pub containers: Vec<Container>,
    /// Its conditions.
    pub conditions: Vec<Condition>,
    /// What kubelet says of the containers.
    pub container_statuses: Vec<ContainerStatus>,
    /// The first of the containers that initialise it which waits.
    pub waiting_init_container: Option<Box<ContainerStatus>>,
}

/// A container as the Pod's spec has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Container {
    /// Its name.
    pub name: String,
    /// Its image.
    pub image: String,
    /// Limits and requests.
    pub resources: Resources,
    /// Resources whose change restarts it.
    pub restart_resources: Vec<String>,
    /// Environment taken from labels and annotations: name and origin.
    pub env: Vec<(String, EnvOrigin)>,
    /// Its launch priority; the highest is first.
    pub priority: Option<i64>,
    /// Its hash as kubelet took it before 1.31; `None` where no update in place may ask for it.
    pub plain_before_131: Option<u64>,
}

/// Limits and requests by name; quantities as text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Limits.
    pub limits: BTreeMap<String, String>,
    /// Requests.
    pub requests: BTreeMap<String, String>,
}

/// One thing that holds of a Pod, or does not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Condition {
    /// The condition's type.
    pub type_: String,
    /// Whether its status is `True`.
    pub is_true: bool,
    /// Why, in a word.
    pub reason: String,
    /// Why, in a sentence.
    pub message: String,
    /// When the status last changed.
    pub since: Option<Timestamp>,
}

/// A container as kubelet last saw it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerStatus {
    /// Its name.
    pub name: String,
    /// ID of the container, as `RUNTIME://ID`; empty before there is one.
    pub id: String,
    /// Name of the image that it runs.
    pub image: String,
    /// ID of the image that it runs.
    pub image_id: String,
    /// Whether it is ready.
    pub ready: bool,
    /// Whether it runs.
    pub running: bool,
    /// How often it was restarted.
    pub restarts: i64,
    /// Why it does not run, if kubelet says so.
    pub waiting: Option<String>,
    /// What kubelet adds to that, where it is always the same.
    pub waiting_message: Option<String>,
    /// How it ended last, in kubelet's words, if it did.
    pub last_termination: Option<String>,
    /// What the runtime gives it; `None` when kubelet does not say.
    pub resources: Option<Resources>,
}

impl Pod {
    /// Reads a Pod as the API server serves it. What is missing is empty.
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
            deleting: meta["deletionTimestamp"].is_string(),
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

    /// Whether it has not ended, and is not being deleted.
    #[must_use]
    pub fn active(&self) -> bool {
        !self.deleting && !matches!(self.phase.as_str(), "Succeeded" | "Failed")
    }

    /// The condition of this type.
    #[must_use]
    pub fn condition(&self, type_: &str) -> Option<&Condition> {
        self.conditions.iter().find(|c| c.type_ == type_)
    }

    /// Whether it has this readiness gate.
    #[must_use]
    pub fn has_readiness_gate(&self, gate: &str) -> bool {
        self.readiness_gates.iter().any(|g| g == gate)
    }

    /// What kubelet says of a container.
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

    /// Whether condition Ready is true.
    #[must_use]
    pub fn condition_ready(&self) -> bool {
        self.condition("Ready").is_some_and(|c| c.is_true)
    }
}

impl Container {
    /// Reads a container (raw JSON of `v1.Container`), but for its hash.
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

/// The launch priority of a container (raw JSON of `v1.Container`), which stands in the key that the barrier's environment
/// variable is taken from.
#[must_use]
pub fn priority(container: &Value) -> Option<i64> {
    let variables = container["env"].as_array()?;
    let barrier = variables
        .iter()
        .find(|v| v["name"] == keys::ENV_CONTAINER_BARRIER)?;
    let key = barrier["valueFrom"]["configMapKeyRef"]["key"].as_str()?;
    key.strip_prefix(keys::CONTAINER_BARRIER_PREFIX)?.parse().ok()
}

impl Resources {
    /// Reads `v1.ResourceRequirements`.
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

/// What kubelet says of a container that it cannot start. Where it tries again it counts, and names times.
fn waiting_message(waiting: &Value) -> Option<String> {
    let reason = waiting["reason"].as_str()?;
    if reason.contains("BackOff") || reason.contains("Image") {
        return None;
    }
    let message = waiting["message"].as_str()?;
    let line = message.lines().map(str::trim).find(|line| !line.is_empty())?;
    Some(truncate(line).to_owned())
}

/// How a container ended last: its exit code, the reason, and the end of what it wrote as its last message.
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

/// As much of a text as is kept.
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

/// A quantity may be written as a number.
fn quantities(map: &Value) -> BTreeMap<String, String> {
    let entries = map.as_object().into_iter().flatten();
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    entries.map(|(name, value)| (name.clone(), text(value))).collect()
}

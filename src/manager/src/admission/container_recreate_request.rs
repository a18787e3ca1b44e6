//! Validates a new ContainerRecreateRequest against its Pod and records the running containers in it.
//!
//! The daemon trusts only the container ID in this record, which identifies what was running; it takes hooks and ports
//! from the Pod itself.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{
    Container, ContainerPort, ContainerStatus, Lifecycle, LifecycleHandler, Pod, PodSpec, PodStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde::Deserialize;
use serde_json::{Value, json};

use super::review::{Decision, Request};
use kruise_api::container_recreate_request::{MAX_CONTAINER_ID_BYTES, MAX_REQUEST_BYTES};
use kruise_api::json::{estimate_memory, set, set_default};
use kruise_api::owner::{Owner, OwnerKind};
use kruise_api::validation::FieldErrors;
use kruise_api::{keys, names};
use kruise_cluster::ObjectView;

/// Maximum number of containers in one request; a Pod has few.
const MAX_CONTAINERS: usize = 256;

/// The result of the lookups for a request.
#[derive(Clone, Debug, Default)]
pub(super) struct PodLookup {
    /// The Pod that the request names, if it exists.
    pub pod: Option<Pod>,
    /// Whether the Pod is on a virtual node, where no daemon runs.
    pub virtual_node: bool,
}

/// The fields of a Pod that are parsed: the rest, such as its environment, may take a hundred times the memory of its
/// JSON.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Target {
    metadata: TargetMetadata,
    spec: Option<TargetSpec>,
    status: Option<PodStatus>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct TargetMetadata {
    uid: Option<String>,
    deletion_timestamp: Option<Time>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct TargetSpec {
    node_name: Option<String>,
    termination_grace_period_seconds: Option<i64>,
    containers: Vec<TargetContainer>,
    init_containers: Option<Vec<TargetContainer>>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct TargetContainer {
    name: String,
    lifecycle: Option<TargetLifecycle>,
    ports: Option<Vec<ContainerPort>>,
    restart_policy: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct TargetLifecycle {
    pre_stop: Option<LifecycleHandler>,
}

impl ObjectView for Target {
    type Kind = Pod;
}

impl From<Target> for Pod {
    fn from(target: Target) -> Self {
        let Target {
            metadata,
            spec,
            status,
        } = target;
        let spec = spec.map(|spec| PodSpec {
            node_name: spec.node_name,
            termination_grace_period_seconds: spec.termination_grace_period_seconds,
            containers: spec.containers.into_iter().map(Container::from).collect(),
            init_containers: spec
                .init_containers
                .map(|all| all.into_iter().map(Container::from).collect()),
            ..PodSpec::default()
        });
        Self {
            metadata: ObjectMeta {
                uid: metadata.uid,
                deletion_timestamp: metadata.deletion_timestamp,
                ..ObjectMeta::default()
            },
            spec,
            status,
        }
    }
}

impl From<TargetContainer> for Container {
    fn from(container: TargetContainer) -> Self {
        let lifecycle = container.lifecycle.map(|lifecycle| Lifecycle {
            pre_stop: lifecycle.pre_stop,
            ..Lifecycle::default()
        });
        Self {
            name: container.name,
            lifecycle,
            ports: container.ports,
            restart_policy: container.restart_policy,
            ..Self::default()
        }
    }
}

/// Admits or rejects the request, and sets its defaults.
pub(super) fn decide(request: &Request, lookup: &PodLookup) -> Decision {
    let mut errors = FieldErrors::default();
    let mut object = request.object.to_json();
    let spec = &request.object["spec"];
    let node = match check_pod(request, lookup.pod.as_ref()) {
        Ok(node) => node,
        Err(why) => {
            errors.add("spec.podName", &spec["podName"], why);
            return Decision::from_errors(errors, object, Vec::new());
        }
    };
    let Some(pod) = &lookup.pod else {
        return Decision::from_errors(errors, object, Vec::new());
    };
    check_containers(spec, pod, &mut errors);
    let id = &request.object["metadata"]["annotations"][keys::CRR_CONTAINER_ID];
    if id.as_str().is_some_and(|id| id.len() > MAX_CONTAINER_ID_BYTES) {
        let field = format!("metadata.annotations[{}]", keys::CRR_CONTAINER_ID);
        errors.add(
            field,
            id,
            format!("must have at most {MAX_CONTAINER_ID_BYTES} bytes"),
        );
    }
    if !errors.is_empty() {
        return Decision::from_errors(errors, object, Vec::new());
    }
    set_defaults(&mut object, pod);
    let bytes = estimate_memory(object["spec"]["containers"].to_string().as_bytes());
    if bytes > MAX_REQUEST_BYTES {
        let why = format!(
            "with their preStop hooks, these containers would take {bytes} bytes of memory, \
             {MAX_REQUEST_BYTES} are the most; name fewer"
        );
        errors.add("spec.containers", &Value::Null, why);
        return Decision::from_errors(errors, object, Vec::new());
    }
    set_labels(&mut object, pod, node, lookup.virtual_node);
    Decision::from_errors(errors, object, Vec::new())
}

/// The Pod's node, or why the Pod cannot take requests.
fn check_pod<'a>(request: &Request, pod: Option<&'a Pod>) -> Result<&'a str, String> {
    let Some(pod) = pod else {
        return Err(match request.object["spec"]["podName"].as_str() {
            None | Some("") => "name the Pod whose containers should be recreated".to_owned(),
            Some(name) if !names::is_subdomain(name) => names::SUBDOMAIN.to_owned(),
            Some(_) => format!("there is no such Pod in namespace {:?}", request.namespace),
        });
    };
    let controller = Owner::controller_from_json(&request.object["metadata"]["ownerReferences"]);
    if controller
        .is_some_and(|owner| owner.kind == OwnerKind::Pod && Some(&owner.uid) != pod.metadata.uid.as_ref())
    {
        return Err("another Pod has this name now: it is not the controller of the request".to_owned());
    }
    // The creator may have seen the Pod that had this name before. A copy of a stored request has that Pod's labels, too,
    // but also its node: OpenKruise overwrites them.
    let label = |key: &str| request.object["metadata"]["labels"][key].as_str();
    let intended = label(keys::CRR_POD_UID).filter(|_| label(keys::CRR_NODE_NAME).is_none());
    if intended.is_some_and(|uid| Some(uid) != pod.metadata.uid.as_deref()) {
        return Err(format!(
            "another Pod has this name now: its UID is not that of the request's label {}; without the label, the \
             request is for the Pod of this name",
            keys::CRR_POD_UID
        ));
    }
    let status = pod.status.clone().unwrap_or_default();
    let sidecars_terminated = status
        .conditions
        .iter()
        .flatten()
        .any(|condition| condition.type_ == keys::SIDECAR_TERMINATED);
    let phase = status.phase.unwrap_or_default();
    if matches!(phase.as_str(), "Succeeded" | "Failed") && !sidecars_terminated {
        return Err(format!("the Pod has ended, its phase is {phase}"));
    }
    if pod.metadata.deletion_timestamp.is_some() && !sidecars_terminated {
        return Err("the Pod is being deleted".to_owned());
    }
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    node.filter(|node| !node.is_empty())
        .ok_or_else(|| "the Pod is not on a node yet".to_owned())
}

fn check_containers(spec: &Value, pod: &Pod, errors: &mut FieldErrors) {
    let requested = spec["containers"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    if requested.is_empty() {
        errors.add("spec.containers", &Value::Null, "name at least one container");
    }
    if requested.len() > MAX_CONTAINERS {
        errors.too_many("spec.containers", requested.len(), MAX_CONTAINERS);
        return;
    }
    let mut names = BTreeSet::new();
    for (index, container) in requested.iter().enumerate() {
        let field = format!("spec.containers[{index}]");
        let name = container["name"].as_str().unwrap_or_default();
        if let Err(why) = find_container(pod, name) {
            errors.add(format!("{field}.name"), &container["name"], why);
        } else if !names.insert(name) {
            errors.add(
                format!("{field}.name"),
                &container["name"],
                "this container is in the list twice",
            );
        }
        for read_only in ["preStop", "ports", "statusContext"] {
            if !container[read_only].is_null() {
                errors.add(
                    format!("{field}.{read_only}"),
                    &container[read_only],
                    "this field is read-only and filled in from the Pod; leave it out",
                );
            }
        }
    }
}

/// The container with that name and its status, or why it cannot be recreated.
fn find_container<'a>(pod: &'a Pod, name: &str) -> Result<(&'a Container, &'a ContainerStatus), String> {
    let spec = pod.spec.as_ref().ok_or("the Pod has no spec")?;
    let inits = spec.init_containers.iter().flatten();
    let sidecars = inits
        .clone()
        .filter(|init| init.restart_policy.as_deref() == Some("Always"));
    let all: Vec<_> = spec.containers.iter().chain(sidecars).collect();
    let Some(container) = all.iter().find(|container| container.name == name) else {
        let recreatable: Vec<_> = all.iter().map(|container| container.name.as_str()).collect();
        let recreatable = recreatable.join(", ");
        return Err(if inits.clone().any(|init| init.name == name) {
            format!(
                "this is an init container that runs only once; containers that can be recreated: {recreatable}"
            )
        } else {
            format!("the Pod has no such container; containers that can be recreated: {recreatable}")
        });
    };
    let status = pod.status.as_ref();
    let statuses = status
        .and_then(|status| status.container_statuses.as_ref())
        .into_iter()
        .flatten();
    let inits = status
        .and_then(|status| status.init_container_statuses.as_ref())
        .into_iter()
        .flatten();
    let status = statuses.chain(inits).find(|status| status.name == name);
    match status.filter(|status| status.container_id.as_deref().is_some_and(|id| !id.is_empty())) {
        Some(status) => Ok((container, status)),
        None => Err("this container has not been started yet, so there is nothing to recreate".to_owned()),
    }
}

/// Sets hooks, ports and identity of each container, and the defaults of the strategy.
fn set_defaults(object: &mut Value, pod: &Pod) {
    let Some(spec) = object.get_mut("spec") else {
        return;
    };
    set_default(spec, &["strategy", "failurePolicy"], json!("Fail"));
    let grace_period = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.termination_grace_period_seconds);
    if let Some(grace_period) = grace_period {
        // The field of the Pod has a wider type than ours.
        let grace_period = grace_period.min(i64::from(i32::MAX));
        set_default(
            spec,
            &["strategy", "terminationGracePeriodSeconds"],
            json!(grace_period),
        );
    }
    for requested in spec
        .get_mut("containers")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        let Ok((container, status)) = find_container(pod, requested["name"].as_str().unwrap_or_default())
        else {
            continue;
        };
        let hook = container
            .lifecycle
            .as_ref()
            .and_then(|lifecycle| lifecycle.pre_stop.as_ref());
        if let Some(hook) = hook {
            set_default(requested, &["preStop"], hook_to_json(hook));
            if hook.http_get.is_some() && container.ports.is_some() {
                set_default(requested, &["ports"], json!(container.ports));
            }
        }
        let context = json!({ "containerID": status.container_id, "restartCount": status.restart_count });
        set_default(requested, &["statusContext"], context);
    }
}

fn hook_to_json(hook: &LifecycleHandler) -> Value {
    // Every field is named, so that the compiler reports a new type of hook here.
    let LifecycleHandler {
        exec,
        http_get,
        sleep,
        tcp_socket,
    } = hook;
    let mut fields = json!({ "exec": exec, "httpGet": http_get, "sleep": sleep, "tcpSocket": tcp_socket });
    if let Some(all) = fields.as_object_mut() {
        all.retain(|_, hook| !hook.is_null());
    }
    fields
}

fn set_labels(object: &mut Value, pod: &Pod, node_name: &str, virtual_node: bool) {
    let mut labels = object["metadata"]["labels"]
        .as_object()
        .cloned()
        .unwrap_or_default();
    labels.insert(keys::CRR_ACTIVE.into(), json!(keys::TRUE));
    labels.insert(keys::CRR_NODE_NAME.into(), json!(keys::node_label(node_name)));
    labels.insert(keys::CRR_POD_UID.into(), json!(pod.metadata.uid));
    if virtual_node {
        labels.insert(keys::TYPE.into(), json!(keys::TYPE_VIRTUAL_KUBELET));
    }
    set(object, &["metadata", "labels"], Value::Object(labels));
}

#[cfg(test)]
mod tests;

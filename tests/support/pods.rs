//! Values that tests read from untyped Pods.

use std::collections::BTreeMap;

use serde_json::Value;

pub fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

pub fn name(pod: &Value) -> String {
    text(&pod["metadata"]["name"])
}

pub fn uid(pod: &Value) -> String {
    text(&pod["metadata"]["uid"])
}

pub fn label(pod: &Value, key: &str) -> String {
    text(&pod["metadata"]["labels"][key])
}

/// Its lifecycle state.
pub fn lifecycle_state(pod: &Value) -> String {
    label(pod, "lifecycle.apps.kruise.io/state")
}

/// Name of its ControllerRevision.
pub fn revision(pod: &Value) -> String {
    label(pod, "controller-revision-hash")
}

/// UID of each, by name.
pub fn uids_by_name<'a>(pods: impl IntoIterator<Item = &'a Value>) -> BTreeMap<String, String> {
    pods.into_iter().map(|pod| (name(pod), uid(pod))).collect()
}

pub fn condition<'a>(pod: &'a Value, type_: &str) -> &'a Value {
    let all = pod["status"]["conditions"].as_array().into_iter().flatten();
    all.into_iter()
        .find(|c| c["type"] == type_)
        .unwrap_or(&Value::Null)
}

pub fn condition_is_true(pod: &Value, type_: &str) -> bool {
    condition(pod, type_)["status"] == "True"
}

pub fn is_terminating(pod: &Value) -> bool {
    pod["metadata"]["deletionTimestamp"].is_string()
}

/// Whether it serves: ready, and not terminating.
pub fn is_serving(pod: &Value) -> bool {
    condition_is_true(pod, "Ready") && !is_terminating(pod)
}

/// The image of a container in the Pod's spec.
pub fn spec_image(pod: &Value, container: usize) -> String {
    text(&pod["spec"]["containers"][container]["image"])
}

/// Kubelet's status of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerStatus {
    pub id: String,
    pub image: String,
    pub restarts: i64,
    pub ready: bool,
}

/// Kubelet's status of the container of that name.
pub fn container_status(pod: &Value, name: &str) -> ContainerStatus {
    let all = pod["status"]["containerStatuses"]
        .as_array()
        .into_iter()
        .flatten();
    let found = all.into_iter().find(|one| one["name"] == name);
    found.map_or_else(ContainerStatus::default, |one| ContainerStatus {
        id: text(&one["containerID"]),
        image: text(&one["image"]),
        restarts: one["restartCount"].as_i64().unwrap_or_default(),
        ready: one["ready"] == true,
    })
}

/// Whether container `app` runs this image (given without registry), and the Pod's spec has it too.
pub fn runs_image(pod: &Value, image: &str) -> bool {
    let status = container_status(pod, "app");
    status.ready && status.image.ends_with(image) && spec_image(pod, 0) == image
}

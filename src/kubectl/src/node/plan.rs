//! What `node` reports about one node.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::image_reference::join_name_and_tag;
use kruise_api::node_image::{ImagePullPhase, NodeImage, RUNTIME_READY};
use kruise_api::node_pod_probe::{NodePodProbe, ProbeState};
use serde::Serialize;

use crate::conditions::find_true;
use crate::status::plan::{RecreateOutcome, is_ended_termination, recreate_outcome};
use kruise_api::container_recreate_request::WAITING;

/// What happens on a node. Its JSON is the output of `node -o json`.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// Name of the node.
    pub node: String,
    /// Why no container runtime of the node answers; empty unless its daemon has reported that.
    pub runtime_error: String,
    /// Images that are pulled, wait or have failed.
    pub pulls: Vec<Pull>,
    /// Number of images that are there.
    pub pulled: usize,
    /// Requests that are not finished or have failed.
    pub recreates: Vec<Recreate>,
    /// Probes of the node's Pods.
    pub probes: ProbeCounts,
    /// What could not be read.
    pub errors: Vec<String>,
}

/// An image that is not there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Pull {
    /// The image.
    pub image: String,
    /// Waiting, Pulling or Failed.
    pub phase: String,
    /// Percentage of the bytes that are on the node.
    pub progress: i32,
    /// When the pull began.
    pub start_time: Option<Time>,
    /// Why it waits or failed.
    pub message: String,
}

/// A request to recreate containers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Recreate {
    /// Namespace of the request.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its Pod.
    pub pod: String,
    /// Names of its containers.
    pub containers: Vec<String>,
    /// Pending, Recreating, Waiting or Failed.
    pub state: String,
    /// What it waits for, or why it failed.
    pub message: String,
}

/// Probes by their last result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProbeCounts {
    /// Pods with probes.
    pub pods: usize,
    /// Probes.
    pub total: usize,
    /// Probes that succeeded.
    pub succeeded: usize,
    /// Probes that failed.
    pub failed: usize,
    /// Probes without a result.
    pub unknown: usize,
}

/// The images of a node that are not there, and the number of those that are.
pub fn pulls(object: &NodeImage) -> (Vec<Pull>, usize) {
    let status = object.status.clone().unwrap_or_default();
    let (mut pulls, mut pulled) = (Vec::new(), 0);
    for (name, spec) in &object.spec.images {
        let tags = status.image_statuses.get(name).map(|image| image.tags.as_slice());
        for tag in &spec.tags {
            let mut reported = tags.unwrap_or_default().iter();
            let found = reported.find(|status| status.tag == tag.tag && status.version == tag.version);
            let image = join_name_and_tag(name, &tag.tag);
            match found {
                Some(status) if status.phase == ImagePullPhase::Succeeded => pulled += 1,
                Some(status) => pulls.push(Pull {
                    image,
                    phase: status.phase.to_string(),
                    progress: status.progress.clamp(0, 100),
                    start_time: status.start_time.clone(),
                    message: status.message.clone().unwrap_or_default(),
                }),
                None => pulls.push(Pull {
                    image,
                    phase: ImagePullPhase::Waiting.to_string(),
                    progress: 0,
                    start_time: None,
                    message: "kruise-daemon has not reported it yet".to_owned(),
                }),
            }
        }
    }
    (pulls, pulled)
}

/// Why no container runtime of the node answers, if its daemon has reported that.
pub fn runtime_error(object: &NodeImage) -> String {
    let mut conditions = object.status.iter().flat_map(|status| &status.conditions);
    let down = conditions.find(|condition| condition.type_ == RUNTIME_READY && condition.status == "False");
    down.map(|condition| condition.message.clone())
        .unwrap_or_default()
}

/// A request that is not finished or has failed.
pub fn recreate(request: &ContainerRecreateRequest) -> Option<Recreate> {
    let status = request.status.clone().unwrap_or_default();
    if is_ended_termination(request) {
        return None;
    }
    let (state, message) = match recreate_outcome(&status) {
        RecreateOutcome::Succeeded => return None,
        RecreateOutcome::Failed(_, message) => ("Failed".to_owned(), message),
        RecreateOutcome::Unfinished => match find_true(&status.conditions, WAITING) {
            Some(condition) => (WAITING.to_owned(), condition.message.to_owned()),
            None if status.phase.as_str().is_empty() => ("Pending".to_owned(), String::new()),
            None => (status.phase.to_string(), status.message.unwrap_or_default()),
        },
    };
    let containers = request.spec.containers.iter();
    Some(Recreate {
        namespace: request.metadata.namespace.clone().unwrap_or_default(),
        name: request.metadata.name.clone().unwrap_or_default(),
        pod: request.spec.pod_name.clone(),
        containers: containers.map(|container| container.name.clone()).collect(),
        state,
        message,
    })
}

/// The probes of a node by their last result.
pub fn probe_counts(object: &NodePodProbe) -> ProbeCounts {
    let status = object.status.clone().unwrap_or_default();
    let mut states = BTreeMap::new();
    for pod in &status.pod_probe_statuses {
        for probe in &pod.probe_states {
            states.insert((pod.uid.as_str(), probe.name.as_str()), &probe.state);
        }
    }
    let mut counts = ProbeCounts::default();
    for pod in object.spec.pod_probes.iter().filter(|pod| !pod.probes.is_empty()) {
        counts.pods += 1;
        for probe in &pod.probes {
            counts.total += 1;
            match states.get(&(pod.uid.as_str(), probe.name.as_str())) {
                Some(ProbeState::Succeeded) => counts.succeeded += 1,
                Some(ProbeState::Failed) => counts.failed += 1,
                _ => counts.unknown += 1,
            }
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn only_reports_of_the_requested_version_count() {
        let tag = |tag: &str, version: i64| json!({ "tag": tag, "version": version });
        let state = |tag: &str, version: i64, phase: &str| json!({ "tag": tag, "version": version, "phase": phase, "progress": 250, "message": phase });
        let object: NodeImage = serde_json::from_value(json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "NodeImage", "metadata": { "name": "n" },
            "spec": { "images": { "nginx": { "tags": [tag("1", 0), tag("2", 1), tag("3", 0), tag("4", 0)] } } },
            "status": { "desired": 4, "imageStatuses": { "nginx": { "tags": [
                state("1", 0, "Succeeded"), state("2", 0, "Succeeded"), state("3", 0, "Pulling"),
                state("4", 0, "Failed"), state("5", 0, "Failed") ] } } },
        }))
        .unwrap();
        let (found, pulled) = pulls(&object);
        let found: Vec<_> = found
            .iter()
            .map(|pull| (&*pull.image, &*pull.phase, pull.progress))
            .collect();
        let expected = [
            ("nginx:2", "Waiting", 0),
            ("nginx:3", "Pulling", 100),
            ("nginx:4", "Failed", 100),
        ];
        assert_eq!((&found[..], pulled), (&expected[..], 1));
    }

    #[test]
    fn runtime_that_does_not_answer_is_reported() {
        let error_with = |conditions: Value| {
            let object: NodeImage = serde_json::from_value(json!({
                "apiVersion": "apps.kruise.io/v1beta1", "kind": "NodeImage", "metadata": { "name": "n" },
                "spec": {}, "status": { "desired": 0, "conditions": conditions },
            }))
            .unwrap();
            runtime_error(&object)
        };
        let condition = |type_: &str, status: &str| {
            json!({ "type": type_, "status": status, "reason": "x",
            "message": "container runtime is down: x", "lastTransitionTime": "2026-01-01T00:00:00Z" })
        };
        assert_eq!(error_with(json!([])), "");
        assert_eq!(error_with(json!([condition("RuntimeReady", "True")])), "");
        let conditions = json!([condition("Other", "False"), condition("RuntimeReady", "False")]);
        assert_eq!(error_with(conditions), "container runtime is down: x");
    }

    #[test]
    fn sidecar_that_was_stopped_for_good_is_no_failure() {
        let request = |name: &str| -> ContainerRecreateRequest {
            let condition = json!({ "type": "Failed", "status": "True", "reason": "ContainersFailed",
                "message": "kubelet does not start it again", "lastTransitionTime": "2026-01-01T00:00:00Z" });
            serde_json::from_value(json!({
                "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
                "metadata": { "name": name }, "spec": { "podName": "p", "containers": [{ "name": "c" }] },
                "status": { "phase": "Completed", "completionTime": "2026-01-01T00:00:00Z",
                    "containerRecreateStates": [], "conditions": [condition] },
            }))
            .unwrap()
        };
        assert_eq!(
            recreate(&request("mine")).map(|shown| shown.state).as_deref(),
            Some("Failed")
        );
        assert!(recreate(&request("sidecar-termination-x")).is_none());
    }

    #[test]
    fn probes_are_counted_by_result() {
        let probe = |name: &str| json!({ "name": name, "containerName": "c", "probe": {} });
        let state = |name: &str, state: &str| json!({ "name": name, "state": state });
        let pod = |uid: &str, list: &str, probes: Value| json!({ "name": "p", "namespace": "n", "uid": uid, "IP": "", list: probes });
        let object: NodePodProbe = serde_json::from_value(json!({
            "apiVersion": "apps.kruise.io/v1alpha1", "kind": "NodePodProbe", "metadata": { "name": "n" },
            "spec": { "podProbes": [pod("u", "probes", json!([probe("a"), probe("b"), probe("c")])),
                pod("v", "probes", json!([probe("a")])), pod("w", "probes", json!([]))] },
            "status": { "podProbeStatuses": [
                pod("u", "probeStates", json!([state("a", "Succeeded"), state("b", "Failed"), state("c", "X")])),
                pod("gone", "probeStates", json!([state("a", "Failed")]))] },
        }))
        .unwrap();
        let expected = ProbeCounts {
            pods: 2,
            total: 4,
            succeeded: 1,
            failed: 1,
            unknown: 2,
        };
        assert_eq!(probe_counts(&object), expected);
    }

    /// The names that the manual lists, for programs.
    #[test]
    fn document_has_the_names_of_the_manual() {
        let status = NodeStatus {
            node: "n".into(),
            runtime_error: "r".into(),
            pulls: vec![Pull {
                image: "i".into(),
                phase: "Pulling".into(),
                progress: 40,
                start_time: serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap(),
                message: "m".into(),
            }],
            pulled: 1,
            recreates: vec![Recreate {
                namespace: "a".into(),
                name: "r".into(),
                pod: "p".into(),
                containers: vec!["c".into()],
                state: "Pending".into(),
                message: "m".into(),
            }],
            probes: ProbeCounts::default(),
            errors: vec!["e".into()],
        };
        let document = json!({
            "node": "n",
            "runtimeError": "r",
            "pulls": [{ "image": "i", "phase": "Pulling", "progress": 40, "startTime": "2026-01-01T00:00:00Z",
                "message": "m" }],
            "pulled": 1,
            "recreates": [{ "namespace": "a", "name": "r", "pod": "p", "containers": ["c"], "state": "Pending",
                "message": "m" }],
            "probes": { "pods": 0, "total": 0, "succeeded": 0, "failed": 0, "unknown": 0 },
            "errors": ["e"],
        });
        assert_eq!(serde_json::to_value(status).unwrap(), document);
    }
}

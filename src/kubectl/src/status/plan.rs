//! What `status` reports about the parts of an installation and about each object that waits or has failed.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use kruise_api::cloneset::CloneSet;
use kruise_api::container_recreate_job::ContainerRecreateJob;
use kruise_api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestPhase, ContainerRecreateRequestStatus,
    is_sidecar_termination,
};
use kruise_api::image_list_pull_job::ImageListPullJob;
use kruise_api::image_pull_job::{COMPLETE, FAILED, ImagePullJob, WAITING};
use kruise_api::sidecarset::SidecarSet;
use serde::Serialize;

use crate::conditions::{ConditionText, find_true, find_true_of_clone_set};

/// The state of Kruise in a cluster. Its JSON is the output of `status -o json`.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterStatus {
    /// Absent if the DaemonSet does not exist or could not be read.
    pub daemon: Option<DaemonStatus>,
    /// Absent if the Deployment does not exist or could not be read.
    pub manager: Option<DeploymentStatus>,
    /// The same for the webhooks.
    pub webhook: Option<DeploymentStatus>,
    /// Holder of the manager's Lease.
    pub leader: Option<String>,
    /// Its last holder, if the Lease has expired.
    pub former_leader: Option<String>,
    /// The CRDs of our kinds.
    pub crds: Vec<CrdStatus>,
    /// Objects that wait, are not finished or have failed.
    pub waiting: Vec<WaitingObject>,
    /// What could not be read.
    pub errors: Vec<String>,
}

/// The holder of a Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    /// Its identity.
    pub holder: String,
    /// Whether it has not renewed the Lease in time.
    pub expired: bool,
}

/// Difference of clocks that makes no Lease expire.
const CLOCK_SKEW: SignedDuration = SignedDuration::from_secs(60);

/// The holder of the Lease, if there is one.
pub fn leader(lease: &Lease, now: Timestamp) -> Option<Leader> {
    let spec = lease.spec.as_ref()?;
    let holder = spec.holder_identity.clone().filter(|holder| !holder.is_empty())?;
    let duration = SignedDuration::from_secs(spec.lease_duration_seconds.unwrap_or_default().into());
    let expired = spec
        .renew_time
        .as_ref()
        .is_some_and(|renewed| now.duration_since(renewed.0) > duration.saturating_add(CLOCK_SKEW));
    Some(Leader { holder, expired })
}

/// The daemons of the nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DaemonStatus {
    /// Nodes that should run a daemon.
    pub desired: i32,
    /// Nodes whose daemon is ready.
    pub ready: i32,
    /// Nodes whose daemon is of the newest template.
    pub updated: i32,
    /// Daemons that are not ready.
    pub not_ready: Vec<DaemonPod>,
}

/// A daemon that is not ready.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DaemonPod {
    /// Its node; empty if it is not scheduled.
    pub node: String,
    /// Its Pod.
    pub pod: String,
    /// Why it is not ready, as far as its Pod shows.
    pub reason: String,
}

/// A Deployment of ours.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeploymentStatus {
    /// Desired number of replicas.
    pub desired: i32,
    /// Replicas that are ready.
    pub ready: i32,
    /// Replicas of the newest template.
    pub updated: i32,
}

/// A CRD.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CrdStatus {
    /// Its name.
    pub name: String,
    /// Whether the API server serves its kind; absent if it could not be read.
    pub established: Option<bool>,
}

/// An object that waits, is not finished or has failed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WaitingObject {
    /// Kind of the object.
    pub kind: &'static str,
    /// Its namespace; empty if the kind has none.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// `Waiting`, `Failed`, or the phase of an unfinished request or job.
    pub state: String,
    /// Reason of the condition.
    pub reason: String,
    /// Message of the condition.
    pub message: String,
}

/// The state of the daemons; `pods` are those of the DaemonSet.
pub fn daemon_status(set: &DaemonSet, pods: &[Pod]) -> DaemonStatus {
    let status = set.status.clone().unwrap_or_default();
    let mut not_ready: Vec<DaemonPod> = pods.iter().filter_map(not_ready_daemon).collect();
    not_ready.sort();
    let is_observed = status.observed_generation >= set.metadata.generation;
    let updated = status.updated_number_scheduled.filter(|_| is_observed);
    DaemonStatus {
        desired: status.desired_number_scheduled,
        ready: status.number_ready,
        updated: updated.unwrap_or(0),
        not_ready,
    }
}

fn not_ready_daemon(pod: &Pod) -> Option<DaemonPod> {
    let status = pod.status.as_ref();
    let conditions = status
        .and_then(|status| status.conditions.as_deref())
        .unwrap_or_default();
    let ready = conditions.iter().find(|condition| condition.type_ == "Ready");
    if ready.is_some_and(|condition| condition.status == "True") {
        return None;
    }
    let containers = status.and_then(|status| status.container_statuses.as_deref());
    let waiting = containers.unwrap_or_default().iter().find_map(|container| {
        let waiting = container.state.as_ref()?.waiting.as_ref()?;
        waiting.reason.clone()
    });
    let phase = status.and_then(|status| status.phase.clone());
    let reason = waiting
        .or_else(|| ready.and_then(|condition| condition.reason.clone()))
        .or(phase)
        .unwrap_or_default();
    Some(DaemonPod {
        node: pod
            .spec
            .as_ref()
            .and_then(|spec| spec.node_name.clone())
            .unwrap_or_default(),
        pod: pod.metadata.name.clone().unwrap_or_default(),
        reason,
    })
}

/// The state of a Deployment.
pub fn deployment_status(deployment: &Deployment) -> DeploymentStatus {
    let desired = deployment.spec.as_ref().and_then(|spec| spec.replicas);
    let status = deployment.status.clone().unwrap_or_default();
    // Until the newest spec is observed, the number is that of the one before.
    let is_observed = status.observed_generation >= deployment.metadata.generation;
    let updated = status.updated_replicas.filter(|_| is_observed);
    DeploymentStatus {
        desired: desired.unwrap_or(1),
        ready: status.ready_replicas.unwrap_or(0),
        updated: updated.unwrap_or(0),
    }
}

/// Whether the API server serves a CRD's kind.
pub fn is_established(crd: &CustomResourceDefinition) -> bool {
    let conditions = crd
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_deref());
    let mut conditions = conditions.unwrap_or_default().iter();
    conditions.any(|condition| condition.type_ == "Established" && condition.status == "True")
}

fn waiting_object(
    kind: &'static str,
    metadata: &ObjectMeta,
    state: impl Into<String>,
    condition: Option<ConditionText<'_>>,
) -> WaitingObject {
    WaitingObject {
        kind,
        namespace: metadata.namespace.clone().unwrap_or_default(),
        name: metadata.name.clone().unwrap_or_default(),
        state: state.into(),
        reason: condition.map_or("", |condition| condition.reason).to_owned(),
        message: condition.map_or("", |condition| condition.message).to_owned(),
    }
}

/// A CloneSet that waits.
pub fn waiting_clone_set(set: &CloneSet) -> Option<WaitingObject> {
    let condition = find_true_of_clone_set(&set.status.as_ref()?.conditions, WAITING)?;
    Some(waiting_object(
        "CloneSet",
        &set.metadata,
        WAITING,
        Some(condition),
    ))
}

/// A SidecarSet that waits.
pub fn waiting_sidecar_set(set: &SidecarSet) -> Option<WaitingObject> {
    let condition = find_true(&set.status.as_ref()?.conditions, WAITING)?;
    Some(waiting_object(
        "SidecarSet",
        &set.metadata,
        WAITING,
        Some(condition),
    ))
}

/// The condition of a job that waits or has failed, and its type.
fn waiting_or_failed(conditions: &[Condition]) -> Option<(&'static str, ConditionText<'_>)> {
    [WAITING, FAILED]
        .into_iter()
        .find_map(|state| Some((state, find_true(conditions, state)?)))
}

/// An ImagePullJob that is not finished or has failed; of those that never end, one that waits.
pub fn waiting_pull_job(job: &ImagePullJob) -> Option<WaitingObject> {
    let status = job.status.clone().unwrap_or_default();
    let object = |state: &str, condition| waiting_object("ImagePullJob", &job.metadata, state, condition);
    if let Some((state, condition)) = waiting_or_failed(&status.conditions) {
        return Some(object(state, Some(condition)));
    }
    if status.completion_time.is_none() && job.spec.completion_policy.never_ends() {
        return None;
    }
    let (state, message) = match status.completion_time {
        // OpenKruise writes no conditions.
        Some(_) if status.failed == 0 => return None,
        Some(_) => (FAILED, status.message.unwrap_or_default()),
        None => {
            let (done, desired) = (status.succeeded, status.desired);
            let message = format!(
                "{done} of {desired} node(s) have the image, {} pull it, {} failed",
                status.active, status.failed
            );
            ("Active", message)
        }
    };
    Some(WaitingObject {
        message,
        ..object(state, None)
    })
}

/// A ContainerRecreateJob that is not finished or has failed.
pub fn waiting_recreate_job(job: &ContainerRecreateJob) -> Option<WaitingObject> {
    let status = job.status.clone().unwrap_or_default();
    let object =
        |state: &str, condition| waiting_object("ContainerRecreateJob", &job.metadata, state, condition);
    if let Some((state, condition)) = waiting_or_failed(&status.conditions) {
        return Some(object(state, Some(condition)));
    }
    if status.completion_time.is_some() {
        return None;
    }
    Some(WaitingObject {
        message: format!("{} of {} Pods are restarted", status.restarted, status.desired),
        ..object("Active", None)
    })
}

/// An ImageListPullJob that is not finished or has failed.
pub fn waiting_list_pull_job(job: &ImageListPullJob) -> Option<WaitingObject> {
    let status = job.status.clone().unwrap_or_default();
    let object = |state: &str, condition| waiting_object("ImageListPullJob", &job.metadata, state, condition);
    if let Some((state, condition)) = waiting_or_failed(&status.conditions) {
        return Some(object(state, Some(condition)));
    }
    if status.completion_time.is_none() && job.spec.completion_policy.never_ends() {
        return None;
    }
    let failed = status.failed_image_statuses.len();
    let (state, message) = match status.completion_time {
        Some(_) if failed == 0 => return None,
        Some(_) => (FAILED, format!("{failed} of {} images failed", status.desired)),
        None => (
            "Active",
            format!("{} of {} images are pulled", status.succeeded, status.desired),
        ),
    };
    Some(WaitingObject {
        message,
        ..object(state, None)
    })
}

/// Whether a request has stopped a sidecar for good, although it counts as failed.
pub fn is_ended_termination(request: &ContainerRecreateRequest) -> bool {
    let conditions = request.status.iter().flat_map(|status| &status.conditions);
    let mut ended = conditions.filter(|condition| condition.type_ == FAILED);
    let name = request.metadata.name.as_deref().unwrap_or_default();
    ended.any(|condition| is_sidecar_termination(name, &condition.message))
}

/// A ContainerRecreateRequest that is not finished or has failed.
pub fn waiting_recreate_request(request: &ContainerRecreateRequest) -> Option<WaitingObject> {
    if is_ended_termination(request) {
        return None;
    }
    let status = request.status.clone().unwrap_or_default();
    let object = |state: &str, condition| {
        waiting_object("ContainerRecreateRequest", &request.metadata, state, condition)
    };
    match recreate_outcome(&status) {
        RecreateOutcome::Succeeded => None,
        RecreateOutcome::Failed(reason, message) => Some(WaitingObject {
            reason,
            message,
            ..object(FAILED, None)
        }),
        RecreateOutcome::Unfinished => {
            if let Some(condition) = find_true(&status.conditions, WAITING) {
                return Some(object(WAITING, Some(condition)));
            }
            let phase = match status.phase.as_str() {
                "" => "Pending",
                phase => phase,
            };
            Some(WaitingObject {
                message: status.message.unwrap_or_default(),
                ..object(phase, None)
            })
        }
    }
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecreateOutcome {
    /// It has not ended.
    Unfinished,
    /// Every container was recreated.
    Succeeded,
    /// With reason and message.
    Failed(String, String),
}

/// How a request ended, by its conditions, or by its states where OpenKruise wrote them.
pub fn recreate_outcome(status: &ContainerRecreateRequestStatus) -> RecreateOutcome {
    if let Some(condition) = find_true(&status.conditions, FAILED) {
        return RecreateOutcome::Failed(condition.reason.to_owned(), condition.message.to_owned());
    }
    if find_true(&status.conditions, COMPLETE).is_some() {
        return RecreateOutcome::Succeeded;
    }
    if status.completion_time.is_none() && !status.phase.is_finished() {
        return RecreateOutcome::Unfinished;
    }
    let states = &status.container_recreate_states;
    let failed: Vec<_> = states
        .iter()
        .filter(|state| state.phase != ContainerRecreateRequestPhase::Succeeded)
        .collect();
    let message = status.message.clone().unwrap_or_default();
    if failed.is_empty() && !states.is_empty() && message.is_empty() {
        return RecreateOutcome::Succeeded;
    }
    let mut causes = vec![message];
    causes.extend(failed.iter().map(|state| {
        let why = state.message.as_deref().unwrap_or_default();
        format!("container {}: {} {why}", state.name, state.phase)
            .trim_end()
            .to_owned()
    }));
    causes.retain(|cause| !cause.is_empty());
    RecreateOutcome::Failed(String::new(), causes.join("; "))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    fn read<T: DeserializeOwned>(kind: &str, spec: Value, status: Value) -> T {
        serde_json::from_value(json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": kind,
            "metadata": { "name": "a", "namespace": "n" }, "spec": spec, "status": status,
        }))
        .unwrap()
    }

    fn condition(type_: &str) -> Value {
        json!({ "type": type_, "status": "True", "reason": "R", "message": "m",
            "lastTransitionTime": "2026-01-01T00:00:00Z" })
    }

    fn summary(found: Option<WaitingObject>) -> Option<(String, String, String)> {
        found.map(|object| (object.state, object.reason, object.message))
    }

    #[test]
    fn lease_that_is_not_renewed_has_no_leader() {
        let now: Timestamp = "2026-01-01T00:10:00Z".parse().unwrap();
        let expired = |holder: &str, renewed: &str| {
            let spec = json!({ "holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": renewed });
            let lease = serde_json::from_value(json!({ "spec": spec })).unwrap();
            leader(&lease, now).map(|leader| leader.expired)
        };
        assert_eq!(expired("a", "2026-01-01T00:09:58.000000Z"), Some(false));
        assert_eq!(expired("a", "2026-01-01T00:09:00.000000Z"), Some(false));
        assert_eq!(expired("a", "2026-01-01T00:08:40.000000Z"), Some(true));
        // The clock of this machine is behind.
        assert_eq!(expired("a", "2026-01-01T00:20:00.000000Z"), Some(false));
        assert_eq!(expired("", "2026-01-01T00:09:58.000000Z"), None);
        assert_eq!(leader(&Lease::default(), now), None);
    }

    fn text(state: &str, reason: &str, message: &str) -> Option<(String, String, String)> {
        Some((state.into(), reason.into(), message.into()))
    }

    #[test]
    fn pull_jobs_wait_until_they_end() {
        let job = |policy: Value, status: Value| {
            let spec = json!({ "image": "i", "completionPolicy": policy });
            summary(waiting_pull_job(&read("ImagePullJob", spec, status)))
        };
        let counts = json!({ "desired": 3, "active": 1, "succeeded": 1, "failed": 0 });
        let active = "1 of 3 node(s) have the image, 1 pull it, 0 failed";
        assert_eq!(job(json!({}), counts.clone()), text("Active", "", active));
        assert_eq!(job(json!({ "type": "Never" }), counts), None);
        let waiting = json!({ "desired": 3, "conditions": [condition("Waiting")] });
        assert_eq!(
            job(json!({ "type": "Never" }), waiting),
            text("Waiting", "R", "m")
        );
        let ended = |failed: i32, conditions: Value| {
            json!({ "desired": 3, "failed": failed, "message": "x", "conditions": conditions,
                "completionTime": "2026-01-01T00:00:00Z" })
        };
        assert_eq!(job(json!({}), ended(0, json!([condition("Complete")]))), None);
        assert_eq!(
            job(json!({}), ended(0, json!([condition("Failed")]))),
            text("Failed", "R", "m")
        );
        assert_eq!(job(json!({}), ended(1, json!([]))), text("Failed", "", "x"));
    }

    #[test]
    fn recreate_jobs_wait_until_they_end() {
        let job = |status: Value| {
            let spec = json!({ "containers": [{ "name": "app" }] });
            summary(waiting_recreate_job(&read("ContainerRecreateJob", spec, status)))
        };
        assert_eq!(
            job(json!({ "desired": 2, "restarted": 1 })),
            text("Active", "", "1 of 2 Pods are restarted")
        );
        assert_eq!(job(json!({ "completionTime": "2026-11-26T12:00:00Z" })), None);
    }

    #[test]
    fn list_pull_jobs_wait_until_they_end() {
        let job = |status: Value| {
            let spec = json!({ "images": ["i"], "completionPolicy": {} });
            summary(waiting_list_pull_job(&read("ImageListPullJob", spec, status)))
        };
        assert_eq!(
            job(json!({ "desired": 2, "succeeded": 1 })),
            text("Active", "", "1 of 2 images are pulled")
        );
        let ended = json!({ "desired": 2, "completionTime": "2026-01-01T00:00:00Z" });
        assert_eq!(job(ended), None);
    }

    #[test]
    fn workloads_are_listed_while_they_wait() {
        let spec = json!({ "selector": {}, "template": {} });
        let status = |conditions: Value| {
            json!({ "replicas": 0, "readyReplicas": 0, "availableReplicas": 0, "updatedReplicas": 0,
                "updatedReadyReplicas": 0, "conditions": conditions })
        };
        let set = |conditions| {
            summary(waiting_clone_set(&read(
                "CloneSet",
                spec.clone(),
                status(conditions),
            )))
        };
        assert_eq!(set(json!([condition("Waiting")])), text("Waiting", "R", "m"));
        assert_eq!(set(json!([condition("Progressing")])), None);
        let set = |conditions: Value| {
            let status = json!({ "conditions": conditions });
            summary(waiting_sidecar_set(&read("SidecarSet", json!({}), status)))
        };
        assert_eq!(set(json!([condition("Waiting")])), text("Waiting", "R", "m"));
        assert_eq!(set(json!([])), None);
    }

    #[test]
    fn recreate_requests_are_listed_unless_they_succeeded() {
        let request = |status: Value| {
            let spec = json!({ "podName": "p", "containers": [{ "name": "c" }] });
            summary(waiting_recreate_request(&read(
                "ContainerRecreateRequest",
                spec,
                status,
            )))
        };
        assert_eq!(request(json!({ "phase": "" })), text("Pending", "", ""));
        let waiting = json!({ "phase": "", "conditions": [condition("Waiting")] });
        assert_eq!(request(waiting), text("Waiting", "R", "m"));
        let completed = |phase: &str, message: &str| {
            let states = json!([{ "name": "c", "phase": phase, "message": message }]);
            request(json!({ "phase": "Completed", "containerRecreateStates": states }))
        };
        assert_eq!(completed("Succeeded", ""), None);
        assert_eq!(
            completed("Failed", "no"),
            text("Failed", "", "container c: Failed no")
        );
        assert_eq!(request(json!({ "phase": "Completed" })), text("Failed", "", ""));
    }

    #[test]
    fn daemons_that_are_not_ready_are_named_with_their_node() {
        let pod = |name: &str, status: Value| -> Pod {
            let object = json!({ "metadata": { "name": name }, "spec": { "nodeName": format!("n-{name}"),
                "containers": [] }, "status": status });
            serde_json::from_value(object).unwrap()
        };
        let ready = json!({ "conditions": [{ "type": "Ready", "status": "True" }] });
        let crashing = json!({ "conditions": [{ "type": "Ready", "status": "False", "reason": "ContainersNotReady" }],
            "containerStatuses": [{ "name": "c", "image": "i", "imageID": "", "ready": false, "restartCount": 4,
                "state": { "waiting": { "reason": "CrashLoopBackOff" } } }] });
        let pods = [
            pod("b", crashing),
            pod("a", ready),
            pod("c", json!({ "phase": "Pending" })),
        ];
        let set: DaemonSet = serde_json::from_value(json!({ "status": { "desiredNumberScheduled": 3,
            "numberReady": 1, "currentNumberScheduled": 3, "numberMisscheduled": 0 } }))
        .unwrap();
        let status = daemon_status(&set, &pods);
        let found: Vec<_> = status
            .not_ready
            .iter()
            .map(|pod| (&*pod.node, &*pod.reason))
            .collect();
        assert_eq!(found, [("n-b", "CrashLoopBackOff"), ("n-c", "Pending")]);
        assert_eq!((status.desired, status.ready), (3, 1));
    }

    #[test]
    fn pods_of_an_observed_spec_alone_are_updated() {
        let updated = |observed: i64| {
            let metadata = json!({ "name": "a", "generation": 2 });
            let status = json!({ "observedGeneration": observed, "updatedReplicas": 1, "readyReplicas": 2 });
            let object = json!({ "metadata": metadata, "spec": { "replicas": 2, "selector": {}, "template": {} },
                "status": status });
            let deployment = deployment_status(&serde_json::from_value(object).unwrap());
            assert_eq!((deployment.desired, deployment.ready), (2, 2));
            let status = json!({ "observedGeneration": observed, "desiredNumberScheduled": 2, "numberReady": 2,
                "updatedNumberScheduled": 1, "currentNumberScheduled": 2, "numberMisscheduled": 0 });
            let object = json!({ "metadata": metadata, "status": status });
            let daemon = daemon_status(&serde_json::from_value(object).unwrap(), &[]);
            (deployment.updated, daemon.updated)
        };
        assert_eq!(updated(2), (1, 1));
        assert_eq!(updated(1), (0, 0));
    }

    /// The names that the manual lists, for programs.
    #[test]
    fn document_has_the_names_of_the_manual() {
        let pod = DaemonPod {
            node: "n".into(),
            pod: "p".into(),
            reason: "Pending".into(),
        };
        let status = ClusterStatus {
            daemon: Some(DaemonStatus {
                desired: 3,
                ready: 2,
                updated: 1,
                not_ready: vec![pod],
            }),
            manager: Some(DeploymentStatus {
                desired: 2,
                ready: 1,
                updated: 0,
            }),
            webhook: None,
            leader: Some("a".into()),
            former_leader: None,
            crds: vec![CrdStatus {
                name: "c".into(),
                established: Some(true),
            }],
            waiting: waiting_sidecar_set(&read(
                "SidecarSet",
                json!({}),
                json!({ "conditions": [condition("Waiting")] }),
            ))
            .into_iter()
            .collect(),
            errors: vec!["e".into()],
        };
        let document = json!({
            "daemon": { "desired": 3, "ready": 2, "updated": 1,
                "notReady": [{ "node": "n", "pod": "p", "reason": "Pending" }] },
            "manager": { "desired": 2, "ready": 1, "updated": 0 },
            "webhook": null,
            "leader": "a",
            "formerLeader": null,
            "crds": [{ "name": "c", "established": true }],
            "waiting": [{ "kind": "SidecarSet", "namespace": "n", "name": "a", "state": "Waiting", "reason": "R",
                "message": "m" }],
            "errors": ["e"],
        });
        assert_eq!(serde_json::to_value(status).unwrap(), document);
    }
}

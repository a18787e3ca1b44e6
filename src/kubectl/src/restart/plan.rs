//! Which Pods are restarted next, and with which requests.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kruise_api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestContainer, ContainerRecreateRequestPhase as Phase,
    ContainerRecreateRequestSpec, ContainerRecreateRequestStatus, WAITING,
};
use kruise_api::keys::CRR_POD_UID;
use kruise_api::owner::Owner;

use crate::conditions::find_true;

/// Characters of a request's name, as many as the API server generates at most.
const MAX_NAME_CHARS: usize = 63;
/// Seconds after its end when a request of this command is deleted.
pub const TTL_SECONDS: i32 = 24 * 60 * 60;
/// How long a Pod may be unavailable after its request until it has failed: the default of a ContainerRecreateJob.
pub const READY_TIMEOUT: Duration = Duration::from_secs(600);

/// How far the restart of a Pod is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodState {
    /// Not started.
    Pending,
    /// Its request is being created, and may not exist.
    Requesting,
    /// Its request exists, and is not finished.
    Recreating,
    /// Its containers were recreated.
    Succeeded,
    /// It was deleted or replaced before its turn.
    Skipped,
    /// Its request failed, or could not be created.
    Failed,
}

/// Limits of the restart of many Pods.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Pods that are restarted, or not available after it, at a time; 1 or greater.
    pub max_unavailable: usize,
    /// Whether other Pods are started after a failure.
    pub continue_on_failure: bool,
}

/// Whether a Pod is started once there is room for it.
pub fn may_start(states: &[PodState], limits: Limits) -> bool {
    let failed = states.contains(&PodState::Failed);
    states.contains(&PodState::Pending) && (limits.continue_on_failure || !failed)
}

/// The Pods, by position, whose restart starts now. `unavailable` Pods are not available again after their restart.
pub fn next(states: &[PodState], unavailable: usize, limits: Limits) -> Vec<usize> {
    if !may_start(states, limits) {
        return Vec::new();
    }
    let in_progress = states
        .iter()
        .filter(|state| matches!(state, PodState::Requesting | PodState::Recreating))
        .count();
    let free = limits
        .max_unavailable
        .saturating_sub(in_progress.saturating_add(unavailable));
    let pending = states
        .iter()
        .enumerate()
        .filter(|(_, state)| **state == PodState::Pending);
    pending.map(|(position, _)| position).take(free).collect()
}

/// Whether a Pod is available again after its request has `ended`: `None` while it may not be, and an error if it will
/// not be. A request without a known end may still stop containers.
pub fn availability(pod: &Pod, ended: Option<&ContainerRecreateRequest>) -> Option<Result<(), &'static str>> {
    if pod.metadata.deletion_timestamp.is_some() {
        return Some(Err("it is being deleted"));
    }
    let status = pod.status.as_ref();
    if matches!(
        status.and_then(|status| status.phase.as_deref()),
        Some("Succeeded" | "Failed")
    ) {
        return Some(Err("it has ended"));
    }
    let mut conditions = status
        .and_then(|status| status.conditions.as_ref())
        .into_iter()
        .flatten();
    let ready = conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True");
    let available = ready && ended.is_some_and(|request| !is_stopping(pod, request));
    available.then_some(Ok(()))
}

/// Whether a container runs that the daemon is stopping: that goes on after the request has failed.
fn is_stopping(pod: &Pod, request: &ContainerRecreateRequest) -> bool {
    let mut unfinished = request
        .stopped_containers()
        .filter(|(state, _)| state.phase != Phase::Succeeded);
    unfinished.any(|(state, id)| {
        let status = pod.status.as_ref();
        let init = status.and_then(|status| status.init_container_statuses.as_ref());
        let others = status.and_then(|status| status.container_statuses.as_ref());
        let mut containers = init.into_iter().chain(others).flatten();
        containers.any(|found| found.name == state.name && found.container_id.as_deref() == Some(id))
    })
}

/// What the next Pod waits for, while this one is not available.
pub fn unavailable_reason(ended: Option<&ContainerRecreateRequest>) -> &'static str {
    match ended {
        Some(_) => "it is not ready after its restart",
        None => "its request may not have ended",
    }
}

/// The result in one line.
pub fn summary(states: &[PodState]) -> String {
    let count = |state: PodState| states.iter().filter(|other| **other == state).count();
    let mut parts = vec![format!(
        "{} of {} Pod(s) restarted",
        count(PodState::Succeeded),
        states.len()
    )];
    for (state, text) in [
        (PodState::Skipped, "skipped"),
        (PodState::Failed, "failed"),
        (PodState::Recreating, "in progress"),
        (PodState::Requesting, "being requested"),
        (PodState::Pending, "not started"),
    ] {
        if count(state) > 0 {
            parts.push(format!("{} {text}", count(state)));
        }
    }
    parts.join(", ")
}

/// Whether all Pods that still exist were restarted.
pub fn is_success(states: &[PodState]) -> bool {
    let is_good = |state: &PodState| matches!(state, PodState::Succeeded | PodState::Skipped);
    states.iter().all(is_good) && states.contains(&PodState::Succeeded)
}

/// What a command that ends early leaves undone, and what continues; `follow` is the command that shows it.
pub fn unfinished(states: &[PodState], follow: &str) -> String {
    let summary = summary(states);
    let count = |state: PodState| states.iter().filter(|other| **other == state).count();
    let uncertain = match count(PodState::Requesting) {
        0 => String::new(),
        count => format!("; those of {count} Pod(s) may not have been created"),
    };
    let (not_started, hint) = match count(PodState::Pending) {
        0 => (String::new(), ""),
        count => (
            format!("; the {count} Pod(s) that were not started will not be restarted"),
            "\nA ContainerRecreateJob continues without this command.",
        ),
    };
    format!(
        "{summary}. Requests in progress continue{uncertain}{not_started}. To follow the requests:\n  \
         {follow}{hint}"
    )
}

/// Why a Pod that was listed is not restarted, if it is so `now`.
pub fn skip_reason(listed: &Pod, now: Option<&Pod>) -> Option<&'static str> {
    let Some(now) = now else {
        return Some("it was deleted");
    };
    if now.metadata.uid != listed.metadata.uid {
        return Some("it was replaced");
    }
    let is_deleted = now.metadata.deletion_timestamp.is_some();
    is_deleted.then_some("it is being deleted")
}

/// Whether the Pod is one of the owner's that can be restarted: on a node, running and not being deleted.
pub fn is_restartable(pod: &Pod, owner: &Owner) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let scheduled = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
    let owned = Owner::controller(&pod.metadata).is_some_and(|controller| controller == *owner);
    owned && scheduled && phase == Some("Running") && pod.metadata.deletion_timestamp.is_none()
}

/// Those of the names that are no container of the Pod, nor an init container that restarts always.
pub fn missing_containers<'a>(pod: &Pod, names: &'a [String]) -> Vec<&'a str> {
    let Some(spec) = &pod.spec else {
        return names.iter().map(String::as_str).collect();
    };
    let restarts = |container: &&Container| container.restart_policy.as_deref() == Some("Always");
    let init = spec.init_containers.iter().flatten().filter(restarts);
    let existing: Vec<&str> = spec
        .containers
        .iter()
        .chain(init)
        .map(|container| container.name.as_str())
        .collect();
    let names = names.iter().map(String::as_str);
    names.filter(|name| !existing.contains(name)).collect()
}

/// The request to create for a Pod as it was listed: admission refuses it if another Pod has that name now. The API
/// server generates no name, so that it is known after a lost response; `suffix` is random.
pub fn request(namespace: &str, pod: &Pod, containers: &[String], suffix: &str) -> ContainerRecreateRequest {
    let max = MAX_NAME_CHARS.saturating_sub(suffix.len() + 1);
    let (name, uid) = (pod.metadata.name.clone(), pod.metadata.uid.clone());
    let name = name.unwrap_or_default();
    let start: String = name.chars().take(max).collect();
    let start = start.trim_end_matches(['-', '.']);
    let container = |name: &String| ContainerRecreateRequestContainer {
        name: name.clone(),
        ..ContainerRecreateRequestContainer::default()
    };
    ContainerRecreateRequest {
        metadata: ObjectMeta {
            namespace: Some(namespace.to_owned()),
            name: Some(format!("{start}-{suffix}")),
            labels: uid.map(|uid| BTreeMap::from([(CRR_POD_UID.to_owned(), uid)])),
            ..ObjectMeta::default()
        },
        spec: ContainerRecreateRequestSpec {
            pod_name: name,
            containers: containers.iter().map(container).collect(),
            ttl_seconds_after_finished: Some(TTL_SECONDS),
            ..ContainerRecreateRequestSpec::default()
        },
        status: None,
    }
}

/// Whether a request of the same name is the planned one.
pub fn is_same(found: &ContainerRecreateRequest, planned: &ContainerRecreateRequest) -> bool {
    // Admission fills in the other fields.
    let names = |request: &ContainerRecreateRequest| -> Vec<String> {
        let containers = request.spec.containers.iter();
        containers.map(|container| container.name.clone()).collect()
    };
    found.spec.pod_name == planned.spec.pod_name && names(found) == names(planned)
}

/// What happens to a request, in one line.
pub fn progress_line(status: &ContainerRecreateRequestStatus) -> String {
    if let Some(waiting) = find_true(&status.conditions, WAITING) {
        return format!("waiting: {}: {}", waiting.reason, waiting.message);
    }
    let states: Vec<String> = status
        .container_recreate_states
        .iter()
        .map(|state| match state.message.as_deref().unwrap_or_default() {
            "" => format!("{} {}", state.name, state.phase),
            message => format!("{} {} ({message})", state.name, state.phase),
        })
        .collect();
    if !states.is_empty() {
        return states.join(", ");
    }
    match status.phase.as_str() {
        "" => "waiting for kruise-daemon".to_owned(),
        phase => phase.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    proptest! {
        /// Whatever fails in whatever order: there are never more Pods unavailable at a time than allowed, each Pod is
        /// started at most once, none after a failure unless that is requested, and the command ends.
        #[test]
        fn restarts_stay_within_their_limits(
            results in prop::collection::vec(any::<bool>(), 0..20),
            order in prop::collection::vec(any::<prop::sample::Index>(), 80),
            max_unavailable in 1_usize..6,
            continue_on_failure in any::<bool>(),
        ) {
            let limits = Limits { max_unavailable, continue_on_failure };
            let mut states = vec![PodState::Pending; results.len()];
            // Those whose request has ended, and that are not available again.
            let mut unavailable: Vec<usize> = Vec::new();
            let mut order = order.into_iter();
            loop {
                let failed = states.contains(&PodState::Failed);
                let started = next(&states, unavailable.len(), limits);
                prop_assert!(!failed || continue_on_failure || started.is_empty());
                for position in started {
                    prop_assert_eq!(states[position], PodState::Pending);
                    states[position] =
                        if position % 2 == 0 { PodState::Recreating } else { PodState::Requesting };
                }
                let is_running = |state| matches!(state, PodState::Recreating | PodState::Requesting);
                let running: Vec<usize> = (0..states.len()).filter(|i| is_running(states[*i])).collect();
                prop_assert!(running.len() + unavailable.len() <= max_unavailable);
                prop_assert!(next(&states, unavailable.len(), limits).is_empty(), "the plan is not complete");
                if running.is_empty() && !may_start(&states, limits) {
                    break;
                }
                let events = [&running[..], &unavailable[..]].concat();
                prop_assert!(!events.is_empty(), "it waits for nothing");
                let position = *order.next().unwrap().get(&events);
                if unavailable.contains(&position) {
                    unavailable.retain(|other| *other != position);
                } else {
                    states[position] = if results[position] { PodState::Succeeded } else { PodState::Failed };
                    unavailable.push(position);
                }
            }
            if continue_on_failure || results.iter().all(|good| *good) {
                prop_assert!(!states.contains(&PodState::Pending));
            }
        }
    }

    fn pod_of(name: &str, uid: &str) -> Pod {
        serde_json::from_value(json!({ "metadata": { "name": name, "uid": uid } })).unwrap()
    }

    #[test]
    fn request_is_for_the_pod_that_was_listed() {
        let request = request("n", &pod_of("web-0", "u"), &[], "x");
        assert_eq!(request.spec.pod_name, "web-0");
        assert_eq!(request.metadata.labels.unwrap()[CRR_POD_UID], "u");
    }

    proptest! {
        /// Whatever the name of the Pod: the API server accepts that of the request.
        #[test]
        fn names_of_requests_are_valid(pod in "[a-z0-9]([a-z0-9.-]{0,100}[a-z0-9])?") {
            prop_assume!(kruise_api::names::is_subdomain(&pod));
            let name = request("n", &pod_of(&pod, "u"), &[], "bcdfghjk").metadata.name.unwrap();
            prop_assert!(kruise_api::names::is_subdomain(&name) && name.len() <= 63, "{name}");
            prop_assert!(name.ends_with("-bcdfghjk"), "{name}");
        }
    }

    #[test]
    fn request_of_others_is_not_the_same() {
        let containers = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let request = |pod: &str, names: &[&str]| request("n", &pod_of(pod, "u"), &containers(names), "x");
        let mut stored = request("a", &["app", "log"]);
        stored.spec.containers[0].pre_stop = Some(Default::default());
        assert!(is_same(&stored, &request("a", &["app", "log"])));
        assert!(!is_same(&stored, &request("b", &["app", "log"])));
        assert!(!is_same(&stored, &request("a", &["app"])));
    }

    #[test]
    fn pod_that_is_gone_is_skipped() {
        let pod = |uid: &str, deleted: Option<&str>| -> Pod {
            serde_json::from_value(
                json!({ "metadata": { "name": "p", "uid": uid, "deletionTimestamp": deleted } }),
            )
            .unwrap()
        };
        let listed = pod("u", None);
        assert_eq!(skip_reason(&listed, Some(&listed)), None);
        assert_eq!(skip_reason(&listed, None), Some("it was deleted"));
        assert_eq!(
            skip_reason(&listed, Some(&pod("v", None))),
            Some("it was replaced")
        );
        let deleted = pod("u", Some("2026-01-01T00:00:00Z"));
        assert_eq!(skip_reason(&listed, Some(&deleted)), Some("it is being deleted"));
    }

    #[test]
    fn pod_is_available_once_it_is_ready_again() {
        let pod = |ready: &str, phase: &str, id: &str| -> Pod {
            serde_json::from_value(json!({ "status": { "phase": phase,
                "conditions": [{ "type": "Ready", "status": ready }],
                "containerStatuses": [{ "name": "app", "containerID": id, "image": "", "imageID": "", "ready": true,
                    "restartCount": 0 }] } }))
            .unwrap()
        };
        let ended = |phase: &str, killed: bool| -> ContainerRecreateRequest {
            let context = json!({ "containerID": "c://1", "restartCount": 0 });
            serde_json::from_value(json!({ "apiVersion": "apps.kruise.io/v1beta1",
                "kind": "ContainerRecreateRequest", "metadata": { "name": "r" },
                "spec": { "podName": "p", "containers": [{ "name": "app", "statusContext": context }] },
                "status": { "phase": "Completed", "completionTime": "2026-01-01T00:00:00Z",
                    "containerRecreateStates": [{ "name": "app", "phase": phase, "isKilled": killed }] } }))
            .unwrap()
        };
        let (done, failed) = (ended("Succeeded", true), ended("Failed", true));
        let (ready, stopped) = (pod("True", "Running", "c://2"), pod("True", "Running", "c://1"));
        let not_ready = pod("False", "Running", "c://2");
        assert_eq!(availability(&ready, Some(&done)), Some(Ok(())));
        assert_eq!(availability(&not_ready, Some(&done)), None);
        assert_eq!(availability(&Pod::default(), Some(&done)), None);
        assert_eq!(availability(&ready, Some(&failed)), Some(Ok(())));
        assert_eq!(availability(&not_ready, Some(&failed)), None);
        assert_eq!(availability(&stopped, Some(&failed)), None, "it is being stopped");
        let untouched = ended("Failed", false);
        assert_eq!(availability(&stopped, Some(&untouched)), Some(Ok(())));
        assert_eq!(availability(&ready, None), None, "the request may go on");
        let evicted = pod("False", "Failed", "c://2");
        assert_eq!(availability(&evicted, Some(&done)), Some(Err("it has ended")));
        assert_eq!(availability(&evicted, None), Some(Err("it has ended")));
        let mut deleted = ready;
        deleted.metadata =
            serde_json::from_value(json!({ "deletionTimestamp": "2026-01-01T00:00:00Z" })).unwrap();
        assert_eq!(
            availability(&deleted, Some(&done)),
            Some(Err("it is being deleted"))
        );
    }

    #[test]
    fn skipped_pods_are_no_failure_unless_all_are() {
        use PodState::{Failed, Skipped, Succeeded};
        assert!(is_success(&[Succeeded, Skipped]));
        assert!(!is_success(&[Skipped]));
        assert!(!is_success(&[Succeeded, Failed]));
        assert_eq!(
            summary(&[Succeeded, Skipped]),
            "1 of 2 Pod(s) restarted, 1 skipped"
        );
    }

    #[test]
    fn command_that_ends_early_names_the_pods_that_are_left() {
        use PodState::{Pending, Recreating, Requesting, Succeeded};
        assert_eq!(
            unfinished(&[Succeeded, Recreating, Pending, Pending], "kubectl get crr"),
            "1 of 4 Pod(s) restarted, 1 in progress, 2 not started. Requests in progress continue; the 2 Pod(s) that \
             were not started will not be restarted. To follow the requests:\n  kubectl get crr\n\
             A ContainerRecreateJob continues without this command."
        );
        assert_eq!(
            unfinished(&[Recreating], "kubectl get crr"),
            "0 of 1 Pod(s) restarted, 1 in progress. Requests in progress continue. To follow the requests:\n  \
             kubectl get crr"
        );
        assert_eq!(
            unfinished(&[Requesting], "kubectl get crr"),
            "0 of 1 Pod(s) restarted, 1 being requested. Requests in progress continue; those of 1 Pod(s) may not \
             have been created. To follow the requests:\n  kubectl get crr"
        );
    }

    #[test]
    fn summary_names_what_did_not_happen() {
        use PodState::{Failed, Pending, Succeeded};
        assert_eq!(summary(&[Succeeded, Succeeded]), "2 of 2 Pod(s) restarted");
        assert_eq!(
            summary(&[Succeeded, Failed, Pending, Pending]),
            "1 of 4 Pod(s) restarted, 1 failed, 2 not started"
        );
    }

    #[test]
    fn containers_must_exist_and_restart() {
        let pod: Pod = serde_json::from_value(json!({ "spec": {
            "containers": [{ "name": "app" }],
            "initContainers": [{ "name": "setup" }, { "name": "proxy", "restartPolicy": "Always" }] } }))
        .unwrap();
        let names = ["app", "setup", "proxy", "x"].map(str::to_owned);
        assert_eq!(missing_containers(&pod, &names), ["setup", "x"]);
        assert_eq!(missing_containers(&Pod::default(), &names[..1]), ["app"]);
    }

    #[test]
    fn only_running_pods_of_the_owner_are_restarted() {
        let pod = |uid: &str, phase: &str, deleted: bool| -> Pod {
            let deleted = deleted.then_some("2026-01-01T00:00:00Z");
            serde_json::from_value(json!({
                "metadata": { "name": "p", "deletionTimestamp": deleted, "ownerReferences": [{ "name": "web",
                    "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "uid": uid, "controller": true }] },
                "spec": { "nodeName": "n", "containers": [] }, "status": { "phase": phase } }))
            .unwrap()
        };
        let metadata = ObjectMeta {
            name: Some("web".into()),
            uid: Some("u".into()),
            ..ObjectMeta::default()
        };
        let owner = Owner::clone_set(&metadata);
        assert!(is_restartable(&pod("u", "Running", false), &owner));
        assert!(!is_restartable(&pod("v", "Running", false), &owner));
        assert!(!is_restartable(&pod("u", "Pending", false), &owner));
        assert!(!is_restartable(&pod("u", "Running", true), &owner));
    }

    #[test]
    fn progress_shows_what_is_waited_for() {
        let line = |status: serde_json::Value| progress_line(&serde_json::from_value(status).unwrap());
        assert_eq!(line(json!({ "phase": "" })), "waiting for kruise-daemon");
        let states = json!([{ "name": "a", "phase": "Succeeded" }, { "name": "b", "phase": "Recreating", "message": "m" }]);
        let status = json!({ "phase": "Recreating", "containerRecreateStates": states });
        assert_eq!(line(status), "a Succeeded, b Recreating (m)");
    }
}

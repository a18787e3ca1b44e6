//! Why a Pod is not ready, for messages.

use std::collections::BTreeSet;

use kruise_api::keys;
use kruise_api::validation::truncate;

use crate::in_place::Pod;
use crate::not_ready::parse_message;

/// Maximum characters of a text from another source.
const MAX_QUOTE_CHARS: usize = 200;
/// Reasons of kubelet during every container's start.
const STARTUP_REASONS: [&str; 2] = ["ContainerCreating", "PodInitializing"];
/// Reason of kubelet for a container that keeps ending.
const CRASH_LOOP_BACK_OFF: &str = "CrashLoopBackOff";
/// Reason of kubelet for a container whose barrier is not lifted.
pub const CONFIG_ERROR: &str = "CreateContainerConfigError";

/// Why a Pod that has a node is not ready, if its status says so: a container, or a readiness gate.
#[must_use]
pub fn not_ready_reason(pod: &Pod) -> Option<String> {
    let container = || {
        let at_barrier = waiting_for_barrier(pod);
        let status = pod
            .container_statuses
            .iter()
            .find(|s| !s.ready && !at_barrier.contains(s.name.as_str()))?;
        let why = match &status.waiting {
            Some(reason) => reason,
            None if status.running => "it runs, but is not ready",
            None => "it does not run",
        };
        let ended = status.last_termination.as_ref().filter(|_| !status.running);
        let ended = ended.map_or(String::new(), |ended| format!(" ({ended})"));
        Some(format!("container {}: {why}{ended}", status.name))
    };
    container_error(pod)
        .or_else(container)
        .or_else(|| failing_gate(pod))
}

/// kubelet's reason for a container of the Pod that does not run, unless it resolves without a change.
#[must_use]
pub fn container_error(pod: &Pod) -> Option<String> {
    let all = pod
        .waiting_init_container
        .as_deref()
        .into_iter()
        .chain(&pod.container_statuses);
    let all = all.filter_map(|status| Some((status, status.waiting.as_deref()?)));
    let at_barrier = waiting_for_barrier(pod);
    let is_at_barrier = |name: &str, reason: &str| reason == CONFIG_ERROR && at_barrier.contains(name);
    let mut errors = all
        .filter(|(status, reason)| !STARTUP_REASONS.contains(reason) && !is_at_barrier(&status.name, reason));
    let (status, reason) = errors.next()?;
    let name = &status.name;
    // kubelet alternates between these two, so they count as the same.
    let reason = match reason {
        "ErrImagePull" => "ImagePullBackOff",
        reason => reason,
    };
    let image = pod.containers.iter().find(|c| c.name == *name);
    let image = image.filter(|_| reason.contains("Image"));
    let image = image.map_or(String::new(), |c| format!(" of image {}", c.image));
    let because = match reason {
        CRASH_LOOP_BACK_OFF => &status.last_termination,
        _ => &status.waiting_message,
    };
    let because = because.as_ref().map_or(String::new(), |why| format!(" ({why})"));
    Some(format!("container {name}: {reason}{image}{because}"))
}

/// The scheduler's message about a Pod that has no node, if any.
#[must_use]
pub fn scheduler_message(pod: &Pod) -> Option<String> {
    let scheduled = pod.condition("PodScheduled").filter(|c| !c.is_true)?;
    let message = truncate(&scheduled.message, MAX_QUOTE_CHARS);
    (!message.is_empty()).then(|| message.into_owned())
}

/// The containers that must wait for others of a higher launch priority that are not ready.
fn waiting_for_barrier(pod: &Pod) -> BTreeSet<&str> {
    if pod.annotations.contains_key(keys::CONTAINER_LAUNCH_COMPLETED) {
        return BTreeSet::new();
    }
    let priorities = pod.containers.iter();
    let priorities = priorities.filter_map(|c| Some((c.name.as_str(), c.priority?)));
    let ready = pod.container_statuses.iter().filter(|status| status.ready);
    let ready: BTreeSet<&str> = ready.map(|status| status.name.as_str()).collect();
    let unready = priorities.clone().filter(|(name, _)| !ready.contains(name));
    let highest = unready.map(|(_, priority)| priority).max();
    let waiting = priorities.filter(|(_, priority)| Some(*priority) < highest);
    waiting.map(|(name, _)| name).collect()
}

/// The Pod's first readiness gate that is not True, with the keys that keep it so, if known.
fn failing_gate(pod: &Pod) -> Option<String> {
    let is_false = |gate: &&String| pod.condition(gate).is_none_or(|c| !c.is_true);
    let gate = pod.readiness_gates.iter().find(is_false)?;
    let message = pod
        .condition(gate)
        .map(|c| c.message.as_str())
        .unwrap_or_default();
    let holders = parse_message(message).into_iter();
    let holders: Vec<String> = holders
        .map(|h| format!("{} of {}", h.key, h.user_agent))
        .collect();
    Some(match (gate.as_str(), message) {
        (keys::KRUISE_POD_READY, _) if !holders.is_empty() => {
            format!("readiness gate {gate}, held by {}", holders.join(", "))
        }
        (_, "") => format!("readiness gate {gate}"),
        (_, message) => format!("readiness gate {gate}: {}", truncate(message, MAX_QUOTE_CHARS)),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn reason(status: &Value) -> Option<String> {
        let spec = json!({
            "containers": [{ "name": "app", "image": "app:1" }, { "name": "log", "image": "log:1" }],
            "readinessGates": [{ "conditionType": "KruisePodReady" }],
        });
        not_ready_reason(&Pod::from_json(&json!({ "spec": spec, "status": status })))
    }

    fn containers(log: &Value) -> Value {
        json!({ "containerStatuses": [{ "name": "app", "ready": true }, log] })
    }

    #[test]
    fn container_that_cannot_run_comes_first() {
        let waiting = |reason: &str| {
            json!({ "name": "log", "ready": false, "state": { "waiting": { "reason": reason } },
                "lastState": { "terminated": { "exitCode": 137, "reason": "OOMKilled" } } })
        };
        for (status, expected) in [
            (
                waiting("CrashLoopBackOff"),
                "container log: CrashLoopBackOff (exit code 137, OOMKilled)",
            ),
            (
                waiting("ErrImagePull"),
                "container log: ImagePullBackOff of image log:1",
            ),
            (
                waiting("ContainerCreating"),
                "container log: ContainerCreating (exit code 137, OOMKilled)",
            ),
            (
                json!({ "name": "log", "state": { "running": {} } }),
                "container log: it runs, but is not ready",
            ),
            (json!({ "name": "log" }), "container log: it does not run"),
            (
                json!({ "name": "log", "ready": true }),
                "readiness gate KruisePodReady",
            ),
        ] {
            assert_eq!(
                reason(&containers(&status)).as_deref(),
                Some(expected),
                "{status}"
            );
        }
    }

    /// Each reason is found in one pass over the containers, of which a Pod may have thousands.
    #[test]
    fn containers_behind_a_barrier_are_no_reason() {
        const CONTAINERS: i64 = 4_000;
        let name = |at: i64| format!("c{at}");
        let container = |at: i64| {
            let key = json!({ "name": "barrier", "key": format!("p_{}", CONTAINERS - at) });
            json!({ "name": name(at), "env": [{ "name": keys::ENV_CONTAINER_BARRIER,
                "valueFrom": { "configMapKeyRef": key } }] })
        };
        let status = |at: i64, ready: bool| match ready {
            true => json!({ "name": name(at), "ready": true }),
            false => json!({ "name": name(at), "state": { "waiting": { "reason": CONFIG_ERROR } } }),
        };
        let reason = |first_unready: i64| {
            let statuses = (0..CONTAINERS).rev().map(|at| status(at, at < first_unready));
            not_ready_reason(&Pod::from_json(&json!({
                "spec": { "containers": (0..CONTAINERS).map(container).collect::<Value>() },
                "status": { "containerStatuses": statuses.collect::<Value>() },
            })))
        };
        let begin = std::time::Instant::now();
        let half = CONTAINERS / 2;
        let expected = format!("container {}: {CONFIG_ERROR}", name(half));
        assert_eq!(reason(half), Some(expected), "it may start");
        assert_eq!(reason(CONTAINERS), None);
        assert!(begin.elapsed().as_secs() < 10, "{:?}", begin.elapsed());
    }

    #[test]
    fn gate_names_its_holders() {
        let message = r#"[{"userAgent":"ContainerRecreateRequest","key":"ns/crr"}]"#;
        let condition = json!({ "type": "KruisePodReady", "status": "False", "message": message });
        let expected = "readiness gate KruisePodReady, held by ns/crr of ContainerRecreateRequest";
        assert_eq!(
            reason(&json!({ "conditions": [condition] })).as_deref(),
            Some(expected)
        );
        let open = json!({ "type": "KruisePodReady", "status": "True" });
        assert_eq!(reason(&json!({ "conditions": [open] })), None);
    }
}

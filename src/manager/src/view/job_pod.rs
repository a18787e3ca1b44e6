//! A Pod that runs to completion, with sidecars that are terminated after its other containers.

use std::collections::BTreeMap;

use kruise_api::restart_policy::{
    ALL_CONTAINERS_RESTARTING, RawRestartRule, RestartAction, RestartPolicy, RestartRule, rule_action,
    will_restart,
};
use serde::Deserialize;
use serde_json::Value;

use kruise_api::keys;

/// What the manager caches of such a Pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobPod {
    /// Its main containers.
    pub mains: Box<[JobContainer]>,
    /// Its sidecars, in the order of the spec.
    pub sidecars: Box<[JobContainer]>,
    /// Its grace period, in seconds.
    pub grace_period_seconds: i64,
}

/// A container of such a Pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobContainer {
    /// Name of the container.
    pub name: Box<str>,
    /// Whether it is a sidecar whose exit code has no effect on the Pod's phase.
    pub ignore_exit_code: bool,
    /// What it does.
    pub state: JobContainerState,
}

/// The state of a container, as far as the end of its Pod depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum JobContainerState {
    /// It was not started yet, or kubelet will start it again.
    #[default]
    Waiting,
    /// It runs.
    Running,
    /// It has ended with this exit code, and kubelet will not start it again.
    Ended(i32),
}

impl JobPod {
    /// The Pod, if it runs to completion, has sidecars and a status of each container.
    pub(super) fn from_json(pod: &Value) -> Option<Self> {
        if pod["metadata"]["annotations"].get(keys::MIRROR_POD).is_some() {
            // Kubelet restores the status of a static Pod, which it does not read.
            return None;
        }
        let (spec, status) = (&pod["spec"], &pod["status"]);
        let policy = RestartPolicy::parse(spec["restartPolicy"].as_str())?;
        if policy == RestartPolicy::Always {
            return None;
        }
        let containers = spec["containers"].as_array()?;
        if !containers.iter().any(is_sidecar) {
            return None;
        }
        let mut conditions = status["conditions"].as_array().into_iter().flatten();
        if conditions.any(|one| one["type"] == ALL_CONTAINERS_RESTARTING && one["status"] == "True") {
            return None;
        }
        let statuses = by_name(&status["containerStatuses"]);
        let (mut mains, mut sidecars) = (Vec::new(), Vec::new());
        for container in containers {
            let name = container["name"].as_str()?;
            let status = statuses.get(name)?;
            let rules = restart_rules(container);
            let state = state(container, policy, &rules, &status["state"])?;
            let mut parsed = JobContainer {
                name: name.into(),
                ignore_exit_code: false,
                state,
            };
            if is_sidecar(container) {
                // Its end must find a Pod that has ended: kubelet would run the main containers again.
                let restarts_all = rules
                    .iter()
                    .any(|rule| rule.action == RestartAction::RestartAllContainers);
                parsed.ignore_exit_code =
                    restarts_all || is_true(container, keys::ENV_IGNORE_SIDECAR_EXIT_CODE);
                sidecars.push(parsed);
            } else {
                mains.push(parsed);
            }
        }
        Some(Self {
            mains: mains.into(),
            sidecars: sidecars.into(),
            grace_period_seconds: spec["terminationGracePeriodSeconds"].as_i64().unwrap_or(30),
        })
    }
}

fn restart_rules(container: &Value) -> Vec<RestartRule> {
    let rules = container["restartPolicyRules"].as_array().into_iter().flatten();
    rules
        .filter_map(|rule| RawRestartRule::deserialize(rule).ok()?.parse())
        .collect()
}

/// The items of a list by their names: a Pod may have thousands of containers.
pub(super) fn by_name(list: &Value) -> BTreeMap<&str, &Value> {
    let items = list.as_array().into_iter().flatten();
    items
        .filter_map(|item| Some((item["name"].as_str()?, item)))
        .collect()
}

/// Whether the container has ended, and kubelet will not start it again.
pub(super) fn ended_for_good(container: &Value, policy: RestartPolicy, now: &Value) -> bool {
    let state = state(container, policy, &restart_rules(container), now);
    matches!(state, Some(JobContainerState::Ended(_)))
}

/// `None` if kubelet is about to restart all containers of the Pod.
fn state(
    container: &Value,
    policy: RestartPolicy,
    rules: &[RestartRule],
    state: &Value,
) -> Option<JobContainerState> {
    if state["running"].is_object() {
        return Some(JobContainerState::Running);
    }
    let policy = RestartPolicy::parse(container["restartPolicy"].as_str()).unwrap_or(policy);
    let code = state["terminated"]["exitCode"].as_i64();
    let Some(code) = code.and_then(|code| i32::try_from(code).ok()) else {
        return Some(JobContainerState::Waiting);
    };
    if rule_action(rules, code) == Some(RestartAction::RestartAllContainers) {
        return None;
    }
    Some(match will_restart(rules, policy, code) {
        true => JobContainerState::Waiting,
        false => JobContainerState::Ended(code),
    })
}

/// Whether the container is terminated after the main ones. The image is for virtual nodes; on others it has no effect.
fn is_sidecar(container: &Value) -> bool {
    let image = env(container, keys::ENV_TERMINATE_SIDECAR_WITH_IMAGE);
    is_true(container, keys::ENV_TERMINATE_SIDECAR) || image.is_some_and(|image| !image.is_empty())
}

fn is_true(container: &Value, name: &str) -> bool {
    env(container, name).is_some_and(|value| value.eq_ignore_ascii_case(keys::TRUE))
}

/// The literal value of an environment variable; of several with that name, the last is set.
fn env<'a>(container: &'a Value, name: &str) -> Option<&'a str> {
    let variables = container["env"].as_array()?;
    let variable = variables.iter().rev().find(|variable| variable["name"] == name)?;
    variable["value"].as_str()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::{PodView, RawPod};
    use super::*;
    use serde_json::json;

    fn pod(policy: &str, containers: &Value, states: &Value) -> Value {
        let names = containers.as_array().into_iter().flatten();
        let states = states.as_array().into_iter().flatten();
        let statuses: Vec<Value> = names
            .zip(states)
            .map(|(container, state)| json!({ "name": container["name"], "state": state }))
            .collect();
        json!({
            "spec": { "restartPolicy": policy, "containers": containers },
            "status": { "phase": "Running", "containerStatuses": statuses },
        })
    }

    /// Reads the Pod as the watch does.
    fn parse(pod: &Value) -> Option<JobPod> {
        let pod: RawPod = serde_json::from_value(pod.clone()).unwrap();
        PodView::from(&pod).job.map(|job| *job)
    }

    fn sidecar(name: &str, variable: &str, value: &str) -> Value {
        json!({ "name": name, "env": [{ "name": variable, "value": value }] })
    }

    /// A Pod may have thousands of containers, and its user may change it many times in a second.
    #[test]
    fn pod_with_many_containers_is_read_quickly() {
        const COUNT: usize = 20_000;
        let mut containers: Vec<Value> = (1..COUNT).map(|at| json!({ "name": format!("c{at}") })).collect();
        containers.push(sidecar("side", keys::ENV_TERMINATE_SIDECAR, "true"));
        let states: Value = vec![json!({ "running": {} }); COUNT].into();
        let pod = pod("Never", &json!(containers), &states);
        let begin = std::time::Instant::now();
        let job = parse(&pod).unwrap();
        assert!(begin.elapsed().as_secs() < 10, "{:?}", begin.elapsed());
        assert_eq!((job.mains.len(), job.sidecars.len()), (COUNT - 1, 1));
    }

    #[test]
    fn sidecars_are_those_with_the_variables() {
        let cases = [
            (keys::ENV_TERMINATE_SIDECAR, "true", true),
            (keys::ENV_TERMINATE_SIDECAR, "TRUE", true),
            (keys::ENV_TERMINATE_SIDECAR, "yes", false),
            (keys::ENV_TERMINATE_SIDECAR_WITH_IMAGE, "exit:v1", true),
            (keys::ENV_TERMINATE_SIDECAR_WITH_IMAGE, "", false),
            (keys::ENV_IGNORE_SIDECAR_EXIT_CODE, "true", false),
        ];
        for (variable, value, expected) in cases {
            let containers = json!([{ "name": "main" }, sidecar("log", variable, value)]);
            let states = json!([{ "running": {} }, { "running": {} }]);
            for policy in ["Never", "OnFailure"] {
                let parsed = parse(&pod(policy, &containers, &states));
                let names = parsed.map(|pod| (pod.mains.len(), pod.sidecars.len()));
                assert_eq!(names, expected.then_some((1, 1)), "{variable}={value}");
            }
            assert_eq!(parse(&pod("Always", &containers, &states)), None);
        }
        let mut both = sidecar("log", keys::ENV_TERMINATE_SIDECAR, "true");
        if let Some(env) = both["env"].as_array_mut() {
            env.push(json!({ "name": keys::ENV_IGNORE_SIDECAR_EXIT_CODE, "value": "True" }));
        }
        let both = pod("Never", &json!([{ "name": "main" }, both]), &json!([{}, {}]));
        let ignored = parse(&both).map(|pod| pod.sidecars.iter().all(|one| one.ignore_exit_code));
        assert_eq!(ignored, Some(true));
    }

    #[test]
    fn static_pod_is_left_alone() {
        let containers = json!([{ "name": "main" }, sidecar("log", keys::ENV_TERMINATE_SIDECAR, "true")]);
        let mut pod = pod("OnFailure", &containers, &json!([{}, {}]));
        assert!(parse(&pod).is_some());
        pod["metadata"] = json!({ "annotations": { keys::MIRROR_POD: "hash" } });
        assert_eq!(parse(&pod), None);
    }

    #[test]
    fn pod_without_all_statuses_is_not_judged() {
        let containers = json!([{ "name": "main" }, sidecar("log", keys::ENV_TERMINATE_SIDECAR, "true")]);
        assert_eq!(
            parse(&pod("Never", &containers, &json!([{ "running": {} }]))),
            None
        );
    }

    #[test]
    fn pod_whose_containers_are_all_restarted_is_not_judged() {
        let mut watcher = sidecar("watcher", keys::ENV_TERMINATE_SIDECAR, "true");
        watcher["restartPolicy"] = json!("Never");
        watcher["restartPolicyRules"] =
            json!([{ "action": "RestartAllContainers", "exitCodes": { "operator": "In", "values": [42] } }]);
        let containers = json!([{ "name": "main" }, watcher]);
        let exit = |code| json!({ "terminated": { "exitCode": code } });
        assert_eq!(
            parse(&pod("Never", &containers, &json!([exit(137), exit(42)]))),
            None
        );
        let mut ended = pod("Never", &containers, &json!([exit(0), { "running": {} }]));
        let job = parse(&ended).unwrap();
        assert!(
            job.sidecars[0].ignore_exit_code,
            "the Pod gets its phase before the sidecar is stopped"
        );
        ended["status"]["conditions"] = json!([{ "type": "AllContainersRestarting", "status": "True" }]);
        assert_eq!(parse(&ended), None);
    }

    #[test]
    fn container_has_ended_if_kubelet_does_not_restart_it() {
        let exit = |code: i64| json!({ "terminated": { "exitCode": code } });
        let rule = json!([{ "action": "Restart", "exitCodes": { "operator": "In", "values": [42] } }]);
        let cases = [
            ("Never", json!({}), exit(1), JobContainerState::Ended(1)),
            ("OnFailure", json!({}), exit(0), JobContainerState::Ended(0)),
            ("OnFailure", json!({}), exit(1), JobContainerState::Waiting),
            (
                "OnFailure",
                json!({ "restartPolicy": "Never" }),
                exit(1),
                JobContainerState::Ended(1),
            ),
            (
                "Never",
                json!({ "restartPolicy": "Never", "restartPolicyRules": rule }),
                exit(42),
                JobContainerState::Waiting,
            ),
            (
                "Never",
                json!({ "restartPolicy": "Never", "restartPolicyRules": rule }),
                exit(1),
                JobContainerState::Ended(1),
            ),
            (
                "Never",
                json!({}),
                json!({ "waiting": { "reason": "ContainerCreating" } }),
                JobContainerState::Waiting,
            ),
            ("Never", json!({}), exit(1 << 40), JobContainerState::Waiting),
        ];
        for (policy, mut main, state, expected) in cases {
            main["name"] = json!("main");
            let containers = json!([main, sidecar("log", keys::ENV_TERMINATE_SIDECAR, "true")]);
            let parsed = parse(&pod(policy, &containers, &json!([state, {}])));
            assert_eq!(
                parsed.map(|pod| pod.mains[0].state),
                Some(expected),
                "{policy} {main} {state}"
            );
        }
    }
}

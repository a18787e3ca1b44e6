//! Whether kubelet restarts a container that has ended.
//!
//! Since Kubernetes 1.34 a container can have a restart policy of its own, and rules based on the exit code. With a
//! rule `RestartAllContainers` (1.35) kubelet stops and starts every container of the Pod.

use std::fmt;

use serde::Deserialize;

use super::{NodePod, PodContainer, PodContainerStatus};

/// When kubelet restarts an ended container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RestartPolicy {
    /// With any exit code.
    #[default]
    Always,
    /// Unless the exit code was 0.
    OnFailure,
    /// Not at all.
    Never,
}

impl RestartPolicy {
    /// Parses the policy of that name.
    pub(super) fn parse(name: Option<&str>) -> Option<Self> {
        match name? {
            "Always" => Some(Self::Always),
            "OnFailure" => Some(Self::OnFailure),
            "Never" => Some(Self::Never),
            _ => None,
        }
    }
}

impl fmt::Display for RestartPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Always => "Always",
            Self::OnFailure => "OnFailure",
            Self::Never => "Never",
        })
    }
}

/// What kubelet does after certain exit codes of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestartRule {
    action: RestartAction,
    /// Whether the rule applies to these codes, or to all others.
    operator_in: bool,
    codes: Vec<i32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RestartAction {
    Restart,
    RestartAllContainers,
    /// An unknown action: the container's policy decides.
    Other,
}

impl PodContainer {
    /// The action of the first rule for this exit code.
    fn rule_action(&self, code: i32) -> Option<RestartAction> {
        let rule = self
            .restart_rules
            .iter()
            .find(|rule| rule.codes.contains(&code) == rule.operator_in);
        rule.map(|rule| rule.action)
    }

    /// Whether kubelet restarts all containers of the Pod after some exit code of this one.
    #[must_use]
    pub fn may_restart_all_containers(&self) -> bool {
        self.restart_rules
            .iter()
            .any(|rule| rule.action == RestartAction::RestartAllContainers)
    }

    /// Whether kubelet restarts all containers of the Pod after the end of this one.
    fn restarts_all_containers(&self) -> bool {
        let code = self.status.as_ref().and_then(PodContainerStatus::exit_code);
        code.is_some_and(|code| self.rule_action(code) == Some(RestartAction::RestartAllContainers))
    }
}

impl PodContainerStatus {
    /// The exit code, if the container neither runs nor is about to start: kubelet reports `waiting` for a container
    /// that it will start, and exit code 137 for one that it removed with all others.
    #[must_use]
    pub fn exit_code(&self) -> Option<i32> {
        let stopped = !self.running && self.waiting.is_none();
        self.last_termination.filter(|_| stopped).map(|ended| ended.code)
    }
}

impl NodePod {
    /// The restart policy that applies when no rule matches.
    #[must_use]
    pub fn restart_policy(&self, container: &PodContainer) -> RestartPolicy {
        container.restart_policy.unwrap_or(self.restart_policy)
    }

    /// Whether kubelet restarts the container after this exit code.
    #[must_use]
    pub fn will_restart(&self, container: &PodContainer, code: i32) -> bool {
        match (container.rule_action(code), self.restart_policy(container)) {
            (Some(RestartAction::Restart | RestartAction::RestartAllContainers), _)
            | (_, RestartPolicy::Always) => true,
            (_, RestartPolicy::OnFailure) => code != 0,
            (_, RestartPolicy::Never) => false,
        }
    }

    /// Whether kubelet is about to restart all of its containers, whatever their policies are.
    #[must_use]
    pub fn restarts_all_containers(&self) -> bool {
        self.restarting_all_containers || self.containers.iter().any(PodContainer::restarts_all_containers)
    }
}

/// A rule as the API server sends it.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RawRestartRule {
    action: String,
    exit_codes: Option<ExitCodes>,
}

#[derive(Deserialize)]
struct ExitCodes {
    operator: String,
    values: Option<Vec<i32>>,
}

impl RawRestartRule {
    /// None if kubelet ignores the rule.
    pub(super) fn parse(self) -> Option<RestartRule> {
        let ExitCodes { operator, values } = self.exit_codes?;
        let within = match operator.as_str() {
            "In" => true,
            "NotIn" => false,
            _ => return None,
        };
        let action = match self.action.as_str() {
            "Restart" => RestartAction::Restart,
            "RestartAllContainers" => RestartAction::RestartAllContainers,
            _ => RestartAction::Other,
        };
        Some(RestartRule {
            action,
            operator_in: within,
            codes: values.unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::{Value, json};

    fn pod(policy: &str, containers: Value) -> NodePod {
        let object = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "p" },
            "spec": { "restartPolicy": policy, "containers": containers } });
        serde_json::from_str(&object.to_string()).unwrap()
    }

    fn rule(action: &str, operator: &str, codes: &[i32]) -> Value {
        json!({ "action": action, "exitCodes": { "operator": operator, "values": codes } })
    }

    /// Those of the exit codes 0, 1 and 42 after which the first container is restarted.
    fn restarting_codes(pod: &NodePod) -> Vec<i32> {
        let codes = [0, 1, 42].into_iter();
        codes
            .filter(|code| pod.will_restart(&pod.containers[0], *code))
            .collect()
    }

    #[test]
    fn restart_rules_precede_container_and_pod_policy() {
        for (policy, codes) in [
            ("Always", vec![0, 1, 42]),
            ("OnFailure", vec![1, 42]),
            ("Never", vec![]),
        ] {
            assert_eq!(
                restarting_codes(&pod(policy, json!([{ "name": "a" }]))),
                codes,
                "{policy}"
            );
            let own = json!([{ "name": "a", "restartPolicy": policy }]);
            assert_eq!(restarting_codes(&pod("Never", own.clone())), codes, "{policy}");
            assert_eq!(restarting_codes(&pod("Always", own)), codes, "{policy}");
        }
        for (rules, codes) in [
            (json!([rule("Restart", "In", &[42])]), vec![42]),
            (json!([rule("Restart", "NotIn", &[42])]), vec![0, 1]),
            (json!([rule("RestartAllContainers", "In", &[0])]), vec![0]),
            (
                json!([rule("Later", "In", &[42]), rule("Restart", "NotIn", &[0])]),
                vec![1],
            ),
            (
                json!([{ "action": "Restart" }, rule("Restart", "About", &[42])]),
                vec![],
            ),
            (json!(null), vec![]),
        ] {
            let own = json!([{ "name": "a", "restartPolicy": "Never", "restartPolicyRules": rules }]);
            assert_eq!(restarting_codes(&pod("Always", own)), codes, "{rules}");
        }
    }

    #[test]
    fn exit_rule_can_restart_all_containers() {
        let rules = json!([rule("RestartAllContainers", "In", &[3])]);
        let containers =
            json!([{ "name": "a", "restartPolicy": "Never", "restartPolicyRules": rules }, { "name": "b" }]);
        let mut pod = pod("Never", containers);
        assert!(
            pod.containers[0].may_restart_all_containers() && !pod.containers[1].may_restart_all_containers()
        );
        assert!(!pod.restarts_all_containers());
        let mut status = PodContainerStatus {
            last_termination: Some(super::super::Termination {
                code: 3,
                ..Default::default()
            }),
            ..PodContainerStatus::default()
        };
        pod.containers[0].status = Some(status.clone());
        assert!(pod.restarts_all_containers());
        let waiting = Some(("RestartingAllContainers".to_owned(), String::new()));
        for (running, waiting) in [(true, None), (false, waiting)] {
            (status.running, status.waiting) = (running, waiting);
            assert_eq!(status.exit_code(), None);
            pod.containers[0].status = Some(status.clone());
            assert!(!pod.restarts_all_containers(), "that was an earlier end");
        }
        pod.restarting_all_containers = true;
        assert!(pod.restarts_all_containers());
    }
}

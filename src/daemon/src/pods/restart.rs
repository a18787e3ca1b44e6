//! Whether kubelet starts a container again that has ended.
//!
//! Since Kubernetes 1.34 a container can have a policy of its own, and rules that go by the exit code. One that says
//! `RestartAllContainers` (1.35) has kubelet stop and start every container of the Pod.

use std::fmt;

use serde::Deserialize;

use super::{ContainerView, PodView, StatusView};

/// When kubelet starts an ended container again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RestartPolicy {
    /// Whatever it ended with.
    #[default]
    Always,
    /// Unless it ended with exit code 0.
    OnFailure,
    /// Not at all.
    Never,
}

impl RestartPolicy {
    /// The policy of that name, if there is one.
    pub(super) fn of(name: Option<&str>) -> Option<Self> {
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

/// What kubelet does when a container has ended with one of these exit codes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    action: Action,
    /// Whether the codes are those that it is for, or those that it is not for.
    within: bool,
    codes: Vec<i32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Restart,
    RestartAllContainers,
    /// One that we do not know: the container's policy decides.
    Other,
}

impl ContainerView {
    /// What the first rule for this exit code says.
    fn action(&self, code: i32) -> Option<Action> {
        let rule = self
            .rules
            .iter()
            .find(|rule| rule.codes.contains(&code) == rule.within);
        rule.map(|rule| rule.action)
    }

    /// Whether kubelet starts all containers of the Pod again after some end of this one.
    #[must_use]
    pub fn may_restart_all(&self) -> bool {
        self.rules
            .iter()
            .any(|rule| rule.action == Action::RestartAllContainers)
    }

    /// Whether its end is one after which kubelet starts all containers of the Pod again.
    fn restarts_all(&self) -> bool {
        let code = self.status.as_ref().and_then(StatusView::exit_code);
        code.is_some_and(|code| self.action(code) == Some(Action::RestartAllContainers))
    }
}

impl StatusView {
    /// What the container ended with, where it neither runs nor is about to: kubelet calls `waiting` what it is going to
    /// start, and gives what it removed with all others an exit code of 137.
    #[must_use]
    pub fn exit_code(&self) -> Option<i32> {
        let over = !self.running && self.waiting.is_none();
        self.ended.filter(|_| over).map(|ended| ended.code)
    }
}

impl PodView {
    /// The policy by which kubelet decides about a container that no rule is for.
    #[must_use]
    pub fn policy(&self, container: &ContainerView) -> RestartPolicy {
        container.restart.unwrap_or(self.restart)
    }

    /// Whether kubelet starts the container again after it has ended with this code.
    #[must_use]
    pub fn starts_again(&self, container: &ContainerView, code: i32) -> bool {
        match (container.action(code), self.policy(container)) {
            (Some(Action::Restart | Action::RestartAllContainers), _) | (_, RestartPolicy::Always) => true,
            (_, RestartPolicy::OnFailure) => code != 0,
            (_, RestartPolicy::Never) => false,
        }
    }

    /// Whether kubelet is about to start all of its containers again, whatever their policies are.
    #[must_use]
    pub fn restarts_all(&self) -> bool {
        self.restarting_all || self.containers.iter().any(ContainerView::restarts_all)
    }
}

/// A rule as the API server sends it.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RawRule {
    action: String,
    exit_codes: Option<ExitCodes>,
}

#[derive(Deserialize)]
struct ExitCodes {
    operator: String,
    values: Option<Vec<i32>>,
}

impl RawRule {
    /// None where kubelet passes over it.
    pub(super) fn read(self) -> Option<Rule> {
        let ExitCodes { operator, values } = self.exit_codes?;
        let within = match operator.as_str() {
            "In" => true,
            "NotIn" => false,
            _ => return None,
        };
        let action = match self.action.as_str() {
            "Restart" => Action::Restart,
            "RestartAllContainers" => Action::RestartAllContainers,
            _ => Action::Other,
        };
        Some(Rule {
            action,
            within,
            codes: values.unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::{Value, json};

    fn pod(policy: &str, containers: Value) -> PodView {
        let object = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "p" },
            "spec": { "restartPolicy": policy, "containers": containers } });
        serde_json::from_str(&object.to_string()).unwrap()
    }

    fn rule(action: &str, operator: &str, codes: &[i32]) -> Value {
        json!({ "action": action, "exitCodes": { "operator": operator, "values": codes } })
    }

    /// Exit codes of 0, 1 and 42 after which the first container is started again.
    fn again(pod: &PodView) -> Vec<i32> {
        let codes = [0, 1, 42].into_iter();
        codes
            .filter(|code| pod.starts_again(&pod.containers[0], *code))
            .collect()
    }

    #[test]
    fn a_container_starts_again_by_its_rules_then_its_policy_then_the_pods() {
        for (policy, codes) in [
            ("Always", vec![0, 1, 42]),
            ("OnFailure", vec![1, 42]),
            ("Never", vec![]),
        ] {
            assert_eq!(again(&pod(policy, json!([{ "name": "a" }]))), codes, "{policy}");
            let own = json!([{ "name": "a", "restartPolicy": policy }]);
            assert_eq!(again(&pod("Never", own.clone())), codes, "{policy}");
            assert_eq!(again(&pod("Always", own)), codes, "{policy}");
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
            assert_eq!(again(&pod("Always", own)), codes, "{rules}");
        }
    }

    #[test]
    fn one_end_can_start_all_containers_again() {
        let rules = json!([rule("RestartAllContainers", "In", &[3])]);
        let containers =
            json!([{ "name": "a", "restartPolicy": "Never", "restartPolicyRules": rules }, { "name": "b" }]);
        let mut pod = pod("Never", containers);
        assert!(pod.containers[0].may_restart_all() && !pod.containers[1].may_restart_all());
        assert!(!pod.restarts_all());
        let mut status = StatusView {
            ended: Some(super::super::Ended {
                code: 3,
                ..Default::default()
            }),
            ..StatusView::default()
        };
        pod.containers[0].status = Some(status.clone());
        assert!(pod.restarts_all());
        let waiting = Some(("RestartingAllContainers".to_owned(), String::new()));
        for (running, waiting) in [(true, None), (false, waiting)] {
            (status.running, status.waiting) = (running, waiting);
            assert_eq!(status.exit_code(), None);
            pod.containers[0].status = Some(status.clone());
            assert!(!pod.restarts_all(), "that was an earlier end");
        }
        pod.restarting_all = true;
        assert!(pod.restarts_all());
    }
}

//! Whether kubelet restarts a container that has ended: the policies of Pod and container, and rules by exit code.
//!
//! A container can have a policy and rules of its own since Kubernetes 1.34; with a rule `RestartAllContainers` (1.35)
//! kubelet stops and starts every container of the Pod.

use std::fmt;

use serde::Deserialize;

/// Condition of a Pod whose containers kubelet removes and starts again, by a rule `RestartAllContainers`.
pub const ALL_CONTAINERS_RESTARTING: &str = "AllContainersRestarting";

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
    #[must_use]
    pub fn parse(name: Option<&str>) -> Option<Self> {
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
    /// What kubelet does.
    pub action: RestartAction,
    /// Whether the rule applies to these codes, or to all others.
    operator_in: bool,
    codes: Vec<i32>,
}

/// What kubelet does after the end of a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestartAction {
    /// It starts the container again.
    Restart,
    /// It starts all containers of the Pod again.
    RestartAllContainers,
    /// An unknown action: the container's policy decides.
    Other,
}

/// The action of the first rule for this exit code.
#[must_use]
pub fn rule_action(rules: &[RestartRule], code: i32) -> Option<RestartAction> {
    let rule = rules
        .iter()
        .find(|rule| rule.codes.contains(&code) == rule.operator_in);
    rule.map(|rule| rule.action)
}

/// Whether kubelet restarts a container with these rules and this policy after this exit code.
#[must_use]
pub fn will_restart(rules: &[RestartRule], policy: RestartPolicy, code: i32) -> bool {
    match (rule_action(rules, code), policy) {
        (Some(RestartAction::Restart | RestartAction::RestartAllContainers), _)
        | (_, RestartPolicy::Always) => true,
        (_, RestartPolicy::OnFailure) => code != 0,
        (_, RestartPolicy::Never) => false,
    }
}

/// A rule as the API server sends it.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RawRestartRule {
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
    #[must_use]
    pub fn parse(self) -> Option<RestartRule> {
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

//! Whether kubelet restarts a container that has ended.
//!
//! The rules are those of [`kruise_api::restart_policy`].

use super::{NodePod, PodContainer, PodContainerStatus};
use kruise_api::restart_policy::{self, RestartAction, RestartPolicy};

impl PodContainer {
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
        code.is_some_and(|code| {
            restart_policy::rule_action(&self.restart_rules, code)
                == Some(RestartAction::RestartAllContainers)
        })
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
        restart_policy::will_restart(&container.restart_rules, self.restart_policy(container), code)
    }

    /// Whether kubelet is about to restart all of its containers, whatever their policies are.
    #[must_use]
    pub fn restarts_all_containers(&self) -> bool {
        self.restarting_all_containers || self.containers.iter().any(PodContainer::restarts_all_containers)
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

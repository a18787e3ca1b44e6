//! Condition `Waiting` of a SidecarSet: what its rollout waits for, and what is to be done about it.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kruise_api::sidecarset::SidecarSetUpdateStrategy;
use kruise_api::validation::truncate;

use super::changed_field::ChangedField;
use super::hot_upgrade::pairs;
use super::plan::{Plan, Wait};
use super::predicates::{is_consistent_container, is_running_and_ready};
use super::set::SetView;
use crate::in_place::Pod;
use crate::names::join_first;
use crate::not_ready_reason::{not_ready_reason, scheduler_message};

/// Maximum number of names for one reason in a message.
const MAX_NAMES: usize = 3;
/// Maximum number of different reasons for one wait in a message.
const MAX_REASONS: usize = 4;
/// Maximum characters of one name, of a namespace with a Pod at most.
const MAX_NAME_CHARS: usize = 320;
/// Maximum characters of one reason.
const MAX_REASON_CHARS: usize = 300;
/// Maximum characters of one wait.
const MAX_WAIT_CHARS: usize = 1000;
/// Maximum characters of a limit of the spec.
const MAX_LIMIT_CHARS: usize = 20;
/// Maximum characters of a message.
pub const MAX_MESSAGE_CHARS: usize = 3000;

/// A rollout, and what it waits for.
#[derive(Clone, Copy, Debug)]
pub struct WaitingRollout<'a> {
    /// The SidecarSet.
    pub set: SetView<'a>,
    /// Its matched Pods, in the order of the plan.
    pub pods: &'a [&'a Pod],
    /// Their namespaces, in the same order.
    pub namespaces: &'a [&'a str],
    /// [`Plan::waits`].
    pub waits: &'a [Wait],
    /// How the containers of the Pod of [`first_not_upgradable`] differ, if that is known.
    pub changed_field: Option<&'a ChangedField>,
}

/// Reason and message of the condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// What kind of thing the rollout waits for, the most important one, in CamelCase.
    pub reason: &'static str,
    /// All that it waits for, at most [`MAX_MESSAGE_CHARS`] characters.
    pub message: String,
}

/// The condition; `None` if the rollout waits for nothing.
///
/// It holds also what a user asked for (a pause, a partition), because another user may look at it.
#[must_use]
pub fn condition(rollout: &WaitingRollout<'_>) -> Option<Waiting> {
    let first = rollout.waits.first()?;
    let waits = rollout.waits.iter();
    let texts: Vec<String> = waits
        .map(|wait| truncate(&rollout.text(wait), MAX_WAIT_CHARS).into_owned())
        .collect();
    // The ellipsis is one more.
    let message = truncate(&texts.join("; "), MAX_MESSAGE_CHARS - 1).into_owned();
    Some(Waiting {
        reason: reason(first),
        message,
    })
}

/// Whether the plan does not show what the rollout waits for, because Pods are written first. What was reported before
/// stays then: otherwise the status would change twice for each Pod.
#[must_use]
pub fn is_undecided(plan: &Plan) -> bool {
    !plan.flips.is_empty()
}

/// The first Pod that keeps its containers because more than images differ, by index: its revision is what
/// [`super::changed_field::changed_field`] compares.
#[must_use]
pub fn first_not_upgradable(waits: &[Wait]) -> Option<usize> {
    waits.iter().find_map(|wait| match wait {
        Wait::NotUpgradable(pods) => pods.first().copied(),
        _ => None,
    })
}

/// As with other workloads where they wait for the same.
fn reason(wait: &Wait) -> &'static str {
    match wait {
        Wait::NotUpdate { .. } => "NotUpdate",
        Wait::Paused { .. } => "Paused",
        Wait::NotUpgradable(_) => "NotUpgradable",
        Wait::InvalidAnnotation(_) => "InvalidAnnotation",
        Wait::HotUpgrade(_) => "HotUpgrade",
        Wait::PreviousUpdate(_) => "PreviousUpdate",
        Wait::MaxUnavailable { .. } => "MaxUnavailable",
        Wait::UpdatedNotReady(_) => "PodsNotReady",
        Wait::Partition(_) => "Partition",
        Wait::NotSelected(_) => "NotSelected",
        Wait::Refused(_) => "UpdateRefused",
    }
}

impl WaitingRollout<'_> {
    fn text(&self, wait: &Wait) -> String {
        match wait {
            Wait::NotUpdate { outdated } => {
                let count = self.count(outdated, ["is", "are"]);
                format!("{count} not updated, because spec.updateStrategy.type is NotUpdate")
            }
            Wait::Paused { outdated } => {
                let count = self.count(outdated, ["is", "are"]);
                format!("{count} not updated, because spec.updateStrategy.paused is true")
            }
            Wait::NotUpgradable(pods) => self.not_upgradable(pods),
            Wait::InvalidAnnotation(pods) => {
                let count = self.count(pods, ["cannot", "cannot"]);
                let reasons = pods.iter().map(|(at, why)| (*at, why.to_string()));
                let list = self.list(reasons);
                format!("{count} be updated until annotation or patch is corrected: {list}")
            }
            Wait::HotUpgrade(pods) => {
                let count = self.count(pods, ["waits", "wait"]);
                let list = self.list(self.reasons(pods, |pod| self.hot_upgrade_reason(pod)));
                format!("{count} for the containers that take over: {list}")
            }
            Wait::PreviousUpdate(pods) => {
                let count = self.count(pods, ["waits", "wait"]);
                let list = self.list(self.reasons(pods, |pod| self.stale_containers(pod, |_| true)));
                format!("{count} for the end of the previous update: {list}")
            }
            Wait::MaxUnavailable {
                held,
                unavailable,
                limit,
            } => self.max_unavailable(held, *unavailable, *limit),
            Wait::Refused(pods) => {
                let count = self.count(pods, ["cannot", "cannot"]);
                let names = self.names(pods);
                format!("{count} be updated, because the API server refuses it, as events show: {names}")
            }
            Wait::UpdatedNotReady(pods) => {
                let count = self.count(pods, ["is", "are"]);
                let list = self.list(self.reasons(pods, |pod| self.unavailable_reason(pod)));
                format!("{count} updated, but not ready: {list}")
            }
            Wait::Partition(pods) => {
                let count = self.count(pods, ["keeps", "keep"]);
                let limit = limit_text(self.strategy().and_then(|s| s.partition.as_ref()));
                format!("{count} the old containers, as partition {limit} asks")
            }
            Wait::NotSelected(pods) => {
                let count = self.count(pods, ["keeps", "keep"]);
                format!("{count} the old containers, because spec.updateStrategy.selector leaves them out")
            }
        }
    }

    /// "1 of 10 Pods VERB", with the verb for one or for several.
    fn count<T>(&self, pods: &[T], [one, several]: [&str; 2]) -> String {
        let verb = if pods.len() == 1 { one } else { several };
        format!("{} of {} Pods {verb}", pods.len(), self.pods.len())
    }

    fn not_upgradable(&self, pods: &[usize]) -> String {
        let count = self.count(pods, ["keeps", "keep"]);
        let until = if pods.len() == 1 { "it is" } else { "they are" };
        let field = self.changed_field.map(|field| field.to_string());
        let field = field.as_deref().unwrap_or("more than images differs");
        let field = truncate(field, MAX_REASON_CHARS);
        let names = self.names(pods);
        format!(
            "{count} the old containers until {until} recreated, because of a change that cannot be made in place \
             ({field}): {names}"
        )
    }

    fn max_unavailable(&self, held: &[usize], unavailable: usize, limit: usize) -> String {
        let count = self.count(held, ["waits", "wait"]);
        let value = self.strategy().and_then(|s| s.max_unavailable.as_ref());
        let text = match value {
            Some(IntOrString::String(_)) => {
                format!("{}, {limit} of {} Pods", limit_text(value), self.pods.len())
            }
            Some(IntOrString::Int(_)) | None => limit.to_string(),
        };
        if limit == 0 {
            return format!(
                "{count} until maxUnavailable is more than 0: it is {text}, so that no ready Pod may be updated"
            );
        }
        let (verb, s) = if unavailable == 1 {
            ("is", "")
        } else {
            ("are", "s")
        };
        format!(
            "{count}: {unavailable} Pod{s} {verb} unavailable or being updated, and maxUnavailable is {text}"
        )
    }

    fn strategy(&self) -> Option<&SidecarSetUpdateStrategy> {
        self.set.spec.update_strategy.as_ref()
    }

    fn reasons<'b>(
        &'b self,
        pods: &'b [usize],
        reason: impl Fn(&Pod) -> String + 'b,
    ) -> impl Iterator<Item = (usize, String)> + 'b {
        let reason = move |at: &usize| self.pods.get(*at).map(|pod| reason(pod)).unwrap_or_default();
        pods.iter().map(move |at| (*at, reason(at)))
    }

    /// The first names of Pods for each reason; the reason of most Pods comes first.
    fn list(&self, reasons: impl Iterator<Item = (usize, String)>) -> String {
        let mut by_reason: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (at, reason) in reasons {
            let reason = truncate(&reason, MAX_REASON_CHARS).into_owned();
            by_reason.entry(reason).or_default().push(at);
        }
        let mut by_reason: Vec<_> = by_reason.into_iter().collect();
        by_reason.sort_by_key(|(_, pods)| Reverse(pods.len()));
        let parts = by_reason
            .iter()
            .take(MAX_REASONS)
            .map(|(reason, pods)| match reason.as_str() {
                "" => self.names(pods),
                reason => format!("{} ({reason})", self.names(pods)),
            });
        let text = parts.collect::<Vec<_>>().join(", ");
        match by_reason.get(MAX_REASONS..).unwrap_or_default() {
            [] => text,
            rest => {
                let more: usize = rest.iter().map(|(_, pods)| pods.len()).sum();
                format!("{text} and {more} more for other reasons")
            }
        }
    }

    fn names(&self, pods: &[usize]) -> String {
        join_first(MAX_NAMES, pods.iter().map(|at| self.name(*at)))
    }

    fn name(&self, at: usize) -> String {
        let namespace = self.namespaces.get(at).copied().unwrap_or_default();
        let pod = self.pods.get(at).map(|pod| pod.name.as_str()).unwrap_or_default();
        truncate(&format!("{namespace}/{pod}"), MAX_NAME_CHARS).into_owned()
    }

    /// Why the containers of a Pod do not all run and serve.
    fn unavailable_reason(&self, pod: &Pod) -> String {
        not_running_reason(pod).unwrap_or_else(|| self.stale_containers(pod, |_| true))
    }

    /// Why the containers that work cannot replace the others yet, which are to be switched off.
    fn hot_upgrade_reason(&self, pod: &Pod) -> String {
        let pairs = pairs(&self.set, pod);
        let works = |name: &str| pairs.iter().all(|(_, pair)| pair.idle != name);
        not_running_reason(pod).unwrap_or_else(|| self.stale_containers(pod, works))
    }

    /// The containers of the set that still run the image from before the update.
    fn stale_containers(&self, pod: &Pod, counts: impl Fn(&str) -> bool) -> String {
        let kubelet = match &pod.node {
            Some(node) => format!("kubelet of Node {node}"),
            None => "kubelet".to_owned(),
        };
        if pod.containers.len() != pod.container_statuses.len() {
            return format!("{kubelet} does not report all containers");
        }
        let names = self.set.names_in_pod();
        let stale: Vec<&String> = names
            .iter()
            .filter(|name| counts(name) && !is_consistent_container(&self.set, pod, name))
            .collect();
        let s = if stale.len() == 1 { "" } else { "s" };
        match join_first(MAX_NAMES, stale.iter()) {
            names if names.is_empty() => String::new(),
            names => format!("{kubelet} has not replaced container{s} {names}"),
        }
    }
}

/// Why a Pod is not running and ready, if it is not.
fn not_running_reason(pod: &Pod) -> Option<String> {
    if is_running_and_ready(pod) {
        return None;
    }
    if pod.node.is_none()
        && let Some(message) = scheduler_message(pod)
    {
        return Some(format!("no Node: {message}"));
    }
    let phase = || match pod.phase.as_str() {
        "" | "Running" => "it is not ready".to_owned(),
        phase => format!("its phase is {phase}"),
    };
    Some(not_ready_reason(pod).unwrap_or_else(phase))
}

/// A limit as written in the spec.
fn limit_text(value: Option<&IntOrString>) -> String {
    match value {
        Some(IntOrString::Int(number)) => number.to_string(),
        Some(IntOrString::String(text)) => truncate(text, MAX_LIMIT_CHARS).into_owned(),
        None => String::new(),
    }
}

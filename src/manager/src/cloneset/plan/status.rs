//! The status of a CloneSet: counters and conditions.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::builder::{PlanBuilder, truncate};
use super::conditions::{set_progressing, upsert_condition};
use super::types::{ActionPurpose, CloneSetEvent, TemplateStatus};
use super::view::{ObservedPod, PlanView};
use super::waiting;
use super::waiting::{MAX_MESSAGE_BYTES, first_stuck};
use kruise_api::cloneset::CloneSetStatus;
use kruise_workload::pods;

/// Condition: Pods could not be created or deleted.
const FAILED_SCALE: &str = "FailedScale";
/// Condition: Pods could not be updated.
const FAILED_UPDATE: &str = "FailedUpdate";

/// The counters; the conditions are the observed ones.
pub(super) fn counters(view: &PlanView<'_>) -> CloneSetStatus {
    let observed = view.observed;
    let before = observed.set.status.clone().unwrap_or_default();
    let count = |predicate: &dyn Fn(&&ObservedPod<'_>) -> bool| {
        i32::try_from(view.pods.iter().filter(|p| predicate(p)).count()).unwrap_or(i32::MAX)
    };
    let replicas = count(&|_| true);
    let updated = count(&|p| p.updated);
    let expected = view.limits.replicas - view.limits.partition;
    let all = updated == replicas && i64::from(replicas) == view.limits.replicas;
    CloneSetStatus {
        // As in upstream and in Deployments: a rejected template is not observed. Otherwise tools that wait for a
        // rollout would take the previous one for it.
        observed_generation: if view.template_rejected() {
            before.observed_generation
        } else {
            observed.set.metadata.generation
        },
        replicas,
        ready_replicas: count(&|p| p.ready),
        available_replicas: count(&|p| p.available),
        updated_replicas: updated,
        updated_ready_replicas: count(&|p| p.updated && p.ready),
        updated_available_replicas: Some(count(&|p| p.updated && p.available)),
        expected_updated_replicas: Some(i32::try_from(expected).unwrap_or(i32::MAX)),
        update_revision: observed.update_revision.clone(),
        current_revision: if all {
            observed.update_revision.clone()
        } else {
            observed.current_revision.clone()
        },
        collision_count: observed.collision_count,
        conditions: before.conditions,
        label_selector: selector_text(&view.spec.selector),
    }
}

/// Sets the conditions; requeues if one of them may change only by time.
pub(super) fn set_conditions(view: &PlanView<'_>, status: &mut CloneSetStatus, builder: &mut PlanBuilder) {
    for pod in view.pods.iter().filter(|p| !p.available && p.ready) {
        if let Some(until) = pods::ready_until(pod, view.min_ready).filter(|until| *until >= view.now) {
            // A Pod is available only after that moment.
            builder.requeue_at(
                until
                    .checked_add(jiff::SignedDuration::from_millis(1))
                    .unwrap_or(until),
            );
        }
    }
    set_failure_conditions(view, status, builder);
    match &view.observed.template_status {
        TemplateStatus::Accepted => set_progressing(view, status, builder),
        // The previous conditions may still be true.
        TemplateStatus::Unknown => return,
        TemplateStatus::Rejected(why) => {
            // Progressing does not change, as in OpenKruise; FailedUpdate and Waiting report the error.
            builder.events.push(CloneSetEvent {
                warning: true,
                reason: FAILED_UPDATE,
                message: why.clone(),
                wait_since: None,
            });
        }
    }
    waiting::set_waiting(view, status, builder);
}

/// Reports failures that will be retried as conditions, and removes the conditions when the failures are over.
fn set_failure_conditions(view: &PlanView<'_>, status: &mut CloneSetStatus, builder: &PlanBuilder) {
    for (type_, purpose) in [
        (FAILED_SCALE, ActionPurpose::Scale),
        (FAILED_UPDATE, ActionPurpose::Update),
    ] {
        let scale = purpose == ActionPurpose::Scale;
        let failures = view.observed.failures.values();
        let current = failures.filter(|f| f.purpose == purpose && f.retry_at > view.now);
        let stuck = first_stuck(builder).filter(|_| !scale);
        let others = current.map(|f| f.message.clone()).chain(stuck).min();
        let template = match &view.observed.template_status {
            TemplateStatus::Rejected(why) if !scale => Some(why.clone()),
            // The previous condition may still be true.
            TemplateStatus::Unknown if !scale => continue,
            _ => None,
        };
        match template.or(others) {
            Some(message) => {
                let message = truncate(&message, MAX_MESSAGE_BYTES);
                upsert_condition(&mut status.conditions, type_, "True", "", &message, view.now);
            }
            None => status.conditions.retain(|c| c.type_ != type_),
        }
    }
}

/// A selector as text, as Go's client writes it: sorted by key, with sorted values.
#[must_use]
pub fn selector_text(selector: &LabelSelector) -> String {
    let labels = selector
        .match_labels
        .iter()
        .flatten()
        .map(|(k, v)| (k.clone(), format!("{k}={v}")));
    let expressions = selector.match_expressions.iter().flatten().map(|e| {
        let mut values = e.values.clone().unwrap_or_default();
        values.sort();
        let (key, values) = (&e.key, values.join(","));
        let text = match e.operator.as_str() {
            "In" => format!("{key} in ({values})"),
            "NotIn" => format!("{key} notin ({values})"),
            "DoesNotExist" => format!("!{key}"),
            _ => key.clone(),
        };
        (key.clone(), text)
    });
    let mut all: Vec<(String, String)> = labels.chain(expressions).collect();
    all.sort();
    all.into_iter()
        .map(|(_, text)| text)
        .collect::<Vec<_>>()
        .join(",")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    #[test]
    fn selector_text_matches_kubectl() {
        let selector = json!({
            "matchLabels": { "b": "2", "a": "1" },
            "matchExpressions": [
                { "key": "c", "operator": "NotIn", "values": ["y", "x"] },
                { "key": "aa", "operator": "Exists" },
                { "key": "d", "operator": "DoesNotExist" },
                { "key": "e", "operator": "In", "values": ["z"] },
            ],
        });
        let selector = serde_json::from_value(selector).unwrap();
        assert_eq!(selector_text(&selector), "a=1,aa,b=2,c notin (x,y),!d,e in (z)");
    }
}

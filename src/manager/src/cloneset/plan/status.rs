//! The status of a CloneSet: its counters and conditions.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::conditions::{set, set_progressing};
use super::draft::{Draft, cut};
use super::types::{Concern, Event, Template};
use super::view::{Seen, View};
use super::waiting;
use super::waiting::{SAID, stuck};
use kruise_api::cloneset::CloneSetStatus;
use kruise_workload::pods;

/// Condition: Pods could not be made or deleted.
const FAILED_SCALE: &str = "FailedScale";
/// Condition: Pods could not be updated.
const FAILED_UPDATE: &str = "FailedUpdate";

/// The counters; conditions are those observed.
pub(super) fn counters(view: &View<'_>) -> CloneSetStatus {
    let observed = view.observed;
    let before = observed.set.status.clone().unwrap_or_default();
    let count = |of: &dyn Fn(&&Seen<'_>) -> bool| {
        i32::try_from(view.pods.iter().filter(|p| of(p)).count()).unwrap_or(i32::MAX)
    };
    let replicas = count(&|_| true);
    let updated = count(&|p| p.updated);
    let expected = view.limits.replicas - view.limits.partition;
    let all = updated == replicas && i64::from(replicas) == view.limits.replicas;
    CloneSetStatus {
        // As with upstream, and with Deployments: a template that is not taken in is not observed, or tools that
        // wait for a rollout would take the last one for it.
        observed_generation: if view.held() {
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
        update_revision: observed.update.clone(),
        current_revision: if all {
            observed.update.clone()
        } else {
            observed.current.clone()
        },
        collision_count: observed.collisions,
        conditions: before.conditions,
        label_selector: selector_text(&view.spec.selector),
    }
}

/// Sets the conditions, and looks again when one of them may change by time alone.
pub(super) fn conditions(view: &View<'_>, status: &mut CloneSetStatus, draft: &mut Draft) {
    for pod in view.pods.iter().filter(|p| !p.available && p.ready) {
        if let Some(until) = pods::ready_until(pod, view.min_ready).filter(|until| *until >= view.now) {
            // Availability begins after that very moment.
            draft.wake_at(
                until
                    .checked_add(jiff::SignedDuration::from_millis(1))
                    .unwrap_or(until),
            );
        }
    }
    failures(view, status, draft);
    match &view.observed.template {
        Template::Taken => set_progressing(view, status, draft),
        // What was said before may hold yet.
        Template::Unknown => return,
        Template::Refused(why) => {
            // Progressing stays as it is, as in OpenKruise; FailedUpdate and Waiting tell of it.
            draft.events.push(Event {
                warning: true,
                reason: FAILED_UPDATE,
                message: why.clone(),
                since: None,
            });
        }
    }
    waiting::set_condition(view, status, draft);
}

/// What failed and is yet to be tried again, as conditions that go when it is over.
fn failures(view: &View<'_>, status: &mut CloneSetStatus, draft: &Draft) {
    for (type_, of) in [(FAILED_SCALE, Concern::Scale), (FAILED_UPDATE, Concern::Update)] {
        let scale = of == Concern::Scale;
        let failures = view.observed.failures.values();
        let current = failures.filter(|f| f.of == of && f.until > view.now);
        let stuck = stuck(draft).filter(|_| !scale);
        let others = current.map(|f| f.message.clone()).chain(stuck).min();
        let template = match &view.observed.template {
            Template::Refused(why) if !scale => Some(why.clone()),
            // What was said before may hold yet.
            Template::Unknown if !scale => continue,
            _ => None,
        };
        match template.or(others) {
            Some(message) => {
                let message = cut(&message, SAID);
                set(&mut status.conditions, type_, "True", "", &message, view.now);
            }
            None => status.conditions.retain(|c| c.type_ != type_),
        }
    }
}

/// A selector as text, as Go's client writes it: by key, values sorted.
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
    fn selectors_read_as_kubectl_takes_them() {
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

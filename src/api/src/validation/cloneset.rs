//! Errors of a CloneSet that neither its schema nor the API server finds.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use serde_json::{Value, json};

use super::{FieldErrors, launch_priority, selector};
use crate::cloneset::{NO_UPDATE_BUDGET, string_map};
use crate::keys;
use crate::lifecycle::{Lifecycle, LifecycleHook};
use crate::selector::matches;

/// The errors of a CloneSet's spec, beyond those that the API server finds: each with field, value and what to do. A
/// CloneSet that has any must not be reconciled: Pods that its selector does not match would be created without end.
pub fn validate(spec: &Value) -> Vec<String> {
    let mut errors = FieldErrors::default();
    selector::check(&spec["selector"], "spec.selector", &mut errors);
    check_labels(spec, &mut errors);
    check_priorities(&spec["updateStrategy"]["rollingUpdate"], &mut errors);
    errors.into_messages()
}

fn check_labels(spec: &Value, errors: &mut FieldErrors) {
    let Ok(selector) = serde_json::from_value::<LabelSelector>(spec["selector"].clone()) else {
        return;
    };
    let labels = &spec["template"]["metadata"]["labels"];
    if !matches(&selector, &string_map(labels)) {
        let labels = if labels.is_null() { &json!({}) } else { labels };
        errors.add(
            "spec.template.metadata.labels",
            labels,
            "spec.selector does not match these labels; give the template the labels that the selector wants",
        );
    }
}

/// Errors in hooks that no Pod can have. Stored ones block nothing, so they do not stop a CloneSet.
pub fn validate_hooks(lifecycle: &Value) -> Vec<String> {
    let mut errors = FieldErrors::default();
    for (name, hook) in lifecycle.as_object().into_iter().flatten() {
        let field = format!("spec.lifecycle.{name}");
        for (key, value) in hook["labelsHandler"].as_object().into_iter().flatten() {
            check_label(key, value, &format!("{field}.labelsHandler[{key}]"), &mut errors);
        }
        let finalizers = hook["finalizersHandler"].as_array();
        for (at, finalizer) in finalizers.into_iter().flatten().enumerate() {
            let field = format!("{field}.finalizersHandler[{at}]");
            check_finalizer(finalizer, &field, &mut errors);
        }
    }
    errors.into_messages()
}

fn check_label(key: &str, value: &Value, field: &str, errors: &mut FieldErrors) {
    selector::check_key(key, field, errors);
    selector::check_value(value, field, errors);
}

/// Finalizers of Kubernetes itself.
const STANDARD_FINALIZERS: [&str; 3] = ["kubernetes", "orphan", "foregroundDeletion"];

fn check_finalizer(finalizer: &Value, field: &str, errors: &mut FieldErrors) {
    let text = finalizer.as_str().unwrap_or_default();
    if text.contains('/') {
        selector::check_key(text, field, errors);
    } else if !STANDARD_FINALIZERS.contains(&text) {
        errors.add(
            field,
            finalizer,
            "Pods take only finalizers of the form DOMAIN/NAME",
        );
    }
}

/// The hooks without the labels and finalizers that no Pod can have.
pub fn without_invalid_hooks(lifecycle: &Lifecycle) -> Lifecycle {
    let is_valid = |check: &dyn Fn(&mut FieldErrors)| {
        let mut errors = FieldErrors::default();
        check(&mut errors);
        errors.is_empty()
    };
    let valid_items = |hook: &Option<LifecycleHook>| {
        let mut hook = hook.clone()?;
        hook.labels_handler
            .retain(|key, value| is_valid(&|errors| check_label(key, &json!(value), "", errors)));
        hook.finalizers_handler
            .retain(|name| is_valid(&|errors| check_finalizer(&json!(name), "", errors)));
        Some(hook)
    };
    Lifecycle {
        pre_delete: valid_items(&lifecycle.pre_delete),
        in_place_update: valid_items(&lifecycle.in_place_update),
        pre_normal: valid_items(&lifecycle.pre_normal),
    }
}

fn check_priorities(rolling: &Value, errors: &mut FieldErrors) {
    let terms = rolling["priorityStrategy"]["weightPriority"].as_array();
    for (at, term) in terms.into_iter().flatten().enumerate() {
        let field =
            format!("spec.updateStrategy.rollingUpdate.priorityStrategy.weightPriority[{at}].matchSelector");
        selector::check(&term["matchSelector"], &field, errors);
    }
}

/// Limits that allow no update at all. The schema accepts them if they were zero before, for the scale subresource,
/// which is not validated here.
pub fn validate_update_budget(spec: &Value) -> Vec<String> {
    let rolling = &spec["updateStrategy"]["rollingUpdate"];
    let zero = |limit: &Value| *limit == 0 || *limit == "0%";
    let mut errors = FieldErrors::default();
    if spec["replicas"] != 0
        && zero(&rolling["maxUnavailable"])
        && (rolling["maxSurge"].is_null() || zero(&rolling["maxSurge"]))
    {
        let field = "spec.updateStrategy.rollingUpdate.maxUnavailable";
        errors.add(field, &rolling["maxUnavailable"], NO_UPDATE_BUDGET);
    }
    errors.into_messages()
}

/// Launch priorities that are not numbers. Stored ones count as absent, so they do not stop a CloneSet.
pub fn validate_launch_priorities(template: &Value) -> Vec<String> {
    let mut errors = FieldErrors::default();
    let containers = template["spec"]["containers"].as_array();
    let annotations = &template["metadata"]["annotations"];
    let ordered = annotations[keys::CONTAINER_LAUNCH_PRIORITY] == keys::CONTAINER_LAUNCH_ORDERED;
    let containers = containers.filter(|all| all.len() > 1 && !ordered);
    for (at, container) in containers.into_iter().flatten().enumerate() {
        launch_priority::check(
            container,
            &format!("spec.template.spec.containers[{at}]"),
            &mut errors,
        );
    }
    errors.into_messages()
}

//! The containers, as far as they are more than those of a Pod.

use kruise_api::validation::{FieldErrors, labels};
use serde_json::Value;

use super::container_names::is_native_sidecar;
use super::read::{as_text, list, object, text};
use super::{pod, resources_policy};

pub(super) fn check(spec: &Value, errors: &mut FieldErrors) {
    let init_containers = list(&spec["initContainers"], "spec.initContainers", errors);
    let containers = list(&spec["containers"], "spec.containers", errors);
    if init_containers.is_empty() && containers.is_empty() {
        return errors.required("spec", "no initContainer or container defined for SidecarSet");
    }
    let mut policies = resources_policy::Checks::default();
    for (at, container) in init_containers.iter().enumerate() {
        let policy = &container["resourcesPolicy"];
        let field = format!("spec[{at}].resourcesPolicy");
        if policy.is_null() || is_native_sidecar(container) {
            policies.check(container, &field, errors);
        } else {
            errors.invalid(field, policy, "init containers need restartPolicy: Always for it");
        }
    }
    for (at, container) in containers.iter().enumerate() {
        check_policies(container, errors);
        check_transfer_env(
            &container["transferEnv"],
            &format!("spec[{at}].transferEnv"),
            errors,
        );
        policies.check(container, &format!("spec[{at}].resourcesPolicy"), errors);
    }
    pod::check(init_containers, containers, &spec["volumes"], errors);
}

fn check_policies(container: &Value, errors: &mut FieldErrors) {
    let inject = &container["podInjectPolicy"];
    if !["BeforeAppContainer", "AfterAppContainer"].contains(&as_text(inject)) {
        errors.invalid(
            "spec.container.podInjectPolicy",
            inject,
            "unsupported pod inject policy",
        );
    }
    let share = &container["shareVolumePolicy"];
    if !["enabled", "disabled"].contains(&as_text(&share["type"])) {
        errors.invalid(
            "spec.container.shareVolumePolicy",
            share,
            "unsupported share volume policy",
        );
    }
}

fn check_transfer_env(transfers: &Value, field: &str, errors: &mut FieldErrors) {
    let transfers = list(transfers, field, errors);
    let field = format!("{field}.fieldRef");
    for transfer in transfers {
        let reference = &transfer["sourceContainerNameFrom"]["fieldRef"];
        if object(reference, &field, errors).is_some() {
            check_field_reference(reference, &field, errors);
        }
    }
}

fn check_field_reference(reference: &Value, field: &str, errors: &mut FieldErrors) {
    let [version_field, path_field] = ["apiVersion", "fieldPath"].map(|part| format!("{field}.{part}"));
    let version = text(&reference["apiVersion"], &version_field, errors);
    let path = text(&reference["fieldPath"], &path_field, errors);
    if version.is_empty() {
        return errors.required(version_field, "");
    }
    if path.is_empty() {
        return errors.required(path_field, "");
    }
    if version != "v1" {
        return errors.invalid(
            path_field,
            &reference["fieldPath"],
            format_args!("unsupported pod version: {version}"),
        );
    }
    match split_subscript(path) {
        Some(("metadata.labels", key)) => labels::validate_key(key, field, errors),
        Some(("metadata.annotations", key)) => labels::validate_key(&key.to_lowercase(), field, errors),
        _ => errors.invalid(
            path_field,
            &reference["fieldPath"],
            "must be metadata.labels['KEY'] or metadata.annotations['KEY']",
        ),
    }
}

/// The parts of `path['subscript']`.
fn split_subscript(path: &str) -> Option<(&str, &str)> {
    path.strip_suffix("']")?.split_once("['")
}

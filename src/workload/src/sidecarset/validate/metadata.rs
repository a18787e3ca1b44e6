//! Name, labels and annotations, and the base of a canary. The API server checks the rest of the metadata.

use kruise_api::keys;
use kruise_api::validation::{FieldErrors, labels};
use serde_json::{Value, json};

use super::read::{as_text, text};
use super::request::Request;

/// Bytes of a name: it is the value of a label.
const MAX_NAME_LENGTH: usize = 63;

pub(super) fn check(request: &Request, errors: &mut FieldErrors) {
    let metadata = &request.set["metadata"];
    let generate_name = text(&metadata["generateName"], "metadata.generateName", errors);
    if !generate_name.is_empty() {
        check_name(generate_name, "metadata.generateName", errors);
    }
    match text(&metadata["name"], "metadata.name", errors) {
        "" => errors.required("metadata.name", "name or generateName is required"),
        name => check_name(name, "metadata.name", errors),
    }
    if !text(&metadata["namespace"], "metadata.namespace", errors).is_empty() {
        errors.forbidden("metadata.namespace", "not allowed on this type");
    }
    labels::validate_labels(&metadata["labels"], "metadata.labels", errors);
    labels::validate_annotations(&metadata["annotations"], "metadata.annotations", errors);
    if let Some(base) = base_of_canary(metadata) {
        check_canary(request, base, errors);
    }
}

fn check_name(name: &str, field: &str, errors: &mut FieldErrors) {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if !name.bytes().all(is_allowed) {
        errors.invalid(
            field,
            &json!(name),
            "must consist of alphanumeric characters or '-'",
        );
    }
    if name.len() > MAX_NAME_LENGTH {
        errors.invalid(field, &json!(name), "must be no more than 63 bytes");
    }
}

/// The SidecarSet that one with these metadata replaces for some Pods.
pub(super) fn base_of_canary(metadata: &Value) -> Option<&str> {
    let annotations = &metadata["annotations"];
    let base = as_text(&annotations[keys::SIDECAR_SET_BASE]);
    (annotations[keys::SIDECAR_SET_CANARY] == keys::TRUE && !base.is_empty()).then_some(base)
}

fn check_canary(request: &Request, base: &str, errors: &mut FieldErrors) {
    let set = request.set;
    let value = json!(base);
    if set["metadata"]["name"] == base {
        errors.invalid("metadata", &value, "a SidecarSet cannot be its own base");
    }
    let base_before = |old: &Value| old["metadata"]["annotations"][keys::SIDECAR_SET_BASE] == base;
    if request.old.is_some_and(|old| !base_before(old)) {
        let annotation = keys::SIDECAR_SET_BASE;
        errors.invalid(
            "metadata",
            &value,
            format_args!("annotation {annotation} is immutable"),
        );
    }
    let stored = request
        .stored
        .iter()
        .find(|stored| stored["metadata"]["name"] == base);
    match stored {
        None => errors.invalid("metadata", &value, "the base does not exist"),
        Some(stored) if base_of_canary(&stored["metadata"]).is_some() => {
            errors.invalid("metadata", &value, "the base cannot be a canary itself");
        }
        Some(_) => {}
    }
    let update_type = &set["spec"]["updateStrategy"]["type"];
    if update_type != "NotUpdate" {
        errors.invalid(
            "spec.updateStrategy.type",
            update_type,
            "must be NotUpdate for a canary",
        );
    }
}

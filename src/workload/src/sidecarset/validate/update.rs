//! What an update may change: containers can be removed, but not added or renamed.

use std::collections::HashMap;

use kruise_api::validation::FieldErrors;
use serde_json::Value;

use super::read::{as_text, items};

pub(super) fn check(containers: &Value, old: &Value, errors: &mut FieldErrors) {
    let old_types: HashMap<&str, &str> = items(old).iter().map(name_and_type).collect();
    for container in items(containers) {
        let (name, upgrade_type) = name_and_type(container);
        match old_types.get(name) {
            None => errors.invalid(
                "spec.containers.name",
                &container["name"],
                "containers cannot be added or renamed",
            ),
            Some(&old_type) if !old_type.is_empty() && old_type != upgrade_type => errors.invalid(
                "spec.containers.upgradeStrategy.upgradeType",
                &container["name"],
                format_args!("upgradeType of container {name} is immutable"),
            ),
            Some(_) => {}
        }
    }
}

fn name_and_type(container: &Value) -> (&str, &str) {
    (
        as_text(&container["name"]),
        as_text(&container["upgradeStrategy"]["upgradeType"]),
    )
}

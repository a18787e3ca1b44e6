//! What keeps a set from being injected into any Pod, and OpenKruise stores nevertheless.

use std::collections::BTreeMap;

use kruise_api::validation::{FieldErrors, launch_priority};
use serde_json::Value;

use super::container_names::{names, names_in_pod};
use super::read::{as_text, items};

/// Finds launch priorities that are not numbers, except in containers whose environment is stored so: a set of
/// OpenKruise can be changed otherwise.
pub(super) fn check(containers: &Value, old: &Value, errors: &mut FieldErrors) {
    let stored: BTreeMap<&str, &Value> = names(old).zip(items(old)).collect();
    for (at, container) in items(containers).iter().enumerate() {
        let stored = stored.get(as_text(&container["name"]));
        if stored.is_none_or(|stored| stored["env"] != container["env"]) {
            launch_priority::check(container, &format!("spec.containers[{at}]"), errors);
        }
    }
}

/// Finds launch priorities that are not numbers, and containers with hot upgrade that have no empty image.
pub(super) fn warn(spec: &Value, warnings: &mut FieldErrors) {
    for (list, is_init) in [("initContainers", true), ("containers", false)] {
        for (at, container) in items(&spec[list]).iter().enumerate() {
            let field = format!("spec.{list}[{at}]");
            let empty_image = &container["upgradeStrategy"]["hotUpgradeEmptyImage"];
            let is_hot = names_in_pod(container, is_init).len() > 1;
            if is_hot && empty_image.as_str().is_none_or(str::is_empty) {
                warnings.required(
                    format_args!("{field}.upgradeStrategy.hotUpgradeEmptyImage"),
                    "the SidecarSet cannot be injected without it",
                );
            }
            if !is_init {
                launch_priority::check(container, &field, warnings);
            }
        }
    }
}

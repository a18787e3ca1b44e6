//! Names that containers have in the Pod.

use std::borrow::Cow;

use serde_json::Value;

use super::read::{as_text, items};
use crate::sidecarset::recorded::hot_upgrade_names;

/// Names of containers or volumes.
pub(super) fn names(list: &Value) -> impl Iterator<Item = &str> {
    items(list).iter().map(|item| as_text(&item["name"]))
}

/// Names in the Pod of a container of `containers`, or of `initContainers`: two with hot upgrade.
pub(super) fn names_in_pod(container: &Value, is_init: bool) -> Vec<Cow<'_, str>> {
    let name = as_text(&container["name"]);
    let is_hot = container["upgradeStrategy"]["upgradeType"] == "HotUpgrade";
    if is_hot && (!is_init || is_native_sidecar(container)) {
        return hot_upgrade_names(name).map(Cow::Owned).into();
    }
    vec![Cow::Borrowed(name)]
}

/// Whether an init container runs as long as the Pod.
pub(super) fn is_native_sidecar(container: &Value) -> bool {
    container["restartPolicy"] == "Always"
}

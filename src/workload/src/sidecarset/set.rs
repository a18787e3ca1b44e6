//! A SidecarSet, reduced to what decisions about its Pods need.

use std::collections::{BTreeMap, BTreeSet};

use kruise_api::keys;
use kruise_api::pod_webhooks::canary_base;
use kruise_api::sidecarset::{SidecarContainer, SidecarContainerUpgradeType, SidecarSet, SidecarSetSpec};

use super::recorded::hot_upgrade_names;

/// What decisions about Pods need of a SidecarSet.
#[derive(Clone, Copy, Debug)]
pub struct SetView<'a> {
    /// Name of the SidecarSet.
    pub name: &'a str,
    /// Its `resourceVersion`: the version that sidecars with hot upgrade see.
    pub resource_version: &'a str,
    /// Its annotations, which hold both hashes.
    pub annotations: &'a BTreeMap<String, String>,
    /// Name of the ControllerRevision of its spec; empty before there is one.
    pub latest_revision: &'a str,
    /// Its spec.
    pub spec: &'a SidecarSetSpec,
}

impl<'a> From<&'a SidecarSet> for SetView<'a> {
    fn from(set: &'a SidecarSet) -> Self {
        static NONE: BTreeMap<String, String> = BTreeMap::new();
        Self {
            name: set.metadata.name.as_deref().unwrap_or_default(),
            resource_version: set.metadata.resource_version.as_deref().unwrap_or_default(),
            annotations: set.metadata.annotations.as_ref().unwrap_or(&NONE),
            latest_revision: set.status.as_ref().map_or("", |status| &status.latest_revision),
            spec: &set.spec,
        }
    }
}

impl<'a> SetView<'a> {
    /// Hash of the containers; empty if the webhook has not set it.
    #[must_use]
    pub fn hash(&self) -> &'a str {
        self.annotation(keys::SIDECAR_SET_HASH)
    }

    /// Hash of the containers without their images; empty if the webhook has not set it.
    #[must_use]
    pub fn hash_without_image(&self) -> &'a str {
        self.annotation(keys::SIDECAR_SET_HASH_WITHOUT_IMAGE)
    }

    /// Name of the set that this one, a canary, replaces.
    #[must_use]
    pub fn canary_base(&self) -> Option<&'a str> {
        canary_base(self.annotations)
    }

    fn annotation(&self, key: &str) -> &'a str {
        self.annotations.get(key).map(String::as_str).unwrap_or_default()
    }

    /// The containers, without init containers.
    pub fn containers(&self) -> impl Iterator<Item = &'a SidecarContainer> + use<'a> {
        self.spec.containers.iter().flatten()
    }

    /// The containers with hot upgrade.
    pub fn hot_upgrade_containers(&self) -> impl Iterator<Item = &'a SidecarContainer> + use<'a> {
        self.containers().filter(|container| is_hot_upgrade(container))
    }

    /// Names in the Pod of the containers, without init containers: two for each with hot upgrade.
    #[must_use]
    pub fn names_in_pod(&self) -> BTreeSet<String> {
        self.containers()
            .flat_map(|container| names_in_pod(container, false))
            .collect()
    }

    /// Sorted names, as a Pod records them: of the containers, and of the init containers that keep running.
    #[must_use]
    pub fn recorded_names(&self) -> Vec<String> {
        let init = self.spec.init_containers.iter().flatten();
        let sidecars = init.filter(|container| is_native_sidecar(container));
        let names: BTreeSet<&str> = sidecars.chain(self.containers()).map(name).collect();
        names.into_iter().map(str::to_owned).collect()
    }
}

/// Name of a container; empty if it has none.
#[must_use]
pub fn name(container: &SidecarContainer) -> &str {
    text(container, "name")
}

/// Image of a container; empty if it has none.
#[must_use]
pub fn image(container: &SidecarContainer) -> &str {
    text(container, "image")
}

/// Whether an init container keeps running beside the containers.
#[must_use]
pub fn is_native_sidecar(container: &SidecarContainer) -> bool {
    text(container, "restartPolicy") == "Always"
}

/// Whether a container is injected twice, so that one takes over from the other.
#[must_use]
pub fn is_hot_upgrade(container: &SidecarContainer) -> bool {
    container.upgrade_strategy.upgrade_type == Some(SidecarContainerUpgradeType::HotUpgrade)
}

/// Names in the Pod of a container, or of an init container: two with hot upgrade.
#[must_use]
pub fn names_in_pod(container: &SidecarContainer, is_init: bool) -> Vec<String> {
    if is_hot_upgrade(container) && (!is_init || is_native_sidecar(container)) {
        hot_upgrade_names(name(container)).into()
    } else {
        vec![name(container).to_owned()]
    }
}

fn text<'a>(container: &'a SidecarContainer, field: &str) -> &'a str {
    let value = container.container.get(field);
    value.and_then(|value| value.as_str()).unwrap_or_default()
}

//! A Pod whose probes the provider of a virtual node runs, which reports them as conditions.

use std::collections::BTreeMap;

use serde_json::Value;

use super::raw_pod::{items, text};
use kruise_api::keys;
use kruise_api::node_pod_probe::{ContainerProbeState, MAX_PROBES_OF_POD, ProbeState};
use kruise_api::pod_probe_marker::{PodContainerProbe, RESERVED_CONDITION_TYPES};

/// What the manager caches of a Pod with annotation [`keys::POD_PROBE`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReportedProbes {
    /// Names of its PodProbeMarkers, comma-separated.
    markers: Box<str>,
    /// Types and states of the Pod's conditions that probes may set.
    conditions: BTreeMap<Box<str>, ProbeState>,
}

impl ReportedProbes {
    pub(super) fn from_json(pod: &Value) -> Option<Self> {
        let annotations = &pod["metadata"]["annotations"];
        annotations[keys::POD_PROBE].as_str()?;
        let conditions = items(&pod["status"]["conditions"]).filter_map(|condition| {
            let type_ = condition["type"].as_str()?;
            let is_reserved = RESERVED_CONDITION_TYPES.contains(&type_);
            let state = match condition["status"].as_str()? {
                "True" => ProbeState::Succeeded,
                "False" => ProbeState::Failed,
                _ => ProbeState::Unknown,
            };
            (!is_reserved).then(|| (type_.into(), state))
        });
        Some(Self {
            markers: text(&annotations[keys::POD_PROBE_MARKER_LIST]).into(),
            conditions: conditions.take(MAX_PROBES_OF_POD).collect(),
        })
    }

    /// Whether the provider has been given the probes of this PodProbeMarker.
    #[must_use]
    pub fn has_marker(&self, name: &str) -> bool {
        self.markers.split(',').any(|one| one == name)
    }

    /// The result of a probe, if its condition exists.
    #[must_use]
    pub fn state(&self, full_name: String, probe: &PodContainerProbe) -> Option<ContainerProbeState> {
        let state = self.conditions.get(probe.condition_type()?)?.clone();
        Some(ContainerProbeState {
            name: full_name,
            state,
            last_probe_time: None,
            last_transition_time: None,
            message: String::new(),
            container_id: None,
        })
    }
}

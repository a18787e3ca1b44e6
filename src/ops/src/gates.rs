//! Feature gates of both programs: upstream's names, limited to the features that exist here.

use std::collections::BTreeMap;

/// The enabled features.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FeatureGates {
    explicit: BTreeMap<String, bool>,
}

/// Sets all alpha features that are not named.
const ALL_ALPHA: &str = "AllAlpha";
/// Sets all beta features that are not named.
const ALL_BETA: &str = "AllBeta";

/// A gate that has an effect here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureGate {
    /// All features that need a daemon on the nodes. On.
    KruiseDaemon,
    /// ImagePullJobs. On; upstream has it off.
    ImagePullJobGate,
    /// Annotation `apps.kruise.io/runtime-containers-meta`, written by the daemon. On.
    DaemonWatchingPod,
    /// In-place updates of environment from labels and annotations, and the restarts that they need. On.
    InPlaceUpdateEnvFromMetadata,
    /// Label `controller-revision-hash` of CloneSets' Pods contains only the short hash. Off.
    CloneSetShortHash,
    /// Raising a CloneSet's `partition` rolls Pods back. Off.
    CloneSetPartitionRollback,
    /// A Pod that is prepared for its update counts as updated when scaling. Off.
    PreparingUpdateAsUpdate,
    /// Changed claim templates of a CloneSet cause new Pods. Off.
    RecreatePodWhenChangeVCTInCloneSetGate,
    /// Templates of CloneSets are stored without defaults. Off.
    TemplateNoDefaults,
    /// Templates with `hostNetwork` have their ports as ports of the host by default. Off.
    DefaultHostNetworkHostPortsInPodTemplates,
    /// CPU and memory are resized in place. Off.
    InPlaceWorkloadVerticalScaling,
    /// New images of a CloneSet are pre-downloaded. Off.
    PreDownloadImageForInPlaceUpdate,
    /// The webhook for new Pods, which injects SidecarSets. On.
    PodWebhook,
    /// All Pods get readiness gate `KruisePodReady`, not only those of CloneSets. Off.
    KruisePodReadinessGate,
    /// Injected containers are sorted by name. Off.
    EnableSortSidecarContainerByName,
    /// SidecarSets may patch annotations of Pods that no whitelist allows. Off.
    SidecarSetPatchPodMetadataDefaultsAllowed,
    /// PodProbeMarkers, and the daemon's probes for them. On.
    PodProbeMarkerGate,
    /// Pods get the probes of PodProbeMarkers in an annotation, for virtual nodes, which report them as conditions. Off.
    EnablePodProbeMarkerOnServerless,
    /// Sidecars of Pods that run to completion are terminated after the main containers. Off.
    SidecarTerminator,
    /// Liveness probes of Pods that ask for it are run by the daemon, and restarts keep to a budget. Off.
    EnhancedLivenessProbe,
    /// SidecarSets are injected by policies of the API server where it serves them. On; upstream does not have it.
    SidecarSetPolicies,
}

impl FeatureGate {
    /// All gates that have an effect here.
    pub const ALL: [Self; 21] = [
        Self::KruiseDaemon,
        Self::ImagePullJobGate,
        Self::DaemonWatchingPod,
        Self::InPlaceUpdateEnvFromMetadata,
        Self::CloneSetShortHash,
        Self::CloneSetPartitionRollback,
        Self::PreparingUpdateAsUpdate,
        Self::RecreatePodWhenChangeVCTInCloneSetGate,
        Self::TemplateNoDefaults,
        Self::DefaultHostNetworkHostPortsInPodTemplates,
        Self::InPlaceWorkloadVerticalScaling,
        Self::PreDownloadImageForInPlaceUpdate,
        Self::PodWebhook,
        Self::KruisePodReadinessGate,
        Self::EnableSortSidecarContainerByName,
        Self::SidecarSetPatchPodMetadataDefaultsAllowed,
        Self::PodProbeMarkerGate,
        Self::EnablePodProbeMarkerOnServerless,
        Self::SidecarTerminator,
        Self::EnhancedLivenessProbe,
        Self::SidecarSetPolicies,
    ];

    /// Its name; upstream's, if upstream has the gate.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::KruiseDaemon => "KruiseDaemon",
            Self::ImagePullJobGate => "ImagePullJobGate",
            Self::DaemonWatchingPod => "DaemonWatchingPod",
            Self::InPlaceUpdateEnvFromMetadata => "InPlaceUpdateEnvFromMetadata",
            Self::CloneSetShortHash => "CloneSetShortHash",
            Self::CloneSetPartitionRollback => "CloneSetPartitionRollback",
            Self::PreparingUpdateAsUpdate => "PreparingUpdateAsUpdate",
            Self::RecreatePodWhenChangeVCTInCloneSetGate => "RecreatePodWhenChangeVCTInCloneSetGate",
            Self::TemplateNoDefaults => "TemplateNoDefaults",
            Self::DefaultHostNetworkHostPortsInPodTemplates => "DefaultHostNetworkHostPortsInPodTemplates",
            Self::InPlaceWorkloadVerticalScaling => "InPlaceWorkloadVerticalScaling",
            Self::PreDownloadImageForInPlaceUpdate => "PreDownloadImageForInPlaceUpdate",
            Self::PodWebhook => "PodWebhook",
            Self::KruisePodReadinessGate => "KruisePodReadinessGate",
            Self::EnableSortSidecarContainerByName => "EnableSortSidecarContainerByName",
            Self::SidecarSetPatchPodMetadataDefaultsAllowed => "SidecarSetPatchPodMetadataDefaultsAllowed",
            Self::PodProbeMarkerGate => "PodProbeMarkerGate",
            Self::EnablePodProbeMarkerOnServerless => "EnablePodProbeMarkerOnServerless",
            Self::SidecarTerminator => "SidecarTerminator",
            Self::EnhancedLivenessProbe => "EnhancedLivenessProbe",
            Self::SidecarSetPolicies => "SidecarSetPolicies",
        }
    }

    /// Whether it is a beta feature (on by default) or an alpha feature.
    fn is_beta(self) -> bool {
        matches!(
            self,
            Self::KruiseDaemon
                | Self::DaemonWatchingPod
                | Self::InPlaceUpdateEnvFromMetadata
                | Self::PodWebhook
                | Self::PodProbeMarkerGate
                | Self::SidecarSetPolicies
        )
    }

    /// Whether it is on by default: as in OpenKruise, except ImagePullJobs, which most users need.
    fn enabled_by_default(self) -> bool {
        self.is_beta() || self == Self::ImagePullJobGate
    }

    /// The gates that it requires.
    fn depends_on(self) -> &'static [Self] {
        match self {
            Self::ImagePullJobGate
            | Self::DaemonWatchingPod
            | Self::InPlaceUpdateEnvFromMetadata
            | Self::PodProbeMarkerGate
            | Self::SidecarTerminator => &[Self::KruiseDaemon],
            Self::PreDownloadImageForInPlaceUpdate => &[Self::ImagePullJobGate],
            Self::KruisePodReadinessGate
            | Self::SidecarSetPatchPodMetadataDefaultsAllowed
            | Self::SidecarSetPolicies => &[Self::PodWebhook],
            // OpenKruise, which runs no such liveness probes, requires KruiseDaemon and PodWebhook; of the other it
            // requires nothing.
            Self::EnhancedLivenessProbe | Self::EnablePodProbeMarkerOnServerless => {
                &[Self::PodProbeMarkerGate, Self::PodWebhook]
            }
            _ => &[],
        }
    }
}

impl FeatureGates {
    /// Help of the flag: all gates that have an effect, with their defaults.
    #[must_use]
    pub fn help() -> String {
        let gates = FeatureGate::ALL.map(|gate| format!("\n- {}={}", gate.name(), gate.enabled_by_default()));
        format!(
            "Feature gates, as NAME=true|false separated by commas; AllAlpha and AllBeta set those not named. Defaults:\n{}",
            gates.concat()
        )
    }

    /// Reads `NAME=true,NAME=false,…`.
    ///
    /// # Errors
    /// When a part has no `=`, or a value is neither true nor false.
    pub fn parse(text: &str) -> Result<Self, String> {
        let parts = text.split(',').map(str::trim).filter(|p| !p.is_empty());
        let given = parts.map(|part| {
            let (name, value) = part
                .split_once('=')
                .ok_or_else(|| format!("{part:?} has no value; expected NAME=true or NAME=false"))?;
            let on = value
                .trim()
                .to_ascii_lowercase()
                .parse()
                .map_err(|_| format!("gate {name:?} cannot be {value:?}; expected true or false"))?;
            Ok((name.trim().to_owned(), on))
        });
        let given = given.collect::<Result<_, String>>()?;
        Ok(Self { explicit: given })
    }

    /// Whether a feature is on. It is off if a feature that it requires is off.
    #[must_use]
    pub fn enabled(&self, gate: FeatureGate) -> bool {
        let given = |name| self.explicit.get(name).copied();
        let stage = if gate.is_beta() { ALL_BETA } else { ALL_ALPHA };
        let own = given(gate.name()).or_else(|| given(stage));
        own.unwrap_or_else(|| gate.enabled_by_default())
            && gate.depends_on().iter().all(|other| self.enabled(*other))
    }

    /// The given names that have no effect here; other programs of the same installation may use them.
    pub fn unknown_names(&self) -> impl Iterator<Item = &str> {
        let is_stage = |name: &str| [ALL_ALPHA, ALL_BETA].contains(&name);
        let is_known = move |name: &&String| {
            is_stage(name) || FeatureGate::ALL.iter().any(|g| g.name() == name.as_str())
        };
        self.explicit
            .keys()
            .filter(move |name| !is_known(name))
            .map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;

    /// Lines of `NAME STAGE DEFAULT`.
    const UPSTREAM: &str = include_str!("../../../tests/data/flags/feature-gates.txt");

    #[test]
    fn feature_gate_defaults_match_upstream() {
        for gate in FeatureGate::ALL {
            let line = UPSTREAM
                .lines()
                .find(|line| line.split(' ').next() == Some(gate.name()));
            let Some(line) = line else {
                assert_eq!(gate, FeatureGate::SidecarSetPolicies, "the only gate of ours");
                continue;
            };
            let [_, stage, on] = line.split(' ').collect::<Vec<_>>()[..] else {
                panic!("{line:?}");
            };
            assert_eq!(gate.is_beta(), stage == "BETA", "{gate:?}");
            let ours = gate.enabled_by_default() != (gate == FeatureGate::ImagePullJobGate);
            assert_eq!(ours, on == "true", "{gate:?}");
        }
    }

    #[test]
    fn feature_gates_of_upstream_are_documented() {
        let operations = include_str!("../../../docs/operations/operations.md");
        let gates = UPSTREAM.lines().filter_map(|line| line.split(' ').next());
        let missing: Vec<_> = gates
            .filter(|gate| !operations.contains(&format!("`{gate}`")))
            .collect();
        assert!(
            missing.is_empty(),
            "docs/operations/operations.md does not name {missing:?}"
        );
    }

    #[test]
    fn all_alpha_and_all_beta_set_unnamed_gates() {
        let gates =
            FeatureGates::parse("AllAlpha=true,AllBeta=false,CloneSetShortHash=false,KruiseDaemon=true")
                .unwrap();
        assert!(
            gates.enabled(FeatureGate::CloneSetPartitionRollback)
                && !gates.enabled(FeatureGate::CloneSetShortHash)
        );
        assert!(gates.enabled(FeatureGate::KruiseDaemon) && !gates.enabled(FeatureGate::DaemonWatchingPod));
        assert_eq!(gates.unknown_names().count(), 0);
    }

    #[test]
    fn gates_have_their_default_unless_set() {
        let gates = FeatureGates::parse("").unwrap();
        assert!(
            FeatureGate::ALL
                .iter()
                .all(|g| gates.enabled(*g) == g.enabled_by_default())
        );
        assert!(
            FeatureGates::parse("CloneSetShortHash=true")
                .unwrap()
                .enabled(FeatureGate::CloneSetShortHash)
        );
        let without = FeatureGates::parse("ImagePullJobGate=false").unwrap();
        assert!(!without.enabled(FeatureGate::PreDownloadImageForInPlaceUpdate));
        let gates = FeatureGates::parse(" ImagePullJobGate=False , Other=true").unwrap();
        assert!(!gates.enabled(FeatureGate::ImagePullJobGate) && gates.enabled(FeatureGate::KruiseDaemon));
        assert_eq!(gates.unknown_names().collect::<Vec<_>>(), ["Other"]);
        assert!(
            !FeatureGates::parse("KruiseDaemon=false")
                .unwrap()
                .enabled(FeatureGate::ImagePullJobGate)
        );
        for (other, expected) in [
            ("CloneSetShortHash", true),
            ("KruiseDaemon", false),
            ("PodProbeMarkerGate", false),
            ("PodWebhook", false),
        ] {
            let gates = FeatureGates::parse(&format!("EnhancedLivenessProbe=true,{other}=false")).unwrap();
            assert_eq!(
                gates.enabled(FeatureGate::EnhancedLivenessProbe),
                expected,
                "{other}"
            );
        }
        assert!(FeatureGates::parse("ImagePullJobGate").is_err());
        assert!(FeatureGates::parse("ImagePullJobGate=maybe").is_err());
    }
}

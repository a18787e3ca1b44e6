//! The served kinds: names, conversion and admission, one row each.
//!
//! CRDs, conversion, reviews, webhook configurations and feature gates match on [`Kind`], so a kind that lacks one of
//! them does not compile.

use super::{GROUP, V1ALPHA1, V1BETA1};

/// A served kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// CloneSet.
    CloneSet,
    /// NodeImage.
    NodeImage,
    /// ImagePullJob.
    ImagePullJob,
    /// ImageListPullJob.
    ImageListPullJob,
    /// ContainerRecreateRequest.
    ContainerRecreateRequest,
    /// ContainerRecreateJob. Not part of OpenKruise.
    ContainerRecreateJob,
    /// SidecarSet.
    SidecarSet,
    /// NodePodProbe.
    NodePodProbe,
    /// PodProbeMarker.
    PodProbeMarker,
}

/// When the API server calls a webhook, and what it does without a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WebhookPolicy {
    /// The part between kind and `.kb.io` in the webhook's name, as in OpenKruise.
    pub suffix: &'static str,
    /// `CREATE`, `UPDATE`.
    pub operations: &'static [&'static str],
    /// `Ignore` or `Fail`.
    pub failure_policy: &'static str,
    /// Whether the manager's own writes, and updates that do not change `spec`, are reviewed.
    pub every_write: bool,
    /// Whether objects are validated, too, not only defaulted.
    pub validates: bool,
}

/// Properties of a kind. Its schemas are in `crd`.
#[derive(Debug, PartialEq, Eq)]
pub struct KindInfo {
    /// The `kind` field.
    pub name: &'static str,
    /// Name of the resource.
    pub plural: &'static str,
    /// Used in webhook names, paths and metric labels.
    pub lowercase: &'static str,
    /// The served versions; the last one is stored.
    pub versions: &'static [&'static str],
    /// Whether the versions have different fields, so that the webhook must convert.
    pub needs_conversion: bool,
    /// How its objects are reviewed; `None` if the schema's rules are all.
    pub webhook: Option<WebhookPolicy>,
}

const BOTH_VERSIONS: &[&str] = &[V1ALPHA1, V1BETA1];

/// Reviewed if the webhook can be reached; the schema's rules apply without it.
const FAIL_OPEN: WebhookPolicy = WebhookPolicy {
    suffix: "",
    operations: &["CREATE", "UPDATE"],
    failure_policy: "Ignore",
    every_write: false,
    validates: true,
};

impl Kind {
    /// All kinds, in the order of the webhook configurations.
    pub const ALL: [Self; 9] = [
        Self::CloneSet,
        Self::NodeImage,
        Self::ImagePullJob,
        Self::ImageListPullJob,
        Self::ContainerRecreateRequest,
        Self::ContainerRecreateJob,
        Self::SidecarSet,
        Self::NodePodProbe,
        Self::PodProbeMarker,
    ];

    /// Properties of the kind.
    #[must_use]
    pub const fn info(self) -> &'static KindInfo {
        match self {
            Self::CloneSet => &KindInfo {
                name: "CloneSet",
                plural: "clonesets",
                lowercase: "cloneset",
                versions: BOTH_VERSIONS,
                needs_conversion: true,
                webhook: Some(FAIL_OPEN),
            },
            Self::NodeImage => &KindInfo {
                name: "NodeImage",
                plural: "nodeimages",
                lowercase: "nodeimage",
                versions: BOTH_VERSIONS,
                needs_conversion: true,
                webhook: Some(FAIL_OPEN),
            },
            Self::ImagePullJob => &KindInfo {
                name: "ImagePullJob",
                plural: "imagepulljobs",
                lowercase: "imagepulljob",
                versions: BOTH_VERSIONS,
                needs_conversion: false,
                webhook: Some(WebhookPolicy {
                    suffix: "-v1beta1",
                    ..FAIL_OPEN
                }),
            },
            Self::ImageListPullJob => &KindInfo {
                name: "ImageListPullJob",
                plural: "imagelistpulljobs",
                lowercase: "imagelistpulljob",
                versions: BOTH_VERSIONS,
                needs_conversion: false,
                webhook: Some(WebhookPolicy {
                    suffix: "-v1beta1",
                    ..FAIL_OPEN
                }),
            },
            Self::ContainerRecreateRequest => &KindInfo {
                name: "ContainerRecreateRequest",
                plural: "containerrecreaterequests",
                lowercase: "containerrecreaterequest",
                versions: BOTH_VERSIONS,
                needs_conversion: true,
                // Without the Pod's UID and container IDs a request could restart containers that it was not created
                // for.
                webhook: Some(WebhookPolicy {
                    suffix: "",
                    operations: &["CREATE"],
                    failure_policy: "Fail",
                    every_write: true,
                    validates: false,
                }),
            },
            Self::ContainerRecreateJob => &KindInfo {
                name: "ContainerRecreateJob",
                plural: "containerrecreatejobs",
                lowercase: "containerrecreatejob",
                versions: &[V1ALPHA1],
                needs_conversion: false,
                webhook: None,
            },
            Self::SidecarSet => &KindInfo {
                name: "SidecarSet",
                plural: "sidecarsets",
                lowercase: "sidecarset",
                versions: BOTH_VERSIONS,
                needs_conversion: true,
                // Without its hashes a set would be updated never, or wrongly. They are annotations, so every write
                // counts.
                webhook: Some(WebhookPolicy {
                    failure_policy: "Fail",
                    every_write: true,
                    ..FAIL_OPEN
                }),
            },
            Self::NodePodProbe => &KindInfo {
                name: "NodePodProbe",
                plural: "nodepodprobes",
                lowercase: "nodepodprobe",
                versions: &[V1ALPHA1],
                needs_conversion: false,
                webhook: None,
            },
            Self::PodProbeMarker => &KindInfo {
                name: "PodProbeMarker",
                plural: "podprobemarkers",
                lowercase: "podprobemarker",
                versions: &[V1ALPHA1],
                needs_conversion: false,
                webhook: None,
            },
        }
    }

    /// The kinds whose objects are reviewed.
    pub fn reviewed() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|kind| kind.info().webhook.is_some())
    }

    /// The kind of this name, as in `kind`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.info().name == name)
    }

    /// The kind of this name in lower case.
    #[must_use]
    pub fn from_lowercase(lower: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.info().lowercase == lower)
    }

    /// Name of its CRD.
    #[must_use]
    pub fn crd_name(self) -> String {
        format!("{}.{GROUP}", self.info().plural)
    }
}

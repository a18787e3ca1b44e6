//! The served kinds: names, conversion and admission, one row each.
//!
//! CRDs, conversion, reviews, webhook configurations and feature gates match on [`Kind`], so a kind that lacks one of
//! them does not compile.

use super::GROUP;

/// A served kind, in both versions.
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
    /// SidecarSet.
    SidecarSet,
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
    /// Whether the versions have different fields, so that the webhook must convert.
    pub needs_conversion: bool,
    /// How its objects are reviewed.
    pub webhook: WebhookPolicy,
}

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
    pub const ALL: [Self; 6] = [
        Self::CloneSet,
        Self::NodeImage,
        Self::ImagePullJob,
        Self::ImageListPullJob,
        Self::ContainerRecreateRequest,
        Self::SidecarSet,
    ];

    /// Properties of the kind.
    #[must_use]
    pub const fn info(self) -> &'static KindInfo {
        match self {
            Self::CloneSet => &KindInfo {
                name: "CloneSet",
                plural: "clonesets",
                lowercase: "cloneset",
                needs_conversion: true,
                webhook: FAIL_OPEN,
            },
            Self::NodeImage => &KindInfo {
                name: "NodeImage",
                plural: "nodeimages",
                lowercase: "nodeimage",
                needs_conversion: true,
                webhook: FAIL_OPEN,
            },
            Self::ImagePullJob => &KindInfo {
                name: "ImagePullJob",
                plural: "imagepulljobs",
                lowercase: "imagepulljob",
                needs_conversion: false,
                webhook: WebhookPolicy {
                    suffix: "-v1beta1",
                    ..FAIL_OPEN
                },
            },
            Self::ImageListPullJob => &KindInfo {
                name: "ImageListPullJob",
                plural: "imagelistpulljobs",
                lowercase: "imagelistpulljob",
                needs_conversion: false,
                webhook: WebhookPolicy {
                    suffix: "-v1beta1",
                    ..FAIL_OPEN
                },
            },
            Self::ContainerRecreateRequest => &KindInfo {
                name: "ContainerRecreateRequest",
                plural: "containerrecreaterequests",
                lowercase: "containerrecreaterequest",
                needs_conversion: true,
                // Without the Pod's UID and container IDs a request could restart containers that it was not created
                // for.
                webhook: WebhookPolicy {
                    suffix: "",
                    operations: &["CREATE"],
                    failure_policy: "Fail",
                    every_write: true,
                    validates: false,
                },
            },
            Self::SidecarSet => &KindInfo {
                name: "SidecarSet",
                plural: "sidecarsets",
                lowercase: "sidecarset",
                needs_conversion: true,
                // Without its hashes a set would be updated never, or wrongly. They are annotations, so every write
                // counts.
                webhook: WebhookPolicy {
                    failure_policy: "Fail",
                    every_write: true,
                    ..FAIL_OPEN
                },
            },
        }
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

//! The kinds that are served: names, conversion and admission, a row each.
//!
//! CRDs, conversion, reviews, webhook configurations and feature gates match on [`Kind`], so a kind with something missing
//! does not compile.

use super::GROUP;

/// A kind that is served, in both versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// CloneSet.
    CloneSet,
    /// NodeImage.
    NodeImage,
    /// ImagePullJob.
    ImagePullJob,
    /// ContainerRecreateRequest.
    ContainerRecreateRequest,
}

/// When the API server asks a webhook, and what it does when it gets no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WebhookPolicy {
    /// What stands between kind and `.kb.io` in the webhook's name, as in OpenKruise.
    pub suffix: &'static str,
    /// `CREATE`, `UPDATE`.
    pub operations: &'static [&'static str],
    /// `Ignore` or `Fail`.
    pub failure_policy: &'static str,
    /// Whether the manager's own writes, and updates that do not change `spec`, are reviewed.
    pub every_write: bool,
    /// Whether objects are validated, too, and not only completed.
    pub validates: bool,
}

/// What is known of a kind. Its schemas are in `crd`.
#[derive(Debug, PartialEq, Eq)]
pub struct KindInfo {
    /// As in `kind`.
    pub name: &'static str,
    /// Name of the resource.
    pub plural: &'static str,
    /// As in webhook names, paths and metric labels.
    pub lowercase: &'static str,
    /// Whether the versions differ in what they can say, so that the webhook must convert.
    pub needs_conversion: bool,
    /// How its objects are reviewed.
    pub webhook: WebhookPolicy,
}

/// Reviewed where the webhook can be reached; the schema's rules hold without it.
const FAIL_OPEN: WebhookPolicy = WebhookPolicy {
    suffix: "",
    operations: &["CREATE", "UPDATE"],
    failure_policy: "Ignore",
    every_write: false,
    validates: true,
};

impl Kind {
    /// All of them, in the order of the webhook configurations.
    pub const ALL: [Self; 4] = [
        Self::CloneSet,
        Self::NodeImage,
        Self::ImagePullJob,
        Self::ContainerRecreateRequest,
    ];

    /// What is known of it.
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
            Self::ContainerRecreateRequest => &KindInfo {
                name: "ContainerRecreateRequest",
                plural: "containerrecreaterequests",
                lowercase: "containerrecreaterequest",
                needs_conversion: true,
                // Without the Pod's UID and container IDs a request could restart what it was not made for.
                webhook: WebhookPolicy {
                    suffix: "",
                    operations: &["CREATE"],
                    failure_policy: "Fail",
                    every_write: true,
                    validates: false,
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

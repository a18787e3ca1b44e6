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
pub struct Webhook {
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
pub struct Row {
    /// As in `kind`.
    pub name: &'static str,
    /// Name of the resource.
    pub plural: &'static str,
    /// As in webhook names, paths and metric labels.
    pub lower: &'static str,
    /// Whether the versions differ in what they can say, so that the webhook must convert.
    pub converted: bool,
    /// How its objects are reviewed.
    pub webhook: Webhook,
}

/// Reviewed where the webhook can be reached; the schema's rules hold without it.
const OPTIONAL: Webhook = Webhook {
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
    pub const fn row(self) -> &'static Row {
        match self {
            Self::CloneSet => &Row {
                name: "CloneSet",
                plural: "clonesets",
                lower: "cloneset",
                converted: true,
                webhook: OPTIONAL,
            },
            Self::NodeImage => &Row {
                name: "NodeImage",
                plural: "nodeimages",
                lower: "nodeimage",
                converted: true,
                webhook: OPTIONAL,
            },
            Self::ImagePullJob => &Row {
                name: "ImagePullJob",
                plural: "imagepulljobs",
                lower: "imagepulljob",
                converted: false,
                webhook: Webhook {
                    suffix: "-v1beta1",
                    ..OPTIONAL
                },
            },
            Self::ContainerRecreateRequest => &Row {
                name: "ContainerRecreateRequest",
                plural: "containerrecreaterequests",
                lower: "containerrecreaterequest",
                converted: true,
                // Without the Pod's UID and container IDs a request could restart what it was not made for.
                webhook: Webhook {
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
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.row().name == name)
    }

    /// The kind of this name in lower case.
    #[must_use]
    pub fn in_lower_case(lower: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.row().lower == lower)
    }

    /// Name of its CRD.
    #[must_use]
    pub fn crd_name(self) -> String {
        format!("{}.{GROUP}", self.row().plural)
    }
}

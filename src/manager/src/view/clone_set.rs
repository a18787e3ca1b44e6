//! A CloneSet as it is kept.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};

use kruise_api::cloneset::CloneSet;

/// What changes of other objects ask of a CloneSet, and the whole of it as text: parsed, a template of many small values
/// takes up to a hundred times its length, which is needed for the time of a pass alone.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CloneSetView {
    /// What names it, its version and generation, and whether it is being deleted.
    pub metadata: ObjectMeta,
    /// Its selector.
    pub selector: LabelSelector,
    json: Box<str>,
}

impl CloneSetView {
    /// Reduces a CloneSet that was read from `text`.
    #[must_use]
    pub fn new(set: &CloneSet, json: Box<str>) -> Self {
        let metadata = &set.metadata;
        Self {
            metadata: ObjectMeta {
                name: metadata.name.clone(),
                namespace: metadata.namespace.clone(),
                uid: metadata.uid.clone(),
                resource_version: metadata.resource_version.clone(),
                generation: metadata.generation,
                deletion_timestamp: metadata.deletion_timestamp.clone(),
                ..ObjectMeta::default()
            },
            selector: set.spec.selector.clone(),
            json,
        }
    }

    /// The whole CloneSet.
    ///
    /// # Errors
    /// Never for a view of one that was read.
    pub fn parse(&self) -> Result<CloneSet, serde_json::Error> {
        serde_json::from_str(&self.json)
    }
}

impl From<&CloneSet> for CloneSetView {
    fn from(set: &CloneSet) -> Self {
        Self::new(set, serde_json::to_string(set).unwrap_or_default().into())
    }
}

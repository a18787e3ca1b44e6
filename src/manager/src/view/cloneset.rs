//! A CloneSet as it is cached.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use kruise_api::cloneset::CloneSet;
use kruise_api::selector::CompiledSelector;

/// The fields of a CloneSet that events of other objects need, and the whole as text: parsed, a template of many small
/// values takes up to a hundred times its length, so it is parsed only during a reconcile.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CloneSetView {
    /// Name, UID, version, generation and deletion timestamp.
    pub metadata: ObjectMeta,
    /// Label selector of its Pods. It is matched with every orphan of the namespace.
    pub selector: CompiledSelector,
    json: Box<str>,
}

impl CloneSetView {
    /// Reduces a CloneSet that was parsed from `json`.
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
            selector: CompiledSelector::from(&set.spec.selector),
            json,
        }
    }

    /// Parses the whole CloneSet.
    ///
    /// # Errors
    /// Never for a view of a parsed CloneSet.
    pub fn parse(&self) -> Result<CloneSet, serde_json::Error> {
        serde_json::from_str(&self.json)
    }
}

impl From<&CloneSet> for CloneSetView {
    fn from(set: &CloneSet) -> Self {
        Self::new(set, serde_json::to_string(set).unwrap_or_default().into())
    }
}

//! MutatingAdmissionPolicies and their bindings, as far as they are written here.

use std::borrow::Cow;
use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::marker::PhantomData;
use std::sync::Arc;

use k8s_openapi::ClusterResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use kruise_api::keys;
use kruise_api::owner::{Owner, OwnerKind};
use kruise_cluster::write_cache::Versioned;

pub const GROUP: &str = "admissionregistration.k8s.io";
pub const VERSION: &str = "v1";

/// A kind of the API group; its types are newer than our oldest Kubernetes release.
pub trait AdmissionKind: Clone + Debug + Default + Send + Sync + 'static {
    const KIND: &'static str;
    const PLURAL: &'static str;
}

#[derive(Clone, Debug, Default)]
pub struct Policy;

impl AdmissionKind for Policy {
    const KIND: &'static str = "MutatingAdmissionPolicy";
    const PLURAL: &'static str = "mutatingadmissionpolicies";
}

#[derive(Clone, Debug, Default)]
pub struct Binding;

impl AdmissionKind for Binding {
    const KIND: &'static str = "MutatingAdmissionPolicyBinding";
    const PLURAL: &'static str = "mutatingadmissionpolicybindings";
}

/// An object of one of these kinds.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", bound = "")]
pub struct AdmissionObject<K: AdmissionKind> {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    pub metadata: ObjectMeta,
    #[serde(default)]
    pub spec: Value,
    #[serde(skip)]
    marker: PhantomData<fn() -> K>,
}

impl<K: AdmissionKind> Resource for AdmissionObject<K> {
    type DynamicType = ();
    type Scope = ClusterResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        K::KIND.into()
    }
    fn group((): &()) -> Cow<'_, str> {
        GROUP.into()
    }
    fn version((): &()) -> Cow<'_, str> {
        VERSION.into()
    }
    fn plural((): &()) -> Cow<'_, str> {
        K::PLURAL.into()
    }
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// What is kept of an object that exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    pub uid: String,
    pub resource_version: String,
    pub terminating: bool,
    /// The SidecarSet that its label names.
    label: Option<String>,
    /// What controls it, if anything.
    pub controller: Option<Owner>,
    /// Of its spec, which may be large.
    pub digest: u64,
}

impl Installed {
    pub fn new<K: AdmissionKind>(object: &AdmissionObject<K>) -> Self {
        let metadata = &object.metadata;
        let labels = metadata.labels.as_ref();
        let set = labels.and_then(|labels| labels.get(keys::SIDECAR_SET_NAME));
        Self {
            uid: metadata.uid.clone().unwrap_or_default(),
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
            terminating: metadata.deletion_timestamp.is_some(),
            label: set.cloned(),
            controller: Owner::controller(metadata),
            digest: digest(&object.spec),
        }
    }

    /// The SidecarSet that its label names.
    pub fn label_set(&self) -> Option<&str> {
        self.label.as_deref()
    }

    /// The SidecarSet that controls it.
    pub fn controlling_set(&self) -> Option<&str> {
        let controller = self.controller.as_ref();
        let set = controller.filter(|owner| owner.kind == OwnerKind::SidecarSet);
        set.map(|owner| owner.name.as_str())
    }

    /// The cache entry, in the group of the set that controls it: a label is easily lost.
    pub fn versioned(self: Arc<Self>) -> Versioned<Self> {
        Versioned {
            uid: self.uid.clone(),
            resource_version: self.resource_version.clone(),
            group: self.controlling_set().unwrap_or_default().to_owned(),
            terminating: self.terminating,
            object: self,
        }
    }
}

/// Equal for equal JSON, since maps are sorted.
pub fn digest(spec: &Value) -> u64 {
    let mut hasher = DefaultHasher::new();
    spec.to_string().hash(&mut hasher);
    hasher.finish()
}

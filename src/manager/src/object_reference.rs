//! References to the objects that events are about.

use k8s_openapi::api::core::v1::ObjectReference;

use kruise_cluster::Key;

/// A reference to the object of that kind, name and UID.
pub(crate) fn object_reference(api_version: &str, kind: &str, key: &Key, uid: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some(api_version.to_owned()),
        kind: Some(kind.to_owned()),
        namespace: key.namespace.clone(),
        name: Some(key.name.clone()),
        uid: Some(uid.to_owned()),
        ..ObjectReference::default()
    }
}

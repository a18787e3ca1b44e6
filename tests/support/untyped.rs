//! Objects of any kind, as JSON.

use kruise_cluster::Cluster;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind};

/// The API of a kind without a type, so that no field is lost.
pub fn untyped(
    cluster: &Cluster,
    group: &str,
    version: &str,
    kind: &str,
    namespace: Option<&str>,
) -> Api<DynamicObject> {
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
    match namespace {
        Some(namespace) => Api::namespaced_with(cluster.client.clone(), namespace, &resource),
        None => Api::all_with(cluster.client.clone(), &resource),
    }
}

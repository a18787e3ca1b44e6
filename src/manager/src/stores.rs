//! The watches that the controllers share.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::{Namespace, Node, PersistentVolumeClaim};
use kube::Api;
use kube::api::ListParams;
use serde::de::DeserializeOwned;

use super::view::{ClaimView, CloneSetView, NodeImageView, NodeView, PodView, RawPod, RevisionView};
use kruise_api::cloneset::CloneSet;
use kruise_api::container_recreate_request::{ContainerRecreateRequest, MAX_REQUEST_BYTES};
use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::keys;
use kruise_api::node_image::NodeImage;
use kruise_api::sidecarset::{MAX_SET_BYTES, SidecarSet};
use kruise_cluster::{Bounded, Cluster, ObjectView, Store};
use kruise_ops::supervise::Supervisor;
use kruise_workload::sidecarset::hash::with_hashes;

/// Objects that a list returns at a time: a whole list of ten thousand nodes would be held twice in memory.
const PAGE_SIZE: u32 = 200;
/// The most memory that a CloneSet may take as JSON, in bytes: some 10,000 environment variables.
const MAX_CLONE_SET_BYTES: usize = 8 << 20;
/// The same of a revision, which holds the template of a CloneSet with the API server's defaults.
const MAX_REVISION_BYTES: usize = 2 * MAX_CLONE_SET_BYTES;
/// Labels of a Namespace.
pub type NamespaceLabels = BTreeMap<String, String>;

/// Defines [`Stores`], one row for each kind: field, what is kept of an object, resource, required label, projection.
macro_rules! stores {
    ($($field:ident: $kept:ty = $resource:literal, $label:expr, $project:expr;)*) => {
        /// The stores that the controllers share; clones share the objects.
        #[derive(Clone)]
        #[allow(missing_docs, reason = "each is named after its resource")]
        pub struct Stores {
            $(pub $field: Store<$kept>,)*
        }

        impl Stores {
            /// Starts the watches.
            #[must_use]
            pub fn start(cluster: &Cluster, supervisor: &mut Supervisor) -> Self {
                let mut starter = WatchStarter { cluster, supervisor };
                Self {
                    $($field: starter.watch(concat!("watch of ", $resource), $label, $project),)*
                }
            }

            /// Waits until every watch has its first list.
            pub async fn synced(&self) {
                tokio::join!($(self.$field.wait_until_synced()),*);
            }

            /// Stores of a cluster that is empty and never changes.
            #[cfg(test)]
            pub fn empty() -> Self {
                Self {
                    $($field: Store::from_objects([]),)*
                }
            }
        }
    };
}

stores! {
    nodes: NodeView = "nodes", None, |o: Node| Some(NodeView::from(o));
    node_images: NodeImageView = "nodeimages", None, |o: NodeImage| Some(NodeImageView::from(o));
    jobs: ImagePullJob = "imagepulljobs", None, Some::<ImagePullJob>;
    // With a workload part only if a CloneSet controls the Pod, no one does, or a SidecarSet was injected.
    pods: PodView = "pods", None, |o: RawPod| Some(PodView::from(&o));
    requests: ContainerRecreateRequest = "containerrecreaterequests", None,
        |o: Bounded<ContainerRecreateRequest, { 2 * MAX_REQUEST_BYTES }>| Some(without_hooks(o.object));
    clone_sets: CloneSetView = "clonesets", None,
        |o: Bounded<CloneSet, MAX_CLONE_SET_BYTES>| Some(CloneSetView::new(&o.object, o.json));
    sidecar_sets: SidecarSet = "sidecarsets", None,
        |o: Bounded<SidecarSet, MAX_SET_BYTES>| Some(with_hashes(o.object));
    // Their labels.
    namespaces: NamespaceLabels = "namespaces", None, |o: Namespace| Some(o.metadata.labels.unwrap_or_default());
    // Of CloneSets and SidecarSets, and orphans.
    revisions: RevisionView = "controllerrevisions", Some(keys::REVISION_HASH),
        |o: Bounded<ControllerRevision, MAX_REVISION_BYTES>| RevisionView::from_object(&o.object);
    // Of CloneSets' Pods.
    claims: ClaimView = "persistentvolumeclaims", Some(keys::CLONESET_INSTANCE_ID),
        |o: PersistentVolumeClaim| Some(ClaimView::from_object(&o));
}

/// A request without what only the daemon needs, which a tenant can make large.
fn without_hooks(mut request: ContainerRecreateRequest) -> ContainerRecreateRequest {
    for container in &mut request.spec.containers {
        container.pre_stop = None;
        container.ports = Vec::new();
    }
    request.metadata.managed_fields = None;
    request
}

/// What is needed to start a watch.
struct WatchStarter<'a> {
    cluster: &'a Cluster,
    supervisor: &'a mut Supervisor,
}

impl WatchStarter<'_> {
    /// Watches all objects of a kind that have this label, or all of them, as `project` sees them.
    fn watch<R, T>(
        &mut self,
        name: &'static str,
        label: Option<&str>,
        project: impl Fn(R) -> Option<T> + Send + 'static,
    ) -> Store<T>
    where
        R: ObjectView + DeserializeOwned + 'static,
        T: PartialEq + Send + Sync + 'static,
    {
        let mut params = ListParams::default().limit(PAGE_SIZE);
        if let Some(label) = label {
            params = params.labels(label);
        }
        let api = Api::all(self.cluster.client.clone());
        let (store, task) = self.cluster.reflector(api, params, project);
        self.supervisor.spawn_endless(name, task);
        store
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    /// Admission copies them from the Pod; a tenant may have many requests.
    #[test]
    fn requests_are_kept_without_hooks() {
        let hook = json!({ "exec": { "command": vec!["x"; 1000] } });
        let request = |containers| {
            json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
                "metadata": { "name": "r" }, "spec": { "podName": "p", "containers": containers } })
        };
        let full = request(
            json!([{ "name": "a", "preStop": hook, "ports": [{ "containerPort": 1 }],
            "statusContext": { "containerID": "c://1", "restartCount": 0 } }]),
        );
        let small =
            request(json!([{ "name": "a", "statusContext": { "containerID": "c://1", "restartCount": 0 } }]));
        let kept = without_hooks(serde_json::from_value(full).unwrap());
        assert_eq!(kept, serde_json::from_value(small).unwrap());
        let hook = json!({ "exec": { "command": vec!["x"; 100_000] } });
        let large = request(json!([{ "name": "a", "preStop": hook }])).to_string();
        serde_json::from_str::<Bounded<ContainerRecreateRequest, { 2 * MAX_REQUEST_BYTES }>>(&large)
            .unwrap_err();
    }
}

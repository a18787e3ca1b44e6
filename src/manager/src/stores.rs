//! The watches that the controllers share.

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim};
use kube::Api;
use kube::api::ListParams;
use serde::de::DeserializeOwned;

use super::view::{ClaimView, CloneSetView, NodeImageView, NodeView, PodView, RawPod, RevisionView};
use kruise_api::cloneset::CloneSet;
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::keys;
use kruise_api::node_image::NodeImage;
use kruise_cluster::{Bounded, Cluster, ObjectView, Store};
use kruise_ops::supervise::Supervisor;

/// What is known of the cluster; clones share it.
#[derive(Clone)]
pub struct Stores {
    /// All Nodes.
    pub nodes: Store<NodeView>,
    /// All NodeImages.
    pub node_images: Store<NodeImageView>,
    /// All ImagePullJobs.
    pub jobs: Store<ImagePullJob>,
    /// All Pods.
    pub pods: Store<PodView>,
    /// All ContainerRecreateRequests.
    pub requests: Store<ContainerRecreateRequest>,
    /// All CloneSets.
    pub clone_sets: Store<CloneSetView>,
    /// Revisions that a CloneSet controls, or nobody.
    pub revisions: Store<RevisionView>,
    /// Claims of CloneSets' Pods.
    pub claims: Store<ClaimView>,
}

/// Objects that a list returns at a time: a whole list of ten thousand nodes would be held twice in memory.
const PAGE_SIZE: u32 = 200;
/// The most memory that a CloneSet may take as JSON, in bytes: some 10,000 environment variables.
const MAX_CLONE_SET_BYTES: usize = 8 << 20;
/// The same of a revision, which holds the template of a CloneSet with the API server's defaults.
const MAX_REVISION_BYTES: usize = 2 * MAX_CLONE_SET_BYTES;

impl Stores {
    /// Starts the watches.
    #[must_use]
    pub fn start(cluster: &Cluster, supervisor: &mut Supervisor) -> Self {
        let mut start = WatchStarter { cluster, supervisor };
        Self {
            nodes: start.watch("watch of nodes", None, |o: Node| Some(NodeView::from(o))),
            node_images: start.watch("watch of nodeimages", None, |o: NodeImage| {
                Some(NodeImageView::from(o))
            }),
            jobs: start.watch("watch of imagepulljobs", None, Some::<ImagePullJob>),
            pods: start.watch("watch of pods", None, |o: RawPod| Some(PodView::from(&o))),
            requests: start.watch(
                "watch of containerrecreaterequests",
                None,
                Some::<ContainerRecreateRequest>,
            ),
            clone_sets: start.watch(
                "watch of clonesets",
                None,
                |o: Bounded<CloneSet, MAX_CLONE_SET_BYTES>| Some(CloneSetView::new(&o.object, o.json)),
            ),
            revisions: start.watch(
                "watch of controllerrevisions",
                Some(keys::REVISION_HASH),
                |o: Bounded<ControllerRevision, MAX_REVISION_BYTES>| RevisionView::from_object(&o.object),
            ),
            claims: start.watch(
                "watch of persistentvolumeclaims",
                Some(keys::CLONESET_INSTANCE_ID),
                |o: PersistentVolumeClaim| Some(ClaimView::from_object(&o)),
            ),
        }
    }

    /// Waits until every watch has its first list.
    pub async fn synced(&self) {
        tokio::join!(
            self.nodes.wait_until_synced(),
            self.node_images.wait_until_synced(),
            self.jobs.wait_until_synced(),
            self.pods.wait_until_synced(),
            self.requests.wait_until_synced(),
            self.clone_sets.wait_until_synced(),
            self.revisions.wait_until_synced(),
            self.claims.wait_until_synced()
        );
    }
}

#[cfg(test)]
impl Stores {
    /// Of a cluster in which there is nothing, and never will be.
    pub fn empty() -> Self {
        Self {
            nodes: Store::from_objects([]),
            node_images: Store::from_objects([]),
            jobs: Store::from_objects([]),
            pods: Store::from_objects([]),
            requests: Store::from_objects([]),
            clone_sets: Store::from_objects([]),
            revisions: Store::from_objects([]),
            claims: Store::from_objects([]),
        }
    }
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

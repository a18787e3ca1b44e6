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
use kruise_cluster::{Bounded, Cluster, Form, Mirror};
use kruise_ops::supervise::Supervisor;

/// What is known of the cluster; clones share it.
#[derive(Clone)]
pub struct Stores {
    /// All Nodes.
    pub nodes: Mirror<NodeView>,
    /// All NodeImages.
    pub node_images: Mirror<NodeImageView>,
    /// All ImagePullJobs.
    pub jobs: Mirror<ImagePullJob>,
    /// All Pods.
    pub pods: Mirror<PodView>,
    /// All ContainerRecreateRequests.
    pub requests: Mirror<ContainerRecreateRequest>,
    /// All CloneSets.
    pub clone_sets: Mirror<CloneSetView>,
    /// Revisions that a CloneSet controls, or nobody.
    pub revisions: Mirror<RevisionView>,
    /// Claims of CloneSets' Pods.
    pub claims: Mirror<ClaimView>,
}

/// Objects that a list returns at a time: a whole list of ten thousand nodes would be held twice in memory.
const PAGE: u32 = 200;
/// The most memory that a CloneSet may take as JSON, in bytes: some 10,000 environment variables.
const CLONE_SET: usize = 8 << 20;
/// The same of a revision, which holds the template of a CloneSet with the API server's defaults.
const REVISION: usize = 2 * CLONE_SET;

impl Stores {
    /// Starts the watches.
    #[must_use]
    pub fn start(cluster: &Cluster, supervisor: &mut Supervisor) -> Self {
        let mut start = Start { cluster, supervisor };
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
            clone_sets: start.watch("watch of clonesets", None, |o: Bounded<CloneSet, CLONE_SET>| {
                Some(CloneSetView::of(&o.object, o.text))
            }),
            revisions: start.watch(
                "watch of controllerrevisions",
                Some(keys::REVISION_HASH),
                |o: Bounded<ControllerRevision, REVISION>| RevisionView::of(&o.object),
            ),
            claims: start.watch(
                "watch of persistentvolumeclaims",
                Some(keys::CLONESET_INSTANCE_ID),
                |o: PersistentVolumeClaim| Some(ClaimView::of(&o)),
            ),
        }
    }

    /// Waits until every watch has its first list.
    pub async fn synced(&self) {
        tokio::join!(
            self.nodes.synced(),
            self.node_images.synced(),
            self.jobs.synced(),
            self.pods.synced(),
            self.requests.synced(),
            self.clone_sets.synced(),
            self.revisions.synced(),
            self.claims.synced()
        );
    }
}

#[cfg(test)]
impl Stores {
    /// Of a cluster in which there is nothing, and never will be.
    pub fn empty() -> Self {
        Self {
            nodes: Mirror::of([]),
            node_images: Mirror::of([]),
            jobs: Mirror::of([]),
            pods: Mirror::of([]),
            requests: Mirror::of([]),
            clone_sets: Mirror::of([]),
            revisions: Mirror::of([]),
            claims: Mirror::of([]),
        }
    }
}

/// What is needed to start a watch.
struct Start<'a> {
    cluster: &'a Cluster,
    supervisor: &'a mut Supervisor,
}

impl Start<'_> {
    /// Watches all objects of a kind that have this label, or all of them, as `project` sees them.
    fn watch<R, T>(
        &mut self,
        name: &'static str,
        label: Option<&str>,
        project: impl Fn(R) -> Option<T> + Send + 'static,
    ) -> Mirror<T>
    where
        R: Form + DeserializeOwned + 'static,
        T: PartialEq + Send + Sync + 'static,
    {
        let mut selected = ListParams::default().limit(PAGE);
        if let Some(label) = label {
            selected = selected.labels(label);
        }
        let api = Api::all(self.cluster.client.clone());
        let (mirror, task) = self.cluster.mirror(api, selected, project);
        self.supervisor.spawn_endless(name, task);
        mirror
    }
}

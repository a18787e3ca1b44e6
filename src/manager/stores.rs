//! The watches that the controllers share.

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::runtime::watcher;
use kube::{Api, ResourceExt};

use super::view::{NodeImageView, NodeView, PodView};
use crate::api::container_recreate_request::ContainerRecreateRequest;
use crate::api::image_pull_job::ImagePullJob;
use crate::api::node_image::NodeImage;
use crate::cluster::{Cluster, Mirror, mirror};
use crate::ops::supervise::Supervisor;

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
}

/// Objects that a list returns at a time: a whole list of ten thousand nodes would be held twice in memory.
const PAGE: u32 = 200;

impl Stores {
    /// Starts the watches.
    #[must_use]
    pub fn start(cluster: &Cluster, supervisor: &mut Supervisor) -> Self {
        let client = &cluster.client;
        let config = || watcher::Config::default().page_size(PAGE);
        let (nodes, task) = mirror(Api::<Node>::all(client.clone()), config(), |o| {
            Some(NodeView::from(o))
        });
        supervisor.spawn_endless("watch of nodes", task);
        let (node_images, task) = mirror(Api::<NodeImage>::all(client.clone()), config(), |o| {
            Some(NodeImageView::from(o))
        });
        supervisor.spawn_endless("watch of nodeimages", task);
        let (jobs, task) = mirror(Api::<ImagePullJob>::all(client.clone()), config(), |mut o| {
            o.managed_fields_mut().clear();
            Some(o)
        });
        supervisor.spawn_endless("watch of imagepulljobs", task);
        let (pods, task) = mirror(Api::<Pod>::all(client.clone()), config(), |o| {
            Some(PodView::from(o))
        });
        supervisor.spawn_endless("watch of pods", task);
        let (requests, task) = mirror(
            Api::<ContainerRecreateRequest>::all(client.clone()),
            config(),
            |mut o| {
                o.managed_fields_mut().clear();
                Some(o)
            },
        );
        supervisor.spawn_endless("watch of containerrecreaterequests", task);
        Self {
            nodes,
            node_images,
            jobs,
            pods,
            requests,
        }
    }

    /// Waits until every watch has its first list.
    pub async fn synced(&self) {
        tokio::join!(
            self.nodes.synced(),
            self.node_images.synced(),
            self.jobs.synced(),
            self.pods.synced(),
            self.requests.synced()
        );
    }

    /// The watches that have no list yet, in words.
    #[must_use]
    pub fn missing(&self) -> Vec<&'static str> {
        let all = [
            ("nodes", self.nodes.is_synced()),
            ("nodeimages", self.node_images.is_synced()),
            ("imagepulljobs", self.jobs.is_synced()),
            ("pods", self.pods.is_synced()),
            ("containerrecreaterequests", self.requests.is_synced()),
        ];
        all.iter().filter(|(_, ok)| !ok).map(|(name, _)| *name).collect()
    }
}

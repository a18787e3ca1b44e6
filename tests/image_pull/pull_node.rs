//! One API server for all tests, and a node for each.

use std::fmt::Debug;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex};

use kruise_api::node_image::{ImageTagStatus, NodeImage};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use testbed::cluster::{ControlPlane, TokenBinding};

use support::connect::connect;
pub use support::waits::WAIT_TIMEOUT;
use support::waits::{self, by_name, log_tails};

static PLANE: LazyLock<ControlPlane> = LazyLock::new(start_control_plane);

/// An API server with what users install.
pub fn start_control_plane() -> ControlPlane {
    let plane = ControlPlane::start().unwrap();
    let deploy = format!("{}/../deploy/default", env!("CARGO_MANIFEST_DIR"));
    plane.kubectl(&["apply", "-k", &deploy]).unwrap();
    plane
}

/// A node and its NodeImage.
pub struct PullNode {
    pub name: String,
    /// Credentials of this node's daemon.
    pub kubeconfig: PathBuf,
    pub client: Client,
    pub images: Api<NodeImage>,
    /// Log files of its programs.
    pub logs: Mutex<Vec<PathBuf>>,
}

impl PullNode {
    /// On the API server that the tests share.
    pub async fn on_shared_plane(name: &str) -> Self {
        let plane = tokio::task::spawn_blocking(|| &*PLANE).await.unwrap();
        Self::on_plane(plane, name).await
    }

    /// On the test's own API server.
    pub async fn on_plane(plane: &ControlPlane, name: &str) -> Self {
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}});
        plane.apply(&node.to_string()).unwrap();
        let client = connect(plane.kubeconfig()).await.client;
        let images = Api::all(client.clone());
        Self {
            name: name.to_owned(),
            kubeconfig: plane
                .kubeconfig_for("kruise-system", "kruise-daemon", TokenBinding::Node(name))
                .unwrap(),
            client,
            images,
            logs: Mutex::default(),
        }
    }

    /// Makes the Node ready, so that the manager creates its NodeImage.
    pub fn set_ready(&self, plane: &ControlPlane) {
        let ready = json!({"status": {"conditions": [{"type": "Ready", "status": "True", "reason": "R", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}]}});
        let ready = ready.to_string();
        let patch = [
            "patch",
            "node",
            &self.name,
            "--subresource=status",
            "--patch",
            &ready,
        ];
        plane.kubectl(&patch).unwrap();
    }

    /// Creates the NodeImage.
    pub async fn create_node_image(&self, images: Value) {
        let object = json!({"apiVersion": "apps.kruise.io/v1beta1", "kind": "NodeImage",
            "metadata": {"name": self.name}, "spec": {"images": images}});
        self.images
            .create(&PostParams::default(), &serde_json::from_value(object).unwrap())
            .await
            .unwrap();
    }

    /// Merges changes into the images of the spec; null removes.
    pub async fn patch_images(&self, images: Value) {
        let patch = json!({"spec": {"images": images}});
        self.images
            .patch(&self.name, &PatchParams::default(), &Patch::Merge(patch))
            .await
            .unwrap();
    }

    pub async fn delete_node_image(&self) {
        self.images
            .delete(&self.name, &DeleteParams::default())
            .await
            .unwrap();
    }

    /// Waits until `predicate` holds for a tag's status.
    pub async fn wait_tag(
        &self,
        image: &str,
        tag: &str,
        what: &str,
        predicate: impl Fn(&ImageTagStatus) -> bool,
    ) -> ImageTagStatus {
        let node_image = self
            .wait_node_image(&format!("{image} {tag} {what}"), |n| {
                tag_status(n, image, tag).is_some_and(&predicate)
            })
            .await;
        tag_status(&node_image, image, tag).unwrap().clone()
    }

    /// Waits until a tag is complete.
    pub async fn wait_tag_complete(&self, image: &str, tag: &str) -> ImageTagStatus {
        self.wait_tag(image, tag, "over", |t| t.completion_time.is_some())
            .await
    }

    /// Waits until `predicate` holds for the NodeImage.
    pub async fn wait_node_image(&self, what: &str, predicate: impl Fn(&NodeImage) -> bool) -> NodeImage {
        self.wait_object(&self.images, &self.name, what, predicate).await
    }

    /// Waits until `predicate` holds for an object.
    pub async fn wait_object<K>(
        &self,
        api: &Api<K>,
        name: &str,
        what: &str,
        predicate: impl Fn(&K) -> bool,
    ) -> K
    where
        K: kube::Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize + Send + 'static,
    {
        let (what, logs) = (format!("{name}: {what}"), || self.log_tails());
        let predicate = |found: &[&K]| found.first().is_some_and(|object| predicate(object));
        let mut last =
            waits::watch_until(&what, &logs, api.clone(), by_name(name), |one| one, predicate).await;
        last.remove(0)
    }

    /// The last lines of the logs of this node's programs.
    fn log_tails(&self) -> String {
        let mut logs = self.logs.lock().unwrap().clone();
        // A restarted daemon appends to its file.
        logs.dedup();
        log_tails(logs)
    }

    /// Waits for an event on an object with that UID, and returns its message.
    pub async fn wait_event(&self, uid: &str, reason: &str) -> String {
        use k8s_openapi::api::core::v1::Event;
        let events: Api<Event> = Api::all(self.client.clone());
        let fields = format!("involvedObject.uid={uid},reason={reason}");
        let what = format!("event {reason} on {uid}");
        let params = ListParams::default().fields(&fields);
        let poll = || async { events.list(&params).await.unwrap().items.pop() };
        let event = waits::poll_until(&what, &|| self.log_tails(), poll).await;
        let host = event.source.unwrap_or_default().host;
        assert_eq!(host.as_deref(), Some(self.name.as_str()));
        event.message.unwrap_or_default()
    }

    pub async fn uid(&self) -> String {
        self.images.get(&self.name).await.unwrap().uid().unwrap()
    }
}

pub fn tag_status<'a>(node: &'a NodeImage, image: &str, tag: &str) -> Option<&'a ImageTagStatus> {
    node.status
        .as_ref()?
        .image_statuses
        .get(image)?
        .tags
        .iter()
        .find(|t| t.tag == tag)
}

/// A tag of the spec.
pub fn tag(tag: &str, options: Value) -> Value {
    let mut object = json!({"tag": tag, "createdAt": "2026-01-01T00:00:00Z",
        "pullPolicy": {"ttlSecondsAfterFinished": 3600}});
    json_patch::merge(&mut object, &options);
    object
}

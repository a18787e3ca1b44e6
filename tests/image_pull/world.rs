//! One API server for all tests, and a node of its own for each.

use std::fmt::Debug;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex};

use kruise_api::node_image::{ImageTagStatus, NodeImage};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use testbed::cluster::{Bound, ControlPlane};

use support::connect::connect;
pub use support::waits::PATIENCE;
use support::waits::{self, named, tails};

static PLANE: LazyLock<ControlPlane> = LazyLock::new(install);

/// An API server with what users install.
pub fn install() -> ControlPlane {
    let plane = ControlPlane::start().unwrap();
    let deploy = format!("{}/../deploy/default", env!("CARGO_MANIFEST_DIR"));
    plane.kubectl(&["apply", "-k", &deploy]).unwrap();
    plane
}

/// A node and its NodeImage.
pub struct Node {
    pub name: String,
    /// Access as the daemon of this node has it.
    pub kubeconfig: PathBuf,
    pub client: Client,
    pub images: Api<NodeImage>,
    /// Where its programs log.
    pub logs: Mutex<Vec<PathBuf>>,
}

impl Node {
    /// On the API server that the tests share.
    pub async fn make(name: &str) -> Self {
        let plane = tokio::task::spawn_blocking(|| &*PLANE).await.unwrap();
        Self::on(plane, name).await
    }

    /// On an API server of the test's own.
    pub async fn on(plane: &ControlPlane, name: &str) -> Self {
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}});
        plane.apply(&node.to_string()).unwrap();
        let client = connect(plane.kubeconfig()).await.client;
        let images = Api::all(client.clone());
        Self {
            name: name.to_owned(),
            kubeconfig: plane
                .kubeconfig_for("kruise-system", "kruise-daemon", Bound::Node(name))
                .unwrap(),
            client,
            images,
            logs: Mutex::default(),
        }
    }

    /// Makes the NodeImage.
    pub async fn ask(&self, images: Value) {
        let object = json!({"apiVersion": "apps.kruise.io/v1beta1", "kind": "NodeImage",
            "metadata": {"name": self.name}, "spec": {"images": images}});
        self.images
            .create(&PostParams::default(), &serde_json::from_value(object).unwrap())
            .await
            .unwrap();
    }

    /// Changes what is asked; null removes.
    pub async fn change(&self, images: Value) {
        let patch = json!({"spec": {"images": images}});
        self.images
            .patch(&self.name, &PatchParams::default(), &Patch::Merge(patch))
            .await
            .unwrap();
    }

    pub async fn delete(&self) {
        self.images
            .delete(&self.name, &DeleteParams::default())
            .await
            .unwrap();
    }

    /// Waits until a tag's status is as wanted.
    pub async fn until(
        &self,
        image: &str,
        tag: &str,
        what: &str,
        wanted: impl Fn(&ImageTagStatus) -> bool,
    ) -> ImageTagStatus {
        let seen = self
            .until_node(&format!("{image} {tag} {what}"), |n| {
                find(n, image, tag).is_some_and(&wanted)
            })
            .await;
        find(&seen, image, tag).unwrap().clone()
    }

    /// Waits until a tag is over.
    pub async fn until_over(&self, image: &str, tag: &str) -> ImageTagStatus {
        self.until(image, tag, "over", |t| t.completion_time.is_some())
            .await
    }

    /// Waits until the NodeImage is as wanted.
    pub async fn until_node(&self, what: &str, wanted: impl Fn(&NodeImage) -> bool) -> NodeImage {
        self.until_object(&self.images, &self.name, what, wanted).await
    }

    /// Waits until an object is as wanted.
    pub async fn until_object<K>(
        &self,
        api: &Api<K>,
        name: &str,
        what: &str,
        wanted: impl Fn(&K) -> bool,
    ) -> K
    where
        K: kube::Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize + Send + 'static,
    {
        let (what, logs) = (format!("{name}: {what}"), || self.tail());
        let wanted = |found: &[&K]| found.first().is_some_and(|object| wanted(object));
        let mut last = waits::follow(&what, &logs, api.clone(), named(name), |one| one, wanted).await;
        last.remove(0)
    }

    /// The ends of the logs of the programs of this node.
    fn tail(&self) -> String {
        let mut logs = self.logs.lock().unwrap().clone();
        // A daemon that was started again goes on in its file.
        logs.dedup();
        tails(logs)
    }

    /// Waits for an event on an object of that UID, and returns its text.
    pub async fn until_event(&self, uid: &str, reason: &str) -> String {
        use k8s_openapi::api::core::v1::Event;
        let events: Api<Event> = Api::all(self.client.clone());
        let fields = format!("involvedObject.uid={uid},reason={reason}");
        let what = format!("event {reason} on {uid}");
        let params = ListParams::default().fields(&fields);
        let ask = || async { events.list(&params).await.unwrap().items.pop() };
        let event = waits::until(&what, &|| self.tail(), ask).await;
        let host = event.source.unwrap_or_default().host;
        assert_eq!(host.as_deref(), Some(self.name.as_str()));
        event.message.unwrap_or_default()
    }

    pub async fn uid(&self) -> String {
        self.images.get(&self.name).await.unwrap().uid().unwrap()
    }
}

pub fn find<'a>(node: &'a NodeImage, image: &str, tag: &str) -> Option<&'a ImageTagStatus> {
    node.status
        .as_ref()?
        .image_statuses
        .get(image)?
        .tags
        .iter()
        .find(|t| t.tag == tag)
}

/// One tag that is asked for.
pub fn tag(tag: &str, more: Value) -> Value {
    let mut object = json!({"tag": tag, "createdAt": "2026-01-01T00:00:00Z",
        "pullPolicy": {"ttlSecondsAfterFinished": 3600}});
    json_patch::merge(&mut object, &more);
    object
}

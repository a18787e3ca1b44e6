//! An API server with everything from `deploy/default`, the manager's binary, and daemons that the tests play.

use std::sync::LazyLock;
use std::time::Duration;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Node, Pod};
use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::node_image::NodeImage;
use kruise_cluster::Cluster;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use testbed::cluster::{ControlPlane, ControlPlaneOptions};

pub use testbed::wait::WAIT_TIMEOUT;

pub use crate::connect::connect;
use crate::manager::Manager;
use crate::waits;
use support::conversion::{self, wait_for_conversion};

static SHARED_CLUSTER: LazyLock<TestCluster> = LazyLock::new(|| {
    let world = TestCluster::new();
    let mut manager = Manager::unelected(&world.plane, "kruise-manager");
    manager.start().unwrap();
    wait_for_conversion(&world.plane, &conversion::CONVERTED_KINDS);
    TestCluster {
        manager: Some(manager),
        ..world
    }
});

/// A bed, with a manager if it has one.
pub struct TestCluster {
    pub plane: ControlPlane,
    manager: Option<Manager>,
}

/// The cluster that most tests share.
pub fn shared_cluster() -> &'static TestCluster {
    &SHARED_CLUSTER
}

impl TestCluster {
    /// An API server with what users install, without a manager.
    pub fn new() -> Self {
        Self::with_options(ControlPlaneOptions::default())
    }

    /// The same on a control plane with these options.
    pub fn with_options(options: ControlPlaneOptions) -> Self {
        let plane = ControlPlane::start_with(options).unwrap();
        let path = format!("{}/../deploy/default", env!("CARGO_MANIFEST_DIR"));
        plane.kubectl(&["apply", "-k", &path]).unwrap();
        plane
            .kubectl(&["create", "serviceaccount", "default", "--namespace=default"])
            .unwrap();
        Self { plane, manager: None }
    }

    /// A replica of the manager, not started yet; ready when `/readyz` says so.
    pub fn manager(&self, name: &'static str) -> Manager {
        Manager::on_free_ports(&self.plane, name)
    }

    /// Waits until lines at level INFO of the manager's log begin with this text and name the object; returns their
    /// number.
    pub async fn wait_for_log(&self, text: &str, object: &str) -> usize {
        let manager = self.manager.as_ref().expect("a manager");
        waits::wait_for_log(manager.log(), text, object).await
    }

    pub async fn admin(&self) -> Cluster {
        connect(self.plane.kubeconfig()).await
    }
}

/// Creates an object from JSON; retries until the webhooks respond.
pub async fn create<K>(api: &Api<K>, object: Value) -> K
where
    K: Resource<DynamicType = ()> + Serialize + DeserializeOwned + Clone + std::fmt::Debug,
{
    let object: K = serde_json::from_value(object).unwrap();
    api.create(&PostParams::default(), &object).await.unwrap()
}

pub async fn merge_status<K>(api: &Api<K>, name: &str, status: Value) -> K
where
    K: Resource<DynamicType = ()> + DeserializeOwned + Clone + std::fmt::Debug,
{
    let patch = json!({ "status": status });
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .unwrap()
}

/// Waits until `predicate` holds for the object of that name; on timeout, prints its last state.
#[track_caller]
pub fn wait_until<K>(
    api: &Api<K>,
    name: &str,
    what: &'static str,
    predicate: impl Fn(&K) -> bool,
) -> impl Future<Output = K>
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned + Serialize + Send + 'static,
{
    let caller = std::panic::Location::caller();
    let what = format!("{caller}: {name}: {what}");
    let (api, config) = (api.clone(), waits::by_name(name));
    async move {
        let predicate = |found: &[&K]| found.first().is_some_and(|object| predicate(object));
        let mut found =
            waits::watch_until(&what, &String::new, api, config, |object| object, predicate).await;
        found.remove(0)
    }
}

/// Waits until there is no object of that name.
#[track_caller]
pub fn wait_until_deleted<K>(api: &Api<K>, name: &str) -> impl Future<Output = ()>
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned + Send + 'static,
{
    let caller = std::panic::Location::caller();
    let (api, name) = (api.clone(), name.to_owned());
    async move {
        let wait_for_deletion = async {
            let none = |object: Option<&K>| object.is_none();
            // A watch ends with an error when its CRD is written, for example, and is then started again.
            while kube::runtime::wait::await_condition(api.clone(), &name, none)
                .await
                .is_err()
            {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        let outcome = tokio::time::timeout(WAIT_TIMEOUT, wait_for_deletion).await;
        assert!(outcome.is_ok(), "{caller}: {name} is still there");
    }
}

/// Creates a Node, ready or not; if ready, waits for its NodeImage.
pub async fn create_node(cluster: &Cluster, name: &str, labels: Value, ready: bool) -> Node {
    let nodes = Api::<Node>::all(cluster.client.clone());
    create(&nodes, json!({ "metadata": { "name": name, "labels": labels } })).await;
    set_node_ready(cluster, name, ready).await
}

pub async fn set_node_ready(cluster: &Cluster, name: &str, ready: bool) -> Node {
    let nodes = Api::<Node>::all(cluster.client.clone());
    let now = cluster.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let status = if ready { "True" } else { "Unknown" };
    let condition = json!({ "type": "Ready", "status": status, "reason": "Test", "message": "",
        "lastHeartbeatTime": now, "lastTransitionTime": now });
    merge_status(&nodes, name, json!({ "conditions": [condition] })).await
}

/// Creates ready Nodes with these names and labels, and waits for their NodeImages.
pub async fn create_nodes(cluster: &Cluster, names: &[&str], labels: Value) {
    for name in names {
        create_node(cluster, name, labels.clone(), true).await;
    }
    let images = Api::<NodeImage>::all(cluster.client.clone());
    for name in names {
        wait_until(&images, name, "there with its labels", |i: &NodeImage| {
            labels
                .as_object()
                .is_none_or(|l| l.keys().all(|k| i.labels().contains_key(k)))
        })
        .await;
    }
}

/// Result that a played daemon reports: phase and message.
#[derive(Clone, Copy)]
pub enum PullOutcome {
    Succeeded,
    Failed(&'static str),
    Pulling,
}

/// Plays a node's daemon: writes the result of all tags that the node should have.
pub async fn report_pull(cluster: &Cluster, node: &str, answer: PullOutcome) {
    let images = Api::<NodeImage>::all(cluster.client.clone());
    let object = images.get(node).await.unwrap();
    report_pull_of(cluster, &object, answer).await;
}

pub async fn report_pull_of(cluster: &Cluster, object: &NodeImage, answer: PullOutcome) {
    let images = Api::<NodeImage>::all(cluster.client.clone());
    let now = cluster.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let status = |tag: &kruise_api::node_image::ImageTagSpec| {
        let (phase, message, outcome) = match answer {
            PullOutcome::Succeeded => ("Succeeded", "", true),
            PullOutcome::Failed(why) => ("Failed", why, true),
            PullOutcome::Pulling => ("Pulling", "", false),
        };
        let ended = outcome.then_some(&now);
        json!({ "tag": tag.tag, "version": tag.version, "phase": phase, "message": message,
            "progress": if outcome { 100 } else { 0 }, "startTime": now, "completionTime": ended })
    };
    let statuses: serde_json::Map<String, Value> = object
        .spec
        .images
        .iter()
        .map(|(name, spec)| {
            let tags: Vec<Value> = spec.tags.iter().map(status).collect();
            (name.clone(), json!({ "tags": tags }))
        })
        .collect();
    let desired = object.spec.images.values().map(|i| i.tags.len()).sum::<usize>();
    merge_status(
        &images,
        &object.name_any(),
        json!({ "desired": desired, "imageStatuses": statuses }),
    )
    .await;
}

/// Waits until the node's NodeImage has the tag.
pub async fn wait_for_tag(
    cluster: &Cluster,
    node: &str,
    image: &'static str,
    tag: &'static str,
) -> NodeImage {
    let images = Api::<NodeImage>::all(cluster.client.clone());
    wait_until(&images, node, "asked for the tag", move |i: &NodeImage| {
        let entry = i.spec.images.get(image);
        entry.is_some_and(|e| e.tags.iter().any(|t| t.tag == tag))
    })
    .await
}

pub fn job(name: &str, spec: Value) -> Value {
    let mut spec = spec;
    if spec.get("completionPolicy").is_none() {
        spec["completionPolicy"] = json!({});
    }
    json!({ "metadata": { "name": name, "namespace": "default" }, "spec": spec })
}

pub fn jobs(cluster: &Cluster) -> Api<ImagePullJob> {
    Api::namespaced(cluster.client.clone(), "default")
}

pub fn completed(job: &ImagePullJob) -> bool {
    job.status.as_ref().is_some_and(|s| s.completion_time.is_some())
}

/// A Pod on a node, with the readiness gate if requested, and its containers running and ready.
pub async fn create_pod(cluster: &Cluster, name: &str, node: &str, labels: Value, gate: bool) -> Pod {
    let pods = Api::<Pod>::namespaced(cluster.client.clone(), "default");
    let gates = if gate {
        json!([{ "conditionType": "KruisePodReady" }])
    } else {
        json!([])
    };
    let spec = json!({ "nodeName": node, "readinessGates": gates, "terminationGracePeriodSeconds": 0,
        "containers": [{ "name": "app", "image": "i" }] });
    create(
        &pods,
        json!({ "metadata": { "name": name, "labels": labels }, "spec": spec }),
    )
    .await;
    run_container(cluster, name, "containerd://one", 0).await
}

/// Plays kubelet: the Pod's container runs with that ID.
pub async fn run_container(cluster: &Cluster, name: &str, id: &str, restarts: i32) -> Pod {
    let pods = Api::<Pod>::namespaced(cluster.client.clone(), "default");
    let true_ = |type_: &str| json!({ "type": type_, "status": "True" });
    let patch = json!({ "status": {
        "phase": "Running",
        "conditions": [true_("Ready"), true_("ContainersReady")],
        "containerStatuses": [{ "name": "app", "containerID": id, "restartCount": restarts, "ready": true,
            "image": "i", "imageID": "i", "state": { "running": {} } }],
    }});
    pods.patch_status(name, &PatchParams::default(), &Patch::Strategic(&patch))
        .await
        .unwrap()
}

/// Marks the namespaced kinds for the test helpers.
pub trait Namespaced: Resource<DynamicType = (), Scope = NamespaceResourceScope> {}
impl<K: Resource<DynamicType = (), Scope = NamespaceResourceScope>> Namespaced for K {}

pub fn api<K: Namespaced>(cluster: &Cluster) -> Api<K> {
    Api::namespaced(cluster.client.clone(), "default")
}

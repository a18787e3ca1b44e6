//! An API server with what users install, both roles of our manager, and our daemon of one node.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use futures::{StreamExt, stream};
use kruise_cluster::Cluster;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, TypeMeta};
use serde_json::{Value, json};
use testbed::cluster::{Component, ControlPlane, TokenBinding};

use support::connect::connect;
use support::conversion::{self, wait_for_conversion};
use support::fault_cri::{FakeContainer, FaultCri};
use support::manager::Manager;
use support::readiness::{http_get, is_ready};
use support::untyped::untyped;
use support::waits;

/// Objects that are created or deleted in parallel.
pub const MAX_CONCURRENT: usize = 8;
/// The only node.
pub const NODE: &str = "n1";
/// Pods whose containers may be recreated; [`target`] names them.
pub const TARGETS: usize = 40;

static SHARED_CLUSTER: LazyLock<FullCluster> = LazyLock::new(FullCluster::start);
/// One attack at a time, so that its effects are its own.
static EXCLUSIVE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

pub struct FullCluster {
    pub plane: ControlPlane,
    /// Port of the webhooks.
    pub webhooks: u16,
    controllers: Mutex<Manager>,
    webhook: Mutex<Manager>,
    daemon: Mutex<Component>,
    daemon_health: String,
    _cri: FaultCri,
    _dir: tempfile::TempDir,
}

/// The cluster, locked for the test that attacks it.
pub struct ClusterGuard {
    cluster: &'static FullCluster,
    _exclusive: tokio::sync::MutexGuard<'static, ()>,
}

impl Deref for ClusterGuard {
    type Target = FullCluster;
    fn deref(&self) -> &FullCluster {
        self.cluster
    }
}

pub async fn exclusive_cluster() -> ClusterGuard {
    let exclusive = EXCLUSIVE.lock().await;
    ClusterGuard {
        cluster: tokio::task::spawn_blocking(|| &*SHARED_CLUSTER).await.unwrap(),
        _exclusive: exclusive,
    }
}

pub fn target(number: usize) -> String {
    format!("target-{}", number % TARGETS)
}

impl FullCluster {
    fn start() -> Self {
        let plane = ControlPlane::start().unwrap();
        let deploy = format!("{}/../deploy/default", env!("CARGO_MANIFEST_DIR"));
        plane.kubectl(&["apply", "-k", &deploy]).unwrap();
        plane.kubectl(&["create", "namespace", "other"]).unwrap();
        for namespace in ["default", "other"] {
            let namespace = format!("--namespace={namespace}");
            plane
                .kubectl(&["create", "serviceaccount", "default", &namespace])
                .unwrap();
        }
        create_node(&plane);
        let webhooks = testbed::port::reserve().unwrap();
        let mut webhook = Manager::with_role(&plane, "kruise-webhook", "webhooks", webhooks);
        webhook.spawn().unwrap();
        let mut controllers = Manager::with_role(&plane, "kruise-manager", "controllers", webhooks);
        controllers.start().unwrap();
        webhook.wait_ready().unwrap();
        wait_for_conversion(&plane, &conversion::CONVERTED_KINDS);

        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("containerd.sock");
        let cri = start_runtime(socket.clone());
        let create_pods = async { create_targets(&connect(plane.kubeconfig()).await, &cri).await };
        tokio::runtime::Handle::current().block_on(create_pods);
        let daemon_health = format!("127.0.0.1:{}", testbed::port::reserve().unwrap());
        let account = plane
            .kubeconfig_for("kruise-system", "kruise-daemon", TokenBinding::Node(NODE))
            .unwrap();
        let probe = daemon_health.clone();
        let mut daemon = plane
            .component("kruise-daemon", support::binaries::daemon())
            .args([
                format!("--node-name={NODE}"),
                format!("--addr={daemon_health}"),
                format!("--kubeconfig={}", account.display()),
                format!("--socket-file={}", socket.display()),
                format!("--control-socket={}", dir.path().join("control.sock").display()),
            ])
            .ready(move || is_ready(&probe));
        daemon.start().unwrap();
        let wait_for_node_image = async {
            let images = Objects::of_kruise(&connect(plane.kubeconfig()).await, "v1beta1", "NodeImage");
            waits::poll_until("the node's NodeImage", &String::new, || async {
                images.get(NODE).await.ok()
            })
            .await
        };
        tokio::runtime::Handle::current().block_on(wait_for_node_image);
        Self {
            plane,
            webhooks,
            controllers: Mutex::new(controllers),
            webhook: Mutex::new(webhook),
            daemon: Mutex::new(daemon),
            daemon_health,
            _cri: cri,
            _dir: dir,
        }
    }

    pub async fn admin(&self) -> Cluster {
        connect(self.plane.kubeconfig()).await
    }

    /// Log of the webhooks.
    pub fn webhook_log(&self) -> String {
        std::fs::read_to_string(lock(&self.webhook).log()).unwrap()
    }

    /// Peak memory of the webhooks, in bytes.
    pub fn webhook_memory(&self) -> u64 {
        lock(&self.webhook).peak_memory()
    }

    /// Number of connections that the webhooks refused because their address had its share.
    pub fn refused_connections(&self) -> u64 {
        lock(&self.webhook).metric_sum("kruise_webhook_connections_closed_total{reason=\"limit\"")
    }

    /// Number of CloneSet lists that the webhooks have converted.
    pub fn lists_converted(&self) -> u64 {
        lock(&self.webhook).metric_sum("kruise_reviews_total{kind=\"cloneset\",step=\"convert\"")
    }

    /// The last lines of all logs.
    pub fn tail(&self) -> String {
        let (controllers, webhook) = (lock(&self.controllers).tail(), lock(&self.webhook).tail());
        format!("{controllers}\n{webhook}\n{}", lock(&self.daemon).tail())
    }

    /// All programs run and serve, have not panicked, and do what a normal user requests: a job, a CloneSet, an object
    /// in the older version, and a rejection.
    pub async fn assert_still_works(&self, name: &str) {
        let admin = self.admin().await;
        let sets = Objects::of_kruise(&admin, "v1beta1", "CloneSet");
        let v1alpha1_sets = Objects::of_kruise(&admin, "v1alpha1", "CloneSet");
        v1alpha1_sets
            .create(&json!({ "metadata": { "name": name }, "spec": cloneset_spec(name, 1) }))
            .await
            .unwrap();
        let jobs = Objects::of_kruise(&admin, "v1beta1", "ImagePullJob");
        let spec = |image: &str| json!({ "image": image, "completionPolicy": {} });
        let invalid = json!({ "metadata": { "name": "wrong" }, "spec": spec("a b") });
        let error = jobs.create(&invalid).await.unwrap_err();
        assert!(error.contains("spec.image"), "{error}");
        let job = json!({ "metadata": { "name": name }, "spec": spec(&format!("plain:{name}")) });
        jobs.create(&job).await.unwrap();
        let tail = || self.tail();
        let _: () = waits::poll_until("a plain CloneSet has its Pod", &tail, || async {
            let set = sets.get(name).await.unwrap();
            (set.data["status"]["replicas"] == 1).then_some(())
        })
        .await;
        let _: () = waits::poll_until("a plain job ends", &tail, || async {
            let job = jobs.get(name).await.unwrap();
            job.data["status"]["completionTime"].is_string().then_some(())
        })
        .await;
        // Everything stored can be read in both versions.
        for kind in [
            "CloneSet",
            "ImagePullJob",
            "ImageListPullJob",
            "ContainerRecreateRequest",
            "NodeImage",
        ] {
            for version in ["v1alpha1", "v1beta1"] {
                let all = Objects::of_kruise(&admin, version, kind);
                all.list(&ListParams::default()).await.unwrap();
            }
        }
        for process in [&self.controllers, &self.webhook] {
            let (running, health) = {
                let mut process = lock(process);
                (process.is_running(), process.health_address().to_owned())
            };
            self.assert_healthy(running, &health);
        }
        let running = lock(&self.daemon).is_running();
        self.assert_healthy(running, &self.daemon_health);
    }

    /// The program runs, is ready, and has not panicked.
    fn assert_healthy(&self, running: bool, health: &str) {
        assert!(running, "a program has ended: {}", self.tail());
        assert!(is_ready(health), "not ready: {}", self.tail());
        let metrics = http_get(health, "/metrics");
        assert!(metrics.ends_with("# EOF\n"), "cut short: {metrics}");
        let panics = metrics
            .lines()
            .filter(|line| line.starts_with("kruise_panics_total"));
        let panics: Vec<_> = panics.filter(|line| !line.ends_with(" 0")).collect();
        assert!(panics.is_empty(), "{panics:?}\n{}", self.tail());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A container runtime that outlives the test that starts it.
fn start_runtime(socket: PathBuf) -> FaultCri {
    let (cri_tx, cri_rx) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            cri_tx.send(FaultCri::start(&socket)).unwrap();
            std::future::pending::<()>().await;
        });
    });
    cri_rx.recv().unwrap()
}

/// Makes the node ready.
fn create_node(plane: &ControlPlane) {
    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": NODE } });
    plane.apply(&node.to_string()).unwrap();
    let ready = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True", "reason": "R", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z", "lastHeartbeatTime": "2026-01-01T00:00:00Z" }] } });
    let ready = ready.to_string();
    plane
        .kubectl(&[
            "patch",
            "node",
            NODE,
            "--subresource=status",
            "--type=merge",
            "-p",
            &ready,
        ])
        .unwrap();
}

/// Creates the Pods that requests may name, each with a running container.
async fn create_targets(admin: &Cluster, cri: &FaultCri) {
    let pods = Objects::new(admin, "", "v1", "Pod", Some("default"));
    for number in 0..TARGETS {
        let name = target(number);
        let id = format!("{name}-0");
        pods.create(&json!({ "metadata": { "name": name },
            "spec": { "nodeName": NODE, "containers": [{ "name": "main", "image": "i" }] } }))
            .await
            .unwrap();
        let status = json!({ "status": { "phase": "Running", "containerStatuses": [{ "name": "main", "image": "i",
            "imageID": "", "ready": true, "restartCount": 0, "containerID": format!("containerd://{id}"),
            "state": { "running": {} } }] } });
        let pod = pods
            .patch_status(&name, &PatchParams::default(), &Patch::Merge(&status))
            .await
            .unwrap();
        let container = FakeContainer {
            pod_uid: pod.metadata.uid.unwrap(),
            name: "main".into(),
            running: true,
            created_at: 1,
            ..FakeContainer::default()
        };
        cri.state().containers.insert(id, container);
    }
}

/// Objects of one kind, untyped.
pub struct Objects {
    api: Api<DynamicObject>,
    types: TypeMeta,
}

impl Deref for Objects {
    type Target = Api<DynamicObject>;
    fn deref(&self) -> &Self::Target {
        &self.api
    }
}

impl Objects {
    pub fn new(cluster: &Cluster, group: &str, version: &str, kind: &str, namespace: Option<&str>) -> Self {
        let api_version = [group, version].join("/");
        Self {
            api: untyped(cluster, group, version, kind, namespace),
            types: TypeMeta {
                api_version: api_version.trim_start_matches('/').to_owned(),
                kind: kind.to_owned(),
            },
        }
    }

    /// Objects of our kinds, in `default` if the kind is namespaced.
    pub fn of_kruise(cluster: &Cluster, version: &str, kind: &str) -> Self {
        let namespace = (!["NodeImage", "NodePodProbe", "SidecarSet"].contains(&kind)).then_some("default");
        Self::new(cluster, "apps.kruise.io", version, kind, namespace)
    }

    pub async fn create(&self, object: &Value) -> Result<(), String> {
        let mut object: DynamicObject = serde_json::from_value(object.clone()).unwrap();
        object.types = Some(self.types.clone());
        let result = self.api.create(&PostParams::default(), &object).await;
        result.map(drop).map_err(|error| error.to_string())
    }

    /// Deletes an object, if it exists.
    pub async fn delete_if_exists(&self, name: &str) {
        self.delete_with(name, &DeleteParams::default()).await;
    }

    /// Deletes objects, those that exist.
    pub async fn delete_all(&self, names: &[String]) {
        let deleted = stream::iter(names).map(|name| self.delete_if_exists(name));
        deleted.buffer_unordered(MAX_CONCURRENT).collect::<()>().await;
    }

    /// Deletes an object, if it exists, without a grace period.
    pub async fn delete_now(&self, name: &str) {
        self.delete_with(name, &DeleteParams::default().grace_period(0))
            .await;
    }

    async fn delete_with(&self, name: &str, params: &DeleteParams) {
        match self.api.delete(name, params).await {
            Err(kube::Error::Api(error)) if error.code == 404 => {}
            result => drop(result.unwrap()),
        }
    }

    /// Merges a patch into the status of an object.
    pub async fn merge_status(&self, name: &str, patch: &Value) -> Result<(), String> {
        let patched = self
            .api
            .patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
            .await;
        patched.map(drop).map_err(|error| error.to_string())
    }

    /// Merges a patch into an object.
    pub async fn merge(&self, name: &str, patch: &Value) -> Result<(), String> {
        let patched = self
            .api
            .patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await;
        patched.map(drop).map_err(|error| error.to_string())
    }
}

/// A valid spec.
pub fn cloneset_spec(app: &str, replicas: i32) -> Value {
    json!({ "replicas": replicas, "selector": { "matchLabels": { "app": app } },
        "template": { "metadata": { "labels": { "app": app } },
            "spec": { "containers": [{ "name": "c", "image": "i" }] } } })
}

/// Number of objects of a kind in all namespaces.
pub async fn count_objects(cluster: &Cluster, kind: &str) -> usize {
    let all = untyped(cluster, "", "v1", kind, None);
    all.list(&ListParams::default()).await.unwrap().items.len()
}

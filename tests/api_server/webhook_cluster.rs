//! The API server with everything from `deploy/default`, and our webhook server with the manager's account.

use std::sync::LazyLock;

use kruise_cluster::Cluster;
use kruise_manager::admission;
use kruise_ops::{FeatureGates, Health};
use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use testbed::cluster::{ControlPlane, TokenBinding, wait};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use testbed::wait::WAIT_TIMEOUT;

pub use crate::connect::connect;
use crate::untyped::untyped;
use support::conversion::{self, wait_for_conversion};

static SHARED_CLUSTER: LazyLock<WebhookCluster> = LazyLock::new(WebhookCluster::start);

pub struct WebhookCluster {
    pub plane: ControlPlane,
    _replica: WebhookReplica,
}

pub fn shared_cluster() -> &'static WebhookCluster {
    &SHARED_CLUSTER
}

/// Installs a folder as users do.
pub fn install(plane: &ControlPlane, folder: &str) {
    let path = format!("{}/../deploy/{folder}", env!("CARGO_MANIFEST_DIR"));
    plane.kubectl(&["apply", "-k", &path]).unwrap();
}

/// A webhook server in a thread with its own runtime; runs until it is stopped.
pub struct WebhookReplica {
    pub port: u16,
    pub leading_tx: watch::Sender<bool>,
    pub shutdown: CancellationToken,
}

impl WebhookReplica {
    /// Starts a replica that is not leader yet.
    pub fn start(plane: &ControlPlane) -> Self {
        Self::start_with(plane, "")
    }

    /// The same with these feature gates.
    pub fn start_with(plane: &ControlPlane, gates: &str) -> Self {
        let kubeconfig = plane
            .kubeconfig_for("kruise-system", "kruise-manager", TokenBinding::Unbound)
            .unwrap();
        let port = testbed::port::reserve().unwrap();
        let options = admission::Options {
            serve: true,
            manage: true,
            namespace: "kruise-system".into(),
            host: Some("127.0.0.1".into()),
            port,
            gates: FeatureGates::parse(gates).unwrap(),
        };
        let (leading, leading_rx) = watch::channel(false);
        let shutdown = CancellationToken::new();
        let shutdown_token = shutdown.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let cluster = connect(&kubeconfig).await;
                admission::run(
                    cluster.clone(),
                    cluster,
                    options,
                    leading_rx,
                    Health::default(),
                    shutdown_token,
                )
                .await
                .unwrap();
            });
        });
        Self {
            port,
            leading_tx: leading,
            shutdown,
        }
    }
}

/// Waits until the webhooks respond and convert.
pub fn wait_for_webhooks(plane: &ControlPlane) {
    let request = json!({
        "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
        "metadata": { "name": "probe", "namespace": "default" },
        "spec": { "podName": "nobody", "containers": [{ "name": "c" }] },
    });
    wait::until("webhooks answer", WAIT_TIMEOUT, || {
        let error = plane.apply(&request.to_string()).unwrap_err().to_string();
        Ok(error.contains("there is no such Pod").then_some(()))
    })
    .unwrap();
    // Jobs are denied when a feature gate is off.
    wait_for_conversion(plane, &["CloneSet", "NodeImage"]);
}

impl WebhookCluster {
    fn start() -> Self {
        let plane = ControlPlane::start().unwrap();
        install(&plane, "default");
        plane
            .kubectl(&["create", "serviceaccount", "default", "--namespace=default"])
            .unwrap();
        let replica = WebhookReplica::start(&plane);
        replica.leading_tx.send(true).unwrap();
        wait_for_webhooks(&plane);
        wait_for_conversion(&plane, &conversion::CONVERTED_KINDS);
        Self {
            plane,
            _replica: replica,
        }
    }

    pub async fn admin(&self) -> Cluster {
        connect(self.plane.kubeconfig()).await
    }

    /// Client with a service account of `kruise-system` and a token that is bound to `bound`.
    pub async fn account(&self, name: &str, bound: TokenBinding<'_>) -> Cluster {
        connect(&self.plane.kubeconfig_for("kruise-system", name, bound).unwrap()).await
    }

    /// Creates a Pod with the given status, on a node that need not exist.
    pub async fn create_pod(&self, name: &str, node: Option<&str>, status: Value) {
        let mut spec = json!({
            "terminationGracePeriodSeconds": 7,
            "initContainers": [
                { "name": "setup", "image": "i" },
                { "name": "proxy", "image": "i", "restartPolicy": "Always" },
            ],
            "containers": [{ "name": "app", "image": "i", "ports": [{ "containerPort": 80 }],
                "lifecycle": { "preStop": { "httpGet": { "port": 80, "path": "/bye" } } } }],
        });
        spec["nodeName"] = json!(node);
        let pods = dynamic_api(&self.admin().await, "v1", "Pod", Some("default"));
        create(
            &pods,
            json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name }, "spec": spec }),
        )
        .await
        .unwrap();
        let status = json!({ "status": status });
        pods.patch_status(name, &PatchParams::default(), &Patch::Merge(&status))
            .await
            .unwrap();
    }
}

/// Status of a running Pod that [`WebhookCluster::create_pod`] creates.
pub fn running_status() -> Value {
    let status = |name: &str, id: &str| {
        json!({ "name": name, "containerID": id, "restartCount": 2, "ready": true, "image": "i", "imageID": "i",
            "state": { "running": {} } })
    };
    json!({
        "phase": "Running",
        "containerStatuses": [status("app", "containerd://app-1")],
        "initContainerStatuses": [status("setup", "containerd://s-1"), status("proxy", "containerd://proxy-1")],
    })
}

/// Objects of any version and kind, as JSON.
pub fn dynamic_api(
    cluster: &Cluster,
    version: &str,
    kind: &str,
    namespace: Option<&str>,
) -> Api<DynamicObject> {
    let (group, version) = version.rsplit_once('/').unwrap_or(("", version));
    untyped(cluster, group, version, kind, namespace)
}

pub async fn create(api: &Api<DynamicObject>, object: Value) -> Result<Value, String> {
    let object: DynamicObject = serde_json::from_value(object).unwrap();
    match api.create(&PostParams::default(), &object).await {
        Ok(object) => Ok(serde_json::to_value(object).unwrap()),
        Err(why) => Err(why.to_string()),
    }
}

/// Result of a create with dry run.
pub async fn dry_run_create(api: &Api<DynamicObject>, object: Value) -> Result<Value, String> {
    let params = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    match api
        .create(&params, &serde_json::from_value(object).unwrap())
        .await
    {
        Ok(object) => Ok(serde_json::to_value(object).unwrap()),
        Err(why) => Err(why.to_string()),
    }
}

pub async fn merge(api: &Api<DynamicObject>, name: &str, patch: Value) -> Result<Value, String> {
    merge_with(api, name, patch, PatchParams::default()).await
}

/// Result of a patch with dry run.
pub async fn dry_run_merge(api: &Api<DynamicObject>, name: &str, patch: Value) -> Result<Value, String> {
    merge_with(api, name, patch, PatchParams::default().dry_run()).await
}

async fn merge_with(
    api: &Api<DynamicObject>,
    name: &str,
    patch: Value,
    params: PatchParams,
) -> Result<Value, String> {
    match api.patch(name, &params, &Patch::Merge(&patch)).await {
        Ok(object) => Ok(serde_json::to_value(object).unwrap()),
        Err(why) => Err(why.to_string()),
    }
}

pub async fn merge_status(api: &Api<DynamicObject>, name: &str, patch: Value) -> Result<Value, String> {
    match api
        .patch_status(name, &PatchParams::default(), &Patch::Merge(&patch))
        .await
    {
        Ok(object) => Ok(serde_json::to_value(object).unwrap()),
        Err(why) => Err(why.to_string()),
    }
}

pub async fn get(api: &Api<DynamicObject>, name: &str) -> Value {
    serde_json::to_value(api.get(name).await.unwrap()).unwrap()
}

/// Asserts that `what` was denied with `message`.
#[track_caller]
pub fn assert_denied(result: Result<Value, String>, message: &str) {
    match result {
        Ok(object) => panic!("should be refused with {message:?}: {object}"),
        Err(why) => assert!(why.contains(message), "{message:?} is not in {why:?}"),
    }
}

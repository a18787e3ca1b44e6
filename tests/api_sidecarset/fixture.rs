//! An API server, and the manager.

use std::panic::Location;
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::{Value, json};
use testbed::cluster::{ControlPlane, ControlPlaneOptions};
use testbed::wait;
use tokio::sync::OnceCell;

use crate::conversion::{CONVERTED_KINDS, wait_for_conversion};
use crate::manager::Manager;
use crate::proxy::Proxy;

pub const POLICIES: &str = "mutatingadmissionpolicies";
pub const BINDINGS: &str = "mutatingadmissionpolicybindings";

pub struct SidecarCluster {
    pub plane: ControlPlane,
    pub manager: Manager,
}

/// A cluster that tests share which leave the manager alone, and the proxy in front of its API server.
pub struct SharedCluster {
    pub cluster: SidecarCluster,
    pub proxy: Proxy,
}

static SHARED_CLUSTER: OnceCell<SharedCluster> = OnceCell::const_new();

/// The shared cluster.
pub async fn shared_cluster() -> &'static SharedCluster {
    let start = || {
        let plane = start_plane();
        let mut manager = SidecarCluster::new_manager(&plane, "kruise-manager", "");
        let proxy = Proxy::in_front_of(&manager.kubeconfig);
        manager.start().unwrap();
        let cluster = SidecarCluster { plane, manager };
        SharedCluster { cluster, proxy }
    };
    SHARED_CLUSTER
        .get_or_init(|| async { tokio::task::spawn_blocking(start).await.unwrap() })
        .await
}

/// An API server with what users install.
pub fn start_plane() -> ControlPlane {
    let options = ControlPlaneOptions {
        controllers: true,
        // Without the garbage collector: a deleted set must not be injected until that comes.
        enabled_controllers: "serviceaccount-controller",
        ..ControlPlaneOptions::default()
    };
    let plane = ControlPlane::start_with(options).unwrap();
    let deploy = format!("{}/../deploy/default", env!("CARGO_MANIFEST_DIR"));
    plane.kubectl(&["apply", "-k", &deploy]).unwrap();
    plane
}

impl SidecarCluster {
    /// A cluster with these feature gates of the manager, `NAME=true,…`.
    pub fn start(gates: &str) -> Self {
        let plane = start_plane();
        let mut manager = Self::new_manager(&plane, "kruise-manager", gates);
        manager.start().unwrap();
        wait_for_conversion(&plane, &CONVERTED_KINDS);
        Self { plane, manager }
    }

    /// A cluster whose controllers and webhooks are separate programs; also returns the one with the webhooks.
    pub fn start_separate() -> (Self, Manager) {
        let plane = start_plane();
        let port = testbed::port::reserve().unwrap();
        let mut webhooks = Manager::with_role(&plane, "kruise-webhook", "webhooks", port);
        webhooks.spawn().unwrap();
        let mut manager = Manager::with_role(&plane, "kruise-manager", "controllers", port);
        manager.start().unwrap();
        webhooks.wait_ready().unwrap();
        (Self { plane, manager }, webhooks)
    }

    fn new_manager(plane: &ControlPlane, name: &'static str, gates: &str) -> Manager {
        let gates = format!("--feature-gates={gates}");
        Manager::on_free_ports_with(plane, name, &["--enable-leader-election=false".to_owned(), gates])
    }

    /// Ends the manager, and starts one with these feature gates.
    pub fn restart_manager(&mut self, name: &'static str, gates: &str) {
        self.manager.stop().unwrap();
        self.manager = Self::new_manager(&self.plane, name, gates);
        self.manager.start().unwrap();
    }

    /// Whether the API server serves the policies.
    pub fn serves_policies(&self) -> bool {
        self.plane.serves_mutating_policies().unwrap()
    }

    /// Creates a set for Pods `app: NAME`; `spec` is merged into its spec.
    #[track_caller]
    pub fn create_set(&self, name: &str, spec: Value) -> Value {
        let mut merged = json!({
            "selector": { "matchLabels": { "app": name } },
            "containers": [{ "name": format!("side-{name}"), "image": "side:1" }],
        });
        json_patch::merge(&mut merged, &spec);
        let object = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet",
            "metadata": { "name": name }, "spec": merged });
        self.wait_until(&format!("SidecarSet {name} is admitted"), || {
            self.plane
                .apply(&object.to_string())
                .map_err(|why| format!("{why:#}"))
        });
        self.wait_set(name, "a revision", |set| {
            set["status"]["latestRevision"].is_string()
        })
    }

    pub fn patch_set(&self, name: &str, patch: &Value) {
        let patch = patch.to_string();
        let args = ["patch", "sidecarset", name, "--type=merge", "-p", &patch];
        self.plane.kubectl(&args).unwrap();
    }

    /// The object, if it exists.
    pub fn get(&self, kind: &str, name: &str) -> Option<Value> {
        let found = self
            .plane
            .kubectl(&["get", kind, name, "--ignore-not-found", "-o", "json"])
            .unwrap();
        (!found.trim().is_empty()).then(|| serde_json::from_str(&found).unwrap())
    }

    /// Waits until `predicate` holds for the set.
    #[track_caller]
    pub fn wait_set(&self, name: &str, what: &str, predicate: impl Fn(&Value) -> bool) -> Value {
        self.wait_until(&format!("SidecarSet {name}: {what}"), || {
            let set = self.get("sidecarset", name).unwrap_or_default();
            if predicate(&set) {
                Ok(set)
            } else {
                Err(set.to_string())
            }
        })
    }

    /// Waits until the status says how the set is injected.
    #[track_caller]
    pub fn wait_injected_by(&self, name: &str, status: &str, reason: &str) -> Value {
        let what = format!("InjectedByPolicy {status} {reason}");
        let set = self.wait_set(name, &what, |set| {
            let injected = injected_by_policy(set);
            injected["status"] == status && injected["reason"] == reason
        });
        injected_by_policy(&set)
    }

    /// The Pod with this label as it would be created.
    pub fn dry_run(&self, app: &str) -> Value {
        self.dry_run_with(app, &json!({}))
    }

    /// The same with a merge patch of the Pod.
    pub fn dry_run_with(&self, app: &str, patch: &Value) -> Value {
        self.try_dry_run_with(app, patch).unwrap()
    }

    /// The same, or why the Pod is refused.
    pub fn try_dry_run_with(&self, app: &str, patch: &Value) -> Result<Value, String> {
        let mount = json!([{ "name": "data", "mountPath": "/data" }]);
        let mut pod = json!({ "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": "web", "namespace": "default", "labels": { "app": app } },
            "spec": { "automountServiceAccountToken": false, "volumes": [{ "name": "data", "emptyDir": {} }],
                "containers": [{ "name": "app", "image": "app:1", "volumeMounts": mount }] } });
        json_patch::merge(&mut pod, patch);
        self.try_create(&pod)
    }

    /// The object as it would be created, or why it is refused.
    pub fn try_create(&self, object: &Value) -> Result<Value, String> {
        // Other tests do so at the same time.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let file = self.plane.dir().join(format!("dry-run-{number}.json"));
        std::fs::write(&file, object.to_string()).unwrap();
        let path = file.display().to_string();
        let created = self
            .plane
            .kubectl(&["create", "--dry-run=server", "-o", "json", "-f", &path]);
        std::fs::remove_file(file).unwrap();
        let created = created.map_err(|why| format!("{why:#}"))?;
        Ok(serde_json::from_str(&created).unwrap())
    }

    /// Waits until new Pods are as `predicate` says.
    #[track_caller]
    pub fn wait_dry_run(&self, app: &str, what: &str, predicate: impl Fn(&Value) -> bool) -> Value {
        self.wait_until(&format!("a new Pod {app}: {what}"), || {
            let pod = self.dry_run(app);
            if predicate(&pod) {
                Ok(pod)
            } else {
                Err(pod.to_string())
            }
        })
    }

    /// Waits until `probe` has a result; on timeout, prints what it said last.
    #[track_caller]
    pub fn wait_until<T>(&self, what: &str, mut probe: impl FnMut() -> Result<T, String>) -> T {
        let caller = Location::caller();
        let mut last = String::new();
        let result = wait::until(what, wait::WAIT_TIMEOUT, || {
            Ok(match probe() {
                Ok(value) => Some(value),
                Err(why) => {
                    last = why;
                    None
                }
            })
        });
        result.unwrap_or_else(|why| panic!("{caller}: {why:#}\n{last}\n{}", self.manager.tail()))
    }
}

/// The condition, null without it.
pub fn injected_by_policy(set: &Value) -> Value {
    let conditions = set["status"]["conditions"].as_array().into_iter().flatten();
    let mut found = conditions.filter(|condition| condition["type"] == "InjectedByPolicy");
    found.next().cloned().unwrap_or_default()
}

/// Names of a Pod's containers.
pub fn names(pod: &Value) -> Vec<&str> {
    let containers = pod["spec"]["containers"].as_array().unwrap();
    containers
        .iter()
        .map(|container| container["name"].as_str().unwrap())
        .collect()
}

/// Image of a container.
pub fn image<'a>(pod: &'a Value, name: &str) -> &'a str {
    let containers = pod["spec"]["containers"].as_array().unwrap();
    let mut found = containers.iter().filter(|container| container["name"] == name);
    found
        .next()
        .and_then(|container| container["image"].as_str())
        .unwrap_or_default()
}

/// What a Pod records of a set.
pub fn record(pod: &Value, set: &str) -> Value {
    let text = pod["metadata"]["annotations"]["kruise.io/sidecarset-hash"]
        .as_str()
        .unwrap_or("{}");
    serde_json::from_str::<Value>(text).unwrap()[set].clone()
}

//! One node for all tests of this target, the daemon on it, and words to ask what happened.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime};

use futures::StreamExt;
use k8s_openapi::api::core::v1::{Event, Namespace, Pod};
use kruise::api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestPhase as Phase, ContainerRecreateRequestStatus,
};
use kube::api::{Api, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Client, Config};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::{OnceCell, RwLock, RwLockReadGuard, RwLockWriteGuard};
use xtask::cluster::{Bound, NODE_NAME, Node};

/// Longer than anything here takes on a slow machine.
pub const LONG: Duration = Duration::from_secs(60);

static NODE: OnceCell<RwLock<Bed>> = OnceCell::const_new();
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// The node and the daemon that runs on it.
pub struct Bed {
    pub node: Node,
    pub daemon: Daemon,
}

async fn bed() -> &'static RwLock<Bed> {
    NODE.get_or_init(|| async {
        let start = || {
            let node = Node::start().expect("the node starts");
            install(&node, "default/namespaces.yaml");
            for folder in ["crds", "rbac", "policies"] {
                install(&node, folder);
            }
            let daemon = Daemon::start(&node, &[]);
            RwLock::new(Bed { node, daemon })
        };
        tokio::task::spawn_blocking(start).await.expect("no panic")
    })
    .await
}

/// Applies a file or folder of `deploy`.
pub fn install(node: &Node, what: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(what);
    let how = if path.is_dir() { "-k" } else { "-f" };
    node.plane
        .kubectl(&["apply", how, &path.display().to_string()])
        .expect("deploy/ can be applied");
}

/// A namespace of its own on the shared node.
pub struct Test<G> {
    pub bed: G,
    pub client: Client,
    pub namespace: String,
    /// A folder of the host that containers write to at `/log`.
    pub log: PathBuf,
}

/// A test that leaves the daemon and the cluster alone; such tests run side by side.
pub async fn shared() -> Test<RwLockReadGuard<'static, Bed>> {
    Test::new(bed().await.read().await).await
}

/// A test that ends parts of the bed: alone.
pub async fn alone() -> Test<RwLockWriteGuard<'static, Bed>> {
    let mut bed = bed().await.write().await;
    if !bed.daemon.running() {
        bed.daemon = Daemon::start(&bed.node, &[]);
    }
    Test::new(bed).await
}

impl<G: std::ops::Deref<Target = Bed>> Test<G> {
    async fn new(bed: G) -> Self {
        let namespace = format!("t{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let options = kube::config::KubeConfigOptions::default();
        let file = kube::config::Kubeconfig::read_from(bed.node.plane.kubeconfig()).unwrap();
        let config = Config::from_custom_kubeconfig(file, &options).await.unwrap();
        let client = Client::try_from(config).unwrap();
        let object: Namespace = serde_json::from_value(json!({"metadata": {"name": namespace}})).unwrap();
        let api: Api<Namespace> = Api::all(client.clone());
        api.create(&PostParams::default(), &object).await.unwrap();
        let log = bed.node.runtime.dir().join("logs").join(&namespace);
        std::fs::create_dir_all(&log).unwrap();
        std::fs::set_permissions(&log, std::fs::Permissions::from_mode(0o777)).unwrap();
        let test = Self {
            bed,
            client,
            namespace,
            log,
        };
        test.until("the default service account", || async {
            let api: Api<k8s_openapi::api::core::v1::ServiceAccount> = test.api();
            api.get_opt("default").await.unwrap()
        })
        .await;
        test
    }

    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = kube::core::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Asks until there is an answer; for what no watch tells of.
    pub async fn until<T, F: Future<Output = Option<T>>>(&self, what: &str, ask: impl Fn() -> F) -> T {
        let start = Instant::now();
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            assert!(
                start.elapsed() < LONG,
                "{what}: not there after {LONG:?}\n{}",
                self.bed.daemon.tail()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Follows one object until `wanted` says that it is as it should be; returns it, and every version seen.
    pub async fn follow<K>(&self, name: &str, what: &str, wanted: impl Fn(&K) -> bool) -> (K, Vec<K>)
    where
        K: kube::Resource<Scope = kube::core::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + DeserializeOwned
            + Send
            + 'static,
    {
        let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let mut stream = Box::pin(watcher(self.api::<K>(), config));
        let mut seen = Vec::new();
        let reached = tokio::time::timeout(LONG, async {
            loop {
                match stream.next().await.expect("a watch goes on") {
                    Ok(watcher::Event::Apply(object) | watcher::Event::InitApply(object)) => {
                        seen.push(object.clone());
                        if wanted(&object) {
                            return object;
                        }
                    }
                    Ok(_) => {}
                    Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
                }
            }
        })
        .await;
        match reached {
            Ok(object) => (object, seen),
            Err(_) => panic!(
                "{name}: {what}: not so after {LONG:?}\nlast: {:#?}\n{}",
                seen.last(),
                self.bed.daemon.tail()
            ),
        }
    }

    /// Creates a Pod whose containers have these specs, with the log folder at `/log`, and waits until it is ready.
    pub async fn pod(&self, name: &str, containers: Value, more: Value) -> Pod {
        let mut spec = json!({
            "nodeName": NODE_NAME, "containers": containers, "terminationGracePeriodSeconds": 30,
            "volumes": [{"name": "log", "hostPath": {"path": self.log}}],
        });
        json_patch::merge(&mut spec, &more);
        for list in ["containers", "initContainers"] {
            for container in spec[list].as_array_mut().into_iter().flatten() {
                container["volumeMounts"] = json!([{"name": "log", "mountPath": "/log"}]);
                container["imagePullPolicy"] = json!("IfNotPresent");
            }
        }
        let pod = json!({"metadata": {"name": name, "labels": {"app": name}}, "spec": spec});
        self.api::<Pod>()
            .create(&PostParams::default(), &serde_json::from_value(pod).unwrap())
            .await
            .unwrap();
        self.follow(name, "all containers ready", |pod: &Pod| {
            let statuses = statuses(pod);
            !statuses.is_empty() && statuses.values().all(|status| status.ready)
        })
        .await
        .0
    }

    /// Creates a request as admission leaves it: labels, and what runs now.
    pub async fn request(
        &self,
        name: &str,
        pod: &Pod,
        containers: &[&str],
        spec: Value,
    ) -> ContainerRecreateRequest {
        let running = statuses(pod);
        let containers: Vec<Value> = containers
            .iter()
            .map(|name| {
                let context = running
                    .get(*name)
                    .map(|status| json!({"containerID": status.id, "restartCount": status.restarts}));
                json!({"name": name, "statusContext": context})
            })
            .collect();
        let mut object = json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
            "metadata": {"name": name, "labels": {
                "crr.apps.kruise.io/active": "true",
                "crr.apps.kruise.io/node-name": NODE_NAME,
                "crr.apps.kruise.io/pod-uid": pod.metadata.uid,
            }},
            "spec": {"podName": pod.metadata.name, "containers": containers},
        });
        json_patch::merge(&mut object["spec"], &spec);
        let object = serde_json::from_value(object).unwrap();
        self.api().create(&PostParams::default(), &object).await.unwrap()
    }

    /// Waits for the end of a request; returns its status and every version of it that was seen.
    pub async fn completed(
        &self,
        name: &str,
    ) -> (ContainerRecreateRequestStatus, Vec<ContainerRecreateRequest>) {
        let (object, seen) = self
            .follow(name, "completed", |request: &ContainerRecreateRequest| {
                request
                    .status
                    .as_ref()
                    .is_some_and(|status| status.completion_time.is_some())
            })
            .await;
        (object.status.unwrap(), seen)
    }

    /// Waits until a container has made a file in its log folder; returns when that was.
    pub async fn mark(&self, file: &str) -> SystemTime {
        let path = self.log.join(file);
        self.until(&format!("file {file} of a container"), || async {
            path.metadata().ok()?.modified().ok()
        })
        .await
    }

    pub fn marked(&self, file: &str) -> bool {
        self.log.join(file).exists()
    }

    pub async fn get_pod(&self, name: &str) -> Pod {
        self.api::<Pod>().get(name).await.unwrap()
    }

    /// Waits for an event with that reason on a container; returns its message.
    pub async fn event(&self, reason: &str, container: &str) -> String {
        let field = format!("{{{container}}}");
        self.until(&format!("event {reason} on {container}"), || async {
            let events = self.api::<Event>().list(&ListParams::default()).await.unwrap();
            let ours = |event: &&Event| {
                event.reason.as_deref() == Some(reason)
                    && event.source.as_ref().and_then(|s| s.component.as_deref()) == Some("kruise-daemon")
                    && event
                        .involved_object
                        .field_path
                        .as_deref()
                        .is_some_and(|path| path.ends_with(&field))
            };
            events
                .items
                .iter()
                .find(ours)
                .and_then(|event| event.message.clone())
        })
        .await
    }

    pub async fn patch_status<K>(&self, name: &str, patch: Value)
    where
        K: kube::Resource<Scope = kube::core::NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + DeserializeOwned,
    {
        let patch = Patch::Strategic(patch);
        self.api::<K>()
            .patch_status(name, &PatchParams::default(), &patch)
            .await
            .unwrap();
    }
}

/// What kubelet says of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    pub id: String,
    pub restarts: i32,
    pub ready: bool,
}

/// What kubelet says of a Pod's containers, init containers included.
pub fn statuses(pod: &Pod) -> BTreeMap<String, Status> {
    let status = pod.status.clone().unwrap_or_default();
    let all = status
        .container_statuses
        .into_iter()
        .chain(status.init_container_statuses)
        .flatten();
    all.map(|one| {
        let id = one.container_id.unwrap_or_default();
        (
            one.name,
            Status {
                id,
                restarts: one.restart_count,
                ready: one.ready,
            },
        )
    })
    .collect()
}

/// Asserts that all containers were recreated.
pub fn assert_succeeded(status: &ContainerRecreateRequestStatus) {
    assert_eq!(status.phase, Phase::Completed);
    let bad = status
        .container_recreate_states
        .iter()
        .find(|state| state.phase != Phase::Succeeded);
    assert!(
        bad.is_none() && !status.container_recreate_states.is_empty(),
        "{status:#?}"
    );
}

/// The daemon as a process of the node.
pub struct Daemon {
    child: Child,
    log: PathBuf,
}

/// Sends a signal to the program that a child made by the bed stands for, and waits for its end.
pub fn end(child: &mut Child, signal: Signal) {
    let path = format!("/proc/{0}/task/{0}/children", child.id());
    let children = std::fs::read_to_string(path).unwrap();
    let pid: i32 = children
        .split_whitespace()
        .next()
        .expect("the program runs")
        .parse()
        .unwrap();
    kill(Pid::from_raw(pid), signal).unwrap();
    child.wait().unwrap();
}

impl Daemon {
    /// Starts it with an environment and waits until it is ready.
    pub fn start(node: &Node, env: &[(&str, &str)]) -> Self {
        let dir = node.runtime.dir();
        let log = dir.join("kruise-daemon.log");
        let file = File::options().create(true).append(true).open(&log).unwrap();
        let control = dir.join("control.sock");
        let mut command: Command = node.runtime.command(env!("CARGO_BIN_EXE_kruise-daemon"));
        command.args([
            "--node-name",
            NODE_NAME,
            "--addr",
            "0.0.0.0:10221",
            "--socket-file",
            "/run/containerd/containerd.sock",
        ]);
        // As users run it: the roles of its account, and the fence around its node.
        let account = node
            .plane
            .kubeconfig_for("kruise-system", "kruise-daemon", Bound::Node(NODE_NAME))
            .unwrap();
        command
            .arg("--kubeconfig")
            .arg(account)
            .arg("--control-socket")
            .arg(control);
        command.env("RUST_LOG", "kruise=debug").envs(env.iter().copied());
        command
            .stdin(Stdio::null())
            .stdout(file.try_clone().unwrap())
            .stderr(file);
        let mut daemon = Self {
            child: command.spawn().unwrap(),
            log,
        };
        let url = format!("http://{}:10221/readyz", bed_address(node));
        let start = Instant::now();
        loop {
            assert!(daemon.running(), "the daemon ended:\n{}", daemon.tail());
            if http_ok(&url) {
                return daemon;
            }
            assert!(
                start.elapsed() < LONG,
                "the daemon is not ready:\n{}",
                daemon.tail()
            );
            std::thread::sleep(Duration::from_millis(25));
        }
    }

    pub fn running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Sends a signal and waits for the end; returns how long that took.
    pub fn end(&mut self, signal: Signal) -> Duration {
        let start = Instant::now();
        end(&mut self.child, signal);
        start.elapsed()
    }

    pub fn tail(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}

fn bed_address(node: &Node) -> String {
    let server = node.plane.server();
    server
        .trim_start_matches("https://")
        .rsplit_once(':')
        .unwrap()
        .0
        .to_owned()
}

fn http_ok(url: &str) -> bool {
    use std::io::{Read, Write};
    let (host, path) = url.trim_start_matches("http://").split_once('/').unwrap();
    let Ok(mut stream) = std::net::TcpStream::connect(host) else {
        return false;
    };
    let _ = stream.write_all(format!("GET /{path} HTTP/1.0\r\nhost: {host}\r\n\r\n").as_bytes());
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer.split(' ').nth(1) == Some("200")
}

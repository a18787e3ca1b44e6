//! A node, and either implementation's programs as processes of it.

use std::fmt::Debug;
use std::path::Path;
use std::time::Duration;

use kube::api::{Api, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use testbed::cluster::{Component, NODE_NAME, Node, run_command};
use testbed::peer::Peer;
use tokio::sync::{Mutex, MutexGuard};

use crate::manager::Manager;
use crate::programs;
pub use crate::waits::WAIT_TIMEOUT;
use crate::waits::{self, by_name};

/// One bed at a time: two cores carry no more, and the Go daemons share a folder of the machine.
static EXCLUSIVE: Mutex<()> = Mutex::const_new(());

pub struct InteropCluster {
    pub node: Node,
    pub client: Client,
    _exclusive: MutexGuard<'static, ()>,
}

impl InteropCluster {
    pub async fn start() -> Self {
        let exclusive = EXCLUSIVE.lock().await;
        let node = tokio::task::spawn_blocking(|| Node::start().unwrap())
            .await
            .unwrap();
        let file = Kubeconfig::read_from(node.plane.kubeconfig()).unwrap();
        let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
            .await
            .unwrap();
        let client = Client::try_from(config).unwrap();
        Self {
            node,
            client,
            _exclusive: exclusive,
        }
    }

    pub fn peer(&self) -> Peer<'_> {
        let dir = std::env::var_os("KRUISE_PEER").expect("run this by 'cargo xtask test --peer DIR'");
        Peer::new(&self.node, Path::new(&dir))
    }

    /// What the Go implementation's chart grants its daemon, and its plain manifests omit.
    pub fn grant_pull_secret_access(&self) {
        let name = "kruise-daemon-secret-role";
        let role = [
            "create",
            "role",
            name,
            "--verb=get,list,watch",
            "--resource=secrets",
        ];
        let role_of = format!("--role={name}");
        let binding = [
            "create",
            "rolebinding",
            name,
            &role_of,
            "--serviceaccount=kruise-system:kruise-daemon",
        ];
        for args in [role, binding] {
            let args = [&args[..], &["--namespace=kruise-daemon-config"]].concat();
            self.node.plane.kubectl(&args).unwrap();
        }
    }

    /// Our manager, started and ready.
    pub fn start_manager(&self) -> Manager {
        let mut manager = programs::manager(&self.node, "kruise-manager", 0);
        manager.start().unwrap();
        manager
    }

    /// Our daemon, started and ready.
    pub fn start_daemon(&self) -> Component {
        let mut daemon = programs::daemon(&self.node);
        daemon.start().unwrap();
        daemon
    }

    /// Kills one of the Go programs.
    pub fn kill(&self, pid: u32) {
        run_command(self.node.runtime.command("kill").arg(pid.to_string())).unwrap();
    }

    /// Applies or deletes a folder of `deploy`.
    pub fn deploy(&self, verb: &str, folder: &str) {
        let path = format!("{}/../deploy/{folder}", env!("CARGO_MANIFEST_DIR"));
        self.node.plane.kubectl(&[verb, "-k", &path]).unwrap();
    }

    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = kube::core::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), "default")
    }

    /// Waits until `predicate` holds for the object; on timeout, prints the object and the logs.
    pub async fn wait_until<K>(
        &self,
        api: Api<K>,
        name: &str,
        what: &str,
        predicate: impl Fn(&K) -> bool,
    ) -> K
    where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Serialize + Send + 'static,
    {
        let (what, logs) = (format!("{name}: {what}"), || self.logs());
        let matches = |found: &[&K]| found.first().is_some_and(|object| predicate(object));
        let mut last = waits::watch_until(&what, &logs, api, by_name(name), |one| one, matches).await;
        last.remove(0)
    }

    /// Asserts that no write of the programs was forbidden.
    pub fn assert_nothing_forbidden(&self) {
        let all = self.node.plane.audited_writes().unwrap();
        let is_ours = |w: &&Value| {
            let user = w["user"]["username"].as_str().unwrap_or_default();
            user.starts_with("system:serviceaccount:kruise-system:")
        };
        let mut own_writes = all.iter().filter(is_ours).peekable();
        assert!(own_writes.peek().is_some(), "the programs wrote nothing");
        let denied: Vec<&Value> = own_writes
            .filter(|w| w["responseStatus"]["code"] == 403)
            .collect();
        assert!(denied.is_empty(), "{denied:#?}");
    }

    /// The last lines of the logs of the programs under test.
    pub fn logs(&self) -> String {
        let dir = self.node.plane.dir();
        let peer = [
            dir.join("peer/manager.log"),
            dir.join(format!("peer/daemon-{NODE_NAME}.log")),
            dir.join("audit.log"),
        ];
        programs::program_log_tails(&self.node) + &waits::log_tails(peer)
    }
}

impl Drop for InteropCluster {
    /// The Go daemon needs `/hostvarrun` for a link to its socket; nothing else uses it.
    fn drop(&mut self) {
        // Neither exists if the Go daemon did not run.
        let _ = std::fs::remove_file(format!("/hostvarrun/peer-{NODE_NAME}"));
        let _ = std::fs::remove_dir("/hostvarrun");
    }
}

/// Creates an object from JSON; retries until the webhooks respond.
pub async fn create<K>(api: &Api<K>, object: Value) -> K
where
    K: Resource<DynamicType = ()> + Serialize + DeserializeOwned + Clone + Debug,
{
    let object: K = serde_json::from_value(object).unwrap();
    let start = std::time::Instant::now();
    loop {
        match api.create(&PostParams::default(), &object).await {
            Ok(created) => return created,
            Err(why) => assert!(start.elapsed() < WAIT_TIMEOUT, "{why}"),
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

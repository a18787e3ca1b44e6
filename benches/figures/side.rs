//! One implementation, installed on its own node and run as host processes of that node.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kube::Client;
use testbed::FEATURE_GATES;
use testbed::cluster::{NODE_NAME, Node, TokenBinding, run_command};
use testbed::peer::{Peer, spawn_background, wait_healthy};

use crate::cluster::{self, NODE_IMAGE};

pub enum Implementation {
    /// This project's, from a folder with the two release binaries.
    Ours(PathBuf),
    /// The Go one, from a folder with `run.sh`.
    Peer(PathBuf),
}

/// A running implementation.
pub struct Side {
    pub node: Node,
    /// The user: an administrator by role, so that API priority and fairness applies.
    pub client: Client,
    /// Process IDs inside the node.
    pub daemon: u32,
    pub manager: u32,
    /// Time from the daemon's start until it reports healthy (ours: ready and watching).
    pub daemon_start: Duration,
    /// Sizes of the binaries in bytes: daemon, manager.
    pub sizes: (u64, u64),
    /// Whether kwok runs.
    pub kwok: bool,
}

impl Implementation {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Ours(_) => "kruise-rs",
            Self::Peer(_) => "Go",
        }
    }

    /// Installs it and starts its manager; returns the process ID.
    fn manager(&self, node: &Node) -> Result<u32> {
        match self {
            Self::Ours(dir) => our_manager(node, dir),
            Self::Peer(dir) => {
                let peer = Peer::new(node, dir);
                peer.install()?;
                peer.start_manager()
            }
        }
    }

    /// Starts its daemon; returns the process ID, and how long it took to report healthy.
    fn daemon(&self, node: &Node) -> Result<(u32, Duration)> {
        match self {
            Self::Ours(dir) => our_daemon(node, dir),
            Self::Peer(dir) => {
                let peer = Peer::new(node, dir);
                let account = peer.daemon_account()?;
                let start = Instant::now();
                let daemon = peer.start_daemon(&account)?;
                wait_healthy(node, 10221, "/healthz")?;
                Ok((daemon, start.elapsed()))
            }
        }
    }

    /// Sizes of the binaries in bytes: daemon, manager.
    fn sizes(&self, node: &Node) -> Result<(u64, u64)> {
        let dir = match self {
            Self::Ours(dir) => dir.clone(),
            Self::Peer(dir) => Peer::new(node, dir).scratch(),
        };
        Ok((
            size(&dir.join("kruise-daemon"))?,
            size(&dir.join("kruise-manager"))?,
        ))
    }
}

impl Side {
    pub async fn start(implementation: &Implementation) -> Result<Self> {
        let node = Node::start()?;
        let plane = &node.plane;
        plane.kubectl(&["create", "serviceaccount", "user", "-n", "kube-public"])?;
        let role = ["--clusterrole=cluster-admin", "--serviceaccount=kube-public:user"];
        plane.kubectl(&[&["create", "clusterrolebinding", "user"], &role[..]].concat())?;
        let client =
            cluster::client(&plane.kubeconfig_for("kube-public", "user", TokenBinding::Unbound)?).await?;
        let manager = implementation.manager(&node)?;
        // The manager writes its address into the CRDs, and for a second after that the API server asks clients that
        // list NodeImages to retry: that is not part of a daemon's start.
        cluster::wait_until(&client, NODE_IMAGE, None, NODE_NAME, |_| true)
            .await
            .context("no NodeImage")?;
        let (daemon, daemon_start) = implementation.daemon(&node)?;
        let sizes = implementation.sizes(&node)?;
        Ok(Self {
            node,
            client,
            daemon,
            manager,
            daemon_start,
            sizes,
            kwok: false,
        })
    }

    /// Starts our manager again, with the webhooks alone.
    pub fn restart_without_policies(&mut self, implementation: &Implementation) -> Result<()> {
        let Implementation::Ours(dir) = implementation else {
            return Ok(());
        };
        let pid = self.manager;
        let script = format!("kill {pid}; while kill -0 {pid}; do sleep 0.1; done 2>/dev/null");
        run_command(self.node.runtime.command("bash").args(["-c", &script]))?;
        let gates = format!("{FEATURE_GATES},SidecarSetPolicies=false");
        self.manager = start_our_manager(&self.node, dir, &gates)?;
        Ok(())
    }
}

/// Installs ours and starts the manager; returns its process ID.
fn our_manager(node: &Node, dir: &Path) -> Result<u32> {
    let plane = &node.plane;
    let deploy = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/default");
    let manifests = plane.kubectl(&["kustomize", deploy])?;
    // The programs run as processes here, as the Go ones do.
    let workload_kinds = [
        "kind: DaemonSet\n",
        "kind: Deployment\n",
        "kind: PodDisruptionBudget\n",
    ];
    let objects: Vec<&str> = manifests
        .split("---\n")
        .filter(|d| !workload_kinds.iter().any(|k| d.contains(k)))
        .collect();
    plane.apply(&objects.join("---\n"))?;
    start_our_manager(node, dir, FEATURE_GATES)
}

fn start_our_manager(node: &Node, dir: &Path, gates: &str) -> Result<u32> {
    let plane = &node.plane;
    let account = plane.kubeconfig_for("kruise-system", "kruise-manager", TokenBinding::Unbound)?;
    let env = "WEBHOOK_HOST=127.0.0.1 WEBHOOK_PORT=9876 POD_NAMESPACE=kruise-system RUST_LOG=info";
    let line = format!(
        "{env} {}/kruise-manager --kubeconfig={} {gates}",
        dir.display(),
        account.display()
    );
    let manager = spawn_background(node, &line, "manager")?;
    wait_healthy(node, 8000, "/readyz")?;
    Ok(manager)
}

/// Starts our daemon; returns its process ID and how long it took to be ready.
fn our_daemon(node: &Node, dir: &Path) -> Result<(u32, Duration)> {
    let plane = &node.plane;
    let account = plane.kubeconfig_for("kruise-system", "kruise-daemon", TokenBinding::Node(NODE_NAME))?;
    let line = format!(
        "NODE_NAME={NODE_NAME} RUST_LOG=info {}/kruise-daemon --kubeconfig={} --control-socket={} \
         --socket-file=/run/containerd/containerd.sock",
        dir.display(),
        account.display(),
        plane.dir().join("control.sock").display()
    );
    let start = Instant::now();
    let daemon = spawn_background(node, &line, "daemon")?;
    wait_healthy(node, 10221, "/readyz")?;
    Ok((daemon, start.elapsed()))
}

fn size(path: &Path) -> Result<u64> {
    Ok(path
        .metadata()
        .with_context(|| format!("{} is missing", path.display()))?
        .len())
}

/// A process's file in `/proc` of the node.
pub fn proc_file(node: &Node, pid: u32, file: &str) -> Result<String> {
    let mut command: Command = node.runtime.command("cat");
    run_command(command.arg(format!("/proc/{pid}/{file}")))
}

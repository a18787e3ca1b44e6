//! One implementation, installed on a node of its own and run as host processes of that node.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use kube::Client;
use xtask::cluster::{Bound, NODE_NAME, Node, finish};
use xtask::peer::{Peer, background, healthy};

use crate::cluster::{self, NODE_IMAGE};

/// Which implementation.
pub enum Which {
    /// This project's, from a folder with the two release binaries.
    Ours(PathBuf),
    /// The Go one, from a folder with `run.sh`.
    Peer(PathBuf),
}

/// A running implementation.
pub struct Side {
    pub node: Node,
    /// The user: an administrator by role, so that priority and fairness hold.
    pub client: Client,
    /// Process IDs inside the node.
    pub daemon: u32,
    pub manager: u32,
    /// Time from the daemon's start until it says that it is healthy (ours: ready and watching).
    pub daemon_start: Duration,
    /// Sizes of the binaries in bytes: daemon, manager.
    pub sizes: (u64, u64),
    /// Whether kwok runs.
    pub kwok: bool,
}

impl Which {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Ours(_) => "kruise-rs",
            Self::Peer(_) => "Go",
        }
    }
}

impl Side {
    pub async fn start(which: &Which) -> Result<Self> {
        let node = Node::start()?;
        let plane = &node.plane;
        plane.kubectl(&["create", "serviceaccount", "user", "-n", "kube-public"])?;
        let role = ["--clusterrole=cluster-admin", "--serviceaccount=kube-public:user"];
        plane.kubectl(&[&["create", "clusterrolebinding", "user"], &role[..]].concat())?;
        let client = cluster::client(&plane.kubeconfig_for("kube-public", "user", Bound::Nothing)?).await?;
        let programs = match which {
            Which::Ours(dir) => Ours { node: &node, dir }.start()?,
            Which::Peer(dir) => start_peer(&node, dir)?,
        };
        cluster::until(&client, NODE_IMAGE, None, NODE_NAME, |_| true)
            .await
            .context("no NodeImage")?;
        let Programs {
            daemon,
            manager,
            daemon_start,
            sizes,
        } = programs;
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
}

struct Programs {
    daemon: u32,
    manager: u32,
    daemon_start: Duration,
    sizes: (u64, u64),
}

struct Ours<'a> {
    node: &'a Node,
    dir: &'a Path,
}

impl Ours<'_> {
    fn start(&self) -> Result<Programs> {
        let plane = &self.node.plane;
        let deploy = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/default");
        let all = plane.kubectl(&["kustomize", deploy])?;
        // The programs run as processes here, as the Go ones do.
        let pods = [
            "kind: DaemonSet\n",
            "kind: Deployment\n",
            "kind: PodDisruptionBudget\n",
        ];
        let objects: Vec<&str> = all
            .split("---\n")
            .filter(|d| !pods.iter().any(|k| d.contains(k)))
            .collect();
        plane.apply(&objects.join("---\n"))?;
        let manager = plane.kubeconfig_for("kruise-system", "kruise-manager", Bound::Nothing)?;
        let env = "WEBHOOK_HOST=127.0.0.1 WEBHOOK_PORT=9876 POD_NAMESPACE=kruise-system RUST_LOG=info";
        let line = format!(
            "{env} {}/kruise-manager --kubeconfig={}",
            self.dir.display(),
            manager.display()
        );
        let manager = background(self.node, &line, "manager")?;
        healthy(self.node, 8000, "/readyz")?;
        let daemon = plane.kubeconfig_for("kruise-system", "kruise-daemon", Bound::Node(NODE_NAME))?;
        let control = plane.dir().join("control.sock");
        let line = format!(
            "NODE_NAME={NODE_NAME} RUST_LOG=info {}/kruise-daemon --kubeconfig={} --control-socket={} \
             --socket-file=/run/containerd/containerd.sock",
            self.dir.display(),
            daemon.display(),
            control.display()
        );
        let start = std::time::Instant::now();
        let daemon = background(self.node, &line, "daemon")?;
        healthy(self.node, 10221, "/readyz")?;
        let sizes = (
            size(&self.dir.join("kruise-daemon"))?,
            size(&self.dir.join("kruise-manager"))?,
        );
        Ok(Programs {
            daemon,
            manager,
            daemon_start: start.elapsed(),
            sizes,
        })
    }
}

/// Starts the Go one from the folder with its `run.sh`.
fn start_peer(node: &Node, dir: &Path) -> Result<Programs> {
    let peer = Peer::new(node, dir);
    peer.install()?;
    let manager = peer.manager()?;
    let account = peer.daemon_account()?;
    let start = std::time::Instant::now();
    let daemon = peer.daemon(&account)?;
    healthy(node, 10221, "/healthz")?;
    Ok(Programs {
        daemon,
        manager,
        daemon_start: start.elapsed(),
        sizes: (
            size(&peer.scratch().join("kruise-daemon"))?,
            size(&peer.scratch().join("kruise-manager"))?,
        ),
    })
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
    finish(command.arg(format!("/proc/{pid}/{file}")))
}

//! One implementation, installed on a node of its own and run as host processes of that node.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use kube::Client;
use xtask::cluster::{Bound, NODE_NAME, Node, finish};

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
    scratch: Option<PathBuf>,
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
            Which::Peer(dir) => Peer { node: &node, dir }.start()?,
        };
        cluster::until(&client, NODE_IMAGE, None, NODE_NAME, |_| true)
            .await
            .context("no NodeImage")?;
        let Programs {
            daemon,
            manager,
            daemon_start,
            sizes,
            scratch,
        } = programs;
        Ok(Self {
            node,
            client,
            daemon,
            manager,
            daemon_start,
            sizes,
            scratch,
        })
    }

    pub fn end(self) -> Result<()> {
        if let Some(dir) = self.scratch {
            std::fs::remove_dir_all(dir)?;
        }
        Ok(())
    }
}

struct Programs {
    daemon: u32,
    manager: u32,
    daemon_start: Duration,
    sizes: (u64, u64),
    scratch: Option<PathBuf>,
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
            scratch: None,
        })
    }
}

struct Peer<'a> {
    node: &'a Node,
    dir: &'a Path,
}

impl Peer<'_> {
    fn start(&self) -> Result<Programs> {
        let plane = &self.node.plane;
        let scratch = std::env::temp_dir().join(format!("kruise-bench-{}", std::process::id()));
        std::fs::create_dir_all(&scratch)?;
        self.script(&scratch, plane.kubeconfig(), &["install"])?;
        let config = plane.kubeconfig_for("kruise-system", "kruise-manager", Bound::Nothing)?;
        let manager = self.script(&scratch, &config, &["manager"])?;
        healthy(self.node, 18000, "/readyz")?;
        let config = plane.kubeconfig_for("kruise-system", "kruise-daemon", Bound::Node(NODE_NAME))?;
        let start = std::time::Instant::now();
        let daemon = self.script(
            &scratch,
            &config,
            &["daemon", NODE_NAME, "/run/containerd/containerd.sock"],
        )?;
        healthy(self.node, 10221, "/healthz")?;
        let sizes = (
            size(&scratch.join("kruise-daemon"))?,
            size(&scratch.join("kruise-manager"))?,
        );
        let number = |text: String| text.trim().parse().context("run.sh printed no process ID");
        let (daemon, manager) = (number(daemon)?, number(manager)?);
        Ok(Programs {
            daemon,
            manager,
            daemon_start: start.elapsed(),
            sizes,
            scratch: Some(scratch),
        })
    }

    fn script(&self, scratch: &Path, kubeconfig: &Path, args: &[&str]) -> Result<String> {
        let kubectl = xtask::cluster::Cache::open()?.kubernetes_dir();
        let mut command = self.node.runtime.command("bash");
        command
            .arg(self.dir.join("run.sh"))
            .args(args)
            .env("KUBECONFIG", kubeconfig)
            .env("DIR", scratch);
        let path = std::env::var("PATH").unwrap_or_default();
        finish(command.env("PATH", format!("{}:{path}", kubectl.display())))
    }
}

/// Runs a shell line in the background of the node; gives its process ID there.
fn background(node: &Node, line: &str, name: &str) -> Result<u32> {
    let log = node.plane.dir().join(format!("{name}.log"));
    let script = format!("env {line} > {} 2>&1 < /dev/null & echo $!", log.display());
    let pid = finish(node.runtime.command("bash").args(["-c", &script]))?;
    pid.trim()
        .parse()
        .with_context(|| format!("no process ID: {pid}"))
}

/// Waits until a program on the node answers 200.
fn healthy(node: &Node, port: u16, path: &str) -> Result<()> {
    let script = format!(
        "for try in {{1..12000}}; do exec 3<>/dev/tcp/127.0.0.1/{port} && {{ printf 'GET {path} HTTP/1.0\\r\\n\\r\\n' >&3; \
         read -r line <&3; exec 3>&-; [[ $line == *' 200 '* ]] && exit 0; }}; sleep 0.005; done 2>/dev/null; exit 1"
    );
    let done = finish(node.runtime.command("bash").args(["-c", &script]));
    if done.is_err() {
        bail!(
            "nothing healthy at port {port} of the node; logs are in {}",
            node.plane.dir().display()
        );
    }
    Ok(())
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

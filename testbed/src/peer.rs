//! The Go implementation as host processes of a bed's node, for what is measured or tested side by side with it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::cluster::{Bound, Cache, NODE_NAME, Node, finish};

/// Port on which its manager tells its health.
const MANAGER_HEALTH: u16 = 18000;

/// The Go implementation, from a folder with its `run.sh`.
pub struct Peer<'a> {
    node: &'a Node,
    dir: PathBuf,
}

impl<'a> Peer<'a> {
    /// That of the folder `dir`, on `node`.
    pub fn new(node: &'a Node, dir: &Path) -> Self {
        let dir = dir.to_owned();
        Self { node, dir }
    }

    /// Where its programs are unpacked to, and its logs; goes with the bed.
    pub fn scratch(&self) -> PathBuf {
        self.node.plane.dir().join("peer")
    }

    /// Installs its CRDs, accounts and webhook configurations.
    pub fn install(&self) -> Result<()> {
        self.script(self.node.plane.kubeconfig(), &["install"]).map(drop)
    }

    /// Starts its manager as the account of that name and waits until it is ready; gives its process ID on the node.
    pub fn manager(&self) -> Result<u32> {
        let plane = &self.node.plane;
        let config = plane.kubeconfig_for("kruise-system", "kruise-manager", Bound::Nothing)?;
        let pid = number(&self.script(&config, &["manager"])?)?;
        healthy(self.node, MANAGER_HEALTH, "/readyz")?;
        Ok(pid)
    }

    /// Starts its daemon with a kubeconfig as [`Peer::daemon_account`] makes it; gives its process ID on the node.
    pub fn daemon(&self, account: &Path) -> Result<u32> {
        number(&self.script(account, &["daemon", NODE_NAME, "/run/containerd/containerd.sock"])?)
    }

    /// Kubeconfig of the daemon's account with a token of the node.
    pub fn daemon_account(&self) -> Result<PathBuf> {
        let plane = &self.node.plane;
        plane.kubeconfig_for("kruise-system", "kruise-daemon", Bound::Node(NODE_NAME))
    }

    fn script(&self, kubeconfig: &Path, args: &[&str]) -> Result<String> {
        let kubectl = Cache::open()?.kubernetes_dir();
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = self.node.runtime.command("bash");
        command.arg(self.dir.join("run.sh")).args(args);
        command.env("KUBECONFIG", kubeconfig).env("DIR", self.scratch());
        finish(command.env("PATH", format!("{}:{path}", kubectl.display())))
    }
}

fn number(text: &str) -> Result<u32> {
    let pid = text.trim().parse();
    pid.with_context(|| format!("no process ID: {text}"))
}

/// Runs a shell line in the background of the node; gives its process ID there.
pub fn background(node: &Node, line: &str, name: &str) -> Result<u32> {
    let log = node.plane.dir().join(format!("{name}.log"));
    let script = format!("env {line} > {} 2>&1 < /dev/null & echo $!", log.display());
    number(&finish(node.runtime.command("bash").args(["-c", &script]))?)
}

/// Waits until a program on the node answers 200.
pub fn healthy(node: &Node, port: u16, path: &str) -> Result<()> {
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

//! The Go implementation as host processes on a test node, for side-by-side tests and measurements.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::cluster::{Cache, NODE_NAME, Node, TokenBinding, run_command};

/// Health port of its manager.
const MANAGER_HEALTH: u16 = 18000;

/// The Go implementation, run by the `run.sh` of a folder.
pub struct Peer<'a> {
    node: &'a Node,
    dir: PathBuf,
}

impl<'a> Peer<'a> {
    /// Uses `run.sh` of the folder `dir`, on `node`.
    pub fn new(node: &'a Node, dir: &Path) -> Self {
        let dir = dir.to_owned();
        Self { node, dir }
    }

    /// Folder of its unpacked programs and its logs; removed with the test cluster.
    pub fn scratch(&self) -> PathBuf {
        self.node.plane.dir().join("peer")
    }

    /// Installs its CRDs, accounts and webhook configurations.
    pub fn install(&self) -> Result<()> {
        self.run_script(self.node.plane.kubeconfig(), &["install"])
            .map(drop)
    }

    /// Starts its manager with the service account `kruise-manager`, waits until it is ready and returns its process ID
    /// on the node.
    pub fn start_manager(&self) -> Result<u32> {
        let plane = &self.node.plane;
        let config = plane.kubeconfig_for("kruise-system", "kruise-manager", TokenBinding::Unbound)?;
        let pid = parse_pid(&self.run_script(&config, &["manager"])?)?;
        wait_healthy(self.node, MANAGER_HEALTH, "/readyz")?;
        Ok(pid)
    }

    /// Starts its daemon with a kubeconfig from [`Peer::daemon_account`] and returns its process ID on the node.
    pub fn start_daemon(&self, account: &Path) -> Result<u32> {
        parse_pid(&self.run_script(account, &["daemon", NODE_NAME, "/run/containerd/containerd.sock"])?)
    }

    /// Kubeconfig of the daemon's service account with a token that is bound to the node.
    pub fn daemon_account(&self) -> Result<PathBuf> {
        let plane = &self.node.plane;
        plane.kubeconfig_for("kruise-system", "kruise-daemon", TokenBinding::Node(NODE_NAME))
    }

    fn run_script(&self, kubeconfig: &Path, args: &[&str]) -> Result<String> {
        let kubectl = Cache::open()?.kubernetes_dir();
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = self.node.runtime.command("bash");
        command.arg(self.dir.join("run.sh")).args(args);
        command.env("KUBECONFIG", kubeconfig).env("DIR", self.scratch());
        run_command(command.env("PATH", format!("{}:{path}", kubectl.display())))
    }
}

fn parse_pid(text: &str) -> Result<u32> {
    let pid = text.trim().parse();
    pid.with_context(|| format!("no process ID: {text}"))
}

/// Runs a shell line in the background on the node and returns its process ID there.
pub fn spawn_background(node: &Node, line: &str, name: &str) -> Result<u32> {
    let log = node.plane.dir().join(format!("{name}.log"));
    let script = format!("env {line} > {} 2>&1 < /dev/null & echo $!", log.display());
    parse_pid(&run_command(node.runtime.command("bash").args(["-c", &script]))?)
}

/// Waits until a program on the node responds with status 200.
pub fn wait_healthy(node: &Node, port: u16, path: &str) -> Result<()> {
    let script = format!(
        "for try in {{1..12000}}; do exec 3<>/dev/tcp/127.0.0.1/{port} && {{ printf 'GET {path} HTTP/1.0\\r\\n\\r\\n' >&3; \
         read -r line <&3; exec 3>&-; [[ $line == *' 200 '* ]] && exit 0; }}; sleep 0.005; done 2>/dev/null; exit 1"
    );
    let result = run_command(node.runtime.command("bash").args(["-c", &script]));
    if result.is_err() {
        bail!(
            "nothing healthy at port {port} of the node; logs are in {}",
            node.plane.dir().display()
        );
    }
    Ok(())
}

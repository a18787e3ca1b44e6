//! The plugin as a process.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Stdio;
use std::sync::LazyLock;

use serde_json::Value;
use support::binaries::kubectl_plugin;
use tokio::process::{Child, Command};

use crate::test_cluster::{TestCluster, WAIT_TIMEOUT};

/// A cluster without a manager, where tests write each status. No webhook answers there.
static CLUSTER_WITHOUT_MANAGER: LazyLock<TestCluster> = LazyLock::new(|| {
    let cluster = TestCluster::new();
    let webhooks = "validatingwebhookconfigurations,mutatingwebhookconfigurations";
    cluster.plane.kubectl(&["delete", webhooks, "--all"]).unwrap();
    cluster
});

pub fn cluster_without_manager() -> &'static TestCluster {
    &CLUSTER_WITHOUT_MANAGER
}

/// What a command printed, and its exit code.
#[derive(Debug)]
pub struct Output {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Output {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|why| panic!("{why}: {self:?}"))
    }

    /// Fails unless it ended with this code.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{self:?}");
        self
    }
}

/// Starts the plugin as the administrator, without `KUBECONFIG`.
pub fn start(cluster: &TestCluster, args: &[&str]) -> Child {
    start_as(cluster.plane.kubeconfig(), args)
}

/// The same with another kubeconfig file.
pub fn start_as(kubeconfig: &Path, args: &[&str]) -> Child {
    let kubeconfig = ["--kubeconfig".as_ref(), kubeconfig.as_os_str()];
    start_as_printed(args.iter().map(AsRef::as_ref).chain(kubeconfig))
}

/// Starts the plugin with these arguments alone.
pub fn start_as_printed(args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Child {
    Command::new(kubectl_plugin())
        .args(args)
        .env_remove("KUBECONFIG")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

/// Waits for the end of the plugin.
pub async fn wait(child: Child) -> Output {
    let ended = tokio::time::timeout(WAIT_TIMEOUT, child.wait_with_output()).await;
    let output = ended.expect("the plugin did not end").unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Output {
        code: output.status.code(),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}

/// Runs the plugin as the administrator.
pub async fn run(cluster: &TestCluster, args: &[&str]) -> Output {
    wait(start(cluster, args)).await
}

/// Runs the plugin with another kubeconfig file.
pub async fn run_as(kubeconfig: &Path, args: &[&str]) -> Output {
    wait(start_as(kubeconfig, args)).await
}

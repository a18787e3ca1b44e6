//! A whole node: control plane, container runtime, registries, kubelet and Services.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result};

use super::component::Component;
use super::containerd;
use super::control_plane::{ControlPlane, ControlPlaneOptions};
use super::kubelet::{self, NODE_NAME};
use super::ports::Ports;
use super::registry::Registry;
use crate::parts::Cache;
use crate::parts::prepare::{self, Part};
use crate::sandbox::{Network, Sandbox};
use crate::wait;

/// containerd and registries without Kubernetes: for tests against the container runtime.
pub struct Runtime {
    /// containerd.
    pub containerd: Component,
    /// Registries that images are pulled from.
    pub registry: Registry,
    sandbox: Arc<Sandbox>,
    network: Network,
}

/// A Ready Kubernetes node with its control plane. Drop ends all of it.
pub struct Node {
    /// The API server and the other control plane components.
    pub plane: ControlPlane,
    /// containerd and the registries.
    pub runtime: Runtime,
    /// kubelet.
    pub kubelet: Component,
    /// kube-proxy: Pods reach the API server and Services, and the API server reaches Services.
    pub proxy: Component,
}

impl Runtime {
    /// Starts containerd of a Debian suite (see [`super::CONTAINERD_VERSIONS`]).
    pub fn start(suite: &'static str) -> Result<Self> {
        let cache = Cache::open()?;
        let parts = [
            Part::NodePackages,
            Part::Containerd(suite),
            Part::Kubernetes,
            Part::Images,
        ];
        prepare::ensure(&cache, &parts)?;
        let sandbox = Arc::new(Sandbox::new(&cache, true)?);
        Self::start_in_sandbox(&cache, sandbox, suite)
    }

    fn start_in_sandbox(cache: &Cache, sandbox: Arc<Sandbox>, suite: &str) -> Result<Self> {
        let network = sandbox.network().context("the bed has no network")?.clone();
        containerd::mount_private_dirs(&sandbox)?;
        let registry = Registry::start(cache, &sandbox, &network)?;
        let mut containerd = containerd::component(cache, &sandbox, &network, suite)?;
        containerd.start()?;
        Ok(Self {
            containerd,
            registry,
            sandbox,
            network,
        })
    }

    /// The runtime's socket, as seen from the host.
    pub fn socket(&self) -> PathBuf {
        self.sandbox.dir().join("run/containerd.sock")
    }

    /// Folder with the logs, as `NAME.log`; removed with the sandbox.
    pub fn dir(&self) -> &Path {
        self.sandbox.dir()
    }

    /// Address at which the sandbox reaches servers of this process.
    pub fn host_address(&self) -> String {
        self.network.host_address()
    }

    /// A command that runs on the node: its network, mounts and processes, with the runtime at its usual socket.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        self.sandbox.command(program)
    }

    /// Runs `ctr` in the namespace of Kubernetes and returns what it prints.
    pub fn ctr(&self, args: &[&str]) -> Result<String> {
        crate::process::run_command(&mut self.ctr_command(args)?)
    }

    /// A command that runs `ctr` in the namespace of Kubernetes.
    pub fn ctr_command(&self, args: &[&str]) -> Result<Command> {
        let mut command = self.command(self.program("ctr")?);
        command.args(["--namespace", "k8s.io", "--address", containerd::SOCKET]);
        command.args(args);
        Ok(command)
    }

    /// Limits the bandwidth of the sandbox's loopback, including the registries, so that a pull takes a while.
    pub fn limit_bandwidth(&self, mebibits_per_second: u32) -> Result<()> {
        let rate = format!("{mebibits_per_second}mibit");
        let mut command = self.command("tc");
        command.args(["qdisc", "replace", "dev", "lo", "root", "tbf", "rate", &rate]);
        crate::process::run_command(command.args(["burst", "256kb", "latency", "50ms"])).map(drop)
    }

    /// Removes the bandwidth limit of the loopback.
    pub fn remove_bandwidth_limit(&self) -> Result<()> {
        crate::process::run_command(self.command("tc").args(["qdisc", "delete", "dev", "lo", "root"]))
            .map(drop)
    }

    fn program(&self, name: &str) -> Result<PathBuf> {
        let path = self
            .containerd
            .program()
            .parent()
            .context("containerd has no folder")?;
        Ok(path.join(name))
    }
}

impl Node {
    /// Starts all components and waits until the node is Ready and Pods can be created.
    pub fn start() -> Result<Self> {
        Self::start_with("trixie")
    }

    /// Starts a node with containerd of a Debian suite (see [`super::CONTAINERD_VERSIONS`]).
    pub fn start_with(suite: &'static str) -> Result<Self> {
        let cache = Cache::open()?;
        prepare::ensure(&cache, &prepare::node_parts(suite))?;
        let sandbox = Arc::new(Sandbox::new(&cache, true)?);
        let runtime = Runtime::start_in_sandbox(&cache, Arc::clone(&sandbox), suite)?;
        let ports = Ports::well_known(&runtime.network);
        let options = ControlPlaneOptions {
            controllers: true,
            scheduler: true,
            ..ControlPlaneOptions::default()
        };
        let plane = ControlPlane::start_in_sandbox(&cache, sandbox, &ports, options)?;
        let mut kubelet = kubelet::kubelet(&cache, &plane, &runtime.network)?;
        let mut proxy = kubelet::proxy(&cache, &plane, &runtime.network)?;
        kubelet.start()?;
        proxy.start()?;
        let mut node = Self {
            plane,
            runtime,
            kubelet,
            proxy,
        };
        node.wait_ready()?;
        Ok(node)
    }

    /// The node's name in the cluster.
    pub fn name(&self) -> &'static str {
        NODE_NAME
    }

    /// Waits until the node is Ready and the default service account exists.
    pub fn wait_ready(&mut self) -> Result<()> {
        let path = r#"-o=jsonpath={.status.conditions[?(@.type=="Ready")].status}"#;
        let outcome = wait::until("the node's Ready condition", wait::WAIT_TIMEOUT, || {
            anyhow::ensure!(self.kubelet.is_running(), "kubelet ended");
            let ready = self
                .plane
                .kubectl(&["get", "node", NODE_NAME, path])
                .is_ok_and(|s| s == "True");
            let account = || self.plane.kubectl(&["get", "serviceaccount", "default"]).is_ok();
            Ok((ready && account()).then_some(()))
        });
        outcome.with_context(|| format!("end of kubelet's log:\n{}", self.kubelet.tail()))
    }

    /// Keeps the node running after this process exits, until [`super::down`] is called.
    pub fn keep_running(self, command: &str) -> Result<()> {
        self.runtime.sandbox.keep_running(command)
    }
}

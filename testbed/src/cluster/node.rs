//! Whole nodes: one with the control plane and the registries, and workers beside it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result};

use super::component::Component;
use super::containerd;
use super::control_plane::{ControlPlane, ControlPlaneOptions};
use super::kubelet::{self, NODE_NAME};
use super::ports::Ports;
use super::registry::{self, Registry};
use crate::parts::Cache;
use crate::parts::prepare::{self, Part};
use crate::process::run_command;
use crate::sandbox::{Network, Sandbox};
use crate::wait;

/// Debian suite whose containerd a node runs if a test names no other.
const DEFAULT_SUITE: &str = "trixie";

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

/// A further node of a cluster, in a sandbox of its own with a link to the first node. Drop ends all of it.
pub struct Worker {
    /// containerd.
    pub containerd: Component,
    /// kubelet.
    pub kubelet: Component,
    /// kube-proxy.
    pub proxy: Component,
    name: &'static str,
    sandbox: Arc<Sandbox>,
    network: Network,
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
        run_command(&mut self.ctr_command(args)?)
    }

    /// A command that runs `ctr` in the namespace of Kubernetes.
    pub fn ctr_command(&self, args: &[&str]) -> Result<Command> {
        ctr_command(&self.sandbox, &self.containerd, args)
    }

    /// Limits the bandwidth of the sandbox's loopback, including the registries, so that a pull takes a while.
    pub fn limit_bandwidth(&self, mebibits_per_second: u32) -> Result<()> {
        limit_bandwidth(&self.sandbox, "lo", mebibits_per_second)
    }

    /// Removes the bandwidth limit of the loopback.
    pub fn remove_bandwidth_limit(&self) -> Result<()> {
        remove_bandwidth_limit(&self.sandbox, "lo")
    }
}

impl Node {
    /// Starts all components and waits until the node is Ready and Pods can be created.
    pub fn start() -> Result<Self> {
        Self::start_with(DEFAULT_SUITE)
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
        let (sandbox, net) = (&runtime.sandbox, &runtime.network);
        let mut kubelet = kubelet::kubelet(&cache, &plane, sandbox, net, NODE_NAME)?;
        let mut proxy = kubelet::proxy(&cache, &plane, sandbox, net, NODE_NAME)?;
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
        kubelet::wait_ready(&self.plane, &mut self.kubelet, NODE_NAME)?;
        wait::until("the default service account", wait::WAIT_TIMEOUT, || {
            let account = self.plane.kubectl(&["get", "serviceaccount", "default"]);
            Ok(account.is_ok().then_some(()))
        })
    }

    /// Starts another node of this cluster, which pulls from the same registries, and waits until it is Ready.
    pub fn add_worker(&self, name: &'static str) -> Result<Worker> {
        Worker::start(self, name)
    }

    /// Keeps the node running after this process exits, until [`super::down`] is called.
    pub fn keep_running(self, command: &str) -> Result<()> {
        self.runtime.sandbox.keep_running(command)
    }
}

impl Worker {
    fn start(first: &Node, name: &'static str) -> Result<Self> {
        let (cache, plane) = (Cache::open()?, &first.plane);
        let sandbox = Arc::new(Sandbox::new(&cache, true)?);
        let network = sandbox.network().context("the sandbox has no network")?.clone();
        first.runtime.sandbox.link(&sandbox)?;
        containerd::mount_private_dirs(&sandbox)?;
        registry::write_hosts(&sandbox, &first.runtime.network.sandbox_address())?;
        let mut containerd = containerd::component(&cache, &sandbox, &network, DEFAULT_SUITE)?;
        let mut kubelet = kubelet::kubelet(&cache, plane, &sandbox, &network, name)?;
        let mut proxy = kubelet::proxy(&cache, plane, &sandbox, &network, name)?;
        for component in [&mut containerd, &mut kubelet, &mut proxy] {
            component.start()?;
        }
        kubelet::wait_ready(plane, &mut kubelet, name)?;
        Ok(Self {
            name,
            containerd,
            kubelet,
            proxy,
            sandbox,
            network,
        })
    }

    /// The node's name in the cluster.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Folder with the logs, as `NAME.log`; removed with the sandbox.
    pub fn dir(&self) -> &Path {
        self.sandbox.dir()
    }

    /// A command that runs on the node: its network, mounts and processes.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        self.sandbox.command(program)
    }

    /// Runs `ctr` in the namespace of Kubernetes and returns what it prints.
    pub fn ctr(&self, args: &[&str]) -> Result<String> {
        run_command(&mut ctr_command(&self.sandbox, &self.containerd, args)?)
    }

    /// Cuts it off: what `first` sends no longer arrives, as with a broken cable. No connection is closed by it.
    pub fn cut_off(&self, first: &Node) -> Result<()> {
        first.runtime.sandbox.set_linked(&self.sandbox, false)
    }

    /// Ends [`Worker::cut_off`].
    pub fn reconnect(&self, first: &Node) -> Result<()> {
        first.runtime.sandbox.set_linked(&self.sandbox, true)
    }

    /// Limits the bandwidth of what it receives from `first`, including the registries.
    pub fn limit_bandwidth(&self, first: &Node, mebibits_per_second: u32) -> Result<()> {
        let device = self.network.link_name();
        limit_bandwidth(&first.runtime.sandbox, &device, mebibits_per_second)
    }

    /// Removes that limit.
    pub fn remove_bandwidth_limit(&self, first: &Node) -> Result<()> {
        remove_bandwidth_limit(&first.runtime.sandbox, &self.network.link_name())
    }

    /// Keeps the node running after this process exits, until [`super::down`] is called.
    pub fn keep_running(self, command: &str) -> Result<()> {
        self.sandbox.keep_running(command)
    }
}

/// A command that runs the `ctr` of this containerd in the namespace of Kubernetes.
fn ctr_command(sandbox: &Sandbox, containerd: &Component, args: &[&str]) -> Result<Command> {
    let programs = containerd
        .program()
        .parent()
        .context("containerd has no folder")?;
    let mut command = sandbox.command(programs.join("ctr"));
    command.args(["--namespace", "k8s.io", "--address", containerd::SOCKET]);
    command.args(args);
    Ok(command)
}

fn limit_bandwidth(sandbox: &Sandbox, device: &str, mebibits_per_second: u32) -> Result<()> {
    let rate = format!("{mebibits_per_second}mibit");
    let mut command = sandbox.command("tc");
    command.args(["qdisc", "replace", "dev", device, "root", "tbf", "rate", &rate]);
    run_command(command.args(["burst", "256kb", "latency", "50ms"])).map(drop)
}

fn remove_bandwidth_limit(sandbox: &Sandbox, device: &str) -> Result<()> {
    let mut command = sandbox.command("tc");
    run_command(command.args(["qdisc", "delete", "dev", device, "root"])).map(drop)
}

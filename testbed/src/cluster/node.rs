//! A whole node: control plane, container runtime, registries, kubelet and Services.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result};

use super::component::Component;
use super::containerd;
use super::control_plane::{ControlPlane, Options};
use super::kubelet::{self, NODE_NAME};
use super::ports::Ports;
use super::registry::Registry;
use crate::parts::Cache;
use crate::parts::prepare::{self, Part};
use crate::sandbox::{Network, Sandbox};
use crate::wait;

/// containerd and registries without Kubernetes: for tests of the runtime's side.
pub struct Runtime {
    /// containerd.
    pub containerd: Component,
    /// Where images come from.
    pub registry: Registry,
    sandbox: Arc<Sandbox>,
    network: Network,
}

/// A Ready Kubernetes node with its control plane. All of it ends on drop.
pub struct Node {
    /// The API server and its company.
    pub plane: ControlPlane,
    /// containerd and the registries.
    pub runtime: Runtime,
    /// kubelet.
    pub kubelet: Component,
    /// kube-proxy: Pods reach the API server and Services, and the API server reaches Services.
    pub proxy: Component,
}

impl Runtime {
    /// containerd of a Debian suite (see [`super::CONTAINERDS`]).
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
        Self::start_in(&cache, sandbox, suite)
    }

    fn start_in(cache: &Cache, sandbox: Arc<Sandbox>, suite: &str) -> Result<Self> {
        let network = sandbox.network().context("the bed has no network")?.clone();
        containerd::isolate(&sandbox)?;
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

    /// A folder that goes with the bed; logs are here as `NAME.log`.
    pub fn dir(&self) -> &Path {
        self.sandbox.dir()
    }

    /// Address at which the bed reaches servers of this process.
    pub fn host_address(&self) -> String {
        self.network.host()
    }

    /// A command that runs on the node: its network, mounts and processes, with the runtime at its usual socket.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        self.sandbox.command(program)
    }

    /// Runs `ctr` in the namespace of Kubernetes and returns what it prints.
    pub fn ctr(&self, args: &[&str]) -> Result<String> {
        crate::process::finish(&mut self.ctr_command(args)?)
    }

    /// `ctr` in the namespace of Kubernetes, to be run.
    pub fn ctr_command(&self, args: &[&str]) -> Result<Command> {
        let mut command = self.command(self.program("ctr")?);
        command.args(["--namespace", "k8s.io", "--address", containerd::SOCKET]);
        command.args(args);
        Ok(command)
    }

    /// Limits what moves over the bed's loopback, registries included, so that a pull takes a while.
    pub fn limit_bandwidth(&self, mebibits_per_second: u32) -> Result<()> {
        let rate = format!("{mebibits_per_second}mibit");
        let mut command = self.command("tc");
        command.args(["qdisc", "replace", "dev", "lo", "root", "tbf", "rate", &rate]);
        crate::process::finish(command.args(["burst", "256kb", "latency", "50ms"])).map(drop)
    }

    /// Takes the limit away.
    pub fn unlimit_bandwidth(&self) -> Result<()> {
        crate::process::finish(self.command("tc").args(["qdisc", "delete", "dev", "lo", "root"])).map(drop)
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
    /// Starts everything and waits until the node is Ready and Pods can be created.
    pub fn start() -> Result<Self> {
        Self::start_with("trixie")
    }

    /// The same with containerd of another Debian suite (see [`super::CONTAINERDS`]).
    pub fn start_with(suite: &'static str) -> Result<Self> {
        let cache = Cache::open()?;
        prepare::ensure(&cache, &prepare::node(suite))?;
        let sandbox = Arc::new(Sandbox::new(&cache, true)?);
        let runtime = Runtime::start_in(&cache, Arc::clone(&sandbox), suite)?;
        let ports = Ports::fixed(&runtime.network);
        let all = Options {
            controllers: true,
            scheduler: true,
            ..Options::default()
        };
        let plane = ControlPlane::start_in(&cache, sandbox, &ports, all)?;
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
        let outcome = wait::until("the node's Ready condition", wait::PATIENCE, || {
            anyhow::ensure!(self.kubelet.running(), "kubelet ended");
            let ready = self
                .plane
                .kubectl(&["get", "node", NODE_NAME, path])
                .is_ok_and(|s| s == "True");
            let account = || self.plane.kubectl(&["get", "serviceaccount", "default"]).is_ok();
            Ok((ready && account()).then_some(()))
        });
        outcome.with_context(|| format!("end of kubelet's log:\n{}", self.kubelet.tail()))
    }

    /// Leaves the bed running after our end, until [`super::down`] is called.
    pub fn keep(self, command: &str) -> Result<()> {
        self.runtime.sandbox.keep(command)
    }
}

//! Our manager as a process of a bed, with its own account.

use std::ops::{Deref, DerefMut};
use std::path::PathBuf;

use testbed::cluster::{Component, ControlPlane, TokenBinding, wait};
use testbed::{FEATURE_GATES, port};

use super::readiness::{http_get, is_ready, readyz};
use super::waits::WAIT_TIMEOUT;

/// Nodes get their NodeImages when they become ready.
const NO_CREATION_DELAY: &str = "--nodeimage-creation-delay=0s";

/// Arguments in most tests.
fn default_args() -> Vec<String> {
    vec![NO_CREATION_DELAY.into(), FEATURE_GATES.into()]
}

/// The same without leader election.
fn unelected_args() -> Vec<String> {
    [default_args(), vec!["--enable-leader-election=false".into()]].concat()
}

/// A manager of the bed, with a token of its own; stopped on drop.
pub struct Manager {
    program: Component,
    health: String,
    /// Its kubeconfig file.
    pub kubeconfig: PathBuf,
}

impl Manager {
    /// A manager that serves its health at `health`; not started yet.
    pub fn new(plane: &ControlPlane, name: &'static str, health: &str, webhooks: u16) -> Self {
        Self::with_args(plane, name, health, webhooks, &default_args())
    }

    fn with_args(
        plane: &ControlPlane,
        name: &'static str,
        health: &str,
        webhooks: u16,
        extra_args: &[String],
    ) -> Self {
        let program = Self::build_component(
            plane,
            name,
            "kruise-manager",
            health,
            ("127.0.0.1", webhooks),
            extra_args,
        );
        Self::probed_at(program, health)
    }

    /// One role of the manager, with its own account; both roles get the port of the webhooks.
    pub fn with_role(plane: &ControlPlane, account: &'static str, role: &str, webhooks: u16) -> Self {
        let health = format!("127.0.0.1:{}", port::reserve().unwrap());
        Self::with_role_at(plane, (account, account), role, &health, webhooks)
    }

    /// The same with a name that may differ from the account's; serves its health at `health`.
    pub fn with_role_at(
        plane: &ControlPlane,
        (name, account): (&'static str, &str),
        role: &str,
        health: &str,
        webhooks: u16,
    ) -> Self {
        let extra_args = [&default_args()[..], &[format!("--role={role}")]].concat();
        let program =
            Self::build_component(plane, name, account, health, ("127.0.0.1", webhooks), &extra_args);
        Self::probed_at(program, health)
    }

    /// The webhooks alone with these feature gates, as `NAME=true,…`.
    pub fn webhooks_with_gates(plane: &ControlPlane, name: &'static str, port: u16, gates: &str) -> Self {
        let health = format!("127.0.0.1:{}", port::reserve().unwrap());
        let extra_args = ["--role=webhooks".to_owned(), format!("--feature-gates={gates}")];
        let address = ("127.0.0.1", port);
        let program = Self::build_component(plane, name, "kruise-webhook", &health, address, &extra_args);
        Self::probed_at(program, &health)
    }

    /// A manager for a bed without IPv4, which listens on all addresses like its Deployment's, without leader election.
    pub fn on_ipv6(plane: &ControlPlane, name: &'static str) -> Self {
        let server = plane.server().trim_start_matches("https://");
        let (host, _) = server.rsplit_once(':').unwrap();
        let extra_args = unelected_args();
        let program =
            Self::build_component(plane, name, "kruise-manager", ":8000", ("::1", 9876), &extra_args);
        Self::probed_at(program, &format!("{host}:8000"))
    }

    fn build_component(
        plane: &ControlPlane,
        name: &'static str,
        account: &str,
        listen: &str,
        (webhook_host, webhook_port): (&str, u16),
        extra_args: &[String],
    ) -> (Component, PathBuf) {
        let account = plane
            .kubeconfig_for("kruise-system", account, TokenBinding::Unbound)
            .unwrap();
        // Otherwise the next kubeconfig for this account would overwrite it.
        let kubeconfig = plane.dir().join(format!("{name}.kubeconfig"));
        std::fs::rename(account, &kubeconfig).unwrap();
        let program = plane
            .component(name, crate::binaries::manager())
            .args([
                format!("--kubeconfig={}", kubeconfig.display()),
                format!("--health-probe-addr={listen}"),
                format!("--metrics-addr={listen}"),
            ])
            .args(extra_args)
            .env("WEBHOOK_HOST", webhook_host)
            .env("WEBHOOK_PORT", webhook_port.to_string())
            .env("POD_NAMESPACE", "kruise-system")
            .env("RUST_LOG", "info,kruise=debug");
        (program, kubeconfig)
    }

    fn probed_at((program, kubeconfig): (Component, PathBuf), health: &str) -> Self {
        let (health, probe) = (health.to_owned(), health.to_owned());
        Self {
            program: program.ready(move || is_ready(&probe)),
            health,
            kubeconfig,
        }
    }

    /// A manager that listens on free ports.
    pub fn on_free_ports(plane: &ControlPlane, name: &'static str) -> Self {
        Self::on_free_ports_with(plane, name, &default_args())
    }

    /// The same without leader election: if a machine is slow for seconds it does not lose the Lease, and with it the
    /// work that it had started.
    pub fn unelected(plane: &ControlPlane, name: &'static str) -> Self {
        Self::on_free_ports_with(plane, name, &unelected_args())
    }

    /// A manager with default feature gates.
    pub fn with_default_gates(plane: &ControlPlane, name: &'static str) -> Self {
        Self::on_free_ports_with(plane, name, &[NO_CREATION_DELAY.into()])
    }

    /// A manager with only these arguments and those for addresses and files.
    pub fn on_free_ports_with(plane: &ControlPlane, name: &'static str, extra_args: &[String]) -> Self {
        let health = format!("127.0.0.1:{}", port::reserve().unwrap());
        Self::with_args(plane, name, &health, port::reserve().unwrap(), extra_args)
    }

    /// Address of its health endpoints.
    pub fn health_address(&self) -> &str {
        &self.health
    }

    /// Number of reconciles of CloneSets, whatever their result.
    pub fn reconcile_count(&self) -> u64 {
        self.metric_sum("kruise_cloneset_pass_seconds_count")
    }

    /// A metric's value, summed over all its labels.
    pub fn metric_sum(&self, metric: &str) -> u64 {
        let metrics = http_get(&self.health, "/metrics");
        assert!(metrics.ends_with("# EOF\n"), "cut short: {metrics}");
        let samples = metrics.lines().filter_map(|line| line.strip_prefix(metric));
        samples
            .map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap())
            .sum()
    }

    /// Its peak memory, in bytes.
    pub fn peak_memory(&self) -> u64 {
        let pid = self.program.pid().unwrap();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kibibytes = peak.unwrap().split_whitespace().next().unwrap();
        kibibytes.parse::<u64>().unwrap() << 10
    }

    /// Waits until its readiness response contains this text, whatever its code.
    pub fn wait_for_readyz_text(&self, text: &str) {
        let poll = || Ok(readyz(&self.health).contains(text).then_some(()));
        if let Err(why) = wait::until(text, WAIT_TIMEOUT, poll) {
            panic!(
                "{why}; it says {:?}\n{}",
                readyz(&self.health),
                self.program.tail()
            );
        }
    }
}

impl Deref for Manager {
    type Target = Component;
    fn deref(&self) -> &Component {
        &self.program
    }
}

impl DerefMut for Manager {
    fn deref_mut(&mut self) -> &mut Component {
        &mut self.program
    }
}

impl Drop for Manager {
    /// The manager of a failed test must not be leader in the next test.
    fn drop(&mut self) {
        // It may have exited already.
        let _ = self.program.kill();
    }
}

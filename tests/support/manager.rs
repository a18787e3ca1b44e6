//! Our manager as a process of a bed, as its own account.

use std::ops::{Deref, DerefMut};
use std::path::PathBuf;

use testbed::cluster::{Bound, Component, ControlPlane, wait};
use testbed::{FEATURE_GATES, port};

use super::readiness::{answer, readiness, ready};
use super::waits::PATIENCE;

/// Nodes get their NodeImages when they become ready.
const AT_ONCE: &str = "--nodeimage-creation-delay=0s";

/// What most tests give it.
fn usual() -> Vec<String> {
    vec![AT_ONCE.into(), FEATURE_GATES.into()]
}

/// The same for one that nobody is to take over from.
fn unelected() -> Vec<String> {
    [usual(), vec!["--enable-leader-election=false".into()]].concat()
}

/// A manager of the bed, with a token of its own; ends on drop.
pub struct Manager {
    program: Component,
    health: String,
    /// Its kubeconfig file.
    pub kubeconfig: PathBuf,
}

impl Manager {
    /// Describes it; it tells its health at `health`.
    pub fn new(plane: &ControlPlane, name: &'static str, health: &str, webhooks: u16) -> Self {
        Self::with(plane, name, health, webhooks, &usual())
    }

    fn with(plane: &ControlPlane, name: &'static str, health: &str, webhooks: u16, more: &[String]) -> Self {
        let program = Self::program(
            plane,
            name,
            "kruise-manager",
            health,
            ("127.0.0.1", webhooks),
            more,
        );
        Self::asked_at(program, health)
    }

    /// One half of the manager, as its own account; both halves are given the port of the webhooks.
    pub fn half(plane: &ControlPlane, account: &'static str, role: &str, webhooks: u16) -> Self {
        let health = format!("127.0.0.1:{}", port::reserve().unwrap());
        Self::half_at(plane, (account, account), role, &health, webhooks)
    }

    /// The same with a name beside its account's, which tells its health at `health`.
    pub fn half_at(
        plane: &ControlPlane,
        (name, account): (&'static str, &str),
        role: &str,
        health: &str,
        webhooks: u16,
    ) -> Self {
        let more = [&usual()[..], &[format!("--role={role}")]].concat();
        let program = Self::program(plane, name, account, health, ("127.0.0.1", webhooks), &more);
        Self::asked_at(program, health)
    }

    /// One in a bed without IPv4, which listens on all addresses as its Deployment's does, and is not elected.
    pub fn on_ipv6(plane: &ControlPlane, name: &'static str) -> Self {
        let server = plane.server().trim_start_matches("https://");
        let (host, _) = server.rsplit_once(':').unwrap();
        let more = unelected();
        let program = Self::program(plane, name, "kruise-manager", ":8000", ("::1", 9876), &more);
        Self::asked_at(program, &format!("{host}:8000"))
    }

    fn program(
        plane: &ControlPlane,
        name: &'static str,
        account: &str,
        listen: &str,
        (webhook_host, webhook_port): (&str, u16),
        more: &[String],
    ) -> (Component, PathBuf) {
        let account = plane
            .kubeconfig_for("kruise-system", account, Bound::Nothing)
            .unwrap();
        // The next one made for this account would be of the same name.
        let kubeconfig = plane.dir().join(format!("{name}.kubeconfig"));
        std::fs::rename(account, &kubeconfig).unwrap();
        let program = plane
            .component(name, crate::binaries::manager())
            .args([
                format!("--kubeconfig={}", kubeconfig.display()),
                format!("--health-probe-addr={listen}"),
                format!("--metrics-addr={listen}"),
            ])
            .args(more)
            .env("WEBHOOK_HOST", webhook_host)
            .env("WEBHOOK_PORT", webhook_port.to_string())
            .env("POD_NAMESPACE", "kruise-system")
            .env("RUST_LOG", "info,kruise=debug");
        (program, kubeconfig)
    }

    fn asked_at((program, kubeconfig): (Component, PathBuf), health: &str) -> Self {
        let (health, probe) = (health.to_owned(), health.to_owned());
        Self {
            program: program.ready(move || ready(&probe)),
            health,
            kubeconfig,
        }
    }

    /// One that listens where nobody does.
    pub fn somewhere(plane: &ControlPlane, name: &'static str) -> Self {
        Self::somewhere_with(plane, name, &usual())
    }

    /// The same, which nobody is to take over from: where a machine is slow for seconds it does not lose the Lease, and
    /// with it what it had begun.
    pub fn unelected(plane: &ControlPlane, name: &'static str) -> Self {
        Self::somewhere_with(plane, name, &unelected())
    }

    /// One whose feature gates are those of a deployment that says nothing of them.
    pub fn as_shipped(plane: &ControlPlane, name: &'static str) -> Self {
        Self::somewhere_with(plane, name, &[AT_ONCE.into()])
    }

    /// One with these arguments alone besides those that say where things are.
    pub fn somewhere_with(plane: &ControlPlane, name: &'static str, more: &[String]) -> Self {
        let health = format!("127.0.0.1:{}", port::reserve().unwrap());
        Self::with(plane, name, &health, port::reserve().unwrap(), more)
    }

    /// Where it tells of its health.
    pub fn health(&self) -> &str {
        &self.health
    }

    /// How many passes over CloneSets it has made, whatever they came to.
    pub fn passes(&self) -> u64 {
        self.count("kruise_cloneset_pass_seconds_count")
    }

    /// A metric's value, summed over all its labels.
    pub fn count(&self, metric: &str) -> u64 {
        let metrics = answer(&self.health, "/metrics");
        assert!(metrics.ends_with("# EOF\n"), "cut short: {metrics}");
        let counts = metrics.lines().filter_map(|line| line.strip_prefix(metric));
        counts
            .map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap())
            .sum()
    }

    /// The most memory that it has had, in bytes.
    pub fn peak_memory(&self) -> u64 {
        let pid = self.program.pid().unwrap();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kibibytes = most.unwrap().split_whitespace().next().unwrap();
        kibibytes.parse::<u64>().unwrap() << 10
    }

    /// Waits until its readiness answer has these words, whatever its code.
    pub fn until_it_says(&self, words: &str) {
        let says = || Ok(readiness(&self.health).contains(words).then_some(()));
        if let Err(why) = wait::until(words, PATIENCE, says) {
            panic!(
                "{why}; it says {:?}\n{}",
                readiness(&self.health),
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
    /// One that a failed test made must not lead for the next test.
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.program.kill();
    }
}

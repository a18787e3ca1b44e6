//! The daemon and managers as processes of the node, as their own accounts.

use std::path::PathBuf;

use xtask::cluster::{Bound, Component, NODE_NAME, Node, wait};
use xtask::peer::healthy;

use super::PATIENCE;
use crate::readiness::{readiness, ready};

/// Our daemon, started and ready.
pub fn daemon(node: &Node) -> Component {
    let plane = &node.plane;
    let account = plane
        .kubeconfig_for("kruise-system", "kruise-daemon", Bound::Node(NODE_NAME))
        .unwrap();
    let mut daemon = plane
        .component("kruise-daemon", env!("CARGO_BIN_EXE_kruise-daemon"))
        .args([
            format!("--kubeconfig={}", account.display()),
            format!("--control-socket={}", plane.dir().join("control.sock").display()),
            "--socket-file=/run/containerd/containerd.sock".into(),
        ])
        .env("NODE_NAME", NODE_NAME)
        .env("RUST_LOG", "info,kruise=debug");
    daemon.spawn().unwrap();
    healthy(node, 10221, "/readyz").unwrap();
    daemon
}

/// A manager of the bed, with a token of its own.
pub struct Manager {
    pub(super) program: Component,
    health: String,
    /// Its kubeconfig file.
    pub kubeconfig: PathBuf,
}

impl Manager {
    /// Describes it; `place` tells its ports from those of others.
    pub fn new(node: &Node, name: &'static str, place: u16) -> Self {
        let plane = &node.plane;
        let account = plane
            .kubeconfig_for("kruise-system", "kruise-manager", Bound::Nothing)
            .unwrap();
        // The next one made for this account would be of the same name.
        let kubeconfig = plane.dir().join(format!("{name}.kubeconfig"));
        std::fs::rename(account, &kubeconfig).unwrap();
        let (host, _) = plane
            .server()
            .trim_start_matches("https://")
            .rsplit_once(':')
            .unwrap();
        let health = format!("{host}:{}", 8000 + place);
        let probe = health.clone();
        let program = plane
            .component(name, env!("CARGO_BIN_EXE_kruise-manager"))
            .args([
                format!("--kubeconfig={}", kubeconfig.display()),
                format!("--health-probe-addr={health}"),
                format!("--metrics-addr={health}"),
                "--nodeimage-creation-delay=0s".into(),
            ])
            .env("WEBHOOK_HOST", "127.0.0.1")
            .env("WEBHOOK_PORT", (9443 + place).to_string())
            .env("POD_NAMESPACE", "kruise-system")
            .env("RUST_LOG", "info,kruise=debug")
            .ready(move || ready(&probe));
        Self {
            program,
            health,
            kubeconfig,
        }
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

//! A node with our daemon, two managers and the process of their webhooks, each with a network and a clock of its own, and a
//! small disk for images.

use std::path::{Path, PathBuf};

use testbed::cluster::{Component, Node};

use super::growth::Sizes;
use super::manager::Manager;
use super::network::Network;
use super::programs;
use support::readiness::{answer, readiness};

/// Size of the disk that the runtime keeps images and containers on. Each rollout takes 3 MB of it, and an hour has some
/// 400 of them.
const DISK: &str = "3g";
/// Makes a program's clock step; it comes with the package `libfaketime`.
const FAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1";

/// A program of ours that runs under the enemy's hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ours {
    Daemon,
    FirstManager,
    SecondManager,
    Webhook,
}

/// All of them.
pub const OURS: [Ours; 4] = [
    Ours::Daemon,
    Ours::FirstManager,
    Ours::SecondManager,
    Ours::Webhook,
];

pub struct Bed {
    pub node: Node,
    daemon: Component,
    managers: [Manager; 3],
    networks: [Network; 4],
}

impl Bed {
    /// Starts everything.
    pub fn start() -> Self {
        let mut node = Node::start().expect("the node starts");
        small_disk(&mut node);
        for what in ["default/namespaces.yaml", "crds", "rbac", "policies", "webhooks"] {
            programs::install(&node, what);
        }
        let host = node.runtime.host_address();
        let account = programs::daemon_account(&node);
        let mut daemon = programs::daemon_as(&node, &account);
        let mut managers = [
            programs::half(&node, "kruise-manager", "controllers", 0),
            programs::half(&node, "kruise-manager-2", "controllers", 1),
            programs::half(&node, "kruise-webhook", "webhooks", 2),
        ];
        let [first, second, webhook] = managers.each_ref().map(|manager| &manager.kubeconfig);
        let networks = [&account, first, second, webhook].map(|file| Network::before(file, &host));
        step_by_file(&node, Ours::Daemon, &mut daemon);
        for (which, manager) in OURS.into_iter().skip(1).zip(&mut managers) {
            step_by_file(&node, which, manager);
        }
        // The first manager makes the certificate that the webhooks wait for.
        for manager in &mut managers {
            manager.start().expect("the manager starts");
        }
        daemon.start().expect("the daemon starts");
        Self {
            node,
            daemon,
            managers,
            networks,
        }
    }

    pub fn program(&mut self, which: Ours) -> &mut Component {
        match which {
            Ours::Daemon => &mut self.daemon,
            Ours::FirstManager => &mut self.managers[0],
            Ours::SecondManager => &mut self.managers[1],
            Ours::Webhook => &mut self.managers[2],
        }
    }

    fn component(&self, which: Ours) -> &Component {
        match which {
            Ours::Daemon => &self.daemon,
            Ours::FirstManager => &self.managers[0],
            Ours::SecondManager => &self.managers[1],
            Ours::Webhook => &self.managers[2],
        }
    }

    pub fn log(&self, which: Ours) -> &Path {
        self.component(which).log()
    }

    pub fn network(&self, which: Ours) -> &Network {
        &self.networks[which as usize]
    }

    /// Steps the program's wall clock to so many seconds from the machine's; its other clocks go on as they are.
    pub fn step_clock(&self, which: Ours, seconds: i64) {
        std::fs::write(clock(&self.node, which), format!("{seconds:+}\n")).unwrap();
    }

    /// Fills the runtime's disk, or makes room again.
    pub fn fill_disk(&self, full: bool) {
        let file = self.node.runtime.dir().join("containerd/filler");
        let script = if full {
            r#"cat /dev/zero > "$0" 2>/dev/null; true"#
        } else {
            r#"rm -f "$0""#
        };
        let mut command = self.node.runtime.command("bash");
        command.args(["-c", script]).arg(file);
        assert!(command.status().unwrap().success());
    }

    /// What its `/readyz` answers.
    pub fn readiness(&self, which: Ours) -> String {
        readiness(&self.health(which))
    }

    fn health(&self, which: Ours) -> String {
        let port = [10_221, 8000, 8001, 8002][which as usize];
        format!("{}:{port}", programs::address(&self.node))
    }

    /// None where it does not answer.
    pub fn sizes(&self, which: Ours) -> Option<Sizes> {
        let metrics = answer(&self.health(which), "/metrics");
        let tasks = metrics
            .lines()
            .find_map(|line| line.strip_prefix("kruise_tasks "))?;
        Some(Sizes {
            kilobytes: self.memory(which),
            open_files: self.open_files(which),
            tasks: tasks.parse().ok()?,
        })
    }

    fn memory(&self, which: Ours) -> u64 {
        let pid = self.component(which).pid().unwrap();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"))
            .unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    fn open_files(&self, which: Ours) -> u64 {
        let pid = self.component(which).pid().unwrap();
        std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count() as u64
    }

    /// No program has panicked.
    pub fn check(&self) {
        for which in OURS {
            let log = std::fs::read_to_string(self.log(which)).unwrap();
            let panics: Vec<&str> = log.lines().filter(|line| line.contains("panic")).collect();
            assert!(panics.is_empty(), "{which:?}: {panics:#?}");
        }
    }
}

/// Puts the runtime's files on a disk that can be filled.
fn small_disk(node: &mut Node) {
    node.runtime.containerd.stop().expect("containerd stops");
    let root = node.runtime.dir().join("containerd");
    let script = format!("set -e; rm -rf \"$0\"/*; mount -t tmpfs -o size={DISK} tmpfs \"$0\"");
    let mut command = node.runtime.command("bash");
    command.args(["-c", &script]).arg(&root);
    assert!(command.status().unwrap().success(), "no small disk");
    node.runtime.containerd.start().expect("containerd starts");
    node.kubelet.restart().expect("kubelet starts");
    node.wait_ready().expect("the node is ready on its small disk");
}

fn clock(node: &Node, which: Ours) -> PathBuf {
    node.plane.dir().join(format!("{which:?}.clock"))
}

/// Lets the program's wall clock follow its file.
fn step_by_file(node: &Node, which: Ours, program: &mut Component) {
    let file = clock(node, which);
    std::fs::write(&file, "+0\n").unwrap();
    program.set_env("LD_PRELOAD", FAKETIME);
    program.set_env("FAKETIME_TIMESTAMP_FILE", file);
    program.set_env("FAKETIME_NO_CACHE", "1");
    program.set_env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
}

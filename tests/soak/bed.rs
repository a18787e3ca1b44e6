//! A node with two managers and our daemon, each with a network and a clock of its own, and a small disk for images.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use xtask::cluster::{Component, Node};

use super::manager::Manager;
use super::network::Network;
use super::programs;

/// Size of the disk that the runtime keeps images and containers on.
const DISK: &str = "1g";
/// Makes a program's clock step; it comes with the package `libfaketime`.
const FAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1";

/// A program of ours that runs under the enemy's hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ours {
    Daemon,
    FirstManager,
    SecondManager,
}

/// All of them.
pub const OURS: [Ours; 3] = [Ours::Daemon, Ours::FirstManager, Ours::SecondManager];

pub struct Bed {
    pub node: Node,
    daemon: Component,
    managers: [Manager; 2],
    networks: [Network; 3],
    /// Kilobytes of memory of their own that each program had when it was started and had come to rest.
    at_rest: [u64; 3],
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
        let mut first = programs::manager(&node, "kruise-manager", 0);
        let mut second = programs::manager(&node, "kruise-manager-2", 1);
        let networks =
            [&account, &first.kubeconfig, &second.kubeconfig].map(|file| Network::before(file, &host));
        step_by_file(&node, "daemon", &mut daemon);
        step_by_file(&node, "first", &mut first);
        step_by_file(&node, "second", &mut second);
        first.start().expect("the manager starts");
        second.start().expect("the second manager starts");
        daemon.start().expect("the daemon starts");
        let mut bed = Self {
            node,
            daemon,
            managers: [first, second],
            networks,
            at_rest: [0; 3],
        };
        bed.at_rest = OURS.map(|which| bed.memory(which));
        bed
    }

    pub fn program(&mut self, which: Ours) -> &mut Component {
        match which {
            Ours::Daemon => &mut self.daemon,
            Ours::FirstManager => &mut self.managers[0],
            Ours::SecondManager => &mut self.managers[1],
        }
    }

    fn component(&self, which: Ours) -> &Component {
        match which {
            Ours::Daemon => &self.daemon,
            Ours::FirstManager => &self.managers[0],
            Ours::SecondManager => &self.managers[1],
        }
    }

    pub fn network(&self, which: Ours) -> &Network {
        &self.networks[which as usize]
    }

    /// Steps the program's wall clock to so many seconds from the machine's; its other clocks go on as they are.
    pub fn step_clock(&self, which: Ours, seconds: i64) {
        let name = ["daemon", "first", "second"][which as usize];
        std::fs::write(clock(&self.node, name), format!("{seconds:+}\n")).unwrap();
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

    /// Kilobytes of memory that are the program's own.
    fn memory(&self, which: Ours) -> u64 {
        let pid = self.component(which).pid().unwrap();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"))
            .unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    fn open_files(&self, which: Ours) -> usize {
        let pid = self.component(which).pid().unwrap();
        std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
    }

    /// No program has panicked, grown, or kept connections.
    pub async fn check(&self) {
        for which in OURS {
            let program = self.component(which);
            let log = std::fs::read_to_string(program.log()).unwrap();
            let panics: Vec<&str> = log.lines().filter(|line| line.contains("panic")).collect();
            assert!(panics.is_empty(), "{which:?}: {panics:#?}");
            // Clients of the API server close idle connections after 90 s, reviews' clients after two minutes.
            let start = Instant::now();
            let rests = |files: usize, memory: u64| {
                files < 64 && memory < 3 * self.at_rest[which as usize] + 24 * 1024
            };
            while !rests(self.open_files(which), self.memory(which)) {
                let seen = (self.open_files(which), self.memory(which));
                assert!(
                    start.elapsed() < Duration::from_secs(180),
                    "{which:?}: (open files, kB) are {seen:?}, and were (_, {}) at first",
                    self.at_rest[which as usize]
                );
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            println!(
                "{which:?}: {} kB and {} open files, {} kB at first",
                self.memory(which),
                self.open_files(which),
                self.at_rest[which as usize]
            );
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

fn clock(node: &Node, name: &str) -> PathBuf {
    node.plane.dir().join(format!("{name}.clock"))
}

/// Lets the program's wall clock follow its file.
fn step_by_file(node: &Node, name: &str, program: &mut Component) {
    let file = clock(node, name);
    std::fs::write(&file, "+0\n").unwrap();
    program.set_env("LD_PRELOAD", FAKETIME);
    program.set_env("FAKETIME_TIMESTAMP_FILE", file);
    program.set_env("FAKETIME_NO_CACHE", "1");
    program.set_env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
}

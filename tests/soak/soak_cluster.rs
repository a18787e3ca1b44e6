//! A node with our daemon, two managers and their webhook process, each with its own network and clock, and a small
//! disk for images.

use std::path::{Path, PathBuf};

use testbed::cluster::{Component, Node};

use super::faulty_proxy::FaultyProxy;
use super::manager::Manager;
use super::programs;
use super::resource_growth::ResourceUsage;
use support::readiness::{http_get, readyz};

/// Size of the disk that the runtime stores images and containers on. Each rollout takes 3 MB of it, and an hour has
/// some 400 of them.
const DISK_SIZE: &str = "3g";
/// Steps a program's clock; part of package `libfaketime`.
const FAKETIME_LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1";

/// A program of ours that faults are injected into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    Daemon,
    FirstManager,
    SecondManager,
    Webhook,
}

pub const PROGRAMS: [Program; 4] = [
    Program::Daemon,
    Program::FirstManager,
    Program::SecondManager,
    Program::Webhook,
];

pub struct SoakCluster {
    pub node: Node,
    daemon: Component,
    managers: [Manager; 3],
    networks: [FaultyProxy; 4],
}

impl SoakCluster {
    /// Starts everything.
    pub fn start() -> Self {
        let mut node = Node::start().expect("the node starts");
        mount_small_disk(&mut node);
        for what in ["default/namespaces.yaml", "crds", "rbac", "policies", "webhooks"] {
            programs::install(&node, what);
        }
        let host = node.runtime.host_address();
        let daemon_kubeconfig = programs::daemon_kubeconfig(&node);
        let mut daemon = programs::daemon_with_kubeconfig(&node, &daemon_kubeconfig);
        let mut managers = [
            programs::manager_with_role(&node, "kruise-manager", "controllers", 0),
            programs::manager_with_role(&node, "kruise-manager-2", "controllers", 1),
            programs::manager_with_role(&node, "kruise-webhook", "webhooks", 2),
        ];
        let [first, second, webhook] = managers.each_ref().map(|manager| &manager.kubeconfig);
        let networks =
            [&daemon_kubeconfig, first, second, webhook].map(|file| FaultyProxy::in_front_of(file, &host));
        use_fake_clock(&node, Program::Daemon, &mut daemon);
        for (program_name, manager) in PROGRAMS.into_iter().skip(1).zip(&mut managers) {
            use_fake_clock(&node, program_name, manager);
        }
        // The first manager creates the certificate that the webhooks wait for.
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

    pub fn program(&mut self, program: Program) -> &mut Component {
        match program {
            Program::Daemon => &mut self.daemon,
            Program::FirstManager => &mut self.managers[0],
            Program::SecondManager => &mut self.managers[1],
            Program::Webhook => &mut self.managers[2],
        }
    }

    fn component(&self, program: Program) -> &Component {
        match program {
            Program::Daemon => &self.daemon,
            Program::FirstManager => &self.managers[0],
            Program::SecondManager => &self.managers[1],
            Program::Webhook => &self.managers[2],
        }
    }

    pub fn log(&self, program: Program) -> &Path {
        self.component(program).log()
    }

    pub fn network(&self, program: Program) -> &FaultyProxy {
        &self.networks[program as usize]
    }

    /// Sets the program's wall clock to this many seconds from the machine's; its other clocks are unchanged.
    pub fn step_clock(&self, program: Program, seconds: i64) {
        std::fs::write(clock_file(&self.node, program), format!("{seconds:+}\n")).unwrap();
    }

    /// Fills the runtime's disk, or frees the space again.
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

    /// Response of its `/readyz`.
    pub fn readyz(&self, program: Program) -> String {
        readyz(&self.health_address(program))
    }

    fn health_address(&self, program: Program) -> String {
        let port = [10_221, 8000, 8001, 8002][program as usize];
        format!("{}:{port}", programs::node_address(&self.node))
    }

    /// None if it does not respond.
    pub fn resource_usage(&self, program: Program) -> Option<ResourceUsage> {
        let metrics = http_get(&self.health_address(program), "/metrics");
        let tasks = metrics
            .lines()
            .find_map(|line| line.strip_prefix("kruise_tasks "))?;
        Some(ResourceUsage {
            kilobytes: self.memory(program),
            open_files: self.open_files(program),
            tasks: tasks.parse().ok()?,
        })
    }

    fn memory(&self, program: Program) -> u64 {
        let pid = self.component(program).pid().unwrap();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"))
            .unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    fn open_files(&self, program: Program) -> u64 {
        let pid = self.component(program).pid().unwrap();
        std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count() as u64
    }

    /// Asserts that no program has panicked.
    pub fn assert_no_panics(&self) {
        for which in PROGRAMS {
            let log = std::fs::read_to_string(self.log(which)).unwrap();
            let panics: Vec<&str> = log.lines().filter(|line| line.contains("panic")).collect();
            assert!(panics.is_empty(), "{which:?}: {panics:#?}");
        }
    }
}

/// Puts the runtime's files on a disk that can be filled.
fn mount_small_disk(node: &mut Node) {
    node.runtime.containerd.stop().expect("containerd stops");
    let root = node.runtime.dir().join("containerd");
    let script = format!("set -e; rm -rf \"$0\"/*; mount -t tmpfs -o size={DISK_SIZE} tmpfs \"$0\"");
    let mut command = node.runtime.command("bash");
    command.args(["-c", &script]).arg(&root);
    assert!(command.status().unwrap().success(), "no small disk");
    node.runtime.containerd.start().expect("containerd starts");
    node.kubelet.restart().expect("kubelet starts");
    node.wait_ready().expect("the node is ready on its small disk");
}

fn clock_file(node: &Node, program: Program) -> PathBuf {
    node.plane.dir().join(format!("{program:?}.clock"))
}

/// Makes the program's wall clock follow its file.
fn use_fake_clock(node: &Node, program: Program, component: &mut Component) {
    let file = clock_file(node, program);
    std::fs::write(&file, "+0\n").unwrap();
    component.set_env("LD_PRELOAD", FAKETIME_LIBRARY);
    component.set_env("FAKETIME_TIMESTAMP_FILE", file);
    component.set_env("FAKETIME_NO_CACHE", "1");
    component.set_env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
}

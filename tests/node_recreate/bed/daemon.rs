//! The daemon as users run it: as its own account, behind the fence around its node.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use xtask::cluster::{Bound, NODE_NAME, Node};

use super::LONG;

/// The daemon as a process of the node.
pub struct Daemon {
    child: Child,
    log: PathBuf,
}

/// Sends a signal to the program that a child made by the bed stands for, and waits for its end.
pub fn end(child: &mut Child, signal: Signal) {
    let path = format!("/proc/{0}/task/{0}/children", child.id());
    let children = std::fs::read_to_string(path).unwrap();
    let pid: i32 = children
        .split_whitespace()
        .next()
        .expect("the program runs")
        .parse()
        .unwrap();
    kill(Pid::from_raw(pid), signal).unwrap();
    child.wait().unwrap();
}

/// Its kubeconfig file. As users run it: the roles of its account, and the fence around its node.
pub fn account(node: &Node) -> PathBuf {
    let bound = Bound::Node(NODE_NAME);
    let file = node.plane.kubeconfig_for("kruise-system", "kruise-daemon", bound);
    file.unwrap()
}

impl Daemon {
    /// Starts it with an environment and waits until it is ready.
    pub fn start(node: &Node, env: &[(&str, &str)]) -> Self {
        Self::start_as(node, &account(node), env)
    }

    /// The same with another kubeconfig file.
    pub fn start_as(node: &Node, account: &Path, env: &[(&str, &str)]) -> Self {
        let dir = node.runtime.dir();
        let log = dir.join("kruise-daemon.log");
        let file = File::options().create(true).append(true).open(&log).unwrap();
        let control = dir.join("control.sock");
        let mut command: Command = node.runtime.command(env!("CARGO_BIN_EXE_kruise-daemon"));
        command.args([
            "--node-name",
            NODE_NAME,
            "--addr",
            "0.0.0.0:10221",
            "--socket-file",
            "/run/containerd/containerd.sock",
        ]);
        command
            .arg("--kubeconfig")
            .arg(account)
            .arg("--control-socket")
            .arg(control);
        command.env("RUST_LOG", "kruise=debug").envs(env.iter().copied());
        command
            .stdin(Stdio::null())
            .stdout(file.try_clone().unwrap())
            .stderr(file);
        let mut daemon = Self {
            child: command.spawn().unwrap(),
            log,
        };
        let url = format!("http://{}:10221/readyz", bed_address(node));
        let start = Instant::now();
        loop {
            assert!(daemon.running(), "the daemon ended:\n{}", daemon.tail());
            if http_ok(&url) {
                return daemon;
            }
            assert!(
                start.elapsed() < LONG,
                "the daemon is not ready:\n{}",
                daemon.tail()
            );
            std::thread::sleep(Duration::from_millis(25));
        }
    }

    pub fn running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Sends a signal and waits for the end; returns how long that took.
    pub fn end(&mut self, signal: Signal) -> Duration {
        let start = Instant::now();
        end(&mut self.child, signal);
        start.elapsed()
    }

    /// All that this daemon and those before it have logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn tail(&self) -> String {
        let text = self.log();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }
}

fn bed_address(node: &Node) -> String {
    let server = node.plane.server();
    server
        .trim_start_matches("https://")
        .rsplit_once(':')
        .unwrap()
        .0
        .to_owned()
}

fn http_ok(url: &str) -> bool {
    use std::io::{Read, Write};
    let (host, path) = url.trim_start_matches("http://").split_once('/').unwrap();
    let Ok(mut stream) = std::net::TcpStream::connect(host) else {
        return false;
    };
    let _ = stream.write_all(format!("GET /{path} HTTP/1.0\r\nhost: {host}\r\n\r\n").as_bytes());
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer.split(' ').nth(1) == Some("200")
}

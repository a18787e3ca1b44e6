//! The daemon's process.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::{Child, Command};

use crate::pull_node::{PullNode, WAIT_TIMEOUT};

/// A running daemon. It is killed when dropped.
pub struct Daemon {
    child: Child,
    pub address: String,
    log: PathBuf,
}

impl Daemon {
    /// Starts it for a node, with the runtime's socket.
    pub fn start(node: &PullNode, socket: &Path, dir: &Path, extra_args: &[&str]) -> Self {
        let address = format!("127.0.0.1:{}", testbed::port::reserve().unwrap());
        let log = dir.join("daemon.log");
        let output = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&log)
            .unwrap();
        let child = Command::new(support::binaries::daemon())
            .args(["--addr", &address, "--node-name", &node.name])
            .arg("--kubeconfig")
            .arg(&node.kubeconfig)
            .arg("--socket-file")
            .arg(socket)
            .arg("--control-socket")
            .arg(dir.join("control.sock"))
            .args(extra_args)
            .env("RUST_LOG", "info,kruise=debug")
            .stdout(Stdio::from(output.try_clone().unwrap()))
            .stderr(Stdio::from(output))
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        node.logs.lock().unwrap().push(log.clone());
        Self { child, address, log }
    }

    /// Kills it, like a crash.
    pub async fn kill(mut self) {
        self.child.kill().await.unwrap();
    }

    /// Stops it with TERM; returns how long that took.
    pub async fn stop(mut self) -> Duration {
        let start = Instant::now();
        kill(
            Pid::from_raw(i32::try_from(self.child.id().unwrap()).unwrap()),
            Signal::SIGTERM,
        )
        .unwrap();
        let result = tokio::time::timeout(WAIT_TIMEOUT, self.child.wait()).await;
        assert!(
            result.is_ok(),
            "the daemon does not end on TERM; its log:\n{}",
            self.log()
        );
        start.elapsed()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Response at a path: status and body.
    pub async fn http_get(&self, path: &str) -> (u16, String) {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let start = Instant::now();
        let mut stream = loop {
            match tokio::net::TcpStream::connect(&self.address).await {
                Ok(stream) => break stream,
                Err(e) => assert!(start.elapsed() < WAIT_TIMEOUT, "{e}; its log:\n{}", self.log()),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    /// Waits until `predicate` holds for the response at a path.
    pub async fn wait_for_response(&self, path: &str, predicate: impl Fn(u16, &str) -> bool) {
        let start = Instant::now();
        loop {
            let (status, body) = self.http_get(path).await;
            if predicate(status, &body) {
                return;
            }
            assert!(
                start.elapsed() < WAIT_TIMEOUT,
                "{path} still answers {status}: {body}\nlog:\n{}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until the daemon's count of NodeImage status writes is in this range; panics if it is above.
    pub async fn wait_for_status_writes(&self, expected: RangeInclusive<u64>) {
        self.wait_for_response("/metrics", |_, text| {
            let writes = text.lines().find(|l| {
                l.starts_with("kruise_api_writes_total{")
                    && l.contains("NodeImage")
                    && l.contains("result=\"ok\"")
            });
            let writes: u64 = writes
                .and_then(|l| l.rsplit(' ').next())
                .map_or(0, |n| n.parse().unwrap());
            assert!(
                writes <= *expected.end(),
                "{writes} writes where {} suffice",
                expected.end()
            );
            expected.contains(&writes)
        })
        .await;
    }
}

//! `kruise-daemon status` as a user runs it, against a control API that says what the test wants.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::os::unix::fs::FileTypeExt;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use kruise_daemon::Live;
use kruise_daemon::control;
use kruise_daemon::live::{Pull, PullPhase, Runtime};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio_util::sync::CancellationToken;

const PATIENCE: Duration = Duration::from_secs(60);

/// A control API of its own.
struct Bed {
    folder: tempfile::TempDir,
    live: Live,
}

impl Bed {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let live = Live::default();
        live.runtimes.send_replace(vec![Runtime {
            name: "containerd".to_owned(),
            socket: "/run/c.sock".to_owned(),
            healthy: true,
            ..Runtime::default()
        }]);
        let (socket, served) = (folder.path().join("c.sock"), live.clone());
        let path = socket.clone();
        tokio::spawn(async move { control::run(&path, served, CancellationToken::new()).await });
        let listens = async {
            while !std::fs::metadata(&socket).is_ok_and(|m| m.file_type().is_socket()) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, listens).await.unwrap();
        Self { folder, live }
    }

    /// Starts `status --watch`.
    fn watch(&self, stdin: Stdio) -> (Child, Lines<BufReader<ChildStdout>>) {
        let mut child = Command::new(support::binaries::daemon())
            .args(["status", "--watch", "--control-socket"])
            .arg(self.folder.path().join("c.sock"))
            .stdin(stdin)
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        (child, lines)
    }
}

async fn line(lines: &mut Lines<BufReader<ChildStdout>>) -> String {
    let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
    line.expect("nothing was printed for 60 s").unwrap().unwrap()
}

async fn ended(mut child: Child) -> ExitStatus {
    let ended = tokio::time::timeout(PATIENCE, child.wait()).await;
    ended.expect("the command goes on without a reader").unwrap()
}

#[tokio::test]
async fn watch_prints_changes_and_ends_with_its_input() {
    let bed = Bed::start().await;
    let (mut child, mut lines) = bed.watch(Stdio::piped());
    assert_eq!(line(&mut lines).await, "runtime /run/c.sock: containerd - ok");
    bed.live.pulls.send_replace(vec![Pull {
        image: "nginx:1".to_owned(),
        phase: PullPhase::Failed,
        message: "no such\u{1b} image".to_owned(),
        ..Pull::default()
    }]);
    assert_eq!(
        line(&mut lines).await,
        "pull nginx:1: Failed no such\\u{1b} image"
    );
    drop(child.stdin.take());
    assert!(ended(child).await.success());
}

#[tokio::test]
async fn watch_ends_with_the_reader_of_its_output() {
    let bed = Bed::start().await;
    let (child, mut lines) = bed.watch(Stdio::piped());
    line(&mut lines).await;
    drop(lines);
    assert!(ended(child).await.success());
}

#[tokio::test]
async fn watch_without_input_does_not_stay() {
    let bed = Bed::start().await;
    let (child, mut lines) = bed.watch(Stdio::null());
    assert_eq!(line(&mut lines).await, "runtime /run/c.sock: containerd - ok");
    assert!(ended(child).await.success());
}

//! `kruise-daemon status` as a user runs it, against a control API that the test controls.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::os::unix::fs::FileTypeExt;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use kruise_daemon::LiveState;
use kruise_daemon::control;
use kruise_daemon::live::{PullPhase, PullStatus, RuntimeStatus};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio_util::sync::CancellationToken;

const PATIENCE: Duration = Duration::from_secs(60);

/// The test's own control API.
struct ControlFixture {
    folder: tempfile::TempDir,
    live: LiveState,
}

impl ControlFixture {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let live = LiveState::default();
        live.runtimes.send_replace(vec![RuntimeStatus {
            name: "containerd".to_owned(),
            socket: "/run/c.sock".to_owned(),
            healthy: true,
            ..RuntimeStatus::default()
        }]);
        let (socket, served) = (folder.path().join("c.sock"), live.clone());
        let path = socket.clone();
        tokio::spawn(async move { control::run(&path, served, CancellationToken::new()).await });
        let wait_for_socket = async {
            while !std::fs::metadata(&socket).is_ok_and(|m| m.file_type().is_socket()) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(PATIENCE, wait_for_socket).await.unwrap();
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

async fn next_line(lines: &mut Lines<BufReader<ChildStdout>>) -> String {
    let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
    line.expect("nothing was printed for 60 s").unwrap().unwrap()
}

async fn wait_for_exit(mut child: Child) -> ExitStatus {
    let ended = tokio::time::timeout(PATIENCE, child.wait()).await;
    ended.expect("the command goes on without a reader").unwrap()
}

#[tokio::test]
async fn watch_prints_changes_and_exits_with_stdin() {
    let fixture = ControlFixture::start().await;
    let (mut child, mut lines) = fixture.watch(Stdio::piped());
    assert_eq!(
        next_line(&mut lines).await,
        "runtime /run/c.sock: containerd - ok"
    );
    fixture.live.pulls.send_replace(vec![PullStatus {
        image: "nginx:1".to_owned(),
        phase: PullPhase::Failed,
        message: "no such\u{1b} image".to_owned(),
        ..PullStatus::default()
    }]);
    assert_eq!(
        next_line(&mut lines).await,
        "pull nginx:1: Failed no such\\u{1b} image"
    );
    drop(child.stdin.take());
    assert!(wait_for_exit(child).await.success());
}

#[tokio::test]
async fn watch_exits_when_stdout_closes() {
    let fixture = ControlFixture::start().await;
    let (child, mut lines) = fixture.watch(Stdio::piped());
    next_line(&mut lines).await;
    drop(lines);
    assert!(wait_for_exit(child).await.success());
}

#[tokio::test]
async fn watch_without_stdin_exits() {
    let fixture = ControlFixture::start().await;
    let (child, mut lines) = fixture.watch(Stdio::null());
    assert_eq!(
        next_line(&mut lines).await,
        "runtime /run/c.sock: containerd - ok"
    );
    assert!(wait_for_exit(child).await.success());
}

//! `kruise-daemon pull` as a user runs it, against a runtime that does what the test wants.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::VecDeque;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;
use support::fault_cri::{Bed, FaultCri};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};

/// Runs the command; it must end by itself.
async fn pull(socket: &Path, args: &[&str], stdin: &str) -> Output {
    let mut child = Command::new(support::binaries::daemon())
        .arg("pull")
        .arg("--socket-file")
        .arg(socket)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(stdin.as_bytes())
        .await
        .unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(60), child.wait_with_output()).await;
    ended
        .unwrap_or_else(|_| panic!("pull {args:?} did not end within 60 s"))
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

async fn pull_on(bed: &Bed, args: &[&str]) -> Output {
    pull(&bed.socket(), args, "").await
}

#[tokio::test]
async fn images_are_pulled_and_those_present_are_not() {
    let bed = Bed::start();
    bed.server.state().add_image("docker.io/library/here:1");
    let out = pull_on(&bed, &["here:1", "nginx", "--output", "json"]).await;
    assert!(out.status.success(), "{}", text(&out.stderr));
    let result: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(result["succeeded"], true);
    assert_eq!(result["images"][0]["alreadyPresent"], true);
    assert_eq!(result["images"][1]["image"], "nginx");
    assert!(
        result["images"][1]["imageID"]
            .as_str()
            .unwrap()
            .starts_with("nginx@sha256:")
    );
    assert_eq!(bed.server.calls("PullImage"), 1);
    assert!(
        text(&out.stderr).contains("nginx: pulling"),
        "{}",
        text(&out.stderr)
    );
}

#[tokio::test]
async fn one_failure_is_told_and_decides_the_exit_status() {
    let bed = Bed::start();
    let refused = (
        tonic::Code::Unknown,
        "dial tcp 127.0.0.1:1: connect: connection refused".to_owned(),
    );
    bed.server
        .state()
        .pull_failures
        .insert("down.test/a:1".to_owned(), VecDeque::from(vec![refused; 2]));
    let out = pull_on(&bed, &["down.test/a:1", "ok.test/b:1", "Bad", "--retries", "1"]).await;
    assert_eq!(out.status.code(), Some(1));
    let lines = text(&out.stdout);
    assert!(
        lines.contains("down.test/a:1: FAILED") && lines.contains("registry cannot be reached"),
        "{lines}"
    );
    assert!(lines.contains("ok.test/b:1: pulled"), "{lines}");
    assert!(
        lines.contains("Bad: FAILED: image reference \"Bad\" is not valid"),
        "{lines}"
    );
    assert_eq!(
        bed.server.calls("PullImage"),
        3,
        "two attempts at one, one at the other, none at the invalid one"
    );
}

#[tokio::test]
async fn a_job_manifest_is_read_from_standard_input_with_its_limits() {
    let bed = Bed::start();
    let refused = (tonic::Code::Unknown, "no".to_owned());
    bed.server
        .state()
        .pull_failures
        .insert("r.test/a:1".to_owned(), VecDeque::from(vec![refused; 5]));
    let yaml = "apiVersion: apps.kruise.io/v1beta1\nkind: ImagePullJob\nmetadata: {name: j}\nspec:\n  image: r.test/a:1\n  pullPolicy: {backoffLimit: 0}\n  sandboxConfig: {annotations: {k: v}}\n  completionPolicy: {}\n";
    let out = pull(&bed.socket(), &["-f", "-"], yaml).await;
    assert_eq!(out.status.code(), Some(1));
    assert_eq!(bed.server.calls("PullImage"), 1);
    let sandbox = bed.server.state().pulls[0].sandbox_config.clone().unwrap();
    assert_eq!(sandbox.annotations["k"], "v");
    assert_eq!(
        sandbox.annotations["apps.kruise.io/pulling-image-by"],
        "kruise-daemon"
    );
}

#[tokio::test]
async fn credentials_come_from_a_docker_configuration() {
    let bed = Bed::start();
    let image = "private.test/team/app:1";
    bed.server
        .state()
        .passwords
        .insert(image.to_owned(), ("u".to_owned(), "p".to_owned()));
    let out = pull_on(&bed, &[image, "--retries", "0"]).await;
    assert!(
        text(&out.stdout).contains("refuses the credentials"),
        "{}",
        text(&out.stdout)
    );
    assert!(!out.status.success());

    // The more specific entry is wrong: the next one is tried.
    let config = r#"{"auths": {"private.test/team": {"username": "x", "password": "y"}, "private.test": {"auth": "dTpw"}}}"#;
    std::fs::write(bed.dir.path().join("config.json"), config).unwrap();
    let out = pull_on(
        &bed,
        &[
            image,
            "--retries",
            "0",
            "--docker-config",
            bed.dir.path().to_str().unwrap(),
        ],
    )
    .await;
    assert!(out.status.success(), "{}{}", text(&out.stdout), text(&out.stderr));
}

#[tokio::test]
async fn no_more_than_asked_are_pulled_at_once() {
    let bed = Bed::start();
    bed.server.state().pull_takes = Duration::from_millis(200);
    let images: Vec<String> = (0..6).map(|n| format!("r.test/a:{n}")).collect();
    let mut args: Vec<&str> = images.iter().map(String::as_str).collect();
    args.extend(["--parallel", "2"]);
    assert!(pull_on(&bed, &args).await.status.success());
    assert_eq!(bed.server.state().pulling_most, 2);
}

#[tokio::test]
async fn without_a_runtime_it_says_where_it_looked() {
    let dir = tempfile::tempdir().unwrap();
    let out = pull(&dir.path().join("no.sock"), &["nginx", "-o", "json"], "").await;
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("no.sock"), "{}", text(&out.stderr));
    let result: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(
        (&result["succeeded"], &result["reason"]),
        (&Value::Bool(false), &Value::from("no_runtime"))
    );
}

/// Starts `pull` of one image; more arguments, and where its standard output goes.
fn start(socket: &Path, args: &[&str], stdout: Stdio) -> Child {
    Command::new(support::binaries::daemon())
        .args(["pull", "nginx", "--socket-file"])
        .arg(socket)
        .args(args)
        .stdin(Stdio::null())
        .stdout(stdout)
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

async fn end(child: Child) -> Output {
    tokio::time::timeout(Duration::from_secs(60), child.wait_with_output())
        .await
        .expect("pull did not end within 60 s")
        .unwrap()
}

#[tokio::test]
async fn a_signal_ends_it_and_the_pull() {
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let bed = Bed::start();
        bed.server.state().pull_takes = Duration::from_secs(600);
        let child = start(&bed.socket(), &[], Stdio::piped());
        bed.server.until("the pull begins", |s| s.pulling == 1).await;
        let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id().unwrap()).unwrap());
        nix::sys::signal::kill(pid, signal).unwrap();
        let out = end(child).await;
        assert_eq!(out.status.code(), Some(1), "{signal}");
        assert!(text(&out.stdout).contains("interrupted"), "{}", text(&out.stdout));
        bed.server
            .until("the pull is given up", |s| s.pulls_dropped == 1)
            .await;
    }
}

#[tokio::test]
async fn it_waits_for_a_runtime_as_long_as_it_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("late.sock");
    let mut child = start(&socket, &["--wait", "60"], Stdio::piped());
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let line = lines.next_line().await.unwrap().unwrap();
    assert!(
        line.contains("waiting 60 s for a container runtime: no socket at"),
        "{line}"
    );
    let _runtime = FaultCri::start(&socket);
    let out = end(child).await;
    assert!(out.status.success(), "{}", text(&out.stdout));
}

#[tokio::test]
async fn a_closed_pipe_is_no_panic_and_the_image_is_pulled_all_the_same() {
    let bed = Bed::start();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let out = end(start(&bed.socket(), &[], writer.into())).await;
    assert!(out.status.success());
    assert!(!text(&out.stderr).contains("panic"), "{}", text(&out.stderr));
    assert_eq!(bed.server.calls("PullImage"), 1);
}

#[tokio::test]
async fn credential_helpers_are_named() {
    let bed = Bed::start();
    let config = r#"{"auths": {"https://index.docker.io/v1/": {}}, "credsStore": "desktop"}"#;
    std::fs::write(bed.dir.path().join("config.json"), config).unwrap();
    let folder = bed.dir.path().to_str().unwrap();
    let out = pull_on(&bed, &["nginx", "--docker-config", folder]).await;
    assert!(out.status.success(), "{}", text(&out.stderr));
    let told = text(&out.stderr);
    assert!(
        told.contains("config.json: credsStore and credHelpers are ignored, as kubelet ignores them; only credentials in auths are used"),
        "{told}"
    );
    assert_eq!(bed.server.state().pulls[0].auth, None, "anonymously");
}

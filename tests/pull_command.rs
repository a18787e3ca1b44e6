//! `kruise-daemon pull` as a user runs it, against a runtime that the test controls.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::VecDeque;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;
use support::fault_cri::{FaultCri, FaultCriFixture};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};

fn pull_command(socket: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(support::binaries::daemon());
    command
        .arg("pull")
        .arg("--socket-file")
        .arg(socket)
        .args(args)
        .kill_on_drop(true);
    command
}

/// Runs the command; it must exit on its own.
async fn run_pull(socket: &Path, args: &[&str], stdin: &str) -> Output {
    let mut child = pull_command(socket, args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
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

async fn run_pull_on(fixture: &FaultCriFixture, args: &[&str]) -> Output {
    run_pull(&fixture.socket(), args, "").await
}

#[tokio::test]
async fn pull_skips_present_images() {
    let fixture = FaultCriFixture::start();
    fixture.server.state().add_image("docker.io/library/here:1");
    let out = run_pull_on(&fixture, &["here:1", "nginx", "--output", "json"]).await;
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
    assert_eq!(fixture.server.calls("PullImage"), 1);
    assert!(
        text(&out.stderr).contains("nginx: pulling"),
        "{}",
        text(&out.stderr)
    );
}

#[tokio::test]
async fn pull_failure_is_reported_in_exit_status() {
    let fixture = FaultCriFixture::start();
    let refused = (
        tonic::Code::Unknown,
        "dial tcp 127.0.0.1:1: connect: connection refused".to_owned(),
    );
    fixture
        .server
        .state()
        .pull_failures
        .insert("down.test/a:1".to_owned(), VecDeque::from(vec![refused; 2]));
    let out = run_pull_on(
        &fixture,
        &["down.test/a:1", "ok.test/b:1", "Bad", "--retries", "1"],
    )
    .await;
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
        fixture.server.calls("PullImage"),
        3,
        "two attempts at one, one at the other, none at the invalid one"
    );
}

#[tokio::test]
async fn pull_reads_job_manifest_from_stdin() {
    let fixture = FaultCriFixture::start();
    let refused = (tonic::Code::Unknown, "no".to_owned());
    fixture
        .server
        .state()
        .pull_failures
        .insert("r.test/a:1".to_owned(), VecDeque::from(vec![refused; 5]));
    let yaml = "apiVersion: apps.kruise.io/v1beta1\nkind: ImagePullJob\nmetadata: {name: j}\nspec:\n  image: r.test/a:1\n  pullPolicy: {backoffLimit: 0}\n  sandboxConfig: {annotations: {k: v}}\n  completionPolicy: {}\n";
    let out = run_pull(&fixture.socket(), &["-f", "-"], yaml).await;
    assert_eq!(out.status.code(), Some(1));
    assert_eq!(fixture.server.calls("PullImage"), 1);
    let sandbox = fixture.server.state().pulls[0].sandbox_config.clone().unwrap();
    assert_eq!(sandbox.annotations["k"], "v");
    assert_eq!(
        sandbox.annotations["apps.kruise.io/pulling-image-by"],
        "kruise-daemon"
    );
}

#[tokio::test]
async fn pull_uses_docker_config_credentials() {
    let fixture = FaultCriFixture::start();
    let image = "private.test/team/app:1";
    fixture
        .server
        .state()
        .credentials
        .insert(image.to_owned(), ("u".to_owned(), "p".to_owned()));
    let out = run_pull_on(&fixture, &[image, "--retries", "0"]).await;
    assert!(
        text(&out.stdout).contains("refuses the credentials"),
        "{}",
        text(&out.stdout)
    );
    assert!(!out.status.success());

    // The more specific entry is wrong, so the next one is tried.
    let config = r#"{"auths": {"private.test/team": {"username": "x", "password": "y"}, "private.test": {"auth": "dTpw"}}}"#;
    std::fs::write(fixture.dir.path().join("config.json"), config).unwrap();
    let out = run_pull_on(
        &fixture,
        &[
            image,
            "--retries",
            "0",
            "--docker-config",
            fixture.dir.path().to_str().unwrap(),
        ],
    )
    .await;
    assert!(out.status.success(), "{}{}", text(&out.stdout), text(&out.stderr));
}

#[tokio::test]
async fn pull_respects_parallel_flag() {
    let fixture = FaultCriFixture::start();
    fixture.server.state().pull_delay = Duration::from_millis(200);
    let images: Vec<String> = (0..6).map(|n| format!("r.test/a:{n}")).collect();
    let mut args: Vec<&str> = images.iter().map(String::as_str).collect();
    args.extend(["--parallel", "2"]);
    assert!(run_pull_on(&fixture, &args).await.status.success());
    assert_eq!(fixture.server.state().max_active_pulls, 2);
}

#[tokio::test]
async fn pull_without_runtime_reports_searched_sockets() {
    let dir = tempfile::tempdir().unwrap();
    let out = run_pull(&dir.path().join("no.sock"), &["nginx", "-o", "json"], "").await;
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("no.sock"), "{}", text(&out.stderr));
    let result: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(
        (&result["succeeded"], &result["reason"]),
        (&Value::Bool(false), &Value::from("no_runtime"))
    );
}

/// Starts `pull` of one image, with more arguments and this standard output.
fn start_pull(socket: &Path, args: &[&str], stdout: Stdio) -> Child {
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

async fn wait_for_exit(child: Child) -> Output {
    tokio::time::timeout(Duration::from_secs(60), child.wait_with_output())
        .await
        .expect("pull did not end within 60 s")
        .unwrap()
}

#[tokio::test]
async fn signal_cancels_the_pull() {
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let fixture = FaultCriFixture::start();
        fixture.server.state().pull_delay = Duration::from_secs(600);
        let child = start_pull(&fixture.socket(), &[], Stdio::piped());
        fixture
            .server
            .wait_until("the pull begins", |s| s.active_pulls == 1)
            .await;
        let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id().unwrap()).unwrap());
        nix::sys::signal::kill(pid, signal).unwrap();
        let out = wait_for_exit(child).await;
        assert_eq!(out.status.code(), Some(1), "{signal}");
        assert!(text(&out.stdout).contains("interrupted"), "{}", text(&out.stdout));
        fixture
            .server
            .wait_until("the pull is given up", |s| s.cancelled_pulls == 1)
            .await;
    }
}

#[tokio::test]
async fn wait_flag_waits_for_a_runtime() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("late.sock");
    let mut child = start_pull(&socket, &["--wait", "60"], Stdio::piped());
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let line = lines.next_line().await.unwrap().unwrap();
    assert!(
        line.contains("waiting 60 s for a container runtime: no socket at"),
        "{line}"
    );
    let _runtime = FaultCri::start(&socket);
    let out = wait_for_exit(child).await;
    assert!(out.status.success(), "{}", text(&out.stdout));
}

#[tokio::test]
async fn closed_stdout_pipe_does_not_stop_the_pull() {
    let fixture = FaultCriFixture::start();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let out = wait_for_exit(start_pull(&fixture.socket(), &[], writer.into())).await;
    assert!(out.status.success());
    assert!(!text(&out.stderr).contains("panic"), "{}", text(&out.stderr));
    assert_eq!(fixture.server.calls("PullImage"), 1);
}

/// Writes a credential helper that is a shell script.
fn write_helper(folder: &Path, name: &str, script: &str) {
    let path = folder.join(format!("docker-credential-{name}"));
    std::fs::write(&path, format!("#!/bin/sh\n{script}")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[tokio::test]
async fn credential_helpers_of_the_docker_config_are_called() {
    let fixture = FaultCriFixture::start();
    let folder = fixture.dir.path();
    let config = r#"{"auths": {"https://index.docker.io/v1/": {}}, "credsStore": "all",
        "credHelpers": {"own.test": "own", "token.test": "token", "fails.test": "fails", "lies.test": "lies",
        "path.test": "../all", "gone.test": "gone"}}"#;
    std::fs::write(folder.join("config.json"), config).unwrap();
    let answer = |user: &str| {
        format!(
            r#"read server; echo "{{\"ServerURL\":\"x\",\"Username\":\"{user}\",\"Secret\":\"$1 $server\"}}""#
        )
    };
    write_helper(folder, "all", &answer("all"));
    write_helper(folder, "own", &answer("own"));
    write_helper(folder, "token", &answer("<token>"));
    write_helper(folder, "fails", "echo s3cret; exit 1");
    write_helper(folder, "lies", "echo s3cret");
    let hosts = [
        "own.test",
        "token.test",
        "fails.test",
        "lies.test",
        "path.test",
        "gone.test",
    ];
    let mut images = vec!["nginx".to_owned()];
    images.extend(hosts.map(|host| format!("{host}/app:1")));
    let mut arguments: Vec<&str> = images.iter().map(String::as_str).collect();
    let folder_text = folder.to_str().unwrap();
    arguments.extend(["--docker-config", folder_text]);
    let path = format!("{folder_text}:{}", std::env::var("PATH").unwrap());
    let mut command = pull_command(&fixture.socket(), &arguments);
    let out = tokio::time::timeout(Duration::from_secs(60), command.env("PATH", path).output());
    let out = out.await.expect("it did not end within 60 s").unwrap();
    let stderr = text(&out.stderr);
    assert!(out.status.success(), "{stderr}");
    let state = fixture.server.state();
    let auth = |image: &str| {
        let named = |pull: &&k8s_cri::v1::PullImageRequest| {
            pull.image
                .as_ref()
                .is_some_and(|spec| spec.image.starts_with(image))
        };
        let auth = state.pulls.iter().find(named).expect(image).auth.clone();
        auth.map(|auth| (auth.username, auth.password, auth.identity_token))
    };
    let of = |user: &str, password: &str, token: &str| {
        Some((user.to_owned(), password.to_owned(), token.to_owned()))
    };
    assert_eq!(
        auth("docker.io/library/nginx"),
        of("all", "get https://index.docker.io/v1/", "")
    );
    assert_eq!(auth("own.test"), of("own", "get own.test", ""));
    assert_eq!(auth("token.test"), of("", "", "get token.test"));
    for host in ["fails.test", "lies.test", "path.test", "gone.test"] {
        assert_eq!(auth(host), None, "{host} is pulled anonymously");
        assert!(
            stderr.contains(&format!("{host} is used without its credentials")),
            "{stderr}"
        );
    }
    assert!(
        stderr.contains("docker-credential-fails: it ended with exit status: 1"),
        "{stderr}"
    );
    assert!(
        stderr.contains("docker-credential-gone: it cannot be started"),
        "{stderr}"
    );
    assert!(stderr.contains("is no name of a credential helper"), "{stderr}");
    assert!(!stderr.contains("s3cret"), "{stderr}");
}

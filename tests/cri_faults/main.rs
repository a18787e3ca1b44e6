//! The CRI client and runtime discovery against a server with injected faults, over a real socket.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod discovery;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kruise_cri::client::CriClient;
use kruise_cri::{Error, PullCause, PullRequest, Runtime};
use support::fault_cri::{FakeContainer, Fault, FaultCriFixture};

const IMAGE: &str = "registry.test/app:v1";

async fn connect(fixture: &FaultCriFixture) -> CriClient {
    CriClient::connect(&fixture.socket())
        .await
        .expect("the runtime answers")
        .0
}

fn pull_request(timeout: Duration) -> PullRequest {
    PullRequest {
        image: IMAGE.to_owned(),
        timeout,
        ..Default::default()
    }
}

const LONG_TIMEOUT: Duration = Duration::from_secs(60);

#[tokio::test]
async fn client_works_with_healthy_runtime() {
    let fixture = FaultCriFixture::start();
    let client = connect(&fixture).await;
    assert_eq!(client.name(), "containerd");
    assert!(client.image_status(IMAGE).await.unwrap().is_none());
    client.pull_image(&pull_request(LONG_TIMEOUT)).await.unwrap();
    assert_eq!(
        client.image_status(IMAGE).await.unwrap().unwrap().repo_tags,
        [IMAGE]
    );
    for (id, created_at) in [("old", 1), ("new", 2)] {
        let c = FakeContainer {
            pod_uid: "u".into(),
            name: "c".into(),
            running: true,
            created_at,
            ..Default::default()
        };
        fixture.server.state().containers.insert(id.to_owned(), c);
    }
    let ids: Vec<_> = client
        .list_containers("u")
        .await
        .unwrap()
        .into_iter()
        .map(|c| c.id)
        .collect();
    assert_eq!(ids, ["new", "old"]);
    assert!(client.list_containers("other").await.unwrap().is_empty());
    client
        .stop_container("new", Duration::from_millis(1500))
        .await
        .unwrap();
    assert_eq!(
        fixture.server.state().containers["new"].stop_grace_seconds,
        Some(2)
    );
    let command = ["echo".into(), "hi".into()];
    let exec = |most| client.exec_sync("new", &command, Duration::from_secs(1), most);
    assert_eq!(exec(7).await.unwrap().unwrap().stdout, b"echo hi");
    fixture.server.inject_fault("ExecSync", Fault::Oversize(100));
    assert_eq!(exec(7).await.unwrap(), None, "more was printed than is read");
}

#[tokio::test]
async fn container_env_is_read_from_verbose_status() {
    let fixture = FaultCriFixture::start();
    let client = connect(&fixture).await;
    let env = vec![("A".to_owned(), "two\nlines=1".to_owned())];
    for (id, env) in [("says", Some(env)), ("silent", None)] {
        let c = FakeContainer {
            pod_uid: "u".into(),
            name: "c".into(),
            running: true,
            hash: 0xdfa5,
            env,
            ..Default::default()
        };
        fixture.server.state().containers.insert(id.to_owned(), c);
    }
    let with_env = client.container_details("says").await.unwrap().unwrap();
    let env = with_env.environment.unwrap();
    assert_eq!((env.get("A"), env.get("B")), (Some("two\nlines=1"), None));
    assert_eq!(
        with_env.status.annotations["io.kubernetes.container.hash"],
        "dfa5"
    );
    assert_eq!(with_env.status.labels["io.kubernetes.pod.uid"], "u");
    let without_env = client.container_details("silent").await.unwrap().unwrap();
    assert_eq!(
        (without_env.environment, without_env.status.name.as_str()),
        (None, "c")
    );

    // The environment alone makes the verbose response too long.
    let long = vec![("A".to_owned(), "x".repeat(3 << 20))];
    fixture.server.state().containers.get_mut("says").unwrap().env = Some(long);
    let truncated = client.container_details("says").await.unwrap().unwrap();
    assert_eq!(
        (truncated.environment, truncated.status.name.as_str()),
        (None, "c")
    );
    fixture
        .server
        .inject_fault("ContainerStatus", Fault::Oversize(17 << 20));
    let error = client.container_details("says").await.unwrap_err();
    assert!(matches!(error, Error::InvalidResponse { .. }), "{error}");
    fixture.server.inject_fault("ContainerStatus", Fault::Disconnect);
    let error = client.container_details("says").await.unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
}

#[tokio::test]
async fn missing_container_is_not_an_error() {
    let fixture = FaultCriFixture::start();
    let client = connect(&fixture).await;
    assert!(client.container_status("gone").await.unwrap().is_none());
    assert!(client.container_details("gone").await.unwrap().is_none());
    client
        .stop_container("gone", Duration::from_secs(1))
        .await
        .unwrap();
}

#[tokio::test]
async fn hanging_call_times_out_and_names_the_method() {
    let fixture = FaultCriFixture::start();
    let client = connect(&fixture).await;
    fixture.server.inject_fault("PullImage", Fault::Hang);
    let start = Instant::now();
    let error = client
        .pull_image(&pull_request(Duration::from_millis(300)))
        .await
        .unwrap_err();
    assert!(
        matches!(
            error,
            Error::Timeout {
                method: "PullImage",
                ..
            }
        ),
        "{error}"
    );
    assert!(error.retryable());
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "took {:?}",
        start.elapsed()
    );
}

#[tokio::test]
async fn dropped_pull_is_cancelled_in_the_runtime() {
    let fixture = FaultCriFixture::start();
    let client = Arc::new(connect(&fixture).await);
    fixture.server.state().pull_delay = Duration::from_secs(600);
    let task = tokio::spawn({
        let client = Arc::clone(&client);
        async move { client.pull_image(&pull_request(LONG_TIMEOUT)).await }
    });
    fixture
        .server
        .wait_until("the pull begins", |s| s.active_pulls == 1)
        .await;
    assert_eq!(
        client.pull_progress(IMAGE).await.unwrap(),
        None,
        "no content store"
    );
    task.abort();
    fixture
        .server
        .wait_until("the pull is given up", |s| s.cancelled_pulls == 1)
        .await;
}

#[tokio::test]
async fn disconnect_is_retryable_and_client_reconnects() {
    let mut fixture = FaultCriFixture::start();
    let client = connect(&fixture).await;
    fixture.server.inject_fault("PullImage", Fault::Disconnect);
    let error = client.pull_image(&pull_request(LONG_TIMEOUT)).await.unwrap_err();
    assert!(
        matches!(
            error,
            Error::Unreachable {
                method: "PullImage",
                ..
            }
        ) && error.retryable(),
        "{error:?}"
    );

    fixture.server.kill().await;
    let error = client.version().await.unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");

    fixture.server.clear_fault("PullImage");
    fixture.server.listen();
    client
        .pull_image(&pull_request(LONG_TIMEOUT))
        .await
        .expect("the same client works after a restart of the runtime");
}

#[tokio::test]
async fn slow_pull_succeeds() {
    let fixture = FaultCriFixture::start();
    let client = connect(&fixture).await;
    fixture
        .server
        .inject_fault("PullImage", Fault::Slow(Duration::from_millis(700)));
    client.pull_image(&pull_request(LONG_TIMEOUT)).await.unwrap();
}

#[tokio::test]
async fn responses_over_16_mib_are_refused() {
    let fixture = FaultCriFixture::start();
    let client = connect(&fixture).await;
    fixture
        .server
        .inject_fault("ListContainers", Fault::Oversize(8 << 20));
    client
        .list_containers("u")
        .await
        .expect("8 MiB is usual on a full node");
    fixture
        .server
        .inject_fault("ListContainers", Fault::Oversize(17 << 20));
    let error = client.list_containers("u").await.unwrap_err();
    assert!(
        matches!(&error, Error::InvalidResponse { why, .. } if why == "it is too long"),
        "{error:?}"
    );
}

#[tokio::test]
async fn unimplemented_method_is_an_error() {
    let fixture = FaultCriFixture::start();
    fixture.server.inject_fault("ImageFsInfo", Fault::Unimplemented);
    let Err(error) = CriClient::connect(&fixture.socket()).await else {
        panic!("a runtime without images was accepted")
    };
    assert!(
        matches!(
            error,
            Error::Unimplemented {
                method: "ImageFsInfo",
                ..
            }
        ),
        "{error:?}"
    );
    assert!(!error.retryable());
}

/// A pull replaces the record of the image, with the pin.
#[tokio::test]
async fn pull_waits_until_the_pin_can_be_read() {
    let fixture = FaultCriFixture::start();
    let client = connect(&fixture).await;
    let unavailable = Fault::Status(tonic::Code::Unavailable, "shutting down".to_owned());
    fixture.server.inject_fault("Get", unavailable);
    let error = client.pull_image(&pull_request(LONG_TIMEOUT)).await.unwrap_err();
    assert!(error.retryable(), "{error:?}");
    assert_eq!(fixture.server.calls("PullImage"), 0);

    fixture.server.inject_fault("Get", Fault::Unimplemented);
    client.pull_image(&pull_request(LONG_TIMEOUT)).await.unwrap();
    assert_eq!(fixture.server.calls("PullImage"), 1);
}

#[tokio::test]
async fn malformed_response_is_an_error() {
    let fixture = FaultCriFixture::start();
    let client = connect(&fixture).await;
    fixture.server.inject_fault("ImageStatus", Fault::Garbage);
    let error = client.image_status(IMAGE).await.unwrap_err();
    assert!(
        matches!(
            error,
            Error::InvalidResponse {
                method: "ImageStatus",
                ..
            }
        ),
        "{error:?}"
    );
}

#[tokio::test]
async fn socket_of_another_protocol_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.sock");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    tokio::spawn(async move {
        use tokio::io::AsyncWriteExt;
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.write_all(b"220 mail.test ESMTP ready\r\n").await;
        }
    });
    let Err(error) = CriClient::connect(&path).await else {
        panic!("a mail server was taken for a runtime")
    };
    assert!(error.to_string().contains("x.sock"), "{error}");
}

#[tokio::test]
async fn pull_failure_cause_is_classified() {
    let fixture = FaultCriFixture::start();
    let client = connect(&fixture).await;
    for (words, cause) in [
        (
            "failed to resolve reference: dial tcp 127.0.0.1:1: connect: connection refused",
            PullCause::RegistryUnavailable,
        ),
        ("unexpected status: 401 Unauthorized", PullCause::Unauthorized),
        ("registry.test/app:v1: not found", PullCause::NotFound),
        (
            "no match for platform in manifest sha256:0: not found",
            PullCause::WrongPlatform,
        ),
        ("write /var/lib/x: no space left on device", PullCause::DiskFull),
    ] {
        fixture
            .server
            .inject_fault("PullImage", Fault::Status(tonic::Code::Unknown, words.to_owned()));
        let error = client.pull_image(&pull_request(LONG_TIMEOUT)).await.unwrap_err();
        assert!(
            matches!(&error, Error::Pull { cause: c, .. } if *c == cause),
            "{words}: {error:?}"
        );
        assert!(
            error.to_string().contains(words) && error.to_string().contains(IMAGE),
            "{error}"
        );
    }
}

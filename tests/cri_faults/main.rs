//! The CRI client and the search for runtimes against a server that misbehaves on demand, over a real socket.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod discovery;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kruise_cri::client::Client;
use kruise_cri::{Error, PullCause, PullRequest, Runtime};
use support::fault_cri::{Bed, FakeContainer, Fault};

const IMAGE: &str = "registry.test/app:v1";

async fn client(bed: &Bed) -> Client {
    Client::connect(&bed.socket())
        .await
        .expect("the runtime answers")
        .0
}

fn pull(timeout: Duration) -> PullRequest {
    PullRequest {
        image: IMAGE.to_owned(),
        timeout,
        ..Default::default()
    }
}

const LONG: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_runtime_that_works_is_understood() {
    let bed = Bed::start();
    let client = client(&bed).await;
    assert_eq!(client.name(), "containerd");
    assert!(client.image_status(IMAGE).await.unwrap().is_none());
    client.pull_image(&pull(LONG)).await.unwrap();
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
        bed.server.state().containers.insert(id.to_owned(), c);
    }
    let ids: Vec<_> = client
        .containers("u")
        .await
        .unwrap()
        .into_iter()
        .map(|c| c.id)
        .collect();
    assert_eq!(ids, ["new", "old"]);
    assert!(client.containers("other").await.unwrap().is_empty());
    client
        .stop_container("new", Duration::from_millis(1500))
        .await
        .unwrap();
    assert_eq!(bed.server.state().containers["new"].stopped_with, Some(2));
    let command = ["echo".into(), "hi".into()];
    let exec = |most| client.exec_sync("new", &command, Duration::from_secs(1), most);
    assert_eq!(exec(7).await.unwrap().unwrap().stdout, b"echo hi");
    bed.server.fault("ExecSync", Fault::Oversize(100));
    assert_eq!(exec(7).await.unwrap(), None, "more was printed than is read");
}

#[tokio::test]
async fn what_a_container_was_made_with_is_told_when_the_runtime_says_it() {
    let bed = Bed::start();
    let client = client(&bed).await;
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
        bed.server.state().containers.insert(id.to_owned(), c);
    }
    let says = client.container_details("says").await.unwrap().unwrap();
    let env = says.environment.unwrap();
    assert_eq!((env.get("A"), env.get("B")), (Some("two\nlines=1"), None));
    assert_eq!(says.status.annotations["io.kubernetes.container.hash"], "dfa5");
    assert_eq!(says.status.labels["io.kubernetes.pod.uid"], "u");
    let silent = client.container_details("silent").await.unwrap().unwrap();
    assert_eq!((silent.environment, silent.status.name.as_str()), (None, "c"));

    // The environment alone makes the verbose answer too long.
    let long = vec![("A".to_owned(), "x".repeat(3 << 20))];
    bed.server.state().containers.get_mut("says").unwrap().env = Some(long);
    let short = client.container_details("says").await.unwrap().unwrap();
    assert_eq!((short.environment, short.status.name.as_str()), (None, "c"));
    bed.server.fault("ContainerStatus", Fault::Oversize(17 << 20));
    let error = client.container_details("says").await.unwrap_err();
    assert!(matches!(error, Error::BadAnswer { .. }), "{error}");
    bed.server.fault("ContainerStatus", Fault::Die);
    let error = client.container_details("says").await.unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
}

#[tokio::test]
async fn a_container_that_is_gone_is_no_error() {
    let bed = Bed::start();
    let client = client(&bed).await;
    assert!(client.container_status("gone").await.unwrap().is_none());
    assert!(client.container_details("gone").await.unwrap().is_none());
    client
        .stop_container("gone", Duration::from_secs(1))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_hang_ends_at_the_deadline_and_names_the_method() {
    let bed = Bed::start();
    let client = client(&bed).await;
    bed.server.fault("PullImage", Fault::Hang);
    let start = Instant::now();
    let error = client
        .pull_image(&pull(Duration::from_millis(300)))
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
async fn a_dropped_pull_is_cancelled_in_the_runtime() {
    let bed = Bed::start();
    let client = Arc::new(client(&bed).await);
    bed.server.state().pull_takes = Duration::from_secs(600);
    let task = tokio::spawn({
        let client = Arc::clone(&client);
        async move { client.pull_image(&pull(LONG)).await }
    });
    bed.server.until("the pull begins", |s| s.pulling == 1).await;
    assert_eq!(
        client.pull_progress(IMAGE).await.unwrap(),
        None,
        "no content store"
    );
    task.abort();
    bed.server
        .until("the pull is given up", |s| s.pulls_dropped == 1)
        .await;
}

#[tokio::test]
async fn a_death_in_mid_call_is_retryable_and_the_client_reconnects() {
    let mut bed = Bed::start();
    let client = client(&bed).await;
    bed.server.fault("PullImage", Fault::Die);
    let error = client.pull_image(&pull(LONG)).await.unwrap_err();
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

    bed.server.kill().await;
    let error = client.version().await.unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");

    bed.server.heal("PullImage");
    bed.server.listen();
    client
        .pull_image(&pull(LONG))
        .await
        .expect("the same client works after a restart of the runtime");
}

#[tokio::test]
async fn a_slow_pull_is_waited_for() {
    let bed = Bed::start();
    let client = client(&bed).await;
    bed.server
        .fault("PullImage", Fault::Slow(Duration::from_millis(700)));
    client.pull_image(&pull(LONG)).await.unwrap();
}

#[tokio::test]
async fn answers_up_to_16_mib_are_read_and_longer_ones_refused() {
    let bed = Bed::start();
    let client = client(&bed).await;
    bed.server.fault("ListContainers", Fault::Oversize(8 << 20));
    client
        .containers("u")
        .await
        .expect("8 MiB is usual on a full node");
    bed.server.fault("ListContainers", Fault::Oversize(17 << 20));
    let error = client.containers("u").await.unwrap_err();
    assert!(
        matches!(&error, Error::BadAnswer { why, .. } if why == "it is too long"),
        "{error:?}"
    );
}

#[tokio::test]
async fn what_is_not_implemented_is_said() {
    let bed = Bed::start();
    bed.server.fault("ImageFsInfo", Fault::Unimplemented);
    let Err(error) = Client::connect(&bed.socket()).await else {
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

#[tokio::test]
async fn garbage_is_not_believed() {
    let bed = Bed::start();
    let client = client(&bed).await;
    bed.server.fault("ImageStatus", Fault::Garbage);
    let error = client.image_status(IMAGE).await.unwrap_err();
    assert!(
        matches!(
            error,
            Error::BadAnswer {
                method: "ImageStatus",
                ..
            }
        ),
        "{error:?}"
    );
}

#[tokio::test]
async fn a_socket_that_speaks_something_else_is_no_runtime() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.sock");
    let listener = tokio::net::UnixListener::bind(&path).unwrap();
    tokio::spawn(async move {
        use tokio::io::AsyncWriteExt;
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.write_all(b"220 mail.test ESMTP ready\r\n").await;
        }
    });
    let Err(error) = Client::connect(&path).await else {
        panic!("a mail server was taken for a runtime")
    };
    assert!(error.to_string().contains("x.sock"), "{error}");
}

#[tokio::test]
async fn the_cause_of_a_failed_pull_is_named() {
    let bed = Bed::start();
    let client = client(&bed).await;
    for (words, cause) in [
        (
            "failed to resolve reference: dial tcp 127.0.0.1:1: connect: connection refused",
            PullCause::RegistryDown,
        ),
        ("unexpected status: 401 Unauthorized", PullCause::Unauthorized),
        ("registry.test/app:v1: not found", PullCause::NotFound),
        (
            "no match for platform in manifest sha256:0: not found",
            PullCause::Platform,
        ),
        ("write /var/lib/x: no space left on device", PullCause::DiskFull),
    ] {
        bed.server
            .fault("PullImage", Fault::Status(tonic::Code::Unknown, words.to_owned()));
        let error = client.pull_image(&pull(LONG)).await.unwrap_err();
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

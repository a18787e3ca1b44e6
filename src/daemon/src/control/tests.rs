#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::v1::node_control_client::NodeControlClient;
use super::v1::{ListPullsRequest, ListRuntimesRequest};
use super::{LiveState, run, status};
use crate::live;

const TIMEOUT: Duration = Duration::from_secs(20);

/// Runs the service on a private socket and connects to it.
async fn start_service(
    live: &LiveState,
) -> (tempfile::TempDir, NodeControlClient<Channel>, CancellationToken) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("control.sock");
    std::fs::write(&socket, "left behind by a former process").unwrap();
    let shutdown = CancellationToken::new();
    let (path, live, stop) = (socket.clone(), live.clone(), shutdown.clone());
    tokio::spawn(async move { run(&path, live, stop).await });
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    while !std::fs::metadata(&socket).is_ok_and(|m| m.file_type().is_socket()) {
        assert!(
            tokio::time::Instant::now() < deadline,
            "no socket at {} after {TIMEOUT:?}",
            socket.display()
        );
        tokio::task::yield_now().await;
    }
    let client = status::connect(&socket).await.unwrap();
    (folder, client, shutdown)
}

#[tokio::test]
async fn control_socket_is_root_only_and_replaces_stale_one() {
    let (folder, mut client, _stop) = start_service(&LiveState::default()).await;
    let mode = std::fs::metadata(folder.path().join("control.sock"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(
        client
            .list_runtimes(ListRuntimesRequest {})
            .await
            .unwrap()
            .into_inner()
            .runtimes
            .is_empty()
    );
}

#[tokio::test]
async fn watch_stream_sends_changes_and_ends_at_shutdown() {
    let live = LiveState::default();
    let (_folder, mut client, stop) = start_service(&live).await;
    let mut stream = client
        .watch_pulls(ListPullsRequest {})
        .await
        .unwrap()
        .into_inner();
    let mut next = async || {
        tokio::time::timeout(TIMEOUT, stream.message())
            .await
            .expect("the stream sent nothing for 20 s")
            .unwrap()
    };
    assert!(next().await.unwrap().pulls.is_empty());
    live.pulls.send_replace(vec![live::PullStatus {
        image: "nginx:alpine".into(),
        bytes_done: 10,
        bytes_total: Some(100),
        bytes_per_second: Some(30),
        ..live::PullStatus::default()
    }]);
    let pull = next().await.unwrap().pulls.remove(0);
    assert_eq!(
        (pull.image.as_str(), pull.seconds_left),
        ("nginx:alpine", Some(3))
    );
    stop.cancel();
    assert!(next().await.is_none(), "the stream continues after shutdown");
}

#[tokio::test]
async fn status_of_a_node_with_many_pulls_is_read() {
    let live = LiveState::default();
    live.pulls.send_replace(vec![live::PullStatus {
        message: "x".repeat(5 << 20),
        ..live::PullStatus::default()
    }]);
    let (_folder, mut client, _stop) = start_service(&live).await;
    let pulls = client.list_pulls(ListPullsRequest {}).await.unwrap().into_inner();
    assert_eq!(pulls.pulls.len(), 1);
}

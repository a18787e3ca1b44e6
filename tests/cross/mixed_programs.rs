//! One program of each implementation.

use crate::interop_cluster::InteropCluster;
use crate::{common_checks, container_meta, events};

/// The Go manager and its manifests, with our daemon on the node.
#[tokio::test]
async fn rust_daemon_with_go_manager() {
    let cluster = InteropCluster::start().await;
    cluster.peer().install().unwrap();
    cluster.peer().start_manager().unwrap();
    cluster.grant_pull_secret_access();
    let mut daemon = cluster.start_daemon();
    common_checks::check_image_pulls(&cluster, true).await;
    common_checks::check_recreate_requests(&cluster).await;
    container_meta::check_meta_and_restart(&cluster).await;
    cluster.assert_nothing_forbidden();
    events::assert_same_daemon_events(&cluster).await;
    daemon.stop().unwrap();
}

/// Our manager and manifests, with the Go daemon on the node.
#[tokio::test]
async fn rust_manager_with_go_daemon() {
    let cluster = InteropCluster::start().await;
    // As users install it; its Pods have no image here, as the programs run as processes.
    cluster.deploy("apply", "default");
    let mut manager = cluster.start_manager();
    let account = cluster.peer().daemon_account().unwrap();
    cluster.peer().start_daemon(&account).unwrap();
    // It takes a digest for a tag, which no runtime understands.
    common_checks::check_image_pulls(&cluster, false).await;
    common_checks::check_recreate_requests(&cluster).await;
    container_meta::check_meta_and_restart(&cluster).await;
    cluster.assert_nothing_forbidden();
    events::assert_same_daemon_events(&cluster).await;
    manager.stop().unwrap();
}

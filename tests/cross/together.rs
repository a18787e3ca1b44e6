//! One program of each implementation.

use crate::bed::Bed;
use crate::{events, told, work};

/// Installed and led by the Go implementation, with our daemon on the node.
#[tokio::test]
async fn our_daemon_serves_the_go_manager() {
    let bed = Bed::start().await;
    bed.peer().install().unwrap();
    bed.peer().manager().unwrap();
    bed.let_daemons_read_pull_secrets();
    let mut daemon = bed.daemon();
    work::pulls_images(&bed, true).await;
    work::recreates_containers(&bed).await;
    told::is_told_and_restarted(&bed).await;
    bed.nothing_was_forbidden();
    events::same_of_either_daemon(&bed).await;
    daemon.stop().unwrap();
}

/// Installed and led by ours, with the Go daemon on the node.
#[tokio::test]
async fn our_manager_leads_the_go_daemon() {
    let bed = Bed::start().await;
    // As users install it; its Pods have no image here, for the programs run as processes.
    bed.deploy("apply", "default");
    let mut manager = bed.manager();
    let account = bed.peer().daemon_account().unwrap();
    bed.peer().daemon(&account).unwrap();
    // It takes a digest for a tag, which no runtime understands.
    work::pulls_images(&bed, false).await;
    work::recreates_containers(&bed).await;
    told::is_told_and_restarted(&bed).await;
    bed.nothing_was_forbidden();
    events::same_of_either_daemon(&bed).await;
    manager.stop().unwrap();
}

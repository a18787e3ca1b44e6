//! The search for runtimes: sockets that appear, hang, and go away for a while.

use std::time::{Duration, Instant};

use kruise_cri::{Options, Runtimes};
use kruise_ops::Progress;
use tokio_util::sync::CancellationToken;

use crate::Bed;
use support::fault_cri::{Fault, FaultCri};

fn runtimes(bed_dir: &std::path::Path) -> Runtimes {
    Runtimes::new(&Options {
        root: bed_dir.to_owned(),
        socket_file: None,
    })
}

/// Waits for a state of the search, and says what it was when that takes too long.
async fn until(runtimes: &Runtimes, what: &str, wanted: impl Fn(&Runtimes) -> bool) -> Duration {
    let start = Instant::now();
    let mut ticks = runtimes.subscribe();
    let wait = async {
        while !wanted(runtimes) {
            ticks.changed().await.unwrap();
        }
    };
    let ended = tokio::time::timeout(Duration::from_secs(60), wait).await;
    assert!(
        ended.is_ok(),
        "after 60 s still not: {what}; sockets: {:?}",
        runtimes.health()
    );
    start.elapsed()
}

#[tokio::test]
async fn a_socket_that_appears_later_is_used_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let found = runtimes(dir.path());
    let shutdown = CancellationToken::new();
    let search = tokio::spawn({
        let (found, shutdown) = (found.clone(), shutdown.clone());
        async move { found.run(shutdown, &Progress::default()).await }
    });
    until(&found, "looked once", |r| {
        r.health()
            .iter()
            .all(|h| h.words.contains("as soon as it appears"))
    })
    .await;
    assert!(found.first().is_none());
    std::fs::create_dir(dir.path().join("crio")).unwrap();
    let crio = FaultCri::start(&dir.path().join("crio/crio.sock"));
    crio.state().runtime_name = "cri-o".to_owned();
    let took = until(&found, "cri-o found", |r| r.by_name("cri-o").is_some()).await;
    assert!(
        took < Duration::from_secs(10),
        "found by the regular look after {took:?}, not by the event"
    );

    let _containerd = FaultCri::start(&dir.path().join("containerd.sock"));
    until(&found, "containerd first", |r| {
        r.first().is_some_and(|r| r.name() == "containerd")
    })
    .await;
    assert!(found.by_name("cri-o").is_some() && found.by_name("docker").is_none());
    shutdown.cancel();
    search.await.unwrap();
}

#[tokio::test]
async fn a_socket_that_hangs_is_a_state_in_words_and_others_are_used() {
    let bed = Bed::start();
    bed.server.fault("Version", Fault::Hang);
    let crio = FaultCri::start(&bed.dir.path().join("crio.sock"));
    crio.state().runtime_name = "cri-o".to_owned();
    let found = runtimes(bed.dir.path());
    let shutdown = CancellationToken::new();
    let search = tokio::spawn({
        let (found, shutdown) = (found.clone(), shutdown.clone());
        async move { found.run(shutdown, &Progress::default()).await }
    });
    until(&found, "the one that works", |r| {
        r.first().is_some_and(|r| r.name() == "cri-o")
    })
    .await;
    let hangs = |r: &Runtimes| r.health()[0].words.contains("did not answer Version within 5s");
    until(&found, "the one that hangs, in words", hangs).await;
    bed.server.heal("Version");
    until(&found, "healed", |r| {
        r.first().is_some_and(|r| r.name() == "containerd")
    })
    .await;
    shutdown.cancel();
    search.await.unwrap();
}

#[tokio::test]
async fn a_runtime_that_restarts_is_kept_and_its_state_said() {
    let mut bed = Bed::start();
    let found = runtimes(bed.dir.path());
    let shutdown = CancellationToken::new();
    let search = tokio::spawn({
        let (found, shutdown) = (found.clone(), shutdown.clone());
        async move { found.run(shutdown, &Progress::default()).await }
    });
    until(&found, "found", |r| r.health()[0].healthy).await;
    bed.server.kill().await;
    until(&found, "gone", |r| !r.health()[0].healthy).await;
    assert!(
        found.first().is_some(),
        "a runtime that restarts is not forgotten"
    );
    bed.server.listen();
    until(&found, "back", |r| r.health()[0].healthy).await;
    found.first().unwrap().version().await.unwrap();
    shutdown.cancel();
    search.await.unwrap();
}

#[tokio::test]
async fn a_socket_that_takes_connections_and_says_nothing_is_a_state_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let _silent = tokio::net::UnixListener::bind(dir.path().join("silent.sock")).unwrap();
    let found = Runtimes::new(&Options {
        root: dir.path().to_owned(),
        socket_file: Some("silent.sock".into()),
    });
    tokio::time::timeout(Duration::from_secs(60), found.look())
        .await
        .expect("a look has an end");
    let health = found.health().remove(0);
    assert!(
        !health.healthy && health.words.contains("did not answer Version within 5s"),
        "{health:?}"
    );
}

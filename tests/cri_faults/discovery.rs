//! Discovery of runtimes: sockets that appear, hang, and disappear for a while.

use std::time::{Duration, Instant};

use kruise_cri::{DiscoveryOptions, Runtimes};
use kruise_ops::Progress;
use tokio_util::sync::CancellationToken;

use crate::FaultCriFixture;
use support::fault_cri::{Fault, FaultCri};

fn discover_in(root: &std::path::Path) -> Runtimes {
    Runtimes::new(&DiscoveryOptions {
        root: root.to_owned(),
        socket_file: None,
    })
}

/// Waits for a state of the discovery; on timeout, prints the last state.
async fn wait_until(runtimes: &Runtimes, what: &str, predicate: impl Fn(&Runtimes) -> bool) -> Duration {
    let start = Instant::now();
    let mut ticks = runtimes.subscribe();
    let wait = async {
        while !predicate(runtimes) {
            ticks.changed().await.unwrap();
        }
    };
    let result = tokio::time::timeout(Duration::from_secs(60), wait).await;
    assert!(
        result.is_ok(),
        "after 60 s still not: {what}; sockets: {:?}",
        runtimes.health()
    );
    start.elapsed()
}

#[tokio::test]
async fn socket_created_later_is_discovered() {
    let dir = tempfile::tempdir().unwrap();
    let runtimes = discover_in(dir.path());
    let shutdown = CancellationToken::new();
    let search = tokio::spawn({
        let (runtimes, shutdown) = (runtimes.clone(), shutdown.clone());
        async move { runtimes.run(shutdown, &Progress::default()).await }
    });
    wait_until(&runtimes, "looked once", |r| {
        r.health()
            .iter()
            .all(|h| h.message.contains("as soon as it appears"))
    })
    .await;
    assert!(runtimes.preferred().is_none());
    std::fs::create_dir(dir.path().join("crio")).unwrap();
    let crio = FaultCri::start(&dir.path().join("crio/crio.sock"));
    crio.state().runtime_name = "cri-o".to_owned();
    let elapsed = wait_until(&runtimes, "cri-o found", |r| r.by_name("cri-o").is_some()).await;
    assert!(
        elapsed < Duration::from_secs(10),
        "found by the regular look after {elapsed:?}, not by the event"
    );

    let _containerd = FaultCri::start(&dir.path().join("containerd.sock"));
    wait_until(&runtimes, "containerd first", |r| {
        r.preferred().is_some_and(|r| r.name() == "containerd")
    })
    .await;
    assert!(runtimes.by_name("cri-o").is_some() && runtimes.by_name("docker").is_none());
    shutdown.cancel();
    search.await.unwrap();
}

#[tokio::test]
async fn hanging_socket_is_reported_and_others_are_used() {
    let fixture = FaultCriFixture::start();
    fixture.server.inject_fault("Version", Fault::Hang);
    let crio = FaultCri::start(&fixture.dir.path().join("crio.sock"));
    crio.state().runtime_name = "cri-o".to_owned();
    let runtimes = discover_in(fixture.dir.path());
    let shutdown = CancellationToken::new();
    let search = tokio::spawn({
        let (runtimes, shutdown) = (runtimes.clone(), shutdown.clone());
        async move { runtimes.run(shutdown, &Progress::default()).await }
    });
    wait_until(&runtimes, "the one that works", |r| {
        r.preferred().is_some_and(|r| r.name() == "cri-o")
    })
    .await;
    let reports_hang = |r: &Runtimes| r.health()[0].message.contains("did not answer Version within 5s");
    wait_until(&runtimes, "the one that hangs, in words", reports_hang).await;
    fixture.server.clear_fault("Version");
    wait_until(&runtimes, "healed", |r| {
        r.preferred().is_some_and(|r| r.name() == "containerd")
    })
    .await;
    shutdown.cancel();
    search.await.unwrap();
}

#[tokio::test]
async fn restarting_runtime_is_kept_and_reported_unhealthy() {
    let mut fixture = FaultCriFixture::start();
    let runtimes = discover_in(fixture.dir.path());
    let shutdown = CancellationToken::new();
    let search = tokio::spawn({
        let (runtimes, shutdown) = (runtimes.clone(), shutdown.clone());
        async move { runtimes.run(shutdown, &Progress::default()).await }
    });
    wait_until(&runtimes, "found", |r| r.health()[0].healthy).await;
    fixture.server.kill().await;
    wait_until(&runtimes, "gone", |r| !r.health()[0].healthy).await;
    assert!(
        runtimes.preferred().is_some(),
        "a runtime that restarts is not forgotten"
    );
    fixture.server.listen();
    wait_until(&runtimes, "back", |r| r.health()[0].healthy).await;
    runtimes.preferred().unwrap().version().await.unwrap();
    shutdown.cancel();
    search.await.unwrap();
}

#[tokio::test]
async fn silent_socket_is_reported_as_unhealthy() {
    let dir = tempfile::tempdir().unwrap();
    let _silent = tokio::net::UnixListener::bind(dir.path().join("silent.sock")).unwrap();
    let runtimes = Runtimes::new(&DiscoveryOptions {
        root: dir.path().to_owned(),
        socket_file: Some("silent.sock".into()),
    });
    tokio::time::timeout(Duration::from_secs(60), runtimes.probe_all())
        .await
        .expect("a look has an end");
    let health = runtimes.health().remove(0);
    assert!(
        !health.healthy && health.message.contains("did not answer Version within 5s"),
        "{health:?}"
    );
}

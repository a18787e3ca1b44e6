//! A long run with faults: programs are killed and frozen, connections cut, silenced and refused, disks filled and
//! clocks stepped, at random moments, while image jobs, container recreates, rollouts and sidecar updates are in progress.
//! At the end every object has its correct final state, nothing was done twice, and no program has grown.
//!
//! Some minutes in each run of the tests; an hour with `cargo xtask test --soak --only soak`. `KRUISE_SEED` repeats
//! the order of the faults, `KRUISE_SOAK_SECONDS` sets another length.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod chaos;
mod container_runs;
mod faulty_proxy;
mod resource_growth;
mod soak_cluster;
mod workload;

use std::time::{Duration, Instant};

use support::{manager, pods, programs};

use soak_cluster::SoakCluster;
use support::seeded_rng::SeededRng;
use workload::Workload;

/// How long faults are injected.
fn run_duration() -> Duration {
    let from_env = std::env::var("KRUISE_SOAK_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok());
    let soak = std::env::var_os("KRUISE_SOAK").is_some();
    Duration::from_secs(from_env.unwrap_or(if soak { 3600 } else { 150 }))
}

#[tokio::test]
async fn workload_survives_random_faults() {
    let rng = SeededRng::new();
    let mut cluster = tokio::task::spawn_blocking(SoakCluster::start)
        .await
        .expect("no panic");
    let workload = Workload::start(&cluster).await;
    let deadline = Instant::now() + run_duration();
    let fault_task = tokio::task::spawn_blocking(move || {
        let injected = chaos::inject_faults(&mut cluster, rng, deadline);
        (cluster, injected)
    });
    let (completed, fault_result) = tokio::join!(workload.run_until(deadline), fault_task);
    let (cluster, (faults, growth)) = fault_result.expect("the enemy mends all that it broke");
    println!("faults: {faults:?}");
    println!("work: {completed:?}");
    workload.assert_consistent(&completed).await;
    cluster.assert_no_panics();
    growth.check(&cluster).await;
    assert!(
        completed.jobs > 0
            && completed.requests > 0
            && completed.rollouts > 0
            && completed.sidecar_updates > 0,
        "the bed did no work: {completed:?}"
    );
}

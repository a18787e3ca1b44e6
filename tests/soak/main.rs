//! A long run with an enemy: programs are killed and stopped, connections cut, silenced and refused, disks filled and clocks
//! stepped, at moments that chance decides, while image jobs, container recreates and rollouts go on. At the end every
//! object is in its right final state, nothing was done twice, and no program has grown.
//!
//! Some minutes in each run of the tests; an hour with `cargo xtask test --soak --only soak`. `KRUISE_SEED` repeats the
//! order of the faults, `KRUISE_SOAK_SECONDS` sets another length.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bed;
mod enemy;
mod growth;
mod network;
mod runs;
mod work;

use std::time::{Duration, Instant};

use support::{manager, pods, programs};

use bed::Bed;
use support::chance::Chance;
use work::Work;

/// How long faults are made.
fn length() -> Duration {
    let given = std::env::var("KRUISE_SOAK_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok());
    let soak = std::env::var_os("KRUISE_SOAK").is_some();
    Duration::from_secs(given.unwrap_or(if soak { 3600 } else { 150 }))
}

#[tokio::test]
async fn all_work_ends_right_whatever_breaks_meanwhile() {
    let chance = Chance::new();
    let mut bed = tokio::task::spawn_blocking(Bed::start).await.expect("no panic");
    let work = Work::start(&bed).await;
    let until = Instant::now() + length();
    let enemy = tokio::task::spawn_blocking(move || {
        let made = enemy::rage(&mut bed, chance, until);
        (bed, made)
    });
    let (done, enemy) = tokio::join!(work.go_on(until), enemy);
    let (bed, (faults, growth)) = enemy.expect("the enemy mends all that it broke");
    println!("faults: {faults:?}");
    println!("work: {done:?}");
    work.check(&done).await;
    bed.check();
    growth.check(&bed).await;
    assert!(
        done.jobs > 0 && done.requests > 0 && done.rollouts > 0,
        "the bed did no work: {done:?}"
    );
}

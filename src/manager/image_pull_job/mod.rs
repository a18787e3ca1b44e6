//! Fans ImagePullJobs out to NodeImages.
//!
//! In:  ImagePullJobs, NodeImages, Nodes and Pods (watches), pull secrets (by name).
//! Out: entries in NodeImages, status of jobs, copies of pull secrets, events.
//!
//! [`plan::index`] knows which job waits for what on which node; `act` writes to nodes, `report` writes statuses,
//! and `keeper` does what a job needs before and after: finalizer, pull secrets, deletion.

mod act;
mod keeper;
mod observe;
pub mod plan;
mod report;
mod secrets;
mod turns;

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tokio::sync::mpsc;

use act::Writer;
use observe::Changes;
use plan::index::Index;
use report::Reporter;

use super::Context;
use crate::ops::panics::isolated_now;

/// The controller's name in `/healthz`.
const NAME: &str = "imagepulljob";
/// The pause after a pass that panicked.
const RETRY: Duration = Duration::from_secs(5);

/// Runs until shutdown.
pub async fn run(ctx: Context) {
    ctx.stores.synced().await;
    let (secrets_tx, secrets_rx) = mpsc::unbounded_channel();
    let keeper = keeper::run(ctx.clone(), secrets_tx);
    let shutdown = ctx.shutdown.clone();
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = keeper => {}
        () = fan_out(ctx, secrets_rx) => {}
    }
}

/// Observe, hand out, write, report; then wait for the next change.
async fn fan_out(ctx: Context, secrets: mpsc::UnboundedReceiver<keeper::Resolved>) {
    let delay = SignedDuration::try_from(ctx.options.nodeimage_creation_delay);
    let mut index = Index::new(delay.unwrap_or(SignedDuration::MAX));
    let mut changes = Changes::new(&ctx.stores, secrets);
    let mut writer = Writer::new(&ctx);
    let mut reporter = Reporter::new(&ctx);
    let step = ctx.progress.waiting(NAME);
    loop {
        let now = ctx.cluster.clock.now();
        let passed = isolated_now(NAME, "assignment to nodes", || {
            for (node, uid) in index.assign(now) {
                writer.push(&index, &node, &uid);
            }
        })
        .and_then(|()| isolated_now(NAME, "writes to NodeImages", || writer.start(&index, now)))
        .and_then(|()| isolated_now(NAME, "status of jobs", || reporter.flush(&mut index, now)));
        let wake = match passed {
            Ok(()) => [
                index.wake().map(|at| until(at, now)),
                reporter.wake(),
                writer.wake(),
            ],
            // What is due stays due, and would be tried without a pause.
            Err(_) => [Some(RETRY), None, None],
        };
        let pause = wake.into_iter().flatten().min();
        step.idle(pause);
        tokio::select! {
            biased;
            Some(done) = writer.done() => {
                // Counted and logged; the node is written again with the next change of it.
                let _ = isolated_now(NAME, "outcome of a write", || writer.finished(&mut index, done));
            }
            Some(done) = reporter.done() => {
                let _ = isolated_now(NAME, "outcome of a status", || reporter.finished(&index, done));
            }
            // Not `now`: it may be an hour ago that the wait began.
            change = changes.next() => changes.apply(&mut index, change, ctx.cluster.clock.now()),
            () = tokio::time::sleep(pause.unwrap_or(Duration::from_secs(3600))) => {}
        }
        changes.drain(&mut index, ctx.cluster.clock.now());
    }
}

/// How long it is until then; nothing when it has passed.
fn until(at: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(at.duration_since(now)).unwrap_or(Duration::ZERO)
}

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
use plan::index::{Index, Uid};
use report::Reporter;

use super::Context;
use kruise_ops::panics::isolated_now;

/// The controller's name in `/healthz`.
const NAME: &str = "imagepulljob";
/// The pause after a pass that panicked, and of a job whose assignment did.
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
            hand_out(&mut index, now, |index, uid| {
                for node in index.assign(uid, now) {
                    writer.push(index, &node, uid);
                }
            });
        })
        .and_then(|()| isolated_now(NAME, "writes to NodeImages", || writer.start(&index, now)))
        .and_then(|()| isolated_now(NAME, "status of jobs", || reporter.flush(&mut index, now)));
        let pause = if passed.is_ok() {
            let wake = [
                index.wake().map(|at| until(at, now)),
                reporter.wake(),
                writer.wake(),
            ];
            wake.into_iter().flatten().min()
        } else {
            // What is due stays due, and what happens meanwhile waits: both would be tried without a pause.
            step.idle(Some(RETRY));
            tokio::time::sleep(RETRY).await;
            Some(Duration::ZERO)
        };
        step.idle(pause);
        tokio::select! {
            biased;
            Some(done) = writer.done() => writer.finished(&mut index, done),
            Some(done) = reporter.done() => reporter.finished(&index, done),
            // Not `now`: it may be an hour ago that the wait began.
            change = changes.next() => changes.apply(&mut index, change, ctx.cluster.clock.now()),
            () = tokio::time::sleep(pause.unwrap_or(Duration::from_secs(3600))) => {}
        }
        changes.drain(&mut index, ctx.cluster.clock.now());
    }
}

/// Gives each open job what it may have. One that this panics at waits for a while, and the others go on.
fn hand_out(index: &mut Index, now: Timestamp, mut give: impl FnMut(&mut Index, &Uid)) {
    for uid in index.take_open(now) {
        let Some(job) = index.job(&uid) else { continue };
        if isolated_now(NAME, &job.key, || give(index, &uid)).is_err() {
            let again = SignedDuration::try_from(RETRY)
                .ok()
                .and_then(|pause| now.checked_add(pause).ok());
            index.open_at(&uid, again.unwrap_or(Timestamp::MAX));
        }
    }
}

/// How long it is until then; nothing when it has passed.
fn until(at: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(at.duration_since(now)).unwrap_or(Duration::ZERO)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use std::sync::{Arc, Mutex};

    use k8s_openapi::api::core::v1::Node;
    use kube::client::Body;
    use serde_json::json;

    use super::*;
    use crate::Stores;
    use crate::view::{NodeImageView, NodeView};
    use kruise_api::image_pull_job::{ImagePullJob, ImagePullJobSpec};
    use kruise_api::node_image::NodeImage;
    use kruise_cluster::{Key, Mirror};
    use kruise_ops::logs::lines_of;
    use kruise_ops::panics::injected::panic_at;
    use plan::job::Job;

    #[test]
    fn a_job_that_panics_waits_and_the_others_are_handed_out() {
        let at = |seconds| Timestamp::from_second(seconds).unwrap();
        let put = |index: &mut Index, name: &str| {
            let spec = ImagePullJobSpec {
                image: format!("{name}:1"),
                ..ImagePullJobSpec::default()
            };
            let mut object = ImagePullJob::new(name, spec);
            object.metadata.namespace = Some("team".to_owned());
            object.metadata.uid = Some(name.to_owned());
            index.put_job(Job::read(&object), at(0));
        };
        let mut index = Index::new(SignedDuration::ZERO);
        index.node_image("n", Some(Arc::new(NodeImageView::default())));
        put(&mut index, "a");
        put(&mut index, "z");
        let mut pass = |now, panics: bool| {
            // Whatever changes, it waits.
            put(&mut index, "bad");
            let mut given = Vec::new();
            hand_out(&mut index, at(now), |index, uid| {
                assert!(!(panics && **uid == *"bad"), "index out of bounds");
                let nodes = index.assign(uid, at(now));
                given.extend(nodes.iter().map(|node| format!("{uid} on {node}")));
            });
            (given, index.wake())
        };
        let lines = lines_of(|| {
            let given = ["a on n", "z on n"].map(str::to_owned).to_vec();
            assert_eq!(pass(0, true), (given, Some(at(5))));
        });
        assert!(lines.iter().any(|line| line.contains("team/bad")), "{lines:?}");
        assert_eq!(pass(4, false).0, [] as [String; 0]);
        assert_eq!(pass(5, false).0, ["bad on n"]);
    }

    /// A cluster with one node and one job for it, and which of both are written.
    fn one_node() -> (Context, Arc<Mutex<Vec<&'static str>>>) {
        let image =
            json!({ "metadata": { "name": "n-panic", "uid": "n", "resourceVersion": "1" }, "spec": {} });
        let job = json!({
            "metadata": { "name": "panic", "namespace": "team", "uid": "team-panic" }, "spec": { "image": "nginx:1" },
        });
        let written = Arc::new(Mutex::new(Vec::new()));
        let (writes, answers) = (Arc::clone(&written), [image.clone(), job.clone()]);
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let (path, patch) = (request.uri().path(), request.method() == http::Method::PATCH);
            let [image, job] = &answers;
            let (kind, answer) = match path {
                path if path.contains("/nodeimages/") => ("NodeImage", image),
                path if path.contains("/imagepulljobs/") => ("job", job),
                _ => ("other", job),
            };
            if patch {
                writes.lock().unwrap().push(kind);
            }
            let answer = Body::from(answer.to_string().into_bytes());
            std::future::ready(http::Response::builder().body(answer))
        });
        let mut ctx = Context::of(kube::Client::new(service, "default"));
        let image: NodeImage = serde_json::from_value(image).unwrap();
        let ready = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True" }] } });
        let node: Node = serde_json::from_value(ready).unwrap();
        ctx.stores = Stores {
            nodes: Mirror::of([(Key::cluster("n-panic"), NodeView::from(node))]),
            node_images: Mirror::of([(Key::cluster("n-panic"), NodeImageView::from(image))]),
            jobs: Mirror::of([(
                Key::namespaced("team", "panic"),
                serde_json::from_value(job).unwrap(),
            )]),
            ..Stores::empty()
        };
        (ctx, written)
    }

    /// Wherever the fan-out panics, it does so with pauses, and goes on with the same job when it panics no more.
    #[tokio::test(start_paused = true)]
    async fn a_panic_at_any_step_ends_nothing_and_is_tried_again() {
        let (node, status) = ("NodeImage", "job");
        for (object, goes_on) in [
            ("NodeImage n-panic", &[node, status][..]),
            ("ImagePullJob team/panic", &[node, status]),
            ("assignment to nodes", &[node, status]),
            ("writes to NodeImages", &[node, status]),
            ("status of jobs", &[status]),
            ("team/panic", &[node, status]),
            ("n-panic", &[node]),
            ("outcome of team/panic on n-panic", &[node]),
            ("outcome of the status of team/panic", &[status]),
        ] {
            let (ctx, written) = one_node();
            let (_secrets, none) = mpsc::unbounded_channel();
            let panics = panic_at(NAME, object);
            let begun = tokio::time::Instant::now();
            let work = tokio::spawn(fan_out(ctx, none));
            panics.happened(3).await;
            let paused = begun.elapsed();
            assert!(
                paused >= Duration::from_millis(500),
                "{object}: three times in {paused:?}"
            );
            drop(panics);
            written.lock().unwrap().clear();
            let all = || goes_on.iter().all(|kind| written.lock().unwrap().contains(kind));
            let gone_on = tokio::time::timeout(Duration::from_secs(300), async {
                while !all() {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            });
            let missing = || format!("{object}: {goes_on:?}, but {:?}", written.lock().unwrap());
            assert!(gone_on.await.is_ok(), "{}", missing());
            work.abort();
        }
    }
}

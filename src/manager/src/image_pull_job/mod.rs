//! Fans ImagePullJobs out to NodeImages.
//!
//! In:  ImagePullJobs, NodeImages, Nodes and Pods (watches), pull secrets (by name).
//! Out: entries in NodeImages, status of jobs, copies of pull secrets, events.
//!
//! [`plan::index`] records which job waits for what on which node; `act` writes to nodes, `report` writes statuses, and
//! `job_lifecycle` does what a job needs before and after: finalizer, pull secrets, deletion.

mod act;
mod job_lifecycle;
mod name;
mod observe;
pub mod plan;
mod report;
mod secrets;

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tokio::sync::mpsc;

use act::NodeImageWriter;
use job_lifecycle::ResolvedSecrets;
pub use job_lifecycle::release_deleted_jobs;
use name::NAME;
use observe::{WatchEvent, apply_event, apply_secrets, watch_events};
use plan::index::JobIndex;
use plan::job::Uid;
use plan::registry_limit::RegistryLimit;
use report::StatusWriter;

use super::Context;
use kruise_cluster::WatchEvents;
use kruise_cluster::clock::duration_until;
use kruise_ops::panics::catch_panic_sync;

/// Pause after a reconcile that panicked.
const RETRY: Duration = Duration::from_secs(5);

/// Runs until shutdown.
pub async fn run(ctx: Context) {
    ctx.stores.synced().await;
    let (secrets_tx, secrets_rx) = mpsc::unbounded_channel();
    let lifecycle = job_lifecycle::run(ctx.clone(), secrets_tx);
    let shutdown = ctx.shutdown.clone();
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = lifecycle => {}
        () = fan_out(ctx, secrets_rx) => {}
    }
}

/// Observes, assigns nodes, writes and reports; then waits for the next change.
async fn fan_out(ctx: Context, mut secrets_rx: mpsc::UnboundedReceiver<ResolvedSecrets>) {
    let delay = SignedDuration::try_from(ctx.options.nodeimage_creation_delay);
    let registry_limit = RegistryLimit::new(ctx.options.max_pulls_per_registry);
    let mut index = JobIndex::new(delay.unwrap_or(SignedDuration::MAX), registry_limit);
    let mut events = watch_events(&ctx.stores);
    let mut resolved = Vec::new();
    let mut writer = NodeImageWriter::new(&ctx);
    let mut reporter = StatusWriter::new(&ctx);
    let step = ctx.progress.begin_idle(NAME);
    loop {
        let now = ctx.cluster.clock.now();
        let result = catch_panic_sync(NAME, "assignment to nodes", || {
            assign_open_jobs(&mut index, now, |index, uid| {
                for node in index.assign(uid, now) {
                    writer.enqueue(&node, uid);
                }
            });
        })
        .and_then(|()| {
            catch_panic_sync(NAME, "writes to NodeImages", || {
                writer.start_writes(&mut index, now)
            })
        })
        .and_then(|()| catch_panic_sync(NAME, "status of jobs", || reporter.start_writes(&mut index, now)));
        let pause = if result.is_ok() {
            let wake = [
                index.next_requeue().map(|at| duration_until(at, now)),
                reporter.next_requeue(),
                writer.next_requeue(),
                (!resolved.is_empty()).then_some(RETRY),
            ];
            wake.into_iter().flatten().min()
        } else {
            // Due work stays due and new events are queued: without a pause both would be retried in a loop.
            step.set_idle(Some(RETRY));
            tokio::time::sleep(RETRY).await;
            Some(Duration::ZERO)
        };
        step.set_idle(pause);
        tokio::select! {
            biased;
            Some(done) = writer.next_finished() => writer.on_write_finished(&mut index, done),
            Some(done) = reporter.next_finished() => reporter.on_write_finished(&index, done),
            // Not `now`: the wait may have begun an hour ago.
            Some(event) = events.next() => {
                let now = ctx.cluster.clock.now();
                events.handle(event, |event| apply_event(&mut index, event, now));
            }
            Some(secrets) = secrets_rx.recv() => resolved.push(secrets),
            () = tokio::time::sleep(pause.unwrap_or(Duration::from_secs(3600))) => {}
        }
        // One reconcile acts on the newest state.
        let now = ctx.cluster.clock.now();
        apply_arrived(&mut index, &mut events, &mut secrets_rx, &mut resolved, now);
    }
}

/// Applies all that has arrived. `resolved` are pull secrets that are not applied yet; after a panic they stay there.
fn apply_arrived(
    index: &mut JobIndex,
    events: &mut WatchEvents<WatchEvent>,
    secrets_rx: &mut mpsc::UnboundedReceiver<ResolvedSecrets>,
    resolved: &mut Vec<ResolvedSecrets>,
    now: Timestamp,
) {
    // Their jobs have arrived before them, and come first: the index ignores secrets of a job that it does not know, and
    // they are not sent again.
    resolved.extend(std::iter::from_fn(|| secrets_rx.try_recv().ok()));
    events.drain(|event| apply_event(index, event, now));
    resolved.retain(|secrets| catch_panic_sync(NAME, secrets, || apply_secrets(index, secrets)).is_err());
}

/// Assigns nodes to each open job. A job that panics is delayed, and the others continue.
fn assign_open_jobs(index: &mut JobIndex, now: Timestamp, mut assign: impl FnMut(&mut JobIndex, &Uid)) {
    // Several rounds, because jobs take turns at a registry with a limit.
    loop {
        let jobs = index.take_assignable(now);
        if jobs.is_empty() {
            return;
        }
        for uid in jobs {
            let Some(job) = index.job(&uid) else { continue };
            if catch_panic_sync(NAME, &job.key, || assign(index, &uid)).is_err() {
                index.delay_job(&uid, now);
            }
        }
    }
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
    use kruise_api::node_image::{NodeImage, ReferenceObject};
    use kruise_cluster::{Change, Key, Store};
    use kruise_ops::logs::captured_lines;
    use kruise_ops::panics::injected::inject_panic;
    use plan::job::PullJob;

    #[test]
    fn panicking_job_waits_and_others_are_assigned() {
        let at = |seconds| Timestamp::from_second(seconds).unwrap();
        let upsert_job = |index: &mut JobIndex, name: &str| {
            let spec = ImagePullJobSpec {
                image: format!("{name}:1"),
                ..ImagePullJobSpec::default()
            };
            let mut object = ImagePullJob::new(name, spec);
            object.metadata.namespace = Some("team".to_owned());
            object.metadata.uid = Some(name.to_owned());
            index.upsert_job(PullJob::from_object(&object), at(0));
        };
        let mut index = JobIndex::new(SignedDuration::ZERO, RegistryLimit::default());
        index.update_node_image(
            "n",
            Some(Arc::new(NodeImageView::default())),
            Timestamp::UNIX_EPOCH,
        );
        upsert_job(&mut index, "a");
        upsert_job(&mut index, "z");
        let mut assign_at = |now, panics: bool| {
            // It waits in spite of changes.
            upsert_job(&mut index, "bad");
            let mut assigned = Vec::new();
            assign_open_jobs(&mut index, at(now), |index, uid| {
                assert!(!(panics && **uid == *"bad"), "index out of bounds");
                let nodes = index.assign(uid, at(now));
                assigned.extend(nodes.iter().map(|node| format!("{uid} on {node}")));
            });
            (assigned, index.next_requeue())
        };
        let lines = captured_lines(|| {
            let assigned = ["a on n", "z on n"].map(str::to_owned).to_vec();
            assert_eq!(assign_at(0, true), (assigned, Some(at(5))));
        });
        assert!(lines.iter().any(|line| line.contains("team/bad")), "{lines:?}");
        assert_eq!(assign_at(4, false).0, [] as [String; 0]);
        assert_eq!(assign_at(5, false).0, ["bad on n"]);
    }

    /// A busy controller finds both at the same time, in any order.
    #[tokio::test]
    async fn pull_secrets_that_arrive_with_their_job_are_used() {
        let spec = ImagePullJobSpec {
            image: "nginx:1".to_owned(),
            pull_secrets: vec!["s".to_owned()],
            ..ImagePullJobSpec::default()
        };
        let mut object = ImagePullJob::new("j", spec);
        object.metadata.namespace = Some("team".to_owned());
        object.metadata.uid = Some("j".to_owned());
        let (jobs_tx, jobs) = mpsc::unbounded_channel();
        let change = Change {
            key: Key::namespaced("team", "j"),
            old: None,
            new: Some(Arc::new(object)),
        };
        jobs_tx.send(change).unwrap();
        let mut events = WatchEvents::new(NAME).with(jobs, WatchEvent::Job);
        let (_secrets_tx, mut secrets_rx) = mpsc::unbounded_channel();
        let copy = ReferenceObject {
            namespace: "kdc".to_owned(),
            name: "s-1".to_owned(),
            mode: None,
        };
        let mut resolved = vec![ResolvedSecrets {
            uid: "j".into(),
            copies: Ok(vec![copy.clone()]),
        }];
        let mut index = JobIndex::new(SignedDuration::ZERO, RegistryLimit::default());
        let (now, image) = (Timestamp::UNIX_EPOCH, NodeImageView::default());
        index.update_node_image("n", Some(Arc::new(image)), now);
        apply_arrived(&mut index, &mut events, &mut secrets_rx, &mut resolved, now);
        let uid: Uid = "j".into();
        assert_eq!(index.secret_copies(&uid), [copy]);
        assert_eq!(index.assign(&uid, now).len(), 1);
        assert!(resolved.is_empty());
    }

    /// A cluster with one node and one job for it, and the names of the objects that are written.
    fn one_node_cluster() -> (Context, Arc<Mutex<Vec<&'static str>>>) {
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
        let mut ctx = Context::for_test(kube::Client::new(service, "default"));
        let image: NodeImage = serde_json::from_value(image).unwrap();
        let ready = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True" }] } });
        let node: Node = serde_json::from_value(ready).unwrap();
        ctx.stores = Stores {
            nodes: Store::from_objects([(Key::cluster_scoped("n-panic"), NodeView::from(node))]),
            node_images: Store::from_objects([(Key::cluster_scoped("n-panic"), NodeImageView::from(image))]),
            jobs: Store::from_objects([(
                Key::namespaced("team", "panic"),
                serde_json::from_value(job).unwrap(),
            )]),
            ..Stores::empty()
        };
        (ctx, written)
    }

    /// A panic at any step is retried with pauses, and the same job completes when the panics stop.
    #[tokio::test(start_paused = true)]
    async fn panics_at_any_step_are_retried() {
        let (node, status) = ("NodeImage", "job");
        for (object, retried) in [
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
            let (ctx, written) = one_node_cluster();
            let (_secrets, none) = mpsc::unbounded_channel();
            let panics = inject_panic(NAME, object);
            let started_at = tokio::time::Instant::now();
            let work = tokio::spawn(fan_out(ctx, none));
            panics.wait_for(3).await;
            let paused = started_at.elapsed();
            assert!(
                paused >= Duration::from_millis(500),
                "{object}: three times in {paused:?}"
            );
            drop(panics);
            written.lock().unwrap().clear();
            let all = || retried.iter().all(|kind| written.lock().unwrap().contains(kind));
            let finished = tokio::time::timeout(Duration::from_secs(300), async {
                while !all() {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            });
            let missing = || format!("{object}: {retried:?}, but {:?}", written.lock().unwrap());
            assert!(finished.await.is_ok(), "{}", missing());
            work.abort();
        }
    }
}

//! A standby replica and its own fake API server, in paused time.
#![allow(clippy::unwrap_used)]

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use futures::StreamExt;
use futures::stream;
use http::{Method, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame};
use kube::client::Body;
use serde_json::json;
use tokio::sync::watch;
use tower::service_fn;

use super::*;

fn lease(holder: &str, seconds: i32, version: &str) -> Lease {
    Lease {
        metadata: ObjectMeta {
            name: Some("one".to_owned()),
            resource_version: Some(version.to_owned()),
            ..ObjectMeta::default()
        },
        spec: Some(LeaseSpec {
            holder_identity: Some(holder.to_owned()),
            lease_duration_seconds: Some(seconds),
            // A holder whose clock is far in the past or future changes nothing.
            renew_time: Some(MicroTime(Timestamp::UNIX_EPOCH)),
            ..LeaseSpec::default()
        }),
    }
}

fn candidate(client: kube::Client) -> Election {
    Election {
        api: Api::namespaced(client, "default"),
        clock: Clock::new(),
        watches: Watches::default(),
        namespace: "default".to_owned(),
        name: "one".to_owned(),
        identity: "me".to_owned(),
        timing: LeaseTiming::default(),
        fence: Fence::closed(),
    }
}

/// A candidate that sends no requests.
fn idle_candidate() -> Election {
    let unused = |_: Request<Body>| std::future::pending::<Result<Response<Body>, Infallible>>();
    candidate(kube::Client::new(service_fn(unused), "default"))
}

#[tokio::test]
async fn lease_expiry_uses_the_local_clock_only() {
    let start = Instant::now();
    let available_at = |holder, seconds| {
        let lease = lease(holder, seconds, "1");
        idle_candidate().available_at(&ObservedLease {
            lease,
            observed_at: start,
        })
    };
    let second = Duration::from_secs(1);
    assert_eq!(available_at("other", 7), start + 7 * second);
    assert_eq!(
        available_at("other", -1),
        start + 15 * second,
        "the duration is ours"
    );
    assert!(available_at("other", i32::MAX) > start + 1_000_000 * second);
    assert_eq!(available_at("me", 7), start, "the holder itself need not wait");
    assert_eq!(available_at("", 7), start, "it has no holder");
}

#[test]
fn renewal_restarts_expiry_and_a_reread_does_not() {
    let start = Instant::now() - Duration::from_secs(60);
    let observed = ObservedLease {
        lease: lease("other", 15, "1"),
        observed_at: start,
    };
    let same = observe(Some(observed.clone()), lease("other", 15, "1"));
    assert_eq!(same.observed_at, start);
    let renewed = observe(Some(observed), lease("other", 15, "2"));
    assert!(renewed.observed_at > start);
}

/// The stored Lease, and whether watches report its changes.
#[derive(Clone)]
struct FakeApiServer {
    lease: Arc<Mutex<Lease>>,
    changed: watch::Sender<()>,
    watches: bool,
    /// Number of writes that are answered with 500.
    failing_writes: Arc<Mutex<u32>>,
    deleted: Arc<Mutex<bool>>,
}

impl FakeApiServer {
    fn new(watches: bool) -> Self {
        Self {
            lease: Arc::new(Mutex::new(lease("other", 15, "1"))),
            changed: watch::Sender::new(()),
            watches,
            failing_writes: Arc::default(),
            deleted: Arc::default(),
        }
    }

    fn set(&self, lease: Lease) {
        *self.lease.lock().unwrap() = lease;
        *self.deleted.lock().unwrap() = false;
        self.changed.send_replace(());
    }

    fn delete(&self) {
        *self.deleted.lock().unwrap() = true;
        self.changed.send_replace(());
    }

    fn now(&self) -> Lease {
        self.lease.lock().unwrap().clone()
    }

    fn client(&self) -> kube::Client {
        let server = self.clone();
        kube::Client::new(
            service_fn(move |request: Request<Body>| {
                let server = server.clone();
                async move { Ok::<_, Infallible>(server.answer(request).await) }
            }),
            "default",
        )
    }

    async fn answer(&self, request: Request<Body>) -> Response<UnsyncBoxBody<Bytes, Infallible>> {
        let respond = |text: String| Response::new(Full::from(text).boxed_unsync());
        let query = request.uri().query().unwrap_or_default().to_owned();
        if query.contains("watch=true") {
            let changes = stream::unfold(
                (self.clone(), self.changed.subscribe()),
                async |(server, mut changed)| {
                    changed.changed().await.ok()?;
                    // In the API server's format: the type first.
                    let deleted = *server.deleted.lock().unwrap();
                    let verb = if deleted { "DELETED" } else { "MODIFIED" };
                    let event = format!("{{\"type\":\"{verb}\",\"object\":{}}}\n", json!(server.now()));
                    let line = Frame::data(Bytes::from(event));
                    Some((Ok(line), (server, changed)))
                },
            );
            if !self.watches {
                return Response::new(StreamBody::new(stream::pending()).boxed_unsync());
            }
            return Response::new(StreamBody::new(changes.boxed()).boxed_unsync());
        }
        if request.method() == Method::GET
            && !query.contains("fieldSelector")
            && *self.deleted.lock().unwrap()
        {
            let mut answer = respond(r#"{"kind":"Status","code":404,"reason":"NotFound"}"#.to_owned());
            *answer.status_mut() = http::StatusCode::NOT_FOUND;
            return answer;
        }
        if [Method::PUT, Method::POST].contains(request.method()) {
            let fail = {
                let mut left = self.failing_writes.lock().unwrap();
                *left = left.saturating_sub(1);
                *left > 0
            };
            if fail {
                let mut answer = respond(r#"{"kind":"Status","code":500,"message":"etcd"}"#.to_owned());
                *answer.status_mut() = http::StatusCode::INTERNAL_SERVER_ERROR;
                return answer;
            }
            let body = request.into_body().collect().await.unwrap().to_bytes();
            self.set(serde_json::from_slice(&body).unwrap());
        }
        let lease = json!(self.now());
        if query.contains("fieldSelector") {
            let items = if *self.deleted.lock().unwrap() {
                json!([])
            } else {
                json!([lease])
            };
            let list = json!({ "apiVersion": "coordination.k8s.io/v1", "kind": "LeaseList",
                "metadata": { "resourceVersion": "1" }, "items": items });
            return respond(list.to_string());
        }
        respond(lease.to_string())
    }
}

/// Waits for a Lease whose holder renews it every 2 s and stops after `renewals`, with or without a release; returns
/// the time from the last renewal to our acquisition.
async fn time_to_acquire(server: &FakeApiServer, renewals: u32, released: bool) -> Duration {
    let election = candidate(server.client());
    let acquired = tokio::spawn(async move { election.acquire(|_| ()).await });
    let mut last = Instant::now();
    for nth in 2..2 + renewals {
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(!acquired.is_finished());
        server.set(lease("other", 15, &nth.to_string()));
        last = Instant::now();
    }
    if released {
        server.set(lease("", 1, "99"));
    }
    let held = tokio::time::timeout(Duration::from_secs(600), acquired);
    let held = held.await.unwrap().unwrap();
    assert_eq!(holder(&held.lease).unwrap(), "me");
    assert_eq!(holder(&server.now()).unwrap(), "me");
    last.elapsed()
}

#[tokio::test(start_paused = true)]
async fn released_lease_is_acquired_at_once() {
    let waited = time_to_acquire(&FakeApiServer::new(true), 20, true).await;
    assert!(waited < Duration::from_secs(1), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn unrenewed_lease_is_acquired_after_its_duration() {
    for watches in [true, false] {
        let waited = time_to_acquire(&FakeApiServer::new(watches), 20, false)
            .await
            .as_secs();
        // Without a watch the Lease is read when it seems expired, and its duration counts from there.
        let most = if watches { 15 } else { 30 };
        assert!((15..=most).contains(&waited), "{watches}: {waited} s");
    }
}

#[tokio::test(start_paused = true)]
async fn deleted_lease_is_left_to_its_last_holder() {
    let server = FakeApiServer::new(true);
    let election = candidate(server.client());
    let acquired = tokio::spawn(async move { election.acquire(|_| ()).await });
    tokio::time::sleep(Duration::from_secs(2)).await;
    // Not waited for, once it is gone.
    server.set(lease("other", 3600, "2"));
    let last = Instant::now();
    tokio::time::sleep(Duration::from_secs(1)).await;
    server.delete();
    acquired.await.unwrap();
    let waited = last.elapsed().as_secs();
    assert!((15..=18).contains(&waited), "{waited} s");
}

/// In real time: between two reads of a paused clock no time passes.
#[tokio::test]
async fn missing_lease_is_created_at_once() {
    let server = FakeApiServer::new(true);
    server.delete();
    let candidate = candidate(server.client());
    let held = tokio::time::timeout(Duration::from_secs(12), candidate.acquire(|_| {}));
    assert_eq!(holder(&held.await.unwrap().lease).unwrap(), "me");
}

#[tokio::test]
async fn a_renewal_mends_an_edited_duration() {
    let renewed = idle_candidate().renewed_lease(&lease("me", 1, "1"));
    assert_eq!(lease_duration(&renewed), Some(Duration::from_secs(15)));
}

#[tokio::test(start_paused = true)]
async fn failed_acquire_is_reported_once() {
    let forbid = |_: Request<Body>| async {
        let body = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403,
            "reason": "Forbidden", "message": "leases is forbidden: no quota" });
        let answer = Response::builder().status(403);
        Ok::<_, Infallible>(answer.body(Full::from(body.to_string())).unwrap())
    };
    let election = candidate(kube::Client::new(service_fn(forbid), "default"));
    let reports = Mutex::new(Vec::new());
    let on_standby = |standby: Standby<'_>| reports.lock().unwrap().push(format!("{standby:?}"));
    let tried = tokio::time::timeout(Duration::from_secs(20), election.acquire(on_standby));
    assert!(tried.await.is_err());
    let reports = reports.into_inner().unwrap();
    assert_eq!(reports.len(), 1, "one report per reason: {reports:?}");
    assert!(
        reports[0].contains("Failed") && reports[0].contains("no quota"),
        "{reports:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn standby_reports_each_leader_once() {
    let server = FakeApiServer::new(true);
    let election = candidate(server.client());
    let reports = Mutex::new(Vec::new());
    let on_standby = |standby: Standby<'_>| reports.lock().unwrap().push(format!("{standby:?}"));
    let competed = async {
        tokio::time::timeout(Duration::from_secs(600), election.acquire(on_standby))
            .await
            .unwrap()
    };
    let renewed = async {
        for (nth, holder) in ["other", "other", "third", "third"].iter().enumerate() {
            tokio::time::sleep(Duration::from_secs(2)).await;
            server.set(lease(holder, 15, &(nth + 2).to_string()));
        }
    };
    tokio::join!(competed, renewed);
    assert_eq!(
        reports.into_inner().unwrap(),
        [r#"Behind("other")"#, r#"Behind("third")"#]
    );
}

#[tokio::test(start_paused = true)]
async fn failed_acquire_is_retried_after_the_retry_period() {
    let server = FakeApiServer::new(true);
    // The last one is answered.
    *server.failing_writes.lock().unwrap() = 4;
    let start = Instant::now();
    candidate(server.client()).acquire(|_| {}).await;
    let waited = start.elapsed().as_secs();
    assert!(
        (21..=24).contains(&waited),
        "15 s of the Lease and three tries of 2 s: {waited} s"
    );
}

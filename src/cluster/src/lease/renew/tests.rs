//! A Lease that is held for a minute of paused time, with an API server that is slow or does not answer.
#![allow(clippy::unwrap_used)]

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use RequestFate::{After, Dropped, Lost as Unheard, ServerError};
use http::{Method, Request, Response};
use http_body_util::BodyExt;
use kube::client::Body;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use tower::service_fn;

use super::*;
use crate::lease::LeaseTiming;
use crate::{Clock, Fence};
use kruise_ops::Watches;
use kruise_ops::progress::Progress;

/// How the fake API server treats a request.
#[derive(Clone, Copy, Debug)]
enum RequestFate {
    /// It is executed at once, and answered after that many milliseconds.
    After(u64),
    /// It is executed, but the answer is lost.
    Lost,
    /// It never arrives.
    Dropped,
    /// It is answered with an error.
    ServerError,
}

/// The stored Lease, the fates of the requests in turn, and the number of requests.
struct FakeApiServer {
    lease: Lease,
    fates: &'static [RequestFate],
    requests: usize,
}

impl FakeApiServer {
    /// The answer to a request, and when it is sent.
    fn respond(&mut self, method: &Method, body: &[u8]) -> Option<(Response<Body>, Duration)> {
        let way = self.fates[self.requests % self.fates.len()];
        self.requests += 1;
        if matches!(way, Dropped) {
            return None;
        }
        if matches!(way, ServerError) {
            let broken = json!({ "kind": "Status", "code": 500, "message": "broken" });
            return Some((response(500, &broken), Duration::ZERO));
        }
        let answer = if method == Method::PUT {
            self.put(serde_json::from_slice(body).unwrap())
        } else {
            response(200, &json!(self.lease))
        };
        let After(ms) = way else { return None };
        Some((answer, Duration::from_millis(ms)))
    }

    /// Stores a Lease if its version is the stored one.
    fn put(&mut self, mut lease: Lease) -> Response<Body> {
        let version = self.lease.resource_version();
        if lease.resource_version() != version {
            let conflict =
                json!({ "kind": "Status", "code": 409, "reason": "Conflict", "message": "another" });
            return response(409, &conflict);
        }
        let version: u64 = version.unwrap().parse().unwrap();
        lease.metadata.resource_version = Some((version + 1).to_string());
        self.lease = lease;
        response(200, &json!(self.lease))
    }
}

fn response(code: u16, body: &Value) -> Response<Body> {
    let answer = Response::builder().status(code);
    answer.body(Body::from(body.to_string().into_bytes())).unwrap()
}

fn client(server: &Arc<Mutex<FakeApiServer>>) -> kube::Client {
    let server = Arc::clone(server);
    let service = service_fn(move |request: Request<Body>| {
        let server = Arc::clone(&server);
        async move {
            let method = request.method().clone();
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let answer = server.lock().unwrap().respond(&method, &body);
            let Some((answer, after)) = answer else {
                return std::future::pending().await;
            };
            tokio::time::sleep(after).await;
            Ok::<_, Infallible>(answer)
        }
    });
    kube::Client::new(service, "default")
}

/// How holding the Lease ended and after how long, its holder then, and the number of requests.
struct HoldResult {
    held: Result<(), LeaseLost>,
    after: Duration,
    holder: Option<String>,
    requests: usize,
    /// Whether writes are still possible.
    fence_open: bool,
}

/// Holds a Lease until it is lost, or released after a minute. A renewal may be in flight at that moment.
async fn hold_for_a_minute(fates: &'static [RequestFate]) -> HoldResult {
    let mut lease = Lease::default();
    lease.metadata.name = Some("one".to_owned());
    lease.metadata.resource_version = Some("1".to_owned());
    let server = Arc::new(Mutex::new(FakeApiServer {
        lease,
        fates,
        requests: 0,
    }));
    let election = Election {
        api: Api::namespaced(client(&server), "default"),
        clock: Clock::new(),
        watches: Watches::default(),
        namespace: "default".to_owned(),
        name: "one".to_owned(),
        identity: "me".to_owned(),
        timing: LeaseTiming::default(),
        fence: Fence::closed(),
    };
    let began = Instant::now();
    let ours = election.new_lease(Some(&server.lock().unwrap().lease));
    server.lock().unwrap().lease = ours.clone();
    let (held, end) = (election.record_renewal(ours, began), CancellationToken::new());
    let canceller = end.clone();
    tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(60)).await;
        canceller.cancel();
    });
    let step = Progress::default().begin_idle("leader election");
    let held = Box::pin(election.renew_until_shutdown(held, end, step)).await;
    let server = server.lock().unwrap();
    HoldResult {
        held,
        after: began.elapsed(),
        holder: holder(&server.lease).cloned(),
        requests: server.requests,
        fence_open: election.fence.is_open(),
    }
}

#[tokio::test(start_paused = true)]
async fn lease_is_held_despite_slow_answers_then_released() {
    // Every 2 s for a minute, and up to three requests to release it.
    let ways: [(&[RequestFate], usize); 8] = [
        (&[After(10)], 33),
        (&[After(1900)], 33),
        (&[After(4900)], 33),
        // A connection that breaks before or after the API server.
        (&[After(10), Dropped], 33),
        (&[After(10), Unheard, After(10), After(10)], 64),
        (&[After(4900), After(10)], 33),
        (&[ServerError, After(10)], 64),
        (&[ServerError, ServerError, ServerError, After(10)], 64),
    ];
    for (ways, most) in ways {
        let end = hold_for_a_minute(ways).await;
        assert!(end.held.is_ok(), "{ways:?}: {:?} after {:?}", end.held, end.after);
        assert!(!end.fence_open, "{ways:?}: written after it was released");
        // At the end only that much time is left, so a bad answer then is not retried.
        let answered = ways.iter().all(|way| matches!(way, After(..1000)));
        assert!(end.holder.is_none() || !answered, "{ways:?}: not released");
        assert!(end.requests <= most, "{ways:?}: asked {} times", end.requests);
    }
}

#[tokio::test(start_paused = true)]
async fn lease_is_lost_by_the_renew_deadline() {
    let ways: [(&[RequestFate], &str, u64); 5] = [
        (&[Dropped], "did not answer", 10),
        (&[Unheard], "did not answer", 10),
        (&[After(5100)], "did not answer", 10),
        (&[ServerError], "broken", 10),
        // Counted from when the renewal was sent, after 2 s, not from its answer.
        (&[After(1990), Dropped, Dropped, Dropped], "did not answer", 12),
    ];
    for (ways, why, seconds) in ways {
        let end = hold_for_a_minute(ways).await;
        let error = end.held.unwrap_err().to_string();
        assert!(error.contains(why), "{ways:?}: {error}");
        assert_eq!(end.after, Duration::from_secs(seconds), "{ways:?}");
        assert!(!end.fence_open, "{ways:?}");
        assert!(end.requests <= 5, "{ways:?}: asked {} times", end.requests);
    }
}

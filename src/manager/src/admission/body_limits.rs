//! Limits what reviews cost: the bytes and memory of all reviews in progress are bounded, and a client that sends
//! slowly or exceeds its quota gets an error that says so. No client address gets the whole quota, and permits return
//! only after the answer is sent. Requests to the API server on behalf of reviews use the same kind of quota.
//!
//! In:  requests of any client that reaches the port.
//! Out: the same requests with a complete body, or a rejection.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::connections::Caller;
use kruise_ops::metrics::metrics;

/// A request without permits after this time is rejected. API servers wait 5 s or more for our answers.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(2);
/// A body that is not complete after this time is rejected.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// The quota that all reviews of one type share. Permits are taken for bytes that have arrived, so a client takes none
/// with a large Content-Length.
#[derive(Clone)]
pub(super) struct BodyLimit {
    /// Bytes of bodies. The largest body may use the whole share of one client address.
    quota: Quota,
    memory_limit: Option<MemoryLimit>,
    acquire_timeout: Duration,
    read_timeout: Duration,
}

/// Limit of the memory that parsed bodies take.
#[derive(Clone)]
struct MemoryLimit {
    /// Bytes. One body may use the whole share of one client address.
    quota: Quota,
    estimate: fn(&[u8]) -> usize,
    /// The answer to a body for this path that takes more memory than one may, with the reason.
    refuse: fn(&str, &[u8], String) -> Response,
}

/// A quota with a share for each client address; clones refer to the same quota.
#[derive(Clone)]
pub(super) struct Quota {
    available: Arc<Semaphore>,
    total: usize,
    per_client: ClientQuotas,
}

/// A separate quota of the same size for each client address; clones refer to the same quotas.
#[derive(Clone)]
pub(super) struct ClientQuotas {
    size: usize,
    /// Only addresses that hold permits have an entry: the permits keep the `Weak` alive.
    available: Arc<Mutex<HashMap<IpAddr, Weak<Semaphore>>>>,
}

impl ClientQuotas {
    /// `size` is the quota of each client address.
    pub fn new(size: usize) -> Self {
        let left = Arc::default();
        Self {
            size,
            available: left,
        }
    }

    /// The quota of one client address.
    pub fn available_to(&self, address: IpAddr) -> Arc<Semaphore> {
        let mut all = self.available.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(left) = all.get(&address).and_then(Weak::upgrade) {
            return left;
        }
        let left = Arc::new(Semaphore::new(self.size));
        all.retain(|_, left| left.strong_count() > 0);
        all.insert(address, Arc::downgrade(&left));
        left
    }
}

impl Quota {
    /// A quota of `total`, of which each client address gets at most `per_client`.
    pub fn new(total: usize, per_client: usize) -> Self {
        Self {
            available: Arc::new(Semaphore::new(total)),
            total,
            per_client: ClientQuotas::new(per_client),
        }
    }

    /// Waits until `amount` is available, and takes it.
    pub async fn acquire(&self, address: IpAddr, amount: u32) -> Result<[QuotaPermit; 2], AcquireError> {
        // The client's share first: a client that waits for it takes nothing from others.
        let client_permit = self
            .per_client
            .available_to(address)
            .acquire_many_owned(amount)
            .await?;
        Ok([
            client_permit,
            Arc::clone(&self.available).acquire_many_owned(amount).await?,
        ])
    }
}

impl BodyLimit {
    /// A quota of `total` bytes; one body, and all bodies of one client address, take at most `max_body`.
    pub fn new(total: usize, max_body: usize) -> Self {
        Self {
            quota: Quota::new(total, max_body),
            memory_limit: None,
            acquire_timeout: ACQUIRE_TIMEOUT,
            read_timeout: READ_TIMEOUT,
        }
    }

    /// Limits the memory of parsed bodies as well: `max_body` bytes for one and `total` for all, as `weigh` estimates
    /// it. `refuse` answers a body that takes more than `max_body`.
    pub fn limit_memory(
        &mut self,
        max_body: usize,
        total: usize,
        weigh: fn(&[u8]) -> usize,
        refuse: fn(&str, &[u8], String) -> Response,
    ) {
        let bytes = Quota::new(total, max_body);
        self.memory_limit = Some(MemoryLimit {
            quota: bytes,
            estimate: weigh,
            refuse,
        });
    }

    /// Bytes that are available.
    #[cfg(test)]
    pub fn available(&self) -> usize {
        self.quota.available.available_permits()
    }

    /// Reads a body; takes permits from the client's share and from the total quota.
    async fn read_body(
        &self,
        address: IpAddr,
        mut body: Body,
    ) -> Result<(Vec<u8>, Vec<QuotaPermit>), (StatusCode, String)> {
        let (mut text, mut permits) = (Vec::new(), Vec::new());
        let (client_available, max_body) = (
            self.quota.per_client.available_to(address),
            self.quota.per_client.size,
        );
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|why| {
                let why = format!("the review did not arrive: {why}");
                (StatusCode::BAD_REQUEST, why)
            })?;
            let Ok(data) = frame.into_data() else { continue };
            if text.len() + data.len() > max_body {
                let why = format!("the review is too large: {max_body} bytes are the most");
                return Err((StatusCode::PAYLOAD_TOO_LARGE, why));
            }
            let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
            // The client's share first: a client that waits for it takes no permits from others.
            for (semaphore, limit, whose) in [
                (&client_available, max_body, " of this client"),
                (&self.quota.available, self.quota.total, ""),
            ] {
                let permit = timeout(
                    self.acquire_timeout,
                    Arc::clone(semaphore).acquire_many_owned(length),
                )
                .await;
                let Ok(Ok(permit)) = permit else {
                    let why = format!(
                        "reviews{whose} of {limit} bytes are being answered: there is no room for more"
                    );
                    return Err((StatusCode::TOO_MANY_REQUESTS, why));
                };
                merge_permit(&mut permits, permit);
            }
            text.extend_from_slice(&data);
        }
        Ok((text, permits))
    }

    /// Takes permits for `bytes` more from the client's share and from the total; none for 0 bytes.
    async fn acquire_more(
        &self,
        address: IpAddr,
        bytes: usize,
    ) -> Result<Option<Arc<[QuotaPermit; 2]>>, (StatusCode, String)> {
        if bytes == 0 {
            return Ok(None);
        }
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        match timeout(self.acquire_timeout, self.quota.acquire(address, bytes)).await {
            Ok(Ok(more)) => Ok(Some(Arc::new(more))),
            _ => {
                let why = format!(
                    "there is no room for the answer of {bytes} bytes beside those that are not read yet"
                );
                Err((StatusCode::TOO_MANY_REQUESTS, why))
            }
        }
    }
}

impl MemoryLimit {
    /// Takes permits for the memory of a parsed body from the client's share and from the total.
    async fn acquire(
        &self,
        address: IpAddr,
        text: &[u8],
        wait: Duration,
    ) -> Result<[QuotaPermit; 2], (StatusCode, String)> {
        let (bytes, max_bytes) = ((self.estimate)(text), self.quota.per_client.size);
        if bytes > max_bytes {
            let why = format!(
                "the review is too large: answering it takes {bytes} bytes of memory, {max_bytes} are the most"
            );
            return Err((StatusCode::PAYLOAD_TOO_LARGE, why));
        }
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let Ok(Ok(permits)) = timeout(wait, self.quota.acquire(address, bytes)).await else {
            let why = format!(
                "reviews that take {} bytes of memory are being answered: there is no room for more",
                self.quota.total
            );
            return Err((StatusCode::TOO_MANY_REQUESTS, why));
        };
        Ok(permits)
    }
}

/// An acquired part of a quota.
pub(super) type QuotaPermit = OwnedSemaphorePermit;

/// Merges a permit with one of the same semaphore.
fn merge_permit(permits: &mut Vec<QuotaPermit>, permit: QuotaPermit) {
    match permits
        .iter_mut()
        .find(|held| Arc::ptr_eq(held.semaphore(), permit.semaphore()))
    {
        Some(held) => held.merge(permit),
        None => permits.push(permit),
    }
}

/// Reads the body of a request within the limits, then calls the handler.
pub(super) async fn limit_body(State(limit): State<BodyLimit>, request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    let unknown_caller = || Caller::new(Ipv4Addr::UNSPECIFIED.into());
    let caller = parts.extensions.get_or_insert_with(unknown_caller).clone();
    let (text, mut permits) = match timeout(limit.read_timeout, limit.read_body(caller.network, body)).await {
        Ok(Ok(body_read)) => body_read,
        Ok(Err((code, why))) => return reject(code, why),
        Err(_) => {
            let why = format!("the review did not arrive in {:?}", limit.read_timeout);
            return reject(StatusCode::REQUEST_TIMEOUT, why);
        }
    };
    let mut refusal = None;
    if let Some(memory) = &limit.memory_limit {
        match memory.acquire(caller.network, &text, limit.acquire_timeout).await {
            Ok(more) => permits.extend(more),
            Err((StatusCode::PAYLOAD_TOO_LARGE, why)) => {
                refusal = Some((memory.refuse)(parts.uri.path(), &text, why));
            }
            Err((code, why)) => return reject(code, why),
        }
    }
    let body_permits = BodyPermits(Arc::new(permits));
    parts.extensions.insert(body_permits.clone());
    let length = text.len();
    let response = match refusal {
        Some(refusal) => refusal,
        None => next.run(Request::from_parts(parts, Body::from(text))).await,
    };
    if response.status().is_success() {
        caller.note_review();
    }
    // A short review may have a long answer, which stays in memory until its client reads it.
    let answer_length = usize::try_from(response.body().size_hint().lower()).unwrap_or(usize::MAX);
    let excess = answer_length.saturating_sub(length.saturating_mul(2));
    let response_permits = match limit.acquire_more(caller.network, excess).await {
        Ok(more) => (body_permits, more),
        Err((code, why)) => return reject(code, why),
    };
    response.map(|body| {
        Body::new(LimitedBody {
            body,
            permits: response_permits,
        })
    })
}

/// The permits of one review, returned when the last clone is dropped. Each request carries a clone for work that may
/// outlast the request.
#[derive(Clone)]
pub(super) struct BodyPermits(
    #[expect(dead_code, reason = "held until it is dropped")] Arc<Vec<QuotaPermit>>,
);

/// The permits of a review, and of the bytes by which its answer is longer.
type ResponsePermits = (BodyPermits, Option<Arc<[QuotaPermit; 2]>>);

/// An answer that keeps the permits of its review until all its bytes are sent or dropped.
struct LimitedBody {
    body: Body,
    permits: ResponsePermits,
}

/// Bytes of an answer. A connection drops the body when it has the last chunk, and the chunk when it is sent.
struct LimitedChunk {
    bytes: Bytes,
    _permits: ResponsePermits,
}

impl AsRef<[u8]> for LimitedChunk {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl HttpBody for LimitedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Self { body, permits: kept } = self.get_mut();
        let with_permits = |bytes| {
            let _kept = kept.clone();
            Bytes::from_owner(LimitedChunk {
                bytes,
                _permits: _kept,
            })
        };
        let frame = Pin::new(body).poll_frame(cx);
        frame.map_ok(|frame| frame.map_data(with_permits))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An error instead of an answer to the review.
pub(super) fn reject(code: StatusCode, why: String) -> Response {
    tracing::debug!(%code, why, "refused to read a review");
    // A review that found no room is one that an API server did not get answered.
    let result = if code == StatusCode::TOO_MANY_REQUESTS {
        "failed"
    } else {
        "refused"
    };
    let labels = [("kind", "other"), ("step", "read"), ("result", result)];
    let labels = labels.map(|(label, value)| (label, value.to_owned()));
    metrics().reviews.get_or_create(&labels).inc();
    let mut answer = (code, why).into_response();
    if code == StatusCode::TOO_MANY_REQUESTS {
        // API servers retry by themselves.
        answer.headers_mut().insert(RETRY_AFTER, 1.into());
    }
    answer
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use axum::body::to_bytes;
    use axum::middleware::from_fn_with_state;
    use axum::routing::post;
    use axum::{Extension, Router};
    use futures::{StreamExt, stream};
    use tokio::sync::mpsc;
    use tower::ServiceExt;

    use super::*;

    const SHORT_TIMEOUT: Duration = Duration::from_millis(200);

    /// Answers with the length of each body, once `proceed` allows it.
    fn router(limit: &BodyLimit, proceed: Arc<Semaphore>, arrived_tx: mpsc::UnboundedSender<()>) -> Router {
        let answer = move |text: String| {
            let (go, here) = (Arc::clone(&proceed), arrived_tx.clone());
            async move {
                here.send(()).unwrap();
                go.acquire().await.unwrap().forget();
                text.len().to_string()
            }
        };
        let router = Router::new().route("/", post(answer));
        router.layer(from_fn_with_state(limit.clone(), limit_body))
    }

    async fn send(router: Router, body: Body) -> (u16, String) {
        send_as(1, router, body).await
    }

    async fn send_as(client: u8, router: Router, body: Body) -> (u16, String) {
        let caller = Caller::new([10, 0, 0, client].into());
        let request = Request::post("/").extension(caller).body(body).unwrap();
        let answer = router.oneshot(request).await.unwrap();
        let code = answer.status().as_u16();
        assert_eq!(answer.headers().contains_key(RETRY_AFTER), code == 429);
        let text = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
        (code, String::from_utf8(text.into()).unwrap())
    }

    #[tokio::test]
    async fn bodies_over_the_limit_are_refused() {
        let mut room = BodyLimit::new(10, 8);
        room.acquire_timeout = SHORT_TIMEOUT;
        let (proceed, (tx, mut arrived)) = (Arc::new(Semaphore::new(0)), mpsc::unbounded_channel());
        let router = router(&room, Arc::clone(&proceed), tx);
        let parts = stream::iter(["abcd", "efg"].map(Ok::<_, std::io::Error>));
        let failed = || {
            let labels = [("kind", "other"), ("step", "read"), ("result", "failed")];
            let labels = labels.map(|(label, value)| (label, value.to_owned()));
            metrics().reviews.get_or_create_owned(&labels).get()
        };
        let failed_before = failed();
        let first = tokio::spawn(send(router.clone(), Body::from_stream(parts)));
        arrived.recv().await.unwrap();
        for (client, message) in [
            (1, "reviews of this client of 8 bytes are being"),
            (2, "reviews of 10 bytes are being"),
        ] {
            let (code, why) = send_as(client, router.clone(), Body::from("abcd")).await;
            assert_eq!((code, why.contains(message)), (429, true), "{why}");
        }
        assert!(failed() >= failed_before + 2, "the alert about reviews sees them");
        proceed.add_permits(3);
        // An empty body needs no permits.
        assert_eq!(send(router.clone(), Body::empty()).await, (200, "0".to_owned()));
        assert_eq!(first.await.unwrap(), (200, "7".to_owned()));
        assert_eq!(send(router, Body::from("abcd")).await, (200, "4".to_owned()));
    }

    #[tokio::test]
    async fn memory_has_its_own_limit() {
        let mut room = BodyLimit::new(100, 10);
        room.acquire_timeout = SHORT_TIMEOUT;
        let refuse = |_: &str, text: &[u8], why: String| {
            assert!(why.contains("takes 60 bytes of memory, 50 are the most"), "{why}");
            (StatusCode::IM_A_TEAPOT, text.to_owned()).into_response()
        };
        room.limit_memory(50, 60, |text| 10 * text.len(), refuse);
        let (here_tx, mut arrived) = mpsc::unbounded_channel();
        let proceed = Arc::new(Semaphore::new(0));
        let router = router(&room, Arc::clone(&proceed), here_tx);
        let answer = send(router.clone(), Body::from("123456")).await;
        assert_eq!(answer, (418, "123456".to_owned()));
        let first = tokio::spawn(send(router.clone(), Body::from("12345")));
        arrived.recv().await.unwrap();
        let (code, why) = send_as(2, router.clone(), Body::from("12")).await;
        assert_eq!((code, why.contains("60 bytes of memory")), (429, true), "{why}");
        proceed.add_permits(2);
        assert_eq!(first.await.unwrap().0, 200);
        assert_eq!(send_as(2, router, Body::from("12")).await.0, 200);
    }

    #[tokio::test]
    async fn oversized_and_slow_bodies_are_refused() {
        let mut room = BodyLimit::new(100, 10);
        room.read_timeout = SHORT_TIMEOUT;
        let (tx, _here) = mpsc::unbounded_channel();
        let router = router(&room, Arc::new(Semaphore::new(9)), tx);
        let some = || stream::iter([Ok("1234567")]);
        let broken = || stream::iter([Err(std::io::Error::other("cut off"))]);
        let cases = [
            (Body::from("12345678901"), 413, "10 bytes are the most"),
            (
                Body::from_stream(some().chain(some())),
                413,
                "10 bytes are the most",
            ),
            (Body::from_stream(some().chain(broken())), 400, "cut off"),
            (
                Body::from_stream(some().chain(stream::pending())),
                408,
                "did not arrive in 200ms",
            ),
            (Body::from("1234567890"), 200, "10"),
        ];
        for (body, expected, message) in cases {
            let (code, why) = send(router.clone(), body).await;
            assert_eq!((code, why.contains(message)), (expected, true), "{why}");
        }
        assert_eq!(room.available(), 100);
    }

    #[tokio::test]
    async fn permits_return_after_response_and_work() {
        let room = BodyLimit::new(10, 8);
        let (kept_tx, mut permits) = mpsc::unbounded_channel();
        let handler = async move |Extension(kept): Extension<BodyPermits>| {
            kept_tx.send(kept).unwrap();
            "answer"
        };
        let router = Router::new().route("/", post(handler));
        let router = router.layer(from_fn_with_state(room.clone(), limit_body));
        let request = Request::post("/").body(Body::from("abcd")).unwrap();
        let mut answer = router.oneshot(request).await.unwrap().into_body();
        assert_eq!((room.available(), answer.size_hint().exact()), (6, Some(6)));
        drop(permits.recv().await.unwrap());
        let part = answer.frame().await.unwrap().unwrap().into_data().unwrap();
        drop(answer);
        assert_eq!(room.available(), 6, "the answer is not sent yet");
        drop(part);
        assert_eq!(room.available(), 10);
    }

    /// A client that reads none of its answers gets no second share of bodies or memory.
    #[tokio::test]
    async fn client_share_returns_when_answers_are_sent() {
        let room = |largest, memory| {
            let mut room = BodyLimit::new(100, largest);
            room.acquire_timeout = SHORT_TIMEOUT;
            room.limit_memory(memory, 100, <[u8]>::len, |_, _, why| why.into_response());
            room
        };
        for (room, whose) in [(room(4, 50), "reviews of this client"), (room(50, 4), "memory")] {
            let router = Router::new().route("/", post(async || "answer"));
            let router = router.layer(from_fn_with_state(room, limit_body));
            let send_review = async |client: u8| {
                let caller = Caller::new([10, 0, 0, client].into());
                let request = Request::post("/").extension(caller).body(Body::from("abcd"));
                router.clone().oneshot(request.unwrap()).await.unwrap()
            };
            let unread = send_review(1).await;
            assert_eq!(send_review(2).await.status(), 200);
            let refused = send_review(1).await;
            assert_eq!(refused.status(), 429);
            let why = to_bytes(refused.into_body(), usize::MAX).await.unwrap();
            let why = String::from_utf8_lossy(&why);
            assert!(why.contains(whose), "{why}");
            drop(unread);
            assert_eq!(send_review(1).await.status(), 200);
        }
    }

    #[tokio::test]
    async fn unread_responses_are_bounded() {
        let mut room = BodyLimit::new(100, 50);
        room.acquire_timeout = SHORT_TIMEOUT;
        let router = Router::new().route("/", post(async || "x".repeat(42)));
        let router = router.layer(from_fn_with_state(room.clone(), limit_body));
        let send_review = async |client: u8| {
            let caller = Caller::new([10, 0, 0, client].into());
            let request = Request::post("/").extension(caller).body(Body::from("a"));
            router.clone().oneshot(request.unwrap()).await.unwrap()
        };
        let unread = [send_review(1).await, send_review(2).await];
        assert_eq!(room.available(), 100 - 2 * 41);
        assert_eq!(
            [send_review(1).await.status(), send_review(3).await.status()],
            [429, 429]
        );
        drop(unread);
        assert_eq!(room.available(), 100);
        assert_eq!(send_review(1).await.status(), 200);
    }
}

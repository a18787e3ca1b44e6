//! Room for the texts of reviews: all that are being read or answered at a time are bounded, and whoever sends slowly, or
//! more than that, gets an answer that says so. No address gets all the room, and none comes back before the answer is
//! sent. What reviews make us ask of the API server is bounded in the same way.
//!
//! In:  requests of anybody who reaches the port.
//! Out: the same with their text complete, or a refusal.

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

/// What there is no room for by then is refused. API servers wait for our answers for 5 s and more.
const WAIT: Duration = Duration::from_secs(2);
/// A text that is not complete by then is given up.
const READ: Duration = Duration::from_secs(10);

/// The room that reviews of one sort share. It is taken for what has arrived, so nobody holds it by saying that more
/// will come.
#[derive(Clone)]
pub(super) struct Room {
    /// Bytes of texts. The largest text may have the share of one address.
    texts: Quota,
    memory: Option<Memory>,
    wait: Duration,
    read: Duration,
}

/// The room for what texts are read into.
#[derive(Clone)]
struct Memory {
    /// Bytes. One text may take the share of one address.
    bytes: Quota,
    weigh: fn(&[u8]) -> usize,
}

/// A quota of which each address has a share; clones are the same quota.
#[derive(Clone)]
pub(super) struct Quota {
    left: Arc<Semaphore>,
    all: usize,
    shares: Shares,
}

/// So much of something for each address; clones are the same shares.
#[derive(Clone)]
pub(super) struct Shares {
    each: usize,
    /// What is left to each address that holds some. What it holds keeps its share alive.
    left: Arc<Mutex<HashMap<IpAddr, Weak<Semaphore>>>>,
}

impl Shares {
    /// So much for each address.
    pub fn of(each: usize) -> Self {
        let left = Arc::default();
        Self { each, left }
    }

    /// What is left to an address.
    pub fn left(&self, address: IpAddr) -> Arc<Semaphore> {
        let mut all = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(left) = all.get(&address).and_then(Weak::upgrade) {
            return left;
        }
        let left = Arc::new(Semaphore::new(self.each));
        all.retain(|_, left| left.strong_count() > 0);
        all.insert(address, Arc::downgrade(&left));
        left
    }
}

impl Quota {
    /// So much in all, and of it so much for each address.
    pub fn new(all: usize, share: usize) -> Self {
        Self {
            left: Arc::new(Semaphore::new(all)),
            all,
            shares: Shares::of(share),
        }
    }

    /// Takes some of it, as soon as that is left.
    pub async fn take(&self, address: IpAddr, some: u32) -> Result<[Held; 2], AcquireError> {
        // The own share first: who waits for it takes nothing from others.
        let own = self.shares.left(address).acquire_many_owned(some).await?;
        Ok([own, Arc::clone(&self.left).acquire_many_owned(some).await?])
    }
}

impl Room {
    /// Room for so many bytes, of which one text, and all texts of one address, have `largest` at most.
    pub fn new(bytes: usize, largest: usize) -> Self {
        Self {
            texts: Quota::new(bytes, largest),
            memory: None,
            wait: WAIT,
            read: READ,
        }
    }

    /// Bounds what texts are read into, too: to `most` bytes for one and to `all`, as `weigh` says.
    pub fn weigh(&mut self, most: usize, all: usize, weigh: fn(&[u8]) -> usize) {
        let bytes = Quota::new(all, most);
        self.memory = Some(Memory { bytes, weigh });
    }

    /// Bytes that are left.
    #[cfg(test)]
    pub fn left(&self) -> usize {
        self.texts.left.available_permits()
    }

    /// Reads a text, and holds the room that it takes of the address's share and of all.
    async fn hold(
        &self,
        address: IpAddr,
        mut body: Body,
    ) -> Result<(Vec<u8>, Vec<Held>), (StatusCode, String)> {
        let (mut text, mut held) = (Vec::new(), Vec::new());
        let (share, largest) = (self.texts.shares.left(address), self.texts.shares.each);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|why| {
                let why = format!("the review did not arrive: {why}");
                (StatusCode::BAD_REQUEST, why)
            })?;
            let Ok(data) = frame.into_data() else { continue };
            if text.len() + data.len() > largest {
                let why = format!("the review is too large: {largest} bytes are the most");
                return Err((StatusCode::PAYLOAD_TOO_LARGE, why));
            }
            let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
            // The own share first: who waits for it takes no room from others.
            for (room, bytes, whose) in [
                (&share, largest, " of this client"),
                (&self.texts.left, self.texts.all, ""),
            ] {
                let more = timeout(self.wait, Arc::clone(room).acquire_many_owned(length)).await;
                let Ok(Ok(more)) = more else {
                    let why = format!(
                        "reviews{whose} of {bytes} bytes are being answered: there is no room for more"
                    );
                    return Err((StatusCode::TOO_MANY_REQUESTS, why));
                };
                keep(&mut held, more);
            }
            text.extend_from_slice(&data);
        }
        if let Some(memory) = &self.memory {
            held.extend(memory.hold(address, &text, self.wait).await?);
        }
        Ok((text, held))
    }

    /// Holds so many bytes more of an address's share and of all, if any.
    async fn more(
        &self,
        address: IpAddr,
        bytes: usize,
    ) -> Result<Option<Arc<[Held; 2]>>, (StatusCode, String)> {
        if bytes == 0 {
            return Ok(None);
        }
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        match timeout(self.wait, self.texts.take(address, bytes)).await {
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

impl Memory {
    /// Holds the room that a text takes when it is read, of the address's share and of all.
    async fn hold(
        &self,
        address: IpAddr,
        text: &[u8],
        wait: Duration,
    ) -> Result<[Held; 2], (StatusCode, String)> {
        let (bytes, most) = ((self.weigh)(text), self.bytes.shares.each);
        if bytes > most {
            let why = format!(
                "the review is too large: answering it takes {bytes} bytes of memory, {most} are the most"
            );
            return Err((StatusCode::PAYLOAD_TOO_LARGE, why));
        }
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let Ok(Ok(held)) = timeout(wait, self.bytes.take(address, bytes)).await else {
            let why = format!(
                "reviews that take {} bytes of memory are being answered: there is no room for more",
                self.bytes.all
            );
            return Err((StatusCode::TOO_MANY_REQUESTS, why));
        };
        Ok(held)
    }
}

/// Part of a quota that is held.
pub(super) type Held = OwnedSemaphorePermit;

/// Adds to what is held of the same room.
fn keep(held: &mut Vec<Held>, more: Held) {
    match held
        .iter_mut()
        .find(|held| Arc::ptr_eq(held.semaphore(), more.semaphore()))
    {
        Some(held) => held.merge(more),
        None => held.push(more),
    }
}

/// Reads the text of a request, and has it answered.
pub(super) async fn held(State(room): State<Room>, request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    let unknown = || Caller::new(Ipv4Addr::UNSPECIFIED.into());
    let caller = parts.extensions.get_or_insert_with(unknown).clone();
    let (text, held) = match timeout(room.read, room.hold(caller.address, body)).await {
        Ok(Ok(read)) => read,
        Ok(Err((code, why))) => return refused(code, why),
        Err(_) => {
            let why = format!("the review did not arrive in {:?}", room.read);
            return refused(StatusCode::REQUEST_TIMEOUT, why);
        }
    };
    let kept = Kept(Arc::new(held));
    parts.extensions.insert(kept.clone());
    let length = text.len();
    let response = next.run(Request::from_parts(parts, Body::from(text))).await;
    if response.status().is_success() {
        caller.note_review();
    }
    // A short review may ask for a long answer, which waits until its caller reads it.
    let answer = usize::try_from(response.body().size_hint().lower()).unwrap_or(usize::MAX);
    let beyond = answer.saturating_sub(length.saturating_mul(2));
    let kept = match room.more(caller.address, beyond).await {
        Ok(more) => (kept, more),
        Err((code, why)) => return refused(code, why),
    };
    response.map(|body| Body::new(Answer { body, kept }))
}

/// The room of one review, which comes back when the last clone is dropped. Requests carry one for work that may outlast
/// them.
#[derive(Clone)]
pub(super) struct Kept(#[expect(dead_code, reason = "held until it is dropped")] Arc<Vec<Held>>);

/// The room of a review, and of what its answer is longer.
type Sending = (Kept, Option<Arc<[Held; 2]>>);

/// An answer, which keeps the room of its review until all its bytes have been sent or dropped.
struct Answer {
    body: Body,
    kept: Sending,
}

/// Bytes of an answer. A connection drops the body when it has the last of them, and these when they are sent.
struct Part {
    bytes: Bytes,
    _kept: Sending,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Self { body, kept } = self.get_mut();
        let keeping = |bytes| {
            let _kept = kept.clone();
            Bytes::from_owner(Part { bytes, _kept })
        };
        let frame = Pin::new(body).poll_frame(cx);
        frame.map_ok(|frame| frame.map_data(keeping))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

fn refused(code: StatusCode, why: String) -> Response {
    tracing::debug!(%code, why, "refused to read a review");
    let labels = [("kind", "other"), ("step", "read"), ("result", "refused")];
    let labels = labels.map(|(label, value)| (label, value.to_owned()));
    metrics().reviews.get_or_create(&labels).inc();
    let mut answer = (code, why).into_response();
    if code == StatusCode::TOO_MANY_REQUESTS {
        // API servers try again by themselves then.
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

    const SOON: Duration = Duration::from_millis(200);

    /// Says how long a text was, once it may.
    fn router(room: &Room, go: Arc<Semaphore>, here: mpsc::UnboundedSender<()>) -> Router {
        let answer = move |text: String| {
            let (go, here) = (Arc::clone(&go), here.clone());
            async move {
                here.send(()).unwrap();
                go.acquire().await.unwrap().forget();
                text.len().to_string()
            }
        };
        let router = Router::new().route("/", post(answer));
        router.layer(from_fn_with_state(room.clone(), held))
    }

    async fn answer(router: Router, body: Body) -> (u16, String) {
        answer_to(1, router, body).await
    }

    async fn answer_to(client: u8, router: Router, body: Body) -> (u16, String) {
        let caller = Caller::new([10, 0, 0, client].into());
        let request = Request::post("/").extension(caller).body(body).unwrap();
        let answer = router.oneshot(request).await.unwrap();
        let code = answer.status().as_u16();
        assert_eq!(answer.headers().contains_key(RETRY_AFTER), code == 429);
        let text = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
        (code, String::from_utf8(text.into()).unwrap())
    }

    #[tokio::test]
    async fn what_there_is_no_room_for_is_refused_and_room_comes_back() {
        let mut room = Room::new(10, 8);
        room.wait = SOON;
        let (go, (tx, mut here)) = (Arc::new(Semaphore::new(0)), mpsc::unbounded_channel());
        let router = router(&room, Arc::clone(&go), tx);
        let parts = stream::iter(["abcd", "efg"].map(Ok::<_, std::io::Error>));
        let first = tokio::spawn(answer(router.clone(), Body::from_stream(parts)));
        here.recv().await.unwrap();
        for (client, words) in [
            (1, "reviews of this client of 8 bytes are being"),
            (2, "reviews of 10 bytes are being"),
        ] {
            let (code, why) = answer_to(client, router.clone(), Body::from("abcd")).await;
            assert_eq!((code, why.contains(words)), (429, true), "{why}");
        }
        go.add_permits(3);
        // What takes no room needs none.
        assert_eq!(answer(router.clone(), Body::empty()).await, (200, "0".to_owned()));
        assert_eq!(first.await.unwrap(), (200, "7".to_owned()));
        assert_eq!(answer(router, Body::from("abcd")).await, (200, "4".to_owned()));
    }

    #[tokio::test]
    async fn what_texts_are_read_into_has_a_bound_of_its_own() {
        let mut room = Room::new(100, 10);
        room.wait = SOON;
        room.weigh(50, 60, |text| 10 * text.len());
        let (here_tx, mut here) = mpsc::unbounded_channel();
        let go = Arc::new(Semaphore::new(0));
        let router = router(&room, Arc::clone(&go), here_tx);
        let (code, why) = answer(router.clone(), Body::from("123456")).await;
        assert_eq!(
            (code, why.contains("takes 60 bytes of memory, 50 are the most")),
            (413, true),
            "{why}"
        );
        let first = tokio::spawn(answer(router.clone(), Body::from("12345")));
        here.recv().await.unwrap();
        let (code, why) = answer_to(2, router.clone(), Body::from("12")).await;
        assert_eq!((code, why.contains("60 bytes of memory")), (429, true), "{why}");
        go.add_permits(2);
        assert_eq!(first.await.unwrap().0, 200);
        assert_eq!(answer_to(2, router, Body::from("12")).await.0, 200);
    }

    #[tokio::test]
    async fn what_is_too_long_or_does_not_come_is_refused() {
        let mut room = Room::new(100, 10);
        room.read = SOON;
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
        for (body, want, words) in cases {
            let (code, why) = answer(router.clone(), body).await;
            assert_eq!((code, why.contains(words)), (want, true), "{why}");
        }
        assert_eq!(room.left(), 100);
    }

    #[tokio::test]
    async fn room_comes_back_when_the_answer_is_sent_and_the_work_has_ended() {
        let room = Room::new(10, 8);
        let (kept_tx, mut kept) = mpsc::unbounded_channel();
        let keep = async move |Extension(kept): Extension<Kept>| {
            kept_tx.send(kept).unwrap();
            "answer"
        };
        let router = Router::new().route("/", post(keep));
        let router = router.layer(from_fn_with_state(room.clone(), held));
        let request = Request::post("/").body(Body::from("abcd")).unwrap();
        let mut answer = router.oneshot(request).await.unwrap().into_body();
        assert_eq!((room.left(), answer.size_hint().exact()), (6, Some(6)));
        drop(kept.recv().await.unwrap());
        let part = answer.frame().await.unwrap().unwrap().into_data().unwrap();
        drop(answer);
        assert_eq!(room.left(), 6, "it is not sent yet");
        drop(part);
        assert_eq!(room.left(), 10);
    }

    /// An address that reads none of its answers gets no second share meanwhile, of texts or of memory.
    #[tokio::test]
    async fn the_share_of_an_address_comes_back_when_its_answers_are_sent() {
        let room = |largest, memory| {
            let mut room = Room::new(100, largest);
            room.wait = SOON;
            room.weigh(memory, 100, <[u8]>::len);
            room
        };
        for (room, whose) in [(room(4, 50), "reviews of this client"), (room(50, 4), "memory")] {
            let router = Router::new().route("/", post(async || "answer"));
            let router = router.layer(from_fn_with_state(room, held));
            let ask = async |client: u8| {
                let caller = Caller::new([10, 0, 0, client].into());
                let request = Request::post("/").extension(caller).body(Body::from("abcd"));
                router.clone().oneshot(request.unwrap()).await.unwrap()
            };
            let unread = ask(1).await;
            assert_eq!(ask(2).await.status(), 200);
            let refused = ask(1).await;
            assert_eq!(refused.status(), 429);
            let why = to_bytes(refused.into_body(), usize::MAX).await.unwrap();
            let why = String::from_utf8_lossy(&why);
            assert!(why.contains(whose), "{why}");
            drop(unread);
            assert_eq!(ask(1).await.status(), 200);
        }
    }

    #[tokio::test]
    async fn answers_that_nobody_reads_are_bounded_however_short_their_reviews_are() {
        let mut room = Room::new(100, 50);
        room.wait = SOON;
        let router = Router::new().route("/", post(async || "x".repeat(42)));
        let router = router.layer(from_fn_with_state(room.clone(), held));
        let ask = async |client: u8| {
            let caller = Caller::new([10, 0, 0, client].into());
            let request = Request::post("/").extension(caller).body(Body::from("a"));
            router.clone().oneshot(request.unwrap()).await.unwrap()
        };
        let unread = [ask(1).await, ask(2).await];
        assert_eq!(room.left(), 100 - 2 * 41);
        assert_eq!([ask(1).await.status(), ask(3).await.status()], [429, 429]);
        drop(unread);
        assert_eq!(room.left(), 100);
        assert_eq!(ask(1).await.status(), 200);
    }
}

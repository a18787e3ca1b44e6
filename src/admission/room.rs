//! Room for the texts of reviews: all that are being read or answered at a time fit into the memory of the manager, and
//! whoever sends slowly, or more than that, gets an answer that says so.
//!
//! In:  requests of anybody who reaches the port.
//! Out: the same with their text complete, or a refusal.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_LENGTH;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Bytes of all texts at a time. Read, they take some five times as much.
const ROOM: u32 = 64 << 20;
/// What there is no room for by then is refused; an API server that asks waits for some 10 s itself.
const WAIT: Duration = Duration::from_secs(5);
/// A text that is not complete by then is given up.
const READ: Duration = Duration::from_secs(10);

/// The room that all share, and what is asked of these reviews.
#[derive(Clone)]
pub(super) struct Room {
    left: Arc<Semaphore>,
    /// The largest text, in bytes.
    largest: u32,
    wait: Duration,
    read: Duration,
}

impl Room {
    /// All the room there is.
    pub fn new() -> Self {
        Self {
            left: Arc::new(Semaphore::new(ROOM as usize)),
            largest: ROOM,
            wait: WAIT,
            read: READ,
        }
    }

    /// The same room, for texts of so many bytes at most.
    pub fn of_at_most(&self, largest: u32) -> Self {
        Self {
            largest: largest.min(ROOM),
            ..self.clone()
        }
    }
}

/// Reads the text of a request, and has it answered.
pub(super) async fn held(State(room): State<Room>, request: Request, next: Next) -> Response {
    let said = request.headers().get(CONTENT_LENGTH);
    let said = said.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    // Without a length it may be as long as any.
    let length = said.unwrap_or(room.largest.into());
    let Some(length) = u32::try_from(length)
        .ok()
        .filter(|length| *length <= room.largest)
    else {
        let why = format!(
            "a review of {length} bytes is too large: {} is the most",
            room.largest
        );
        return refused(StatusCode::PAYLOAD_TOO_LARGE, why);
    };
    let Ok(Ok(_held)) = timeout(room.wait, room.left.acquire_many(length)).await else {
        let why = format!("reviews of {ROOM} bytes are being answered: there is no room for {length} more");
        return refused(StatusCode::TOO_MANY_REQUESTS, why);
    };
    let (parts, body) = request.into_parts();
    let text = match timeout(room.read, to_bytes(body, length as usize)).await {
        Ok(Ok(text)) => text,
        Ok(Err(why)) => {
            let why = format!("the review did not arrive: {why}");
            return refused(StatusCode::BAD_REQUEST, why);
        }
        Err(_) => {
            let why = format!("the review did not arrive in {:?}", room.read);
            return refused(StatusCode::REQUEST_TIMEOUT, why);
        }
    };
    next.run(Request::from_parts(parts, Body::from(text))).await
}

fn refused(code: StatusCode, why: String) -> Response {
    tracing::warn!(%code, why, "refused to read a review");
    (code, why).into_response()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use axum::Router;
    use axum::middleware::from_fn_with_state;
    use axum::routing::post;
    use futures::stream;
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

    async fn answer(router: Router, length: Option<u64>, body: Body) -> (u16, String) {
        let mut request = Request::post("/");
        if let Some(length) = length {
            request = request.header(CONTENT_LENGTH, length);
        }
        let answer = router.oneshot(request.body(body).unwrap()).await.unwrap();
        let code = answer.status().as_u16();
        let text = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
        (code, String::from_utf8(text.into()).unwrap())
    }

    #[tokio::test]
    async fn what_there_is_no_room_for_is_refused_and_room_comes_back() {
        let mut room = Room::new();
        room.wait = SOON;
        let (go, (tx, mut here)) = (Arc::new(Semaphore::new(0)), mpsc::unbounded_channel());
        let router = router(&room, Arc::clone(&go), tx);
        // Nobody says how long it is.
        let first = tokio::spawn(answer(router.clone(), None, Body::from("abc")));
        here.recv().await.unwrap();
        let (code, why) = answer(router.clone(), Some(4), Body::from("abcd")).await;
        assert_eq!((code, why.contains("no room for 4 more")), (429, true), "{why}");
        go.add_permits(2);
        assert_eq!(first.await.unwrap(), (200, "3".to_owned()));
        assert_eq!(
            answer(router, Some(4), Body::from("abcd")).await,
            (200, "4".to_owned())
        );
    }

    #[tokio::test]
    async fn what_is_too_long_or_does_not_come_is_refused() {
        let mut room = Room::new().of_at_most(10);
        room.read = SOON;
        let (tx, _here) = mpsc::unbounded_channel();
        let router = router(&room, Arc::new(Semaphore::new(9)), tx);
        let cases = [
            (Some(11), Body::empty(), 413, "11 bytes is too large: 10"),
            (Some(u64::MAX), Body::empty(), 413, "too large"),
            (None, Body::from("12345678901"), 400, "did not arrive"),
            (
                Some(5),
                Body::from_stream(stream::pending::<Result<String, std::io::Error>>()),
                408,
                "did not arrive in 200ms",
            ),
            (Some(10), Body::from("1234567890"), 200, "10"),
        ];
        for (length, body, want, words) in cases {
            let (code, why) = answer(router.clone(), length, body).await;
            assert_eq!((code, why.contains(words)), (want, true), "{length:?}: {why}");
        }
        assert_eq!(room.left.available_permits(), ROOM as usize);
    }
}

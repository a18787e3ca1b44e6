//! What watches bring, as it comes: later, noted, or not at all.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use http_body_util::{BodyExt, BodyStream, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use tokio::time::Instant;

use super::{Body, BoxError, NetworkFault, ProxyState};

/// News of Pods is this late, so that what is decided without it shows.
const WATCH_DELAY: Duration = Duration::from_millis(150);
/// So many parts of it are under way at a time.
const MAX_IN_FLIGHT: usize = 1000;

/// What a watch of these objects brings, or the answer to anything else.
pub fn watch_body(state: Arc<ProxyState>, resource: &str, body: Incoming) -> Body {
    match resource {
        "pods" => delayed_body(state, body),
        "clonesets" => observed_body(state, body),
        _ => body.map_err(BoxError::from).boxed_unsync(),
    }
}

/// The body as it comes, each part of it a little later, but for what is lost.
fn delayed_body(state: Arc<ProxyState>, body: Incoming) -> Body {
    let parts = BodyStream::new(body).scan(Vec::new(), move |buffer, part| {
        let complete = part.map(|part| {
            buffer.extend_from_slice(part.data_ref().map_or(&[], |news| news));
            Frame::data(deliverable_lines(&state, buffer))
        });
        ready(Some(complete))
    });
    let late = parts.map(|part| {
        let due = Instant::now() + WATCH_DELAY;
        tokio::time::sleep_until(due).map(|()| part.map_err(BoxError::from))
    });
    BodyExt::boxed_unsync(StreamBody::new(late.buffered(MAX_IN_FLIGHT)))
}

/// Takes the complete lines, each of which is about one object; those that are not lost.
fn deliverable_lines(state: &ProxyState, buffer: &mut Vec<u8>) -> Bytes {
    let end = buffer
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |at| at + 1);
    let complete: Vec<u8> = buffer.drain(..end).collect();
    let rules = state.rules.lock().unwrap();
    let dropped = rules.iter().filter(|rule| rule.what == "watch pods");
    let dropped: Vec<String> = dropped
        .map(|rule| format!(r#""namespace":"{}""#, rule.namespace))
        .collect();
    let lines = complete.split_inclusive(|byte| *byte == b'\n');
    let delivered = lines.filter(|line| {
        let line = String::from_utf8_lossy(line);
        !dropped.iter().any(|namespace| line.contains(namespace))
    });
    delivered.flatten().copied().collect()
}

/// The body as it comes, of which note is taken.
fn observed_body(state: Arc<ProxyState>, body: Incoming) -> Body {
    let noted = body.map_frame(move |part| {
        record_markers(&state, part.data_ref().map_or(&[], |news| news));
        part
    });
    noted.map_err(BoxError::from).boxed_unsync()
}

/// Takes note of news that somebody waits for.
fn record_markers(state: &ProxyState, news: &[u8]) {
    let news = String::from_utf8_lossy(news);
    for rule in state.rules.lock().unwrap().iter() {
        if let NetworkFault::HoldUntil(marker) = rule.fault
            && news.contains(marker)
        {
            state.seen_markers.send_modify(|markers| markers.push(marker));
        }
    }
}

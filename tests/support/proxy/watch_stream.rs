//! Watch streams: delayed, observed or dropped.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use http_body_util::{BodyExt, BodyStream, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use tokio::time::Instant;

use super::{Body, BoxError, NetworkFault, ProxyState};

/// Delay of Pod events, so that decisions on stale data show.
const WATCH_DELAY: Duration = Duration::from_millis(150);
/// Delayed chunks in flight.
const MAX_IN_FLIGHT: usize = 1000;

/// Body of a watch of these objects, or of any other response.
pub fn watch_body(state: Arc<ProxyState>, resource: &str, body: Incoming) -> Body {
    match resource {
        "pods" => delayed_body(state, body),
        "clonesets" | "sidecarsets" => observed_body(state, body),
        _ => body.map_err(BoxError::from).boxed_unsync(),
    }
}

/// The body, each chunk delayed, without the dropped events.
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

/// Takes the complete lines, one object each; returns those that are not dropped.
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

/// The body unchanged; its content is recorded.
fn observed_body(state: Arc<ProxyState>, body: Incoming) -> Body {
    let noted = body.map_frame(move |part| {
        record_markers(&state, part.data_ref().map_or(&[], |news| news));
        part
    });
    noted.map_err(BoxError::from).boxed_unsync()
}

/// Records the markers that a request waits for.
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

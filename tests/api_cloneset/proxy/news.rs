//! What watches bring, as it comes: later, noted, or not at all.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use http_body_util::{BodyExt, BodyStream, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use tokio::time::Instant;

use super::{Body, Fault, Loss, Shared};

/// News of Pods is this late, so that what is decided without it shows.
const LATE: Duration = Duration::from_millis(150);
/// So many parts of it are under way at a time.
const AHEAD: usize = 1000;

/// What a watch of these objects brings, or the answer to anything else.
pub fn told(shared: Arc<Shared>, watched: &str, body: Incoming) -> Body {
    match watched {
        "pods" => slowly(shared, body),
        "clonesets" => noted(shared, body),
        _ => body.map_err(Fault::from).boxed_unsync(),
    }
}

/// The body as it comes, each part of it a little later, but for what is lost.
fn slowly(shared: Arc<Shared>, body: Incoming) -> Body {
    let parts = BodyStream::new(body).scan(Vec::new(), move |rest, part| {
        let whole = part.map(|part| {
            rest.extend_from_slice(part.data_ref().map_or(&[], |news| news));
            Frame::data(heard(&shared, rest))
        });
        ready(Some(whole))
    });
    let late = parts.map(|part| {
        let due = Instant::now() + LATE;
        tokio::time::sleep_until(due).map(|()| part.map_err(Fault::from))
    });
    BodyExt::boxed_unsync(StreamBody::new(late.buffered(AHEAD)))
}

/// Takes the complete lines, each of which is about one object; those that are not lost.
fn heard(shared: &Shared, rest: &mut Vec<u8>) -> Bytes {
    let end = rest
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |at| at + 1);
    let whole: Vec<u8> = rest.drain(..end).collect();
    let rules = shared.rules.lock().unwrap();
    let lost = rules.iter().filter(|rule| rule.what == "watch pods");
    let lost: Vec<String> = lost
        .map(|rule| format!(r#""namespace":"{}""#, rule.namespace))
        .collect();
    let lines = whole.split_inclusive(|byte| *byte == b'\n');
    let heard = lines.filter(|line| {
        let line = String::from_utf8_lossy(line);
        !lost.iter().any(|namespace| line.contains(namespace))
    });
    heard.flatten().copied().collect()
}

/// The body as it comes, of which note is taken.
fn noted(shared: Arc<Shared>, body: Incoming) -> Body {
    let noted = body.map_frame(move |part| {
        note(&shared, part.data_ref().map_or(&[], |news| news));
        part
    });
    noted.map_err(Fault::from).boxed_unsync()
}

/// Takes note of news that somebody waits for.
fn note(shared: &Shared, news: &[u8]) {
    let news = String::from_utf8_lossy(news);
    for rule in shared.rules.lock().unwrap().iter() {
        if let Loss::Until(words) = rule.loss
            && news.contains(words)
        {
            shared.told.send_modify(|told| told.push(words));
        }
    }
}

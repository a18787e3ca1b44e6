//! A span: what was done, from when to when, and how it ended.

use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::context::SpanContext;
use crate::metrics::metrics;

/// Where this process sends its spans, if it does.
pub(super) static TRACER: OnceLock<Tracer> = OnceLock::new();

#[derive(Debug)]
pub(super) struct Tracer {
    pub(super) spans: mpsc::Sender<FinishedSpan>,
    pub(super) rate_per_million: u32,
}

/// Bytes of an attribute's text or of an error, at most.
const MAX_TEXT: usize = 1024;

/// OTLP's `SpanKind` of an operation within a process, and of a call to another one.
const KIND_INTERNAL: u8 = 1;
const KIND_CLIENT: u8 = 3;
/// OTLP's `StatusCode` of a failure.
const STATUS_ERROR: u8 = 2;

/// A span in progress. It is sent when it ends, or is dropped.
#[derive(Debug, Default)]
pub struct Span(Option<Box<Active>>);

/// A span in the form of OTLP's JSON.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct FinishedSpan(pub(super) Value);

#[derive(Debug)]
struct Active {
    name: &'static str,
    context: SpanContext,
    /// Zero for the root of a trace.
    parent: u64,
    kind: u8,
    start: SystemTime,
    attributes: Vec<Value>,
    error: Option<String>,
}

impl Span {
    /// Begins a span of the trace of the object with this UID. Without a collector it does nothing, as all spans.
    #[must_use]
    pub fn of_trace(name: &'static str, uid: &str) -> Self {
        Self::begin(name, KIND_INTERNAL, sampled(uid))
    }

    /// Begins a span that is a call to another process, below `parent` if that is sent.
    #[must_use]
    pub fn of_call(name: &'static str, parent: Option<SpanContext>) -> Self {
        Self::begin(name, KIND_CLIENT, parent)
    }

    fn begin(name: &'static str, kind: u8, parent: Option<SpanContext>) -> Self {
        Self(parent.map(|parent| {
            Box::new(Active {
                name,
                context: SpanContext {
                    trace: parent.trace,
                    span: random_id(),
                },
                parent: parent.span,
                kind,
                start: SystemTime::now(),
                attributes: Vec::new(),
                error: None,
            })
        }))
    }

    /// The root of an object's trace, which began at its creation.
    #[must_use]
    pub fn of_object(name: &'static str, uid: &str, created: SystemTime) -> Self {
        Self(sampled(uid).map(|context| {
            Box::new(Active {
                name,
                context,
                parent: 0,
                kind: KIND_INTERNAL,
                start: created,
                attributes: Vec::new(),
                error: None,
            })
        }))
    }

    /// Adds an attribute.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: &str) -> Self {
        if let Some(active) = &mut self.0 {
            active
                .attributes
                .push(json!({ "key": key, "value": { "stringValue": shortened(value) } }));
        }
        self
    }

    /// Adds an attribute that is a number.
    #[must_use]
    pub fn with_number(mut self, key: &'static str, value: i64) -> Self {
        if let Some(active) = &mut self.0 {
            // OTLP has 64-bit integers as text.
            active
                .attributes
                .push(json!({ "key": key, "value": { "intValue": value.to_string() } }));
        }
        self
    }

    /// Marks it as failed.
    pub fn fail(&mut self, why: &str) {
        if let Some(active) = &mut self.0 {
            active.error = Some(shortened(why).to_owned());
        }
    }

    /// The context for what it calls, if it is sent.
    #[must_use]
    pub fn context(&self) -> Option<SpanContext> {
        self.0.as_ref().map(|active| active.context)
    }

    /// Ends it.
    pub fn end(self) {
        drop(self);
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let (Some(active), Some(tracer)) = (self.0.take(), TRACER.get()) else {
            return;
        };
        if tracer.spans.try_send(active.finish(SystemTime::now())).is_err() {
            count("dropped", 1);
        }
    }
}

impl Active {
    fn finish(self, end: SystemTime) -> FinishedSpan {
        let mut span = json!({
            "traceId": format!("{:032x}", self.context.trace),
            "spanId": format!("{:016x}", self.context.span),
            "name": self.name,
            "kind": self.kind,
            "startTimeUnixNano": nanoseconds(self.start),
            "endTimeUnixNano": nanoseconds(end.max(self.start)),
            "attributes": self.attributes,
        });
        if let Some(fields) = span.as_object_mut() {
            if self.parent != 0 {
                fields.insert("parentSpanId".to_owned(), json!(format!("{:016x}", self.parent)));
            }
            if let Some(error) = self.error {
                fields.insert(
                    "status".to_owned(),
                    json!({ "code": STATUS_ERROR, "message": error }),
                );
            }
        }
        FinishedSpan(span)
    }
}

/// The context of an object, if its trace is sent.
fn sampled(uid: &str) -> Option<SpanContext> {
    let tracer = TRACER.get()?;
    SpanContext::of_object(uid).filter(|context| context.is_sampled(tracer.rate_per_million))
}

/// A random number, not zero.
fn random_id() -> u64 {
    RandomState::new().hash_one(0).max(1)
}

/// OTLP has 64-bit integers as text.
fn nanoseconds(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_nanos().to_string()
}

fn shortened(text: &str) -> &str {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default()
}

/// Counts spans by what became of them.
pub(super) fn count(result: &'static str, spans: usize) {
    let spans = u64::try_from(spans).unwrap_or(u64::MAX);
    metrics()
        .trace_spans
        .get_or_create(&[("result", result.to_owned())])
        .inc_by(spans);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::*;

    fn active(parent: u64, error: Option<&str>) -> Active {
        Active {
            name: "pull image",
            context: SpanContext { trace: 10, span: 11 },
            parent,
            kind: KIND_CLIENT,
            start: UNIX_EPOCH + Duration::from_nanos(1_700_000_000_000_000_001),
            attributes: Vec::new(),
            error: error.map(str::to_owned),
        }
    }

    #[test]
    fn span_is_in_the_format_of_otlp() {
        let end = UNIX_EPOCH + Duration::from_secs(1_700_000_001);
        let FinishedSpan(span) = active(12, Some("no space")).finish(end);
        let expected = json!({
            "traceId": "0000000000000000000000000000000a", "spanId": "000000000000000b",
            "parentSpanId": "000000000000000c", "name": "pull image", "kind": 3,
            "startTimeUnixNano": "1700000000000000001", "endTimeUnixNano": "1700000001000000000",
            "attributes": [], "status": { "code": 2, "message": "no space" },
        });
        assert_eq!(span, expected);
    }

    #[test]
    fn root_has_no_parent_and_never_ends_before_its_start() {
        let FinishedSpan(span) = active(0, None).finish(UNIX_EPOCH);
        assert_eq!(span["parentSpanId"], Value::Null);
        assert_eq!(span["status"], Value::Null);
        assert_eq!(span["endTimeUnixNano"], span["startTimeUnixNano"]);
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(shortened("é"), "é");
        let cut = shortened(&"é".repeat(MAX_TEXT)).len();
        assert_eq!(cut, MAX_TEXT);
        assert_eq!(
            shortened(&format!("a{}", "é".repeat(MAX_TEXT))).len(),
            MAX_TEXT - 1
        );
    }
}

//! OpenTelemetry traces, off by default: one trace for an object, whose UID is the trace's ID.
//!
//! In:  spans that begin and end anywhere in the process, and a collector's address.
//! Out: OTLP over HTTP as JSON, in batches, by one task; what the collector does not take is dropped and counted.
//!
//! Own code rather than the crates of OpenTelemetry: see `docs/decisions/0032-traces.md`.

mod export;
mod span;

use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;

use clap::Args;
use hyper::Uri;
use tokio::sync::mpsc;

use crate::supervise::Supervisor;
use export::Exporter;
use span::FinishedSpan;
pub use span::Span;

/// Spans that wait for the collector, at most. A span is some hundred bytes.
const MAX_WAITING_SPANS: usize = 8192;

/// Where this process sends its spans, if it does.
static TRACER: OnceLock<Tracer> = OnceLock::new();

/// Flags for traces.
#[derive(Args, Clone, Debug)]
pub struct TraceOptions {
    /// Send OpenTelemetry traces to this collector, as OTLP over HTTP (http://HOST:4318); without it there are none
    #[arg(long = "tracing-endpoint", value_name = "URL", value_parser = parse_endpoint)]
    pub endpoint: Option<Endpoint>,
    /// Traces of a million that are sent; the same objects are chosen everywhere
    #[arg(
        long = "tracing-sampling-rate-per-million",
        default_value_t = MILLION,
        value_parser = clap::value_parser!(u32).range(0..=i64::from(MILLION)),
        value_name = "NUMBER"
    )]
    pub rate_per_million: u32,
}

const MILLION: u32 = 1_000_000;

impl Default for TraceOptions {
    fn default() -> Self {
        Self {
            endpoint: None,
            rate_per_million: MILLION,
        }
    }
}

/// The collector's URL for traces; `None` if the flag is empty.
pub type Endpoint = Option<Uri>;

/// The address of a collector, to which OpenTelemetry's own rules add the path.
fn parse_endpoint(text: &str) -> Result<Endpoint, String> {
    if text.is_empty() {
        return Ok(None);
    }
    let uri: Uri = text.parse().map_err(|why| format!("no URL: {why}"))?;
    if uri.scheme_str() != Some("http") {
        return Err("only http:// is supported: use a collector on the node or in the cluster".to_owned());
    }
    if uri.host().is_none_or(str::is_empty) || uri.query().is_some() {
        return Err("expected http://HOST:PORT".to_owned());
    }
    let text = format!("{}/v1/traces", text.trim_end_matches('/'));
    text.parse().map(Some).map_err(|why| format!("no URL: {why}"))
}

#[derive(Debug)]
struct Tracer {
    spans: mpsc::Sender<FinishedSpan>,
    rate_per_million: u32,
}

/// Starts to send traces of this program, if the options name a collector. A second call does nothing.
pub fn start(supervisor: &mut Supervisor, options: &TraceOptions, service: &str, instance: &str) {
    let Some(endpoint) = options.endpoint.clone().flatten() else {
        return;
    };
    let (spans, finished) = mpsc::channel(MAX_WAITING_SPANS);
    let tracer = Tracer {
        spans,
        rate_per_million: options.rate_per_million,
    };
    if TRACER.set(tracer).is_err() {
        return;
    }
    tracing::info!(collector = %endpoint, rate_per_million = options.rate_per_million, "sending traces");
    let exporter = Exporter::new(endpoint, service, instance, finished);
    let sending = exporter.run(supervisor.shutdown.clone());
    supervisor.spawn("traces", async move {
        sending.await;
        Ok::<_, String>(())
    });
}

/// A span as others see it: its trace, and its place there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanContext {
    trace: u128,
    span: u64,
}

impl SpanContext {
    /// The span of an object's whole life. All processes compute the same from its UID, so none must pass it on.
    #[must_use]
    pub fn of_object(uid: &str) -> Option<Self> {
        let trace = parse_uuid(uid)?;
        // The halves of a random UUID; zero would be invalid.
        let halves =
            [trace >> 64, trace & u128::from(u64::MAX)].map(|half| u64::try_from(half).unwrap_or_default());
        let [high, low] = halves;
        Some(Self {
            trace,
            span: (high ^ low).max(1),
        })
    }

    /// The context for a call, as W3C defines its header `traceparent`.
    #[must_use]
    pub fn traceparent(&self) -> String {
        format!("00-{:032x}-{:016x}-01", self.trace, self.span)
    }

    /// Whether the trace is one of those that are sent: by its last 56 bits, as OpenTelemetry samples.
    fn is_sampled(&self, rate_per_million: u32) -> bool {
        let random = self.trace & ((1 << 56) - 1);
        random * u128::from(MILLION) < u128::from(rate_per_million) << 56
    }
}

fn parse_uuid(uid: &str) -> Option<u128> {
    let lengths = uid.split('-').map(str::len);
    if !lengths.eq([8, 4, 4, 4, 12]) {
        return None;
    }
    let digits = uid.replace('-', "");
    if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    u128::from_str_radix(&digits, 16).ok().filter(|trace| *trace != 0)
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const UID: &str = "3fa1b2c4-0000-4abc-8def-0123456789ab";

    #[test]
    fn trace_is_the_uid_of_the_object() {
        let context = SpanContext::of_object(UID).unwrap();
        let expected = format!(
            "00-3fa1b2c400004abc8def0123456789ab-{:016x}-01",
            0x3fa1_b2c4_0000_4abc_u64 ^ 0x8def_0123_4567_89ab
        );
        assert_eq!(context.traceparent(), expected);
        for uid in [
            "",
            "uid-1",
            "00000000-0000-0000-0000-000000000000",
            "3fa1b2c4-0000-4abc-8def-0123456789ag",
            "3fa1b2c4-0000-4abc-8def-+123456789a",
            "3fa1b2c400004abc8def0123456789ab",
            "é3fa1b2-0000-4abc-8def-0123456789ab",
        ] {
            assert_eq!(SpanContext::of_object(uid), None, "{uid}");
        }
    }

    #[test]
    fn sampling_chooses_by_the_trace_alone() {
        let context = |low: u128| SpanContext {
            trace: (7 << 64) | low,
            span: 1,
        };
        let half = 1 << 55;
        for (trace, rate, sampled) in [
            (0, 0, false),
            (0, 1, true),
            (half - 1, 500_000, true),
            (half, 500_000, false),
            ((1 << 56) - 1, MILLION, true),
            ((1 << 56) - 1, MILLION - 1, false),
        ] {
            assert_eq!(context(trace).is_sampled(rate), sampled, "{trace} {rate}");
        }
    }

    #[test]
    fn endpoint_is_a_plain_address_with_a_path_added() {
        let parsed = |text| parse_endpoint(text).map(|uri| uri.map(|uri| uri.to_string()));
        assert_eq!(parsed(""), Ok(None));
        for text in ["http://10.0.0.1:4318", "http://10.0.0.1:4318/"] {
            assert_eq!(parsed(text).unwrap().unwrap(), "http://10.0.0.1:4318/v1/traces");
        }
        assert_eq!(
            parsed("http://c/otlp").unwrap().unwrap(),
            "http://c/otlp/v1/traces"
        );
        for text in [
            "https://c:4318",
            "c:4318",
            "http://",
            "grpc://c",
            "http://c?x=1",
            " ",
        ] {
            assert!(parsed(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn without_a_collector_a_span_is_nothing() {
        let span = Span::of_trace("pull image", UID);
        assert_eq!(span.context(), None);
        span.end();
    }
}

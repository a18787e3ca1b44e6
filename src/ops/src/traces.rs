//! OpenTelemetry traces, off by default: one trace for an object, whose UID is the trace's ID.
//!
//! In:  spans that begin and end anywhere in the process, and a collector's address.
//! Out: OTLP over HTTP as JSON, in batches, by one task; what the collector does not take is dropped and counted.
//!
//! Own code rather than the crates of OpenTelemetry: see `docs/decisions/0032-traces.md`.

mod context;
mod export;
mod span;

use clap::Args;
use hyper::Uri;
use tokio::sync::mpsc;

use crate::supervise::Supervisor;
use context::MILLION;
pub use context::SpanContext;
use export::Exporter;
pub use span::Span;
use span::{TRACER, Tracer};

/// Spans that wait for the collector, at most. A span is some hundred bytes.
const MAX_WAITING_SPANS: usize = 8192;

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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const UID: &str = "3fa1b2c4-0000-4abc-8def-0123456789ab";

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

//! Sends finished spans to the collector.

use std::time::Duration;

use hyper::client::conn::http1;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Request, Uri};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::span::{FinishedSpan, count};
use crate::{COMMIT, VERSION};

/// Spans of one request, at most.
const MAX_BATCH: usize = 512;
/// How long the first span of a batch waits for others, as in OpenTelemetry's SDKs.
const BATCH_DELAY: Duration = Duration::from_secs(5);
/// Timeout of a request, as in OpenTelemetry's SDKs.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of a request from the shutdown on: the process has two seconds in total.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(500);
/// Port of a URL without one.
const DEFAULT_PORT: u16 = 80;

/// Sends what ends in this process.
#[derive(Debug)]
pub(super) struct Exporter {
    endpoint: Uri,
    resource: Value,
    finished: mpsc::Receiver<FinishedSpan>,
    /// What the next request contains.
    batch: Vec<FinishedSpan>,
}

impl Exporter {
    pub(super) fn new(
        endpoint: Uri,
        service: &str,
        instance: &str,
        finished: mpsc::Receiver<FinishedSpan>,
    ) -> Self {
        let attributes = [
            ("service.name", service),
            ("service.version", VERSION),
            ("service.instance.id", instance),
            ("vcs.ref.head.revision", COMMIT),
        ];
        let attributes =
            attributes.map(|(key, value)| json!({ "key": key, "value": { "stringValue": value } }));
        Self {
            endpoint,
            resource: json!({ "attributes": attributes }),
            finished,
            batch: Vec::new(),
        }
    }

    /// Sends batches until shutdown. What the collector does not take is dropped: traces are no record.
    pub(super) async fn run(mut self, shutdown: CancellationToken) {
        let mut failing = false;
        loop {
            let waited = shutdown.run_until_cancelled(self.wait_for_batch()).await;
            while let Some(failed) = self.send_batch(&shutdown, failing).await {
                failing = failed;
                // At shutdown, the rest as well, as long as the collector takes it.
                if waited.is_some() || failed {
                    break;
                }
            }
            if waited.is_none() {
                return;
            }
        }
    }

    /// Waits until there is a span, and then for others, unless there are enough.
    async fn wait_for_batch(&mut self) {
        match self.finished.recv().await {
            Some(span) => self.batch.push(span),
            // Not while the process may send spans.
            None => std::future::pending().await,
        }
        if self.finished.len() < MAX_BATCH {
            sleep(BATCH_DELAY).await;
        }
    }

    /// Sends what waits, as one request; returns whether that failed, and nothing if nothing waits.
    async fn send_batch(&mut self, shutdown: &CancellationToken, was_failing: bool) -> Option<bool> {
        while self.batch.len() < MAX_BATCH
            && let Ok(span) = self.finished.try_recv()
        {
            self.batch.push(span);
        }
        let spans: Vec<Value> = std::mem::take(&mut self.batch)
            .into_iter()
            .map(|FinishedSpan(span)| span)
            .collect();
        if spans.is_empty() {
            return None;
        }
        let number = spans.len();
        let sent = tokio::select! {
            sent = send(&self.endpoint, self.request(spans)) => sent,
            limit = request_timeout(shutdown) => Err(format!("no answer within {limit:?}")),
        };
        count(if sent.is_ok() { "sent" } else { "dropped" }, number);
        let collector = &self.endpoint;
        match &sent {
            Ok(()) if was_failing => tracing::info!(%collector, "the collector takes traces again"),
            Err(why) if !was_failing => {
                tracing::warn!(%collector, why, "cannot send traces; they are dropped");
            }
            _ => {}
        }
        Some(sent.is_err())
    }

    /// The body of a request.
    fn request(&self, spans: Vec<Value>) -> String {
        json!({ "resourceSpans": [{
            "resource": self.resource,
            "scopeSpans": [{ "scope": { "name": "kruise-rs", "version": VERSION }, "spans": spans }],
        }] })
        .to_string()
    }
}

/// Returns when a request has had its time, with that time.
async fn request_timeout(shutdown: &CancellationToken) -> Duration {
    let shutdown_timeout = async {
        shutdown.cancelled().await;
        sleep(SHUTDOWN_TIMEOUT).await;
    };
    tokio::select! {
        () = sleep(REQUEST_TIMEOUT) => REQUEST_TIMEOUT,
        () = shutdown_timeout => SHUTDOWN_TIMEOUT,
    }
}

/// Sends a request on a connection of its own: there are seconds between two.
async fn send(endpoint: &Uri, body: String) -> Result<(), String> {
    let authority = endpoint.authority().ok_or("the URL has no host")?;
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    let stream = TcpStream::connect((host, authority.port_u16().unwrap_or(DEFAULT_PORT)))
        .await
        .map_err(|why| why.to_string())?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|why| why.to_string())?;
    let request = Request::post(endpoint.path())
        .header(HOST, authority.as_str())
        .header(CONTENT_TYPE, "application/json")
        .body(body)
        .map_err(|why| why.to_string())?;
    let response = async {
        let response = sender
            .send_request(request)
            .await
            .map_err(|why| why.to_string())?;
        match response.status() {
            status if status.is_success() => Ok(()),
            status => Err(format!("HTTP status {status}")),
        }
    };
    tokio::pin!(response);
    tokio::select! {
        result = &mut response => result,
        ended = connection => {
            ended.map_err(|why| why.to_string())?;
            // What it has read before its end.
            response.await
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    fn exporter(endpoint: &str) -> (mpsc::Sender<FinishedSpan>, Exporter) {
        let (spans, finished) = mpsc::channel(10_000);
        let endpoint = endpoint.parse().unwrap();
        (spans, Exporter::new(endpoint, "kruise-daemon", "n1", finished))
    }

    /// Reads a request, and answers it.
    async fn serve_one(listener: &TcpListener, answer: &str) -> (String, Value) {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut received = Vec::new();
        loop {
            stream.read_buf(&mut received).await.unwrap();
            let text = String::from_utf8(received.clone()).unwrap();
            let Some((head, body)) = text.split_once("\r\n\r\n") else {
                continue;
            };
            if let Ok(body) = serde_json::from_str(body) {
                stream.write_all(answer.as_bytes()).await.unwrap();
                return (head.to_ascii_lowercase(), body);
            }
        }
    }

    const ACCEPTED: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
    const REFUSED: &str = "HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n";

    #[tokio::test]
    async fn spans_are_sent_in_one_request() {
        crate::metrics::init(crate::metrics::Program::Daemon);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (spans, exporter) = exporter(&format!("http://{address}/v1/traces"));
        for name in ["a", "b"] {
            spans.try_send(FinishedSpan(json!({ "name": name }))).unwrap();
        }
        let shutdown = CancellationToken::new();
        let running = tokio::spawn(exporter.run(shutdown.clone()));
        // The rest of a batch is not waited for then.
        shutdown.cancel();
        let (head, body) = serve_one(&listener, ACCEPTED).await;
        running.await.unwrap();
        assert!(head.starts_with("post /v1/traces http/1.1"), "{head}");
        assert!(head.contains("content-type: application/json"), "{head}");
        assert!(head.contains(&format!("host: {address}")), "{head}");
        let resource = &body["resourceSpans"][0];
        assert_eq!(
            resource["scopeSpans"][0]["spans"],
            json!([{ "name": "a" }, { "name": "b" }])
        );
        let name = json!({ "key": "service.name", "value": { "stringValue": "kruise-daemon" } });
        assert_eq!(resource["resource"]["attributes"][0], name);
    }

    #[tokio::test(start_paused = true)]
    async fn silent_collector_does_not_delay_the_shutdown() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (spans, exporter) = exporter(&format!("http://{address}/v1/traces"));
        spans.try_send(FinishedSpan(json!({ "name": "a" }))).unwrap();
        let shutdown = CancellationToken::new();
        let running = tokio::spawn(exporter.run(shutdown.clone()));
        // The request has begun.
        sleep(BATCH_DELAY + Duration::from_secs(1)).await;
        shutdown.cancel();
        let start = tokio::time::Instant::now();
        running.await.unwrap();
        assert!(start.elapsed() <= 2 * SHUTDOWN_TIMEOUT, "{:?}", start.elapsed());
    }

    #[tokio::test]
    async fn refused_and_unreachable_are_errors() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint: Uri = format!("http://{}/v1/traces", listener.local_addr().unwrap())
            .parse()
            .unwrap();
        let (sent, _) = tokio::join!(send(&endpoint, "{}".to_owned()), serve_one(&listener, REFUSED));
        assert!(sent.unwrap_err().contains("503"));
        let closing = async { drop(listener.accept().await.unwrap()) };
        let (sent, ()) = tokio::join!(send(&endpoint, "{}".to_owned()), closing);
        assert!(sent.is_err());
        drop(listener);
        assert!(send(&endpoint, "{}".to_owned()).await.is_err());
    }
}

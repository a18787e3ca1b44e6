//! One call: its deadline, its metric, and the meaning of its failure.

use std::error::Error as _;
use std::future::Future;
use std::path::Path;
use std::time::{Duration, Instant};

use tonic::{Code, Response, Status};

use super::convert::truncate_message;
use crate::Error;
use kruise_ops::metrics::metrics;

/// Timeout of a call that only reads or stops something.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest response that is read; lists on full nodes exceed gRPC's 4 MiB.
pub(super) const MAX_RESPONSE_BYTES: usize = 16 << 20;

/// How much longer the client waits than the deadline sent to the runtime, so that the runtime's own answer can win.
const DEADLINE_MARGIN: Duration = Duration::from_millis(500);

/// The longest deadline that is sent: gRPC has eight digits for it, in hours at most, and tonic panics at longer ones.
/// A year, so that a runtime which counts in nanoseconds does not overflow either.
pub(super) const MAX_DEADLINE: Duration = Duration::from_secs(365 * 86_400);

/// Error of a response that is longer than the client of the call reads.
pub(super) const RESPONSE_TOO_LONG: &str = "it is too long";

/// Go's text for a connection that timed out.
const CONNECTION_TIMEOUT: &str = "i/o timeout";

#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) socket: &'a Path,
    pub(super) method: &'static str,
    pub(super) deadline: Duration,
}

impl Call<'_> {
    /// Wraps a message with the call's deadline for the server.
    pub(super) fn request<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        request.set_timeout(self.deadline.min(MAX_DEADLINE));
        request
    }

    pub(super) async fn run<T>(
        &self,
        rpc: impl Future<Output = Result<Response<T>, Status>> + Send,
    ) -> Result<T, Error> {
        let start = Instant::now();
        let result = match tokio::time::timeout(self.deadline.saturating_add(DEADLINE_MARGIN), rpc).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => Err(self.to_error(&status)),
            Err(_) => Err(self.timed_out()),
        };
        let label = match &result {
            Ok(_) => "ok",
            Err(Error::Rejected {
                code: Code::NotFound, ..
            }) => "not_found",
            Err(error) => error.category(),
        };
        tracing::debug!(method = self.method, result = label, took = ?start.elapsed(), "CRI call");
        metrics().cri_call(self.method, label, start.elapsed());
        result
    }

    /// Runs the call; "not found" is a result, not a failure.
    pub(super) async fn run_optional<T>(
        &self,
        rpc: impl Future<Output = Result<Response<T>, Status>> + Send,
    ) -> Result<Option<T>, Error> {
        match self.run(rpc).await {
            Err(Error::Rejected {
                code: Code::NotFound, ..
            }) => Ok(None),
            other => other.map(Some),
        }
    }

    /// The next message of a streamed response.
    pub(super) async fn next_message<T>(&self, stream: &mut tonic::Streaming<T>) -> Result<Option<T>, Error> {
        match tokio::time::timeout(self.deadline, stream.message()).await {
            Ok(answer) => answer.map_err(|status| self.to_error(&status)),
            Err(_) => Err(self.timed_out()),
        }
    }

    pub(super) fn invalid_response(&self, why: impl Into<String>) -> Error {
        let why: String = why.into();
        Error::InvalidResponse {
            socket: self.socket.to_owned(),
            method: self.method,
            why: truncate_message(&why),
        }
    }

    fn timed_out(&self) -> Error {
        Error::Timeout {
            socket: self.socket.to_owned(),
            method: self.method,
            after: self.deadline,
        }
    }

    /// Converts a status. A status that carries a source was created here, not by the runtime.
    fn to_error(self, status: &Status) -> Error {
        let (socket, method) = (self.socket.to_owned(), self.method);
        let message = redact_url_queries(status.message());
        match status.code() {
            // containerd also returns this code for a connection of its own, such as one to a registry that does not
            // answer, long before the deadline of the call.
            Code::DeadlineExceeded if !message.contains(CONNECTION_TIMEOUT) => self.timed_out(),
            Code::Cancelled if message == "Timeout expired" => self.timed_out(),
            Code::Unimplemented => Error::Unimplemented {
                socket,
                method,
                message,
            },
            Code::OutOfRange if message.contains("message length too large") => {
                self.invalid_response(RESPONSE_TOO_LONG)
            }
            _ if status.source().is_some() => Error::Unreachable {
                socket,
                method,
                why: root_causes(status),
            },
            // containerd answers this for a moment after its start.
            _ if message.starts_with("server is not initialized") => Error::Unreachable {
                socket,
                method,
                why: message,
            },
            Code::Internal if message.starts_with("failed to decode Protobuf message") => {
                self.invalid_response(message)
            }
            Code::Unknown | Code::Internal if is_not_grpc(&message) => self.invalid_response(message),
            code => Error::Rejected {
                socket,
                method,
                code,
                message,
            },
        }
    }
}

/// A runtime's message without the query strings of URLs, which may be signatures.
fn redact_url_queries(message: &str) -> String {
    let mut text = String::with_capacity(message.len());
    let mut rest = message;
    while let Some(at) = rest.find("://") {
        let (before, url) = rest.split_at(at + 3);
        let end = url
            .find(|c: char| c.is_whitespace() || "\"'<>()".contains(c))
            .unwrap_or(url.len());
        let (url, after) = url.split_at(end);
        text.push_str(before);
        match url.split_once('?') {
            Some((path, _)) => text.extend([path, "?…"]),
            None => text.push_str(url),
        }
        // The end of a sentence is not part of the URL.
        if url.contains('?') && url.ends_with(':') {
            text.push(':');
        }
        rest = after;
    }
    text + rest
}

/// Whether this is tonic's message for a response that is HTTP but not gRPC, or gRPC cut short. Its status has nothing
/// else of its own; a runtime's message may contain such words of a registry, but does not begin with them.
fn is_not_grpc(message: &str) -> bool {
    [
        "grpc-status header missing",
        "protocol error: ",
        "h2 protocol error: ",
        "Missing response message",
        "Unexpected EOF decoding stream",
    ]
    .iter()
    .any(|words| message.starts_with(words))
}

/// The innermost causes as text, without the layers that add nothing.
fn root_causes(status: &Status) -> String {
    let mut causes: Vec<String> = Vec::new();
    let mut next = status.source();
    while let Some(error) = next {
        let text = error.to_string();
        if text != "transport error" && causes.last().is_none_or(|last| !last.contains(&text)) {
            causes.push(text);
        }
        next = error.source();
    }
    if causes.is_empty() {
        status.message().to_owned()
    } else {
        causes.join(": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PullCause;
    use crate::client::to_pull_error;
    use proptest::prelude::*;

    #[test]
    fn connection_timeout_of_the_runtime_is_not_that_of_the_call() {
        let call = Call {
            socket: Path::new("/s"),
            method: "PullImage",
            deadline: Duration::from_secs(600),
        };
        let pull_error = |message: &str| {
            let message = format!("failed to pull and unpack image \"r.test/a:1\": {message}");
            to_pull_error("r.test/a:1", call.to_error(&Status::deadline_exceeded(message)))
        };
        let why = "failed to do request: Head \"https://r.test/v2/a/manifests/1\": dial tcp 192.0.2.1:443: i/o timeout";
        let error = pull_error(why);
        assert!(
            matches!(
                &error,
                Error::Pull { cause: PullCause::RegistryUnavailable, message, .. } if message == why
            ),
            "{error}"
        );
        let error = pull_error("context deadline exceeded");
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
    }

    /// Other credentials may help after an error of the registry, but not after one of the connection.
    #[test]
    fn text_of_a_registry_is_no_error_of_the_connection() {
        let call = Call {
            socket: Path::new("/s"),
            method: "PullImage",
            deadline: Duration::from_secs(600),
        };
        let pull_error =
            |message: String| to_pull_error("r.test/a:1", call.to_error(&Status::unknown(message)));
        for text in [
            "grpc-status header missing, mapped from HTTP status code 502",
            "protocol error: no",
            "Unexpected EOF decoding stream.",
        ] {
            let error = pull_error(format!("failed to resolve reference \"r.test/a:1\": {text}"));
            assert!(matches!(error, Error::Pull { .. }), "{error}");
            let error = pull_error(format!("{text}{}", "x".repeat(1 << 20)));
            assert!(matches!(error, Error::InvalidResponse { .. }), "{error}");
            assert!(error.to_string().len() < 1000, "{error}");
        }
    }

    #[test]
    fn url_query_strings_are_redacted() {
        let message = "failed: Get \"https://cdn.example/v2/blob?X-Amz-Signature=s3cret&a=b\": dial https://b/?q=1: eof (http://c)";
        assert_eq!(
            redact_url_queries(message),
            "failed: Get \"https://cdn.example/v2/blob?…\": dial https://b/?…: eof (http://c)"
        );
        assert_eq!(redact_url_queries("what? no URL"), "what? no URL");
    }

    proptest! {
        /// The number may be external input of any size.
        #[test]
        fn no_deadline_is_too_long_for_grpc(seconds: u64, nanos in 0..1_000_000_000_u32) {
            for deadline in [Duration::new(seconds, nanos), Duration::MAX, Duration::ZERO] {
                let call = Call { socket: Path::new("/s"), method: "StopContainer", deadline };
                let request = call.request(());
                prop_assert!(request.metadata().contains_key("grpc-timeout"));
            }
        }
    }
}

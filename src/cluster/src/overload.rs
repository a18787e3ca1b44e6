//! An overloaded API server: requests are retried for a moment, and then its error is returned as what it is.
//!
//! In:  responses that reject a request.
//! Out: the response to the last attempt, with the requested pause where our errors expect it.

use std::time::Duration;

use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{Either, Full};
use hyper::body::Bytes;
use kube::client::Body;
use kube::client::retry::RetryPolicy;
use serde_json::json;
use tower::BoxError;
use tower::retry::Policy;

/// Retries requests that an overloaded API server rejected, for a moment. Longer retries are left to the callers: they
/// have deadlines, and know what can wait.
#[derive(Clone)]
pub(super) struct OverloadRetry(RetryPolicy);

/// How often a request is sent again.
const MAX_RETRIES: u32 = 3;
/// Pause before the first retry; it doubles.
const INITIAL_BACKOFF: Duration = Duration::from_millis(50);
/// A longer pause is not waited for here, even if the API server requests one.
const MAX_BACKOFF: Duration = Duration::from_secs(1);

impl OverloadRetry {
    pub fn new() -> Self {
        Self(RetryPolicy::new(INITIAL_BACKOFF, MAX_BACKOFF, MAX_RETRIES, true).unwrap_or_default())
    }
}

impl<B> Policy<Request<Body>, Response<B>, BoxError> for OverloadRetry {
    type Future = tokio::time::Sleep;

    fn retry(
        &mut self,
        request: &mut Request<Body>,
        result: &mut Result<Response<B>, BoxError>,
    ) -> Option<Self::Future> {
        if is_list_or_watch(request) {
            return None;
        }
        let retry_after = retry_after_seconds(result.as_ref().ok()?.headers());
        if retry_after.is_some_and(|seconds| Duration::from_secs(seconds.into()) > MAX_BACKOFF) {
            return None;
        }
        self.0.retry(request, result)
    }

    fn clone_request(&mut self, request: &Request<Body>) -> Option<Request<Body>> {
        Policy::<_, Response<B>, BoxError>::clone_request(&mut self.0, request)
    }
}

/// Lists and watches, whose reflectors have their own pauses: four requests for one would be a multiple of the load.
fn is_list_or_watch<B>(request: &Request<B>) -> bool {
    let query = request.uri().query().unwrap_or_default();
    query
        .split('&')
        .any(|part| part.starts_with("limit=") || part.starts_with("watch="))
}

/// The pause that the API server requests, in seconds.
fn retry_after_seconds(headers: &HeaderMap) -> Option<u32> {
    headers.get(RETRY_AFTER)?.to_str().ok()?.parse().ok()
}

/// Converts the plain-text rejection of an overloaded API server into a `Status`: otherwise clients of kube see only
/// the text, not the requested pause.
pub(super) fn to_status<B>(response: Response<B>) -> Response<Either<B, Full<Bytes>>> {
    let (parts, body) = response.into_parts();
    let json = parts
        .headers
        .get(CONTENT_TYPE)
        .is_some_and(|content_type| content_type.as_bytes().starts_with(b"application/json"));
    let seconds = retry_after_seconds(&parts.headers)
        .filter(|_| parts.status == StatusCode::TOO_MANY_REQUESTS && !json);
    let Some(seconds) = seconds else {
        return Response::from_parts(parts, Either::Left(body));
    };
    let status = json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure", "code": 429, "reason": "TooManyRequests",
        "message": format!("too many requests, and it asks to try again after {seconds} s"),
        "details": { "retryAfterSeconds": seconds },
    });
    Response::from_parts(parts, Either::Right(Full::from(status.to_string())))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use tower::retry::RetryLayer;
    use tower::{ServiceBuilder, service_fn};

    use super::*;
    use crate::Error;

    /// The result of a request that is always rejected so, and how often it is sent.
    async fn send_throttled(
        retry_after: Option<&'static str>,
        content_type: &'static str,
        text: &'static str,
    ) -> (Error, u32) {
        let (sent, count) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let counter = Arc::clone(&count);
        let server = service_fn(move |_: Request<Body>| {
            sent.fetch_add(1, Ordering::SeqCst);
            counter.store(sent.load(Ordering::SeqCst), Ordering::SeqCst);
            let mut answer = Response::builder()
                .status(429)
                .header("content-type", content_type);
            if let Some(after) = retry_after {
                answer = answer.header("retry-after", after);
            }
            let body = answer.body(Body::from(text.as_bytes().to_vec()));
            async move { body.map_err(BoxError::from) }
        });
        let service = ServiceBuilder::new()
            .map_response(to_status)
            .layer(RetryLayer::new(OverloadRetry::new()))
            .service(server);
        let client = kube::Client::new(service, "default");
        let error = client.apiserver_version().await.unwrap_err();
        (Error::from(error), count.load(Ordering::SeqCst))
    }

    #[tokio::test]
    async fn short_retry_after_is_waited_out_and_long_returned() {
        let plain = "text/plain; charset=utf-8";
        let cases = [
            (None, 4, None),
            (Some("1"), 4, Some(1)),
            (Some("5"), 1, Some(5)),
            (Some("soon"), 4, None),
        ];
        for (after, times, seconds) in cases {
            let (error, sent) =
                send_throttled(after, plain, "Too many requests, please try again later.").await;
            assert!(error.throttled() && !error.outcome_unknown(), "{error}");
            assert_eq!(
                (sent, error.retry_after()),
                (times, seconds.map(Duration::from_secs)),
                "{after:?}: {error}"
            );
        }
    }

    #[test]
    fn lists_and_watches_are_not_retried() {
        for (path, own) in [
            ("/api/v1/pods?&limit=500&fieldSelector=a%3Db", true),
            ("/api/v1/pods?&watch=true&timeoutSeconds=290", true),
            ("/api/v1/namespaces/limit=1/pods/watch=", false),
            ("/api/v1/namespaces/a/pods?&dryRun=All", false),
        ] {
            assert_eq!(
                is_list_or_watch(&Request::get(path).body(()).unwrap()),
                own,
                "{path}"
            );
        }
    }

    #[tokio::test]
    async fn json_status_of_the_api_server_is_unchanged() {
        let text = r#"{"kind":"Status","status":"Failure","code":429,"message":"a budget","details":{"retryAfterSeconds":7}}"#;
        let (error, sent) = send_throttled(Some("7"), "application/json", text).await;
        assert_eq!((sent, error.retry_after()), (1, Some(Duration::from_secs(7))));
        assert!(error.to_string().contains("a budget"), "{error}");
    }
}

//! A page of a list, of bounded size.
//!
//! In:  the response of the API server.
//! Out: its objects, fewer than requested if the page is too large.

use std::time::Duration;

use http_body_util::{BodyExt, LengthLimitError, Limited};
use kube::api::ListParams;
use kube::client::Body;
use kube::core::{ObjectList, Request, Status, request};
use kube::{Client, Error};
use serde::de::DeserializeOwned;

/// The longest page that is read, in bytes: it is in memory twice while it arrives.
const MAX_PAGE_BYTES: usize = 8 << 20;
/// Assumed number of objects of a page that is too large, if the request had no limit.
const DEFAULT_LIMIT: u32 = 500;
/// The longest page of one object. The API server accepts objects of 3 MiB, of which each byte may be six in JSON.
const MAX_OBJECT_BYTES: usize = 24 << 20;

/// Builds the request for a page: [`Request::list`] or [`Request::list_metadata`].
pub type ListRequest = fn(&Request, &ListParams) -> Result<http::Request<Vec<u8>>, request::Error>;

/// A page of the list at `path`. If it is too large, one with fewer objects: the limit in `params` is reduced then.
/// `timeout` is that of each request, and `kind` is for errors and the log.
///
/// # Errors
/// As the client's, and a timeout.
pub async fn fetch_fitting<K: Clone + DeserializeOwned>(
    client: &Client,
    path: &str,
    build: ListRequest,
    params: &mut ListParams,
    kind: &str,
    timeout: Duration,
) -> Result<ObjectList<K>, crate::Error> {
    loop {
        let request = build(&Request::new(path), params);
        let page = tokio::time::timeout(timeout, send_list(client, request, params)).await;
        let page = page.map_err(|_| crate::Error::Timeout {
            verb: "list",
            kind: kind.to_owned(),
            after: timeout,
        })?;
        if let Some(page) = page? {
            return Ok(page);
        }
        params.limit = Some((params.limit.unwrap_or(DEFAULT_LIMIT) / 4).max(1));
        tracing::debug!(kind, limit = params.limit, "page is too large");
    }
}

/// Raises a reduced limit again, up to `full`, after a page of this many bytes: one large object must not make the rest
/// of the list a request for each object.
pub fn raise_limit(params: &mut ListParams, full: Option<u32>, bytes: usize) {
    if bytes <= MAX_PAGE_BYTES / 2 {
        let full = full.unwrap_or(DEFAULT_LIMIT);
        params.limit = params.limit.map(|limit| limit.saturating_mul(2).min(full));
    }
}

/// The answer to the request of a page; `None` when it is too large and can be smaller.
async fn send_list<K: Clone + DeserializeOwned>(
    client: &Client,
    request: Result<http::Request<Vec<u8>>, request::Error>,
    params: &ListParams,
) -> Result<Option<ObjectList<K>>, Error> {
    let request = request.map_err(Error::BuildRequest)?;
    let response = client.send(request.map(Body::from)).await?;
    let code = response.status();
    let max_bytes = if params.limit == Some(1) {
        MAX_OBJECT_BYTES
    } else {
        MAX_PAGE_BYTES
    };
    let body = match Limited::new(response.into_body(), max_bytes).collect().await {
        Ok(body) => body.to_bytes(),
        Err(why) if why.is::<LengthLimitError>() && params.limit != Some(1) => return Ok(None),
        Err(why) => return Err(Error::Service(why)),
    };
    if code.is_success() {
        return serde_json::from_slice(&body).map(Some).map_err(Error::SerdeError);
    }
    let status = serde_json::from_slice(&body).unwrap_or_else(|_| {
        let text = String::from_utf8_lossy(body.get(..200).unwrap_or(&body)).into_owned();
        Status::failure(&text, "").with_code(code.as_u16())
    });
    Err(Error::Api(Box::new(status)))
}

//! An API server that unit tests play.

use std::sync::Arc;

use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

use super::client::Connection;

/// A request as the API server gets it.
pub struct Request {
    /// Such as `GET`.
    pub method: String,
    pub path: String,
    pub query: String,
    pub body: Value,
}

/// What it responds with: HTTP code and body; an empty body for null.
pub type Response = (u16, Value);

/// A code for a request that gets no response.
pub const SILENT: u16 = 0;

/// A client of an API server that responds so.
pub fn client(respond: impl Fn(&Request) -> Response + Send + Sync + 'static) -> Client {
    let respond = Arc::new(respond);
    let service = tower::service_fn(move |request: http::Request<Body>| {
        let respond = respond.clone();
        async move {
            let (head, body) = request.into_parts();
            let body = body.collect_bytes().await?;
            let request = Request {
                method: head.method.to_string(),
                path: head.uri.path().to_owned(),
                query: head.uri.query().unwrap_or_default().to_owned(),
                body: serde_json::from_slice(&body).unwrap_or_default(),
            };
            let (code, body) = respond(&request);
            if code == SILENT {
                std::future::pending::<()>().await;
            }
            let text = match body {
                Value::Null => String::new(),
                body => body.to_string(),
            };
            let response = http::Response::builder()
                .status(code)
                .body(Body::from(text.into_bytes()));
            response.map_err(kube::Error::HttpError)
        }
    });
    Client::new(service, "n")
}

/// A connection to it, for namespace `n`.
pub fn connection(respond: impl Fn(&Request) -> Response + Send + Sync + 'static) -> Connection {
    Connection {
        client: client(respond),
        namespace: "n".to_owned(),
        kruise_namespace: "kruise-system".to_owned(),
        named_namespace: None,
        cluster_options: String::new(),
    }
}

/// A refusal.
pub fn failure(code: u16, reason: &str) -> Response {
    let details = json!({ "name": "some" });
    (
        code,
        json!({ "kind": "Status", "code": code, "reason": reason, "details": details }),
    )
}

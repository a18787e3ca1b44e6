//! A webhook that refuses Pods and says what they are like when all policies have run, before they are validated.

use axum::routing::post;
use axum::{Json, Router};
use base64::Engine;
use serde_json::{Value, json};
use support::tls_listener::TlsListener;
use tokio::task::JoinHandle;

/// Label of Pods that the webhook gets.
pub const LABEL: &str = "last-webhook";
/// Begin of the message with the Pod.
const MESSAGE: &str = "Pod: ";

pub struct LastWebhook {
    /// Its configuration.
    pub configuration: Value,
    server: JoinHandle<()>,
}

impl Drop for LastWebhook {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl LastWebhook {
    pub async fn serve() -> Self {
        let listener = TlsListener::listen("127.0.0.1").await;
        let bundle = base64::engine::general_purpose::STANDARD.encode(listener.certificate());
        let address = listener.local_addr();
        let router = Router::new().route("/", post(refuse));
        let server = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        let rule = json!({ "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"] });
        let webhook = json!({
            "name": "last.example.com",
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "failurePolicy": "Fail",
            "clientConfig": { "url": format!("https://{address}/"), "caBundle": bundle },
            "objectSelector": { "matchLabels": { LABEL: "yes" } },
            "rules": [rule],
        });
        Self {
            configuration: json!({
                "apiVersion": "admissionregistration.k8s.io/v1",
                "kind": "MutatingWebhookConfiguration",
                "metadata": { "name": "last" },
                "webhooks": [webhook],
            }),
            server,
        }
    }
}

/// The Pod in a message, if the webhook refused it.
pub fn pod_in(message: &str) -> Option<Value> {
    let (_, pod) = message.split_once(MESSAGE)?;
    Some(serde_json::from_str(pod).unwrap())
}

async fn refuse(Json(review): Json<Value>) -> Json<Value> {
    let request = &review["request"];
    let status = json!({ "code": 403, "message": format!("{MESSAGE}{}", request["object"]) });
    Json(json!({
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": { "uid": request["uid"], "allowed": false, "status": status },
    }))
}

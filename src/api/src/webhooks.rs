//! The webhook configurations, built from the rows of [`Kind`].

use serde_json::{Value, json};

use super::kind::{KindInfo, WebhookPolicy};
use super::{GROUP, Kind, V1BETA1, keys};

/// Name of the mutating configuration.
pub const MUTATING: &str = "kruise-mutating-webhook-configuration";
/// Name of the validating configuration.
pub const VALIDATING: &str = "kruise-validating-webhook-configuration";
/// Both configurations for an installation in `namespace`.
#[must_use]
pub fn configurations(namespace: &str) -> [Value; 2] {
    let reviewed = Kind::ALL
        .into_iter()
        .filter_map(|kind| Some((kind.info(), kind.info().webhook.as_ref()?)));
    let mutating = reviewed
        .clone()
        .map(|(kind, policy)| webhook(namespace, "mutate", kind, policy));
    let validated = reviewed.filter(|(_, policy)| policy.validates);
    let validating = validated.map(|(kind, policy)| webhook(namespace, "validate", kind, policy));
    let mutating = mutating.collect();
    let mut validating: Vec<Value> = validating.collect();
    validating.push(namespace_webhook(namespace));
    [
        configuration("MutatingWebhookConfiguration", MUTATING, mutating),
        configuration("ValidatingWebhookConfiguration", VALIDATING, validating),
    ]
}

fn configuration(kind: &str, name: &str, webhooks: Vec<Value>) -> Value {
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": kind,
        "metadata": { "name": name },
        "webhooks": webhooks,
    })
}

fn webhook(namespace: &str, step: &str, kind: &KindInfo, webhook: &WebhookPolicy) -> Value {
    let lower = kind.lowercase;
    let initial = step.chars().next().unwrap_or_default();
    without_nulls(json!({
        "name": format!("{initial}{lower}{}.kb.io", webhook.suffix),
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": webhook.failure_policy,
        "matchPolicy": "Equivalent",
        // A webhook that may be skipped gets a short timeout, in case it is unreachable.
        "timeoutSeconds": if webhook.failure_policy == "Fail" { 10 } else { 5 },
        "clientConfig": client_config(namespace, &format!("/{step}-apps-kruise-io-{lower}")),
        "rules": [{
            "apiGroups": [GROUP],
            "apiVersions": [V1BETA1],
            "operations": webhook.operations,
            "resources": [kind.plural],
            "scope": "*",
        }],
        "matchConditions": match_conditions(namespace, webhook.every_write),
    }))
}

/// Deletions of Namespaces that are protected by their content. A user who protects one prefers keeping it to an
/// unreviewed deletion, so this fails closed; without the label the request is not sent to us.
fn namespace_webhook(namespace: &str) -> Value {
    json!({
        "name": "vnamespace.kb.io",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "matchPolicy": "Equivalent",
        "timeoutSeconds": 10,
        "clientConfig": client_config(namespace, keys::VALIDATE_NAMESPACE_PATH),
        "rules": [{
            "apiGroups": [""],
            "apiVersions": ["v1"],
            "operations": ["DELETE"],
            "resources": ["namespaces"],
            "scope": "*",
        }],
        "objectSelector": { "matchExpressions": [
            { "key": keys::DELETE_PROTECTION, "operator": "In", "values": [keys::PROTECT_CASCADING] },
        ] },
        "matchConditions": [
            { "name": "not-being-deleted", "expression": "!has(oldObject.metadata.deletionTimestamp)" },
        ],
    })
}

/// The client configuration of a path, until the manager has filled in the rest.
pub(super) fn client_config(namespace: &str, path: &str) -> Value {
    json!({
        "service": { "namespace": namespace, "name": keys::WEBHOOK_SERVICE, "path": path },
        "url": null, // when applied, removes the URL of a manager with `WEBHOOK_HOST`
    })
}

/// Filters out the manager's own writes, updates that do not change the spec, and updates of terminating objects.
fn match_conditions(namespace: &str, every_write: bool) -> Value {
    if every_write {
        return Value::Null;
    }
    let manager = format!("system:serviceaccount:{namespace}:kruise-manager");
    json!([
        { "name": "not-the-manager", "expression": format!("request.userInfo.username != '{manager}'") },
        {
            "name": "spec-changes",
            "expression": "request.operation == 'CREATE' || \
                (!has(object.metadata.deletionTimestamp) && object.?spec != oldObject.?spec)",
        },
    ])
}

/// Without null fields.
#[must_use]
pub fn without_nulls(mut value: Value) -> Value {
    if let Some(map) = value.as_object_mut() {
        map.retain(|_, value| !value.is_null());
    }
    value
}

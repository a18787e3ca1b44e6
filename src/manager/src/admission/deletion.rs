//! Validates deletions that no admission policy can: of a Namespace with label
//! `policy.kruise.io/delete-protection: Cascading`, which is rejected while the Namespace has active Pods or bound
//! claims. Rule and messages are OpenKruise's.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::review::{Decision, Object};
use kruise_api::{keys, names};
use kruise_cluster::write::Metadata;
use kruise_cluster::{self as cluster, ObjectView};

/// Why a Namespace cannot be deleted.
#[derive(Debug, PartialEq)]
pub(super) enum DeletionBlocker {
    /// At least this number of active Pods.
    Pods(usize),
    /// At least this number of bound claims.
    Claims(usize),
}

/// The name of a Namespace whose deletion depends on its content.
pub(super) fn protected_namespace(namespace: &Object) -> Option<&str> {
    let metadata = &namespace["metadata"];
    let cascading = metadata["labels"][keys::DELETE_PROTECTION] == keys::PROTECT_CASCADING;
    let name = metadata["name"].as_str().filter(|name| names::is_label(name));
    name.filter(|_| cascading && metadata["deletionTimestamp"].is_null())
}

/// Whether a Pod that is not terminal is active.
pub(super) fn is_active_pod(pod: &Metadata) -> bool {
    pod.deletion_timestamp.is_none()
}

/// The fields of a claim that are parsed. Other fields take no memory, and cannot prevent the claim from being counted.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ClaimFields {
    metadata: ClaimMetadata,
    status: ClaimStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ClaimMetadata {
    deletion_timestamp: Option<IgnoredAny>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct ClaimStatus {
    phase: Option<String>,
}

impl ObjectView for ClaimFields {
    type Kind = PersistentVolumeClaim;
}

/// Whether a claim is bound and not terminating.
pub(super) fn is_bound_claim(claim: &ClaimFields) -> bool {
    claim.status.phase.as_deref() == Some("Bound") && claim.metadata.deletion_timestamp.is_none()
}

/// Decides about the deletion of a protected Namespace.
pub(super) fn decide(
    name: &str,
    blocker: Result<Option<DeletionBlocker>, (&'static str, cluster::Error)>,
) -> Decision {
    let (key, value) = (keys::DELETE_PROTECTION, keys::PROTECT_CASCADING);
    let reason = match blocker {
        Ok(None) => {
            return Decision::Allow {
                object: Value::Null,
                warnings: Vec::new(),
            };
        }
        Ok(Some(DeletionBlocker::Pods(count))) => format!("for {key}={value} and active pods {count}>0"),
        Ok(Some(DeletionBlocker::Claims(count))) => {
            format!("for {key}={value} and \"Bound\" status pvc {count}>0")
        }
        Err((kind, why)) => format!("for list {kind} error: {why}"),
    };
    Decision::Deny {
        code: 403,
        message: format!(
            "forbidden by ResourcesProtectionDeletion {reason}; remove the label from Namespace {name} to delete it"
        ),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::panic, clippy::unwrap_used)]

    use serde_json::json;

    use super::*;

    fn namespace(metadata: Value) -> Object {
        Object::for_test(json!({ "kind": "Namespace", "metadata": metadata }))
    }

    #[test]
    fn only_cascading_namespaces_are_protected() {
        let label = |value: &str| json!({ "policy.kruise.io/delete-protection": value });
        let named = |labels: Value| namespace(json!({ "name": "web", "labels": labels }));
        assert_eq!(protected_namespace(&named(label("Cascading"))), Some("web"));
        for other in [label("Always"), label(""), json!({}), json!(null)] {
            assert_eq!(protected_namespace(&named(other)), None);
        }
        let terminating = json!({ "name": "web", "labels": label("Cascading"), "deletionTimestamp": "2026-01-01T00:00:00Z" });
        assert_eq!(protected_namespace(&namespace(terminating)), None);
        for hostile in [json!("../x"), json!(1), json!("")] {
            let hostile = json!({ "name": hostile, "labels": label("Cascading") });
            assert_eq!(protected_namespace(&namespace(hostile)), None);
        }
    }

    #[test]
    fn bound_claims_block_namespace_deletion() {
        let claim = |phase: &str, deletion_timestamp: Value| {
            let claim = json!({ "metadata": { "deletionTimestamp": deletion_timestamp }, "status": { "phase": phase } });
            is_bound_claim(&serde_json::from_value(claim).unwrap())
        };
        assert!(claim("Bound", Value::Null));
        assert!(!claim("Pending", Value::Null));
        assert!(!claim("Bound", json!("2026-01-01T00:00:00Z")));
    }

    #[test]
    fn refusals_match_openkruise_messages() {
        let refusal = |blocker| match decide("web", blocker) {
            Decision::Deny {
                code: 403,
                message: why,
            } => why,
            other => panic!("{other:?}"),
        };
        let cascading =
            "forbidden by ResourcesProtectionDeletion for policy.kruise.io/delete-protection=Cascading and";
        let advice = "; remove the label from Namespace web to delete it";
        let pods = refusal(Ok(Some(DeletionBlocker::Pods(2))));
        assert_eq!(pods, format!("{cascading} active pods 2>0{advice}"));
        let claims = refusal(Ok(Some(DeletionBlocker::Claims(1))));
        assert_eq!(claims, format!("{cascading} \"Bound\" status pvc 1>0{advice}"));
        let error = refusal(Err(("pods", cluster::Error::Transport("away".into()))));
        assert!(
            error.starts_with("forbidden by ResourcesProtectionDeletion for list pods error: "),
            "{error}"
        );
        assert!(matches!(decide("web", Ok(None)), Decision::Allow { .. }));
    }
}

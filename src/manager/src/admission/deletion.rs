//! Deletions that no policy can judge: of a Namespace with label `policy.kruise.io/delete-protection: Cascading`, which is
//! refused while there are active Pods or bound claims in it. Words and rule are OpenKruise's.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::review::{Decision, Object};
use kruise_api::{keys, names};
use kruise_cluster::write::Metadata;
use kruise_cluster::{self as cluster, Form};

/// What keeps a Namespace from being deleted.
#[derive(Debug, PartialEq)]
pub(super) enum Kept {
    /// So many active Pods, at least.
    Pods(usize),
    /// So many bound claims, at least.
    Claims(usize),
}

/// The name of a Namespace whose deletion depends on what is in it.
pub(super) fn protected(namespace: &Object) -> Option<&str> {
    let metadata = &namespace["metadata"];
    let cascading = metadata["labels"][keys::DELETE_PROTECTION] == keys::PROTECT_CASCADING;
    let name = metadata["name"].as_str().filter(|name| names::is_label(name));
    name.filter(|_| cascading && metadata["deletionTimestamp"].is_null())
}

/// Whether a Pod that has not ended is active.
pub(super) fn is_active(pod: &Metadata) -> bool {
    pod.deletion_timestamp.is_none()
}

/// What is read of a claim. Whatever else its owner writes into it takes no memory, and keeps no claim from being counted.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Claim {
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

impl Form for Claim {
    type Kind = PersistentVolumeClaim;
}

/// Whether a claim has a volume, and keeps it.
pub(super) fn is_bound(claim: &Claim) -> bool {
    claim.status.phase.as_deref() == Some("Bound") && claim.metadata.deletion_timestamp.is_none()
}

/// Decides about a protected Namespace by what is in it.
pub(super) fn decide(name: &str, kept: Result<Option<Kept>, (&'static str, cluster::Error)>) -> Decision {
    let (key, value) = (keys::DELETE_PROTECTION, keys::PROTECT_CASCADING);
    let why = match kept {
        Ok(None) => {
            return Decision::Allow {
                object: Value::Null,
                warnings: Vec::new(),
            };
        }
        Ok(Some(Kept::Pods(count))) => format!("for {key}={value} and active pods {count}>0"),
        Ok(Some(Kept::Claims(count))) => format!("for {key}={value} and \"Bound\" status pvc {count}>0"),
        Err((kind, why)) => format!("for list {kind} error: {why}"),
    };
    Decision::Deny {
        code: 403,
        why: format!(
            "forbidden by ResourcesProtectionDeletion {why}; remove the label from Namespace {name} to delete it"
        ),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::panic, clippy::unwrap_used)]

    use serde_json::json;

    use super::*;

    fn namespace(metadata: Value) -> Object {
        Object::of(json!({ "kind": "Namespace", "metadata": metadata }))
    }

    #[test]
    fn only_a_namespace_labelled_cascading_depends_on_what_is_in_it() {
        let label = |value: &str| json!({ "policy.kruise.io/delete-protection": value });
        let named = |labels: Value| namespace(json!({ "name": "web", "labels": labels }));
        assert_eq!(protected(&named(label("Cascading"))), Some("web"));
        for other in [label("Always"), label(""), json!({}), json!(null)] {
            assert_eq!(protected(&named(other)), None);
        }
        let going = json!({ "name": "web", "labels": label("Cascading"), "deletionTimestamp": "2026-01-01T00:00:00Z" });
        assert_eq!(protected(&namespace(going)), None);
        for hostile in [json!("../x"), json!(1), json!("")] {
            let hostile = json!({ "name": hostile, "labels": label("Cascading") });
            assert_eq!(protected(&namespace(hostile)), None);
        }
    }

    #[test]
    fn a_claim_keeps_a_namespace_while_it_is_bound() {
        let claim = |phase: &str, going: Value| {
            let claim = json!({ "metadata": { "deletionTimestamp": going }, "status": { "phase": phase } });
            is_bound(&serde_json::from_value(claim).unwrap())
        };
        assert!(claim("Bound", Value::Null));
        assert!(!claim("Pending", Value::Null));
        assert!(!claim("Bound", json!("2026-01-01T00:00:00Z")));
    }

    #[test]
    fn refusals_are_in_the_words_of_openkruise() {
        let refusal = |kept| match decide("web", kept) {
            Decision::Deny { code: 403, why } => why,
            other => panic!("{other:?}"),
        };
        let cascading =
            "forbidden by ResourcesProtectionDeletion for policy.kruise.io/delete-protection=Cascading and";
        let advice = "; remove the label from Namespace web to delete it";
        let pods = refusal(Ok(Some(Kept::Pods(2))));
        assert_eq!(pods, format!("{cascading} active pods 2>0{advice}"));
        let claims = refusal(Ok(Some(Kept::Claims(1))));
        assert_eq!(claims, format!("{cascading} \"Bound\" status pvc 1>0{advice}"));
        let error = refusal(Err(("pods", cluster::Error::Transport("away".into()))));
        assert!(
            error.starts_with("forbidden by ResourcesProtectionDeletion for list pods error: "),
            "{error}"
        );
        assert!(matches!(decide("web", Ok(None)), Decision::Allow { .. }));
    }
}

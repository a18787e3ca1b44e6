//! Which Pods a set selects, in CEL.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kruise_api::cel::{LABELS, matches};

/// Labels of the Pod's Namespace.
const NAMESPACE_LABELS: &str = "namespaceObject.metadata.?labels.orValue({})";

/// Whether the Pod, and its Namespace, have labels that a set selects.
pub(super) fn selects(pods: &LabelSelector, namespaces: Option<&LabelSelector>) -> String {
    let pods = matches(pods, LABELS);
    match namespaces {
        Some(namespaces) => format!("({pods} && {})", matches(namespaces, NAMESPACE_LABELS)),
        None => pods,
    }
}

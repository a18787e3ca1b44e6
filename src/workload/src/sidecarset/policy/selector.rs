//! Label selectors in CEL.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::literal::{string, strings};

/// Labels of the Pod.
pub(super) const POD_LABELS: &str = "object.metadata.?labels.orValue({})";
/// Labels of its Namespace.
const NAMESPACE_LABELS: &str = "namespaceObject.metadata.?labels.orValue({})";

/// Whether the Pod, and its Namespace, have labels that a set selects.
pub(super) fn selects(pods: &LabelSelector, namespaces: Option<&LabelSelector>) -> String {
    let pods = matches(pods, POD_LABELS);
    match namespaces {
        Some(namespaces) => format!("({pods} && {})", matches(namespaces, NAMESPACE_LABELS)),
        None => pods,
    }
}

/// Whether `labels`, an expression, match a selector, as [`kruise_api::selector::matches`] decides it.
pub(super) fn matches(selector: &LabelSelector, labels: &str) -> String {
    let equal = selector.match_labels.iter().flatten().map(|(key, value)| {
        let (key, value) = (string(key), string(value));
        format!("({key} in {labels} && {labels}[{key}] == {value})")
    });
    let expressions = selector.match_expressions.iter().flatten().map(|one| {
        let key = string(&one.key);
        let values = strings(one.values.iter().flatten().map(String::as_str));
        let listed = format!("({key} in {labels} && {labels}[{key}] in {values})");
        match one.operator.as_str() {
            "In" => listed,
            "NotIn" => format!("!{listed}"),
            "Exists" => format!("{key} in {labels}"),
            "DoesNotExist" => format!("!({key} in {labels})"),
            _ => "false".to_owned(),
        }
    });
    let all: Vec<String> = equal.chain(expressions).collect();
    match all.as_slice() {
        [] => "true".to_owned(),
        all => format!("({})", all.join(" && ")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    #[test]
    fn selectors_become_expressions() {
        let selector = |value| serde_json::from_value::<LabelSelector>(value).unwrap();
        let all = selector(json!({ "matchLabels": { "a'": "b" }, "matchExpressions": [
            { "key": "c", "operator": "NotIn", "values": ["d", "e"] }, { "key": "f", "operator": "DoesNotExist" },
        ] }));
        assert_eq!(
            matches(&all, "l"),
            r"(('a\'' in l && l['a\''] == 'b') && !('c' in l && l['c'] in ['d', 'e']) && !('f' in l))"
        );
        assert_eq!(matches(&selector(json!({})), "l"), "true");
        let odd = selector(json!({ "matchExpressions": [{ "key": "c", "operator": "?" }] }));
        assert_eq!(matches(&odd, "l"), "(false)");
    }
}

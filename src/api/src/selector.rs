//! Label selectors.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};

/// Whether `labels` match `selector`. An empty selector matches everything, as in Kubernetes; an operator that does not
/// exist matches nothing.
#[must_use]
pub fn matches(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    let equal = |(k, v): (&String, &String)| labels.get(k) == Some(v);
    selector.match_labels.iter().flatten().all(equal)
        && selector
            .match_expressions
            .iter()
            .flatten()
            .all(|r| requirement_matches(r, labels))
}

fn requirement_matches(requirement: &LabelSelectorRequirement, labels: &BTreeMap<String, String>) -> bool {
    let value = labels.get(&requirement.key);
    let listed = |v: &String| requirement.values.iter().flatten().any(|w| w == v);
    match requirement.operator.as_str() {
        "In" => value.is_some_and(listed),
        "NotIn" => !value.is_some_and(listed),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_match_like_kubernetes() {
        let labels: BTreeMap<String, String> = [("a".into(), "1".into())].into();
        let cases = [
            ("a", "In", vec!["1", "2"], true),
            ("a", "In", vec!["2"], false),
            ("b", "In", vec!["1"], false),
            ("a", "NotIn", vec!["1"], false),
            ("b", "NotIn", vec!["1"], true),
            ("a", "Exists", vec![], true),
            ("b", "Exists", vec![], false),
            ("b", "DoesNotExist", vec![], true),
            ("a", "DoesNotExist", vec![], false),
            ("a", "Like", vec!["1"], false),
        ];
        for (key, operator, values, expected) in cases {
            let selector = LabelSelector {
                match_labels: None,
                match_expressions: Some(vec![LabelSelectorRequirement {
                    key: key.to_owned(),
                    operator: operator.to_owned(),
                    values: Some(values.iter().map(ToString::to_string).collect()),
                }]),
            };
            assert_eq!(
                matches(&selector, &labels),
                expected,
                "{key} {operator} {values:?}"
            );
        }
        assert!(matches(&LabelSelector::default(), &labels));
    }
}

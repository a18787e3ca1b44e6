//! Label selectors.

use std::collections::{BTreeMap, HashMap, HashSet};

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

/// Whether a selector has no requirement.
#[must_use]
pub fn is_empty(selector: &LabelSelector) -> bool {
    selector.match_labels.as_ref().is_none_or(BTreeMap::is_empty)
        && selector.match_expressions.as_ref().is_none_or(Vec::is_empty)
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

/// The value that stands for all values when selectors are compared.
const ALL_VALUES: &str = "ALL";

/// Whether OpenKruise expects that labels exist which both selectors match.
///
/// This is an estimate in both directions, and callers depend on it: `Exists` for a key that the other selector does
/// not require counts as no overlap, and values of several requirements for one key add up. The label value `ALL`
/// matches every value.
#[must_use]
pub fn overlap(one: &LabelSelector, other: &LabelSelector) -> bool {
    !excludes(other, &required_values(one)) && !excludes(one, &required_values(other))
}

/// For each key that a selector requires the values that it allows.
fn required_values(selector: &LabelSelector) -> HashMap<&str, HashSet<&str>> {
    let mut required: HashMap<&str, HashSet<&str>> = HashMap::new();
    for (key, value) in selector.match_labels.iter().flatten() {
        required.entry(key).or_default().insert(value);
    }
    for requirement in selector.match_expressions.iter().flatten() {
        let key = requirement.key.as_str();
        match requirement.operator.as_str() {
            "In" => {
                let values = requirement.values.iter().flatten().map(String::as_str);
                required.entry(key).or_default().extend(values);
            }
            "Exists" => {
                required.insert(key, [ALL_VALUES].into());
            }
            _ => {}
        }
    }
    required
}

/// Whether `selector` cannot match labels of which another one requires these values.
fn excludes(selector: &LabelSelector, required: &HashMap<&str, HashSet<&str>>) -> bool {
    let allowed = |key: &str, value: &str| {
        required
            .get(key)
            .is_none_or(|values| values.contains(ALL_VALUES) || values.contains(value))
    };
    let differs = |(key, value): (&String, &String)| !allowed(key, value);
    let labels = selector.match_labels.iter().flatten();
    let mut requirements = selector.match_expressions.iter().flatten();
    labels.into_iter().any(differs)
        || requirements.any(|requirement| {
            let key = requirement.key.as_str();
            let values = requirement.values.as_deref().unwrap_or_default();
            let others = required.get(key);
            match requirement.operator.as_str() {
                "In" => others.is_some() && !values.iter().any(|value| allowed(key, value)),
                "NotIn" => others.is_some_and(|others| covers(values, others)),
                "Exists" => others.is_none(),
                "DoesNotExist" => others.is_some(),
                _ => false,
            }
        })
}

fn covers(values: &[String], others: &HashSet<&str>) -> bool {
    let values: HashSet<&str> = values.iter().map(String::as_str).collect();
    others.is_subset(&values)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn selectors_overlap_as_in_go() {
        let file = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/data/go/selector-overlap.jsonl"
        );
        let text = std::fs::read_to_string(file).unwrap();
        let mut count = 0;
        for (at, line) in text.lines().enumerate() {
            let case: serde_json::Value = serde_json::from_str(line).unwrap();
            let [a, b] =
                ["a", "b"].map(|side| serde_json::from_value::<LabelSelector>(case[side].clone()).unwrap());
            assert_eq!(overlap(&a, &b), case["overlapping"], "line {}: {line}", at + 1);
            assert_eq!(overlap(&a, &b), overlap(&b, &a));
            count += 1;
        }
        assert_eq!(count, 150);
    }

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

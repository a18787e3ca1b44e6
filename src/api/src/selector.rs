//! Label selectors.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

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

/// A selector that is matched with many labels: values are looked up and not searched, because tenants may list many.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CompiledSelector {
    requirements: Vec<CompiledRequirement>,
}

#[derive(Clone, Debug, PartialEq)]
struct CompiledRequirement {
    key: String,
    operator: Operator,
    values: BTreeSet<String>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Operator {
    In,
    NotIn,
    Exists,
    DoesNotExist,
    Unknown,
}

impl CompiledSelector {
    /// The keys of the labels that decide whether it matches.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.requirements
            .iter()
            .map(|requirement| requirement.key.as_str())
    }

    /// Whether `labels` match, as [`matches()`] says it.
    #[must_use]
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.requirements.iter().all(|requirement| {
            let value = labels.get(&requirement.key);
            let is_listed = value.is_some_and(|value| requirement.values.contains(value));
            match requirement.operator {
                Operator::In => is_listed,
                Operator::NotIn => !is_listed,
                Operator::Exists => value.is_some(),
                Operator::DoesNotExist => value.is_none(),
                Operator::Unknown => false,
            }
        })
    }
}

impl From<&LabelSelector> for CompiledSelector {
    fn from(selector: &LabelSelector) -> Self {
        let equal = selector.match_labels.iter().flatten();
        let equal = equal.map(|(key, value)| CompiledRequirement {
            key: key.clone(),
            operator: Operator::In,
            values: BTreeSet::from([value.clone()]),
        });
        let requirements = selector.match_expressions.iter().flatten();
        let requirements = requirements.map(|requirement| CompiledRequirement {
            key: requirement.key.clone(),
            operator: match requirement.operator.as_str() {
                "In" => Operator::In,
                "NotIn" => Operator::NotIn,
                "Exists" => Operator::Exists,
                "DoesNotExist" => Operator::DoesNotExist,
                _ => Operator::Unknown,
            },
            values: requirement.values.iter().flatten().cloned().collect(),
        });
        Self {
            requirements: equal.chain(requirements).collect(),
        }
    }
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

/// Whether no labels exist that both selectors match, as far as the values that they require show it; never true if some
/// do.
#[must_use]
pub fn disjoint(one: &LabelSelector, other: &LabelSelector) -> bool {
    let mut allowed: HashMap<&str, HashSet<&str>> = HashMap::new();
    let mut absent: HashSet<&str> = HashSet::new();
    let mut restrict = |key, values: HashSet<_>| match allowed.entry(key) {
        Entry::Vacant(entry) => drop(entry.insert(values)),
        Entry::Occupied(mut entry) => entry.get_mut().retain(|value| values.contains(value)),
    };
    for selector in [one, other] {
        for (key, value) in selector.match_labels.iter().flatten() {
            restrict(key, HashSet::from([value.as_str()]));
        }
        for requirement in selector.match_expressions.iter().flatten() {
            let key = requirement.key.as_str();
            match requirement.operator.as_str() {
                "In" => {
                    let values = requirement.values.iter().flatten();
                    restrict(key, values.map(String::as_str).collect());
                }
                "DoesNotExist" => drop(absent.insert(key)),
                _ => {}
            }
        }
    }
    allowed
        .iter()
        .any(|(key, values)| values.is_empty() || absent.contains(key))
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
    use proptest::prelude::*;

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
            let compiled = CompiledSelector::from(&selector);
            assert_eq!(compiled.matches(&labels), expected, "{compiled:?}");
        }
        assert!(matches(&LabelSelector::default(), &labels));
        assert!(CompiledSelector::default().matches(&labels));
    }

    fn any_selector() -> impl Strategy<Value = LabelSelector> {
        let text = |texts: &'static [&'static str]| prop::sample::select(texts).prop_map(str::to_owned);
        let (keys, values): (_, &[&str]) = (&["a", "b"], &["1", "2", "3"]);
        let labels = prop::collection::btree_map(text(keys), text(values), 0..3);
        let operator = text(&["In", "NotIn", "Exists", "DoesNotExist", "Like"]);
        let values = prop::collection::vec(text(values), 0..3);
        let requirement =
            (text(keys), operator, values).prop_map(|(key, operator, values)| LabelSelectorRequirement {
                key,
                operator,
                values: Some(values),
            });
        let requirements = prop::collection::vec(requirement, 0..3);
        (labels, requirements).prop_map(|(labels, requirements)| LabelSelector {
            match_labels: Some(labels),
            match_expressions: Some(requirements),
        })
    }

    proptest! {
        #[test]
        fn compiled_selector_matches_the_same_labels(
            selector in any_selector(),
            labels in prop::collection::btree_map("[ab]", "[123]", 0..3),
        ) {
            prop_assert_eq!(CompiledSelector::from(&selector).matches(&labels), matches(&selector, &labels));
        }

        /// Labels that both match are none that disjoint selectors have.
        #[test]
        fn disjoint_selectors_match_no_labels_together(
            one in any_selector(),
            other in any_selector(),
            labels in prop::collection::btree_map("[ab]", "[123]", 0..3),
        ) {
            let both = matches(&one, &labels) && matches(&other, &labels);
            prop_assert!(!(both && disjoint(&one, &other)));
            prop_assert_eq!(disjoint(&one, &other), disjoint(&other, &one));
        }
    }

    #[test]
    fn selectors_that_require_other_values_are_disjoint() {
        let selector = |json: serde_json::Value| serde_json::from_value::<LabelSelector>(json).unwrap();
        let app = |name: &str| selector(serde_json::json!({ "matchLabels": { "app": name } }));
        let expression = |operator: &str, values: &[&str]| {
            let one = serde_json::json!({ "key": "app", "operator": operator, "values": values });
            selector(serde_json::json!({ "matchExpressions": [one] }))
        };
        for (one, other, expected) in [
            (app("a"), app("b"), true),
            (app("a"), app("a"), false),
            (app("a"), expression("In", &["a", "b"]), false),
            (app("c"), expression("In", &["a", "b"]), true),
            (app("a"), expression("DoesNotExist", &[]), true),
            (app("a"), expression("Exists", &[]), false),
            (app("a"), LabelSelector::default(), false),
        ] {
            assert_eq!(disjoint(&one, &other), expected, "{one:?} {other:?}");
        }
    }
}

//! Whether two SidecarSets may select the same Pod.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kruise_api::selector::{disjoint, overlap};
use kruise_api::sidecarset::SidecarSetSpec;
use serde::Deserialize;
use serde_json::Value;

/// Which Pods a SidecarSet selects.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scope {
    /// Labels of the Pods.
    pub selector: LabelSelector,
    /// Labels of their namespaces; `None` for all namespaces.
    pub namespace_selector: Option<LabelSelector>,
}

impl Scope {
    /// The scope of a spec; `None` if it has no selector, or one that cannot be read: it selects nothing.
    #[must_use]
    pub fn from_spec(spec: &Value) -> Option<Self> {
        let read = |field: &str| Option::<LabelSelector>::deserialize(&spec[field]).ok();
        Some(Self {
            selector: read("selector")??,
            namespace_selector: read("namespaceSelector")?,
        })
    }

    /// The scope of a set; `None` if it has no selector.
    #[must_use]
    pub fn of(spec: &SidecarSetSpec) -> Option<Self> {
        Some(Self {
            selector: spec.selector.clone()?,
            namespace_selector: spec.namespace_selector.clone(),
        })
    }

    /// Whether some Pod may be in both; an estimate as in [`overlap`].
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let namespaces_overlap = match (&self.namespace_selector, &other.namespace_selector) {
            (Some(one), Some(other)) => overlap(one, other),
            _ => true,
        };
        namespaces_overlap && overlap(&self.selector, &other.selector)
    }
}

/// Whether no Pod can be in the scope of both sets, as far as the labels that they require show it; never true if one
/// can.
#[must_use]
pub fn are_disjoint(one: &SidecarSetSpec, other: &SidecarSetSpec) -> bool {
    let apart = |one: &Option<LabelSelector>, other: &Option<LabelSelector>| {
        let both = one.as_ref().zip(other.as_ref());
        both.is_some_and(|(one, other)| disjoint(one, other))
    };
    apart(&one.selector, &other.selector) || apart(&one.namespace_selector, &other.namespace_selector)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use serde_json::json;

    use super::*;

    #[test]
    fn scopes_overlap_unless_pods_or_namespaces_are_disjoint() {
        let scope = |app: &str, namespace: Option<&str>| {
            let namespaces = namespace.map(|name| json!({ "matchLabels": { "name": name } }));
            let spec =
                json!({ "selector": { "matchLabels": { "app": app } }, "namespaceSelector": namespaces });
            Scope::from_spec(&spec).unwrap()
        };
        for (one, other, overlaps) in [
            (scope("a", None), scope("a", None), true),
            (scope("a", None), scope("b", None), false),
            (scope("a", Some("x")), scope("a", None), true),
            (scope("a", Some("x")), scope("a", Some("x")), true),
            (scope("a", Some("x")), scope("a", Some("y")), false),
            (scope("a", Some("x")), scope("b", Some("x")), false),
        ] {
            assert_eq!(one.overlaps(&other), overlaps, "{one:?} {other:?}");
            assert_eq!(other.overlaps(&one), overlaps, "{one:?} {other:?}");
        }
    }

    #[test]
    fn unreadable_selectors_select_nothing() {
        for spec in [
            json!(null),
            json!([]),
            json!({}),
            json!({ "selector": "x" }),
            json!({ "selector": { "matchLabels": { "a": 1 } } }),
            json!({ "selector": {}, "namespaceSelector": 1 }),
        ] {
            assert_eq!(Scope::from_spec(&spec), None, "{spec}");
        }
        assert!(Scope::from_spec(&json!({ "selector": {}, "namespaceSelector": null })).is_some());
    }
}

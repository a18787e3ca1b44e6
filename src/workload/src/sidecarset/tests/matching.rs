use std::collections::BTreeMap;

use kruise_api::sidecarset::SidecarSetSpec;
use serde_json::json;

use crate::sidecarset::matching::{selects_labels, selects_namespace};

#[test]
fn namespace_selector_needs_the_labels() {
    let all = SidecarSetSpec::default();
    let labels = BTreeMap::from([("env".to_owned(), "prod".to_owned())]);
    let selecting = |selector: serde_json::Value| SidecarSetSpec {
        namespace_selector: serde_json::from_value(selector).unwrap(),
        ..SidecarSetSpec::default()
    };
    let prod = selecting(json!({ "matchLabels": { "env": "prod" } }));
    assert!(selects_namespace(&all, None));
    assert!(selects_namespace(&selecting(json!({})), Some(&labels)));
    assert!(selects_namespace(&prod, Some(&labels)));
    assert!(!selects_namespace(&prod, Some(&BTreeMap::new())));
    assert!(!selects_namespace(&prod, None));
}

#[test]
fn empty_selector_selects_nothing() {
    for selector in [json!(null), json!({}), json!({ "matchLabels": {} })] {
        let spec: SidecarSetSpec = serde_json::from_value(json!({ "selector": selector })).unwrap();
        assert!(!selects_labels(&spec, &BTreeMap::new()));
    }
}

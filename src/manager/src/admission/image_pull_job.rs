//! ImagePullJob: fills in what a job leaves out, and checks the image and its selectors.

use serde_json::json;

use super::node_image::{BACKOFF_LIMIT, TIMEOUT_SECONDS};
use super::review::{Decision, Request};
use kruise_api::image_reference::Reference;
use kruise_api::json::default;
use kruise_api::validation::{FieldErrors, selector};

/// Completion policy, pull policy and limits. A deadline shorter than the usual timeout shortens it.
pub(super) fn fill_in(asked: &Request) -> Decision {
    let mut object = asked.object.to_json();
    if let Some(spec) = object.get_mut("spec") {
        default(spec, &["completionPolicy", "type"], json!("Always"));
        default(spec, &["imagePullPolicy"], json!("IfNotPresent"));
        let deadline = spec["completionPolicy"]["activeDeadlineSeconds"].as_i64();
        let timeout = deadline
            .filter(|deadline| *deadline > 0)
            .unwrap_or(TIMEOUT_SECONDS)
            .min(TIMEOUT_SECONDS);
        default(spec, &["pullPolicy", "timeoutSeconds"], json!(timeout));
        default(spec, &["pullPolicy", "backoffLimit"], json!(BACKOFF_LIMIT));
    }
    Decision::Allow {
        object,
        warnings: Vec::new(),
    }
}

/// The image's reference and the selectors; names of nodes that do not exist are worth a warning.
pub(super) fn check(asked: &Request, unknown_nodes: &[String]) -> Decision {
    let mut errors = FieldErrors::default();
    let spec = &asked.object["spec"];
    // What is stored already was checked, or is older than this check.
    let changed = |field: &str| {
        asked
            .old
            .as_ref()
            .is_none_or(|old| old["spec"][field] != spec[field])
    };
    if changed("image")
        && let Err(why) = Reference::parse(spec["image"].as_str().unwrap_or_default())
    {
        errors.add("spec.image", &spec["image"], why);
    }
    for field in ["selector", "podSelector"] {
        if changed(field) {
            selector::check(&spec[field], &format!("spec.{field}"), &mut errors);
        }
    }
    let warnings = unknown_nodes.iter().map(|name| {
        format!("spec.selector.names: there is no node {name:?} now; the job continues without it")
    });
    Decision::of(errors, asked.object.to_json(), warnings.collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::panic)]

    use serde_json::Value;

    use super::*;
    use crate::admission::review::Object;

    fn request(spec: Value) -> Request {
        Request {
            object: Object::of(json!({ "spec": spec })),
            old: None,
            namespace: "ns".into(),
            version: "v1beta1".into(),
            strict: false,
        }
    }

    fn filled(spec: Value) -> Value {
        match fill_in(&request(spec)) {
            Decision::Allow { object, .. } => object["spec"].clone(),
            Decision::Deny { why, .. } => panic!("{why}"),
        }
    }

    fn denied(spec: Value) -> String {
        match check(&request(spec), &[]) {
            Decision::Deny { code: 422, why } => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_absent_is_filled_in() {
        let spec = filled(json!({ "image": "nginx" }));
        assert_eq!(
            spec,
            json!({
                "image": "nginx",
                "completionPolicy": { "type": "Always" },
                "imagePullPolicy": "IfNotPresent",
                "pullPolicy": { "timeoutSeconds": 600, "backoffLimit": 3 },
            })
        );
        assert_eq!(filled(spec.clone()), spec);
    }

    #[test]
    fn a_deadline_bounds_the_timeout_that_is_filled_in() {
        let spec = filled(json!({ "completionPolicy": { "activeDeadlineSeconds": 30 } }));
        assert_eq!(spec["pullPolicy"]["timeoutSeconds"], 30);
        let spec = filled(json!({ "completionPolicy": { "activeDeadlineSeconds": 3000 } }));
        assert_eq!(spec["pullPolicy"]["timeoutSeconds"], 600);
    }

    #[test]
    fn mistakes_are_named() {
        for (spec, message) in [
            (
                json!({ "image": "Not Valid" }),
                "spec.image: Invalid value: \"Not Valid\": image reference",
            ),
            (json!({}), "spec.image: Required value"),
            (
                json!({ "image": "a", "selector": { "matchLabels": { "a b": "c" } } }),
                "spec.selector.matchLabels[a b]: Invalid value: \"a b\": not a label key",
            ),
            (
                json!({ "image": "a", "selector": { "matchLabels": { "a": "-" } } }),
                "spec.selector.matchLabels[a]: Invalid value: \"-\": not a label value",
            ),
            (
                json!({ "image": "a", "podSelector": { "matchExpressions": [{ "key": "a", "operator": "in" }] } }),
                "spec.podSelector.matchExpressions[0].operator: Invalid value: \"in\": give In,",
            ),
            (
                json!({ "image": "a", "podSelector": { "matchExpressions": [{ "key": "a", "operator": "In" }] } }),
                "spec.podSelector.matchExpressions[0].values: Required value",
            ),
        ] {
            let why = denied(spec);
            assert!(why.contains(message), "{message} is not in {why}");
        }
    }

    #[test]
    fn good_jobs_pass() {
        let spec = json!({ "image": "r.example:5000/a/b:1@sha256:".to_owned() + &"0".repeat(64),
            "selector": { "matchLabels": { "kubernetes.io/os": "linux", "empty": "" },
                "matchExpressions": [{ "key": "x", "operator": "NotIn", "values": ["a.b_c-d"] }] } });
        let Decision::Allow { warnings, .. } = check(&request(spec), &["gone".into()]) else {
            panic!("denied")
        };
        assert!(warnings.iter().any(|warning| warning.contains("\"gone\"")));
    }

    #[test]
    fn what_is_stored_stays_updatable() {
        let mut asked = request(json!({ "image": "Not Valid", "parallelism": 2 }));
        asked.old = Some(Object::of(json!({ "spec": { "image": "Not Valid" } })));
        assert!(matches!(check(&asked, &[]), Decision::Allow { .. }));
    }
}

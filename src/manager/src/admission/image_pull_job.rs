//! ImagePullJob: sets defaults, and validates the image and the selectors.

use serde_json::json;

use super::node_image::{BACKOFF_LIMIT, TIMEOUT_SECONDS};
use super::review::{Decision, Request};
use kruise_api::image_reference::ImageReference;
use kruise_api::json::set_default;
use kruise_api::validation::{FieldErrors, selector};

/// Defaults of completion policy, pull policy and limits. A deadline below the default timeout shortens the timeout.
pub(super) fn set_defaults(request: &Request) -> Decision {
    let mut object = request.object.to_json();
    if let Some(spec) = object.get_mut("spec") {
        set_default(spec, &["completionPolicy", "type"], json!("Always"));
        set_default(spec, &["imagePullPolicy"], json!("IfNotPresent"));
        let deadline = spec["completionPolicy"]["activeDeadlineSeconds"].as_i64();
        let timeout = deadline
            .filter(|deadline| *deadline > 0)
            .unwrap_or(TIMEOUT_SECONDS)
            .min(TIMEOUT_SECONDS);
        set_default(spec, &["pullPolicy", "timeoutSeconds"], json!(timeout));
        set_default(spec, &["pullPolicy", "backoffLimit"], json!(BACKOFF_LIMIT));
    }
    Decision::Allow {
        object,
        warnings: Vec::new(),
    }
}

/// Validates the image reference and the selectors; warns about names of nodes that do not exist.
pub(super) fn validate_request(request: &Request, missing_nodes: &[String]) -> Decision {
    let mut errors = FieldErrors::default();
    let spec = &request.object["spec"];
    // Stored values were validated before, or are older than this check.
    let changed = |field: &str| {
        request
            .old
            .as_ref()
            .is_none_or(|old| old["spec"][field] != spec[field])
    };
    if changed("image")
        && let Err(why) = ImageReference::parse(spec["image"].as_str().unwrap_or_default())
    {
        errors.add("spec.image", &spec["image"], why);
    }
    for field in ["selector", "podSelector"] {
        if changed(field) {
            selector::check(&spec[field], &format!("spec.{field}"), &mut errors);
        }
    }
    let warnings = missing_nodes.iter().map(|name| {
        format!("spec.selector.names: there is no node {name:?} now; the job continues without it")
    });
    Decision::from_errors(errors, request.object.to_json(), warnings.collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::panic)]

    use serde_json::Value;

    use super::*;
    use crate::admission::review::Object;

    fn request(spec: Value) -> Request {
        Request {
            object: Object::for_test(json!({ "spec": spec })),
            old: None,
            namespace: "ns".into(),
            version: "v1beta1".into(),
            strict: false,
        }
    }

    fn filled(spec: Value) -> Value {
        match set_defaults(&request(spec)) {
            Decision::Allow { object, .. } => object["spec"].clone(),
            Decision::Deny { message: why, .. } => panic!("{why}"),
        }
    }

    fn denied(spec: Value) -> String {
        match validate_request(&request(spec), &[]) {
            Decision::Deny {
                code: 422,
                message: why,
            } => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn absent_fields_get_defaults() {
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
    fn deadline_caps_the_default_timeout() {
        let spec = filled(json!({ "completionPolicy": { "activeDeadlineSeconds": 30 } }));
        assert_eq!(spec["pullPolicy"]["timeoutSeconds"], 30);
        let spec = filled(json!({ "completionPolicy": { "activeDeadlineSeconds": 3000 } }));
        assert_eq!(spec["pullPolicy"]["timeoutSeconds"], 600);
    }

    #[test]
    fn invalid_fields_are_refused_by_path() {
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
    fn valid_jobs_are_admitted() {
        let spec = json!({ "image": "r.example:5000/a/b:1@sha256:".to_owned() + &"0".repeat(64),
            "selector": { "matchLabels": { "kubernetes.io/os": "linux", "empty": "" },
                "matchExpressions": [{ "key": "x", "operator": "NotIn", "values": ["a.b_c-d"] }] } });
        let Decision::Allow { warnings, .. } = validate_request(&request(spec), &["gone".into()]) else {
            panic!("denied")
        };
        assert!(warnings.iter().any(|warning| warning.contains("\"gone\"")));
    }

    #[test]
    fn invalid_stored_job_can_be_updated() {
        let mut review_request = request(json!({ "image": "Not Valid", "parallelism": 2 }));
        review_request.old = Some(Object::for_test(json!({ "spec": { "image": "Not Valid" } })));
        assert!(matches!(
            validate_request(&review_request, &[]),
            Decision::Allow { .. }
        ));
    }
}

//! ImagePullJob and ImageListPullJob: sets defaults, and validates images and selectors.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::review::{Decision, Request};
use kruise_api::image_list_pull_job::MAX_IMAGES;
use kruise_api::image_pull_job::default_timeout;
use kruise_api::image_reference::ImageReference;
use kruise_api::json::set_default;
use kruise_api::node_image::DEFAULT_BACKOFF_LIMIT;
use kruise_api::schedule::Schedule;
use kruise_api::validation::{FieldErrors, selector};

/// Defaults of an ImagePullJob.
pub(super) fn set_defaults(request: &Request) -> Decision {
    let mut object = request.object.to_json();
    if let Some(spec) = object.get_mut("spec") {
        set_common_defaults(spec);
        set_default(spec, &["imagePullPolicy"], json!("IfNotPresent"));
    }
    allow(object)
}

/// Defaults of an ImageListPullJob. A new one gets all that its ImagePullJobs get, so that their specs stay equal in
/// OpenKruise, which compares them. For the same reason one of OpenKruise is left without the default that OpenKruise
/// does not set.
pub(super) fn set_list_defaults(request: &Request) -> Decision {
    if request.old.is_none() {
        return set_defaults(request);
    }
    let mut object = request.object.to_json();
    if let Some(spec) = object.get_mut("spec") {
        set_common_defaults(spec);
    }
    allow(object)
}

fn allow(object: Value) -> Decision {
    Decision::Allow {
        object,
        warnings: Vec::new(),
    }
}

/// Defaults of completion policy and pull policy. A deadline below the default timeout shortens the timeout.
fn set_common_defaults(spec: &mut Value) {
    set_default(spec, &["completionPolicy", "type"], json!("Always"));
    let deadline = spec["completionPolicy"]["activeDeadlineSeconds"].as_i64();
    let timeout = default_timeout(deadline);
    set_default(spec, &["pullPolicy", "timeoutSeconds"], json!(timeout));
    set_default(
        spec,
        &["pullPolicy", "backoffLimit"],
        json!(DEFAULT_BACKOFF_LIMIT),
    );
}

/// Whether a field of the spec is new. Stored values were validated before, or are older than this check.
fn has_changed(request: &Request, field: &str) -> bool {
    let old = request.old.as_ref();
    old.is_none_or(|old| old["spec"][field] != request.object["spec"][field])
}

fn check_image(field: &str, image: &Value, errors: &mut FieldErrors) {
    if let Err(why) = ImageReference::parse(image.as_str().unwrap_or_default()) {
        errors.add(field, image, why);
    }
}

/// Validates the image reference and the selectors of an ImagePullJob; warns about names of nodes that do not exist.
pub(super) fn validate_request(request: &Request, missing_nodes: &[String]) -> Decision {
    let mut errors = FieldErrors::default();
    if has_changed(request, "image") {
        check_image("spec.image", &request.object["spec"]["image"], &mut errors);
    }
    check_schedule(request, &mut errors);
    validate_nodes(request, missing_nodes, errors)
}

/// The same for an ImageListPullJob.
pub(super) fn validate_list_request(request: &Request, missing_nodes: &[String]) -> Decision {
    let mut errors = FieldErrors::default();
    if has_changed(request, "images") {
        check_images(request, &mut errors);
    }
    check_schedule(request, &mut errors);
    validate_nodes(request, missing_nodes, errors)
}

fn check_schedule(request: &Request, errors: &mut FieldErrors) {
    let schedule = &request.object["spec"]["schedule"];
    if let (true, Some(text)) = (has_changed(request, "schedule"), schedule.as_str())
        && let Err(why) = Schedule::parse(text)
    {
        errors.add("spec.schedule", schedule, why);
    }
}

fn check_images(request: &Request, errors: &mut FieldErrors) {
    let images_of = |spec: &Value| spec["images"].as_array().cloned().unwrap_or_default();
    let images = images_of(&request.object["spec"]);
    if images.is_empty() {
        return errors.required("spec.images", "give at least one image");
    }
    if images.len() > MAX_IMAGES {
        return errors.too_many("spec.images", images.len(), MAX_IMAGES);
    }
    let stored = request.old.as_ref().map(|old| images_of(&old["spec"]));
    let stored = stored.unwrap_or_default();
    let mut seen = HashSet::new();
    for (at, image) in images.iter().enumerate() {
        let field = format!("spec.images[{at}]");
        if !seen.insert(image.as_str().unwrap_or_default()) {
            errors.duplicate(&field, image);
        } else if !stored.contains(image) {
            check_image(&field, image, errors);
        }
    }
}

/// Validates the selectors.
fn validate_nodes(request: &Request, missing_nodes: &[String], mut errors: FieldErrors) -> Decision {
    let spec = &request.object["spec"];
    for field in ["selector", "podSelector"] {
        if has_changed(request, field) {
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
        let validate = if spec["images"].is_null() {
            validate_request
        } else {
            validate_list_request
        };
        match validate(&request(spec), &[]) {
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
            (
                json!({ "image": "a", "schedule": "0 2 30 2 *" }),
                "spec.schedule: Invalid value: \"0 2 30 2 *\": no such day exists",
            ),
            (
                json!({ "images": ["a"], "schedule": "61 2 * * *" }),
                "spec.schedule: Invalid value: \"61 2 * * *\"",
            ),
            (json!({}), "spec.image: Required value"),
            (json!({ "images": [] }), "spec.images: Required value"),
            (json!({ "images": "a" }), "spec.images: Required value"),
            (
                json!({ "images": ["a", "Not Valid"] }),
                "spec.images[1]: Invalid value: \"Not Valid\": image reference",
            ),
            (
                json!({ "images": [""] }),
                "spec.images[0]: Invalid value: \"\": image reference",
            ),
            (
                json!({ "images": ["a:1", "b", "a:1"] }),
                "spec.images[2]: Duplicate value: \"a:1\"",
            ),
            (
                json!({ "images": vec!["a"; MAX_IMAGES + 1] }),
                "spec.images: Too many: 256: must have at most 255 items",
            ),
            (
                json!({ "images": ["a"], "selector": { "matchLabels": { "a b": "c" } } }),
                "spec.selector.matchLabels[a b]: Invalid value: \"a b\": not a label key",
            ),
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
        let mut review_request = request(json!({ "images": ["Not Valid", "a"] }));
        review_request.old = Some(Object::for_test(json!({ "spec": { "images": ["Not Valid"] } })));
        assert!(matches!(
            validate_list_request(&review_request, &[]),
            Decision::Allow { .. }
        ));
    }

    #[test]
    fn list_gets_the_defaults_of_its_jobs_only_when_it_is_new() {
        let mut expected = json!({ "images": ["a"], "completionPolicy": { "type": "Always" },
            "pullPolicy": { "timeoutSeconds": 600, "backoffLimit": 3 } });
        for is_new in [false, true] {
            let mut review_request = request(json!({ "images": ["a"] }));
            if is_new {
                expected["imagePullPolicy"] = json!("IfNotPresent");
            } else {
                review_request.old = Some(Object::for_test(json!({ "spec": { "images": ["b"] } })));
            }
            let Decision::Allow { object, .. } = set_list_defaults(&review_request) else {
                panic!("denied")
            };
            assert_eq!(object["spec"], expected);
        }
    }
}

//! NodeImage: sets the defaults of tags, and validates names.
//!
//! Our own manager writes NodeImages that need neither, and its writes do not pass this webhook.

use std::collections::BTreeSet;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::review::{Decision, Request};
use kruise_api::image_reference::ImageReference;
use kruise_api::json::set_default;
use kruise_api::node_image::{
    DEFAULT_BACKOFF_LIMIT, DEFAULT_TIMEOUT_SECONDS, MAX_IMAGE_NAME_CHARS, MAX_TAGS,
};
use kruise_api::validation::FieldErrors;

/// Rejects objects that no node can serve and that would take long to default: each change repeats the name of its
/// image.
pub(super) fn reject_oversized(object: &Value) -> Option<Decision> {
    let mut errors = FieldErrors::default();
    let images = object["spec"]["images"].as_object();
    let tags = |image: &Value| image["tags"].as_array().map_or(0, Vec::len);
    let all: usize = images.into_iter().flatten().map(|(_, image)| tags(image)).sum();
    if all > MAX_TAGS {
        errors.too_many("spec.images[].tags", all, MAX_TAGS);
    }
    for (name, _) in images
        .into_iter()
        .flatten()
        .filter(|(name, _)| name.len() > MAX_IMAGE_NAME_CHARS)
    {
        let why = format!("the name of an image may not be longer than {MAX_IMAGE_NAME_CHARS} characters");
        errors.add("spec.images", &json!(name), why);
    }
    (!errors.is_empty()).then(|| Decision::from_errors(errors, Value::Null, Vec::new()))
}

/// Sorts the tags, and sets their creation time and limits.
pub(super) fn set_defaults(request: &Request, now: Timestamp) -> Decision {
    let mut object = request.object.to_json();
    let created = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let images = object
        .get_mut("spec")
        .and_then(|spec| spec.get_mut("images")?.as_object_mut());
    for image in images.into_iter().flat_map(|images| images.values_mut()) {
        let Some(tags) = image.get_mut("tags").and_then(Value::as_array_mut) else {
            continue;
        };
        tags.sort_by(|one, other| one["tag"].as_str().cmp(&other["tag"].as_str()));
        for tag in tags.iter_mut().filter(|tag| tag.is_object()) {
            set_default(tag, &["createdAt"], json!(created));
            set_default(
                tag,
                &["pullPolicy", "timeoutSeconds"],
                json!(DEFAULT_TIMEOUT_SECONDS),
            );
            set_default(tag, &["pullPolicy", "backoffLimit"], json!(DEFAULT_BACKOFF_LIMIT));
        }
    }
    Decision::Allow {
        object,
        warnings: Vec::new(),
    }
}

/// Requires valid image references, unique tags, and a TTL for each tag.
pub(super) fn validate_request(request: &Request) -> Decision {
    let mut errors = FieldErrors::default();
    let images = request.object["spec"]["images"].as_object();
    for (name, image) in images.into_iter().flatten() {
        // Stored values were validated before, or are older than this check.
        if request
            .old
            .as_ref()
            .is_some_and(|old| old["spec"]["images"][name] == *image)
        {
            continue;
        }
        let mut tags = BTreeSet::new();
        for (index, tag) in image["tags"].as_array().into_iter().flatten().enumerate() {
            let field = format!("spec.images[{name}].tags[{index}]");
            let text = tag["tag"].as_str().unwrap_or_default();
            if let Err(why) = ImageReference::from_name_and_tag(name, text) {
                errors.add(format!("{field}.tag"), &tag["tag"], why);
            }
            if !tags.insert(text) {
                errors.add(
                    format!("{field}.tag"),
                    &tag["tag"],
                    "this tag is in the list twice",
                );
            }
            if tag["createdAt"].is_null() {
                errors.add(
                    format!("{field}.createdAt"),
                    &Value::Null,
                    "when the tag was requested",
                );
            }
            if tag["pullPolicy"]["ttlSecondsAfterFinished"].is_null() {
                errors.add(
                    format!("{field}.pullPolicy.ttlSecondsAfterFinished"),
                    &Value::Null,
                    "seconds after its end when the tag is removed",
                );
            }
        }
    }
    Decision::from_errors(errors, request.object.to_json(), Vec::new())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use proptest::prelude::*;

    use super::*;
    use crate::admission::review::Object;

    fn request(images: Value) -> Request {
        Request {
            object: Object::for_test(json!({ "spec": { "images": images } })),
            old: None,
            namespace: String::new(),
            version: "v1beta1".into(),
            strict: false,
        }
    }

    fn filled(images: Value) -> Value {
        match set_defaults(&request(images), "2026-01-02T03:04:05Z".parse().unwrap()) {
            Decision::Allow { object, .. } => object["spec"]["images"].clone(),
            Decision::Deny { message: why, .. } => panic!("{why}"),
        }
    }

    #[test]
    fn absent_fields_get_defaults() {
        let images = json!({ "nginx": { "tags": [
            { "tag": "b", "createdAt": "2025-01-01T00:00:00Z", "pullPolicy": { "timeoutSeconds": 5 } },
            { "tag": "a" },
        ] } });
        assert_eq!(
            filled(images)["nginx"]["tags"],
            json!([
                { "tag": "a", "createdAt": "2026-01-02T03:04:05Z",
                  "pullPolicy": { "timeoutSeconds": 600, "backoffLimit": 3 } },
                { "tag": "b", "createdAt": "2025-01-01T00:00:00Z",
                  "pullPolicy": { "timeoutSeconds": 5, "backoffLimit": 3 } },
            ])
        );
    }

    #[test]
    fn object_without_tags_is_unchanged() {
        for object in [
            json!({}),
            json!({ "spec": {} }),
            json!({ "spec": { "images": { "a": {} } } }),
        ] {
            let review_request = Request {
                object: Object::for_test(object.clone()),
                old: None,
                namespace: String::new(),
                version: "v1beta1".into(),
                strict: false,
            };
            let Decision::Allow { object: filled, .. } = set_defaults(&review_request, Timestamp::UNIX_EPOCH)
            else {
                panic!("denied");
            };
            assert_eq!(filled, *Object::for_test(object));
        }
    }

    #[test]
    fn invalid_tags_are_refused_by_path() {
        let good = json!({ "ttlSecondsAfterFinished": 1 });
        let images = json!({ "UPPER": { "tags": [{ "tag": "1", "createdAt": "x", "pullPolicy": good }] },
            "nginx": { "tags": [
                { "tag": "1", "createdAt": "x", "pullPolicy": good },
                { "tag": "1", "createdAt": "x", "pullPolicy": good },
                { "tag": "2" },
        ] } });
        let Decision::Deny {
            code: 422,
            message: why,
        } = validate_request(&request(images))
        else {
            panic!("allowed")
        };
        for part in [
            "spec.images[UPPER].tags[0].tag: Invalid value: \"1\": image reference \"UPPER:1\" is not valid",
            "spec.images[nginx].tags[1].tag: Invalid value: \"1\": this tag is in the list twice",
            "spec.images[nginx].tags[2].createdAt: Required value",
            "spec.images[nginx].tags[2].pullPolicy.ttlSecondsAfterFinished: Required value",
        ] {
            assert!(why.contains(part), "{part} is not in {why}");
        }
    }

    #[test]
    fn invalid_stored_tags_can_be_updated() {
        let bad = json!({ "tags": [{ "tag": "1" }] });
        let mut review_request = request(json!({ "UPPER": bad, "nginx": { "tags": [] } }));
        review_request.old = Some(Object::for_test(
            json!({ "spec": { "images": { "UPPER": bad } } }),
        ));
        assert!(matches!(
            validate_request(&review_request),
            Decision::Allow { .. }
        ));
    }

    proptest! {
        /// Defaulting twice changes nothing.
        #[test]
        fn defaulting_is_idempotent(tags in proptest::collection::vec(("[a-c]{0,2}", proptest::option::of(0..9)), 0..4)) {
            let tags: Vec<_> = tags.into_iter().map(|(tag, timeout)| match timeout {
                Some(timeout) => json!({ "tag": tag, "pullPolicy": { "timeoutSeconds": timeout } }),
                None => json!({ "tag": tag }),
            }).collect();
            let once = filled(json!({ "a": { "tags": tags } }));
            prop_assert_eq!(filled(once.clone()), once);
        }
    }
}

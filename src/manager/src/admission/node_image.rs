//! NodeImage: fills in what a tag leaves out, and checks names.
//!
//! Our own manager writes NodeImages that need none of this, and its writes do not come here.

use std::collections::BTreeSet;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::review::{Decision, Request};
use kruise_api::image_reference::Reference;
use kruise_api::json::default;
use kruise_api::node_image::{LONGEST_NAME, MOST_TAGS};
use kruise_api::validation::FieldErrors;

/// Seconds of one attempt when a tag does not say.
pub(super) const TIMEOUT_SECONDS: i64 = 600;
/// Repetitions when a tag does not say.
pub(super) const BACKOFF_LIMIT: i64 = 3;

/// What no node is asked for, and would take long to fill in: each change names its image.
pub(super) fn too_long(object: &Value) -> Option<Decision> {
    let mut errors = FieldErrors::default();
    let images = object["spec"]["images"].as_object();
    let tags = |image: &Value| image["tags"].as_array().map_or(0, Vec::len);
    let all: usize = images.into_iter().flatten().map(|(_, image)| tags(image)).sum();
    if all > MOST_TAGS {
        errors.too_many("spec.images[].tags", all, MOST_TAGS);
    }
    for (name, _) in images
        .into_iter()
        .flatten()
        .filter(|(name, _)| name.len() > LONGEST_NAME)
    {
        let why = format!("the name of an image may not be longer than {LONGEST_NAME} characters");
        errors.add("spec.images", &json!(name), why);
    }
    (!errors.is_empty()).then(|| Decision::of(errors, Value::Null, Vec::new()))
}

/// Tags in order, with creation time and limits.
pub(super) fn fill_in(asked: &Request, now: Timestamp) -> Decision {
    let mut object = asked.object.to_json();
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
            default(tag, &["createdAt"], json!(created));
            default(tag, &["pullPolicy", "timeoutSeconds"], json!(TIMEOUT_SECONDS));
            default(tag, &["pullPolicy", "backoffLimit"], json!(BACKOFF_LIMIT));
        }
    }
    Decision::Allow {
        object,
        warnings: Vec::new(),
    }
}

/// Names and tags that make references, each tag once, and a time to go for each.
pub(super) fn check(asked: &Request) -> Decision {
    let mut errors = FieldErrors::default();
    let images = asked.object["spec"]["images"].as_object();
    for (name, image) in images.into_iter().flatten() {
        // What is stored already was checked, or is older than this check.
        if asked
            .old
            .as_ref()
            .is_some_and(|old| old["spec"]["images"][name] == *image)
        {
            continue;
        }
        let mut seen = BTreeSet::new();
        for (at, tag) in image["tags"].as_array().into_iter().flatten().enumerate() {
            let field = format!("spec.images[{name}].tags[{at}]");
            let text = tag["tag"].as_str().unwrap_or_default();
            if let Err(why) = Reference::from_name_and_tag(name, text) {
                errors.add(format!("{field}.tag"), &tag["tag"], why);
            }
            if !seen.insert(text) {
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
                    "when the tag was asked for",
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
    Decision::of(errors, asked.object.to_json(), Vec::new())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use proptest::prelude::*;

    use super::*;
    use crate::admission::review::Object;

    fn request(images: Value) -> Request {
        Request {
            object: Object::of(json!({ "spec": { "images": images } })),
            old: None,
            namespace: String::new(),
            version: "v1beta1".into(),
            strict: false,
        }
    }

    fn filled(images: Value) -> Value {
        match fill_in(&request(images), "2026-01-02T03:04:05Z".parse().unwrap()) {
            Decision::Allow { object, .. } => object["spec"]["images"].clone(),
            Decision::Deny { why, .. } => panic!("{why}"),
        }
    }

    #[test]
    fn what_is_absent_is_filled_in() {
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
    fn an_object_that_says_nothing_stays_as_it_is() {
        for object in [
            json!({}),
            json!({ "spec": {} }),
            json!({ "spec": { "images": { "a": {} } } }),
        ] {
            let asked = Request {
                object: Object::of(object.clone()),
                old: None,
                namespace: String::new(),
                version: "v1beta1".into(),
                strict: false,
            };
            let Decision::Allow { object: filled, .. } = fill_in(&asked, Timestamp::UNIX_EPOCH) else {
                panic!("denied");
            };
            assert_eq!(filled, *Object::of(object));
        }
    }

    #[test]
    fn mistakes_are_named() {
        let good = json!({ "ttlSecondsAfterFinished": 1 });
        let images = json!({ "UPPER": { "tags": [{ "tag": "1", "createdAt": "x", "pullPolicy": good }] },
            "nginx": { "tags": [
                { "tag": "1", "createdAt": "x", "pullPolicy": good },
                { "tag": "1", "createdAt": "x", "pullPolicy": good },
                { "tag": "2" },
        ] } });
        let Decision::Deny { code: 422, why } = check(&request(images)) else {
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
    fn what_is_stored_stays_updatable() {
        let bad = json!({ "tags": [{ "tag": "1" }] });
        let mut asked = request(json!({ "UPPER": bad, "nginx": { "tags": [] } }));
        asked.old = Some(Object::of(json!({ "spec": { "images": { "UPPER": bad } } })));
        assert!(matches!(check(&asked), Decision::Allow { .. }));
    }

    proptest! {
        /// Filling in what was filled in changes nothing.
        #[test]
        fn filling_in_is_idempotent(tags in proptest::collection::vec(("[a-c]{0,2}", proptest::option::of(0..9)), 0..4)) {
            let tags: Vec<_> = tags.into_iter().map(|(tag, timeout)| match timeout {
                Some(timeout) => json!({ "tag": tag, "pullPolicy": { "timeoutSeconds": timeout } }),
                None => json!({ "tag": tag }),
            }).collect();
            let once = filled(json!({ "a": { "tags": tags } }));
            prop_assert_eq!(filled(once.clone()), once);
        }
    }
}

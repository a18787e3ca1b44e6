//! Types of the decisions: the content of a review, and the answer to it.

use serde_json::Value;

use kruise_api::validation::FieldErrors;
use kruise_api::validation::labels::{MAX_ANNOTATIONS_BYTES, annotation_bytes};

/// The part of an admission review that decisions use.
#[derive(Clone, Debug)]
pub(super) struct Request {
    /// The object of the request, after the change.
    pub object: Object,
    /// The stored object, for updates.
    pub old: Option<Object>,
    /// Namespace of the object; empty for cluster-scoped objects.
    pub namespace: String,
    /// Version of the user's request; the objects here are in v1beta1.
    pub version: String,
    /// Whether unknown fields are rejected (`fieldValidation=Strict`); kubectl's default.
    pub strict: bool,
}

/// A read-only JSON object with a checked structure: required objects exist.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Object(Value);

impl Object {
    /// Requires an object at the root and in `metadata`, nothing but objects in `spec`, `status`, labels and annotations,
    /// and no more annotations than an object may have.
    ///
    /// # Errors
    /// A message with the field, its value and the expected type.
    pub fn parse(value: Value) -> Result<Self, String> {
        let object = |field: &str, value: &Value| match value {
            Value::Object(_) => Ok(()),
            value => {
                let mut errors = FieldErrors::default();
                errors.add(field, value, "must be an object");
                Err(errors.into_messages().concat())
            }
        };
        object("object", &value)?;
        object("metadata", &value["metadata"])?;
        let metadata =
            ["labels", "annotations"].map(|field| (format!("metadata.{field}"), &value["metadata"][field]));
        let parts = ["spec", "status"].map(|field| (field.to_owned(), &value[field]));
        for (field, part) in metadata
            .into_iter()
            .chain(parts)
            .filter(|(_, part)| !part.is_null())
        {
            object(&field, part)?;
        }
        // The API server refuses it, too, but after the webhooks, and JSON in annotations may take a hundred times their
        // length when it is parsed.
        if annotation_bytes(&value["metadata"]["annotations"]) > MAX_ANNOTATIONS_BYTES {
            let mut errors = FieldErrors::default();
            errors.too_long("metadata.annotations", MAX_ANNOTATIONS_BYTES);
            return Err(errors.into_messages().concat());
        }
        Ok(Self(value))
    }

    /// A copy to change.
    pub fn to_json(&self) -> Value {
        self.0.clone()
    }

    /// For tests; adds `metadata` if it is missing.
    #[cfg(test)]
    #[allow(clippy::panic)]
    pub fn for_test(mut value: Value) -> Self {
        kruise_api::json::set_default(&mut value, &["metadata"], serde_json::json!({}));
        Self::parse(value).unwrap_or_else(|why| panic!("{why}"))
    }
}

impl std::ops::Deref for Object {
    type Target = Value;
    fn deref(&self) -> &Value {
        &self.0
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Decision {
    /// Allows the request, with changes and warnings.
    Allow {
        /// The object with all changes.
        object: Value,
        /// Printed by kubectl.
        warnings: Vec<String>,
    },
    /// Rejects the request.
    Deny {
        /// HTTP status of the user's request.
        code: u16,
        /// The field, its value and what to do.
        message: String,
    },
}

impl Decision {
    /// Rejects the request if there are errors, else allows it with `object`.
    pub fn from_errors(errors: FieldErrors, object: Value, warnings: Vec<String>) -> Self {
        if errors.is_empty() {
            return Self::Allow { object, warnings };
        }
        Self::Deny {
            code: 422,
            message: errors.into_messages().join("; "),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use serde_json::json;

    use super::*;
    use kruise_api::validation::truncate;

    #[test]
    fn objects_are_required_at_every_place_read() {
        let object = |part: Value| {
            let mut object = json!({ "metadata": { "labels": {} }, "spec": {} });
            json_patch::merge(&mut object, &part);
            Object::parse(object)
        };
        assert!(object(json!({})).is_ok());
        assert!(object(json!({ "spec": null, "metadata": { "labels": null } })).is_ok());
        for wrong in [json!("x"), json!(1), json!(true), json!([]), json!([{}])] {
            let why = |field: &str| format!("{field}: Invalid value: {wrong}: must be an object");
            assert_eq!(Object::parse(wrong.clone()).unwrap_err(), why("object"));
            for field in ["metadata", "spec", "status"] {
                assert_eq!(object(json!({ field: wrong })).unwrap_err(), why(field));
            }
            for field in ["labels", "annotations"] {
                let got = object(json!({ "metadata": { field: wrong } })).unwrap_err();
                assert_eq!(got, why(&format!("metadata.{field}")));
            }
        }
        let annotations =
            |length: usize| json!({ "metadata": { "annotations": { "a": "x".repeat(length) } } });
        assert!(object(annotations(MAX_ANNOTATIONS_BYTES - 1)).is_ok());
        let long = object(annotations(MAX_ANNOTATIONS_BYTES)).unwrap_err();
        assert_eq!(
            long,
            "metadata.annotations: Too long: may not be more than 262144 bytes"
        );
        let none = object(json!({ "metadata": null })).unwrap_err();
        assert_eq!(none, "metadata: Required value: must be an object");
    }

    #[test]
    fn refusal_messages_are_bounded() {
        let (mut errors, long) = (FieldErrors::default(), "é".repeat(1 << 20));
        for _ in 0..100_000 {
            errors.add(&long, &json!(long), "too long");
        }
        let Decision::Deny { message: why, .. } = Decision::from_errors(errors, Value::Null, Vec::new())
        else {
            panic!("allowed")
        };
        assert!(why.len() < 100 << 10, "{}", why.len());
        assert_eq!(truncate("short", 5), "short");
        assert_eq!(truncate("abcdef", 5), "abcde…");
    }
}

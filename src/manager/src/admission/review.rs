//! A review as decisions see it: what the API server asks, and how our answers look.

use serde_json::Value;

use kruise_api::validation::FieldErrors;

/// What an answer is about.
#[derive(Clone, Debug)]
pub(super) struct Request {
    /// The object as asked for.
    pub object: Object,
    /// The object as it is, on updates.
    pub old: Option<Object>,
    /// Namespace of the object; empty for cluster-wide ones.
    pub namespace: String,
    /// Version that the user speaks; the objects here are in v1beta1.
    pub version: String,
    /// Whether the user wants unknown fields to be refused (`fieldValidation=Strict`), as kubectl does unless told otherwise.
    pub strict: bool,
}

/// An object as decisions may rely on it: JSON with objects where every object has them. It can be read only.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Object(Value);

impl Object {
    /// Takes what has an object at its root and in `metadata`, and none but objects in `spec`, `status`, labels and
    /// annotations.
    ///
    /// # Errors
    /// Field, value and what it must be, in words.
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
        Ok(Self(value))
    }

    /// A copy to change.
    pub fn to_json(&self) -> Value {
        self.0.clone()
    }

    /// The object of a test, whose metadata does not matter where there is none.
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

/// An answer.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Decision {
    /// Yes, with these changes, and these words to the user.
    Allow {
        /// The object as it should be.
        object: Value,
        /// Shown by kubectl.
        warnings: Vec<String>,
    },
    /// No.
    Deny {
        /// HTTP status that the user gets.
        code: u16,
        /// Field, value and what to do, in words.
        message: String,
    },
}

impl Decision {
    /// No when there are errors, else yes with `object`.
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

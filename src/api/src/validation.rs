//! Validation beyond the schemas: errors in the format of `field.ErrorList`, for admission and for controllers, which
//! get objects that were stored while no webhook served.

pub mod cloneset;
pub mod labels;
pub mod launch_priority;
pub mod selector;

use std::borrow::Cow;
use std::fmt::{self, Display, Write};

use serde_json::Value;

/// How many errors of one object are reported: an object has room for millions.
const MAX_ERRORS: usize = 64;
/// Characters of a field's path that a message repeats: keys in it may be as long as an object.
pub const MAX_FIELD_CHARS: usize = 300;
/// Characters of a value that a message repeats.
pub const MAX_VALUE_CHARS: usize = 300;
/// Characters of an error's explanation, which may repeat names.
const MAX_DETAIL_CHARS: usize = 1000;

/// As much of a text as a message has room for.
#[must_use]
pub fn truncate(text: &str, max_chars: usize) -> Cow<'_, str> {
    match text.char_indices().nth(max_chars) {
        Some((end, _)) => Cow::Owned(format!("{}…", text.get(..end).unwrap_or_default())),
        None => Cow::Borrowed(text),
    }
}

/// The same for what is not a text yet; the rest is not formatted at all.
fn format_truncated(what: impl Display, max_chars: usize) -> String {
    let mut out = Truncated {
        text: String::new(),
        chars_left: max_chars,
    };
    // The only error is that there is no more room.
    let _ = write!(out, "{what}");
    out.text
}

struct Truncated {
    text: String,
    chars_left: usize,
}

impl Write for Truncated {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let Some((end, _)) = text.char_indices().nth(self.chars_left) else {
            self.chars_left -= text.chars().count().min(self.chars_left);
            self.text.push_str(text);
            return Ok(());
        };
        self.text.push_str(text.get(..end).unwrap_or_default());
        self.text.push('…');
        Err(fmt::Error)
    }
}

/// What is wrong with a field, as Go's `field.ErrorType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorType {
    /// A required value is missing.
    Required,
    /// The value is not allowed here.
    Invalid,
    /// The value exists already.
    Duplicate,
    /// The field must not be set.
    Forbidden,
    /// The value is none of the supported ones.
    NotSupported,
    /// What the value refers to does not exist.
    NotFound,
    /// The value is too long.
    TooLong,
    /// The list has too many items.
    TooMany,
}

impl ErrorType {
    /// The name in the API: `type` of a `StatusCause`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Required => "FieldValueRequired",
            Self::Invalid => "FieldValueInvalid",
            Self::Duplicate => "FieldValueDuplicate",
            Self::Forbidden => "FieldValueForbidden",
            Self::NotSupported => "FieldValueNotSupported",
            Self::NotFound => "FieldValueNotFound",
            Self::TooLong => "FieldValueTooLong",
            Self::TooMany => "FieldValueTooMany",
        }
    }
}

/// As messages begin.
impl Display for ErrorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Required => "Required value",
            Self::Invalid => "Invalid value",
            Self::Duplicate => "Duplicate value",
            Self::Forbidden => "Forbidden",
            Self::NotSupported => "Unsupported value",
            Self::NotFound => "Not found",
            Self::TooLong => "Too long",
            Self::TooMany => "Too many",
        })
    }
}

/// An error of the user, as Go's `field.Error`. Its texts are bounded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// What is wrong.
    pub error_type: ErrorType,
    /// Path of the field, as `spec.containers[0].name`.
    pub field: String,
    /// The value as JSON; empty for types whose message does not repeat it.
    pub value: String,
    /// What to do; may be empty.
    pub detail: String,
}

impl Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.error_type)?;
        for part in [&self.value, &self.detail] {
            if !part.is_empty() {
                write!(f, ": {part}")?;
            }
        }
        Ok(())
    }
}

/// Errors of the user: for each the field, its value, and what is wrong with it.
#[derive(Debug, Default)]
pub struct FieldErrors(Vec<Entry>);

#[derive(Debug)]
enum Entry {
    Field(FieldError),
    Message(String),
}

impl FieldErrors {
    /// Adds an error: that the value is required if it is null, else that it is invalid.
    pub fn add(&mut self, field: impl Display, value: &Value, why: impl Display) {
        match value {
            Value::Null => self.required(field, why),
            value => self.invalid(field, value, why),
        }
    }

    /// Adds the error that a value is missing.
    pub fn required(&mut self, field: impl Display, detail: impl Display) {
        self.add_typed(ErrorType::Required, field, None, detail);
    }

    /// Adds the error that a value is not allowed.
    pub fn invalid(&mut self, field: impl Display, value: &Value, detail: impl Display) {
        self.add_typed(ErrorType::Invalid, field, Some(value), detail);
    }

    /// Adds the error that a value exists already.
    pub fn duplicate(&mut self, field: impl Display, value: &Value) {
        self.add_typed(ErrorType::Duplicate, field, Some(value), "");
    }

    /// Adds the error that a field must not be set.
    pub fn forbidden(&mut self, field: impl Display, detail: impl Display) {
        self.add_typed(ErrorType::Forbidden, field, None, detail);
    }

    /// Adds the error that a value is none of `supported`.
    pub fn not_supported(&mut self, field: impl Display, value: &Value, supported: &[&str]) {
        let quoted: Vec<String> = supported.iter().map(|one| format!("{one:?}")).collect();
        let detail = format!("supported values: {}", quoted.join(", "));
        self.add_typed(ErrorType::NotSupported, field, Some(value), detail);
    }

    /// Adds the error that what the value refers to does not exist.
    pub fn not_found(&mut self, field: impl Display, value: &Value) {
        self.add_typed(ErrorType::NotFound, field, Some(value), "");
    }

    /// Adds the error that a value has more than `max` bytes.
    pub fn too_long(&mut self, field: impl Display, max: usize) {
        let detail = format!("may not be more than {max} bytes");
        self.add_typed(ErrorType::TooLong, field, None, detail);
    }

    /// Adds the error that a list has too many items.
    pub fn too_many(&mut self, field: &str, count: usize, max: usize) {
        let detail = format!("must have at most {max} items");
        self.add_typed(ErrorType::TooMany, field, Some(&count.into()), detail);
    }

    fn add_typed(
        &mut self,
        error_type: ErrorType,
        field: impl Display,
        value: Option<&Value>,
        detail: impl Display,
    ) {
        if self.is_full() {
            return;
        }
        self.0.push(Entry::Field(FieldError {
            error_type,
            field: format_truncated(field, MAX_FIELD_CHARS),
            value: value.map_or_else(String::new, |value| format_truncated(value, MAX_VALUE_CHARS)),
            detail: format_truncated(detail, MAX_DETAIL_CHARS),
        }));
    }

    /// Adds a complete message.
    pub fn push(&mut self, message: String) {
        if !self.is_full() {
            self.0.push(Entry::Message(message));
        }
    }

    /// Adds the errors of another list.
    pub fn append(&mut self, other: Self) {
        let room = MAX_ERRORS.saturating_sub(self.0.len());
        self.0.extend(other.0.into_iter().take(room));
    }

    /// Whether there are no errors.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether further errors are ignored.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.0.len() >= MAX_ERRORS
    }

    /// The errors of fields, without those that were added as messages.
    pub fn fields(&self) -> impl Iterator<Item = &FieldError> {
        self.0.iter().filter_map(|entry| match entry {
            Entry::Field(error) => Some(error),
            Entry::Message(_) => None,
        })
    }

    /// One message per error.
    #[must_use]
    pub fn into_messages(self) -> Vec<String> {
        let message = |entry| match entry {
            Entry::Field(error) => error.to_string(),
            Entry::Message(message) => message,
        };
        self.0.into_iter().map(message).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn messages_are_those_of_field_errors() {
        let mut errors = FieldErrors::default();
        errors.required("a", "give it");
        errors.required("a", "");
        errors.invalid("a", &json!("x"), "no");
        errors.duplicate("a[1]", &json!("x"));
        errors.forbidden("a", "may not be set");
        errors.not_supported("a", &json!("x"), &["y", "z"]);
        errors.not_found("a", &json!("x"));
        errors.too_long("a", 9);
        errors.too_many("a", 3, 2);
        errors.push("whole".to_owned());
        errors.add("a", &Value::Null, "why");
        errors.add("a", &json!(1), "why");
        assert_eq!(errors.fields().count(), 11);
        assert_eq!(
            errors.into_messages(),
            [
                "a: Required value: give it",
                "a: Required value",
                "a: Invalid value: \"x\": no",
                "a[1]: Duplicate value: \"x\"",
                "a: Forbidden: may not be set",
                "a: Unsupported value: \"x\": supported values: \"y\", \"z\"",
                "a: Not found: \"x\"",
                "a: Too long: may not be more than 9 bytes",
                "a: Too many: 3: must have at most 2 items",
                "whole",
                "a: Required value: why",
                "a: Invalid value: 1: why",
            ]
        );
    }

    #[test]
    fn what_an_error_repeats_is_bounded() {
        let (mut errors, long) = (FieldErrors::default(), "é".repeat(1 << 16));
        for _ in 0..=MAX_ERRORS {
            errors.invalid(&long, &json!({ "a": [long] }), &long);
        }
        assert!(errors.is_full());
        let messages = errors.into_messages();
        assert_eq!(messages.len(), MAX_ERRORS);
        let all = MAX_FIELD_CHARS + MAX_VALUE_CHARS + MAX_DETAIL_CHARS;
        for message in messages {
            assert!(message.chars().count() < all + 30, "{}", message.len());
            assert!(message.contains(r#"Invalid value: {"a":["éé"#) && message.ends_with("éé…"));
        }
        for max in 0..5 {
            assert_eq!(format_truncated("abé", max), truncate("abé", max));
        }
    }
}

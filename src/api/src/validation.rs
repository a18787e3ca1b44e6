//! Validation beyond the schemas: errors in the format of `field.ErrorList`, for admission and for controllers, which
//! get objects that were stored while no webhook served.

pub mod cloneset;
pub mod selector;

use std::borrow::Cow;

use serde_json::Value;

/// How many errors of one object are reported: an object has room for millions.
const MAX_ERRORS: usize = 64;
/// Characters of a field's path that a message repeats: keys in it may be as long as an object.
pub const MAX_FIELD_CHARS: usize = 300;
/// Characters of a value that a message repeats.
pub const MAX_VALUE_CHARS: usize = 300;

/// As much of a text as a message has room for.
#[must_use]
pub fn truncate(text: &str, max_chars: usize) -> Cow<'_, str> {
    match text.char_indices().nth(max_chars) {
        Some((end, _)) => Cow::Owned(format!("{}…", text.get(..end).unwrap_or_default())),
        None => Cow::Borrowed(text),
    }
}

/// Errors of the user: for each the field, its value, and what is wrong with it.
#[derive(Debug, Default)]
pub struct FieldErrors(Vec<String>);

impl FieldErrors {
    /// Adds an error.
    pub fn add(&mut self, field: impl std::fmt::Display, value: &Value, why: impl std::fmt::Display) {
        if self.0.len() == MAX_ERRORS {
            return;
        }
        let field = field.to_string();
        let field = truncate(&field, MAX_FIELD_CHARS);
        self.0.push(match value {
            Value::Null => format!("{field}: Required value: {why}"),
            value => {
                let value = value.to_string();
                format!(
                    "{field}: Invalid value: {}: {why}",
                    truncate(&value, MAX_VALUE_CHARS)
                )
            }
        });
    }

    /// Adds the error that a list has too many items.
    pub fn too_many(&mut self, field: &str, count: usize, max: usize) {
        self.push(format!(
            "{field}: Too many: {count}: must have at most {max} items"
        ));
    }

    /// Adds a complete message.
    pub fn push(&mut self, message: String) {
        if self.0.len() < MAX_ERRORS {
            self.0.push(message);
        }
    }

    /// Whether there are no errors.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// One message per error.
    #[must_use]
    pub fn into_messages(self) -> Vec<String> {
        self.0
    }
}

//! Validation beyond the schemas: errors in the words of `field.ErrorList`, for admission and for controllers, which meet
//! objects that were stored while no webhook served.

pub mod cloneset;
pub mod selector;

use std::borrow::Cow;

use serde_json::Value;

/// How many mistakes of one object are named: an object has room for millions.
const MAX_ERRORS: usize = 64;
/// The most of a field's path that is repeated in a message, in characters: keys in it may be as long as an object.
pub const MAX_FIELD_CHARS: usize = 300;
/// The most of a value that is repeated in a message, in characters.
pub const MAX_VALUE_CHARS: usize = 300;

/// As much of a text as a message has room for.
#[must_use]
pub fn truncate(text: &str, max_chars: usize) -> Cow<'_, str> {
    match text.char_indices().nth(max_chars) {
        Some((end, _)) => Cow::Owned(format!("{}…", text.get(..end).unwrap_or_default())),
        None => Cow::Borrowed(text),
    }
}

/// Mistakes of the user's: for each the field, the value it has, and what is wrong with it.
#[derive(Debug, Default)]
pub struct FieldErrors(Vec<String>);

impl FieldErrors {
    /// Notes one.
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

    /// Notes that a list has more items than it may.
    pub fn too_many(&mut self, field: &str, count: usize, max: usize) {
        self.push(format!(
            "{field}: Too many: {count}: must have at most {max} items"
        ));
    }

    /// Notes one that is in words already.
    pub fn push(&mut self, message: String) {
        if self.0.len() < MAX_ERRORS {
            self.0.push(message);
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A message for each.
    #[must_use]
    pub fn into_messages(self) -> Vec<String> {
        self.0
    }
}

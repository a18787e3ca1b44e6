//! Files that a person wrote in YAML, as JSON values: one parser for all of them keeps the program small.

use serde_json::Value;

/// Why a text is no YAML.
#[derive(Debug)]
pub struct Error(serde_saphyr::Error);

impl Error {
    /// The place, without any text of the file, as ` (line 3, column 5)`; empty if it is not known.
    pub fn place(&self) -> String {
        let place = self.0.location();
        place.map_or_else(String::new, |at| {
            format!(" (line {}, column {})", at.line(), at.column())
        })
    }

    /// The reason and the place, with text of the file in it.
    pub fn message(&self) -> String {
        self.0.without_snippet().to_string()
    }
}

/// The documents of a file, in order, without empty ones.
///
/// # Errors
/// When it is not YAML, or when a mapping has a key twice.
pub fn documents(text: &str) -> Result<Vec<Value>, Error> {
    // Words such as yes are strings, as in a label's value.
    let options = serde_saphyr::options! { strict_booleans: true };
    serde_saphyr::from_multiple_with_options(text, options).map_err(Error)
}

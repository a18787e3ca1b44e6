//! Objects whose parts are kept as JSON, read only where they do not take too much memory.

use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::Form;
use kruise_api::json::memory;

/// An object that takes `MOST` bytes of memory as JSON at most, as [`memory`] estimates it, and its text. Texts, as scripts
/// or configuration, count little more than their length.
#[derive(Clone, Debug)]
pub struct Bounded<T, const MOST: usize> {
    /// The object.
    pub object: T,
    /// Its JSON.
    pub text: Box<str>,
}

impl<T: Form, const MOST: usize> Form for Bounded<T, MOST> {
    type Kind = T::Kind;
}

impl<'de, T: DeserializeOwned, const MOST: usize> Deserialize<'de> for Bounded<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <&RawValue>::deserialize(deserializer)?.get();
        let memory = memory(text.as_bytes());
        if memory > MOST {
            let why = format!(
                "it would take {memory} bytes of memory, {MOST} are the most: it has too many values"
            );
            return Err(D::Error::custom(why));
        }
        let object = serde_json::from_str(text).map_err(D::Error::custom)?;
        Ok(Self {
            object,
            text: text.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use kruise_api::cloneset::CloneSet;

    #[test]
    fn an_object_of_too_many_values_is_not_read_and_one_of_long_texts_is() {
        let set = |inner: String| {
            format!(
                r#"{{"apiVersion":"apps.kruise.io/v1beta1","kind":"CloneSet","metadata":{{"name":"web"}},
                    "spec":{{"selector":{{}},"template":{{"spec":{{"x":[{inner}]}}}}}}}}"#
            )
        };
        let read = |text: String| serde_json::from_str::<Bounded<CloneSet, { 8 << 20 }>>(&text);
        let many = read(set(vec![r#"{"":0}"#; 200_000].join(","))).unwrap_err();
        assert!(many.to_string().contains("it has too many values"), "{many}");
        let long = format!("\"{}\"", "x".repeat(1 << 20));
        let long = read(set(long)).unwrap();
        assert_eq!(long.object.metadata.name.as_deref(), Some("web"));
        assert!(long.text.len() > 1 << 20);
    }
}

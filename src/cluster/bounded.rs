//! Objects whose parts are kept as JSON, read only where they do not take too much memory.

use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::Form;
use crate::api::json::memory;

/// The most memory that an object may take as JSON, in bytes: some 500 KiB of text with small values. Texts, as scripts or
/// configuration, count little more than their length.
const MOST: usize = 8 << 20;

/// An object that takes a bounded amount of memory.
#[derive(Clone, Debug)]
pub struct Bounded<T>(pub T);

impl<T: Form> Form for Bounded<T> {
    type Kind = T::Kind;
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Bounded<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <&RawValue>::deserialize(deserializer)?.get();
        let memory = memory(text.as_bytes());
        if memory > MOST {
            let why = format!(
                "it would take {memory} bytes of memory, {MOST} are the most: it has too many values"
            );
            return Err(D::Error::custom(why));
        }
        serde_json::from_str(text).map(Self).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::api::cloneset::CloneSet;

    #[test]
    fn an_object_of_too_many_values_is_not_read_and_one_of_long_texts_is() {
        let set = |inner: String| {
            format!(
                r#"{{"apiVersion":"apps.kruise.io/v1beta1","kind":"CloneSet","metadata":{{"name":"web"}},
                    "spec":{{"selector":{{}},"template":{{"spec":{{"x":[{inner}]}}}}}}}}"#
            )
        };
        let read = |text: String| serde_json::from_str::<Bounded<CloneSet>>(&text).map(|set| set.0);
        let many = read(set(vec![r#"{"":0}"#; 200_000].join(","))).unwrap_err();
        assert!(many.to_string().contains("it has too many values"), "{many}");
        let long = format!("\"{}\"", "x".repeat(1 << 20));
        assert_eq!(read(set(long)).unwrap().metadata.name.as_deref(), Some("web"));
    }
}

//! Objects whose parts are kept as JSON, read only if they do not take too much memory.

use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::ObjectView;
use kruise_api::json::estimate_memory;

/// An object that takes at most `MAX_BYTES` of memory as JSON, as [`estimate_memory`] estimates it, and its text.
/// Strings, such as scripts or configuration, count little more than their length.
#[derive(Clone, Debug)]
pub struct Bounded<T, const MAX_BYTES: usize> {
    /// The object.
    pub object: T,
    /// Its JSON.
    pub json: Box<str>,
}

impl<T: ObjectView, const MAX_BYTES: usize> ObjectView for Bounded<T, MAX_BYTES> {
    type Kind = T::Kind;
}

impl<'de, T: DeserializeOwned, const MAX_BYTES: usize> Deserialize<'de> for Bounded<T, MAX_BYTES> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <&RawValue>::deserialize(deserializer)?.get();
        let memory = estimate_memory(text.as_bytes());
        if memory > MAX_BYTES {
            let why = format!(
                "it would take {memory} bytes of memory, {MAX_BYTES} are the most: it has too many values"
            );
            return Err(D::Error::custom(why));
        }
        let object = serde_json::from_str(text).map_err(D::Error::custom)?;
        Ok(Self {
            object,
            json: text.into(),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use kruise_api::cloneset::CloneSet;

    #[test]
    fn memory_limit_counts_values_not_string_length() {
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
        assert!(long.json.len() > 1 << 20);
    }
}

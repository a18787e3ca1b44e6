//! An object of which only what conversions read is parsed; the rest stays text. Parsed, a template of small values
//! takes up to a hundred times its length, and an object that is stored must be readable in each version: one that is
//! not takes all lists of its kind with it.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::{Error, convert};
use crate::json::estimate_memory;

/// Maximum number of fields of the object, its metadata, its spec or its status. Those that no schema has are not
/// stored.
const MAX_FIELDS: usize = 1000;

/// The fields that conversions read or write in the object (`""`), or in a field of it. Fields of others are parsed
/// completely.
fn read_fields(holder: &str) -> &'static [&'static str] {
    match holder {
        "" => &["apiVersion", "kind", "metadata", "spec", "status"],
        "metadata" => &["annotations", "labels"],
        "spec" => &[
            "customVersion",
            "images",
            "namespace",
            "namespaceSelector",
            "scaleStrategy",
            "updateStrategy",
        ],
        "status" => &["conditions", "containerStatusSnapshot"],
        _ => &[],
    }
}

/// The text of a field's name, with its quotes, and of its value.
type Field<'a> = (&'a RawValue, &'a RawValue);

/// An object to convert.
pub struct PartialObject<'a> {
    parsed: Value,
    /// Estimated bytes of what is parsed.
    memory: usize,
    /// The other fields, by what holds them.
    unparsed: BTreeMap<&'static str, Vec<Field<'a>>>,
}

impl<'a> PartialObject<'a> {
    /// Parses what conversions read.
    ///
    /// # Errors
    /// If it is not readable, or takes more than `max_memory` bytes.
    pub fn parse(text: &'a RawValue, max_memory: usize) -> Result<Self, Error> {
        let mut object = Self {
            parsed: Value::Null,
            memory: 0,
            unparsed: BTreeMap::new(),
        };
        object.parsed = object.parse_part("", text, max_memory)?;
        Ok(object)
    }

    /// Parses the object, or its field `holder`.
    fn parse_part(
        &mut self,
        holder: &'static str,
        text: &'a RawValue,
        max_memory: usize,
    ) -> Result<Value, Error> {
        let read = read_fields(holder);
        if read.is_empty() || !text.get().starts_with('{') {
            self.memory = self.memory.saturating_add(estimate_memory(text.get().as_bytes()));
            if self.memory > max_memory {
                return Err(Error::TooLarge {
                    memory: self.memory,
                    max_memory,
                });
            }
            return Ok(serde_json::from_str(text.get())?);
        }
        let mut parsed = Map::new();
        for (name, text) in serde_json::from_str::<Fields<'a>>(text.get())?.0 {
            let unquoted = name.get().trim_matches('"');
            match read.iter().find(|read| **read == unquoted) {
                Some(name) => {
                    parsed.insert((*name).to_owned(), self.parse_part(name, text, max_memory)?);
                }
                None => self.unparsed.entry(holder).or_default().push((name, text)),
            }
        }
        Ok(Value::Object(parsed))
    }

    /// The kind of the object, if it has one.
    #[must_use]
    pub fn kind(&self) -> Option<&str> {
        self.parsed.get("kind")?.as_str()
    }

    /// Converts the object to the version `to`.
    ///
    /// # Errors
    /// As [`convert`].
    pub fn convert(self, to: &str) -> Result<Self, Error> {
        let parsed = convert(self.parsed, to)?;
        Ok(Self { parsed, ..self })
    }

    /// Writes the JSON of the object.
    ///
    /// # Errors
    /// When it cannot be serialized.
    pub fn write(&self, json: &mut Vec<u8>) -> Result<(), serde_json::Error> {
        self.write_part("", &self.parsed, json)
    }

    /// Writes the object, or its field `holder`.
    fn write_part(&self, holder: &str, parsed: &Value, json: &mut Vec<u8>) -> Result<(), serde_json::Error> {
        let fields = parsed.as_object().filter(|_| !read_fields(holder).is_empty());
        let Some(fields) = fields else {
            return serde_json::to_writer(json, parsed);
        };
        json.push(b'{');
        let mut is_first = true;
        let mut separate = |json: &mut Vec<u8>| {
            if !std::mem::take(&mut is_first) {
                json.push(b',');
            }
        };
        for (name, value) in fields {
            separate(json);
            serde_json::to_writer(&mut *json, name)?;
            json.push(b':');
            self.write_part(name, value, json)?;
        }
        for (name, value) in self.unparsed.get(holder).into_iter().flatten() {
            separate(json);
            json.extend_from_slice(name.get().as_bytes());
            json.push(b':');
            json.extend_from_slice(value.get().as_bytes());
        }
        json.push(b'}');
        Ok(())
    }
}

/// The fields of a JSON object.
struct Fields<'a>(Vec<Field<'a>>);

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FieldsVisitor;
        impl<'de> Visitor<'de> for FieldsVisitor {
            type Value = Fields<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    if fields.len() == MAX_FIELDS {
                        let why = format!("an object has too many fields: {MAX_FIELDS} are the most");
                        return Err(A::Error::custom(why));
                    }
                    fields.push(field);
                }
                Ok(Fields(fields))
            }
        }
        deserializer.deserialize_map(FieldsVisitor)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;
    use serde_json::json;

    use super::super::tests::arbitrary_json;
    use super::super::tests::vectors::{read_cases, versioned};
    use super::*;

    /// The result of converting the text.
    fn convert_text(text: String, to: &str, max_memory: usize) -> Result<String, Error> {
        let text = RawValue::from_string(text).unwrap();
        let mut json = Vec::new();
        let object = PartialObject::parse(&text, max_memory)?;
        object.convert(to)?.write(&mut json)?;
        Ok(String::from_utf8(json).unwrap())
    }

    /// A field that a conversion uses and that is not parsed would be lost, or be there twice.
    #[test]
    fn conversions_read_no_other_fields() {
        let cases = ["cloneset", "sidecarset", "upstream"].map(read_cases).concat();
        assert!(cases.len() > 400, "{}", cases.len());
        for case in cases {
            let (object, to) = (versioned(&case["in"], &case, &case["from"]), &case["to"]);
            let to = to.as_str().unwrap();
            let converted = convert_text(object.to_string(), to, usize::MAX).unwrap();
            let converted_back = convert_text(converted.clone(), case["from"].as_str().unwrap(), usize::MAX);
            let expected = convert(object, to).unwrap();
            let expected_back = convert(expected.clone(), case["from"].as_str().unwrap()).unwrap();
            assert_eq!(serde_json::from_str::<Value>(&converted).unwrap(), expected);
            let back: Value = serde_json::from_str(&converted_back.unwrap()).unwrap();
            assert_eq!(back, expected_back);
        }
    }

    #[test]
    fn memory_is_of_what_is_parsed() {
        let many = |one: &str| vec![one; 10_000].join(",");
        let set = |spec: &str| {
            format!(
                r#"{{"kind":"CloneSet","apiVersion":"apps.kruise.io/v1beta1","metadata":{{"managedFields":[{}]}},"spec":{spec},"x":[[]]}}"#,
                many("{\"\":0}")
            )
        };
        let deep = format!("{}{}", "[".repeat(1000), "]".repeat(1000));
        let template = format!(r#"{{"template":{{"x":[{}],"y":{deep}}}}}"#, many("{\"a\":1}"));
        let converted = convert_text(set(&template), "v1alpha1", 10_000).unwrap();
        assert!(
            converted.contains(&template["{\"template\":".len()..template.len() - 1]),
            "the template is the same"
        );
        let strategy = format!(r#"{{"updateStrategy":{{"x":[{}]}}}}"#, many("{\"a\":1}"));
        let why = convert_text(set(&strategy), "v1alpha1", 10_000).unwrap_err();
        assert!(matches!(why, Error::TooLarge { .. }), "{why}");
        let strategy = format!(r#"{{"updateStrategy":{deep}}}"#);
        let why = convert_text(set(&strategy), "v1alpha1", usize::MAX).unwrap_err();
        assert!(why.to_string().contains("recursion"), "{why}");
    }

    #[test]
    fn number_of_fields_is_bounded() {
        let spec = |count: usize| {
            let fields: Vec<_> = (0..count).map(|n| format!(r#""f{n}":0"#)).collect();
            let object = format!(
                r#"{{"kind":"NodeImage","apiVersion":"v1beta1","metadata":{{}},"spec":{{{}}}}}"#,
                fields.join(",")
            );
            convert_text(object, "v1alpha1", usize::MAX).map(|json| json.len())
        };
        assert!(spec(MAX_FIELDS).is_ok());
        let why = spec(MAX_FIELDS + 1).unwrap_err();
        assert!(why.to_string().contains("too many fields"), "{why}");
    }

    proptest! {
        #[test]
        fn values_of_any_type_are_kept(
            kind in prop::sample::select(vec!["CloneSet", "NodeImage", "SidecarSet", "ContainerRecreateRequest"]),
            upwards in any::<bool>(), parts in (arbitrary_json(), arbitrary_json(), arbitrary_json()),
        ) {
            let (from, to) = if upwards { ("v1alpha1", "v1beta1") } else { ("v1beta1", "v1alpha1") };
            let (metadata, spec, status) = parts;
            for metadata in [metadata, json!({ "name": "n" })] {
                let object = json!({ "apiVersion": format!("apps.kruise.io/{from}"), "kind": kind,
                    "metadata": metadata, "spec": spec, "status": status, "": spec });
                let converted = convert_text(object.to_string(), to, usize::MAX);
                let converted = converted.map(|json| serde_json::from_str::<Value>(&json).unwrap());
                let expected = convert(object, to);
                prop_assert_eq!(converted.map_err(|why| why.to_string()), expected.map_err(|why| why.to_string()));
            }
        }
    }

    #[test]
    fn other_values_are_no_objects() {
        for wrong in ["1", "[]", "{}", "null"] {
            let why = convert_text(wrong.to_owned(), "v1alpha1", usize::MAX).unwrap_err();
            assert!(
                matches!(why, Error::Malformed { field: "kind" }),
                "{wrong}: {why}"
            );
        }
    }
}

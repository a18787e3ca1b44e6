//! Which unknown fields of an update existed before: an update is not rejected for a field that it does not add.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::hash::{BuildHasher, DefaultHasher, Hasher, RandomState};

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use super::review::Request;

/// Annotation with the manifest of the last `kubectl apply`.
pub(super) const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// The paths of the previous fields below `spec`, as hashes: a path may be as long as an object.
pub(super) struct PreviousFields {
    hasher: RandomState,
    /// None when the fields are unknown: the API server stores no unknown fields, so only the last applied manifest,
    /// and what was stored while no webhook was running, can show them.
    paths: Option<HashSet<u64>>,
}

impl PreviousFields {
    /// The fields of the object that an update replaces.
    pub fn from_request(request: &Request) -> Self {
        let hasher = RandomState::new();
        let mut paths = HashSet::new();
        let mut readable = true;
        if let Some(old) = &request.old {
            let last = old["metadata"]["annotations"][LAST_APPLIED].as_str();
            readable = last.is_some_and(|text| {
                let mut text = serde_json::Deserializer::from_str(text);
                let applied = PathCollector::root(&hasher, &mut paths).deserialize(&mut text);
                applied.is_ok() && text.end().is_ok()
            });
            let spec: &Value = &old["spec"];
            let stored = PathCollector::root(&hasher, &mut paths)
                .field("spec")
                .deserialize(spec);
            readable &= stored.is_ok();
        }
        let paths = readable.then_some(paths);
        Self { hasher, paths }
    }

    /// Those of `fields` that are certainly new, such as `spec.template.spec.containers[0].imagee`.
    pub fn filter_new<'a>(&self, fields: &'a [String]) -> Vec<&'a String> {
        let Some(previous) = &self.paths else {
            return Vec::new();
        };
        let new = |field: &&String| {
            let mut path = self.hasher.build_hasher();
            path.write(b".");
            without_indexes(field).for_each(|part| path.write(part.as_bytes()));
            !previous.contains(&path.finish())
        };
        fields.iter().filter(new).collect()
    }
}

/// `spec.containers[0].name` as `spec.containers.name`, in parts.
fn without_indexes(path: &str) -> impl Iterator<Item = &str> {
    let mut first = true;
    path.split('[').flat_map(move |part| {
        let is_first = std::mem::take(&mut first);
        let index = part.split_once(']').filter(|(index, _)| {
            !is_first && !index.is_empty() && index.bytes().all(|digit| digit.is_ascii_digit())
        });
        match index {
            Some((_, rest)) => ["", rest],
            None if is_first => ["", part],
            None => ["[", part],
        }
    })
}

/// Collects the paths of all fields of a value below `path`; the value itself is not kept.
struct PathCollector<'a> {
    path: DefaultHasher,
    paths: &'a mut HashSet<u64>,
}

impl<'a> PathCollector<'a> {
    fn root(hasher: &RandomState, paths: &'a mut HashSet<u64>) -> Self {
        let path = hasher.build_hasher();
        Self { path, paths }
    }

    fn field(self, name: &str) -> Self {
        let Self { mut path, paths } = self;
        path.write(b".");
        path.write(name.as_bytes());
        paths.insert(path.finish());
        Self { path, paths }
    }

    fn reborrow(&mut self) -> PathCollector<'_> {
        PathCollector {
            path: self.path.clone(),
            paths: self.paths,
        }
    }
}

impl<'de> DeserializeSeed<'de> for PathCollector<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<(), D::Error> {
        value.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for PathCollector<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<Cow<'_, str>>()? {
            let field = self.reborrow().field(&name);
            map.next_value_seed(field)?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
        while items.next_element_seed(self.reborrow())?.is_some() {}
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    fn without_indexes_joined(path: &str) -> String {
        without_indexes(path).collect()
    }

    #[test]
    fn item_indexes_are_not_part_of_a_path() {
        for (path, expected) in [
            ("spec.containers[0].name", "spec.containers.name"),
            ("spec.a[10][2].b", "spec.a.b"),
            ("spec.a[b].c[]", "spec.a[b].c[]"),
            ("[0", "[0"),
            ("", ""),
        ] {
            assert_eq!(without_indexes_joined(path), expected);
        }
    }

    #[test]
    fn every_manifest_field_is_collected() {
        let manifest =
            json!({ "spec": { "a": [{ "b": 1 }, [{ "c": null }]], "d[e]": { "f.g": true } }, "x": -1.5 });
        let (hasher, mut paths) = (RandomState::new(), HashSet::new());
        let collector = PathCollector::root(&hasher, &mut paths);
        let text = manifest.to_string();
        collector
            .deserialize(&mut serde_json::Deserializer::from_str(&text))
            .unwrap();
        let previous = PreviousFields {
            hasher,
            paths: Some(paths),
        };
        let fields = [
            "spec",
            "spec.a[0].b",
            "spec.a[1][0].c",
            "spec.d[e].f.g",
            "x",
            "spec.a.x",
            "spec.c",
            "spe",
            "y",
        ];
        let fields = fields.map(str::to_owned);
        assert_eq!(previous.filter_new(&fields), ["spec.a.x", "spec.c", "spe", "y"]);
    }

    /// A path is as long as all its names together: as text, these paths would take 2 GiB.
    #[test]
    fn long_paths_take_little_memory() {
        let long = "k".repeat(128 << 10);
        let fields: serde_json::Map<_, _> = (0..16_384).map(|at| (format!("a{at}"), json!(0))).collect();
        let text = json!({ "spec": { long: fields } }).to_string();
        let (hasher, mut paths) = (RandomState::new(), HashSet::new());
        let collector = PathCollector::root(&hasher, &mut paths);
        collector
            .deserialize(&mut serde_json::Deserializer::from_str(&text))
            .unwrap();
        assert_eq!(paths.len(), 16_386);
    }
}

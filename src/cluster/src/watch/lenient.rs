//! Objects are read one by one: one that cannot be read hides no other.
//!
//! A client reads a list completely or not at all, and the API server stores everything that a schema allows: a number
//! that does not fit into `int32`, or unknown fields, nested deeper than any parser follows. One such object would
//! break the watch of its kind for the whole cluster.

use kube::Resource;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::Key;
use kruise_ops::panics::catch_panic_sync;

/// The type that an object is read as: that of its kind, or one that leaves parts of it unread.
pub trait ObjectView {
    /// The kind of the object.
    type Kind: Resource<DynamicType = ()>;
}

impl<K: Resource<DynamicType = ()>> ObjectView for K {
    type Kind = K;
}

/// An object, if it can be read as an `R`, and its identity in any case.
#[derive(Clone, Debug)]
pub(crate) struct Lenient<R> {
    identity: ObjectIdentity,
    bytes: usize,
    object: Result<R, String>,
}

impl<R> Lenient<R> {
    /// The object, or why it cannot be read.
    pub fn into_result(self) -> Result<R, String> {
        self.object
    }
}

impl<R: ObjectView> Lenient<R> {
    pub fn key(&self) -> Key {
        Key {
            namespace: self.identity.namespace.clone(),
            name: self.identity.name.clone(),
        }
    }

    /// Length of the object's text, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The object's resource version, if it has one.
    pub fn version(&self) -> Option<String> {
        self.identity.resource_version.clone()
    }

    pub fn identity(&self) -> ObjectIdentity {
        self.identity.clone()
    }
}

/// Identifies an object that may be unreadable.
#[derive(Clone, Debug)]
pub(crate) struct ObjectIdentity {
    pub name: String,
    pub namespace: Option<String>,
    pub uid: Option<String>,
    resource_version: Option<String>,
}

#[derive(Deserialize)]
struct MetadataOnly<'a> {
    #[serde(borrow)]
    metadata: Metadata<'a>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata<'a> {
    name: String,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    #[serde(borrow)]
    managed_fields: Option<&'a RawValue>,
}

impl<'de, R: DeserializeOwned> Deserialize<'de> for Lenient<R> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Finding the end of a value, and skipping one, uses no stack, however deep it is.
        let text = <&RawValue>::deserialize(deserializer)?.get();
        let MetadataOnly { metadata } = serde_json::from_str(text).map_err(D::Error::custom)?;
        let fields = metadata.managed_fields.map(RawValue::get);
        let read = || match fields.and_then(|fields| without_managed_fields(fields, text)) {
            Some(text) => serde_json::from_str(&text),
            None => serde_json::from_str(text),
        };
        // A panic must not affect other objects either.
        let object = catch_panic_sync("watch", &metadata.name, read);
        let object = object.map_err(|panicked| panicked.to_string());
        let object = object.and_then(|object| object.map_err(|why| why.to_string()));
        let name = ObjectIdentity {
            name: metadata.name,
            namespace: metadata.namespace,
            uid: metadata.uid,
            resource_version: metadata.resource_version,
        };
        let bytes = text.len();
        Ok(Self {
            identity: name,
            bytes,
            object,
        })
    }
}

/// The object's text without `managed_fields`, which is a part of it. Anyone who may write the object can put values
/// into it that our types cannot hold, for example a time in the year 9999, and no store reads it.
fn without_managed_fields(managed_fields: &str, text: &str) -> Option<String> {
    // The part's address gives its position in the text.
    let start = managed_fields.as_ptr().addr().checked_sub(text.as_ptr().addr())?;
    let before = text.get(..start)?;
    let after = text.get(start.checked_add(managed_fields.len())?..)?;
    Some([before, "null", after].concat())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]

    use k8s_openapi::api::apps::v1::ControllerRevision;
    use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod, Secret};
    use kube::core::{ObjectList, WatchEvent};

    use super::*;

    fn revision(name: &str, data: &str, number: &str) -> String {
        format!(
            r#"{{"apiVersion":"apps/v1","kind":"ControllerRevision",
                "metadata":{{"name":"{name}","namespace":"ns","uid":"u","resourceVersion":"7"}},
                "data":{data},"revision":{number}}}"#
        )
    }

    fn deeply_nested_json() -> String {
        format!("{}0{}", "[".repeat(9_000), "]".repeat(9_000))
    }

    /// Whether it could be read.
    fn is_readable(object: &Lenient<ControllerRevision>) -> bool {
        object.object.is_ok()
    }

    #[derive(Clone, Debug)]
    struct Panicking;

    impl<'de> Deserialize<'de> for Panicking {
        fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
            panic!("index out of bounds")
        }
    }

    #[test]
    fn panic_while_parsing_makes_the_object_unreadable() {
        let text = r#"{ "metadata": { "name": "a", "namespace": "n", "resourceVersion": "7" } }"#;
        let read: Lenient<Panicking> = serde_json::from_str(text).unwrap();
        assert_eq!(read.identity.resource_version.as_deref(), Some("7"));
        let why = read.into_result().unwrap_err();
        assert!(why.contains("index out of bounds"), "{why}");
    }

    #[test]
    fn unreadable_object_does_not_hide_others_in_a_list() {
        let items = [
            revision("a", "{}", "1"),
            revision("deep", &deeply_nested_json(), "1"),
            revision("large", "{}", "99999999999999999999"),
            revision("z", "{}", "2"),
        ];
        let list = format!(
            r#"{{"kind":"ControllerRevisionList","apiVersion":"apps/v1","metadata":{{}},"items":[{}]}}"#,
            items.join(",")
        );
        let list: ObjectList<Lenient<ControllerRevision>> = serde_json::from_str(&list).unwrap();
        let read: Vec<_> = list
            .items
            .iter()
            .map(|item| (item.identity.name.as_str(), is_readable(item)))
            .collect();
        assert_eq!(
            read,
            [("a", true), ("deep", false), ("large", false), ("z", true)]
        );
    }

    #[test]
    fn watch_continues_past_an_unreadable_object() {
        let event = format!(
            r#"{{"type":"MODIFIED","object":{}}}"#,
            revision("deep", &deeply_nested_json(), "1")
        );
        let event: WatchEvent<Lenient<ControllerRevision>> = serde_json::from_str(&event).unwrap();
        assert!(matches!(event, WatchEvent::Modified(object)
            if !is_readable(&object) && object.version().as_deref() == Some("7")));
    }

    /// Any writer of an object can set its managed fields, with times that our types cannot hold.
    #[test]
    fn managed_fields_of_any_shape_are_ignored() {
        fn reads<K: Resource<DynamicType = ()> + DeserializeOwned>(fields: &str) -> bool {
            let text = format!(
                r#"{{"apiVersion":"v1","kind":"{}","spec":{{"containers":[]}},"data":{{"managedFields":"YQ=="}},
                    "metadata":{{"name":"a","managedFields":{fields},"labels":{{"managedFields":"x"}}}}}}"#,
                K::kind(&())
            );
            let one: Lenient<K> = serde_json::from_str(&text).unwrap();
            let labels = one.into_result().ok().and_then(|k| k.meta().labels.clone());
            labels.is_some_and(|labels| labels["managedFields"] == "x")
        }
        for fields in [
            r#"[{"manager":"m","time":"9999-12-31T23:59:59Z"}]"#,
            r#"[{"time":"0000-01-01T00:00:00Z"}]"#,
            r#"[{"time":7},"text"]"#,
            "[]",
            "null",
        ] {
            assert!(reads::<Pod>(fields), "Pod {fields}");
            assert!(reads::<Node>(fields), "Node {fields}");
            assert!(reads::<PersistentVolumeClaim>(fields), "claim {fields}");
            assert!(reads::<Secret>(fields), "Secret {fields}");
        }
    }
}

//! Objects read one by one: one that cannot be read hides no other.
//!
//! A client reads a list all or not at all, and the API server keeps what a schema lets pass: a number that no
//! `int32` holds, or fields that it does not know, nested deeper than anybody follows. One such object would end the
//! watch of its kind in the whole cluster.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::Key;
use crate::{EventType, Events};
use kruise_api::keys;
use kruise_ops::panics::isolated_now;

/// What an object is read as: the type of its kind, or one that leaves parts of it unread.
pub trait Form {
    /// The kind.
    type Kind: Resource<DynamicType = ()>;
}

impl<K: Resource<DynamicType = ()>> Form for K {
    type Kind = K;
}

/// An object, if it can be read as an `R`, and what names it in any case.
#[derive(Clone, Debug)]
pub(crate) struct Readable<R> {
    name: Named,
    bytes: usize,
    object: Result<R, String>,
}

impl<R> Readable<R> {
    /// The object, or why it cannot be read.
    pub fn into_result(self) -> Result<R, String> {
        self.object
    }
}

impl<R: Form> Readable<R> {
    pub fn key(&self) -> Key {
        Key {
            namespace: self.name.namespace.clone(),
            name: self.name.name.clone(),
        }
    }

    /// The object's length as text.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The object's version, if it has one.
    pub fn version(&self) -> Option<String> {
        self.name.resource_version.clone()
    }

    /// The object. One that cannot be read is left out, with a line in the log and a warning on it.
    pub fn read(self, events: Option<&Events>) -> Option<R> {
        let why = match self.object {
            Ok(object) => return Some(object),
            Err(why) => why,
        };
        self.name.unreadable::<R>(
            events,
            &format!("cannot parse this object, so it is ignored until it is changed: {why}"),
        );
        None
    }

    /// What names it.
    pub fn named(&self) -> Named {
        self.name.clone()
    }
}

/// What names an object.
#[derive(Clone, Debug)]
pub(crate) struct Named {
    name: String,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
}

impl Named {
    /// Says why the object cannot be used, in the log and in a warning on it.
    pub fn unreadable<R: Form>(&self, events: Option<&Events>, why: &str) {
        let kind = R::Kind::kind(&());
        tracing::warn!(%kind, name = self.name, namespace = self.namespace, why, "object is unreadable");
        let reference = ObjectReference {
            api_version: Some(R::Kind::api_version(&()).into_owned()),
            kind: Some(kind.into_owned()),
            name: Some(self.name.clone()),
            namespace: self.namespace.clone(),
            uid: self.uid.clone(),
            ..ObjectReference::default()
        };
        if let Some(events) = events {
            events.publish(
                reference,
                EventType::Warning,
                keys::EVENT_UNREADABLE,
                "Reading",
                why.to_owned(),
            );
        }
    }
}

#[derive(Deserialize)]
struct Whole<'a> {
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

impl<'de, R: DeserializeOwned> Deserialize<'de> for Readable<R> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // To find the end of a value, and to pass one over, takes no stack, however deep it is.
        let text = <&RawValue>::deserialize(deserializer)?.get();
        let Whole { metadata } = serde_json::from_str(text).map_err(D::Error::custom)?;
        let fields = metadata.managed_fields.map(RawValue::get);
        let read = || match fields.and_then(|fields| without(fields, text)) {
            Some(text) => serde_json::from_str(&text),
            None => serde_json::from_str(text),
        };
        // Of a panic, too, no other object may hear.
        let object = isolated_now("watch", &metadata.name, read);
        let object = object.map_err(|panicked| panicked.to_string());
        let object = object.and_then(|object| object.map_err(|why| why.to_string()));
        let name = Named {
            name: metadata.name,
            namespace: metadata.namespace,
            uid: metadata.uid,
            resource_version: metadata.resource_version,
        };
        let bytes = text.len();
        Ok(Self { name, bytes, object })
    }
}

/// The object without who manages which field, which is this part of its text. Whoever may write the object writes into
/// that what no type of ours holds, a time in the year 9999 for example, and no mirror looks at it.
fn without(fields: &str, text: &str) -> Option<String> {
    // Where the part is in memory tells where it is in the text.
    let start = fields.as_ptr().addr().checked_sub(text.as_ptr().addr())?;
    let before = text.get(..start)?;
    let after = text.get(start.checked_add(fields.len())?..)?;
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

    fn deep() -> String {
        format!("{}0{}", "[".repeat(9_000), "]".repeat(9_000))
    }

    /// Whether it could be read.
    fn good(object: &Readable<ControllerRevision>) -> bool {
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
    fn an_object_whose_reading_panics_is_unreadable() {
        let text = r#"{ "metadata": { "name": "a", "namespace": "n", "resourceVersion": "7" } }"#;
        let read: Readable<Panicking> = serde_json::from_str(text).unwrap();
        assert_eq!(read.name.resource_version.as_deref(), Some("7"));
        let why = read.into_result().unwrap_err();
        assert!(why.contains("index out of bounds"), "{why}");
    }

    #[test]
    fn one_that_cannot_be_read_hides_no_other() {
        let items = [
            revision("a", "{}", "1"),
            revision("deep", &deep(), "1"),
            revision("large", "{}", "99999999999999999999"),
            revision("z", "{}", "2"),
        ];
        let list = format!(
            r#"{{"kind":"ControllerRevisionList","apiVersion":"apps/v1","metadata":{{}},"items":[{}]}}"#,
            items.join(",")
        );
        let list: ObjectList<Readable<ControllerRevision>> = serde_json::from_str(&list).unwrap();
        let read: Vec<_> = list
            .items
            .iter()
            .map(|item| (item.name.name.as_str(), good(item)))
            .collect();
        assert_eq!(
            read,
            [("a", true), ("deep", false), ("large", false), ("z", true)]
        );
    }

    #[test]
    fn a_watch_goes_on_past_it() {
        let event = format!(
            r#"{{"type":"MODIFIED","object":{}}}"#,
            revision("deep", &deep(), "1")
        );
        let event: WatchEvent<Readable<ControllerRevision>> = serde_json::from_str(&event).unwrap();
        assert!(matches!(event, WatchEvent::Modified(object)
            if !good(&object) && object.version().as_deref() == Some("7")));
    }

    /// Who manages which field is written by whoever writes the object, with times that no type of ours holds.
    #[test]
    fn managed_fields_of_any_shape_hide_no_object() {
        fn reads<K: Resource<DynamicType = ()> + DeserializeOwned>(fields: &str) -> bool {
            let text = format!(
                r#"{{"apiVersion":"v1","kind":"{}","spec":{{"containers":[]}},"data":{{"managedFields":"YQ=="}},
                    "metadata":{{"name":"a","managedFields":{fields},"labels":{{"managedFields":"x"}}}}}}"#,
                K::kind(&())
            );
            let one: Readable<K> = serde_json::from_str(&text).unwrap();
            let labels = one.read(None).and_then(|k| k.meta().labels.clone());
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

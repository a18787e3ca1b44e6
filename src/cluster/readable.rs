//! Objects that users write, read one by one: one that cannot be read hides no other.
//!
//! A client reads a list all or not at all, and the API server keeps what a schema lets pass: a number that no
//! `int32` holds, or fields that it does not know, nested deeper than anybody follows. One such object would end the
//! watch of its kind in the whole cluster.

use std::borrow::Cow;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::{EventType, Events};

/// What an object is read as: the type of its kind, or one that leaves parts of it unread.
pub trait Form {
    /// The kind.
    type Kind: Resource<DynamicType = ()>;
}

impl<K: Resource<DynamicType = ()>> Form for K {
    type Kind = K;
}

/// An object, if it can be read as a `T`. [`Resource::meta`] is there in any case, and holds no more than what
/// names the object.
#[derive(Clone, Debug)]
pub struct Readable<T> {
    meta: ObjectMeta,
    object: Result<T, String>,
}

impl<T: Form> Readable<T> {
    /// The object. One that cannot be read is told of in the log and in a warning on it, and left out.
    fn read(self, events: &Events) -> Option<T> {
        let why = match self.object {
            Ok(object) => return Some(object),
            Err(why) => why,
        };
        let kind = T::Kind::kind(&());
        let (name, namespace) = (self.meta.name, self.meta.namespace);
        tracing::warn!(%kind, name, namespace, why, "cannot parse object; ignoring it");
        let reference = ObjectReference {
            api_version: Some(T::Kind::api_version(&()).into_owned()),
            kind: Some(kind.into_owned()),
            name,
            namespace,
            uid: self.meta.uid,
            ..ObjectReference::default()
        };
        let note = format!("cannot parse this object, so it is ignored until it is changed: {why}");
        events.publish(reference, EventType::Warning, "Unreadable", "Reading", note);
        None
    }
}

/// What `project` makes of the objects that can be read, for a [mirror](super::Cluster::mirror) of them.
pub fn readable<T: Form, V>(
    events: &Events,
    project: impl Fn(T) -> Option<V> + Send + 'static,
) -> impl Fn(Readable<T>) -> Option<V> + Send + 'static {
    let events = events.clone();
    move |one| project(one.read(&events)?)
}

/// What names an object.
#[derive(Deserialize)]
struct Named {
    metadata: Name,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Name {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Readable<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // To find the end of a value, and to pass one over, takes no stack, however deep it is.
        let text = <&RawValue>::deserialize(deserializer)?.get();
        let Named { metadata } = serde_json::from_str(text).map_err(D::Error::custom)?;
        let meta = ObjectMeta {
            name: metadata.name,
            namespace: metadata.namespace,
            uid: metadata.uid,
            resource_version: metadata.resource_version,
            ..ObjectMeta::default()
        };
        let object = serde_json::from_str(text).map_err(|why| why.to_string());
        Ok(Self { meta, object })
    }
}

impl<T: Form> Resource for Readable<T> {
    type DynamicType = ();
    type Scope = <T::Kind as Resource>::Scope;

    fn kind((): &()) -> Cow<'_, str> {
        T::Kind::kind(&())
    }
    fn group((): &()) -> Cow<'_, str> {
        T::Kind::group(&())
    }
    fn version((): &()) -> Cow<'_, str> {
        T::Kind::version(&())
    }
    fn plural((): &()) -> Cow<'_, str> {
        T::Kind::plural(&())
    }
    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }
    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.meta
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use k8s_openapi::api::apps::v1::ControllerRevision;
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
            .map(|item| (item.meta.name.as_deref().unwrap(), good(item)))
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
            if !good(&object) && object.meta.resource_version.as_deref() == Some("7")));
    }
}

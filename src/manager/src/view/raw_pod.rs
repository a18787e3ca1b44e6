//! A Pod as JSON, read without the fields that no decision needs.

use std::fmt;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

/// A Pod. If it was read, it lacks unused fields, so it must never be written back: Pods are patched. Only its metadata
/// is typed, and only with the fields that identify the object.
#[derive(kube::Resource, Clone, Debug, Default, PartialEq)]
#[resource(inherit = Pod)]
pub struct RawPod {
    metadata: ObjectMeta,
    json: Value,
}

impl RawPod {
    /// The Pod as JSON. If it was read: metadata without `managedFields`, status, and only `SPEC_FIELDS` of the spec.
    #[must_use]
    pub fn json(&self) -> &Value {
        &self.json
    }
}

impl From<Value> for RawPod {
    fn from(json: Value) -> Self {
        let text = |key: &str| json["metadata"][key].as_str().map(str::to_owned);
        let metadata = ObjectMeta {
            name: text("name"),
            namespace: text("namespace"),
            uid: text("uid"),
            resource_version: text("resourceVersion"),
            ..ObjectMeta::default()
        };
        Self { metadata, json }
    }
}

impl<'de> Deserialize<'de> for RawPod {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        PodPart::Pod.deserialize(deserializer).map(Self::from)
    }
}

/// The fields that are read from a Pod's spec; volumes, tolerations and so on would double the size.
const SPEC_FIELDS: [&str; 5] = [
    "containers",
    "nodeName",
    "readinessGates",
    "restartPolicy",
    "terminationGracePeriodSeconds",
];

/// The part that is being read. `managedFields` are a large part of a Pod. They and most of the spec are skipped
/// without being parsed.
#[derive(Clone, Copy)]
enum PodPart {
    Pod,
    Metadata,
    Spec,
}

impl PodPart {
    fn is_parsed(self, key: &str) -> bool {
        match self {
            Self::Pod => true,
            Self::Metadata => key != "managedFields",
            Self::Spec => SPEC_FIELDS.contains(&key),
        }
    }
}

impl<'de> DeserializeSeed<'de> for PodPart {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for PodPart {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            if !self.is_parsed(&key) {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let value = match (self, key.as_str()) {
                (Self::Pod, "metadata") => map.next_value_seed(Self::Metadata)?,
                (Self::Pod, "spec") => map.next_value_seed(Self::Spec)?,
                _ => map.next_value()?,
            };
            object.insert(key, value);
        }
        Ok(Value::Object(object))
    }
}

impl Serialize for RawPod {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.json.serialize(serializer)
    }
}

/// The items of a list; none if there is no list.
pub(super) fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

/// A string; empty if there is none.
pub(super) fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use kube::Resource;
    use serde_json::json;

    #[test]
    fn unused_pod_fields_are_not_parsed() {
        let spec = json!({ "nodeName": "n", "containers": [{ "unknown": { "managedFields": [1] } }] });
        let mut pod = json!({ "apiVersion": "v1", "kind": "Pod", "spec": spec, "metadata": {
            "name": "p", "namespace": "n", "uid": "u", "resourceVersion": "7", "labels": { "managedFields": "x" } } });
        let expected = pod.clone();
        pod["spec"]["volumes"] = json!([{ "name": "v", "projected": { "sources": [] } }]);
        pod["metadata"]["managedFields"] = json!([{ "manager": "m", "fieldsV1": { "f:spec": {} } }]);
        let read: RawPod = serde_json::from_str(&pod.to_string()).unwrap();
        assert_eq!(*read.json(), expected);
        let meta = read.meta();
        let names = [&meta.name, &meta.namespace, &meta.uid, &meta.resource_version];
        assert_eq!(names.map(|n| n.as_deref().unwrap()), ["p", "n", "u", "7"]);
        assert_eq!(serde_json::to_value(&read).unwrap(), expected);
        assert!(serde_json::from_str::<RawPod>("[]").is_err());
        assert!(serde_json::from_str::<RawPod>(r#"{"spec":[]}"#).is_err());
    }
}

//! NodeImages are read part by part: a part that cannot be read hides no other.
//!
//! All tenants of a node share its NodeImage, and the API server stores everything that the schema allows: a time in
//! the year 9999, which our type cannot hold, or a number that an older schema did not limit. Both programs use these
//! rules:
//!
//! * A time that cannot be read counts as absent. For `createdAt` that is the safe side: every wait of the manager
//!   counts from it, and a wait from the end of time never ends. A tag without it is removed, as OpenKruise does, and a
//!   user of the image requests it again; the daemon, which does not need the time, pulls meanwhile.
//! * A final state without a readable `completionTime` is still final: no node waits for it.
//! * A tag with another unreadable part keeps its name, version, owners and all readable parts, and has no `createdAt`.
//!   The daemon does not pull it, because its limits are unknown.
//! * A part without a name is left out: no request can refer to it.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::{ImageSpec, ImageStatus, ImageTagSpec, ImageTagStatus, NodeImageSpec, NodeImageStatus};

/// The fields of an object, to be read one by one.
struct LenientFields {
    fields: Map<String, Value>,
    /// The first field that could not be read, and why.
    unreadable: Option<String>,
}

impl LenientFields {
    /// The fields of an object; none if the value is absent or not an object.
    fn from_deserializer<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // An absent field is read as an absent option.
        let fields = match Option::<Value>::deserialize(deserializer)? {
            Some(Value::Object(fields)) => fields,
            _ => Map::new(),
        };
        Ok(Self {
            fields,
            unreadable: None,
        })
    }

    /// A field; `None` if it is absent, null or cannot be read.
    fn get<T: DeserializeOwned>(&mut self, name: &str) -> Option<T> {
        let value = self.fields.remove(name).filter(|value| !value.is_null())?;
        match serde_json::from_value(value) {
            Ok(read) => Some(read),
            Err(why) => {
                self.unreadable.get_or_insert_with(|| format!("{name}: {why}"));
                None
            }
        }
    }

    fn get_or_default<T: DeserializeOwned + Default>(&mut self, name: &str) -> T {
        self.get(name).unwrap_or_default()
    }

    /// A time; `None` if it cannot be read.
    fn time(&mut self, name: &str) -> Option<Time> {
        serde_json::from_value(self.fields.remove(name)?).ok()
    }

    /// The readable items of a list.
    fn list<T: DeserializeOwned>(&mut self, name: &str) -> Vec<T> {
        let items = self.get_or_default::<Vec<Value>>(name).into_iter();
        items
            .filter_map(|item| serde_json::from_value(item).ok())
            .collect()
    }

    /// The readable entries of a map.
    fn map<T: DeserializeOwned>(&mut self, name: &str) -> BTreeMap<String, T> {
        let entries = self.get_or_default::<Map<String, Value>>(name).into_iter();
        let read = |(key, value)| Some((key, serde_json::from_value(value).ok()?));
        entries.filter_map(read).collect()
    }
}

impl<'de> Deserialize<'de> for NodeImageSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let images = LenientFields::from_deserializer(deserializer)?.map("images");
        Ok(Self { images })
    }
}

impl<'de, S: DeserializeOwned> Deserialize<'de> for ImageSpec<S> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = LenientFields::from_deserializer(deserializer)?;
        let mut tags: Vec<ImageTagSpec> = fields.list("tags");
        let (pull_secrets, service_accounts, sandbox_config) = (
            fields.get_or_default("pullSecrets"),
            fields.get_or_default("serviceAccounts"),
            fields.get_or_default("sandboxConfig"),
        );
        if let Some(why) = fields.unreadable {
            for tag in &mut tags {
                tag.created_at = None;
                tag.unreadable.get_or_insert_with(|| why.clone());
            }
        }
        Ok(Self {
            pull_secrets,
            service_accounts,
            sandbox_config,
            tags,
        })
    }
}

impl<'de> Deserialize<'de> for ImageTagSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = LenientFields::from_deserializer(deserializer)?;
        let tag = fields.get("tag").ok_or_else(|| D::Error::missing_field("tag"))?;
        let created_at = fields.time("createdAt");
        let pull_policy = fields.get_or_default("pullPolicy");
        let owner_references = fields.get_or_default("ownerReferences");
        let version = fields.get_or_default("version");
        let image_pull_policy = fields.get_or_default("imagePullPolicy");
        let unreadable = fields.unreadable;
        Ok(Self {
            tag,
            created_at: created_at.filter(|_| unreadable.is_none()),
            pull_policy,
            owner_references,
            version,
            image_pull_policy,
            unreadable,
        })
    }
}

impl<'de> Deserialize<'de> for NodeImageStatus {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = LenientFields::from_deserializer(deserializer)?;
        Ok(Self {
            desired: fields.get_or_default("desired"),
            succeeded: fields.get_or_default("succeeded"),
            failed: fields.get_or_default("failed"),
            pulling: fields.get_or_default("pulling"),
            waiting: fields.get_or_default("waiting"),
            image_statuses: fields.map("imageStatuses"),
            first_sync_status: fields.get_or_default("firstSyncStatus"),
            conditions: fields.list("conditions"),
            progress: fields.get("progress"),
        })
    }
}

impl<'de> Deserialize<'de> for ImageStatus {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let tags = LenientFields::from_deserializer(deserializer)?.list("tags");
        Ok(Self { tags })
    }
}

impl<'de> Deserialize<'de> for ImageTagStatus {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = LenientFields::from_deserializer(deserializer)?;
        let tag = fields.get("tag").ok_or_else(|| D::Error::missing_field("tag"))?;
        let phase = fields
            .get("phase")
            .ok_or_else(|| D::Error::missing_field("phase"))?;
        let version = fields.get_or_default("version");
        // Without its version it may be the result of a different request.
        if let Some(why) = fields.unreadable {
            return Err(D::Error::custom(why));
        }
        Ok(Self {
            tag,
            phase,
            version,
            progress: fields.get_or_default("progress"),
            start_time: fields.time("startTime"),
            completion_time: fields.time("completionTime"),
            image_id: fields.get_or_default("imageID"),
            message: fields.get_or_default("message"),
            bytes: fields.get("bytes"),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use serde_json::json;

    use super::super::{ImagePullPhase, NodeImage};
    use super::*;

    /// Times that the API server accepts, and those that it did not check.
    const TIMES: [&str; 4] = [
        r#""9999-12-31T23:59:59Z""#,
        r#""2026-01-01T00:00:00+99:99""#,
        r#""soon""#,
        "7",
    ];

    fn parse_node_image(spec: &Value, status: &Value) -> NodeImage {
        let object = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "NodeImage",
            "metadata": { "name": "n" }, "spec": spec, "status": status });
        serde_json::from_str(&object.to_string()).unwrap()
    }

    #[test]
    fn unreadable_time_is_none() {
        for time in TIMES {
            let time: Value = serde_json::from_str(time).unwrap();
            let object = parse_node_image(
                &json!({ "images": { "a": { "tags": [{ "tag": "bad", "createdAt": time, "version": 3,
                    "pullPolicy": { "timeoutSeconds": 5 }, "ownerReferences": [{ "uid": "u" }] },
                    { "tag": "good", "createdAt": "2026-01-01T00:00:00Z" }] } } }),
                &json!({ "desired": 2, "firstSyncStatus": { "syncAt": time }, "imageStatuses": { "a": { "tags": [
                    { "tag": "bad", "phase": "Succeeded", "version": 3, "progress": 100, "startTime": time,
                        "completionTime": time, "imageID": "i" },
                    { "tag": "good", "phase": "Pulling", "startTime": "2026-01-01T00:00:00Z" }] } } }),
            );
            let [bad, good] = &object.spec.images["a"].tags[..] else {
                unreachable!("two tags")
            };
            assert_eq!((&bad.created_at, &bad.unreadable), (&None, &None), "{time}");
            assert_eq!((bad.version, bad.owner_references.len()), (3, 1));
            assert_eq!(bad.pull_policy.clone().unwrap().timeout_seconds, Some(5));
            assert!(good.created_at.is_some());
            let status = object.status.unwrap();
            let [bad, good] = &status.image_statuses["a"].tags[..] else {
                unreachable!("two states")
            };
            assert_eq!((&bad.start_time, &bad.completion_time), (&None, &None));
            assert_eq!((bad.version, bad.image_id.as_deref()), (3, Some("i")));
            assert!(bad.is_finished() && !good.is_finished());
            assert!(good.start_time.is_some());
            assert_eq!(status.desired, 2);
        }
    }

    #[test]
    fn unreadable_condition_does_not_hide_others() {
        let condition = |type_: &str, since: &str| {
            json!({ "type": type_, "status": "False", "reason": "R", "message": "",
                "lastTransitionTime": since })
        };
        let (good, bad) = (
            condition("Good", "2026-01-01T00:00:00Z"),
            condition("Bad", "9999-12-31T23:59:59Z"),
        );
        let status = json!({ "desired": 1, "conditions": [bad, good, 7, {}] });
        let status = parse_node_image(&json!({}), &status).status.unwrap();
        assert_eq!(json!(status.conditions), json!([good]));
        assert_eq!(status.desired, 1);
    }

    #[test]
    fn malformed_part_does_not_hide_others() {
        let good = || json!({ "tag": "good", "createdAt": "2026-01-01T00:00:00Z" });
        let long = json!({ "timeoutSeconds": 99_999_999_999_i64 });
        let object = parse_node_image(
            &json!({ "images": {
                "a": { "tags": [good(), "x", {}, { "tag": 7 },
                    { "tag": "bad", "createdAt": "2026-01-01T00:00:00Z", "version": 4, "pullPolicy": long, "ownerReferences": [{ "uid": "u" }] }] },
                "b": { "tags": [good()], "sandboxConfig": "x" },
                "none": { "tags": null },
                "odd": "x",
            } }),
            &json!({ "desired": "x", "succeeded": 1, "imageStatuses": { "a": { "tags": [
                { "tag": "good", "phase": "Failed", "version": 1, "progress": "x", "message": 7 },
                { "tag": "no phase" }, { "tag": "odd version", "phase": "Failed", "version": "x" }, 7] }, "odd": "x" } }),
        );
        let tags = |image: &str| {
            let tags = object.spec.images[image].tags.iter();
            let summaries = tags.map(|t| {
                (
                    &*t.tag,
                    t.version,
                    t.created_at.is_some(),
                    t.unreadable.as_deref(),
                )
            });
            summaries.collect::<Vec<_>>()
        };
        let [good, bad] = tags("a")[..] else {
            unreachable!("two tags with names")
        };
        assert_eq!(good, ("good", 0, true, None));
        assert_eq!((bad.0, bad.1, bad.2), ("bad", 4, false));
        assert!(bad.3.unwrap().starts_with("pullPolicy: invalid value"), "{bad:?}");
        assert_eq!(object.spec.images["a"].tags[1].owner_references.len(), 1);
        let [(_, _, false, Some(why))] = tags("b")[..] else {
            unreachable!("limits of the whole image count for its tags")
        };
        assert!(why.starts_with("sandboxConfig: invalid type"), "{why}");
        assert_eq!((tags("none"), tags("odd")), (Vec::new(), Vec::new()));
        let status = object.status.unwrap();
        assert_eq!((status.desired, status.succeeded), (0, 1));
        let [state] = &status.image_statuses["a"].tags[..] else {
            unreachable!("one state with name, phase and version")
        };
        assert_eq!(
            (&state.phase, state.progress, &state.message),
            (&ImagePullPhase::Failed, 0, &None)
        );
    }

    #[test]
    fn node_image_may_be_empty() {
        let object: NodeImage = serde_json::from_str(
            r#"{"apiVersion":"apps.kruise.io/v1beta1","kind":"NodeImage","metadata":{"name":"n"}}"#,
        )
        .unwrap();
        assert!(object.spec.images.is_empty() && object.status.is_none());
        let nothing = parse_node_image(&Value::Null, &json!({}));
        assert_eq!(nothing.status, Some(NodeImageStatus::default()));
    }
}

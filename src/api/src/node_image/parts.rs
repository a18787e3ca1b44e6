//! NodeImages are read part by part: a part that cannot be read hides no other.
//!
//! All tenants of a node share its NodeImage, and the API server keeps what the schema lets pass: a time in the year 9999,
//! which our type does not hold, or a number that an older schema did not bound. Both programs read by these rules:
//!
//! * A time that cannot be read is none. For `createdAt` that is the safe side: every wait of the manager counts from it,
//!   and one that counts from the end of time has none. A tag without it is removed, as OpenKruise removes it, and whoever
//!   needs the image asks anew; the daemon, which does not need the time, pulls meanwhile.
//! * An outcome without a readable `completionTime` is an outcome: no node waits for it.
//! * A tag of which anything else cannot be read keeps its name, version, owners and whatever else can be, and has no
//!   `createdAt`. The daemon does not pull it, for its limits are not known.
//! * What has no name is left out: nobody can ask for it.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::{ImageSpec, ImageStatus, ImageTagSpec, ImageTagStatus, NodeImageSpec, NodeImageStatus};

/// The fields of an object, to be read one by one.
struct Fields {
    fields: Map<String, Value>,
    /// The first that could not be read, and why.
    unreadable: Option<String>,
}

impl Fields {
    /// The fields of what is there; none of what is absent, or no object.
    fn of<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
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

    /// A field; nothing where it is absent, null or cannot be read.
    fn read<T: DeserializeOwned>(&mut self, name: &str) -> Option<T> {
        let value = self.fields.remove(name).filter(|value| !value.is_null())?;
        match serde_json::from_value(value) {
            Ok(read) => Some(read),
            Err(why) => {
                self.unreadable.get_or_insert_with(|| format!("{name}: {why}"));
                None
            }
        }
    }

    fn take<T: DeserializeOwned + Default>(&mut self, name: &str) -> T {
        self.read(name).unwrap_or_default()
    }

    /// A time; one that cannot be read is none.
    fn time(&mut self, name: &str) -> Option<Time> {
        serde_json::from_value(self.fields.remove(name)?).ok()
    }

    /// What can be read of a list.
    fn list<T: DeserializeOwned>(&mut self, name: &str) -> Vec<T> {
        let items = self.take::<Vec<Value>>(name).into_iter();
        items
            .filter_map(|item| serde_json::from_value(item).ok())
            .collect()
    }

    /// What can be read of a map.
    fn map<T: DeserializeOwned>(&mut self, name: &str) -> BTreeMap<String, T> {
        let entries = self.take::<Map<String, Value>>(name).into_iter();
        let read = |(key, value)| Some((key, serde_json::from_value(value).ok()?));
        entries.filter_map(read).collect()
    }
}

impl<'de> Deserialize<'de> for NodeImageSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let images = Fields::of(deserializer)?.map("images");
        Ok(Self { images })
    }
}

impl<'de, S: DeserializeOwned> Deserialize<'de> for ImageSpec<S> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Fields::of(deserializer)?;
        let mut tags: Vec<ImageTagSpec> = fields.list("tags");
        let (pull_secrets, sandbox_config) = (fields.take("pullSecrets"), fields.take("sandboxConfig"));
        if let Some(why) = fields.unreadable {
            for tag in &mut tags {
                tag.created_at = None;
                tag.unreadable.get_or_insert_with(|| why.clone());
            }
        }
        Ok(Self {
            pull_secrets,
            sandbox_config,
            tags,
        })
    }
}

impl<'de> Deserialize<'de> for ImageTagSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Fields::of(deserializer)?;
        let tag = fields.read("tag").ok_or_else(|| D::Error::missing_field("tag"))?;
        let created_at = fields.time("createdAt");
        let pull_policy = fields.take("pullPolicy");
        let owner_references = fields.take("ownerReferences");
        let version = fields.take("version");
        let image_pull_policy = fields.take("imagePullPolicy");
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
        let mut fields = Fields::of(deserializer)?;
        Ok(Self {
            desired: fields.take("desired"),
            succeeded: fields.take("succeeded"),
            failed: fields.take("failed"),
            pulling: fields.take("pulling"),
            waiting: fields.take("waiting"),
            image_statuses: fields.map("imageStatuses"),
            first_sync_status: fields.take("firstSyncStatus"),
        })
    }
}

impl<'de> Deserialize<'de> for ImageStatus {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let tags = Fields::of(deserializer)?.list("tags");
        Ok(Self { tags })
    }
}

impl<'de> Deserialize<'de> for ImageTagStatus {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = Fields::of(deserializer)?;
        let tag = fields.read("tag").ok_or_else(|| D::Error::missing_field("tag"))?;
        let phase = fields
            .read("phase")
            .ok_or_else(|| D::Error::missing_field("phase"))?;
        let version = fields.take("version");
        // Without its version it may be the answer to another request.
        if let Some(why) = fields.unreadable {
            return Err(D::Error::custom(why));
        }
        Ok(Self {
            tag,
            phase,
            version,
            progress: fields.take("progress"),
            start_time: fields.time("startTime"),
            completion_time: fields.time("completionTime"),
            image_id: fields.take("imageID"),
            message: fields.take("message"),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use serde_json::json;

    use super::super::{ImagePullPhase, NodeImage};
    use super::*;

    /// Times that the API server takes, and those that it did not look at.
    const TIMES: [&str; 4] = [
        r#""9999-12-31T23:59:59Z""#,
        r#""2026-01-01T00:00:00+99:99""#,
        r#""soon""#,
        "7",
    ];

    fn read(spec: &Value, status: &Value) -> NodeImage {
        let object = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "NodeImage",
            "metadata": { "name": "n" }, "spec": spec, "status": status });
        serde_json::from_str(&object.to_string()).unwrap()
    }

    #[test]
    fn a_time_that_cannot_be_read_is_none() {
        for time in TIMES {
            let time: Value = serde_json::from_str(time).unwrap();
            let object = read(
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
            assert!(bad.ended() && !good.ended());
            assert!(good.start_time.is_some());
            assert_eq!(status.desired, 2);
        }
    }

    #[test]
    fn a_part_of_a_wrong_shape_hides_no_other() {
        let good = || json!({ "tag": "good", "createdAt": "2026-01-01T00:00:00Z" });
        let long = json!({ "timeoutSeconds": 99_999_999_999_i64 });
        let object = read(
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
            let told = tags.map(|t| {
                (
                    &*t.tag,
                    t.version,
                    t.created_at.is_some(),
                    t.unreadable.as_deref(),
                )
            });
            told.collect::<Vec<_>>()
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
    fn a_nodeimage_may_have_nothing_but_a_name() {
        let object: NodeImage = serde_json::from_str(
            r#"{"apiVersion":"apps.kruise.io/v1beta1","kind":"NodeImage","metadata":{"name":"n"}}"#,
        )
        .unwrap();
        assert!(object.spec.images.is_empty() && object.status.is_none());
        let nothing = read(&Value::Null, &json!({}));
        assert_eq!(nothing.status, Some(NodeImageStatus::default()));
    }
}

//! Conversion between the two versions, in both directions and without loss.
//!
//! Works on JSON, so that unknown fields are kept. Fields that v1alpha1 lacks are kept in annotations: two of
//! upstream's (the container snapshot and the time of the unready mark of a ContainerRecreateRequest) and two of our
//! own ([`keys::CRR_CONDITIONS`], [`keys::NODE_IMAGE_SECRET_MODES`]), which exist only while an object is in v1alpha1.
//! For CloneSet see its own file.
//!
//! As upstream does, upstream's two annotations are kept on an object that is converted to v1beta1; there the status
//! counts, and on the way back it overwrites them.

use std::collections::{HashMap, VecDeque};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Map, Value, json};

use super::container_recreate_request::ContainerRecreateRequestSyncContainerStatus;
use super::json::set;
use super::{GROUP, Kind, V1ALPHA1, V1BETA1, keys};

mod cloneset;
mod metadata;
pub mod partial;
mod sidecarset;

use metadata::{annotated_list, annotation, remove_annotation, set_annotation};

/// Why an object was not converted. All of these are permanent.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not a Kubernetes object.
    #[error("cannot convert an object whose {field} is missing or of the wrong type")]
    Malformed {
        /// The wrong or missing field.
        field: &'static str,
    },
    /// A version that is not served.
    #[error(
        "cannot convert {kind} from {from:?} to {to:?}: expected apps.kruise.io/v1alpha1 or apps.kruise.io/v1beta1"
    )]
    UnknownVersion {
        /// Kind of the object.
        kind: String,
        /// `apiVersion` of the object.
        from: String,
        /// Requested `apiVersion`.
        to: String,
    },
    /// A kind that is not served.
    #[error("cannot convert objects of kind {kind:?}")]
    UnknownKind {
        /// Kind of the object.
        kind: String,
    },
    /// Its JSON cannot be parsed.
    #[error("this object cannot be read; fields may be nested some 120 levels deep: {0}")]
    Unreadable(#[from] serde_json::Error),
    /// What conversion reads of it takes too much memory.
    #[error("too large: reading it takes {memory} bytes of memory, {max_memory} are the most")]
    TooLarge {
        /// Estimated bytes.
        memory: usize,
        /// Maximum number of bytes.
        max_memory: usize,
    },
}

impl Error {
    /// Whether the same call may succeed later without any change: never.
    pub fn retryable(&self) -> bool {
        false
    }

    /// The word used as metric label.
    pub fn category(&self) -> &'static str {
        match self {
            Self::Malformed { .. } => "malformed",
            Self::UnknownVersion { .. } => "unknown_version",
            Self::UnknownKind { .. } => "unknown_kind",
            Self::Unreadable(_) => "unreadable",
            Self::TooLarge { .. } => "too_large",
        }
    }
}

/// Converts an object to the version `to`, given as `apps.kruise.io/v1beta1` or `v1beta1`.
///
/// # Errors
///
/// For kinds and versions that are not served. Unusual values inside an object are kept, not refused: an object that
/// cannot be converted could not even be deleted.
pub fn convert(mut object: Value, to: &str) -> Result<Value, Error> {
    let text = |field: &'static str| match &object[field] {
        Value::String(text) => Ok(text.clone()),
        _ => Err(Error::Malformed { field }),
    };
    let (kind, from) = (text("kind")?, text("apiVersion")?);
    if !object["metadata"].is_object() {
        return Err(Error::Malformed { field: "metadata" });
    }
    let version = |api_version: &str| match api_version
        .strip_prefix(GROUP)
        .and_then(|rest| rest.strip_prefix('/'))
        .unwrap_or(api_version)
    {
        V1ALPHA1 => Some(V1ALPHA1),
        V1BETA1 => Some(V1BETA1),
        _ => None,
    };
    let (Some(from_version), Some(to_version)) = (version(&from), version(to)) else {
        return Err(Error::UnknownVersion {
            kind,
            from,
            to: to.to_owned(),
        });
    };
    let Some(served) = Kind::from_name(&kind) else {
        return Err(Error::UnknownKind { kind });
    };
    if !served.info().versions.contains(&to_version) {
        return Err(Error::UnknownVersion {
            kind,
            from,
            to: to.to_owned(),
        });
    }
    set(
        &mut object,
        &["apiVersion"],
        json!(format!("{GROUP}/{to_version}")),
    );
    if from_version == to_version {
        return Ok(object);
    }
    match (served, to_version) {
        (Kind::CloneSet, V1BETA1) => cloneset::to_v1beta1(&mut object),
        (Kind::CloneSet, _) => cloneset::to_v1alpha1(&mut object),
        (Kind::NodeImage, V1BETA1) => modes_from_annotation(&mut object),
        (Kind::NodeImage, _) => modes_to_annotation(&mut object),
        (Kind::ContainerRecreateRequest, V1BETA1) => request_to_v1beta1(&mut object),
        (Kind::ContainerRecreateRequest, _) => request_to_v1alpha1(&mut object),
        (Kind::SidecarSet, V1BETA1) => sidecarset::to_v1beta1(&mut object),
        (Kind::SidecarSet, _) => sidecarset::to_v1alpha1(&mut object),
        (
            Kind::ImagePullJob
            | Kind::ImageListPullJob
            | Kind::ContainerRecreateJob
            | Kind::NodePodProbe
            | Kind::PodProbeMarker,
            _,
        ) => {}
    }
    Ok(object)
}

fn pull_secrets_by_image(object: &mut Value) -> impl Iterator<Item = (&String, &mut Vec<Value>)> {
    let images = object.get_mut("spec").and_then(|spec| spec.get_mut("images"));
    images
        .and_then(Value::as_object_mut)
        .into_iter()
        .flat_map(Map::iter_mut)
        .filter_map(|(name, image)| Some((name, image.get_mut("pullSecrets")?.as_array_mut()?)))
}

/// v1beta1 → v1alpha1: the modes of pull secrets move to an annotation.
fn modes_to_annotation(object: &mut Value) {
    remove_annotation(object, keys::NODE_IMAGE_SECRET_MODES);
    let mut modes = Map::new();
    for (name, secrets) in pull_secrets_by_image(object) {
        if secrets.iter().all(|secret| secret["mode"].is_null()) {
            continue;
        }
        let triples: Vec<_> = secrets
            .iter_mut()
            .map(|secret| {
                let mode = secret.as_object_mut().and_then(|secret| secret.remove("mode"));
                json!([secret["namespace"], secret["name"], mode])
            })
            .collect();
        modes.insert(name.clone(), triples.into());
    }
    if !modes.is_empty() {
        set_annotation(
            object,
            keys::NODE_IMAGE_SECRET_MODES,
            Value::Object(modes).to_string(),
        );
    }
}

/// v1alpha1 → v1beta1: modes return to the secrets that still exist.
fn modes_from_annotation(object: &mut Value) {
    let annotation_text = remove_annotation(object, keys::NODE_IMAGE_SECRET_MODES);
    let annotated_modes =
        annotation_text.and_then(|text| serde_json::from_str::<Map<String, Value>>(&text).ok());
    let Some(annotated_modes) = annotated_modes else {
        return;
    };
    for (name, secrets) in pull_secrets_by_image(object) {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let mut modes: HashMap<_, VecDeque<&Value>> = HashMap::new();
        for triple in annotated_modes
            .get(name)
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
        {
            let secret = (text(&triple[0]), text(&triple[1]));
            modes.entry(secret).or_default().push_back(&triple[2]);
        }
        for secret in secrets {
            let key = (text(&secret["namespace"]), text(&secret["name"]));
            let mode = modes.get_mut(&key).and_then(VecDeque::pop_front);
            if let (Some(secret), Some(mode @ Value::String(_))) = (secret.as_object_mut(), mode) {
                secret.insert("mode".into(), mode.clone());
            }
        }
    }
}

/// v1alpha1 → v1beta1: annotations become status. Text that is not such a value remains an annotation.
fn request_to_v1beta1(object: &mut Value) {
    let carried = remove_annotation(object, keys::CRR_CONDITIONS);
    let mut conditions: Vec<Value> = carried
        .and_then(|text| serde_json::from_str(&text).ok())
        .unwrap_or_default();
    if let Some(since) = annotation(object, keys::CRR_UNREADY_ACQUIRED).and_then(parse_time) {
        let existing = conditions
            .iter_mut()
            .find(|condition| condition["type"] == keys::PRE_RECREATE_GRACE);
        match existing {
            Some(existing) if transition_time(existing) == Some(since.clone()) => {}
            Some(existing) => *existing = grace_condition(&since),
            None => conditions.push(grace_condition(&since)),
        }
    }
    if !conditions.is_empty() {
        set_status(object, "conditions", conditions.into());
    }
    let snapshot = annotated_list(object, keys::CRR_SYNC_CONTAINER_STATUSES);
    if let Some(snapshot) = snapshot.filter(|list| !list.is_empty() && list.iter().all(is_container_status)) {
        set_status(object, "containerStatusSnapshot", snapshot.into());
    }
}

/// v1beta1 → v1alpha1: status that has no field becomes annotations.
fn request_to_v1alpha1(object: &mut Value) {
    remove_annotation(object, keys::CRR_CONDITIONS);
    let mut remove_list = |field: &str| match object
        .get_mut("status")
        .and_then(Value::as_object_mut)?
        .remove(field)?
    {
        Value::Array(list) if !list.is_empty() => Some(list),
        _ => None,
    };
    let (snapshot, conditions) = (remove_list("containerStatusSnapshot"), remove_list("conditions"));
    if let Some(snapshot) = snapshot
        && annotated_list(object, keys::CRR_SYNC_CONTAINER_STATUSES).as_ref() != Some(&snapshot)
    {
        set_annotation(object, keys::CRR_SYNC_CONTAINER_STATUSES, snapshot_text(snapshot));
    }
    let Some(conditions) = conditions else { return };
    let mut reconstructible = true;
    for condition in &conditions {
        let since = transition_time(condition);
        let is_grace_condition =
            condition["type"] == keys::PRE_RECREATE_GRACE && condition["status"] == "True";
        match since.filter(|_| is_grace_condition) {
            Some(since) => {
                reconstructible &= *condition == grace_condition(&since);
                if annotation(object, keys::CRR_UNREADY_ACQUIRED)
                    .and_then(parse_time)
                    .as_ref()
                    != Some(&since)
                {
                    set_annotation(object, keys::CRR_UNREADY_ACQUIRED, format_time(&since));
                }
            }
            None => reconstructible = false,
        }
    }
    if !reconstructible {
        set_annotation(object, keys::CRR_CONDITIONS, Value::Array(conditions).to_string());
    }
}

/// Sets a field of status, which is created with an empty phase if absent.
fn set_status(object: &mut Value, field: &str, value: Value) {
    if !object["status"].is_object() {
        set(object, &["status", "phase"], json!(""));
    }
    set(object, &["status", field], value);
}

fn is_container_status(value: &Value) -> bool {
    serde_json::from_value::<ContainerRecreateRequestSyncContainerStatus>(value.clone()).is_ok()
}

/// The snapshot as text, in upstream's order of fields.
fn snapshot_text(list: Vec<Value>) -> String {
    let typed: Result<Vec<ContainerRecreateRequestSyncContainerStatus>, _> =
        list.iter().cloned().map(serde_json::from_value).collect();
    typed
        .ok()
        .and_then(|typed| serde_json::to_string(&typed).ok())
        .unwrap_or_else(|| json!(list).to_string())
}

fn parse_time(text: &str) -> Option<Time> {
    serde_json::from_value(json!(text)).ok()
}

fn transition_time(condition: &Value) -> Option<Time> {
    condition["lastTransitionTime"].as_str().and_then(parse_time)
}

fn format_time(time: &Time) -> String {
    time.0.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

fn grace_condition(since: &Time) -> Value {
    json!({
        "type": keys::PRE_RECREATE_GRACE,
        "status": "True",
        "lastTransitionTime": format_time(since),
        "reason": keys::PRE_RECREATE_GRACE,
        "message": keys::PRE_RECREATE_GRACE_MESSAGE,
    })
}

#[cfg(test)]
mod tests;

//! What the API server or etcd would refuse in a Pod because of its sidecars. Found before, it is a failed injection, so
//! that the failure policy of the sets decides about it.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::{Container, LocalObjectReference, Volume};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::sidecarset::inject::is_injected;
use crate::sidecarset::policy::{Unsupported, typed};
use kruise_api::validation::labels::{MAX_ANNOTATIONS_BYTES, annotation_bytes};

/// Bytes of an object that etcd stores by default.
const MAX_STORED: usize = 3 << 19;

/// Why the Pod would be refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unacceptable {
    /// A container has no image.
    #[error("container {container:?} of a SidecarSet has no image; its hotUpgradeEmptyImage may be missing")]
    NoImage {
        /// Name of the container in the Pod.
        container: String,
    },
    /// A field has another type than in Kubernetes.
    #[error("the API server could not read what a SidecarSet adds: {0}")]
    Unreadable(Unsupported),
    /// The annotations are too long.
    #[error("the Pod would have {bytes} bytes of annotations; it may have {MAX_ANNOTATIONS_BYTES}")]
    AnnotationsTooLong {
        /// Bytes of keys and values.
        bytes: usize,
    },
    /// The Pod is too large.
    #[error("the Pod would have at least {bytes} bytes; etcd stores {MAX_STORED}")]
    TooLarge {
        /// Bytes of its strings.
        bytes: usize,
    },
}

/// Compares the Pod that was submitted with the result: the API server itself refuses what was wrong before.
///
/// # Errors
///
/// If the API server would accept the one and refuse the other for its sidecars.
pub fn check(submitted: &Value, pod: &Value) -> Result<(), Unacceptable> {
    let lists = ["containers", "initContainers"].map(|list| pod["spec"][list].as_array());
    let mut sidecars = lists.into_iter().flatten().flatten().filter(|c| is_injected(c));
    if let Some(container) = sidecars.find(|c| c["image"].as_str().is_none_or(str::is_empty)) {
        let container = container["name"].as_str().unwrap_or_default().to_owned();
        return Err(Unacceptable::NoImage { container });
    }
    readable::<Container>(submitted, pod, "containers", is_injected)?;
    readable::<Container>(submitted, pod, "initContainers", is_injected)?;
    readable::<Volume>(submitted, pod, "volumes", |_| true)?;
    readable::<LocalObjectReference>(submitted, pod, "imagePullSecrets", |_| true)?;
    let grows_beyond = |limit: usize, bytes: fn(&Value) -> usize| {
        Some(bytes(pod)).filter(|of_pod| *of_pod > limit && bytes(submitted) <= limit)
    };
    if let Some(bytes) = grows_beyond(MAX_ANNOTATIONS_BYTES, |pod| {
        annotation_bytes(&pod["metadata"]["annotations"])
    }) {
        return Err(Unacceptable::AnnotationsTooLong { bytes });
    }
    if let Some(bytes) = grows_beyond(MAX_STORED, text) {
        return Err(Unacceptable::TooLarge { bytes });
    }
    Ok(())
}

/// Checks the members of a list that were added. The API server answers with status 500 if it cannot read them.
fn readable<'a, T: DeserializeOwned>(
    submitted: &'a Value,
    pod: &'a Value,
    list: &str,
    may_be_added: fn(&Value) -> bool,
) -> Result<(), Unacceptable> {
    let items = |pod: &'a Value| pod["spec"][list].as_array().into_iter().flatten();
    let submitted: HashMap<_, _> = items(submitted)
        .map(|item| (item["name"].as_str(), item))
        .collect();
    for item in items(pod).filter(|item| may_be_added(item)) {
        let name = item["name"].as_str();
        if submitted.get(&name) != Some(&item) {
            let field = format!("spec.{list}[{}]", name.unwrap_or_default());
            typed::check::<T>(item, &field).map_err(Unacceptable::Unreadable)?;
        }
    }
    Ok(())
}

/// Bytes of all strings in a value. The stored form has them all, and is somewhat larger.
fn text(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(text).sum(),
        Value::Object(fields) => fields.values().map(text).sum(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use kruise_api::keys;
    use serde_json::json;

    use super::*;

    fn pod(annotation: usize, env: usize, sidecar: &Value) -> Value {
        let env = json!([{ "name": "E", "value": "x".repeat(env) }]);
        json!({ "metadata": { "annotations": { "key": "x".repeat(annotation) } },
            "spec": { "containers": [{ "name": "app", "env": env }, sidecar] } })
    }

    #[test]
    fn only_what_the_sidecars_add_is_a_failed_injection() {
        let sidecar = |image: &str| {
            let env = json!([{ "name": keys::ENV_IS_INJECTED, "value": "true" }]);
            json!({ "name": "log", "image": image, "env": env })
        };
        let good = sidecar("i");
        let none = json!({});
        let no_image = Unacceptable::NoImage {
            container: "log".to_owned(),
        };
        let all = MAX_ANNOTATIONS_BYTES - "key".len();
        let long = Unacceptable::AnnotationsTooLong {
            bytes: MAX_ANNOTATIONS_BYTES + 1,
        };
        let large = Unacceptable::TooLarge {
            bytes: MAX_STORED + "appElogiIS_INJECTEDtrue".len(),
        };
        for (submitted, result, expected) in [
            (pod(0, 0, &none), pod(0, 0, &good), Ok(())),
            (pod(0, 0, &none), pod(0, 0, &sidecar("")), Err(no_image)),
            (pod(0, 0, &none), pod(all, 0, &good), Ok(())),
            (pod(all, 0, &none), pod(all + 1, 0, &good), Err(long)),
            (pod(all + 1, 0, &none), pod(all + 2, 0, &good), Ok(())),
            (
                pod(0, MAX_STORED - 4, &none),
                pod(0, MAX_STORED, &good),
                Err(large),
            ),
            (pod(0, MAX_STORED, &none), pod(0, MAX_STORED, &good), Ok(())),
        ] {
            assert_eq!(check(&submitted, &result), expected);
        }
        let mut number = good.clone();
        number["ports"] = json!([{ "containerPort": "80" }]);
        let mut amount = good.clone();
        amount["resources"] = json!({ "limits": { "cpu": 1.5, "memory": null } });
        amount["command"] = json!(null);
        let with = |list: &str, item: Value| {
            let mut pod = pod(0, 0, &good);
            pod["spec"][list] = json!([item]);
            pod
        };
        for (result, readable) in [
            (pod(0, 0, &amount), true),
            (pod(0, 0, &number), false),
            (with("initContainers", number.clone()), false),
            (
                with("volumes", json!({ "name": "v", "emptyDir": { "sizeLimit": 5 } })),
                true,
            ),
            (with("volumes", json!({ "name": "v", "emptyDir": [] })), false),
            (with("volumes", json!({ "name": "v", "emptyDir": "" })), false),
            (with("imagePullSecrets", json!({ "name": 1 })), false),
        ] {
            let checked = check(&pod(0, 0, &none), &result);
            let is_unreadable = matches!(checked, Err(Unacceptable::Unreadable(_)));
            assert_eq!(is_unreadable, !readable, "{checked:?} {result}");
            assert_eq!(check(&result, &result), Ok(()), "{result}");
        }
        for hostile in [
            json!(null),
            json!({ "metadata": [], "spec": { "containers": "x" } }),
        ] {
            assert_eq!(check(&hostile, &hostile), Ok(()));
        }
    }
}

//! The webhook handlers for `kruise-fuzzing`: from the bytes of a review to its answer, without any request to the API
//! server.

use std::sync::{Arc, LazyLock};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::container_recreate_request::PodLookup;
use super::pod::PodInjectionLookup;
use super::review::{Object, Request};
use super::sidecar_set::SidecarSetLookup;
use super::{
    cloneset, container_recreate_request, deletion, image_pull_job, node_image, pod, reviews_json,
    sidecar_set,
};
use kruise_api::convert::partial::PartialObject;
use kruise_api::sidecarset::SidecarSet;
use kruise_api::{keys, names};
use kruise_workload::pod_admission::MutationError;
use kruise_workload::sidecarset::hash::with_hashes;
use kruise_workload::sidecarset::policy;
use kruise_workload::sidecarset::set::SetView;

/// Sets that select every Pod, with what reads the Pod to inject them.
static SETS: LazyLock<Vec<Arc<SidecarSet>>> = LazyLock::new(|| {
    let all = json!({ "matchExpressions": [{ "key": "none", "operator": "DoesNotExist" }] });
    let name_from = json!({ "fieldRef": { "fieldPath": "metadata.labels['app']" } });
    let computed = json!({ "targetContainersMode": "sum", "targetContainersNameRegex": ".*", "resourcesExpr": {
        "limits": { "cpu": "max(cpu*50%, 50m)", "memory": "200Mi" },
        "requests": { "cpu": "min(cpu - 10m, 2)", "memory": "(memory + 1Mi) / 2" } } });
    let priority = json!([{ "name": keys::ENV_CONTAINER_PRIORITY, "value": "1" }]);
    let plain = json!({
        "selector": all,
        "initContainers": [
            { "name": "init", "image": "a:1", "podInjectPolicy": "BeforeAppContainer" },
            { "name": "native", "image": "a:1", "restartPolicy": "Always", "resourcesPolicy": computed },
        ],
        "containers": [
            { "name": "copies", "image": "a:1", "podInjectPolicy": "AfterAppContainer", "env": priority,
              "shareVolumePolicy": { "type": "enabled" }, "shareVolumeDevicePolicy": { "type": "enabled" },
              "volumeMounts": [{ "name": "data", "mountPath": "/data" }],
              "transferEnv": [{ "sourceContainerName": "app", "envName": "A" },
                  { "sourceContainerNameFrom": name_from, "envNames": ["A", "B"] }] },
            { "name": "computed", "image": "a:1", "resourcesPolicy": computed },
        ],
        "volumes": [{ "name": "data", "emptyDir": {} }],
        "imagePullSecrets": [{ "name": "registry" }],
        "patchPodMetadata": [
            { "annotations": { "retained": "a" } },
            { "annotations": { "written": "b" }, "patchPolicy": "Overwrite" },
            { "annotations": { "merged": r#"{"a":{"b":1}}"# }, "patchPolicy": "MergePatchJson" },
        ],
    });
    let hot = json!({
        "selector": all,
        "containers": [{ "name": "hot", "image": "a:1",
            "upgradeStrategy": { "upgradeType": "HotUpgrade", "hotUpgradeEmptyImage": "empty:1" } }],
    });
    let sets = [("plain", plain), ("hot", hot)].map(|(name, spec)| {
        let set = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet",
            "metadata": { "name": name, "uid": name, "resourceVersion": "1" }, "spec": spec });
        let set = serde_json::from_value(set);
        Arc::new(with_hashes(set.unwrap_or_else(|why| {
            unreachable!("the SidecarSet above is one: {why}")
        })))
    });
    sets.into()
});

/// A Pod (JSON) with what sets read.
fn injected_pod() -> Value {
    json!({
        "metadata": { "name": "p", "labels": { "app": "app" }, "annotations": { "merged": "{}" } },
        "spec": {
            "containers": [{ "name": "app", "image": "a:1", "env": [{ "name": "A", "value": "1" }],
                "volumeMounts": [{ "name": "v", "mountPath": "/v" }],
                "resources": { "limits": { "cpu": "1500m", "memory": "1Gi" }, "requests": { "cpu": "0.1", "memory": "1e6" } } }],
            "volumes": [{ "name": "v", "emptyDir": {} }],
        },
    })
}

/// The request that creates that Pod.
fn injected_pod_request() -> Option<Request> {
    Some(Request {
        object: Object::parse(injected_pod()).ok()?,
        old: None,
        namespace: "n".to_owned(),
        version: "v1".to_owned(),
        strict: false,
    })
}

/// The Pod of the request with these sets.
fn inject(request: &Request, sets: Vec<Arc<SidecarSet>>) -> Result<Value, MutationError> {
    let lookup = PodInjectionLookup {
        sets,
        namespace_labels: Some(Arc::default()),
        readiness_gate_for_all: true,
        enhanced_liveness: true,
        ..PodInjectionLookup::default()
    };
    pod::mutate(request, &lookup, Timestamp::UNIX_EPOCH)
}

/// Injects a SidecarSet of any content, by the webhook and by a policy.
fn inject_set(set: SidecarSet) {
    let (set, mut sets) = (Arc::new(set), SETS.clone());
    sets.push(Arc::clone(&set));
    if let Some(request) = injected_pod_request() {
        let _ = inject(&request, sets.clone());
    }
    let views: Vec<_> = sets.iter().map(|set| SetView::from(&**set)).collect();
    let options = policy::Options {
        namespace: keys::SYSTEM_NAMESPACE,
        sort_containers: false,
        sets: &views,
        revisions: &[],
    };
    let _ = policy::compile(&SetView::from(&*set), &options);
}

/// An `AdmissionReview`, decided for every kind.
pub fn review(data: &[u8]) {
    if let Ok((_, Some(namespace))) = reviews_json::parse_deletion(data) {
        let name = deletion::protected_namespace(&namespace);
        assert!(name.is_none_or(names::is_label), "{name:?}");
    }
    let Ok((_, Some(request))) = reviews_json::parse_admission(data) else {
        return;
    };
    let pod = json!({
        "metadata": {"name": "p", "namespace": "n", "uid": "u"},
        "spec": {"nodeName": "node", "containers": [{"name": "app"}]},
        "status": {"phase": "Running", "containerStatuses": [{"name": "app", "containerID": "c://1", "image": "a",
            "imageID": "a", "ready": true, "restartCount": 0}]},
    });
    let lookup = PodLookup {
        pod: serde_json::from_value::<Pod>(pod).ok(),
        ..PodLookup::default()
    };
    let _ = container_recreate_request::decide(&request, &lookup);
    let _ = image_pull_job::set_defaults(&request);
    let _ = image_pull_job::validate_request(&request, &[]);
    let _ = node_image::set_defaults(&request, Timestamp::UNIX_EPOCH);
    let _ = node_image::validate_request(&request);
    let _ = cloneset::changed_templates(&request);
    let _ = cloneset::added_pods_to_delete(&request);
    let _ = cloneset::set_defaults(&request, None);
    let _ = cloneset::validate_request(&request, &[], None);
    let _ = sidecar_set::set_defaults(&request);
    let _ = sidecar_set::validate_request(&request, &SidecarSetLookup::default());
    let _ = inject(&request, SETS.clone());
    if let Ok(set) = serde_json::from_value(request.object.to_json()) {
        inject_set(set);
    }
}

/// A `ConversionReview`.
pub fn conversion(data: &[u8]) {
    if let Ok((_, (objects, to))) = reviews_json::parse_conversion(data) {
        for text in objects {
            let object = PartialObject::parse(text, reviews_json::MAX_OBJECT_MEMORY);
            if let Ok(object) = object.and_then(|object| object.convert(&to)) {
                let _ = object.write(&mut Vec::new());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// The sets of the fuzz target are injected with everything that they have, and both have policies, so that it
    /// reaches that code.
    #[test]
    fn fuzz_target_injects_sets() {
        let request = injected_pod_request().unwrap();
        let pod = inject(&request, SETS.clone()).unwrap();
        let names = |list: &str| -> Vec<String> {
            let containers = pod["spec"][list].as_array().unwrap();
            containers
                .iter()
                .map(|one| one["name"].as_str().unwrap().to_owned())
                .collect()
        };
        assert_eq!(names("initContainers"), ["init", "native"]);
        let mut containers = names("containers");
        containers.sort();
        assert_eq!(containers, ["app", "computed", "copies", "hot-1", "hot-2"]);
        let text = pod.to_string();
        for part in [
            "750m",
            r#""written":"b""#,
            r#""merged":"{\"a\":{\"b\":1}}""#,
            "registry",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let views: Vec<_> = SETS.iter().map(|set| SetView::from(&**set)).collect();
        let options = policy::Options {
            namespace: keys::SYSTEM_NAMESPACE,
            sort_containers: false,
            sets: &views,
            revisions: &[],
        };
        let policies = views
            .iter()
            .map(|set| policy::compile(set, &options).map(|all| all.len()));
        assert!(
            policies
                .into_iter()
                .any(|count| count.is_ok_and(|count| count > 0))
        );
    }
}

//! What the webhook for Pods changes, step by step, without a client.
//!
//! Each step is a file here, or in the module of its kind; [`mutate`] is their order.

use std::sync::Arc;

use serde_json::Value;

use kruise_api::pod_probe_marker::PodProbeMarker;

use crate::sidecarset::inject::{self, InjectionError};
use crate::sidecarset::policy;
use acceptable::Unacceptable;
use launch_priority::LaunchPriorityError;

pub mod acceptable;
pub mod enhanced_liveness;
pub mod launch_priority;
pub mod readiness_gate;
pub mod virtual_node_probes;

/// What the request is about.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Namespace of the Pod; empty counts as `default`.
    pub namespace: &'a str,
    /// `status`, `eviction` and so on; empty for the Pod itself.
    pub subresource: &'a str,
}

/// Gates, time and randomness.
#[derive(Debug)]
pub struct Options<'a> {
    /// Gate `KruisePodReadinessGate`: all Pods get the readiness gate.
    pub readiness_gate_for_all: bool,
    /// Gate `EnhancedLivenessProbe`.
    pub enhanced_liveness: bool,
    /// The PodProbeMarkers of the Pod's namespace, sorted by name; empty without gate `EnablePodProbeMarkerOnServerless`.
    pub probe_markers: &'a [Arc<PodProbeMarker>],
    /// How SidecarSets are injected.
    pub inject: inject::Options,
    /// Random bytes for the end of a generated name.
    pub random_name: [u8; 5],
    /// Where the SidecarSets come from.
    pub cluster: inject::Cluster<'a>,
}

/// Why a Pod is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MutationError {
    /// A SidecarSet cannot be injected.
    #[error(transparent)]
    Injection(#[from] InjectionError),
    /// A launch priority of the Pod's own container is invalid.
    #[error(transparent)]
    LaunchPriority(LaunchPriorityError),
    /// A launch priority of a sidecar is invalid.
    #[error("a SidecarSet cannot be injected: {0}")]
    SidecarLaunchPriority(LaunchPriorityError),
    /// The API server would refuse the Pod because of its sidecars.
    #[error(transparent)]
    Unacceptable(#[from] Unacceptable),
}

/// Changes a Pod (raw JSON) that is created. Returns whether a step changed it; annotations of a SidecarSet that
/// injects no container do not count.
///
/// # Errors
///
/// If a step refuses the Pod, which may be half-changed then.
pub fn mutate(
    pod: &mut Value,
    request: &Request<'_>,
    options: &Options<'_>,
    random_percent: &mut dyn FnMut() -> u32,
) -> Result<bool, MutationError> {
    let mut changed = readiness_gate::apply(pod, options.readiness_gate_for_all);
    if request.subresource.is_empty() {
        let namespace = Some(request.namespace)
            .filter(|name| !name.is_empty())
            .unwrap_or("default");
        policy::undo(pod, options.cluster.sets);
        let own_errors = launch_priority::errors(pod);
        changed |= inject::inject(pod, namespace, &options.cluster, &options.inject, random_percent)?;
        // Behind the injection, because sidecars have priorities, too.
        changed |= launch_priority::apply(pod, options.random_name).map_err(|why| {
            let mut errors = launch_priority::errors(pod).into_iter();
            let own = errors.find(|error| own_errors.contains(error));
            own.map_or(
                MutationError::SidecarLaunchPriority(why),
                MutationError::LaunchPriority,
            )
        })?;
        changed |= options.enhanced_liveness && enhanced_liveness::apply(pod);
        changed |= virtual_node_probes::apply(pod, options.probe_markers);
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::sidecarset::set::SetView;
    use kruise_api::keys;
    use kruise_api::sidecarset::SidecarSetSpec;

    fn mutated(pod: &mut Value, spec: &SidecarSetSpec) -> Result<bool, MutationError> {
        let annotations = BTreeMap::new();
        let set = SetView {
            name: "mesh",
            resource_version: "1",
            annotations: &annotations,
            latest_revision: "",
            spec,
        };
        let options = Options {
            readiness_gate_for_all: true,
            enhanced_liveness: true,
            probe_markers: &[],
            inject: inject::Options {
                sort_containers: true,
                now: jiff::Timestamp::UNIX_EPOCH,
            },
            random_name: [0; 5],
            cluster: inject::Cluster {
                sets: &[set],
                namespace_labels: None,
                revisions: &[],
            },
        };
        let request = Request {
            namespace: "",
            subresource: "",
        };
        mutate(pod, &request, &options, &mut || 0)
    }

    fn spec(container: Value) -> SidecarSetSpec {
        serde_json::from_value(json!({
            "selector": { "matchExpressions": [{ "key": "none", "operator": "DoesNotExist" }] },
            "containers": [container],
            "initContainers": [{ "name": "init", "restartPolicy": "Always" }],
            "patchPodMetadata": [{ "annotations": { "k": "{}" }, "patchPolicy": "MergePatchJson" }],
        }))
        .unwrap()
    }

    #[test]
    fn priorities_of_sidecars_count() {
        let env = json!([{ "name": keys::ENV_CONTAINER_PRIORITY, "value": "1" }]);
        let sidecar = spec(json!({ "name": "log", "env": env }));
        let mut pod = json!({ "metadata": { "name": "p" }, "spec": { "containers": [{ "name": "app" }] } });
        assert_eq!(mutated(&mut pod, &sidecar), Ok(true));
        let priorities: Vec<_> = pod["spec"]["containers"]
            .as_array()
            .unwrap()
            .iter()
            .map(|container| {
                (
                    container["name"].as_str().unwrap(),
                    crate::in_place::priority(container),
                )
            })
            .collect();
        assert_eq!(priorities, [("app", Some(0)), ("log", Some(1))]);
        assert_eq!(
            pod["spec"]["readinessGates"][0]["conditionType"],
            keys::KRUISE_POD_READY
        );
    }

    #[test]
    fn invalid_priority_is_of_the_pod_only_if_its_own_container_has_it() {
        let priority = |value: &str| json!([{ "name": keys::ENV_CONTAINER_PRIORITY, "value": value }]);
        let error = |container: &str, value: &str| LaunchPriorityError::NotAnInteger {
            container: container.to_owned(),
            value: value.to_owned(),
        };
        let of_sidecar = MutationError::SidecarLaunchPriority(error("log", "high"));
        let of_pod = |container| MutationError::LaunchPriority(error(container, "low"));
        for (own, sidecar, expected) in [
            (json!({ "name": "app" }), "high", &of_sidecar),
            (
                json!({ "name": "app", "env": priority("low") }),
                "1",
                &of_pod("app"),
            ),
            (
                json!({ "name": "app", "env": priority("low") }),
                "high",
                &of_pod("app"),
            ),
            // The sidecar replaces it.
            (
                json!({ "name": "log", "env": priority("low") }),
                "high",
                &of_sidecar,
            ),
        ] {
            let sidecar =
                json!({ "name": "log", "env": priority(sidecar), "podInjectPolicy": "BeforeAppContainer" });
            let mut pod =
                json!({ "metadata": { "name": "p" }, "spec": { "containers": [own, { "name": "other" }] } });
            assert_eq!(mutated(&mut pod, &spec(sidecar)).as_ref(), Err(expected), "{own}");
        }
    }

    /// JSON with the names that the steps look at, anywhere.
    fn any_json() -> impl Strategy<Value = Value> {
        let names = [
            "metadata",
            "spec",
            "containers",
            "initContainers",
            "name",
            "generateName",
            "env",
            "value",
            "annotations",
            "labels",
            "volumeMounts",
            "volumeDevices",
            "subPathExpr",
            "mountPath",
            "resources",
            "limits",
            "requests",
            "cpu",
            "readinessGates",
            "livenessProbe",
            "ownerReferences",
            "volumes",
            "imagePullSecrets",
            "k",
            keys::SIDECAR_SET_HASH,
            keys::SIDECAR_SET_WORKING_CONTAINER,
            keys::USING_ENHANCED_LIVENESS,
        ];
        let texts = [
            "",
            "app",
            "$(A)$(",
            "true",
            "{}",
            "[1]",
            "KRUISE_CONTAINER_PRIORITY",
            "IS_INJECTED",
            "1",
            "é",
        ];
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<i64>().prop_map(Value::from),
            prop::sample::select(texts.to_vec()).prop_map(Value::from),
        ];
        let key = prop::sample::select(names.to_vec()).prop_map(str::to_owned);
        leaf.prop_recursive(6, 64, 6, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map(key.clone(), inner, 0..6)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// Whatever a Pod and a container hold, the steps end, and only add to the Pod's own containers.
        #[test]
        fn any_pod_is_changed_or_refused(
            containers in any_json(),
            metadata in any_json(),
            pod in any_json(),
            container in any_json(),
            hot in any::<bool>(),
        ) {
            let mut container = container;
            if let Some(fields) = container.as_object_mut() {
                fields.insert("shareVolumePolicy".to_owned(), json!({ "type": "enabled" }));
                fields.insert("transferEnv".to_owned(), json!([{ "sourceContainerName": "app", "envName": "1" }]));
                if hot {
                    fields.insert("upgradeStrategy".to_owned(), json!({ "upgradeType": "HotUpgrade" }));
                }
                let spec = spec(container);
                let mut pod = pod;
                let _ = mutated(&mut pod, &spec);
                let mut pod = json!({ "metadata": metadata, "spec": { "containers": containers } });
                let own = containers.as_array().map_or(0, Vec::len);
                if mutated(&mut pod, &spec).is_ok() {
                    let now = pod["spec"]["containers"].as_array().map_or(0, Vec::len);
                    prop_assert!(now >= own);
                }
            }
        }
    }
}

//! New Pods: adds the readiness gate, injects SidecarSets, sets the barriers of launch priorities, moves liveness
//! probes that the daemon runs, and lists the probes that a virtual node runs.
//!
//! What a set asks for and cannot have is a failed request, so that the set's failure policy decides whether the Pod is
//! created without it. A Pod is refused only for what it says itself.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::ControllerRevision;
use serde::Deserialize;
use serde_json::Value;

use super::review::Request;
use kruise_api::pod_probe_marker::PodProbeMarker;
use kruise_api::sidecarset::{SidecarSet, SidecarSetSpec};
use kruise_workload::pod_admission::{self, MutationError, acceptable};
use kruise_workload::sidecarset::inject::{self, InjectionError};
use kruise_workload::sidecarset::matching::selects_labels;
use kruise_workload::sidecarset::set::SetView;

/// What the cluster has, as far as a new Pod needs it.
#[derive(Debug, Default)]
pub(super) struct PodInjectionLookup {
    /// All sets.
    pub sets: Vec<Arc<SidecarSet>>,
    /// Labels of the Pod's Namespace, if it is known.
    pub namespace_labels: Option<Arc<BTreeMap<String, String>>>,
    /// Revisions of sets.
    pub revisions: Vec<Arc<ControllerRevision>>,
    /// Gate `KruisePodReadinessGate`.
    pub readiness_gate_for_all: bool,
    /// Gate `EnhancedLivenessProbe`.
    pub enhanced_liveness: bool,
    /// PodProbeMarkers of the Pod's namespace, sorted by name; none without gate `EnablePodProbeMarkerOnServerless`.
    pub probe_markers: Vec<Arc<PodProbeMarker>>,
    /// Gate `EnableSortSidecarContainerByName`.
    pub sort_containers: bool,
}

/// Removes the sets of which the unknown labels of the Pod's Namespace decide whether they are injected, and the sets that
/// they replace as canaries: what a policy has injected for them stays. Returns whether the rest is what was called for:
/// `reason` is the name in the path, without one all sets are.
pub(super) fn remove_undecided(
    request: &Request,
    sets: &mut Vec<Arc<SidecarSet>>,
    reason: Option<&str>,
) -> bool {
    let pod = request.object.to_json();
    let labels = BTreeMap::<String, String>::deserialize(&pod["metadata"]["labels"]).unwrap_or_default();
    let mut is_complete = true;
    let selects = |spec: &SidecarSetSpec| !spec.is_injection_paused() && selects_labels(spec, &labels);
    let undecided = sets
        .iter()
        .filter(|set| set.spec.namespace_selector.is_some() && selects(&set.spec));
    let replaced = undecided.filter_map(|set| SetView::from(&**set).canary_base());
    let replaced: BTreeSet<String> = replaced.map(str::to_owned).collect();
    sets.retain(|set| {
        let name = set.metadata.name.as_deref().unwrap_or_default();
        let matters = set.spec.namespace_selector.is_some() || replaced.contains(name);
        let is_decided = !matters || !selects(&set.spec);
        is_complete &= is_decided || reason.is_some_and(|reason| reason != name);
        is_decided
    });
    is_complete
}

/// Whether the Pod's own content is the reason, so that no set may decide.
pub(super) fn is_about_pod(error: &MutationError) -> bool {
    matches!(
        error,
        MutationError::LaunchPriority(_) | MutationError::Injection(InjectionError::InvalidAnnotation { .. })
    )
}

/// The Pod with all changes.
///
/// # Errors
/// If a set cannot be injected.
pub(super) fn mutate(
    request: &Request,
    lookup: &PodInjectionLookup,
    now: Timestamp,
) -> Result<Value, MutationError> {
    let mut pod = request.object.to_json();
    // The API server drops the status of a new Pod after the webhooks: one that says that the Pod has failed would keep
    // sidecars out of a Pod that runs.
    let status = pod.as_object_mut().and_then(|pod| pod.remove("status"));
    let sets: Vec<SetView<'_>> = lookup.sets.iter().map(|set| SetView::from(&**set)).collect();
    let (is_named, no_labels) = (inject::named_by(&sets), BTreeMap::new());
    let named = lookup.revisions.iter().filter(|revision| {
        let name = revision.metadata.name.as_deref().unwrap_or_default();
        is_named(name, revision.metadata.labels.as_ref().unwrap_or(&no_labels))
    });
    let revisions: Vec<_> = named.cloned().collect();
    let options = pod_admission::Options {
        readiness_gate_for_all: lookup.readiness_gate_for_all,
        enhanced_liveness: lookup.enhanced_liveness,
        probe_markers: &lookup.probe_markers,
        inject: inject::Options {
            sort_containers: lookup.sort_containers,
            now,
        },
        random_name: random().to_ne_bytes().first_chunk().copied().unwrap_or_default(),
        cluster: inject::Cluster {
            sets: &sets,
            namespace_labels: lookup.namespace_labels.as_deref(),
            revisions: &revisions,
        },
    };
    let scope = pod_admission::Request {
        namespace: &request.namespace,
        subresource: "",
    };
    let mut random_percent = || u32::try_from(random() % 100).unwrap_or_default();
    pod_admission::mutate(&mut pod, &scope, &options, &mut random_percent)?;
    acceptable::check(&request.object, &pod)?;
    if let Some(status) = status {
        kruise_api::json::set(&mut pod, &["status"], status);
    }
    Ok(pod)
}

/// A random number; it need not be secret.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kruise_api::keys;
    use serde_json::json;

    use super::*;
    use crate::admission::review::Object;

    /// Why a Pod with this container and annotations gets no sidecar, and whether it is refused for it.
    fn failure(container: &Value, annotations: &Value, sidecar: &Value) -> (String, bool) {
        let set = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet", "metadata": { "name": "s" },
            "spec": { "selector": { "matchLabels": { "app": "web" } }, "containers": [sidecar] } });
        let lookup = PodInjectionLookup {
            sets: vec![Arc::new(serde_json::from_value(set).unwrap())],
            ..PodInjectionLookup::default()
        };
        let metadata = json!({ "name": "p", "labels": { "app": "web" }, "annotations": annotations });
        let request = Request {
            object: Object::for_test(json!({ "metadata": metadata, "spec": { "containers": [container] } })),
            old: None,
            namespace: "default".to_owned(),
            version: "v1".to_owned(),
            strict: false,
        };
        let why = mutate(&request, &lookup, Timestamp::UNIX_EPOCH).unwrap_err();
        (why.to_string(), is_about_pod(&why))
    }

    /// Otherwise the base would be injected in the place of its canary.
    #[test]
    fn base_is_undecided_with_its_canary() {
        let web = json!({ "matchLabels": { "app": "web" } });
        let set = |name: &str, annotations: Value, spec: Value| -> Arc<SidecarSet> {
            let metadata = json!({ "name": name, "annotations": annotations });
            let set = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet", "metadata": metadata,
                "spec": spec });
            Arc::new(serde_json::from_value(set).unwrap())
        };
        let canary_of_base = json!({ keys::SIDECAR_SET_CANARY: "true", keys::SIDECAR_SET_BASE: "base" });
        let sets = |canary_app: &str| {
            let namespaces = json!({ "matchLabels": { "ring": "1" } });
            let selector = json!({ "matchLabels": { "app": canary_app } });
            vec![
                set("base", json!({}), json!({ "selector": web })),
                set(
                    "canary",
                    canary_of_base.clone(),
                    json!({ "selector": selector, "namespaceSelector": namespaces }),
                ),
                set("other", json!({}), json!({ "selector": web })),
            ]
        };
        let metadata = json!({ "name": "p", "labels": { "app": "web" } });
        let request = Request {
            object: Object::for_test(json!({ "metadata": metadata, "spec": { "containers": [] } })),
            old: None,
            namespace: "default".to_owned(),
            version: "v1".to_owned(),
            strict: false,
        };
        for (canary_app, reason, is_complete, left) in [
            ("web", Some("base"), false, &["other"][..]),
            ("web", Some("other"), true, &["other"]),
            ("none", Some("base"), true, &["base", "canary", "other"]),
        ] {
            let mut sets = sets(canary_app);
            assert_eq!(
                remove_undecided(&request, &mut sets, reason),
                is_complete,
                "{left:?}"
            );
            let names: Vec<&str> = sets
                .iter()
                .filter_map(|set| set.metadata.name.as_deref())
                .collect();
            assert_eq!(names, left);
        }
    }

    #[test]
    fn pod_is_refused_only_for_what_it_has_itself() {
        let priority = json!([{ "name": keys::ENV_CONTAINER_PRIORITY, "value": "high" }]);
        let with_priority = |name: &str| json!({ "name": name, "image": "i", "env": priority });
        let app = json!({ "name": "app", "image": "i" });
        let side = json!({ "name": "side", "image": "i" });
        let hot = json!({ "name": "side", "image": "i", "upgradeStrategy": { "upgradeType": "HotUpgrade" } });
        let mut text = side.clone();
        text["securityContext"] = json!({ "runAsUser": "1000" });
        let junk = json!({ keys::SIDECAR_SET_HASH: "junk" });
        let long = json!({ "key": "x".repeat((256 << 10) - 10) });
        let none = json!({});
        for (container, annotations, sidecar, why, refused) in [
            (&app, &none, &with_priority("side"), "container \"side\"", false),
            (&with_priority("app"), &none, &side, "container \"app\"", true),
            (&app, &junk, &side, "is invalid: \"junk\"", true),
            (
                &app,
                &none,
                &hot,
                "container \"side-2\" of a SidecarSet has no image",
                false,
            ),
            (
                &app,
                &none,
                &text,
                "spec.containers[side] cannot be read: invalid type: string",
                false,
            ),
            (&app, &long, &side, "bytes of annotations", false),
        ] {
            let failure = failure(container, annotations, sidecar);
            assert!(failure.0.contains(why), "{failure:?}");
            assert_eq!(failure.1, refused, "{failure:?}");
        }
    }
}

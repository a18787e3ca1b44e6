//! New Pods.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::instance_ids::{instance_ids, is_kept, pod_name, unavailable_ids, unused_claim_ids};
use super::types::{Action, ParsedRevision};
use super::view::PlanView;
use super::{claims, lifecycle};
use kruise_api::cloneset::string_map;
use kruise_api::json::{list_items, set};
use kruise_api::keys;
use kruise_api::lifecycle::LifecycleStateType as State;
use kruise_workload::in_place::Pod;
use kruise_workload::pod_admission::launch_priority;
use kruise_workload::revision::{revision_label, short_hash};

/// Gates that we add to our Pods ourselves, so that an outage of our webhook cannot block the creation of a Pod.
const READINESS_GATES: [&str; 2] = [keys::IN_PLACE_UPDATE_READY, keys::KRUISE_POD_READY];

/// Actions that create `count` Pods, the first `from_current` of them of the current revision. It creates fewer while
/// Pods are terminating whose claims are kept: the Pods that replace them get these claims, and their names. Unused
/// claims come first, so that a Pod that never terminates does not block the creation of others. It also creates fewer
/// if that exceeds the limit of one plan.
pub(super) fn plan_creations(
    view: &PlanView<'_>,
    kept_claims: &BTreeSet<&str>,
    count: usize,
    from_current: usize,
) -> Vec<Action> {
    let observed = view.observed;
    let terminating = unusable_with_claims(view, kept_claims).len();
    let unavailable = unavailable_ids(view, kept_claims);
    let unused = unused_claim_ids(view, kept_claims, &unavailable);
    let count = count.saturating_sub(terminating).max(count.min(unused.len()));
    let count = count.min(view.pod_limit());
    let ids = instance_ids(view, unavailable, unused, count);
    let create = |(at, id): (usize, String)| {
        let name = if at < from_current {
            &observed.current_revision
        } else {
            &observed.update_revision
        };
        let revision = view.revision(name)?;
        Some(Action::CreatePod {
            name: pod_name(view, &id),
            pod: build_pod(view, revision, &id)?,
            claims: claims::missing_claims(view, kept_claims, &id),
        })
    };
    ids.into_iter().enumerate().filter_map(create).collect()
}

/// The Pods that are terminating or have ended, and whose claims are kept.
pub(super) fn unusable_with_claims<'a>(view: &PlanView<'a>, kept_claims: &BTreeSet<&str>) -> Vec<&'a Pod> {
    pods_with_claims(view, kept_claims, |pod| {
        is_own(view, pod) && (pod.terminating || is_terminal(view, pod))
    })
}

/// The Pods that have ended and whose claims are kept, and that no one has deleted.
pub(super) fn ended_with_claims<'a>(view: &PlanView<'a>, kept_claims: &BTreeSet<&str>) -> Vec<&'a Pod> {
    pods_with_claims(view, kept_claims, |pod| {
        !pod.terminating && is_terminal(view, pod)
    })
}

/// Whether a Pod of the CloneSet has ended.
pub(super) fn is_terminal(view: &PlanView<'_>, pod: &Pod) -> bool {
    !pod.terminating && !pod.active() && is_own(view, pod)
}

/// Whether the CloneSet controls the Pod. An orphan may have a copy of its Pods' labels.
fn is_own(view: &PlanView<'_>, pod: &Pod) -> bool {
    pod.controller.as_ref() == Some(&view.owner())
}

fn pods_with_claims<'a>(
    view: &PlanView<'a>,
    kept_claims: &BTreeSet<&str>,
    filter: impl Fn(&Pod) -> bool,
) -> Vec<&'a Pod> {
    let observed = view.observed;
    let kept = observed.claims.iter().filter(|claim| is_kept(kept_claims, claim));
    let ids = kept.map(|claim| claim.instance_id.as_str());
    let ids: BTreeSet<&str> = ids.filter(|id| !id.is_empty()).collect();
    if ids.is_empty() {
        return Vec::new();
    }
    let with_claims = observed
        .pods
        .iter()
        .filter(|pod| ids.contains(claims::instance_id(view, pod)));
    with_claims.filter(|pod| filter(pod)).map(AsRef::as_ref).collect()
}

/// The labels for a Pod's revision.
pub(super) fn revision_labels(view: &PlanView<'_>, revision: &str) -> [(&'static str, String); 2] {
    let hash = short_hash(revision).to_owned();
    let full = if view.observed.features.short_hash {
        hash.clone()
    } else {
        revision_label(revision).to_owned()
    };
    [
        (keys::CONTROLLER_REVISION_HASH, full),
        (keys::POD_TEMPLATE_HASH, hash),
    ]
}

/// A Pod from the revision's template; `None` if the template has no spec.
fn build_pod(view: &PlanView<'_>, revision: &ParsedRevision, id: &str) -> Option<Value> {
    let template = &revision.data["spec"]["template"];
    let mut spec = template["spec"].as_object()?.clone();
    add_readiness_gates(&mut spec);
    claims::add_volumes(view, &mut spec, id);
    let lifecycle = lifecycle::state_metadata(&State::PreparingNormal, view.now);
    let mut labels = string_map(&template["metadata"]["labels"]);
    labels.extend(string_map(&lifecycle["labels"]));
    labels.extend(revision_labels(view, &revision.name).map(|(k, v)| (k.to_owned(), v)));
    labels.insert(keys::CLONESET_INSTANCE_ID.to_owned(), id.to_owned());
    let mut annotations = string_map(&template["metadata"]["annotations"]);
    // They belong to the Pod that the template was copied from.
    annotations.retain(|key, _| !keys::OWN_POD_METADATA.contains(&key.as_str()));
    annotations.extend(string_map(&lifecycle["annotations"]));
    let mut metadata = json!({
        "generateName": pod_name(view, ""),
        "name": pod_name(view, id),
        "namespace": view.observed.set.metadata.namespace,
        "labels": labels,
        "annotations": annotations,
        "ownerReferences": [view.owner_reference()],
    });
    let finalizers = &template["metadata"]["finalizers"];
    if finalizers.is_array() {
        set(&mut metadata, &["finalizers"], finalizers.clone());
    }
    let mut pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec });
    // The Pod has a name, and admission refuses a priority that is no number.
    let _ = launch_priority::apply(&mut pod, [0; 5]);
    Some(pod)
}

/// Appends our gates if the template lacks them.
fn add_readiness_gates(spec: &mut Map<String, Value>) {
    let mut gates = list_items(spec, "readinessGates").to_vec();
    for gate in READINESS_GATES {
        if gates.iter().all(|g| g["conditionType"] != gate) {
            gates.push(json!({ "conditionType": gate }));
        }
    }
    spec.insert("readinessGates".to_owned(), Value::Array(gates));
}

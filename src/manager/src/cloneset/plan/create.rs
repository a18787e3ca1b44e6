//! New Pods.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::instance_ids::{instance_ids, pod_name, spare, stays, taken};
use super::types::{Act, Revision};
use super::view::View;
use super::{claims, launch_barriers, lifecycle};
use kruise_api::cloneset::texts;
use kruise_api::json::{items, set};
use kruise_api::keys;
use kruise_api::lifecycle::LifecycleStateType as State;
use kruise_workload::in_place::Pod;
use kruise_workload::revision::{label, short};

/// Gates that we put into our Pods ourselves, so that no outage of ours can stop a Pod's creation.
const GATES: [&str; 2] = [keys::IN_PLACE_UPDATE_READY, keys::KRUISE_POD_READY];

/// Acts that make `count` Pods, the first `old` of them of the current revision. Fewer where Pods are still going
/// whose claims stay: those claims are for the Pods that take their places, and names, when they are gone. Claims that
/// no Pod has wait for nobody: they come first, so that a Pod that never goes keeps no other from being made. Fewer also
/// where one plan makes no more.
pub(super) fn create(view: &View<'_>, claims: &BTreeSet<&str>, count: usize, old: usize) -> Vec<Act> {
    let observed = view.observed;
    let going = leaving(view, claims).len();
    let taken = taken(view, claims);
    let spare = spare(view, claims, &taken);
    let count = count.saturating_sub(going).max(count.min(spare.len()));
    let count = count.min(view.room());
    let ids = instance_ids(view, taken, spare, count);
    let make = |(at, id): (usize, String)| {
        let name = if at < old {
            &observed.current
        } else {
            &observed.update
        };
        let revision = view.revision(name)?;
        Some(Act::CreatePod {
            name: pod_name(view, &id),
            pod: pod(view, revision, &id)?,
            claims: claims::missing(view, claims, &id),
        })
    };
    ids.into_iter().enumerate().filter_map(make).collect()
}

/// The Pods that are being deleted, or have ended, and whose claims stay.
pub(super) fn leaving<'a>(view: &View<'a>, claims: &BTreeSet<&str>) -> Vec<&'a Pod> {
    with_claims(view, claims, |pod| pod.deleting || gone(view, pod))
}

/// The Pods that have ended, and whose claims stay, with nobody to delete them.
pub(super) fn ended<'a>(view: &View<'a>, claims: &BTreeSet<&str>) -> Vec<&'a Pod> {
    with_claims(view, claims, |pod| !pod.deleting && gone(view, pod))
}

/// Whether a Pod of ours has ended.
fn gone(view: &View<'_>, pod: &Pod) -> bool {
    !pod.deleting && !pod.active() && pod.controller.as_ref() == Some(&view.owner())
}

fn with_claims<'a>(view: &View<'a>, claims: &BTreeSet<&str>, which: impl Fn(&Pod) -> bool) -> Vec<&'a Pod> {
    let observed = view.observed;
    let stay = observed.claims.iter().filter(|claim| stays(claims, claim));
    let ids: BTreeSet<&String> = stay.map(|c| &c.instance).filter(|id| !id.is_empty()).collect();
    if ids.is_empty() {
        return Vec::new();
    }
    let going = observed.pods.iter().filter(|pod| which(pod));
    going
        .filter(|pod| {
            pod.labels
                .get(keys::CLONESET_INSTANCE_ID)
                .is_some_and(|id| ids.contains(id))
        })
        .map(AsRef::as_ref)
        .collect()
}

/// The labels that tell a Pod's revision.
pub(super) fn revision_labels(view: &View<'_>, revision: &str) -> [(&'static str, String); 2] {
    let hash = short(revision).to_owned();
    let full = if view.observed.switches.short_hash {
        hash.clone()
    } else {
        label(revision).to_owned()
    };
    [
        (keys::CONTROLLER_REVISION_HASH, full),
        (keys::POD_TEMPLATE_HASH, hash),
    ]
}

/// A Pod made from the revision's template; `None` where that has no spec.
fn pod(view: &View<'_>, revision: &Revision, id: &str) -> Option<Value> {
    let template = &revision.data["spec"]["template"];
    let mut spec = template["spec"].as_object()?.clone();
    gate(&mut spec);
    launch_barriers::raise(template, &pod_name(view, id), &mut spec);
    claims::mount(view, &mut spec, id);
    let mark = lifecycle::marks(&State::PreparingNormal, view.now);
    let mut labels = texts(&template["metadata"]["labels"]);
    labels.extend(texts(&mark["labels"]));
    labels.extend(revision_labels(view, &revision.name).map(|(k, v)| (k.to_owned(), v)));
    labels.insert(keys::CLONESET_INSTANCE_ID.to_owned(), id.to_owned());
    let mut annotations = texts(&template["metadata"]["annotations"]);
    // Of the Pod that the template was taken from.
    annotations.remove(keys::CONTAINER_LAUNCH_COMPLETED);
    annotations.extend(texts(&mark["annotations"]));
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
    Some(json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec }))
}

/// Appends our gates where the template has them not.
fn gate(spec: &mut Map<String, Value>) {
    let mut gates = items(spec, "readinessGates").to_vec();
    for gate in GATES {
        if gates.iter().all(|g| g["conditionType"] != gate) {
            gates.push(json!({ "conditionType": gate }));
        }
    }
    spec.insert("readinessGates".to_owned(), Value::Array(gates));
}

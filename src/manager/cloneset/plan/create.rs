//! New Pods.

use std::collections::{BTreeSet, HashSet};

use serde_json::{Map, Value, json};

use super::types::{Act, Revision};
use super::view::View;
use super::{barriers, lifecycle, volumes};
use crate::api::cloneset::texts;
use crate::api::json::set;
use crate::api::keys;
use crate::api::lifecycle::LifecycleStateType as State;
use crate::in_place::Pod;
use crate::workload::claim::Claim;
use crate::workload::revision::{label, short};

/// Characters of an instance id.
const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
/// How many of them it has.
const LENGTH: usize = 5;
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
            claims: volumes::missing(view, claims, &id),
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

fn pod_name(view: &View<'_>, id: &str) -> String {
    format!(
        "{}-{id}",
        view.observed.set.metadata.name.as_deref().unwrap_or_default()
    )
}

/// Ids of Pods that were to be made before, as far as they are missing or may turn up yet, these first. They are tried
/// again under the same name, so that there is one Pod at most.
pub(super) fn tried<'a>(view: &View<'a>) -> Vec<&'a str> {
    let names = &view.observed.left.pods;
    if names.is_empty() {
        return Vec::new();
    }
    let prefix = pod_name(view, "");
    let id = |(name, _): (&'a String, _)| name.strip_prefix(&prefix);
    let (doubt, refused): (Vec<_>, Vec<_>) = names
        .iter()
        .partition(|(_, until)| until.is_some_and(|until| until > view.now));
    let missing = view.numbers(|pod| view.scaled_as_updated(pod)).scale_up;
    let count = doubt.len().max(usize::try_from(missing).unwrap_or_default());
    doubt
        .into_iter()
        .chain(refused)
        .filter_map(id)
        .take(count)
        .collect()
}

/// Ids that a new Pod cannot have: those of Pods, and of claims that are being deleted, which keep their names for a
/// while.
fn taken<'a>(view: &View<'a>, claims: &BTreeSet<&str>) -> HashSet<&'a str> {
    let observed = view.observed;
    let of_pod = |pod: &'a std::sync::Arc<Pod>| {
        let last = pod.name.rsplit_once('-').map(|(_, id)| id);
        let label = pod.labels.get(keys::CLONESET_INSTANCE_ID);
        label.map(String::as_str).into_iter().chain(last)
    };
    let going = observed.claims.iter().filter(|claim| !stays(claims, claim));
    let pods = observed.pods.iter().flat_map(of_pod);
    pods.chain(going.map(|claim| claim.instance.as_str())).collect()
}

/// Ids of claims that stay and that no Pod has.
fn spare<'a>(view: &View<'a>, claims: &BTreeSet<&str>, taken: &HashSet<&str>) -> BTreeSet<&'a str> {
    let all = view.observed.claims.iter().filter(|claim| stays(claims, claim));
    all.map(|claim| claim.instance.as_str())
        .filter(|id| !id.is_empty() && !taken.contains(id))
        .collect()
}

fn stays(claims: &BTreeSet<&str>, claim: &Claim) -> bool {
    claims.contains(claim.name.as_str())
}

/// Ids that no Pod has, sorted: first those that were tried already, then those of the claims that stay without a Pod,
/// then new ones.
fn instance_ids<'a>(
    view: &View<'a>,
    mut taken: HashSet<&'a str>,
    spare: BTreeSet<&'a str>,
    count: usize,
) -> BTreeSet<String> {
    let mut ids = BTreeSet::new();
    for id in tried(view).iter().chain(&spare) {
        if ids.len() < count && !taken.contains(id) {
            ids.insert((*id).to_owned());
        }
    }
    taken.extend(spare);
    let mut seed = view.observed.seed;
    while ids.len() < count {
        let id = random_id(&mut seed);
        if !taken.contains(id.as_str()) {
            ids.insert(id);
        }
    }
    ids
}

/// The next id out of `seed` (splitmix64).
fn random_id(seed: &mut u64) -> String {
    *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut bits = *seed;
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^= bits >> 31;
    let letters = ALPHABET.len() as u64;
    let letter = |_| {
        let at = usize::try_from(bits % letters).unwrap_or_default();
        bits /= letters;
        char::from(ALPHABET[at])
    };
    (0..LENGTH).map(letter).collect()
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

/// The reference of the CloneSet to itself as the controller of what it makes.
pub(super) fn owner(view: &View<'_>) -> Value {
    let meta = &view.observed.set.metadata;
    json!({
        "apiVersion": "apps.kruise.io/v1beta1",
        "kind": "CloneSet",
        "name": meta.name,
        "uid": meta.uid,
        "controller": true,
        "blockOwnerDeletion": true,
    })
}

/// A Pod made from the revision's template; `None` where that has no spec.
fn pod(view: &View<'_>, revision: &Revision, id: &str) -> Option<Value> {
    let template = &revision.data["spec"]["template"];
    let mut spec = template["spec"].as_object()?.clone();
    gate(&mut spec);
    barriers::raise(template, &pod_name(view, id), &mut spec);
    volumes::mount(view, &mut spec, id);
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
        "ownerReferences": [owner(view)],
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

/// The items of a list in a Pod's spec.
pub(super) fn items<'a>(spec: &'a Map<String, Value>, list: &str) -> &'a [Value] {
    spec.get(list)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

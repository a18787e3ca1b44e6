//! The claims of a CloneSet's Pods.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::draft::Draft;
use super::instance_ids::tried;
use super::types::{Act, ClaimPatch, OrphanClaim, Subject};
use super::view::View;
use kruise_api::cloneset::texts;
use kruise_api::json::{items, set};
use kruise_api::keys;
use kruise_api::lifecycle::LifecycleStateType as State;
use kruise_workload::claim::Claim;
use kruise_workload::in_place::Pod;

/// Names of the claims that stay. Where claims are not reused, those of Pods that are gone are deleted, and those
/// of Pods that go are given to them, to go with them; those of Pods that are yet to be made wait for them.
pub(super) fn clean_up<'a>(view: &View<'a>, draft: &mut Draft) -> BTreeSet<&'a str> {
    let strategy = view.spec.scale_strategy.as_ref();
    let reuse = strategy.is_some_and(|s| s.enable_pvc_reuse);
    let tried = tried(view);
    let unknown = view.observed.left.pods.values().flatten();
    let next = unknown.filter(|until| **until > view.now).min();
    next.into_iter().for_each(|until| draft.wake_at(*until));
    // There may be ten thousand Pods without a claim.
    let pods = view.observed.pods.iter().filter(|_| !view.claims.is_empty());
    let pods: BTreeMap<&str, &Pod> = pods.map(|pod| (instance(pod), pod.as_ref())).collect();
    let mut kept = BTreeSet::new();
    for claim in view.observed.claims.iter().filter(|claim| !claim.deleting) {
        let (name, uid, id) = (claim.name.clone(), claim.uid.clone(), claim.instance.as_str());
        let stays = reuse || id.is_empty() || tried.contains(&id);
        match pods.get(id) {
            Some(pod) if !stays && !pod.active() => {
                draft.act(view, Act::PatchClaim(hand_over(view, pod, claim)));
            }
            None if !stays && claim.shared => {
                draft.act(view, Act::PatchClaim(change_owner(claim, set_uid(view), None)));
            }
            None if !stays => {
                draft.act(view, Act::DeleteClaim { name, uid });
            }
            _ => {
                kept.insert(claim.name.as_str());
            }
        }
    }
    kept
}

/// The id that a Pod shares with its claims; empty where it has none.
fn instance(pod: &Pod) -> &str {
    let id = pod.labels.get(keys::CLONESET_INSTANCE_ID);
    id.map(String::as_str).unwrap_or_default()
}

/// Gives a claim to a Pod, so that the garbage collector deletes the claim once the Pod, and who else owns it, is gone.
/// The Pod blocks nobody's deletion, which would take a right over the finalizers of Pods.
fn hand_over(view: &View<'_>, pod: &Pod, claim: &Claim) -> ClaimPatch {
    let to =
        json!({ "apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid, "controller": true });
    change_owner(claim, set_uid(view), Some(to))
}

fn set_uid<'a>(view: &View<'a>) -> &'a str {
    view.observed.set.metadata.uid.as_deref().unwrap_or_default()
}

/// Puts one owner in the place of another, or of nobody: then the claim is left to who else owns it.
fn change_owner(claim: &Claim, from: &str, mut to: Option<Value>) -> ClaimPatch {
    if let Some(to) = to.as_mut().filter(|_| claim.controlled) {
        set(to, &["controller"], json!(false));
    }
    let mut owners = vec![json!({ "$patch": "delete", "uid": from })];
    owners.extend(to);
    ClaimPatch {
        name: claim.name.clone(),
        uid: claim.uid.clone(),
        patch: json!({ "metadata": { "uid": claim.uid, "ownerReferences": owners } }),
    }
}

/// Takes back the claims of Pods that were to be deleted and are not: somebody else's deletion is not to take them along.
pub(super) fn take_back(view: &View<'_>, draft: &mut Draft) {
    if view.observed.given.is_empty() {
        return;
    }
    for pod in &view.pods {
        let goes = pod.specified || pod.state == State::PreparingDelete || draft.touched(pod);
        let Some(claims) = view.observed.given.get(&pod.uid).filter(|_| !goes) else {
            continue;
        };
        // Its deletion may be tried again.
        if let Some(until) = view.delayed(&Subject::Pod(pod.uid.clone())) {
            draft.wake_at(until);
            continue;
        }
        for claim in claims {
            draft.act(
                view,
                Act::PatchClaim(change_owner(claim, &pod.uid, Some(view.owner_reference()))),
            );
        }
    }
}

/// What gives a Pod its claims before it is deleted.
pub(super) fn of_pod(view: &View<'_>, pod: &Pod) -> Vec<ClaimPatch> {
    let id = Some(instance(pod)).filter(|id| !id.is_empty());
    let claims = id.and_then(|id| view.claims.get(id)).into_iter().flatten();
    claims.map(|claim| hand_over(view, pod, claim)).collect()
}

/// The claims of a Pod that is to be adopted: a deletion of the CloneSet before, without its dependents, left them, too.
pub(super) fn orphans(view: &View<'_>, pod: &Pod) -> Vec<OrphanClaim> {
    let id = Some(instance(pod)).filter(|id| !id.is_empty());
    let templates = view.spec.volume_claim_templates.iter();
    let claims = id.into_iter().flat_map(|id| {
        templates.clone().map(move |template| OrphanClaim {
            name: claim_name(view, template, id),
            instance: id.to_owned(),
        })
    });
    claims.collect()
}

fn claim_name(view: &View<'_>, template: &Value, id: &str) -> String {
    let set = view.observed.set.metadata.name.as_deref().unwrap_or_default();
    format!(
        "{}-{set}-{id}",
        template["metadata"]["name"].as_str().unwrap_or_default()
    )
}

/// The claims that a new Pod needs, and that are not `there`.
pub(super) fn missing(view: &View<'_>, there: &BTreeSet<&str>, id: &str) -> Vec<Value> {
    let templates = view.spec.volume_claim_templates.iter();
    let needed = templates.map(|template| (claim_name(view, template, id), template));
    let lacking = needed.filter(|(name, _)| !there.contains(name.as_str()));
    lacking
        .map(|(name, template)| claim(view, template, name, id))
        .collect()
}

fn claim(view: &View<'_>, template: &Value, name: String, id: &str) -> Value {
    let mut labels = texts(&template["metadata"]["labels"]);
    labels.extend(view.spec.selector.match_labels.clone().unwrap_or_default());
    labels.insert(keys::CLONESET_INSTANCE_ID.to_owned(), id.to_owned());
    let mut metadata = json!({
        "name": name,
        "namespace": view.observed.set.metadata.namespace,
        "labels": labels,
        "annotations": texts(&template["metadata"]["annotations"]),
        "ownerReferences": [view.owner_reference()],
    });
    let finalizers = &template["metadata"]["finalizers"];
    if finalizers.is_array() {
        set(&mut metadata, &["finalizers"], finalizers.clone());
    }
    json!({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata,
        "spec": template["spec"],
    })
}

/// Puts a volume for each claim before the template's own, and takes away what has the same name.
pub(super) fn mount(view: &View<'_>, spec: &mut Map<String, Value>, id: &str) {
    let templates = &view.spec.volume_claim_templates;
    if templates.is_empty() {
        return;
    }
    let volume = |template: &Value| {
        let claim = claim_name(view, template, id);
        json!({ "name": template["metadata"]["name"], "persistentVolumeClaim": { "claimName": claim } })
    };
    let mut volumes: Vec<Value> = templates.iter().map(volume).collect();
    let replaced = |v: &&Value| templates.iter().any(|t| t["metadata"]["name"] == v["name"]);
    let own = items(spec, "volumes").iter();
    volumes.extend(own.filter(|v| !replaced(v)).cloned());
    spec.insert("volumes".to_owned(), Value::Array(volumes));
}

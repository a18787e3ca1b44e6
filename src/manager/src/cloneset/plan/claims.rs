//! The claims of a CloneSet's Pods.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::builder::PlanBuilder;
use super::instance_ids::attempted_ids;
use super::types::{Action, ClaimPatch, FailureSubject, OrphanClaim};
use super::view::PlanView;
use kruise_api::cloneset::string_map;
use kruise_api::json::{list_items, set};
use kruise_api::keys;
use kruise_api::lifecycle::LifecycleStateType as State;
use kruise_workload::claim::{self, Claim};
use kruise_workload::in_place::Pod;

/// Returns the names of the claims that are kept. If claims are not reused, the claims of deleted Pods are deleted,
/// those of terminating Pods are transferred to them, to be deleted with them, and those of Pods that must still be
/// created are kept.
pub(super) fn clean_up<'a>(view: &PlanView<'a>, builder: &mut PlanBuilder) -> BTreeSet<&'a str> {
    let strategy = view.spec.scale_strategy.as_ref();
    let reuse = strategy.is_some_and(|s| s.enable_pvc_reuse);
    let attempted_ids = attempted_ids(view);
    let unknown = view.observed.unfinished.pods.values().flatten();
    let earliest = unknown.filter(|until| **until > view.now).min();
    earliest.into_iter().for_each(|until| builder.requeue_at(*until));
    // There may be ten thousand Pods without a claim.
    let pods = view.observed.pods.iter().filter(|_| !view.claims.is_empty());
    // An orphan may have a copy of a Pod's labels. It keeps a claim that no other Pod has, in case it is adopted.
    let owner = view.owner();
    let is_own = |pod: &Pod| pod.controller.as_ref() == Some(&owner);
    let (own, orphans): (Vec<_>, Vec<_>) = pods.partition(|pod| is_own(pod));
    let pods = orphans.into_iter().chain(own);
    let pods: BTreeMap<&str, &Pod> = pods.map(|pod| (instance_id(view, pod), pod.as_ref())).collect();
    let mut remaining = BTreeSet::new();
    for claim in view.observed.claims.iter().filter(|claim| !claim.terminating) {
        let (name, uid, id) = (claim.name.clone(), claim.uid.clone(), claim.instance_id.as_str());
        let in_use = reuse || id.is_empty() || attempted_ids.contains(&id);
        match pods.get(id) {
            Some(pod) if !in_use && !pod.active() && is_own(pod) => {
                builder.push(view, Action::PatchClaim(transfer_to_pod(view, pod, claim)));
            }
            None if !in_use && claim.has_other_owner => {
                builder.push(
                    view,
                    Action::PatchClaim(replace_owner(claim, clone_set_uid(view), None)),
                );
            }
            None if !in_use => {
                builder.push(view, Action::DeleteClaim { name, uid });
            }
            _ => {
                remaining.insert(claim.name.as_str());
            }
        }
    }
    remaining
}

/// The ID that a Pod shares with its claims; empty if it has none.
pub(super) fn instance_id<'a>(view: &PlanView<'_>, pod: &'a Pod) -> &'a str {
    let owner = view.owner();
    let id = match pod.controller.as_ref() == Some(&owner) {
        true => claim::instance_id(&owner.name, pod),
        false => claim::instance_label(pod),
    };
    id.unwrap_or_default()
}

/// Transfers a claim to a Pod, so that the garbage collector deletes the claim once the Pod and all other owners are
/// deleted. The reference does not set `blockOwnerDeletion`, which would require a permission for finalizers of Pods.
fn transfer_to_pod(view: &PlanView<'_>, pod: &Pod, claim: &Claim) -> ClaimPatch {
    let new_owner =
        json!({ "apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid, "controller": true });
    replace_owner(claim, clone_set_uid(view), Some(new_owner))
}

fn clone_set_uid<'a>(view: &PlanView<'a>) -> &'a str {
    view.observed.set.metadata.uid.as_deref().unwrap_or_default()
}

/// Replaces one owner by another, or removes it: then the claim is left to its other owners.
fn replace_owner(claim: &Claim, old_uid: &str, mut new_owner: Option<Value>) -> ClaimPatch {
    if let Some(to) = new_owner.as_mut().filter(|_| claim.has_other_controller) {
        set(to, &["controller"], json!(false));
    }
    let mut owners = vec![json!({ "$patch": "delete", "uid": old_uid })];
    owners.extend(new_owner);
    ClaimPatch {
        name: claim.name.clone(),
        uid: claim.uid.clone(),
        patch: json!({ "metadata": { "uid": claim.uid, "ownerReferences": owners } }),
    }
}

/// Takes back the claims of Pods that should have been deleted and are kept: a deletion by another client must not
/// delete the claims too.
pub(super) fn reclaim(view: &PlanView<'_>, builder: &mut PlanBuilder) {
    if view.observed.claims_owned_by_pod.is_empty() {
        return;
    }
    for pod in &view.pods {
        let will_delete = pod.specified || pod.state == State::PreparingDelete || builder.has_action(pod);
        let Some(claims) = view
            .observed
            .claims_owned_by_pod
            .get(&pod.uid)
            .filter(|_| !will_delete)
        else {
            continue;
        };
        // Its deletion may be retried.
        if let Some(until) = view.retry_at(&FailureSubject::Pod(pod.uid.clone())) {
            builder.requeue_at(until);
            continue;
        }
        for claim in claims {
            builder.push(
                view,
                Action::PatchClaim(replace_owner(claim, &pod.uid, Some(view.owner_reference()))),
            );
        }
    }
}

/// The patches that transfer its claims to a Pod before the Pod is deleted.
pub(super) fn pod_claims(view: &PlanView<'_>, pod: &Pod) -> Vec<ClaimPatch> {
    let id = Some(instance_id(view, pod)).filter(|id| !id.is_empty());
    let claims = id.and_then(|id| view.claims.get(id)).into_iter().flatten();
    claims.map(|claim| transfer_to_pod(view, pod, claim)).collect()
}

/// The claims of a Pod to adopt: the deletion of the previous CloneSet without its dependents orphaned them, too.
pub(super) fn orphan_claims(view: &PlanView<'_>, pod: &Pod) -> Vec<OrphanClaim> {
    let id = Some(instance_id(view, pod)).filter(|id| !id.is_empty());
    let templates = view.spec.volume_claim_templates.iter();
    let claims = id.into_iter().flat_map(|id| {
        templates.clone().map(move |template| OrphanClaim {
            name: claim_name(view, template, id),
            instance_id: id.to_owned(),
        })
    });
    claims.collect()
}

fn claim_name(view: &PlanView<'_>, template: &Value, id: &str) -> String {
    let set = view.observed.set.metadata.name.as_deref().unwrap_or_default();
    format!(
        "{}-{set}-{id}",
        template["metadata"]["name"].as_str().unwrap_or_default()
    )
}

/// The claims that a new Pod needs, without the `existing` ones.
pub(super) fn missing_claims(view: &PlanView<'_>, existing: &BTreeSet<&str>, id: &str) -> Vec<Value> {
    let templates = view.spec.volume_claim_templates.iter();
    let needed = templates.map(|template| (claim_name(view, template, id), template));
    let missing = needed.filter(|(name, _)| !existing.contains(name.as_str()));
    missing
        .map(|(name, template)| build_claim(view, template, name, id))
        .collect()
}

fn build_claim(view: &PlanView<'_>, template: &Value, name: String, id: &str) -> Value {
    let mut labels = string_map(&template["metadata"]["labels"]);
    labels.extend(view.spec.selector.match_labels.clone().unwrap_or_default());
    labels.insert(keys::CLONESET_INSTANCE_ID.to_owned(), id.to_owned());
    let mut metadata = json!({
        "name": name,
        "namespace": view.observed.set.metadata.namespace,
        "labels": labels,
        "annotations": string_map(&template["metadata"]["annotations"]),
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

/// Inserts a volume for each claim before the template's own volumes, and removes those of the same name.
pub(super) fn add_volumes(view: &PlanView<'_>, spec: &mut Map<String, Value>, id: &str) {
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
    let own = list_items(spec, "volumes").iter();
    volumes.extend(own.filter(|v| !replaced(v)).cloned());
    spec.insert("volumes".to_owned(), Value::Array(volumes));
}

use std::collections::BTreeMap;

use jiff::Timestamp;
use kruise_api::{go_json, keys};
use serde_json::{Value, json};

use super::cluster::{Cluster, list, text};
use super::update_vectors::{SetParts, is_rollback, masked};
use crate::in_place::Pod;
use crate::revision::{RevisionAction, RevisionOwner};
use crate::sidecarset::history::KIND;
use crate::sidecarset::plan::{EVENT_NOT_UPGRADABLE, EVENT_RESET_SUCCEEDED, Observed, Plan, plan};
use crate::sidecarset::upgrade::PodChanges;

const NAMESPACE: &str = "kruise-system";

/// The Pods after the plan, as the vectors show them.
fn pods_after(cluster: &Cluster, matched: &[usize], plan: &Plan) -> Value {
    let of = |list: &[(usize, PodChanges)], at: usize| {
        let found = list.iter().find(|(index, _)| matched[*index] == at);
        found.map(|(_, changes)| changes.clone())
    };
    let shown = cluster.pods.iter().enumerate().map(|(at, (namespace, pod))| {
        let changes = of(&plan.flips, at).or_else(|| of(&plan.upgrades, at)).unwrap_or_default();
        let mut annotations = pod.annotations.clone();
        annotations.extend(changes.annotations);
        let images = pod.containers.iter();
        let images = images.map(|c| json!([c.name, changes.images.get(&c.name).unwrap_or(&c.image)]));
        let current = pod.condition(keys::SIDECAR_SET_UPGRADABLE);
        let condition = current.map_or(json!({}), |c| {
            json!({ "status": if c.is_true { "True" } else { "False" }, "reason": c.reason, "message": c.message })
        });
        let new = plan.conditions.iter().find(|(index, _)| matched[*index] == at);
        let condition = new.map_or(condition, |(_, new)| {
            json!({ "status": new["status"], "reason": new["reason"], "message": new["message"] })
        });
        json!({
            "namespace": namespace,
            "name": pod.name,
            "annotations": masked(&annotations),
            "images": images.collect::<Vec<_>>(),
            "upgradableCondition": condition,
        })
    });
    shown.collect()
}

/// The revisions after the plan, by name, as the vectors show them.
fn revisions_after(cluster: &Cluster, observed: &Observed<'_>, plan: &Plan) -> Value {
    let history = &plan.history;
    let mut after = BTreeMap::new();
    for raw in &cluster.raw_revisions {
        let name = text(&raw["metadata"]["name"]);
        let mut labels = raw["metadata"]["labels"].clone();
        let mut number = raw["revision"].clone();
        if name == history.latest {
            if let RevisionAction::Promote { number: new, .. } = &history.action {
                number = json!(new);
            }
            if let Some(version) = &history.custom_version {
                labels[keys::SIDECAR_SET_CUSTOM_VERSION] = json!(version);
            }
        }
        if !history.delete.contains(&name) {
            let shown = json!({ "labels": labels, "name": name, "namespace": NAMESPACE, "revision": number });
            after.insert(name, shown);
        }
    }
    if let RevisionAction::Create { number } = &history.action {
        let owner = RevisionOwner {
            kind: KIND,
            namespace: NAMESPACE,
            name: observed.name,
            uid: observed.uid,
            annotations: observed.annotations,
        };
        let body = history.desired.request_body(&owner, *number);
        let object: Value = serde_json::from_str(&body).unwrap();
        assert!(body.contains(&format!("\"data\":{}", history.desired.data)));
        let meta = &object["metadata"];
        let shown = json!({
            "annotations": meta["annotations"],
            "data": history.desired.data,
            "labels": meta["labels"],
            "name": meta["name"],
            "namespace": meta["namespace"],
            "owners": meta["ownerReferences"],
            "revision": object["revision"],
        });
        after.insert(text(&meta["name"]), shown);
    }
    after.into_values().collect()
}

fn reconcile(vector: &Value) -> Value {
    let input = &vector["in"];
    let cluster = Cluster::new(input);
    let observed = cluster.observed(&input["sidecarSet"]);
    let matched = cluster.matched();
    let pods: Vec<&Pod> = matched.iter().map(|at| &cluster.pods[*at].1).collect();
    let plan = plan(&observed, &pods, &cluster.revisions(), Timestamp::UNIX_EPOCH);
    let mut events = vec![format!("Normal {EVENT_RESET_SUCCEEDED}"); plan.flips.len()];
    if plan.not_upgradable_event > 0 {
        events.push(format!("Normal {EVENT_NOT_UPGRADABLE}"));
    }
    json!({
        "events": events,
        // It is only for writes that the cache does not show yet, which ours always does.
        "requeue": "0s",
        "status": plan.status.as_ref().unwrap_or(&cluster.status),
        "pods": pods_after(&cluster, &matched, &plan),
        "revisions": revisions_after(&cluster, &observed, &plan),
    })
}

#[test]
fn reconciles_match_go() {
    let vectors = include_str!("../../../../../tests/data/go/sidecarset-reconcile.jsonl");
    assert_eq!(vectors.lines().count(), 160);
    let (mut differences, mut rollbacks) = (Vec::new(), 0);
    for (at, line) in vectors.lines().enumerate() {
        let vector: Value = serde_json::from_str(line).unwrap();
        let ours = reconcile(&vector);
        for (field, theirs) in vector["out"].as_object().unwrap() {
            let pairs = || list(&ours[field]).zip(list(theirs));
            let parts = SetParts::new(&vector["in"]["sidecarSet"]);
            let set = parts.view();
            if field == "pods"
                && pairs().any(|(ours, theirs)| ours != theirs)
                && pairs().all(|(ours, theirs)| ours == theirs || is_rollback(ours, theirs, &set))
            {
                rollbacks += 1;
            } else if ours[field] != *theirs {
                let (ours, theirs) = (&ours[field], go_json::to_sorted_json(theirs));
                differences.push(format!(
                    "line {}: {field}\n  ours   {ours}\n  theirs {theirs}",
                    at + 1
                ));
            }
        }
    }
    assert_eq!(rollbacks, 1);
    let first: Vec<&str> = differences.iter().take(4).map(String::as_str).collect();
    assert!(
        differences.is_empty(),
        "{} differences\n{}",
        differences.len(),
        first.join("\n")
    );
}

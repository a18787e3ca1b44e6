//! A manager that dies between the writes of one act.

use std::collections::BTreeMap;

use serde_json::json;

use crate::errors::{quota, says};
use crate::field::Field;
use crate::lost::{Bed, alone, matched, spec, until_replaced, unwanted};
use crate::pods;
use crate::proxy::Loss;
use crate::waits;

/// `web` of two Pods whose claims are reused where somebody else deletes the Pods; the next request of this sort gets no
/// answer.
async fn two(
    bed: &Bed,
    namespace: &str,
    what: &'static str,
    loss: Loss,
) -> (Field, BTreeMap<String, String>) {
    let field = Field::new(bed.world, namespace).await;
    let mut spec = spec(true);
    spec["replicas"] = json!(2);
    field.set("web", spec).await;
    field.settled("web").await;
    let claims = matched(&field).await;
    bed.proxy.lose(namespace, what, loss, 1, 1);
    (field, claims)
}

/// Waits until the request is made.
pub async fn until_asked(bed: &Bed, namespace: &str) {
    let asked = async || (!bed.proxy.lost(namespace).is_empty()).then_some(());
    let log = || waits::tails([bed.manager.log().to_owned()]);
    waits::until(&format!("the request in {namespace}"), &log, asked).await;
}

#[tokio::test]
async fn claims_go_with_the_pods_that_are_deleted_though_the_manager_dies() {
    let mut bed = alone().await;
    let mut cases = Vec::new();
    for (namespace, what, loss) in [
        ("dies-giving", "patch persistentvolumeclaims", Loss::Silence),
        ("dies-deleting", "delete pods", Loss::Late),
        ("dies-deleted", "delete pods", Loss::Silence),
    ] {
        let (field, before) = two(&bed, namespace, what, loss).await;
        let gone = before.keys().next().unwrap().clone();
        cases.push((field, before, gone));
    }
    for (field, _, gone) in &cases {
        unwanted(field, gone).await;
    }
    for (field, ..) in &cases {
        until_asked(&bed, &field.namespace).await;
    }
    bed.manager.kill().unwrap();
    bed.manager.start().unwrap();
    for (field, before, gone) in &cases {
        until_replaced(field, gone, before).await;
    }
}

#[tokio::test]
async fn a_pod_that_stays_after_all_gives_its_claim_back() {
    let mut bed = alone().await;
    let (field, before) = two(&bed, "dies-stays", "delete pods", Loss::Late).await;
    field.edit("web", json!({ "spec": { "replicas": 1 } })).await;
    until_asked(&bed, "dies-stays").await;
    bed.manager.kill().unwrap();
    field.edit("web", json!({ "spec": { "replicas": 2 } })).await;
    bed.manager.start().unwrap();
    field.settled("web").await;
    assert_eq!(matched(&field).await, before);
}

#[tokio::test]
async fn claims_that_wait_for_their_pods_are_used_by_the_next_manager_or_go() {
    let mut bed = alone().await;
    let mut fields = Vec::new();
    for (namespace, reuse) in [("waits-reused", true), ("waits", false)] {
        let field = Field::new(bed.world, namespace).await;
        quota(&field, "pods", 0).await;
        field.set("web", spec(reuse)).await;
        says(&field, "FailedScale", "exceeded quota: few").await;
        let before: Vec<String> = field.claims().await.iter().map(pods::name).collect();
        assert!(!before.is_empty());
        fields.push((field, reuse, before));
    }
    bed.manager.kill().unwrap();
    for (field, ..) in &fields {
        quota(field, "pods", 99).await;
    }
    bed.manager.start().unwrap();
    for (field, reuse, before) in &fields {
        field.settled("web").await;
        let after = matched(field).await;
        let used = before
            .iter()
            .filter(|claim| after.contains_key(&claim["data-".len()..]));
        assert_eq!(
            used.count(),
            if *reuse { before.len() } else { 0 },
            "{before:?} {after:?}"
        );
    }
}

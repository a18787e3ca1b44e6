//! A manager that crashes between the writes of one action.

use std::collections::BTreeMap;

use serde_json::json;

use crate::errors::{set_quota, wait_for_condition};
use crate::fixture::Fixture;
use crate::network_faults::{
    ProxiedCluster, cloneset_spec, exclusive_cluster, mark_for_replacement, wait_for_claims,
    wait_until_replaced,
};
use crate::pods;
use crate::proxy::NetworkFault;
use crate::waits;

/// Creates `web` with two Pods whose claims are reused when another client deletes the Pods; the next request of this
/// kind gets no response.
async fn inject_fault_with_two_pods(
    proxied: &ProxiedCluster,
    namespace: &str,
    what: &'static str,
    fault: NetworkFault,
) -> (Fixture, BTreeMap<String, String>) {
    let fixture = Fixture::new(proxied.cluster, namespace).await;
    let mut spec = cloneset_spec(true);
    spec["replicas"] = json!(2);
    fixture.create_cloneset("web", spec).await;
    fixture.wait_settled("web").await;
    let claims = wait_for_claims(&fixture).await;
    proxied.proxy.inject(namespace, what, fault, 1, 1);
    (fixture, claims)
}

/// Waits until the request was sent.
pub async fn wait_for_faulted_request(proxied: &ProxiedCluster, namespace: &str) {
    let requested = async || (!proxied.proxy.faulted_requests(namespace).is_empty()).then_some(());
    let log = || waits::log_tails([proxied.manager.log().to_owned()]);
    waits::poll_until(&format!("the request in {namespace}"), &log, requested).await;
}

#[tokio::test]
async fn manager_crash_deletes_claims_of_deleted_pods() {
    let mut proxied = exclusive_cluster().await;
    let mut cases = Vec::new();
    for (namespace, what, fault) in [
        (
            "dies-giving",
            "patch persistentvolumeclaims",
            NetworkFault::NoResponse,
        ),
        ("dies-deleting", "delete pods", NetworkFault::Delay),
        ("dies-deleted", "delete pods", NetworkFault::NoResponse),
    ] {
        let (fixture, before) = inject_fault_with_two_pods(&proxied, namespace, what, fault).await;
        let replaced = before.keys().next().unwrap().clone();
        cases.push((fixture, before, replaced));
    }
    for (fixture, _, replaced) in &cases {
        mark_for_replacement(fixture, replaced).await;
    }
    for (fixture, ..) in &cases {
        wait_for_faulted_request(&proxied, &fixture.namespace).await;
    }
    proxied.manager.kill().unwrap();
    proxied.manager.start().unwrap();
    for (fixture, before, replaced) in &cases {
        wait_until_replaced(fixture, replaced, before).await;
    }
}

#[tokio::test]
async fn manager_crash_returns_claim_of_kept_pod() {
    let mut proxied = exclusive_cluster().await;
    let (fixture, before) =
        inject_fault_with_two_pods(&proxied, "dies-stays", "delete pods", NetworkFault::Delay).await;
    fixture
        .patch_set("web", json!({ "spec": { "replicas": 1 } }))
        .await;
    wait_for_faulted_request(&proxied, "dies-stays").await;
    proxied.manager.kill().unwrap();
    fixture
        .patch_set("web", json!({ "spec": { "replicas": 2 } }))
        .await;
    proxied.manager.start().unwrap();
    fixture.wait_settled("web").await;
    assert_eq!(wait_for_claims(&fixture).await, before);
}

#[tokio::test]
async fn manager_crash_reuses_or_deletes_pending_claims() {
    let mut proxied = exclusive_cluster().await;
    let mut fixtures = Vec::new();
    for (namespace, reuse) in [("waits-reused", true), ("waits", false)] {
        let fixture = Fixture::new(proxied.cluster, namespace).await;
        set_quota(&fixture, "pods", 0).await;
        fixture.create_cloneset("web", cloneset_spec(reuse)).await;
        wait_for_condition(&fixture, "FailedScale", "exceeded quota: few").await;
        let before: Vec<String> = fixture.owned_claims().await.iter().map(pods::name).collect();
        assert!(!before.is_empty());
        fixtures.push((fixture, reuse, before));
    }
    proxied.manager.kill().unwrap();
    for (fixture, ..) in &fixtures {
        set_quota(fixture, "pods", 99).await;
    }
    proxied.manager.start().unwrap();
    for (fixture, reuse, before) in &fixtures {
        fixture.wait_settled("web").await;
        let after = wait_for_claims(fixture).await;
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

//! A CloneSet that changes while the manager is still acting on the previous spec.

use serde_json::{Value, json};

use crate::fixture::{Fixture, identities};
use crate::network_faults::proxied_cluster;
use crate::proxy::NetworkFault;
use crate::waits;

/// Pods that are written to in parallel at least: half of the manager's slots, as parallel tests need some.
const MIN_CONCURRENT_DELETES: usize = 32;
/// More Pods than are written to at once.
const PODS: usize = 200;
/// All slots, and the few that may be used again before the event is processed.
const MAX_DELETES_IN_FLIGHT: usize = 100;

#[tokio::test]
async fn spec_change_stops_deletions_in_progress() {
    let proxied = proxied_cluster().await;
    let fixture = Fixture::new(proxied.cluster, "changed").await;
    // No kubelet runs them, so they are deleted at once.
    fixture.stop_kubelet();
    let spec = json!({ "replicas": PODS, "scaleStrategy": { "maxUnavailable": "100%" } });
    fixture.create_cloneset("web", spec).await;
    let all = |pods: &[&Value]| pods.len() == PODS;
    let before = identities(&fixture.wait_pods("web", "all of them", all).await);

    let marker = "they-are-wanted-after-all";
    proxied.proxy.inject(
        "changed",
        "delete pods",
        NetworkFault::HoldUntil(marker),
        1,
        usize::MAX,
    );
    fixture
        .patch_set("web", json!({ "spec": { "replicas": 0 } }))
        .await;
    // They are deleted in parallel; none waits for a slot at the API server.
    let requested =
        async || (proxied.proxy.faulted_requests("changed").len() >= MIN_CONCURRENT_DELETES).then_some(());
    let log = || waits::log_tails([proxied.manager.log().to_owned()]);
    waits::poll_until("the first deletions", &log, requested).await;
    let scale_back_up =
        json!({ "metadata": { "annotations": { "why": marker } }, "spec": { "replicas": PODS } });
    fixture.patch_set("web", scale_back_up).await;

    fixture.wait_status("web", "the change taken up", |_| true).await;
    let after = identities(&fixture.wait_pods("web", "all of them again", all).await);
    let kept = before.iter().filter(|pod| after.contains(pod)).count();
    assert!(kept >= PODS - MAX_DELETES_IN_FLIGHT, "{kept} of {PODS} were left");
}

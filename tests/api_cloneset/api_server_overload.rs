//! An overloaded API server answers 429, and the manager backs off.

use serde_json::json;

use crate::errors::{condition_message, wait_for_condition};
use crate::fixture::Fixture;
use crate::network_faults::proxied_cluster;
use crate::proxy::NetworkFault;

#[tokio::test]
async fn too_many_requests_is_reported_and_retried() {
    let proxied = proxied_cluster().await;
    let fixture = Fixture::new(proxied.cluster, "busy").await;
    // Each of the three requests is sent four times before the failure is reported; then one at a time, twice more.
    proxied
        .proxy
        .inject("busy", "create pods", NetworkFault::TooManyRequests, 1, 20);
    fixture.create_cloneset("web", json!({ "replicas": 3 })).await;
    let set = wait_for_condition(
        &fixture,
        "FailedScale",
        "too many requests, and it asks to try again after 1 s",
    )
    .await;
    let failed = condition_message(&set, "FailedScale");
    assert!(failed.ends_with("try again after 1 s"), "{failed}");
    let set = fixture.wait_settled("web").await;
    assert_eq!(condition_message(&set, "FailedScale"), "");
    // Nothing was done, so Pods are listed only once: to adopt orphans at the start.
    assert_eq!(proxied.proxy.response_count("busy", "get pods"), 1);
}

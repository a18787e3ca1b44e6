//! The condition behind readiness gate `KruisePodReady`.

use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;
use serde_json::json;

use crate::test_cluster::{api, create_pod, shared_cluster, wait_until};

/// Status and message of a condition.
pub fn condition(pod: &Pod, type_: &str) -> Option<(String, String)> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let found = conditions.iter().find(|c| c.type_ == type_)?;
    Some((found.status.clone(), found.message.clone().unwrap_or_default()))
}

#[tokio::test]
async fn pod_with_readiness_gate_gets_its_condition() {
    let admin = shared_cluster().admin().await;
    create_pod(&admin, "ungated", "nowhere", json!({}), false).await;
    create_pod(&admin, "gated", "nowhere", json!({}), true).await;
    let pods: Api<Pod> = api(&admin);
    let gated = wait_until(&pods, "gated", "condition made", |p: &Pod| {
        condition(p, "KruisePodReady").is_some()
    })
    .await;
    assert_eq!(
        condition(&gated, "KruisePodReady"),
        Some(("True".into(), String::new()))
    );
    assert_eq!(
        condition(&pods.get("ungated").await.unwrap(), "KruisePodReady"),
        None
    );
}

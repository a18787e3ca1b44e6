//! The condition behind readiness gate `KruisePodReady`.

use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;
use serde_json::json;

use crate::world::{api, pod, until, world};

/// Status and message of a condition.
pub fn condition(pod: &Pod, type_: &str) -> Option<(String, String)> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let found = conditions.iter().find(|c| c.type_ == type_)?;
    Some((found.status.clone(), found.message.clone().unwrap_or_default()))
}

#[tokio::test]
async fn a_pod_with_the_gate_gets_its_condition_and_others_do_not() {
    let admin = world().admin().await;
    pod(&admin, "ungated", "nowhere", json!({}), false).await;
    pod(&admin, "gated", "nowhere", json!({}), true).await;
    let pods: Api<Pod> = api(&admin);
    let gated = until(&pods, "gated", "condition made", |p: &Pod| {
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

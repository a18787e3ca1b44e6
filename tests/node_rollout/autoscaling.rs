//! Scaling through the scale subresource: kubectl, and a HorizontalPodAutoscaler that reads metrics.

use serde_json::{Value, json};

use crate::metrics_api::MetricsApi;
use crate::pods::uids_by_name;
use crate::workloads::{shared_cluster, template};

#[tokio::test]
async fn kubectl_scale_up_and_down() {
    let ns = shared_cluster().await;
    let before = ns
        .create_settled_set("web", json!({ "replicas": 1, "progressDeadlineSeconds": 600 }))
        .await;
    ns.kubectl(&["scale", "clone/web", "--current-replicas=1", "--replicas=3"]);
    assert_eq!(ns.wait_settled("web").await.replicas, 3);
    // From `docs/user/cloneset.md`.
    let reason = r#"--for=jsonpath={.status.conditions[?(@.type=="Progressing")].reason}=CloneSetAvailable"#;
    let generation = ns.kubectl(&["get", "clone/web", "--output=jsonpath={.metadata.generation}"]);
    let observed = format!("--for=jsonpath={{.status.observedGeneration}}={generation}");
    for wait in [observed.as_str(), reason] {
        ns.kubectl(&["wait", "clone/web", wait, "--timeout=60s"]);
    }
    let path = format!(
        "/apis/apps.kruise.io/v1beta1/namespaces/{}/clonesets/web/scale",
        ns.namespace
    );
    let scale = ns.cluster.node.plane.kubectl(&["get", "--raw", &path]).unwrap();
    let scale: Value = serde_json::from_str(&scale).unwrap();
    assert_eq!(scale["status"], json!({ "replicas": 3, "selector": "app=web" }));
    let namespace = format!("--namespace={}", ns.namespace);
    let stale_scale = [
        "scale",
        "clone/web",
        "--current-replicas=2",
        "--replicas=5",
        namespace.as_str(),
    ];
    let error = ns
        .cluster
        .node
        .plane
        .kubectl(&stale_scale)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("current-replicas") || error.contains("Expected replicas"),
        "{error}"
    );
    ns.kubectl(&["scale", "clonesets.apps.kruise.io/web", "--replicas=1"]);
    ns.wait_settled("web").await;
    let pods = ns.wait_pods("web", "one", |pods| pods.len() == 1).await;
    // The Pods that became ready last are deleted first.
    assert_eq!(uids_by_name(&pods), before);
}

#[tokio::test]
async fn hpa_scales_clone_set_by_metric() {
    let ns = shared_cluster().await;
    let mut template = template("web");
    template["spec"]["containers"][0]["resources"] = json!({ "requests": { "cpu": "10m" } });
    ns.create_set("web", json!({ "replicas": 2, "template": template }))
        .await;
    ns.wait_settled("web").await;
    let metrics = MetricsApi::serve(&ns).await;
    let autoscaler = json!({
        "metadata": { "name": "web" },
        "spec": {
            "scaleTargetRef": { "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "web" },
            "minReplicas": 1, "maxReplicas": 4,
            "metrics": [{ "type": "Resource", "resource": { "name": "cpu",
                "target": { "type": "Utilization", "averageUtilization": 100 } } }],
            "behavior": { "scaleDown": { "stabilizationWindowSeconds": 0 } },
        },
    });
    let autoscalers = ns.api("autoscaling", "v2", "HorizontalPodAutoscaler");
    ns.create(&autoscalers, autoscaler).await;
    let is_stable = |hpa: &Value, replicas: i32| {
        let conditions = hpa["status"]["conditions"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let active = conditions
            .iter()
            .any(|c| c["type"] == "ScalingActive" && c["status"] == "True");
        active && hpa["status"]["currentReplicas"] == replicas && hpa["status"]["desiredReplicas"] == replicas
    };
    for (load, replicas) in [(20, 2), (40, 4), (20, 2), (10, 1)] {
        metrics.set_cpu_usage(load);
        ns.poll_until(&format!("{replicas} Pods for {load}m"), || async {
            let hpa = json!(autoscalers.get("web").await.unwrap());
            is_stable(&hpa, replicas).then_some(())
        })
        .await;
        assert_eq!(ns.wait_settled("web").await.replicas, replicas);
    }
    metrics.shut_down().await;
}

//! Scaling by others through the scale subresource: kubectl, and a HorizontalPodAutoscaler that reads metrics.

use serde_json::{Value, json};

use crate::metrics::Metrics;
use crate::pods::identities;
use crate::workloads::{shared, template};

#[tokio::test]
async fn kubectl_scales_up_and_down() {
    let space = shared().await;
    let before = space
        .settled_set("web", json!({ "replicas": 1, "progressDeadlineSeconds": 600 }))
        .await;
    space.kubectl(&["scale", "clone/web", "--current-replicas=1", "--replicas=3"]);
    assert_eq!(space.settled("web").await.replicas, 3);
    // As `docs/user/cloneset.md` has it.
    let reason = r#"--for=jsonpath={.status.conditions[?(@.type=="Progressing")].reason}=CloneSetAvailable"#;
    let generation = space.kubectl(&["get", "clone/web", "--output=jsonpath={.metadata.generation}"]);
    let told = format!("--for=jsonpath={{.status.observedGeneration}}={generation}");
    for wait in [told.as_str(), reason] {
        space.kubectl(&["wait", "clone/web", wait, "--timeout=60s"]);
    }
    let path = format!(
        "/apis/apps.kruise.io/v1beta1/namespaces/{}/clonesets/web/scale",
        space.namespace
    );
    let scale = space.bed.node.plane.kubectl(&["get", "--raw", &path]).unwrap();
    let scale: Value = serde_json::from_str(&scale).unwrap();
    assert_eq!(scale["status"], json!({ "replicas": 3, "selector": "app=web" }));
    let namespace = format!("--namespace={}", space.namespace);
    let wrong = [
        "scale",
        "clone/web",
        "--current-replicas=2",
        "--replicas=5",
        namespace.as_str(),
    ];
    let refused = space.bed.node.plane.kubectl(&wrong).unwrap_err().to_string();
    assert!(
        refused.contains("current-replicas") || refused.contains("Expected replicas"),
        "{refused}"
    );
    space.kubectl(&["scale", "clonesets.apps.kruise.io/web", "--replicas=1"]);
    space.settled("web").await;
    let pods = space.until_pods("web", "one", |pods| pods.len() == 1).await;
    // The Pods that were ready last go first.
    assert_eq!(identities(&pods), before);
}

#[tokio::test]
async fn an_autoscaler_follows_its_metric() {
    let space = shared().await;
    let mut template = template("web");
    template["spec"]["containers"][0]["resources"] = json!({ "requests": { "cpu": "10m" } });
    space
        .set("web", json!({ "replicas": 2, "template": template }))
        .await;
    space.settled("web").await;
    let metrics = Metrics::serve(&space).await;
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
    let autoscalers = space.api("autoscaling", "v2", "HorizontalPodAutoscaler");
    space.create(&autoscalers, autoscaler).await;
    let at_rest = |hpa: &Value, replicas: i32| {
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
        metrics.load(load);
        space
            .until(&format!("{replicas} Pods for {load}m"), || async {
                let hpa = json!(autoscalers.get("web").await.unwrap());
                at_rest(&hpa, replicas).then_some(())
            })
            .await;
        assert_eq!(space.settled("web").await.replicas, replicas);
    }
    metrics.end().await;
}

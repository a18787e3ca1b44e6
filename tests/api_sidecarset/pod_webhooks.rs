//! What webhooks change in Pods, whether a set selects them or not.

use serde_json::{Value, json};

use crate::fixture::SidecarCluster;

#[tokio::test]
async fn launch_priorities_hold_with_and_without_sets() {
    let cluster = SidecarCluster::start("");
    let priority = |value: &str| json!([{ "name": "KRUISE_CONTAINER_PRIORITY", "value": value }]);
    cluster.create_set(
        "shop",
        json!({ "containers": [{ "name": "log", "image": "log:1", "env": priority("5") }] }),
    );
    if cluster.serves_policies() {
        cluster.wait_injected_by("shop", "True", "PolicyInstalled");
    }
    let barriers = |pod: &Value| {
        let containers = pod["spec"]["containers"].as_array().unwrap().iter();
        let keys = containers.map(|container| {
            let env = container["env"].as_array().into_iter().flatten();
            let mut barrier = env.filter(|variable| variable["name"] == "KRUISE_CONTAINER_BARRIER");
            let key = barrier
                .next()
                .map(|variable| variable["valueFrom"]["configMapKeyRef"]["key"].clone());
            (container["name"].clone(), key.unwrap_or_default())
        });
        keys.collect::<Vec<_>>()
    };
    let pair = |name: &str, key: &str| (json!(name), json!(key));
    let two = json!({ "spec": { "containers": [
        { "name": "first", "image": "i", "env": priority("2") }, { "name": "second", "image": "i" }] } });
    // Copied from a Pod that runs: its barriers have other keys than the Pod gets.
    let copied = |map: &str, annotations: Value| {
        let key = json!({ "configMapKeyRef": { "name": map, "key": "p_9" } });
        let barrier = json!({ "name": "KRUISE_CONTAINER_BARRIER", "valueFrom": key });
        let mut first = priority("2");
        first.as_array_mut().unwrap().push(barrier.clone());
        json!({ "metadata": { "annotations": annotations }, "spec": { "containers": [
            { "name": "first", "image": "i", "env": first }, { "name": "second", "image": "i", "env": [barrier] }] } })
    };
    let completed = json!({ "apps.kruise.io/container-launch-priority-completed": "true" });
    let renamed = copied("old-barrier", json!({}));
    let restored = copied("web-barrier", completed);
    let with_barriers = copied("web-barrier", json!({}));
    for (app, patch, expected) in [
        ("bare", &two, vec![pair("first", "p_2"), pair("second", "p_0")]),
        (
            "shop",
            &two,
            vec![pair("log", "p_5"), pair("first", "p_2"), pair("second", "p_0")],
        ),
        ("shop", &json!({}), vec![pair("log", "p_5"), pair("app", "p_0")]),
        ("bare", &json!({}), vec![(json!("app"), Value::Null)]),
        (
            "bare",
            &renamed,
            vec![pair("first", "p_2"), pair("second", "p_0")],
        ),
        (
            "bare",
            &restored,
            vec![pair("first", "p_2"), pair("second", "p_0")],
        ),
        (
            "bare",
            &with_barriers,
            vec![pair("first", "p_9"), pair("second", "p_9")],
        ),
    ] {
        cluster.wait_until(&format!("barriers of a Pod {app}"), || {
            let pod = cluster.dry_run_with(app, patch);
            let found = barriers(&pod);
            if found == expected {
                Ok(())
            } else {
                Err(format!("{found:?}"))
            }
        });
    }
}

#[tokio::test]
async fn readiness_gate_of_all_pods_follows_the_feature_gate() {
    let mut cluster = SidecarCluster::start("KruisePodReadinessGate=true");
    let gates = |pod: &Value| pod["spec"]["readinessGates"].clone();
    let one = json!([{ "conditionType": "KruisePodReady" }]);
    cluster.wait_dry_run("bare", "the readiness gate", |pod| gates(pod) == one);
    let own = json!({ "spec": { "readinessGates": one } });
    assert_eq!(
        gates(&cluster.dry_run_with("bare", &own)),
        one,
        "it is added once"
    );

    cluster.restart_manager("default-gates", "");
    cluster.wait_dry_run("bare", "no readiness gate", |pod| gates(pod).is_null());
}

#[tokio::test]
async fn liveness_probes_are_moved_with_the_feature_gate_only() {
    let mut cluster = SidecarCluster::start("EnhancedLivenessProbe=true");
    let probe = json!({ "tcpSocket": { "port": 8080 }, "periodSeconds": 5 });
    let owner = |api_version: &str| json!([{ "apiVersion": api_version, "kind": "CloneSet", "name": "web", "uid": "u", "controller": true }]);
    let pod = |annotated: bool, api_version: &str| {
        let annotations = json!({ "apps.kruise.io/using-enhanced-liveness": annotated.to_string() });
        json!({ "metadata": { "annotations": annotations, "ownerReferences": owner(api_version) },
            "spec": { "containers": [
                { "name": "app", "image": "i", "livenessProbe": probe, "readinessProbe": probe },
                { "name": "log", "image": "i" }] } })
    };
    // What is left of the probe, and what the annotation has.
    let moved = |pod: &Value| {
        let context = pod["metadata"]["annotations"]["apps.kruise.io/container-probe-context"].as_str();
        let context = context.map(|context| serde_json::from_str::<Value>(context).unwrap());
        let app = &pod["spec"]["containers"][0];
        assert!(app["readinessProbe"].is_object());
        (app["livenessProbe"].is_object(), context)
    };
    let defaulted = json!([{ "name": "app", "livenessProbe": { "tcpSocket": { "port": 8080 },
        "periodSeconds": 5, "timeoutSeconds": 1, "successThreshold": 1, "failureThreshold": 3 } }]);
    let version = "apps.kruise.io/v1beta1";
    cluster.wait_until("the probe is moved", || {
        let found = moved(&cluster.dry_run_with("bare", &pod(true, version)));
        if found == (false, Some(defaulted.clone())) {
            Ok(())
        } else {
            Err(format!("{found:?}"))
        }
    });
    for (annotated, version) in [(false, version), (true, "apps/v1")] {
        let found = moved(&cluster.dry_run_with("bare", &pod(annotated, version)));
        assert_eq!(found, (true, None), "{annotated} {version}");
    }

    cluster.restart_manager("default-gates", "");
    cluster.wait_until("the probe stays", || {
        let found = moved(&cluster.dry_run_with("bare", &pod(true, version)));
        if found == (true, None) {
            Ok(())
        } else {
            Err(format!("{found:?}"))
        }
    });
}

/// The provider of a virtual node is played by the test.
#[tokio::test]
async fn virtual_nodes_get_the_probes_and_their_conditions_mark_the_pods() {
    let mut cluster = SidecarCluster::start("EnablePodProbeMarkerOnServerless=true");
    let marker = json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "PodProbeMarker",
        "metadata": { "name": "game", "namespace": "default" },
        "spec": { "selector": { "matchLabels": { "app": "game" } }, "probes": [
            { "name": "idle", "containerName": "app", "podConditionType": "game.io/idle",
              "probe": { "tcpSocket": { "port": 80 } }, "markerPolicy": [
                { "state": "Succeeded", "labels": { "idle": "yes" } },
                { "state": "Failed", "annotations": { "busy": "yes" } } ] },
            { "name": "label", "containerName": "app", "probe": { "tcpSocket": { "port": 81 } },
              "markerPolicy": [{ "state": "Failed", "labels": { "never": "set" } }] } ] } });
    cluster.wait_until("the PodProbeMarker is admitted", || {
        cluster
            .plane
            .apply(&marker.to_string())
            .map_err(|why| format!("{why:#}"))
    });
    let probes = r#"[{"name":"idle","containerName":"app","probe":{"tcpSocket":{"port":80}},"podConditionType":"game.io/idle"}]"#;
    cluster.wait_dry_run("game", "probes for a virtual node", |pod| {
        let annotations = &pod["metadata"]["annotations"];
        annotations["kruise.io/podprobe"] == probes && annotations["kruise.io/podprobemarker-list"] == "game"
    });
    // Pods of other namespaces are never sent.
    let configuration = cluster
        .get(
            "mutatingwebhookconfiguration",
            "kruise-mutating-webhook-configuration",
        )
        .unwrap();
    let mut webhooks = configuration["webhooks"].as_array().unwrap().iter();
    let webhook = webhooks
        .find(|webhook| webhook["name"] == "podprobe.marker.mpod.kb.io")
        .unwrap();
    let mut conditions = webhook["matchConditions"].as_array().unwrap().iter();
    assert!(
        conditions.any(|condition| condition["expression"] == "request.namespace in ['default']"),
        "{webhook}"
    );
    assert_eq!(webhook["failurePolicy"], "Ignore");

    let node = json!({ "apiVersion": "v1", "kind": "Node",
        "metadata": { "name": "virtual", "labels": { "type": "virtual-kubelet" } } });
    cluster.plane.apply(&node.to_string()).unwrap();
    let pod = json!({ "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": "game-0", "namespace": "default", "labels": { "app": "game" } },
        "spec": { "nodeName": "virtual", "automountServiceAccountToken": false,
            "containers": [{ "name": "app", "image": "i" }] } });
    cluster.plane.apply(&pod.to_string()).unwrap();
    for (status, label, annotation) in [
        ("True", json!("yes"), Value::Null),
        ("False", Value::Null, json!("yes")),
        ("Unknown", Value::Null, Value::Null),
    ] {
        let conditions = json!([{ "type": "Initialized", "status": "True" },
            { "type": "game.io/idle", "status": status, "message": "by the provider" }]);
        let patch = json!({ "status": { "phase": "Running", "conditions": conditions } }).to_string();
        let args = [
            "patch",
            "pod",
            "game-0",
            "--subresource=status",
            "--type=strategic",
            "-p",
            &patch,
        ];
        cluster.plane.kubectl(&args).unwrap();
        cluster.wait_until(&format!("marks of condition {status}"), || {
            let pod = cluster.get("pod", "game-0").unwrap();
            let found = (
                &pod["metadata"]["labels"]["idle"],
                &pod["metadata"]["annotations"]["busy"],
            );
            if found == (&label, &annotation) {
                let mut all = pod["status"]["conditions"].as_array().unwrap().iter();
                let condition = all.find(|one| one["type"] == "game.io/idle").unwrap();
                assert_eq!(condition["status"], status, "the provider sets it: {pod}");
                Ok(())
            } else {
                Err(format!("{found:?}"))
            }
        });
    }
    cluster.wait_until("matchedPods", || {
        let marker = cluster.get("podprobemarker", "game").unwrap_or_default();
        if marker["status"]["matchedPods"] == 1 {
            Ok(())
        } else {
            Err(marker["status"].to_string())
        }
    });

    cluster.restart_manager("default-gates", "");
    cluster.wait_dry_run("game", "no probes", |pod| {
        pod["metadata"]["annotations"]["kruise.io/podprobe"].is_null()
    });
}

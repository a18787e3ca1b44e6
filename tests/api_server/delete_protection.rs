//! Label `policy.kruise.io/delete-protection`, on every protected kind.

use std::time::Duration;

use kube::api::{Api, DeleteParams, DynamicObject};
use serde_json::{Value, json};
use testbed::cluster::{ControlPlane, ControlPlaneOptions, wait};

use crate::daemon_fence::wait_until_denied;
use crate::webhook_cluster::{
    WAIT_TIMEOUT, assert_denied, connect, create, dynamic_api, install, merge, shared_cluster,
};

const DENIAL_PREFIX: &str =
    "forbidden by ResourcesProtectionDeletion for policy.kruise.io/delete-protection=";

fn protection_label(value: Value) -> Value {
    json!({ "metadata": { "labels": { "policy.kruise.io/delete-protection": value } } })
}

async fn dry_run_delete(api: &Api<DynamicObject>, name: &str) -> Result<Value, String> {
    let result = api.delete(name, &DeleteParams::default().dry_run()).await;
    result.map(|_| Value::Null).map_err(|why| why.to_string())
}

fn workload_spec(name: &str) -> Value {
    json!({ "selector": { "matchLabels": { "app": name } }, "replicas": 2, "serviceName": "x",
        "template": { "metadata": { "labels": { "app": name } },
            "spec": { "containers": [{ "name": "app", "image": "i" }] } } })
}

#[tokio::test]
async fn delete_protection_covers_every_kind() {
    let admin = shared_cluster().admin().await;
    let mut claims = workload_spec("kept");
    claims.as_object_mut().unwrap().remove("serviceName");
    let port = json!({ "ports": [{ "port": 80 }] });
    let backend = json!({ "defaultBackend": { "service": { "name": "kept", "port": { "number": 80 } } } });
    let widgets = json!({ "group": "example.com", "scope": "Namespaced",
        "names": { "plural": "widgets", "singular": "widget", "kind": "Widget" },
        "versions": [{ "name": "v1", "served": true, "storage": true,
            "schema": { "openAPIV3Schema": { "type": "object" } } }] });
    let default_namespace = Some("default");
    for (version, kind, namespace, name, spec, cascading) in [
        ("v1", "Namespace", None, "kept", json!({}), None),
        ("v1", "Service", default_namespace, "kept", port, None),
        (
            "networking.k8s.io/v1",
            "Ingress",
            default_namespace,
            "kept",
            backend,
            None,
        ),
        (
            "apiextensions.k8s.io/v1",
            "CustomResourceDefinition",
            None,
            "widgets.example.com",
            widgets,
            Some("Cascading; remove the label"),
        ),
        (
            "apps/v1",
            "Deployment",
            default_namespace,
            "kept",
            claims.clone(),
            Some("Cascading and replicas 2>0"),
        ),
        (
            "apps/v1",
            "ReplicaSet",
            default_namespace,
            "kept",
            claims.clone(),
            Some("Cascading and replicas 2>0"),
        ),
        (
            "apps/v1",
            "StatefulSet",
            default_namespace,
            "kept",
            workload_spec("kept"),
            Some("Cascading and replicas 2>0"),
        ),
        (
            "apps.kruise.io/v1beta1",
            "CloneSet",
            default_namespace,
            "kept",
            claims,
            Some("Cascading and replicas 2>0"),
        ),
    ] {
        let api = dynamic_api(&admin, version, kind, namespace);
        let object =
            json!({ "apiVersion": version, "kind": kind, "metadata": { "name": name }, "spec": spec });
        create(&api, object).await.unwrap();
        dry_run_delete(&api, name).await.unwrap();
        merge(&api, name, protection_label(json!("Always")))
            .await
            .unwrap();
        let denial = format!("{DENIAL_PREFIX}Always; remove the label from {kind} {name} to delete it");
        wait_until_denied(|| dry_run_delete(&api, name), &denial).await;
        merge(&api, name, protection_label(json!("Cascading")))
            .await
            .unwrap();
        match cascading {
            Some(denial) => assert_denied(
                dry_run_delete(&api, name).await,
                &format!("{DENIAL_PREFIX}{denial}"),
            ),
            // Its webhook is covered by another test.
            None if kind == "Namespace" => {}
            None => drop(dry_run_delete(&api, name).await.unwrap()),
        }
        if cascading.is_some_and(|denial| denial.contains("replicas")) {
            merge(&api, name, json!({ "spec": { "replicas": 0 } }))
                .await
                .unwrap();
            dry_run_delete(&api, name).await.unwrap();
        }
        merge(&api, name, protection_label(Value::Null)).await.unwrap();
        dry_run_delete(&api, name).await.unwrap();
    }
}

/// The Namespace's status names what blocks its deletion, and it is deleted once the label is removed.
#[tokio::test]
async fn namespace_deletion_is_blocked_by_protected_cloneset() {
    let controllers = ControlPlaneOptions {
        controllers: true,
        enabled_controllers: "namespace-controller",
        ..ControlPlaneOptions::default()
    };
    let plane = ControlPlane::start_with(controllers).unwrap();
    install(&plane, "crds");
    install(&plane, "policies");
    plane.kubectl(&["create", "namespace", "prot"]).unwrap();
    let sets = dynamic_api(
        &connect(plane.kubeconfig()).await,
        "apps.kruise.io/v1beta1",
        "CloneSet",
        Some("prot"),
    );
    let mut set = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet",
        "metadata": { "name": "kept" }, "spec": workload_spec("kept") });
    set["spec"].as_object_mut().unwrap().remove("serviceName");
    create(&sets, set).await.unwrap();
    merge(&sets, "kept", protection_label(json!("Always")))
        .await
        .unwrap();
    wait_until_denied(|| dry_run_delete(&sets, "kept"), DENIAL_PREFIX).await;
    plane
        .kubectl(&["delete", "namespace", "prot", "--wait=false"])
        .unwrap();
    wait::until("the namespace says what holds it up", WAIT_TIMEOUT, || {
        let path = "--output=jsonpath={.status.conditions[*].message}";
        let conditions = plane.kubectl(&["get", "namespace", "prot", path])?;
        Ok(conditions.contains(DENIAL_PREFIX).then_some(()))
    })
    .unwrap();
    merge(&sets, "kept", protection_label(Value::Null)).await.unwrap();
    wait::until(
        "the namespace goes",
        WAIT_TIMEOUT + Duration::from_secs(60),
        || {
            let output =
                plane.kubectl(&["get", "namespace", "prot", "--ignore-not-found", "--output=name"])?;
            Ok(output.is_empty().then_some(()))
        },
    )
    .unwrap();
}

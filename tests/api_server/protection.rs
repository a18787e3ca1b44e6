//! Label `policy.kruise.io/delete-protection`, on every kind that it protects.

use std::time::Duration;

use kube::api::{Api, DeleteParams, DynamicObject};
use serde_json::{Value, json};
use testbed::cluster::{ControlPlane, Options, wait};

use crate::fence::heeded;
use crate::world::{PATIENCE, connect, create, install, merge, refused, typed, world};

const WORDS: &str = "forbidden by ResourcesProtectionDeletion for policy.kruise.io/delete-protection=";

fn label(value: Value) -> Value {
    json!({ "metadata": { "labels": { "policy.kruise.io/delete-protection": value } } })
}

async fn would_delete(api: &Api<DynamicObject>, name: &str) -> Result<Value, String> {
    let done = api.delete(name, &DeleteParams::default().dry_run()).await;
    done.map(|_| Value::Null).map_err(|why| why.to_string())
}

fn workload(name: &str) -> Value {
    json!({ "selector": { "matchLabels": { "app": name } }, "replicas": 2, "serviceName": "x",
        "template": { "metadata": { "labels": { "app": name } },
            "spec": { "containers": [{ "name": "app", "image": "i" }] } } })
}

#[tokio::test]
async fn delete_protection_covers_every_kind() {
    let admin = world().admin().await;
    let mut claims = workload("kept");
    claims.as_object_mut().unwrap().remove("serviceName");
    let port = json!({ "ports": [{ "port": 80 }] });
    let backend = json!({ "defaultBackend": { "service": { "name": "kept", "port": { "number": 80 } } } });
    let widgets = json!({ "group": "example.com", "scope": "Namespaced",
        "names": { "plural": "widgets", "singular": "widget", "kind": "Widget" },
        "versions": [{ "name": "v1", "served": true, "storage": true,
            "schema": { "openAPIV3Schema": { "type": "object" } } }] });
    let here = Some("default");
    for (version, kind, namespace, name, spec, cascading) in [
        ("v1", "Namespace", None, "kept", json!({}), None),
        ("v1", "Service", here, "kept", port, None),
        ("networking.k8s.io/v1", "Ingress", here, "kept", backend, None),
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
            here,
            "kept",
            claims.clone(),
            Some("Cascading and replicas 2>0"),
        ),
        (
            "apps/v1",
            "ReplicaSet",
            here,
            "kept",
            claims.clone(),
            Some("Cascading and replicas 2>0"),
        ),
        (
            "apps/v1",
            "StatefulSet",
            here,
            "kept",
            workload("kept"),
            Some("Cascading and replicas 2>0"),
        ),
        (
            "apps.kruise.io/v1beta1",
            "CloneSet",
            here,
            "kept",
            claims,
            Some("Cascading and replicas 2>0"),
        ),
    ] {
        let api = typed(&admin, version, kind, namespace);
        let object =
            json!({ "apiVersion": version, "kind": kind, "metadata": { "name": name }, "spec": spec });
        create(&api, object).await.unwrap();
        would_delete(&api, name).await.unwrap();
        merge(&api, name, label(json!("Always"))).await.unwrap();
        let words = format!("{WORDS}Always; remove the label from {kind} {name} to delete it");
        heeded(|| would_delete(&api, name), &words).await;
        merge(&api, name, label(json!("Cascading"))).await.unwrap();
        match cascading {
            Some(words) => refused(would_delete(&api, name).await, &format!("{WORDS}{words}")),
            // Its webhook is another test's.
            None if kind == "Namespace" => {}
            None => drop(would_delete(&api, name).await.unwrap()),
        }
        if cascading.is_some_and(|words| words.contains("replicas")) {
            merge(&api, name, json!({ "spec": { "replicas": 0 } }))
                .await
                .unwrap();
            would_delete(&api, name).await.unwrap();
        }
        merge(&api, name, label(Value::Null)).await.unwrap();
        would_delete(&api, name).await.unwrap();
    }
}

/// The namespace says what holds it up, and goes once the label is off.
#[tokio::test]
async fn a_namespace_with_a_protected_cloneset_says_so_and_goes_without_the_label() {
    let controllers = Options {
        controllers: true,
        only: "namespace-controller",
        ..Options::default()
    };
    let plane = ControlPlane::start_with(controllers).unwrap();
    install(&plane, "crds");
    install(&plane, "policies");
    plane.kubectl(&["create", "namespace", "prot"]).unwrap();
    let sets = typed(
        &connect(plane.kubeconfig()).await,
        "apps.kruise.io/v1beta1",
        "CloneSet",
        Some("prot"),
    );
    let mut set = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet",
        "metadata": { "name": "kept" }, "spec": workload("kept") });
    set["spec"].as_object_mut().unwrap().remove("serviceName");
    create(&sets, set).await.unwrap();
    merge(&sets, "kept", label(json!("Always"))).await.unwrap();
    heeded(|| would_delete(&sets, "kept"), WORDS).await;
    plane
        .kubectl(&["delete", "namespace", "prot", "--wait=false"])
        .unwrap();
    wait::until("the namespace says what holds it up", PATIENCE, || {
        let path = "--output=jsonpath={.status.conditions[*].message}";
        let said = plane.kubectl(&["get", "namespace", "prot", path])?;
        Ok(said.contains(WORDS).then_some(()))
    })
    .unwrap();
    merge(&sets, "kept", label(Value::Null)).await.unwrap();
    wait::until("the namespace goes", PATIENCE + Duration::from_secs(60), || {
        let there = plane.kubectl(&["get", "namespace", "prot", "--ignore-not-found", "--output=name"])?;
        Ok(there.is_empty().then_some(()))
    })
    .unwrap();
}

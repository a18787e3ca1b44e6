//! Templates of CloneSets through the webhook and through the manager's own dry run.

use std::collections::BTreeMap;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use k8s_openapi::api::apps::v1::ControllerRevision;
use kruise_cluster::Cluster;
use kruise_cluster::pod_template::{self, Defaulting, DryRunResult, Templates};
use kruise_cluster::write;
use kruise_workload::in_place::normalize::TemplateStorage;
use kruise_workload::revision::{self, Revision, RevisionOwner};
use kube::Api;
use serde_json::{Value, json};
use testbed::cluster::TokenBinding;

use crate::cloneset::{cloneset, cloneset_api};
use crate::etcd::etcd_request;
use crate::webhook_cluster::{WAIT_TIMEOUT, assert_denied, create, dynamic_api, get, merge, shared_cluster};

const ALPHA: &str = "apps.kruise.io/v1alpha1";
const BETA: &str = "apps.kruise.io/v1beta1";

async fn manager_client() -> Cluster {
    shared_cluster()
        .account("kruise-manager", TokenBinding::Unbound)
        .await
}

async fn dry_run_defaults(spec: &Value) -> Templates {
    let answer = pod_template::dry_run(
        &manager_client().await,
        "default",
        Templates::from_workload_spec(spec),
        Defaulting::default(),
    )
    .await;
    match answer.unwrap() {
        DryRunResult::Valid { templates, .. } => templates,
        DryRunResult::Invalid(why) => panic!("{why}"),
    }
}

fn claim() -> Value {
    json!({
        "metadata": { "name": "data" },
        "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1024Mi" } } },
    })
}

/// The webhook's defaults equal those that the manager gets without the webhook, so both lead to one revision.
#[tokio::test]
async fn manager_dry_run_and_webhook_set_the_same_defaults() {
    let classes = dynamic_api(
        &shared_cluster().admin().await,
        "storage.k8s.io/v1",
        "StorageClass",
        None,
    );
    let class = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "provisioner": "example.com/none",
        "metadata": { "name": "usual", "annotations": { "storageclass.kubernetes.io/is-default-class": "true" } },
    });
    create(&classes, class).await.unwrap();
    let change = json!({
        "template": { "spec": { "containers": [{
            "name": "c", "image": "i:1", "resources": { "limits": { "cpu": "0.5" } },
            "ports": [{ "containerPort": 80 }], "volumeMounts": [{ "name": "data", "mountPath": "/data" }],
        }] } },
        "volumeClaimTemplates": [claim()],
    });
    let raw = cloneset(BETA, "templates", change);
    let stored = create(&cloneset_api(BETA).await, raw.clone()).await.unwrap();
    let pod = &stored["spec"]["template"]["spec"];
    assert_eq!(pod["restartPolicy"], "Always");
    assert_eq!(pod["containers"][0]["ports"][0]["protocol"], "TCP");
    assert_eq!(pod["containers"][0]["imagePullPolicy"], "Always");
    assert_eq!(pod["containers"][0]["resources"]["limits"]["cpu"], "500m");
    assert_eq!(pod.get("volumes"), None);
    let claim = &stored["spec"]["volumeClaimTemplates"][0]["spec"];
    assert_eq!(claim["resources"]["requests"]["storage"], "1Gi");
    assert_eq!(claim.get("volumeMode"), None, "OpenKruise fills it in nowhere");
    assert_eq!(
        claim.get("storageClassName"),
        None,
        "the cluster's default got in"
    );

    let defaulted = dry_run_defaults(&raw["spec"]).await;
    assert_eq!(defaulted, Templates::from_workload_spec(&stored["spec"]));
    assert_eq!(
        dry_run_defaults(&stored["spec"]).await,
        defaulted,
        "defaults have no defaults"
    );
    let owner = RevisionOwner {
        kind: "CloneSet",
        namespace: "default",
        name: "templates",
        uid: "u",
        annotations: &BTreeMap::new(),
    };
    let desired_revision = |templates: &Templates| {
        revision::desired_revision(&owner, &templates.template, &templates.claims, None)
    };
    assert_eq!(
        desired_revision(&defaulted),
        desired_revision(&Templates::from_workload_spec(&stored["spec"]))
    );
}

/// The oldest supported release drops image volumes and their mounts; the indexes of later items do not shift. All
/// releases empty the sources of trust bundles unless these are enabled.
#[tokio::test]
async fn volumes_of_disabled_features_are_stored_unchanged() {
    let volumes = json!([
        { "name": "model", "image": { "reference": "example.com/model:1" } },
        { "name": "config", "configMap": { "name": "config" } },
        { "name": "bundle", "projected": { "sources": [{ "clusterTrustBundle": { "name": "b", "path": "p" } }] } },
    ]);
    let mounts = json!([
        { "name": "model", "mountPath": "/model" },
        { "name": "config", "mountPath": "/config" },
        { "name": "data", "mountPath": "/data" },
    ]);
    let change = json!({
        "template": { "spec": { "volumes": volumes, "containers": [{ "name": "c", "image": "i:1", "volumeMounts": mounts }] } },
        "volumeClaimTemplates": [claim()],
    });
    let manifest = cloneset(BETA, "image-volume", change);
    let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
    std::fs::write(file.path(), manifest.to_string()).unwrap();
    let apply = ["apply", "-f", file.path().to_str().unwrap()];
    shared_cluster().plane.kubectl(&apply).unwrap();
    let stored = get(&cloneset_api(BETA).await, "image-volume").await;
    let pod = &stored["spec"]["template"]["spec"];
    let mut expected_volumes = volumes;
    expected_volumes[1]["configMap"]["defaultMode"] = json!(420);
    expected_volumes[2]["projected"]["defaultMode"] = json!(420);
    assert_eq!(pod["volumes"], expected_volumes);
    assert_eq!(pod["containers"][0]["volumeMounts"], mounts);
    assert_eq!(pod["containers"][0]["terminationMessagePolicy"], "File");
    let claim = &stored["spec"]["volumeClaimTemplates"][0]["spec"];
    assert_eq!(claim["resources"]["requests"]["storage"], "1Gi");
    assert_eq!(
        dry_run_defaults(&stored["spec"]).await,
        Templates::from_workload_spec(&stored["spec"])
    );
    shared_cluster().plane.kubectl(&apply).unwrap();
    let again = get(&cloneset_api(BETA).await, "image-volume").await;
    assert_eq!(again["metadata"]["generation"], stored["metadata"]["generation"]);
}

/// A revision that the manager creates is found again when it is read.
#[tokio::test]
async fn stored_revision_equals_created_revision() {
    let admin = shared_cluster().admin().await;
    let owner = RevisionOwner {
        kind: "CloneSet",
        namespace: "default",
        name: "revised",
        uid: "u",
        annotations: &BTreeMap::new(),
    };
    let mut spec = cloneset(BETA, "revised", json!({}))["spec"].clone();
    spec["template"]["metadata"]["annotations"] = json!({ "note": "a<b>&c" });
    let defaulted = dry_run_defaults(&spec).await;
    let desired = revision::desired_revision(&owner, &defaulted.template, &defaulted.claims, None);
    let revisions: Api<ControllerRevision> = Api::namespaced(admin.client.clone(), "default");
    let response = write::create_raw(&revisions, desired.request_body(&owner, 1)).await;
    let created = Revision::from(&serde_json::from_value(response.unwrap()).unwrap());
    assert!(desired.matches(&created));
    // The Go implementation compares the stored bytes.
    let key = format!("/registry/controllerrevisions/default/{}", desired.name);
    let found = etcd_request(
        shared_cluster().plane.etcd_address(),
        "range",
        &json!({ "key": BASE64_STANDARD.encode(key) }),
    );
    let stored = BASE64_STANDARD
        .decode(found["kvs"][0]["value"].as_str().unwrap())
        .unwrap();
    assert!(
        stored
            .windows(desired.data.len())
            .any(|part| part == desired.data.as_bytes())
    );
    let known_revisions = [created];
    assert_eq!(
        revision::plan(&desired, &known_revisions),
        revision::RevisionAction::UseNewest {
            name: desired.name.clone()
        }
    );
    let found = revision::equivalent_template(
        &defaulted.template,
        &known_revisions,
        TemplateStorage::WithDefaults,
    );
    assert_eq!(found, known_revisions[0].template());
}

#[tokio::test]
async fn invalid_templates_are_rejected_with_the_field_path() {
    let sets = cloneset_api(BETA).await;
    let container = |container: Value| json!({ "template": { "spec": { "containers": [container] } } });
    for (change, message) in [
        (
            container(json!({ "name": "c" })),
            "spec.template.spec.containers[0].image: Required value",
        ),
        (
            container(
                json!({ "name": "c", "image": "i", "volumeMounts": [{ "name": "data", "mountPath": "/d" }] }),
            ),
            "spec.template.spec.containers[0].volumeMounts[0].name: Not found: \"data\"",
        ),
        (container(json!({ "name": 7, "image": "i" })), "spec.template: "),
        (
            json!({ "volumeClaimTemplates": [{ "metadata": { "name": "data" }, "spec": { "accessModes": ["ReadWriteOnce"] } }] }),
            "spec.volumeClaimTemplates[0].spec.resources[storage]: Required value",
        ),
        (
            json!({ "volumeClaimTemplates": [claim(), claim()] }),
            "spec.volumeClaimTemplates[1].metadata.name: Duplicate value: \"data\"",
        ),
        (
            json!({ "template": { "metadata": { "labels": { "app": "b" } } } }),
            "give the template the labels that the selector wants",
        ),
        (
            json!({ "lifecycle": { "preDelete": { "finalizersHandler": ["plain"] } } }),
            "Pods take only finalizers of the form DOMAIN/NAME",
        ),
    ] {
        assert_denied(create(&sets, cloneset(BETA, "bad", change)).await, message);
    }
}

#[tokio::test]
async fn reapplying_a_manifest_changes_nothing() {
    let manifest = cloneset(ALPHA, "again", json!({ "volumeClaimTemplates": [claim()] }));
    let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
    std::fs::write(file.path(), manifest.to_string()).unwrap();
    let file = file.path().to_str().unwrap();
    let plane = &shared_cluster().plane;
    for apply_args in [
        &["apply", "-f", file][..],
        &["apply", "--server-side", "--force-conflicts", "-f", file],
    ] {
        plane.kubectl(apply_args).unwrap();
        let first = get(&cloneset_api(BETA).await, "again").await;
        plane.kubectl(apply_args).unwrap();
        let second = get(&cloneset_api(BETA).await, "again").await;
        assert_eq!(first["spec"], second["spec"]);
        assert_eq!(
            first["metadata"]["generation"], second["metadata"]["generation"],
            "{apply_args:?}"
        );
    }
}

/// The same in both versions. OpenKruise's v1beta1 checks nothing.
#[tokio::test]
async fn in_place_only_rejects_other_template_changes() {
    let policies = [
        (
            BETA,
            json!({ "rollingUpdate": { "podUpdatePolicy": "InPlaceOnly" } }),
        ),
        (ALPHA, json!({ "type": "InPlaceOnly" })),
    ];
    for (version, policy) in policies {
        let (sets, name) = (cloneset_api(version).await, format!("stays-{}", version.len()));
        let container = |image: &str, cpu: &str| {
            let resources = json!({ "requests": { "cpu": cpu, "memory": "64Mi" } });
            json!({ "name": "c", "image": image, "resources": resources })
        };
        let template = |container: Value| json!({ "template": { "spec": { "containers": [container] } } });
        let mut spec = template(container("i:1", "100m"));
        spec["updateStrategy"] = policy.clone();
        create(&sets, cloneset(version, &name, spec)).await.unwrap();
        let stored = get(&sets, &name).await["spec"]["updateStrategy"].clone();
        let stored_policies = json!([stored["type"], stored["rollingUpdate"]["podUpdatePolicy"]]);
        assert!(
            stored_policies
                .as_array()
                .unwrap()
                .contains(&json!("InPlaceOnly")),
            "{stored}"
        );

        let change = |container| merge(&sets, &name, json!({ "spec": template(container) }));
        change(container("i:2", "100m")).await.unwrap();
        // Without feature gate InPlaceWorkloadVerticalScaling.
        assert_denied(
            change(container("i:3", "150m")).await,
            "spec.template.spec/containers/0/resources/requests/cpu: Forbidden: a Pod cannot be changed in this",
        );
        let mut other = container("i:2", "100m");
        other["env"] = json!([{ "name": "A", "value": "1" }]);
        assert_denied(
            change(other).await,
            "spec.template.spec/containers/0/env: Forbidden: a Pod cannot be changed in this",
        );
    }
}

#[tokio::test]
async fn pods_to_delete_must_belong_to_the_cloneset() {
    let (alpha, beta) = (cloneset_api(ALPHA).await, cloneset_api(BETA).await);
    let created = create(&beta, cloneset(BETA, "naming", json!({}))).await.unwrap();
    let pods = dynamic_api(&shared_cluster().admin().await, "v1", "Pod", Some("default"));
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": "naming-1", "ownerReferences": [{ "apiVersion": BETA, "kind": "CloneSet",
            "name": "naming", "uid": created["metadata"]["uid"], "controller": true }] },
        "spec": { "containers": [{ "name": "c", "image": "i" }] },
    });
    create(&pods, pod).await.unwrap();
    let pods_to_delete = |names: Value| json!({ "spec": { "scaleStrategy": { "podsToDelete": names } } });
    merge(&alpha, "naming", pods_to_delete(json!(["naming-1"])))
        .await
        .unwrap();
    assert_denied(
        merge(&alpha, "naming", pods_to_delete(json!(["naming-1", "naming-2"]))).await,
        "spec.scaleStrategy.podsToDelete: Invalid value: \"naming-2\"",
    );
    merge(&beta, "naming", pods_to_delete(json!(["naming-1", "naming-2"])))
        .await
        .unwrap();
    // Every name is looked up, however many there are.
    let many: Vec<String> = (100..140).map(|n| format!("naming-{n}")).collect();
    assert_denied(
        merge(&alpha, "naming", pods_to_delete(json!(many))).await,
        "spec.scaleStrategy.podsToDelete: Invalid value: \"naming-139\"",
    );
}

/// A policy for all kinds also evaluates the object of the dry run: it has the CloneSet's labels and annotations, and a
/// denial of that object alone does not reject the CloneSet.
#[tokio::test]
async fn policy_denying_the_dry_run_does_not_reject_the_cloneset() {
    let plane = &shared_cluster().plane;
    let policy = |name: &str, resources: &str, expression: &str| {
        let rules = json!([{ "apiGroups": ["*"], "apiVersions": ["*"], "operations": ["CREATE"], "resources": [resources],
            "scope": "Namespaced" }]);
        json!({ "apiVersion": "v1", "kind": "List", "items": [
            { "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy", "metadata": { "name": name },
              "spec": { "matchConstraints": { "resourceRules": rules },
                  "validations": [{ "expression": expression, "message": "no team" }] } },
            { "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding", "metadata": { "name": name },
              "spec": { "policyName": name, "validationActions": ["Deny"],
                  "matchResources": { "namespaceSelector": { "matchLabels": { "policed": name } } } } },
        ] })
    };
    let admin = shared_cluster().admin().await;
    for (name, resources, expression) in [
        ("team", "*", "'team' in object.metadata.?labels.orValue({})"),
        (
            "owner",
            "*",
            "'owner' in object.metadata.?annotations.orValue({})",
        ),
        ("none", "podtemplates", "false"),
    ] {
        plane.kubectl(&["create", "namespace", name]).unwrap();
        plane
            .kubectl(&["label", "namespace", name, &format!("policed={name}")])
            .unwrap();
        plane
            .apply(&policy(name, resources, expression).to_string())
            .unwrap();
        let probe = json!({ "apiVersion": "v1", "kind": "PodTemplate", "metadata": { "generateName": "probe-" },
            "template": { "metadata": {}, "spec": { "containers": [{ "name": "c", "image": "i" }] } } });
        let probes = dynamic_api(&admin, "v1", "PodTemplate", Some(name));
        let start = std::time::Instant::now();
        while create(&probes, probe.clone()).await.is_ok() {
            assert!(start.elapsed() < WAIT_TIMEOUT, "policy {name} is not heeded");
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        let mut object = cloneset(BETA, "policed", json!({}));
        object["metadata"]["labels"] = json!({ "team": "a" });
        object["metadata"]["annotations"] = json!({ "owner": "a" });
        create(&dynamic_api(&admin, BETA, "CloneSet", Some(name)), object)
            .await
            .unwrap();
        let policed: &[&str] = &[
            "get",
            "clone/policed",
            "-o",
            "jsonpath={.spec.template.spec.restartPolicy}",
        ];
        let restart_policy = plane
            .kubectl(&[policed, &["--namespace", name]].concat())
            .unwrap();
        assert_eq!(
            restart_policy,
            if name == "none" { "" } else { "Always" },
            "policy {name}"
        );
    }
    let mut bad = cloneset(
        BETA,
        "bad",
        json!({ "template": { "spec": { "containers": [{ "name": "A" }] } } }),
    );
    bad["metadata"]["labels"] = json!({ "team": "a" });
    let answer = create(&dynamic_api(&admin, BETA, "CloneSet", Some("team")), bad).await;
    assert_denied(
        answer,
        "spec.template.spec.containers[0].name: Invalid value: \"A\"",
    );
}

//! Templates of CloneSets through the webhook and through the manager's own question.

use std::collections::BTreeMap;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use k8s_openapi::api::apps::v1::ControllerRevision;
use kruise_cluster::Cluster;
use kruise_cluster::pod_template::{self, Answer, Defaults, Templates};
use kruise_cluster::write;
use kruise_workload::in_place::normal::Stored;
use kruise_workload::revision::{self, Owner, Revision};
use kube::Api;
use serde_json::{Value, json};
use testbed::cluster::Bound;

use crate::cloneset::{set, sets};
use crate::etcd::etcd;
use crate::world::{PATIENCE, create, get, merge, refused, typed, world};

const ALPHA: &str = "apps.kruise.io/v1alpha1";
const BETA: &str = "apps.kruise.io/v1beta1";

async fn manager() -> Cluster {
    world().account("kruise-manager", Bound::Nothing).await
}

async fn with_defaults(spec: &Value) -> Templates {
    let answer = pod_template::ask(
        &manager().await,
        "default",
        Templates::of(spec),
        Defaults::default(),
    )
    .await;
    match answer.unwrap() {
        Answer::Good { templates, .. } => templates,
        Answer::Bad(why) => panic!("{why}"),
    }
}

fn claim() -> Value {
    json!({
        "metadata": { "name": "data" },
        "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1024Mi" } } },
    })
}

/// The webhook's defaults are those that the manager gets where no webhook was asked, so both make one revision.
#[tokio::test]
async fn the_manager_s_own_question_gives_what_the_webhook_filled_in() {
    let classes = typed(&world().admin().await, "storage.k8s.io/v1", "StorageClass", None);
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
    let raw = set(BETA, "templates", change);
    let stored = create(&sets(BETA).await, raw.clone()).await.unwrap();
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

    let asked = with_defaults(&raw["spec"]).await;
    assert_eq!(asked, Templates::of(&stored["spec"]));
    assert_eq!(
        with_defaults(&stored["spec"]).await,
        asked,
        "defaults have no defaults"
    );
    let owner = Owner {
        kind: "CloneSet",
        namespace: "default",
        name: "templates",
        uid: "u",
        annotations: &BTreeMap::new(),
    };
    let of = |templates: &Templates| revision::wanted(&owner, &templates.template, &templates.claims, None);
    assert_eq!(of(&asked), of(&Templates::of(&stored["spec"])));
}

/// The oldest release that is supported drops image volumes and their mounts; what follows them is not shifted by that.
/// Sources of trust bundles all releases empty as long as nobody switches them on.
#[tokio::test]
async fn a_template_with_volumes_of_a_feature_that_is_off_is_stored_as_it_was_asked_for() {
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
    let manifest = set(BETA, "image-volume", change);
    let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
    std::fs::write(file.path(), manifest.to_string()).unwrap();
    let apply = ["apply", "-f", file.path().to_str().unwrap()];
    world().plane.kubectl(&apply).unwrap();
    let stored = get(&sets(BETA).await, "image-volume").await;
    let pod = &stored["spec"]["template"]["spec"];
    let mut filled = volumes;
    filled[1]["configMap"]["defaultMode"] = json!(420);
    filled[2]["projected"]["defaultMode"] = json!(420);
    assert_eq!(pod["volumes"], filled);
    assert_eq!(pod["containers"][0]["volumeMounts"], mounts);
    assert_eq!(pod["containers"][0]["terminationMessagePolicy"], "File");
    let claim = &stored["spec"]["volumeClaimTemplates"][0]["spec"];
    assert_eq!(claim["resources"]["requests"]["storage"], "1Gi");
    assert_eq!(
        with_defaults(&stored["spec"]).await,
        Templates::of(&stored["spec"])
    );
    world().plane.kubectl(&apply).unwrap();
    let again = get(&sets(BETA).await, "image-volume").await;
    assert_eq!(again["metadata"]["generation"], stored["metadata"]["generation"]);
}

/// A revision as the manager makes it is found again when it is read.
#[tokio::test]
async fn a_revision_comes_back_as_it_was_made() {
    let admin = world().admin().await;
    let owner = Owner {
        kind: "CloneSet",
        namespace: "default",
        name: "revised",
        uid: "u",
        annotations: &BTreeMap::new(),
    };
    let mut spec = set(BETA, "revised", json!({}))["spec"].clone();
    spec["template"]["metadata"]["annotations"] = json!({ "note": "a<b>&c" });
    let asked = with_defaults(&spec).await;
    let wanted = revision::wanted(&owner, &asked.template, &asked.claims, None);
    let revisions: Api<ControllerRevision> = Api::namespaced(admin.client.clone(), "default");
    let made = write::post(&revisions, wanted.body(&owner, 1)).await;
    let made = Revision::from(&serde_json::from_value(made.unwrap()).unwrap());
    assert!(wanted.is(&made));
    // The Go implementation compares the bytes that are stored.
    let key = format!("/registry/controllerrevisions/default/{}", wanted.name);
    let found = etcd(
        world().plane.store(),
        "range",
        &json!({ "key": BASE64_STANDARD.encode(key) }),
    );
    let stored = BASE64_STANDARD
        .decode(found["kvs"][0]["value"].as_str().unwrap())
        .unwrap();
    assert!(
        stored
            .windows(wanted.data.len())
            .any(|part| part == wanted.data.as_bytes())
    );
    let known = [made];
    assert_eq!(
        revision::plan(&wanted, &known),
        revision::Step::Use {
            name: wanted.name.clone()
        }
    );
    let found = revision::stands_for(&asked.template, &known, Stored::WithDefaults);
    assert_eq!(found, known[0].template());
}

#[tokio::test]
async fn what_the_api_server_finds_wrong_is_said_where_it_stands() {
    let sets = sets(BETA).await;
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
        refused(create(&sets, set(BETA, "bad", change)).await, message);
    }
}

#[tokio::test]
async fn applying_the_same_again_changes_nothing() {
    let manifest = set(ALPHA, "again", json!({ "volumeClaimTemplates": [claim()] }));
    let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
    std::fs::write(file.path(), manifest.to_string()).unwrap();
    let file = file.path().to_str().unwrap();
    let plane = &world().plane;
    for how in [
        &["apply", "-f", file][..],
        &["apply", "--server-side", "--force-conflicts", "-f", file],
    ] {
        plane.kubectl(how).unwrap();
        let first = get(&sets(BETA).await, "again").await;
        plane.kubectl(how).unwrap();
        let second = get(&sets(BETA).await, "again").await;
        assert_eq!(first["spec"], second["spec"]);
        assert_eq!(
            first["metadata"]["generation"], second["metadata"]["generation"],
            "{how:?}"
        );
    }
}

/// In both versions the same. OpenKruise's v1beta1 looks at nothing.
#[tokio::test]
async fn pods_that_stay_change_only_in_what_they_can() {
    let policies = [
        (
            BETA,
            json!({ "rollingUpdate": { "podUpdatePolicy": "InPlaceOnly" } }),
        ),
        (ALPHA, json!({ "type": "InPlaceOnly" })),
    ];
    for (version, policy) in policies {
        let (sets, name) = (sets(version).await, format!("stays-{}", version.len()));
        let container = |image: &str, cpu: &str| {
            let resources = json!({ "requests": { "cpu": cpu, "memory": "64Mi" } });
            json!({ "name": "c", "image": image, "resources": resources })
        };
        let template = |container: Value| json!({ "template": { "spec": { "containers": [container] } } });
        let mut spec = template(container("i:1", "100m"));
        spec["updateStrategy"] = policy.clone();
        create(&sets, set(version, &name, spec)).await.unwrap();
        let stored = get(&sets, &name).await["spec"]["updateStrategy"].clone();
        let stays = json!([stored["type"], stored["rollingUpdate"]["podUpdatePolicy"]]);
        assert!(
            stays.as_array().unwrap().contains(&json!("InPlaceOnly")),
            "{stored}"
        );

        let change = |container| merge(&sets, &name, json!({ "spec": template(container) }));
        change(container("i:2", "100m")).await.unwrap();
        // Without gate InPlaceWorkloadVerticalScaling.
        refused(
            change(container("i:3", "150m")).await,
            "spec.template.spec/containers/0/resources/requests/cpu: Forbidden: a Pod cannot be changed in this",
        );
        let mut other = container("i:2", "100m");
        other["env"] = json!([{ "name": "A", "value": "1" }]);
        refused(
            change(other).await,
            "spec.template.spec/containers/0/env: Forbidden: a Pod cannot be changed in this",
        );
    }
}

#[tokio::test]
async fn only_pods_of_the_cloneset_can_be_named_for_deletion() {
    let (alpha, beta) = (sets(ALPHA).await, sets(BETA).await);
    let made = create(&beta, set(BETA, "naming", json!({}))).await.unwrap();
    let pods = typed(&world().admin().await, "v1", "Pod", Some("default"));
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": "naming-1", "ownerReferences": [{ "apiVersion": BETA, "kind": "CloneSet",
            "name": "naming", "uid": made["metadata"]["uid"], "controller": true }] },
        "spec": { "containers": [{ "name": "c", "image": "i" }] },
    });
    create(&pods, pod).await.unwrap();
    let naming = |names: Value| json!({ "spec": { "scaleStrategy": { "podsToDelete": names } } });
    merge(&alpha, "naming", naming(json!(["naming-1"])))
        .await
        .unwrap();
    refused(
        merge(&alpha, "naming", naming(json!(["naming-1", "naming-2"]))).await,
        "spec.scaleStrategy.podsToDelete: Invalid value: \"naming-2\"",
    );
    merge(&beta, "naming", naming(json!(["naming-1", "naming-2"])))
        .await
        .unwrap();
    // However many there are, each is looked up.
    let many: Vec<String> = (100..140).map(|n| format!("naming-{n}")).collect();
    refused(
        merge(&alpha, "naming", naming(json!(many))).await,
        "spec.scaleStrategy.podsToDelete: Invalid value: \"naming-139\"",
    );
}

/// A policy for all kinds looks at the object of the dry run too: it has the CloneSet's labels and annotations, and what is refused of it alone
/// does not refuse the CloneSet.
#[tokio::test]
async fn a_policy_that_the_dry_run_does_not_meet_is_no_mistake_of_the_template() {
    let plane = &world().plane;
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
    let admin = world().admin().await;
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
        let probes = typed(&admin, "v1", "PodTemplate", Some(name));
        let start = std::time::Instant::now();
        while create(&probes, probe.clone()).await.is_ok() {
            assert!(start.elapsed() < PATIENCE, "policy {name} is not heeded");
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        let mut object = set(BETA, "policed", json!({}));
        object["metadata"]["labels"] = json!({ "team": "a" });
        object["metadata"]["annotations"] = json!({ "owner": "a" });
        create(&typed(&admin, BETA, "CloneSet", Some(name)), object)
            .await
            .unwrap();
        let policed: &[&str] = &[
            "get",
            "clone/policed",
            "-o",
            "jsonpath={.spec.template.spec.restartPolicy}",
        ];
        let filled = plane
            .kubectl(&[policed, &["--namespace", name]].concat())
            .unwrap();
        assert_eq!(
            filled,
            if name == "none" { "" } else { "Always" },
            "policy {name}"
        );
    }
    let mut bad = set(
        BETA,
        "bad",
        json!({ "template": { "spec": { "containers": [{ "name": "A" }] } } }),
    );
    bad["metadata"]["labels"] = json!({ "team": "a" });
    let answer = create(&typed(&admin, BETA, "CloneSet", Some("team")), bad).await;
    refused(
        answer,
        "spec.template.spec.containers[0].name: Invalid value: \"A\"",
    );
}

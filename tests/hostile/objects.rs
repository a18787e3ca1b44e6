//! Objects next to ours that others may write: revisions, Pods, Secrets.

use kruise_api::keys::{KRUISE_POD_READY, POD_DELETION_COST};
use kruise_cluster::Cluster;
use kube::api::{DynamicObject, ListParams};
use serde_json::{Value, json};

use crate::full_cluster::{NODE, Objects, cloneset_spec, exclusive_cluster, target};
use support::waits;

/// An owner reference to a CloneSet.
fn owner_references(set: &DynamicObject, version: &str) -> Value {
    json!([{ "apiVersion": format!("apps.kruise.io/{version}"), "kind": "CloneSet", "name": set.metadata.name,
        "uid": set.metadata.uid, "controller": true }])
}

/// Creates a CloneSet of two Pods with labels of its own, and waits for them.
async fn create_set_with_pods(admin: &Cluster, name: &str) -> DynamicObject {
    let sets = Objects::of_kruise(admin, "v1beta1", "CloneSet");
    sets.create(&json!({ "metadata": { "name": name }, "spec": cloneset_spec(name, 2) }))
        .await
        .unwrap();
    waits::poll_until("its Pods are there", &String::new, || async {
        let set = sets.get(name).await.unwrap();
        (set.data["status"]["replicas"] == 2).then_some(set)
    })
    .await
}

#[tokio::test]
async fn malformed_revisions_crash_no_program() {
    let cluster = exclusive_cluster().await;
    let admin = cluster.admin().await;
    let set = create_set_with_pods(&admin, "revisions").await;
    let old = set.data["status"]["updateRevision"].as_str().unwrap().to_owned();
    let sets = Objects::of_kruise(&admin, "v1beta1", "CloneSet");
    let revisions = Objects::new(&admin, "apps", "v1", "ControllerRevision", Some("default"));
    let pods = Objects::new(&admin, "", "v1", "Pod", Some("default"));
    let template = json!({ "spec": { "updateStrategy": { "rollingUpdate": { "partition": 2 } },
        "template": { "spec": { "containers": [{ "name": "c", "image": "i:2" }] } } } });
    sets.merge("revisions", &template).await.unwrap();
    let _: () = waits::poll_until("the new revision", &String::new, || async {
        let set = sets.get("revisions").await.unwrap();
        (set.data["status"]["updateRevision"] != *old).then_some(())
    })
    .await;
    let shapes = [
        json!({ "spec": { "template": { "spec": "x" } } }),
        json!({ "spec": { "template": "x" } }),
        json!({ "spec": "x" }),
        json!({}),
        json!({ "spec": { "template": { "metadata": [], "spec": { "containers": "x", "volumes": 1, "readinessGates": {} } } } }),
        json!({ "spec": { "template": { "metadata": { "labels": 1 }, "spec": { "containers": [1, {}, "x"] } } } }),
        json!({ "spec": { "volumeClaimTemplates": [1, "x", {}], "template": {} } }),
    ];
    for (index, data) in shapes.iter().enumerate() {
        let object = |name: &str, number: i64| {
            json!({ "metadata": { "name": name, "ownerReferences": owner_references(&set, "v1beta1"),
                "labels": { "app": "revisions", "controller.kubernetes.io/hash": name.trim_start_matches("revisions-"),
                    "controller-revision-hash": name } }, "data": data, "revision": number })
        };
        // The name of the Pods' own revision; the manager may recreate it first.
        let _: () = waits::poll_until("a revision in the old one's place", &String::new, async || {
            revisions.delete_if_exists(&old).await;
            match revisions.create(&object(&old, 0)).await {
                Err(words) if words.contains("already exists") => None,
                result => {
                    result.unwrap();
                    Some(())
                }
            }
        })
        .await;
        for (name, number) in [
            (format!("odd-{index}"), i64::MAX),
            (format!("odd-{index}-low"), 0),
        ] {
            revisions.create(&object(&name, number)).await.unwrap();
        }
        let error = revisions.create(&object("odd-negative", -1)).await.unwrap_err();
        assert!(error.contains("revision: Invalid value: -1"), "{error}");
        sets.merge("revisions", &json!({ "spec": { "replicas": 3 + index % 2 } }))
            .await
            .unwrap();
        let labelled = ListParams::default().labels("app=revisions");
        if let Some(pod) = pods.list(&labelled).await.unwrap().items.first() {
            pods.delete_now(pod.metadata.name.as_deref().unwrap()).await;
        }
    }
    cluster.assert_still_works("after-revisions").await;
}

/// Every annotation, or label, that our programs know; read from the sources, so a new one is included.
fn known_keys(what: &str) -> Vec<&'static str> {
    let mut found = Vec::new();
    for constant in include_str!("../../src/api/src/keys.rs")
        .split("\n\n")
        .flat_map(|part| part.split(";\n"))
    {
        let (doc, declaration) = constant.split_once("pub const ").unwrap_or_default();
        let text = declaration
            .split_once(": &str =")
            .and_then(|(_, text)| text.split('"').nth(1));
        let doc = doc
            .trim_start()
            .trim_start_matches("/// ")
            .replace("Pod annotation", "Annotation");
        let matches =
            doc.starts_with(what) || (what == "Annotation" && doc.starts_with("What old releases called"));
        found.extend(text.filter(|_| matches));
    }
    assert!(found.len() > 9, "{what}: {found:?}");
    found
}

/// All keys with this value.
fn with_value(keys: &[&str], text: &str) -> Value {
    let entries = keys.iter().map(|key| ((*key).to_owned(), json!(text)));
    entries.collect::<serde_json::Map<_, _>>().into()
}

/// Malformed values of an annotation.
fn malformed_texts() -> Vec<String> {
    let deep = format!("{}1{}", "[".repeat(300), "]".repeat(300));
    let texts = [
        "",
        "{",
        "null",
        "[]",
        "\"x\"",
        "-1",
        "99999999999999999999",
        "99999999999999999999%",
        "9999-12-31T23:59:59Z",
        "?/../x,,/",
        deep.as_str(),
        r#"[[],{},1,null,[["a",1,{}]]]"#,
        r#"{"hostile":[["a","b","c"],["?"],[1],{}],"":null}"#,
        r#"[{"name":1},{"type":"Waiting","status":"x","lastTransitionTime":"x","reason":"","message":{}}]"#,
        r#"[{"type":"Complete","status":"True","lastTransitionTime":"9999-12-31T23:59:59Z","reason":"?","message":"\u0000"}]"#,
        r#"[{"name":"c","ready":"x","restartCount":1e300,"containerID":[]}]"#,
        r#"{"containers":[{"name":"c","containerID":"?","restartCount":-1,"hashes":{"plainHash":-1,"extractedEnvFromMetadataHash":1e300}}]}"#,
        r#"{"revision":1,"updateTimestamp":"9999-12-31T23:59:59Z","lastContainerStatuses":[],"containerBatchesRecord":{}}"#,
        r#"{"revision":"r","updateTimestamp":"0000-01-01T00:00:00Z","nextContainerImages":{"c":1},"graceSeconds":9223372036854775807}"#,
    ];
    texts.map(str::to_owned).into()
}

/// An object with everything that our programs read in metadata, and one of each kind that they read it from.
#[tokio::test]
async fn malformed_metadata_of_any_kind_crashes_no_program() {
    let cluster = exclusive_cluster().await;
    let admin = cluster.admin().await;
    let secrets = Objects::new(&admin, "", "v1", "Secret", Some("kruise-daemon-config"));
    let revisions = Objects::new(&admin, "apps", "v1", "ControllerRevision", Some("default"));
    let nodes = Objects::new(&admin, "", "v1", "Node", None);
    let set = create_set_with_pods(&admin, "metadata").await;
    for (number, text) in malformed_texts().iter().enumerate() {
        let annotations = with_value(&known_keys("Annotation"), text);
        // Such a text is no valid label value.
        let labels = with_value(&known_keys("Label"), ["", "true", "x", "1"][number % 4]);
        let metadata = |name: &str| json!({ "name": name, "annotations": annotations, "labels": labels });
        for version in ["v1alpha1", "v1beta1"] {
            let name = format!("metadata-{version}-{number}");
            for (kind, spec) in [
                ("CloneSet", cloneset_spec(&name, 1)),
                (
                    "ImagePullJob",
                    json!({ "image": "hostile:metadata", "completionPolicy": {} }),
                ),
                (
                    "ContainerRecreateRequest",
                    json!({ "podName": target(number), "containers": [{ "name": "main" }] }),
                ),
                ("NodeImage", json!({ "images": {} })),
            ] {
                let objects = Objects::of_kruise(&admin, version, kind);
                let object = json!({ "metadata": metadata(&name), "spec": spec });
                let result = objects.create(&object).await;
                // It is now a field, into which such a text does not fit.
                let is_field = (kind, version) == ("CloneSet", "v1alpha1") && text.len() > 64;
                match result {
                    Err(words) if is_field => {
                        assert!(words.contains("imagePreDownloadParallelism: Too long"), "{words}")
                    }
                    result => result.unwrap(),
                }
            }
            // The daemon's own NodeImage, with a Secret.
            let entry = json!({ "tags": [{ "tag": "1", "pullPolicy": { "ttlSecondsAfterFinished": 1 } }], "pullSecrets": [{ "namespace": "kruise-daemon-config", "name": name }] });
            let patch = json!({ "metadata": { "annotations": annotations }, "spec": { "images": { "hostile": entry } } });
            Objects::of_kruise(&admin, version, "NodeImage")
                .merge(NODE, &patch)
                .await
                .unwrap();
            let secret = json!({ "metadata": metadata(&name), "type": "kubernetes.io/dockerconfigjson",
                "stringData": { ".dockerconfigjson": "{}" } });
            secrets.create(&secret).await.unwrap();
            let mut revision = json!({ "metadata": metadata(&name), "revision": number, "data": {} });
            revision["metadata"]["ownerReferences"] = owner_references(&set, version);
            revisions.create(&revision).await.unwrap();
        }
        let metadata = json!({ "annotations": annotations, "labels": labels });
        nodes.merge(NODE, &json!({ "metadata": metadata })).await.unwrap();
    }
    // A NodeImage with such a label exists without a Node, and has no daemon.
    let images = Objects::of_kruise(&admin, "v1beta1", "NodeImage");
    for image in images.list(&ListParams::default()).await.unwrap().items {
        let name = image.metadata.name.unwrap();
        if name != NODE {
            images.delete_if_exists(&name).await;
        }
    }
    let null_values = |keys: Vec<&'static str>| {
        keys.into_iter()
            .map(|key| (key.to_owned(), Value::Null))
            .collect::<serde_json::Map<_, _>>()
    };
    let reset = json!({ "metadata": { "annotations": null_values(known_keys("Annotation")), "labels": null_values(known_keys("Label")) } });
    nodes.merge(NODE, &reset).await.unwrap();
    cluster.assert_still_works("after-metadata").await;
}

#[tokio::test]
async fn malformed_annotations_and_owners_crash_no_program() {
    let cluster = exclusive_cluster().await;
    let admin = cluster.admin().await;
    let set = create_set_with_pods(&admin, "annotations").await;
    let texts = malformed_texts();
    for (namespace, version) in [("default", "v1beta1"), ("other", "v1beta1"), ("other", "v9")] {
        let pods = Objects::new(&admin, "", "v1", "Pod", Some(namespace));
        for (number, text) in texts.iter().enumerate() {
            let mut annotations = with_value(&known_keys("Annotation"), text);
            // The API server validates this one.
            annotations[POD_DELETION_COST] = json!("-2147483648");
            let pod = json!({ "metadata": { "name": format!("odd-{version}-{number}"), "ownerReferences": owner_references(&set, version),
                    "labels": { "app": "annotations", "lifecycle.apps.kruise.io/state": "odd" }, "annotations": annotations },
                "spec": { "nodeName": NODE, "terminationGracePeriodSeconds": i64::MAX,
                    "readinessGates": [{ "conditionType": KRUISE_POD_READY }],
                    "containers": [{ "name": "c", "image": "i" }] } });
            pods.create(&pod).await.unwrap();
            // Our programs store there, as JSON, who holds the Pod unready.
            let condition = json!({ "type": KRUISE_POD_READY, "status": "False", "message": text });
            let status = json!({ "status": { "conditions": [condition] } });
            let name = format!("odd-{version}-{number}");
            pods.merge_status(&name, &status).await.unwrap();
        }
    }
    let change = json!({ "spec": {
        "updateStrategy": { "rollingUpdate": { "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": "100%" } },
        "template": { "spec": { "containers": [{ "name": "c", "image": "i:2" }] } } } });
    Objects::of_kruise(&admin, "v1beta1", "CloneSet")
        .merge("annotations", &change)
        .await
        .unwrap();
    cluster.assert_still_works("after-annotations").await;
}

#[tokio::test]
async fn malformed_pull_secrets_crash_no_program() {
    let cluster = exclusive_cluster().await;
    let admin = cluster.admin().await;
    let secrets = Objects::new(&admin, "", "v1", "Secret", Some("default"));
    let jobs = Objects::of_kruise(&admin, "v1beta1", "ImagePullJob");
    let long = "a".repeat(200);
    let many: serde_json::Map<String, Value> = (0..20_000)
        .map(|index| (format!("r{index}"), json!({})))
        .collect();
    let shapes = [
        json!({ "auths": { "*a*a*a*a*a*a*a*a*a*a*b.x": { "auth": "eDp5" } } }),
        json!({ "auths": { "[[[[": 1, "https://": {}, "": { "auth": "=" } } }),
        json!({ "auths": [] }),
        json!({ "auths": { format!("{long}.x"): { "username": 1, "password": [] } } }),
        json!({ "auths": many }),
    ];
    for (number, shape) in shapes.iter().enumerate() {
        let name = format!("odd-{number}");
        let secret = json!({ "metadata": { "name": name }, "type": "kubernetes.io/dockerconfigjson",
            "stringData": { ".dockerconfigjson": shape.to_string() } });
        secrets.create(&secret).await.unwrap();
        let job = json!({ "metadata": { "name": name },
            "spec": { "image": format!("{long}.x/y:{number}"), "pullSecrets": [name], "completionPolicy": {} } });
        jobs.create(&job).await.unwrap();
    }
    cluster.assert_still_works("after-secrets").await;
}

/// As many Pods as desired, and none of another namespace among them.
#[tokio::test]
async fn forged_owners_of_another_namespace_are_ignored() {
    let cluster = exclusive_cluster().await;
    let admin = cluster.admin().await;
    let set = create_set_with_pods(&admin, "forged").await;
    let update = set.data["status"]["updateRevision"].clone();
    let labelled = ListParams::default().labels("app=forged");
    let pods = Objects::new(&admin, "", "v1", "Pod", Some("default"));
    let other_pods = Objects::new(&admin, "", "v1", "Pod", Some("other"));
    let revisions = Objects::new(&admin, "apps", "v1", "ControllerRevision", Some("other"));
    let jobs = Objects::new(&admin, "apps.kruise.io", "v1beta1", "ImagePullJob", Some("other"));
    for version in ["v1beta1", "v9"] {
        let metadata = |name: &str| {
            json!({ "name": name, "ownerReferences": owner_references(&set, version), "labels": { "app": "forged",
                "controller-revision-hash": update, "controller.kubernetes.io/hash": "x" },
                "annotations": { "controller.kubernetes.io/pod-deletion-cost": "2147483647" } })
        };
        for number in 0..3 {
            let pod = json!({ "metadata": metadata(&format!("forged-{version}-{number}")),
                "spec": { "containers": [{ "name": "c", "image": "i" }] } });
            other_pods.create(&pod).await.unwrap();
        }
        let name = format!("{}-{version}", update.as_str().unwrap());
        let data = json!({ "spec": { "template": { "spec": { "containers": [{ "name": "c", "image": "evil" }] } } } });
        let revision = json!({ "metadata": metadata(&name), "data": data, "revision": i64::MAX });
        revisions.create(&revision).await.unwrap();
        let job = json!({ "metadata": metadata(&format!("forged-{version}")),
            "spec": { "image": "evil", "completionPolicy": { "type": "Never" } } });
        jobs.create(&job).await.unwrap();
    }
    let pod_states = async |objects: &Objects| {
        let list = objects.list(&labelled).await.unwrap().items;
        let mut pod_states: Vec<_> = list
            .into_iter()
            .map(|pod| (pod.metadata.uid, pod.metadata.deletion_timestamp.is_some()))
            .collect();
        pod_states.sort();
        pod_states
    };
    let before = (pod_states(&pods).await, pod_states(&other_pods).await);
    assert_eq!((before.0.len(), before.1.len()), (2, 6));
    let sets = Objects::of_kruise(&admin, "v1beta1", "CloneSet");
    let change = json!({ "spec": {
        "updateStrategy": { "rollingUpdate": { "podUpdatePolicy": "InPlaceOnly", "maxUnavailable": "100%" } },
        "template": { "spec": { "containers": [{ "name": "c", "image": "i:2" }] } } } });
    sets.merge("forged", &change).await.unwrap();
    let all_have = async |objects: &Objects, image: &str| {
        let list = objects.list(&labelled).await.unwrap().items;
        list.iter()
            .all(|pod| pod.data["spec"]["containers"][0]["image"] == image)
    };
    let _: () = waits::poll_until("its own Pods are updated", &String::new, || async {
        all_have(&pods, "i:2").await.then_some(())
    })
    .await;
    assert_eq!((pod_states(&pods).await, pod_states(&other_pods).await), before);
    assert!(all_have(&other_pods, "i").await);
    cluster.assert_still_works("after-owners").await;
}

//! Sets with mistakes: they are refused and the field is named, or Pods are created nevertheless.

use serde_json::{Value, json};

use crate::fixture::{SharedCluster, SidecarCluster, image, names, shared_cluster};

/// A set for Pods `app: faults`; `patch` is merged into it.
fn set(name: &str, patch: &Value) -> Value {
    let mut set = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet", "metadata": { "name": name },
        "spec": { "selector": { "matchLabels": { "app": "faults" } },
            "containers": [{ "name": format!("side-{name}"), "image": "side:1" }] } });
    json_patch::merge(&mut set, patch);
    set
}

/// Waits until creating the set is refused with this text: the webhook's watch may be behind.
#[track_caller]
fn wait_refused(cluster: &SidecarCluster, set: &Value, text: &str) {
    cluster.wait_until(text, || match cluster.try_create(set) {
        Err(why) if why.contains(text) => Ok(()),
        other => Err(format!("{other:?}")),
    });
}

#[tokio::test]
async fn sets_with_mistakes_are_refused_and_the_field_is_named() {
    let SharedCluster { cluster, .. } = shared_cluster().await;
    let hot = |name: &str| {
        let upgrade = json!({ "upgradeType": "HotUpgrade", "hotUpgradeEmptyImage": "e" });
        json!({ "name": name, "image": "i", "upgradeStrategy": upgrade })
    };
    let spec = |list: &str, items: Value| json!({ "spec": { list: items } });
    let named = |list: &str, name: &str| spec(list, json!([{ "name": name, "image": "i" }]));
    let container =
        |field: &str, value: Value| spec("containers", json!([{ "name": "c", "image": "i", field: value }]));
    cluster.create_set(
        "first",
        json!({ "selector": { "matchLabels": { "app": "faults" } }, "volumes": [{ "name": "data", "emptyDir": {} }],
            "containers": [{ "name": "log", "image": "log:1" }, hot("mesh")],
            "initContainers": [{ "name": "init", "image": "i" }] }),
    );
    let too_long = "x".repeat(62);
    let source = json!({ "fieldRef": { "fieldPath": "metadata.name" } });
    for (patch, text) in [
        (
            named("containers", "log"),
            r#"spec.containers: Invalid value: "log": a container of this name exists in SidecarSet first"#,
        ),
        (
            named("initContainers", "init"),
            r#"spec.containers: Invalid value: "init": a container of this name exists in SidecarSet first"#,
        ),
        (
            named("initContainers", "log"),
            r#"spec.containers: Invalid value: "log": a container has this name in the Pod, too, in SidecarSet first"#,
        ),
        (
            named("containers", "mesh-1"),
            r#"spec.containers: Invalid value: "mesh-1": a container has this name in the Pod, too, in SidecarSet first"#,
        ),
        (
            spec(
                "containers",
                json!([hot("pair"), { "name": "pair-2", "image": "i" }]),
            ),
            r#"spec.containers[0].name: Invalid value: "pair": is pair-2 in the Pod with upgradeType HotUpgrade"#,
        ),
        (
            spec("containers", json!([hot(&too_long)])),
            "must be no more than 61 bytes with upgradeType HotUpgrade",
        ),
        (
            spec(
                "volumes",
                json!([{ "name": "data", "hostPath": { "path": "/" } }]),
            ),
            r#"spec.volumes: Invalid value: "data": a different volume of this name exists in SidecarSet first"#,
        ),
        (
            container("volumeMounts", json!([{ "name": "absent", "mountPath": "/x" }])),
            r#"spec.containers[0].volumeMounts[0].name: Not found: "absent""#,
        ),
        (
            container(
                "env",
                json!([{ "name": "KRUISE_CONTAINER_PRIORITY", "value": "high" }]),
            ),
            r#"spec.containers[0].env[0].value: Invalid value: "high": a launch priority is a whole number, as 10 or -1"#,
        ),
        (
            container(
                "transferEnv",
                json!([{ "envName": "A", "sourceContainerNameFrom": source }]),
            ),
            "must be metadata.labels['KEY'] or metadata.annotations['KEY']",
        ),
        // What only the API server knows.
        (
            container(
                "resizePolicy",
                json!([{ "resourceName": "cpu", "restartPolicy": "Often" }]),
            ),
            r#"spec.containers[0].resizePolicy: Unsupported value: "Often""#,
        ),
        (
            spec(
                "volumes",
                json!([{ "name": "two", "emptyDir": {}, "hostPath": { "path": "/" } }]),
            ),
            "spec.volumes[0].hostPath: Forbidden",
        ),
        (
            container("securityContext", json!({ "runAsUser": "root" })),
            "spec: PodTemplate in version \"v1\" cannot be handled",
        ),
    ] {
        wait_refused(cluster, &set("faulty", &patch), text);
    }
}

#[tokio::test]
async fn canaries_form_no_chain_and_no_cycle() {
    let SharedCluster { cluster, .. } = shared_cluster().await;
    let annotations = |base: &str| json!({ "apps.kruise.io/sidecarset-canary": "true", "apps.kruise.io/sidecarset-base": base });
    let canary = |name: &str, base: &str| {
        let update = json!({ "type": "NotUpdate" });
        let patch =
            json!({ "metadata": { "annotations": annotations(base) }, "spec": { "updateStrategy": update } });
        set(name, &patch)
    };
    let selector = json!({ "matchLabels": { "app": "canaries" } });
    cluster.create_set("base", json!({ "selector": selector }));
    wait_refused(
        cluster,
        &canary("own", "own"),
        "a SidecarSet cannot be its own base",
    );
    wait_refused(cluster, &canary("orphan", "absent"), "the base does not exist");
    let mut one = canary("canary-one", "base");
    one["spec"]["selector"] = selector;
    cluster.wait_until("the canary is admitted", || {
        let applied = cluster.plane.apply(&one.to_string());
        applied.map_err(|why| format!("{why:#}"))
    });
    let text = "the base cannot be a canary itself";
    wait_refused(cluster, &canary("canary-two", "canary-one"), text);
    let make_canary = json!({ "metadata": { "annotations": annotations("canary-one") },
        "spec": { "updateStrategy": { "type": "NotUpdate" } } });
    let args = [
        "patch",
        "sidecarset",
        "base",
        "--type=merge",
        "-p",
        &make_canary.to_string(),
    ];
    let refused = format!("{:#}", cluster.plane.kubectl(&args).unwrap_err());
    assert!(
        refused.contains("annotation apps.kruise.io/sidecarset-base is immutable"),
        "{refused}"
    );
    assert!(refused.contains(text), "{refused}");

    // Without its base, the canary is injected nevertheless.
    cluster.plane.kubectl(&["delete", "sidecarset", "base"]).unwrap();
    cluster.wait_dry_run("canaries", "the canary", |pod| {
        names(pod) == ["side-canary-one", "app"]
    });
}

#[tokio::test]
async fn annotations_need_a_whitelist() {
    let SharedCluster { cluster, .. } = shared_cluster().await;
    let patch = |key: &str| {
        let patches = json!([{ "annotations": { key: "x" }, "patchPolicy": "Overwrite" }]);
        json!({ "selector": { "matchLabels": { "app": "annotated" } }, "patchPodMetadata": patches })
    };
    let annotated = |key: &str| set("annotated", &json!({ "spec": patch(key) }));
    let key = "example.com/note";
    let no_rule = "spec.patchPodMetadata: Required value: the whitelist has no rule for this SidecarSet";
    wait_refused(cluster, &annotated(key), no_rule);
    let configuration = |text: &str| {
        let object = json!({ "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": { "name": "kruise-configuration", "namespace": "kruise-system" },
            "data": { "SidecarSet_PatchPodMetadata_WhiteList": text } });
        cluster.plane.apply(&object.to_string()).unwrap();
    };
    configuration("{");
    wait_refused(cluster, &annotated(key), "the whitelist cannot be read");
    configuration(
        r#"{"rules": [{"allowedAnnotationKeyExprs": ["^example\\.com/", "^kruise\\.io/sidecarset-hash$"]}]}"#,
    );
    cluster.create_set("annotated", patch(key));
    cluster.wait_dry_run("annotated", "the annotation", |pod| {
        pod["metadata"]["annotations"][key] == "x"
    });
    let other = "the whitelist does not allow annotation example.org/note";
    wait_refused(cluster, &annotated("example.org/note"), other);

    // A record that a set makes invalid is not the Pod's: the failure policy decides.
    let records =
        json!([{ "annotations": { "kruise.io/sidecarset-hash": "junk" }, "patchPolicy": "Overwrite" }]);
    cluster.create_set("records", json!({ "patchPodMetadata": records }));
    let policy = |value: &str| {
        let annotations = json!({ "apps.kruise.io/sidecarset-failure-policy": value });
        cluster.patch_set("records", &json!({ "metadata": { "annotations": annotations } }));
    };
    policy("Fail");
    let text = "makes annotation kruise.io/sidecarset-hash invalid";
    let create = || cluster.try_dry_run_with("records", &json!({}));
    cluster.wait_until(text, || match create() {
        Err(why) if why.contains(text) => Ok(()),
        other => Err(format!("{other:?}")),
    });
    policy("Ignore");
    let pod = cluster.wait_until("the Pod is created", create);
    assert_eq!(names(&pod), ["app"]);
}

/// What a set asks for and the Pod does not have is left out; what the Pod has already is kept, except for a container.
#[tokio::test]
async fn pods_are_created_whatever_they_have_already() {
    let SharedCluster { cluster, .. } = shared_cluster().await;
    let label = json!({ "fieldRef": { "apiVersion": "v1", "fieldPath": "metadata.labels['absent']" } });
    cluster.create_set(
        "taken",
        json!({ "volumes": [{ "name": "data", "hostPath": { "path": "/" } }], "containers": [{
            "name": "side", "image": "side:1", "shareVolumePolicy": { "type": "enabled" },
            "volumeMounts": [{ "name": "data", "mountPath": "/data" }],
            "transferEnv": [{ "sourceContainerName": "absent", "envName": "A" },
                { "sourceContainerNameFrom": label, "envNames": ["B"] }] }] }),
    );
    let pod = cluster.wait_dry_run("taken", "injected", |pod| names(pod) == ["side", "app"]);
    let mount = json!([{ "name": "data", "mountPath": "/data" }]);
    assert_eq!(pod["spec"]["containers"][0]["volumeMounts"], mount);
    assert_eq!(
        pod["spec"]["containers"][0]["env"],
        json!([{ "name": "IS_INJECTED", "value": "true" }])
    );
    assert_eq!(
        pod["spec"]["volumes"],
        json!([{ "name": "data", "emptyDir": {} }]),
        "that of the Pod"
    );
    let replaced = json!({ "spec": { "containers": [{ "name": "side", "image": "own:1" }] } });
    let pod = cluster.dry_run_with("taken", &replaced);
    assert_eq!((names(&pod), image(&pod, "side")), (vec!["side"], "side:1"));

    // No Pod has a container and an init container of one name: the failure policy decides.
    let init = json!({ "spec": { "initContainers": [{ "name": "side", "image": "own:1" }] } });
    let pod = cluster.dry_run_with("taken", &init);
    assert_eq!(names(&pod), ["app"]);
    let fail =
        json!({ "metadata": { "annotations": { "apps.kruise.io/sidecarset-failure-policy": "Fail" } } });
    cluster.patch_set("taken", &fail);
    let text = "SidecarSet taken and the Pod have a container and an init container of the same name";
    cluster.wait_until(text, || {
        let why = cluster.try_dry_run_with("taken", &init).expect_err("refused");
        if why.replace(['"', '\\'], "").contains(text) {
            Ok(())
        } else {
            Err(why)
        }
    });
}

#[tokio::test]
async fn missing_empty_image_is_left_to_the_failure_policy() {
    let SharedCluster { cluster, .. } = shared_cluster().await;
    let hot =
        json!([{ "name": "side", "image": "side:1", "upgradeStrategy": { "upgradeType": "HotUpgrade" } }]);
    let set = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet", "metadata": { "name": "no-image" },
        "spec": { "selector": { "matchLabels": { "app": "no-image" } }, "containers": hot } });
    let mut fail = set.clone();
    fail["metadata"]["annotations"] = json!({ "apps.kruise.io/sidecarset-failure-policy": "Fail" });
    cluster.wait_until("SidecarSet no-image is admitted", || {
        cluster
            .plane
            .apply(&fail.to_string())
            .map_err(|why| format!("{why:#}"))
    });
    let create = || cluster.try_dry_run_with("no-image", &json!({}));
    let text = "has no image; its hotUpgradeEmptyImage may be missing";
    cluster.wait_until(text, || match create() {
        Err(why) if why.contains(text) => Ok(()),
        other => Err(format!("{other:?}")),
    });
    cluster.plane.apply(&set.to_string()).unwrap();
    let pod = cluster.wait_until("the Pod is created", create);
    assert_eq!(names(&pod), ["app"]);
}

/// Anyone who creates a Pod can write the annotation.
#[tokio::test]
async fn pods_that_only_claim_to_be_injected_are_injected() {
    let SharedCluster { cluster, .. } = shared_cluster().await;
    let native = json!([{ "name": "mesh", "image": "mesh:1", "restartPolicy": "Always" }]);
    cluster.create_set(
        "claimed",
        json!({ "containers": null, "initContainers": native, "updateStrategy": { "type": "NotUpdate" } }),
    );
    let claim = json!({ "metadata": { "annotations": { "kruise.io/sidecarset-injected-list": "claimed" } } });
    cluster.wait_until("the Pod is injected", || {
        let pod = cluster.try_dry_run_with("claimed", &claim)?;
        if pod["spec"]["initContainers"][0]["name"] == "mesh" {
            Ok(())
        } else {
            Err(pod.to_string())
        }
    });
}

#[tokio::test]
async fn set_for_all_pods_spares_system_namespaces() {
    let cluster = SidecarCluster::start("");
    let label = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "plane", "labels": { "control-plane": "x" } } });
    cluster.plane.apply(&label.to_string()).unwrap();
    let every =
        json!({ "matchLabels": null, "matchExpressions": [{ "key": "absent", "operator": "DoesNotExist" }] });
    let one = |operator: &str| json!({ "key": "app", "operator": operator, "values": ["web"] });
    let none = json!({ "matchLabels": null, "matchExpressions": [one("In"), one("NotIn")] });
    cluster.create_set("every", json!({ "selector": every }));
    cluster.create_set("none", json!({ "selector": none }));
    if cluster.serves_policies() {
        for set in ["every", "none"] {
            cluster.wait_injected_by(set, "True", "PolicyInstalled");
        }
    }
    cluster.wait_dry_run("web", "injected", |pod| names(pod) == ["side-every", "app"]);
    for namespace in ["kube-system", "kruise-system", "kube-node-lease", "plane"] {
        let elsewhere = json!({ "metadata": { "namespace": namespace } });
        cluster.wait_until(&format!("a Pod of {namespace}"), || {
            let pod = cluster.try_dry_run_with("web", &elsewhere)?;
            if names(&pod) == ["app"] {
                Ok(())
            } else {
                Err(pod.to_string())
            }
        });
    }
    let set = cluster.get("sidecarset", "none").unwrap();
    assert_eq!(set["status"]["matchedPods"], 0);
    assert_eq!(set["status"]["notInjectedPods"], Value::Null);
}

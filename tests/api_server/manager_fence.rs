//! What the tokens of the manager and of the webhooks may write, within the permissions of their roles.

use kube::api::{Api, DeleteParams, DynamicObject};
use serde_json::{Value, json};
use testbed::cluster::TokenBinding;

use crate::daemon_fence::wait_until_denied;
use crate::webhook_cluster::{
    assert_denied, create, dry_run_create, dry_run_merge, dynamic_api, merge, merge_status, shared_cluster,
};

fn owner_references(version: &str, kind: &str) -> Value {
    json!([{ "apiVersion": version, "kind": kind, "name": "o", "uid": "11111111-2222-3333-4444-555555555555",
        "controller": true }])
}

fn cloneset_owner() -> Value {
    owner_references("apps.kruise.io/v1beta1", "CloneSet")
}

/// A Pod with these owners.
fn pod_with_owners(name: &str, owners: Value) -> Value {
    json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "ownerReferences": owners },
        "spec": { "automountServiceAccountToken": false, "containers": [{ "name": "app", "image": "i:1" }] } })
}

async fn delete(api: &Api<DynamicObject>, name: &str) -> Result<Value, String> {
    let result = api.delete(name, &DeleteParams::default()).await;
    result.map(|_| Value::Null).map_err(|why| why.to_string())
}

#[tokio::test]
async fn manager_writes_pods_of_clonesets_only() {
    let manager = shared_cluster()
        .account("kruise-manager", TokenBinding::Unbound)
        .await;
    let pods = dynamic_api(&manager, "v1", "Pod", Some("default"));
    let admin_pods = dynamic_api(&shared_cluster().admin().await, "v1", "Pod", Some("default"));
    for owners in [
        json!([]),
        owner_references("apps/v1", "ReplicaSet"),
        owner_references("apps.kruise.io/v1beta1", "StatefulSet"),
        owner_references("example.com/v1", "CloneSet"),
    ] {
        let forged = || dry_run_create(&pods, pod_with_owners("m-forged", owners.clone()));
        wait_until_denied(forged, "may create Pods of CloneSets only").await;
    }
    create(&pods, pod_with_owners("m-ours", cloneset_owner()))
        .await
        .unwrap();
    let image = |image: &str| json!({ "spec": { "containers": [{ "name": "app", "image": image }] } });
    merge(&pods, "m-ours", image("i:2")).await.unwrap();
    delete(&pods, "m-ours").await.unwrap();

    create(
        &admin_pods,
        pod_with_owners("m-theirs", owner_references("apps/v1", "ReplicaSet")),
    )
    .await
    .unwrap();
    let denial = "may not change spec or owner of Pod m-theirs, which belongs to apps/ReplicaSet";
    assert_denied(merge(&pods, "m-theirs", image("i:2")).await, denial);
    let stolen = json!({ "metadata": { "ownerReferences": cloneset_owner() } });
    assert_denied(merge(&pods, "m-theirs", stolen.clone()).await, denial);
    assert_denied(
        delete(&pods, "m-theirs").await,
        "may not delete Pod m-theirs, which belongs to no CloneSet",
    );
    let barrier = json!({ "metadata": { "annotations": { "a": "1" } } });
    merge(&pods, "m-theirs", barrier).await.unwrap();
    // A Pod without an owner may be adopted, and nothing else.
    create(&admin_pods, pod_with_owners("m-orphan", json!([])))
        .await
        .unwrap();
    let denial = "may not change spec or owner of Pod m-orphan, which belongs to no controller";
    assert_denied(merge(&pods, "m-orphan", image("i:2")).await, denial);
    let with_owner = json!({ "metadata": { "ownerReferences": owner_references("apps/v1", "ReplicaSet") } });
    assert_denied(merge(&pods, "m-orphan", with_owner).await, denial);
    merge(&pods, "m-orphan", stolen).await.unwrap();
}

/// A stolen token cannot end any Pod, nor give it another address.
#[tokio::test]
async fn manager_changes_conditions_and_phases_of_jobs_only() {
    let manager = shared_cluster()
        .account("kruise-manager", TokenBinding::Unbound)
        .await;
    let pods = dynamic_api(&manager, "v1", "Pod", Some("default"));
    let admin_pods = dynamic_api(&shared_cluster().admin().await, "v1", "Pod", Some("default"));
    let container_status = |ready: bool| {
        json!([{ "name": "app", "containerID": "containerd://1", "image": "i", "imageID": "i",
            "ready": ready, "restartCount": 0, "state": { "running": {} } }])
    };
    let sidecar = json!({ "name": "KRUISE_TERMINATE_SIDECAR_WHEN_JOB_EXIT", "value": "true" });
    for (name, policy, env) in [
        ("m-service", "Always", json!([sidecar])),
        ("m-plain-job", "Never", json!([])),
        ("m-sidecar-job", "Never", json!([sidecar])),
    ] {
        let mut pod = pod_with_owners(name, owner_references("batch/v1", "Job"));
        pod["spec"]["nodeName"] = json!("m-node");
        pod["spec"]["restartPolicy"] = json!(policy);
        pod["spec"]["containers"][0]["env"] = env;
        create(&admin_pods, pod).await.unwrap();
        let status = json!({ "status": { "phase": "Running", "podIP": "10.0.0.1",
            "containerStatuses": container_status(true) } });
        merge_status(&admin_pods, name, status).await.unwrap();
    }
    let set_status = |name: &'static str, status: Value| {
        let (pods, patch) = (pods.clone(), json!({ "status": status }));
        async move { merge_status(&pods, name, patch).await }
    };
    let phase = |phase: &str| json!({ "phase": phase });

    // A phase that was changed before the policy is enforced could not be changed once more.
    let forged = || dry_run_create(&pods, pod_with_owners("m-forged", json!([])));
    wait_until_denied(forged, "may create Pods of CloneSets only").await;
    for (name, end) in [("m-service", "Failed"), ("m-plain-job", "Succeeded")] {
        let denial = format!("may not change the phase of Pod {name}");
        assert_denied(set_status(name, phase(end)).await, &denial);
    }
    for status in [
        json!({ "podIP": "10.0.0.2" }),
        json!({ "message": "forged" }),
        json!({ "containerStatuses": container_status(false) }),
        json!({ "podIP": null, "podIPs": null }),
        json!({ "phase": "Succeeded", "podIP": "10.0.0.2" }),
    ] {
        let denial = "may change nothing of the status of a Pod but its conditions and phase";
        assert_denied(set_status("m-sidecar-job", status).await, denial);
    }
    let denial = "may not change the phase of Pod m-sidecar-job";
    assert_denied(set_status("m-sidecar-job", phase("Unknown")).await, denial);
    let condition = json!([{ "type": "SidecarTerminated", "status": "True" }]);
    for name in ["m-service", "m-plain-job", "m-sidecar-job"] {
        set_status(name, json!({ "conditions": condition }))
            .await
            .unwrap();
    }
    set_status("m-sidecar-job", phase("Succeeded")).await.unwrap();
    assert_denied(set_status("m-sidecar-job", phase("Failed")).await, denial);
}

#[tokio::test]
async fn manager_creates_claims_revisions_and_jobs_of_clonesets_only() {
    let manager = shared_cluster()
        .account("kruise-manager", TokenBinding::Unbound)
        .await;
    let claim =
        json!({ "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } });
    for (version, kind, key, content) in [
        ("v1", "PersistentVolumeClaim", "spec", claim),
        ("apps/v1", "ControllerRevision", "data", json!({})),
        (
            "apps.kruise.io/v1beta1",
            "ImagePullJob",
            "spec",
            json!({ "image": "i", "completionPolicy": {} }),
        ),
    ] {
        let api = dynamic_api(&manager, version, kind, Some("default"));
        let object = |owners: Value| {
            let mut object = json!({ "apiVersion": version, "kind": kind,
                "metadata": { "name": "m-part", "ownerReferences": owners } });
            object[key] = content.clone();
            if kind == "ControllerRevision" {
                object["revision"] = json!(1);
            }
            object
        };
        let forged = || dry_run_create(&api, object(owner_references("apps/v1", "StatefulSet")));
        wait_until_denied(forged, &format!("may create a {kind} for a CloneSet")).await;
        dry_run_create(&api, object(cloneset_owner())).await.unwrap();
        let of_list = owner_references("apps.kruise.io/v1beta1", "ImageListPullJob");
        let of_list = dry_run_create(&api, object(of_list)).await;
        assert_eq!(of_list.is_ok(), kind == "ImagePullJob", "{kind}: {of_list:?}");
    }
}

#[tokio::test]
async fn manager_creates_requests_for_sidecars_of_their_owner_only() {
    let manager = shared_cluster()
        .account("kruise-manager", TokenBinding::Unbound)
        .await;
    let admin_pods = dynamic_api(&shared_cluster().admin().await, "v1", "Pod", Some("default"));
    let mut uids = Vec::new();
    for name in ["m-job", "m-other-job"] {
        let mut pod = pod_with_owners(name, json!([]));
        pod["spec"]["nodeName"] = json!("m-node");
        let created = create(&admin_pods, pod).await.unwrap();
        uids.push(created["metadata"]["uid"].as_str().unwrap().to_owned());
        let statuses = json!([{ "name": "app", "containerID": "containerd://1", "image": "i", "imageID": "i",
            "ready": true, "restartCount": 0, "state": { "running": {} } }]);
        let status = json!({ "status": { "phase": "Running", "containerStatuses": statuses } });
        merge_status(&admin_pods, name, status).await.unwrap();
    }
    let version = "apps.kruise.io/v1beta1";
    let api = dynamic_api(&manager, version, "ContainerRecreateRequest", Some("default"));
    let request = |name: &str, pod: &str, owners: Value| {
        json!({ "apiVersion": version, "kind": "ContainerRecreateRequest",
            "metadata": { "name": name, "ownerReferences": owners },
            "spec": { "podName": pod, "containers": [{ "name": "app" }] } })
    };
    let owner = |name: &str, uid: &str| {
        let mut owners = owner_references("v1", "Pod");
        (owners[0]["name"], owners[0]["uid"]) = (json!(name), json!(uid));
        owners
    };
    let owners = owner("m-job", &uids[0]);
    let own = format!("sidecar-termination-{}", uids[0]);
    let denial = "or for sidecars or a liveness probe of the Pod that controls it";
    let liveness = format!("liveness-{}-0123456789abcdef", uids[0]);
    let forged = || dry_run_create(&api, request(&own, "m-other-job", owner("m-other-job", &uids[1])));
    wait_until_denied(forged, denial).await;
    // The webhook is asked first.
    let of_another = dry_run_create(&api, request(&own, "m-other-job", owners.clone())).await;
    assert_denied(
        of_another,
        "spec.podName: Invalid value: \"m-other-job\": another Pod has this name now",
    );
    for forged in [
        request(&own, "m-job", json!([])),
        request(&own, "m-job", owner_references("apps/v1", "ReplicaSet")),
        request("restart", "m-job", owners.clone()),
    ] {
        assert_denied(dry_run_create(&api, forged).await, denial);
    }
    for name in [own.clone(), format!("{own}-2"), liveness] {
        let own = request(&name, "m-job", owners.clone());
        dry_run_create(&api, own).await.unwrap();
    }
}

#[tokio::test]
async fn manager_changes_images_of_injected_containers_only() {
    let manager = shared_cluster()
        .account("kruise-manager", TokenBinding::Unbound)
        .await;
    let pods = dynamic_api(&manager, "v1", "Pod", Some("default"));
    let admin_pods = dynamic_api(&shared_cluster().admin().await, "v1", "Pod", Some("default"));
    let mut pod = pod_with_owners("m-injected", owner_references("apps/v1", "ReplicaSet"));
    let injected =
        json!({ "name": "side", "image": "i:1", "env": [{ "name": "IS_INJECTED", "value": "true" }] });
    pod["spec"]["containers"].as_array_mut().unwrap().push(injected);
    create(&admin_pods, pod).await.unwrap();
    let image = |name: &str| json!({ "spec": { "containers": [{ "name": name, "image": "i:2" }] } });
    let strategic = async |patch: Value| {
        let patch = kube::api::Patch::Strategic(patch);
        let result = pods
            .patch("m-injected", &kube::api::PatchParams::default(), &patch)
            .await;
        result.map(|pod| json!(pod)).map_err(|why| why.to_string())
    };
    let denial = "may not change spec or owner of Pod m-injected, which belongs to apps/ReplicaSet";
    wait_until_denied(|| strategic(image("app")), denial).await;
    strategic(image("side")).await.unwrap();
    let deadline = json!({ "spec": { "activeDeadlineSeconds": 1 } });
    assert_denied(strategic(deadline).await, denial);
    let tolerations = json!({ "spec": { "tolerations": [{ "key": "k", "operator": "Exists" }] } });
    assert_denied(strategic(tolerations).await, denial);
}

/// The API server lets clients add a node selector and an affinity to a Pod that waits for its scheduling gates.
#[tokio::test]
async fn manager_places_no_gated_pods_of_others() {
    let manager = shared_cluster()
        .account("kruise-manager", TokenBinding::Unbound)
        .await;
    let pods = dynamic_api(&manager, "v1", "Pod", Some("default"));
    let admin_pods = dynamic_api(&shared_cluster().admin().await, "v1", "Pod", Some("default"));
    let mut pod = pod_with_owners("m-gated", owner_references("apps/v1", "ReplicaSet"));
    pod["spec"]["schedulingGates"] = json!([{ "name": "example.com/quota" }]);
    create(&admin_pods, pod).await.unwrap();
    let denial = "may not change spec or owner of Pod m-gated, which belongs to apps/ReplicaSet";
    let has_disk = json!([{ "matchExpressions": [{ "key": "disk", "operator": "Exists" }] }]);
    let required =
        json!({ "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": has_disk } });
    for spec in [
        json!({ "nodeSelector": { "kubernetes.io/hostname": "stolen" } }),
        json!({ "affinity": { "nodeAffinity": required } }),
        json!({ "schedulingGates": null }),
    ] {
        let patch = json!({ "spec": spec });
        // Without the policy, the API server would take it.
        dry_run_merge(&admin_pods, "m-gated", patch.clone())
            .await
            .unwrap();
        wait_until_denied(|| dry_run_merge(&pods, "m-gated", patch.clone()), denial).await;
    }
    let annotated = json!({ "metadata": { "annotations": { "a": "1" } } });
    merge(&pods, "m-gated", annotated).await.unwrap();
}

/// A controller releases a Pod whose labels its selector does not match, and a CloneSet may adopt and delete it then.
#[tokio::test]
async fn manager_changes_no_labels_that_other_controllers_select_by() {
    let manager = shared_cluster()
        .account("kruise-manager", TokenBinding::Unbound)
        .await;
    let pods = dynamic_api(&manager, "v1", "Pod", Some("default"));
    let admin_pods = dynamic_api(&shared_cluster().admin().await, "v1", "Pod", Some("default"));
    let labels = json!({ "app": "a", "pod-template-hash": "1", "controller-revision-hash": "1",
        "batch.kubernetes.io/controller-uid": "1", "controller-uid": "1",
        "statefulset.kubernetes.io/pod-name": "m-labelled" });
    for (name, owners) in [
        ("m-labelled", owner_references("apps/v1", "ReplicaSet")),
        ("m-labelled-ours", cloneset_owner()),
    ] {
        let mut pod = pod_with_owners(name, owners);
        pod["metadata"]["labels"] = labels.clone();
        create(&admin_pods, pod).await.unwrap();
    }
    let label = |key: &str, value: Value| json!({ "metadata": { "labels": { key: value } } });
    let denial = "may not change labels by which apps/ReplicaSet selects Pod m-labelled";
    for key in labels.as_object().unwrap().keys().filter(|key| *key != "app") {
        for value in [json!("2"), Value::Null] {
            let patch = label(key, value);
            wait_until_denied(|| dry_run_merge(&pods, "m-labelled", patch.clone()), denial).await;
            assert_denied(merge_status(&pods, "m-labelled", patch.clone()).await, denial);
            dry_run_merge(&pods, "m-labelled-ours", patch).await.unwrap();
        }
    }
    // PodProbeMarkers set labels that their users choose.
    merge(&pods, "m-labelled", label("app", json!("b")))
        .await
        .unwrap();
}

#[tokio::test]
async fn manager_writes_revisions_of_sidecarsets_in_its_own_namespace_only() {
    let manager = shared_cluster()
        .account("kruise-manager", TokenBinding::Unbound)
        .await;
    let revision = json!({ "apiVersion": "apps/v1", "kind": "ControllerRevision", "revision": 1, "data": {},
        "metadata": { "name": "s-1", "ownerReferences": owner_references("apps.kruise.io/v1beta1", "SidecarSet") } });
    let in_namespace =
        |name: &'static str| dynamic_api(&manager, "apps/v1", "ControllerRevision", Some(name));
    let (others, own) = (in_namespace("default"), in_namespace("kruise-system"));
    let forged = || dry_run_create(&others, revision.clone());
    wait_until_denied(
        forged,
        "may create a ControllerRevision for a CloneSet or, in its own namespace, for a SidecarSet only",
    )
    .await;
    create(&own, revision).await.unwrap();
    merge(&own, "s-1", json!({ "revision": 2 })).await.unwrap();
    delete(&own, "s-1").await.unwrap();
}

#[tokio::test]
async fn manager_changes_no_claims_revisions_or_jobs_of_others() {
    let manager = shared_cluster()
        .account("kruise-manager", TokenBinding::Unbound)
        .await;
    let admin = shared_cluster().admin().await;
    let spec = json!({ "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } });
    let job = json!({ "image": "i", "completionPolicy": {} });
    for (version, kind, key, content) in [
        ("v1", "PersistentVolumeClaim", "spec", spec),
        ("apps/v1", "ControllerRevision", "data", json!({ "a": "1" })),
        ("apps.kruise.io/v1beta1", "ImagePullJob", "spec", job),
    ] {
        let admins = dynamic_api(&admin, version, kind, Some("default"));
        let managers = dynamic_api(&manager, version, kind, Some("default"));
        let create_object = async |name: &str, labels: Value, owners: Value| {
            let mut object = json!({ "apiVersion": version, "kind": kind,
                "metadata": { "name": name, "labels": labels, "ownerReferences": owners } });
            object[key] = content.clone();
            if kind == "ControllerRevision" {
                object["revision"] = json!(1);
            }
            create(&admins, object).await.unwrap();
        };
        create_object("m-other", json!({}), owner_references("apps/v1", "StatefulSet")).await;
        let id = json!({ "apps.kruise.io/cloneset-instance-id": "x" });
        create_object("m-own", id, cloneset_owner()).await;
        let mark = json!({ "metadata": { "annotations": { "a": "1" } } });
        let others = format!("{kind} m-other, which");
        let image = "may not change the image of ImagePullJob m-own".to_owned();
        let (name, patch, denial) = match kind {
            "ImagePullJob" => ("m-own", json!({ "spec": { "image": "j" } }), &image),
            _ => ("m-other", mark.clone(), &others),
        };
        wait_until_denied(|| dry_run_merge(&managers, name, patch.clone()), denial).await;
        if kind != "ImagePullJob" {
            assert_denied(merge(&managers, "m-other", mark.clone()).await, &others);
        }
        assert_denied(delete(&managers, "m-other").await, &others);
        merge(&managers, "m-own", mark).await.unwrap();
        delete(&managers, "m-own").await.unwrap();
        delete(&admins, "m-other").await.unwrap();
    }
}

#[tokio::test]
async fn manager_writes_barriers_certificates_and_copies_only() {
    let manager = shared_cluster()
        .account("kruise-manager", TokenBinding::Unbound)
        .await;
    let named =
        |kind: &str, name: &str| json!({ "apiVersion": "v1", "kind": kind, "metadata": { "name": name } });
    let maps = dynamic_api(&manager, "v1", "ConfigMap", Some("kube-system"));
    let other = || dry_run_create(&maps, named("ConfigMap", "coredns"));
    wait_until_denied(
        other,
        "may write no ConfigMap but those whose names end with -barrier",
    )
    .await;
    let without_owner = dry_run_create(&maps, named("ConfigMap", "web-barrier")).await;
    assert_denied(without_owner, "that of the Pod that owns it, POD-barrier");
    let mut barrier = named("ConfigMap", "web-barrier");
    barrier["metadata"]["ownerReferences"] =
        json!([{ "apiVersion": "v1", "kind": "Pod", "name": "web", "uid": "u" }]);
    dry_run_create(&maps, barrier).await.unwrap();
    let admins = dynamic_api(
        &shared_cluster().admin().await,
        "v1",
        "ConfigMap",
        Some("kube-system"),
    );
    create(&admins, named("ConfigMap", "x-barrier")).await.unwrap();
    let denial = "kruise-manager may change no ConfigMap but that of the Pod that owns it, POD-barrier";
    assert_denied(delete(&maps, "x-barrier").await, denial);
    let stolen = json!([{ "apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "u" }]);
    let stolen = json!({ "metadata": { "ownerReferences": stolen } });
    assert_denied(merge(&maps, "x-barrier", stolen).await, denial);
    delete(&admins, "x-barrier").await.unwrap();
    let own = dynamic_api(&manager, "v1", "Secret", Some("kruise-system"));
    let other = || dry_run_create(&own, named("Secret", "other"));
    wait_until_denied(other, "may write no Secret but").await;
    let copies = dynamic_api(&manager, "v1", "Secret", Some("kruise-daemon-config"));
    dry_run_create(&copies, named("Secret", "copy")).await.unwrap();
}

#[tokio::test]
async fn pod_templates_are_created_in_dry_runs_only() {
    let template = json!({ "apiVersion": "v1", "kind": "PodTemplate", "metadata": { "generateName": "dry-" },
        "template": { "spec": { "containers": [{ "name": "app", "image": "i" }] } } });
    for account in ["kruise-manager", "kruise-webhook"] {
        let cluster = shared_cluster().account(account, TokenBinding::Unbound).await;
        let templates = dynamic_api(&cluster, "v1", "PodTemplate", Some("default"));
        let stored = || create(&templates, template.clone());
        wait_until_denied(stored, "may create PodTemplates in dry runs only").await;
        dry_run_create(&templates, template.clone()).await.unwrap();
    }
}

//! What the Pods of our programs get: of the node, for each runtime that there is a folder for, and of rights.

use serde_json::Value;

use crate::webhook_cluster::shared_cluster;

/// The DaemonSet of a folder in `deploy`, as the API server takes it.
fn daemon_set(folder: &str) -> Value {
    let path = format!("{}/../deploy/{folder}", env!("CARGO_MANIFEST_DIR"));
    // Nothing else: a webhook server is reached by its address here, which excludes the Service that is applied.
    let only = [
        "--selector=control-plane=daemon",
        "--dry-run=server",
        "--output=json",
    ];
    let apply = [&["apply", "-k", &path][..], &only].concat();
    let object: Value = serde_json::from_str(&shared_cluster().plane.kubectl(&apply).unwrap()).unwrap();
    assert_eq!(object["kind"], "DaemonSet", "{folder}: {object}");
    object
}

/// Seconds for which a token is asked for; for exactly 3607 the API server gives one that lives for a year.
fn token_lifetime(volume: &Value) -> i64 {
    volume["projected"]["sources"][0]["serviceAccountToken"]["expirationSeconds"]
        .as_i64()
        .unwrap()
}

/// The manager's and the webhooks' Pods would be let into a namespace of the strictest kind.
#[test]
fn deployments_comply_with_restricted_pod_security() {
    let plane = &shared_cluster().plane;
    plane.kubectl(&["create", "namespace", "restricted"]).unwrap();
    let enforce = "pod-security.kubernetes.io/enforce=restricted";
    plane
        .kubectl(&["label", "namespace", "restricted", enforce])
        .unwrap();
    for (name, role) in [("kruise-manager", "controllers"), ("kruise-webhook", "webhooks")] {
        let get = [
            "get",
            "deployment",
            name,
            "--namespace=kruise-system",
            "--output=json",
        ];
        let deployment: Value = serde_json::from_str(&plane.kubectl(&get).unwrap()).unwrap();
        let mut spec = deployment["spec"]["template"]["spec"].clone();
        assert_eq!(spec["serviceAccountName"], name);
        assert_eq!(spec["containers"][0]["args"][0], format!("--role={role}"));
        assert_eq!(spec["automountServiceAccountToken"], false, "{name}");
        assert_eq!(token_lifetime(&spec["volumes"][0]), 3600, "{name}");
        // Neither is there in this namespace.
        spec.as_object_mut()
            .unwrap()
            .retain(|key, _| key != "priorityClassName" && !key.starts_with("serviceAccount"));
        spec["serviceAccountName"] = Value::Null;
        let account = plane.kubectl(&["create", "serviceaccount", "default", "--namespace=restricted"]);
        drop(account);
        let pod = serde_json::json!({ "apiVersion": "v1", "kind": "Pod", "spec": spec,
            "metadata": { "name": name, "namespace": "restricted" } });
        plane.apply(&pod.to_string()).unwrap();
    }
}

#[test]
fn only_runtime_directory_and_memory_volume_are_mounted() {
    for (folder, host, mount_path) in [
        ("default", "/run/containerd", "/hostvarrun/containerd"),
        ("runtimes/crio", "/run/crio", "/hostvarrun/crio"),
        ("runtimes/k3s", "/run/k3s/containerd", "/hostvarrun/containerd"),
        ("runtimes/any", "/run", "/hostvarrun"),
    ] {
        let pod = &daemon_set(folder)["spec"]["template"]["spec"];
        let [runtime, control, token] = pod["volumes"].as_array().unwrap().as_slice() else {
            panic!("{folder}: {}", pod["volumes"]);
        };
        assert_eq!(runtime["hostPath"]["path"], host, "{folder}");
        assert_eq!(control["emptyDir"]["medium"], "Memory", "{folder}");
        assert_eq!(token_lifetime(token), 3600, "{folder}");
        assert_eq!(pod["automountServiceAccountToken"], false, "{folder}");
        let [containers, mounts] = [&pod["containers"], &pod["containers"][0]["volumeMounts"]];
        assert_eq!(containers.as_array().unwrap().len(), 1, "{folder}");
        let [socket, control_mount, _] = mounts.as_array().unwrap().as_slice() else {
            panic!("{folder}: {mounts}");
        };
        assert_eq!(
            (&socket["name"], &socket["mountPath"]),
            (&runtime["name"], &mount_path.into()),
            "{folder}"
        );
        assert_eq!(socket["readOnly"], true, "{folder}");
        assert_eq!(
            (&control_mount["name"], &control_mount["mountPath"]),
            (&control["name"], &"/run/kruise".into())
        );
    }
}

//! What the Pods of our programs may use of the node, for each runtime that has a folder, and their permissions.

use serde_json::Value;

use crate::webhook_cluster::shared_cluster;

/// The DaemonSet of a folder in `deploy`, as the API server accepts it.
fn daemon_set(folder: &str) -> Value {
    let path = format!("{}/../deploy/{folder}", env!("CARGO_MANIFEST_DIR"));
    // Only the DaemonSet: the webhooks are registered by address here, so the folder's Service cannot be applied.
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

/// Requested lifetime of a token in seconds; for exactly 3607 the API server issues one that lasts a year.
fn token_lifetime(volume: &Value) -> i64 {
    volume["projected"]["sources"][0]["serviceAccountToken"]["expirationSeconds"]
        .as_i64()
        .unwrap()
}

/// The Pods of the manager and of the webhooks comply with Pod security level `restricted`.
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
        // Neither exists in this namespace.
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

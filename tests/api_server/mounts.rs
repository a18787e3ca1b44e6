//! What the daemon's Pod gets of its node, for each runtime that there is a folder for.

use serde_json::Value;

use crate::world::world;

/// The DaemonSet of a folder in `deploy`, as the API server takes it.
fn daemon_set(folder: &str) -> Value {
    let path = format!("{}/deploy/{folder}", env!("CARGO_MANIFEST_DIR"));
    // Nothing else: a webhook server is reached by its address here, which excludes the Service that is applied.
    let only = [
        "--selector=control-plane=daemon",
        "--dry-run=server",
        "--output=json",
    ];
    let apply = [&["apply", "-k", &path][..], &only].concat();
    let object: Value = serde_json::from_str(&world().plane.kubectl(&apply).unwrap()).unwrap();
    assert_eq!(object["kind"], "DaemonSet", "{folder}: {object}");
    object
}

#[test]
fn only_the_runtimes_directory_and_a_place_in_memory_are_mounted() {
    for (folder, host, at) in [
        ("default", "/run/containerd", "/hostvarrun/containerd"),
        ("runtimes/crio", "/run/crio", "/hostvarrun/crio"),
        ("runtimes/k3s", "/run/k3s/containerd", "/hostvarrun/containerd"),
        ("runtimes/any", "/run", "/hostvarrun"),
    ] {
        let pod = &daemon_set(folder)["spec"]["template"]["spec"];
        let [runtime, control] = pod["volumes"].as_array().unwrap().as_slice() else {
            panic!("{folder}: {}", pod["volumes"]);
        };
        assert_eq!(runtime["hostPath"]["path"], host, "{folder}");
        assert_eq!(control["emptyDir"]["medium"], "Memory", "{folder}");
        let [containers, mounts] = [&pod["containers"], &pod["containers"][0]["volumeMounts"]];
        assert_eq!(containers.as_array().unwrap().len(), 1, "{folder}");
        let [socket, place] = mounts.as_array().unwrap().as_slice() else {
            panic!("{folder}: {mounts}");
        };
        assert_eq!(
            (&socket["name"], &socket["mountPath"]),
            (&runtime["name"], &at.into()),
            "{folder}"
        );
        assert_eq!(socket["readOnly"], true, "{folder}");
        assert_eq!(
            (&place["name"], &place["mountPath"]),
            (&control["name"], &"/run/kruise".into())
        );
    }
}

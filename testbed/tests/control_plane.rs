//! The control plane of the test bed, on its own. It starts real programs: `cargo xtask test` runs it.
#![allow(clippy::unwrap_used)]

use testbed::cluster::{ControlPlane, TokenBinding};

#[test]
fn control_plane_restarts_and_cleans_up() {
    let mut plane = ControlPlane::start().unwrap();
    plane.kubectl(&["create", "serviceaccount", "daemon"]).unwrap();
    plane
        .apply(r#"{"apiVersion":"v1","kind":"Node","metadata":{"name":"one"}}"#)
        .unwrap();
    let config = plane
        .kubeconfig_for("default", "daemon", TokenBinding::Node("one"))
        .unwrap();
    let me = plane.kubectl(&[
        "--kubeconfig",
        config.to_str().unwrap(),
        "auth",
        "whoami",
        "-o",
        "json",
    ]);
    let me = me.unwrap();
    assert!(me.contains("system:serviceaccount:default:daemon"), "{me}");
    assert!(me.contains("authentication.kubernetes.io/node-name"), "{me}");

    let is_node_apply = |w: &serde_json::Value| w["verb"] == "patch" && w["objectRef"]["resource"] == "nodes";
    assert!(
        plane.audited_writes().unwrap().iter().any(is_node_apply),
        "the Node's apply is in the audit log"
    );

    plane.apiserver.kill().unwrap();
    assert!(plane.kubectl(&["get", "nodes", "--request-timeout=2s"]).is_err());
    plane.apiserver.start().unwrap();
    assert!(plane.kubectl(&["get", "nodes"]).unwrap().contains("one"));

    let (dir, pid) = (plane.dir().to_owned(), plane.apiserver.pid().unwrap());
    drop(plane);
    assert!(!dir.exists());
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
}

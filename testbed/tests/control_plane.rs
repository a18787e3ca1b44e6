//! The control plane of the test bed, on its own. It starts real programs: `cargo xtask test` runs it.
#![allow(clippy::unwrap_used)]

use testbed::cluster::{Bound, ControlPlane};

#[test]
fn the_api_server_answers_stops_starts_and_leaves_nothing() {
    let mut plane = ControlPlane::start().unwrap();
    plane.kubectl(&["create", "serviceaccount", "daemon"]).unwrap();
    plane
        .apply(r#"{"apiVersion":"v1","kind":"Node","metadata":{"name":"one"}}"#)
        .unwrap();
    let config = plane
        .kubeconfig_for("default", "daemon", Bound::Node("one"))
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

    let created = |w: &serde_json::Value| w["verb"] == "patch" && w["objectRef"]["resource"] == "nodes";
    assert!(
        plane.writes().unwrap().iter().any(created),
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

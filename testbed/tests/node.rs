//! The whole node of the test bed. It starts real programs: `cargo xtask test` runs it.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use testbed::cluster::{Image, Node, wait};

const POD: &str = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"app","labels":{"app":"app"}},
"spec":{"terminationGracePeriodSeconds":5,"containers":[{"name":"main","image":"bed.test/mine:1",
"command":["sh","-c","trap 'exit 0' TERM; mkdir /www; echo hello >/www/index.html; httpd -p 8080 -h /www; sleep 3600 & wait $!"]}]}}
---
{"apiVersion":"v1","kind":"Service","metadata":{"name":"app"},"spec":{"clusterIP":"10.96.7.7","selector":{"app":"app"},"ports":[{"port":80,"targetPort":8080}]}}"#;

#[test]
fn node_runs_a_reachable_pod_and_cleans_up() {
    let mut node = Node::start().unwrap();
    node.runtime
        .registry
        .push("mine:1", &Image::busybox().random(2))
        .unwrap();
    node.plane.apply(POD).unwrap();
    node.plane
        .kubectl(&["wait", "pod/app", "--for=condition=Ready", "--timeout=60s"])
        .unwrap();
    let response = wait::until("an answer of the Service", Duration::from_secs(90), || {
        // Before kube-proxy has written its rules a connection is dropped, not refused, and would be retried
        // for minutes.
        let mut request = node.runtime.command("timeout");
        request.args([
            "2",
            "bash",
            "-c",
            r"exec 3<>/dev/tcp/10.96.7.7/80; printf 'GET / HTTP/1.0\r\n\r\n' >&3; cat <&3",
        ]);
        Ok(testbed::cluster::run_command(&mut request).ok())
    });
    assert!(response.unwrap().ends_with("hello\n"));
    assert_eq!(
        node.plane
            .kubectl(&["exec", "app", "--", "cat", "/www/index.html"])
            .unwrap(),
        "hello\n"
    );
    assert!(
        node.runtime
            .ctr(&["images", "list"])
            .unwrap()
            .contains("bed.test/mine:1")
    );

    node.runtime.containerd.restart().unwrap();
    node.wait_ready().unwrap();
    let (dir, name) = (
        node.plane.dir().to_owned(),
        node.plane.dir().file_name().unwrap().to_owned(),
    );
    drop(node);
    assert!(!dir.exists());
    let name = name.to_str().unwrap();
    let groups = testbed::cluster::cgroups_named(name).unwrap();
    assert!(groups.is_empty(), "{groups:?}");
    assert!(!std::fs::read_to_string("/proc/mounts").unwrap().contains(name));
}

#[test]
fn worker_runs_a_pod_and_can_be_cut_off() {
    let node = Node::start().unwrap();
    node.runtime
        .registry
        .push("mine:1", &Image::busybox().random(2))
        .unwrap();
    let worker = node.add_worker("node-2").unwrap();
    let pod = POD.replace(r#""spec":{"term"#, r#""spec":{"nodeName":"node-2","term"#);
    node.plane.apply(&pod).unwrap();
    node.plane
        .kubectl(&["wait", "pod/app", "--for=condition=Ready", "--timeout=60s"])
        .unwrap();
    let page = ["exec", "app", "--", "cat", "/www/index.html"];
    assert_eq!(node.plane.kubectl(&page).unwrap(), "hello\n");
    assert!(
        worker
            .ctr(&["images", "list"])
            .unwrap()
            .contains("bed.test/mine:1")
    );
    let server = node
        .plane
        .server()
        .trim_start_matches("https://")
        .replace(':', "/");
    let connects = || {
        let mut connect = worker.command("timeout");
        connect.args(["2", "bash", "-c", &format!("exec 3<>/dev/tcp/{server}")]);
        testbed::cluster::run_command(&mut connect).is_ok()
    };
    assert!(connects());
    worker.cut_off(&node).unwrap();
    assert!(!connects());
    worker.reconnect(&node).unwrap();
    assert!(connects());
    let dir = worker.dir().to_owned();
    drop((worker, node));
    assert!(!dir.exists());
}

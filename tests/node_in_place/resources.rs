//! Updates of CPU and memory.

use std::fs;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::field::{Field, container, holds, restarted_once, same_container, same_pod, shared, status};

/// A container with as much of both.
fn sized(name: &str, cpu: &str, memory: &str) -> Value {
    let mut container = container(name, "kruise-test/term:1");
    container["resources"] = size(cpu, memory);
    container
}

fn size(cpu: &str, memory: &str) -> Value {
    json!({"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"cpu": cpu, "memory": memory}})
}

/// The folder of that name somewhere below `root`.
fn folder(root: &Path, name: &str) -> Option<PathBuf> {
    let found = fs::read_dir(root).ok()?.flatten().filter(|e| e.path().is_dir());
    found.into_iter().find_map(|entry| {
        let path = entry.path();
        if entry.file_name() == name {
            Some(path)
        } else {
            folder(&path, name)
        }
    })
}

/// What the kernel holds a container to: microseconds of CPU in 100 ms, and bytes.
fn limits(pod: &Pod, container: &str) -> (u64, u64) {
    let id = status(pod, container).container_id.clone().unwrap();
    let id = id.split("://").nth(1).unwrap();
    let read = |root: &str, file: &str| {
        let group = folder(Path::new(root), id).expect("the container has a group");
        let text = fs::read_to_string(group.join(file)).unwrap();
        text.split_whitespace().next().unwrap().parse().unwrap()
    };
    if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        let root = "/sys/fs/cgroup";
        return (read(root, "cpu.max"), read(root, "memory.max"));
    }
    (
        read("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us"),
        read("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
    )
}

#[tokio::test]
async fn cpu_and_memory_change_while_the_container_runs() {
    let test = shared().await;
    let containers = json!([sized("app", "100m", "64Mi"), sized("side", "100m", "64Mi")]);
    test.set("web", 1, containers, json!({})).await;
    let before = test.pod_of("web").await;
    assert_eq!(limits(&before, "app"), (10_000, 64 << 20));
    let name = before.metadata.name.as_deref().unwrap();
    for (request, cpu, memory, quota, bytes) in [
        ("10m", "200m", "64Mi", 20_000, 64 << 20),
        ("10m", "200m", "96Mi", 20_000, 96 << 20),
        ("37m", "150m", "128Mi", 15_000, 128 << 20),
        ("20m", "100m", "64Mi", 10_000, 64 << 20),
    ] {
        let change = |template: &mut Value| {
            let resources = &mut template["spec"]["containers"][0]["resources"];
            *resources = size(cpu, memory);
            resources["requests"]["cpu"] = json!(request);
        };
        test.template("web", change).await;
        test.settled("web").await;
        let after = test.get_pod(name).await;
        same_pod(&before, &after);
        same_container(&before, &after, "app");
        same_container(&before, &after, "side");
        assert_eq!(limits(&after, "app"), (quota, bytes));
        assert_eq!(limits(&after, "side"), (10_000, 64 << 20));
        let given = status(&after, "app").resources.clone().unwrap();
        let (limits, requests) = (given.limits.unwrap(), given.requests.unwrap());
        let given = [&limits["cpu"].0, &limits["memory"].0, &requests["cpu"].0];
        assert_eq!(given, [cpu, memory, request]);
    }
}

#[tokio::test]
async fn image_and_cpu_change_in_one_update() {
    let test = shared().await;
    let plain = container("plain", "kruise-test/term:1");
    let containers = json!([sized("app", "100m", "64Mi"), sized("side", "100m", "64Mi"), plain]);
    test.set("web", 1, containers, json!({})).await;
    let before = test.pod_of("web").await;
    let change = |template: &mut Value| {
        let containers = &mut template["spec"]["containers"];
        containers[0]["image"] = json!("kruise-test/term:2");
        containers[0]["resources"] = size("200m", "64Mi");
        containers[1]["resources"] = size("300m", "64Mi");
    };
    test.template("web", change).await;
    test.settled("web").await;
    let after = test.pod_of("web").await;
    same_pod(&before, &after);
    restarted_once(&before, &after, "app");
    same_container(&before, &after, "side");
    assert_eq!(limits(&after, "app"), (20_000, 64 << 20));
    assert_eq!(limits(&after, "side"), (30_000, 64 << 20));
}

/// Kubernetes gives such a Pod requests as high as its limits, and the best quality of service, for life.
#[tokio::test]
async fn limits_without_requests_take_their_requests_along() {
    let test = shared().await;
    let mut app = sized("app", "100m", "64Mi");
    app["resources"].as_object_mut().unwrap().remove("requests");
    test.set("web", 1, json!([app]), json!({})).await;
    let before = test.pod_of("web").await;
    let quality = |pod: &Pod| pod.status.as_ref().unwrap().qos_class.clone();
    assert_eq!(quality(&before).as_deref(), Some("Guaranteed"));
    let change = |template: &mut Value| {
        template["spec"]["containers"][0]["resources"]["limits"]["cpu"] = json!("200m")
    };
    test.template("web", change).await;
    test.settled("web").await;
    let after = test.pod_of("web").await;
    same_pod(&before, &after);
    same_container(&before, &after, "app");
    assert_eq!(limits(&after, "app"), (20_000, 64 << 20));
    assert_eq!(quality(&after), quality(&before));
}

/// The container wants to be restarted for its memory, so its Pod leaves its Services meanwhile.
#[tokio::test]
async fn a_container_that_asks_for_it_is_restarted_for_its_memory() {
    let test = shared().await;
    let mut app = sized("app", "100m", "64Mi");
    app["resizePolicy"] = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
    test.set("web", 1, json!([app]), json!({})).await;
    let before = test.pod_of("web").await;
    let change = |template: &mut Value| template["spec"]["containers"][0]["resources"] = size("100m", "96Mi");
    let restarted = |pod: &Pod| status(pod, "app").restart_count == 1 && holds(pod, "Ready");
    let name = before.metadata.name.clone().unwrap();
    let history = test.follow(&name, "restarted and in use", restarted);
    let ((after, history), _) = tokio::join!(history, test.template("web", change));
    test.settled("web").await;
    same_pod(&before, &after);
    restarted_once(&before, &after, "app");
    assert_eq!(limits(&after, "app"), (10_000, 96 << 20));
    let left = |pod: &Pod| !holds(pod, "InPlaceUpdateReady") && !holds(pod, "Ready");
    let out = history.iter().position(left).expect("it left its Services");
    let back = history[out..].iter().find(|pod| holds(pod, "InPlaceUpdateReady"));
    assert_eq!(
        back.map(|pod| status(pod, "app").restart_count),
        Some(1),
        "not before the restart"
    );
}

/// More than the node has.
fn too_large(template: &mut Value) {
    template["spec"]["containers"][0]["resources"]["limits"]["cpu"] = json!("1000");
    template["spec"]["containers"][0]["resources"]["requests"]["cpu"] = json!("999");
}

/// Where no Pod may be replaced, its image is updated all the same, and the CloneSet says what kubelet does.
#[tokio::test]
async fn an_infeasible_resize_does_not_hold_back_the_image_under_in_place_only_and_is_taken_back() {
    let test = shared().await;
    let containers = json!([sized("app", "100m", "64Mi")]);
    let only = json!({ "updateStrategy": { "rollingUpdate": { "podUpdatePolicy": "InPlaceOnly" } } });
    test.set("web", 1, containers, only).await;
    let before = test.pod_of("web").await;
    let change = |template: &mut Value| {
        too_large(template);
        template["spec"]["containers"][0]["image"] = json!("kruise-test/term:2");
    };
    test.template("web", change).await;
    test.says("web", "didn't have enough").await;
    test.settled("web").await;
    let updated = test.pod_of("web").await;
    same_pod(&before, &updated);
    restarted_once(&before, &updated, "app");
    assert!(holds(&updated, "Ready"));
    assert_eq!(limits(&updated, "app"), (10_000, 64 << 20));
    let back = |template: &mut Value| template["spec"]["containers"][0]["resources"] = size("100m", "64Mi");
    test.template("web", back).await;
    test.settled("web").await;
    let after = test.pod_of("web").await;
    same_pod(&before, &after);
    same_container(&updated, &after, "app");
    assert_eq!(limits(&after, "app"), (10_000, 64 << 20));
}

/// Where Pods may be replaced, another Pod is made for the size, which a node of its own may have.
#[tokio::test]
async fn an_infeasible_resize_replaces_the_pod_under_in_place_if_possible() {
    let test = shared().await;
    let containers = json!([sized("app", "100m", "64Mi")]);
    test.set("web", 1, containers, json!({})).await;
    let before = test.pod_of("web").await;
    test.template("web", too_large).await;
    let replaced = async || {
        let pods = test.pods_of("web").await;
        pods.into_iter()
            .find(|pod| pod.metadata.uid != before.metadata.uid)
    };
    let after = test.until("another Pod", replaced).await;
    let resources = json!(after.spec.unwrap().containers[0].resources);
    assert_eq!(resources["requests"]["cpu"], "999");
}

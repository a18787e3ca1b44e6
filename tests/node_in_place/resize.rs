//! Updates of CPU and memory.

use std::fs;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use crate::clone_set_ops::{
    CloneSetOps, assert_container_untouched, assert_restarted_once, assert_same_pod, condition_is_true,
    container, container_status, shared_cluster,
};

/// A container with these requests and limits.
fn container_with_limits(name: &str, cpu: &str, memory: &str) -> Value {
    let mut container = container(name, "kruise-test/term:1");
    container["resources"] = resources(cpu, memory);
    container
}

fn resources(cpu: &str, memory: &str) -> Value {
    json!({"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"cpu": cpu, "memory": memory}})
}

/// The folder of that name somewhere below `root`.
fn find_cgroup(root: &Path, name: &str) -> Option<PathBuf> {
    let found = fs::read_dir(root).ok()?.flatten().filter(|e| e.path().is_dir());
    found.into_iter().find_map(|entry| {
        let path = entry.path();
        if entry.file_name() == name {
            Some(path)
        } else {
            find_cgroup(&path, name)
        }
    })
}

/// The kernel's limits of a container: microseconds of CPU in 100 ms, and bytes.
fn cgroup_limits(pod: &Pod, container: &str) -> (u64, u64) {
    let id = container_status(pod, container).container_id.clone().unwrap();
    let id = id.split("://").nth(1).unwrap();
    let read = |root: &str, file: &str| {
        let group = find_cgroup(Path::new(root), id).expect("the container has a group");
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
async fn resize_changes_cgroup_without_restart() {
    let test = shared_cluster().await;
    let containers = json!([
        container_with_limits("app", "100m", "64Mi"),
        container_with_limits("side", "100m", "64Mi")
    ]);
    test.create_set("web", 1, containers, json!({})).await;
    let before = test.single_pod("web").await;
    assert_eq!(cgroup_limits(&before, "app"), (10_000, 64 << 20));
    let name = before.metadata.name.as_deref().unwrap();
    for (request, cpu, memory, quota, bytes) in [
        ("10m", "200m", "64Mi", 20_000, 64 << 20),
        ("10m", "200m", "96Mi", 20_000, 96 << 20),
        ("37m", "150m", "128Mi", 15_000, 128 << 20),
        ("20m", "100m", "64Mi", 10_000, 64 << 20),
    ] {
        let change = |template: &mut Value| {
            let current = &mut template["spec"]["containers"][0]["resources"];
            *current = resources(cpu, memory);
            current["requests"]["cpu"] = json!(request);
        };
        test.update_template("web", change).await;
        test.wait_settled("web").await;
        let after = test.get_pod(name).await;
        assert_same_pod(&before, &after);
        assert_container_untouched(&before, &after, "app");
        assert_container_untouched(&before, &after, "side");
        assert_eq!(cgroup_limits(&after, "app"), (quota, bytes));
        assert_eq!(cgroup_limits(&after, "side"), (10_000, 64 << 20));
        let reported = container_status(&after, "app").resources.clone().unwrap();
        let (limits, requests) = (reported.limits.unwrap(), reported.requests.unwrap());
        let reported = [&limits["cpu"].0, &limits["memory"].0, &requests["cpu"].0];
        assert_eq!(reported, [cpu, memory, request]);
    }
}

#[tokio::test]
async fn image_update_and_resize_happen_together() {
    let test = shared_cluster().await;
    let plain = container("plain", "kruise-test/term:1");
    let containers = json!([
        container_with_limits("app", "100m", "64Mi"),
        container_with_limits("side", "100m", "64Mi"),
        plain
    ]);
    test.create_set("web", 1, containers, json!({})).await;
    let before = test.single_pod("web").await;
    let change = |template: &mut Value| {
        let containers = &mut template["spec"]["containers"];
        containers[0]["image"] = json!("kruise-test/term:2");
        containers[0]["resources"] = resources("200m", "64Mi");
        containers[1]["resources"] = resources("300m", "64Mi");
    };
    test.update_template("web", change).await;
    test.wait_settled("web").await;
    let after = test.single_pod("web").await;
    assert_same_pod(&before, &after);
    assert_restarted_once(&before, &after, "app");
    assert_container_untouched(&before, &after, "side");
    assert_eq!(cgroup_limits(&after, "app"), (20_000, 64 << 20));
    assert_eq!(cgroup_limits(&after, "side"), (30_000, 64 << 20));
}

/// Kubernetes sets such a Pod's requests to its limits, and QoS class Guaranteed, which never changes.
#[tokio::test]
async fn resize_of_limits_keeps_guaranteed_qos() {
    let test = shared_cluster().await;
    let mut app = container_with_limits("app", "100m", "64Mi");
    app["resources"].as_object_mut().unwrap().remove("requests");
    test.create_set("web", 1, json!([app]), json!({})).await;
    let before = test.single_pod("web").await;
    let qos_class = |pod: &Pod| pod.status.as_ref().unwrap().qos_class.clone();
    assert_eq!(qos_class(&before).as_deref(), Some("Guaranteed"));
    let change = |template: &mut Value| {
        template["spec"]["containers"][0]["resources"]["limits"]["cpu"] = json!("200m")
    };
    test.update_template("web", change).await;
    test.wait_settled("web").await;
    let after = test.single_pod("web").await;
    assert_same_pod(&before, &after);
    assert_container_untouched(&before, &after, "app");
    assert_eq!(cgroup_limits(&after, "app"), (20_000, 64 << 20));
    assert_eq!(qos_class(&after), qos_class(&before));
}

/// The container's resize policy restarts it for memory, so its Pod leaves its Services meanwhile.
#[tokio::test]
async fn resize_policy_restarts_container_for_memory() {
    let test = shared_cluster().await;
    let mut app = container_with_limits("app", "100m", "64Mi");
    app["resizePolicy"] = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
    test.create_set("web", 1, json!([app]), json!({})).await;
    let before = test.single_pod("web").await;
    let change =
        |template: &mut Value| template["spec"]["containers"][0]["resources"] = resources("100m", "96Mi");
    let restarted =
        |pod: &Pod| container_status(pod, "app").restart_count == 1 && condition_is_true(pod, "Ready");
    let name = before.metadata.name.clone().unwrap();
    let history = test.watch_until(&name, "restarted and in use", restarted);
    let ((after, history), _) = tokio::join!(history, test.update_template("web", change));
    test.wait_settled("web").await;
    assert_same_pod(&before, &after);
    assert_restarted_once(&before, &after, "app");
    assert_eq!(cgroup_limits(&after, "app"), (10_000, 96 << 20));
    let is_out_of_service =
        |pod: &Pod| !condition_is_true(pod, "InPlaceUpdateReady") && !condition_is_true(pod, "Ready");
    let left_at = history
        .iter()
        .position(is_out_of_service)
        .expect("it left its Services");
    let returned = history[left_at..]
        .iter()
        .find(|pod| condition_is_true(pod, "InPlaceUpdateReady"));
    assert_eq!(
        returned.map(|pod| container_status(pod, "app").restart_count),
        Some(1),
        "not before the restart"
    );
}

/// More than the node has.
fn request_too_much_cpu(template: &mut Value) {
    template["spec"]["containers"][0]["resources"]["limits"]["cpu"] = json!("1000");
    template["spec"]["containers"][0]["resources"]["requests"]["cpu"] = json!("999");
}

/// If no Pod may be recreated, its image is updated all the same, and the CloneSet reports kubelet's state of the
/// resize.
#[tokio::test]
async fn infeasible_resize_in_place_only_updates_image() {
    let test = shared_cluster().await;
    let containers = json!([container_with_limits("app", "100m", "64Mi")]);
    let in_place_only =
        json!({ "updateStrategy": { "rollingUpdate": { "podUpdatePolicy": "InPlaceOnly" } } });
    test.create_set("web", 1, containers, in_place_only).await;
    let before = test.single_pod("web").await;
    let change = |template: &mut Value| {
        request_too_much_cpu(template);
        template["spec"]["containers"][0]["image"] = json!("kruise-test/term:2");
    };
    test.update_template("web", change).await;
    test.wait_waiting_message("web", "didn't have enough").await;
    test.wait_settled("web").await;
    let updated = test.single_pod("web").await;
    assert_same_pod(&before, &updated);
    assert_restarted_once(&before, &updated, "app");
    assert!(condition_is_true(&updated, "Ready"));
    assert_eq!(cgroup_limits(&updated, "app"), (10_000, 64 << 20));
    let roll_back =
        |template: &mut Value| template["spec"]["containers"][0]["resources"] = resources("100m", "64Mi");
    test.update_template("web", roll_back).await;
    test.wait_settled("web").await;
    let after = test.single_pod("web").await;
    assert_same_pod(&before, &after);
    assert_container_untouched(&updated, &after, "app");
    assert_eq!(cgroup_limits(&after, "app"), (10_000, 64 << 20));
}

/// If Pods may be recreated, a new Pod is created with the size; another node may have room for it.
#[tokio::test]
async fn infeasible_resize_in_place_if_possible_replaces_pod() {
    let test = shared_cluster().await;
    let containers = json!([container_with_limits("app", "100m", "64Mi")]);
    test.create_set("web", 1, containers, json!({})).await;
    let before = test.single_pod("web").await;
    test.update_template("web", request_too_much_cpu).await;
    let find_replacement = async || {
        let pods = test.pods_of("web").await;
        pods.into_iter()
            .find(|pod| pod.metadata.uid != before.metadata.uid)
    };
    let after = test.poll_until("another Pod", find_replacement).await;
    let resources = json!(after.spec.unwrap().containers[0].resources);
    assert_eq!(resources["requests"]["cpu"], "999");
}

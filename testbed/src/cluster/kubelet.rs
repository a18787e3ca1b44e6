//! kubelet and kube-proxy.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use serde_json::json;

use super::component::Component;
use super::containerd::SOCKET;
use super::control_plane::ControlPlane;
use crate::parts::{Cache, kubernetes};
use crate::sandbox::{Network, Sandbox};
use crate::wait;

/// Name of the node beside the control plane, which is the only one in most clusters.
pub const NODE_NAME: &str = "node-1";

pub(super) fn kubelet(
    cache: &Cache,
    plane: &ControlPlane,
    sandbox: &Arc<Sandbox>,
    net: &Network,
    node_name: &str,
) -> Result<Component> {
    let dir = sandbox.dir();
    create_cgroups(&sandbox.name())?;
    let user = format!("system:node:{node_name}");
    let kubeconfig = plane.kubeconfig_as(&format!("kubelet-{node_name}"), &user, &["system:nodes"])?;
    let resolv = dir.join("resolv.conf");
    fs::write(&resolv, "nameserver 10.96.0.10\n")?;
    let config = dir.join("kubelet.json");
    fs::write(
        &config,
        kubelet_config(cache, plane, &sandbox.name(), &resolv).to_string(),
    )?;
    Ok(Component::new(sandbox, "kubelet", cache.kubernetes("kubelet"))
        .args([
            format!("--config={}", config.display()),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--hostname-override={node_name}"),
            format!("--node-ip={}", net.sandbox_address()),
        ])
        .env("PATH", system_path()))
}

pub(super) fn proxy(
    cache: &Cache,
    plane: &ControlPlane,
    sandbox: &Arc<Sandbox>,
    net: &Network,
    node_name: &str,
) -> Result<Component> {
    let config = sandbox.dir().join("kube-proxy.json");
    let settings = json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": { "kubeconfig": plane.kubeconfig() },
        "mode": "iptables",
        "clusterCIDR": net.pod_cidr(),
        "hostnameOverride": node_name,
        "conntrack": { "maxPerCore": 0, "min": 0 },
        "iptables": { "minSyncPeriod": "0s", "syncPeriod": "30s" },
    });
    fs::write(&config, settings.to_string())?;
    Ok(
        Component::new(sandbox, "kube-proxy", cache.kubernetes("kube-proxy"))
            .args([format!("--config={}", config.display())])
            .env("PATH", system_path()),
    )
}

/// Waits until kubelet has set the node's Ready condition to True.
pub(super) fn wait_ready(plane: &ControlPlane, kubelet: &mut Component, node_name: &str) -> Result<()> {
    let path = r#"-o=jsonpath={.status.conditions[?(@.type=="Ready")].status}"#;
    let outcome = wait::until("the node's Ready condition", wait::WAIT_TIMEOUT, || {
        anyhow::ensure!(kubelet.is_running(), "kubelet ended");
        let ready = plane.kubectl(&["get", "node", node_name, path]);
        Ok(ready.is_ok_and(|status| status == "True").then_some(()))
    });
    outcome.with_context(|| format!("end of kubelet's log:\n{}", kubelet.tail()))
}

/// PATH with the folders of administrators' programs.
fn system_path() -> String {
    format!("/usr/sbin:/sbin:{}", std::env::var("PATH").unwrap_or_default())
}

fn kubelet_config(cache: &Cache, plane: &ControlPlane, cgroup: &str, resolv: &Path) -> serde_json::Value {
    let mut config = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": false },
            "x509": { "clientCAFile": plane.ca() },
        },
        "authorization": { "mode": "AlwaysAllow" },
        "containerRuntimeEndpoint": format!("unix://{SOCKET}"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": format!("/{cgroup}"),
        "enforceNodeAllocatable": ["none"],
        "failSwapOn": false,
        "resolvConf": resolv,
        "serializeImagePulls": false,
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
        "kubeAPIQPS": 200,
        "kubeAPIBurst": 400,
        // For the figures of a full node; the default is 110.
        "maxPods": 600,
        "syncFrequency": "10s",
        "nodeStatusUpdateFrequency": "2s",
        // Tests remove images, not image garbage collection; and a full disk of the machine must not affect the node.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": { "memory.available": "10Mi" },
        "shutdownGracePeriod": "0s",
    });
    // Since 1.35 kubelet refuses hosts with cgroup v1 by default.
    if kubernetes::at_least(cache.release(), 35) {
        config["failCgroupV1"] = json!(false);
    }
    config
}

/// cgroup v1 needs the root group in every hierarchy, with CPUs and memory nodes set; v2 sets its own.
fn create_cgroups(name: &str) -> Result<()> {
    let root = Path::new("/sys/fs/cgroup");
    if root.join("cgroup.controllers").exists() {
        return Ok(fs::create_dir_all(root.join(name))?);
    }
    for hierarchy in fs::read_dir(root)?.flatten().filter(|e| e.path().is_dir()) {
        let group = hierarchy.path().join(name);
        fs::create_dir_all(&group)?;
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if let Ok(value) = fs::read(hierarchy.path().join(file)) {
                fs::write(group.join(file), value)?;
            }
        }
    }
    Ok(())
}

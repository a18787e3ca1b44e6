//! containerd with runc and a bridge network, as on a node.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};

use super::component::Component;
use crate::parts::Cache;
use crate::sandbox::{Network, Sandbox};

/// The runtime's socket, as a path inside the sandbox.
pub(super) const SOCKET: &str = "/run/containerd/containerd.sock";

/// Debian suites and their containerd series.
pub const CONTAINERD_VERSIONS: [(&str, &str); 3] = [("bookworm", "1.6"), ("trixie", "1.7"), ("forky", "2.")];

pub(super) fn component(
    cache: &Cache,
    sandbox: &Arc<Sandbox>,
    net: &Network,
    suite: &str,
) -> Result<Component> {
    let dir = sandbox.dir();
    let programs = cache.debian_package_dir(suite, "containerd").join("usr/bin");
    let cni = dir.join("cni");
    fs::create_dir_all(&cni)?;
    fs::write(cni.join("10-bridge.conflist"), network_config(net))?;
    let config = dir.join("containerd.toml");
    fs::write(&config, containerd_config(dir, suite == "forky"))?;
    let path = std::env::var("PATH").unwrap_or_default();
    let socket = dir.join("run/containerd.sock");
    Ok(Component::new(sandbox, "containerd", programs.join("containerd"))
        .args([Path::new("--config"), &config])
        .env("PATH", format!("{}:/usr/sbin:/sbin:{path}", programs.display()))
        .ready(move || UnixStream::connect(&socket).is_ok()))
}

/// Makes the folders that node programs write to private to the sandbox. The runtime's socket is in `run` of the
/// sandbox's folder.
pub(super) fn mount_private_dirs(sandbox: &Sandbox) -> Result<()> {
    let dir = sandbox.dir();
    for part in ["run", "kubelet", "kept-logs"] {
        fs::create_dir_all(dir.join(part))?;
    }
    let script = r#"set -e
dir=$1
mount -t tmpfs tmpfs /run; mkdir -p /run/containerd /run/netns /run/lock
mount --bind "$dir/run" /run/containerd
case $dir in /var/*) ;; *) mount -t tmpfs tmpfs /var/lib; mount -t tmpfs tmpfs /var/log ;; esac
mkdir -p /var/lib/kubelet /var/log/pods
mount --bind "$dir/kubelet" /var/lib/kubelet; mount --make-rshared /var/lib/kubelet
# Where kube-controller-manager makes the volumes of claims.
mkdir -p /tmp/hostpath_pv; mount -t tmpfs tmpfs /tmp/hostpath_pv"#;
    let mut command = sandbox.command("bash");
    command.args(["-c", script, "isolate"]).arg(dir);
    crate::process::run_command(&mut command)
        .context("cannot make the node's private folders")
        .map(drop)
}

fn containerd_config(dir: &Path, is_v2: bool) -> String {
    let registry = dir.join("registries.d");
    let (version, runtime, images, cni) = if is_v2 {
        (
            3,
            "io.containerd.cri.v1.runtime",
            "io.containerd.cri.v1.images",
            "bin_dirs = [\"/usr/lib/cni\"]",
        )
    } else {
        (
            2,
            "io.containerd.grpc.v1.cri",
            "io.containerd.grpc.v1.cri",
            "bin_dir = \"/usr/lib/cni\"",
        )
    };
    let pause = if is_v2 {
        format!("[plugins.\"{images}\".pinned_images]\nsandbox = \"registry.k8s.io/pause:3.10\"\n")
    } else {
        String::new()
    };
    let sandbox_image = if is_v2 {
        ""
    } else {
        "sandbox_image = \"registry.k8s.io/pause:3.10\"\n"
    };
    format!(
        r#"version = {version}
root = "{root}"
state = "/run/containerd"
[grpc]
address = "{SOCKET}"
[plugins."{runtime}"]
restrict_oom_score_adj = true
{sandbox_image}[plugins."{runtime}".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."{runtime}".cni]
{cni}
conf_dir = "{conf}"
{pause}[plugins."{images}".registry]
config_path = "{registry}"
"#,
        root = dir.join("containerd").display(),
        conf = dir.join("cni").display(),
        registry = registry.display(),
    )
}

fn network_config(net: &Network) -> String {
    serde_json::json!({
        "cniVersion": "0.4.0",
        "name": "bed",
        "plugins": [{
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": true,
            "hairpinMode": true,
            "ipam": {
                "type": "host-local",
                "dataDir": "/run/cni",
                "ranges": [[{ "subnet": net.pod_cidr() }]],
                "routes": [{ "dst": "0.0.0.0/0" }],
            },
        }],
    })
    .to_string()
}

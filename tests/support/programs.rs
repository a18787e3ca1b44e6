//! Our programs as processes of a node, with their own accounts, and what they need.

use std::path::{Path, PathBuf};

use testbed::cluster::{Component, NODE_NAME, Node, TokenBinding};

use super::manager::Manager;
use super::readiness::is_ready;
use super::waits::log_tails;

/// The default class of claims: kube-controller-manager provisions the volumes.
pub const STORAGE_CLASS: &str = r#"{"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
    "metadata": {"name": "folders", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
    "provisioner": "kubernetes.io/host-path"}"#;

/// A node with our CRDs, roles and policies, and our daemon as a process of it.
pub fn start_node() -> (Node, Component) {
    let node = Node::start().expect("the node starts");
    // Not `default` itself: our programs run as processes here, and its Pods would have no image.
    for what in ["default/namespaces.yaml", "crds", "rbac", "policies"] {
        install(&node, what);
    }
    let mut daemon = daemon(&node);
    daemon.start().expect("the daemon starts");
    (node, daemon)
}

/// Installs what else CloneSets need, and starts our manager; returns when it is leader.
pub fn start_manager(node: &Node) -> Manager {
    install(node, "webhooks");
    node.plane.apply(STORAGE_CLASS).expect("a storage class");
    let mut manager = manager(node, "kruise-manager", 0);
    manager.start().expect("the manager starts");
    manager.wait_for_readyz_text("leading");
    manager
}

/// Applies a file or folder of `deploy`.
pub fn install(node: &Node, what: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .join("deploy")
        .join(what);
    let flag = if path.is_dir() { "-k" } else { "-f" };
    let applied = node.plane.kubectl(&["apply", flag, &path.display().to_string()]);
    applied.expect("deploy/ can be applied");
}

/// Kubeconfig file of the daemon: with the roles of its account, and the fence around its node.
pub fn daemon_kubeconfig(node: &Node) -> PathBuf {
    let bound = TokenBinding::Node(NODE_NAME);
    let file = node.plane.kubeconfig_for("kruise-system", "kruise-daemon", bound);
    file.unwrap()
}

/// Our daemon, not started yet.
pub fn daemon(node: &Node) -> Component {
    daemon_with_kubeconfig(node, &daemon_kubeconfig(node))
}

/// The same with another kubeconfig file.
pub fn daemon_with_kubeconfig(node: &Node, kubeconfig: &Path) -> Component {
    let plane = &node.plane;
    let health = format!("{}:10221", node_address(node));
    plane
        .component("kruise-daemon", crate::binaries::daemon())
        .args([
            format!("--addr={health}"),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--control-socket={}", plane.dir().join("control.sock").display()),
            "--socket-file=/run/containerd/containerd.sock".into(),
        ])
        .env("NODE_NAME", NODE_NAME)
        .env("RUST_LOG", "info,kruise=debug")
        .ready(move || is_ready(&health))
}

/// Log files of our programs.
pub fn log_files(node: &Node) -> Vec<PathBuf> {
    let names = [
        "kruise-manager",
        "kruise-manager-2",
        "kruise-webhook",
        "kruise-daemon",
    ];
    let file = |name| node.plane.dir().join(name).with_extension("log");
    names.map(file).to_vec()
}

/// The last lines of these logs.
pub fn program_log_tails(node: &Node) -> String {
    log_tails(log_files(node))
}

/// Address at which the host reaches listeners on the node.
pub fn node_address(node: &Node) -> &str {
    let server = node.plane.server().trim_start_matches("https://");
    server.rsplit_once(':').unwrap().0
}

/// A manager as a process of the node, not started yet; `port_offset` separates its ports from those of others.
pub fn manager(node: &Node, name: &'static str, port_offset: u16) -> Manager {
    Manager::new(
        &node.plane,
        name,
        &health_address(node, port_offset),
        9443 + port_offset,
    )
}

/// One role of a manager as a process of the node, not started yet; its account is `name` without the suffix `-2`.
pub fn manager_with_role(node: &Node, name: &'static str, role: &str, port_offset: u16) -> Manager {
    let account = name.trim_end_matches("-2");
    Manager::with_role_at(
        &node.plane,
        (name, account),
        role,
        &health_address(node, port_offset),
        9443,
    )
}

/// Address at which a manager serves its health.
fn health_address(node: &Node, port_offset: u16) -> String {
    format!("{}:{}", node_address(node), 8000 + port_offset)
}

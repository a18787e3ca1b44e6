//! Networks as in real clusters: without IPv4, and with connections that are dropped without an error.

use std::path::Path;
use std::time::{Duration, Instant};

use kruise_api::node_image::NodeImage;
use kube::api::Api;
use serde_json::{Value, json};
use testbed::cluster::{ControlPlaneOptions, TokenBinding, wait};

use crate::manager::Manager;
use crate::test_cluster::{TestCluster, create_node, wait_until};
use crate::waits::WAIT_TIMEOUT;
use support::conversion::{self, wait_for_conversion};

/// Port of the API server in a bed with its own network.
const API_SERVER: &str = "6443";
/// TCP gives a silent connection up after 30 s. Without that, a silent watch is started again after 150 s, and the
/// request for it waits for 60 s.
const DETECTION_LIMIT: Duration = Duration::from_secs(120);

fn ipv6_cluster() -> TestCluster {
    TestCluster::with_options(ControlPlaneOptions {
        ipv6: true,
        ..ControlPlaneOptions::default()
    })
}

#[tokio::test]
async fn ipv6_only_cluster_is_served() {
    let cluster = ipv6_cluster();
    let plane = &cluster.plane;
    let v4 = plane.run_inside("ip", &["-4", "-oneline", "address"]).unwrap();
    assert_eq!(v4.trim(), "", "the bed has an IPv4 address");
    let admin = cluster.admin().await;
    let mut manager = Manager::on_ipv6(plane, "kruise-manager");
    manager.start().unwrap();
    // Shows that the API server reaches the webhooks, and the manager the API server.
    wait_for_conversion(plane, &conversion::CONVERTED_KINDS);
    create_node(&admin, "six", json!({}), true).await;
    let images = Api::<NodeImage>::all(admin.client.clone());
    wait_until(&images, "six", "there", |_| true).await;

    // As deployed: the only IPv4 address that it needs is the loopback that every node has.
    plane
        .run_inside("ip", &["address", "add", "127.0.0.1/8", "dev", "lo"])
        .unwrap();
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/daemon/daemonset.yaml");
    let manifest: Value = serde_yaml::from_str(&std::fs::read_to_string(manifest).unwrap()).unwrap();
    let container = &manifest["spec"]["template"]["spec"]["containers"][0];
    let args: Vec<String> = serde_json::from_value(container["args"].clone()).unwrap();
    let probe = &container["readinessProbe"]["httpGet"];
    let account = plane.kubeconfig_for("kruise-system", "kruise-daemon", TokenBinding::Node("six"));
    let mut daemon = plane
        .component("kruise-daemon", support::binaries::daemon())
        .args(args)
        .args([
            format!("--kubeconfig={}", account.unwrap().display()),
            format!("--control-socket={}", plane.dir().join("control.sock").display()),
        ])
        .env("NODE_NAME", "six");
    daemon.spawn().unwrap();
    let (host, port) = (probe["host"].as_str().unwrap(), &probe["port"]);
    let http_get = format!(
        "exec 3<>/dev/tcp/{host}/{port}; printf 'GET {} HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3",
        probe["path"].as_str().unwrap()
    );
    let readiness = || plane.run_inside("bash", &["-c", &http_get]).unwrap_or_default();
    let expected = "ok watches: ContainerRecreateRequest, NodeImage, NodePodProbe, Pod";
    let result = wait::until(expected, WAIT_TIMEOUT, || {
        Ok(readiness().contains(expected).then_some(()))
    });
    assert!(result.is_ok(), "it says {:?}\n{}", readiness(), daemon.tail());
}

/// Drops every packet between the programs of the bed and the API server; they get no error.
fn drop_packets(cluster: &TestCluster) {
    for port in ["--dport", "--sport"] {
        let rule = [
            "-A", "INPUT", "-i", "lo", "-p", "tcp", port, API_SERVER, "-j", "DROP",
        ];
        cluster.plane.run_inside("/usr/sbin/ip6tables", &rule).unwrap();
    }
}

fn restore_packets(cluster: &TestCluster) {
    cluster
        .plane
        .run_inside("/usr/sbin/ip6tables", &["-F", "INPUT"])
        .unwrap();
}

#[tokio::test]
async fn silently_dropped_connections_are_reestablished() {
    assert!(Path::new("/usr/sbin/ip6tables").exists(), "install iptables");
    let cluster = ipv6_cluster();
    let admin = cluster.admin().await;
    let mut manager = Manager::on_ipv6(&cluster.plane, "kruise-manager");
    manager.start().unwrap();
    let images = Api::<NodeImage>::all(admin.client.clone());
    create_node(&admin, "before", json!({}), true).await;
    wait_until(&images, "before", "there", |_| true).await;

    let errors = || manager.metric_sum("kruise_watch_errors_total");
    let before = errors();
    let dropped = Instant::now();
    drop_packets(&cluster);
    create_node(&admin, "meanwhile", json!({}), true).await;
    let detected = wait::until("each watch that is cut fails", WAIT_TIMEOUT, || {
        Ok((errors() >= before + 8).then_some(()))
    });
    assert!(
        detected.is_ok(),
        "{} errors\n{}",
        errors() - before,
        manager.tail()
    );
    let after = dropped.elapsed();
    println!("detected after {after:?}");
    assert!(after < DETECTION_LIMIT, "{after:?}");
    restore_packets(&cluster);
    wait_until(&images, "meanwhile", "there", |_| true).await;
    manager.wait_for_readyz_text("ok watches: ");
}

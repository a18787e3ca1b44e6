//! Networks as clusters have them: without IPv4, and with connections that are cut without a word.

use std::path::Path;

use kruise_api::node_image::NodeImage;
use kube::api::Api;
use serde_json::{Value, json};
use testbed::cluster::{Bound, Options, wait};

use crate::manager::Manager;
use crate::waits::PATIENCE;
use crate::world::{World, node, until};
use support::converted::{self, until_converted};

/// The port of the API server in a bed with a network of its own.
const API_SERVER: &str = "6443";

fn ipv6() -> World {
    World::with(Options {
        ipv6: true,
        ..Options::default()
    })
}

#[tokio::test]
async fn a_cluster_that_has_no_ipv4_is_served() {
    let world = ipv6();
    let plane = &world.plane;
    let v4 = plane.inside("ip", &["-4", "-oneline", "address"]).unwrap();
    assert_eq!(v4.trim(), "", "the bed has an IPv4 address");
    let admin = world.admin().await;
    let mut manager = Manager::on_ipv6(plane, "kruise-manager");
    manager.start().unwrap();
    // The API server reaches the webhooks, and the manager the API server.
    until_converted(plane, &converted::ALL);
    node(&admin, "six", json!({}), true).await;
    let images = Api::<NodeImage>::all(admin.client.clone());
    until(&images, "six", "there", |_| true).await;

    // As it is deployed: of IPv4 it needs the loopback that every node has.
    plane
        .inside("ip", &["address", "add", "127.0.0.1/8", "dev", "lo"])
        .unwrap();
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/daemon/daemonset.yaml");
    let manifest: Value = serde_yaml::from_str(&std::fs::read_to_string(manifest).unwrap()).unwrap();
    let container = &manifest["spec"]["template"]["spec"]["containers"][0];
    let args: Vec<String> = serde_json::from_value(container["args"].clone()).unwrap();
    let probe = &container["readinessProbe"]["httpGet"];
    let account = plane.kubeconfig_for("kruise-system", "kruise-daemon", Bound::Node("six"));
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
    let ask = format!(
        "exec 3<>/dev/tcp/{host}/{port}; printf 'GET {} HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3",
        probe["path"].as_str().unwrap()
    );
    let readiness = || plane.inside("bash", &["-c", &ask]).unwrap_or_default();
    let words = "ok watches: ContainerRecreateRequest, NodeImage, Pod";
    let says = wait::until(words, PATIENCE, || Ok(readiness().contains(words).then_some(())));
    assert!(says.is_ok(), "it says {:?}\n{}", readiness(), daemon.tail());
}

/// Drops every packet between the programs of the bed and its API server; they get no error.
fn cut(world: &World) {
    for port in ["--dport", "--sport"] {
        let rule = [
            "-A", "INPUT", "-i", "lo", "-p", "tcp", port, API_SERVER, "-j", "DROP",
        ];
        world.plane.inside("/usr/sbin/ip6tables", &rule).unwrap();
    }
}

fn mend(world: &World) {
    world
        .plane
        .inside("/usr/sbin/ip6tables", &["-F", "INPUT"])
        .unwrap();
}

#[tokio::test]
async fn connections_that_are_cut_without_a_word_are_found_and_made_again() {
    assert!(Path::new("/usr/sbin/ip6tables").exists(), "install iptables");
    let world = ipv6();
    let admin = world.admin().await;
    let mut manager = Manager::on_ipv6(&world.plane, "kruise-manager");
    manager.start().unwrap();
    let images = Api::<NodeImage>::all(admin.client.clone());
    node(&admin, "before", json!({}), true).await;
    until(&images, "before", "there", |_| true).await;

    let errors = || manager.count("kruise_watch_errors_total");
    let before = errors();
    cut(&world);
    node(&admin, "meanwhile", json!({}), true).await;
    let found = wait::until("each watch that is cut fails", PATIENCE, || {
        Ok((errors() >= before + 8).then_some(()))
    });
    assert!(found.is_ok(), "{} errors\n{}", errors() - before, manager.tail());
    mend(&world);
    until(&images, "meanwhile", "there", |_| true).await;
    manager.until_it_says("ok watches: ");
}

//! Tests that end or stop parts of the bed, one after the other. By their name they come first, so that the others
//! run side by side without a break.

mod manager_kill;
mod outages;

use std::ops::Deref;

use testbed::cluster::Image;

use crate::workloads::{NodeNamespace, TestCluster};

/// An image like no other, in this bed's registry: kubelet holds a container back for 10 s that comes back with an
/// image it had lately.
fn push_unique_image(ns: &NodeNamespace<impl Deref<Target = TestCluster>>, name: &str) -> String {
    let image = Image::busybox().script(&format!(
        "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done; : {name}"
    ));
    let name = format!("rollout/{name}:1");
    ns.cluster.node.runtime.registry.push(&name, &image).unwrap();
    name
}

//! Tests that stop parts of the bed, one after the other. Their names sort first, so that the others run in parallel
//! without interruption.

mod manager_kill;
mod outages;

use std::ops::Deref;

use testbed::cluster::Image;

use crate::workloads::{NodeNamespace, TestCluster};

/// An image of its own in this bed's registry: kubelet delays a container by 10 s when it returns to an image that it
/// had recently.
fn push_unique_image(ns: &NodeNamespace<impl Deref<Target = TestCluster>>, name: &str) -> String {
    let image = Image::busybox().script(&format!(
        "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done; : {name}"
    ));
    let name = format!("rollout/{name}:1");
    ns.cluster.node.runtime.registry.push(&name, &image).unwrap();
    name
}

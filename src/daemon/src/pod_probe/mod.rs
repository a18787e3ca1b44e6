//! Runs the probes that this node's NodePodProbe lists.
//!
//! In:  our NodePodProbe (watch), the node's Pods (watch), the Pods' own servers, commands in their containers.
//! Out: NodePodProbe status, one event for each transition, metric `pod_probes`.
//!
//! Whether a container runs, its ID and its start are kubelet's, from the Pod's status: a command is the only call to
//! the runtime. A probe is sent to the address of a Pod of this node, never to another host, whatever the object says.
//! See [`plan`] for every decision.

mod controller;
mod handler;
pub mod plan;
pub(crate) mod spec;

use kube::Api;
use kube::api::ListParams;

use super::Context;
use super::pods::NodePod;
use kruise_api::node_pod_probe::NodePodProbe;
use kruise_cluster::Store;

/// Probes until shutdown; `pods` is the store of this node's Pods. Without the CRD, or the role, there is nothing to do.
pub async fn run(mut ctx: Context, pods: Store<NodePod>) {
    // OpenKruise's source component of these events; clients may use it in field selectors.
    ctx.cluster.events = ctx.cluster.events.with_component("kruise-daemon-podprobe");
    let api: Api<NodePodProbe> = Api::all(ctx.cluster.client.clone());
    let selector = ListParams::default().fields(&format!("metadata.name={}", ctx.node_name));
    let (probes, watch) = ctx
        .cluster
        .optional_reflector(api, selector, Some::<NodePodProbe>);
    tokio::select! {
        () = watch => {}
        () = controller::PodProbeController::new(ctx, pods, probes.subscribe()).run() => {}
    }
}

//! Gathers the inputs of a plan: what the index, the revisions and earlier reconciles hold of one CloneSet.

use std::collections::BTreeMap;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Instant;

use jiff::Timestamp;
use serde_json::Value;

use super::context::CloneSetContext;
use super::history::RevisionHistory;
use super::observe::OwnedObjects;
use super::plan::{Observed, Plan, plan};
use super::reconcile_state::ReconcileState;
use kruise_api::json;
use kruise_cluster::Key;
use kruise_workload::in_place::Pod;

/// The plan and the Pods that it covers. Its inputs, above all parsed revisions, are dropped before the plan is
/// executed.
pub fn make_plan(
    ctx: &CloneSetContext<'_>,
    owned: OwnedObjects,
    history: &RevisionHistory,
    state: &ReconcileState,
    now: Timestamp,
) -> (Plan, Vec<Arc<Pod>>) {
    let observed = build_observed(ctx, owned, history, state);
    (plan(&observed, now), observed.pods)
}

/// All inputs of the plan.
fn build_observed(
    ctx: &CloneSetContext<'_>,
    owned: OwnedObjects,
    history: &RevisionHistory,
    state: &ReconcileState,
) -> Observed {
    let template = &ctx.set.spec.template;
    let spread = template["spec"]["topologySpreadConstraints"].is_array();
    let nodes = owned
        .pods
        .iter()
        .filter_map(|pod| pod.node.as_ref())
        .filter(|_| spread);
    let labels = |name: &String| {
        let node = ctx.manager.stores.nodes.get(&Key::cluster_scoped(name))?;
        Some((name.clone(), node.labels.clone()))
    };
    let nodes: BTreeMap<_, _> = nodes.filter_map(labels).collect();
    let (revisions, unread) = history.plan_revisions(&owned.pods);
    Observed {
        set: Arc::clone(ctx.set),
        revisions,
        unread_revisions: unread,
        pods: owned.pods,
        claims: owned.claims,
        claims_owned_by_pod: owned.claims_owned_by_pod,
        current_revision: history.current_revision.clone(),
        update_revision: history.update_revision.clone(),
        template_status: history.template_status.clone(),
        collision_count: history.collisions,
        max_pod_memory: history.max_revision_memory() + estimate_memory(&ctx.set.spec.volume_claim_templates),
        jobs: owned.jobs,
        nodes,
        failures: state.failures.clone(),
        unfinished: state.unfinished.clone(),
        features: ctx.shared.features,
        rng_seed: ctx.shared.rng_seed.hash_one(Instant::now()),
    }
}

/// Estimated memory of parsed values, in bytes.
fn estimate_memory(values: &[Value]) -> usize {
    let texts = values.iter().map(Value::to_string);
    texts.map(|text| json::estimate_memory(text.as_bytes())).sum()
}

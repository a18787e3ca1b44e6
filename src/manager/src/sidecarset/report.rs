//! Writes the status of a set, and its events.

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Api;

use super::observe::versioned_set;
use super::{SetContext, SetState};
use kruise_api::sidecarset::SidecarSet;
use kruise_cluster::{Error, EventType, Key, write};
use kruise_workload::in_place::Pod;
use kruise_workload::sidecarset::plan::{EVENT_NOT_UPGRADABLE, Plan};

/// Fields of the status that may be absent.
const OPTIONAL_STATUS_FIELDS: [&str; 4] = [
    "observedGeneration",
    "updatedReadyPods",
    "latestRevision",
    "collisionCount",
];

/// Writes the status if it changed and the write is due; returns how long to wait if it is not.
///
/// # Errors
/// If the write failed.
pub async fn update_status(
    ctx: &SetContext<'_>,
    plan: &Plan,
    _pods: &[(Key, Arc<Pod>)],
    state: &mut SetState,
) -> Result<Option<Duration>, Error> {
    let Some(status) = &plan.status else {
        state.status_pacer.unchanged();
        return Ok(None);
    };
    let now = Instant::now();
    let wait = state.status_pacer.delay_of_change(now, false);
    let first = ctx.set.status.is_none();
    if !wait.is_zero() && !first {
        return Ok(Some(wait));
    }
    state.status_pacer.record_write(now);
    let sets: Api<SidecarSet> = Api::all(ctx.shared.manager.cluster.client.clone());
    let patch = write::status_patch(ctx.uid, status, OPTIONAL_STATUS_FIELDS);
    match write::patch_status_merge(&sets, ctx.name, &patch).await {
        Ok(stored) => {
            let entry = versioned_set(Arc::new(stored.object()?));
            let key = Key::cluster_scoped(ctx.name);
            ctx.shared.index().sets.apply_write(&key, entry, now);
        }
        // It is deleted, or another one has its name: the watch will show that.
        Err(error) if error.not_found() || error.conflict() => {}
        Err(error) => return Err(error),
    }
    Ok(None)
}

/// Publishes that Pods cannot be updated in place, when their number changed.
pub fn publish_not_upgradable(ctx: &SetContext<'_>, pods: usize, state: &mut SetState) {
    if std::mem::replace(&mut state.not_upgradable, pods) == pods || pods == 0 {
        return;
    }
    let reference = ObjectReference {
        api_version: Some("apps.kruise.io/v1beta1".to_owned()),
        kind: Some("SidecarSet".to_owned()),
        name: Some(ctx.name.to_owned()),
        uid: Some(ctx.uid.to_owned()),
        ..ObjectReference::default()
    };
    let note = format!(
        "SidecarSet in-place update detected {pods} not upgradable pod(s) in this round, will skip them"
    );
    let events = &ctx.shared.manager.cluster.events;
    events.publish(
        reference,
        EventType::Normal,
        EVENT_NOT_UPGRADABLE,
        "Reconcile",
        note,
    );
}

//! Writes the status of a set, and its events.

use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::Api;

use super::context::{SetContext, SetState};
use super::injections::{Injection, KnownInjection};
use super::observe::{ObservedSet, versioned_set};
use crate::object_reference::object_reference;
use kruise_api::sidecarset::{INJECTED_BY_POLICY, SidecarSet, SidecarSetStatus};
use kruise_cluster::write_cache::Written;
use kruise_cluster::{Error, EventType, Key, write};
use kruise_workload::in_place::Pod;
use kruise_workload::names::join_first;
use kruise_workload::sidecarset::changed_field::{ChangedField, changed_field};
use kruise_workload::sidecarset::hash::with_hashes;
use kruise_workload::sidecarset::history::revision_of;
use kruise_workload::sidecarset::plan::{EVENT_NOT_UPGRADABLE, Plan};
use kruise_workload::sidecarset::set::SetView;
use kruise_workload::sidecarset::waiting::{self, Waiting, WaitingRollout};

/// Condition type of ours: what the update waits for.
const WAITING: &str = "Waiting";
/// Event reason of ours: Pods run without the containers that they should have.
const SIDECAR_NOT_INJECTED: &str = "SidecarNotInjected";
/// Event reason of ours: the API server refuses the update of a Pod.
const FAILED_UPDATE: &str = "FailedUpdatePodInPlace";
/// Names of Pods in an event.
const MAX_NAMES: usize = 5;
/// Fields of the status that may be absent.
const OPTIONAL_STATUS_FIELDS: [&str; 6] = [
    "observedGeneration",
    "updatedReadyPods",
    "latestRevision",
    "collisionCount",
    "notInjectedPods",
    "conditions",
];

/// The status after this plan.
pub fn new_status(
    set: &SetView<'_>,
    current: &SidecarSetStatus,
    plan: &Plan,
    observed: &ObservedSet,
    injection: KnownInjection,
    now: Timestamp,
) -> SidecarSetStatus {
    let mut status = plan.status.clone().unwrap_or_else(|| current.clone());
    let count = i32::try_from(observed.not_injected.len()).unwrap_or(i32::MAX);
    status.not_injected_pods = (count > 0).then_some(count);
    set_injected_by_policy(&mut status, injection, now);
    if waiting::is_undecided(plan) {
        return status;
    }
    let waiting = what_it_waits_for(set, plan, observed).map(|Waiting { reason, message }| Stated {
        holds: true,
        reason,
        message,
    });
    set_condition(&mut status, WAITING, waiting, now);
    status
}

/// A leader that has just started must not remove what the one before it wrote.
fn set_injected_by_policy(status: &mut SidecarSetStatus, injection: KnownInjection, now: Timestamp) {
    let stated = match injection {
        KnownInjection::NotYet => return,
        KnownInjection::Nothing => None,
        KnownInjection::Known(injection) => Some(Stated::from(injection)),
    };
    set_condition(status, INJECTED_BY_POLICY, stated, now);
}

/// What a condition says.
struct Stated {
    holds: bool,
    reason: &'static str,
    message: String,
}

impl From<Injection> for Stated {
    fn from(injection: Injection) -> Self {
        match injection {
            Injection::Policy => Self {
                holds: true,
                reason: "PolicyInstalled",
                message: "new Pods are injected by the API server".to_owned(),
            },
            Injection::Webhook { reason, message } => Self {
                holds: false,
                reason,
                message,
            },
        }
    }
}

/// Replaces a condition, or removes it.
fn set_condition(status: &mut SidecarSetStatus, type_: &str, stated: Option<Stated>, now: Timestamp) {
    let at = status
        .conditions
        .iter()
        .position(|condition| condition.type_ == type_);
    let Some(Stated {
        holds,
        reason,
        message,
    }) = stated
    else {
        status.conditions.retain(|condition| condition.type_ != type_);
        return;
    };
    let value = if holds { "True" } else { "False" };
    let previous = at.and_then(|at| status.conditions.get(at));
    let since = previous
        .filter(|previous| previous.status == value)
        .map_or_else(|| Time(now), |previous| previous.last_transition_time.clone());
    let condition = Condition {
        type_: type_.to_owned(),
        status: value.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: since,
        observed_generation: None,
    };
    match at.and_then(|at| status.conditions.get_mut(at)) {
        Some(previous) => *previous = condition,
        None => status.conditions.push(condition),
    }
}

fn what_it_waits_for(set: &SetView<'_>, plan: &Plan, observed: &ObservedSet) -> Option<Waiting> {
    let pods: Vec<&Pod> = observed.pods.iter().map(|(_, pod)| &**pod).collect();
    let namespaces = observed.pods.iter();
    let namespaces: Vec<&str> = namespaces
        .map(|(key, _)| key.namespace.as_deref().unwrap_or_default())
        .collect();
    let field =
        waiting::first_not_upgradable(&plan.waits).and_then(|at| field_of(set, pods.get(at)?, observed));
    waiting::condition(&WaitingRollout {
        set: *set,
        pods: &pods,
        namespaces: &namespaces,
        waits: &plan.waits,
        changed_field: field.as_ref(),
    })
}

/// How the containers of a Pod differ from those of the set, if the Pod's revision still exists.
fn field_of(set: &SetView<'_>, pod: &Pod, observed: &ObservedSet) -> Option<ChangedField> {
    let name = revision_of(set, pod)?;
    let listed = observed
        .revisions
        .iter()
        .find(|listed| listed.revision.name == name)?;
    changed_field(&serde_json::from_str(&listed.revision.data).ok()?, set.spec)
}

/// Writes the status if it changed and the write is due; returns how long to wait if it is not.
///
/// # Errors
/// If the write failed.
pub async fn update_status(
    ctx: &SetContext<'_>,
    status: &SidecarSetStatus,
    state: &mut SetState,
) -> Result<Option<Duration>, Error> {
    let current = ctx.set.status.as_ref();
    if current == Some(status) {
        state.status_pacer.unchanged();
        return Ok(None);
    }
    let now = Instant::now();
    let message_only = current.map(without_messages) == Some(without_messages(status));
    if let Some(delay) = state
        .status_pacer
        .begin_write(now, message_only, current.is_none())
    {
        return Ok(Some(delay));
    }
    let sets: Api<SidecarSet> = Api::all(ctx.shared.manager.cluster.client.clone());
    let patch = write::status_patch(ctx.uid, status, OPTIONAL_STATUS_FIELDS);
    match write::patch_status_merge(&sets, ctx.name, &patch).await {
        Ok(stored) => {
            let entry = versioned_set(Arc::new(with_hashes(stored.object()?)));
            let key = Key::cluster_scoped(ctx.name);
            let mut index = ctx.shared.index();
            index.sets.apply_write(&key, entry, Written::Changed, now);
        }
        // It is deleted, or another one has its name: the watch will show that.
        Err(error) if error.not_found() || error.conflict() => {}
        Err(error) => return Err(error),
    }
    Ok(None)
}

fn without_messages(status: &SidecarSetStatus) -> SidecarSetStatus {
    let mut status = status.clone();
    status
        .conditions
        .iter_mut()
        .for_each(|condition| condition.message.clear());
    status
}

/// Publishes that Pods cannot be updated in place; in OpenKruise's words.
pub fn publish_not_upgradable(ctx: &SetContext<'_>, pods: usize) {
    let note = format!(
        "SidecarSet in-place update detected {pods} not upgradable pod(s) in this round, will skip them"
    );
    publish(ctx, EventType::Normal, EVENT_NOT_UPGRADABLE, note);
}

/// Publishes that Pods lack the containers, when there are more of them than before.
pub fn publish_not_injected(ctx: &SetContext<'_>, pods: &[Key], state: &mut SetState) {
    let before = std::mem::replace(&mut state.not_injected, pods.len());
    if pods.len() <= before {
        return;
    }
    let names: Vec<String> = pods.iter().map(ToString::to_string).collect();
    let names = join_first(MAX_NAMES, names.iter().map(String::as_str));
    let note = format!(
        "selected Pods were created without the containers, and get them when they are recreated: {names}"
    );
    tracing::warn!(set = ctx.name, pods = pods.len(), "{note}");
    publish(ctx, EventType::Warning, SIDECAR_NOT_INJECTED, note);
}

/// Publishes that the API server refuses the update of a Pod.
pub fn publish_refused(ctx: &SetContext<'_>, pod: &Pod, error: &Error) {
    let note = format!(
        "cannot update the containers of pod {}: {}",
        pod.name,
        error.message()
    );
    publish(ctx, EventType::Warning, FAILED_UPDATE, note);
}

/// Publishes that a container cannot be switched off, because admission changes its image.
pub fn publish_rewritten(ctx: &SetContext<'_>, pod: &Pod, container: &str, image: &str) {
    let note = format!(
        "container {container} of pod {} cannot be switched off: a webhook or policy gave it image {image}, not hotUpgradeEmptyImage",
        pod.name
    );
    publish(ctx, EventType::Warning, FAILED_UPDATE, note);
}

fn publish(ctx: &SetContext<'_>, type_: EventType, reason: &str, note: String) {
    let key = Key::cluster_scoped(ctx.name);
    let reference = object_reference("apps.kruise.io/v1beta1", "SidecarSet", &key, ctx.uid);
    let events = &ctx.shared.manager.cluster.events;
    events.publish(reference, type_, reason, "Reconcile", note);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn injected_by_policy_is_kept_until_the_policies_are_known() {
        let time = |second| Timestamp::UNIX_EPOCH + Duration::from_secs(second);
        let mut status = SidecarSetStatus::default();
        set_injected_by_policy(&mut status, KnownInjection::Known(Injection::Policy), time(1));
        let written = status.conditions.clone();
        assert_eq!(written.len(), 1);
        set_injected_by_policy(&mut status, KnownInjection::NotYet, time(2));
        assert_eq!(status.conditions, written);
        set_injected_by_policy(&mut status, KnownInjection::Known(Injection::Policy), time(3));
        assert_eq!(status.conditions, written, "it keeps its time");
        set_injected_by_policy(&mut status, KnownInjection::Nothing, time(4));
        assert_eq!(status.conditions, []);
    }
}

//! Messages about waits: which Pods wait, and for which container, node, claim, hook or limit.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::builder::{MAX_REASON_BYTES, PlanBuilder, WaitReason, truncate};
use super::conditions::{PARTITION, PAUSED, stopped_reason, upsert_condition};
use super::types::{ActionPurpose, CloneSetEvent, FailureSubject, TemplateStatus};
use super::view::{ObservedPod, PlanView};
use kruise_api::cloneset::{CloneSetCondition, CloneSetStatus};
use kruise_api::keys;
use kruise_api::lifecycle::{LifecycleHook, LifecycleStateType as State};
use kruise_workload::in_place::{Pod, resize};
use kruise_workload::names::join_first;
use kruise_workload::not_ready_reason::{not_ready_reason, scheduler_message};

/// Maximum number of names for one reason in a message.
const MAX_NAMES: usize = 3;
/// Maximum number of different reasons in a message.
const MAX_REASONS: usize = 6;
/// Maximum bytes of a text from another source in a message.
const MAX_QUOTE_BYTES: usize = 200;
/// Maximum bytes of the API server's message in a condition that holds nothing else.
pub(super) const MAX_MESSAGE_BYTES: usize = 1000;

/// Our condition for what the CloneSet waits for. It exists only while it waits.
pub const WAITING: &str = "Waiting";
/// Time of waiting for the same kind of thing before an event is published: shorter waits are part of every rollout.
const EVENT_AFTER: SignedDuration = SignedDuration::from_secs(60);
/// How long after that the event may be published: the previous leader already published older waits.
const EVENT_WINDOW: SignedDuration = SignedDuration::from_secs(60);

/// Sets condition Waiting.
pub(super) fn set_waiting(view: &PlanView<'_>, status: &mut CloneSetStatus, builder: &mut PlanBuilder) {
    let parts = collect_waits(view, status, builder);
    let Some(kind) = parts.iter().map(|(kind, _)| *kind).min() else {
        status.conditions.retain(|c| c.type_ != WAITING);
        return;
    };
    let texts: Vec<&str> = parts.iter().map(|(_, text)| text.as_str()).collect();
    upsert_condition(
        &mut status.conditions,
        WAITING,
        "True",
        kind.as_str(),
        &texts.join("; "),
        view.now,
    );
    let condition = status.conditions.iter().find(|c| c.type_ == WAITING);
    if let Some(condition) = condition.filter(|_| !kind.has_events()) {
        push_wait_event(view, kind, condition, builder);
    }
}

/// Plans one event for each long wait.
fn push_wait_event(
    view: &PlanView<'_>,
    kind: WaitReason,
    condition: &CloneSetCondition,
    builder: &mut PlanBuilder,
) {
    let since = condition
        .last_update_time
        .as_ref()
        .map_or(view.now, |time| time.0);
    let event_at = since.checked_add(EVENT_AFTER).unwrap_or(Timestamp::MAX);
    if view.now < event_at {
        builder.requeue_at(event_at);
    }
    let event_until = event_at.checked_add(EVENT_WINDOW).unwrap_or(Timestamp::MAX);
    if !(event_at..event_until).contains(&view.now) {
        return;
    }
    builder.events.push(CloneSetEvent {
        warning: matches!(kind, WaitReason::Stuck | WaitReason::ResizeRefused),
        reason: kind.as_str(),
        message: condition.message.clone(),
        wait_since: Some(since),
    });
}

/// The parts of the message.
fn collect_waits(
    view: &PlanView<'_>,
    status: &CloneSetStatus,
    builder: &mut PlanBuilder,
) -> Vec<(WaitReason, String)> {
    let reported: BTreeSet<String> = builder.waits.values().flatten().cloned().collect();
    for pod in view.pods.iter().filter(|pod| !reported.contains(&pod.name)) {
        if let Some((kind, why)) = unavailable_reason(view, pod) {
            builder.add_wait(kind, why, pod);
        }
    }
    let mut parts = Vec::new();
    if let TemplateStatus::Rejected(why) = &view.observed.template_status {
        let text = format!("CloneSet cannot be updated: {}", truncate(why, MAX_MESSAGE_BYTES));
        parts.push((WaitReason::TemplateRefused, text));
    }
    parts.extend(paused_wait(view, status));
    if let Some(list) = format_reasons(&builder.stuck) {
        parts.push((WaitReason::Stuck, format!("stuck: {list}")));
    }
    if let Some(reason) = &builder.scale_up_limited {
        parts.push((WaitReason::ScaleUpLimited, reason.clone()));
    }
    if let (Some(list), Some(kind)) = (format_reasons(&builder.waits), builder.wait_reasons.first()) {
        parts.push((*kind, list));
    }
    let failed = failure_messages(view);
    let more = failed.len().saturating_sub(MAX_NAMES);
    for message in failed.into_iter().take(MAX_NAMES) {
        parts.push((
            WaitReason::Failed,
            format!("failed: {}", truncate(message, MAX_REASON_BYTES)),
        ));
    }
    if more > 0 {
        parts.push((WaitReason::Failed, format!("{more} more failed")));
    }
    parts
}

/// Error messages of the API server for failed attempts, except resizes: those are reported with their Pods.
fn failure_messages<'a>(view: &PlanView<'a>) -> BTreeSet<&'a String> {
    let failures = view.observed.failures.iter();
    let failures = failures.filter(|(_, f)| f.purpose != ActionPurpose::PreDownload && f.retry_at > view.now);
    let mut failures = failures.peekable();
    if failures.peek().is_none() {
        return BTreeSet::new();
    }
    let resize_refused = view.pods.iter().filter(|pod| resize::resize_refused(pod));
    let refused: BTreeSet<&String> = resize_refused.map(|pod| &pod.pod.uid).collect();
    let is_resize = |subject: &FailureSubject| match subject {
        FailureSubject::PendingResizes => true,
        FailureSubject::Pod(uid) => refused.contains(uid),
        _ => false,
    };
    let others = failures.filter(|(subject, _)| !is_resize(subject));
    others.map(|(_, failure)| &failure.message).collect()
}

/// Why a rollout has stopped at a point that a user requested.
fn paused_wait(view: &PlanView<'_>, status: &CloneSetStatus) -> Option<(WaitReason, String)> {
    if view.template_rejected() || i64::from(status.updated_replicas) >= view.limits.replicas {
        return None;
    }
    let rolling = view.spec.rolling_update();
    match stopped_reason(view, status)?.0 {
        PAUSED => Some((WaitReason::Paused, "the update is paused".to_owned())),
        PARTITION => {
            let partition = rolling.and_then(|r| r.partition.as_ref()).map(limit_text);
            let (updated, all) = (status.updated_replicas, view.limits.replicas);
            let partition = partition.unwrap_or_default();
            let text = format!("{updated} of {all} Pods are updated, as partition {partition} asks");
            Some((WaitReason::Partition, text))
        }
        _ => None,
    }
}

/// A limit as written in the spec.
fn limit_text(value: &IntOrString) -> String {
    match value {
        IntOrString::Int(number) => number.to_string(),
        IntOrString::String(text) => text.clone(),
    }
}

/// The first of these reasons, each with its Pods.
fn format_reasons(reasons: &BTreeMap<String, BTreeSet<String>>) -> Option<String> {
    if reasons.is_empty() {
        return None;
    }
    let first = reasons.iter().take(MAX_REASONS);
    let parts = first.map(|(why, pods)| format!("{} ({why})", format_names(pods)));
    let text = parts.collect::<Vec<_>>().join(", ");
    Some(match reasons.len().saturating_sub(MAX_REASONS) {
        0 => text,
        more => text + &format!(" and others for {more} more reasons"),
    })
}

fn format_names(pods: &BTreeSet<String>) -> String {
    join_first(MAX_NAMES, pods.iter().map(String::as_str))
}

/// The first thing that cannot be done until a user changes something.
pub(super) fn first_stuck(builder: &PlanBuilder) -> Option<String> {
    let (why, pods) = builder.stuck.first_key_value()?;
    Some(format!("{}: {why}", format_names(pods)))
}

/// What the Pod lacks to be available.
fn unavailable_reason(view: &PlanView<'_>, pod: &ObservedPod<'_>) -> Option<(WaitReason, String)> {
    if !pod.ready && pod.node.is_none() {
        return Some((WaitReason::PodsNotScheduled, not_scheduled_reason(view, pod)));
    }
    if !pod.ready {
        let why = not_ready_reason(pod).unwrap_or_else(|| "to be ready".to_owned());
        return Some((WaitReason::PodsNotReady, why));
    }
    if let State::Other(word) = &pod.state {
        return Some((WaitReason::Stuck, invalid_state(word)));
    }
    if let Some(why) = resize_wait(view, pod) {
        return Some(why);
    }
    let below_min_ready = pod.state == State::Normal && !pod.available;
    let why = || format!("to be ready for {} s, minReadySeconds", view.min_ready);
    below_min_ready.then(|| (WaitReason::MinReadySeconds, why()))
}

/// Why the Pod does not have the size of its revision.
fn resize_wait(view: &PlanView<'_>, pod: &Pod) -> Option<(WaitReason, String)> {
    if resize::resize_refused(pod) {
        let failure = view.observed.failures.get(&FailureSubject::PendingResizes);
        let detail = failure.map_or(String::new(), |failure| format!(": {}", failure.message));
        return Some((
            WaitReason::ResizeRefused,
            format!("its resize was refused{detail}"),
        ));
    }
    let pending = resize::resize_message(pod, view.pod_template(pod))?;
    Some((
        WaitReason::ResizePending,
        format!("resize is {}", truncate(&pending, MAX_QUOTE_BYTES)),
    ))
}

/// The message for a Pod with an unknown lifecycle state.
pub(super) fn invalid_state(value: &str) -> String {
    format!(
        "label {} is {:?}, not a lifecycle state",
        keys::LIFECYCLE_STATE,
        truncate(value, MAX_QUOTE_BYTES)
    )
}

/// Why a Pod has no node yet: the scheduler's message, and unbound claims.
pub(super) fn not_scheduled_reason(view: &PlanView<'_>, pod: &Pod) -> String {
    let mut text = "a node".to_owned();
    if let Some(message) = scheduler_message(pod) {
        text += &format!(": {message}");
    }
    let id = pod.labels.get(keys::CLONESET_INSTANCE_ID);
    let claims = view.observed.claims.iter();
    let own = claims.filter(|claim| !claim.instance_id.is_empty() && Some(&claim.instance_id) == id);
    let classes: BTreeSet<&String> = own
        .filter_map(|claim| claim.unbound_storage_class.as_ref())
        .collect();
    for class in classes {
        text += &match class.as_str() {
            "" => "; its claim without storage class is not bound".to_owned(),
            class => format!("; its claim of storage class {class} is not bound"),
        };
    }
    text
}

/// The limit that a Pod to be updated or deleted waits for.
pub(super) fn unavailable_limit_text(view: &PlanView<'_>) -> String {
    let rolling = view.spec.rolling_update();
    let max_unavailable = rolling.and_then(|r| r.max_unavailable.as_ref());
    let text = max_unavailable.map_or_else(|| "20%".to_owned(), self::limit_text);
    let limits = &view.limits;
    let surge = if limits.max_surge > 0 {
        format!(" and maxSurge is {}", limits.max_surge)
    } else {
        String::new()
    };
    let limit = if text.ends_with('%') {
        format!("{text}, {} of {} Pods", limits.max_unavailable, limits.replicas)
    } else {
        text
    };
    format!("maxUnavailable is {limit}{surge}")
}

/// The items of a hook that are present on a Pod, or those that are missing.
pub(super) fn hook_items(hook: &LifecycleHook, pod: &Pod, present: bool) -> String {
    let finalizers = hook.finalizers_handler.iter();
    let finalizers = finalizers.filter(|f| pod.finalizers.contains(f) == present);
    let labels = hook.labels_handler.iter();
    let labels = labels.filter(|(k, v)| (pod.labels.get(*k) == Some(v)) == present);
    let finalizers = finalizers.map(|f| format!("finalizer {f}"));
    let labels = labels.map(|(k, v)| format!("label {k}={v}"));
    finalizers.chain(labels).collect::<Vec<_>>().join(", ")
}

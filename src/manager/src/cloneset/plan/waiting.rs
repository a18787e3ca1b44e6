//! What is waited for, in words: which Pods, and the container, node, claim, hook or limit that they wait for.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::conditions::{PARTITION, PAUSED, resting, set};
use super::draft::{Draft, Kind, REASON, cut};
use super::types::{Concern, Event, Subject, Template};
use super::view::{Seen, View};
use crate::names::first_of;
use kruise_api::cloneset::{CloneSetCondition, CloneSetStatus};
use kruise_api::keys;
use kruise_api::lifecycle::{LifecycleHook, LifecycleStateType as State};
use kruise_workload::in_place::{Pod, resize};
use kruise_workload::not_ready::holders_of;

/// How many names a message holds at most for one thing.
const NAMES: usize = 3;
/// How many different things a message names at most.
const THINGS: usize = 6;
/// How many bytes of somebody else's words go into a message.
const QUOTED: usize = 200;
/// How many bytes of what the API server said go into a condition that is about nothing else.
pub(super) const SAID: usize = 1000;
/// Reasons of kubelet that every container has on its way.
const ORDINARY: [&str; 2] = ["ContainerCreating", "PodInitializing"];
/// Reason of kubelet for a container that ends again and again.
const CRASHES: &str = "CrashLoopBackOff";
/// Reason of kubelet for a container whose barrier is not lifted.
const HELD: &str = "CreateContainerConfigError";

/// Condition of ours: what the CloneSet waits for. It is there while it waits for anything.
pub const WAITING: &str = "Waiting";
/// For so long it waits for the same kind of thing before an event tells of it: shorter waits are every rollout's course.
const LASTS: SignedDuration = SignedDuration::from_secs(60);
/// For so long after that the event may be told: older waits were told of by whoever led before.
const TOLD: SignedDuration = SignedDuration::from_secs(60);

/// Sets the condition.
pub(super) fn set_condition(view: &View<'_>, status: &mut CloneSetStatus, draft: &mut Draft) {
    let parts = waits(view, status, draft);
    let Some(kind) = parts.iter().map(|(kind, _)| *kind).min() else {
        status.conditions.retain(|c| c.type_ != WAITING);
        return;
    };
    let texts: Vec<&str> = parts.iter().map(|(_, text)| text.as_str()).collect();
    set(
        &mut status.conditions,
        WAITING,
        "True",
        kind.word(),
        &texts.join("; "),
        view.now,
    );
    let condition = status.conditions.iter().find(|c| c.type_ == WAITING);
    if let Some(condition) = condition.filter(|_| !kind.has_events()) {
        tell(view, kind, condition, draft);
    }
}

/// An event of a wait that lasts, once for each.
fn tell(view: &View<'_>, kind: Kind, condition: &CloneSetCondition, draft: &mut Draft) {
    let since = condition
        .last_update_time
        .as_ref()
        .map_or(view.now, |time| time.0);
    let from = since.checked_add(LASTS).unwrap_or(Timestamp::MAX);
    if view.now < from {
        draft.wake_at(from);
    }
    let before = from.checked_add(TOLD).unwrap_or(Timestamp::MAX);
    if !(from..before).contains(&view.now) {
        return;
    }
    draft.events.push(Event {
        warning: matches!(kind, Kind::Stuck | Kind::ResizeRefused),
        reason: kind.word(),
        message: condition.message.clone(),
        since: Some(since),
    });
}

/// What is waited for, in parts.
fn waits(view: &View<'_>, status: &CloneSetStatus, draft: &mut Draft) -> Vec<(Kind, String)> {
    let said: BTreeSet<String> = draft.waits.values().flatten().cloned().collect();
    for pod in view.pods.iter().filter(|pod| !said.contains(&pod.name)) {
        if let Some((kind, why)) = lacks(view, pod) {
            draft.wait(kind, why, pod);
        }
    }
    let mut parts = Vec::new();
    if let Template::Refused(why) = &view.observed.template {
        let text = format!("CloneSet cannot be updated: {}", cut(why, SAID));
        parts.push((Kind::TemplateRefused, text));
    }
    parts.extend(rests(view, status));
    if let Some(list) = listed(&draft.stuck) {
        parts.push((Kind::Stuck, format!("stuck: {list}")));
    }
    if let Some(reason) = &draft.limited {
        parts.push((Kind::ScaleUpLimited, reason.clone()));
    }
    if let (Some(list), Some(kind)) = (listed(&draft.waits), draft.kinds.first()) {
        parts.push((*kind, list));
    }
    let failed = failed(view);
    let more = failed.len().saturating_sub(NAMES);
    for message in failed.into_iter().take(NAMES) {
        parts.push((Kind::Failed, format!("failed: {}", cut(message, REASON))));
    }
    if more > 0 {
        parts.push((Kind::Failed, format!("{more} more failed")));
    }
    parts
}

/// What the API server said to tries that failed, but for sizes: those are told with their Pods.
fn failed<'a>(view: &View<'a>) -> BTreeSet<&'a String> {
    let failures = view.observed.failures.iter();
    let failures = failures.filter(|(_, f)| f.of != Concern::PreDownload && f.until > view.now);
    let mut failures = failures.peekable();
    if failures.peek().is_none() {
        return BTreeSet::new();
    }
    let refused = view.pods.iter().filter(|pod| resize::refused(pod));
    let refused: BTreeSet<&String> = refused.map(|pod| &pod.pod.uid).collect();
    let of_size = |subject: &Subject| match subject {
        Subject::Sizes => true,
        Subject::Pod(uid) => refused.contains(uid),
        _ => false,
    };
    let others = failures.filter(|(subject, _)| !of_size(subject));
    others.map(|(_, failure)| &failure.message).collect()
}

/// What keeps a rollout from going on that somebody asked to stop there.
fn rests(view: &View<'_>, status: &CloneSetStatus) -> Option<(Kind, String)> {
    if view.held() || i64::from(status.updated_replicas) >= view.limits.replicas {
        return None;
    }
    let rolling = view.spec.rolling_update();
    match resting(view, status)?.0 {
        PAUSED => Some((Kind::Paused, "the update is paused".to_owned())),
        PARTITION => {
            let asked = rolling.and_then(|r| r.partition.as_ref()).map(given);
            let (there, all) = (status.updated_replicas, view.limits.replicas);
            let asked = asked.unwrap_or_default();
            let text = format!("{there} of {all} Pods are updated, as partition {asked} asks");
            Some((Kind::Partition, text))
        }
        _ => None,
    }
}

/// A limit as it is written in the spec.
fn given(value: &IntOrString) -> String {
    match value {
        IntOrString::Int(number) => number.to_string(),
        IntOrString::String(text) => text.clone(),
    }
}

/// The first of these reasons, each with its Pods.
fn listed(reasons: &BTreeMap<String, BTreeSet<String>>) -> Option<String> {
    if reasons.is_empty() {
        return None;
    }
    let first = reasons.iter().take(THINGS);
    let parts = first.map(|(why, pods)| format!("{} ({why})", names(pods)));
    let text = parts.collect::<Vec<_>>().join(", ");
    Some(match reasons.len().saturating_sub(THINGS) {
        0 => text,
        more => text + &format!(" and others for {more} more reasons"),
    })
}

fn names(pods: &BTreeSet<String>) -> String {
    first_of(NAMES, pods.iter().map(String::as_str))
}

/// The first thing that cannot be done until somebody changes something.
pub(super) fn stuck(draft: &Draft) -> Option<String> {
    let (why, pods) = draft.stuck.first_key_value()?;
    Some(format!("{}: {why}", names(pods)))
}

/// What the Pod lacks to be available.
fn lacks(view: &View<'_>, pod: &Seen<'_>) -> Option<(Kind, String)> {
    if !pod.ready && pod.node.is_none() {
        return Some((Kind::PodsNotScheduled, no_node(view, pod)));
    }
    if !pod.ready {
        return Some((Kind::PodsNotReady, unready(pod)));
    }
    if let State::Other(word) = &pod.state {
        return Some((Kind::Stuck, no_state(word)));
    }
    if let Some(why) = size(view, pod) {
        return Some(why);
    }
    let young = pod.state == State::Normal && !pod.available;
    let why = || format!("to be ready for {} s, minReadySeconds", view.min_ready);
    young.then(|| (Kind::MinReadySeconds, why()))
}

/// Why the Pod has not the size that its revision says.
fn size(view: &View<'_>, pod: &Pod) -> Option<(Kind, String)> {
    if resize::refused(pod) {
        let failure = view.observed.failures.get(&Subject::Sizes);
        let said = failure.map_or(String::new(), |failure| format!(": {}", failure.message));
        return Some((Kind::ResizeRefused, format!("its resize was refused{said}")));
    }
    let pending = resize::pending_to(pod, view.template_of(pod))?;
    Some((
        Kind::ResizePending,
        format!("resize is {}", cut(&pending, QUOTED)),
    ))
}

/// What is wrong with a Pod whose state somebody made up.
pub(super) fn no_state(word: &str) -> String {
    format!(
        "label {} is {:?}, not a lifecycle state",
        keys::LIFECYCLE_STATE,
        cut(word, QUOTED)
    )
}

/// Why a Pod that has a node is not ready.
fn unready(pod: &Pod) -> String {
    let container = || {
        let status = pod.statuses.iter().find(|s| !s.ready && !held(pod, &s.name))?;
        let why = match &status.waiting {
            Some(reason) => reason,
            None if status.running => "it runs, but is not ready",
            None => "it does not run",
        };
        let ended = status.ended.as_ref().filter(|_| !status.running);
        let ended = ended.map_or(String::new(), |ended| format!(" ({ended})"));
        Some(format!("container {}: {why}{ended}", status.name))
    };
    let found = trouble(pod).or_else(container).or_else(|| shut(pod));
    found.unwrap_or_else(|| "to be ready".to_owned())
}

/// What stops a container of the Pod from running, in the words of kubelet; nothing that passes by itself.
pub(super) fn trouble(pod: &Pod) -> Option<String> {
    let all = pod.initial.as_deref().into_iter().chain(&pod.statuses);
    let all = all.filter_map(|status| Some((status, status.waiting.as_deref()?)));
    let waits = |name: &str, reason: &str| reason == HELD && held(pod, name);
    let mut bad = all.filter(|(status, reason)| !ORDINARY.contains(reason) && !waits(&status.name, reason));
    let (status, reason) = bad.next()?;
    let name = &status.name;
    // Kubelet takes turns with these two, which is no news.
    let reason = match reason {
        "ErrImagePull" => "ImagePullBackOff",
        reason => reason,
    };
    let image = pod.containers.iter().find(|c| c.name == *name);
    let image = image.filter(|_| reason.contains("Image"));
    let image = image.map_or(String::new(), |c| format!(" of image {}", c.image));
    let because = match reason {
        CRASHES => &status.ended,
        _ => &status.because,
    };
    let because = because.as_ref().map_or(String::new(), |why| format!(" ({why})"));
    Some(format!("container {name}: {reason}{image}{because}"))
}

/// Whether a container is yet to start when others of a higher launch priority are ready, and these are not.
fn held(pod: &Pod, name: &str) -> bool {
    if pod.annotations.contains_key(keys::CONTAINER_LAUNCH_COMPLETED) {
        return false;
    }
    let ready = |name: &str| pod.status(name).is_some_and(|s| s.ready);
    let own = pod
        .containers
        .iter()
        .find(|c| c.name == name)
        .and_then(|c| c.priority);
    own.is_some_and(|own| {
        let before = pod.containers.iter().filter(|c| c.priority > Some(own));
        before.into_iter().any(|c| !ready(&c.name))
    })
}

/// The first of the Pod's readiness gates that is shut, and by whom where that is known.
fn shut(pod: &Pod) -> Option<String> {
    let shut = |gate: &&String| pod.condition(gate).is_none_or(|c| !c.holds);
    let gate = pod.gates.iter().find(shut)?;
    let message = pod
        .condition(gate)
        .map(|c| c.message.as_str())
        .unwrap_or_default();
    let holders = holders_of(message).into_iter();
    let holders: Vec<String> = holders
        .map(|h| format!("{} of {}", h.key, h.user_agent))
        .collect();
    Some(match (gate.as_str(), message) {
        (keys::KRUISE_POD_READY, _) if !holders.is_empty() => {
            format!("readiness gate {gate}, held by {}", holders.join(", "))
        }
        (_, "") => format!("readiness gate {gate}"),
        (_, message) => format!("readiness gate {gate}: {}", cut(message, QUOTED)),
    })
}

/// Why a Pod has no node yet: what the scheduler says, and claims that nobody provides.
pub(super) fn no_node(view: &View<'_>, pod: &Pod) -> String {
    let scheduled = pod.condition("PodScheduled").filter(|c| !c.holds);
    let message = scheduled.map(|c| c.message.as_str()).unwrap_or_default();
    let mut text = "a node".to_owned();
    if !message.is_empty() {
        text += &format!(": {}", cut(message, QUOTED));
    }
    let id = pod.labels.get(keys::CLONESET_INSTANCE_ID);
    let claims = view.observed.claims.iter();
    let own = claims.filter(|claim| !claim.instance.is_empty() && Some(&claim.instance) == id);
    let classes: BTreeSet<&String> = own.filter_map(|claim| claim.unbound.as_ref()).collect();
    for class in classes {
        text += &match class.as_str() {
            "" => "; its claim without storage class is not bound".to_owned(),
            class => format!("; its claim of storage class {class} is not bound"),
        };
    }
    text
}

/// The limit that a Pod waits for which is to be updated or deleted.
pub(super) fn budget(view: &View<'_>) -> String {
    let rolling = view.spec.rolling_update();
    let given = rolling.and_then(|r| r.max_unavailable.as_ref());
    let given = given.map_or_else(|| "20%".to_owned(), self::given);
    let limits = &view.limits;
    let surge = if limits.surge > 0 {
        format!(" and maxSurge is {}", limits.surge)
    } else {
        String::new()
    };
    let of = if given.ends_with('%') {
        format!("{given}, {} of {} Pods", limits.unavailable, limits.replicas)
    } else {
        given
    };
    format!("maxUnavailable is {of}{surge}")
}

/// The items of a hook that are on a Pod, or those that are not.
pub(super) fn items(hook: &LifecycleHook, pod: &Pod, there: bool) -> String {
    let finalizers = hook.finalizers_handler.iter();
    let finalizers = finalizers.filter(|f| pod.finalizers.contains(f) == there);
    let labels = hook.labels_handler.iter();
    let labels = labels.filter(|(k, v)| (pod.labels.get(*k) == Some(v)) == there);
    let finalizers = finalizers.map(|f| format!("finalizer {f}"));
    let labels = labels.map(|(k, v)| format!("label {k}={v}"));
    finalizers.chain(labels).collect::<Vec<_>>().join(", ")
}

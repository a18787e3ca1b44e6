//! Collects the actions, waits and errors of a plan.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use super::types::{Action, CloneSetEvent, FailureSubject, PatchReason, Plan};
use super::view::PlanView;
use kruise_workload::in_place::{Pod, PodWrite};

/// Maximum bytes of a reason.
pub(super) const MAX_REASON_BYTES: usize = 500;

/// Kinds of waits, the most informative first; the reason of the condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum WaitReason {
    TemplateRefused,
    Stuck,
    Failed,
    ScaleUpLimited,
    PodsEnded,
    PodsNotReady,
    PodsNotScheduled,
    ResizeRefused,
    ResizePending,
    LifecycleHook,
    GracePeriod,
    ClaimsInUse,
    MinReadySeconds,
    MaxUnavailable,
    OnDelete,
    Paused,
    Partition,
}

impl WaitReason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::TemplateRefused => "TemplateRefused",
            Self::Stuck => "Stuck",
            Self::Failed => "Failed",
            Self::ScaleUpLimited => "ScaleUpLimited",
            Self::PodsEnded => "PodsEnded",
            Self::PodsNotReady => "PodsNotReady",
            Self::PodsNotScheduled => "PodsNotScheduled",
            Self::ResizeRefused => "ResizeRefused",
            Self::ResizePending => "ResizePending",
            Self::LifecycleHook => "LifecycleHook",
            Self::GracePeriod => "GracePeriod",
            Self::ClaimsInUse => "ClaimsInUse",
            Self::MinReadySeconds => "MinReadySeconds",
            Self::MaxUnavailable => "MaxUnavailable",
            Self::OnDelete => "OnDelete",
            Self::Paused => "Paused",
            Self::Partition => "Partition",
        }
    }

    /// Whether events of the attempt or its error already exist, so that the wait needs no event.
    pub fn has_events(self) -> bool {
        matches!(self, Self::TemplateRefused | Self::Failed | Self::ScaleUpLimited)
    }
}

pub(super) struct PendingWrites {
    pub writes: Vec<PodWrite>,
    pub reason: PatchReason,
    /// Whether nothing else may be decided about the Pod before they are done.
    pub exclusive: bool,
}

/// The plan so far.
#[derive(Default)]
pub(super) struct PlanBuilder {
    pub actions: Vec<Action>,
    pub events: Vec<CloneSetEvent>,
    requeue_at: Option<Timestamp>,
    /// What is waited for, and by which Pods.
    pub waits: BTreeMap<String, BTreeSet<String>>,
    /// The kinds of these waits.
    pub wait_reasons: BTreeSet<WaitReason>,
    /// What cannot be done until a user changes something, and for which Pods.
    pub stuck: BTreeMap<String, BTreeSet<String>>,
    /// Why not all missing Pods are created.
    pub scale_up_limited: Option<String>,
    pods_with_actions: BTreeSet<String>,
}

impl PlanBuilder {
    /// Plans an action unless it failed recently; returns whether it was planned.
    pub fn push(&mut self, view: &PlanView<'_>, act: Action) -> bool {
        let subject = act.subject();
        if let Some(until) = view.retry_at(&subject) {
            self.requeue_at(until);
            return false;
        }
        if let FailureSubject::Pod(uid) = subject {
            self.pods_with_actions.insert(uid);
        }
        self.actions.push(act);
        true
    }

    /// Plans a patch of a Pod, if there is anything to write.
    pub fn push_patch(
        &mut self,
        view: &PlanView<'_>,
        pod: &Pod,
        reason: PatchReason,
        writes: Vec<PodWrite>,
    ) -> bool {
        self.push_update(view, pod, None, (reason, writes))
    }

    /// Plans a patch of an update to `target_revision`.
    pub fn push_update(
        &mut self,
        view: &PlanView<'_>,
        pod: &Pod,
        target_revision: Option<&str>,
        (reason, writes): (PatchReason, Vec<PodWrite>),
    ) -> bool {
        let (uid, name) = (pod.uid.clone(), pod.name.clone());
        let action = |writes| Action::PatchPod {
            uid,
            name,
            reason,
            revision: target_revision.map(str::to_owned),
            writes,
            claims: Vec::new(),
        };
        !writes.is_empty() && self.push(view, action(writes))
    }

    /// Whether an action is already planned for this Pod.
    pub fn has_action(&self, pod: &Pod) -> bool {
        self.pods_with_actions.contains(&pod.uid)
    }

    /// Requeues at a time, or earlier if that is already planned.
    pub fn requeue_at(&mut self, time: Timestamp) {
        self.requeue_at = Some(self.requeue_at.map_or(time, |wake| wake.min(time)));
    }

    /// Records that a Pod waits.
    pub fn add_wait(&mut self, kind: WaitReason, why: impl Into<String>, pod: &Pod) {
        self.wait_reasons.insert(kind);
        let pods = self.waits.entry(truncate_reason(why.into())).or_default();
        pods.insert(pod.name.clone());
    }

    /// Records that a Pod waits until a user changes something.
    pub fn add_stuck(&mut self, why: String, pod: &Pod) {
        let pods = self.stuck.entry(truncate_reason(why)).or_default();
        pods.insert(pod.name.clone());
    }

    pub fn build(self) -> Plan {
        Plan {
            actions: self.actions,
            status: None,
            events: self.events,
            requeue_at: self.requeue_at,
        }
    }
}

/// Limits the length of a reason, whatever it contains.
fn truncate_reason(why: String) -> String {
    if why.len() <= MAX_REASON_BYTES {
        why
    } else {
        truncate(&why, MAX_REASON_BYTES)
    }
}

/// The beginning of a text from another source.
pub fn truncate(text: &str, limit: usize) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    let end = text.floor_char_boundary(limit);
    format!("{}…", text.get(..end).unwrap_or_default())
}

//! What is planned so far.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use super::types::{Act, Event, Plan, Subject, Why};
use super::view::View;
use kruise_workload::in_place::{Pod, Write};

/// How many bytes a reason has at most.
pub(super) const REASON: usize = 500;

/// What kind of wait, the one that tells most first: the reason of the condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    TemplateRefused,
    Stuck,
    Failed,
    ScaleUpLimited,
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

impl Kind {
    pub fn word(self) -> &'static str {
        match self {
            Self::TemplateRefused => "TemplateRefused",
            Self::Stuck => "Stuck",
            Self::Failed => "Failed",
            Self::ScaleUpLimited => "ScaleUpLimited",
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

    /// Whether there are events with what was tried or found, so that none is to tell of the wait.
    pub fn has_events(self) -> bool {
        matches!(self, Self::TemplateRefused | Self::Failed | Self::ScaleUpLimited)
    }
}

/// Writes that a Pod needs.
pub(super) struct Pending {
    pub writes: Vec<Write>,
    pub why: Why,
    /// Whether nothing else may be decided about the Pod before they are done.
    pub first: bool,
}

/// What is planned so far.
#[derive(Default)]
pub(super) struct Draft {
    pub acts: Vec<Act>,
    pub events: Vec<Event>,
    wake: Option<Timestamp>,
    /// What is waited for, and the Pods that do.
    pub waits: BTreeMap<String, BTreeSet<String>>,
    /// The kinds of that.
    pub kinds: BTreeSet<Kind>,
    /// What cannot be done at all until somebody changes something, and the Pods that this is about.
    pub stuck: BTreeMap<String, BTreeSet<String>>,
    /// Why not all missing Pods are made.
    pub limited: Option<String>,
    touched: BTreeSet<String>,
}

impl Draft {
    /// Plans an act unless it failed lately; whether it did so.
    pub fn act(&mut self, view: &View<'_>, act: Act) -> bool {
        let subject = act.subject();
        if let Some(until) = view.delayed(&subject) {
            self.wake_at(until);
            return false;
        }
        if let Subject::Pod(uid) = subject {
            self.touched.insert(uid);
        }
        self.acts.push(act);
        true
    }

    /// Plans a patch of a Pod, if there is anything to write.
    pub fn patch(&mut self, view: &View<'_>, pod: &Pod, why: Why, writes: Vec<Write>) -> bool {
        self.update(view, pod, None, (why, writes))
    }

    /// The same of an update to the revision `to`.
    pub fn update(
        &mut self,
        view: &View<'_>,
        pod: &Pod,
        to: Option<&str>,
        (why, writes): (Why, Vec<Write>),
    ) -> bool {
        let (uid, name) = (pod.uid.clone(), pod.name.clone());
        let act = |writes| Act::PatchPod {
            uid,
            name,
            why,
            revision: to.map(str::to_owned),
            writes,
            claims: Vec::new(),
        };
        !writes.is_empty() && self.act(view, act(writes))
    }

    /// Whether something is planned for this Pod already.
    pub fn touched(&self, pod: &Pod) -> bool {
        self.touched.contains(&pod.uid)
    }

    /// Looks again at a time, or sooner.
    pub fn wake_at(&mut self, time: Timestamp) {
        self.wake = Some(self.wake.map_or(time, |wake| wake.min(time)));
    }

    /// Says that a Pod waits.
    pub fn wait(&mut self, kind: Kind, why: impl Into<String>, pod: &Pod) {
        self.kinds.insert(kind);
        let pods = self.waits.entry(reason(why.into())).or_default();
        pods.insert(pod.name.clone());
    }

    /// Says that a Pod will wait until somebody changes something.
    pub fn stuck(&mut self, why: String, pod: &Pod) {
        let pods = self.stuck.entry(reason(why)).or_default();
        pods.insert(pod.name.clone());
    }

    pub fn plan(self) -> Plan {
        Plan {
            acts: self.acts,
            status: None,
            events: self.events,
            wake: self.wake,
        }
    }
}

/// A reason as it is told: whatever it is made of, it has an end.
fn reason(why: String) -> String {
    if why.len() <= REASON {
        why
    } else {
        cut(&why, REASON)
    }
}

/// The beginning of what somebody else says.
pub fn cut(text: &str, limit: usize) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    let end = text.floor_char_boundary(limit);
    format!("{}…", text.get(..end).unwrap_or_default())
}

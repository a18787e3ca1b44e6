//! What to do about one node's NodeImage.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ObjectReference;

use crate::view::{NodeImageView, NodeView, TagOwner, TagStatusView, TagView};
use kruise_api::keys;
use kruise_api::node_image::{ImageTagSpec, ReferenceObject};
use kruise_api::time::is_over;

/// Message of a tag whose daemon reports nothing; upstream's.
pub const NO_RESPONSE: &str = "node has not responded for a long time";

/// A daemon that has reported nothing for this time does not work, whatever the limits of its pulls are.
const MAX_SILENCE: SignedDuration = SignedDuration::from_hours(24);

/// Time spans that the decisions depend on.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// How long a Node must be ready before its NodeImage is created.
    pub creation_delay: SignedDuration,
    /// How long a daemon may report nothing beyond the time that its work can take.
    pub no_response: SignedDuration,
    /// How long the daemon of a node that is not ready may report nothing about a tag that it has not begun.
    pub unready_no_response: SignedDuration,
}

impl Timeouts {
    /// Upstream's ten minutes for a daemon that may be working, and its documented minute if the node is not ready and
    /// nothing was begun.
    #[must_use]
    pub fn new(creation_delay: SignedDuration) -> Self {
        Self {
            creation_delay,
            no_response: SignedDuration::from_mins(10),
            unready_no_response: SignedDuration::from_mins(1),
        }
    }
}

/// State of the owner of a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerState {
    /// It exists, and its tag may expire.
    Present,
    /// It is a job that needs the tag until the job ends.
    Counting,
    /// It does not exist any more.
    Deleted,
}

/// Observed state of one node.
#[derive(Clone, Copy, Debug)]
pub struct NodeObservation<'a> {
    /// The Node.
    pub node: Option<&'a NodeView>,
    /// The NodeImage.
    pub image: Option<&'a NodeImageView>,
    /// When we last observed a status write of the daemon.
    pub last_report: Option<Timestamp>,
}

/// One write.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Create the NodeImage.
    Create {
        /// Labels of the new NodeImage.
        labels: BTreeMap<String, String>,
    },
    /// Delete the NodeImage.
    Delete,
    /// Change labels: `None` removes one.
    SetLabels(BTreeMap<String, Option<String>>),
    /// Remove tags, secrets and owners that are not needed.
    RemoveEntries(Removal),
    /// Mark tags as failed.
    FailTags(Vec<TagFailure>),
}

/// Tags, secrets and owners that are no longer needed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removal {
    /// The tags.
    pub tags: Vec<TagRemoval>,
    /// Image and secret.
    pub secrets: Vec<(String, ReferenceObject)>,
    /// Image, tag, and UID of an owner that is deleted or pulls again, while other owners exist.
    pub owners: Vec<(String, String, String)>,
}

/// A tag that is removed if no other job owns it by then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TagRemoval {
    /// Image name.
    pub image: String,
    /// Tag or digest.
    pub tag: String,
    /// Version of the tag.
    pub version: i64,
    /// UIDs of its owners.
    pub owners: Vec<String>,
}

impl TagRemoval {
    /// Whether it is still right for the tag as it is stored: a job that has joined it since needs it.
    #[must_use]
    pub fn applies_to(&self, image: &str, stored: &ImageTagSpec) -> bool {
        let is_planned =
            |owner: &ObjectReference| owner.uid.as_ref().is_none_or(|uid| self.owners.contains(uid));
        self.image == image
            && self.tag == stored.tag
            && self.version == stored.version
            && stored.owner_references.iter().all(is_planned)
    }
}

/// A tag that the manager marks as failed for the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TagFailure {
    /// Image name.
    pub image: String,
    /// Tag or digest.
    pub tag: String,
    /// Version of the tag.
    pub version: i64,
    /// The [`progress_hash`](crate::view::progress_hash) of the daemon's last status of this version, if any.
    pub pulse: Option<u64>,
    /// Message of the failure.
    pub message: &'static str,
}

/// What to do now, and when to requeue.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// At most one action; the rest follows after it.
    pub action: Option<Action>,
    /// When to reconcile although nothing has changed.
    pub requeue_at: Option<Timestamp>,
}

impl Plan {
    fn with_action(act: Action) -> Self {
        Self {
            action: Some(act),
            requeue_at: None,
        }
    }
    fn wait_until(wake: Option<Timestamp>) -> Self {
        Self {
            action: None,
            requeue_at: wake,
        }
    }
}

/// Plans the next action for one node. `repull_at` is when an owner pulls again after a pull that ended at this time.
pub fn plan(
    observed: NodeObservation<'_>,
    owner_state: impl Fn(&TagOwner) -> OwnerState,
    secret_missing: impl Fn(&ReferenceObject) -> bool,
    repull_at: impl Fn(&TagOwner, Timestamp) -> Option<Timestamp>,
    timeouts: Timeouts,
    now: Timestamp,
) -> Plan {
    if observed.node.is_some_and(NodeView::is_virtual) || observed.image.is_some_and(|i| i.terminating) {
        return Plan::default();
    }
    let node = observed.node.filter(|n| !n.terminating);
    let image = match (node, observed.image) {
        (None, None) => return Plan::default(),
        (None, Some(image)) if !image.is_fake() => return Plan::with_action(Action::Delete),
        (Some(node), None) => return plan_creation(node, timeouts, now),
        (_, Some(image)) => image,
    };
    let mut requeue = EarliestRequeue::default();
    let (removable, remaining): (Vec<_>, Vec<_>) = image
        .tags
        .iter()
        .partition(|tag| is_removable(image, tag, &owner_state, &repull_at, now, &mut requeue));
    let secrets = image.non_batch_secrets.iter();
    let mut released_owners = |tag: &TagView| {
        let owners = tag.owners.iter().filter(|owner| {
            owner_state(owner) == OwnerState::Deleted
                || pulls_again(image, tag, owner, &repull_at, now, &mut requeue)
        });
        let named = owners.map(|owner| (tag.image.clone(), tag.tag.clone(), owner.uid.clone()));
        named.collect::<Vec<_>>()
    };
    let removal = Removal {
        tags: removable
            .iter()
            .map(|t| TagRemoval {
                image: t.image.clone(),
                tag: t.tag.clone(),
                version: t.version,
                owners: t.owners.iter().map(|owner| owner.uid.clone()).collect(),
            })
            .collect(),
        secrets: secrets.filter(|(_, s)| secret_missing(s)).cloned().collect(),
        owners: remaining.into_iter().flat_map(&mut released_owners).collect(),
    };
    if removal != Removal::default() {
        return Plan::with_action(Action::RemoveEntries(removal));
    }
    let failures = tag_failures(observed, image, timeouts, now, &mut requeue);
    if !failures.is_empty() {
        return Plan::with_action(Action::FailTags(failures));
    }
    // Last: a webhook or a policy that labels all objects undoes it each time.
    let labels = node.and_then(|n| label_changes(&n.labels, &image.labels));
    Plan {
        action: labels.map(Action::SetLabels),
        requeue_at: requeue.0,
    }
}

fn plan_creation(node: &NodeView, timeouts: Timeouts, now: Timestamp) -> Plan {
    let Some(since) = node.ready_since.filter(|_| node.ready) else {
        return Plan::default();
    };
    // Kubelet writes that time by the node's clock, which may have been ahead by hours.
    if !is_over(since, timeouts.creation_delay, now) {
        return Plan::wait_until(Some(add(since, timeouts.creation_delay)));
    }
    Plan::with_action(Action::Create {
        labels: node.labels.clone(),
    })
}

/// The changes from `current` to `desired`; `None` when they are equal.
fn label_changes(
    desired: &BTreeMap<String, String>,
    current: &BTreeMap<String, String>,
) -> Option<BTreeMap<String, Option<String>>> {
    if desired == current {
        return None;
    }
    let removed = current
        .keys()
        .filter(|k| !desired.contains_key(*k))
        .map(|k| (k.clone(), None));
    let set = desired
        .iter()
        .filter(|(k, v)| current.get(*k) != Some(v))
        .map(|(k, v)| (k.clone(), Some(v.clone())));
    Some(removed.chain(set).collect())
}

/// The earliest time to requeue.
#[derive(Default)]
struct EarliestRequeue(Option<Timestamp>);

impl EarliestRequeue {
    /// Whether that time has passed; if not, requeue at it.
    fn has_passed(&mut self, at: Timestamp, now: Timestamp) -> bool {
        if now < at {
            self.0 = Some(self.0.map_or(at, |first| first.min(at)));
        }
        now >= at
    }
}

/// Whether an owner of a tag that others still need gives it up, in order to request it again.
fn pulls_again(
    image: &NodeImageView,
    tag: &TagView,
    owner: &TagOwner,
    repull_at: &impl Fn(&TagOwner, Timestamp) -> Option<Timestamp>,
    now: Timestamp,
    requeue: &mut EarliestRequeue,
) -> bool {
    let due = completion(image, tag).and_then(|completed| repull_at(owner, completed));
    due.is_some_and(|due| requeue.has_passed(due, now))
}

/// When the pull of a tag ended. The node's clock may be behind: a pull does not end before its request.
fn completion(image: &NodeImageView, tag: &TagView) -> Option<Timestamp> {
    let status = image.status_of(tag).filter(|status| status.ended())?;
    status.completed.max(tag.created)
}

/// Whether a tag is no longer needed. One that a running job needs is kept at any age.
fn is_removable(
    image: &NodeImageView,
    tag: &TagView,
    owner_state: &impl Fn(&TagOwner) -> OwnerState,
    repull_at: &impl Fn(&TagOwner, Timestamp) -> Option<Timestamp>,
    now: Timestamp,
    requeue: &mut EarliestRequeue,
) -> bool {
    let owners: Vec<OwnerState> = tag.owners.iter().map(owner_state).collect();
    if tag.created.is_none() || (!owners.is_empty() && owners.iter().all(|o| *o == OwnerState::Deleted)) {
        return true;
    }
    if owners.contains(&OwnerState::Counting) {
        return false;
    }
    let completed = completion(image, tag);
    // A job that never ends pulls again when its tag is removed, however long others want to see it.
    let repull = completed.and_then(|at| tag.owners.iter().filter_map(|owner| repull_at(owner, at)).min());
    if let Some(due) = repull {
        // Its schedule may have been edited since: the TTL is of an earlier one.
        return requeue.has_passed(due, now);
    }
    let (Some(completed), Some(ttl)) = (completed, tag.ttl) else {
        return false;
    };
    requeue.has_passed(add(completed, SignedDuration::from_secs(ttl)), now)
}

/// The tags that the manager marks as failed for the daemon.
fn tag_failures(
    observed: NodeObservation<'_>,
    image: &NodeImageView,
    timeouts: Timeouts,
    now: Timestamp,
    requeue: &mut EarliestRequeue,
) -> Vec<TagFailure> {
    let budgets = Budgets::new(image);
    let failure = |tag: &TagView| {
        Some(TagFailure {
            message: failure_reason(observed, image, tag, &budgets, timeouts, now, requeue)?,
            image: tag.image.clone(),
            tag: tag.tag.clone(),
            version: tag.version,
            pulse: image.status_of(tag).map(|status| status.progress_hash),
        })
    };
    image.tags.iter().filter_map(failure).collect()
}

/// Why the manager marks a tag as failed; `None` if it does not.
fn failure_reason(
    observed: NodeObservation<'_>,
    image: &NodeImageView,
    tag: &TagView,
    budgets: &Budgets<'_>,
    timeouts: Timeouts,
    now: Timestamp,
    requeue: &mut EarliestRequeue,
) -> Option<&'static str> {
    let status = image.status_of(tag);
    let created = tag.created?;
    if status.is_some_and(TagStatusView::ended) {
        return None;
    }
    let last_report = observed.last_report.map_or(created, |h| h.max(created));
    let node = observed.node.filter(|n| !n.ready);
    if let Some(since) = node.and_then(|n| n.ready_since) {
        // kubelet may be down while the daemon and the runtime work: a pull that has begun gets more time than one that
        // no daemon has begun.
        let timeout = if status.is_some() {
            timeouts.no_response
        } else {
            timeouts.unready_no_response
        };
        if requeue.has_passed(add(since.max(last_report), timeout), now) {
            return Some(NO_RESPONSE);
        }
    }
    let Some(status) = status else {
        // A daemon answers at once, even if the tag has to queue.
        return requeue
            .has_passed(add(created, timeouts.no_response), now)
            .then_some(NO_RESPONSE);
    };
    // As for the daemon, it counts from the first attempt: the tag may have to wait for a slot.
    if let (Some(seconds), Some(started)) = (tag.deadline, status.started) {
        let timeout = SignedDuration::from_secs(seconds).saturating_add(timeouts.no_response);
        if requeue.has_passed(add(started.max(created), timeout), now) {
            return Some(keys::DEADLINE_EXCEEDED);
        }
    }
    // While pulls of a node continue, one of them ends within the longest budget, and the daemon reports it.
    let timeout = budgets.longest(tag).saturating_add(timeouts.no_response);
    requeue
        .has_passed(add(last_report, timeout), now)
        .then_some(NO_RESPONSE)
}

/// The longest budget of the unfinished tags of each namespace, in seconds.
struct Budgets<'a>(BTreeMap<Option<&'a str>, i64>);

impl<'a> Budgets<'a> {
    fn new(image: &'a NodeImageView) -> Self {
        let mut longest = BTreeMap::new();
        let is_unfinished = |tag: &&TagView| image.status_of(tag).is_none_or(|status| !status.ended());
        for tag in image.tags.iter().filter(is_unfinished) {
            for owner in &tag.owners {
                let budget = longest.entry(namespace(owner)).or_insert(0);
                *budget = tag.budget.max(*budget);
            }
        }
        Self(longest)
    }

    /// The longest budget of those tags that this one may have to wait for: those of other namespaces leave a slot, and
    /// their limits may be as long as they like.
    fn longest(&self, tag: &TagView) -> SignedDuration {
        let of_owners = tag
            .owners
            .iter()
            .filter_map(|owner| self.0.get(&namespace(owner)));
        let seconds = of_owners.copied().fold(tag.budget, i64::max);
        SignedDuration::from_secs(seconds).min(MAX_SILENCE)
    }
}

fn namespace(owner: &TagOwner) -> Option<&str> {
    owner.job.as_ref()?.namespace.as_deref()
}

fn add(at: Timestamp, span: SignedDuration) -> Timestamp {
    at.checked_add(span).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests;

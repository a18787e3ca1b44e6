//! What to do about one node's NodeImage.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};

use crate::view::{NodeImageView, NodeView, Owner, TagStatusView, TagView};
use kruise_api::keys;
use kruise_api::node_image::ReferenceObject;

/// Message of a tag whose daemon says nothing; upstream's.
pub const NO_RESPONSE: &str = "node has not responded for a long time";

/// Time spans that the decisions depend on.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// How long a Node must have been ready before its NodeImage is made.
    pub creation_delay: SignedDuration,
    /// How long a daemon may say nothing beyond the time that its work can take.
    pub response: SignedDuration,
    /// How long the daemon of a node that is not ready may say nothing about a tag that it has not begun.
    pub unready: SignedDuration,
}

impl Rules {
    /// Upstream's ten minutes for a daemon that may be at work, and its documented minute where the node is not ready and
    /// nothing was begun.
    #[must_use]
    pub fn new(creation_delay: SignedDuration) -> Self {
        Self {
            creation_delay,
            response: SignedDuration::from_mins(10),
            unready: SignedDuration::from_mins(1),
        }
    }
}

/// What is known of the owner of a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// It is there, and its tag may expire.
    There,
    /// It is a job that counts on the tag to stay until the job ends.
    Counting,
    /// It does not exist any more.
    Gone,
}

/// What is known of one node.
#[derive(Clone, Copy, Debug)]
pub struct Observed<'a> {
    /// The Node.
    pub node: Option<&'a NodeView>,
    /// The NodeImage.
    pub image: Option<&'a NodeImageView>,
    /// When the daemon last wrote its status, as far as we have seen.
    pub heard: Option<Timestamp>,
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Act {
    /// Make the NodeImage.
    Create {
        /// With these labels.
        labels: BTreeMap<String, String>,
    },
    /// Remove the NodeImage.
    Delete,
    /// Change labels: `None` removes one.
    Label(BTreeMap<String, Option<String>>),
    /// Remove what is no longer wanted.
    Remove(Removal),
    /// Mark tags as failed.
    Fail(Vec<Failure>),
}

/// Tags and secrets that are no longer wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removal {
    /// Image, tag and version.
    pub tags: Vec<(String, String, i64)>,
    /// Image and secret.
    pub secrets: Vec<(String, ReferenceObject)>,
    /// Image, tag, and UID of an owner that has gone while others have not.
    pub owners: Vec<(String, String, String)>,
}

/// A tag that is given up on the daemon's behalf.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Image name.
    pub image: String,
    /// Tag or digest.
    pub tag: String,
    /// Version.
    pub version: i64,
    /// The [`pulse`](crate::view::pulse) of the daemon's last word about this version, if there was any.
    pub pulse: Option<u64>,
    /// Why.
    pub message: &'static str,
}

/// What to do now, and when to look again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// At most one thing; what it leaves comes after it.
    pub act: Option<Act>,
    /// When something will have to be done without any change.
    pub wake: Option<Timestamp>,
}

impl Plan {
    fn act(act: Act) -> Self {
        Self {
            act: Some(act),
            wake: None,
        }
    }
    fn wait(wake: Option<Timestamp>) -> Self {
        Self { act: None, wake }
    }
}

/// What to do about one node.
pub fn plan(
    seen: Observed<'_>,
    interest: impl Fn(&Owner) -> Interest,
    secret_gone: impl Fn(&ReferenceObject) -> bool,
    rules: Rules,
    now: Timestamp,
) -> Plan {
    if seen.node.is_some_and(NodeView::is_virtual) || seen.image.is_some_and(|i| i.deleting) {
        return Plan::default();
    }
    let node = seen.node.filter(|n| !n.deleting);
    let image = match (node, seen.image) {
        (None, None) => return Plan::default(),
        (None, Some(image)) if !image.is_fake() => return Plan::act(Act::Delete),
        (Some(node), None) => return create(node, rules, now),
        (_, Some(image)) => image,
    };
    if let Some(labels) = node.and_then(|n| relabel(&n.labels, &image.labels)) {
        return Plan::act(Act::Label(labels));
    }
    let mut first = Wake::default();
    let (unwanted, kept): (Vec<_>, Vec<_>) = image
        .tags
        .iter()
        .partition(|tag| unwanted(image, tag, &interest, now, &mut first));
    let secrets = image.old_secrets.iter();
    let gone = |tag: &TagView| {
        let owners = tag
            .owners
            .iter()
            .filter(|owner| interest(owner) == Interest::Gone);
        let named = owners.map(|owner| (tag.image.clone(), tag.tag.clone(), owner.uid.clone()));
        named.collect::<Vec<_>>()
    };
    let removal = Removal {
        tags: unwanted
            .iter()
            .map(|t| (t.image.clone(), t.tag.clone(), t.version))
            .collect(),
        secrets: secrets.filter(|(_, s)| secret_gone(s)).cloned().collect(),
        owners: kept.into_iter().flat_map(gone).collect(),
    };
    if removal != Removal::default() {
        return Plan::act(Act::Remove(removal));
    }
    let failures = failures(seen, image, rules, now, &mut first);
    if failures.is_empty() {
        Plan::wait(first.0)
    } else {
        Plan::act(Act::Fail(failures))
    }
}

fn create(node: &NodeView, rules: Rules, now: Timestamp) -> Plan {
    let Some(since) = node.ready_since.filter(|_| node.ready) else {
        return Plan::default();
    };
    let due = add(since, rules.creation_delay);
    if now < due {
        return Plan::wait(Some(due));
    }
    Plan::act(Act::Create {
        labels: node.labels.clone(),
    })
}

/// The changes that make `have` equal to `want`.
fn relabel(
    want: &BTreeMap<String, String>,
    have: &BTreeMap<String, String>,
) -> Option<BTreeMap<String, Option<String>>> {
    if want == have {
        return None;
    }
    let gone = have
        .keys()
        .filter(|k| !want.contains_key(*k))
        .map(|k| (k.clone(), None));
    let set = want
        .iter()
        .filter(|(k, v)| have.get(*k) != Some(v))
        .map(|(k, v)| (k.clone(), Some(v.clone())));
    Some(gone.chain(set).collect())
}

/// The earliest of several moments.
#[derive(Default)]
struct Wake(Option<Timestamp>);

impl Wake {
    /// Whether that moment has come; if not, it is remembered.
    fn due(&mut self, at: Timestamp, now: Timestamp) -> bool {
        if now < at {
            self.0 = Some(self.0.map_or(at, |first| first.min(at)));
        }
        now >= at
    }
}

/// Whether nobody wants a tag any more. One that a running job counts on stays, however old it is.
fn unwanted(
    image: &NodeImageView,
    tag: &TagView,
    interest: &impl Fn(&Owner) -> Interest,
    now: Timestamp,
    first: &mut Wake,
) -> bool {
    let owners: Vec<Interest> = tag.owners.iter().map(interest).collect();
    if tag.created.is_none() || (!owners.is_empty() && owners.iter().all(|o| *o == Interest::Gone)) {
        return true;
    }
    if owners.contains(&Interest::Counting) {
        return false;
    }
    let status = image.status_of(tag).filter(|s| s.ended());
    // Where it is not known when it ended, its time to go counts from when it was asked for.
    let completed = status.and_then(|s| s.completed.or(tag.created));
    let (Some(completed), Some(ttl)) = (completed, tag.ttl) else {
        return false;
    };
    first.due(add(completed, SignedDuration::from_secs(ttl)), now)
}

/// The tags that are given up on the daemon's behalf.
fn failures(
    seen: Observed<'_>,
    image: &NodeImageView,
    rules: Rules,
    now: Timestamp,
    first: &mut Wake,
) -> Vec<Failure> {
    let given_up = |tag: &TagView| {
        Some(Failure {
            message: given_up(seen, image, tag, rules, now, first)?,
            image: tag.image.clone(),
            tag: tag.tag.clone(),
            version: tag.version,
            pulse: image.status_of(tag).map(|status| status.pulse),
        })
    };
    image.tags.iter().filter_map(given_up).collect()
}

/// Why a tag is given up on the daemon's behalf, if it is.
fn given_up(
    seen: Observed<'_>,
    image: &NodeImageView,
    tag: &TagView,
    rules: Rules,
    now: Timestamp,
    first: &mut Wake,
) -> Option<&'static str> {
    let status = image.status_of(tag);
    let created = tag.created?;
    if status.is_some_and(TagStatusView::ended) {
        return None;
    }
    let heard = seen.heard.map_or(created, |h| h.max(created));
    let node = seen.node.filter(|n| !n.ready);
    if let Some(since) = node.and_then(|n| n.ready_since) {
        // kubelet may be down while the daemon and the runtime are well: what is under way is not given up as early as what
        // no daemon has begun.
        let silence = if status.is_some() {
            rules.response
        } else {
            rules.unready
        };
        if first.due(add(since.max(heard), silence), now) {
            return Some(NO_RESPONSE);
        }
    }
    if status.is_none() {
        // A daemon answers at once, also to a tag that has to queue.
        return first
            .due(add(created, rules.response), now)
            .then_some(NO_RESPONSE);
    }
    if let Some(seconds) = tag.deadline {
        let limit = SignedDuration::from_secs(seconds).saturating_add(rules.response);
        if first.due(add(created, limit), now) {
            return Some(keys::DEADLINE_EXCEEDED);
        }
    }
    // While pulls of a node go on, one of them ends within the longest budget, and the daemon says so.
    let open = image
        .tags
        .iter()
        .filter(|t| image.status_of(t).is_none_or(|s| !s.ended()));
    let budget = open.map(|t| t.budget).max().unwrap_or(tag.budget);
    let limit = SignedDuration::from_secs(budget).saturating_add(rules.response);
    first.due(add(heard, limit), now).then_some(NO_RESPONSE)
}

fn add(at: Timestamp, span: SignedDuration) -> Timestamp {
    at.checked_add(span).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests;

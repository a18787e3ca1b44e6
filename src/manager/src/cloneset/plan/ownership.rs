//! Which Pods are the CloneSet's: adopting and releasing them.

use serde_json::json;

use super::claims;
use super::draft::Draft;
use super::types::{Act, Revision, Why};
use super::view::View;
use crate::view::matches;
use kruise_api::cloneset::texts;
use kruise_workload::in_place::{Pod, Target, Write};

/// What became of the Pods.
pub(super) struct Claimed {
    /// Whether some are being adopted, or will be, so that it is too early to count: a Pod that is made in the place of one
    /// that was not adopted at once would have that one deleted.
    pub early: bool,
    /// Whether some are yet to be adopted, now or later.
    pub orphans: bool,
}

/// Whether orphans are adopted, as Kubernetes' own workloads do: while the CloneSet has no status, so that it can take over
/// from a Deployment, or a CloneSet of its name, that was deleted without its Pods. Later on they are left alone, as
/// OpenKruise leaves them: a CloneSet that its manager looked after must not count them when ours begins to.
pub(super) fn adopts(view: &View<'_>) -> bool {
    view.observed.set.is_new()
}

/// Sorts the Pods out: the active ones that count are left in the view. The one who acts makes sure before adoptions that
/// the CloneSet lives, by a live read.
pub(super) fn claim(view: &mut View<'_>, draft: &mut Draft) -> Claimed {
    let observed = view.observed;
    let set = view.owner();
    let (trusted, adopts) = (trusted(view), adopts(view));
    let mut claimed = Claimed {
        early: false,
        orphans: false,
    };
    for pod in observed.pods.iter().map(AsRef::as_ref) {
        let matching = matches(&view.spec.selector, &pod.labels);
        match &pod.controller {
            Some(controller) if *controller == set => {
                if matching || !trusted {
                    if pod.active() {
                        view.count(pod);
                    }
                } else {
                    draft.patch(view, pod, Why::Release, vec![release(pod, &set.uid)]);
                }
            }
            None if matching && pod.active() && trusted && adopts => {
                let reference = json!({ "metadata": { "ownerReferences": [view.owner_reference()] } });
                let write = Write::new(Target::Pod, pod, reference);
                let adopt = Act::PatchPod {
                    uid: pod.uid.clone(),
                    name: pod.name.clone(),
                    why: Why::Adopt,
                    revision: None,
                    writes: vec![write],
                    claims: claims::orphans(view, pod),
                };
                claimed.early |= !view.given_up(&adopt.subject());
                draft.act(view, adopt);
                claimed.orphans = true;
            }
            _ => {}
        }
    }
    claimed
}

/// Whether the selector may be gone by. Where what the CloneSet asks for is refused the mistake may be the selector's,
/// unless it picks what was made so far.
fn trusted(view: &View<'_>) -> bool {
    let picks = |revision: &Revision| {
        let labels = texts(&revision.data["spec"]["template"]["metadata"]["labels"]);
        matches(&view.spec.selector, &labels)
    };
    !view.held() || view.revision(&view.observed.update).is_some_and(picks)
}

fn release(pod: &Pod, uid: &str) -> Write {
    let owners = json!([{ "$patch": "delete", "uid": uid }]);
    Write::new(
        Target::Pod,
        pod,
        json!({ "metadata": { "ownerReferences": owners } }),
    )
}

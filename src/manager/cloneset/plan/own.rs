//! Which Pods are the CloneSet's: adopting and releasing them.

use serde_json::json;

use super::create::owner;
use super::types::{Act, Revision, Why};
use super::view::{Draft, View};
use super::volumes;
use crate::api::cloneset::texts;
use crate::in_place::{Pod, Target, Write};
use crate::manager::view::matches;

/// Sorts the Pods out: the active ones that count are left in the view. Whether Pods are yet to be adopted, so that
/// it is too early to count.
///
/// Unlike upstream, Pods without a controller are adopted as Kubernetes' own workloads do. The one who acts makes
/// sure first that the CloneSet lives, by a live read.
pub(super) fn claim(view: &mut View<'_>, draft: &mut Draft) -> bool {
    let observed = view.observed;
    let set = view.owner();
    let (mut early, trusted) = (false, trusted(view));
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
            None if matching && pod.active() && trusted => {
                let reference = json!({ "metadata": { "ownerReferences": [owner(view)] } });
                let write = Write::new(Target::Pod, pod, reference);
                let adopt = Act::PatchPod {
                    uid: pod.uid.clone(),
                    name: pod.name.clone(),
                    why: Why::Adopt,
                    writes: vec![write],
                    claims: volumes::orphans(view, pod),
                };
                early |= draft.act(view, adopt);
            }
            _ => {}
        }
    }
    early
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

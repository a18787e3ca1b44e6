//! Which Pods are the CloneSet's: adopting and releasing them.

use serde_json::json;

use super::create::owner;
use super::types::Why;
use super::view::{Draft, View};
use crate::in_place::{Pod, Target, Write};
use crate::manager::view::matches;

/// Sorts the Pods out: the active ones that count are left in the view. Whether Pods are yet to be adopted, so that
/// it is too early to count.
///
/// Unlike upstream, Pods without a controller are adopted as Kubernetes' own workloads do. The one who acts makes
/// sure first that the CloneSet lives, by a live read.
pub(super) fn claim(view: &mut View<'_>, draft: &mut Draft) -> bool {
    let observed = view.observed;
    let uid = observed.set.metadata.uid.clone().unwrap_or_default();
    let mut early = false;
    for pod in observed.pods.iter().map(AsRef::as_ref) {
        let matching = matches(&view.spec.selector, &pod.labels);
        match &pod.controller {
            Some(controller) if *controller == uid => {
                if matching {
                    if pod.active() {
                        view.count(pod);
                    }
                } else {
                    draft.patch(view, pod, Why::Release, vec![release(pod, &uid)]);
                }
            }
            None if matching && pod.active() => {
                let reference = json!({ "metadata": { "ownerReferences": [owner(view)] } });
                let write = Write::new(Target::Pod, pod, reference);
                early |= draft.patch(view, pod, Why::Adopt, vec![write]);
            }
            _ => {}
        }
    }
    early
}

fn release(pod: &Pod, uid: &str) -> Write {
    let owners = json!([{ "$patch": "delete", "uid": uid }]);
    Write::new(
        Target::Pod,
        pod,
        json!({ "metadata": { "ownerReferences": owners } }),
    )
}

//! Decides which Pods the CloneSet owns: adopts and releases them.

use serde_json::json;

use super::builder::PlanBuilder;
use super::claims;
use super::types::{Action, ParsedRevision, PatchReason};
use super::view::PlanView;
use kruise_api::cloneset::string_map;
use kruise_workload::in_place::{PatchTarget, Pod, PodWrite};

/// Result of claiming Pods.
pub(super) struct ClaimResult {
    /// Whether some are being adopted, or will be, so that it is too early to count: a Pod created instead of one that
    /// is adopted late would cause the deletion of that one.
    pub adoption_pending: bool,
    /// Whether some are still to be adopted, now or later.
    pub has_orphans: bool,
}

/// Whether orphans are adopted, as Kubernetes' own workloads do: while the CloneSet has no status, so that it can take
/// over from a Deployment, or a CloneSet of its name, that was deleted without its Pods. Later they are left alone, as
/// in OpenKruise: a CloneSet that its manager reconciled must not count them when ours takes over.
pub(super) fn adopts_orphans(view: &PlanView<'_>) -> bool {
    view.observed.set.is_new()
}

/// Claims Pods: the active ones that count are added to the view. Before adoptions the executor verifies with a live
/// read that the CloneSet exists.
pub(super) fn claim_pods(view: &mut PlanView<'_>, builder: &mut PlanBuilder) -> ClaimResult {
    let observed = view.observed;
    let set = view.owner();
    let (selector_usable, adopts) = (selector_is_usable(view), adopts_orphans(view));
    let mut result = ClaimResult {
        adoption_pending: false,
        has_orphans: false,
    };
    for pod in observed.pods.iter().map(AsRef::as_ref) {
        let matching = view.selector.matches(&pod.labels);
        match &pod.controller {
            Some(controller) if *controller == set => {
                if matching || !selector_usable {
                    if pod.active() {
                        view.add_pod(pod);
                    }
                } else {
                    builder.push_patch(
                        view,
                        pod,
                        PatchReason::Release,
                        vec![release_patch(pod, &set.uid)],
                    );
                }
            }
            None if matching && pod.active() && selector_usable && adopts => {
                let reference = json!({ "metadata": { "ownerReferences": [view.owner_reference()] } });
                let write = PodWrite::new(PatchTarget::Pod, pod, reference);
                let adopt = Action::PatchPod {
                    uid: pod.uid.clone(),
                    name: pod.name.clone(),
                    reason: PatchReason::Adopt,
                    revision: None,
                    writes: vec![write],
                    claims: claims::orphan_claims(view, pod),
                };
                result.adoption_pending |= !view.failed_permanently(&adopt.subject());
                builder.push(view, adopt);
                result.has_orphans = true;
            }
            _ => {}
        }
    }
    result
}

/// Whether the selector may be used. If the CloneSet's template is rejected, the mistake may be in the selector, unless
/// it matches the Pods created so far.
fn selector_is_usable(view: &PlanView<'_>) -> bool {
    let matches_template = |revision: &ParsedRevision| {
        let labels = string_map(&revision.data["spec"]["template"]["metadata"]["labels"]);
        view.selector.matches(&labels)
    };
    !view.template_rejected()
        || view
            .revision(&view.observed.update_revision)
            .is_some_and(matches_template)
}

fn release_patch(pod: &Pod, uid: &str) -> PodWrite {
    let owners = json!([{ "$patch": "delete", "uid": uid }]);
    PodWrite::new(
        PatchTarget::Pod,
        pod,
        json!({ "metadata": { "ownerReferences": owners } }),
    )
}

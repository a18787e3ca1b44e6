//! Which Pods are updated now, and how.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::builder::{PendingWrites, PlanBuilder, WaitReason};
use super::limits::on_delete;
use super::replica_counts::ReplicaCounts;
use super::types::{FailureSubject, PatchReason};
use super::view::{ObservedPod, PlanView};
use super::{create, lifecycle, waiting};
use kruise_api::cloneset::PodUpdateStrategyType as Policy;
use kruise_api::keys;
use kruise_api::lifecycle::LifecycleStateType as State;
use kruise_workload::in_place::{
    self, MustRecreate, Options, PatchTarget, Pod, PodWrite, RevisionData, Spec, patch, resize,
    resize_rollback, spec,
};
use kruise_workload::{order, pods};

/// The in-place change from each revision to the target, by the name of the revision.
type Specs = BTreeMap<String, Result<Spec, MustRecreate>>;

/// Plans the updates that the limits allow now, `room` at most. `pending` are the writes that Pods need anyway; those
/// of updated Pods are removed from it.
pub(super) fn plan_updates(
    view: &PlanView<'_>,
    pending: &mut BTreeMap<String, PendingWrites>,
    mut room: usize,
    builder: &mut PlanBuilder,
) {
    let chosen = plan_rollout(view, pending, &mut room, builder);
    restore_sizes(view, &chosen, pending, room, builder);
}

/// Updates Pods; returns the indexes of those that are due now, whether they wait or not.
fn plan_rollout(
    view: &PlanView<'_>,
    pending: &mut BTreeMap<String, PendingWrites>,
    room: &mut usize,
    builder: &mut PlanBuilder,
) -> BTreeSet<usize> {
    let numbers = view.replica_counts(|pod| pod.updated);
    let forward = numbers.update >= 0;
    if on_delete(view.spec) {
        let count = if forward {
            None
        } else {
            usize::try_from(numbers.update.unsigned_abs()).ok()
        };
        let others = view.pods.iter().filter(|pod| pod.updated != forward);
        others.take(count.unwrap_or(usize::MAX)).for_each(|pod| {
            builder.add_wait(
                WaitReason::OnDelete,
                "to be deleted: updateStrategy type is OnDelete",
                pod,
            )
        });
    }
    let target = match forward {
        true => &view.observed.update_revision,
        false => &view.observed.current_revision,
    };
    let mut spec_cache = Specs::new();
    let rolling = view.spec.rolling_update();
    let stopped = view.template_rejected() || rolling.is_some_and(|r| r.paused);
    // The order matters then only for Pods that are being prepared, of which some are to go on.
    if stopped && view.pods.iter().all(|pod| pod.state != State::PreparingUpdate) {
        return BTreeSet::new();
    }
    let ordered = rolling.is_some_and(|r| r.priority_strategy.is_some() || !r.scatter_strategy.is_empty());
    let (mut candidates, mut remaining) = choose_candidates(view, &numbers, forward);
    let failures = &view.observed.failures;
    if !ordered && !failures.contains_key(&FailureSubject::InPlaceUpdates) {
        // With a partition, a Pod that cannot be updated would hold the place of one that can, for ever. What is
        // refused for all must not have each Pod prepared in turn.
        candidates.sort_by_cached_key(|at| {
            let pod = &view.pods[*at];
            !pod.specified && is_blocked(view, pod, target, &mut spec_cache)
        });
    }
    let regular = remaining.min(candidates.len());
    let mut chosen: BTreeSet<usize> = candidates[..regular].iter().copied().collect();
    if stopped {
        cancel_preparations(view, &chosen, pending);
        return BTreeSet::new();
    }
    // Unavailable Pods beyond may take a place below, and one that has taken it is prepared already.
    let mut undecided: BTreeSet<usize> = candidates[regular..].iter().copied().collect();
    undecided.retain(|at| !view.pods[*at].available);
    cancel_preparations(view, &(&chosen | &undecided), pending);
    // Pods whose update was refused do not continue it: each wait of the update that replaces it would retry it.
    for pod in chosen
        .iter()
        .map(|at| &view.pods[*at])
        .filter(|pod| grace_update_rejected(view, pod))
    {
        pending.remove(&pod.uid);
    }
    // What was refused for several Pods would be refused for the next: one is tried at a time, with a growing backoff.
    if let Some(until) = view.retry_at(&FailureSubject::InPlaceUpdates) {
        builder.requeue_at(until);
        chosen.append(&mut undecided);
        return chosen;
    }
    if view
        .observed
        .failures
        .contains_key(&FailureSubject::InPlaceUpdates)
    {
        *room = (*room).min(1);
    }
    let mut budget = UpdateBudget::new(view, &numbers, target);
    let pods = candidates.iter().map(|at| (at, &view.pods[*at]));
    for (place, (at, pod)) in pods.enumerate() {
        if remaining == 0 {
            break;
        }
        if *room == 0 {
            // The next reconcile decides about these.
            chosen.append(&mut undecided);
            break;
        }
        // If the limit blocks the Pods whose turn it is, unavailable Pods may take their places, unless the user chose
        // the order. But then too if nothing else can continue: without maxUnavailable, an old Pod that never becomes
        // available may hold the place of the only Pod that may be unavailable.
        let keeps_order = ordered && (view.limits.max_unavailable > 0 || budget.updating > 0);
        if place >= regular && (keeps_order || pod.available || !budget.allows(false)) {
            continue;
        }
        // Updating an unavailable Pod costs nothing, so it does not wait for those before it in the order.
        if !budget.allows(pod.available) {
            builder.add_wait(
                WaitReason::MaxUnavailable,
                format!("to be updated: {}", waiting::unavailable_limit_text(view)),
                pod,
            );
            continue;
        }
        remaining -= 1;
        undecided.remove(at);
        chosen.insert(*at);
        if pending.get(&pod.uid).is_some_and(|p| p.exclusive) || requeue_if_delayed(view, pod, builder) {
            continue;
        }
        match next_patch(view, pod, target, &mut spec_cache) {
            // This Pod will not become unavailable, so others may.
            Err(why) => {
                builder.add_stuck(why, pod);
                cancel_preparation(view, pod, pending);
                chosen.remove(at);
            }
            Ok(None) => budget.consume(pod.available),
            Ok(Some(step)) => {
                budget.consume(pod.available);
                pending.remove(&pod.uid);
                *room -= usize::from(builder.push_update(view, pod, Some(target), step));
            }
        }
    }
    for at in undecided {
        cancel_preparation(view, &view.pods[at], pending);
    }
    chosen
}

/// Whether the Pod cannot be updated until a user changes something, or its change was refused.
fn is_blocked(view: &PlanView<'_>, pod: &ObservedPod<'_>, target: &str, spec_cache: &mut Specs) -> bool {
    let failure = view.observed.failures.get(&FailureSubject::Pod(pod.uid.clone()));
    let rolling = view.spec.rolling_update();
    let in_place_only = rolling.is_some_and(|r| r.pod_update_policy == Some(Policy::InPlaceOnly));
    failure.is_some_and(|failure| failure.permanent && !failure.resize_rejected)
        || matches!(pod.state, State::Other(_))
        || in_place_only && in_place_spec(view, pod, target, spec_cache).is_err()
}

/// The indexes of the Pods that may be updated or rolled back, in order, and how many of them to change. Those marked
/// for deletion come first.
///
/// If the number of updated Pods is already right, an unavailable old Pod may occupy the place of a Pod that must be
/// created before another is deleted. Neither would ever be deleted, so the unavailable one is updated, too.
fn choose_candidates(view: &PlanView<'_>, numbers: &ReplicaCounts, forward: bool) -> (Vec<usize>, usize) {
    let all_updated = numbers.update == 0;
    let surplus = surplus(view, forward);
    let target_count = if all_updated {
        surplus - numbers.use_surge_old
    } else {
        numbers.update.abs().min(surplus)
    };
    let target_count = target_count.max(0);
    let target_count = usize::try_from(target_count).unwrap_or(usize::MAX);
    if target_count == 0 || on_delete(view.spec) {
        return (Vec::new(), 0);
    }
    let candidates = (0..view.pods.len()).filter(|at| {
        let pod = &view.pods[*at];
        is_candidate(view, pod, forward) && !(all_updated && pod.available)
    });
    let pods: Vec<&Pod> = view.pods.iter().map(|seen| seen.pod).collect();
    let rolling = view.spec.rolling_update();
    let priority = rolling.and_then(|r| r.priority_strategy.as_ref());
    let scatter = rolling.map_or(&[][..], |r| &r.scatter_strategy);
    let mut candidates = order::update_order(&pods, candidates.collect(), priority, scatter);
    order::preparing_first(&pods, &mut candidates);
    // A Pod that will be deleted anyway is replaced by one of the other revision, so no other Pod needs to change.
    candidates.sort_by_key(|at| !view.pods[*at].specified);
    (candidates, target_count)
}

/// How many more Pods may be updated.
struct UpdateBudget {
    limit: i64,
    /// The limit for Pods that are already unavailable.
    unavailable_limit: i64,
    /// Number of unavailable Pods.
    unavailable: i64,
    /// Pods of the target revision that are or will be unavailable.
    updating: i64,
}

pub(super) fn to_i64(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// How many Pods may be unavailable when no more need an update: also those beyond `replicas`.
pub(super) fn spare_unavailable(view: &PlanView<'_>) -> i64 {
    view.limits.max_unavailable + to_i64(view.pods.len()) - view.limits.replicas
}

impl UpdateBudget {
    /// Missing Pods lower the limit, and they may be missing for as long as others are unavailable. So one that is
    /// already unavailable may be updated nevertheless.
    fn new(view: &PlanView<'_>, numbers: &ReplicaCounts, target: &str) -> Self {
        let unavailable = || view.pods.iter().filter(|p| !p.available);
        let limit = match numbers.update {
            0 => spare_unavailable(view),
            _ => numbers.update_max_unavailable,
        };
        let missing = numbers.scale_up > 0;
        Self {
            limit,
            unavailable_limit: if missing {
                limit.max(view.limits.max_unavailable).max(1)
            } else {
                limit
            },
            unavailable: to_i64(unavailable().count()),
            updating: to_i64(unavailable().filter(|p| pods::has_revision(p, target)).count()),
        }
    }

    fn allows(&self, available: bool) -> bool {
        if available {
            self.updating < self.limit && self.unavailable < self.limit
        } else {
            self.updating < self.unavailable_limit
        }
    }

    fn consume(&mut self, available: bool) {
        self.unavailable += i64::from(available);
        self.updating += 1;
    }
}

/// Number of Pods beyond those that must keep their revision: the current revision if `forward`, or else the update
/// revision. While Pods are missing, new ones fill the gaps of either revision.
fn surplus(view: &PlanView<'_>, forward: bool) -> i64 {
    let keeps_revision =
        |pod: &&ObservedPod<'_>| pod.updated != forward && pod.state != State::PreparingDelete;
    let existing = i64::try_from(view.pods.iter().filter(keeps_revision).count()).unwrap_or(i64::MAX);
    let (replicas, partition) = (view.limits.replicas, view.limits.partition);
    existing - if forward { partition } else { replicas - partition }
}

/// Whether the Pod may be updated if `forward`, or else rolled back.
fn is_candidate(view: &PlanView<'_>, pod: &ObservedPod<'_>, forward: bool) -> bool {
    pod.updated != forward
        && pod.state != State::PreparingDelete
        && (!in_place::in_grace_period(pod)
            || grace_update_rejected(view, pod)
            || pod.state == State::Updated)
}

/// Whether the change after the Pod's grace period was refused, so that another revision should take over.
fn grace_update_rejected(view: &PlanView<'_>, pod: &Pod) -> bool {
    let failure = view.observed.failures.get(&FailureSubject::Pod(pod.uid.clone()));
    in_place::in_grace_period(pod)
        && failure.is_some_and(|failure| failure.permanent && !failure.resize_rejected)
}

fn grace_seconds(view: &PlanView<'_>) -> i32 {
    let strategy = view
        .spec
        .rolling_update()
        .and_then(|r| r.in_place_update_strategy.as_ref());
    strategy.and_then(|s| s.grace_period_seconds).unwrap_or_default()
}

/// Cancels the preparation of Pods whose update is no longer requested.
fn cancel_preparations(
    view: &PlanView<'_>,
    chosen: &BTreeSet<usize>,
    pending: &mut BTreeMap<String, PendingWrites>,
) {
    for (at, pod) in view.pods.iter().enumerate() {
        if !chosen.contains(&at) {
            cancel_preparation(view, pod, pending);
        }
    }
}

/// Cancels the preparation of a Pod that will not be updated.
fn cancel_preparation(
    view: &PlanView<'_>,
    pod: &ObservedPod<'_>,
    pending: &mut BTreeMap<String, PendingWrites>,
) {
    // Its size is restored first.
    if pod.state != State::PreparingUpdate || resize::has_unrecorded_resize(pod) {
        return;
    }
    let ready = pending.remove(&pod.uid).filter(|p| p.exclusive);
    let state = lifecycle::state_after_update(view, pod);
    if let Some(write) = lifecycle::state_write(view, pod, Some(state), None) {
        let (writes, reason) = (vec![write], PatchReason::SyncLifecycle);
        pending.insert(
            pod.uid.clone(),
            ready.unwrap_or(PendingWrites {
                writes,
                reason,
                exclusive: true,
            }),
        );
    }
}

pub(super) fn requeue_if_delayed(view: &PlanView<'_>, pod: &Pod, builder: &mut PlanBuilder) -> bool {
    let until = view.retry_at(&FailureSubject::Pod(pod.uid.clone()));
    until.map(|until| builder.requeue_at(until)).is_some()
}

/// A step of a Pod's update: reason and writes.
type PlannedPatch = (PatchReason, Vec<PodWrite>);

/// The next step of one Pod's update; `None` while it waits.
///
/// # Errors
/// Why the update is impossible until a user changes something.
fn next_patch(
    view: &PlanView<'_>,
    pod: &ObservedPod<'_>,
    target: &str,
    spec_cache: &mut Specs,
) -> Result<Option<PlannedPatch>, String> {
    let rolling = view.spec.rolling_update();
    let policy = rolling.and_then(|r| r.pod_update_policy.as_ref());
    if !matches!(policy, Some(Policy::InPlaceIfPossible | Policy::InPlaceOnly)) {
        return Ok(mark_for_recreate(pod));
    }
    let spec = match in_place_spec(view, pod, target, spec_cache) {
        Ok(spec) => spec,
        Err(_) if policy == Some(&Policy::InPlaceIfPossible) => return Ok(mark_for_recreate(pod)),
        Err(error) => {
            return Err(format!(
                "policy is InPlaceOnly, and {error}; delete the Pod to have another"
            ));
        }
    };
    Ok(match &pod.state {
        State::Normal | State::PreparingNormal if pods::is_hooked(view.in_place_update(), pod) => {
            let write = lifecycle::state_write(view, pod, Some(State::PreparingUpdate), None);
            Some((PatchReason::PrepareUpdate, write.into_iter().collect()))
        }
        State::PreparingUpdate if pods::is_hooked(view.in_place_update(), pod) => None,
        State::Updated => prepare_next_update(view, pod),
        State::Normal | State::PreparingNormal | State::PreparingUpdate | State::Updating => {
            let mut writes = begin_update(view, pod, target, &spec);
            let resources_only = spec.container_images.is_empty()
                && spec.container_ref_metadata.is_empty()
                && spec.meta_data_patch.is_none();
            let alone = resources_only && !spec.container_resources.is_empty();
            set_fallbacks(view, pod, alone, &mut writes);
            Some((PatchReason::UpdateInPlace, writes))
        }
        State::PreparingDelete => None,
        State::Other(word) => return Err(waiting::invalid_state(word)),
    })
}

/// The in-place change to the target.
fn in_place_spec(
    view: &PlanView<'_>,
    pod: &Pod,
    target: &str,
    spec_cache: &mut Specs,
) -> Result<Spec, MustRecreate> {
    let policy = view
        .spec
        .rolling_update()
        .and_then(|r| r.pod_update_policy.as_ref());
    let in_place_only = policy == Some(&Policy::InPlaceOnly);
    if !in_place_only && !pod.has_readiness_gate(keys::IN_PLACE_UPDATE_READY) {
        return Err(MustRecreate::NoReadinessGate);
    }
    let revisions = view.pod_revision(pod).zip(view.revision(target));
    let (old, new) = revisions.ok_or(MustRecreate::NoRevision)?;
    let switches = &view.observed.features;
    let options = Options {
        recreate_for_claims: switches.recreate_for_claims && !in_place_only,
        grace_seconds: grace_seconds(view),
        ..switches.in_place_options()
    };
    let cached = spec_cache.entry(old.name.clone());
    let spec = cached
        .or_insert_with(|| spec::calculate_spec(&revision_data(old), &revision_data(new), &options))
        .clone()?;
    if restarts_no_container(pod, &spec) {
        return Err(MustRecreate::NoReadinessGate);
    }
    let refused = view.observed.failures.get(&FailureSubject::Pod(pod.uid.clone()));
    let refused = refused.filter(|failure| failure.resize_rejected && !spec.container_resources.is_empty());
    if let Some(failure) = refused {
        return Err(MustRecreate::ResizeRefused(failure.message.clone()));
    }
    Ok(spec)
}

/// Whether a Pod that cannot be resized may be recreated.
pub(super) fn may_recreate(view: &PlanView<'_>) -> bool {
    let rolling = view.spec.rolling_update();
    let only = rolling.is_some_and(|r| r.paused || r.pod_update_policy == Some(Policy::InPlaceOnly));
    !(only || view.template_rejected() || on_delete(view.spec))
}

/// Sets what is written if the API server refuses the resize among these writes: the Pod is recreated, if allowed, or
/// the rest of the update is done, unless the resize is all (`only_resize`). If a quota has no room, recreating does
/// not help.
pub(super) fn set_fallbacks(view: &PlanView<'_>, pod: &Pod, only_resize: bool, writes: &mut [PodWrite]) {
    for fallback in writes.iter_mut().filter_map(|write| write.fallback.as_mut()) {
        if only_resize {
            (fallback.refused, fallback.quota) = (None, None);
        }
        if may_recreate(view)
            && let Some((_, mut recreate_writes)) = mark_for_recreate(pod)
        {
            fallback.refused = recreate_writes.pop();
        }
    }
}

/// Whether the environment must change in a container that would not be restarted: the daemon does that only while the
/// Pod is out of its Services, and kubelet only for another image.
fn restarts_no_container(pod: &Pod, spec: &Spec) -> bool {
    let replaced = |name: &&str| spec.container_images.contains_key(*name);
    spec.update_env_from_metadata
        && !pod.has_readiness_gate(keys::IN_PLACE_UPDATE_READY)
        && !patch::env_readers(pod, spec).iter().all(replaced)
}

pub(super) fn revision_data(revision: &super::types::ParsedRevision) -> RevisionData<'_> {
    RevisionData {
        name: &revision.name,
        data: &revision.data,
        claim_hash: revision.claim_hash.as_deref(),
    }
}

/// Begins the update. If no running container changes, the Pod remains in use.
fn begin_update(view: &PlanView<'_>, pod: &Pod, target: &str, spec: &Spec) -> Vec<PodWrite> {
    let template = view.template_of_revision(target);
    let state = if patch::completes_immediately(pod, spec, template) {
        lifecycle::state_after_update(view, pod)
    } else {
        State::Updating
    };
    let marks = lifecycle::state_metadata(&state, view.now);
    let map = |value: &Value| value.as_object().cloned().unwrap_or_else(Map::new);
    let mut labels = map(&marks["labels"]);
    let revision = create::revision_labels(view, target);
    labels.extend(revision.map(|(key, value)| (key.to_owned(), json!(value))));
    patch::begin(
        pod,
        spec,
        template,
        &labels,
        &map(&marks["annotations"]),
        view.now,
    )
}

/// For a Pod whose last update the hook has not acknowledged: adds the hook again, which must then release it. The
/// conditions follow in the next reconcile.
fn prepare_next_update(view: &PlanView<'_>, pod: &Pod) -> Option<(PatchReason, Vec<PodWrite>)> {
    let metadata = lifecycle::reapply_hook(view.in_place_update()?, view.now);
    let patch = json!({ "metadata": metadata });
    Some((
        PatchReason::PrepareUpdate,
        vec![PodWrite::new(PatchTarget::Pod, pod, patch)],
    ))
}

/// Marks a Pod for deletion, unless it is marked already.
pub(super) fn mark_for_recreate(pod: &Pod) -> Option<(PatchReason, Vec<PodWrite>)> {
    if pod.labels.contains_key(keys::SPECIFIED_DELETE) {
        return None;
    }
    let label = json!({ "metadata": { "labels": { keys::SPECIFIED_DELETE: keys::TRUE } } });
    Some((
        PatchReason::UpdateReCreate,
        vec![PodWrite::new(PatchTarget::Pod, pod, label)],
    ))
}

/// Restores the size of Pods that were resized for an update that is no longer requested, or not now, and of Pods whose
/// resize was refused. Of the latter it tries one at a time while resizes are refused.
fn restore_sizes(
    view: &PlanView<'_>,
    chosen: &BTreeSet<usize>,
    pending: &mut BTreeMap<String, PendingWrites>,
    mut room: usize,
    builder: &mut PlanBuilder,
) {
    let needs_restore = |at: &usize| resize::has_resize_annotation(&view.pods[*at]) && !chosen.contains(at);
    let mut to_restore: Vec<usize> = (0..view.pods.len()).filter(needs_restore).collect();
    if to_restore.is_empty() {
        return;
    }
    // The least recently tried one comes first.
    let last_attempt = |at: &usize| {
        let subject = FailureSubject::Pod(view.pods[*at].uid.clone());
        view.observed
            .failures
            .get(&subject)
            .map(|failure| failure.retry_at)
    };
    to_restore.sort_by_key(last_attempt);
    let failure = view.observed.failures.get(&FailureSubject::PendingResizes);
    let mut attempts = failure.map_or(usize::MAX, |_| 1);
    if let Some(until) = view.retry_at(&FailureSubject::PendingResizes) {
        builder.requeue_at(until);
        attempts = 0;
    }
    let limit = spare_unavailable(view);
    let is_unavailable = |pod: &&ObservedPod<'_>| !pod.available || builder.has_action(pod);
    let mut unavailable = to_i64(view.pods.iter().filter(is_unavailable).count());
    for pod in to_restore.into_iter().map(|at| &view.pods[at]) {
        let will_delete = pod.specified || pod.state == State::PreparingDelete;
        let busy = builder.has_action(pod) || pending.get(&pod.uid).is_some_and(|p| p.exclusive);
        if will_delete
            || busy
            || room == 0
            || in_place::in_grace_period(pod)
            || requeue_if_delayed(view, pod, builder)
        {
            continue;
        }
        let resize_refused = resize::resize_refused(pod);
        if resize_refused && (attempts == 0 || pod.state != State::Normal) {
            continue;
        }
        if pod.available && resize_rollback::disrupts(pod, view.pod_template(pod)) {
            if unavailable >= limit {
                builder.add_wait(
                    WaitReason::MaxUnavailable,
                    format!("to be resized: {}", waiting::unavailable_limit_text(view)),
                    pod,
                );
                continue;
            }
            unavailable += 1;
        }
        room -= 1;
        attempts -= usize::from(resize_refused);
        // A hook released the Pod, and must acknowledge it afterwards.
        let marks = match pod.state {
            State::PreparingUpdate => lifecycle::state_metadata(&State::Updating, view.now),
            _ => json!({}),
        };
        let map = |part: &str| marks[part].as_object().cloned().unwrap_or_default();
        let mut writes = resize_rollback::restore_size(
            pod,
            view.pod_template(pod),
            &map("labels"),
            &map("annotations"),
            view.now,
        );
        // The desired size is already announced.
        writes.iter_mut().for_each(|write| write.fallback = None);
        let reason = PatchReason::ContinueUpdate;
        pending.insert(
            pod.uid.clone(),
            PendingWrites {
                writes,
                reason,
                exclusive: true,
            },
        );
    }
}

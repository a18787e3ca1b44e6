//! Which Pods are updated now, and how.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::draft::{Draft, Kind, Pending};
use super::limits::on_delete;
use super::numbers::Numbers;
use super::types::{Subject, Why};
use super::view::{Seen, View};
use super::{create, lifecycle, waiting};
use kruise_api::cloneset::PodUpdateStrategyType as Policy;
use kruise_api::keys;
use kruise_api::lifecycle::LifecycleStateType as State;
use kruise_workload::in_place::{
    self, MustRecreate, Options, Pod, Revision, Spec, Target, Write, patch, resize, resize_back, spec,
};
use kruise_workload::{order, pods};

/// What is known to lead from one revision to the target, by the name of the revision.
type Specs = BTreeMap<String, Result<Spec, MustRecreate>>;

/// Plans the updates that the limits allow now, `room` at most. `pending` are the writes that Pods need anyway; those
/// of Pods that are updated are dropped from it.
pub(super) fn update(
    view: &View<'_>,
    pending: &mut BTreeMap<String, Pending>,
    mut room: usize,
    draft: &mut Draft,
) {
    let turns = roll(view, pending, &mut room, draft);
    take_back(view, &turns, pending, room, draft);
}

/// Updates Pods, and returns the places of those that are to be updated now, whether they wait or not.
fn roll(
    view: &View<'_>,
    pending: &mut BTreeMap<String, Pending>,
    room: &mut usize,
    draft: &mut Draft,
) -> BTreeSet<usize> {
    let numbers = view.numbers(|pod| pod.updated);
    let forward = numbers.update >= 0;
    if forward && on_delete(view.spec) {
        let old = view.pods.iter().filter(|pod| !pod.updated);
        old.for_each(|pod| {
            draft.wait(
                Kind::OnDelete,
                "to be deleted: updateStrategy type is OnDelete",
                pod,
            )
        });
    }
    let (candidates, mut wanted) = choose(view, &numbers, forward);
    let first = wanted.min(candidates.len());
    let mut turns: BTreeSet<usize> = candidates[..first].iter().copied().collect();
    restore(view, &turns, pending);
    if view.held() || view.spec.rolling_update().is_some_and(|r| r.paused) {
        return BTreeSet::new();
    }
    // They do not go on with what was refused: it would be tried in each pause of the update that takes over.
    for pod in turns
        .iter()
        .map(|at| &view.pods[*at])
        .filter(|pod| refused(view, pod))
    {
        pending.remove(&pod.uid);
    }
    // What was refused for several Pods would be for the next: one is tried at a time, ever later.
    if let Some(until) = view.delayed(&Subject::Updates) {
        draft.wake_at(until);
        return turns;
    }
    if view.observed.failures.contains_key(&Subject::Updates) {
        *room = (*room).min(1);
    }
    let target = match forward {
        true => &view.observed.update,
        false => &view.observed.current,
    };
    let mut budget = Budget::new(view, &numbers, target);
    let mut specs = Specs::new();
    let rolling = view.spec.rolling_update();
    let ordered = rolling.is_some_and(|r| r.priority_strategy.is_some() || !r.scatter_strategy.is_empty());
    let pods = candidates.iter().map(|at| (at, &view.pods[*at]));
    for (place, (at, pod)) in pods.enumerate() {
        if wanted == 0 || *room == 0 {
            break;
        }
        // Where the limit keeps those whose turn it is, others may take their places that are unavailable anyway, unless
        // the user chose who comes first.
        if place >= first && (ordered || pod.available || !budget.allows(false)) {
            continue;
        }
        // One that is unavailable anyway costs nothing, so it need not wait for those before it in the order.
        if !budget.allows(pod.available) {
            draft.wait(
                Kind::MaxUnavailable,
                format!("to be updated: {}", waiting::budget(view)),
                pod,
            );
            continue;
        }
        wanted -= 1;
        if pending.get(&pod.uid).is_some_and(|p| p.first) || delayed(view, pod, draft) {
            continue;
        }
        match step(view, pod, target, &mut specs) {
            // It will not become unavailable, so that others may.
            Err(why) => {
                draft.stuck(why, pod);
                put_back(view, pod, pending);
                turns.remove(at);
            }
            Ok(None) => budget.take(pod.available),
            Ok(Some(step)) => {
                budget.take(pod.available);
                pending.remove(&pod.uid);
                *room -= usize::from(draft.update(view, pod, Some(target), step));
            }
        }
    }
    turns
}

/// The places of the Pods that may be updated, or taken back, in order, and how many of them are to be. Those that are
/// marked for deletion come first.
///
/// Where as many Pods are updated as there are to be, one of the old that is unavailable may fill the place in which
/// another is to be made for a Pod that is to be deleted; neither would ever go, so that one is updated, too.
fn choose(view: &View<'_>, numbers: &Numbers, forward: bool) -> (Vec<usize>, usize) {
    let enough = numbers.update == 0;
    let beyond = beyond(view, forward);
    let wanted = if enough {
        beyond - numbers.use_surge_old
    } else {
        numbers.update.abs().min(beyond)
    };
    let wanted = wanted.max(0);
    let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
    if wanted == 0 || on_delete(view.spec) {
        return (Vec::new(), 0);
    }
    let candidates = (0..view.pods.len()).filter(|at| {
        let pod = &view.pods[*at];
        candidate(view, pod, forward) && !(enough && pod.available)
    });
    let pods: Vec<&Pod> = view.pods.iter().map(|seen| seen.pod).collect();
    let mut candidates = order::update(&pods, candidates.collect(), view.spec.rolling_update());
    // What goes anyway gives way to the other revision; so there is no need for another Pod to.
    candidates.sort_by_key(|at| !view.pods[*at].specified);
    (candidates, wanted)
}

/// How many more Pods may be updated.
struct Budget {
    limit: i64,
    /// The limit for Pods that are unavailable anyway.
    free: i64,
    /// Pods that are unavailable.
    lost: i64,
    /// Pods of the target revision that are unavailable, or will be.
    taken: i64,
}

pub(super) fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// How many Pods may be unavailable where no more are to be updated: those beyond the ones asked for may be, too.
pub(super) fn spare(view: &View<'_>) -> i64 {
    view.limits.unavailable + count(view.pods.len()) - view.limits.replicas
}

impl Budget {
    /// While Pods are missing, the limit is lower by as many, and they may be missing for as long as others are
    /// unavailable; so one that is unavailable anyway may be updated all the same.
    fn new(view: &View<'_>, numbers: &Numbers, target: &str) -> Self {
        let unavailable = || view.pods.iter().filter(|p| !p.available);
        let limit = match numbers.update {
            0 => spare(view),
            _ => numbers.update_max_unavailable,
        };
        let missing = numbers.scale_up > 0;
        Self {
            limit,
            free: if missing {
                limit.max(view.limits.unavailable).max(1)
            } else {
                limit
            },
            lost: count(unavailable().count()),
            taken: count(unavailable().filter(|p| pods::at(p, target)).count()),
        }
    }

    fn allows(&self, available: bool) -> bool {
        if available {
            self.taken < self.limit && self.lost < self.limit
        } else {
            self.taken < self.free
        }
    }

    fn take(&mut self, available: bool) {
        self.lost += i64::from(available);
        self.taken += 1;
    }
}

/// How many Pods there are beyond those that are to keep what they have: the current revision, if `forward`, or else
/// the update revision. While Pods are missing, new ones make up for what is missing of either.
fn beyond(view: &View<'_>, forward: bool) -> i64 {
    let keeping = |pod: &&Seen<'_>| pod.updated != forward && pod.state != State::PreparingDelete;
    let there = i64::try_from(view.pods.iter().filter(keeping).count()).unwrap_or(i64::MAX);
    let (replicas, partition) = (view.limits.replicas, view.limits.partition);
    there - if forward { partition } else { replicas - partition }
}

/// Whether the Pod is one to update, if `forward`, or else one to take back.
fn candidate(view: &View<'_>, pod: &Seen<'_>, forward: bool) -> bool {
    pod.updated != forward
        && pod.state != State::PreparingDelete
        && (!in_place::graced(pod) || refused(view, pod) || pod.state == State::Updated)
}

/// Whether the change that was due after the Pod's grace period is refused, so that another revision is to take over.
fn refused(view: &View<'_>, pod: &Pod) -> bool {
    let failure = view.observed.failures.get(&Subject::Pod(pod.uid.clone()));
    in_place::graced(pod) && failure.is_some_and(|failure| failure.lasting && !failure.of_resize)
}

fn grace_seconds(view: &View<'_>) -> i32 {
    let strategy = view
        .spec
        .rolling_update()
        .and_then(|r| r.in_place_update_strategy.as_ref());
    strategy.and_then(|s| s.grace_period_seconds).unwrap_or_default()
}

/// Lets Pods be that were prepared for an update which they are not to have any more.
fn restore(view: &View<'_>, chosen: &BTreeSet<usize>, pending: &mut BTreeMap<String, Pending>) {
    for (at, pod) in view.pods.iter().enumerate() {
        if !chosen.contains(&at) {
            put_back(view, pod, pending);
        }
    }
}

/// Lets a Pod be, if it was prepared for an update, which it will not have.
fn put_back(view: &View<'_>, pod: &Seen<'_>, pending: &mut BTreeMap<String, Pending>) {
    // What it was resized for comes first.
    if pod.state != State::PreparingUpdate || resize::unrecorded(pod) {
        return;
    }
    let ready = pending.remove(&pod.uid).filter(|p| p.first);
    let state = lifecycle::after_update(view, pod);
    if let Some(write) = lifecycle::write(view, pod, Some(state), None) {
        let (writes, why, first) = (vec![write], Why::State, true);
        pending.insert(pod.uid.clone(), ready.unwrap_or(Pending { writes, why, first }));
    }
}

pub(super) fn delayed(view: &View<'_>, pod: &Pod, draft: &mut Draft) -> bool {
    let until = view.delayed(&Subject::Pod(pod.uid.clone()));
    until.map(|until| draft.wake_at(until)).is_some()
}

/// A step of a Pod's update: what for, and its writes.
type Step = (Why, Vec<Write>);

/// The next step of one Pod's update; nothing while it waits.
///
/// # Errors
/// Why there will be none until somebody changes something.
fn step(view: &View<'_>, pod: &Seen<'_>, target: &str, specs: &mut Specs) -> Result<Option<Step>, String> {
    let rolling = view.spec.rolling_update();
    let policy = rolling.and_then(|r| r.pod_update_policy.as_ref());
    if !matches!(policy, Some(Policy::InPlaceIfPossible | Policy::InPlaceOnly)) {
        return Ok(recreate(pod));
    }
    let spec = match in_place(view, pod, target, specs) {
        Ok(spec) => spec,
        Err(_) if policy == Some(&Policy::InPlaceIfPossible) => return Ok(recreate(pod)),
        Err(why) => {
            return Err(format!(
                "policy is InPlaceOnly, and {why}; delete the Pod to have another"
            ));
        }
    };
    Ok(match &pod.state {
        State::Normal | State::PreparingNormal if pods::hooked(view.in_place_update(), pod) => {
            let write = lifecycle::write(view, pod, Some(State::PreparingUpdate), None);
            Some((Why::PrepareUpdate, write.into_iter().collect()))
        }
        State::PreparingUpdate if pods::hooked(view.in_place_update(), pod) => None,
        State::Updated => prepare_again(view, pod),
        State::Normal | State::PreparingNormal | State::PreparingUpdate | State::Updating => {
            let mut writes = begin(view, pod, target, &spec);
            let nothing_else = spec.container_images.is_empty()
                && spec.container_ref_metadata.is_empty()
                && spec.meta_data_patch.is_none();
            let alone = nothing_else && !spec.container_resources.is_empty();
            fall_back(view, pod, alone, &mut writes);
            Some((Why::UpdateInPlace, writes))
        }
        State::PreparingDelete => None,
        State::Other(word) => return Err(waiting::no_state(word)),
    })
}

/// What leads to the target in place.
fn in_place(view: &View<'_>, pod: &Pod, target: &str, specs: &mut Specs) -> Result<Spec, MustRecreate> {
    let policy = view
        .spec
        .rolling_update()
        .and_then(|r| r.pod_update_policy.as_ref());
    let only = policy == Some(&Policy::InPlaceOnly);
    if !only && !pod.gated(keys::IN_PLACE_UPDATE_READY) {
        return Err(MustRecreate::NoGate);
    }
    let revisions = view.revision_of(pod).zip(view.revision(target));
    let (old, new) = revisions.ok_or(MustRecreate::NoRevision)?;
    let switches = &view.observed.switches;
    let options = Options {
        env_from_metadata: switches.env_from_metadata,
        vertical: switches.vertical,
        recreate_for_claims: switches.recreate_for_claims && !only,
        grace_seconds: grace_seconds(view),
        stored: switches.stored,
    };
    let known = specs.entry(old.name.clone());
    let spec = known
        .or_insert_with(|| spec::spec(&as_engine(old), &as_engine(new), &options))
        .clone()?;
    if starts_nothing_anew(pod, &spec) {
        return Err(MustRecreate::NoGate);
    }
    let refused = view.observed.failures.get(&Subject::Pod(pod.uid.clone()));
    let refused = refused.filter(|failure| failure.of_resize && !spec.container_resources.is_empty());
    if let Some(failure) = refused {
        return Err(MustRecreate::ResizeRefused(failure.message.clone()));
    }
    Ok(spec)
}

/// Whether another Pod may take the place of one that cannot be resized.
pub(super) fn may_replace(view: &View<'_>) -> bool {
    let rolling = view.spec.rolling_update();
    let only = rolling.is_some_and(|r| r.paused || r.pod_update_policy == Some(Policy::InPlaceOnly));
    !(only || view.held() || on_delete(view.spec))
}

/// What is done where the API server refuses the resize among these writes: another Pod takes the place, if one may; or
/// the rest of the update is done, unless the resize is `alone`. Where a quota has no room, another Pod is of no use.
pub(super) fn fall_back(view: &View<'_>, pod: &Pod, alone: bool, writes: &mut [Write]) {
    for fallback in writes.iter_mut().filter_map(|write| write.fallback.as_mut()) {
        if alone {
            (fallback.refused, fallback.quota) = (None, None);
        }
        if may_replace(view)
            && let Some((_, mut instead)) = recreate(pod)
        {
            fallback.refused = instead.pop();
        }
    }
}

/// Whether an environment is to change in a container that nobody would restart: the daemon does so only while the Pod
/// is out of its Services, and kubelet only for another image.
fn starts_nothing_anew(pod: &Pod, spec: &Spec) -> bool {
    let mut readers = spec.container_ref_metadata.keys();
    spec.update_env_from_metadata
        && !pod.gated(keys::IN_PLACE_UPDATE_READY)
        && readers.any(|name| !spec.container_images.contains_key(name))
}

pub(super) fn as_engine(revision: &super::types::Revision) -> Revision<'_> {
    Revision {
        name: &revision.name,
        data: &revision.data,
        claims: revision.claims.as_deref(),
    }
}

/// Begins the update. What changes nothing that runs leaves the Pod in use.
fn begin(view: &View<'_>, pod: &Pod, target: &str, spec: &Spec) -> Vec<Write> {
    let template = view.template(target);
    let state = if patch::at_once(pod, spec, template) {
        lifecycle::after_update(view, pod)
    } else {
        State::Updating
    };
    let marks = lifecycle::marks(&state, view.now);
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

/// A Pod whose last update the hook has not acknowledged: the hook is put onto it, and must let go again. Its
/// conditions follow in the next pass.
fn prepare_again(view: &View<'_>, pod: &Pod) -> Option<(Why, Vec<Write>)> {
    let metadata = lifecycle::hook_again(view.in_place_update()?, view.now);
    let patch = json!({ "metadata": metadata });
    Some((Why::PrepareUpdate, vec![Write::new(Target::Pod, pod, patch)]))
}

/// Marks a Pod for deletion, unless it is.
pub(super) fn recreate(pod: &Pod) -> Option<(Why, Vec<Write>)> {
    if pod.labels.contains_key(keys::SPECIFIED_DELETE) {
        return None;
    }
    let label = json!({ "metadata": { "labels": { keys::SPECIFIED_DELETE: keys::TRUE } } });
    Some((Why::UpdateReCreate, vec![Write::new(Target::Pod, pod, label)]))
}

/// Gives Pods the size of their revision: those that were resized for an update which they are not to have any more, or
/// not now, and those whose resize was refused; of these, one at a time while it still is.
fn take_back(
    view: &View<'_>,
    turns: &BTreeSet<usize>,
    pending: &mut BTreeMap<String, Pending>,
    mut room: usize,
    draft: &mut Draft,
) {
    let left = |at: &usize| resize::announced(&view.pods[*at]) && !turns.contains(at);
    let mut left: Vec<usize> = (0..view.pods.len()).filter(left).collect();
    if left.is_empty() {
        return;
    }
    // The one that was tried longest ago comes first.
    let last_try = |at: &usize| {
        let subject = Subject::Pod(view.pods[*at].uid.clone());
        view.observed.failures.get(&subject).map(|failure| failure.until)
    };
    left.sort_by_key(last_try);
    let failure = view.observed.failures.get(&Subject::Sizes);
    let mut tries = failure.map_or(usize::MAX, |_| 1);
    if let Some(until) = view.delayed(&Subject::Sizes) {
        draft.wake_at(until);
        tries = 0;
    }
    let limit = spare(view).max(view.limits.unavailable);
    let gone = |pod: &&Seen<'_>| !pod.available || draft.touched(pod);
    let mut lost = count(view.pods.iter().filter(gone).count());
    for pod in left.into_iter().map(|at| &view.pods[at]) {
        let goes = pod.specified || pod.state == State::PreparingDelete;
        let busy = draft.touched(pod) || pending.get(&pod.uid).is_some_and(|p| p.first);
        if goes || busy || room == 0 || in_place::graced(pod) || delayed(view, pod, draft) {
            continue;
        }
        let refused = resize::refused(pod);
        if refused && (tries == 0 || pod.state != State::Normal) {
            continue;
        }
        if pod.available && resize_back::disturbs(pod, view.template_of(pod)) {
            if lost >= limit {
                draft.wait(
                    Kind::MaxUnavailable,
                    format!("to be resized: {}", waiting::budget(view)),
                    pod,
                );
                continue;
            }
            lost += 1;
        }
        room -= 1;
        tries -= usize::from(refused);
        // A hook let go of it, and is to take it back into use when that is over.
        let marks = match pod.state {
            State::PreparingUpdate => lifecycle::marks(&State::Updating, view.now),
            _ => json!({}),
        };
        let map = |part: &str| marks[part].as_object().cloned().unwrap_or_default();
        let mut writes = resize_back::take_back(
            pod,
            view.template_of(pod),
            &map("labels"),
            &map("annotations"),
            view.now,
        );
        // It is announced already what the Pod is to get.
        writes.iter_mut().for_each(|write| write.fallback = None);
        let (why, first) = (Why::GoOn, true);
        pending.insert(pod.uid.clone(), Pending { writes, why, first });
    }
}

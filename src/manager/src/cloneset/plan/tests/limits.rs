//! What must hold of every pass, whatever happened before.

use std::collections::BTreeSet;

use jiff::ToSpan;
use serde_json::{Value, json};

use super::cases::{kubelets, settle};
use super::histories::{container, rolling, spec};
use super::partition;
use super::world::World;
use crate::cloneset::plan::limits::{Limits, on_delete};
use crate::cloneset::plan::view::AT_ONCE;
use crate::cloneset::plan::{Act, Observed, Plan, Subject, Template, Why};
use kruise_api::cloneset::PodUpdateStrategyType as Policy;
use kruise_api::keys;
use kruise_api::lifecycle::{LifecycleHook, LifecycleStateType as State};
use kruise_workload::in_place::{Pod, Write};
use kruise_workload::pods;

/// What a pass does to the Pods.
#[derive(Default)]
struct Taken {
    /// Available Pods that are not so after it.
    lost: i64,
    /// New Pods.
    made: i64,
}

/// A pass, and what it was planned on.
struct Pass<'a> {
    observed: &'a Observed,
    limits: Limits,
    active: Vec<&'a Pod>,
    /// Names of Pods that were made, and that the watch has not shown yet.
    unseen: &'a BTreeSet<String>,
    now: jiff::Timestamp,
}

pub(super) fn check(world: &World, observed: &Observed, planned: &Plan, unseen: &BTreeSet<String>) {
    let ours = |pod: &Pod| super::world::ours(pod) && pod.labels["app"] == "x";
    let pass = Pass {
        observed,
        limits: Limits::of(&observed.set.spec, &observed.switches),
        active: observed
            .pods
            .iter()
            .map(AsRef::as_ref)
            .filter(|p| p.active() && ours(p))
            .collect(),
        unseen,
        now: world.now,
    };
    let mut taken = Taken::default();
    planned.acts.iter().for_each(|act| pass.take(act, &mut taken));
    pass.hold(&taken);
    partition::kept(observed, planned, &pass.limits, &pass.active, pass.now);
    assert!(
        observed.template == Template::Taken || !planned.acts.iter().any(updates),
        "a Pod is updated though the template is refused: {:?}",
        planned.acts
    );
    says_why(observed, planned);
    pass.no_claim_is_idle(planned);
}

/// Whether it is a step of an update that had not begun.
fn updates(act: &Act) -> bool {
    let begins = [Why::UpdateInPlace, Why::UpdateReCreate, Why::PrepareUpdate];
    matches!(act, Act::PatchPod { why, .. } if begins.contains(why))
}

/// Where a rollout goes on and nothing is done about it, the condition says what is waited for.
fn says_why(observed: &Observed, planned: &Plan) {
    let status = planned.status.as_ref().or(observed.set.status.as_ref()).unwrap();
    let find = |type_: &str| status.conditions.iter().find(|c| c.type_ == type_);
    let limits = Limits::of(&observed.set.spec, &observed.switches);
    let done = i64::from(status.updated_available_replicas.unwrap_or_default()) == limits.replicas
        && i64::from(status.replicas) == limits.replicas;
    let waiting = find("Waiting");
    let known = observed.template != Template::Unknown;
    assert!(
        done || !known || !planned.acts.is_empty() || waiting.is_some_and(|c| !c.message.is_empty()),
        "nothing says what is waited for: {status:?}"
    );
    // To the letter, and there with a deadline only.
    let deadline = observed.set.spec.progress_deadline_seconds;
    let message = find("Progressing").map(|c| c.message.as_str());
    let messages = [
        "CloneSet is available",
        "CloneSet is paused",
        "CloneSet has been paused due to partition ready",
        "CloneSet is progressing",
    ];
    // It names the revision that was too late first.
    let late = |text: &str| {
        let revision = text.strip_prefix("CloneSet revision s-");
        revision.is_some_and(|rest| rest.ends_with(" has timed out progressing"))
    };
    let held = observed.template != Template::Taken;
    assert!(
        held || message.is_some() == deadline.is_some_and(|d| d != i32::MAX),
        "{status:?}"
    );
    assert!(
        held || message.is_none_or(|text| messages.contains(&text) || late(text)),
        "{message:?}"
    );
}

fn count(n: usize) -> i64 {
    i64::try_from(n).unwrap()
}

impl Pass<'_> {
    fn available(&self, pod: &Pod) -> bool {
        let seconds = self.observed.set.spec.min_ready_seconds.unwrap_or_default();
        pods::available(pod, seconds, self.now)
    }

    fn hook(
        &self,
        of: fn(&kruise_api::lifecycle::Lifecycle) -> Option<&LifecycleHook>,
    ) -> Option<&LifecycleHook> {
        self.observed.set.spec.lifecycle.as_ref().and_then(of)
    }

    /// Whether Pods may be updated at all.
    fn updates(&self) -> bool {
        let spec = &self.observed.set.spec;
        !on_delete(spec) && !spec.rolling_update().is_some_and(|r| r.paused)
    }

    fn pod(&self, uid: &str) -> &Pod {
        self.active.iter().find(|p| p.uid == uid).unwrap()
    }

    /// Counts what an act does, which must be nothing that a hook forbids.
    fn take(&self, act: &Act, taken: &mut Taken) {
        match act {
            Act::CreatePod { name, .. } => taken.made += i64::from(!self.unseen.contains(name)),
            Act::DeletePod { uid, .. } if !self.active.iter().any(|p| p.uid == *uid) => {
                let pod = self.observed.pods.iter().find(|p| p.uid == *uid).unwrap();
                assert!(!pod.active() && super::world::ours(pod), "{pod:?}");
            }
            Act::DeletePod { uid, .. } => {
                let pod = self.pod(uid);
                let held = pods::hooked(self.hook(|l| l.pre_delete.as_ref()), pod);
                assert!(!held, "a Pod is deleted that a hook holds");
                taken.lost += i64::from(self.available(pod));
            }
            Act::PatchPod { uid, why, writes, .. } if !matches!(why, Why::Adopt | Why::Release) => {
                let pod = self.pod(uid);
                let rolling = self.observed.set.spec.rolling_update();
                let out = matches!(why, Why::UpdateInPlace | Why::PrepareUpdate | Why::PrepareDelete);
                let update = matches!(why, Why::UpdateInPlace | Why::PrepareUpdate | Why::UpdateReCreate);
                assert!(
                    !update || self.updates(),
                    "{why:?} of a Pod under OnDelete, or while paused"
                );
                let only = rolling.and_then(|r| r.pod_update_policy.as_ref()) == Some(&Policy::InPlaceOnly);
                let marks = *why == Why::UpdateReCreate;
                assert!(
                    !(marks && only),
                    "a Pod is to give way to another under InPlaceOnly"
                );
                taken.lost += i64::from(out && self.available(pod));
                in_order(pod, *why, writes);
                if *why == Why::UpdateInPlace {
                    let held = pods::hooked(self.hook(|l| l.in_place_update.as_ref()), pod);
                    let half_way = pods::state(pod) == State::Updating;
                    assert!(half_way || !held, "a Pod is updated that a hook holds");
                }
            }
            _ => {}
        }
    }

    /// Nothing goes beyond its limit.
    fn hold(&self, taken: &Taken) {
        let Taken { lost, made } = *taken;
        let limits = &self.limits;
        let there = count(self.active.iter().filter(|p| self.available(p)).count());
        let least = limits.replicas - limits.unavailable;
        assert!(
            lost == 0 || there - lost >= least,
            "{lost} of {there} available Pods are taken, {least} must stay"
        );
        let waiting = self
            .active
            .iter()
            .filter(|p| pods::state(p) == State::PreparingDelete)
            .count();
        let counted = self.active.len() + self.unseen.len()
            - if limits.exclude_preparing_delete {
                waiting
            } else {
                0
            };
        let most = limits.replicas + limits.surge;
        assert!(
            made == 0 || count(counted) + made <= most,
            "{made} Pods are made, {most} are allowed"
        );
        let (lacking, most) = (self.lacking(), limits.scale_unavailable);
        assert!(
            made == 0 || lacking + made <= most,
            "{made} Pods are made beside {lacking} that are unavailable, {most} are allowed"
        );
    }

    /// Pods that count against the limit of the scale strategy: what is not available, but for what somebody wants to
    /// be deleted, and what is to be deleted, whatever it is; and Pods that nobody has seen yet.
    fn lacking(&self) -> i64 {
        let strategy = self.observed.set.spec.scale_strategy.iter();
        let named: BTreeSet<&String> = strategy.flat_map(|s| &s.pods_to_delete).collect();
        let lacks = |pod: &&&Pod| {
            let marked = pod.labels.contains_key(keys::SPECIFIED_DELETE) || named.contains(&pod.name);
            pods::state(pod) == State::PreparingDelete || (!marked && !self.available(pod))
        };
        count(self.active.iter().filter(lacks).count() + self.unseen.len())
    }
}

impl Pass<'_> {
    /// Where Pods are missing that may be made, claims that no Pod has are put to use, whoever else is to go first.
    fn no_claim_is_idle(&self, planned: &Plan) {
        let observed = self.observed;
        let first = |act: &Act| match act {
            Act::CreatePod { .. } => true,
            Act::PatchPod { why, .. } => matches!(why, Why::Adopt | Why::KeepAfterAll),
            _ => false,
        };
        let scale = observed.set.spec.scale_strategy.as_ref().unwrap();
        let missing = count(self.active.len()) < self.limits.replicas;
        let may = scale.max_unavailable.is_none() && !observed.failures.contains_key(&Subject::Creation);
        // Nobody counts before an adoption that is to be tried again.
        let tried = |pod: &Pod| observed.failures.get(&Subject::Pod(pod.uid.clone()));
        let early = observed
            .pods
            .iter()
            .any(|pod| pod.controller.is_none() && tried(pod).is_some_and(|failure| !failure.lasting));
        if !missing || !may || !scale.enable_pvc_reuse || early || planned.acts.iter().any(first) {
            return;
        }
        let of_pod = |id: &str| observed.pods.iter().any(|pod| pod.name == format!("s-{id}"));
        let going = |id: &str| {
            let mut of = observed.claims.iter().filter(|claim| claim.instance == id);
            of.any(|claim| claim.deleting)
        };
        let mut ids = observed.claims.iter().map(|claim| claim.instance.as_str());
        let idle = ids.find(|id| !of_pod(id) && !going(id));
        assert_eq!(idle, None, "nobody takes this over");
    }
}

/// Containers of one launch priority are changed at a time; those that come after others are when these run what they are
/// to, and are ready.
fn in_order(pod: &Pod, why: Why, writes: &[Write]) {
    let patched = writes
        .iter()
        .filter_map(|write| write.patch["spec"]["containers"].as_array());
    let names: Vec<&Value> = patched.flatten().map(|container| &container["name"]).collect();
    let now = pod
        .containers
        .iter()
        .filter(|c| names.iter().any(|name| **name == c.name));
    let priorities: BTreeSet<i64> = now.filter_map(|c| c.priority).collect();
    assert!(priorities.len() < 2, "{names:?} are changed at once");
    let graced = pod.annotations.contains_key(keys::IN_PLACE_UPDATE_GRACE);
    let Some(priority) = priorities.first().filter(|_| why == Why::GoOn && !graced) else {
        return;
    };
    for first in pod.containers.iter().filter(|c| c.priority > Some(*priority)) {
        let status = pod.status(&first.name).unwrap();
        assert!(
            status.ready && status.image == first.image,
            "{names:?} go before {status:?}"
        );
    }
}

/// A template of a few hundred kilobytes may take megabytes as JSON, once for each Pod that a plan makes.
#[test]
fn a_pass_makes_and_patches_fewer_pods_where_each_takes_much_memory() {
    let mut world = World::new(spec(false, true));
    world.memory = 4 << 20;
    world.edit(&json!({ "replicas": 10 }));
    rolling(&mut world, json!({ "maxUnavailable": "100%" }));
    let made = |world: &mut World| {
        let plan = world.reconcile().1;
        let create = |act: &&Act| matches!(act, Act::CreatePod { .. });
        plan.acts.iter().filter(create).count()
    };
    assert_eq!([made(&mut world), made(&mut world), made(&mut world)], [4, 4, 2]);
    settle(&mut world);
    container(&mut world, "image", json!("app:2"));
    let updating = |world: &mut World| patched(&world.reconcile().1);
    assert_eq!(
        [updating(&mut world), updating(&mut world), updating(&mut world)],
        [4, 4, 2]
    );
    settle(&mut world);
    assert_eq!(world.set["status"]["updatedAvailableReplicas"], 10);
}

/// Nodes of many Pods may be dead: what goes and keeps its claims is not counted among the Pods that a plan makes.
#[test]
fn pods_that_never_go_take_no_room_of_new_ones() {
    let mut world = World::new(spec(false, true));
    world.edit(&json!({ "replicas": 3, "scaleStrategy": { "enablePVCReuse": true } }));
    settle(&mut world);
    let dead: Vec<String> = world.pods.keys().cloned().collect();
    for name in &dead {
        world.pods.get_mut(name).unwrap()["metadata"]["finalizers"] = json!(["example.io/dead"]);
        world.delete(name);
    }
    world.memory = usize::MAX;
    world.edit(&json!({ "replicas": 8 }));
    settle(&mut world);
    assert_eq!(world.pods.len(), 8, "three of them are going");
    let plan = world.reconcile().1;
    assert_eq!(plan.acts, [], "no act is planned");
}

/// What an update in place under way is to write next stands in a revision that takes too much memory.
#[test]
fn an_update_under_way_waits_for_a_revision_that_cannot_be_read() {
    let mut world = World::new(spec(false, false));
    rolling(&mut world, json!({ "maxUnavailable": "100%" }));
    settle(&mut world);
    container(&mut world, "image", json!("app:2"));
    world.reconcile();
    let mut observed = world.observe();
    let read = crate::cloneset::plan::plan(&observed, world.now);
    let newest = observed.update.clone();
    observed.revisions.retain(|one| one.name != newest);
    observed.unread.push(newest);
    let plan = crate::cloneset::plan::plan(&observed, world.now);
    assert_eq!(patched(&plan), 0, "{plan:?}");
    let said = |plan: &Plan| format!("{:?}", plan.status);
    assert!(said(&plan).contains("which takes too much memory"), "{plan:?}");
    assert!(!said(&read).contains("which takes too much memory"));
}

/// How many Pods a plan patches.
fn patched(plan: &Plan) -> usize {
    let patch = |act: &&Act| matches!(act, Act::PatchPod { .. });
    plan.acts.iter().filter(patch).count()
}

#[test]
fn a_pass_patches_as_many_pods_as_it_can_send_and_the_next_ones_go_on() {
    let mut world = World::new(spec(false, true));
    world.edit(&json!({ "replicas": AT_ONCE + 20 }));
    rolling(&mut world, json!({ "maxUnavailable": "100%" }));
    settle(&mut world);
    container(&mut world, "image", json!("app:2"));
    let updating = |world: &mut World| patched(&world.reconcile().1);
    assert_eq!([updating(&mut world), updating(&mut world)], [AT_ONCE, 20]);
    kubelets(&mut world);
    // All are to be taken into use again; those that failed are not in the way of others.
    world.failing = AT_ONCE;
    assert_eq!(updating(&mut world), AT_ONCE);
    assert_eq!(updating(&mut world), 20);
    world.now = world.now.checked_add(10.seconds()).unwrap();
    settle(&mut world);
    assert_eq!(world.set["status"]["updatedAvailableReplicas"], AT_ONCE + 20);
}

/// A rollout of `app:2` that has just been asked for, where one Pod may be unavailable: an old one that is broken, and
/// comes after all others in the order.
fn one_broken_behind_others(replicas: usize) -> World {
    let mut world = World::new(spec(false, false));
    world.edit(&json!({ "replicas": replicas }));
    let first = json!({ "weight": 50, "matchSelector": { "matchLabels": { "first": "yes" } } });
    rolling(
        &mut world,
        json!({ "maxUnavailable": 1, "priorityStrategy": { "weightPriority": [first] } }),
    );
    settle(&mut world);
    let names: Vec<String> = world.pods.keys().cloned().collect();
    for name in &names[1..] {
        world.pods.get_mut(name).unwrap()["metadata"]["labels"]["first"] = json!("yes");
    }
    world.pods.get_mut(&names[0]).unwrap()["spec"]["containers"][0]["image"] = json!("app:bad");
    kubelets(&mut world);
    container(&mut world, "image", json!("app:2"));
    world
}

/// How many Pods are to run `app:2`.
fn updated(world: &World) -> usize {
    let new = |pod: &&serde_json::Value| pod["spec"]["containers"][0]["image"] == "app:2";
    world.pods.values().filter(new).count()
}

/// Its update costs nothing, and may be what mends it.
#[test]
fn a_broken_old_pod_is_updated_though_others_come_first() {
    let mut world = one_broken_behind_others(3);
    settle(&mut world);
    assert_eq!(updated(&world), 3);
}

/// The places of those whose turn it is, but which the limit keeps, may be taken by one that costs nothing.
#[test]
fn a_broken_old_pod_takes_a_place_of_a_partition_unless_the_user_says_who_comes_first() {
    let priority = json!({ "weightPriority": [{ "weight": 5, "matchSelector": { "matchLabels": { "first": "yes" } } }] });
    for (strategy, count) in [(json!(null), 2), (priority, 0)] {
        let mut world = one_broken_behind_others(4);
        rolling(
            &mut world,
            json!({ "partition": 2, "priorityStrategy": strategy }),
        );
        settle(&mut world);
        assert_eq!(updated(&world), count);
    }
}

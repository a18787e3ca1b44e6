#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::super::entry::secret_key;
use super::super::status::job_status;
use super::*;
use crate::view::{ImageTag, NodeView, TagOwner, TagRequest, TagStatusView, TagView};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kruise_api::image_pull_job::{
    CompletionPolicyType, ImagePullJob, ImagePullJobNodeSelector, ImagePullJobSpec, PullPolicy,
};

const NODES: u8 = 6;

fn job(n: u8, parallelism: i32, never: bool) -> PullJob {
    let mut spec = ImagePullJobSpec {
        image: ["nginx:1", "nginx:1", "nginx:2"][usize::from(n)].to_owned(),
        parallelism: Some(IntOrString::Int(parallelism)),
        ..ImagePullJobSpec::default()
    };
    if never {
        spec.completion_policy.type_ = Some(CompletionPolicyType::Never);
    }
    if n == 2 {
        spec.selector = Some(ImagePullJobNodeSelector {
            match_labels: [("even".to_owned(), "true".to_owned())].into(),
            ..ImagePullJobNodeSelector::default()
        });
    }
    let mut object = ImagePullJob::new(&format!("j{n}"), spec);
    object.metadata.uid = Some(format!("uid{n}"));
    object.metadata.namespace = Some(["ns", "ns", "other"][usize::from(n)].to_owned());
    PullJob::from_object(&object)
}

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).unwrap()
}

/// The objects of the API server, and the events sent to the watch.
#[derive(Default)]
struct FakeCluster {
    index: JobIndex,
    views: BTreeMap<u8, NodeImageView>,
    writes: Vec<(u8, Uid)>,
    jobs: BTreeMap<Uid, PullJob>,
    /// Nodes, and whether they are ready.
    nodes: BTreeMap<u8, bool>,
    /// Those of them that are cordoned, and Nodes that will be when they are added.
    cordoned: BTreeSet<u8>,
    /// Ready nodes without NodeImage, and when each was first seen so.
    pending_nodes: BTreeMap<u8, i64>,
    /// How many nodes may pull from a registry; 0 for any number.
    max_pulls: usize,
    now: i64,
}

/// Nodes with even numbers have a label.
fn labels(n: u8) -> BTreeMap<String, String> {
    let even = n
        .is_multiple_of(2)
        .then(|| ("even".to_owned(), "true".to_owned()));
    even.into_iter().collect()
}

impl FakeCluster {
    fn notify_index(&mut self, n: u8) {
        let view = self.views.get(&n).cloned().map(Arc::new);
        self.index.update_node_image(&format!("n{n}"), view, at(self.now));
    }

    fn add_node(&mut self, n: u8) {
        self.views.entry(n).or_insert_with(|| NodeImageView {
            uid: format!("node{n}"),
            labels: labels(n),
            ..NodeImageView::default()
        });
        self.pending_nodes.remove(&n);
        self.notify_index(n);
    }

    /// Adds a Node, or changes whether it is ready.
    fn set_node(&mut self, n: u8, ready: bool) {
        self.nodes.insert(n, ready);
        if !ready || self.views.contains_key(&n) {
            self.pending_nodes.remove(&n);
        } else {
            self.pending_nodes.entry(n).or_insert(self.now);
        }
        let view = NodeView {
            labels: labels(n),
            ready,
            ready_since: Some(at(0)),
            unschedulable: self.cordoned.contains(&n),
            ..NodeView::default()
        };
        self.index
            .update_node(&format!("n{n}"), Some(&Arc::new(view)), at(self.now));
    }

    /// A new leader starts with the objects of the API server. Writes of the old leader may still arrive.
    fn new_leader(&mut self) {
        self.index = JobIndex::new(SignedDuration::ZERO, RegistryLimit::new(self.max_pulls));
        self.pending_nodes.clear();
        for (n, ready) in self.nodes.clone() {
            self.set_node(n, ready);
        }
        for n in self.views.keys().copied().collect::<Vec<_>>() {
            self.notify_index(n);
        }
        for job in self.jobs.values() {
            self.index.upsert_job(job.clone(), at(self.now));
        }
    }

    /// The group of a node.
    fn group(&self, node: &NodeName) -> NodeGroup {
        let n: u8 = node[1..].parse().unwrap();
        match self.nodes.get(&n) {
            Some(false) => NodeGroup::NotReady,
            Some(true) if self.cordoned.contains(&n) => NodeGroup::Cordoned,
            _ => NodeGroup::Ready,
        }
    }

    /// Whether a job requests no other node before those of the group.
    fn has_turn(&self, uid: &Uid, group: NodeGroup) -> bool {
        let comes_before = |(node, state): (&NodeName, &NodeState)| {
            let other = self.group(node);
            match state {
                NodeState::Pending => other < group,
                NodeState::Assigned | NodeState::Pulling => {
                    group == NodeGroup::NotReady && other != NodeGroup::NotReady
                }
                NodeState::Succeeded | NodeState::Failed => false,
            }
        };
        !self.index.node_states(uid).iter().any(comes_before)
    }

    /// On how many nodes that are ready all jobs pull: all images are of one registry.
    fn pulls(&self) -> usize {
        let is_ready = |node: &NodeName| self.group(node) != NodeGroup::NotReady;
        let active = |uid: &Uid| {
            let states = self.index.node_states(uid).into_iter();
            let active = states.filter(|(node, state)| {
                matches!(state, NodeState::Assigned | NodeState::Pulling) && is_ready(node)
            });
            active.count()
        };
        self.jobs.keys().map(active).sum()
    }

    /// Assigns nodes, and checks that this exceeds no job's parallelism and not the registry's limit, keeps the order of
    /// the groups, and leaves out no node whose turn it is.
    fn assign_all(&mut self) {
        loop {
            let jobs = self.index.take_assignable(at(self.now));
            if jobs.is_empty() {
                break;
            }
            for uid in jobs {
                self.assign(&uid);
            }
        }
        for (uid, job) in self.jobs.iter().filter(|_| self.max_pulls == 0) {
            let states = self.index.node_states(uid);
            let is_active = |state: &&NodeState| matches!(state, NodeState::Assigned | NodeState::Pulling);
            let active = states.values().filter(is_active).count();
            let limit = job.parallelism.clone().unwrap().limit(states.len());
            let is_left_out = |(node, state): (&NodeName, &NodeState)| {
                active < limit && *state == NodeState::Pending && self.has_turn(uid, self.group(node))
            };
            assert!(
                !states.iter().any(is_left_out),
                "{uid} requests nothing, although nodes have their turn: {states:?}"
            );
        }
    }

    fn assign(&mut self, uid: &Uid) {
        let (pulls, before) = (self.pulls(), self.index.node_states(uid));
        let nodes = self.index.assign(uid, at(self.now));
        let is_new = |node: &NodeName| before.get(node) == Some(&NodeState::Pending);
        let (new, edited): (Vec<_>, Vec<_>) = nodes.into_iter().partition(is_new);
        assert!(
            new.is_empty() || self.max_pulls == 0 || (pulls < self.max_pulls && new.len() == 1),
            "{pulls} nodes pull, and {new:?} are to"
        );
        let unique = new.iter().collect::<BTreeSet<_>>().len();
        assert_eq!(unique, new.len(), "{new:?} has a node twice");
        for node in &new {
            assert!(
                self.has_turn(uid, self.group(node)),
                "{node} has not its turn in {uid}"
            );
        }
        for node in edited {
            self.writes.push((node[1..].parse().unwrap(), Arc::clone(uid)));
        }
        for node in new {
            let limit = self.jobs[uid].parallelism.clone().unwrap();
            let active = self.index.counters(uid, false, at(self.now)).unwrap().active;
            let limit = limit.limit(before.len());
            assert!(active <= limit, "{uid} has {active} active nodes; limit {limit}");
            self.writes.push((node[1..].parse().unwrap(), Arc::clone(uid)));
        }
    }

    /// The API server applies the oldest write.
    fn apply_write(&mut self) -> bool {
        if self.writes.is_empty() {
            return false;
        }
        let (n, uid) = self.writes.remove(0);
        let Some(job) = self.jobs.get(&uid).cloned() else {
            return true;
        };
        let (image, tag) = job.image.clone().unwrap();
        if let Some(view) = self.views.get_mut(&n) {
            let owner = TagOwner {
                uid: uid.to_string(),
                job: None,
            };
            match view.tags.iter_mut().find(|t| t.image == image && t.tag == tag) {
                Some(entry) if entry.owners.contains(&owner) => {}
                Some(entry) => {
                    Arc::make_mut(&mut entry.request).owners.push(owner);
                    entry.version += 1;
                }
                None => {
                    let request = TagRequest {
                        image,
                        tag,
                        owners: vec![owner],
                        ..TagRequest::default()
                    };
                    view.tags.push(TagView {
                        request: Arc::new(request),
                        version: 0,
                        created: Some(at(self.now)),
                    });
                    view.tags
                        .sort_by(|a, b| (&a.image, &a.tag).cmp(&(&b.image, &b.tag)));
                }
            }
        }
        self.notify_index(n);
        self.index.write_succeeded(&job, &format!("n{n}").into(), None);
        true
    }

    /// The daemon of a node reports all its pulls.
    fn report_pulls(&mut self, n: u8, ok: bool) {
        let Some(view) = self.views.get_mut(&n) else {
            return;
        };
        view.statuses = view
            .tags
            .iter()
            .map(|t| TagStatusView {
                name: Arc::new(ImageTag {
                    image: t.image.clone(),
                    tag: t.tag.clone(),
                }),
                version: t.version,
                phase: if ok {
                    ImagePullPhase::Succeeded
                } else {
                    ImagePullPhase::Failed
                },
                completed: Some(at(self.now)),
                started: None,
                error: None,
                progress_hash: 0,
                bytes: None,
            })
            .collect();
        self.notify_index(n);
    }

    /// Counters match the states, and states match the nodes of the job.
    fn check_invariants(&self) -> Result<(), TestCaseError> {
        for (uid, job) in &self.jobs {
            let states = self.index.node_states(uid);
            let tally = self.index.counters(uid, true, at(self.now)).unwrap();
            let count = |f: fn(&NodeState) -> bool| states.values().filter(|s| f(s)).count();
            prop_assert_eq!(tally.desired, states.len());
            prop_assert_eq!(
                tally.active,
                count(|s| matches!(s, NodeState::Assigned | NodeState::Pulling))
            );
            prop_assert_eq!(tally.succeeded, count(|s| *s == NodeState::Succeeded));
            prop_assert_eq!(tally.failed.len(), count(|s| *s == NodeState::Failed));
            prop_assert_eq!(
                tally.unfinished.len(),
                tally.desired - tally.succeeded - tally.failed.len()
            );
            let is_aside = |(node, state): &(&NodeName, &NodeState)| {
                **state == NodeState::Pending && self.group(node) == NodeGroup::NotReady
            };
            let aside = states.iter().filter(is_aside);
            let aside: BTreeSet<NodeName> = aside.map(|(node, _)| Arc::clone(node)).collect();
            prop_assert_eq!(&tally.put_aside, &aside);
            let unresponsive = tally.unresponsive.union(&tally.not_ready);
            prop_assert!(
                unresponsive
                    .into_iter()
                    .all(|node| states.get(node) == Some(&NodeState::Pulling))
            );
            let pending = self.pending_nodes.iter().filter(|(n, since)| {
                self.now < *since + 30 && job.targets.includes(&format!("n{n}"), &labels(**n))
            });
            prop_assert_eq!(tally.pending_nodes.len(), pending.count());
            let members = self
                .views
                .iter()
                .filter(|(n, v)| job.targets.includes(&format!("n{n}"), &v.labels));
            prop_assert_eq!(states.len(), members.count());
        }
        Ok(())
    }
}

#[derive(Clone, Debug)]
enum Op {
    AddNode(u8),
    RemoveNode(u8),
    SetReady(u8, bool),
    Cordon(u8, bool),
    PutJob(u8),
    EditJob(u8, i32),
    RemoveJob(u8),
    Assign,
    Write,
    ReportPulls(u8, bool),
    ExpireTags(u8),
    AdvanceTime(i64),
    NewLeader,
    RefuseWrite(u8),
}

fn any_op() -> impl Strategy<Value = Op> {
    let node = 0..NODES;
    prop_oneof![
        1 => node.clone().prop_map(Op::AddNode),
        1 => node.clone().prop_map(Op::RemoveNode),
        1 => (node.clone(), any::<bool>()).prop_map(|(n, r)| Op::SetReady(n, r)),
        1 => (node.clone(), any::<bool>()).prop_map(|(n, on)| Op::Cordon(n, on)),
        1 => (0_u8..3).prop_map(Op::PutJob),
        1 => (0_u8..3, 1..4).prop_map(|(n, timeout)| Op::EditJob(n, timeout)),
        1 => (0_u8..3).prop_map(Op::RemoveJob),
        3 => Just(Op::Assign),
        4 => Just(Op::Write),
        3 => (node.clone(), any::<bool>()).prop_map(|(n, ok)| Op::ReportPulls(n, ok)),
        1 => node.clone().prop_map(Op::ExpireTags),
        1 => node.prop_map(Op::RefuseWrite),
        1 => Just(Op::NewLeader),
        1 => (0_i64..20).prop_map(Op::AdvanceTime),
    ]
}

fn state_of(index: &JobIndex, uid: &Uid, n: u8) -> Option<NodeState> {
    index.node_states(uid).get(&*format!("n{n}")).copied()
}

fn apply_op(world: &mut FakeCluster, op: Op, limits: &BTreeMap<Uid, usize>, never: bool) {
    match op {
        Op::AddNode(n) => world.add_node(n),
        Op::RemoveNode(n) => {
            world.views.remove(&n);
            if world.nodes.get(&n) == Some(&true) {
                world.pending_nodes.entry(n).or_insert(world.now);
            }
            world.notify_index(n);
        }
        Op::SetReady(n, ready) => world.set_node(n, ready),
        Op::Cordon(n, on) => {
            if on {
                world.cordoned.insert(n);
            } else {
                world.cordoned.remove(&n);
            }
            if let Some(ready) = world.nodes.get(&n).copied() {
                world.set_node(n, ready);
            }
        }
        Op::PutJob(n) => {
            let uid: Uid = format!("uid{n}").into();
            let job = job(n, i32::try_from(limits[&uid]).unwrap(), never);
            world.index.upsert_job(job.clone(), at(world.now));
            world.jobs.insert(uid, job);
        }
        Op::EditJob(n, timeout) => {
            let uid: Uid = format!("uid{n}").into();
            if let Some(job) = world.jobs.get_mut(&uid) {
                let timeout_seconds = Some(timeout);
                job.spec.pull_policy = Some(PullPolicy {
                    timeout_seconds,
                    ..PullPolicy::default()
                });
                world.index.upsert_job(job.clone(), at(world.now));
            }
        }
        Op::RemoveJob(n) => {
            let uid: Uid = format!("uid{n}").into();
            world.index.remove_job(&uid);
            world.jobs.remove(&uid);
        }
        Op::Assign => world.assign_all(),
        Op::Write => {
            world.apply_write();
        }
        Op::ReportPulls(n, ok) => world.report_pulls(n, ok),
        Op::ExpireTags(n) => {
            if let Some(view) = world.views.get_mut(&n) {
                view.tags.clear();
                world.notify_index(n);
            }
        }
        Op::AdvanceTime(seconds) => world.now += seconds,
        Op::NewLeader => world.new_leader(),
        Op::RefuseWrite(n) => {
            for (uid, job) in &world.jobs {
                let before = state_of(&world.index, uid, n);
                world.index.write_refused(job, &format!("n{n}").into(), "refused");
                let after = state_of(&world.index, uid, n);
                assert!(
                    before != Some(NodeState::Pulling) || before == after,
                    "its pull continues"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.max(400)))]
    /// For any history, counters are right, no job exceeds its parallelism, and nodes come in the order of their groups;
    /// and when all components work again, every job ends.
    #[test]
    fn counters_hold_and_jobs_end(
        ops in prop::collection::vec(any_op(), 0..80),
        parallelism in prop::collection::vec(1_usize..4, 3),
        max_pulls in 0_usize..6,
        never in any::<bool>(),
    ) {
        let limits: BTreeMap<Uid, usize> =
            (0..3).map(|n| (Uid::from(format!("uid{n}")), parallelism[n])).collect();
        let mut world = FakeCluster { max_pulls, ..FakeCluster::default() };
        world.new_leader();
        for op in ops {
            apply_op(&mut world, op, &limits, never);
            world.check_invariants()?;
        }
        world.assign_all();
        while world.apply_write() {}
        for uid in world.jobs.keys() {
            let outdated: Vec<u8> =
                (0..NODES).filter(|n| world.index.is_outdated(uid, &format!("n{n}").into())).collect();
            prop_assert!(outdated.is_empty(), "an edit of {uid} has not reached {outdated:?}");
        }
        // Nodes that are not ready pull nothing, and this limits nothing.
        for _ in 0..120 {
            world.now += 31;
            world.assign_all();
            while world.apply_write() {}
            for n in 0..NODES { world.report_pulls(n, true); }
            world.check_invariants()?;
        }
        for (uid, job) in &world.jobs {
            let tally = world.index.counters(uid, false, at(world.now)).unwrap();
            prop_assert_eq!(tally.desired, tally.succeeded + tally.failed.len(), "{} does not end", job.key);
            if !never {
                let update = job_status(&world.index.job(uid).unwrap(), &tally, at(world.now));
                prop_assert!(update.status.completion_time.is_some());
            }
        }
    }
}

mod cases;

#[test]
fn secrets_of_an_image_are_those_of_its_running_jobs() {
    let mut index = JobIndex::new(SignedDuration::ZERO, RegistryLimit::default());
    let uid = |n: u8| -> Uid { format!("uid{n}").into() };
    let mut with_secrets = |n: u8| {
        let mut job = job(n, 1, false);
        job.spec.pull_secrets = vec!["s".to_owned()];
        job.image = Ok(("reg/app".to_owned(), n.to_string()));
        index.upsert_job(job, at(0));
    };
    with_secrets(0);
    with_secrets(1);
    let copy = |name: &str| ReferenceObject {
        namespace: "d".into(),
        name: name.into(),
        mode: None,
    };
    index.set_secrets(&uid(0), vec![copy("a")]);
    let keys = |names: &[&str]| names.iter().map(|name| secret_key(&copy(name))).collect();
    assert_eq!(
        index.needed_secrets("reg/app"),
        Some(keys(&["a"])),
        "the other does not pull"
    );
    index.set_secrets(&uid(1), vec![copy("b")]);
    assert_eq!(index.needed_secrets("reg/app"), Some(keys(&["a", "b"])));
    index.remove_job(&uid(0));
    assert_eq!(index.needed_secrets("reg/app"), Some(keys(&["b"])));
    // Each of a thousand nodes needs them; they are collected once.
    let is_known = |index: &JobIndex| index.secrets_of_images.contains_key("reg/app");
    assert!(is_known(&index));
    index.set_secrets(&uid(1), vec![copy("c")]);
    assert!(!is_known(&index));
    assert_eq!(index.needed_secrets("reg/app"), Some(keys(&["c"])));
    index.remove_job(&uid(1));
    assert!(!is_known(&index));
}

/// The nodes of an earlier leader may pull for long, so that none is assigned.
#[test]
fn status_shows_at_once_that_secrets_block_no_more() {
    let mut index = JobIndex::new(SignedDuration::ZERO, RegistryLimit::default());
    let mut job = job(0, 1, false);
    job.spec.pull_secrets = vec!["s".to_owned()];
    index.upsert_job(job, at(0));
    let uid = Uid::from("uid0");
    index.block(&uid, "forbidden".to_owned());
    index.take_dirty();
    for changed in [true, false] {
        index.set_secrets(&uid, Vec::new());
        assert_eq!(index.take_dirty().contains(&uid), changed);
    }
}

#[test]
fn service_accounts_of_one_namespace_are_limited() {
    let mut index = JobIndex::new(SignedDuration::ZERO, RegistryLimit::default());
    let add = |index: &mut JobIndex, namespace: &str, account: &str| {
        let mut job = job(0, 1, false);
        job.key.namespace = Some(namespace.to_owned());
        job.uid = format!("{namespace}-{account}");
        job.spec.service_account_name = Some(account.to_owned());
        index.upsert_job(job, at(0));
    };
    let names = |index: &mut JobIndex| -> Vec<String> {
        let needed = index.needed_accounts("nginx").into_iter();
        needed
            .map(|account| format!("{}/{}", account.namespace, account.name))
            .collect()
    };
    for account in ["a", "b", "c", "d", "e", "f"] {
        add(&mut index, "many", account);
    }
    assert_eq!(names(&mut index), ["many/a", "many/b", "many/c", "many/d"]);
    add(&mut index, "one", "z");
    assert_eq!(names(&mut index).len(), MAX_ACCOUNTS_OF_NAMESPACE + 1);
    index.remove_job(&"many-a".into());
    assert_eq!(
        names(&mut index),
        ["many/b", "many/c", "many/d", "many/e", "one/z"]
    );
}

#![allow(clippy::unwrap_used, clippy::panic)]

use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// When the job was created.
const CREATED: i64 = 1_800_000_000;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(CREATED + second).unwrap()
}

/// A Pod as it is. What the manager sees of a restart may be older.
#[derive(Clone)]
struct PodState {
    created: i64,
    uid: String,
    container_id: usize,
    /// Whether it is ready, but for its request.
    ready: bool,
    running: bool,
    /// What the manager sees.
    view: Arc<PodView>,
}

impl PodState {
    fn new(uid: &str, created: i64) -> Self {
        let mut pod = Self {
            created,
            uid: uid.to_owned(),
            container_id: 1,
            ready: true,
            running: true,
            view: Arc::default(),
        };
        pod.report();
        pod
    }

    /// Kubelet reports the status.
    fn report(&mut self) {
        let container = ContainerView {
            name: "main".to_owned(),
            id: format!("containerd://{}-{}", self.uid, self.container_id),
            ready: self.ready,
            running: self.running,
            restarts: 0,
        };
        self.view = Arc::new(PodView {
            uid: self.uid.clone(),
            created: Some(at(self.created)),
            node: Some("node-1".to_owned()),
            ready: self.ready && self.running,
            containers: vec![container],
            ..PodView::default()
        });
    }
}

struct World {
    job: ContainerRecreateJob,
    pods: BTreeMap<String, PodState>,
    requests: BTreeMap<String, ContainerRecreateRequest>,
    memory: Memory,
    target: Target,
    /// UIDs of Pods that another job is restarting.
    others: BTreeSet<String>,
    /// What others have restarted since the job was created.
    restarted_since: RestartedContainers,
    now: i64,
    start: Instant,
    /// How many requests each Pod has had, by UID.
    created: BTreeMap<String, usize>,
    /// UIDs of Pods that were ready after their restart.
    ready_after: BTreeSet<String>,
}

impl World {
    fn new(pods: usize, spec: Value) -> Self {
        let mut all =
            json!({ "selector": { "matchLabels": { "app": "web" } }, "containers": [{ "name": "main" }] });
        json_patch::merge(&mut all, &spec);
        let job = json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "ContainerRecreateJob", "spec": all,
            "metadata": { "name": "reload", "namespace": "team", "uid": "j", "generation": 1,
                "creationTimestamp": at(0).to_string() } });
        let pods = (0..pods).map(|n| (format!("web-{n}"), PodState::new(&format!("u{n}"), -60)));
        Self {
            job: serde_json::from_value(job).unwrap(),
            pods: pods.collect(),
            requests: BTreeMap::new(),
            memory: Memory::default(),
            target: Target::Known,
            others: BTreeSet::new(),
            restarted_since: BTreeMap::new(),
            now: 10,
            start: Instant::now(),
            created: BTreeMap::new(),
            ready_after: BTreeSet::new(),
        }
    }

    fn observed(&self) -> Observed {
        Observed {
            job: Arc::new(self.job.clone()),
            selectors: Arc::new(JobSelectors::from(&self.job.spec)),
            target: self.target.clone(),
            pods: self
                .pods
                .iter()
                .map(|(name, pod)| (name.clone(), Arc::clone(&pod.view)))
                .collect(),
            unseen: Vec::new(),
            requests: self.requests.values().cloned().map(Arc::new).collect(),
            restarted_by_others: self.others.clone(),
            restarted_since: self.restarted_since.clone(),
        }
    }

    fn plan(&self) -> Plan {
        plan(
            &self.observed(),
            &self.memory,
            at(self.now),
            self.instant(self.now),
        )
    }

    /// The instant at which the API server's clock shows this second, unless it is set.
    fn instant(&self, second: i64) -> Instant {
        self.start + Duration::from_secs(second.try_into().unwrap())
    }

    /// UIDs and names of the Pods whose requests would be created.
    fn next_creations(&self) -> Vec<(String, String)> {
        let create = self.plan().create;
        let pod = |request: &ContainerRecreateRequest| {
            let uid = pod_uid(request).unwrap().to_owned();
            (uid, request.spec.pod_name.clone())
        };
        create.iter().map(pod).collect()
    }

    fn is_running(&self, uid: &str) -> bool {
        let mut own = self
            .requests
            .values()
            .filter(|request| pod_uid(request) == Some(uid));
        own.any(|request| {
            request
                .status
                .as_ref()
                .is_none_or(|status| status.completion_time.is_none())
        })
    }

    /// Pods that are unavailable, whether or not the manager sees it.
    fn unavailable(&self) -> usize {
        let pods = self.pods.values();
        pods.filter(|pod| !pod.ready || !pod.running || self.is_running(&pod.uid))
            .count()
    }

    /// One reconcile: what is planned is done. Returns the names of the Pods.
    fn reconcile(&mut self) -> Vec<String> {
        let plan = self.plan();
        let before = self.unavailable();
        let [.., failed_before] = self.counts();
        self.memory = plan.memory;
        if let Some(status) = plan.status {
            self.job.status = Some(status);
        }
        let names = plan.create.iter().map(|request| request.spec.pod_name.clone());
        let names: Vec<_> = names.collect();
        for request in plan.create {
            let uid = pod_uid(&request).unwrap().to_owned();
            self.memory.requested.insert(uid.clone(), stop_limit(&request));
            self.memory.not_ready_since.insert(uid.clone(), None);
            self.memory.refused.remove(&uid);
            self.memory.all_refused = None;
            *self.created.entry(uid).or_default() += 1;
            let name = request.metadata.name.clone().unwrap();
            assert!(name.len() <= 253 && self.requests.insert(name, request).is_none());
        }
        let [.., restarted, failed] = self.counts();
        assert!(failed >= failed_before, "{failed} failed, before {failed_before}");
        let ready_after = self.ready_after.len();
        assert!(
            to_count(ready_after) >= restarted,
            "{restarted} were restarted, and {ready_after} ready"
        );
        let max = scaled(
            self.job.spec.max_unavailable.as_ref(),
            self.pods.len(),
            1,
            f64::floor,
        );
        let (max, now) = (max.max(1), self.unavailable());
        assert!(
            now <= max.max(before),
            "{now} of at most {max} are unavailable, before {before}"
        );
        assert!(
            self.created.values().all(|times| *times == 1),
            "{:?}",
            self.created
        );
        names
    }

    /// Ends the request of a Pod as the daemon does: the container was replaced, or it failed.
    fn finish(&mut self, pod: &str, failure: Option<&str>) {
        self.finish_stop(pod, failure, failure.is_none());
    }

    /// The same; a failed one may have begun to stop the container.
    fn finish_stop(&mut self, pod: &str, failure: Option<&str>, is_killed: bool) {
        let state = self.pods.get_mut(pod);
        let found = state.and_then(|state| {
            let mut all = self.requests.values_mut();
            Some((all.find(|request| pod_uid(request) == Some(&state.uid))?, state))
        });
        let Some((request, state)) = found.filter(|(request, _)| request.status.is_none()) else {
            return;
        };
        let old = format!("containerd://{}-{}", state.uid, state.container_id);
        let succeeded = failure.is_none();
        if succeeded {
            state.container_id += 1;
            state.ready = false;
        }
        let status = json!({ "phase": "Completed", "completionTime": at(self.now).to_string(),
            "containerRecreateStates": [{ "name": "main", "phase": if succeeded { "Succeeded" } else { "Failed" },
                "message": failure, "isKilled": is_killed, "containerID": old }] });
        request.status = Some(serde_json::from_value(status).unwrap());
    }

    /// The daemon and the manager end the requests whose Pod is gone.
    fn finish_gone(&mut self) {
        let uids: BTreeSet<String> = self.pods.values().map(|pod| pod.uid.clone()).collect();
        let ended = json!({ "phase": "Completed", "completionTime": at(self.now).to_string(),
            "message": request::POD_GONE_MESSAGE });
        for request in self.requests.values_mut() {
            if request.status.is_none() && pod_uid(request).is_some_and(|uid| !uids.contains(uid)) {
                request.status = Some(serde_json::from_value(ended.clone()).unwrap());
            }
        }
    }

    /// The refused request is tried again: the condition stays until it is created.
    fn retry_and_create(&mut self, first: &str) {
        let retry_at = self.plan().requeue_at.unwrap();
        self.now = (retry_at.as_second() - CREATED).max(self.now);
        let plan = self.plan();
        assert_eq!(plan.status, None);
        assert_eq!(plan.create.first().unwrap().spec.pod_name, first);
        assert_eq!(self.reconcile().first().unwrap(), first);
        self.assert_condition("Waiting", "RequestRefused");
        self.reconcile();
        assert_eq!(self.condition(), Default::default());
    }

    /// Readiness returns, and kubelet reports it.
    fn recover(&mut self, pod: &str) {
        if let Some(state) = self.pods.get_mut(pod) {
            (state.ready, state.running) = (true, true);
            state.report();
            let mut requests = self.requests.values();
            let own = requests.find(|request| pod_uid(request) == Some(&state.uid));
            if own.is_some_and(|request| result(request) == Some(Ok(()))) {
                self.ready_after.insert(state.uid.clone());
            }
        }
    }

    fn counts(&self) -> [i32; 4] {
        let status = self.job.status.clone().unwrap_or_default();
        [status.desired, status.active, status.restarted, status.failed]
    }

    /// Type and reason of the condition.
    fn condition(&self) -> (String, String) {
        let conditions = self.job.status.iter().flat_map(|status| &status.conditions);
        let mut conditions = conditions.map(|one| (one.type_.clone(), one.reason.clone()));
        let condition = conditions.next().unwrap_or_default();
        assert_eq!(conditions.next(), None);
        condition
    }

    fn assert_condition(&self, type_: &str, reason: &str) {
        assert_eq!(
            self.condition(),
            (type_.to_owned(), reason.to_owned()),
            "{:?}",
            self.job.status
        );
    }
}

#[test]
fn pods_are_restarted_one_at_a_time_from_the_last_ordinal() {
    let mut world = World::new(3, json!({}));
    for name in ["web-2", "web-1", "web-0"] {
        assert_eq!(world.reconcile(), [name]);
        assert_eq!(
            world.reconcile(),
            Vec::<String>::new(),
            "the request has not ended"
        );
        world.finish(name, None);
        assert_eq!(
            world.reconcile(),
            Vec::<String>::new(),
            "kubelet has not reported the restart"
        );
        world.pods.get_mut(name).unwrap().report();
        assert_eq!(
            world.reconcile(),
            Vec::<String>::new(),
            "the Pod is not ready again"
        );
        world.assert_condition("Waiting", "PodsNotReady");
        world.recover(name);
    }
    assert_eq!(world.reconcile(), Vec::<String>::new());
    world.assert_condition("Complete", "PodsRestarted");
    assert_eq!(world.counts(), [3, 0, 3, 0]);
    let request = world.requests.values().next().unwrap();
    assert_eq!(job_of(request).unwrap().uid, "j");
    assert_eq!(request.spec.active_deadline_seconds, Some(600));
    // A job that has ended restarts nothing more.
    world.pods.insert("web-9".to_owned(), PodState::new("u9", -60));
    assert_eq!(world.plan(), Plan::default());
}

#[test]
fn priority_comes_before_the_order_of_names() {
    let first = json!({ "weight": 10, "matchSelector": { "matchLabels": { "app": "first" } } });
    let mut world = World::new(3, json!({ "priorityStrategy": { "weightPriority": [first] } }));
    let pod = world.pods.get_mut("web-0").unwrap();
    let mut view = (*pod.view).clone();
    view.labels = Arc::new(BTreeMap::from([("app".to_owned(), "first".to_owned())]));
    pod.view = Arc::new(view);
    assert_eq!(world.reconcile(), ["web-0"]);
}

/// Weights may be many: they are looked at only for a Pod that can be restarted.
#[test]
fn pods_are_sorted_only_if_one_may_be_restarted() {
    let may_choose = |spec: Value, not_ready: Option<&str>| {
        let mut world = World::new(3, spec);
        // New Pods need no restart.
        world.pods.insert("web-3".to_owned(), PodState::new("u3", 5));
        if let Some(pod) = not_ready.and_then(|name| world.pods.get_mut(name)) {
            pod.ready = false;
            pod.report();
        }
        let observed = world.observed();
        let situation = Situation::of(&observed, &world.memory, at(world.now), world.instant(world.now));
        situation.may_choose(&situation.budget())
    };
    assert!(may_choose(json!({}), None));
    assert!(!may_choose(json!({ "paused": true }), None));
    assert!(!may_choose(json!({ "partition": "100%" }), None));
    assert!(!may_choose(json!({}), Some("web-3")), "the budget is used up");
    assert!(
        may_choose(json!({}), Some("web-0")),
        "that Pod is unavailable anyway"
    );
}

#[test]
fn unavailable_pods_use_the_budget_and_are_restarted_at_once() {
    let mut world = World::new(4, json!({ "maxUnavailable": "50%" }));
    let broken = world.pods.get_mut("web-1").unwrap();
    broken.ready = false;
    broken.report();
    assert_eq!(world.reconcile(), ["web-3", "web-1"]);
    let mut world = World::new(2, json!({}));
    // A new Pod that is not ready: it needs no restart, and leaves no room for others.
    let mut new = PodState::new("new", 5);
    new.ready = false;
    new.report();
    world.pods.insert("web-7".to_owned(), new);
    assert_eq!(world.reconcile(), Vec::<String>::new());
    world.assert_condition("Waiting", "MaxUnavailable");
    assert_eq!(world.counts(), [2, 0, 0, 0]);
}

#[test]
fn new_pods_and_containers_that_do_not_run_need_no_restart() {
    let mut world = World::new(2, json!({}));
    world.pods.insert("web-5".to_owned(), PodState::new("new", 1));
    let waiting = world.pods.get_mut("web-1").unwrap();
    waiting.running = false;
    waiting.report();
    world.job.spec.max_unavailable = Some(IntOrString::Int(10));
    assert_eq!(world.reconcile(), ["web-0"]);
    let mut none = World::new(0, json!({}));
    let set_back = plan(&none.observed(), &none.memory, at(-60), none.start);
    assert!(set_back.status.unwrap().completion_time.is_some());
    none.now = 0;
    none.reconcile();
    assert_eq!(
        none.condition(),
        Default::default(),
        "the watch of Pods may be behind"
    );
    none.now = 1;
    none.reconcile();
    none.assert_condition("Complete", "NoPods");
}

/// A Pod that waits for its turn, because of the partition, is restarted by a user's request.
#[test]
fn container_that_another_request_has_restarted_since_needs_no_restart() {
    let mut world = World::new(2, json!({ "partition": "100%" }));
    world.reconcile();
    let restarted = |world: &World, requested: i64, phase: &str, is_killed: bool| {
        let request = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
            "metadata": { "name": "r", "creationTimestamp": at(requested).to_string() },
            "spec": { "podName": "web-1", "containers": [{ "name": "main" }] },
            "status": { "phase": "Recreating", "containerRecreateStates": [{ "name": "main", "phase": phase,
                "isKilled": is_killed, "containerID": "containerd://u1-1" }] } });
        let request: ContainerRecreateRequest = serde_json::from_value(request).unwrap();
        restarted_since(&world.job, &request)
            .cloned()
            .collect::<BTreeSet<_>>()
    };
    let main = BTreeSet::from(["main".to_owned()]);
    assert_eq!(restarted(&world, 1, "Succeeded", true), main);
    for (requested, phase, is_killed) in [
        (0, "Succeeded", true),
        (1, "Recreating", true),
        (1, "Failed", true),
        // Kubelet did, and may have done so before.
        (1, "Succeeded", false),
    ] {
        let none = restarted(&world, requested, phase, is_killed);
        assert_eq!(none, BTreeSet::new(), "{requested} {phase} {is_killed}");
    }
    world.restarted_since.insert("u1".to_owned(), main);
    world.happen(&Event::Edit(json!({ "partition": null })));
    assert_eq!(world.reconcile(), ["web-0"]);
    assert_eq!(world.counts(), [1, 0, 0, 0]);
    // As a request with it does.
    world.happen(&Event::Edit(json!({ "strategy": { "forceRecreate": true } })));
    assert_eq!(restarted(&world, 1, "Succeeded", true), BTreeSet::new());
}

#[test]
fn job_does_not_complete_before_the_watch_has_shown_its_pods() {
    let world = World::new(0, json!({}));
    let mut observed = world.observed();
    let condition = |observed: &Observed| {
        let plan = plan(observed, &world.memory, at(world.now), world.start);
        let status = plan.status.unwrap();
        (
            status.completion_time.is_some(),
            status.conditions[0].reason.clone(),
        )
    };
    observed.unseen = vec!["web-0".to_owned()];
    assert_eq!(condition(&observed), (false, "WatchDelayed".to_owned()));
    observed.unseen.clear();
    assert_eq!(condition(&observed), (true, "NoPods".to_owned()));
}

#[test]
fn container_that_no_pod_has_is_a_mistake() {
    let mut world = World::new(2, json!({ "containers": [{ "name": "typo" }] }));
    world.reconcile();
    world.assert_condition("Failed", "ContainerNotFound");
}

#[test]
fn pause_partition_and_deadline_stop_further_restarts() {
    let mut world = World::new(
        4,
        json!({ "paused": true, "partition": "50%", "activeDeadlineSeconds": 100 }),
    );
    assert_eq!(world.reconcile(), Vec::<String>::new());
    world.assert_condition("Waiting", "Paused");
    world.job.spec.paused = false;
    for name in ["web-3", "web-2"] {
        assert_eq!(world.reconcile(), [name]);
        world.finish(name, None);
        world.recover(name);
    }
    assert_eq!(world.reconcile(), Vec::<String>::new());
    world.assert_condition("Waiting", "Partition");
    world.job.spec.partition = Some(IntOrString::Int(1));
    assert_eq!(world.reconcile(), ["web-1"]);
    // The deadline is over: what has begun is finished.
    world.now += 100;
    world.job.spec.partition = None;
    assert_eq!(world.reconcile(), Vec::<String>::new());
    assert_eq!(world.counts(), [4, 1, 2, 0]);
    world.finish("web-1", None);
    world.recover("web-1");
    world.reconcile();
    world.assert_condition("Failed", "DeadlineExceeded");
    assert_eq!(world.counts(), [4, 0, 3, 0]);
}

#[test]
fn failed_pod_ends_the_job_unless_failures_are_allowed() {
    let mut world = World::new(3, json!({}));
    world.reconcile();
    world.finish("web-2", Some("no luck"));
    assert_eq!(world.reconcile(), Vec::<String>::new());
    world.assert_condition("Failed", "TooManyFailures");
    let status = world.job.status.clone().unwrap();
    let message = &status.conditions[0].message;
    assert!(
        message.starts_with("2 of 3 Pods were not restarted") && message.contains("web-2: "),
        "{message}"
    );
    assert!(message.contains("no luck"), "{message}");
    assert_eq!(status.failed_pods, ["web-2"]);

    let mut world = World::new(3, json!({ "maxFailures": 1 }));
    world.reconcile();
    world.finish("web-2", Some("no luck"));
    for name in ["web-1", "web-0"] {
        assert_eq!(world.reconcile(), [name]);
        world.finish(name, None);
        world.recover(name);
    }
    world.reconcile();
    world.assert_condition("Failed", "PodsFailed");
    assert_eq!(world.counts(), [3, 0, 2, 1]);
}

#[test]
fn pod_that_is_not_ready_in_time_has_failed() {
    let mut world = World::new(2, json!({ "podDeadlineSeconds": 30 }));
    world.reconcile();
    world.finish("web-1", None);
    world.pods.get_mut("web-1").unwrap().report();
    world.reconcile();
    assert_eq!(world.plan().requeue_at, Some(at(world.now + 30)));
    world.now += 30;
    world.reconcile();
    world.assert_condition("Failed", "TooManyFailures");
    // One that was ready once may be not ready later.
    let mut world = World::new(2, json!({ "podDeadlineSeconds": 30 }));
    world.reconcile();
    world.finish("web-1", None);
    world.recover("web-1");
    world.reconcile();
    world.now += 60;
    let pod = world.pods.get_mut("web-1").unwrap();
    pod.ready = false;
    pod.report();
    world.reconcile();
    assert_eq!(world.counts(), [2, 1, 1, 0]);
}

#[test]
fn pod_gets_no_more_time_when_the_clock_is_set_back() {
    let mut world = World::new(1, json!({ "podDeadlineSeconds": 30 }));
    world.now = 7200;
    world.reconcile();
    world.finish("web-0", None);
    world.pods.get_mut("web-0").unwrap().report();
    world.reconcile();
    world.now = 100;
    world.reconcile();
    assert_eq!(world.plan().requeue_at, Some(at(130)));
    world.now = 130;
    world.reconcile();
    world.assert_condition("Failed", "PodsFailed");
}

#[test]
fn deleted_request_fails_its_pod_and_is_not_created_again() {
    let mut world = World::new(2, json!({ "maxFailures": 5 }));
    world.reconcile();
    world.requests.clear();
    assert_eq!(
        world.reconcile(),
        Vec::<String>::new(),
        "its containers may be stopped"
    );
    assert_eq!(world.counts(), [2, 0, 0, 1]);
    assert_eq!(world.plan().requeue_at, Some(at(world.now + 600)));
    world.now += 600;
    assert_eq!(world.reconcile(), ["web-0"]);
    // One that had been restarted already needs no request any more.
    let mut restarted = World::new(1, json!({}));
    restarted.reconcile();
    restarted.finish("web-0", None);
    restarted.recover("web-0");
    restarted.job.spec.paused = true;
    restarted
        .pods
        .insert("web-9".to_owned(), PodState::new("u9", -60));
    restarted.reconcile();
    restarted.requests.clear();
    restarted.reconcile();
    assert_eq!(restarted.counts(), [2, 0, 1, 0]);
    // Its Pod was replaced: it has failed nevertheless.
    world.pods.insert("web-1".to_owned(), PodState::new("later", 20));
    world.reconcile();
    assert_eq!(world.counts(), [2, 1, 0, 1]);
}

/// The restart breaks the application, and something deletes each Pod that is not ready for a while.
#[test]
fn pod_that_is_deleted_before_it_is_ready_has_failed() {
    let mut world = World::new(3, json!({}));
    assert_eq!(world.reconcile(), ["web-2"]);
    world.finish("web-2", None);
    world.pods.get_mut("web-2").unwrap().report();
    world.reconcile();
    world.happen(&Event::Replace(2));
    assert_eq!(world.reconcile(), Vec::<String>::new());
    world.assert_condition("Failed", "TooManyFailures");
    assert_eq!(world.counts(), [3, 0, 0, 1]);
    // It does not become ready, and the request ends with the Pod.
    let mut world = World::new(3, json!({}));
    assert_eq!(world.reconcile(), ["web-2"]);
    world.finish_stop("web-2", Some(request::POD_GONE_MESSAGE), true);
    for request in world.requests.values_mut() {
        let status = request.status.as_mut().unwrap();
        status.message = Some(request::POD_GONE_MESSAGE.to_owned());
    }
    world.happen(&Event::Replace(2));
    assert_eq!(world.reconcile(), Vec::<String>::new());
    world.assert_condition("Failed", "TooManyFailures");
    // It was ready, and is deleted afterwards.
    let mut world = World::new(2, json!({}));
    world.reconcile();
    world.finish("web-1", None);
    world.recover("web-1");
    let pod = world.pods.get_mut("web-1").unwrap();
    Arc::make_mut(&mut pod.view).terminating = true;
    world.reconcile();
    assert_eq!(world.counts(), [2, 0, 1, 0]);
    world.happen(&Event::Replace(1));
    assert_eq!(world.reconcile(), ["web-0"]);
    assert_eq!(world.counts(), [2, 0, 1, 0]);
}

#[test]
fn failed_pod_stays_failed() {
    let mut world = World::new(
        4,
        json!({ "maxFailures": 9, "podDeadlineSeconds": 30, "maxUnavailable": 9 }),
    );
    assert_eq!(world.reconcile().len(), 4);
    world.finish("web-3", Some("no luck"));
    world.finish("web-2", None);
    world.finish("web-1", None);
    world.happen(&Event::Wait(0));
    world.reconcile();
    world.now += 30;
    world.reconcile();
    assert_eq!(world.counts(), [4, 1, 0, 3]);
    // One is ready too late, and two are deleted.
    world.recover("web-1");
    world.happen(&Event::Replace(2));
    world.happen(&Event::Replace(3));
    // The last one went before its restart.
    world.happen(&Event::Replace(0));
    world.finish_gone();
    world.reconcile();
    assert_eq!(world.counts(), [3, 0, 0, 3]);
    world.assert_condition("Failed", "PodsFailed");
    assert_eq!(world.job.status.unwrap().failed_pods, ["web-1", "web-2", "web-3"]);
}

/// It knows failed Pods from the status, and of those that are gone not whether they were ready.
#[test]
fn new_manager_keeps_failures_and_counts_no_pod_that_is_gone() {
    let spec = json!({ "maxFailures": 9, "podDeadlineSeconds": 30, "maxUnavailable": 2 });
    let mut world = World::new(4, spec);
    assert_eq!(world.reconcile(), ["web-3", "web-2"]);
    world.finish("web-3", None);
    world.finish("web-2", None);
    world.recover("web-2");
    world.happen(&Event::Wait(0));
    world.job.spec.paused = true;
    world.reconcile();
    world.now += 30;
    world.reconcile();
    assert_eq!(world.counts(), [4, 0, 1, 1]);
    world.happen(&Event::Replace(2));
    world.recover("web-3");
    world.memory = Memory::default();
    for _ in 0..2 {
        world.reconcile();
        assert_eq!(world.counts(), [3, 0, 0, 1]);
    }
    // As long as it cannot know whose Pods are, it does not decide about them.
    let mut world = World::new(1, json!({}));
    world.reconcile();
    world.finish("web-0", None);
    world.recover("web-0");
    world.job.spec.paused = true;
    let pods = std::mem::take(&mut world.pods);
    (world.memory, world.target) = (Memory::default(), Target::Unreadable("forbidden".to_owned()));
    world.reconcile();
    (world.pods, world.target) = (pods, Target::Known);
    world.reconcile();
    assert_eq!(world.counts(), [1, 0, 1, 0]);
}

#[test]
fn requests_with_a_forged_owner_do_not_count() {
    let mut world = World::new(2, json!({}));
    let mut forged = build_request(
        &world.job,
        "web-1",
        &world.pods["web-1"].view,
        &RestartedContainers::new(),
    );
    forged.metadata.name = Some("forged".to_owned());
    world.requests.insert("forged".to_owned(), forged.clone());
    forged.metadata.labels = None;
    world.requests.insert("without-label".to_owned(), forged);
    let plan = world.plan();
    assert_eq!(plan.status.unwrap().active, 0);
    assert_eq!(plan.create.len(), 1);
}

#[test]
fn refused_request_is_reported_and_stops_no_other() {
    let mut world = World::new(2, json!({}));
    let refusal = Refusal {
        message: "denied".to_owned(),
        retry_at: world.instant(world.now + 30),
    };
    world.memory.refused = BTreeMap::from([("u1".to_owned(), refusal)]);
    assert_eq!(world.reconcile(), ["web-0"]);
    world.finish("web-0", None);
    world.recover("web-0");
    assert_eq!(world.reconcile(), Vec::<String>::new());
    world.assert_condition("Waiting", "RequestRefused");
    world.retry_and_create("web-1");
}

#[test]
fn refusal_of_all_stops_all_requests_until_it_is_tried_again() {
    let mut world = World::new(3, json!({ "maxUnavailable": 2 }));
    world.memory.all_refused = Some(Refusal {
        message: "exceeded quota".to_owned(),
        retry_at: world.instant(world.now + 30),
    });
    assert_eq!(world.reconcile(), Vec::<String>::new());
    world.assert_condition("Waiting", "RequestRefused");
    world.job.spec.paused = true;
    world.now += 29;
    world.reconcile();
    world.assert_condition("Waiting", "Paused");
    world.job.spec.paused = false;
    world.reconcile();
    world.retry_and_create("web-2");
    assert_eq!(world.memory.all_refused, None);
}

#[test]
fn refusal_ends_although_the_clock_is_set_back() {
    let mut world = World::new(1, json!({}));
    world.memory.all_refused = Some(Refusal {
        message: "exceeded quota".to_owned(),
        retry_at: world.instant(world.now + 30),
    });
    let (observed, back) = (world.observed(), at(world.now - 7200));
    let plan_after = |seconds: i64| plan(&observed, &world.memory, back, world.instant(world.now + seconds));
    let waiting = plan_after(10);
    assert_eq!(
        (waiting.create, waiting.requeue_at),
        (vec![], Some(add_seconds(back, 20)))
    );
    assert_eq!(plan_after(30).create.len(), 1);
}

#[test]
fn refused_pods_take_turns_and_many_stop_the_job() {
    let mut world = World::new(200, json!({}));
    let mut tried = BTreeSet::new();
    for round in 0..4 {
        let start = world.now;
        // A policy refuses each of them.
        while let [(uid, name)] = &world.next_creations()[..] {
            assert!(
                tried.insert(uid.clone()) || round == 3,
                "{name} was tried before others"
            );
            let refusal = Refusal {
                message: "denied".to_owned(),
                retry_at: world.instant(world.now + 30),
            };
            world.memory.refused.insert(uid.clone(), refusal);
        }
        assert_eq!(tried.len(), 200.min((round + 1) * MAX_CREATIONS));
        assert_eq!(world.plan().requeue_at, Some(at(start + 30)));
        world.now += 30;
    }
}

/// Its hook was begun, and its container was never stopped: it is not waited for without end.
#[test]
fn container_that_was_not_stopped_counts_for_a_while() {
    let mut world = World::new(3, json!({ "maxFailures": 1, "podDeadlineSeconds": 60 }));
    assert_eq!(world.reconcile(), ["web-2"]);
    world.finish_stop("web-2", Some("deadline exceeded"), true);
    assert_eq!(world.reconcile(), Vec::<String>::new());
    world.assert_condition("Waiting", "MaxUnavailable");
    // The default grace period and half a minute.
    assert_eq!(world.plan().requeue_at, Some(at(world.now + 60)));
    world.now += 60;
    assert_eq!(world.reconcile(), ["web-1"]);
    // Its grace period is longer than the deadline.
    let strategy = json!({ "terminationGracePeriodSeconds": 120 });
    let spec = json!({ "maxFailures": 1, "podDeadlineSeconds": 30, "strategy": strategy });
    let mut world = World::new(3, spec.clone());
    assert_eq!(world.reconcile(), ["web-2"]);
    world.finish_stop("web-2", Some("deadline exceeded"), true);
    world.now += 149;
    assert_eq!(world.reconcile(), Vec::<String>::new());
    world.now += 1;
    assert_eq!(world.reconcile(), ["web-1"]);
    let mut world = World::new(3, spec);
    assert_eq!(world.reconcile(), ["web-2"]);
    world.requests.clear();
    world.reconcile();
    world.now += 149;
    assert_eq!(world.reconcile(), Vec::<String>::new());
    world.now += 1;
    assert_eq!(world.reconcile(), ["web-1"]);
}

#[test]
fn pod_that_another_job_restarts_is_unavailable() {
    let mut world = World::new(3, json!({}));
    world.others = BTreeSet::from(["u0".to_owned(), "not selected".to_owned()]);
    // That Pod itself may be restarted: no other becomes unavailable.
    assert_eq!(world.reconcile(), ["web-0"]);
    world.finish("web-0", None);
    world.recover("web-0");
    assert_eq!(world.reconcile(), Vec::<String>::new());
    world.assert_condition("Waiting", "MaxUnavailable");
    world.others.clear();
    assert_eq!(world.reconcile(), ["web-2"]);
}

#[test]
fn missing_workload_fails_the_job_and_unreadable_one_delays_it() {
    let mut world = World::new(0, json!({}));
    world.job.spec.selector = None;
    world.job.spec.target_ref = Some(kruise_api::container_recreate_job::TargetRef {
        api_version: "apps/v1".to_owned(),
        kind: "Deployment".to_owned(),
        name: "web".to_owned(),
    });
    world.target = Target::Unreadable("forbidden".to_owned());
    world.reconcile();
    world.assert_condition("Waiting", "TargetUnreadable");
    let mut limited = World::new(0, json!({ "activeDeadlineSeconds": 60 }));
    limited.target = world.target.clone();
    limited.reconcile();
    limited.assert_condition("Waiting", "TargetUnreadable");
    limited.now += 60;
    limited.reconcile();
    limited.assert_condition("Failed", "DeadlineExceeded");
    world.target = Target::NotFound;
    world.reconcile();
    world.assert_condition("Failed", "TargetNotFound");
    let owners = BTreeSet::from([(OwnerKind::ReplicaSet, Box::from("rs"))]);
    let pod = |kind, uid: &str| PodView {
        controller: Some((kind, uid.into())),
        ..PodView::default()
    };
    let selectors = JobSelectors::from(&world.job.spec);
    let selects = |pod: &PodView| selectors.may_select(pod) && selectors.is_owned(&owners, pod);
    assert!(selects(&pod(OwnerKind::ReplicaSet, "rs")));
    assert!(!selects(&pod(OwnerKind::ReplicaSet, "other")));
    assert!(!selects(&pod(OwnerKind::Other, "rs")));
    assert!(!selects(&PodView::default()));
}

#[test]
fn expired_job_is_deleted() {
    let mut world = World::new(0, json!({ "ttlSecondsAfterFinished": 60 }));
    world.reconcile();
    world.assert_condition("Complete", "NoPods");
    assert_eq!(world.plan().requeue_at, Some(at(world.now + 60)));
    world.now += 60;
    assert!(world.plan().expired);
}

#[test]
fn request_names_differ_by_pod_and_job() {
    let world = World::new(1, json!({}));
    let name = |pod: &str, uid: &str| request_name(&world.job, pod, uid);
    assert_ne!(name("web-0", "a"), name("web-0", "b"));
    assert_ne!(name("web-0", "a"), name("web-1", "a"));
    assert!(name("web-0", "a").starts_with("reload-web-0-"));
    let long = name(&format!("{}.{}", "a".repeat(99), "b".repeat(100)), "a");
    assert!(long.len() <= 253 && !long.contains(".-"), "{long}");
}

/// Something that happens in the cluster.
#[derive(Clone, Debug)]
enum Event {
    Reconcile,
    /// The daemon ends the request of a Pod.
    Finish(usize, bool),
    /// Kubelet reports the status of a Pod.
    Report(usize),
    /// A Pod becomes ready.
    Recover(usize),
    /// A Pod fails without the job's doing.
    Break(usize),
    /// A Pod is replaced by another one of the same name.
    Replace(usize),
    DeleteRequest(usize),
    /// Another manager takes over.
    Failover,
    Edit(Value),
    Wait(i64),
}

fn any_event() -> impl Strategy<Value = Event> {
    let pod = 0..6_usize;
    let edits = [
        json!({ "paused": true }),
        json!({ "paused": false }),
        json!({ "partition": 2 }),
        json!({ "partition": "30%" }),
        json!({ "partition": null }),
        json!({ "maxUnavailable": 3 }),
        json!({ "maxUnavailable": null }),
    ];
    prop_oneof![
        4 => Just(Event::Reconcile),
        3 => (pod.clone(), prop::bool::weighted(0.8)).prop_map(|(pod, succeeds)| Event::Finish(pod, succeeds)),
        2 => pod.clone().prop_map(Event::Report),
        3 => pod.clone().prop_map(Event::Recover),
        1 => pod.clone().prop_map(Event::Break),
        1 => pod.clone().prop_map(Event::Replace),
        1 => pod.prop_map(Event::DeleteRequest),
        1 => prop::sample::select(edits.to_vec()).prop_map(Event::Edit),
        1 => (1..400_i64).prop_map(Event::Wait),
    ]
}

impl World {
    fn happen(&mut self, event: &Event) {
        let name = |pod: &usize| format!("web-{pod}");
        match event {
            Event::Reconcile => {
                self.reconcile();
            }
            Event::Finish(pod, succeeds) => {
                let failure = (!succeeds).then_some("no luck");
                self.finish_stop(&name(pod), failure, pod % 2 == 0 || *succeeds);
            }
            Event::Report(pod) => {
                if let Some(pod) = self.pods.get_mut(&name(pod)) {
                    pod.report();
                }
            }
            Event::Recover(pod) => self.recover(&name(pod)),
            Event::Break(pod) => {
                if let Some(pod) = self.pods.get_mut(&name(pod)) {
                    pod.ready = false;
                    pod.report();
                }
            }
            Event::Replace(pod) => {
                let uid = format!("replaced-{pod}-{}", self.now);
                if let Some(old) = self.pods.get_mut(&name(pod)) {
                    *old = PodState::new(&uid, self.now);
                }
            }
            Event::DeleteRequest(index) => {
                let name = self.requests.keys().nth(*index).cloned();
                name.and_then(|name| self.requests.remove(&name));
            }
            Event::Failover => self.memory = Memory::default(),
            Event::Edit(edit) => {
                let mut spec = json!(self.job.spec);
                json_patch::merge(&mut spec, edit);
                self.job.spec = serde_json::from_value(spec).unwrap();
            }
            Event::Wait(seconds) => {
                // Kubelet does not take that long.
                self.pods.values_mut().for_each(PodState::report);
                self.now += seconds;
            }
        }
    }
}

proptest! {
    /// Whatever happens and whichever manager counts, a failure stays one, and a restarted Pod was ready after its restart:
    /// each reconcile checks it. What a manager knows of deleted requests is in its memory alone.
    #[test]
    fn failures_stay_and_restarted_pods_were_ready(
        events in prop::collection::vec(
            prop_oneof![
                9 => any_event().prop_filter("kept", |event| !matches!(event, Event::DeleteRequest(_))),
                1 => Just(Event::Failover),
            ],
            0..80,
        ),
        max_failures in 0..5,
    ) {
        let mut world = World::new(6, json!({ "maxFailures": max_failures, "podDeadlineSeconds": 60 }));
        for event in &events {
            world.happen(event);
        }
    }

    /// Whatever happens, no Pod is restarted twice and the budget is kept, which each reconcile checks; and once the
    /// cluster works again, the job ends.
    #[test]
    fn job_keeps_its_budget_and_ends(
        events in prop::collection::vec(any_event(), 0..60),
        max_failures in 0..3,
        deadline in prop::option::of(100..1000_i64),
    ) {
        let spec = json!({ "maxFailures": max_failures, "activeDeadlineSeconds": deadline, "podDeadlineSeconds": 60 });
        let mut world = World::new(6, spec);
        for event in &events {
            world.happen(event);
        }
        world.happen(&Event::Edit(json!({ "paused": false, "partition": null })));
        for _ in 0..20 {
            for pod in 0..6 {
                world.finish(&format!("web-{pod}"), None);
                world.recover(&format!("web-{pod}"));
            }
            world.finish_gone();
            world.reconcile();
            // A Pod whose request was deleted is unavailable for a while.
            world.now += 10;
        }
        let (type_, reason) = world.condition();
        prop_assert!(type_ == COMPLETE || type_ == FAILED, "{type_} {reason}");
        let [desired, active, restarted, failed] = world.counts();
        prop_assert_eq!(active, 0);
        prop_assert!(type_ == FAILED || (desired == restarted && failed == 0));
        prop_assert_eq!(world.plan().create, vec![]);
    }
}

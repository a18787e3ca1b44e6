//! One Pod: looks, plans, acts and reports until none of its requests is left.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource;
use tokio::sync::{Notify, mpsc};
use tokio::task::{AbortHandle, JoinSet};

use super::Shared;
use super::act::{self, Failure, Job, News, What};
use super::observe::{self, Eyes};
use super::plan::{
    self, Attempt, Begin, Memory, Now, Observed, Plan, PodSight, Request, RuntimeSight, Stage, Write,
};
use super::report;
use super::turns::{LOOK, Limit};
use super::writer::Writer;
use kruise_api::backoff::Backoff;
use kruise_api::container_recreate_request::{COMPLETE, ContainerRecreateRequest, FAILED};
use kruise_api::keys;
use kruise_cluster::{EventType, Key};
use kruise_ops::metrics::metrics;
use kruise_ops::panics;
use kruise_ops::progress::Step;

/// How long after a failed stop the runtime is asked again.
const STOP_TRIES: Backoff = Backoff::new(Duration::from_secs(1), LONGEST_PAUSE);
/// The longest such pause, and the longest after a panic.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How often a preStop hook that the runtime's end broke off begins: one that breaks the connection must not keep its
/// container for ever. Where the runtime is away none begins, for its containers are listed before.
const HOOK_TRIES: u32 = 3;
/// How long what is being written at shutdown may take; the process has two seconds.
const FLUSH: Duration = Duration::from_millis(1500);

/// The state machine of one Pod.
pub struct Machine {
    shared: Arc<Shared>,
    /// Namespace and name of the Pod.
    key: Key,
    /// Rings when something about the Pod or its requests has changed.
    bell: Arc<Notify>,
    memory: Memory,
    eyes: Eyes,
    writer: Writer,
    jobs: JoinSet<()>,
    running: BTreeMap<plan::Key, AbortHandle>,
    /// How often the runtime failed to stop a container.
    failures: BTreeMap<plan::Key, u32>,
    news_tx: mpsc::UnboundedSender<News>,
    news_rx: mpsc::UnboundedReceiver<News>,
    /// When each request was first seen: by the API server's clock, and by our own count.
    seen_at: BTreeMap<String, (Timestamp, Duration)>,
    /// Requests of which a container is being stopped, as last seen: the watch drops one soon after its end.
    known: BTreeMap<String, Arc<Request>>,
}

/// What a round over the Pod came to.
enum Round {
    /// No request is left.
    Over,
    /// When to look again, if nothing happens before.
    Next(Option<Duration>),
}

impl Machine {
    /// A machine for the Pod of that name; `bell` is rung when it or its requests change.
    pub fn new(shared: Arc<Shared>, key: Key, bell: Arc<Notify>) -> Self {
        let (news_tx, news_rx) = mpsc::unbounded_channel();
        Self {
            writer: Writer::new(Arc::clone(&shared)),
            shared,
            key,
            bell,
            memory: Memory::default(),
            eyes: Eyes::default(),
            jobs: JoinSet::new(),
            running: BTreeMap::new(),
            failures: BTreeMap::new(),
            news_tx,
            news_rx,
            seen_at: BTreeMap::new(),
            known: BTreeMap::new(),
        }
    }

    /// Runs until no request for the Pod is left, or until shutdown.
    pub async fn run(mut self) -> Key {
        let shutdown = self.shared.ctx.shutdown.clone();
        let mut last = None;
        let step = self.shared.ctx.health.progress.waiting(super::NAME);
        let mut failures = 0;
        loop {
            step.now(format!("looking at Pod {}", self.key), LOOK);
            let key = self.key.clone();
            let round = tokio::select! {
                biased;
                () = shutdown.cancelled() => break,
                round = panics::isolated(super::NAME, key, self.round(&mut last, &step)) => round,
            };
            match round {
                Ok(Round::Over) => break,
                Ok(Round::Next(wake)) => {
                    failures = 0;
                    step.idle(wake.map(|at| at.saturating_sub(self.shared.now().mono)));
                    if !self.wait(wake, &shutdown).await {
                        break;
                    }
                }
                Err(_) => {
                    let pause = STOP_TRIES.pause(failures);
                    failures += 1;
                    step.idle(Some(pause));
                    let sleep = tokio::time::sleep(pause);
                    if shutdown.run_until_cancelled(sleep).await.is_none() {
                        break;
                    }
                }
            }
        }
        self.jobs.abort_all();
        if shutdown.is_cancelled() {
            self.flush(last).await;
        }
        self.shared
            .board
            .show(&self.shared.ctx.live, &self.key, Vec::new());
        self.key
    }

    /// Looks, plans and acts.
    async fn round(&mut self, last: &mut Option<Observed>, step: &Step) -> Round {
        let requests = self.requests();
        if requests.is_empty() && self.writer.idle() {
            return Round::Over;
        }
        let seen = self.observe(requests, step).await;
        Round::Next(self.pass(seen, last))
    }

    /// The Pod's requests that are not over or of which a container is still being stopped, as we know them best.
    fn requests(&mut self) -> Vec<Arc<Request>> {
        let mut watched = self.shared.requests.list();
        watched.retain(|request| super::pod_of(request) == self.key);
        let shown: BTreeSet<String> = watched.iter().map(|request| request.uid.clone()).collect();
        let hidden = self.known.iter().filter(|(uid, _)| !shown.contains(*uid));
        watched.extend(hidden.map(|(_, request)| Arc::clone(request)));
        let mut requests = self.writer.newest(watched);
        for request in &mut requests {
            // It was deleted, or its end was written by kruise-manager.
            if !shown.contains(&request.uid) && !super::over(request) {
                Arc::make_mut(request).deleting = true;
            }
        }
        let attempted = |uid: &str| self.memory.attempts.keys().any(|key| key.request == uid);
        let finishing = |request: &Request| attempted(&request.uid) && !self.writer.is_gone(&request.uid);
        requests.retain(|request| !super::over(request) || finishing(request));
        self.known = requests
            .iter()
            .filter(|request| attempted(&request.uid))
            .map(|request| (request.uid.clone(), Arc::clone(request)))
            .collect();
        let uids: BTreeSet<&str> = requests.iter().map(|request| request.uid.as_str()).collect();
        let alive = |uid: &str| uids.contains(uid);
        let attempts = &mut self.memory.attempts;
        attempts.retain(|key, attempt| attempt.live || alive(&key.request));
        self.memory.targets.retain(|key, _| alive(&key.request));
        self.memory.settled.retain(|key, _| alive(&key.request));
        self.memory.unready_seen.retain(|uid, _| alive(uid));
        self.failures.retain(|key, _| alive(&key.request));
        let now = self.shared.now();
        self.seen_at
            .retain(|uid, _| alive(uid) || self.writer.busy_with(uid));
        for request in requests.iter().filter(|request| !super::over(request)) {
            self.seen_at
                .entry(request.uid.clone())
                .or_insert((now.api, now.mono));
            if request.status.unready_since().is_some() {
                self.memory
                    .unready_seen
                    .entry(request.uid.clone())
                    .or_insert(now.mono);
            }
        }
        requests
    }

    async fn observe(&mut self, requests: Vec<Arc<Request>>, step: &Step) -> Observed {
        let limit = Limit::of(&requests, self.shared.now());
        let mut pod = self.pod(&requests, limit).await;
        let now = self.shared.now();
        let mut runtime = match &pod {
            PodSight::Here(view) => {
                let eyes = &mut self.eyes;
                eyes.look(&self.shared, view, &requests, now, limit, step).await
            }
            _ => RuntimeSight::Unknown("the Pod is not known".to_owned()),
        };
        // What the jobs said meanwhile may be newer or older than the look. Either is sound, for a container
        // is known by its ID.
        while let Ok(news) = self.news_rx.try_recv() {
            self.hear(news);
        }
        if let (PodSight::Here(looked), RuntimeSight::Seen { .. }) = (&pod, &runtime) {
            let uid = looked.uid.clone();
            pod = self.pod(&requests, limit).await;
            if !matches!(&pod, PodSight::Here(now) if now.uid == uid) {
                runtime = RuntimeSight::Unknown("the Pod has changed since it was asked".to_owned());
            }
        }
        let requests = self.requests_now(&requests);
        Observed {
            requests,
            pod,
            runtime,
            memory: self.memory.clone(),
        }
    }

    /// The requests as they are after a look, which may have waited for its turn. The look was not about new ones; the bell
    /// has rung for them.
    fn requests_now(&mut self, looked: &[Arc<Request>]) -> Vec<Arc<Request>> {
        let mut requests = self.requests();
        requests.retain(|request| looked.iter().any(|before| before.uid == request.uid));
        requests
    }

    async fn pod(&self, requests: &[Arc<Request>], limit: Limit) -> PodSight {
        let call = limit.call();
        tokio::time::timeout(call, observe::pod(&self.shared, &self.key, requests))
            .await
            .unwrap_or_else(|_| PodSight::Unknown(format!("the API server has not answered for {call:?}")))
    }

    /// Plans and acts until nothing is left to do for now; returns when to look again.
    fn pass(&mut self, mut seen: Observed, last: &mut Option<Observed>) -> Option<Duration> {
        let now = self.shared.now();
        let plan = loop {
            let plan = plan::plan(&seen, now);
            let acted = self.carry_out(&seen, &plan, now);
            seen.memory = self.memory.clone();
            if !acted {
                break plan;
            }
        };
        tracing::debug!(
            pod = %self.key,
            steps = ?plan.steps,
            begin = plan.begin.len(),
            writes = plan.writes.len(),
            wake = ?plan.wake,
            "looked at the requests of a Pod"
        );
        self.show(&seen, &plan);
        self.writer.want(&plan.writes, &seen.requests, now);
        self.forget(&seen, &plan);
        *last = Some(seen);
        [plan.wake.map(|wake| wake.at), self.writer.start(now)]
            .into_iter()
            .flatten()
            .min()
    }

    /// Forgets the stops of requests that are over and of which nothing is left to do or to write.
    fn forget(&mut self, seen: &Observed, plan: &Plan) {
        let over = |uid: &str| {
            let request = seen.requests.iter().find(|request| request.uid == uid);
            request.is_none_or(|request| super::over(request))
        };
        let (writer, written) = (&self.writer, |uid: &str| {
            plan.writes.iter().any(|write| write.request == uid)
        });
        self.memory.attempts.retain(|key, attempt| {
            let uid = key.request.as_str();
            attempt.live || !over(uid) || written(uid) || writer.busy_with(uid)
        });
    }

    /// Acts on a plan. Returns whether the memory has changed, so that it must be planned anew.
    fn carry_out(&mut self, seen: &Observed, plan: &Plan, now: Now) -> bool {
        for key in &plan.cancel {
            if let Some(handle) = self.running.remove(key) {
                handle.abort();
            }
            if let Some(attempt) = self.memory.attempts.get_mut(key) {
                attempt.live = false;
            }
        }
        for (key, settled) in &plan.settle {
            self.memory.settled.insert(key.clone(), settled.clone());
        }
        let (PodSight::Here(pod), Some(runtime)) = (&seen.pod, self.eyes.runtime.clone()) else {
            return !plan.settle.is_empty();
        };
        self.announce(plan);
        for begin in &plan.begin {
            let job = Job {
                shared: Arc::clone(&self.shared),
                runtime: Arc::clone(&runtime),
                pod: Arc::clone(pod),
                begin: begin.clone(),
                news_tx: self.news_tx.clone(),
            };
            self.begin(job, begin, now);
        }
        !plan.settle.is_empty() || !plan.begin.is_empty()
    }

    /// Logs which requests begin, with an event on each.
    fn announce(&self, plan: &Plan) {
        let known = |uid: &str| self.memory.attempts.keys().any(|key| key.request == uid);
        let mut new: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
        for begin in plan.begin.iter().filter(|begin| !known(&begin.key.request)) {
            let request = (begin.key.request.as_str(), begin.request.as_str());
            new.entry(request).or_default().push(&begin.key.container);
        }
        for ((uid, name), containers) in new {
            let containers = containers.join(", ");
            tracing::info!(
                namespace = self.key.namespace,
                request = name,
                pod = self.key.name,
                containers,
                "recreating containers"
            );
            let note = format!("Recreating containers {containers} of Pod {}", self.key.name);
            self.event(uid, name, EventType::Normal, keys::EVENT_RECREATING, note);
        }
    }

    /// An event on a request.
    fn event(&self, uid: &str, name: &str, type_: EventType, reason: &str, note: String) {
        let object = ObjectReference {
            api_version: Some(ContainerRecreateRequest::api_version(&()).into_owned()),
            kind: Some(ContainerRecreateRequest::kind(&()).into_owned()),
            namespace: self.key.namespace.clone(),
            name: Some(name.to_owned()),
            uid: Some(uid.to_owned()),
            ..ObjectReference::default()
        };
        let events = &self.shared.ctx.cluster.events;
        events.publish(object, type_, reason, "Recreating", note);
    }

    fn begin(&mut self, job: Job, begin: &Begin, now: Now) {
        let slot = self.shared.ctx.stops.try_take(&job.pod.namespace);
        let stage = match (&slot, &begin.act.hook) {
            (None, _) => Stage::Queued,
            (Some(_), Some(_)) => Stage::Hook,
            (Some(_), None) => Stage::Stopping,
        };
        let old = self.memory.attempts.get(&begin.key);
        let attempt = Attempt {
            request: begin.request.clone(),
            target: begin.target.clone(),
            begun: old
                .and_then(|attempt| attempt.begun)
                .or_else(|| slot.is_some().then_some(now.mono)),
            hooked: begin.act.hook.is_none(),
            spent: old.map(|attempt| attempt.spent).unwrap_or_default(),
            stage,
            live: true,
        };
        self.memory.attempts.insert(begin.key.clone(), attempt);
        let handle = self.jobs.spawn(act::run(job, slot));
        self.running.insert(begin.key.clone(), handle);
    }

    /// Waits for anything to happen. Returns false at shutdown.
    async fn wait(&mut self, wake: Option<Duration>, shutdown: &tokio_util::sync::CancellationToken) -> bool {
        let at = wake.map(|at| self.shared.instant(at));
        let timer = async {
            match at {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let timer = pin!(timer);
        tokio::select! {
            () = shutdown.cancelled() => return false,
            () = self.bell.notified() => {}
            Some(news) = self.news_rx.recv() => self.hear(news),
            stored = self.writer.finished() => {
                if let Some((write, request)) = stored {
                    self.told(&write, &request);
                }
            }
            Some(_) = self.jobs.join_next() => {}
            () = timer => {}
        }
        true
    }

    /// Takes in what a job reports, unless it was broken off.
    fn hear(&mut self, News { key, what }: News) {
        let now = self.shared.now().mono;
        let Some(attempt) = self.memory.attempts.get_mut(&key).filter(|attempt| attempt.live) else {
            return;
        };
        attempt.begun.get_or_insert(now);
        let failures = self.failures.entry(key.clone()).or_default();
        attempt.hooked |= matches!(what, What::Stopping) || *failures + 1 >= HOOK_TRIES;
        attempt.stage = match what {
            What::Hook => Stage::Hook,
            What::Stopping => Stage::Stopping,
            What::Stopped => Stage::Stopped(now),
            What::Failed { error, spent } => {
                attempt.spent += spent;
                failed(&error, failures, now)
            }
        };
        attempt.live = matches!(attempt.stage, Stage::Hook | Stage::Stopping);
        if !attempt.live {
            self.running.remove(&key);
        }
    }

    /// Shows on the control API what the requests are at.
    fn show(&self, seen: &Observed, plan: &Plan) {
        let rows = seen
            .requests
            .iter()
            .map(|request| {
                let seen_at = self.seen_at.get(&request.uid).map(|(at, _)| *at);
                report::row(request, plan, seen, seen_at)
            })
            .collect();
        self.shared.board.show(&self.shared.ctx.live, &self.key, rows);
    }

    /// Takes in that the API server has a status; counts and logs a request that has ended by it.
    fn told(&mut self, write: &Write, request: &Request) {
        for state in &write.status.container_recreate_states {
            if let Some(target) = &state.container_id {
                let key = plan::Key {
                    request: write.request.clone(),
                    container: state.name.clone(),
                };
                self.memory.targets.insert(key, target.clone());
            }
        }
        if request.status.completion_time.is_none() {
            return;
        }
        // Removed, so that what is written later about a stop that ran at the deadline does not count it twice.
        let Some((_, since)) = self.seen_at.remove(&request.uid) else {
            return;
        };
        let took = self.shared.now().mono.saturating_sub(since);
        let ended = |type_: &&str| {
            request
                .status
                .conditions
                .iter()
                .find(|condition| condition.type_ == **type_)
        };
        let condition = [COMPLETE, FAILED].iter().find_map(ended);
        let failed = condition.is_none_or(|condition| condition.type_ == FAILED);
        let result = if failed { "failed" } else { "succeeded" };
        if let Some(condition) = condition {
            let type_ = if failed {
                EventType::Warning
            } else {
                EventType::Normal
            };
            let (reason, note) = (condition.type_.as_str(), condition.message.clone());
            self.event(&request.uid, &request.name, type_, reason, note);
        }
        metrics()
            .recreates
            .get_or_create(&[("result", result.to_owned())])
            .observe(took.as_secs_f64());
        let Request {
            namespace,
            name,
            pod_name,
            ..
        } = request;
        let message = condition.map(|condition| condition.message.as_str());
        tracing::info!(
            namespace,
            request = name,
            pod = pod_name,
            result,
            ?took,
            message,
            "request completed"
        );
    }

    /// At shutdown: writes what would otherwise be lost, as far as that is possible in time.
    async fn flush(&mut self, last: Option<Observed>) {
        let Some(mut seen) = last else { return };
        let now = self.shared.now();
        seen.memory = self.memory.clone();
        seen.requests = self.writer.newest(seen.requests);
        let plan = plan::plan(&seen, now);
        self.writer.want(&plan.writes, &seen.requests, now);
        if tokio::time::timeout(FLUSH, self.writer.flush()).await.is_err() {
            tracing::warn!(pod = %self.key, "could not write the last status before shutdown");
        }
    }
}

fn failed(error: &Failure, failures: &mut u32, now: Duration) -> Stage {
    let words = error.to_string();
    if !error.retryable() {
        return Stage::Refused(words);
    }
    let at = now + STOP_TRIES.pause(*failures);
    *failures = failures.saturating_add(1);
    Stage::Retry { at, error: words }
}

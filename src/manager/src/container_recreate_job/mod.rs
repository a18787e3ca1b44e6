//! Restarts containers of the Pods of a ContainerRecreateJob, a few Pods at a time.
//!
//! In:  ContainerRecreateJobs, Pods and the ContainerRecreateRequests that the jobs control (watches); once for a job,
//!      the workload that it names.
//! Out: ContainerRecreateRequests; status, an event and, after the TTL, deletion of ContainerRecreateJobs.
//!
//! A reconcile is one pure [`plan()`], and `act` does it.

mod act;
mod observe;
pub mod plan;
mod state;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kube::Api;
use kube::api::ListParams;
use tokio::sync::mpsc;

use super::Context;
use super::namespace_limit::NamespaceLimit;
use super::restarts::{Planning, counts_until};
use act::{REFUSED_RETRY, WorkloadAtEnd};
use kruise_api::container_recreate_job::{COMPLETE, ContainerRecreateJob, ContainerRecreateJobStatus};
use kruise_cluster::clock::duration_until;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Error, Key, WatchEvents};
use observe::{NAME, WatchEvent, watch_events};
use plan::{Observed, Target, is_of_job, is_unfinished, plan, pod_uid, restarted_since};
use state::{ControllerState, JobState};

/// Jobs that are processed at once.
const WORKERS: usize = 4;
/// Of these, those that the jobs of one namespace can take: theirs may have thousands of Pods.
const MAX_PER_NAMESPACE: usize = 2;
/// Pause before a workload that is being deleted is looked at again.
const TERMINATING_RECHECK: Duration = Duration::from_secs(10);

/// Pause before the watch is compared with a list again.
const WATCH_RECHECK: Duration = Duration::from_secs(5);

/// Runs until shutdown. Without the CRD, or the role, there is nothing to do.
pub async fn run(ctx: Context) {
    ctx.stores.synced().await;
    let api: Api<ContainerRecreateJob> = Api::all(ctx.cluster.client.clone());
    let (jobs, watching) =
        ctx.cluster
            .optional_reflector(api, ListParams::default(), Some::<ContainerRecreateJob>);
    let shared = Arc::new(ControllerState {
        manager: ctx.clone(),
        index: Mutex::default(),
        states: Mutex::default(),
    });
    let (keys_tx, keys_rx) = mpsc::unbounded_channel();
    let (pods, requests) = (ctx.stores.pods.subscribe(), ctx.stores.requests.subscribe());
    let events = watch_events(pods, requests, jobs.subscribe());
    let namespace_limit = NamespaceLimit::new(MAX_PER_NAMESPACE, keys_tx.clone());
    let enqueue = enqueue_changes(Arc::clone(&shared), events, keys_tx);
    let work = |key: Key| {
        let shared = Arc::clone(&shared);
        let namespace_limit = namespace_limit.clone();
        namespace_limit.reconcile(key.clone(), move || reconcile(shared, key))
    };
    tokio::select! {
        () = ctx.run_workers(NAME, WORKERS, keys_rx, enqueue, work) => {}
        () = watching => {}
    }
}

/// Enqueues the affected jobs.
async fn enqueue_changes(
    shared: Arc<ControllerState>,
    events: WatchEvents<WatchEvent>,
    keys: mpsc::UnboundedSender<Key>,
) {
    let pods = &shared.manager.stores.pods;
    events
        .send_affected(keys, |event| shared.index().apply(event, pods))
        .await;
}

/// Whether that is the status of a job that has completed.
fn is_complete(status: &ContainerRecreateJobStatus) -> bool {
    let mut conditions = status.conditions.iter();
    conditions.any(|condition| condition.type_ == COMPLETE && condition.status == "True")
}

/// Adds which Pods others restart, and what they have restarted; returns when the first of these restarts ends to count
/// whatever happens.
fn add_restarts_by_others(
    shared: &ControllerState,
    key: &Key,
    observed: &mut Observed,
    planning: &mut Planning<'_>,
) -> Option<Duration> {
    let job = Arc::clone(&observed.job);
    if !is_unfinished(&job) {
        return None;
    }
    let requests = &shared.manager.stores.requests;
    let now = shared.manager.cluster.clock.now();
    let (mut uids, mut first_end) = planning.unseen(key, requests, Instant::now());
    for (_, request) in requests.entries_of(key.namespace.as_deref()) {
        let pod = shared
            .manager
            .stores
            .pods
            .get(&key.with_name(&request.spec.pod_name));
        let Some(pod) = pod.filter(|pod| pod_uid(&request) == Some(&pod.uid)) else {
            continue;
        };
        let end = counts_until(&request, &pod).filter(|end| now < *end);
        let restarted: Vec<&String> = restarted_since(&job, &request).collect();
        if (end.is_none() && restarted.is_empty()) || is_of_job(&job, &request) {
            continue;
        }
        if let Some(end) = end {
            uids.insert(pod.uid.clone());
            let left = duration_until(end, now);
            first_end = Some(first_end.map_or(left, |first| first.min(left)));
        }
        if !restarted.is_empty() {
            let all = observed.restarted_since.entry(pod.uid.clone()).or_default();
            all.extend(restarted.into_iter().cloned());
        }
    }
    observed.restarted_by_others = uids;
    first_end
}

/// Reconciles one job.
async fn reconcile(shared: Arc<ControllerState>, key: Key) -> Result<RequeueAfter, Error> {
    act::fetch_unconfirmed(&shared, &key).await?;
    let state = Arc::clone(shared.states().entry(key.clone()).or_default());
    let mut state = state.lock().await;
    act::fetch_unknown(&shared, &key, &mut state).await?;
    let cached = shared.index().job(&key, Instant::now());
    let Some(cached) = cached else {
        shared.states().remove(&key);
        return Ok(None);
    };
    let job = &cached.job;
    let uid = job.metadata.uid.as_deref().unwrap_or_default();
    if state.uid != uid {
        *state = JobState {
            uid: uid.to_owned(),
            ..JobState::default()
        };
    }
    let stores = &shared.manager.stores;
    let pods = cached.pods.iter();
    let mut pods: Vec<_> = pods
        .filter_map(|key| Some((key.name.clone(), stores.pods.get(key)?)))
        .filter(|(_, pod)| cached.selectors.may_select(pod))
        .collect();
    let target = if is_unfinished(job) {
        act::find_workload(&shared, &key, job, &pods, &mut state).await?
    } else {
        state.workload = None;
        Target::Known
    };
    let owners = state.workload.as_ref().map(|workload| workload.owners.clone());
    let owners = owners.unwrap_or_default();
    pods.retain(|(_, pod)| cached.selectors.is_owned(&owners, pod));
    let (now, instant) = (shared.manager.cluster.clock.now(), Instant::now());
    // They may have changed while the workload was read.
    for (name, pod) in &mut pods {
        if let Some(newer) = stores.pods.get(&key.with_name(name)) {
            *pod = newer;
        }
    }
    let mut observed = Observed {
        job: Arc::clone(job),
        selectors: Arc::clone(&cached.selectors),
        target,
        pods,
        unseen: Vec::new(),
        requests: cached.requests.clone(),
        restarted_by_others: BTreeSet::new(),
        restarted_since: BTreeMap::new(),
    };
    let (mut plan, others_end) = {
        let mut planning = shared.manager.restarts.plan();
        let end = add_restarts_by_others(&shared, &key, &mut observed, &mut planning);
        let plan = plan(&observed, &state.memory, now, instant);
        for request in &plan.create {
            let name = request.metadata.name.as_deref().unwrap_or_default();
            let pod = pod_uid(request).unwrap_or_default();
            planning.record(key.with_name(name), pod.to_owned(), Instant::now());
        }
        (plan, end)
    };
    state.memory = plan.memory.clone();
    if plan.status.as_ref().is_some_and(is_complete) {
        // Each event of a Pod comes here, and the API server may be slow.
        let looked_at = state.looked_at;
        let left = looked_at.and_then(|at| WATCH_RECHECK.checked_sub(at.elapsed()));
        if let Some(left) = left.filter(|left| !left.is_zero()) {
            return Ok(Some(left));
        }
        // Pods of a workload that was deleted without them do not show that they are its.
        match act::workload_at_end(&shared, &key, job, &state).await? {
            WorkloadAtEnd::Terminating if plan::deadline(job, now).is_none_or(|at| now < at) => {
                observed.target = Target::Terminating;
            }
            WorkloadAtEnd::Terminating | WorkloadAtEnd::Gone => observed.target = Target::NotFound,
            WorkloadAtEnd::Replaced => {
                state.workload = None;
                return Ok(Some(Duration::ZERO));
            }
            WorkloadAtEnd::Same => {
                let restarted = &observed.restarted_since;
                let found = act::find_unseen(&shared, &key, &cached, &plan.memory, restarted, &mut state);
                (observed.target, observed.unseen) = found.await?;
            }
        }
        let may_end = observed.target != Target::Terminating && observed.unseen.is_empty();
        state.looked_at = (!may_end).then(Instant::now);
        plan = plan::plan(&observed, &state.memory, now, instant);
        state.memory = plan.memory.clone();
    }
    // Neither stops the other.
    let status_due = act::update_status(&shared, &key, &cached, &plan, &mut state).await;
    let refused = act::create_requests(&shared, &key, &cached, &plan, &mut state).await;
    if plan.expired {
        act::delete_job(&shared, &key, job).await?;
    }
    let status_due = status_due?;
    let report_refusals = refused.then_some(Duration::ZERO);
    // The watch may confirm the requests late: their Pods count at once.
    let report_requests = (!plan.create.is_empty()).then_some(Duration::ZERO);
    let is_unreadable = matches!(observed.target, Target::Unreadable(_));
    let requeues = [
        status_due,
        report_refusals,
        report_requests,
        is_unreadable.then_some(REFUSED_RETRY),
        (observed.target == Target::Terminating).then_some(TERMINATING_RECHECK),
        (!observed.unseen.is_empty()).then_some(WATCH_RECHECK),
        others_end,
        cached.next_fetch,
        plan.requeue_at.map(|at| duration_until(at, now)),
    ];
    Ok(requeues.into_iter().flatten().min())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    pub fn shared(client: kube::Client) -> Arc<ControllerState> {
        Arc::new(ControllerState {
            manager: Context::for_test(client),
            index: Mutex::default(),
            states: Mutex::default(),
        })
    }

    /// Reconciles a job with this spec, whose Pods no watch has shown, while the API server answers GET requests so.
    /// Returns the status that is written, and when it is reconciled again.
    async fn reconciled(spec: Value, answer: fn(&str) -> Value) -> (Value, Option<Duration>) {
        let job = json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "ContainerRecreateJob", "spec": spec,
            "metadata": { "name": "j", "namespace": "n", "uid": "j", "resourceVersion": "1", "generation": 1,
                "creationTimestamp": "2026-01-01T00:00:00Z" } });
        let written = Arc::new(Mutex::new(Value::Null));
        let (stored, body_of) = (job.clone(), Arc::clone(&written));
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let (stored, written) = (stored.clone(), Arc::clone(&body_of));
            async move {
                let path = request.uri().to_string();
                let answer = if request.method() == http::Method::PATCH {
                    let body = request.into_body().collect_bytes().await?;
                    *written.lock().unwrap() = serde_json::from_slice(&body)?;
                    stored
                } else {
                    answer(&path)
                };
                let answer = Body::from(answer.to_string().into_bytes());
                Ok::<_, tower::BoxError>(http::Response::new(answer))
            }
        });
        let shared = shared(kube::Client::new(service, "default"));
        let key = Key::namespaced("n", "j");
        let job = Arc::new(serde_json::from_value(job).unwrap());
        shared.index().jobs.apply_watch(&key, observe::versioned_job(job));
        let requeue_after = reconcile(Arc::clone(&shared), key).await.unwrap();
        let status = written.lock().unwrap()["status"].take();
        (status, requeue_after)
    }

    fn reason(status: &Value) -> &str {
        status["conditions"][0]["reason"].as_str().unwrap_or_default()
    }

    #[tokio::test]
    async fn job_lists_its_pods_before_it_completes() {
        /// A Pod created before the job, on a page of its own.
        fn page(path: &str) -> Value {
            let (token, name, app) = match path.contains("continue=second") {
                true => ("", "web-1", "web"),
                false => ("second", "other", "other"),
            };
            let container = json!({ "name": "main", "containerID": "c://1", "state": { "running": {} } });
            let pod = json!({ "metadata": { "name": name, "uid": name, "labels": { "app": app },
                    "creationTimestamp": "2025-12-31T00:00:00Z" },
                "spec": { "nodeName": "node" }, "status": { "containerStatuses": [container] } });
            json!({ "metadata": { "continue": token }, "items": [pod] })
        }
        let spec =
            || json!({ "selector": { "matchLabels": { "app": "web" } }, "containers": [{ "name": "main" }] });
        let (status, requeue_after) = reconciled(spec(), page).await;
        assert_eq!(reason(&status), "WatchDelayed", "{status}");
        assert!(status["completionTime"].is_null());
        assert_eq!(requeue_after, Some(WATCH_RECHECK));
        let (status, _) = reconciled(spec(), |_| json!({ "metadata": {}, "items": [] })).await;
        assert_eq!(reason(&status), "NoPods", "{status}");
    }

    #[tokio::test]
    async fn job_shows_that_it_waits_for_a_workload_that_is_being_deleted() {
        let spec = json!({ "containers": [{ "name": "main" }],
            "targetRef": { "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "web" } });
        let (status, requeue_after) = reconciled(spec, |_| {
            json!({ "metadata": { "name": "web", "uid": "w", "deletionTimestamp": "2026-01-02T00:00:00Z" } })
        })
        .await;
        assert_eq!(reason(&status), "TargetTerminating", "{status}");
        assert_eq!(
            status["conditions"][0]["message"],
            "StatefulSet web is being deleted"
        );
        assert!(status["completionTime"].is_null() && status["desired"] == 0);
        assert_eq!(requeue_after, Some(TERMINATING_RECHECK));
    }

    #[tokio::test]
    async fn jobs_of_one_namespace_take_not_all_workers() {
        let service = tower::service_fn(|_: http::Request<Body>| async {
            http::Response::builder().body(Body::empty())
        });
        let shared = shared(kube::Client::new(service, "default"));
        let (requeue_tx, mut requeue_rx) = mpsc::unbounded_channel();
        let limit = NamespaceLimit::new(MAX_PER_NAMESPACE, requeue_tx);
        let key = |namespace: &str| Key::namespaced(namespace, "job");
        let permits = limit.take_all("crowd").unwrap();
        let is_reconciled = async |key: Key| {
            shared.states().insert(key.clone(), Arc::default());
            let work = || reconcile(Arc::clone(&shared), key.clone());
            let ended = limit.clone().reconcile(key.clone(), work).await;
            assert_eq!(ended.unwrap(), None);
            // The state of a job that does not exist is dropped.
            !shared.states().contains_key(&key)
        };
        assert!(!is_reconciled(key("crowd")).await);
        assert!(is_reconciled(key("other")).await);
        drop(permits);
        assert_eq!(requeue_rx.recv().await, Some(key("crowd")));
        assert!(is_reconciled(key("crowd")).await);
    }
}

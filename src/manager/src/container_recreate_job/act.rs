//! Executes the plan for one ContainerRecreateJob, and finds its workload.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::join_all;
use k8s_openapi::api::apps::v1::ReplicaSet;
use kube::api::ListParams;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Api, Resource};
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::observe::{CachedJob, versioned_job, versioned_request};
use super::plan::{
    Memory, Plan, Refusal, RestartedContainers, Target, controller_kind, is_due, job_of, pod_uid,
};
use super::state::{ControllerState, JobState, Workload};
use crate::context::fetch_all;
use crate::restarts::stop_limit;
use crate::view::{PodView, RawPod};
use kruise_api::container_recreate_job::{
    COMPLETE, ContainerRecreateJob, ContainerRecreateJobStatus, TargetRef, WAITING,
};
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::owner::{Owner, OwnerKind};
use kruise_cluster::write_cache::Written;
use kruise_cluster::{Error, EventType, Key, write};

/// Fields of the status that may be absent.
const OPTIONAL_STATUS_FIELDS: [&str; 4] = ["startTime", "completionTime", "failedPods", "conditions"];
/// Pause before a refused creation is repeated, and a workload that cannot be read is read again: it succeeds after a
/// change of a quota, a policy or a role.
pub const REFUSED_RETRY: Duration = Duration::from_secs(30);
/// The same after a failure that may end soon, such as a webhook without endpoints. The status shows it meanwhile.
const FAILED_RETRY: Duration = Duration::from_secs(5);
/// Requests that are created at once.
const CONCURRENT_CREATIONS: usize = 16;
/// ReplicaSets or Pods in one page.
const PAGE_SIZE: u32 = 200;
/// Label of the ReplicaSets of a Deployment.
const POD_TEMPLATE_HASH: &str = "pod-template-hash";

/// Reads what the watch has not confirmed in time, and what may have been created.
pub async fn fetch_unconfirmed(shared: &ControllerState, key: &Key) -> Result<(), Error> {
    let (job_is_unconfirmed, requests) = shared.index().unconfirmed(key, Instant::now());
    if job_is_unconfirmed {
        let jobs: Api<ContainerRecreateJob> = shared.manager.api(key);
        let found = write::get(&jobs, &key.name).await?;
        let entry = found.map(|job| versioned_job(Arc::new(job)));
        shared.index().jobs.apply_read(key, entry, Instant::now());
    }
    let reads: Vec<_> = requests.iter().map(|key| fetch_request(shared, key)).collect();
    fetch_all(reads).await
}

async fn fetch_request(shared: &ControllerState, key: &Key) -> Result<(), Error> {
    let requests: Api<ContainerRecreateRequest> = shared.manager.api(key);
    let found = write::get(&requests, &key.name).await?;
    let entry = found.and_then(|request| versioned_request(Arc::new(request)));
    shared.index().requests.apply_read(key, entry, Instant::now());
    Ok(())
}

/// Reads the requests whose creation had no answer: until they are known, nothing more may be restarted. One that does
/// not exist counts in no budget, and is created again.
pub async fn fetch_unknown(shared: &ControllerState, key: &Key, state: &mut JobState) -> Result<(), Error> {
    while let Some(name) = state.unknown.first().cloned() {
        let request = key.with_name(&name);
        fetch_request(shared, &request).await?;
        let exists = shared.index().requests.get(&request).is_some();
        if !exists {
            shared.manager.restarts.plan().forget(&request);
        }
        state.unknown.remove(&name);
    }
    Ok(())
}

/// Metadata of a workload.
#[derive(Deserialize)]
struct Found {
    metadata: FoundMetadata,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct FoundMetadata {
    uid: String,
    deletion_timestamp: Option<IgnoredAny>,
}

/// Finds the workload of a job once, and the ReplicaSets of a Deployment when a Pod has a new one.
pub async fn find_workload(
    shared: &ControllerState,
    key: &Key,
    job: &ContainerRecreateJob,
    pods: &[(String, Arc<PodView>)],
    state: &mut JobState,
) -> Result<Target, Error> {
    let Some(target) = &job.spec.target_ref else {
        return Ok(Target::Known);
    };
    let kind = controller_kind(&target.kind);
    if state.workload.is_none() {
        match find_metadata(shared, key, target).await {
            Ok(Some(found)) => {
                let mut workload = Workload {
                    uid: found.uid.clone(),
                    ..Workload::default()
                };
                if target.kind != "Deployment" {
                    workload.owners.insert((kind, found.uid.into_boxed_str()));
                }
                state.workload = Some(workload);
            }
            Ok(None) => return Ok(Target::NotFound),
            Err(error) if error.retryable() => return Err(error),
            Err(error) => return Ok(Target::Unreadable(error.to_string())),
        }
    }
    let Some(workload) = state.workload.as_mut().filter(|_| target.kind == "Deployment") else {
        return Ok(Target::Known);
    };
    let controllers = pods.iter().filter_map(|(_, pod)| pod.controller.as_ref());
    let unknown = controllers
        .map(|(_, uid)| uid)
        .filter(|uid| !workload.known.contains(*uid));
    let unknown: BTreeSet<Box<str>> = unknown.cloned().collect();
    if unknown.is_empty() {
        return Ok(Target::Known);
    }
    let deployment = Owner {
        kind: OwnerKind::Deployment,
        name: target.name.clone(),
        uid: workload.uid.clone(),
    };
    match find_replica_sets(&shared.manager.api(key), &deployment).await {
        Ok(found) => {
            let owners = found.into_iter().map(|uid| (OwnerKind::ReplicaSet, uid));
            workload.owners.extend(owners);
            workload.known.extend(unknown);
            Ok(Target::Known)
        }
        Err(error) if error.retryable() => Err(error),
        Err(error) => Ok(Target::Unreadable(error.to_string())),
    }
}

/// The workload that a job knows, when the job is about to end.
pub enum WorkloadAtEnd {
    /// It is there, or the job names none.
    Same,
    /// It is being deleted.
    Terminating,
    /// Another one has its name.
    Replaced,
    /// It does not exist.
    Gone,
}

/// Looks at the workload once more.
pub async fn workload_at_end(
    shared: &ControllerState,
    key: &Key,
    job: &ContainerRecreateJob,
    state: &JobState,
) -> Result<WorkloadAtEnd, Error> {
    let (Some(target), Some(workload)) = (&job.spec.target_ref, &state.workload) else {
        return Ok(WorkloadAtEnd::Same);
    };
    Ok(match find_metadata(shared, key, target).await {
        Ok(None) => WorkloadAtEnd::Gone,
        Ok(Some(found)) if found.uid != workload.uid => WorkloadAtEnd::Replaced,
        Ok(Some(found)) if found.deletion_timestamp.is_some() => WorkloadAtEnd::Terminating,
        Ok(Some(_)) => WorkloadAtEnd::Same,
        Err(error) if error.retryable() => return Err(error),
        Err(_) => WorkloadAtEnd::Same,
    })
}

/// Lists the Pods once more when the job is about to end, because each watch may be delayed on its own; returns whether
/// the workload is still known, and the names of Pods to restart.
pub async fn find_unseen(
    shared: &ControllerState,
    key: &Key,
    cached: &CachedJob,
    memory: &Memory,
    restarted: &RestartedContainers,
    state: &mut JobState,
) -> Result<(Target, Vec<String>), Error> {
    let (job, selectors) = (&*cached.job, &*cached.selectors);
    let api: Api<RawPod> = shared.manager.api(key);
    let mut params = ListParams::default().limit(PAGE_SIZE);
    let mut due = Vec::new();
    loop {
        let page = write::list::<RawPod>(&api, &params).await?;
        for raw in &page.items {
            let pod = PodView::from(raw);
            if selectors.may_select(&pod) && is_due(job, &pod, &memory.requested, restarted) {
                due.push((raw.meta().name.clone().unwrap_or_default(), Arc::new(pod)));
            }
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => break,
        }
    }
    let target = find_workload(shared, key, job, &due, state).await?;
    let owners = state.workload.as_ref().map(|workload| workload.owners.clone());
    let owners = owners.unwrap_or_default();
    due.retain(|(_, pod)| selectors.is_owned(&owners, pod));
    Ok((target, due.into_iter().map(|(name, _)| name).collect()))
}

async fn find_metadata(
    shared: &ControllerState,
    key: &Key,
    target: &TargetRef,
) -> Result<Option<FoundMetadata>, Error> {
    let (group, version) = target.api_version.split_once('/').unwrap_or_default();
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &target.kind));
    let namespace = key.namespace.as_deref().unwrap_or_default();
    let client = shared.manager.cluster.client.clone();
    let api: Api<DynamicObject> = Api::namespaced_with(client, namespace, &resource);
    let found: Option<Found> = write::get_partial(&api, &resource, &target.name).await?;
    Ok(found.map(|found| found.metadata))
}

/// UIDs of the ReplicaSets of a Deployment.
async fn find_replica_sets(api: &Api<ReplicaSet>, deployment: &Owner) -> Result<BTreeSet<Box<str>>, Error> {
    let mut params = ListParams::default().limit(PAGE_SIZE).labels(POD_TEMPLATE_HASH);
    let mut found = BTreeSet::new();
    loop {
        let page = write::list_metadata(api, &(), &params).await?;
        for object in page.items {
            let controller = Owner::controller_in(&object.metadata.owner_references);
            if controller.as_ref() == Some(deployment) {
                found.insert(object.metadata.uid.into_boxed_str());
            }
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(found),
        }
    }
}

/// Writes the status, its end at once; returns when a change that waits is due.
pub async fn update_status(
    shared: &ControllerState,
    key: &Key,
    cached: &CachedJob,
    plan: &Plan,
    state: &mut JobState,
) -> Result<Option<Duration>, Error> {
    let Some(status) = &plan.status else {
        state.status_pacer.unchanged();
        return Ok(None);
    };
    let now = Instant::now();
    let has_ended = status.completion_time.is_some();
    // The first one is not waited for, either.
    let at_once = has_ended || cached.job.status.is_none();
    if let Some(delay) = state.status_pacer.begin_write(now, false, at_once) {
        return Ok(Some(delay));
    }
    let uid = cached.job.metadata.uid.as_deref().unwrap_or_default();
    let body = write::status_patch(uid, status, OPTIONAL_STATUS_FIELDS);
    let jobs: Api<ContainerRecreateJob> = shared.manager.api(key);
    match write::patch_status_merge(&jobs, &key.name, &body).await {
        Ok(stored) => {
            let job = Arc::new(stored.object()?);
            if has_ended {
                publish_end(shared, key, &cached.job, status);
            }
            let (entry, now) = (versioned_job(job), Instant::now());
            shared.index().jobs.apply_write(key, entry, Written::Changed, now);
            // The end has a TTL.
            Ok(has_ended.then_some(Duration::ZERO))
        }
        Err(error) if error.not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

fn publish_end(
    shared: &ControllerState,
    key: &Key,
    job: &ContainerRecreateJob,
    status: &ContainerRecreateJobStatus,
) {
    let mut outcomes = status.conditions.iter().filter(|one| one.type_ != WAITING);
    let Some(outcome) = outcomes.next() else { return };
    let (reason, message) = (&outcome.reason, &outcome.message);
    tracing::info!(job = %key, reason, message, "ContainerRecreateJob has ended");
    let type_ = if outcome.type_ == COMPLETE {
        EventType::Normal
    } else {
        EventType::Warning
    };
    shared.manager.cluster.events.publish(
        job.object_ref(&()),
        type_,
        &outcome.type_,
        "Recreate",
        message.clone(),
    );
}

/// Creates requests; returns whether one could not be created, which the status then says. A quota, a missing role or an
/// API server that is overloaded refuses the others, too: they are not tried then.
pub async fn create_requests(
    shared: &ControllerState,
    key: &Key,
    cached: &CachedJob,
    plan: &Plan,
    state: &mut JobState,
) -> bool {
    let mut is_refused = false;
    let mut left = plan.create.as_slice();
    while !left.is_empty() {
        let (chunk, rest) = left.split_at(left.len().min(CONCURRENT_CREATIONS));
        let created = chunk
            .iter()
            .map(|request| create_request(shared, key, cached, request));
        let mut all_refused = None;
        for (request, created) in chunk.iter().zip(join_all(created).await) {
            let uid = pod_uid(request).unwrap_or_default().to_owned();
            match created {
                Ok(()) => {
                    state.memory.refused.remove(&uid);
                    state.memory.all_refused = None;
                    state.memory.not_ready_since.insert(uid.clone(), None);
                    state.memory.requested.insert(uid, stop_limit(request));
                }
                Err(error) => {
                    if error.outcome_unknown() {
                        state.unknown.extend(request.metadata.name.clone());
                    }
                    tracing::debug!(job = %key, %error, "cannot create a request");
                    is_refused = true;
                    let refusal = refusal(&error);
                    state.memory.all_refused = None;
                    if error.refuses_all() {
                        all_refused = Some(refusal.clone());
                    }
                    state.memory.refused.insert(uid, refusal);
                }
            }
        }
        left = rest;
        if all_refused.is_some() {
            state.memory.all_refused = all_refused;
            break;
        }
    }
    for request in left {
        let name = request.metadata.name.as_deref().unwrap_or_default();
        shared.manager.restarts.plan().forget(&key.with_name(name));
    }
    is_refused
}

fn refusal(error: &Error) -> Refusal {
    let pause = if error.retryable() {
        FAILED_RETRY
    } else {
        REFUSED_RETRY
    };
    let requested = error.retry_after().unwrap_or_default();
    Refusal {
        message: error.to_string(),
        retry_at: Instant::now() + pause.max(requested),
    }
}

async fn create_request(
    shared: &ControllerState,
    key: &Key,
    cached: &CachedJob,
    request: &ContainerRecreateRequest,
) -> Result<(), Error> {
    let name = request.metadata.name.as_deref().unwrap_or_default();
    let requests: Api<ContainerRecreateRequest> = shared.manager.api(key);
    let created = write::create(&requests, request).await;
    let may_exist = created.as_ref().map_or_else(Error::outcome_unknown, |_| true);
    if !may_exist {
        shared.manager.restarts.plan().forget(&key.with_name(name));
    }
    let stored = match created {
        Ok(stored) => {
            let pod = &request.spec.pod_name;
            tracing::info!(job = %key, pod, request = name, "created a request");
            stored.object()?
        }
        Err(error) if error.already_exists() => match write::get(&requests, name).await? {
            Some(existing) if job_of(&existing).map(|job| job.uid) == cached.job.metadata.uid => existing,
            _ => return Err(error),
        },
        Err(error) => return Err(error),
    };
    let key = Key {
        namespace: key.namespace.clone(),
        name: name.to_owned(),
    };
    if let Some(entry) = versioned_request(Arc::new(stored)) {
        let now = Instant::now();
        shared
            .index()
            .requests
            .apply_write(&key, entry, Written::Created, now);
    }
    Ok(())
}

/// Deletes a job whose TTL has passed.
pub async fn delete_job(
    shared: &ControllerState,
    key: &Key,
    job: &ContainerRecreateJob,
) -> Result<(), Error> {
    let jobs: Api<ContainerRecreateJob> = shared.manager.api(key);
    let uid = job.metadata.uid.as_deref().unwrap_or_default();
    write::delete(&jobs, &key.name, uid).await?;
    tracing::info!(job = %key, "ContainerRecreateJob deleted: its ttlSecondsAfterFinished has passed");
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicUsize, Ordering};

    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;
    use crate::container_recreate_job::tests::shared;
    use kruise_api::keys;

    /// What is remembered after 40 creations that get this answer, and their number.
    async fn refused(answer: Value) -> (JobState, usize, Instant) {
        let count = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&count);
        let service = tower::service_fn(move |_: http::Request<Body>| {
            counter.fetch_add(1, Ordering::Relaxed);
            let code = u16::try_from(answer["code"].as_u64().unwrap()).unwrap();
            let response = http::Response::builder().status(code);
            let response = response.body(Body::from(answer.to_string().into_bytes()));
            async { response }
        });
        let shared = shared(kube::Client::new(service, "default"));
        let job = json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "ContainerRecreateJob",
            "metadata": { "name": "j", "namespace": "n", "uid": "j" }, "spec": { "containers": [] } });
        let cached = CachedJob {
            job: Arc::new(serde_json::from_value(job).unwrap()),
            selectors: Arc::default(),
            requests: Vec::new(),
            pods: Vec::new(),
            next_fetch: None,
        };
        let request = |n: usize| {
            let request = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
                "metadata": { "name": format!("r{n}"), "namespace": "n", "labels": { keys::CRR_POD_UID: format!("u{n}") } },
                "spec": { "podName": "p", "containers": [] } });
            serde_json::from_value(request).unwrap()
        };
        let plan = Plan {
            create: (0..40).map(request).collect(),
            ..Plan::default()
        };
        let (mut state, now) = (JobState::default(), Instant::now());
        let key = Key::namespaced("n", "j");
        assert!(create_requests(&shared, &key, &cached, &plan, &mut state).await);
        (state, count.load(Ordering::Relaxed), now)
    }

    fn status(code: u16, message: &str, details: Value) -> Value {
        json!({ "apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "reason": "Reason",
            "message": message, "details": details })
    }

    #[tokio::test]
    async fn refusal_of_all_stops_the_job_for_as_long_as_the_api_server_says() {
        for (code, message, retry_after, seconds) in [
            (403, "exceeded quota: crr, requested: 1", 0, 30),
            (
                403,
                "User \"m\" cannot create resource \"containerrecreaterequests\"",
                0,
                30,
            ),
            (429, "too many requests", 20, 20),
            (429, "too many requests", 1, 5),
        ] {
            let answer = status(code, message, json!({ "retryAfterSeconds": retry_after }));
            let (state, tried, now) = refused(answer).await;
            assert_eq!(tried, CONCURRENT_CREATIONS, "{message}");
            // These come last when it is tried again.
            assert_eq!(state.memory.refused.len(), CONCURRENT_CREATIONS);
            let refusal = state.memory.all_refused.unwrap();
            assert!(refusal.message.contains(message), "{refusal:?}");
            let pause = refusal.retry_at.saturating_duration_since(now).as_secs();
            assert!((seconds..seconds + 5).contains(&pause), "{message}: {pause}");
        }
        let denied = "admission webhook \"w\" denied the request: not this Pod";
        // A webhook chooses the code itself.
        for code in [403, 500] {
            let (state, tried, _) = refused(status(code, denied, json!({}))).await;
            assert_eq!((tried, state.memory.refused.len()), (40, 40));
            assert_eq!(state.memory.all_refused, None);
            assert!(state.unknown.is_empty(), "nothing was created");
        }
    }

    /// Its Pod would count as restarted until the watch could have shown the request.
    #[tokio::test]
    async fn request_that_was_not_created_counts_in_no_budget() {
        let found = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
            "metadata": { "name": "r", "namespace": "n", "uid": "r", "resourceVersion": "1", "ownerReferences": [{
                "apiVersion": "apps.kruise.io/v1alpha1", "kind": "ContainerRecreateJob", "name": "j", "uid": "j",
                "controller": true }] },
            "spec": { "podName": "p", "containers": [] } });
        for (answer, counted) in [(status(404, "not found", json!({})), 0), (found, 1)] {
            let code = answer["code"].as_u64().unwrap_or(200);
            let service = tower::service_fn(move |_: http::Request<Body>| {
                let response = http::Response::builder().status(u16::try_from(code).unwrap());
                let response = response.body(Body::from(answer.to_string().into_bytes()));
                async { response }
            });
            let shared = shared(kube::Client::new(service, "default"));
            let key = Key::namespaced("n", "j");
            let mut state = JobState::default();
            state.unknown.insert("r".to_owned());
            let (restarts, now) = (&shared.manager.restarts, Instant::now());
            restarts.plan().record(key.with_name("r"), "pod".to_owned(), now);
            fetch_unknown(&shared, &key, &mut state).await.unwrap();
            assert!(state.unknown.is_empty());
            let requests = &shared.manager.stores.requests;
            let (planned, _) = restarts.plan().unseen(&key, requests, now);
            assert_eq!(planned.len(), counted);
        }
    }

    /// Only a reference that is one to the Deployment makes a ReplicaSet its own.
    #[tokio::test]
    async fn replica_sets_of_a_deployment_refer_to_it() {
        let owner = json!({ "apiVersion": "apps/v1", "kind": "Deployment", "name": "web", "uid": "d", "controller": true });
        let replica_set = |uid: &str, field: &str, value: &str| {
            let mut owner = owner.clone();
            owner[field] = json!(value);
            json!({ "metadata": { "name": uid, "uid": uid, "ownerReferences": [owner] } })
        };
        let items = [
            replica_set("own", "name", "web"),
            replica_set("version", "apiVersion", "apps/v9"),
            replica_set("kind", "kind", "StatefulSet"),
            replica_set("name", "name", "other"),
            replica_set("uid", "uid", "e"),
        ];
        let list = json!({ "metadata": {}, "items": items }).to_string();
        let service = tower::service_fn(move |_: http::Request<Body>| {
            let response = http::Response::builder().body(Body::from(list.clone().into_bytes()));
            async { response }
        });
        let api = Api::namespaced(kube::Client::new(service, "default"), "n");
        let web = Owner {
            kind: OwnerKind::Deployment,
            name: "web".to_owned(),
            uid: "d".to_owned(),
        };
        assert_eq!(
            find_replica_sets(&api, &web).await.unwrap(),
            ["own".into()].into()
        );
    }
}

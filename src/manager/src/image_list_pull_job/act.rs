//! Executes the plan for one ImageListPullJob.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::{Api, Resource};

use super::observe::{versioned_job, versioned_list};
use super::plan::{MAX_WRITES, Observed, Plan, owner};
use super::state::{ControllerState, ListState, Refusal};
use crate::context::fetch_all;
use kruise_api::image_list_pull_job::{ImageListPullJob, list_of};
use kruise_api::image_pull_job::ImagePullJob;
use kruise_cluster::write_cache::Written;
use kruise_cluster::{Error, EventType, Key, write};

/// Pause before a refused creation is repeated: it succeeds after a change of a quota, a policy or a role.
const REFUSED_RETRY: Duration = Duration::from_secs(30);
/// How long a reconcile creates, and how long it deletes: a slow webhook may be called for each.
const MAX_WRITE_TIME: Duration = Duration::from_secs(30);
/// Fields of the status that may be absent.
const OPTIONAL_STATUS_FIELDS: [&str; 4] =
    ["startTime", "completionTime", "failedImageStatuses", "conditions"];

/// Reads what the watch has not confirmed in time.
pub async fn fetch_unconfirmed(shared: &ControllerState, key: &Key) -> Result<(), Error> {
    let (list_is_unconfirmed, jobs) = shared.index().unconfirmed(key, Instant::now());
    if list_is_unconfirmed {
        let lists: Api<ImageListPullJob> = shared.manager.api(key);
        let found = write::get(&lists, &key.name).await?;
        let entry = found.map(|list| versioned_list(Arc::new(list)));
        shared.index().lists.apply_read(key, entry, Instant::now());
    }
    let reads: Vec<_> = jobs.iter().map(|key| fetch_job(shared, key)).collect();
    fetch_all(reads).await
}

async fn fetch_job(shared: &ControllerState, key: &Key) -> Result<(), Error> {
    let jobs: Api<ImagePullJob> = shared.manager.api(key);
    let found = write::get(&jobs, &key.name).await?;
    let entry = found.and_then(|job| versioned_job(Arc::new(job)));
    shared.index().jobs.apply_read(key, entry, Instant::now());
    Ok(())
}

/// Writes the status, its end at once; returns when a change that waits is due.
pub async fn update_status(
    shared: &ControllerState,
    key: &Key,
    observed: &Observed,
    plan: &Plan,
    state: &mut ListState,
) -> Result<Option<Duration>, Error> {
    let Some(status) = &plan.status else {
        state.status_pacer.unchanged();
        return Ok(None);
    };
    let now = Instant::now();
    // The first one is not waited for, either.
    let at_once = status.completion_time.is_some() || observed.list.status.is_none();
    if let Some(delay) = state.status_pacer.begin_write(now, false, at_once) {
        return Ok(Some(delay));
    }
    let uid = observed.list.metadata.uid.as_deref().unwrap_or_default();
    let body = write::status_patch(uid, status, OPTIONAL_STATUS_FIELDS);
    let lists: Api<ImageListPullJob> = shared.manager.api(key);
    match write::patch_status_merge(&lists, &key.name, &body).await {
        Ok(stored) => {
            let list = Arc::new(stored.object()?);
            if status.completion_time.is_some() {
                tracing::info!(job = %key, succeeded = status.succeeded, desired = status.desired, "ImageListPullJob has completed");
            }
            let entry = versioned_list(list);
            let mut index = shared.index();
            index
                .lists
                .apply_write(key, entry, Written::Changed, Instant::now());
            // The end has a TTL.
            Ok(status.completion_time.is_some().then_some(Duration::ZERO))
        }
        Err(error) if error.not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Deletes surplus ImagePullJobs; returns whether there are more than one reconcile deletes, or than it has time for.
pub async fn delete_jobs(shared: &ControllerState, observed: &Observed, plan: &Plan) -> Result<bool, Error> {
    let until = tokio::time::Instant::now() + MAX_WRITE_TIME;
    let mut deleted = 0;
    let mut result = Ok(false);
    for (name, uid) in &plan.delete {
        if deleted == MAX_WRITES || tokio::time::Instant::now() >= until {
            result = result.map(|_| true);
            break;
        }
        let key = job_key(observed, name);
        let jobs: Api<ImagePullJob> = shared.manager.api(&key);
        match write::delete(&jobs, name, uid).await {
            Ok(()) => {
                deleted += 1;
                let list = observed.list.metadata.name.as_deref();
                tracing::info!(job = %key, list, "ImagePullJob deleted: its ImageListPullJob has changed");
            }
            Err(error) if error.not_found() || error.conflict() => {}
            // A policy may protect one of them; a webhook chooses the code of its denial.
            Err(error) if !error.retryable() || error.denied() => {
                result = Err(error);
                continue;
            }
            Err(error) => {
                result = Err(error);
                break;
            }
        }
        shared.index().jobs.mark_deleted(&key, uid, Instant::now());
    }
    publish(shared, observed, deleted, "delete", "Delete");
    result
}

/// Creates missing ImagePullJobs; returns whether one was refused, or there was no time for all. A quota or a missing role refuses the others, too: they
/// are not tried then. A name that is taken, or a policy about one image, stops no other.
pub async fn create_jobs(
    shared: &ControllerState,
    observed: &Observed,
    plan: &Plan,
    state: &mut ListState,
) -> Result<bool, Error> {
    let until = tokio::time::Instant::now() + MAX_WRITE_TIME;
    let mut created = 0;
    let mut result = Ok(false);
    let mut missing = plan.create.iter();
    while let Some(job) = missing.next() {
        if tokio::time::Instant::now() >= until {
            result = result.map(|_| true);
            break;
        }
        match create_job(shared, observed, job).await {
            Ok(is_new) => created += usize::from(is_new),
            Err(error) if error.retryable() && !error.denied() => {
                result = Err(error);
                break;
            }
            Err(error) => {
                let refuses_all = error.refuses_all();
                let mut images = vec![&job.spec.image];
                if refuses_all {
                    images.extend(missing.as_slice().iter().map(|job| &job.spec.image));
                    images.extend(&plan.create_later);
                }
                for image in images {
                    let refusal = Refusal {
                        generation: observed.list.metadata.generation,
                        message: error.to_string(),
                        retry_at: Instant::now() + REFUSED_RETRY,
                    };
                    state.refused.insert(image.clone(), refusal);
                }
                result = Ok(true);
                if refuses_all {
                    break;
                }
            }
        }
    }
    publish(shared, observed, created, "create", "Create");
    result
}

/// Creates an ImagePullJob; returns whether it did not exist.
async fn create_job(
    shared: &ControllerState,
    observed: &Observed,
    job: &ImagePullJob,
) -> Result<bool, Error> {
    let name = job.metadata.name.as_deref().unwrap_or_default();
    let key = job_key(observed, name);
    let jobs: Api<ImagePullJob> = shared.manager.api(&key);
    let (stored, is_new) = match write::create(&jobs, job).await {
        Ok(stored) => {
            let list = observed.list.metadata.name.as_deref();
            tracing::info!(job = %key, list, "ImagePullJob created");
            (stored.object()?, true)
        }
        Err(error) if error.already_exists() => match write::get(&jobs, name).await? {
            Some(existing) if list_of(&existing).as_ref() == Some(&owner(&observed.list)) => {
                (existing, false)
            }
            _ => return Err(error),
        },
        Err(error) => return Err(error),
    };
    if let Some(entry) = versioned_job(Arc::new(stored)) {
        let mut index = shared.index();
        index
            .jobs
            .apply_write(&key, entry, Written::Created, Instant::now());
    }
    Ok(is_new)
}

/// Deletes a job whose TTL has passed.
pub async fn delete_list(shared: &ControllerState, key: &Key, observed: &Observed) -> Result<(), Error> {
    let lists: Api<ImageListPullJob> = shared.manager.api(key);
    let uid = observed.list.metadata.uid.as_deref().unwrap_or_default();
    write::delete(&lists, &key.name, uid).await?;
    tracing::info!(job = %key, "ImageListPullJob deleted: its ttlSecondsAfterFinished has passed");
    Ok(())
}

fn job_key(observed: &Observed, name: &str) -> Key {
    Key {
        namespace: observed.list.metadata.namespace.clone(),
        name: name.to_owned(),
    }
}

/// OpenKruise's event about created or deleted ImagePullJobs.
fn publish(shared: &ControllerState, observed: &Observed, count: usize, verb: &str, action: &str) {
    if count == 0 {
        return;
    }
    shared.manager.cluster.events.publish(
        observed.list.object_ref(&()),
        EventType::Normal,
        &format!("Successful {verb} ImagePullJob"),
        action,
        format!("{action} {count} ImagePullJob"),
    );
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Mutex;

    use kruise_ops::logs::captured_lines;
    use kube::client::Body;
    use serde_json::{Value, json};
    use tokio::sync::mpsc;

    use super::*;
    use crate::Context;

    fn controller_state(client: kube::Client) -> ControllerState {
        ControllerState {
            manager: Context::for_test(client),
            index: Mutex::default(),
            states: Mutex::default(),
        }
    }

    /// A list, with so many ImagePullJobs to create and as many to delete.
    fn planned(count: usize) -> (Observed, Plan) {
        let metadata = |name: &str| json!({ "namespace": "n", "name": name, "uid": name });
        let list = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImageListPullJob",
            "metadata": metadata("list"), "spec": { "images": [], "completionPolicy": {} } });
        let observed = Observed {
            list: Arc::new(serde_json::from_value(list).unwrap()),
            jobs: Vec::new(),
            terminating: Default::default(),
        };
        let jobs = (0..count).map(|n| {
            let spec = json!({ "image": format!("i-{n}"), "completionPolicy": {} });
            let job = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob",
                "metadata": metadata(&format!("job-{n}")), "spec": spec });
            serde_json::from_value(job).unwrap()
        });
        let plan = Plan {
            create: jobs.collect(),
            delete: (0..count).map(|n| (format!("old-{n}"), "u".to_owned())).collect(),
            ..Plan::default()
        };
        (observed, plan)
    }

    /// A webhook that times out, and is ignored, makes each write slow.
    #[tokio::test(start_paused = true)]
    async fn slow_writes_continue_in_the_next_reconcile() {
        let service = tower::service_fn(|request: http::Request<Body>| async {
            tokio::time::sleep(Duration::from_secs(9)).await;
            http::Response::builder().body(request.into_body())
        });
        let shared = controller_state(kube::Client::new(service, "default"));
        let (observed, plan) = planned(MAX_WRITES);
        let start = tokio::time::Instant::now();
        assert!(
            delete_jobs(&shared, &observed, &plan).await.unwrap(),
            "there are more"
        );
        let mut state = ListState::default();
        assert!(create_jobs(&shared, &observed, &plan, &mut state).await.unwrap());
        assert_eq!(start.elapsed().as_secs(), 2 * 4 * 9);
        assert!(state.refused.is_empty());
    }

    #[test]
    fn each_created_or_deleted_job_is_logged() {
        let write_all = async {
            let service = tower::service_fn(|request: http::Request<Body>| async {
                http::Response::builder().body(request.into_body())
            });
            let shared = controller_state(kube::Client::new(service, "default"));
            let (observed, plan) = planned(1);
            delete_jobs(&shared, &observed, &plan).await.unwrap();
            let mut state = ListState::default();
            create_jobs(&shared, &observed, &plan, &mut state).await.unwrap();
        };
        let lines = captured_lines(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(write_all);
        });
        for (action, job) in [("deleted", "n/old-0"), ("created", "n/job-0")] {
            let text = format!("ImagePullJob {action}");
            let is_logged = |line: &String| line.contains(&text) && line.contains(job);
            assert!(lines.iter().any(is_logged), "{text} {job}: {lines:?}");
        }
    }

    #[tokio::test]
    async fn denial_of_one_job_stops_no_other() {
        let (accepted_tx, mut accepted) = mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let accepted_tx = accepted_tx.clone();
            async move {
                let (method, path) = (request.method().to_string(), request.uri().path().to_owned());
                let body = request.into_body().collect_bytes().await.unwrap_or_default();
                let sent: Value = serde_json::from_slice(&body).unwrap_or_default();
                let is_denied = path.ends_with("/old-0") || sent["metadata"]["name"] == "job-0";
                if !is_denied && path.contains("/imagepulljobs") {
                    let _ = accepted_tx.send(method);
                }
                let denial = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 503,
                    "reason": "ServiceUnavailable", "message": "admission webhook \"w\" denied the request: no" });
                let (code, answer) = if is_denied {
                    (503, Body::from(denial.to_string().into_bytes()))
                } else {
                    (200, Body::from(body))
                };
                http::Response::builder().status(code).body(answer)
            }
        });
        let shared = controller_state(kube::Client::new(service, "default"));
        let (observed, plan) = planned(2);
        assert!(delete_jobs(&shared, &observed, &plan).await.is_err());
        let mut state = ListState::default();
        assert!(create_jobs(&shared, &observed, &plan, &mut state).await.unwrap());
        let accepted: Vec<String> = std::iter::from_fn(|| accepted.try_recv().ok()).collect();
        assert_eq!(accepted, ["DELETE", "POST"]);
        let refused: Vec<&str> = state.refused.keys().map(String::as_str).collect();
        assert_eq!(refused, ["i-0"]);
    }
}

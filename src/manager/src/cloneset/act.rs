//! Executes a plan: all actions concurrently within a bound, each with its deadlines, none blocking another.

mod claims;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use kube::{Api, Resource};
use serde_json::{Value, json};

use claims::{adopt_claims, create_claim, delete_claim, has_foreign_claim, patch_claim};

use super::context::CloneSetContext;
use super::fetch::{fetch_job, fetch_pod};
use super::history;
use super::observe::{versioned_job, versioned_pod};
use super::plan::{
    Action, ActionOutcome, ActionPurpose, ClaimPatch, FailureSubject, ImagePullJobRef, PatchReason,
};
use super::reconcile_state::{MAX_CONCURRENT_WRITES, ReconcileState};
use super::report::ActionEvents;
use crate::view::RawPod;
use kruise_api::cloneset::CloneSet;
use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::keys;
use kruise_api::unconfirmed::CONFIRM_TIMEOUT;
use kruise_cluster::write::Stored;
use kruise_cluster::write_cache::Written;
use kruise_cluster::{Error, Key, write};
use kruise_workload::in_place::{self, PatchTarget, Pod, PodWrite, RefreshResult};

/// Outcome of the resize among the writes of an action.
#[derive(Default)]
enum ResizeOutcome {
    /// There was none, or it was not requested.
    #[default]
    None,
    Done,
    Refused {
        quota: bool,
    },
    /// It was refused and the fallback was written, which may mark the Pod for recreation.
    FellBack {
        refusal: Error,
        replaced: bool,
    },
}

/// Result of executing a plan.
pub struct ExecutionResult {
    /// Whether anything was attempted.
    pub acted: bool,
    /// Events to publish.
    pub events: ActionEvents,
    /// Number of Pods created.
    created: usize,
    /// Whether the creation of a Pod failed.
    creation_failed: bool,
}

/// Executes the planned actions. No action starts later than `time_slice` after the first one, nor after the spec has
/// changed.
pub async fn execute_actions(
    ctx: &CloneSetContext<'_>,
    actions: Vec<Action>,
    time_slice: Duration,
    state: &mut ReconcileState,
) -> ExecutionResult {
    let mut execution = ExecutionResult {
        acted: false,
        events: ActionEvents::default(),
        created: 0,
        creation_failed: false,
    };
    let actions = admit_actions(ctx, actions, state, &mut execution.events).await;
    // After failed updates, a Pod leaves its Services only for a patch that the API server would accept.
    let dry_run = state.failures.contains_key(&FailureSubject::InPlaceUpdates);
    execution.acted = !actions.is_empty() || execution.events.has_failures();
    for action in &actions {
        tracing::debug!(set = %ctx.name, subject = ?action.subject(), concern = ?action.purpose(), "act planned");
    }
    let mut pending = actions.into_iter();
    let mut in_flight = FuturesUnordered::new();
    let begin = Instant::now();
    loop {
        while in_flight.len() < state.write_limit() && begin.elapsed() < time_slice && ctx.is_current() {
            match pending.next() {
                // The error that stopped one creation stops the next.
                Some(Action::CreatePod { .. }) if execution.creation_failed => {}
                Some(action) => {
                    // A request whose answer was lost may succeed now; a dry run would be one more request to lose.
                    let failed = state.failures.get(&action.subject());
                    let careful = dry_run || failed.is_some_and(|failure| failure.answered);
                    in_flight.push(execute_one(ctx, action, careful, begin + time_slice));
                }
                None => break,
            }
        }
        match in_flight.next().await {
            Some(Some((action, result, resize))) => execution.record(ctx, &action, result, resize, state),
            Some(None) => {}
            None => break,
        }
    }
    state.record_creations(
        execution.created,
        execution.creation_failed,
        MAX_CONCURRENT_WRITES,
    );
    execution
}

impl ExecutionResult {
    /// Records the result of an action.
    fn record(
        &mut self,
        ctx: &CloneSetContext<'_>,
        action: &Action,
        result: Result<(), Error>,
        resize: ResizeOutcome,
        state: &mut ReconcileState,
    ) {
        state
            .unfinished
            .record(action, creation_outcome(ctx, action, &result));
        let now = ctx.manager.cluster.clock.now();
        let creation = matches!(action, Action::CreatePod { .. });
        let patched_for = |purpose| matches!(action, Action::PatchPod { reason, .. } if *reason == purpose);
        let (update, continues) = (
            patched_for(PatchReason::UpdateInPlace),
            patched_for(PatchReason::ContinueUpdate),
        );
        let resize_refused = matches!(resize, ResizeOutcome::Refused { .. });
        // Taking back the announcement of a refused resize does not make the API server accept it.
        let keeps_refusal = continues
            && matches!(resize, ResizeOutcome::None)
            && state.is_resize_rejected(&action.subject())
            // Nor does the end of its preparation change that a Pod's update is refused.
            || patched_for(PatchReason::SyncLifecycle) && state.is_update_refused(&action.subject());
        state.record_answer(result.as_ref().err());
        match &result {
            Ok(()) if keeps_refusal => {}
            Ok(()) if update || continues => state.record_update_success(),
            Err(error) if (update || continues && !resize_refused) && !error.retryable() => {
                state.record_update_rejection(error, now);
            }
            _ => {}
        }
        let Err(error) = result else {
            self.created += usize::from(creation);
            if !keeps_refusal {
                state.record_success(&action.subject());
            }
            match resize {
                ResizeOutcome::FellBack { refusal, replaced } => {
                    self.events.record_failure(action, &refusal);
                    if replaced {
                        self.events.record_success(ctx.name, &as_recreate(action));
                        return;
                    }
                    state.record_failure(
                        FailureSubject::PendingResizes,
                        ActionPurpose::Update,
                        &refusal,
                        now,
                    );
                }
                ResizeOutcome::Done if continues => state.record_success(&FailureSubject::PendingResizes),
                _ => {}
            }
            self.events.record_success(ctx.name, action);
            return;
        };
        let refused_by_quota = match resize {
            ResizeOutcome::Refused { quota } => Some(quota),
            _ => None,
        };
        if refused_by_quota.is_some() && continues {
            state.record_failure(FailureSubject::PendingResizes, ActionPurpose::Update, &error, now);
        }
        let error = redact_pod_name(ctx, action, error);
        // Concurrent creations count as one attempt.
        let already_failed = creation && self.creation_failed;
        self.creation_failed |= creation;
        if !already_failed {
            record_failure(ctx, action, &error, state, &mut self.events);
        }
        // A quota may have room later.
        if refused_by_quota == Some(false) {
            state.record_resize_rejection(&action.subject());
        }
    }
}

/// The action that was done when a Pod was marked for deletion instead of being resized.
fn as_recreate(action: &Action) -> Action {
    let mut action = action.clone();
    if let Action::PatchPod { reason: why, .. } = &mut action {
        *why = PatchReason::UpdateReCreate;
    }
    action
}

/// The error without the name of the Pod: which creation fails first is random, and must not count as a new message.
fn redact_pod_name(ctx: &CloneSetContext<'_>, action: &Action, mut error: Error) -> Error {
    if let (Action::CreatePod { name, .. }, Error::Api(status)) = (action, &mut error) {
        status.message = status.message.replace(name, &format!("{}-*", ctx.name.name));
    }
    error
}

/// Filters out actions that must not be done now: Pods beyond the slow-start batch, and adoptions by a CloneSet that is
/// terminating. Actions for existing Pods come before creations; otherwise they would wait until the last Pod is
/// created.
async fn admit_actions(
    ctx: &CloneSetContext<'_>,
    mut actions: Vec<Action>,
    state: &mut ReconcileState,
    events: &mut ActionEvents,
) -> Vec<Action> {
    let (mut pods, batch) = (0, state.slow_start_batch());
    actions.retain(|action| {
        pods += usize::from(matches!(action, Action::CreatePod { .. }));
        !matches!(action, Action::CreatePod { .. }) || pods <= batch
    });
    actions.sort_by_key(|action| matches!(action, Action::CreatePod { .. }));
    let adopts = |action: &Action| {
        matches!(
            action,
            Action::PatchPod {
                reason: PatchReason::Adopt,
                ..
            }
        )
    };
    if actions.iter().any(adopts) {
        let owner_exists = ctx.owner_exists().await;
        if let Err(error) = &owner_exists {
            let unverified = actions.iter().filter(|action| adopts(action));
            unverified.for_each(|action| record_failure(ctx, action, error, state, events));
        }
        actions.retain(|action| matches!(owner_exists, Ok(true)) || !adopts(action));
    }
    actions
}

/// Records a failed action; it is reported unless it is expected.
fn record_failure(
    ctx: &CloneSetContext<'_>,
    action: &Action,
    error: &Error,
    state: &mut ReconcileState,
    events: &mut ActionEvents,
) {
    let now = ctx.manager.cluster.clock.now();
    tracing::debug!(set = %ctx.name, subject = ?action.subject(), %error, category = error.category(), "act failed");
    if state.record_failure(action.subject(), action.purpose(), error, now) && !error.namespace_terminating()
    {
        events.record_failure(action, error);
    }
}

/// Executes one action; `None` if it cannot start before `start_by`, or before the spec changes.
async fn execute_one(
    ctx: &CloneSetContext<'_>,
    action: Action,
    dry_run: bool,
    start_by: Instant,
) -> Option<(Action, Result<(), Error>, ResizeOutcome)> {
    let mut resize = ResizeOutcome::None;
    // The semaphore is never closed. Other CloneSets may hold all permits for longer than what was planned is true.
    let _permit = ctx.write_permits.acquire().await;
    if Instant::now() >= start_by || !ctx.is_current() {
        return None;
    }
    let result = match &action {
        Action::CreatePod { name, pod, claims } => create_pod(ctx, name, pod, claims).await,
        Action::DeletePod {
            uid,
            name,
            version,
            claims,
        } => delete_pod(ctx, uid, name, version.as_deref(), claims).await,
        Action::PatchPod {
            uid,
            name,
            writes,
            claims,
            ..
        } => {
            let preflight = async {
                dry_run_patch(ctx, name, writes, dry_run).await?;
                adopt_claims(ctx, claims).await
            };
            match preflight.await {
                Ok(()) => patch_pod(ctx, uid, name, writes, &mut resize).await,
                Err(error) => {
                    restore_service(ctx, name, &error).await;
                    Err(error)
                }
            }
        }
        Action::PatchClaim(claim) => patch_claim(ctx, claim).await,
        Action::DeleteClaim { name, uid } => delete_claim(ctx, name, uid).await,
        Action::CreateJob(job) => create_job(ctx, job).await,
        Action::DeleteJob(job) => delete_job(ctx, job).await,
        Action::LabelRevision { name, label } => history::label_revision(ctx, name, label).await,
        Action::PatchCloneSet(patch) => patch_clone_set(ctx, patch).await,
    };
    Some((action, result, resize))
}

fn cache_pod(ctx: &CloneSetContext<'_>, stored: &RawPod, what: Written) -> Arc<Pod> {
    let pod = Arc::new(Pod::from_json(stored.json()));
    let key = ctx.key(&pod.name);
    let entry = versioned_pod(&key, Arc::clone(&pod));
    ctx.index().pods.apply_write(&key, entry, what, Instant::now());
    pod
}

/// The outcome of an action, as far as it is known.
fn creation_outcome(ctx: &CloneSetContext<'_>, action: &Action, result: &Result<(), Error>) -> ActionOutcome {
    let until = || ctx.manager.cluster.clock.now().checked_add(CONFIRM_TIMEOUT);
    match result {
        Err(error) if error.outcome_unknown() => {
            until().map_or(ActionOutcome::Failed, ActionOutcome::Unknown)
        }
        Err(error) if !error.already_exists() => ActionOutcome::Failed,
        Err(_) if has_foreign_claim(ctx, action) => ActionOutcome::ClaimNameTaken,
        _ => ActionOutcome::Settled,
    }
}

async fn create_pod(
    ctx: &CloneSetContext<'_>,
    name: &str,
    pod: &Value,
    claims: &[Value],
) -> Result<(), Error> {
    for claim in claims {
        create_claim(ctx, claim).await?;
    }
    match write::create(&ctx.api(), &RawPod::from(pod.clone()))
        .await
        .and_then(Stored::object)
    {
        Ok(stored) => {
            cache_pod(ctx, &stored, Written::Created);
            Ok(())
        }
        // The owner of the name must be known before the name is given up.
        Err(error) if error.already_exists() || error.outcome_unknown() => {
            match fetch_pod(ctx, name).await {
                Ok(Some(pod)) if pod.controller.as_ref() == Some(&ctx.owner) => Ok(()),
                // A refused read does not mean that the creation was refused.
                Err(why) if !error.outcome_unknown() => Err(why),
                _ => Err(error),
            }
        }
        Err(error) => Err(error),
    }
}

async fn delete_pod(
    ctx: &CloneSetContext<'_>,
    uid: &str,
    name: &str,
    version: Option<&str>,
    claims: &[ClaimPatch],
) -> Result<(), Error> {
    for claim in claims {
        patch_claim(ctx, claim).await?;
    }
    let key = ctx.key(name);
    let deleted = write::delete_if_unchanged(&ctx.api::<RawPod>(), name, uid, version).await;
    match &deleted {
        Ok(()) => ctx.index().pods.mark_deleted(&key, uid, Instant::now()),
        Err(error) if error.conflict() => drop(fetch_pod(ctx, name).await?),
        Err(error) if error.outcome_unknown() => ctx.index().pods.mark_unknown(&key),
        Err(_) => {}
    }
    deleted
}

/// Dry-runs the change of the Pod itself: the later patch that the last write leads to or, if `dry_run` is set, that
/// write.
async fn dry_run_patch(
    ctx: &CloneSetContext<'_>,
    name: &str,
    writes: &[PodWrite],
    dry_run: bool,
) -> Result<(), Error> {
    let leaves_services = writes
        .first()
        .is_some_and(|write| write.target == PatchTarget::Status);
    let last = writes.last().filter(|write| write.target == PatchTarget::Pod);
    let patch = match last.map(|write| (write, &write.dry_run)) {
        Some((_, Some(later))) => later.as_ref(),
        Some((write, None)) if dry_run && leaves_services => &write.patch,
        _ => return Ok(()),
    };
    write::dry_run_patch_strategic(&ctx.api::<RawPod>(), name, patch).await
}

async fn patch_pod(
    ctx: &CloneSetContext<'_>,
    uid: &str,
    name: &str,
    writes: &[PodWrite],
    resize: &mut ResizeOutcome,
) -> Result<(), Error> {
    let api = ctx.api::<RawPod>();
    let mut last_stored: Option<Arc<Pod>> = None;
    for write in writes {
        let error = match send(&api, name, write, last_stored.as_deref()).await {
            Ok(stored) => {
                if write.target == PatchTarget::Resize {
                    *resize = ResizeOutcome::Done;
                }
                last_stored = Some(cache_pod(ctx, &stored, Written::Changed));
                continue;
            }
            Err(error) => error,
        };
        if write.target != PatchTarget::Resize || error.retryable() {
            return handle_patch_error(ctx, uid, name, error).await;
        }
        let quota = rejects_another_pod(&error.message());
        let fallback = write.fallback.as_deref();
        let instead = fallback.and_then(|f| {
            if quota {
                f.quota.as_ref()
            } else {
                f.refused.as_ref()
            }
        });
        let Some(instead) = instead else {
            *resize = ResizeOutcome::Refused { quota };
            return handle_patch_error(ctx, uid, name, error).await;
        };
        *resize = ResizeOutcome::None;
        return match send(&api, name, instead, last_stored.as_deref()).await {
            Ok(stored) => {
                let pod = cache_pod(ctx, &stored, Written::Changed);
                *resize = ResizeOutcome::FellBack {
                    refusal: error,
                    replaced: pod.labels.contains_key(keys::SPECIFIED_DELETE),
                };
                Ok(())
            }
            Err(error) => handle_patch_error(ctx, uid, name, error).await,
        };
    }
    Ok(())
}

/// Whether the API server would also refuse another Pod of the new size, according to the messages of its
/// `ResourceQuota` and `LimitRange` plugins.
fn rejects_another_pod(message: &str) -> bool {
    let limits = [" usage per ", " max limit to request ratio per "];
    message.contains("exceeded quota") || limits.iter().any(|of_limit| message.contains(of_limit))
}

/// Sends one write, after the one that returned `previous`.
async fn send(
    api: &Api<RawPod>,
    name: &str,
    write: &PodWrite,
    previous: Option<&Pod>,
) -> Result<RawPod, Error> {
    let patch = previous.map_or(Cow::Borrowed(&write.patch), |pod| write.rebased_on(pod));
    let stored = match write.target {
        PatchTarget::Pod => write::patch_strategic(api, name, &patch).await,
        PatchTarget::Status => write::patch_status_strategic(api, name, &patch).await,
        PatchTarget::Resize => write::patch_resize(api, name, &patch).await,
    };
    stored?.object()
}

/// Handles a failed patch of a Pod.
async fn handle_patch_error(
    ctx: &CloneSetContext<'_>,
    uid: &str,
    name: &str,
    error: Error,
) -> Result<(), Error> {
    if error.not_found() || error.conflict() {
        let current = fetch_pod(ctx, name).await?;
        // If the Pod exists, the API server does not have the subresource: it is too old to resize Pods.
        if error.not_found() && current.is_none_or(|pod| pod.uid != uid) {
            return Ok(());
        }
    }
    if error.outcome_unknown() {
        ctx.index().pods.mark_unknown(&ctx.key(name));
    }
    restore_service(ctx, name, &error).await;
    Err(error)
}

/// Puts the Pod back into its Services until the retry, unless the retry is soon or the change was made after all. The
/// caller reports `error`, whatever the outcome of this is.
async fn restore_service(ctx: &CloneSetContext<'_>, name: &str, error: &Error) {
    let answered = matches!(error, Error::Api(_)) && !error.conflict() && !error.throttled();
    if answered
        && let Err(error) = restore_readiness(ctx, name, error.outcome_unknown()).await
        && error.outcome_unknown()
    {
        ctx.index().pods.mark_unknown(&ctx.key(name));
    }
}

/// Reverts the writes before a change that was refused. If that is in doubt, the Pod is read first.
async fn restore_readiness(ctx: &CloneSetContext<'_>, name: &str, in_doubt: bool) -> Result<(), Error> {
    let cached = match in_doubt {
        true => fetch_pod(ctx, name).await?,
        false => ctx.index().pods.get(&ctx.key(name)).cloned(),
    };
    let Some(pod) = cached else {
        return Ok(());
    };
    let now = ctx.manager.cluster.clock.now();
    let gate = pod.condition(keys::IN_PLACE_UPDATE_READY);
    let out_of_service =
        gate.is_some_and(|gate| !gate.is_true) && !in_place::resize::resize_in_progress(&pod);
    let idle = out_of_service
        && in_place::refresh(&pod, |_| true, in_place::Template::unknown(), now) == RefreshResult::Done;
    let Some(ready) = in_place::ready::ready_condition(&pod, now).filter(|_| idle) else {
        return Ok(());
    };
    let patch = json!({ "status": { "conditions": [ready] } });
    let patch = PodWrite::new(PatchTarget::Status, &pod, patch).patch;
    let stored = write::patch_status_strategic(&ctx.api::<RawPod>(), name, &patch).await?;
    cache_pod(ctx, &stored.object()?, Written::Changed);
    Ok(())
}

async fn create_job(ctx: &CloneSetContext<'_>, job: &ImagePullJob) -> Result<(), Error> {
    match write::create(&ctx.api(), job).await.and_then(Stored::object) {
        Ok(stored) => {
            let (key, entry) = (Key::from_object(&stored), versioned_job(&stored));
            let now = Instant::now();
            ctx.index().jobs.apply_write(&key, entry, Written::Created, now);
        }
        Err(error) if error.already_exists() => {
            let name = job.meta().name.clone().unwrap_or_default();
            if !fetch_job(ctx, &name).await? {
                return Err(error);
            }
        }
        Err(error) => return Err(error),
    }
    Ok(())
}

async fn delete_job(ctx: &CloneSetContext<'_>, job: &ImagePullJobRef) -> Result<(), Error> {
    let ImagePullJobRef { name, uid } = job;
    write::delete(&ctx.api::<ImagePullJob>(), name, uid).await?;
    ctx.index().jobs.mark_deleted(&ctx.key(name), uid, Instant::now());
    Ok(())
}

async fn patch_clone_set(ctx: &CloneSetContext<'_>, patch: &Value) -> Result<(), Error> {
    match write::patch_merge::<CloneSet>(&ctx.api(), &ctx.name.name, patch).await {
        Ok(stored) => ctx.cache_clone_set(stored.object()?),
        Err(error) if error.not_found() => {}
        Err(error) => return Err(error),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kube::client::Body;

    use super::*;
    use crate::cloneset::context::ControllerState;

    /// An overloaded API server answers neither the creation in time nor the read: the Pod may appear, and its claims
    /// are kept for it.
    #[tokio::test]
    async fn creation_is_unknown_while_the_pod_cannot_be_read() -> Result<(), serde_json::Error> {
        let service = tower::service_fn(|request: http::Request<Body>| {
            let code = if request.method() == http::Method::GET {
                429
            } else {
                504
            };
            let status = json!({ "kind": "Status", "status": "Failure", "code": code, "message": "no" });
            std::future::ready(
                http::Response::builder()
                    .status(code)
                    .body(Body::from(status.to_string().into_bytes())),
            )
        });
        let manager = crate::Context::for_test(kube::Client::new(service, "default"));
        let shared = ControllerState::new(manager);
        let set: Arc<CloneSet> = Arc::new(serde_json::from_value(json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet",
            "metadata": { "name": "web", "namespace": "n", "uid": "set" },
            "spec": { "selector": { "matchLabels": { "app": "web" } }, "template": {} },
        }))?);
        let key = Key::namespaced("n", "web");
        let ctx = CloneSetContext::new(&shared, &key, &set);
        let (name, pod) = ("web-a", json!({ "metadata": { "name": "web-a" } }));
        let result = create_pod(&ctx, name, &pod, &[]).await;
        let (name, claims) = (name.to_owned(), Vec::new());
        let outcome = creation_outcome(&ctx, &Action::CreatePod { name, pod, claims }, &result);
        assert!(matches!(outcome, ActionOutcome::Unknown(_)), "{outcome:?}");
        Ok(())
    }

    #[test]
    fn quota_and_limit_range_reject_another_pod_too() {
        let start = "pods \"web-x\" is forbidden: ";
        for (message, rejected) in [
            (
                "exceeded quota: few, requested: requests.cpu=1, used: requests.cpu=2",
                true,
            ),
            ("maximum cpu usage per Container is 1, but limit is 2", true),
            (
                "[minimum memory usage per Pod is 1Gi, but request is 1Mi, x]",
                true,
            ),
            (
                "cpu max limit to request ratio per Container is 2, but provided ratio is 3.000000",
                true,
            ),
            ("Pod QoS is immutable", false),
            (
                "ValidatingAdmissionPolicy 'p' denied request: no resizes here",
                false,
            ),
        ] {
            assert_eq!(
                rejects_another_pod(&format!("{start}{message}")),
                rejected,
                "{message}"
            );
        }
    }
}

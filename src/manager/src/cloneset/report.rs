//! Reports what was done: the status of a CloneSet and its events.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ObjectReference;

use super::context::CloneSetContext;
use super::plan::{Action, ClaimPatch, CloneSetEvent, ImagePullJobRef, PatchReason, WAITING, truncate};
use super::reconcile_state::ReconcileState;
use crate::object_reference::object_reference;
use kruise_api::cloneset::{CloneSet, CloneSetStatus};
use kruise_cluster::{Error, EventType, Key, write};
use kruise_ops::metrics::metrics;

/// Events of executed actions: one for each, as in OpenKruise.
#[derive(Default)]
pub struct ActionEvents {
    succeeded: Vec<CloneSetEvent>,
    /// By reason and text: while the API server is unavailable, many are the same.
    failed: BTreeSet<(&'static str, String)>,
}

/// Reason and text of the event about a completed action. They are exactly OpenKruise's, if it has that event.
///
/// # Errors
/// If there is no event: the text for the log, to be put before the name.
fn success_event(action: &Action) -> Result<(&'static str, String), &'static str> {
    let name = object_name(action);
    Ok(match action {
        Action::CreatePod { .. } => ("SuccessfulCreate", format!("succeed to create pod {name}")),
        Action::DeletePod { .. } => ("SuccessfulDelete", format!("succeed to delete pod {name}")),
        Action::PatchPod { reason, .. } => match reason {
            PatchReason::UpdateInPlace => (
                "SuccessfulUpdatePodInPlace",
                format!(
                    "successfully update pod {name} in-place{}",
                    revision_suffix(action)
                ),
            ),
            PatchReason::UpdateReCreate => (
                "SuccessfulUpdatePodReCreate",
                format!(
                    "successfully patch pod {name} specified-delete for update{}",
                    revision_suffix(action)
                ),
            ),
            PatchReason::Adopt => ("SuccessfulAdopt", format!("adopted pod {name}")),
            PatchReason::Release => (
                "SuccessfulRelease",
                format!("released pod {name}, which the selector does not match"),
            ),
            PatchReason::PrepareUpdate => (
                "PreparingUpdate",
                format!("pod {name} waits for hook inPlaceUpdate"),
            ),
            PatchReason::PrepareDelete => ("PreparingDelete", format!("pod {name} waits for hook preDelete")),
            PatchReason::CancelDeletion => (
                "DeletionCancelled",
                format!("cancelled the deletion of pod {name}"),
            ),
            PatchReason::ContinueUpdate => return Err("continued the in-place update of pod"),
            PatchReason::SyncLifecycle => return Err("updated the state of pod"),
        },
        Action::CreateJob(job) => (
            "CreatedImagePullJob",
            format!("created ImagePullJob {name} for image: {}", job.spec.image),
        ),
        Action::PatchClaim(_) => return Err("updated PVC"),
        Action::DeleteClaim { .. } => return Err("deleted PVC"),
        Action::DeleteJob(_) => return Err("deleted ImagePullJob"),
        Action::LabelRevision { .. } => return Err("labelled ControllerRevision"),
        Action::PatchCloneSet(_) => return Err("updated"),
    })
}

/// Reason and text of the event about a failed action.
fn failure_event(action: &Action, error: &Error) -> (&'static str, String) {
    let about_claim = error.is_about("PersistentVolumeClaim", "persistentvolumeclaims");
    let (name, error) = (object_name(action), error.message());
    match action {
        // OpenKruise adds the object as JSON; its name alone would make each attempt a different event.
        Action::CreatePod { .. } if about_claim => ("FailedCreate", format!("failed to create pvc: {error}")),
        Action::CreatePod { .. } => ("FailedCreate", format!("failed to create pod: {error}")),
        Action::DeletePod { .. } if about_claim => ("FailedDelete", format!("failed to delete pvc: {error}")),
        Action::DeletePod { .. } => ("FailedDelete", format!("failed to delete pod {name}: {error}")),
        Action::DeleteClaim { .. } => ("FailedDelete", format!("failed to clean up PVC {name}: {error}")),
        Action::PatchClaim(_) => ("FailedUpdate", format!("failed to update PVC {name}: {error}")),
        Action::PatchPod { reason, .. } => match reason {
            PatchReason::UpdateInPlace | PatchReason::ContinueUpdate => (
                "FailedUpdatePodInPlace",
                format!(
                    "failed to update pod {name} in-place{}: {error}",
                    revision_suffix(action)
                ),
            ),
            PatchReason::UpdateReCreate => (
                "FailedUpdatePodReCreate",
                format!(
                    "failed to patch pod specified-delete {name} for update{}: {error}",
                    revision_suffix(action)
                ),
            ),
            PatchReason::Adopt | PatchReason::Release | PatchReason::CancelDeletion => {
                ("FailedScale", format!("pod {name}: {error}"))
            }
            PatchReason::PrepareDelete => ("FailedDelete", format!("pod {name}: {error}")),
            PatchReason::PrepareUpdate | PatchReason::SyncLifecycle => {
                ("FailedUpdate", format!("pod {name}: {error}"))
            }
        },
        Action::CreateJob(_) => (
            FAILED_JOB_REASON,
            format!("failed to create ImagePullJob {name}: {error}"),
        ),
        Action::DeleteJob(_) | Action::LabelRevision { .. } => {
            ("FailedPreDownload", format!("{name}: {error}"))
        }
        Action::PatchCloneSet(_) => ("FailedScale", format!("{name}: {error}")),
    }
}

/// The target revision of an action, as in OpenKruise's events.
fn revision_suffix(action: &Action) -> String {
    match action {
        Action::PatchPod {
            revision: Some(revision),
            ..
        } => format!("(revision {revision})"),
        _ => String::new(),
    }
}

/// The name of an action's object.
fn object_name(action: &Action) -> &str {
    match action {
        Action::CreatePod { name, .. }
        | Action::DeletePod { name, .. }
        | Action::PatchPod { name, .. }
        | Action::PatchClaim(ClaimPatch { name, .. })
        | Action::DeleteClaim { name, .. }
        | Action::LabelRevision { name, .. }
        | Action::DeleteJob(ImagePullJobRef { name, .. }) => name,
        Action::CreateJob(job) => job.metadata.name.as_deref().unwrap_or_default(),
        Action::PatchCloneSet(_) => "the CloneSet",
    }
}

/// The only failure that OpenKruise publishes as `Normal`.
const FAILED_JOB_REASON: &str = "FailedCreateImagePullJob";

/// Kind of the action, as a metric label.
fn action_label(action: &Action) -> &'static str {
    match action {
        Action::CreatePod { .. } => "create_pod",
        Action::DeletePod { .. } => "delete_pod",
        Action::PatchPod { reason, .. } => match reason {
            PatchReason::UpdateInPlace | PatchReason::ContinueUpdate => "update_in_place",
            PatchReason::UpdateReCreate => "replace_pod",
            PatchReason::Adopt | PatchReason::Release => "own_pod",
            PatchReason::PrepareUpdate
            | PatchReason::PrepareDelete
            | PatchReason::CancelDeletion
            | PatchReason::SyncLifecycle => "pod_state",
        },
        Action::PatchClaim(_) | Action::DeleteClaim { .. } => "claim",
        Action::CreateJob(_) | Action::DeleteJob(_) => "image_pull_job",
        Action::LabelRevision { .. } => "revision",
        Action::PatchCloneSet(_) => "cloneset",
    }
}

fn count_action(action: &Action, result: &'static str) {
    let labels = [
        ("act", action_label(action).to_owned()),
        ("result", result.to_owned()),
    ];
    metrics().cloneset_acts.get_or_create(&labels).inc();
}

impl ActionEvents {
    /// Records a successful action.
    pub fn record_success(&mut self, set: &Key, action: &Action) {
        count_action(action, "ok");
        match success_event(action) {
            Ok((reason, message)) => self.succeeded.push(CloneSetEvent {
                warning: false,
                reason,
                message,
                wait_since: None,
            }),
            Err(what) => tracing::info!(%set, "{what} {}", object_name(action)),
        }
    }

    /// Records a failed action.
    pub fn record_failure(&mut self, action: &Action, error: &Error) {
        count_action(action, error.category());
        self.failed.insert(failure_event(action, error));
    }

    pub fn has_failures(&self) -> bool {
        !self.failed.is_empty()
    }

    fn into_events(self) -> Vec<CloneSetEvent> {
        let failed = self.failed.into_iter().map(|(reason, message)| CloneSetEvent {
            warning: reason != FAILED_JOB_REASON,
            reason,
            message,
            wait_since: None,
        });
        self.succeeded.into_iter().chain(failed).collect()
    }
}

/// Event reason: the template has fields that the API server does not know.
const UNKNOWN_FIELD: &str = "UnknownField";

/// Publishes the events of actions, and the planned events that were not published before.
pub fn publish_events(
    ctx: &CloneSetContext<'_>,
    action_events: ActionEvents,
    planned: Vec<CloneSetEvent>,
    state: &mut ReconcileState,
) {
    let events = &ctx.manager.cluster.events;
    for event in action_events
        .into_events()
        .into_iter()
        .chain(state.new_events(planned))
    {
        let (reason, message) = (event.reason, &event.message);
        match event.warning {
            true => tracing::warn!(set = %ctx.name, reason, "{message}"),
            false => tracing::info!(set = %ctx.name, reason, "{message}"),
        }
        let type_ = if event.warning {
            EventType::Warning
        } else {
            EventType::Normal
        };
        events.publish(reference(ctx), type_, reason, "Reconcile", event.message);
    }
}

/// Maximum number of fields in an event, and bytes of each.
const MAX_FIELDS: usize = 8;
const MAX_FIELD_BYTES: usize = 100;

/// Publishes fields that Pods lack because the API server does not know them: the webhook would have warned.
pub fn report_unknown_fields(ctx: &CloneSetContext<'_>, fields: &[String]) {
    if fields.is_empty() {
        return;
    }
    let fields: Vec<_> = fields
        .iter()
        .take(MAX_FIELDS)
        .map(|field| truncate(field, MAX_FIELD_BYTES))
        .collect();
    let message = format!(
        "unknown fields are left out; look for a misspelling: {}",
        fields.join(", ")
    );
    tracing::warn!(set = %ctx.name, reason = UNKNOWN_FIELD, "{message}");
    ctx.manager.cluster.events.publish(
        reference(ctx),
        EventType::Warning,
        UNKNOWN_FIELD,
        "Reconcile",
        message,
    );
}

fn reference(ctx: &CloneSetContext<'_>) -> ObjectReference {
    object_reference("apps.kruise.io/v1beta1", "CloneSet", ctx.name, &ctx.owner.uid)
}

/// Fields of the status that may be absent.
const OPTIONAL_STATUS_FIELDS: [&str; 8] = [
    "observedGeneration",
    "updatedAvailableReplicas",
    "expectedUpdatedReplicas",
    "updateRevision",
    "currentRevision",
    "collisionCount",
    "conditions",
    "labelSelector",
];

/// Writes the status if it changed and the write is due; returns how long to wait if it is not.
///
/// # Errors
/// If the write failed.
pub async fn update_status(
    ctx: &CloneSetContext<'_>,
    status: Option<CloneSetStatus>,
    settled: bool,
    state: &mut ReconcileState,
) -> Result<Option<Duration>, Error> {
    let Some(status) = status else {
        state.status_pacer.unchanged();
        return Ok(None);
    };
    let now = Instant::now();
    let message_only = only_message_changed(ctx.set, &status);
    let at_once = settled && is_complete(ctx.set, &status);
    if let Some(delay) = state.status_pacer.begin_write(now, message_only, at_once) {
        return Ok(Some(delay));
    }
    let patch = write::status_patch(&ctx.owner.uid, &status, OPTIONAL_STATUS_FIELDS);
    match write::patch_status_merge::<CloneSet>(&ctx.api(), &ctx.name.name, &patch).await {
        Ok(stored) => ctx.cache_clone_set(stored.object()?),
        // It is deleted, or another one has its name: the watch will show that.
        Err(error) if error.not_found() || error.conflict() => {}
        Err(error) => return Err(error),
    }
    Ok(None)
}

/// Whether only a message changed: a container that keeps crashing has another state each time.
fn only_message_changed(set: &CloneSet, status: &CloneSetStatus) -> bool {
    let without_message = |status: &CloneSetStatus| {
        let mut status = status.clone();
        let waiting = status.conditions.iter_mut().filter(|c| c.type_ == WAITING);
        waiting.for_each(|condition| condition.message.clear());
        status
    };
    set.status.as_ref().map(without_message) == Some(without_message(status))
}

/// Whether the CloneSet is complete, which is reported at once.
fn is_complete(set: &CloneSet, status: &CloneSetStatus) -> bool {
    let desired = set.spec.desired_replicas();
    let all = [status.replicas, status.available_replicas];
    let updated = status.expected_updated_replicas.unwrap_or(desired);
    all.iter().all(|count| *count == desired) && status.updated_replicas >= updated
}

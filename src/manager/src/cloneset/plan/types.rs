//! Input and output of the plan.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::Value;

use kruise_api::cloneset::{CloneSet, CloneSetStatus};
use kruise_api::image_pull_job::ImagePullJob;
use kruise_workload::claim::Claim;
use kruise_workload::in_place::normalize::TemplateStorage;
use kruise_workload::in_place::{self, Pod, PodWrite};

/// All observed state of one CloneSet.
#[derive(Clone, Debug)]
pub struct Observed {
    /// The CloneSet with its status. It is not terminating.
    pub set: Arc<CloneSet>,
    /// The Pods that it controls, whatever their state, and orphans in its namespace that its selector matches.
    pub pods: Vec<Arc<Pod>>,
    /// The claims that the CloneSet owns.
    pub claims: Vec<Claim>,
    /// The claims that its Pods own, by the Pod's UID, without terminating ones.
    pub claims_owned_by_pod: BTreeMap<String, Vec<Claim>>,
    /// Maximum memory of a Pod of the CloneSet with its claims, in bytes; a patch takes no more.
    pub max_pod_memory: usize,
    /// Its revisions, the oldest first. Those named below are included, unless there are none at all.
    pub revisions: Vec<Arc<ParsedRevision>>,
    /// Names of other revisions of Pods that take too much memory to be parsed.
    pub unread_revisions: Vec<String>,
    /// Name of the revision that Pods had before the update.
    pub current_revision: String,
    /// Name of the revision of the template, or of the last accepted template; empty if there is none.
    pub update_revision: String,
    /// Whether the update revision corresponds to the template.
    pub template_status: TemplateStatus,
    /// Number of name collisions of new revisions so far.
    pub collision_count: Option<i32>,
    /// The ImagePullJobs that it controls, without terminating ones.
    pub jobs: Vec<ImagePullJobRef>,
    /// Labels of the nodes of its Pods, by node; only needed with topology spread constraints.
    pub nodes: BTreeMap<String, BTreeMap<String, String>>,
    /// Recent failures, each of which must not be retried before its time.
    pub failures: BTreeMap<FailureSubject, ActionFailure>,
    /// Creations that failed actions left unfinished.
    pub unfinished: UnfinishedCreations,
    /// Upstream's feature gates and flags.
    pub features: Features,
    /// Random seed for names of new Pods.
    pub rng_seed: u64,
}

/// Whether the CloneSet's template has a revision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TemplateStatus {
    /// The update revision corresponds to it.
    #[default]
    Accepted,
    /// Not known yet, and not reported. No Pod is updated, as with `Rejected`.
    Unknown,
    /// It has no revision, for this reason. The Pods are still reconciled with the existing revisions; none is updated.
    Rejected(String),
}

/// An ImagePullJob of the CloneSet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImagePullJobRef {
    /// Name of the ImagePullJob.
    pub name: String,
    /// UID of the ImagePullJob.
    pub uid: String,
}

/// A change of a claim's owners.
#[derive(Clone, Debug, PartialEq)]
pub struct ClaimPatch {
    /// Name of the claim.
    pub name: String,
    /// UID of the claim.
    pub uid: String,
    /// Strategic merge patch. Owners merge by UID, so other owners are kept.
    pub patch: Value,
}

/// A claim that an orphaned Pod would have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OrphanClaim {
    /// Name of the claim.
    pub name: String,
    /// The ID that it must share with the Pod.
    pub instance_id: String,
}

/// A revision of the CloneSet's template.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParsedRevision {
    /// Name of the ControllerRevision.
    pub name: String,
    /// Its raw data, `{"spec":{"template":…}}`.
    pub data: Value,
    /// Hash of the claim templates; `None` if it is not recorded.
    pub claim_hash: Option<String>,
    /// Whether its images are already pre-pulled, or need not be.
    pub pre_downloaded: bool,
}

/// What a failure concerns.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FailureSubject {
    /// Creation of Pods.
    PodCreation,
    /// In-place updates of any Pod, after several were refused alike.
    InPlaceUpdates,
    /// Pending sizes of Pods that have their revision, but whose resize was refused.
    PendingResizes,
    /// The Pod of this UID.
    Pod(String),
    /// The claim of this name.
    Claim(String),
    /// The ImagePullJob of this name.
    Job(String),
    /// The revision of this name.
    Revision(String),
    /// The CloneSet itself.
    CloneSet,
}

/// A failure that delays only what it concerns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActionFailure {
    /// The purpose that it blocks.
    pub purpose: ActionPurpose,
    /// Earliest time of a retry.
    pub retry_at: Timestamp,
    /// Whether a retry would fail again until a user changes something.
    pub permanent: bool,
    /// Whether the API server refused to resize the Pod.
    pub resize_rejected: bool,
    /// Whether the API server answered at all.
    pub answered: bool,
    /// Message of the API server.
    pub message: String,
}

/// Purpose of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActionPurpose {
    /// The number of Pods, and the objects that belong to them.
    Scale,
    /// The content of Pods and their states.
    Update,
    /// Pre-pulled images, which nothing waits for.
    PreDownload,
}

/// Outcome of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActionOutcome {
    /// It is done, or can never be: another owner has its name.
    Settled,
    /// A claim of another owner has the name of one of the Pod's.
    ClaimNameTaken,
    /// It was not done.
    Failed,
    /// No answer; until this time it may still turn out to be done.
    Unknown(Timestamp),
}

/// Creations that failed actions left unfinished.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnfinishedCreations {
    /// Names of Pods whose creation was attempted. The time is until when one may still appear, if it is not known that
    /// it was refused. Their claims may exist and are empty.
    pub pods: BTreeMap<String, Option<Timestamp>>,
    /// Names of Pods that cannot have all their claims, because others have the names of some. They are not tried again
    /// for this generation, even if there are unused claims for them.
    pub without_claims: BTreeSet<String>,
}

impl UnfinishedCreations {
    /// Records the outcome of an action.
    pub fn record(&mut self, action: &Action, outcome: ActionOutcome) {
        let Action::CreatePod { name, .. } = action else {
            return;
        };
        self.pods.remove(name);
        match outcome {
            ActionOutcome::Settled => {}
            ActionOutcome::ClaimNameTaken => self.without_claims.extend([name.clone()]),
            ActionOutcome::Failed => self.pods.extend([(name.clone(), None)]),
            ActionOutcome::Unknown(until) => self.pods.extend([(name.clone(), Some(until))]),
        }
    }

    /// Removes the Pods that exist now.
    pub fn forget_existing(&mut self, pods: &[Arc<Pod>]) {
        for pod in pods {
            self.pods.remove(&pod.name);
        }
    }
}

/// Upstream's feature gates and flags that the plan uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// CloneSetShortHash: label `controller-revision-hash` holds only the short hash. Off.
    pub short_hash: bool,
    /// CloneSetPartitionRollback: a higher `partition` rolls Pods back.
    pub partition_rollback: bool,
    /// PreparingUpdateAsUpdate: a Pod that is prepared for its update counts as updated when scaling. Off.
    pub preparing_update_as_update: bool,
    /// RecreatePodWhenChangeVCTInCloneSetGate: changed claim templates require new Pods. Off.
    pub recreate_for_claims: bool,
    /// InPlaceUpdateEnvFromMetadata: environment from labels and annotations is updated in place. On.
    pub env_from_metadata: bool,
    /// InPlaceWorkloadVerticalScaling: CPU and memory are resized in place.
    pub vertical: bool,
    /// PreDownloadImageForInPlaceUpdate: new images are pre-pulled.
    pub pre_download: bool,
    /// TemplateNoDefaults: templates are stored as requested. Off.
    pub template_storage: TemplateStorage,
    /// Flag `--cloneset-scaling-exclude-preparing-delete`. Off.
    pub exclude_preparing_delete: bool,
}

impl Features {
    /// What in-place updates may do, without a grace period.
    #[must_use]
    pub fn in_place_options(&self) -> in_place::Options {
        in_place::Options {
            env_from_metadata: self.env_from_metadata,
            vertical: self.vertical,
            recreate_for_claims: self.recreate_for_claims,
            grace_seconds: 0,
            template_storage: self.template_storage,
        }
    }
}

impl Default for Features {
    fn default() -> Self {
        Self {
            short_hash: false,
            partition_rollback: true,
            preparing_update_as_update: false,
            recreate_for_claims: false,
            env_from_metadata: true,
            vertical: true,
            pre_download: true,
            template_storage: TemplateStorage::WithDefaults,
            exclude_preparing_delete: false,
        }
    }
}

/// What to do for a CloneSet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Actions, in any order unless an action says otherwise; a failed one stops no other.
    pub actions: Vec<Action>,
    /// The whole status, if it differs from the observed one.
    pub status: Option<CloneSetStatus>,
    /// Events in addition to those of the actions.
    pub events: Vec<CloneSetEvent>,
    /// When to requeue even if nothing changed.
    pub requeue_at: Option<Timestamp>,
}

/// One action of a plan.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Create a Pod, and its missing claims first. An existing claim is no failure. The first failure ends all
    /// creations of this reconcile; the next reconciles create batches of 1, 2, 4 and so on.
    CreatePod {
        /// Name of the Pod.
        name: String,
        /// The Pod as JSON.
        pod: Value,
        /// Claims that do not exist yet.
        claims: Vec<Value>,
    },
    /// Transfer its claims to a Pod, so that they are deleted with it, then delete it. The first failed write ends the
    /// action.
    DeletePod {
        /// UID of the Pod.
        uid: String,
        /// Name of the Pod.
        name: String,
        /// The version that it must have, if a hook could be added meanwhile.
        version: Option<String>,
        /// Patches that transfer the claims to the Pod.
        claims: Vec<ClaimPatch>,
    },
    /// Patch a Pod with successive writes. The first failed write ends the action, or is replaced by its fallback.
    PatchPod {
        /// UID of the Pod.
        uid: String,
        /// Name of the Pod.
        name: String,
        /// Reason of the patch.
        reason: PatchReason,
        /// Name of the target ControllerRevision, for an update.
        revision: Option<String>,
        /// Requests, in order.
        writes: Vec<PodWrite>,
        /// Claims of an adopted Pod; those that are orphans are adopted first.
        claims: Vec<OrphanClaim>,
    },
    /// Patch the owners of a claim.
    PatchClaim(ClaimPatch),
    /// Delete a claim.
    DeleteClaim {
        /// Name of the claim.
        name: String,
        /// UID of the claim.
        uid: String,
    },
    /// Create an ImagePullJob. An existing one is no failure.
    CreateJob(Box<ImagePullJob>),
    /// Delete an ImagePullJob.
    DeleteJob(ImagePullJobRef),
    /// Set a label of a ControllerRevision to `true`.
    LabelRevision {
        /// Name of the ControllerRevision.
        name: String,
        /// Key of the label.
        label: &'static str,
    },
    /// Patch the CloneSet (merge patch, bound to the version observed).
    PatchCloneSet(Value),
}

/// Why a Pod is patched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatchReason {
    /// The CloneSet adopts it.
    Adopt,
    /// The CloneSet releases it.
    Release,
    /// Its in-place update begins.
    UpdateInPlace,
    /// It is marked for deletion, because it cannot be updated in place.
    UpdateReCreate,
    /// Its in-place update continues.
    ContinueUpdate,
    /// Its hook must act before its update.
    PrepareUpdate,
    /// Its hook must act before its deletion.
    PrepareDelete,
    /// Its deletion is no longer needed.
    CancelDeletion,
    /// Its state or its gates changed.
    SyncLifecycle,
}

/// An event of the CloneSet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloneSetEvent {
    /// Whether its type is `Warning`.
    pub warning: bool,
    /// Reason in CamelCase.
    pub reason: &'static str,
    /// Message for people.
    pub message: String,
    /// Start of the wait that it reports. It is published once for each wait, whatever the message becomes.
    pub wait_since: Option<Timestamp>,
}

impl Action {
    /// What a failure of this action blocks.
    #[must_use]
    pub fn purpose(&self) -> ActionPurpose {
        match self {
            Self::CreatePod { .. }
            | Self::DeletePod { .. }
            | Self::PatchClaim(_)
            | Self::DeleteClaim { .. }
            | Self::PatchCloneSet(_) => ActionPurpose::Scale,
            Self::PatchPod { reason, .. } => match reason {
                PatchReason::PrepareDelete
                | PatchReason::CancelDeletion
                | PatchReason::Adopt
                | PatchReason::Release => ActionPurpose::Scale,
                PatchReason::UpdateInPlace
                | PatchReason::UpdateReCreate
                | PatchReason::ContinueUpdate
                | PatchReason::PrepareUpdate
                | PatchReason::SyncLifecycle => ActionPurpose::Update,
            },
            Self::CreateJob(_) | Self::DeleteJob(_) | Self::LabelRevision { .. } => {
                ActionPurpose::PreDownload
            }
        }
    }

    /// What a failure of this action is recorded for.
    #[must_use]
    pub fn subject(&self) -> FailureSubject {
        match self {
            Self::CreatePod { .. } => FailureSubject::PodCreation,
            Self::DeletePod { uid, .. } | Self::PatchPod { uid, .. } => FailureSubject::Pod(uid.clone()),
            Self::PatchClaim(ClaimPatch { name, .. }) | Self::DeleteClaim { name, .. } => {
                FailureSubject::Claim(name.clone())
            }
            Self::CreateJob(job) => FailureSubject::Job(job.metadata.name.clone().unwrap_or_default()),
            Self::DeleteJob(job) => FailureSubject::Job(job.name.clone()),
            Self::LabelRevision { name, .. } => FailureSubject::Revision(name.clone()),
            Self::PatchCloneSet(_) => FailureSubject::CloneSet,
        }
    }
}

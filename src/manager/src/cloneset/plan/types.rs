//! What the plan is given, and what it says.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::Value;

use kruise_api::cloneset::{CloneSet, CloneSetStatus};
use kruise_api::image_pull_job::ImagePullJob;
use kruise_workload::claim::Claim;
use kruise_workload::in_place::normalize::TemplateStorage;
use kruise_workload::in_place::{Pod, PodWrite};

/// All that is known about one CloneSet.
#[derive(Clone, Debug)]
pub struct Observed {
    /// The CloneSet, with its status. It is not being deleted.
    pub set: Arc<CloneSet>,
    /// The Pods that it controls, whatever their state, and Pods of its namespace without a controller whose
    /// labels its selector matches.
    pub pods: Vec<Arc<Pod>>,
    /// The claims that it owns.
    pub claims: Vec<Claim>,
    /// The claims that its Pods own, by the Pod's UID, without those that are being deleted.
    pub claims_owned_by_pod: BTreeMap<String, Vec<Claim>>,
    /// The most memory that a Pod of the CloneSet takes with its claims, in bytes; a patch takes no more.
    pub max_pod_memory: usize,
    /// Its revisions, the oldest first. Those named below are among them, unless there are none at all.
    pub revisions: Vec<Arc<ParsedRevision>>,
    /// Names of other revisions that Pods have, and that take too much memory to be read.
    pub unread_revisions: Vec<String>,
    /// Name of the revision that Pods had before the update.
    pub current_revision: String,
    /// Name of the revision that the template stands for, or did last; empty when there is none.
    pub update_revision: String,
    /// Whether it does.
    pub template_status: TemplateStatus,
    /// How often the name of a new revision was taken already.
    pub collision_count: Option<i32>,
    /// The ImagePullJobs that it controls, without those that are being deleted.
    pub jobs: Vec<ImagePullJobRef>,
    /// Labels of the nodes that its Pods are on; needed with topology spread constraints only.
    pub nodes: BTreeMap<String, BTreeMap<String, String>>,
    /// What failed lately, and is not to be tried again before a time.
    pub failures: BTreeMap<FailureSubject, ActionFailure>,
    /// What acts that failed left to be done.
    pub unfinished: UnfinishedCreations,
    /// Features.
    pub features: Features,
    /// Chance, for names of new Pods.
    pub rng_seed: u64,
}

/// What became of the CloneSet's template.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TemplateStatus {
    /// The update revision stands for it.
    #[default]
    Accepted,
    /// It is not known yet whether there can be a revision for it, which is no news so far. As with the next.
    Unknown,
    /// There is no revision for it, for this reason. The Pods are looked after all the same, with the revisions that
    /// there are; none is updated.
    Rejected(String),
}

/// An ImagePullJob of the CloneSet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImagePullJobRef {
    /// Its name.
    pub name: String,
    /// Identity of the object.
    pub uid: String,
}

/// Another owner for a claim.
#[derive(Clone, Debug, PartialEq)]
pub struct ClaimPatch {
    /// Name of the claim.
    pub name: String,
    /// Which.
    pub uid: String,
    /// Strategic merge patch, in which owners merge by UID: those of others stay.
    pub patch: Value,
}

/// A claim that a Pod without a controller would have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OrphanClaim {
    /// Name of the claim.
    pub name: String,
    /// The id that it must share with the Pod.
    pub instance_id: String,
}

/// A revision of the CloneSet's template.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParsedRevision {
    /// Name of the ControllerRevision.
    pub name: String,
    /// Its raw data, `{"spec":{"template":…}}`.
    pub data: Value,
    /// Hash of the claim templates; `None` when it does not say.
    pub claim_hash: Option<String>,
    /// Whether its images are pulled ahead already, or need not be.
    pub pre_downloaded: bool,
}

/// Whom a failure concerns.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FailureSubject {
    /// Making Pods.
    PodCreation,
    /// Updates in place of any Pod, where several were refused alike.
    InPlaceUpdates,
    /// Sizes that Pods of their revision are yet to get, for a resize was refused.
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

/// A failure that delays what it concerns, and nothing else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActionFailure {
    /// What it is in the way of.
    pub purpose: ActionPurpose,
    /// When it may be tried again.
    pub retry_at: Timestamp,
    /// Whether the same would fail again until somebody changes something.
    pub permanent: bool,
    /// Whether the API server refused to resize the Pod.
    pub resize_rejected: bool,
    /// Whether the API server answered at all.
    pub answered: bool,
    /// What the API server said.
    pub message: String,
}

/// What an act is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActionPurpose {
    /// How many Pods there are, and what belongs to them.
    Scale,
    /// What the Pods are, and their states.
    Update,
    /// Images that are pulled ahead, which nothing waits for.
    PreDownload,
}

/// What an act came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActionOutcome {
    /// It is done, or nothing like it ever will be: its name is somebody else's.
    Settled,
    /// It was not done.
    Failed,
    /// There was no answer, so that it may turn out to be done until then.
    Unknown(Timestamp),
}

/// What acts that failed left to be done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnfinishedCreations {
    /// Names of Pods that were to be made, and until when they may turn up where it is not known that they were refused.
    /// Their claims may be there, and hold nothing yet.
    pub pods: BTreeMap<String, Option<Timestamp>>,
}

impl UnfinishedCreations {
    /// Takes note of what an act came to.
    pub fn record(&mut self, action: &Action, outcome: ActionOutcome) {
        let Action::CreatePod { name, .. } = action else {
            return;
        };
        self.pods.remove(name);
        match outcome {
            ActionOutcome::Settled => {}
            ActionOutcome::Failed => self.pods.extend([(name.clone(), None)]),
            ActionOutcome::Unknown(until) => self.pods.extend([(name.clone(), Some(until))]),
        }
    }

    /// Forgets the Pods that are there now.
    pub fn forget_existing(&mut self, pods: &[Arc<Pod>]) {
        for pod in pods {
            self.pods.remove(&pod.name);
        }
    }
}

/// Upstream's feature gates and flags, as far as the plan heeds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// CloneSetShortHash: label `controller-revision-hash` holds the short hash alone. Off.
    pub short_hash: bool,
    /// CloneSetPartitionRollback: raising `partition` takes Pods back.
    pub partition_rollback: bool,
    /// PreparingUpdateAsUpdate: a Pod that is prepared for its update counts as updated when scaling. Off.
    pub preparing_update_as_update: bool,
    /// RecreatePodWhenChangeVCTInCloneSetGate: changed claim templates ask for new Pods. Off.
    pub recreate_for_claims: bool,
    /// InPlaceUpdateEnvFromMetadata: environment from labels and annotations is updated in place. On.
    pub env_from_metadata: bool,
    /// InPlaceWorkloadVerticalScaling: CPU and memory are resized in place.
    pub vertical: bool,
    /// PreDownloadImageForInPlaceUpdate: new images are pulled ahead.
    pub pre_download: bool,
    /// TemplateNoDefaults: templates are stored as they were asked for. Off.
    pub template_storage: TemplateStorage,
    /// Flag `--cloneset-scaling-exclude-preparing-delete`. Off.
    pub exclude_preparing_delete: bool,
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

/// What to do about a CloneSet.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// What to do, in any order unless an act says otherwise; the failure of one stops no other.
    pub actions: Vec<Action>,
    /// The whole status, if it differs from the one observed.
    pub status: Option<CloneSetStatus>,
    /// What to tell besides what the acts say of themselves.
    pub events: Vec<CloneSetEvent>,
    /// When to look again though nothing changed.
    pub requeue_at: Option<Timestamp>,
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Make a Pod; its claims first, where they do not exist. A claim that exists is no failure. The first failure ends
    /// such acts, and those of the passes that follow begin in batches of 1, 2, 4 and so on.
    CreatePod {
        /// Its name.
        name: String,
        /// The Pod.
        pod: Value,
        /// The claims that are missing.
        claims: Vec<Value>,
    },
    /// Give its claims to a Pod, so that they go with it, then delete it. The first write that fails ends the act.
    DeletePod {
        /// Which.
        uid: String,
        /// Its name.
        name: String,
        /// The version that it must have, where a hook could come onto it meanwhile.
        version: Option<String>,
        /// What makes those of its claims its own that are not yet.
        claims: Vec<ClaimPatch>,
    },
    /// Patch a Pod, one write after the other; the first that fails ends the act, or gives way to its fallback.
    PatchPod {
        /// Which.
        uid: String,
        /// Its name.
        name: String,
        /// What for.
        reason: PatchReason,
        /// Name of the ControllerRevision that it is to have, where it is updated.
        revision: Option<String>,
        /// The writes.
        writes: Vec<PodWrite>,
        /// Claims that become the CloneSet's before, where they are nobody's: those of a Pod that is adopted.
        claims: Vec<OrphanClaim>,
    },
    /// Patch the owners of a claim.
    PatchClaim(ClaimPatch),
    /// Delete a claim.
    DeleteClaim {
        /// Its name.
        name: String,
        /// Which.
        uid: String,
    },
    /// Make an ImagePullJob. One that exists is no failure.
    CreateJob(Box<ImagePullJob>),
    /// Delete an ImagePullJob.
    DeleteJob(ImagePullJobRef),
    /// Set a label of a ControllerRevision to `true`.
    LabelRevision {
        /// Its name.
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
    /// It became ours.
    Adopt,
    /// It is not ours any more.
    Release,
    /// It is updated in place.
    UpdateInPlace,
    /// It is marked for deletion, for it cannot be updated in place.
    UpdateReCreate,
    /// An update in place goes on.
    ContinueUpdate,
    /// Its hook is to act before its update.
    PrepareUpdate,
    /// Its hook is to act before its deletion.
    PrepareDelete,
    /// It need not be deleted any more.
    CancelDeletion,
    /// Its state or its gates changed.
    SyncLifecycle,
}

/// An event of the CloneSet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloneSetEvent {
    /// Whether it is a warning.
    pub warning: bool,
    /// The reason, in a word.
    pub reason: &'static str,
    /// The message.
    pub message: String,
    /// Of a wait, since when it lasts: that is told once, whatever the message becomes.
    pub wait_since: Option<Timestamp>,
}

impl Action {
    /// What a failure of this act is in the way of.
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

    /// Whom a failure of this act is to be kept for.
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

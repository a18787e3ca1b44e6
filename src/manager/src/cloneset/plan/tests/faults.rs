//! Results of actions: done, refused, half done, or done without a response.

use jiff::ToSpan;
use serde_json::{Value, json};

use super::fake_cluster::{BACKUP, FakeCluster, apply_writes, has_owner, owner_reference};
use crate::cloneset::plan::{
    Action, ActionFailure, ActionOutcome, ActionPurpose, ClaimPatch, FailureSubject, ImagePullJobRef,
    OrphanClaim, UnfinishedCreations,
};
use kruise_api::keys;
use kruise_workload::in_place::{PatchTarget, Pod, PodWrite};
use kruise_workload::testing::apply;

/// How an action fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is refused. Claims of a Pod are created before that.
    Refused,
    /// The first write is done, the next one is refused.
    FirstWriteOnly,
    /// The last write is refused after the others were done.
    LastWriteRefused,
    /// A quota has no room for other sizes of Pods; earlier writes and the fallback are done.
    ResizeQuotaExceeded,
    /// The same, because Pods cannot be resized at all.
    ResizeUnsupported,
    /// It is done, but the response is lost, and the watch lags for a new Pod.
    ResponseLost,
}

fn is_resize(write: &PodWrite) -> bool {
    write.target == PatchTarget::Resize
}

impl Fault {
    /// How many of these writes are done before one is refused.
    fn applied_writes(self, writes: &[PodWrite]) -> usize {
        match self {
            Self::FirstWriteOnly => 1,
            Self::LastWriteRefused => writes.len() - 1,
            Self::ResizeQuotaExceeded | Self::ResizeUnsupported => writes.iter().position(is_resize).unwrap(),
            Self::Refused | Self::ResponseLost => 0,
        }
    }

    /// Whether only resizes fail.
    fn is_resize_only(self) -> bool {
        matches!(self, Self::ResizeQuotaExceeded | Self::ResizeUnsupported)
    }

    /// The fallback that is written instead.
    fn fallback(self, writes: &[PodWrite]) -> Option<PodWrite> {
        let fallback = writes.iter().find_map(|write| write.fallback.as_deref())?;
        match self {
            Self::ResizeQuotaExceeded => fallback.quota.clone(),
            Self::ResizeUnsupported => fallback.refused.clone(),
            _ => None,
        }
    }
}

impl FakeCluster {
    /// Tries an action and records its outcome.
    pub fn try_action(&mut self, action: &Action) {
        let resizes = matches!(action, Action::PatchPod { writes, .. } if writes.iter().any(is_resize));
        let fault = (self.failures_left > 0).then_some(self.fault);
        let fault = fault.filter(|fault| !fault.is_resize_only() || resizes);
        self.failures_left = self.failures_left.saturating_sub(1);
        let confirmed_at = self.now.checked_add(30.seconds()).unwrap();
        let (failed, outcome) = match (fault, action) {
            (None, _) => match self.execute(action) {
                true => (None, ActionOutcome::Settled),
                // A foreign Pod or claim has the name.
                false if self.has_foreign_claim(action) => {
                    (Some(action.clone()), ActionOutcome::ClaimNameTaken)
                }
                false => (Some(action.clone()), ActionOutcome::Settled),
            },
            (Some(Fault::ResponseLost), _) => {
                if let Action::CreatePod { name, .. } = action
                    && self.execute(action)
                {
                    self.not_yet_watched.insert(name.clone());
                }
                if !matches!(action, Action::CreatePod { .. }) {
                    self.execute(action);
                }
                (Some(action.clone()), ActionOutcome::Unknown(confirmed_at))
            }
            (Some(Fault::FirstWriteOnly), Action::DeletePod { claims, .. }) => {
                self.patch_claims(claims);
                (Some(action.clone()), ActionOutcome::Failed)
            }
            (
                Some(fault),
                Action::PatchPod {
                    name, writes, claims, ..
                },
            ) => {
                self.adopt_claims(claims);
                let mut writes_done = writes[..fault.applied_writes(writes)].to_vec();
                let fallback = fault.fallback(writes);
                let failed = fallback.is_none().then(|| action.clone());
                writes_done.extend(fallback);
                apply_writes(self.pods.get_mut(name).unwrap(), &writes_done);
                if fault.is_resize_only() && failed.is_none() {
                    self.failures.insert(
                        FailureSubject::PendingResizes,
                        self.new_failure(ActionPurpose::Update),
                    );
                }
                (failed, ActionOutcome::Failed)
            }
            (Some(_), Action::CreatePod { claims, .. }) => {
                self.create_claims(claims);
                (Some(action.clone()), ActionOutcome::Failed)
            }
            (Some(_), _) => (Some(action.clone()), ActionOutcome::Failed),
        };
        match failed {
            Some(action) => self.record_failure(&action, outcome),
            None => self.unfinished.record(action, outcome),
        }
    }

    fn record_failure(&mut self, action: &Action, outcome: ActionOutcome) {
        self.unfinished.record(action, outcome);
        self.failures
            .insert(action.subject(), self.new_failure(action.purpose()));
    }

    fn new_failure(&self, purpose: ActionPurpose) -> ActionFailure {
        ActionFailure {
            purpose,
            permanent: false,
            resize_rejected: false,
            answered: true,
            retry_at: self.now.checked_add(5.seconds()).unwrap(),
            message: "refused".to_owned(),
        }
    }

    /// Changes the owners of claims.
    fn patch_claims(&mut self, claims: &[ClaimPatch]) {
        for ClaimPatch { name, uid, patch } in claims {
            assert_eq!(patch["metadata"]["uid"], json!(uid));
            let claim = self.claims.get_mut(name).unwrap();
            apply(claim, patch);
            let owners = claim["metadata"]["ownerReferences"].as_array().unwrap();
            let controllers = owners.iter().filter(|owner| owner["controller"] == true);
            assert!(
                controllers.count() < 2,
                "the API server accepts only one controller: {claim}"
            );
        }
    }

    /// Adopts orphaned claims.
    fn adopt_claims(&mut self, claims: &[OrphanClaim]) {
        for OrphanClaim {
            name,
            instance_id: instance,
        } in claims
        {
            let Some(claim) = self.claims.get_mut(name) else {
                continue;
            };
            let metadata = &mut claim["metadata"];
            let owners = metadata["ownerReferences"].as_array_mut().unwrap();
            let free = owners
                .iter()
                .all(|o| o["uid"] == BACKUP && o["controller"] != true);
            if free && metadata["labels"][keys::CLONESET_INSTANCE_ID] == **instance {
                metadata["ownerReferences"]
                    .as_array_mut()
                    .unwrap()
                    .push(owner_reference());
            }
        }
    }

    /// Creates missing claims; returns whether the Pod can use all.
    fn create_claims(&mut self, claims: &[Value]) -> bool {
        for claim in claims {
            let name = claim["metadata"]["name"].as_str().unwrap().to_owned();
            let existing = self.claims.entry(name).or_insert_with(|| claim.clone());
            if existing["metadata"]["deletionTimestamp"].is_string() || !has_owner(existing, "set") {
                return false;
            }
        }
        true
    }

    /// Whether claims that are not the CloneSet's have names of a Pod's new claims, and stay.
    fn has_foreign_claim(&self, action: &Action) -> bool {
        let Action::CreatePod { claims, .. } = action else {
            return false;
        };
        let names = claims
            .iter()
            .map(|claim| claim["metadata"]["name"].as_str().unwrap());
        let mut existing = names.filter_map(|name| self.claims.get(name));
        existing.any(|claim| claim["metadata"]["deletionTimestamp"].is_null() && !has_owner(claim, "set"))
    }

    /// Executes an action; returns whether it succeeded.
    fn execute(&mut self, act: &Action) -> bool {
        match act {
            Action::CreatePod { name, pod, claims } => {
                return self.create_claims(claims) && self.create_pod(name, pod.clone());
            }
            Action::DeletePod {
                uid, name, claims, ..
            } => {
                assert_eq!(self.pods[name]["metadata"]["uid"], json!(uid));
                self.patch_claims(claims);
                let pod = Pod::from_json(&self.pods[name]);
                // The claim of a Pod that has ended is for the next Pod of its name.
                if pod.active() || pod.terminating {
                    let id = pod.labels.get(keys::CLONESET_INSTANCE_ID);
                    self.deleted_ids.extend(id.cloned());
                }
                self.delete_pod(name);
            }
            Action::PatchPod {
                uid,
                name,
                writes,
                claims,
                ..
            } => {
                self.adopt_claims(claims);
                let pod = self.pods.get_mut(name).unwrap();
                assert_eq!(pod["metadata"]["uid"], json!(uid));
                apply_writes(pod, writes);
            }
            Action::PatchClaim(claim) => self.patch_claims(std::slice::from_ref(claim)),
            Action::DeleteClaim { name, uid } => {
                assert_eq!(name, uid, "a claim of another namespace");
                self.delete_claim(name);
            }
            Action::CreateJob(job) => {
                let name = job.metadata.name.clone().unwrap();
                if self.terminating_jobs.contains(&name) {
                    return false;
                }
                self.jobs.push(name);
            }
            Action::DeleteJob(ImagePullJobRef { name, .. }) => {
                self.jobs.retain(|job| job != name);
                self.terminating_jobs
                    .extend(self.slow_deletion.then(|| name.clone()));
            }
            Action::LabelRevision { name, .. } => {
                let revision = self.revisions.iter_mut().find(|r| r.name == *name).unwrap();
                revision.pre_downloaded = true;
            }
            Action::PatchCloneSet(patch) => self.edit(&patch["spec"]),
        }
        true
    }

    /// The manager crashes and restarts: its state in memory is lost.
    pub fn restart_manager(&mut self) {
        self.unfinished = UnfinishedCreations::default();
        self.failures.clear();
        self.not_yet_watched.clear();
        self.foreign_names.clear();
    }

    /// The watch catches up, and pending deletions complete.
    pub fn sync_watches(&mut self) {
        (self.slow_deletion, self.failures_left) = (false, 0);
        self.not_yet_watched.clear();
        self.terminating_jobs.clear();
        self.collect_garbage();
    }
}

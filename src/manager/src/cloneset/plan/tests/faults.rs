//! What becomes of acts: done, refused, done by half, or done without an answer.

use jiff::ToSpan;
use serde_json::{Value, json};

use super::world::{BACKUP, World, owned, owner, patch};
use crate::cloneset::plan::{
    Act, ClaimPatch, Concern, Failure, Job, LeftOver, OrphanClaim, Outcome, Subject,
};
use kruise_api::keys;
use kruise_workload::in_place::{Pod, Target, Write};
use kruise_workload::testing::apply;

/// How an act fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is refused. The claims of a Pod are made before that.
    Refused,
    /// Its first write is done, the next one refused.
    HalfDone,
    /// Its last write is refused, after the others were done.
    NearlyDone,
    /// A quota has no room for other sizes of Pods; what comes before that is done, and what may be done instead.
    NoResize,
    /// The same where Pods cannot be resized at all.
    Unresizable,
    /// It is done, but the answer is lost, and the watch is late to show a new Pod.
    Lost,
}

fn resize(write: &Write) -> bool {
    write.to == Target::Resize
}

impl Fault {
    /// How many of these are done before one is refused.
    fn done(self, writes: &[Write]) -> usize {
        match self {
            Self::HalfDone => 1,
            Self::NearlyDone => writes.len() - 1,
            Self::NoResize | Self::Unresizable => writes.iter().position(resize).unwrap(),
            Self::Refused | Self::Lost => 0,
        }
    }

    /// Whether only resizes fail.
    fn of_resize(self) -> bool {
        matches!(self, Self::NoResize | Self::Unresizable)
    }

    /// What is written instead.
    fn instead(self, writes: &[Write]) -> Option<Write> {
        let fallback = writes.iter().find_map(|write| write.fallback.as_deref())?;
        match self {
            Self::NoResize => fallback.quota.clone(),
            Self::Unresizable => fallback.refused.clone(),
            _ => None,
        }
    }
}

impl World {
    /// Tries an act, and takes note of what it came to.
    pub fn attempt(&mut self, act: &Act) {
        let resizes = matches!(act, Act::PatchPod { writes, .. } if writes.iter().any(resize));
        let fault = (self.failing > 0).then_some(self.fault);
        let fault = fault.filter(|fault| !fault.of_resize() || resizes);
        self.failing = self.failing.saturating_sub(1);
        let sure = self.now.checked_add(30.seconds()).unwrap();
        let (failed, outcome) = match (fault, act) {
            (None, _) => match self.act(act) {
                true => (None, Outcome::Over),
                // Somebody else has the name.
                false => (Some(act.clone()), Outcome::Over),
            },
            (Some(Fault::Lost), _) => {
                if let Act::CreatePod { name, .. } = act
                    && self.act(act)
                {
                    self.unseen.insert(name.clone());
                }
                if !matches!(act, Act::CreatePod { .. }) {
                    self.act(act);
                }
                (Some(act.clone()), Outcome::Unknown(sure))
            }
            (Some(Fault::HalfDone), Act::DeletePod { claims, .. }) => {
                self.give(claims);
                (Some(act.clone()), Outcome::Refused)
            }
            (
                Some(fault),
                Act::PatchPod {
                    name, writes, claims, ..
                },
            ) => {
                self.adopt(claims);
                let mut done = writes[..fault.done(writes)].to_vec();
                let instead = fault.instead(writes);
                let failed = instead.is_none().then(|| act.clone());
                done.extend(instead);
                patch(self.pods.get_mut(name).unwrap(), &done);
                if fault.of_resize() && failed.is_none() {
                    self.failures
                        .insert(Subject::Sizes, self.failure(Concern::Update));
                }
                (failed, Outcome::Refused)
            }
            (Some(_), Act::CreatePod { claims, .. }) => {
                self.make_claims(claims);
                (Some(act.clone()), Outcome::Refused)
            }
            (Some(_), _) => (Some(act.clone()), Outcome::Refused),
        };
        match failed {
            Some(act) => self.fail(&act, outcome),
            None => self.left.note(act, outcome),
        }
    }

    fn fail(&mut self, act: &Act, outcome: Outcome) {
        self.left.note(act, outcome);
        self.failures.insert(act.subject(), self.failure(act.concern()));
    }

    fn failure(&self, of: Concern) -> Failure {
        Failure {
            of,
            lasting: false,
            of_resize: false,
            answered: true,
            until: self.now.checked_add(5.seconds()).unwrap(),
            message: "refused".to_owned(),
        }
    }

    /// Changes the owners of claims.
    fn give(&mut self, claims: &[ClaimPatch]) {
        for ClaimPatch { name, uid, patch } in claims {
            assert_eq!(patch["metadata"]["uid"], json!(uid));
            let claim = self.claims.get_mut(name).unwrap();
            apply(claim, patch);
            let owners = claim["metadata"]["ownerReferences"].as_array().unwrap();
            let controllers = owners.iter().filter(|owner| owner["controller"] == true);
            assert!(controllers.count() < 2, "the API server takes one: {claim}");
        }
    }

    /// Makes claims of nobody ours.
    fn adopt(&mut self, claims: &[OrphanClaim]) {
        for OrphanClaim { name, instance } in claims {
            let Some(claim) = self.claims.get_mut(name) else {
                continue;
            };
            let metadata = &mut claim["metadata"];
            let owners = metadata["ownerReferences"].as_array_mut().unwrap();
            let free = owners
                .iter()
                .all(|o| o["uid"] == BACKUP && o["controller"] != true);
            if free && metadata["labels"][keys::CLONESET_INSTANCE_ID] == **instance {
                metadata["ownerReferences"].as_array_mut().unwrap().push(owner());
            }
        }
    }

    /// Makes those that are missing; whether the Pod can have them all.
    fn make_claims(&mut self, claims: &[Value]) -> bool {
        for claim in claims {
            let name = claim["metadata"]["name"].as_str().unwrap().to_owned();
            let there = self.claims.entry(name).or_insert_with(|| claim.clone());
            if there["metadata"]["deletionTimestamp"].is_string() || !owned(there, "set") {
                return false;
            }
        }
        true
    }

    /// Does an act; whether it could be done.
    fn act(&mut self, act: &Act) -> bool {
        match act {
            Act::CreatePod { name, pod, claims } => {
                return self.make_claims(claims) && self.create(name, pod.clone());
            }
            Act::DeletePod {
                uid, name, claims, ..
            } => {
                assert_eq!(self.pods[name]["metadata"]["uid"], json!(uid));
                self.give(claims);
                let pod = Pod::of(&self.pods[name]);
                // The claim of one that has ended is for the next of its name.
                if pod.active() || pod.deleting {
                    let id = pod.labels.get(keys::CLONESET_INSTANCE_ID);
                    self.spent.extend(id.cloned());
                }
                self.delete(name);
            }
            Act::PatchPod {
                uid,
                name,
                writes,
                claims,
                ..
            } => {
                self.adopt(claims);
                let pod = self.pods.get_mut(name).unwrap();
                assert_eq!(pod["metadata"]["uid"], json!(uid));
                patch(pod, writes);
            }
            Act::PatchClaim(claim) => self.give(std::slice::from_ref(claim)),
            Act::DeleteClaim { name, uid } => {
                assert_eq!(name, uid, "a claim of another namespace");
                self.delete_claim(name);
            }
            Act::CreateJob(job) => {
                let name = job.metadata.name.clone().unwrap();
                if self.going.contains(&name) {
                    return false;
                }
                self.jobs.push(name);
            }
            Act::DeleteJob(Job { name, .. }) => {
                self.jobs.retain(|job| job != name);
                self.going.extend(self.slow.then(|| name.clone()));
            }
            Act::LabelRevision { name, .. } => {
                let revision = self.revisions.iter_mut().find(|r| r.name == *name).unwrap();
                revision.downloaded = true;
            }
            Act::PatchSet(patch) => self.edit(&patch["spec"]),
        }
        true
    }

    /// The manager dies, and another one begins: what was only remembered is lost.
    pub fn restart(&mut self) {
        self.left = LeftOver::default();
        self.failures.clear();
        self.unseen.clear();
        self.met.clear();
    }

    /// The watch shows everything, and what was to go is gone.
    pub fn catch_up(&mut self) {
        (self.slow, self.failing) = (false, 0);
        self.unseen.clear();
        self.going.clear();
        self.collect();
    }
}

//! Carries a plan out: all acts at once within a bound, each with its deadlines, none in the way of another.

mod claims;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use kube::{Api, Resource};
use serde_json::{Value, json};

pub use claims::look_up_claim;
use claims::{adopt_claims, create_claim, delete_claim, patch_claim};

use super::history;
use super::memory::Memory;
use super::observe::{job_at, pod_at};
use super::plan::{Act, ClaimPatch, Concern, Job, Outcome, Subject, Why};
use super::report::Tally;
use super::work::Work;
use crate::view::RawPod;
use kruise_api::cloneset::CloneSet;
use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::keys;
use kruise_cluster::write::Stored;
use kruise_cluster::write_cache::CONFIRM;
use kruise_cluster::{Error, Key, write};
use kruise_workload::in_place::{self, Pod, Refresh, Target, Write};

/// Acts of all CloneSets that are under way at once: what the API server can take without queueing.
pub const AT_ONCE: usize = 64;

/// What became of the resize among the writes of an act.
#[derive(Default)]
enum Resize {
    /// There was none, or it was not asked for.
    #[default]
    None,
    Done,
    Refused {
        quota: bool,
    },
    /// It was refused, and the fallback was written, which may have another Pod take the place.
    FellBack {
        refusal: Error,
        replaced: bool,
    },
}

/// What a pass came to.
pub struct Done {
    /// Whether anything was tried.
    pub acted: bool,
    /// What to tell.
    pub tally: Tally,
    /// Pods that were made.
    made: usize,
    /// Whether the making of a Pod failed.
    refused: bool,
}

/// Does what is planned. No act is taken up later than `slice` after the first, nor when the spec has changed.
pub async fn carry_out(work: &Work<'_>, acts: Vec<Act>, slice: Duration, memory: &mut Memory) -> Done {
    let mut done = Done {
        acted: false,
        tally: Tally::default(),
        made: 0,
        refused: false,
    };
    let acts = fit(work, acts, memory, &mut done.tally).await;
    // Where updates failed a Pod leaves its Services only for one that would be taken.
    let careful = memory.failures.contains_key(&Subject::Updates);
    done.acted = !acts.is_empty() || done.tally.failures();
    for act in &acts {
        tracing::debug!(set = %work.name, subject = ?act.subject(), concern = ?act.concern(), "act planned");
    }
    let mut waiting = acts.into_iter();
    let mut running = FuturesUnordered::new();
    let begin = Instant::now();
    loop {
        while running.len() < AT_ONCE && begin.elapsed() < slice && work.current() {
            match waiting.next() {
                // What stopped one Pod from being made stops the next.
                Some(Act::CreatePod { .. }) if done.refused => {}
                Some(act) => {
                    // What was lost on the way may be taken; a try would be one more request to lose.
                    let failed = memory.failures.get(&act.subject());
                    let careful = careful || failed.is_some_and(|failure| failure.answered);
                    running.push(one(work, act, careful));
                }
                None => break,
            }
        }
        let Some((act, result, resize)) = running.next().await else {
            break;
        };
        done.note(work, &act, result, resize, memory);
    }
    memory.made(done.made, done.refused, AT_ONCE);
    done
}

impl Done {
    /// Takes note of what an act came to.
    fn note(
        &mut self,
        work: &Work<'_>,
        act: &Act,
        result: Result<(), Error>,
        resize: Resize,
        memory: &mut Memory,
    ) {
        memory.left.note(act, outcome(work, &result));
        let now = work.ctx.cluster.clock.now();
        let creation = matches!(act, Act::CreatePod { .. });
        let patched_for = |purpose| matches!(act, Act::PatchPod { why, .. } if *why == purpose);
        let (update, goes_on) = (patched_for(Why::UpdateInPlace), patched_for(Why::GoOn));
        let of_size = matches!(resize, Resize::Refused { .. });
        match &result {
            Ok(()) if update || goes_on => memory.update_began(),
            Err(error) if (update || goes_on && !of_size) && !error.retryable() => {
                memory.update_refused(error, now);
            }
            _ => {}
        }
        let Err(error) = result else {
            self.made += usize::from(creation);
            memory.succeeded(&act.subject());
            match resize {
                Resize::FellBack { refusal, replaced } => {
                    self.tally.failed(act, &refusal);
                    if replaced {
                        self.tally.succeeded(work.name, &replacing(act));
                        return;
                    }
                    memory.failed(Subject::Sizes, Concern::Update, &refusal, now);
                }
                Resize::Done if goes_on => memory.succeeded(&Subject::Sizes),
                _ => {}
            }
            self.tally.succeeded(work.name, act);
            return;
        };
        let refused = match resize {
            Resize::Refused { quota } => Some(quota),
            _ => None,
        };
        if refused.is_some() && goes_on {
            memory.failed(Subject::Sizes, Concern::Update, &error, now);
        }
        let error = nameless(work, act, error);
        // What is under way at the same time is one try.
        let again = creation && self.refused;
        self.refused |= creation;
        if !again {
            failed(work, act, &error, memory, &mut self.tally);
        }
        // A quota may have room later.
        if refused == Some(false) {
            memory.resize_refused(&act.subject());
        }
    }
}

/// The act that was done where a Pod was marked for deletion instead of being resized.
fn replacing(act: &Act) -> Act {
    let mut act = act.clone();
    if let Act::PatchPod { why, .. } = &mut act {
        *why = Why::UpdateReCreate;
    }
    act
}

/// The error without the name of a Pod that could not be made: it is chance which fails first, and no other news.
fn nameless(work: &Work<'_>, act: &Act, mut error: Error) -> Error {
    if let (Act::CreatePod { name, .. }, Error::Api(status)) = (act, &mut error) {
        status.message = status.message.replace(name, &format!("{}-*", work.name.name));
    }
    error
}

/// Leaves out what is not to be done now: Pods beyond `width`, and adoptions by a CloneSet that is going. What Pods
/// need that are there comes before new ones, which would otherwise keep them waiting until the last is made.
async fn fit(work: &Work<'_>, mut acts: Vec<Act>, memory: &mut Memory, tally: &mut Tally) -> Vec<Act> {
    let (mut pods, width) = (0, memory.width());
    acts.retain(|act| {
        pods += usize::from(matches!(act, Act::CreatePod { .. }));
        !matches!(act, Act::CreatePod { .. }) || pods <= width
    });
    acts.sort_by_key(|act| matches!(act, Act::CreatePod { .. }));
    let adopts = |act: &Act| matches!(act, Act::PatchPod { why: Why::Adopt, .. });
    if acts.iter().any(adopts) {
        let alive = work.alive().await;
        if let Err(error) = &alive {
            let unsure = acts.iter().filter(|act| adopts(act));
            unsure.for_each(|act| failed(work, act, error, memory, tally));
        }
        acts.retain(|act| matches!(alive, Ok(true)) || !adopts(act));
    }
    acts
}

/// Takes note of an act that failed, to be told unless it is ordinary life.
fn failed(work: &Work<'_>, act: &Act, error: &Error, memory: &mut Memory, tally: &mut Tally) {
    let now = work.ctx.cluster.clock.now();
    tracing::debug!(set = %work.name, subject = ?act.subject(), %error, category = error.category(), "act failed");
    if memory.failed(act.subject(), act.concern(), error, now) && !error.namespace_terminating() {
        tally.failed(act, error);
    }
}

/// Does one act.
async fn one(work: &Work<'_>, act: Act, careful: bool) -> (Act, Result<(), Error>, Resize) {
    let mut resize = Resize::None;
    // The semaphore is never closed.
    let _permit = work.writes.acquire().await;
    let result = match &act {
        Act::CreatePod { name, pod, claims } => create_pod(work, name, pod, claims).await,
        Act::DeletePod {
            uid,
            name,
            version,
            claims,
        } => delete_pod(work, uid, name, version.as_deref(), claims).await,
        Act::PatchPod {
            uid,
            name,
            writes,
            claims,
            ..
        } => {
            let ready = async {
                would_be_taken(work, name, writes, careful).await?;
                adopt_claims(work, claims).await
            };
            match ready.await {
                Ok(()) => patch_pod(work, uid, name, writes, &mut resize).await,
                Err(error) => {
                    serve_again(work, name, &error).await;
                    Err(error)
                }
            }
        }
        Act::PatchClaim(claim) => patch_claim(work, claim).await,
        Act::DeleteClaim { name, uid } => delete_claim(work, name, uid).await,
        Act::CreateJob(job) => create_job(work, job).await,
        Act::DeleteJob(job) => delete_job(work, job).await,
        Act::LabelRevision { name, label } => history::label(work, name, label).await,
        Act::PatchSet(patch) => patch_set(work, patch).await,
    };
    (act, result, resize)
}

fn keep_pod(work: &Work<'_>, stored: &RawPod) -> Arc<Pod> {
    let pod = Arc::new(Pod::of(stored.json()));
    let key = work.key(&pod.name);
    let at = pod_at(&key, Arc::clone(&pod));
    work.index().pods.wrote(&key, at, Instant::now());
    pod
}

/// Reads a Pod from the API server itself, and takes note of it.
pub async fn look_up_pod(work: &Work<'_>, name: &str) -> Result<Option<Arc<Pod>>, Error> {
    let found = write::get(&work.api::<RawPod>(), name).await?;
    let pod = found.map(|found| Arc::new(Pod::of(found.json())));
    let key = work.key(name);
    let at = pod.clone().map(|pod| pod_at(&key, pod));
    work.index().pods.read(&key, at, Instant::now());
    Ok(pod)
}

/// What an act came to, as far as it is known.
fn outcome(work: &Work<'_>, result: &Result<(), Error>) -> Outcome {
    let until = || work.ctx.cluster.clock.now().checked_add(CONFIRM);
    match result {
        Err(error) if error.in_doubt() => until().map_or(Outcome::Refused, Outcome::Unknown),
        Err(error) if !error.already_exists() => Outcome::Refused,
        _ => Outcome::Over,
    }
}

async fn create_pod(work: &Work<'_>, name: &str, pod: &Value, claims: &[Value]) -> Result<(), Error> {
    for claim in claims {
        create_claim(work, claim).await?;
    }
    match write::create(&work.api(), &RawPod::from(pod.clone()))
        .await
        .and_then(Stored::object)
    {
        Ok(stored) => {
            keep_pod(work, &stored);
            Ok(())
        }
        // Whose the name is must be known before it is given up.
        Err(error) if error.already_exists() || error.in_doubt() => match look_up_pod(work, name).await? {
            Some(pod) if pod.controller.as_ref() == Some(&work.owner) => Ok(()),
            _ => Err(error),
        },
        Err(error) => Err(error),
    }
}

async fn delete_pod(
    work: &Work<'_>,
    uid: &str,
    name: &str,
    version: Option<&str>,
    claims: &[ClaimPatch],
) -> Result<(), Error> {
    for claim in claims {
        patch_claim(work, claim).await?;
    }
    let key = work.key(name);
    let deleted = write::delete_seen(&work.api::<RawPod>(), name, uid, version).await;
    match &deleted {
        Ok(()) => work.index().pods.mark_deleted(&key, uid, Instant::now()),
        Err(error) if error.conflict() => drop(look_up_pod(work, name).await?),
        Err(error) if error.in_doubt() => work.index().pods.mark_unknown(&key),
        Err(_) => {}
    }
    deleted
}

/// Tries the change of the Pod itself without storing it: what the last of these writes leads to, or, with care, that write.
async fn would_be_taken(work: &Work<'_>, name: &str, writes: &[Write], careful: bool) -> Result<(), Error> {
    let leaves = writes.first().is_some_and(|write| write.to == Target::Status);
    let last = writes.last().filter(|write| write.to == Target::Pod);
    let patch = match last.map(|write| (write, &write.trial)) {
        Some((_, Some(later))) => later.as_ref(),
        Some((write, None)) if careful && leaves => &write.patch,
        _ => return Ok(()),
    };
    write::try_strategic(&work.api::<RawPod>(), name, patch).await
}

async fn patch_pod(
    work: &Work<'_>,
    uid: &str,
    name: &str,
    writes: &[Write],
    resize: &mut Resize,
) -> Result<(), Error> {
    let api = work.api::<RawPod>();
    let mut before: Option<Arc<Pod>> = None;
    for write in writes {
        let error = match send(&api, name, write, before.as_deref()).await {
            Ok(stored) => {
                if write.to == Target::Resize {
                    *resize = Resize::Done;
                }
                before = Some(keep_pod(work, &stored));
                continue;
            }
            Err(error) => error,
        };
        if write.to != Target::Resize || error.retryable() {
            return not_patched(work, uid, name, error).await;
        }
        let quota = refuses_another(&error.words());
        let fallback = write.fallback.as_deref();
        let instead = fallback.and_then(|f| {
            if quota {
                f.quota.as_ref()
            } else {
                f.refused.as_ref()
            }
        });
        let Some(instead) = instead else {
            *resize = Resize::Refused { quota };
            return not_patched(work, uid, name, error).await;
        };
        *resize = Resize::None;
        return match send(&api, name, instead, before.as_deref()).await {
            Ok(stored) => {
                let pod = keep_pod(work, &stored);
                *resize = Resize::FellBack {
                    refusal: error,
                    replaced: pod.labels.contains_key(keys::SPECIFIED_DELETE),
                };
                Ok(())
            }
            Err(error) => not_patched(work, uid, name, error).await,
        };
    }
    Ok(())
}

/// Whether the refusal of a resize, in the words of the API server's plugins for `ResourceQuota` and `LimitRange`, would be
/// that of another Pod of the new size, too.
fn refuses_another(words: &str) -> bool {
    let limits = [" usage per ", " max limit to request ratio per "];
    words.contains("exceeded quota") || limits.iter().any(|of_limit| words.contains(of_limit))
}

/// Sends one write, after the one that came to `before`.
async fn send(api: &Api<RawPod>, name: &str, write: &Write, before: Option<&Pod>) -> Result<RawPod, Error> {
    let patch = before.map_or(Cow::Borrowed(&write.patch), |pod| write.after(pod));
    let stored = match write.to {
        Target::Pod => write::patch_strategic(api, name, &patch).await,
        Target::Status => write::patch_status_strategic(api, name, &patch).await,
        Target::Resize => write::patch_resize(api, name, &patch).await,
    };
    stored?.object()
}

/// A patch of a Pod failed.
async fn not_patched(work: &Work<'_>, uid: &str, name: &str, error: Error) -> Result<(), Error> {
    if error.not_found() || error.conflict() {
        let there = look_up_pod(work, name).await?;
        // Where it is there, the API server does not know what was asked of it: it is too old to resize Pods.
        if error.not_found() && there.is_none_or(|pod| pod.uid != uid) {
            return Ok(());
        }
    }
    if error.in_doubt() {
        work.index().pods.mark_unknown(&work.key(name));
    }
    serve_again(work, name, &error).await;
    Err(error)
}

/// The Pod serves until the next try, unless that is soon, or the change was made after all. What is told is `error`,
/// whatever becomes of this.
async fn serve_again(work: &Work<'_>, name: &str, error: &Error) {
    let answered = matches!(error, Error::Api(_)) && !error.conflict() && !error.throttled();
    if answered
        && let Err(error) = back_into_service(work, name, error.in_doubt()).await
        && error.in_doubt()
    {
        work.index().pods.mark_unknown(&work.key(name));
    }
}

/// Undoes what comes before a change that was refused. Where that is in doubt, the Pod is read first.
async fn back_into_service(work: &Work<'_>, name: &str, in_doubt: bool) -> Result<(), Error> {
    let known = match in_doubt {
        true => look_up_pod(work, name).await?,
        false => work.index().pods.get(&work.key(name)).cloned(),
    };
    let Some(pod) = known else {
        return Ok(());
    };
    let now = work.ctx.cluster.clock.now();
    let gate = pod.condition(keys::IN_PLACE_UPDATE_READY);
    let out = gate.is_some_and(|gate| !gate.holds) && !in_place::resize::under_way(&pod);
    let idle = out && in_place::refresh(&pod, |_| true, in_place::Template::unknown(), now) == Refresh::Done;
    let Some(ready) = in_place::ready::ready(&pod, now).filter(|_| idle) else {
        return Ok(());
    };
    let patch = json!({ "status": { "conditions": [ready] } });
    let patch = Write::new(Target::Status, &pod, patch).patch;
    let stored = write::patch_status_strategic(&work.api::<RawPod>(), name, &patch).await?;
    keep_pod(work, &stored.object()?);
    Ok(())
}

async fn create_job(work: &Work<'_>, job: &ImagePullJob) -> Result<(), Error> {
    match write::create(&work.api(), job).await.and_then(Stored::object) {
        Ok(stored) => work
            .index()
            .jobs
            .wrote(&Key::of(&stored), job_at(&stored), Instant::now()),
        Err(error) if error.already_exists() => {
            let name = job.meta().name.clone().unwrap_or_default();
            if !look_up_job(work, &name).await? {
                return Err(error);
            }
        }
        Err(error) => return Err(error),
    }
    Ok(())
}

/// Reads a job from the API server itself, and takes note of it. Whether it will do: one of somebody else will not, nor
/// one that goes.
pub async fn look_up_job(work: &Work<'_>, name: &str) -> Result<bool, Error> {
    let found = write::get(&work.api::<ImagePullJob>(), name).await?;
    let at = found.as_ref().map(job_at);
    let good = at
        .as_ref()
        .is_none_or(|at| at.group == work.group && !at.deleting);
    work.index().jobs.read(&work.key(name), at, Instant::now());
    Ok(good)
}

async fn delete_job(work: &Work<'_>, job: &Job) -> Result<(), Error> {
    let Job { name, uid } = job;
    write::delete(&work.api::<ImagePullJob>(), name, uid).await?;
    work.index()
        .jobs
        .mark_deleted(&work.key(name), uid, Instant::now());
    Ok(())
}

async fn patch_set(work: &Work<'_>, patch: &Value) -> Result<(), Error> {
    match write::patch_merge::<CloneSet>(&work.api(), &work.name.name, patch).await {
        Ok(stored) => work.keep_set(stored.object()?),
        Err(error) if error.not_found() => {}
        Err(error) => return Err(error),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_not_given_up_for_one_that_would_be_refused_as_well() {
        let start = "pods \"web-x\" is forbidden: ";
        for (words, another) in [
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
            assert_eq!(refuses_another(&format!("{start}{words}")), another, "{words}");
        }
    }
}

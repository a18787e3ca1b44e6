//! Keeps the Pods of CloneSets: how many there are, what they are made of, and how they are updated.
//!
//! In:  CloneSets, Pods, claims, ControllerRevisions, ImagePullJobs and Nodes (watches, reduced).
//! Out: Pods, claims, revisions and jobs; conditions, labels and annotations of Pods; status and events.
//!
//! A pass over one CloneSet reads as: `observe` → `plan` → `act` → `report`. What our own writes returned is
//! known at once (`cluster::write_cache`), so no pass waits for a watch.

mod act;
mod defaults;
mod history;
mod memory;
mod observe;
mod orphans;
pub mod plan;
mod report;
mod unfit;
mod work;

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde_json::Value;
use tokio::sync::{Semaphore, mpsc};

use super::view::CloneSetView;
use super::{Context, Gate, Gates};
use history::History;
use kruise_api::cloneset::CloneSet;
use kruise_api::json;
use kruise_api::owner::Owner;
use kruise_cluster::queue::Again;
use kruise_cluster::{Error, Key, write};
use kruise_ops::metrics::metrics;
use kruise_workload::in_place::Pod;
use kruise_workload::in_place::normal::Stored;
use memory::{Memories, Memory, slice};
use observe::{Belongings, Changes};
use plan::{Observed, Plan, Switches, Template, plan};
use work::{Shared, Work};

/// The controller's name in `/healthz` and in the log.
const NAME: &str = "cloneset";

/// Runs until shutdown.
pub async fn run(mut ctx: Context) {
    // OpenKruise's name of the source of these events, which field selectors of clients may hold.
    ctx.cluster.events = ctx.cluster.events.of("cloneset-controller");
    ctx.stores.synced().await;
    let switches = switches(&ctx.options.feature_gates);
    let shared = Arc::new(Shared {
        index: Mutex::default(),
        memories: Memories::default(),
        writes: Semaphore::new(act::AT_ONCE),
        switches: Switches {
            exclude_preparing_delete: ctx.options.cloneset_scaling_exclude_preparing_delete,
            ..switches
        },
        chance: RandomState::new(),
        ctx: ctx.clone(),
    });
    let (sets_tx, sets_rx) = mpsc::unbounded_channel();
    let wake = wake_up(Arc::clone(&shared), sets_tx);
    let work = |key| look_after(Arc::clone(&shared), key);
    ctx.work(NAME, ctx.options.cloneset_workers, sets_rx, wake, work)
        .await;
}

/// The plan's switches, as the gates say.
fn switches(gates: &Gates) -> Switches {
    Switches {
        short_hash: gates.on(Gate::CloneSetShortHash),
        partition_rollback: gates.on(Gate::CloneSetPartitionRollback),
        preparing_update_as_update: gates.on(Gate::PreparingUpdateAsUpdate),
        recreate_for_claims: gates.on(Gate::RecreatePodWhenChangeVCTInCloneSetGate),
        env_from_metadata: gates.on(Gate::InPlaceUpdateEnvFromMetadata),
        vertical: gates.on(Gate::InPlaceWorkloadVerticalScaling),
        pre_download: gates.on(Gate::PreDownloadImageForInPlaceUpdate),
        stored: Stored::of(gates.on(Gate::TemplateNoDefaults)),
        exclude_preparing_delete: false,
    }
}

/// Sends the CloneSets to look at. What is there at the beginning is taken in before the first one is.
async fn wake_up(shared: Arc<Shared>, sets: mpsc::UnboundedSender<Key>) {
    let mut changes = Changes::new(&shared.ctx.stores);
    loop {
        let concerned = changes.drain(&mut shared.index());
        if !concerned.into_iter().all(|key| sets.send(key).is_ok()) {
            return;
        }
        let Some(said) = changes.next().await else { return };
        let concerned = changes.apply(&mut shared.index(), said);
        if !concerned.into_iter().all(|key| sets.send(key).is_ok()) {
            return;
        }
    }
}

/// Works on one CloneSet; what is remembered of it is in nobody else's hands meanwhile.
async fn look_after(shared: Arc<Shared>, key: Key) -> Result<Again, Error> {
    let view = shared.index().sets.get(&key).cloned();
    let Some(view) = view.filter(|set| set.metadata.deletion_timestamp.is_none()) else {
        shared.memories.take(&key);
        return Ok(None);
    };
    let uid = view.metadata.uid.as_deref().unwrap_or_default();
    let mut memory = shared.memories.lend(&key, uid);
    if let Some(pause) = memory.too_early(Instant::now()) {
        return Ok(Some(pause));
    }
    let set = view
        .read()
        .map_err(|why| Error::Transport(format!("cannot read the CloneSet: {why}")))?;
    let set = Arc::new(set);
    let work = Work {
        shared: &shared,
        ctx: &shared.ctx,
        writes: &shared.writes,
        name: &key,
        set: &set,
        owner: Owner::clone_set(&set.metadata),
        group: observe::group_of(&set.metadata),
    };
    measured(&work, &mut memory).await
}

/// A pass, and how long it took.
async fn measured(work: &Work<'_>, memory: &mut Memory) -> Result<Again, Error> {
    let begin = Instant::now();
    let mut done = "idle";
    let again = pass(work, memory, &mut done).await;
    let result = again.as_ref().map_or_else(Error::category, |_| done);
    let passes = &metrics().cloneset_passes;
    let passes = passes.get_or_create(&[("result", result.to_owned())]);
    passes.observe(begin.elapsed().as_secs_f64());
    again
}

/// Observe, plan, act, report; then say when to look again. `word` is what it came to.
async fn pass(work: &Work<'_>, memory: &mut Memory, word: &mut &'static str) -> Result<Again, Error> {
    look_up(work).await?;
    orphans::look_for(work, memory).await?;
    if !work.current() {
        return Ok(Some(Duration::ZERO));
    }
    let now = work.ctx.cluster.clock.now();
    let generation = work.set.metadata.generation.unwrap_or_default();
    memory.forget(generation, &work.set.spec.volume_claim_templates, now);
    let begin = Instant::now();
    let seen = work.index().belongings(work.set);
    memory.left.settle(&seen.pods);
    let gathered = begin.elapsed();
    let history = history::settle(work, &seen.revisions, memory).await;
    let begin = Instant::now();
    let (mut planned, pods) = planned(work, seen, &history, memory, now);
    planned.events.extend(history.warnings());
    let (planned_at, cost) = (Instant::now(), gathered + begin.elapsed());
    tracing::debug!(set = %work.name, update = history.update, current = history.current, pods = pods.len(),
        acts = planned.acts.len(), wake = ?planned.wake, "planned");
    let wake = planned.wake.map(|at| until(at, now));
    let done = act::carry_out(work, planned.acts, slice(cost), memory).await;
    *word = match history.failed {
        Some(category) => category,
        None if done.acted => "acted",
        None => "idle",
    };
    memory.pause(cost, done.acted, planned_at);
    report::tell(work, done.tally, planned.events, memory);
    let status = report::status(work, planned.status, !done.acted, memory).await?;
    if !done.acted
        && memory.may_trim(Instant::now())
        && let Err(error) = history::trim(work, &history, &pods).await
    {
        tracing::warn!(set = %work.name, %error, "cannot delete old revisions; will retry");
        memory.not_trimmed(Instant::now());
    }
    let rests = !done.acted && history.template == Template::Taken;
    let defaults = if rests {
        defaults::store(work, memory).await
    } else {
        None
    };
    let at_once = done.acted.then_some(Duration::ZERO);
    let unseen = work.index().next_look_up(work.name, &work.group, Instant::now());
    let all = [wake, status, defaults, at_once, unseen, history.again];
    Ok(all.into_iter().flatten().min())
}

/// The memory that values take, in bytes.
fn memory_of(values: &[Value]) -> usize {
    let texts = values.iter().map(Value::to_string);
    texts.map(|text| json::memory(text.as_bytes())).sum()
}

/// The plan, and the Pods that it is about. What it was made of, parsed revisions above all, is not kept for as long as the
/// plan is acted by.
fn planned(
    work: &Work<'_>,
    seen: Belongings,
    history: &History,
    memory: &Memory,
    now: Timestamp,
) -> (Plan, Vec<Arc<Pod>>) {
    let observed = observed(work, seen, history, memory);
    (plan(&observed, now), observed.pods)
}

/// How long it is until then; nothing when it has passed.
fn until(at: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(at.duration_since(now)).unwrap_or(Duration::ZERO)
}

/// Reads from the API server itself what we wrote and the watch has not brought in all that time, and what we may have
/// written.
async fn look_up(work: &Work<'_>) -> Result<(), Error> {
    let now = Instant::now();
    let (set, pods, claims, jobs, revisions) = {
        let index = work.index();
        (
            index.sets.unconfirmed_for(work.name, now),
            index.pods.unconfirmed(&work.group, now).0,
            index.claims.unconfirmed(&work.group, now).0,
            index.jobs.unconfirmed(&work.group, now).0,
            index.revisions.unconfirmed(&work.group, now).0,
        )
    };
    if set == Some(Duration::ZERO) {
        let found = write::get(&work.api::<CloneSet>(), &work.name.name).await?;
        let at = found.map(|found| observe::set_at(Arc::new(CloneSetView::from(&found))));
        work.index().sets.read(work.name, at, Instant::now());
    }
    for key in pods {
        tracing::warn!(set = %work.name, pod = key.name, "outcome of a write is unknown; reading the Pod again");
        act::look_up_pod(work, &key.name).await?;
    }
    for key in claims {
        act::look_up_claim(work, &key.name).await?;
    }
    for key in jobs {
        act::look_up_job(work, &key.name).await?;
    }
    for key in revisions {
        history::look_up(work, &key.name).await?;
    }
    Ok(())
}

/// All that the plan wants to know.
fn observed(work: &Work<'_>, seen: Belongings, history: &History, memory: &Memory) -> Observed {
    let template = &work.set.spec.template;
    let spread = template["spec"]["topologySpreadConstraints"].is_array();
    let nodes = seen
        .pods
        .iter()
        .filter_map(|pod| pod.node.as_ref())
        .filter(|_| spread);
    let labels = |name: &String| {
        let node = work.ctx.stores.nodes.get(&Key::cluster(name))?;
        Some((name.clone(), node.labels.clone()))
    };
    let nodes: BTreeMap<_, _> = nodes.filter_map(labels).collect();
    let (revisions, unread) = history.observed(&seen.pods);
    Observed {
        set: Arc::clone(work.set),
        revisions,
        unread,
        pods: seen.pods,
        claims: seen.claims,
        given: seen.given,
        current: history.current.clone(),
        update: history.update.clone(),
        template: history.template.clone(),
        collisions: history.collisions,
        memory: history.memory() + memory_of(&work.set.spec.volume_claim_templates),
        jobs: seen.jobs,
        nodes,
        failures: memory.failures.clone(),
        left: memory.left.clone(),
        switches: work.shared.switches,
        seed: work.shared.chance.hash_one(Instant::now()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_switched_on_or_off_is_as_in_openkruise() {
        let wanted = Switches {
            short_hash: false,
            partition_rollback: false,
            preparing_update_as_update: false,
            recreate_for_claims: false,
            env_from_metadata: true,
            vertical: false,
            pre_download: false,
            stored: Stored::WithDefaults,
            exclude_preparing_delete: false,
        };
        assert_eq!(switches(&Gates::default()), wanted);
    }
}

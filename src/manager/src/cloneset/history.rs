//! Keeps the ControllerRevisions of a CloneSet: makes them, makes an old one the newest, deletes the oldest.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::apps::v1::ControllerRevision;
use kube::Api;
use serde_json::{Value, json};

use super::memory::Memory;
use super::observe::revision_at;
use super::plan;
use super::report;
use super::unfit::Unfit;
use super::work::Work;
use crate::view::RevisionView;
use kruise_api::cloneset::{CloneSet, CloneSetStatus};
use kruise_api::json::set;
use kruise_api::keys;
use kruise_api::owner::Owner as Controller;
use kruise_api::validation::clone_set::validate;
use kruise_cluster::pod_template::{self, Answer, Defaults, Templates};
use kruise_cluster::{Error, Key, write};
use kruise_workload::in_place::Pod;
use kruise_workload::revision::{self, Owner, Revision, Step, Wanted};

/// The most memory that revisions take in a pass, in bytes; those that the CloneSet itself names are read in any case.
const OLD: usize = 16 << 20;
/// Names that may be taken before somebody must look.
const COLLISIONS: i32 = 20;

/// The revisions of a CloneSet, and what they are to it.
pub struct History {
    /// All of them, the oldest first.
    pub all: Vec<Arc<Revision>>,
    /// Name of the newest revision; empty when there is none.
    pub update: String,
    /// Name of the revision that Pods had before.
    pub current: String,
    /// How often a name was taken.
    pub collisions: Option<i32>,
    /// Whether the newest revision is what the template stands for.
    pub template: plan::Template,
    /// When that is to be tried again, if it is not.
    pub again: Option<Duration>,
    /// The category of the error that this try ended with.
    pub failed: Option<&'static str>,
}

/// Whose revisions they are.
fn owner(set: &CloneSet) -> Owner<'_> {
    static NONE: std::collections::BTreeMap<String, String> = std::collections::BTreeMap::new();
    let metadata = &set.metadata;
    Owner {
        kind: "CloneSet",
        namespace: metadata.namespace.as_deref().unwrap_or_default(),
        name: metadata.name.as_deref().unwrap_or_default(),
        uid: metadata.uid.as_deref().unwrap_or_default(),
        annotations: metadata.annotations.as_ref().unwrap_or(&NONE),
    }
}

/// The reference to the CloneSet as the controller of what it owns.
pub fn reference(set: &CloneSet) -> Value {
    owner(set).reference()
}

/// The revisions. The newest is what the template stands for, unless there can be no such revision for now: then it is
/// the last that there could be.
pub async fn settle(work: &Work<'_>, known: &[Arc<RevisionView>], memory: &mut Memory) -> History {
    let mut all: Vec<Arc<Revision>> = known.iter().map(|view| Arc::clone(&view.revision)).collect();
    revision::sort(&mut all);
    let status = work.set.status.as_ref();
    let before = Some(collisions(status, memory));
    let (mut collisions, mut failed) = (before, None);
    let generation = work.set.metadata.generation.unwrap_or_default();
    let mut unsettled = memory.unsettled(generation, Instant::now());
    if unsettled.is_none() {
        match newest(work, known, &mut all, &mut collisions, memory).await {
            Ok(()) => memory.settled(),
            Err(unfit) => {
                match &unfit {
                    Unfit::Failed(error) if error.namespace_terminating() => {
                        tracing::debug!(set = %work.name, "no revision is made: the namespace is being deleted");
                    }
                    _ => tracing::warn!(set = %work.name, error = %unfit, "no revision for the template"),
                }
                (collisions, failed) = (before, Some(unfit.category()));
                unsettled = Some(memory.not_settled(generation, &unfit, Instant::now()));
            }
        }
    }
    let (template, again) = unsettled.unzip();
    let newest = all.last().cloned().unwrap_or_default();
    let (update, current) = (newest.name.clone(), status.map_or("", |s| &s.current_revision));
    let current = revision::current(current, &update, &all).to_owned();
    let mut template = template.unwrap_or_default();
    if let Some(why) = newest
        .unfit
        .as_ref()
        .filter(|_| template == plan::Template::Taken)
    {
        template = plan::Template::Refused(no_template(&update, why));
    }
    History {
        all,
        update,
        current,
        collisions,
        template,
        again,
        failed,
    }
}

/// How often the name of a revision was taken. OpenKruise counts from 0 on, and the count goes into every name.
fn collisions(status: Option<&CloneSetStatus>, memory: &Memory) -> i32 {
    // A status is written a moment later, by a pass that finds the revision and has no collision to count.
    let before = status.and_then(|s| s.collision_count).max(memory.collisions);
    before.unwrap_or_default()
}

/// Sees to it that the newest revision is what the template stands for.
async fn newest(
    work: &Work<'_>,
    known: &[Arc<RevisionView>],
    all: &mut Vec<Arc<Revision>>,
    collisions: &mut Option<i32>,
    memory: &mut Memory,
) -> Result<(), Unfit> {
    adopt(work, known).await?;
    let wanted = wanted(work, all, *collisions, memory).await?;
    match revision::plan(&wanted, all) {
        Step::Use { .. } => {}
        Step::Promote {
            name,
            number,
            claim_hash,
        } => {
            let view = known.iter().find(|view| view.revision.name == name);
            let version = view.map(|view| view.resource_version.as_str());
            let stored = promote(work, &name, version, number, claim_hash).await?;
            tracing::info!(set = %work.name, revision = name, number, "made an old revision the newest");
            all.retain(|one| one.name != name);
            all.push(Arc::new(stored));
        }
        Step::Create { number } => {
            let made = create(work, wanted, number, collisions).await?;
            tracing::info!(set = %work.name, revision = made.name, number, "created a revision");
            all.push(Arc::new(made));
            memory.collisions = *collisions;
        }
    }
    Ok(())
}

/// Takes revisions of nobody that the selector picks, as Kubernetes' own workloads do: what a deletion without the
/// dependents left behind is used, so it must not stay for ever once the CloneSet goes.
async fn adopt(work: &Work<'_>, known: &[Arc<RevisionView>]) -> Result<(), Error> {
    let strays = || known.iter().filter(|view| view.controller.is_none());
    if strays().next().is_none() || !work.alive().await? {
        return Ok(());
    }
    for view in strays() {
        let name = &view.revision.name;
        let patch = json!({ "metadata": {
            "resourceVersion": view.resource_version,
            "ownerReferences": [owner(work.set).reference()],
        } });
        match write::patch_strategic(&api(work), name, &patch).await {
            Ok(stored) => drop(keep(work, &stored.object()?)),
            // Somebody was quicker, so that the next pass decides again.
            Err(error) if error.conflict() || error.not_found() => look_up(work, name).await?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// What the template stands for: found out once for each generation.
async fn wanted(
    work: &Work<'_>,
    all: &[Arc<Revision>],
    collisions: Option<i32>,
    memory: &mut Memory,
) -> Result<Wanted, Unfit> {
    let generation = work.set.metadata.generation.unwrap_or_default();
    let known = memory.wanted.take().filter(|(of, _)| *of == generation);
    let wanted = match known {
        Some((_, wanted)) => wanted,
        None => find_out(work, all, collisions).await?,
    };
    memory.wanted = Some((generation, wanted.clone()));
    Ok(wanted)
}

async fn find_out(work: &Work<'_>, all: &[Arc<Revision>], collisions: Option<i32>) -> Result<Wanted, Unfit> {
    let asked = {
        let spec = json!(work.set.spec);
        let mistakes = validate(&spec);
        if !mistakes.is_empty() {
            return Err(Unfit::Mistake(mistakes.join("; ")));
        }
        Templates {
            labels: json!(work.set.metadata.labels),
            annotations: json!(work.set.metadata.annotations),
            ..Templates::of(&spec)
        }
    };
    let owner = owner(work.set);
    let of = |template: &Value, claims: &[Value]| revision::wanted(&owner, template, claims, collisions);
    // A template that a revision holds was checked when that was made; others may have been stored while the webhook
    // was away. So may claims, whose hash only a revision gets that is not the newest yet.
    let stored = work.shared.switches.stored;
    if let Some(template) = revision::stands_for(&asked.template, all, stored) {
        let wanted = of(&template, &asked.claims);
        let newest = matches!(revision::plan(&wanted, all), Step::Use { .. });
        if newest || revision::knows_claims(&asked.claims, all) {
            return Ok(wanted);
        }
    }
    if revision::checked(&asked.template, &asked.claims, all) {
        return Ok(of(&asked.template, &asked.claims));
    }
    let defaults = Defaults::of(&work.ctx.options.feature_gates);
    let templates = match pod_template::ask(&work.ctx.cluster, owner.namespace, asked, defaults).await {
        Ok(Answer::Good {
            templates, unknown, ..
        }) => {
            report::unknown_fields(work, &unknown);
            templates
        }
        Ok(Answer::Bad(why)) => return Err(Unfit::Mistake(why)),
        // A quota or policy for PodTemplates, of which none is to be made. Its defaults make no other revision, so it is the
        // same once the dry run is taken.
        Err(error) if error.refused() => {
            let templates = pod_template::unchecked(Templates::of(&json!(work.set.spec)), defaults);
            if revision::no_template(&templates.template).is_some() {
                return Err(error.into());
            }
            tracing::warn!(set = %work.name, %error,
                "cannot check the Pod template, because its dry run as a PodTemplate is refused; it is used as it is stored");
            templates
        }
        Err(error) => return Err(error.into()),
    };
    let known = revision::stands_for(&templates.template, all, stored);
    let template = known.as_ref().unwrap_or(&templates.template);
    Ok(of(template, &templates.claims))
}

fn api(work: &Work<'_>) -> Api<ControllerRevision> {
    Api::namespaced(work.ctx.cluster.client.clone(), work.namespace())
}

/// Takes note of a revision that a write returned.
fn keep(work: &Work<'_>, object: &ControllerRevision) -> Revision {
    let revision = Revision::from(object);
    if let Some(view) = RevisionView::of(object) {
        let key = Key::of(object);
        let at = revision_at(&key, Arc::new(view));
        work.index().revisions.wrote(&key, at, Instant::now());
    }
    revision
}

/// Reads a revision from the API server itself, and takes note of it.
pub async fn look_up(work: &Work<'_>, name: &str) -> Result<(), Error> {
    let key = work.key(name);
    let found = write::get(&api(work), name).await?;
    let view = found.as_ref().and_then(RevisionView::of);
    let at = view.map(|view| revision_at(&key, Arc::new(view)));
    work.index().revisions.read(&key, at, Instant::now());
    Ok(())
}

/// Makes an old revision the newest, if it is as it was seen: another may have taken its name.
async fn promote(
    work: &Work<'_>,
    name: &str,
    version: Option<&str>,
    number: i64,
    claim_hash: Option<String>,
) -> Result<Revision, Error> {
    let mut patch = json!({ "metadata": { "resourceVersion": version }, "revision": number });
    if let Some(hash) = claim_hash {
        set(
            &mut patch,
            &["metadata", "annotations", keys::VOLUME_CLAIM_TEMPLATE_HASH],
            json!(hash),
        );
    }
    match write::patch_merge(&api(work), name, &patch).await {
        Ok(stored) => Ok(keep(work, &stored.object()?)),
        Err(error) => {
            if error.conflict() || error.not_found() {
                look_up(work, name).await?;
            }
            Err(error)
        }
    }
}

/// Makes the revision, under another name where its own is taken by one that says something else.
async fn create(
    work: &Work<'_>,
    mut wanted: Wanted,
    number: i64,
    collisions: &mut Option<i32>,
) -> Result<Revision, Unfit> {
    let owner = owner(work.set);
    let mut tries = 0;
    loop {
        let body = wanted.body(&owner, number);
        let object = match write::post(&api(work), body).await {
            Ok(stored) => Some(read(stored)?),
            Err(error) if error.already_exists() => {
                let taken = write::get(&api(work), &wanted.name).await?;
                taken.filter(|object| usable(object, &wanted, &work.owner))
            }
            Err(error) => return Err(error.into()),
        };
        if let Some(object) = object {
            return Ok(keep(work, &object));
        }
        let count = collisions.unwrap_or_default().saturating_add(1);
        tries += 1;
        if tries > COLLISIONS {
            let why = format!(
                "the names of {COLLISIONS} revisions are taken; the last is {}",
                wanted.name
            );
            return Err(Unfit::Mistake(why));
        }
        *collisions = Some(count);
        wanted = wanted.renamed(&owner, count);
    }
}

/// Whether a revision of the wanted name is the wanted one, and ours or nobody's.
fn usable(object: &ControllerRevision, wanted: &Wanted, owner: &Controller) -> bool {
    let free = RevisionView::of(object).is_some_and(|v| v.controller.is_none_or(|of| of == *owner));
    free && wanted.is(&Revision::from(object))
}

fn read(stored: Value) -> Result<ControllerRevision, Error> {
    serde_json::from_value(stored)
        .map_err(|why| Error::Transport(format!("the answer is no ControllerRevision: {why}")))
}

impl History {
    /// The revisions as the plan takes them: those of the CloneSet, and of its Pods, of these the newest that there is
    /// memory for; and the names of the others.
    pub fn observed(&self, pods: &[Arc<Pod>]) -> (Vec<Arc<plan::Revision>>, Vec<String>) {
        let used = self.used(pods);
        let used = |one: &&Revision| used.iter().any(|label| revision::same(label, &one.name));
        let mut memory = 0;
        let (mut taken, unread): (Vec<_>, Vec<_>) = self.fit().rev().filter(used).partition(|one| {
            memory += one.memory;
            memory <= OLD || self.names(one)
        });
        taken.reverse();
        (
            taken.into_iter().map(|one| Arc::new(one.into())).collect(),
            unread.into_iter().map(|one| one.name.clone()).collect(),
        )
    }

    /// Those that Pods can be made of.
    fn fit(&self) -> impl DoubleEndedIterator<Item = &Revision> {
        let all = self.all.iter().map(AsRef::as_ref);
        all.filter(|one: &&Revision| one.unfit.is_none())
    }

    /// Whether it is one of the two that the CloneSet itself names.
    fn names(&self, one: &Revision) -> bool {
        [&self.update, &self.current].contains(&&one.name)
    }

    /// The memory that the larger of these two takes, in bytes.
    pub fn memory(&self) -> usize {
        let own = self.fit().filter(|one| self.names(one));
        own.map(|one| one.memory).max().unwrap_or_default()
    }

    /// Warnings of revisions that no Pods can be made of. They count as if they were not there.
    pub fn warnings(&self) -> impl Iterator<Item = plan::Event> {
        let unfit = self
            .all
            .iter()
            .filter_map(|one| Some((&one.name, one.unfit.as_ref()?)));
        unfit.map(|(name, why)| plan::Event {
            warning: true,
            reason: "InvalidRevision",
            message: no_template(name, why),
            since: None,
        })
    }

    /// Values of revision labels that are in use.
    fn used<'a>(&'a self, pods: &'a [Arc<Pod>]) -> BTreeSet<&'a str> {
        let labels = pods
            .iter()
            .filter_map(|pod| pod.labels.get(keys::CONTROLLER_REVISION_HASH));
        let mut used = BTreeSet::from([self.update.as_str(), self.current.as_str()]);
        let mut last = "";
        // Most of ten thousand Pods have the label of the one before.
        for label in labels {
            if label != last {
                used.insert(label);
                last = label;
            }
        }
        used
    }
}

fn no_template(revision: &str, why: &str) -> String {
    format!("ControllerRevision {revision} does not hold a Pod template, and is not used: {why}")
}

impl From<&Revision> for plan::Revision {
    fn from(one: &Revision) -> Self {
        let marks = [keys::IMAGE_PRE_DOWNLOAD_CREATED, keys::IMAGE_PRE_DOWNLOAD_IGNORED];
        Self {
            name: one.name.clone(),
            data: serde_json::from_str(&one.data).unwrap_or_default(),
            claims: one.claim_hash.clone(),
            downloaded: marks.iter().any(|mark| one.labels.contains_key(*mark)),
        }
    }
}

/// Deletes the revisions that are too many.
pub async fn trim(work: &Work<'_>, history: &History, pods: &[Arc<Pod>]) -> Result<(), Error> {
    let limit = work
        .set
        .spec
        .revision_history_limit
        .unwrap_or(revision::DEFAULT_HISTORY_LIMIT);
    for name in revision::trim(&history.all, &history.used(pods), limit) {
        let key = work.key(&name);
        let Some(uid) = work.index().revisions.uid(&key).map(str::to_owned) else {
            continue;
        };
        write::delete(&api(work), &name, &uid).await?;
        work.index().revisions.mark_deleted(&key, &uid, Instant::now());
        tracing::info!(set = %work.name, revision = name, "deleted an old revision");
    }
    Ok(())
}

/// Sets a label of a revision to `true`.
pub async fn label(work: &Work<'_>, name: &str, label: &str) -> Result<(), Error> {
    let uid = work.index().revisions.uid(&work.key(name)).map(str::to_owned);
    let patch = json!({ "metadata": { "uid": uid, "labels": { (label): "true" } } });
    let stored = write::patch_merge(&api(work), name, &patch).await?;
    keep(work, &stored.object()?);
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// A new CloneSet has no status yet, and its first revision the name that OpenKruise gives it.
    #[test]
    fn the_first_revision_is_named_as_openkruise_names_it() {
        let vectors = include_str!("../../../../tests/data/go/cloneset-revision.jsonl");
        let of_none = vectors
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap());
        let first = of_none.filter(|vector| vector["collisionCount"] == 0);
        let (mut names, none) = (0, std::collections::BTreeMap::new());
        for vector in first {
            let set = &vector["cloneset"];
            let owner = Owner {
                kind: "CloneSet",
                namespace: "default",
                name: set["metadata"]["name"].as_str().unwrap(),
                uid: "u",
                annotations: &none,
            };
            let claims = set["spec"]["volumeClaimTemplates"].as_array().cloned();
            let count = Some(collisions(None, &Memory::default()));
            let wanted = revision::wanted(
                &owner,
                &set["spec"]["template"],
                &claims.unwrap_or_default(),
                count,
            );
            assert_eq!(json!(wanted.name), vector["name"]);
            names += 1;
        }
        assert!(names > 0);
        let status = CloneSetStatus {
            collision_count: Some(1),
            ..CloneSetStatus::default()
        };
        let mut memory = Memory::default();
        memory.collisions = Some(2);
        assert_eq!(collisions(Some(&status), &memory), 2, "a status may be behind");
    }
}

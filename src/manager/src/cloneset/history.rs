//! Maintains the ControllerRevisions of a CloneSet: creates them, promotes an old one, deletes the oldest.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::apps::v1::ControllerRevision;
use serde_json::{Value, json};

use super::context::CloneSetContext;
use super::fetch::fetch_revision;
use super::observe::versioned_revision;
use super::plan;
use super::reconcile_state::ReconcileState;
use super::report;
use super::revision_error::RevisionError;
use crate::view::RevisionView;
use kruise_api::cloneset::{CloneSet, CloneSetStatus};
use kruise_api::json::set;
use kruise_api::keys;
use kruise_api::owner::Owner as Controller;
use kruise_api::validation::cloneset::validate;
use kruise_cluster::pod_template::{self, Defaulting, DryRunResult, Templates};
use kruise_cluster::write_cache::Written;
use kruise_cluster::{Error, Key, write};
use kruise_workload::in_place::Pod;
use kruise_workload::revision::{self, DesiredRevision, Revision, RevisionAction, RevisionOwner};

/// Maximum memory of parsed revisions in one reconcile, in bytes; those that the CloneSet itself names are always read.
const MAX_REVISION_MEMORY: usize = 16 << 20;
/// Number of name collisions before a user must act.
const MAX_COLLISIONS: i32 = 20;

/// The revisions of a CloneSet and their roles.
pub struct RevisionHistory {
    /// All of them, the oldest first.
    pub revisions: Vec<Arc<Revision>>,
    /// Name of the newest revision; empty if there is none.
    pub update_revision: String,
    /// Name of the revision that Pods had before.
    pub current_revision: String,
    /// Number of name collisions.
    pub collisions: Option<i32>,
    /// Whether the newest revision corresponds to the template.
    pub template_status: plan::TemplateStatus,
    /// Delay before the next attempt, if it does not.
    pub retry_after: Option<Duration>,
    /// Category of the error of this attempt.
    pub error_category: Option<&'static str>,
}

fn revision_owner(set: &CloneSet) -> RevisionOwner<'_> {
    static NONE: std::collections::BTreeMap<String, String> = std::collections::BTreeMap::new();
    let metadata = &set.metadata;
    RevisionOwner {
        kind: "CloneSet",
        namespace: metadata.namespace.as_deref().unwrap_or_default(),
        name: metadata.name.as_deref().unwrap_or_default(),
        uid: metadata.uid.as_deref().unwrap_or_default(),
        annotations: metadata.annotations.as_ref().unwrap_or(&NONE),
    }
}

/// Brings the revisions into line with the template. The newest one corresponds to the template, unless such a revision
/// cannot be created now; then it is the last one that could be.
pub async fn sync_revisions(
    ctx: &CloneSetContext<'_>,
    observed: &[Arc<RevisionView>],
    state: &mut ReconcileState,
) -> RevisionHistory {
    let mut revisions: Vec<Arc<Revision>> = observed.iter().map(|view| Arc::clone(&view.revision)).collect();
    revision::sort(&mut revisions);
    let status = ctx.set.status.as_ref();
    let before = Some(collision_count(status, state));
    let (mut collisions, mut failed) = (before, None);
    let generation = ctx.set.metadata.generation.unwrap_or_default();
    let mut backoff = state.template_backoff(generation, Instant::now());
    if backoff.is_none() {
        match ensure_newest(ctx, observed, &mut revisions, &mut collisions, state).await {
            Ok(()) => {
                state.template_resolved();
                let newest = revisions.last().map(|revision| revision.name.clone());
                state.accepted_revision = newest.unwrap_or_default();
            }
            Err(error) => {
                match &error {
                    RevisionError::Api(error) if error.namespace_terminating() => {
                        tracing::debug!(set = %ctx.name, "no revision is made: the namespace is being deleted");
                    }
                    _ => tracing::warn!(set = %ctx.name, error = %error, "no revision for the template"),
                }
                (collisions, failed) = (before, Some(error.category()));
                backoff = Some(state.template_failed(generation, &error, Instant::now()));
            }
        }
    }
    let backoff_is_over = backoff.is_none();
    let (template_status, retry_after) = backoff.unzip();
    let newest = if backoff_is_over {
        revisions.last()
    } else {
        let before = status.map_or("", |status| &status.update_revision);
        last_accepted([&state.accepted_revision, before], observed, &revisions)
    };
    let newest = newest.cloned().unwrap_or_default();
    let (update, current) = (newest.name.clone(), status.map_or("", |s| &s.current_revision));
    let current = revision::current_revision(current, &update, &revisions).to_owned();
    let mut template_status = template_status.unwrap_or_default();
    if let Some(why) = newest
        .invalid_reason
        .as_ref()
        .filter(|_| template_status == plan::TemplateStatus::Accepted)
    {
        template_status = plan::TemplateStatus::Rejected(invalid_message(&update, why));
    }
    RevisionHistory {
        revisions,
        update_revision: update,
        current_revision: current,
        collisions,
        template_status,
        retry_after,
        error_category: failed,
    }
}

/// The revision to keep to while none can be made for the template: one of those `before`, and not an orphan that the selector happens to match,
/// which may be newer.
fn last_accepted<'a>(
    before: [&str; 2],
    observed: &[Arc<RevisionView>],
    revisions: &'a [Arc<Revision>],
) -> Option<&'a Arc<Revision>> {
    let is_orphan = |name: &str| {
        let mut orphans = observed.iter().filter(|view| view.controller.is_none());
        orphans.any(|view| view.revision.name == name)
    };
    let mut newest_first = revisions.iter().rev();
    let mut accepted = before.into_iter();
    let accepted = accepted.find_map(|name| revisions.iter().find(|revision| revision.name == name));
    accepted.or_else(|| newest_first.find(|revision| !is_orphan(&revision.name)))
}

/// Number of name collisions. OpenKruise counts from 0, and the count is part of every name.
fn collision_count(status: Option<&CloneSetStatus>, state: &ReconcileState) -> i32 {
    // The status is written a moment later, by a reconcile that finds the revision and has no collision to count.
    let before = status.and_then(|s| s.collision_count).max(state.collisions);
    before.unwrap_or_default()
}

/// Ensures that the newest revision corresponds to the template.
async fn ensure_newest(
    ctx: &CloneSetContext<'_>,
    observed: &[Arc<RevisionView>],
    revisions: &mut Vec<Arc<Revision>>,
    collisions: &mut Option<i32>,
    state: &mut ReconcileState,
) -> Result<(), RevisionError> {
    adopt_revisions(ctx, observed, state).await?;
    let desired = desired_revision(ctx, revisions, *collisions, state).await?;
    match revision::plan(&desired, revisions) {
        RevisionAction::UseNewest { .. } => {}
        RevisionAction::Promote {
            name,
            number,
            claim_hash,
        } => {
            let view = observed.iter().find(|view| view.revision.name == name);
            let version = view.map(|view| view.resource_version.as_str());
            let stored = promote_revision(ctx, &name, version, number, claim_hash).await?;
            tracing::info!(set = %ctx.name, revision = name, number, "made an old revision the newest");
            revisions.retain(|one| one.name != name);
            revisions.push(Arc::new(stored));
        }
        RevisionAction::Create { number } => {
            let made = create_revision(ctx, desired, number, collisions).await?;
            tracing::info!(set = %ctx.name, revision = made.name, number, "created a revision");
            revisions.push(Arc::new(made));
            state.collisions = *collisions;
        }
    }
    Ok(())
}

/// Adopts orphaned revisions that the selector matches, as Kubernetes' own workloads do: those that a deletion without
/// dependents left behind are used, so they must not remain forever after the CloneSet is deleted.
async fn adopt_revisions(
    ctx: &CloneSetContext<'_>,
    observed: &[Arc<RevisionView>],
    state: &mut ReconcileState,
) -> Result<(), Error> {
    let orphans = || observed.iter().filter(|view| view.controller.is_none());
    let due = orphans().next().is_some() && state.may_adopt_revisions(Instant::now());
    if !due || !ctx.owner_exists().await? {
        return Ok(());
    }
    for view in orphans() {
        let name = &view.revision.name;
        let patch = json!({ "metadata": {
            "resourceVersion": view.resource_version,
            "ownerReferences": [ctx.owner.controller_reference()],
        } });
        match write::patch_strategic(&ctx.api::<ControllerRevision>(), name, &patch).await {
            Ok(stored) => drop(cache_revision(ctx, &stored.object()?, Written::Changed)),
            // Another writer was first; the next reconcile decides again.
            Err(error) if error.conflict() || error.not_found() => fetch_revision(ctx, name).await?,
            // A webhook chooses the code of its denial.
            Err(error) if error.retryable() && !error.denied() => return Err(error),
            // OpenKruise adopts none, and uses them nevertheless.
            Err(error) => {
                tracing::warn!(set = %ctx.name, revision = name, %error, "cannot adopt a revision; will retry");
                state.revision_adoption_refused(Instant::now());
            }
        }
    }
    Ok(())
}

/// The desired revision of the template, resolved once for each generation.
async fn desired_revision(
    ctx: &CloneSetContext<'_>,
    revisions: &[Arc<Revision>],
    collisions: Option<i32>,
    state: &mut ReconcileState,
) -> Result<DesiredRevision, RevisionError> {
    let generation = ctx.set.metadata.generation.unwrap_or_default();
    let cached = state.desired_revision.take().filter(|(of, _)| *of == generation);
    let desired = match cached {
        Some((_, wanted)) => wanted,
        None => resolve_template(ctx, revisions, collisions).await?,
    };
    state.desired_revision = Some((generation, desired.clone()));
    Ok(desired)
}

async fn resolve_template(
    ctx: &CloneSetContext<'_>,
    revisions: &[Arc<Revision>],
    collisions: Option<i32>,
) -> Result<DesiredRevision, RevisionError> {
    let requested = {
        let spec = json!(ctx.set.spec);
        let errors = validate(&spec);
        if !errors.is_empty() {
            return Err(RevisionError::InvalidTemplate(errors.join("; ")));
        }
        Templates {
            labels: json!(ctx.set.metadata.labels),
            annotations: json!(ctx.set.metadata.annotations),
            ..Templates::from_workload_spec(&spec)
        }
    };
    let owner = revision_owner(ctx.set);
    let desired_for =
        |template: &Value, claims: &[Value]| revision::desired_revision(&owner, template, claims, collisions);
    // A template that a revision holds was checked when that revision was created; others may have been stored while
    // the webhook was down. The same holds for claim templates: their hash is written only when a revision is created or
    // promoted, so the newest one may lack it.
    let storage = ctx.shared.features.template_storage;
    if let Some(template) = revision::equivalent_template(&requested.template, revisions, storage) {
        let desired = desired_for(&template, &requested.claims);
        let newest = matches!(
            revision::plan(&desired, revisions),
            RevisionAction::UseNewest { .. }
        );
        if newest || revision::has_claim_hash(&requested.claims, revisions) {
            return Ok(desired);
        }
    }
    if revision::matches_except_images(&requested.template, &requested.claims, revisions) {
        return Ok(desired_for(&requested.template, &requested.claims));
    }
    let defaults = Defaulting::from_gates(&ctx.manager.options.feature_gates);
    let templates = match pod_template::dry_run(&ctx.manager.cluster, owner.namespace, requested, defaults)
        .await
    {
        Ok(DryRunResult::Valid {
            templates,
            unknown_fields: unknown,
            ..
        }) => {
            report::report_unknown_fields(ctx, &unknown);
            templates
        }
        Ok(DryRunResult::Invalid(why)) => return Err(RevisionError::InvalidTemplate(why)),
        // A quota or policy refuses PodTemplates, although none is stored. Default filling does not change the
        // revision, so it is the same once the dry run is accepted.
        Err(error) if error.rejected() || error.denied() => {
            let templates =
                pod_template::without_dry_run(Templates::from_workload_spec(&json!(ctx.set.spec)), defaults);
            if revision::template_error(&templates.template).is_some() {
                return Err(error.into());
            }
            tracing::warn!(set = %ctx.name, %error,
                "cannot check the Pod template, because its dry run as a PodTemplate is refused; it is used as it is stored");
            templates
        }
        Err(error) => return Err(error.into()),
    };
    let equivalent = revision::equivalent_template(&templates.template, revisions, storage);
    let template = equivalent.as_ref().unwrap_or(&templates.template);
    Ok(desired_for(template, &templates.claims))
}

/// Caches a revision that a write returned.
fn cache_revision(ctx: &CloneSetContext<'_>, object: &ControllerRevision, what: Written) -> Revision {
    let revision = Revision::from(object);
    if let Some(view) = RevisionView::from_object(object) {
        let key = Key::from_object(object);
        let entry = versioned_revision(&key, Arc::new(view));
        let now = Instant::now();
        ctx.index().revisions.apply_write(&key, entry, what, now);
    }
    revision
}

/// Makes an old revision the newest, if it has not changed since it was observed: another may have taken its name.
async fn promote_revision(
    ctx: &CloneSetContext<'_>,
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
    match write::patch_merge(&ctx.api::<ControllerRevision>(), name, &patch).await {
        Ok(stored) => Ok(cache_revision(ctx, &stored.object()?, Written::Changed)),
        Err(error) => {
            if error.conflict() || error.not_found() {
                fetch_revision(ctx, name).await?;
            }
            Err(error)
        }
    }
}

/// Creates the revision, under another name if a different revision has its name.
async fn create_revision(
    ctx: &CloneSetContext<'_>,
    mut desired: DesiredRevision,
    number: i64,
    collisions: &mut Option<i32>,
) -> Result<Revision, RevisionError> {
    let owner = revision_owner(ctx.set);
    let mut attempts = 0;
    loop {
        let body = desired.request_body(&owner, number);
        let object = match write::create_raw(&ctx.api::<ControllerRevision>(), body).await {
            Ok(stored) => Some(parse_revision(stored)?),
            Err(error) if error.already_exists() => {
                let existing = write::get(&ctx.api::<ControllerRevision>(), &desired.name).await?;
                existing.filter(|object| is_usable(object, &desired, &ctx.owner))
            }
            Err(error) => return Err(error.into()),
        };
        if let Some(object) = object {
            return Ok(cache_revision(ctx, &object, Written::Created));
        }
        let count = collisions.unwrap_or_default().saturating_add(1);
        attempts += 1;
        if attempts > MAX_COLLISIONS {
            let why = format!(
                "the names of {MAX_COLLISIONS} revisions are taken; the last is {}",
                desired.name
            );
            return Err(RevisionError::InvalidTemplate(why));
        }
        *collisions = Some(count);
        desired = desired.with_collisions(owner.name, count);
    }
}

/// Whether a revision of the desired name equals the desired one, and is owned by the CloneSet or is an orphan.
fn is_usable(object: &ControllerRevision, desired: &DesiredRevision, owner: &Controller) -> bool {
    let free = RevisionView::from_object(object).is_some_and(|v| v.controller.is_none_or(|of| of == *owner));
    free && desired.matches(&Revision::from(object))
}

fn parse_revision(stored: Value) -> Result<ControllerRevision, Error> {
    serde_json::from_value(stored)
        .map_err(|why| Error::Transport(format!("the answer is no ControllerRevision: {why}")))
}

impl RevisionHistory {
    /// The revisions for the plan: those that the CloneSet and its Pods use, of the latter the newest that fit into
    /// memory; and the names of the rest.
    pub fn plan_revisions(&self, pods: &[Arc<Pod>]) -> (Vec<Arc<plan::ParsedRevision>>, Vec<String>) {
        let labels_in_use = self.labels_in_use(pods).into_iter();
        let hashes_in_use: BTreeSet<&str> = labels_in_use.map(revision::short_hash).collect();
        let is_used = |one: &&Revision| hashes_in_use.contains(revision::short_hash(&one.name));
        let mut bytes = 0;
        let (mut readable, unread): (Vec<_>, Vec<_>) = self.valid().rev().filter(is_used).partition(|one| {
            bytes += one.memory;
            bytes <= MAX_REVISION_MEMORY || self.is_current_or_update(one)
        });
        readable.reverse();
        (
            readable.into_iter().map(|one| Arc::new(one.into())).collect(),
            unread.into_iter().map(|one| one.name.clone()).collect(),
        )
    }

    /// Revisions that Pods can be created from.
    fn valid(&self) -> impl DoubleEndedIterator<Item = &Revision> {
        let all = self.revisions.iter().map(AsRef::as_ref);
        all.filter(|one: &&Revision| one.invalid_reason.is_none())
    }

    /// Whether it is one of the two that the CloneSet itself names.
    fn is_current_or_update(&self, one: &Revision) -> bool {
        [&self.update_revision, &self.current_revision].contains(&&one.name)
    }

    /// The memory of the larger one of these two, in bytes.
    pub fn max_revision_memory(&self) -> usize {
        let own = self.valid().filter(|one| self.is_current_or_update(one));
        own.map(|one| one.memory).max().unwrap_or_default()
    }

    /// Warnings about revisions that no Pods can be created from. They are ignored otherwise.
    pub fn warnings(&self) -> impl Iterator<Item = plan::CloneSetEvent> {
        let invalid = self
            .revisions
            .iter()
            .filter_map(|one| Some((&one.name, one.invalid_reason.as_ref()?)));
        invalid.map(|(name, why)| plan::CloneSetEvent {
            warning: true,
            reason: "InvalidRevision",
            message: invalid_message(name, why),
            wait_since: None,
        })
    }

    /// Values of revision labels in use.
    fn labels_in_use<'a>(&'a self, pods: &'a [Arc<Pod>]) -> BTreeSet<&'a str> {
        let labels = pods
            .iter()
            .filter_map(|pod| pod.labels.get(keys::CONTROLLER_REVISION_HASH));
        let mut in_use = BTreeSet::from([self.update_revision.as_str(), self.current_revision.as_str()]);
        let mut previous = "";
        // Most of ten thousand Pods have the same label as the previous one.
        for label in labels {
            if label != previous {
                in_use.insert(label);
                previous = label;
            }
        }
        in_use
    }
}

fn invalid_message(revision: &str, why: &str) -> String {
    format!("ControllerRevision {revision} does not hold a Pod template, and is not used: {why}")
}

impl From<&Revision> for plan::ParsedRevision {
    fn from(one: &Revision) -> Self {
        let marks = [keys::IMAGE_PRE_DOWNLOAD_CREATED, keys::IMAGE_PRE_DOWNLOAD_IGNORED];
        Self {
            name: one.name.clone(),
            data: serde_json::from_str(&one.data).unwrap_or_default(),
            claim_hash: one.claim_hash.clone(),
            pre_downloaded: marks.iter().any(|mark| one.labels.contains_key(*mark)),
        }
    }
}

/// Deletes the revisions beyond the history limit. Nothing waits for that, so a failure does not fail the reconcile.
pub async fn prune(
    ctx: &CloneSetContext<'_>,
    history: &RevisionHistory,
    pods: &[Arc<Pod>],
    state: &mut ReconcileState,
) {
    if !state.may_delete_revisions(Instant::now()) {
        return;
    }
    if let Err(error) = delete_surplus(ctx, history, pods).await {
        tracing::warn!(set = %ctx.name, %error, "cannot delete old revisions; will retry");
        state.revision_deletion_failed(Instant::now());
    }
}

async fn delete_surplus(
    ctx: &CloneSetContext<'_>,
    history: &RevisionHistory,
    pods: &[Arc<Pod>],
) -> Result<(), Error> {
    let limit = ctx
        .set
        .spec
        .revision_history_limit
        .unwrap_or(revision::DEFAULT_HISTORY_LIMIT);
    // Orphans that could not be adopted are not the CloneSet's to delete.
    let is_own = |one: &&Arc<Revision>| {
        let index = ctx.index();
        index
            .revisions
            .find_in_group(&ctx.group, &ctx.key(&one.name))
            .is_some()
    };
    let own: Vec<Arc<Revision>> = history.revisions.iter().filter(is_own).cloned().collect();
    for name in revision::revisions_to_delete(&own, &history.labels_in_use(pods), limit) {
        let key = ctx.key(&name);
        let Some(uid) = ctx.index().revisions.uid(&key).map(str::to_owned) else {
            continue;
        };
        write::delete(&ctx.api::<ControllerRevision>(), &name, &uid).await?;
        ctx.index().revisions.mark_deleted(&key, &uid, Instant::now());
        tracing::info!(set = %ctx.name, revision = name, "deleted an old revision");
    }
    Ok(())
}

pub async fn label_revision(ctx: &CloneSetContext<'_>, name: &str, label: &str) -> Result<(), Error> {
    let uid = ctx.index().revisions.uid(&ctx.key(name)).map(str::to_owned);
    let patch = json!({ "metadata": { "uid": uid, "labels": { (label): "true" } } });
    let stored = write::patch_merge(&ctx.api::<ControllerRevision>(), name, &patch).await?;
    cache_revision(ctx, &stored.object()?, Written::Changed);
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::Mutex;

    use kube::client::Body;

    use super::*;
    use crate::cloneset::context::ControllerState;
    use kruise_api::owner::{Owner, OwnerKind};

    /// While no revision can be made, Pods are not created from a revision that others have left behind.
    #[test]
    fn orphaned_revision_is_not_kept_to() {
        let view = |name: &str, controller: Option<Owner>| {
            let revision = Revision {
                name: name.to_owned(),
                ..Revision::default()
            };
            Arc::new(RevisionView {
                revision: Arc::new(revision),
                controller,
                ..RevisionView::default()
            })
        };
        let owner = Owner {
            kind: OwnerKind::CloneSet,
            name: "web".to_owned(),
            uid: "uid".to_owned(),
        };
        let observed = [
            view("web-1", Some(owner.clone())),
            view("web-2", Some(owner)),
            view("db-9", None),
        ];
        let revisions: Vec<_> = observed.iter().map(|view| Arc::clone(&view.revision)).collect();
        let kept = |before: [&str; 2]| {
            last_accepted(before, &observed, &revisions).map(|revision| revision.name.as_str())
        };
        assert_eq!(kept(["", "web-1"]), Some("web-1"));
        assert_eq!(kept(["web-2", "web-1"]), Some("web-2"), "the status is behind");
        assert_eq!(kept(["", "gone"]), Some("web-2"));
    }

    /// Users may create revisions, and write the labels of Pods.
    #[test]
    fn many_revisions_are_matched_with_many_labels() {
        const COUNT: usize = 20_000;
        let name = |at: usize| format!("web-{at}");
        let stored = |at: usize| {
            Arc::new(Revision {
                name: name(at),
                ..Revision::default()
            })
        };
        let pod = |at: usize| {
            let label = (keys::CONTROLLER_REVISION_HASH.to_owned(), name(at));
            Arc::new(Pod {
                labels: Arc::new([label].into()),
                ..Pod::default()
            })
        };
        let history = RevisionHistory {
            revisions: (0..COUNT).map(stored).collect(),
            update_revision: name(1),
            current_revision: name(1),
            collisions: None,
            template_status: plan::TemplateStatus::Accepted,
            retry_after: None,
            error_category: None,
        };
        let pods: Vec<_> = (COUNT - 1..2 * COUNT).map(pod).collect();
        let begin = Instant::now();
        let (used, _) = history.plan_revisions(&pods);
        let surplus = revision::revisions_to_delete(&history.revisions, &history.labels_in_use(&pods), 10);
        assert!(begin.elapsed().as_secs() < 10, "{:?}", begin.elapsed());
        let used: Vec<_> = used.iter().map(|one| one.name.clone()).collect();
        assert_eq!(
            (used, surplus.len()),
            (vec![name(1), name(COUNT - 1)], COUNT - 12)
        );
    }

    /// An orphaned revision for a template with this image.
    fn orphan(set: &CloneSet, image: &str, number: i64) -> Arc<RevisionView> {
        let owner = revision_owner(set);
        let mut template = set.spec.template.clone();
        template["spec"]["containers"][0]["image"] = json!(image);
        let desired = revision::desired_revision(&owner, &template, &[], Some(0));
        let mut object: Value = serde_json::from_str(&desired.request_body(&owner, number)).unwrap();
        object["metadata"]["ownerReferences"] = json!([]);
        object["metadata"]["uid"] = json!(image);
        let object = serde_json::from_value(object).unwrap();
        Arc::new(RevisionView::from_object(&object).unwrap())
    }

    fn clone_set() -> Value {
        json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet",
            "metadata": { "name": "web", "namespace": "n", "uid": "set", "generation": 1 },
            "spec": { "selector": { "matchLabels": { "app": "web" } }, "revisionHistoryLimit": 0, "template": {
                "metadata": { "labels": { "app": "web" } },
                "spec": { "containers": [{ "name": "app", "image": "app:2" }] } } } })
    }

    fn denial(code: u16) -> Value {
        json!({ "kind": "Status", "status": "Failure", "code": code, "reason": "Some",
            "message": "admission webhook \"w\" denied the request: no" })
    }

    /// A webhook refuses changes of the revisions that a deletion without dependents left behind.
    #[tokio::test]
    async fn revision_that_cannot_be_adopted_is_used() {
        for code in [403, 503] {
            let requests = Arc::new(Mutex::new(Vec::new()));
            let seen = Arc::clone(&requests);
            let service = tower::service_fn(move |request: http::Request<Body>| {
                let method = request.method().to_string();
                let (code, body) = match method.as_str() {
                    "GET" => (200, clone_set()),
                    _ => (code, denial(code)),
                };
                seen.lock().unwrap().push(method);
                let body = Body::from(body.to_string().into_bytes());
                std::future::ready(http::Response::builder().status(code).body(body))
            });
            let manager = crate::Context::for_test(kube::Client::new(service, "default"));
            let shared = ControllerState::new(manager);
            let set: Arc<CloneSet> = Arc::new(serde_json::from_value(clone_set()).unwrap());
            let name = Key::namespaced("n", "web");
            let ctx = CloneSetContext::new(&shared, &name, &set);
            let orphans = [orphan(&set, "app:1", 1), orphan(&set, "app:2", 2)];
            for view in &orphans {
                let key = ctx.key(&view.revision.name);
                let entry = versioned_revision(&key, Arc::clone(view));
                ctx.index().revisions.apply_watch(&key, entry);
            }
            let mut state = ReconcileState::default();
            for _ in 0..2 {
                let history = sync_revisions(&ctx, &orphans, &mut state).await;
                assert_eq!(history.template_status, plan::TemplateStatus::Accepted);
                assert_eq!(history.update_revision, orphans[1].revision.name);
                prune(&ctx, &history, &[], &mut state).await;
            }
            assert_eq!(
                *requests.lock().unwrap(),
                ["GET", "PATCH", "PATCH"],
                "not retried at once"
            );
        }
    }

    /// A webhook that refuses PodTemplates need not refuse Pods.
    #[tokio::test]
    async fn template_whose_dry_run_is_denied_is_used() {
        for code in [403, 503] {
            let service = tower::service_fn(move |request: http::Request<Body>| async move {
                let is_dry_run = request.uri().path().ends_with("/podtemplates");
                let created = request.into_body().collect_bytes().await.unwrap_or_default();
                let (code, body) = if is_dry_run {
                    (code, denial(code).to_string().into_bytes())
                } else {
                    (201, created.to_vec())
                };
                http::Response::builder().status(code).body(Body::from(body))
            });
            let manager = crate::Context::for_test(kube::Client::new(service, "default"));
            let shared = ControllerState::new(manager);
            let set: Arc<CloneSet> = Arc::new(serde_json::from_value(clone_set()).unwrap());
            let name = Key::namespaced("n", "web");
            let ctx = CloneSetContext::new(&shared, &name, &set);
            let history = sync_revisions(&ctx, &[], &mut ReconcileState::default()).await;
            assert_eq!(history.template_status, plan::TemplateStatus::Accepted);
            assert_eq!(history.revisions.len(), 1);
        }
    }

    /// A new CloneSet has no status yet; its first revision gets the same name as from OpenKruise.
    #[test]
    fn first_revision_name_matches_openkruise() {
        let vectors = include_str!("../../../../tests/data/go/cloneset-revision.jsonl");
        let of_none = vectors
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap());
        let first = of_none.filter(|vector| vector["collisionCount"] == 0);
        let (mut names, none) = (0, std::collections::BTreeMap::new());
        for vector in first {
            let set = &vector["cloneset"];
            let owner = RevisionOwner {
                kind: "CloneSet",
                namespace: "default",
                name: set["metadata"]["name"].as_str().unwrap(),
                uid: "u",
                annotations: &none,
            };
            let claims = set["spec"]["volumeClaimTemplates"].as_array().cloned();
            let count = Some(collision_count(None, &ReconcileState::default()));
            let desired = revision::desired_revision(
                &owner,
                &set["spec"]["template"],
                &claims.unwrap_or_default(),
                count,
            );
            assert_eq!(json!(desired.name), vector["name"]);
            names += 1;
        }
        assert!(names > 0);
        let status = CloneSetStatus {
            collision_count: Some(1),
            ..CloneSetStatus::default()
        };
        let mut state = ReconcileState::default();
        state.collisions = Some(2);
        assert_eq!(
            collision_count(Some(&status), &state),
            2,
            "a status may be behind"
        );
    }
}

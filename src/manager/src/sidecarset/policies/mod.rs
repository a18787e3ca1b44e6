//! Installs the policies by which the API server injects SidecarSets itself, where it serves them (Kubernetes 1.36 and
//! later).
//!
//! In:  SidecarSets and their ControllerRevisions (shared watches), policies and bindings (own watches).
//! Out: MutatingAdmissionPolicies and their bindings, controlled by their set; for each set, how it is injected.
//!
//! The webhooks stay: a Pod that a policy has injected is not sent to them. So it does not matter which of the two knows
//! a change first, and a set without a policy is injected as well.

mod objects;

use std::collections::{BTreeSet, HashMap};
use std::fmt::{Display, Formatter};
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use kube::Api;
use kube::api::ListParams;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::context::ControllerState;
use super::injections::{Injection, KnownInjection};
use crate::FeatureGate;
use crate::view::RevisionView;
use kruise_api::keys;
use kruise_api::owner::{Owner, OwnerKind, controller_reference};
use kruise_api::sidecarset::SidecarSet;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::write_cache::{WriteCache, Written};
use kruise_cluster::{Change, Error, Key, Store, WatchEvents, write};
use kruise_workload::sidecarset::inject::named_by;
use kruise_workload::sidecarset::overlap::are_disjoint;
use kruise_workload::sidecarset::policy::{Options, Unsupported, compile};
use kruise_workload::sidecarset::set::SetView;
use objects::{AdmissionKind, AdmissionObject, Binding, GROUP, Installed, Policy, VERSION, digest};

/// Name in logs and metrics.
const NAME: &str = "sidecarset-policies";
/// Whether the API server serves policies changes with its upgrade.
const DISCOVERY_INTERVAL: Duration = Duration::from_secs(600);
const DISCOVERY_RETRY: Duration = Duration::from_secs(30);
/// How long the first lists may take before the statuses say that they fail.
const LIST_PATIENCE: Duration = Duration::from_secs(15);
/// A refusal may be due to a quota or to another policy, which no watch of ours sees.
const RETRY_REFUSED: Duration = Duration::from_secs(300);
/// How long a policy waits for the revision of a changed set, which new Pods record: it would be written twice.
const REVISION_PATIENCE: Duration = Duration::from_secs(1);

/// What all reconciles share.
struct Policies {
    shared: Arc<ControllerState>,
    policies: Mutex<WriteCache<Installed>>,
    bindings: Mutex<WriteCache<Installed>>,
    /// Digests of specs that were written, by kind and name: as they were sent, and as the API server stored them with
    /// defaults that only a newer release may have.
    stored_as: Mutex<HashMap<(&'static str, String), [u64; 2]>>,
    /// Sets whose new revision is awaited: by name, the generation, and since when.
    awaited: Mutex<HashMap<String, (i64, Instant)>>,
    /// Refused objects, by the name of their set.
    refused: Mutex<HashMap<String, Refusal>>,
    /// Sets whose injection changed.
    changed: mpsc::UnboundedSender<Key>,
}

/// The objects of a set, of which the API server refused one.
#[derive(Clone, Debug)]
struct Refusal {
    /// Of all of them.
    digest: u64,
    /// Until when they are not sent again.
    until: Instant,
    injection: Injection,
}

/// A kind with its cache.
trait Cached: AdmissionKind {
    fn cache(policies: &Policies) -> &Mutex<WriteCache<Installed>>;
}

impl Cached for Policy {
    fn cache(policies: &Policies) -> &Mutex<WriteCache<Installed>> {
        &policies.policies
    }
}

impl Cached for Binding {
    fn cache(policies: &Policies) -> &Mutex<WriteCache<Installed>> {
        &policies.bindings
    }
}

/// Why a set has no policy, or not yet.
enum Obstacle {
    /// The set is injected by the webhook until something changes.
    Permanent(Injection),
    /// The reconcile is tried again.
    Error(Error),
}

impl From<Error> for Obstacle {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

/// Runs until shutdown. Sends the sets whose injection changed to `changed`.
pub async fn run(shared: Arc<ControllerState>, changed: mpsc::UnboundedSender<Key>) {
    let ctx = shared.manager.clone();
    let client = &ctx.cluster.client;
    wait_until_served(&shared, &changed).await;
    // Without a label selector: ours could lose their label, also while no manager runs, and would inject for ever.
    let params = ListParams::default;
    let api: Api<AdmissionObject<Policy>> = Api::all(client.clone());
    let (policies, watch_policies) =
        ctx.cluster
            .optional_reflector(api, params(), |object: AdmissionObject<Policy>| {
                Some(Installed::new(&object))
            });
    let api: Api<AdmissionObject<Binding>> = Api::all(client.clone());
    let (bindings, watch_bindings) =
        ctx.cluster
            .optional_reflector(api, params(), |object: AdmissionObject<Binding>| {
                Some(Installed::new(&object))
            });
    let state = Arc::new(Policies {
        shared,
        policies: Mutex::default(),
        bindings: Mutex::default(),
        stored_as: Mutex::default(),
        awaited: Mutex::default(),
        refused: Mutex::default(),
        changed,
    });
    let work = async {
        let synced = async { tokio::join!(policies.wait_until_synced(), bindings.wait_until_synced()) };
        let mut synced = pin!(synced);
        if tokio::time::timeout(LIST_PATIENCE, &mut synced).await.is_err() {
            state.set_unreadable(true);
            synced.await;
            state.set_unreadable(false);
        }
        let (sets_tx, sets_rx) = mpsc::unbounded_channel();
        let enqueue = enqueue_changes(&state, &policies, &bindings, sets_tx);
        let work = |key| reconcile(Arc::clone(&state), key);
        let workers = ctx.options.sidecarset_workers;
        ctx.run_workers(NAME, workers, sets_rx, enqueue, work).await;
    };
    tokio::select! {
        () = watch_policies => {}
        () = watch_bindings => {}
        () = work => {}
    }
}

/// Waits until the API server serves policies. If it does not, the statuses say nothing about them.
async fn wait_until_served(shared: &ControllerState, changed: &mpsc::UnboundedSender<Key>) {
    let client = &shared.manager.cluster.client;
    let unserved = &shared.injections.unserved;
    let version = format!("{GROUP}/{VERSION}");
    loop {
        let request = client.list_api_group_resources(&version);
        let pause = match tokio::time::timeout(write::REQUEST_TIMEOUT, request).await {
            Ok(Ok(list)) if list.resources.iter().any(|one| one.name == Policy::PLURAL) => {
                unserved.store(false, Ordering::Relaxed);
                return;
            }
            Ok(Ok(_)) => {
                if !unserved.swap(true, Ordering::Relaxed) {
                    enqueue_all(shared, changed);
                }
                tracing::info!(
                    "the API server does not serve MutatingAdmissionPolicy v1; SidecarSets are injected by webhooks"
                );
                DISCOVERY_INTERVAL
            }
            Ok(Err(why)) => {
                tracing::warn!(%why, "cannot find out whether the API server serves MutatingAdmissionPolicy");
                DISCOVERY_RETRY
            }
            Err(_) => DISCOVERY_RETRY,
        };
        tokio::time::sleep(pause).await;
    }
}

/// Has the status of every set written.
fn enqueue_all(shared: &ControllerState, changed: &mpsc::UnboundedSender<Key>) {
    for (key, _) in shared.manager.stores.sidecar_sets.entries() {
        // It fails at shutdown only.
        let _ = changed.send(key);
    }
}

/// A change of one object.
enum WatchEvent {
    Policy(Change<Installed>),
    Binding(Change<Installed>),
    Revision(Change<RevisionView>),
    SidecarSet(Change<SidecarSet>),
}

impl Display for WatchEvent {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Policy(change) => write!(f, "{} {}", Policy::KIND, change.key),
            Self::Binding(change) => write!(f, "{} {}", Binding::KIND, change.key),
            Self::Revision(change) => write!(f, "ControllerRevision {}", change.key),
            Self::SidecarSet(change) => write!(f, "SidecarSet {}", change.key),
        }
    }
}

/// Enqueues the sets whose policies may change. What is installed is known before the first set is compared with it.
async fn enqueue_changes(
    state: &Policies,
    policies: &Store<Installed>,
    bindings: &Store<Installed>,
    keys: mpsc::UnboundedSender<Key>,
) {
    let stores = &state.shared.manager.stores;
    let events = WatchEvents::new(NAME)
        .with(policies.subscribe(), WatchEvent::Policy)
        .with(bindings.subscribe(), WatchEvent::Binding)
        .with(stores.revisions.subscribe(), WatchEvent::Revision)
        .with(stores.sidecar_sets.subscribe(), WatchEvent::SidecarSet);
    let handle = |event: &WatchEvent| match event {
        WatchEvent::Policy(change) => apply(&state.policies, change),
        WatchEvent::Binding(change) => apply(&state.bindings, change),
        WatchEvent::Revision(change) => affected_by_revision(change, &state.shared.namespace),
        WatchEvent::SidecarSet(change) => affected_by_set(change, &stores.sidecar_sets),
    };
    events
        .send_affected(keys, |event| handle(event).into_iter().map(Key::cluster_scoped))
        .await;
}

fn observed_generation(set: &SidecarSet) -> i64 {
    let status = set.status.as_ref();
    status
        .and_then(|status| status.observed_generation)
        .unwrap_or_default()
}

/// What a policy has of its set, and whether its revision is known.
fn is_same_injection(one: &SidecarSet, other: &SidecarSet) -> bool {
    let (old, new) = (SetView::from(one), SetView::from(other));
    one.metadata.uid == other.metadata.uid
        && one.metadata.deletion_timestamp.is_some() == other.metadata.deletion_timestamp.is_some()
        && old.annotations == new.annotations
        && old.latest_revision == new.latest_revision
        && observed_generation(one) == observed_generation(other)
        && old.spec == new.spec
}

/// The set, and those whose Pods it may be for.
fn affected_by_set(change: &Change<SidecarSet>, sets: &Store<SidecarSet>) -> BTreeSet<String> {
    if let (Some(old), Some(new)) = (&change.old, &change.new)
        && is_same_injection(old, new)
    {
        return BTreeSet::new();
    }
    let versions: Vec<&SidecarSet> = [&change.old, &change.new]
        .into_iter()
        .flatten()
        .map(Arc::as_ref)
        .collect();
    let concerned = sets.list().into_iter().filter(|set| {
        versions
            .iter()
            .any(|version| !are_disjoint(&version.spec, &set.spec))
    });
    let mut names: BTreeSet<String> = concerned.filter_map(|set| set.metadata.name.clone()).collect();
    names.insert(change.key.name.clone());
    names
}

fn affected_by_revision(change: &Change<RevisionView>, namespace: &str) -> BTreeSet<String> {
    if change.key.namespace.as_deref() != Some(namespace) {
        return BTreeSet::new();
    }
    let versions = [&change.old, &change.new].into_iter().flatten();
    let sets = versions.filter_map(|view| view.revision.labels.get(keys::SIDECAR_SET_NAME));
    sets.cloned().collect()
}

/// Applies the change of a policy or binding; returns the sets that it is for.
fn apply(cache: &Mutex<WriteCache<Installed>>, change: &Change<Installed>) -> BTreeSet<String> {
    let mut cache = cache.lock().unwrap_or_else(PoisonError::into_inner);
    match (&change.old, &change.new) {
        (_, Some(new)) => cache.apply_watch(&change.key, Arc::clone(new).versioned()),
        (Some(old), None) => cache.apply_watch_delete(&change.key, &old.uid),
        (None, None) => {}
    }
    let versions = [&change.old, &change.new].into_iter().flatten();
    let sets = versions.flat_map(|one| one.label_set().into_iter().chain(one.controlling_set()));
    sets.map(str::to_owned).collect()
}

/// Compiles one set, and writes its policies.
async fn reconcile(state: Arc<Policies>, key: Key) -> Result<RequeueAfter, Error> {
    let set = state.shared.manager.stores.sidecar_sets.get(&key);
    let Some(set) = set.filter(|set| set.metadata.deletion_timestamp.is_none()) else {
        // The garbage collector would delete them, too, but they inject until then.
        let is_left = |owner: &Owner| owner.name == key.name;
        delete_all(&state, &key.name, is_left, &[]).await?;
        state.shared.injections.remove(&key.name);
        state.awaited().remove(&key.name);
        state.refused().remove(&key.name);
        return Ok(None);
    };
    if let Some(wait) = state.awaited_revision(&set, Instant::now()) {
        return Ok(Some(wait));
    }
    let is_own = |owner: &Owner| is_set(owner, &set);
    // Of a set that had this name before: the garbage collector may come late.
    let is_of_former_set = |owner: &Owner| owner.name == key.name && !is_own(owner);
    delete_all(&state, &key.name, is_of_former_set, &[]).await?;
    let desired = match compiled(&state.shared, &set) {
        Ok(desired) => desired,
        Err(unsupported) => {
            let why = format!("a policy cannot express the SidecarSet: {unsupported}");
            delete_all(&state, &key.name, is_own, &[]).await?;
            state.report(
                &key,
                KnownInjection::Known(Injection::webhook("Unsupported", &why)),
            );
            return Ok(None);
        }
    };
    let installed = async {
        install(&state, &set, &desired).await?;
        Ok(delete_all(&state, &key.name, is_own, &desired).await?)
    };
    let (injection, requeue) = match installed.await {
        Ok(()) if desired.is_empty() => (KnownInjection::Nothing, None),
        Ok(()) => (KnownInjection::Known(Injection::Policy), None),
        Err(Obstacle::Permanent(injection)) => {
            // What an older policy would inject is outdated.
            delete_all(&state, &key.name, is_own, &[]).await?;
            (KnownInjection::Known(injection), Some(RETRY_REFUSED))
        }
        Err(Obstacle::Error(error)) => return Err(error),
    };
    state.report(&key, injection);
    Ok(requeue)
}

/// The policies of a set with their bindings.
fn compiled(shared: &ControllerState, set: &SidecarSet) -> Result<Vec<Value>, Unsupported> {
    let (stores, gates) = (&shared.manager.stores, &shared.manager.options.feature_gates);
    if !gates.enabled(FeatureGate::SidecarSetPolicies) {
        return Ok(Vec::new());
    }
    let sets = stores.sidecar_sets.list();
    let sets: Vec<SetView<'_>> = sets.iter().map(|set| SetView::from(&**set)).collect();
    let options = Options {
        namespace: &shared.namespace,
        sort_containers: gates.enabled(FeatureGate::EnableSortSidecarContainerByName),
        sets: &sets,
        revisions: &named_revisions(&stores.revisions, &shared.namespace, &sets),
    };
    let mut objects = compile(&SetView::from(set), &options)?;
    let [name, uid] = [&set.metadata.name, &set.metadata.uid].map(|text| text.as_deref().unwrap_or_default());
    let references = json!([controller_reference("SidecarSet", name, uid)]);
    for object in &mut objects {
        kruise_api::json::set(object, &["metadata", "ownerReferences"], references.clone());
    }
    Ok(objects)
}

/// The revisions that sets name.
fn named_revisions(
    revisions: &Store<RevisionView>,
    namespace: &str,
    sets: &[SetView<'_>],
) -> Vec<Arc<ControllerRevision>> {
    if !sets.iter().any(|set| set.spec.injected_revision().is_some()) {
        return Vec::new();
    }
    let is_named = named_by(sets);
    let of_namespace = revisions.entries_of(Some(namespace)).into_iter();
    let named = of_namespace.map(|(_, view)| view).filter(|view| {
        let RevisionView {
            terminating,
            revision,
            ..
        } = &**view;
        let of_set = revision.labels.contains_key(keys::SIDECAR_SET_NAME);
        of_set && !terminating && is_named(&revision.name, &revision.labels)
    });
    named.map(|view| Arc::new(controller_revision(&view))).collect()
}

fn controller_revision(view: &RevisionView) -> ControllerRevision {
    let mut revision = ControllerRevision {
        revision: view.revision.number,
        data: serde_json::from_str(&view.revision.data).ok().map(RawExtension),
        ..ControllerRevision::default()
    };
    revision.metadata.name = Some(view.revision.name.clone());
    revision.metadata.labels = Some(view.revision.labels.clone());
    revision.metadata.annotations = Some(view.hash_annotations.clone());
    revision
}

/// Writes what differs from `desired`. After a refusal it writes nothing until all of it would be accepted: what was written
/// before the refused object is deleted again, and the watch events of both start the next attempt at once.
async fn install(state: &Policies, set: &SidecarSet, desired: &[Value]) -> Result<(), Obstacle> {
    for object in desired {
        if object["kind"] == Policy::KIND {
            existing::<Policy>(state, set, object)?;
        } else {
            existing::<Binding>(state, set, object)?;
        }
    }
    let name = set.metadata.name.as_deref().unwrap_or_default();
    let digest = digest(&json!(desired));
    let refused = state.refused().get(name).cloned();
    let refused = refused.filter(|refused| refused.digest == digest);
    if let Some(refused) = &refused
        && Instant::now() < refused.until
    {
        return Err(Obstacle::Permanent(refused.injection.clone()));
    }
    let written = write_all(state, set, desired, refused.is_some()).await;
    match &written {
        Ok(()) => drop(state.refused().remove(name)),
        Err(Obstacle::Permanent(injection)) => {
            let refusal = Refusal {
                digest,
                until: Instant::now() + RETRY_REFUSED,
                injection: injection.clone(),
            };
            state.refused().insert(name.to_owned(), refusal);
        }
        Err(Obstacle::Error(_)) => {}
    }
    written
}

/// `check` starts with a dry run of all objects.
async fn write_all(
    state: &Policies,
    set: &SidecarSet,
    desired: &[Value],
    check: bool,
) -> Result<(), Obstacle> {
    let rounds: &[bool] = if check { &[true, false] } else { &[false] };
    for dry_run in rounds {
        for object in desired {
            if object["kind"] == Policy::KIND {
                write::<Policy>(state, set, object, *dry_run).await?;
            } else {
                write::<Binding>(state, set, object, *dry_run).await?;
            }
        }
    }
    Ok(())
}

fn name_of(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

fn name_taken<K: AdmissionKind>(name: &str) -> Obstacle {
    let why = format!(
        "{} {name} exists, and this SidecarSet does not control it",
        K::KIND
    );
    Obstacle::Permanent(Injection::webhook("NameTaken", &why))
}

/// What has the name of an object; an obstacle if the set does not control it.
fn existing<K: Cached>(
    state: &Policies,
    set: &SidecarSet,
    desired: &Value,
) -> Result<Option<Arc<Installed>>, Obstacle> {
    let name = name_of(desired);
    let existing = state.cache::<K>().get(&Key::cluster_scoped(name)).cloned();
    match existing {
        Some(existing) if !is_of(&existing, set) => Err(name_taken::<K>(name)),
        existing => Ok(existing),
    }
}

/// Writes an object unless it is current. A dry run only checks whether a new object would be accepted.
async fn write<K: Cached>(
    state: &Policies,
    set: &SidecarSet,
    desired: &Value,
    dry_run: bool,
) -> Result<(), Obstacle> {
    let name = name_of(desired);
    let existing = existing::<K>(state, set, desired)?;
    let sent = digest(&desired["spec"]);
    if let Some(existing) = &existing
        && (dry_run || is_current::<K>(state, set, name, existing, sent))
    {
        return Ok(());
    }
    let written = match dry_run {
        true => dry_run_creation::<K>(state, desired).await.map(|()| None),
        false => send::<K>(state, existing.as_deref(), desired).await.map(Some),
    };
    match written {
        Ok(stored) => {
            if let Some(stored) = stored {
                let what = existing.map_or(Written::Created, |_| Written::Changed);
                record_written::<K>(state, name, sent, stored, what);
            }
            Ok(())
        }
        // It may be ours, from a write that had no answer, or without its label.
        Err(error) if error.already_exists() || error.conflict() || error.not_found() => {
            fetch::<K>(state, set, name).await?;
            Err(error.into())
        }
        Err(error) if error.forbidden() || error.permanent() => Err(refused::<K>(name, &error)),
        // If it was written nevertheless, the watch will show it.
        Err(error) => Err(error.into()),
    }
}

/// Whether an object is as it would be written. `sent` is the digest of the spec.
fn is_current<K: Cached>(
    state: &Policies,
    set: &SidecarSet,
    name: &str,
    existing: &Installed,
    sent: u64,
) -> bool {
    let stored_as = state.stored_as().get(&(K::KIND, name.to_owned())).copied();
    // The label is for users; see `kubectl get -l`.
    existing.label_set() == set.metadata.name.as_deref()
        && (existing.digest == sent || stored_as == Some([sent, existing.digest]))
}

async fn dry_run_creation<K: Cached>(state: &Policies, desired: &Value) -> Result<(), Error> {
    write::create_dry_run(&state.api::<K>(), desired.to_string())
        .await
        .map(drop)
}

/// Creates an object, or replaces the existing one.
async fn send<K: Cached>(
    state: &Policies,
    existing: Option<&Installed>,
    desired: &Value,
) -> Result<Installed, Error> {
    let mut object: AdmissionObject<K> = serde_json::from_value(desired.clone())
        .map_err(|why| Error::Transport(format!("cannot read the compiled {}: {why}", K::KIND)))?;
    let written = match existing {
        None => write::create(&state.api(), &object).await,
        Some(existing) => {
            object.metadata.resource_version = Some(existing.resource_version.clone());
            write::replace(&state.api(), &object).await
        }
    };
    Ok(Installed::new(&written?.object()?))
}

fn record_written<K: Cached>(state: &Policies, name: &str, sent: u64, stored: Installed, what: Written) {
    let digests = [sent, stored.digest];
    state.stored_as().insert((K::KIND, name.to_owned()), digests);
    let entry = Arc::new(stored).versioned();
    let key = Key::cluster_scoped(name);
    state.cache::<K>().apply_write(&key, entry, what, Instant::now());
}

fn refused<K: AdmissionKind>(name: &str, error: &Error) -> Obstacle {
    tracing::warn!(name, kind = K::KIND, why = %error, "the policy is refused; the SidecarSet is injected by a webhook");
    let why = format!("the API server refuses {} {name}: {}", K::KIND, error.message());
    Obstacle::Permanent(Injection::webhook("PolicyRefused", &why))
}

/// Reads what has this name; an obstacle if the set does not control it.
async fn fetch<K: Cached>(state: &Policies, set: &SidecarSet, name: &str) -> Result<(), Obstacle> {
    let found = write::get(&state.api::<K>(), name).await?;
    let found = found.map(|found| Arc::new(Installed::new(&found)));
    if found.as_ref().is_some_and(|found| !is_of(found, set)) {
        return Err(name_taken::<K>(name));
    }
    let entry = found.map(Installed::versioned);
    let key = Key::cluster_scoped(name);
    state.cache::<K>().apply_read(&key, entry, Instant::now());
    Ok(())
}

fn is_of(installed: &Installed, set: &SidecarSet) -> bool {
    is_controlled(installed, |owner| is_set(owner, set))
}

fn is_set(owner: &Owner, set: &SidecarSet) -> bool {
    Some(&owner.uid) == set.metadata.uid.as_ref()
}

/// Whether a SidecarSet controls it, and this one.
fn is_controlled(installed: &Installed, by: impl Fn(&Owner) -> bool) -> bool {
    let controller = installed.controller.as_ref();
    controller.is_some_and(|owner| owner.kind == OwnerKind::SidecarSet && by(owner))
}

/// Deletes the bindings of a set, and then its policies, which are not in `kept`.
async fn delete_all(
    state: &Policies,
    set: &str,
    owner: impl Fn(&Owner) -> bool + Copy,
    kept: &[Value],
) -> Result<(), Error> {
    delete::<Binding>(state, set, owner, kept).await?;
    delete::<Policy>(state, set, owner, kept).await
}

async fn delete<K: Cached>(
    state: &Policies,
    set: &str,
    owner: impl Fn(&Owner) -> bool + Copy,
    kept: &[Value],
) -> Result<(), Error> {
    let is_kept = |key: &Key| {
        kept.iter()
            .any(|object| object["metadata"]["name"] == key.name.as_str())
    };
    let surplus: Vec<(Key, String)> = state
        .cache::<K>()
        .group_entries(set)
        .filter(|(key, installed, deleting)| !deleting && !is_kept(key) && is_controlled(installed, owner))
        .map(|(key, installed, _)| (key.clone(), installed.uid.clone()))
        .collect();
    let api = state.api::<K>();
    for (key, uid) in surplus {
        match write::delete(&api, &key.name, &uid).await {
            Ok(()) => {}
            // It is gone, or is another one by now.
            Err(error) if error.not_found() || error.conflict() => {}
            Err(error) => return Err(error),
        }
        state.stored_as().remove(&(K::KIND, key.name.clone()));
        state.cache::<K>().mark_deleted(&key, &uid, Instant::now());
    }
    Ok(())
}

impl Policies {
    fn api<K: AdmissionKind>(&self) -> Api<AdmissionObject<K>> {
        Api::all(self.shared.manager.cluster.client.clone())
    }

    fn cache<K: Cached>(&self) -> MutexGuard<'_, WriteCache<Installed>> {
        K::cache(self).lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stored_as(&self) -> MutexGuard<'_, HashMap<(&'static str, String), [u64; 2]>> {
        self.stored_as.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn awaited(&self) -> MutexGuard<'_, HashMap<String, (i64, Instant)>> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refused(&self) -> MutexGuard<'_, HashMap<String, Refusal>> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How long to wait for the revision of a set, whose status is of an older generation.
    fn awaited_revision(&self, set: &SidecarSet, now: Instant) -> Option<Duration> {
        let name = set.metadata.name.clone().unwrap_or_default();
        let generation = set.metadata.generation.unwrap_or_default();
        if observed_generation(set) >= generation {
            self.awaited().remove(&name);
            return None;
        }
        let mut awaited = self.awaited();
        let since = awaited.entry(name).or_insert((generation, now));
        if since.0 != generation {
            *since = (generation, now);
        }
        let left = REVISION_PATIENCE.checked_sub(now.saturating_duration_since(since.1));
        left.filter(|left| !left.is_zero())
    }

    /// Says it in the status of every set.
    fn set_unreadable(&self, unreadable: bool) {
        self.shared
            .injections
            .unreadable
            .store(unreadable, Ordering::Relaxed);
        enqueue_all(&self.shared, &self.changed);
    }

    /// Has the set's status written if its injection changed.
    fn report(&self, key: &Key, injection: KnownInjection) {
        if self.shared.injections.set(&key.name, injection) {
            // It fails at shutdown only.
            let _ = self.changed.send(key.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::AtomicBool;

    use kube::client::Body;

    use super::*;
    use crate::{Context, Stores};

    /// What is received and answered.
    #[derive(Default)]
    struct FakeApiServer {
        /// Verb and kind of each request.
        requests: Mutex<Vec<String>>,
        accepts_bindings: AtomicBool,
        /// All objects exist, and have no labels.
        labels_are_lost: AtomicBool,
    }

    impl FakeApiServer {
        /// The status code and the body for a request.
        fn answer(&self, request: &http::Request<Body>) -> (u16, Value) {
            let is_binding = request.uri().path().contains(Binding::PLURAL);
            let query = request.uri().query().unwrap_or_default();
            let verb = match query.contains("dryRun=All") {
                true => "DRY RUN".to_owned(),
                false => request.method().to_string(),
            };
            let kind = if is_binding { "binding" } else { "policy" };
            self.requests.lock().unwrap().push(format!("{verb} {kind}"));
            let refused = *request.method() == http::Method::POST
                && is_binding
                && !self.accepts_bindings.load(Ordering::Relaxed);
            if refused {
                let why = json!({ "kind": "Status", "status": "Failure", "code": 422, "reason": "Invalid",
                    "message": "no bindings" });
                return (422, why);
            }
            let labels_are_lost = self.labels_are_lost.load(Ordering::Relaxed);
            if labels_are_lost && *request.method() == http::Method::POST {
                return (
                    409,
                    json!({ "kind": "Status", "status": "Failure", "code": 409, "reason": "AlreadyExists" }),
                );
            }
            let mut metadata = json!({ "name": "sidecarset-web", "uid": kind, "resourceVersion": "1",
                "ownerReferences": [controller_reference("SidecarSet", "web", "u")] });
            if *request.method() == http::Method::PUT {
                metadata["resourceVersion"] = json!("2");
            }
            if *request.method() == http::Method::PUT || !labels_are_lost {
                metadata["labels"] = json!({ keys::SIDECAR_SET_NAME: "web" });
            }
            (200, json!({ "metadata": metadata, "spec": {} }))
        }

        fn take_requests(&self) -> Vec<String> {
            std::mem::take(&mut *self.requests.lock().unwrap())
        }
    }

    fn store_with_set(is_paused: bool) -> Store<SidecarSet> {
        let set = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet",
            "metadata": { "name": "web", "uid": "u" },
            "spec": { "selector": { "matchLabels": { "app": "web" } },
                "containers": [{ "name": "log", "image": "i" }],
                "injectionStrategy": { "paused": is_paused } } });
        let set: SidecarSet = serde_json::from_value(set).unwrap();
        Store::from_objects([(Key::cluster_scoped("web"), set)])
    }

    fn pause_set(state: &mut Arc<Policies>) {
        let shared = Arc::get_mut(&mut Arc::get_mut(state).unwrap().shared);
        shared.unwrap().manager.stores.sidecar_sets = store_with_set(true);
    }

    /// A cluster with one set.
    fn cluster() -> (Arc<Policies>, Arc<FakeApiServer>) {
        let server = Arc::new(FakeApiServer::default());
        let answering = Arc::clone(&server);
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let (code, body) = answering.answer(&request);
            let body = Body::from(body.to_string().into_bytes());
            std::future::ready(http::Response::builder().status(code).body(body))
        });
        let mut ctx = Context::for_test(kube::Client::new(service, "default"));
        ctx.stores = Stores {
            sidecar_sets: store_with_set(false),
            ..Stores::empty()
        };
        let state = Policies {
            shared: Arc::new(ControllerState::new(ctx, "kruise-system")),
            policies: Mutex::default(),
            bindings: Mutex::default(),
            stored_as: Mutex::default(),
            awaited: Mutex::default(),
            refused: Mutex::default(),
            changed: mpsc::unbounded_channel().0,
        };
        (Arc::new(state), server)
    }

    /// A revision of a set, with custom version `v1`.
    fn revision(set: &str, name: &str) -> (Key, RevisionView) {
        let labels = json!({ keys::SIDECAR_SET_NAME: set, keys::SIDECAR_SET_CUSTOM_VERSION: "v1" });
        let annotations = json!({ keys::SIDECAR_SET_HASH: format!("hash of {name}") });
        let revision = json!({ "apiVersion": "apps/v1", "kind": "ControllerRevision", "revision": 1,
            "metadata": { "name": name, "namespace": "kruise-system", "labels": labels, "annotations": annotations },
            "data": { "spec": { "containers": [{ "name": "log", "image": "old" }] } } });
        let revision = serde_json::from_value(revision).unwrap();
        let view = RevisionView::from_object(&revision).unwrap();
        (Key::namespaced("kruise-system", name), view)
    }

    /// They are large, and each change of a set compiles others.
    #[test]
    fn only_named_revisions_are_read_and_they_keep_their_hashes() {
        let set = |name: &str, strategy: Value| -> SidecarSet {
            let set = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet", "metadata": { "name": name },
                "spec": { "selector": { "matchLabels": { "app": "web" } }, "containers": [{ "name": "log", "image": "i" }],
                    "injectionStrategy": strategy } });
            serde_json::from_value(set).unwrap()
        };
        let named = |named: Value| json!({ "revision": named });
        let store = Store::from_objects([
            revision("web", "web-1"),
            revision("web", "web-2"),
            revision("log", "log-1"),
        ]);
        for (strategy, expected) in [
            (json!({}), &[][..]),
            (named(json!({ "revisionName": "web-1" })), &["web-1"]),
            (named(json!({ "customVersion": "v1" })), &["web-1", "web-2"]),
            (named(json!({ "customVersion": "v2" })), &[]),
        ] {
            let sets = [set("web", strategy.clone()), set("log", json!({}))];
            let views = sets.each_ref().map(SetView::from);
            let revisions = named_revisions(&store, "kruise-system", &views);
            let mut names: Vec<_> = revisions
                .iter()
                .filter_map(|one| one.metadata.name.clone())
                .collect();
            names.sort();
            assert_eq!(names, expected, "{strategy}");
            let Some(name) = expected.last() else { continue };
            let options = Options {
                namespace: "kruise-system",
                sort_containers: false,
                sets: &views,
                revisions: &revisions,
            };
            let objects = json!(compile(&views[0], &options).unwrap()).to_string();
            assert!(objects.contains(&format!("hash of {name}")), "{objects}");
        }
    }

    /// Reconciles the set; returns its reason to be injected by the webhook, if it is.
    async fn reconciled(state: &Arc<Policies>) -> Option<&'static str> {
        let key = Key::cluster_scoped("web");
        let requeue = reconcile(Arc::clone(state), key).await.unwrap();
        match state.shared.injections.get("web") {
            KnownInjection::Known(Injection::Webhook { reason, .. }) => {
                assert_eq!(requeue, Some(RETRY_REFUSED));
                Some(reason)
            }
            _ => None,
        }
    }

    #[tokio::test]
    async fn refused_objects_are_not_written_and_deleted_for_ever() {
        let (state, server) = cluster();
        let refused = Some("PolicyRefused");
        assert_eq!(reconciled(&state).await, refused);
        assert_eq!(
            server.take_requests(),
            ["POST policy", "POST binding", "DELETE policy"]
        );
        // The watch shows it, which enqueues the set.
        let key = Key::cluster_scoped("sidecarset-web");
        state.cache::<Policy>().apply_watch_delete(&key, "policy");
        assert_eq!(reconciled(&state).await, refused);
        assert!(server.take_requests().is_empty());

        let expire = || {
            if let Some(refusal) = state.refused().get_mut("web") {
                refusal.until = Instant::now();
            }
        };
        expire();
        assert_eq!(reconciled(&state).await, refused);
        assert_eq!(server.take_requests(), ["DRY RUN policy", "DRY RUN binding"]);
        assert_eq!(reconciled(&state).await, refused);
        assert!(server.take_requests().is_empty());

        expire();
        server.accepts_bindings.store(true, Ordering::Relaxed);
        assert_eq!(reconciled(&state).await, None);
        assert_eq!(
            server.take_requests(),
            ["DRY RUN policy", "DRY RUN binding", "POST policy", "POST binding"]
        );
        assert!(state.refused().is_empty());
    }

    /// They inject all the same.
    #[tokio::test]
    async fn objects_without_their_label_get_it_back_or_are_deleted() {
        let (mut state, server) = cluster();
        server.accepts_bindings.store(true, Ordering::Relaxed);
        assert_eq!(reconciled(&state).await, None);
        server.take_requests();
        let key = Key::cluster_scoped("sidecarset-web");
        state.cache::<Policy>().apply_watch_delete(&key, "policy");
        state.cache::<Binding>().apply_watch_delete(&key, "binding");
        server.labels_are_lost.store(true, Ordering::Relaxed);
        let reconcile_web = |state: &Arc<Policies>| reconcile(Arc::clone(state), Key::cluster_scoped("web"));
        for requests in [
            &["POST policy", "GET policy"][..],
            &["PUT policy", "POST binding", "GET binding"],
        ] {
            assert!(reconcile_web(&state).await.is_err());
            assert_eq!(server.take_requests(), requests);
        }
        let found = state.cache::<Binding>().get(&key).cloned();
        assert_eq!(reconciled(&state).await, None);
        assert_eq!(server.take_requests(), ["PUT binding"]);
        assert_eq!(reconciled(&state).await, None);
        assert!(server.take_requests().is_empty());

        // The set is paused before the label is written.
        state.cache::<Binding>().apply_read(&key, None, Instant::now());
        let found = found.map(Installed::versioned);
        state.cache::<Binding>().apply_read(&key, found, Instant::now());
        pause_set(&mut state);
        assert_eq!(reconciled(&state).await, None);
        assert_eq!(server.take_requests(), ["DELETE binding", "DELETE policy"]);
    }

    /// The label was lost while no manager ran, and the set was paused then.
    #[tokio::test]
    async fn object_without_its_label_is_found_at_the_start() {
        let (mut state, server) = cluster();
        pause_set(&mut state);
        let key = Key::cluster_scoped("sidecarset-web");
        let found = json!({ "metadata": { "name": "sidecarset-web", "uid": "policy", "resourceVersion": "1",
            "ownerReferences": [controller_reference("SidecarSet", "web", "u")] } });
        let found: AdmissionObject<Policy> = serde_json::from_value(found).unwrap();
        let found = Change {
            key,
            old: None,
            new: Some(Arc::new(Installed::new(&found))),
        };
        assert_eq!(apply(&state.policies, &found), BTreeSet::from(["web".to_owned()]));
        assert_eq!(reconciled(&state).await, None);
        assert_eq!(server.take_requests(), ["DELETE policy"]);
    }

    #[tokio::test]
    async fn nothing_is_written_while_a_name_is_taken() {
        let (state, server) = cluster();
        let foreign = json!({ "metadata": { "name": "sidecarset-web", "uid": "f", "resourceVersion": "1",
            "labels": { keys::SIDECAR_SET_NAME: "web" } } });
        let foreign: AdmissionObject<Binding> = serde_json::from_value(foreign).unwrap();
        let key = Key::cluster_scoped("sidecarset-web");
        let entry = Arc::new(Installed::new(&foreign)).versioned();
        state.cache::<Binding>().apply_watch(&key, entry);
        assert_eq!(reconciled(&state).await, Some("NameTaken"));
        assert!(server.take_requests().is_empty());

        // When it is deleted, nothing waits.
        state.cache::<Binding>().apply_watch_delete(&key, "f");
        server.accepts_bindings.store(true, Ordering::Relaxed);
        assert_eq!(reconciled(&state).await, None);
        assert_eq!(server.take_requests(), ["POST policy", "POST binding"]);
    }
}

//! `kubectl kruise rollout`: status, pause, resume, history and undo of CloneSets and SidecarSets.
//!
//! In:  the workload and its ControllerRevisions.
//! Out: lines, a table or JSON; patches of the workload that apply only to the object that was read.

pub mod plan;

use std::time::Duration;

use clap::Subcommand;
use k8s_openapi::api::apps::v1::ControllerRevision;
use kruise_api::cloneset::CloneSet;
use kruise_api::keys::SIDECAR_SET_NAME;
use kruise_api::owner::{Owner, OwnerKind};
use kruise_api::sidecarset::SidecarSet;
use kruise_api::text::printable;
use kruise_cluster::write;
use kube::api::ListParams;
use kube::core::Selector;
use kube::{Api, Resource};
use serde_json::{Value, json};

use super::arguments::{self, Target};
use super::client::{Connection, follow, get, list, patch_json, qualified_plural};
use super::error::Error;
use super::output::{
    Cell, OutputOptions, Tone, colours, json as to_json, print, print_line, print_note, table,
};
use super::pull::sleep_unless_zero;
use super::signals::interrupted;
use plan::{History, HistoryEntry, RolloutProgress, Undo};

/// Attempts to patch an object that others change at the same time.
const MAX_ATTEMPTS: u32 = 5;
/// How long `undo` waits for the manager to observe the newest spec.
const OBSERVE_TIMEOUT: Duration = Duration::from_secs(30);

/// Options of `rollout`.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Clone, Debug)]
enum Command {
    /// Follows a rollout to its end
    Status(StatusOptions),
    /// Stops a rollout at its current state
    Pause(TargetOptions),
    /// Continues a paused rollout
    Resume(TargetOptions),
    /// Lists the revisions
    History(HistoryOptions),
    /// Goes back to an earlier revision
    Undo(UndoOptions),
}

#[derive(clap::Args, Clone, Debug)]
struct TargetOptions {
    /// clone/NAME or sidecarset/NAME
    #[arg(value_name = "TYPE/NAME", value_parser = arguments::workload)]
    target: Target,
}

#[derive(clap::Args, Clone, Debug)]
struct StatusOptions {
    #[command(flatten)]
    target: TargetOptions,

    /// Whether to wait for the end of the rollout
    #[arg(short, long, default_value_t = true, num_args = 0..=1, require_equals = true,
        default_missing_value = "true", action = clap::ArgAction::Set)]
    watch: bool,

    /// How long to wait for the end, such as 10m; 0 is without limit
    #[arg(long, value_name = "DURATION", default_value = "0", value_parser = arguments::duration)]
    timeout: Duration,
}

#[derive(clap::Args, Clone, Debug)]
struct HistoryOptions {
    #[command(flatten)]
    target: TargetOptions,

    #[command(flatten)]
    output: OutputOptions,
}

#[derive(clap::Args, Clone, Debug)]
struct UndoOptions {
    #[command(flatten)]
    target: TargetOptions,

    /// Revision to go back to; 0 is the one before the newest
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(i64).range(0..))]
    to_revision: i64,
}

/// Shows or controls the rollout.
pub async fn run(connection: &Connection, options: Options) -> Result<(), Error> {
    match options.command {
        Command::Status(options) => show_status(connection, options).await,
        Command::Pause(options) => set_paused(connection, &options.target, true).await,
        Command::Resume(options) => set_paused(connection, &options.target, false).await,
        Command::History(options) => show_history(connection, &options).await,
        Command::Undo(options) => undo(connection, &options).await,
    }
}

fn not_a_workload() -> Error {
    Error::Usage("expected clone/NAME or sidecarset/NAME".to_owned())
}

fn sidecar_sets(connection: &Connection) -> Api<SidecarSet> {
    Api::all(connection.client.clone())
}

async fn show_status(connection: &Connection, options: StatusOptions) -> Result<(), Error> {
    let limit = options.timeout;
    let progress = match &options.target.target {
        Target::CloneSet(name) => {
            follow_rollout(
                &connection.api(),
                name,
                plan::clone_set_progress,
                options.watch,
                limit,
            )
            .await?
        }
        Target::SidecarSet(name) => {
            let sets = sidecar_sets(connection);
            follow_rollout(&sets, name, plan::sidecar_set_progress, options.watch, limit).await?
        }
        Target::Pod(_) => return Err(not_a_workload()),
    };
    match progress {
        RolloutProgress::Complete(line) | RolloutProgress::InProgress(line) => {
            print_line(&line);
            Ok(())
        }
        RolloutProgress::Failed(line) => Err(Error::Failed(printable(&line))),
    }
}

/// Follows a rollout to its end; without `watch`, returns its progress.
async fn follow_rollout<K: write::Object>(
    api: &Api<K>,
    name: &str,
    progress: impl Fn(&K) -> RolloutProgress,
    watch: bool,
    limit: Duration,
) -> Result<RolloutProgress, Error> {
    let object = get(api, name).await?;
    let uid = object.meta().uid.clone().unwrap_or_default();
    if !watch {
        return Ok(progress(&object));
    }
    let mut last = String::new();
    let following = follow(api, name, &uid, print_note, |object| match progress(object) {
        RolloutProgress::InProgress(line) => {
            if line != last {
                print_line(&line);
                last = line;
            }
            None
        }
        ended => Some(ended),
    });
    tokio::select! {
        ended = following => ended,
        () = interrupted() => Err(Error::Interrupted("interrupted; the rollout continues".to_owned())),
        () = sleep_unless_zero(limit) => {
            Err(Error::TimedOut(format!("timed out after {limit:?}; the rollout continues")))
        }
    }
}

async fn set_paused(connection: &Connection, target: &Target, paused: bool) -> Result<(), Error> {
    match target {
        Target::CloneSet(name) => {
            let read = |set: &CloneSet| set.spec.rolling_update().is_some_and(|update| update.paused);
            let spec = json!({ "updateStrategy": { "rollingUpdate": { "paused": paused } } });
            patch_paused(&connection.api(), name, paused, read, &spec).await
        }
        Target::SidecarSet(name) => {
            let read = |set: &SidecarSet| {
                set.spec
                    .update_strategy
                    .as_ref()
                    .is_some_and(|update| update.paused)
            };
            let spec = json!({ "updateStrategy": { "paused": paused } });
            patch_paused(&sidecar_sets(connection), name, paused, read, &spec).await
        }
        Target::Pod(_) => Err(not_a_workload()),
    }
}

async fn patch_paused<K: write::Object>(
    api: &Api<K>,
    name: &str,
    paused: bool,
    is_paused: impl Fn(&K) -> bool,
    spec: &Value,
) -> Result<(), Error> {
    let plural = qualified_plural::<K>();
    let mut attempts = 0;
    loop {
        let object = get(api, name).await?;
        if is_paused(&object) == paused {
            let state = if paused { "already paused" } else { "not paused" };
            return Err(Error::Refused(format!("{plural} {name:?} is {state}")));
        }
        let metadata = object.meta();
        let identity = json!({ "uid": metadata.uid, "resourceVersion": metadata.resource_version });
        let patch = json!({ "metadata": identity, "spec": spec });
        attempts += 1;
        match write::patch_merge(api, name, &patch).await {
            Ok(_) => break,
            Err(error) if error.conflict() && attempts < MAX_ATTEMPTS => {}
            Err(error) => return Err(error.into()),
        }
    }
    let done = if paused { "paused" } else { "resumed" };
    print_line(&format!("{} {done}", qualified_name::<K>(name)));
    Ok(())
}

/// `cloneset.apps.kruise.io/NAME`, as kubectl names objects in its results.
fn qualified_name<K: Resource<DynamicType = ()>>(name: &str) -> String {
    format!("{}.{}/{name}", K::kind(&()).to_lowercase(), K::group(&()))
}

async fn show_history(connection: &Connection, options: &HistoryOptions) -> Result<(), Error> {
    let history = match &options.target.target {
        Target::CloneSet(name) => {
            let set = get(&connection.api::<CloneSet>(), name).await?;
            History {
                kind: "CloneSet",
                namespace: connection.namespace.clone(),
                name: name.clone(),
                revisions: clone_set_history(connection, &set).await?,
            }
        }
        Target::SidecarSet(name) => {
            let set = get(&sidecar_sets(connection), name).await?;
            History {
                kind: "SidecarSet",
                namespace: String::new(),
                name: name.clone(),
                revisions: sidecar_set_history(connection, &set).await?,
            }
        }
        Target::Pod(_) => return Err(not_a_workload()),
    };
    if options.output.output.is_some() {
        print(&format!("{}\n", to_json(&history)));
        return Ok(());
    }
    let rows: Vec<[Cell; 6]> = history.revisions.iter().map(history_row).collect();
    let header = ["REVISION", "NAME", "CREATED", "STATE", "IMAGES", "CHANGE-CAUSE"];
    print(&table(header, &rows, colours()));
    Ok(())
}

fn history_row(entry: &HistoryEntry) -> [Cell; 6] {
    let state = match (entry.update_revision, entry.current_revision) {
        (true, true) => Cell::toned("current,update", Tone::Good),
        (true, false) => Cell::toned("update", Tone::Pending),
        (false, true) => Cell::toned("current", Tone::Pending),
        (false, false) => "".into(),
    };
    [
        entry.revision.to_string().into(),
        entry.name.clone().into(),
        entry
            .creation_timestamp
            .map(|time| time.to_string())
            .unwrap_or_default()
            .into(),
        state,
        entry.images.join(",").into(),
        entry.change_cause.clone().into(),
    ]
}

async fn clone_set_history(connection: &Connection, set: &CloneSet) -> Result<Vec<HistoryEntry>, Error> {
    let selector =
        Selector::try_from(set.spec.selector.clone()).map_err(|why| Error::Refused(why.to_string()))?;
    let revisions = connection.api::<ControllerRevision>();
    let objects = list_revisions(&revisions, ListParams::default().labels_from(&selector)).await?;
    let status = set.status.clone().unwrap_or_default();
    Ok(plan::history(
        &objects,
        &Owner::clone_set(&set.metadata),
        &status.update_revision,
        &status.current_revision,
    ))
}

async fn sidecar_set_history(connection: &Connection, set: &SidecarSet) -> Result<Vec<HistoryEntry>, Error> {
    let name = set.metadata.name.clone().unwrap_or_default();
    let revisions =
        Api::<ControllerRevision>::namespaced(connection.client.clone(), &connection.kruise_namespace);
    let params = ListParams::default().labels(&format!("{SIDECAR_SET_NAME}={name}"));
    let objects = list_revisions(&revisions, params).await?;
    let status = set.status.clone().unwrap_or_default();
    let owner = Owner {
        kind: OwnerKind::SidecarSet,
        name,
        uid: set.metadata.uid.clone().unwrap_or_default(),
    };
    Ok(plan::history(&objects, &owner, &status.latest_revision, ""))
}

async fn list_revisions(
    api: &Api<ControllerRevision>,
    params: ListParams,
) -> Result<Vec<ControllerRevision>, Error> {
    let mut objects = Vec::new();
    let unreadable = list(api, params, |object| objects.push(object)).await?;
    unreadable.iter().for_each(|problem| print_note(problem));
    Ok(objects)
}

async fn undo(connection: &Connection, options: &UndoOptions) -> Result<(), Error> {
    let mut attempts = 0;
    loop {
        attempts += 1;
        let result = match &options.target.target {
            Target::CloneSet(name) => undo_clone_set(connection, name, options.to_revision).await,
            Target::SidecarSet(name) => undo_sidecar_set(connection, name, options.to_revision).await,
            Target::Pod(_) => Err(not_a_workload()),
        };
        match result {
            Err(Error::Server(error)) if error.conflict() && attempts < MAX_ATTEMPTS => {}
            other => return other,
        }
    }
}

async fn undo_clone_set(connection: &Connection, name: &str, to: i64) -> Result<(), Error> {
    let sets: Api<CloneSet> = connection.api();
    let observed = |set: &CloneSet| set.status.as_ref().and_then(|status| status.observed_generation);
    let set = get_observed(&sets, name, observed).await?;
    let entries = clone_set_history(connection, &set).await?;
    let Some(entry) = select(&sets, name, &entries, to)? else {
        return Ok(());
    };
    let (uid, version) = identity(&set);
    let patch = plan::restore_clone_set(entry, &uid, &version);
    apply(&sets, name, entry, patch).await
}

async fn undo_sidecar_set(connection: &Connection, name: &str, to: i64) -> Result<(), Error> {
    let sets = sidecar_sets(connection);
    let observed = |set: &SidecarSet| set.status.as_ref().and_then(|status| status.observed_generation);
    let set = get_observed(&sets, name, observed).await?;
    let entries = sidecar_set_history(connection, &set).await?;
    let Some(entry) = select(&sets, name, &entries, to)? else {
        return Ok(());
    };
    let (uid, version) = identity(&set);
    let spec = serde_json::to_value(&set.spec).unwrap_or_default();
    let patch = plan::restore_sidecar_set(entry, &spec, &uid, &version);
    apply(&sets, name, entry, patch).await
}

/// The object once its newest spec is observed: until then it is not known which revision is the newest.
async fn get_observed<K: write::Object>(
    api: &Api<K>,
    name: &str,
    observed: impl Fn(&K) -> Option<i64>,
) -> Result<K, Error> {
    let object = get(api, name).await?;
    let uid = object.meta().uid.clone().unwrap_or_default();
    let following = follow(api, name, &uid, print_note, |object: &K| {
        (observed(object) >= object.meta().generation).then(|| object.clone())
    });
    let ended = tokio::time::timeout(OBSERVE_TIMEOUT, following).await;
    ended.unwrap_or_else(|_| {
        let plural = qualified_plural::<K>();
        Err(Error::Refused(format!(
            "kruise-manager has not observed the spec of {plural} {name:?} within {OBSERVE_TIMEOUT:?}"
        )))
    })
}

fn identity<K: Resource>(object: &K) -> (String, String) {
    let metadata = object.meta();
    (
        metadata.uid.clone().unwrap_or_default(),
        metadata.resource_version.clone().unwrap_or_default(),
    )
}

/// The revision to restore; `None` if there is nothing to do, which is printed.
fn select<'a, K: Resource<DynamicType = ()>>(
    _: &Api<K>,
    name: &str,
    entries: &'a [HistoryEntry],
    to: i64,
) -> Result<Option<&'a HistoryEntry>, Error> {
    match plan::undo(entries, to) {
        Undo::Restore(entry) => Ok(Some(entry)),
        Undo::Skip(number) => {
            let object = qualified_name::<K>(name);
            print_line(&format!(
                "{object} skipped rollback (current template already matches revision {number})"
            ));
            Ok(None)
        }
        Undo::Refuse(why) => Err(Error::Refused(format!(
            "{why} of {} {name:?}",
            qualified_plural::<K>()
        ))),
    }
}

async fn apply<K: write::Object>(
    api: &Api<K>,
    name: &str,
    entry: &HistoryEntry,
    patch: Option<Value>,
) -> Result<(), Error> {
    let revision = entry.revision;
    let patch = patch.and_then(|patch| serde_json::from_value(patch).ok());
    let patch = patch.ok_or_else(|| {
        Error::Refused(format!(
            "revision {revision} of {} {name:?} cannot be restored: its data is not valid",
            qualified_plural::<K>()
        ))
    })?;
    patch_json(api, name, patch).await?;
    print_line(&format!(
        "{} rolled back to revision {revision}",
        qualified_name::<K>(name)
    ));
    Ok(())
}

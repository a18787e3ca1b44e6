//! `kubectl kruise rollout`: status, pause, resume, history and undo of CloneSets and SidecarSets.
//!
//! In:  the workload and its ControllerRevisions.
//! Out: lines, a table or JSON; patches of the workload that apply only to the object that was read.

pub mod plan;

use std::cell::RefCell;
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
use tokio::time::Instant;

use super::arguments::{self, Target};
use super::client::{Connection, follow, get, list, patch_json, qualified_plural};
use super::error::Error;
use super::output::{
    Cell, OutputOptions, Tone, colours, json as to_json, print, print_line, print_note, table,
};
use super::pull::sleep_unless_zero;
use super::signals::interrupted;
use plan::{CloneSetRollout, History, HistoryEntry, RolloutProgress, Undo};

/// How long `undo` repeats its patch of an object that others change at the same time, as its status in a rollout.
const CONFLICT_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause between these attempts.
const CONFLICT_PAUSE: Duration = Duration::from_millis(500);
/// Time between two looks at what [`RolloutProgress::Failing`] reports.
const FAILURE_INTERVAL: Duration = Duration::from_secs(1);
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
        Target::CloneSet(name) if options.watch => {
            let mut rollout = CloneSetRollout::default();
            let observe = |set: &CloneSet, now: Duration| rollout.observe(set, now);
            follow_rollout(&connection.api::<CloneSet>(), name, observe, limit).await?
        }
        Target::CloneSet(name) => plan::clone_set_progress(&get(&connection.api::<CloneSet>(), name).await?),
        Target::SidecarSet(name) if options.watch => {
            let observe = |set: &SidecarSet, _: Duration| plan::sidecar_set_progress(set);
            follow_rollout(&sidecar_sets(connection), name, observe, limit).await?
        }
        Target::SidecarSet(name) => plan::sidecar_set_progress(&get(&sidecar_sets(connection), name).await?),
        Target::Pod(_) => return Err(not_a_workload()),
    };
    match progress {
        RolloutProgress::Complete(line)
        | RolloutProgress::InProgress(line)
        | RolloutProgress::Failing { line, .. } => {
            print_line(&line);
            Ok(())
        }
        RolloutProgress::Failed(line) => Err(Error::Failed(printable(&line))),
    }
}

/// Follows a rollout to its end. `observe` gets the time since the start, too.
async fn follow_rollout<K: write::Object>(
    api: &Api<K>,
    name: &str,
    mut observe: impl FnMut(&K, Duration) -> RolloutProgress,
    limit: Duration,
) -> Result<RolloutProgress, Error> {
    let start = Instant::now();
    let object = get(api, name).await?;
    let uid = object.meta().uid.clone().unwrap_or_default();
    let failing: RefCell<Option<(Duration, String)>> = RefCell::default();
    let mut last = String::new();
    let following = follow(api, name, &uid, print_note, |object| {
        let (line, failure) = match observe(object, start.elapsed()) {
            RolloutProgress::InProgress(line) => (line, None),
            RolloutProgress::Failing { line, failure, at } => (line, Some((at, failure))),
            ended => return Some(ended),
        };
        *failing.borrow_mut() = failure;
        if line != last {
            print_line(&line);
            last = line;
        }
        None
    });
    // The object need not change at that time.
    let failed = async {
        loop {
            tokio::time::sleep(FAILURE_INTERVAL).await;
            let is_due = |(at, _): &mut (Duration, String)| start.elapsed() >= *at;
            let due = failing.borrow_mut().take_if(is_due);
            if let Some((_, failure)) = due {
                return RolloutProgress::Failed(failure);
            }
        }
    };
    tokio::select! {
        ended = following => ended,
        failed = failed => Ok(failed),
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
    let object = get(api, name).await?;
    if is_paused(&object) == paused {
        let plural = qualified_plural::<K>();
        let state = if paused { "already paused" } else { "not paused" };
        return Err(Error::Refused(format!("{plural} {name:?} is {state}")));
    }
    // Without resourceVersion: during a rollout, each change of the status would be a conflict.
    let patch = json!({ "metadata": { "uid": object.meta().uid }, "spec": spec });
    write::patch_merge(api, name, &patch).await?;
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
    let start = Instant::now();
    loop {
        let result = match &options.target.target {
            Target::CloneSet(name) => undo_clone_set(connection, name, options.to_revision).await,
            Target::SidecarSet(name) => undo_sidecar_set(connection, name, options.to_revision).await,
            Target::Pod(_) => Err(not_a_workload()),
        };
        match result {
            Err(Error::Server(error)) if error.conflict() && start.elapsed() < CONFLICT_TIMEOUT => {
                tokio::time::sleep(CONFLICT_PAUSE).await;
            }
            other => return other,
        }
    }
}

async fn undo_clone_set(connection: &Connection, name: &str, to: i64) -> Result<(), Error> {
    let sets: Api<CloneSet> = connection.api();
    let is_observed = |set: &CloneSet| {
        let observed = set.status.as_ref().and_then(|status| status.observed_generation);
        observed >= set.metadata.generation || plan::is_template_refused(set)
    };
    let set = get_observed(&sets, name, is_observed).await?;
    let entries = clone_set_history(connection, &set).await?;
    let decision = plan::undo(&entries, to, plan::is_template_refused(&set));
    let Some(entry) = select(&sets, name, decision)? else {
        return Ok(());
    };
    let (uid, version) = identity(&set);
    let patch = plan::restore_clone_set(entry, &uid, &version);
    apply(&sets, name, entry, patch).await
}

async fn undo_sidecar_set(connection: &Connection, name: &str, to: i64) -> Result<(), Error> {
    let sets = sidecar_sets(connection);
    let is_observed = |set: &SidecarSet| {
        let observed = set.status.as_ref().and_then(|status| status.observed_generation);
        observed >= set.metadata.generation
    };
    let set = get_observed(&sets, name, is_observed).await?;
    let entries = sidecar_set_history(connection, &set).await?;
    let Some(entry) = select(&sets, name, plan::undo(&entries, to, false))? else {
        return Ok(());
    };
    let (uid, version) = identity(&set);
    let spec = serde_json::to_value(&set.spec).unwrap_or_default();
    let patch = plan::restore_sidecar_set(entry, &spec, &uid, &version);
    apply(&sets, name, entry, patch).await
}

/// The object once its newest spec is observed, or refused: until then it is not known which revision is the newest.
async fn get_observed<K: write::Object>(
    api: &Api<K>,
    name: &str,
    is_observed: impl Fn(&K) -> bool,
) -> Result<K, Error> {
    let object = get(api, name).await?;
    let uid = object.meta().uid.clone().unwrap_or_default();
    let following = follow(api, name, &uid, print_note, |object: &K| {
        is_observed(object).then(|| object.clone())
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
    decision: Undo<'a>,
) -> Result<Option<&'a HistoryEntry>, Error> {
    match decision {
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::fake_server::{self, Request, Response, failure};

    fn web() -> Target {
        Target::CloneSet("web".to_owned())
    }

    /// A CloneSet of generation 2 whose Pods are not updated yet.
    fn clone_set(observed: i64, conditions: Value) -> Value {
        json!({
            "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet",
            "metadata": { "name": "web", "namespace": "n", "uid": "u", "resourceVersion": "7", "generation": 2 },
            "spec": { "replicas": 1, "selector": { "matchLabels": { "app": "web" } }, "template": {},
                "progressDeadlineSeconds": 60 },
            "status": { "observedGeneration": observed, "replicas": 1, "readyReplicas": 1, "availableReplicas": 1,
                "updatedReplicas": 0, "updatedReadyReplicas": 0, "expectedUpdatedReplicas": 1,
                "updateRevision": "web-b", "conditions": conditions },
        })
    }

    fn condition(type_: &str, reason: &str) -> Value {
        json!([{ "type": type_, "status": "True", "reason": reason, "message": "m" }])
    }

    fn revisions() -> Value {
        let revision = |name: &str, number: i64| {
            let owner = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "web", "uid": "u",
                "controller": true });
            json!({ "metadata": { "name": name, "ownerReferences": [owner] }, "revision": number,
                "data": { "spec": { "template": { "$patch": "replace", "note": name } } } })
        };
        let items = [revision("web-a", 1), revision("web-b", 2)];
        json!({ "apiVersion": "apps/v1", "kind": "ControllerRevisionList", "metadata": {}, "items": items })
    }

    /// An API server with this CloneSet, and the patches that it gets, to which it responds so.
    fn serve(
        set: Value,
        respond: impl Fn(usize) -> Response + Send + Sync + 'static,
    ) -> (Connection, Arc<Mutex<Vec<Value>>>) {
        let patches = Arc::new(Mutex::new(Vec::new()));
        let received = patches.clone();
        let connection = fake_server::connection(move |request: &Request| {
            if request.method == "PATCH" {
                let mut received = received.lock().unwrap();
                received.push(request.body.clone());
                return respond(received.len());
            }
            if request.path.ends_with("/controllerrevisions") {
                return (200, revisions());
            }
            // No watch is served, so that the object is seldom read.
            let silent = request.query.contains("watch=");
            (if silent { fake_server::SILENT } else { 200 }, set.clone())
        });
        (connection, patches)
    }

    fn undo_options(to_revision: i64) -> UndoOptions {
        let target = TargetOptions { target: web() };
        UndoOptions { target, to_revision }
    }

    /// What the patch of `undo` restores.
    fn restored(patch: &Value) -> &Value {
        &patch[2]["value"]["note"]
    }

    #[tokio::test(start_paused = true)]
    async fn refused_template_is_left_at_once() {
        let refused = clone_set(1, condition("Waiting", "TemplateRefused"));
        let (connection, patches) = serve(refused, |_| (200, clone_set(1, json!([]))));
        let start = Instant::now();
        for to in [0, 2, 1] {
            undo(&connection, &undo_options(to)).await.unwrap();
        }
        assert_eq!(start.elapsed(), Duration::ZERO);
        let patches = patches.lock().unwrap();
        let templates: Vec<&Value> = patches.iter().map(restored).collect();
        assert_eq!(templates, ["web-b", "web-b", "web-a"]);
    }

    #[tokio::test(start_paused = true)]
    async fn spec_that_is_not_observed_is_waited_for() {
        let (connection, patches) = serve(clone_set(1, json!([])), |_| (200, Value::Null));
        let error = undo(&connection, &undo_options(0)).await.unwrap_err();
        assert!(error.text().contains("has not observed the spec"), "{error}");
        assert!(patches.lock().unwrap().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn undo_gets_through_a_busy_status() {
        let respond = |attempt: usize| match attempt {
            20 => (200, clone_set(2, json!([]))),
            _ => failure(409, "Conflict"),
        };
        let (connection, patches) = serve(clone_set(2, json!([])), respond);
        undo(&connection, &undo_options(0)).await.unwrap();
        assert_eq!(restored(patches.lock().unwrap().last().unwrap()), "web-a");
        let (connection, _) = serve(clone_set(2, json!([])), |_| failure(409, "Conflict"));
        let start = Instant::now();
        undo(&connection, &undo_options(0)).await.unwrap_err();
        assert_eq!(start.elapsed().as_secs(), 30);
    }

    #[tokio::test]
    async fn pause_does_not_depend_on_the_status() {
        let (connection, patches) = serve(clone_set(2, json!([])), |_| (200, clone_set(2, json!([]))));
        set_paused(&connection, &web(), true).await.unwrap();
        let expected = json!({ "metadata": { "uid": "u" },
            "spec": { "updateStrategy": { "rollingUpdate": { "paused": true } } } });
        assert_eq!(*patches.lock().unwrap(), [expected]);
    }

    /// Follows a rollout that does not change; returns its failure and the seconds until then.
    async fn follow_to_failure(set: Value) -> (String, u64) {
        let (connection, _) = serve(set, |_| (200, Value::Null));
        let options = StatusOptions {
            target: TargetOptions { target: web() },
            watch: true,
            timeout: Duration::from_secs(100),
        };
        let start = Instant::now();
        let error = show_status(&connection, options).await.unwrap_err();
        (error.text(), start.elapsed().as_secs())
    }

    #[tokio::test(start_paused = true)]
    async fn failure_needs_no_change_of_the_object() {
        let (error, seconds) =
            follow_to_failure(clone_set(2, condition("Progressing", "ProgressDeadlineExceeded"))).await;
        assert!(
            error.starts_with("error: cloneset \"web\" exceeded its progress deadline: "),
            "{error}"
        );
        assert!((60..=61).contains(&seconds), "{seconds} s");
        let (error, seconds) = follow_to_failure(clone_set(1, condition("Waiting", "TemplateRefused"))).await;
        assert!(error.ends_with("TemplateRefused: m"), "{error}");
        assert!((10..=11).contains(&seconds), "{seconds} s");
        let (error, seconds) = follow_to_failure(clone_set(2, json!([]))).await;
        assert_eq!(
            (error.as_str(), seconds),
            ("error: timed out after 100s; the rollout continues", 100)
        );
    }

    #[tokio::test]
    async fn state_that_is_printed_once_shows_a_refusal() {
        let once = async |set: Value| {
            let (connection, _) = serve(set, |_| (200, Value::Null));
            let options = StatusOptions {
                target: TargetOptions { target: web() },
                watch: false,
                timeout: Duration::ZERO,
            };
            show_status(&connection, options).await
        };
        assert!(
            once(clone_set(1, condition("Waiting", "TemplateRefused")))
                .await
                .is_err()
        );
        let late = clone_set(2, condition("Progressing", "ProgressDeadlineExceeded"));
        assert!(once(late).await.is_ok());
    }
}

//! `kubectl kruise status`: what is installed, whether it is ready, and what waits for what.
//!
//! In:  the DaemonSet, Deployments and Lease of Kruise, its CRDs, and the objects of its kinds.
//! Out: tables or JSON; exit code 1 if a part could not be read, with all other parts.

pub mod plan;

use futures::future::join_all;
use futures::join;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kruise_api::Kind;
use kruise_api::cloneset::CloneSet;
use kruise_api::container_recreate_job::ContainerRecreateJob;
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::image_list_pull_job::ImageListPullJob;
use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::sidecarset::SidecarSet;
use kruise_cluster::write;
use kube::api::ListParams;
use kube::core::Selector;
use kube::{Api, Resource};
use serde::de::DeserializeOwned;

use super::client::{Connection, ScopeOptions, list};
use super::error::Error;
use super::output::{Cell, OutputOptions, Tone, colours, json, print, table, unread};
use plan::{ClusterStatus, CrdStatus, DaemonStatus, DeploymentStatus, Leader, WaitingObject};

const DAEMON: &str = "kruise-daemon";
const MANAGER: &str = "kruise-manager";
const WEBHOOK: &str = "kruise-webhook";
/// What errors are about.
const DAEMON_SET: &str = "DaemonSet kruise-daemon";
const MANAGER_DEPLOYMENT: &str = "Deployment kruise-manager";
const WEBHOOK_DEPLOYMENT: &str = "Deployment kruise-webhook";

/// Options of `status`.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct Options {
    #[command(flatten)]
    scope: ScopeOptions,

    #[command(flatten)]
    output: OutputOptions,
}

/// What the parts of the status could not be read for, in one list.
struct Errors(Vec<String>);

impl Errors {
    /// The value; an error is noted under this name.
    fn note<T: Default>(&mut self, what: &str, result: Result<T, Error>) -> T {
        result.unwrap_or_else(|error| {
            self.0.push(format!("{what}: {}", error.text()));
            T::default()
        })
    }
}

/// Prints the status.
pub async fn run(connection: &Connection, options: Options) -> Result<(), Error> {
    let status = Box::pin(read(&connection.in_scope(options.scope))).await;
    match options.output.output {
        Some(_) => print(&format!("{}\n", json(&status))),
        None => print(&render(&status, colours())),
    }
    match status.errors.len() {
        0 => Ok(()),
        count => Err(Error::Failed(format!(
            "{count} part(s) of the status could not be read"
        ))),
    }
}

async fn read(connection: &Connection) -> ClusterStatus {
    let (daemon, manager, webhook, leader, crds, (waiting, list_errors)) = join!(
        read_daemons(connection),
        read_deployment(connection, MANAGER),
        read_deployment(connection, WEBHOOK),
        read_leader(connection),
        read_crds(connection),
        read_waiting(connection),
    );
    let mut errors = Errors(Vec::new());
    let leader = errors.note("Lease kruise-manager", leader);
    let (leader, former_leader) = match leader {
        Some(leader) if leader.expired => (None, Some(leader.holder)),
        leader => (leader.map(|leader| leader.holder), None),
    };
    let mut status = ClusterStatus {
        daemon: errors.note(DAEMON_SET, daemon),
        manager: errors.note(MANAGER_DEPLOYMENT, manager),
        webhook: errors.note(WEBHOOK_DEPLOYMENT, webhook),
        leader,
        former_leader,
        crds: Vec::new(),
        waiting,
        errors: Vec::new(),
    };
    for (name, established) in crds {
        let established = errors.note(&format!("CRD {name}"), established);
        status.crds.push(CrdStatus { name, established });
    }
    status.errors = [errors.0, list_errors].concat();
    status
}

fn system_api<K>(connection: &Connection) -> Api<K>
where
    K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
{
    Api::namespaced(connection.client.clone(), &connection.kruise_namespace)
}

async fn read_daemons(connection: &Connection) -> Result<Option<DaemonStatus>, Error> {
    let Some(set) = write::get(&system_api::<DaemonSet>(connection), DAEMON).await? else {
        return Ok(None);
    };
    let selector = set
        .spec
        .as_ref()
        .map(|spec| spec.selector.clone())
        .unwrap_or_default();
    let selector = Selector::try_from(selector).map_err(|why| Error::Refused(why.to_string()))?;
    let mut pods = Vec::new();
    let params = ListParams::default().labels_from(&selector);
    list(&system_api::<Pod>(connection), params, |pod: Pod| pods.push(pod)).await?;
    Ok(Some(plan::daemon_status(&set, &pods)))
}

async fn read_deployment(connection: &Connection, name: &str) -> Result<Option<DeploymentStatus>, Error> {
    let found = write::get(&system_api::<Deployment>(connection), name).await?;
    Ok(found.as_ref().map(plan::deployment_status))
}

async fn read_leader(connection: &Connection) -> Result<Option<Leader>, Error> {
    let lease = write::get(&system_api::<Lease>(connection), MANAGER).await?;
    Ok(lease.and_then(|lease| plan::leader(&lease, Timestamp::now())))
}

async fn read_crds(connection: &Connection) -> Vec<(String, Result<Option<bool>, Error>)> {
    let crds = &Api::<CustomResourceDefinition>::all(connection.client.clone());
    join_all(Kind::ALL.map(|kind| async move {
        let name = kind.crd_name();
        let found = write::get(crds, &name).await;
        let established = found.map(|crd| Some(crd.is_some_and(|crd| plan::is_established(&crd))));
        (name, established.map_err(Error::from))
    }))
    .await
}

async fn read_waiting(connection: &Connection) -> (Vec<WaitingObject>, Vec<String>) {
    let (sets, sidecar_sets, jobs, list_jobs, recreate_jobs, requests) = join!(
        list_waiting(connection.api_of_scope::<CloneSet>(), plan::waiting_clone_set),
        list_waiting(
            Api::<SidecarSet>::all(connection.client.clone()),
            plan::waiting_sidecar_set
        ),
        list_waiting(connection.api_of_scope::<ImagePullJob>(), plan::waiting_pull_job),
        list_waiting(
            connection.api_of_scope::<ImageListPullJob>(),
            plan::waiting_list_pull_job
        ),
        list_waiting(
            connection.api_of_scope::<ContainerRecreateJob>(),
            plan::waiting_recreate_job
        ),
        list_waiting(
            connection.api_of_scope::<ContainerRecreateRequest>(),
            plan::waiting_recreate_request
        ),
    );
    let (mut objects, mut errors) = (Vec::new(), Vec::new());
    for (found, problems) in [sets, sidecar_sets, jobs, list_jobs, recreate_jobs, requests] {
        objects.extend(found);
        errors.extend(problems);
    }
    objects.sort();
    (objects, errors)
}

async fn list_waiting<K>(
    api: Api<K>,
    waiting: impl Fn(&K) -> Option<WaitingObject>,
) -> (Vec<WaitingObject>, Vec<String>)
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned,
{
    let mut found = Vec::new();
    match list(&api, ListParams::default(), |object: K| {
        found.extend(waiting(&object))
    })
    .await
    {
        Ok(unreadable) => (found, unreadable),
        // Without its CRD a kind has no objects; the CRD is reported as missing.
        Err(Error::NoResourceType(_)) => (found, Vec::new()),
        Err(error) => (found, vec![format!("{}: {}", K::plural(&()), error.text())]),
    }
}

/// The status as tables.
fn render(status: &ClusterStatus, colours: bool) -> String {
    let leader = match (&status.leader, &status.former_leader) {
        (Some(leader), _) => format!("leader is {leader}"),
        (None, Some(former)) => format!("no leader, the last one was {former}"),
        (None, None) => String::new(),
    };
    let absent = |what: &str| absent_state(status, what);
    let rows = [
        daemon_row(status.daemon.as_ref(), absent(DAEMON_SET)),
        deployment_row(
            "manager",
            status.manager.as_ref(),
            &leader,
            absent(MANAGER_DEPLOYMENT),
        ),
        deployment_row("webhook", status.webhook.as_ref(), "", absent(WEBHOOK_DEPLOYMENT)),
        crd_row(&status.crds),
    ];
    let mut text = table(["COMPONENT", "READY", "STATE", "NOTE"], &rows, colours);
    if let Some(daemon) = status
        .daemon
        .as_ref()
        .filter(|daemon| !daemon.not_ready.is_empty())
    {
        let rows: Vec<[Cell; 3]> = daemon
            .not_ready
            .iter()
            .map(|pod| {
                [
                    pod.node.clone().into(),
                    pod.pod.clone().into(),
                    Cell::toned(pod.reason.clone(), Tone::Bad),
                ]
            })
            .collect();
        text += "\nDaemons that are not ready:\n";
        text += &table(["NODE", "POD", "REASON"], &rows, colours);
    }
    text += "\n";
    if status.waiting.is_empty() && status.errors.is_empty() {
        text += "Nothing waits and nothing has failed.\n";
    } else if status.waiting.is_empty() {
        text += "Nothing waits or has failed as far as it could be read.\n";
    } else {
        let rows: Vec<[Cell; 6]> = status.waiting.iter().map(waiting_row).collect();
        let header = ["KIND", "NAMESPACE", "NAME", "STATE", "REASON", "MESSAGE"];
        text += &table(header, &rows, colours);
    }
    text + &unread(&status.errors, colours)
}

/// The state of a component that was not read.
fn absent_state(status: &ClusterStatus, what: &str) -> Cell {
    if status.errors.iter().any(|error| error.starts_with(what)) {
        Cell::toned("Unknown", Tone::Pending)
    } else {
        Cell::toned("NotFound", Tone::Bad)
    }
}

fn daemon_row(daemon: Option<&DaemonStatus>, absent: Cell) -> [Cell; 4] {
    let Some(daemon) = daemon else {
        return ["daemon".into(), "".into(), absent, "".into()];
    };
    let note = match daemon.desired.saturating_sub(daemon.ready) {
        missing if missing > 0 => format!("not ready on {missing} node(s)"),
        _ => String::new(),
    };
    component_row("daemon", daemon.desired, daemon.ready, daemon.updated, note)
}

fn deployment_row(name: &str, status: Option<&DeploymentStatus>, note: &str, absent: Cell) -> [Cell; 4] {
    match status {
        Some(status) => component_row(
            name,
            status.desired,
            status.ready,
            status.updated,
            note.to_owned(),
        ),
        None => [name.into(), "".into(), absent, note.into()],
    }
}

fn component_row(name: &str, desired: i32, ready: i32, updated: i32, note: String) -> [Cell; 4] {
    let (state, tone) = if desired == 0 {
        ("NotRunning", Tone::Bad)
    } else if ready < desired {
        ("NotReady", Tone::Bad)
    } else if updated < desired {
        ("Updating", Tone::Pending)
    } else {
        ("Ready", Tone::Good)
    };
    let mut notes = vec![note];
    if updated < desired {
        notes.push(format!("{updated} of {desired} updated"));
    }
    notes.retain(|note| !note.is_empty());
    let ready = format!("{ready}/{desired}");
    [
        name.into(),
        ready.into(),
        Cell::toned(state, tone),
        notes.join(", ").into(),
    ]
}

fn crd_row(crds: &[CrdStatus]) -> [Cell; 4] {
    let established = crds.iter().filter(|crd| crd.established == Some(true)).count();
    let missing = crds.iter().filter(|crd| crd.established == Some(false));
    let missing: Vec<&str> = missing.map(|crd| crd.name.as_str()).collect();
    let (state, tone) = if established == crds.len() {
        ("Ready", Tone::Good)
    } else if missing.is_empty() {
        ("Unknown", Tone::Pending)
    } else {
        ("NotReady", Tone::Bad)
    };
    let note = match missing.is_empty() {
        true => String::new(),
        false => format!("missing: {}", missing.join(", ")),
    };
    let ready = format!("{established}/{}", crds.len());
    ["CRDs".into(), ready.into(), Cell::toned(state, tone), note.into()]
}

fn waiting_row(object: &WaitingObject) -> [Cell; 6] {
    let tone = if object.state == kruise_api::image_pull_job::FAILED {
        Tone::Bad
    } else {
        Tone::Pending
    };
    [
        object.kind.into(),
        object.namespace.clone().into(),
        object.name.clone().into(),
        Cell::toned(object.state.clone(), tone),
        object.reason.clone().into(),
        object.message.clone().into(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_cluster_has_no_component() {
        let crds = vec![CrdStatus {
            name: "clonesets.apps.kruise.io".into(),
            established: Some(false),
        }];
        let status = ClusterStatus {
            crds,
            ..ClusterStatus::default()
        };
        let text = render(&status, false);
        assert!(text.contains("daemon      -       NotFound   -\n"), "{text}");
        assert!(
            text.contains("CRDs        0/1     NotReady   missing: clonesets.apps.kruise.io\n"),
            "{text}"
        );
        assert!(
            text.ends_with("\nNothing waits and nothing has failed.\n"),
            "{text}"
        );
    }

    #[test]
    fn messages_of_tenants_are_one_line() {
        let object = WaitingObject {
            kind: "CloneSet",
            namespace: "a".into(),
            name: "web".into(),
            state: "Waiting".into(),
            reason: "X".into(),
            message: "a\u{1b}[2J\nmanager   2/2".into(),
        };
        let status = ClusterStatus {
            waiting: vec![object],
            errors: vec!["b\u{1b}c".into()],
            ..ClusterStatus::default()
        };
        let text = render(&status, true);
        assert!(text.contains("a\\u{1b}[2J\\nmanager   2/2\n"), "{text}");
        assert!(text.contains("b\\u{1b}c"), "{text}");
    }

    #[test]
    fn what_could_not_be_read_is_unknown() {
        let status = ClusterStatus {
            errors: vec!["DaemonSet kruise-daemon: forbidden".into()],
            ..ClusterStatus::default()
        };
        let text = render(&status, false);
        assert!(text.contains("daemon      -       Unknown    -\n"), "{text}");
        assert!(text.contains("manager     -       NotFound   -\n"), "{text}");
        assert!(!text.contains("nothing has failed"), "{text}");
    }

    /// The Pods of the template before are ready, and those of the new one never are.
    #[test]
    fn update_that_does_not_continue_is_not_ready() {
        let deployment = |updated: i32| {
            let status = ClusterStatus {
                manager: Some(DeploymentStatus {
                    desired: 2,
                    ready: 2,
                    updated,
                }),
                leader: Some("a".into()),
                ..ClusterStatus::default()
            };
            render(&status, false)
        };
        let text = deployment(1);
        assert!(
            text.contains("manager     2/2     Updating   leader is a, 1 of 2 updated\n"),
            "{text}"
        );
        assert!(deployment(2).contains("manager     2/2     Ready      leader is a\n"));
    }

    #[test]
    fn component_without_replicas_does_not_run() {
        let none = DeploymentStatus {
            desired: 0,
            ready: 0,
            updated: 0,
        };
        let status = ClusterStatus {
            manager: Some(none),
            former_leader: Some("manager-1_x".into()),
            ..ClusterStatus::default()
        };
        let text = render(&status, false);
        let row = "manager     0/0     NotRunning   no leader, the last one was manager-1_x\n";
        assert!(text.contains(row), "{text}");
    }
}

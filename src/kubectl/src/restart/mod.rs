//! `kubectl kruise restart`: ContainerRecreateRequests, followed to their end.
//!
//! In:  a Pod or the Pods of a CloneSet, names of containers; the status of the requests.
//! Out: one new request per Pod, at most `--max-unavailable` at a time; exit code 1 when one fails.

pub mod plan;

use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use k8s_openapi::api::core::v1::Pod;
use kruise_api::cloneset::CloneSet;
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::keys::CRR_POD_UID;
use kruise_api::owner::Owner;
use kruise_api::text::printable;
use kube::api::ListParams;
use kube::core::Selector;
use kube::{Api, ResourceExt};

use super::arguments::{self, Target};
use super::client::{Connection, create, follow, get, list};
use super::error::Error;
use super::output::{print_line, print_note};
use super::pull::sleep_unless_zero;
use super::signals::interrupted;
use super::status::plan::{RecreateOutcome, recreate_outcome};
use plan::{Limits, PodState};

/// Options of `restart`.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// A Pod, or clone/NAME for all Pods of a CloneSet
    #[arg(value_name = "POD|clone/NAME", value_parser = arguments::target)]
    target: Target,

    /// Container to restart; may be repeated
    #[arg(short, long, required = true, value_name = "NAME", value_parser = arguments::container_name)]
    container: Vec<String>,

    /// How many Pods of a CloneSet are restarted at a time
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    max_unavailable: u16,

    /// Restart the other Pods of a CloneSet after a failure, too
    #[arg(long)]
    continue_on_failure: bool,

    /// How long to wait for the end, such as 10m; 0 is without limit
    #[arg(long, value_name = "DURATION", default_value = "0", value_parser = arguments::duration)]
    timeout: Duration,
}

/// Restarts the containers.
pub async fn run(connection: &Connection, options: Options) -> Result<(), Error> {
    let Options {
        target,
        mut container,
        max_unavailable,
        continue_on_failure,
        timeout,
    } = options;
    let mut seen = std::collections::BTreeSet::new();
    container.retain(|name| seen.insert(name.clone()));
    let pods = match &target {
        Target::Pod(name) => vec![get(&connection.api::<Pod>(), name).await?],
        Target::CloneSet(name) => pods_of(connection, name).await?,
        Target::SidecarSet(_) => {
            return Err(Error::Usage(
                "a SidecarSet has no Pods of its own; expected a Pod or clone/NAME".into(),
            ));
        }
    };
    check_containers(&pods, &container)?;
    let limits = Limits {
        max_unavailable: max_unavailable.into(),
        continue_on_failure,
    };
    let mut states = vec![PodState::Pending; pods.len()];
    let stopped = tokio::select! {
        () = restart_pods(connection, &pods, &container, limits, &mut states) => None,
        () = interrupted() => Some((Error::Interrupted as fn(String) -> Error, "interrupted".to_owned())),
        () = sleep_unless_zero(timeout) => Some((Error::TimedOut as fn(String) -> Error, format!("timed out after {timeout:?}"))),
    };
    let summary = plan::summary(&states);
    if let Some((error, why)) = stopped {
        let namespace = &connection.namespace;
        let options = printable(&connection.cluster_options);
        return Err(error(format!(
            "{why}: {summary}. Requests in progress continue. To follow them:\n  \
             kubectl get containerrecreaterequests -n {namespace}{options} -w"
        )));
    }
    if states.iter().all(|state| *state == PodState::Succeeded) {
        if let Target::CloneSet(_) = target {
            print_line(&summary);
        }
        return Ok(());
    }
    Err(Error::Failed(summary))
}

/// The Pods of a CloneSet that can be restarted, by name.
async fn pods_of(connection: &Connection, name: &str) -> Result<Vec<Pod>, Error> {
    let set: CloneSet = get(&connection.api(), name).await?;
    let owner = Owner::clone_set(&set.metadata);
    let selector =
        Selector::try_from(set.spec.selector.clone()).map_err(|why| Error::Refused(why.to_string()))?;
    let (mut pods, mut skipped) = (Vec::new(), 0);
    let params = ListParams::default().labels_from(&selector);
    let unreadable = list(&connection.api::<Pod>(), params, |pod: Pod| {
        if plan::is_restartable(&pod, &owner) {
            pods.push(pod);
        } else if Owner::controller(&pod.metadata).as_ref() == Some(&owner) {
            skipped += 1;
        }
    })
    .await?;
    for problem in unreadable {
        print_note(&problem);
    }
    if skipped > 0 {
        print_note(&format!("skipped {skipped} Pod(s) that do not run"));
    }
    if pods.is_empty() {
        return Err(Error::Refused(format!(
            "clonesets.apps.kruise.io {name:?} has no running Pods"
        )));
    }
    pods.sort_by_key(ResourceExt::name_any);
    Ok(pods)
}

fn check_containers(pods: &[Pod], containers: &[String]) -> Result<(), Error> {
    for pod in pods {
        if let Some(missing) = plan::missing_containers(pod, containers).first() {
            return Err(Error::Refused(format!(
                "container {missing} is not in pod {}, or it is an init container that does not restart",
                pod.name_any()
            )));
        }
    }
    Ok(())
}

/// Restarts the Pods within the limits; `states` shows how far it is, also when this is dropped.
async fn restart_pods(
    connection: &Connection,
    pods: &[Pod],
    containers: &[String],
    limits: Limits,
    states: &mut [PodState],
) {
    let mut running = FuturesUnordered::new();
    loop {
        for position in plan::next(states, limits) {
            let (Some(state), Some(pod)) = (states.get_mut(position), pods.get(position)) else {
                continue;
            };
            *state = PodState::Recreating;
            running.push(async move { (position, restart_pod(connection, pod, containers).await) });
        }
        let Some((position, result)) = running.next().await else {
            return;
        };
        let name = pods.get(position).map(ResourceExt::name_any).unwrap_or_default();
        let state = match result {
            Ok(()) => {
                print_line(&format!("pod/{name} restarted"));
                PodState::Succeeded
            }
            Err(error) => {
                print_note(&format!("pod/{name}: {}", error.text()));
                PodState::Failed
            }
        };
        if let Some(place) = states.get_mut(position) {
            *place = state;
        }
    }
}

/// Creates the request of one Pod, and follows it.
async fn restart_pod(connection: &Connection, pod: &Pod, containers: &[String]) -> Result<(), Error> {
    let requests: Api<ContainerRecreateRequest> = connection.api();
    let name = pod.name_any();
    let request = create(
        &requests,
        &plan::request(&connection.namespace, &name, containers),
    )
    .await?;
    print_line(&format!(
        "containerrecreaterequest.apps.kruise.io/{} created",
        request.name_any()
    ));
    // Admission records the Pod that the request is for.
    let recorded = request.labels().get(CRR_POD_UID);
    if recorded.is_some_and(|uid| Some(uid) != pod.metadata.uid.as_ref()) {
        return Err(Error::Failed(format!(
            "another Pod has this name now, and {} restarts its containers",
            request.name_any()
        )));
    }
    let (request_name, uid) = (request.name_any(), request.uid().unwrap_or_default());
    let mut last = String::new();
    let outcome = follow(&requests, &request_name, &uid, print_note, |request| {
        let status = request.status.clone().unwrap_or_default();
        match recreate_outcome(&status) {
            RecreateOutcome::Unfinished => {
                let line = plan::progress_line(&status);
                if line != last {
                    print_note(&format!("pod/{name}: {line}"));
                    last = line;
                }
                None
            }
            outcome => Some(outcome),
        }
    });
    match outcome.await? {
        RecreateOutcome::Failed(reason, message) => {
            let text = [reason, message].into_iter().filter(|text| !text.is_empty());
            let text = text.collect::<Vec<_>>().join(": ");
            Err(Error::Failed(format!("restart failed: {}", printable(&text))))
        }
        RecreateOutcome::Succeeded | RecreateOutcome::Unfinished => Ok(()),
    }
}

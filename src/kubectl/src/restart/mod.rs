//! `kubectl kruise restart`: ContainerRecreateRequests, followed to their end.
//!
//! In:  a Pod or the Pods of a CloneSet, names of containers; the status of the requests.
//! Out: one new request per Pod, at most `--max-unavailable` at a time; exit code 1 when one fails. The next one is
//! created when a Pod is available again.

pub mod plan;

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use futures::StreamExt;
use futures::future::LocalBoxFuture;
use futures::stream::FuturesUnordered;
use k8s_openapi::api::core::v1::Pod;
use kruise_api::cloneset::CloneSet;
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::keys::CRR_POD_UID;
use kruise_api::owner::Owner;
use kruise_api::text::printable;
use kruise_cluster::write;
use kube::api::ListParams;
use kube::core::Selector;
use kube::{Api, ResourceExt};

use super::arguments::{self, Target};
use super::client::{Connection, create_once, follow, get, list, retry};
use super::error::Error;
use super::output::{print_line, print_note};
use super::pull::sleep_unless_zero;
use super::signals::interrupted;
use super::status::plan::{RecreateOutcome, recreate_outcome};
use plan::{Limits, PodState};

/// Characters of generated names, as the API server chooses them.
const SUFFIX_CHARS: &str = "bcdfghjklmnpqrstvwxz2456789";

/// Options of `restart`.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// A Pod, or clone/NAME for all Pods of a CloneSet
    #[arg(value_name = "POD|clone/NAME", value_parser = arguments::target)]
    target: Target,

    /// Container to restart; may be repeated
    #[arg(short, long, required = true, value_name = "NAME", value_parser = arguments::container_name)]
    container: Vec<String>,

    /// How many Pods of a CloneSet are restarted, or not ready after it, at a time
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
    if let Some((error, why)) = stopped {
        let follow = follow_command(connection, "containerrecreaterequests");
        return Err(error(format!("{why}: {}", plan::unfinished(&states, &follow))));
    }
    let summary = plan::summary(&states);
    if plan::is_success(&states) {
        if let Target::CloneSet(_) = target {
            print_line(&summary);
        }
        return Ok(());
    }
    Err(Error::Failed(summary))
}

/// The command that shows these objects as they change.
fn follow_command(connection: &Connection, what: &str) -> String {
    let namespace = &connection.namespace;
    let options = printable(&connection.cluster_options);
    format!("kubectl get {what} -n {namespace}{options} -w")
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
    let states = Cell::from_mut(states).as_slice_of_cells();
    let current = || -> Vec<PodState> { states.iter().map(Cell::get).collect() };
    let mut running = FuturesUnordered::new();
    let mut unavailable: FuturesUnordered<LocalBoxFuture<'_, ()>> = FuturesUnordered::new();
    loop {
        for position in plan::next(&current(), unavailable.len(), limits) {
            let (Some(state), Some(pod)) = (states.get(position), pods.get(position)) else {
                continue;
            };
            state.set(PodState::Requesting);
            running.push(async move {
                let on_created = || state.set(PodState::Recreating);
                let restart = Box::pin(restart_pod(connection, pod, containers, on_created));
                (pod, state, restart.await)
            });
        }
        tokio::select! {
            Some((pod, state, result)) = running.next() => {
                let ended = match result {
                    Ok(Some(request)) => {
                        state.set(report_end(pod, &request));
                        Some(request)
                    }
                    Ok(None) => {
                        state.set(PodState::Skipped);
                        continue;
                    }
                    Err(error) => {
                        print_error(pod, &error);
                        let exists = state.replace(PodState::Failed) == PodState::Recreating;
                        if !exists && !error.retryable() {
                            continue;
                        }
                        None
                    }
                };
                unavailable.push(Box::pin(async move {
                    if let Err(error) = wait_until_available(connection, pod, ended).await {
                        print_error(pod, &error);
                        state.set(PodState::Failed);
                    }
                }));
            }
            Some(()) = unavailable.next(), if plan::may_start(&current(), limits) => {}
            else => return,
        }
    }
}

fn print_error(pod: &Pod, error: &Error) {
    let text = format!("pod/{}: {}", pod.name_any(), error.text());
    text.lines().for_each(print_note);
}

/// Prints how the request of a Pod ended.
fn report_end(pod: &Pod, request: &ContainerRecreateRequest) -> PodState {
    match recreate_outcome(&request.status.clone().unwrap_or_default()) {
        RecreateOutcome::Failed(reason, message) => {
            let text = [reason, message].into_iter().filter(|text| !text.is_empty());
            let text = text.collect::<Vec<_>>().join(": ");
            let error = Error::Failed(format!("restart failed: {}", printable(&text)));
            print_error(pod, &error);
            PodState::Failed
        }
        RecreateOutcome::Succeeded | RecreateOutcome::Unfinished => {
            print_line(&format!("pod/{} restarted", pod.name_any()));
            PodState::Succeeded
        }
    }
}

/// Waits until a Pod is available again after its request has `ended`, if the end is known.
async fn wait_until_available(
    connection: &Connection,
    pod: &Pod,
    ended: Option<ContainerRecreateRequest>,
) -> Result<(), Error> {
    let (pods, name) = (connection.api::<Pod>(), pod.name_any());
    let uid = pod.uid().unwrap_or_default();
    let reason = plan::unavailable_reason(ended.as_ref());
    let unavailable = |why: String| Error::Failed(format!("{reason}: {why}"));
    let mut noted = false;
    let available = follow(&pods, &name, &uid, print_note, |pod| {
        let available = plan::availability(pod, ended.as_ref());
        if available.is_none() && !noted {
            print_note(&format!("pod/{name}: waiting: {reason}"));
            noted = true;
        }
        available
    });
    match tokio::time::timeout(plan::READY_TIMEOUT, available).await {
        Ok(Ok(available)) => available.map_err(|why| unavailable(why.to_owned())),
        Ok(Err(Error::Failed(why))) => Err(unavailable(why)),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(unavailable(format!("waited {:?}", plan::READY_TIMEOUT))),
    }
}

/// A random suffix of a name.
fn random_suffix() -> String {
    // A hash of nothing with the random keys of the standard library.
    let mut random = RandomState::new().hash_one(());
    let next = |_| {
        let position = usize::try_from(random % 27).ok()?;
        random /= 27;
        SUFFIX_CHARS.chars().nth(position)
    };
    (0..8).filter_map(next).collect()
}

/// Why the Pod is not restarted, if it has changed since it was listed.
async fn skip_reason(connection: &Connection, listed: &Pod) -> Result<Option<&'static str>, Error> {
    let (pods, name) = (connection.api::<Pod>(), listed.name_any());
    let read = async || write::get(&pods, &name).await.map_err(Error::from);
    let now = retry(print_note, read).await?;
    Ok(plan::skip_reason(listed, now.as_ref()))
}

/// Creates the request of one Pod, and follows it to its end; `None` if the Pod is skipped. `on_created` is called once
/// the request is known to exist.
async fn restart_pod(
    connection: &Connection,
    pod: &Pod,
    containers: &[String],
    on_created: impl FnOnce(),
) -> Result<Option<ContainerRecreateRequest>, Error> {
    let name = pod.name_any();
    if let Some(why) = skip_reason(connection, pod).await? {
        print_line(&format!("pod/{name} skipped: {why}"));
        return Ok(None);
    }
    let requests: Api<ContainerRecreateRequest> = connection.api();
    let planned = plan::request(&connection.namespace, pod, containers, &random_suffix());
    let is_ours = |found: &ContainerRecreateRequest| plan::is_same(found, &planned);
    let created = create_once(&requests, &planned, is_ours, print_note).await;
    // Admission refuses a request if the Pod was replaced in between.
    if let Err(error) = &created
        && !error.retryable()
        && let Ok(Some(why)) = skip_reason(connection, pod).await
    {
        print_line(&format!("pod/{name} skipped: {why}"));
        return Ok(None);
    }
    let request = created?;
    on_created();
    print_line(&format!(
        "containerrecreaterequest.apps.kruise.io/{} created",
        request.name_any()
    ));
    // Admission of OpenKruise records the Pod of this name, whatever the label is.
    let recorded = request.labels().get(CRR_POD_UID);
    if recorded.is_some_and(|uid| Some(uid) != pod.metadata.uid.as_ref()) {
        return Err(Error::Failed(format!(
            "another Pod has this name now, and {} restarts its containers",
            request.name_any()
        )));
    }
    let (request_name, uid) = (request.name_any(), request.uid().unwrap_or_default());
    let mut last = String::new();
    let end = follow(&requests, &request_name, &uid, print_note, |request| {
        let status = request.status.clone().unwrap_or_default();
        if recreate_outcome(&status) != RecreateOutcome::Unfinished {
            return Some(request.clone());
        }
        let line = plan::progress_line(&status);
        if line != last {
            print_note(&format!("pod/{name}: {line}"));
            last = line;
        }
        None
    });
    let hint = || {
        let follow = follow_command(connection, &format!("containerrecreaterequest {request_name}"));
        format!("the request continues. To follow it:\n  {follow}")
    };
    end.await.map(Some).map_err(|error| error.with_hint(hint))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeSet;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use serde_json::{Value, json};
    use tokio::time::Instant;

    use super::*;
    use crate::fake_server::{self, Request, SILENT, failure};

    #[test]
    fn suffixes_differ() {
        let suffixes: BTreeSet<String> = (0..100).map(|_| random_suffix()).collect();
        assert_eq!(suffixes.len(), 100);
        assert!(suffixes.iter().all(|suffix| suffix.len() == 8), "{suffixes:?}");
    }

    fn pod(name: &str, uid: &str) -> Value {
        let owner = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "web", "uid": "u",
            "controller": true });
        json!({ "metadata": { "name": name, "namespace": "n", "uid": uid, "ownerReferences": [owner] },
            "spec": { "nodeName": "node", "containers": [{ "name": "app" }] },
            "status": { "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] } })
    }

    /// A Pod that is not ready.
    fn not_ready(name: &str) -> Value {
        let mut pod = pod(name, name);
        kruise_api::json::set(&mut pod, &["status", "conditions"], json!([]));
        pod
    }

    /// A request as it is stored, at its end.
    fn stored(mut request: Value) -> Value {
        kruise_api::json::set(&mut request, &["metadata", "uid"], json!("r"));
        let states = json!([{ "name": "app", "phase": "Succeeded" }]);
        let status = json!({ "phase": "Completed", "completionTime": "2026-01-01T00:00:00Z",
            "containerRecreateStates": states });
        kruise_api::json::set(&mut request, &["status"], status);
        request
    }

    /// Restarts the Pods `web-1`, `web-2` and `web-3`; `respond` may respond for the API server.
    async fn restart_all(
        respond: impl Fn(&Request) -> Option<fake_server::Response> + Send + Sync + 'static,
    ) -> Vec<PodState> {
        let created = std::sync::Mutex::new(Value::Null);
        let connection = fake_server::connection(move |request| {
            if let Some(response) = respond(request) {
                return response;
            }
            let mut created = created.lock().unwrap();
            if request.method == "POST" {
                *created = stored(request.body.clone());
            }
            match request.path.rsplit_once("/pods/") {
                Some((_, name)) => (200, pod(name, name)),
                // A watch that ends at once.
                None if request.path.ends_with("/pods") => (200, Value::Null),
                None => (200, created.clone()),
            }
        });
        let read = |name| serde_json::from_value(pod(name, name)).unwrap();
        let pods: [Pod; 3] = ["web-1", "web-2", "web-3"].map(read);
        let limits = Limits {
            max_unavailable: 1,
            continue_on_failure: false,
        };
        let mut states = vec![PodState::Pending; pods.len()];
        restart_pods(&connection, &pods, &["app".to_owned()], limits, &mut states).await;
        states
    }

    #[tokio::test(start_paused = true)]
    async fn pods_that_are_replaced_during_the_walk_are_skipped() {
        use PodState::{Skipped, Succeeded};
        let states = restart_all(|request| match request.path.rsplit_once("/pods/")?.1 {
            "web-1" => Some(failure(404, "NotFound")),
            "web-2" => Some((200, pod("web-2", "another"))),
            _ => None,
        });
        assert_eq!(states.await, [Skipped, Skipped, Succeeded]);
    }

    #[tokio::test(start_paused = true)]
    async fn pod_that_is_replaced_before_its_request_is_skipped() {
        use PodState::{Skipped, Succeeded};
        let reads = AtomicUsize::new(0);
        let states = restart_all(move |request| {
            if request.path.ends_with("/pods/web-1") && reads.fetch_add(1, Ordering::Relaxed) > 0 {
                return Some((200, pod("web-1", "another")));
            }
            let labels = request.body.pointer("/metadata/labels")?;
            let refused = labels.get(CRR_POD_UID)? == "web-1";
            refused.then(|| failure(422, "Invalid"))
        });
        assert_eq!(states.await, [Skipped, Succeeded, Succeeded]);
    }

    #[tokio::test(start_paused = true)]
    async fn next_pod_waits_until_the_last_one_is_ready() {
        let started = Instant::now();
        let states = restart_all(move |request| {
            let is_late =
                request.path.ends_with("/pods/web-1") && started.elapsed() < Duration::from_secs(60);
            is_late.then(|| (200, not_ready("web-1")))
        });
        assert_eq!(states.await, [PodState::Succeeded; 3]);
        assert!(started.elapsed() >= Duration::from_secs(60));
    }

    #[tokio::test(start_paused = true)]
    async fn pod_that_does_not_become_ready_has_failed() {
        use PodState::{Failed, Pending, Succeeded};
        let started = Instant::now();
        let states = restart_all(|request| {
            let of_first = request.path.ends_with("/pods/web-1");
            of_first.then(|| (200, not_ready("web-1")))
        });
        assert_eq!(states.await, [Failed, Pending, Pending]);
        assert!(started.elapsed() >= plan::READY_TIMEOUT);

        // No Pod waits for the last one.
        let started = Instant::now();
        let states = restart_all(|request| {
            let of_last = request.path.ends_with("/pods/web-3");
            of_last.then(|| (200, not_ready("web-3")))
        });
        assert_eq!(states.await, [Succeeded; 3]);
        assert!(started.elapsed() < plan::READY_TIMEOUT);
    }

    #[tokio::test(start_paused = true)]
    async fn outage_does_not_end_the_walk() {
        let requests = AtomicUsize::new(0);
        let states = restart_all(move |_| {
            let count = requests.fetch_add(1, Ordering::Relaxed);
            (count % 3 != 2).then(|| failure(503, "ServiceUnavailable"))
        });
        assert_eq!(states.await, [PodState::Succeeded; 3]);
    }

    /// A command that ends early must not report a restart that was never requested.
    #[tokio::test(start_paused = true)]
    async fn pod_is_in_progress_once_its_request_exists() {
        for (created, expected) in [(false, PodState::Requesting), (true, PodState::Recreating)] {
            let connection = fake_server::connection(move |request| match request.method.as_str() {
                "POST" if created => (201, stored(request.body.clone())),
                "POST" => failure(503, "ServiceUnavailable"),
                _ if request.path.contains("/pods/") => (200, pod("web-1", "web-1")),
                _ => (SILENT, Value::Null),
            });
            let pods: [Pod; 1] = [serde_json::from_value(pod("web-1", "web-1")).unwrap()];
            let containers = ["app".to_owned()];
            let limits = Limits {
                max_unavailable: 1,
                continue_on_failure: false,
            };
            let mut states = [PodState::Pending];
            let restarts = restart_pods(&connection, &pods, &containers, limits, &mut states);
            let ended = tokio::time::timeout(Duration::from_secs(60), restarts).await;
            assert!(ended.is_err(), "{created}");
            assert_eq!(states, [expected]);
        }
    }

    /// A request may be created, and then not be followed.
    #[tokio::test(start_paused = true)]
    async fn request_that_cannot_be_followed_continues() {
        let connection = fake_server::connection(|request| match request.method.as_str() {
            "POST" => (201, stored(request.body.clone())),
            _ if request.path.contains("/pods/") => (200, pod("web-1", "web-1")),
            _ => failure(403, "Forbidden"),
        });
        let listed: Pod = serde_json::from_value(pod("web-1", "web-1")).unwrap();
        let lost = restart_pod(&connection, &listed, &["app".to_owned()], || ()).await;
        let text = lost.unwrap_err().text();
        let (error, hint) = text.split_once('\n').unwrap();
        assert!(error.starts_with("Error from server (Forbidden): "), "{text}");
        assert!(
            hint.starts_with(
                "the request continues. To follow it:\n  kubectl get containerrecreaterequest web-1-"
            ),
            "{text}"
        );
        assert!(hint.ends_with(" -n n -w"), "{text}");
    }
}

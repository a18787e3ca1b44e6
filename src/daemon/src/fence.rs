//! Checks that this daemon's token is restricted to its own node: it tries writes that the policies in
//! `deploy/policies` must refuse, as dry runs, at the start and then every hour.
//!
//! In:  one NodeImage, NodePodProbe and request of other nodes, one Pod of this node (lists with a limit).
//! Out: the check `fence` in readiness, metric `daemon_fenced`, a log line when a write is not refused.
//! A daemon that is not fenced continues to work, but its Pod is not ready, so that users notice and a rollout stops.
//! As a process with `--kubeconfig` it stays ready, because its credentials are not those of the DaemonSet.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Pod};
use kube::Client;
use kube::api::{Api, ListParams};
use serde_json::{Value, json};

use super::Context;
use kruise_api::backoff::Backoff;
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::keys;
use kruise_api::node_image::NodeImage;
use kruise_api::node_pod_probe::NodePodProbe;
use kruise_cluster::Error;
use kruise_cluster::write::{self, Object};
use kruise_ops::metrics::metrics;

/// Name of the check in the process's health.
const HEALTH_CHECK: &str = "fence";
/// Interval after a good check.
const CHECK_INTERVAL: Duration = Duration::from_secs(3600);
/// Backoff after checks that were not good.
const RETRY_BACKOFF: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(300));
/// Consecutive checks that must find writes not refused before this is reported: the API server applies a new policy
/// only seconds after its creation.
const FAILURE_THRESHOLD: u32 = 4;

/// The outcome of a write that must be refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProbeOutcome {
    Refused,
    Accepted,
    /// There is no object to try it on, or no answer.
    Unknown,
}

/// Kinds, as named in the metric and the messages, and the outcome of each write.
type ProbeOutcomes = [(&'static str, ProbeOutcome); 5];

/// The report of a check.
#[derive(Debug, PartialEq, Eq)]
enum FenceReport {
    /// Writes of these kinds are refused, which are all that could be tried.
    Fenced(String),
    /// Writes of these kinds are repeatedly not refused.
    NotFenced {
        kinds: String,
        /// Whether the previous check did not report this.
        first: bool,
    },
}

/// Runs the checks as long as the process lives.
pub async fn run(ctx: Context) {
    let report = |fence_report: FenceReport| match fence_report {
        FenceReport::Fenced(kinds) => ctx.health.set_ready(
            HEALTH_CHECK,
            format!("writes about other nodes are refused: {kinds}"),
        ),
        FenceReport::NotFenced { kinds, first: new } => report_not_fenced(&ctx, &kinds, new),
    };
    check_periodically(|| Box::pin(probe_all(&ctx)), report).await;
}

async fn check_periodically<F: Future<Output = ProbeOutcomes>>(
    probe: impl Fn() -> F,
    mut report: impl FnMut(FenceReport),
) {
    let (mut failures, mut accepted) = (0_u32, 0_u32);
    loop {
        let outcomes = probe().await;
        for (kind, outcome) in outcomes {
            let labels = [("kind", kind.to_owned())];
            let refused = match outcome {
                ProbeOutcome::Refused => 1,
                ProbeOutcome::Accepted => 0,
                // Without a series there is no alert. An earlier outcome may no longer be true.
                ProbeOutcome::Unknown => {
                    metrics().daemon_fenced.remove(&labels);
                    continue;
                }
            };
            metrics().daemon_fenced.get_or_create(&labels).set(refused);
        }
        let kinds = |expected| {
            let matching = outcomes.iter().filter(|(_, outcome)| *outcome == expected);
            matching.map(|(kind, _)| *kind).collect::<Vec<_>>().join(", ")
        };
        let (not_refused, refused) = (kinds(ProbeOutcome::Accepted), kinds(ProbeOutcome::Refused));
        if not_refused.is_empty() && !refused.is_empty() {
            report(FenceReport::Fenced(refused));
            (failures, accepted) = (0, 0);
            tokio::time::sleep(next_check_delay(&RandomState::new())).await;
            continue;
        }
        if !not_refused.is_empty() {
            accepted = accepted.saturating_add(1);
            if accepted >= FAILURE_THRESHOLD {
                let first = accepted == FAILURE_THRESHOLD;
                report(FenceReport::NotFenced {
                    kinds: not_refused,
                    first,
                });
            }
        }
        tokio::time::sleep(RETRY_BACKOFF.delay(failures)).await;
        failures = failures.saturating_add(1);
    }
}

/// Delay after a good check: [`CHECK_INTERVAL`] plus up to a tenth of it, so that daemons that started together do not
/// check together.
fn next_check_delay(hasher: &impl BuildHasher) -> Duration {
    let per_mille = u32::try_from(hasher.hash_one(0_u8) % 100).unwrap_or_default();
    CHECK_INTERVAL.saturating_add(CHECK_INTERVAL.saturating_mul(per_mille) / 1000)
}

/// Reports that writes of these kinds are not refused.
fn report_not_fenced(ctx: &Context, kinds: &str, log: bool) {
    let message =
        format!("NOT FENCED: writes about other nodes are not refused: {kinds}; apply deploy/policies");
    if log {
        tracing::error!(
            kinds,
            "writes about other nodes are not refused; apply deploy/policies"
        );
    }
    match ctx.options.kubeconfig {
        None => ctx.health.set_not_ready(HEALTH_CHECK, message),
        Some(_) => ctx.health.set_ready(HEALTH_CHECK, message),
    }
}

async fn probe_all(ctx: &Context) -> ProbeOutcomes {
    let client = &ctx.cluster.client;
    let event = async {
        let events: Api<Event> = Api::namespaced(client.clone(), "default");
        probe_outcome(write::create_dry_run(&events, foreign_event().to_string()).await)
    };
    let status = json!({ "status": { "desired": 1 } });
    // One of two belongs to another node.
    let limit = ListParams::default().limit(2);
    let node_image = probe_status_patch::<NodeImage>(
        client,
        limit.clone(),
        Some(&ctx.node_name),
        &status,
        |client, _| Api::all(client),
    );
    let results = json!({ "status": { "podProbeStatuses": [] } });
    let node_pod_probe =
        probe_status_patch::<NodePodProbe>(client, limit, Some(&ctx.node_name), &results, |client, _| {
            Api::all(client)
        });
    let selector = format!("{}!={}", keys::CRR_NODE_NAME, keys::node_label(&ctx.node_name));
    let other_nodes = ListParams::default().labels(&selector).limit(1);
    let phase = json!({ "status": { "phase": "Recreating" } });
    let request =
        probe_status_patch::<ContainerRecreateRequest>(client, other_nodes, None, &phase, Api::namespaced);
    // On Pods of its own node the daemon may write one annotation only.
    let own_node = ListParams::default()
        .fields(&format!("spec.nodeName={}", ctx.node_name))
        .limit(1);
    let label = json!({ "metadata": { "labels": { "apps.kruise.io/fence-check": "true" } } });
    let pod = probe_status_patch::<Pod>(client, own_node, None, &label, Api::namespaced);
    let (event, node_image, node_pod_probe, request, pod) =
        tokio::join!(event, node_image, node_pod_probe, request, pod);
    [
        ("events", event),
        ("nodeimages", node_image),
        ("nodepodprobes", node_pod_probe),
        ("containerrecreaterequests", request),
        ("pods", pod),
    ]
}

/// An event in the name of a node that does not exist.
fn foreign_event() -> Value {
    json!({ "apiVersion": "v1", "kind": "Event", "metadata": { "generateName": "fence-check-" },
        "source": { "component": "kruise-daemon", "host": "fence-check.invalid" }, "involvedObject": {} })
}

/// Patches, as a dry run, the status of the first listed object whose name is not `own`.
async fn probe_status_patch<K: Object>(
    client: &Client,
    params: ListParams,
    own: Option<&str>,
    patch: &Value,
    api: impl Fn(Client, &str) -> Api<K>,
) -> ProbeOutcome {
    let Ok(listed) = write::list_metadata(&Api::<K>::all(client.clone()), &(), &params).await else {
        return ProbeOutcome::Unknown;
    };
    let mut objects = listed.items.into_iter().map(|object| object.metadata);
    match objects.find(|object| Some(object.name.as_str()) != own) {
        Some(object) => {
            let api = api(client.clone(), object.namespace.as_deref().unwrap_or_default());
            probe_outcome(write::dry_run_patch_status(&api, &object.name, patch).await)
        }
        None => ProbeOutcome::Unknown,
    }
}

/// The outcome of a write that must be refused, from its response.
fn probe_outcome<T>(result: Result<T, Error>) -> ProbeOutcome {
    match result {
        Ok(_) => ProbeOutcome::Accepted,
        Err(Error::Api(status)) if status.code == 403 => ProbeOutcome::Refused,
        Err(_) => ProbeOutcome::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::hash::{BuildHasherDefault, DefaultHasher};

    use tokio::time::Instant;

    use super::*;

    /// The policies are deleted and created again while the daemon runs.
    #[tokio::test(start_paused = true)]
    async fn fence_loss_and_recovery_are_reported() {
        let (start, reports) = (Instant::now(), RefCell::new(Vec::new()));
        let minutes = || start.elapsed().as_secs() / 60;
        let fenced = Cell::new(true);
        let probe = || {
            let outcome = if fenced.get() {
                ProbeOutcome::Refused
            } else {
                ProbeOutcome::Accepted
            };
            let other = ("nodeimages", ProbeOutcome::Unknown);
            std::future::ready([
                ("events", ProbeOutcome::Refused),
                other,
                other,
                ("pods", outcome),
                other,
            ])
        };
        let report = |found| {
            if reports.borrow().is_empty() {
                fenced.set(false);
            }
            reports.borrow_mut().push((minutes(), found));
            if reports.borrow().len() == 4 {
                fenced.set(true);
            }
        };
        let result =
            tokio::time::timeout(Duration::from_secs(2 * 3600), check_periodically(probe, report)).await;
        assert!(result.is_err(), "it checks for ever");
        let reports = reports.into_inner();
        let not_fenced = |new| FenceReport::NotFenced {
            kinds: "pods".to_owned(),
            first: new,
        };
        let reported: Vec<&FenceReport> = reports.iter().map(|(_, found)| found).collect();
        let fenced = FenceReport::Fenced("events, pods".to_owned());
        assert_eq!(
            reported[..5],
            [
                &fenced,
                &not_fenced(true),
                &not_fenced(false),
                &not_fenced(false),
                &fenced
            ]
        );
        assert!((60..=67).contains(&reports[1].0), "{reports:?}");
        assert!(reports[4].0 - reports[3].0 <= 5, "{reports:?}");
        let text = metrics().render();
        assert!(text.contains("kruise_daemon_fenced{kind=\"pods\"} 1\n"), "{text}");
        let unknown = "kruise_daemon_fenced{kind=\"nodeimages\"}";
        assert!(!text.contains(unknown), "{text}");
    }

    /// The object that accepted the write is deleted, and there is no other to try it on.
    #[tokio::test(start_paused = true)]
    async fn metric_ends_when_the_outcome_becomes_unknown() {
        let (checks, before_checks) = (Cell::new(0_u32), RefCell::new(Vec::new()));
        let probe = || {
            let has_series = metrics()
                .render()
                .contains("kruise_daemon_fenced{kind=\"deleted\"} 0\n");
            before_checks.borrow_mut().push(has_series);
            let outcome = match checks.replace(checks.get() + 1) {
                0 => ProbeOutcome::Accepted,
                _ => ProbeOutcome::Unknown,
            };
            let other = ("nodeimages", ProbeOutcome::Unknown);
            std::future::ready([("deleted", outcome), other, other, other, other])
        };
        let checking = check_periodically(probe, |_| ());
        let result = tokio::time::timeout(Duration::from_secs(3600), checking).await;
        assert!(result.is_err(), "it checks for ever");
        assert_eq!(before_checks.into_inner()[..3], [false, true, false]);
    }

    #[test]
    fn fence_checks_are_spread_over_six_minutes() {
        let spread = CHECK_INTERVAL..=CHECK_INTERVAL + CHECK_INTERVAL / 10;
        let times: std::collections::BTreeSet<Duration> =
            (0..50).map(|_| next_check_delay(&RandomState::new())).collect();
        assert!(times.iter().all(|time| spread.contains(time)), "{times:?}");
        assert!(times.len() > 1, "all at {times:?}");
        let fixed = BuildHasherDefault::<DefaultHasher>::default();
        assert_eq!(next_check_delay(&fixed), next_check_delay(&fixed));
    }
}

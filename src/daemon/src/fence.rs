//! Checks that this daemon's token is held to its own node: tries writes that the policies in `deploy/policies` must
//! refuse, as dry runs, at the start and then every hour.
//!
//! In:  one NodeImage and one request of other nodes, one Pod of this node (lists with a limit).
//! Out: the check `fence` in readiness, metric `daemon_fenced`, a log line where a write is not refused.
//! A daemon that is not fenced works on, but its Pod is not ready, so that it is seen and a rollout stops. As a process
//! with `--kubeconfig` it stays ready, because its credentials are not those of the DaemonSet.

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
use kruise_cluster::Error;
use kruise_cluster::write::{self, Object};
use kruise_ops::metrics::metrics;

/// Name of our check in the process's health.
const CHECK: &str = "fence";
/// How long after a good check the next one is.
const EVERY: Duration = Duration::from_secs(3600);
/// After checks that were not good.
const RETRY: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(300));
/// Checks in a row that must find writes not refused before it is said: the API server heeds a new policy seconds after
/// it is created.
const IN_A_ROW: u32 = 4;

/// What became of a write that must be refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Refused,
    Accepted,
    /// There is nothing to try it on, or no answer.
    Unknown,
}

/// Kinds, in the words of the metric and the messages, and what became of the write.
type Outcomes = [(&'static str, Outcome); 4];

/// What is told of a check.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// Writes of these kinds are refused, as all that could be tried.
    Fenced(String),
    /// Writes of these kinds are not, again and again.
    Open {
        kinds: String,
        /// Whether this was not told at the check before.
        new: bool,
    },
}

/// Checks for as long as the process lives.
pub async fn run(ctx: Context) {
    let tell = |found: Found| match found {
        Found::Fenced(kinds) => ctx
            .health
            .ready(CHECK, format!("writes about other nodes are refused: {kinds}")),
        Found::Open { kinds, new } => say(&ctx, &kinds, new),
    };
    check(|| Box::pin(try_all(&ctx)), tell).await;
}

async fn check<F: Future<Output = Outcomes>>(ask: impl Fn() -> F, mut tell: impl FnMut(Found)) {
    let (mut failures, mut accepted) = (0_u32, 0_u32);
    loop {
        let outcomes = ask().await;
        for (kind, outcome) in outcomes {
            let gauge = metrics()
                .daemon_fenced
                .get_or_create(&[("kind", kind.to_owned())])
                .clone();
            match outcome {
                Outcome::Refused => gauge.set(1),
                Outcome::Accepted => gauge.set(0),
                Outcome::Unknown => continue,
            };
        }
        let kinds = |wanted| {
            let of = outcomes.iter().filter(|(_, outcome)| *outcome == wanted);
            of.map(|(kind, _)| *kind).collect::<Vec<_>>().join(", ")
        };
        let (open, refused) = (kinds(Outcome::Accepted), kinds(Outcome::Refused));
        if open.is_empty() && !refused.is_empty() {
            tell(Found::Fenced(refused));
            (failures, accepted) = (0, 0);
            tokio::time::sleep(next_check(&RandomState::new())).await;
            continue;
        }
        if !open.is_empty() {
            accepted = accepted.saturating_add(1);
            if accepted >= IN_A_ROW {
                let new = accepted == IN_A_ROW;
                tell(Found::Open { kinds: open, new });
            }
        }
        tokio::time::sleep(RETRY.pause(failures)).await;
        failures = failures.saturating_add(1);
    }
}

/// How long until the check after a good one: [`EVERY`], and up to a tenth more, so that daemons that started together
/// do not check together.
fn next_check(chance: &impl BuildHasher) -> Duration {
    let per_mille = u32::try_from(chance.hash_one(0_u8) % 100).unwrap_or_default();
    EVERY.saturating_add(EVERY.saturating_mul(per_mille) / 1000)
}

/// Says that writes of these kinds are not refused.
fn say(ctx: &Context, kinds: &str, log: bool) {
    let words =
        format!("NOT FENCED: writes about other nodes are not refused: {kinds}; apply deploy/policies");
    if log {
        tracing::error!(
            kinds,
            "writes about other nodes are not refused; apply deploy/policies"
        );
    }
    match ctx.options.kubeconfig {
        None => ctx.health.unready(CHECK, words),
        Some(_) => ctx.health.ready(CHECK, words),
    }
}

async fn try_all(ctx: &Context) -> Outcomes {
    let client = &ctx.cluster.client;
    let event = async {
        let events: Api<Event> = Api::namespaced(client.clone(), "default");
        outcome(write::dry_run(&events, event().to_string()).await)
    };
    let status = json!({ "status": { "desired": 1 } });
    // One of two is another node's.
    let two = ListParams::default().limit(2);
    let node_image = patched::<NodeImage>(client, two, Some(&ctx.node_name), &status, |client, _| {
        Api::all(client)
    });
    let others = format!("{}!={}", keys::CRR_NODE_NAME, keys::node_label(&ctx.node_name));
    let others = ListParams::default().labels(&others).limit(1);
    let phase = json!({ "status": { "phase": "Recreating" } });
    let request = patched::<ContainerRecreateRequest>(client, others, None, &phase, Api::namespaced);
    // Of Pods on the own node all but one annotation is another's.
    let here = ListParams::default()
        .fields(&format!("spec.nodeName={}", ctx.node_name))
        .limit(1);
    let label = json!({ "metadata": { "labels": { "apps.kruise.io/fence-check": "true" } } });
    let pod = patched::<Pod>(client, here, None, &label, Api::namespaced);
    let (event, node_image, request, pod) = tokio::join!(event, node_image, request, pod);
    [
        ("events", event),
        ("nodeimages", node_image),
        ("containerrecreaterequests", request),
        ("pods", pod),
    ]
}

/// An event in the name of a node that there is not.
fn event() -> Value {
    json!({ "apiVersion": "v1", "kind": "Event", "metadata": { "generateName": "fence-check-" },
        "source": { "component": "kruise-daemon", "host": "fence-check.invalid" }, "involvedObject": {} })
}

/// Patches in a dry run the status of the first object listed whose name is not `own`.
async fn patched<K: Object>(
    client: &Client,
    params: ListParams,
    own: Option<&str>,
    patch: &Value,
    api: impl Fn(Client, &str) -> Api<K>,
) -> Outcome {
    let Ok(listed) = write::list_metadata(&Api::<K>::all(client.clone()), &(), &params).await else {
        return Outcome::Unknown;
    };
    let mut objects = listed.items.into_iter().map(|object| object.metadata);
    match objects.find(|object| Some(object.name.as_str()) != own) {
        Some(object) => {
            let api = api(client.clone(), object.namespace.as_deref().unwrap_or_default());
            outcome(write::try_status(&api, &object.name, patch).await)
        }
        None => Outcome::Unknown,
    }
}

/// What the answer says of a write that must be refused.
fn outcome<T>(answer: Result<T, Error>) -> Outcome {
    match answer {
        Ok(_) => Outcome::Accepted,
        Err(Error::Api(status)) if status.code == 403 => Outcome::Refused,
        Err(_) => Outcome::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::hash::{BuildHasherDefault, DefaultHasher};

    use tokio::time::Instant;

    use super::*;

    /// The policies go while the daemon runs, and come back.
    #[tokio::test(start_paused = true)]
    async fn a_fence_that_falls_is_told_within_the_hour_and_so_is_its_return() {
        let (start, told) = (Instant::now(), RefCell::new(Vec::new()));
        let minutes = || start.elapsed().as_secs() / 60;
        let fenced = Cell::new(true);
        let ask = || {
            let outcome = if fenced.get() {
                Outcome::Refused
            } else {
                Outcome::Accepted
            };
            let other = ("nodeimages", Outcome::Unknown);
            std::future::ready([("events", Outcome::Refused), other, ("pods", outcome), other])
        };
        let tell = |found| {
            if told.borrow().is_empty() {
                fenced.set(false);
            }
            told.borrow_mut().push((minutes(), found));
            if told.borrow().len() == 4 {
                fenced.set(true);
            }
        };
        let ended = tokio::time::timeout(Duration::from_secs(2 * 3600), check(ask, tell)).await;
        assert!(ended.is_err(), "it checks for ever");
        let told = told.into_inner();
        let open = |new| Found::Open {
            kinds: "pods".to_owned(),
            new,
        };
        let found: Vec<&Found> = told.iter().map(|(_, found)| found).collect();
        let fenced = Found::Fenced("events, pods".to_owned());
        assert_eq!(
            found[..5],
            [&fenced, &open(true), &open(false), &open(false), &fenced]
        );
        assert!((60..=67).contains(&told[1].0), "{told:?}");
        assert!(told[4].0 - told[3].0 <= 5, "{told:?}");
    }

    #[test]
    fn checks_are_spread_over_six_minutes_after_the_hour() {
        let spread = EVERY..=EVERY + EVERY / 10;
        let times: std::collections::BTreeSet<Duration> =
            (0..50).map(|_| next_check(&RandomState::new())).collect();
        assert!(times.iter().all(|time| spread.contains(time)), "{times:?}");
        assert!(times.len() > 1, "all at {times:?}");
        let fixed = BuildHasherDefault::<DefaultHasher>::default();
        assert_eq!(next_check(&fixed), next_check(&fixed));
    }
}

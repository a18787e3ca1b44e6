//! Writes images and annotations of injected Pods, and their conditions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{StreamExt, stream};
use kube::Api;
use serde_json::{Value, json};

use super::context::{SetContext, SetState};
use super::observe::{versioned_pod, versioned_set};
use super::{history, report};
use crate::context::fetch_all;
use crate::object_reference::object_reference;
use crate::view::RawPod;
use kruise_api::json::set;
use kruise_api::sidecarset::SidecarSet;
use kruise_cluster::write_cache::Written;
use kruise_cluster::{Error, EventType, Key, write};
use kruise_workload::in_place::Pod;
use kruise_workload::sidecarset::hash::with_hashes;
use kruise_workload::sidecarset::plan::{EVENT_RESET_FAILED, EVENT_RESET_SUCCEEDED, Plan};
use kruise_workload::sidecarset::upgrade::PodChanges;

/// Pods that are written at once for one set.
const MAX_CONCURRENT_WRITES: usize = 32;
/// No write of a reconcile starts later than this after the first one: the status waits for it.
const MAX_WRITING_TIME: Duration = Duration::from_secs(2);

/// How long a Pod is left alone whose update the API server refused.
const RETRY_REFUSED: Duration = Duration::from_secs(60);
/// The same after an internal error of the API server, or without an answer: a webhook may be restarting, or hang.
const RETRY_INTERNAL: Duration = Duration::from_secs(10);

type ObservedPod = (Key, Arc<Pod>);

/// Whether another write of a reconcile may start, so long after the first one.
fn may_start_write(elapsed: Duration, is_current: bool) -> bool {
    elapsed < MAX_WRITING_TIME && is_current
}

/// How long the Pod is left alone that a write failed for; `None` if the failure is not one of this Pod.
fn retry_of_pod(error: &Error) -> Option<Duration> {
    if error.rejected() || error.too_large() || error.denied() {
        Some(RETRY_REFUSED)
    } else if error.internal() || matches!(error, Error::Timeout { .. }) {
        Some(RETRY_INTERNAL)
    } else {
        None
    }
}

impl SetContext<'_> {
    fn pods(&self, key: &Key) -> Api<RawPod> {
        self.shared.manager.api(key)
    }

    fn cache_pod(&self, key: &Key, stored: &RawPod) -> Arc<Pod> {
        let pod = Arc::new(Pod::from_json(stored.json()));
        let entry = versioned_pod(key, Arc::clone(&pod));
        let now = Instant::now();
        self.shared
            .index()
            .pods
            .apply_write(key, entry, Written::Changed, now);
        pod
    }

    async fn fetch_pod(&self, key: &Key) -> Result<(), Error> {
        let found = write::get(&self.pods(key), &key.name).await?;
        let pod = found.map(|found| Arc::new(Pod::from_json(found.json())));
        let entry = pod.map(|pod| versioned_pod(key, pod));
        self.shared.index().pods.apply_read(key, entry, Instant::now());
        Ok(())
    }
}

/// Reads the set, its Pods and its revisions whose last write had no answer, or was not confirmed by the watch.
pub async fn fetch_unconfirmed(ctx: &SetContext<'_>) -> Result<(), Error> {
    let unconfirmed = ctx.shared.index().unconfirmed(ctx.name, Instant::now());
    if unconfirmed.set {
        let sets: Api<SidecarSet> = Api::all(ctx.shared.manager.cluster.client.clone());
        let found = write::get(&sets, ctx.name).await?;
        let entry = found.map(|found| versioned_set(Arc::new(with_hashes(found))));
        let key = Key::cluster_scoped(ctx.name);
        ctx.shared.index().sets.apply_read(&key, entry, Instant::now());
    }
    for key in &unconfirmed.revisions {
        history::fetch_revision(ctx, key).await?;
    }
    let reads: Vec<_> = unconfirmed.pods.iter().map(|key| ctx.fetch_pod(key)).collect();
    fetch_all(reads).await
}

/// Writes the planned changes of Pods, as many as can be written soon and before the set changes; returns whether there
/// were any. Pods whose writes the API server does not accept are left alone for a while, so that they stop no others.
///
/// # Errors
/// The first other error, after everything was tried.
pub async fn write_pods(
    ctx: &SetContext<'_>,
    plan: &Plan,
    pods: &[ObservedPod],
    state: &mut SetState,
) -> Result<bool, Error> {
    let at = |at: usize| pods.get(at);
    let flips = plan
        .flips
        .iter()
        .filter_map(|(index, changes)| Some((at(*index)?, Some(changes), None, true)));
    let mut conditions: BTreeMap<usize, &Value> = plan
        .conditions
        .iter()
        .map(|(index, condition)| (*index, condition))
        .collect();
    // That of a Pod that is updated is written with the update.
    let upgrades = plan.upgrades.iter();
    let upgrades = upgrades.map(|(index, changes)| (*index, changes, conditions.remove(index)));
    let upgrades: Vec<_> = upgrades.collect();
    let upgrades = upgrades
        .into_iter()
        .filter_map(|(index, changes, condition)| Some((at(index)?, Some(changes), condition, false)));
    let conditions = conditions.into_iter();
    let conditions =
        conditions.filter_map(|(index, condition)| Some((at(index)?, None, Some(condition), false)));
    let writes: Vec<_> = flips.chain(upgrades).chain(conditions).collect();
    let acted = !writes.is_empty();
    let writes: Vec<_> = writes
        .into_iter()
        .map(async |(pod, changes, condition, flip)| {
            (&pod.1, write_pod(ctx, pod, changes, condition, flip).await)
        })
        .collect();
    let begin = Instant::now();
    let mut writes = writes.into_iter();
    // Evaluated when a write can start.
    let due = std::iter::from_fn(|| {
        let may_start = may_start_write(begin.elapsed(), ctx.is_current());
        may_start.then(|| writes.next()).flatten()
    });
    let results = stream::iter(due)
        .buffer_unordered(MAX_CONCURRENT_WRITES)
        .collect::<Vec<_>>()
        .await;
    let generation = ctx.set.metadata.generation.unwrap_or_default();
    let mut result = Ok(acted);
    for (pod, written) in results {
        let retry = match written {
            Err(error) => match retry_of_pod(&error) {
                Some(retry) => {
                    report::publish_refused(ctx, pod, &error);
                    retry
                }
                None => {
                    result = Err(error);
                    continue;
                }
            },
            Ok(Outcome::Written) => {
                state.refused.remove(&pod.uid);
                continue;
            }
            Ok(Outcome::Changed) => continue,
            Ok(Outcome::Rewritten { container, image }) => {
                report::publish_rewritten(ctx, pod, &container, &image);
                RETRY_REFUSED
            }
        };
        state
            .refused
            .insert(pod.uid.clone(), (generation, Instant::now() + retry));
    }
    result
}

/// What became of a write that did not fail.
enum Outcome {
    Written,
    /// Nothing was written: the Pod has changed or is gone.
    Changed,
    /// Admission has given a container that is switched off another image.
    Rewritten {
        container: String,
        image: String,
    },
}

/// The container whose image is not what it was to be.
fn rewritten(stored: &Pod, changes: &PodChanges) -> Option<Outcome> {
    let mut containers = stored.containers.iter();
    let differs = |name: &str, image: &str| changes.images.get(name).is_some_and(|wanted| wanted != image);
    let found = containers.find(|container| differs(&container.name, &container.image))?;
    Some(Outcome::Rewritten {
        container: found.name.clone(),
        image: found.image.clone(),
    })
}

async fn write_pod(
    ctx: &SetContext<'_>,
    (key, pod): &ObservedPod,
    changes: Option<&PodChanges>,
    condition: Option<&Value>,
    flip: bool,
) -> Result<Outcome, Error> {
    let mut outcome = Outcome::Written;
    let mut version = pod.resource_version.clone();
    let mut condition_refused = None;
    // Before the update: kubelet writes the Pod's status after it, and a condition that conflicts with that would not be
    // planned again.
    if let Some(condition) = condition {
        // Other sets have their part in the same condition.
        let metadata = json!({ "uid": pod.uid, "resourceVersion": version });
        let patch = json!({ "metadata": metadata, "status": { "conditions": [condition] } });
        match write::patch_status_strategic(&ctx.pods(key), &key.name, &patch).await {
            Ok(stored) => {
                let stored = ctx.cache_pod(key, &stored.object()?);
                version.clone_from(&stored.resource_version);
            }
            // It changed or is gone: the next reconcile decides again.
            Err(error) if error.conflict() || error.not_found() => {
                ctx.fetch_pod(key).await?;
                return Ok(Outcome::Changed);
            }
            // The update does not need it. A webhook chooses the code of its denial.
            Err(error) if error.rejected() || error.denied() => condition_refused = Some(error),
            Err(error) => return Err(error),
        }
    }
    if let Some(changes) = changes {
        let patch = pod_patch(&pod.uid, &version, changes);
        let stored = write::patch_strategic(&ctx.pods(key), &key.name, &patch).await;
        let stored = stored.and_then(|stored| stored.object());
        if flip {
            publish_flip(ctx, key, pod, stored.as_ref().err());
        }
        match stored {
            Ok(stored) => {
                let stored = ctx.cache_pod(key, &stored);
                tracing::info!(set = ctx.name, pod = %key, images = ?changes.images, flip, "updated sidecars");
                // Otherwise it would be switched off again at once, and for ever.
                if flip && let Some(rewritten) = rewritten(&stored, changes) {
                    outcome = rewritten;
                }
            }
            // It changed or is gone: the next reconcile decides again.
            Err(error) if error.conflict() || error.not_found() => {
                ctx.fetch_pod(key).await?;
                return Ok(Outcome::Changed);
            }
            Err(error) => {
                if error.outcome_unknown() {
                    ctx.shared.index().pods.mark_unknown(key);
                }
                tracing::warn!(set = ctx.name, pod = %key, %error, "cannot update sidecars");
                return Err(error);
            }
        }
    }
    condition_refused.map_or(Ok(outcome), Err)
}

/// The patch of a Pod; it is refused if the Pod has changed.
fn pod_patch(uid: &str, version: &str, changes: &PodChanges) -> Value {
    let mut patch = json!({ "metadata": {
        "uid": uid,
        "resourceVersion": version,
        "annotations": changes.annotations,
    } });
    let images = changes
        .images
        .iter()
        .map(|(name, image)| json!({ "name": name, "image": image }));
    let images: Vec<Value> = images.collect();
    if !images.is_empty() {
        set(&mut patch, &["spec", "containers"], images.into());
    }
    patch
}

fn publish_flip(ctx: &SetContext<'_>, key: &Key, pod: &Pod, error: Option<&Error>) {
    let reference = object_reference("v1", "Pod", key, &pod.uid);
    let (type_, reason, note) = match error {
        None => (
            EventType::Normal,
            EVENT_RESET_SUCCEEDED,
            "reset sidecar container image empty successfully".to_owned(),
        ),
        Some(error) => (
            EventType::Warning,
            EVENT_RESET_FAILED,
            format!("reset sidecar container image empty failed: {}", error.message()),
        ),
    };
    let events = &ctx.shared.manager.cluster.events;
    events.publish(reference, type_, reason, "Updating", note);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use kube::client::Body;
    use tokio::sync::mpsc;

    use super::*;
    use crate::Context;
    use crate::sidecarset::context::ControllerState;

    #[test]
    fn no_write_starts_late_or_for_an_older_version_of_the_set() {
        let millisecond = Duration::from_millis(1);
        for (elapsed, is_current, starts) in [
            (Duration::ZERO, true, true),
            (MAX_WRITING_TIME - millisecond, true, true),
            (MAX_WRITING_TIME, true, false),
            (MAX_WRITING_TIME * 10, true, false),
            (Duration::ZERO, false, false),
        ] {
            assert_eq!(
                may_start_write(elapsed, is_current),
                starts,
                "{elapsed:?} {is_current}"
            );
        }
    }

    #[test]
    fn failures_of_one_pod_are_distinguished_from_those_of_all() {
        let error = |code: u16, message: &str| {
            let status = json!({ "status": "Failure", "code": code, "reason": "", "message": message });
            Error::Api(serde_json::from_value(status).unwrap())
        };
        // A webhook for the updates of its namespace's Pods may hang.
        let no_answer = Error::Timeout {
            verb: "patch",
            kind: "Pod".to_owned(),
            after: Duration::from_secs(10),
        };
        for (error, retry) in [
            (error(403, "denied by a policy"), Some(RETRY_REFUSED)),
            (error(422, "invalid"), Some(RETRY_REFUSED)),
            (
                error(500, "etcdserver: request is too large"),
                Some(RETRY_REFUSED),
            ),
            (error(500, "failed calling webhook"), Some(RETRY_INTERNAL)),
            (error(401, "unauthorized"), None),
            (error(429, "too many requests"), None),
            (error(503, "shutting down"), None),
            (
                error(503, r#"admission webhook "w" denied the request: no"#),
                Some(RETRY_REFUSED),
            ),
            (Error::Transport("closed".to_owned()), None),
            (no_answer, Some(RETRY_INTERNAL)),
        ] {
            assert_eq!(retry_of_pod(&error), retry, "{error}");
        }
    }

    #[tokio::test]
    async fn sidecars_are_updated_although_a_webhook_denies_the_condition() {
        let pod = json!({ "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": "p", "namespace": "n", "uid": "u", "resourceVersion": "1" } });
        let observed = (Key::namespaced("n", "p"), Arc::new(Pod::from_json(&pod)));
        let (sent_tx, mut sent) = mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let path = request.uri().path().to_owned();
            let denial = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 503,
                "reason": "ServiceUnavailable", "message": r#"admission webhook "w" denied the request: no"# });
            let (code, answer) = if path.ends_with("/status") {
                (503, &denial)
            } else {
                (200, &pod)
            };
            let answer = Body::from(answer.to_string().into_bytes());
            let _ = sent_tx.send(path);
            std::future::ready(http::Response::builder().status(code).body(answer))
        });
        let ctx = Context::for_test(kube::Client::new(service, "default"));
        let shared = ControllerState::new(ctx, "kruise-system");
        let set = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet",
            "metadata": { "name": "log", "uid": "u" }, "spec": { "selector": { "matchLabels": { "app": "web" } } } });
        let set: SidecarSet = serde_json::from_value(set).unwrap();
        let ctx = SetContext {
            shared: &shared,
            set: &set,
            name: "log",
            uid: "u",
        };
        let changes = PodChanges {
            images: BTreeMap::from([("log".to_owned(), "log:2".to_owned())]),
            ..PodChanges::default()
        };
        let condition = json!({ "type": "SidecarSetUpgradable", "status": "True" });
        let written = write_pod(&ctx, &observed, Some(&changes), Some(&condition), false).await;
        assert!(written.is_err_and(|error| error.denied()));
        let paths: Vec<String> = std::iter::from_fn(|| sent.try_recv().ok()).collect();
        let pod = "/api/v1/namespaces/n/pods/p";
        assert_eq!(paths, [format!("{pod}/status"), pod.to_owned()]);
    }

    #[test]
    fn image_that_admission_changed_is_found() {
        let changes = PodChanges {
            images: BTreeMap::from([("mesh-1".to_owned(), "empty:1".to_owned())]),
            ..PodChanges::default()
        };
        let stored = |image: &str| {
            let containers =
                json!([{ "name": "app", "image": "app:2" }, { "name": "mesh-1", "image": image }]);
            Pod::from_json(&json!({ "metadata": { "name": "p" }, "spec": { "containers": containers } }))
        };
        assert!(rewritten(&stored("empty:1"), &changes).is_none());
        let found = rewritten(&stored("mirror/empty:1"), &changes);
        assert!(matches!(found, Some(Outcome::Rewritten { container, image })
                if container == "mesh-1" && image == "mirror/empty:1"));
    }
}

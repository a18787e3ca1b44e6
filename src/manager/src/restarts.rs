//! ContainerRecreateRequests, as the budgets of controllers see them.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::view::PodView;
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::unconfirmed::CONFIRM_TIMEOUT;
use kruise_cluster::{Key, Store};

/// How long a request without a deadline counts: its daemon may have gone, and then it never ends.
const MAX_SECONDS: i64 = 3600;
/// Kubernetes' default grace period, in seconds.
const DEFAULT_GRACE_SECONDS: i64 = 30;
/// The longest grace period that counts, in seconds: a day.
const MAX_GRACE_SECONDS: i64 = 86_400;
/// Seconds from the end of a container until the Pod shows it.
const REPORT_SECONDS: i64 = 30;

/// The requests that controllers are creating: a Pod that one of them restarts counts in the budgets of all at once.
#[derive(Default)]
pub struct Restarts {
    /// UIDs of the Pods of requests that the watch may not have shown yet, and when they were planned.
    planned: Mutex<HashMap<Key, (String, Instant)>>,
}

/// While it exists, no other controller plans: nothing may be awaited.
pub struct Planning<'a> {
    planned: MutexGuard<'a, HashMap<Key, (String, Instant)>>,
}

impl Restarts {
    /// Begins to plan restarts.
    pub fn plan(&self) -> Planning<'_> {
        Planning {
            planned: self.planned.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }
}

impl Planning<'_> {
    /// UIDs of the Pods with requests that the watch has not shown yet, in the namespace of `key`, and how long the first
    /// of these counts if it is never shown.
    pub fn unseen(
        &mut self,
        key: &Key,
        requests: &Store<ContainerRecreateRequest>,
        now: Instant,
    ) -> (BTreeSet<String>, Option<Duration>) {
        let left = |at: Instant| CONFIRM_TIMEOUT.checked_sub(now.saturating_duration_since(at));
        self.planned
            .retain(|request, (_, at)| left(*at).is_some() && requests.get(request).is_none());
        let of_namespace = || {
            let planned = self.planned.iter();
            planned.filter(|(request, _)| request.namespace == key.namespace)
        };
        let uids = of_namespace().map(|(_, (uid, _))| uid.clone()).collect();
        (uids, of_namespace().filter_map(|(_, (_, at))| left(*at)).min())
    }

    /// A request for the Pod with this UID will be created.
    pub fn record(&mut self, request: Key, pod_uid: String, now: Instant) {
        self.planned.insert(request, (pod_uid, now));
    }

    /// The request is not created after all.
    pub fn forget(&mut self, request: &Key) {
        self.planned.remove(request);
    }
}

/// Whether the request has ended.
pub fn is_finished(request: &ContainerRecreateRequest) -> bool {
    let status = request.status.as_ref();
    status.is_some_and(|status| status.completion_time.is_some())
}

/// Until when a request makes its Pod unavailable, whatever readiness the Pod shows; `None` if it does not. The stop that
/// a request has begun goes on after the request has ended, at its deadline or because another container failed.
pub fn counts_until(request: &ContainerRecreateRequest, pod: &PodView) -> Option<Timestamp> {
    let ended = request
        .status
        .as_ref()
        .and_then(|status| status.completion_time.as_ref());
    let (since, limit) = match ended {
        Some(Time(ended)) if shows_stopped_container(request, pod) => (*ended, stop_limit(request)),
        Some(_) => return None,
        None => {
            let seconds = request.spec.active_deadline_seconds.unwrap_or(MAX_SECONDS);
            let created = request.metadata.creation_timestamp.as_ref()?.0;
            (created, SignedDuration::from_secs(seconds))
        }
    };
    Some(since.checked_add(limit).unwrap_or(Timestamp::MAX))
}

/// How long the stop of a container takes at most, until the Pod shows it. Admission records the Pod's grace period in
/// each request.
pub fn stop_limit(request: &ContainerRecreateRequest) -> SignedDuration {
    let strategy = request.spec.strategy.as_ref();
    let grace = strategy.and_then(|strategy| strategy.termination_grace_period_seconds);
    let grace = grace.unwrap_or(DEFAULT_GRACE_SECONDS).clamp(0, MAX_GRACE_SECONDS);
    SignedDuration::from_secs(grace + REPORT_SECONDS)
}

/// Whether the Pod's status still shows a container that the daemon has stopped for this request.
pub fn shows_stopped_container(request: &ContainerRecreateRequest, pod: &PodView) -> bool {
    request.stopped_containers().any(|(state, id)| {
        let mut containers = pod.containers.iter();
        containers.any(|container| container.name == state.name && container.id == id)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::{Value, json};

    use super::*;
    use crate::view::ContainerView;

    #[test]
    fn planned_restarts_count_before_the_watch_shows_them() {
        let (restarts, now) = (Restarts::default(), Instant::now());
        let key = |namespace: &str, name: &str| Key::namespaced(namespace, name);
        let store = |requests: &[&str]| {
            let requests = requests.iter().map(|name| {
                let request = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
                    "metadata": { "name": name, "namespace": "n" }, "spec": { "podName": "p", "containers": [] } });
                (key("n", name), serde_json::from_value(request).unwrap())
            });
            Store::from_objects(requests)
        };
        let unseen =
            |namespace: &str, store: &Store<_>, now| restarts.plan().unseen(&key(namespace, ""), store, now);
        let record = |name: &str| restarts.plan().record(key("n", name), "pod".to_owned(), now);
        let none = (BTreeSet::new(), None);
        record("r");
        let second = Duration::from_secs(1);
        let counted = (["pod".to_owned()].into(), Some(CONFIRM_TIMEOUT - second));
        assert_eq!(unseen("n", &store(&[]), now + second), counted);
        assert_eq!(unseen("other", &store(&[]), now), none);
        assert_eq!(unseen("n", &store(&["r"]), now), none, "the watch shows it");
        record("s");
        restarts.plan().forget(&key("n", "s"));
        assert_eq!(unseen("n", &store(&[]), now), none, "it was refused");
        record("t");
        let late = now + CONFIRM_TIMEOUT + second;
        assert_eq!(unseen("n", &store(&[]), late), none, "it was not created");
    }

    /// A request that ended at its deadline, of 30 s, while its container had 120 s to stop.
    #[test]
    fn stop_counts_after_its_request() {
        let request = |is_killed: bool, grace: Value| -> ContainerRecreateRequest {
            let request = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
                "metadata": { "name": "r", "creationTimestamp": "2026-01-01T00:00:00Z" },
                "spec": { "podName": "p", "activeDeadlineSeconds": 30, "strategy": { "terminationGracePeriodSeconds": grace },
                    "containers": [{ "name": "app", "statusContext": { "containerID": "c://1", "restartCount": 0 } }] },
                "status": { "phase": "Completed", "completionTime": "2026-01-01T00:00:30Z",
                    "containerRecreateStates": [{ "name": "app", "phase": "Failed", "isKilled": is_killed }] } });
            serde_json::from_value(request).unwrap()
        };
        let pod = |id: &str| PodView {
            ready: true,
            containers: vec![ContainerView {
                name: "app".to_owned(),
                id: id.to_owned(),
                ready: true,
                running: true,
                restarts: 0,
            }],
            ..PodView::default()
        };
        let counts = |is_killed: bool, grace: Value, id: &str| {
            counts_until(&request(is_killed, grace), &pod(id)).map(|end| end.to_string())
        };
        let end = |time: &str| Some(format!("2026-01-01T00:{time}Z"));
        assert_eq!(counts(true, json!(120), "c://1"), end("03:00"));
        assert_eq!(counts(true, Value::Null, "c://1"), end("01:30"));
        assert_eq!(counts(true, json!(120), "c://2"), None, "it was replaced");
        assert_eq!(counts(false, json!(120), "c://1"), None, "no stop was begun");
        assert_eq!(
            counts(true, json!(i64::MAX), "c://1"),
            Some("2026-01-02T00:01:00Z".to_owned())
        );
    }

    #[test]
    fn request_counts_until_its_end_or_its_deadline() {
        let counts = |deadline: Value, status: Value| {
            let request = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
                "metadata": { "name": "r", "creationTimestamp": "2026-01-01T00:00:00Z" },
                "spec": { "podName": "p", "containers": [], "activeDeadlineSeconds": deadline }, "status": status });
            let request: ContainerRecreateRequest = serde_json::from_value(request).unwrap();
            counts_until(&request, &PodView::default()).map(|end| end.to_string())
        };
        let running = json!({ "phase": "Recreating" });
        assert_eq!(
            counts(json!(60), running.clone()).unwrap(),
            "2026-01-01T00:01:00Z"
        );
        assert_eq!(
            counts(Value::Null, running.clone()).unwrap(),
            "2026-01-01T01:00:00Z"
        );
        assert_eq!(
            counts(json!(i64::MAX), running).unwrap(),
            Timestamp::MAX.to_string()
        );
        let ended = json!({ "phase": "Completed", "completionTime": "2026-01-01T00:00:10Z" });
        assert_eq!(counts(Value::Null, ended), None);
    }
}

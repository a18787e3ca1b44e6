//! ContainerRecreateRequests, as the budgets of controllers see them.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use jiff::{SignedDuration, Timestamp};
use tokio::sync::OwnedMutexGuard;

use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kruise_api::unconfirmed::CONFIRM_TIMEOUT;
use kruise_cluster::{Key, Store};

/// How long a request without a deadline counts: its daemon may have gone, and then it never ends.
const MAX_SECONDS: i64 = 3600;

/// What the controllers that create requests share: a Pod that one of them restarts counts in the budgets of all.
#[derive(Default)]
pub struct Restarts {
    /// By namespace; held from the look at what is being restarted until the requests are created.
    turns: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
    /// The UIDs of the Pods of requests that the watch may not have shown yet, and when they were created.
    created: Mutex<HashMap<Key, (String, Instant)>>,
}

impl Restarts {
    /// Waits for the other controllers and jobs of the namespace of `key`.
    pub async fn turn(&self, key: &Key) -> OwnedMutexGuard<()> {
        let namespace = key.namespace.clone().unwrap_or_default();
        let turn = {
            let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
            turns.retain(|_, turn| Arc::strong_count(turn) > 1);
            Arc::clone(turns.entry(namespace).or_default())
        };
        turn.lock_owned().await
    }

    /// A request for the Pod with this UID was created, or may have been.
    pub fn record(&self, request: Key, pod_uid: String, now: Instant) {
        let mut created = self.created.lock().unwrap_or_else(PoisonError::into_inner);
        created.insert(request, (pod_uid, now));
    }

    /// UIDs of the Pods with requests that the watch has not shown yet, in the namespace of `key`.
    pub fn unseen(
        &self,
        key: &Key,
        requests: &Store<ContainerRecreateRequest>,
        now: Instant,
    ) -> BTreeSet<String> {
        let mut created = self.created.lock().unwrap_or_else(PoisonError::into_inner);
        created.retain(|request, (_, at)| {
            now.saturating_duration_since(*at) < CONFIRM_TIMEOUT && requests.get(request).is_none()
        });
        let of_namespace = created
            .iter()
            .filter(|(request, _)| request.namespace == key.namespace);
        of_namespace.map(|(_, (uid, _))| uid.clone()).collect()
    }
}

/// Whether the request has ended.
pub fn is_finished(request: &ContainerRecreateRequest) -> bool {
    let status = request.status.as_ref();
    status.is_some_and(|status| status.completion_time.is_some())
}

/// Until when a request makes its Pod unavailable, whatever the Pod shows; `None` if it has ended.
pub fn counts_until(request: &ContainerRecreateRequest) -> Option<Timestamp> {
    if is_finished(request) {
        return None;
    }
    let created = request.metadata.creation_timestamp.as_ref()?.0;
    let seconds = request.spec.active_deadline_seconds.unwrap_or(MAX_SECONDS);
    let limit = SignedDuration::from_secs(seconds);
    Some(created.checked_add(limit).unwrap_or(Timestamp::MAX))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::{Value, json};

    use super::*;

    #[tokio::test]
    async fn restarts_of_a_namespace_are_planned_in_turns_and_count_before_the_watch_shows_them() {
        let (restarts, now) = (Restarts::default(), Instant::now());
        let key = |namespace: &str, name: &str| Key::namespaced(namespace, name);
        let turn = restarts.turn(&key("n", "job")).await;
        let other = restarts.turn(&key("other", "job")).await;
        let probe = key("n", "probe");
        let next = restarts.turn(&probe);
        tokio::pin!(next);
        let waits = tokio::time::timeout(std::time::Duration::from_millis(10), &mut next).await;
        assert!(waits.is_err(), "the turn of the other controller");
        restarts.record(key("n", "r"), "pod".to_owned(), now);
        drop((turn, other));
        let _next = next.await;

        let store = |requests: &[&str]| {
            let requests = requests.iter().map(|name| {
                let request = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
                    "metadata": { "name": name, "namespace": "n" }, "spec": { "podName": "p", "containers": [] } });
                (key("n", name), serde_json::from_value(request).unwrap())
            });
            Store::from_objects(requests)
        };
        let unseen =
            |namespace: &str, store: &Store<_>, now| restarts.unseen(&key(namespace, ""), store, now);
        assert_eq!(unseen("n", &store(&[]), now), ["pod".to_owned()].into());
        assert!(unseen("other", &store(&[]), now).is_empty());
        assert!(unseen("n", &store(&["r"]), now).is_empty(), "the watch shows it");
        restarts.record(key("n", "s"), "pod".to_owned(), now);
        assert!(
            unseen("n", &store(&[]), now + CONFIRM_TIMEOUT).is_empty(),
            "it was not created"
        );
        assert_eq!(restarts.turns.lock().unwrap().len(), 2);
    }

    #[test]
    fn request_counts_until_its_end_or_its_deadline() {
        let counts = |deadline: Value, status: Value| {
            let request = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "ContainerRecreateRequest",
                "metadata": { "name": "r", "creationTimestamp": "2026-01-01T00:00:00Z" },
                "spec": { "podName": "p", "containers": [], "activeDeadlineSeconds": deadline }, "status": status });
            let request: ContainerRecreateRequest = serde_json::from_value(request).unwrap();
            counts_until(&request).map(|end| end.to_string())
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

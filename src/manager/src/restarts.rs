//! ContainerRecreateRequests, as the budgets of controllers see them.

use jiff::{SignedDuration, Timestamp};

use kruise_api::container_recreate_request::ContainerRecreateRequest;

/// How long a request without a deadline counts: its daemon may have gone, and then it never ends.
const MAX_SECONDS: i64 = 3600;

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

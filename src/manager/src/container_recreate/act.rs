//! Executes the plan for one ContainerRecreateRequest.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{Api, Resource};
use serde_json::{Value, json};

use super::plan::{Action, label, targets_pod};
use crate::Context;
use crate::pod_readiness::set_not_ready;
use crate::view::{PodView, RawPod};
use kruise_api::container_recreate_request::{
    ContainerRecreateRequest, ContainerRecreateRequestStatus, POD_GONE_MESSAGE,
};
use kruise_api::json::set;
use kruise_api::keys;
use kruise_cluster::{Error, EventType, Key, write};
use kruise_workload::not_ready::NotReadyKey;

/// Executes one action. Succeeds if the request was deleted in the meantime.
pub async fn execute(
    ctx: &Context,
    key: &Key,
    request: &ContainerRecreateRequest,
    pod: Option<&PodView>,
    action: Action,
    now: Timestamp,
) -> Result<(), Error> {
    let namespace = key.namespace.as_deref().unwrap_or_default();
    let api = Api::<ContainerRecreateRequest>::namespaced(ctx.cluster.client.clone(), namespace);
    let executor = RequestExecutor {
        ctx,
        api,
        key,
        request,
        pod,
    };
    match executor.apply(action, now).await {
        Err(error) if error.not_found() => Ok(()),
        other => other,
    }
}

struct RequestExecutor<'a> {
    ctx: &'a Context,
    api: Api<ContainerRecreateRequest>,
    key: &'a Key,
    request: &'a ContainerRecreateRequest,
    pod: Option<&'a PodView>,
}

impl RequestExecutor<'_> {
    async fn apply(&self, act: Action, now: Timestamp) -> Result<(), Error> {
        match act {
            Action::SetLabels(labels) => self.patch_metadata(json!({ "labels": labels })).await,
            Action::Complete(status) => {
                let pod_deleted = status.message.as_deref() == Some(POD_GONE_MESSAGE);
                if pod_deleted && self.pod_exists().await? {
                    return Ok(());
                }
                let body = json!({ "metadata": self.resource_version(), "status": &*status });
                self.patch_status(body).await?;
                self.publish_completion(&status);
                Ok(())
            }
            Action::ReportNoDaemon(conditions) => {
                // The schema requires a phase. Any phase but the empty one means that a daemon has taken the request.
                let phase = ContainerRecreateRequestStatus::default().phase;
                let body = json!({ "metadata": self.resource_version(), "status": { "phase": phase, "conditions": conditions } });
                self.patch_status(body).await?;
                let node = label(self.request, keys::CRR_NODE_NAME);
                tracing::info!(request = %self.key, node, "no kruise-daemon has started the request");
                Ok(())
            }
            Action::SetConditions(conditions) => {
                let body =
                    json!({ "metadata": self.resource_version(), "status": { "conditions": conditions } });
                self.patch_status(body).await
            }
            Action::AddFinalizer => self.patch_metadata(self.finalizers_patch(true)).await,
            Action::MarkNotReady => {
                self.set_not_ready(true).await?;
                self.start_grace_period(now).await
            }
            Action::StartGracePeriod => self.start_grace_period(now).await,
            Action::WriteSnapshot(new) => {
                let body = json!({ "metadata": self.resource_version(), "status": { "containerStatusSnapshot": new } });
                self.patch_status(body).await
            }
            Action::Finalize { mark_ready: release } => {
                let mut metadata = json!({ "labels": { (keys::CRR_ACTIVE): null } });
                if release {
                    self.set_not_ready(false).await?;
                    let finalizers = self.finalizers_patch(false)["finalizers"].clone();
                    set(&mut metadata, &["finalizers"], finalizers);
                }
                self.patch_metadata(metadata).await
            }
            Action::Delete => {
                let uid = self.request.metadata.uid.as_deref().unwrap_or_default();
                write::delete(&self.api, &self.key.name, uid).await?;
                tracing::info!(request = %self.key, "deleted the request: ttlSecondsAfterFinished is over");
                Ok(())
            }
        }
    }

    /// Publishes an event: the manager, not the daemon, completed the request.
    fn publish_completion(&self, status: &ContainerRecreateRequestStatus) {
        let Some(outcome) = status.final_condition() else {
            return;
        };
        let (pod, reason) = (&self.request.spec.pod_name, &outcome.reason);
        tracing::info!(request = %self.key, pod, reason, message = outcome.message, "ended the request");
        let events = &self.ctx.cluster.events;
        let reference = self.request.object_ref(&());
        events.publish(
            reference,
            EventType::Warning,
            &outcome.type_,
            "Recreate",
            outcome.message.clone(),
        );
    }

    /// Whether the Pod exists: the watch of Pods may be behind that of requests.
    async fn pod_exists(&self) -> Result<bool, Error> {
        let namespace = self.key.namespace.as_deref().unwrap_or_default();
        let pods = Api::<RawPod>::namespaced(self.ctx.cluster.client.clone(), namespace);
        let pod = write::get(&pods, &self.request.spec.pod_name).await?;
        let pod = pod.as_ref().map(PodView::from);
        Ok(pod.is_some_and(|pod| !pod.terminating && targets_pod(self.request, &pod)))
    }

    fn resource_version(&self) -> Value {
        json!({ "resourceVersion": self.request.metadata.resource_version })
    }

    async fn patch_metadata(&self, mut metadata: Value) -> Result<(), Error> {
        let version = json!(self.request.metadata.resource_version);
        set(&mut metadata, &["resourceVersion"], version);
        let body = json!({ "metadata": metadata });
        write::patch_merge(&self.api, &self.key.name, &body)
            .await
            .map(|_| ())
    }

    async fn patch_status(&self, body: Value) -> Result<(), Error> {
        write::patch_status_merge(&self.api, &self.key.name, &body)
            .await
            .map(|_| ())
    }

    fn finalizers_patch(&self, present: bool) -> Value {
        let others = self.request.metadata.finalizers.iter().flatten();
        let mut list: Vec<&str> = others
            .map(String::as_str)
            .filter(|f| *f != keys::CRR_UNREADY_ACQUIRED)
            .collect();
        if present {
            list.push(keys::CRR_UNREADY_ACQUIRED);
        }
        json!({ "finalizers": list })
    }

    /// Marks the Pod not ready on the request's behalf, or releases it.
    async fn set_not_ready(&self, not_ready: bool) -> Result<(), Error> {
        // The store may lack a Pod that it cannot read. A deleted Pod needs nothing, and this request does not block a
        // new Pod of the same name.
        let uid = label(self.request, keys::CRR_POD_UID).or(self.pod.map(|pod| pod.uid.as_str()));
        let Some(uid) = uid else { return Ok(()) };
        let name = Key {
            namespace: self.key.namespace.clone(),
            name: self.request.spec.pod_name.clone(),
        };
        let holder = NotReadyKey {
            user_agent: keys::NOT_READY_USER_AGENT.to_owned(),
            key: self.key.to_string(),
        };
        if set_not_ready(self.ctx, &name, uid, &holder, not_ready).await? {
            let readiness = if not_ready { "not ready" } else { "ready again" };
            tracing::info!(request = %self.key, pod = %name, "marked the Pod {readiness} for the request");
        }
        Ok(())
    }

    /// Records that the Pod is not ready; an existing time is kept.
    async fn start_grace_period(&self, now: Timestamp) -> Result<(), Error> {
        let status = self.request.status.clone().unwrap_or_default();
        let ContainerRecreateRequestStatus { mut conditions, .. } = status;
        conditions.retain(|c| c.type_ != keys::PRE_RECREATE_GRACE);
        conditions.push(Condition {
            type_: keys::PRE_RECREATE_GRACE.to_owned(),
            status: "True".to_owned(),
            reason: keys::PRE_RECREATE_GRACE.to_owned(),
            message: keys::PRE_RECREATE_GRACE_MESSAGE.to_owned(),
            last_transition_time: Time(now),
            observed_generation: None,
        });
        let body = json!({ "metadata": self.resource_version(), "status": { "conditions": conditions } });
        self.patch_status(body).await
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::{Arc, Mutex};

    use kube::client::Body;

    use super::*;
    use kruise_api::container_recreate_request::ContainerRecreateRequestSpec;

    /// Otherwise it would stay out of its Services for ever.
    #[tokio::test]
    async fn pod_that_the_store_lacks_is_released() {
        let calls: Arc<Mutex<Vec<String>>> = Arc::default();
        let recorded = Arc::clone(&calls);
        let service = tower::service_fn(move |call: http::Request<Body>| {
            let line = format!("{} {}", call.method(), call.uri().path());
            recorded.lock().unwrap().push(line);
            let pod = json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "p", "namespace": "n", "uid": "u" },
                "status": { "conditions": [{ "type": "KruisePodReady", "status": "False",
                    "message": r#"[{"userAgent":"ContainerRecreateRequest","key":"n/r"}]"# }] },
            });
            let body = Body::from(pod.to_string().into_bytes());
            std::future::ready(http::Response::builder().body(body))
        });
        let ctx = Context::for_test(kube::Client::new(service, "default"));
        let spec = ContainerRecreateRequestSpec {
            pod_name: "p".to_owned(),
            ..ContainerRecreateRequestSpec::default()
        };
        let mut request = ContainerRecreateRequest::new("r", spec);
        request.metadata.labels = Some([(keys::CRR_POD_UID.to_owned(), "u".to_owned())].into());
        let (key, now) = (Key::namespaced("n", "r"), Timestamp::UNIX_EPOCH);
        let action = Action::Finalize { mark_ready: true };
        execute(&ctx, &key, &request, None, action, now).await.unwrap();
        let calls = calls.lock().unwrap();
        let (get, patch) = (
            "GET /api/v1/namespaces/n/pods/p",
            "PATCH /api/v1/namespaces/n/pods/p/status",
        );
        assert_eq!(
            calls.get(..2),
            Some([get.to_owned(), patch.to_owned()].as_slice())
        );
    }
}

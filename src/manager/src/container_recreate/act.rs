//! Carries a plan for one request out.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{Api, Resource};
use serde_json::{Value, json};

use super::plan::{Act, belongs};
use crate::Context;
use crate::pod_readiness::hold;
use crate::view::{PodView, RawPod};
use kruise_api::container_recreate_request::{
    COMPLETE, ContainerRecreateRequest, ContainerRecreateRequestStatus, FAILED, GONE,
};
use kruise_api::json::set;
use kruise_api::keys;
use kruise_cluster::{Error, EventType, Key, write};
use kruise_workload::not_ready::NotReadyKey;

/// Does one thing. A request that has gone meanwhile is done.
pub async fn carry_out(
    ctx: &Context,
    key: &Key,
    request: &ContainerRecreateRequest,
    pod: Option<&PodView>,
    act: Act,
    now: Timestamp,
) -> Result<(), Error> {
    let namespace = key.namespace.as_deref().unwrap_or_default();
    let api = Api::<ContainerRecreateRequest>::namespaced(ctx.cluster.client.clone(), namespace);
    let work = Work {
        ctx,
        api,
        key,
        request,
        pod,
    };
    match work.act(act, now).await {
        Err(error) if error.not_found() => Ok(()),
        other => other,
    }
}

struct Work<'a> {
    ctx: &'a Context,
    api: Api<ContainerRecreateRequest>,
    key: &'a Key,
    request: &'a ContainerRecreateRequest,
    pod: Option<&'a PodView>,
}

impl Work<'_> {
    async fn act(&self, act: Act, now: Timestamp) -> Result<(), Error> {
        match act {
            Act::Label(labels) => self.metadata(json!({ "labels": labels })).await,
            Act::Complete(status) => {
                let gone = status.message.as_deref() == Some(GONE);
                if gone && self.pod_is_there().await? {
                    return Ok(());
                }
                let body = json!({ "metadata": self.version(), "status": &*status });
                self.status(body).await?;
                self.ended(&status);
                Ok(())
            }
            Act::Wait(conditions) => {
                // The schema wants a phase. Any but the empty one says that a daemon has the request.
                let phase = ContainerRecreateRequestStatus::default().phase;
                let body = json!({ "metadata": self.version(), "status": { "phase": phase, "conditions": conditions } });
                self.status(body).await?;
                tracing::info!(request = %self.key, node = self.node(), "no kruise-daemon has started the request");
                Ok(())
            }
            Act::Conditions(conditions) => {
                let body = json!({ "metadata": self.version(), "status": { "conditions": conditions } });
                self.status(body).await
            }
            Act::Guard => self.metadata(self.finalizers(true)).await,
            Act::Hold => {
                self.hold(true).await?;
                self.grace(now).await
            }
            Act::Grace => self.grace(now).await,
            Act::Snapshot(new) => {
                let body =
                    json!({ "metadata": self.version(), "status": { "containerStatusSnapshot": new } });
                self.status(body).await
            }
            Act::Close { release } => {
                let mut metadata = json!({ "labels": { (keys::CRR_ACTIVE): null } });
                if release {
                    self.hold(false).await?;
                    let without = self.finalizers(false)["finalizers"].clone();
                    set(&mut metadata, &["finalizers"], without);
                }
                self.metadata(metadata).await
            }
            Act::Delete => {
                let uid = self.request.metadata.uid.as_deref().unwrap_or_default();
                write::delete(&self.api, &self.key.name, uid).await?;
                tracing::info!(request = %self.key, "deleted the request: ttlSecondsAfterFinished is over");
                Ok(())
            }
        }
    }

    /// Says that the manager, not the daemon, has ended the request.
    fn ended(&self, status: &ContainerRecreateRequestStatus) {
        let outcome = status
            .conditions
            .iter()
            .find(|c| [COMPLETE, FAILED].contains(&c.type_.as_str()));
        let Some(outcome) = outcome else { return };
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

    /// The node of the request's Pod, as far as the request tells.
    fn node(&self) -> Option<&str> {
        let labels = self.request.metadata.labels.as_ref()?;
        labels.get(keys::CRR_NODE_NAME).map(String::as_str)
    }

    /// Whether the Pod is there after all: the watch of Pods may be behind that of requests.
    async fn pod_is_there(&self) -> Result<bool, Error> {
        let namespace = self.key.namespace.as_deref().unwrap_or_default();
        let pods = Api::<RawPod>::namespaced(self.ctx.cluster.client.clone(), namespace);
        let pod = write::get(&pods, &self.request.spec.pod_name).await?;
        let pod = pod.as_ref().map(PodView::from);
        Ok(pod.is_some_and(|pod| !pod.deleting && belongs(self.request, &pod)))
    }

    fn version(&self) -> Value {
        json!({ "resourceVersion": self.request.metadata.resource_version })
    }

    async fn metadata(&self, mut metadata: Value) -> Result<(), Error> {
        let version = json!(self.request.metadata.resource_version);
        set(&mut metadata, &["resourceVersion"], version);
        let body = json!({ "metadata": metadata });
        write::patch_merge(&self.api, &self.key.name, &body)
            .await
            .map(|_| ())
    }

    async fn status(&self, body: Value) -> Result<(), Error> {
        write::patch_status_merge(&self.api, &self.key.name, &body)
            .await
            .map(|_| ())
    }

    fn finalizers(&self, on: bool) -> Value {
        let others = self.request.metadata.finalizers.iter().flatten();
        let mut list: Vec<&str> = others
            .map(String::as_str)
            .filter(|f| *f != keys::CRR_UNREADY_ACQUIRED)
            .collect();
        if on {
            list.push(keys::CRR_UNREADY_ACQUIRED);
        }
        json!({ "finalizers": list })
    }

    /// Makes the Pod unready on the request's behalf, or lets it go.
    async fn hold(&self, on: bool) -> Result<(), Error> {
        // A Pod that has gone needs nothing; one that came in its place is not held by this request.
        let Some(pod) = self.pod else { return Ok(()) };
        let labels = self.request.metadata.labels.as_ref();
        let uid = labels.and_then(|l| l.get(keys::CRR_POD_UID)).unwrap_or(&pod.uid);
        let name = Key {
            namespace: self.key.namespace.clone(),
            name: self.request.spec.pod_name.clone(),
        };
        let who = NotReadyKey {
            user_agent: keys::NOT_READY_USER_AGENT.to_owned(),
            key: self.key.to_string(),
        };
        hold(self.ctx, &name, uid, &who, on).await?;
        let word = if on { "not ready" } else { "ready again" };
        tracing::info!(request = %self.key, pod = %name, "marked the Pod {word} for the request");
        Ok(())
    }

    /// Says that the Pod was made unready; the moment never moves.
    async fn grace(&self, now: Timestamp) -> Result<(), Error> {
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
        let body = json!({ "metadata": self.version(), "status": { "conditions": conditions } });
        self.status(body).await
    }
}

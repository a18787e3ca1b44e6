//! The writes: a Pod's ConfigMap, and the annotation on the Pod when all barriers are lifted.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde_json::json;

use crate::Context;
use crate::object_reference::object_reference;
use crate::view::{PodView, RawPod, barrier_config_map, barrier_key};
use kruise_api::keys;
use kruise_api::owner::{Owner, OwnerKind};
use kruise_cluster::{Error, EventType, Key, write};

/// Adds the keys of this priority and of all higher ones to the Pod's ConfigMap; false if the ConfigMap belongs to
/// another owner. An event on the Pod reports that, and a refused write.
///
/// # Errors
/// When a request to the API server fails.
pub async fn lift_barriers(ctx: &Context, key: &Key, pod: &PodView, priority: i64) -> Result<bool, Error> {
    let lifted = add_keys(ctx, key, pod, priority).await;
    if let Err(error) = &lifted
        && (error.rejected() || error.internal() || error.denied())
    {
        let name = barrier_config_map(&key.name);
        report_blocked(
            ctx,
            key,
            pod,
            &format!("{name}, which cannot be written: {}", error.message()),
        );
    }
    lifted
}

async fn add_keys(ctx: &Context, key: &Key, pod: &PodView, priority: i64) -> Result<bool, Error> {
    let name = barrier_config_map(&key.name);
    let api = ctx.api::<ConfigMap>(key);
    let lifted = pod.barriers.iter().filter(|(_, p)| *p >= priority);
    let lifted = lifted.map(|(_, p)| barrier_key(*p));
    let data: BTreeMap<String, String> = lifted.map(|key| (key, keys::TRUE.to_owned())).collect();
    if let Some(existing) = write::get(&api, &name).await? {
        let owners = existing.metadata.owner_references.unwrap_or_default();
        let own = Owner::pod(&key.name, &pod.uid);
        if owners.iter().any(|owner| Owner::from_reference(owner) == own) {
            let current = existing.data.unwrap_or_default();
            if data.iter().all(|(key, value)| current.get(key) == Some(value)) {
                return Ok(true);
            }
            let patch = json!({ "metadata": { "uid": existing.metadata.uid }, "data": data });
            write::patch_merge(&api, &name, &patch).await?;
            log_lift(key, priority);
            return Ok(true);
        }
        let owned_by_pod = |owner: &OwnerReference| Owner::from_reference(owner).kind == OwnerKind::Pod;
        let owned_by_earlier_pod = |owner: &OwnerReference| owned_by_pod(owner) && owner.name == key.name;
        if owners.is_empty() || !owners.iter().all(owned_by_earlier_pod) {
            report_blocked(
                ctx,
                key,
                pod,
                &format!("{name}, which the Pod does not own: delete the ConfigMap"),
            );
            return Ok(false);
        }
        // It belongs to a deleted Pod of the same name, and would be garbage-collected.
        write::delete(&api, &name, existing.metadata.uid.as_deref().unwrap_or_default()).await?;
    }
    let owner = Owner::pod_reference(&key.name, &pod.uid);
    let map = ConfigMap {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            owner_references: Some(vec![owner]),
            ..ObjectMeta::default()
        },
        data: Some(data),
        ..ConfigMap::default()
    };
    write::create(&api, &map).await?;
    log_lift(key, priority);
    Ok(true)
}

fn log_lift(pod: &Key, priority: i64) {
    tracing::info!(%pod, priority, "lifted the barriers of this launch priority and of higher ones");
}

/// Publishes an event on the Pod: which ConfigMap its containers wait for, and why that is not theirs.
fn report_blocked(ctx: &Context, key: &Key, pod: &PodView, map: &str) {
    let reference = object_reference("v1", "Pod", key, &pod.uid);
    let note = format!("containers wait for keys of ConfigMap {map}");
    tracing::warn!(pod = %key, note);
    let events = &ctx.cluster.events;
    events.publish(
        reference,
        EventType::Warning,
        "LaunchPriorityBlocked",
        "Lifting",
        note,
    );
}

/// Records on the Pod that all of its containers may start.
///
/// # Errors
/// When a request to the API server fails.
pub async fn mark_launch_completed(ctx: &Context, key: &Key, uid: &str) -> Result<(), Error> {
    let annotations = json!({ keys::CONTAINER_LAUNCH_COMPLETED: keys::TRUE });
    let patch = json!({ "metadata": { "uid": uid, "annotations": annotations } });
    match write::patch_merge(&ctx.api::<RawPod>(key), &key.name, &patch).await {
        // A different Pod has the name now; its own event enqueues it.
        Err(error) if error.not_found() || error.conflict() => Ok(()),
        result => {
            result.map(|_| tracing::info!(pod = %key, "recorded that all containers of the Pod may start"))
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use kube::client::Body;
    use serde_json::Value;
    use tokio::sync::mpsc;

    use super::*;

    /// A webhook chooses the code of its denial, and one that does not answer stops the Pod as well.
    #[tokio::test]
    async fn refused_config_map_is_reported_whatever_the_code() {
        for (code, message) in [
            (403_u16, "exceeded quota: maps"),
            (500, "failed calling webhook \"w\": no endpoints"),
            (503, "admission webhook \"w\" denied the request: no"),
        ] {
            let (sent_tx, mut sent) = mpsc::unbounded_channel();
            let service = tower::service_fn(move |request: http::Request<Body>| {
                let sent = sent_tx.clone();
                async move {
                    let (code, message) = match *request.method() {
                        http::Method::GET => (404, "not found"),
                        _ => (code, message),
                    };
                    let body = request.into_body().collect_bytes().await.unwrap_or_default();
                    let mut body: Value = serde_json::from_slice(&body).unwrap_or_default();
                    let _ = sent.send((body["reason"].take(), body["message"].take()));
                    let answer = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
                        "reason": "Some", "message": message });
                    let answer = Body::from(answer.to_string().into_bytes());
                    http::Response::builder().status(code).body(answer)
                }
            });
            let ctx = Context::for_test(kube::Client::new(service, "default"));
            let pod = PodView {
                uid: "u".to_owned(),
                barriers: vec![("app".to_owned(), 1)],
                ..PodView::default()
            };
            let lifted = lift_barriers(&ctx, &Key::namespaced("n", "p"), &pod, 1).await;
            lifted.unwrap_err();
            let reported = async {
                loop {
                    let (reason, note) = sent.recv().await.unwrap();
                    if reason == "LaunchPriorityBlocked" {
                        return note;
                    }
                }
            };
            let note = tokio::time::timeout(Duration::from_secs(60), reported).await;
            let note = note.unwrap().to_string();
            assert!(note.contains("p-barrier, which cannot be written"), "{note}");
        }
    }
}

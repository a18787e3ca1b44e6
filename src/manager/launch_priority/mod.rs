//! Starts the containers of a Pod one after the other, by their launch priority.
//!
//! In:  Pods whose containers take an environment variable from a ConfigMap of the Pod's own (watch).
//! Out: that ConfigMap, with a key for each priority whose turn has come; an annotation on the Pod when all have.
//!
//! Kubelet holds a container back until its key is there. CloneSets make such Pods, and OpenKruise's webhook did.

pub mod plan;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use serde_json::json;
use tokio::sync::mpsc;

use super::Context;
use super::view::{PodView, RawPod, barrier_of};
use crate::api::keys;
use crate::cluster::queue::Again;
use crate::cluster::{Error, Key, write};
use plan::{Step, step};

/// Pods written to at once.
const WORKERS: usize = 4;

/// What was done last for each Pod that is not complete: its UID, and the priority that may start.
type Lifted = Arc<Mutex<HashMap<Key, (String, i64)>>>;

/// Runs until shutdown.
pub async fn run(ctx: Context) {
    let (pods_tx, pods_rx) = mpsc::unbounded_channel();
    let mut changes = ctx.stores.pods.subscribe();
    let lifted = Lifted::default();
    let known = Arc::clone(&lifted);
    let wake = async move {
        while let Some(change) = changes.recv().await {
            let step = change.new.as_deref().map_or(Step::Nothing, step);
            if step == Step::Nothing {
                lock(&known).remove(&change.key);
            } else if pods_tx.send(change.key).is_err() {
                return;
            }
        }
    };
    let work = |key| look_after(ctx.clone(), Arc::clone(&lifted), key);
    ctx.work("launchpriority", WORKERS, pods_rx, wake, work).await;
}

fn lock(lifted: &Lifted) -> std::sync::MutexGuard<'_, HashMap<Key, (String, i64)>> {
    lifted.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn look_after(ctx: Context, lifted: Lifted, key: Key) -> Result<Again, Error> {
    let Some(pod) = ctx.stores.pods.get(&key) else {
        return Ok(None);
    };
    let last = match step(&pod) {
        Step::Nothing => return Ok(None),
        Step::Complete => true,
        Step::Lift { priority, last } => {
            let done = (pod.uid.clone(), priority);
            if lock(&lifted).get(&key) != Some(&done) {
                lift(&ctx, &key, &pod, priority).await?;
                lock(&lifted).insert(key.clone(), done);
            }
            last
        }
    };
    if last {
        complete(&ctx, &key, &pod.uid).await?;
    }
    Ok(None)
}

fn api<K>(ctx: &Context, key: &Key) -> Api<K>
where
    K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
{
    let namespace = key.namespace.as_deref().unwrap_or_default();
    Api::namespaced(ctx.cluster.client.clone(), namespace)
}

/// Puts the keys of this priority and of all higher ones into the Pod's ConfigMap.
async fn lift(ctx: &Context, key: &Key, pod: &PodView, priority: i64) -> Result<(), Error> {
    let name = barrier_of(&key.name);
    let api = api::<ConfigMap>(ctx, key);
    let lifted = pod.barriers.iter().filter(|(_, p)| *p >= priority);
    let word = |p: &i64| {
        (
            format!("{}{p}", keys::CONTAINER_BARRIER_PREFIX),
            keys::TRUE.to_owned(),
        )
    };
    let data: BTreeMap<String, String> = lifted.map(|(_, p)| word(p)).collect();
    if let Some(there) = write::get(&api, &name).await? {
        let owners = there.metadata.owner_references.unwrap_or_default();
        if owners.iter().any(|owner| owner.uid == pod.uid) {
            let patch = json!({ "metadata": { "uid": there.metadata.uid }, "data": data });
            return write::patch_merge(&api, &name, &patch).await.map(drop);
        }
        // It is of a Pod that had the name before, and is collected one day; who made another is to see it refused.
        if !owners
            .iter()
            .any(|owner| owner.kind == "Pod" && owner.name == key.name)
        {
            tracing::warn!(pod = %key, name, "containers wait: the ConfigMap of their barriers is somebody else's");
            return Ok(());
        }
        write::delete(&api, &name, there.metadata.uid.as_deref()).await?;
    }
    let map = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": name, "namespace": key.namespace, "ownerReferences": [{
            "apiVersion": "v1", "kind": "Pod", "name": key.name, "uid": pod.uid,
        }]},
        "data": data,
    });
    let namespace = key.namespace.as_deref().unwrap_or_default();
    let path = format!("/api/v1/namespaces/{namespace}/configmaps");
    let client = &ctx.cluster.client;
    write::post(client, "ConfigMap", &path, map.to_string())
        .await
        .map(drop)
}

/// Says on the Pod that all of its containers may start.
async fn complete(ctx: &Context, key: &Key, uid: &str) -> Result<(), Error> {
    let annotations = json!({ keys::CONTAINER_LAUNCH_COMPLETED: keys::TRUE });
    let patch = json!({ "metadata": { "uid": uid, "annotations": annotations } });
    match write::patch_merge(&api::<RawPod>(ctx, key), &key.name, &patch).await {
        // Another Pod has the name now; its own event brings it here.
        Err(error) if !error.not_found() && !error.conflict() => Err(error),
        _ => Ok(()),
    }
}

//! Writes NodePodProbes, marks of Pods, and the status of PodProbeMarkers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use serde_json::{Map, Value, json};

use super::ControllerState;
use super::observe::has_daemon;
use super::plan::{PodChange, PodMarks, ProbedPod, Results, full_name, node_probes, pod_change, removal};
use crate::FeatureGate;
use crate::view::PodView;
use kruise_api::keys;
use kruise_api::node_pod_probe::{NodePodProbe, NodePodProbeSpec};
use kruise_api::pod_probe_marker::{PodProbeMarker, PodProbeMarkerStatus};
use kruise_api::selector::CompiledSelector;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Error, Key, write};

/// How long one reconcile removes the marks of a deleted PodProbeMarker; the queue allows it two minutes.
const REMOVAL_TIME: Duration = Duration::from_secs(30);
/// Pods whose marks are removed at a time.
const MAX_CONCURRENT_REMOVALS: usize = 16;
/// Pause before it is checked again whether the probes of a PodProbeMarker have gone.
const RECHECK_DELAY: Duration = Duration::from_secs(5);

/// Creates, changes or deletes the NodePodProbe of a node.
pub async fn sync_node(shared: &ControllerState, name: &str) -> Result<(), Error> {
    let api: Api<NodePodProbe> = Api::all(shared.manager.cluster.client.clone());
    let key = Key::cluster_scoped(name);
    let current = shared.node_pod_probes.get(&key);
    let node = shared.manager.stores.nodes.get(&key);
    if !node.as_deref().is_some_and(has_daemon) {
        return match current {
            Some(current) => delete(&api, &current).await,
            None => Ok(()),
        };
    }
    let pods = shared.index().reachable_pods_on(name);
    let old = current.as_ref().map(|current| current.spec.pod_probes.as_slice());
    let pod_probes = node_probes(old.unwrap_or_default(), &pods);
    match &current {
        None if pod_probes.is_empty() => Ok(()),
        None => {
            let object = NodePodProbe::new(name, NodePodProbeSpec { pod_probes });
            match write::create(&api, &object).await {
                // The watch shows it soon.
                Err(error) if error.already_exists() => Ok(()),
                result => result.map(drop),
            }
        }
        Some(current) if current.spec.pod_probes != pod_probes => {
            let patch = json!({
                "metadata": { "uid": current.metadata.uid, "resourceVersion": current.metadata.resource_version },
                "spec": { "podProbes": pod_probes },
            });
            write::patch_merge(&api, name, &patch).await.map(drop)
        }
        Some(_) => Ok(()),
    }
}

async fn delete(api: &Api<NodePodProbe>, object: &NodePodProbe) -> Result<(), Error> {
    let name = object.metadata.name.as_deref().unwrap_or_default();
    let uid = object.metadata.uid.as_deref().unwrap_or_default();
    match write::delete(api, name, uid).await {
        // A new one has the name.
        Err(error) if error.conflict() => Ok(()),
        result => result,
    }
}

/// Marks a Pod with its results, if they or the PodProbeMarkers have changed.
pub async fn mark_pod(shared: &ControllerState, key: &Key) -> Result<(), Error> {
    let pod = shared.index().pod(key);
    let Some(pod) = pod.filter(|pod| !pod.markers.is_empty()) else {
        shared.applied().remove(key);
        return Ok(());
    };
    let Some(results) = results(shared, pod) else {
        return Ok(());
    };
    if shared.applied().get(key) == Some(&results) {
        return Ok(());
    }
    let api = shared.manager.api::<Pod>(key);
    let object = write::get(&api, &key.name).await?;
    if let Some(object) = object.filter(|object| object.metadata.uid.as_deref() == Some(&results.uid)) {
        let change = pod_change(&marks(&object), &results);
        write_change(&api, key, &results.uid, &change).await?;
        shared.applied().insert(key.clone(), results);
    }
    Ok(())
}

/// The results of a Pod's probes; `None` if its node has reported none.
fn results(shared: &ControllerState, pod: ProbedPod) -> Option<Results> {
    let node = Key::cluster_scoped(pod.node.as_str());
    if let Some(reported) = pod.reported.clone()
        && is_virtual(shared, &pod.node)
    {
        return Some(Results::reported(pod, &reported));
    }
    let node_pod_probe = shared.node_pod_probes.get(&node)?;
    let status = node_pod_probe.status.as_ref()?;
    let states = status.pod_probe_statuses.iter().find(|one| one.uid == pod.uid)?;
    Some(Results::new(pod.uid, &states.probe_states, pod.markers))
}

fn is_virtual(shared: &ControllerState, node: &str) -> bool {
    let node = shared.manager.stores.nodes.get(&Key::cluster_scoped(node));
    node.is_some_and(|node| node.is_virtual())
}

fn marks(pod: &Pod) -> PodMarks {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.clone());
    PodMarks {
        conditions: conditions.unwrap_or_default(),
        labels: pod.metadata.labels.clone().unwrap_or_default(),
        annotations: pod.metadata.annotations.clone().unwrap_or_default(),
    }
}

async fn write_change(api: &Api<Pod>, key: &Key, uid: &str, change: &PodChange) -> Result<(), Error> {
    let set = change.conditions.iter().map(|condition| json!(condition));
    let removed = change.removed_conditions.iter();
    let removed = removed.map(|type_| json!({ "$patch": "delete", "type": type_ }));
    let conditions: Vec<Value> = set.chain(removed).collect();
    if !conditions.is_empty() {
        let patch = json!({ "metadata": { "uid": uid }, "status": { "conditions": conditions } });
        match write::patch_status_strategic(api, &key.name, &patch).await {
            Err(error) if error.not_found() => return Ok(()),
            result => drop(result?),
        }
    }
    let mut metadata = Map::from_iter([("uid".to_owned(), json!(uid))]);
    for (field, map) in [("labels", &change.labels), ("annotations", &change.annotations)] {
        if !map.is_empty() {
            metadata.insert(field.to_owned(), json!(map));
        }
    }
    if metadata.len() > 1 {
        match write::patch_merge(api, &key.name, &json!({ "metadata": metadata })).await {
            Err(error) if error.not_found() => {}
            result => drop(result?),
        }
    }
    Ok(())
}

/// Writes the status of a PodProbeMarker; if it is being deleted, removes what it has set, and then its finalizer.
pub async fn sync_marker(shared: &ControllerState, key: &Key) -> Result<RequeueAfter, Error> {
    let Some(marker) = shared.markers.get(key) else {
        shared.pacers().remove(key);
        // A user may have removed the finalizer before all was done.
        shared.unmarked_pods().remove(key);
        return Ok(None);
    };
    if marker.metadata.deletion_timestamp.is_some() {
        return finalize(shared, key, &marker).await;
    }
    let api = shared.manager.api::<PodProbeMarker>(key);
    let uid = marker.metadata.uid.as_deref().unwrap_or_default();
    if !has_finalizer(&marker) {
        let mut finalizers = marker.metadata.finalizers.clone().unwrap_or_default();
        finalizers.push(keys::NODE_POD_PROBE_CLEANUP.to_owned());
        return write_finalizers(&api, &marker, &finalizers).await.map(|()| None);
    }
    let matched = shared.index().count(key, &shared.manager.stores.nodes);
    let status = PodProbeMarkerStatus {
        observed_generation: marker.metadata.generation.unwrap_or_default(),
        matched_pods: i64::try_from(matched).unwrap_or(i64::MAX),
    };
    let now = Instant::now();
    {
        let mut pacers = shared.pacers();
        let pacer = pacers.entry(key.clone()).or_default();
        if marker.status.as_ref() == Some(&status) {
            pacer.unchanged();
            return Ok(None);
        }
        // Many Pods of a rollout change one after the other.
        if let Some(delay) = pacer.begin_write(now, false, false) {
            return Ok(Some(delay));
        }
    }
    let patch = write::status_patch(uid, &status, []);
    write::patch_status_merge(&api, &key.name, &patch)
        .await
        .map(|_| None)
}

async fn finalize(
    shared: &ControllerState,
    key: &Key,
    marker: &Arc<PodProbeMarker>,
) -> Result<RequeueAfter, Error> {
    if !has_finalizer(marker) {
        return Ok(None);
    }
    let prefix = full_name(&key.name, "");
    let namespace = key.namespace.as_deref().unwrap_or_default();
    let nodes = &shared.manager.stores.nodes;
    let is_probed = shared.node_pod_probes.entries().iter().any(|(node, object)| {
        let mut pods = object
            .spec
            .pod_probes
            .iter()
            .filter(|pod| pod.namespace == namespace);
        // That of a node without a daemon is deleted as a whole, and nothing probes there.
        pods.any(|pod| pod.probes.iter().any(|probe| probe.name.starts_with(&prefix)))
            && nodes.get(node).as_deref().is_some_and(has_daemon)
    });
    if is_probed {
        return Ok(Some(RECHECK_DELAY));
    }
    if !remove_all_marks(shared, key, marker).await? {
        return Ok(Some(Duration::ZERO));
    }
    let mut finalizers = marker.metadata.finalizers.clone().unwrap_or_default();
    finalizers.retain(|finalizer| finalizer != keys::NODE_POD_PROBE_CLEANUP);
    let api = shared.manager.api::<PodProbeMarker>(key);
    write_finalizers(&api, marker, &finalizers).await?;
    shared.unmarked_pods().remove(key);
    Ok(None)
}

/// Removes what a deleted PodProbeMarker has set on its Pods; returns whether that is done. Thousands of Pods take more
/// than one reconcile, and those that are done are remembered.
async fn remove_all_marks(
    shared: &ControllerState,
    key: &Key,
    marker: &PodProbeMarker,
) -> Result<bool, Error> {
    let uid = marker.metadata.uid.clone().unwrap_or_default();
    let selector = CompiledSelector::from(&marker.spec.selector);
    let mut pods = shared.manager.stores.pods.entries_of(key.namespace.as_deref());
    pods.retain(|(_, pod)| pod.active() && selector.matches(&pod.labels));
    if let Some(done) = shared.unmarked_pods().get(key) {
        pods.retain(|(_, pod)| !done.contains(&(uid.clone(), pod.uid.clone())));
    }
    let deadline = Instant::now() + REMOVAL_TIME;
    let removals = pods.into_iter().map(async |(pod_key, pod)| {
        if Instant::now() >= deadline {
            return Ok(false);
        }
        match remove_marks(shared, &pod_key, &pod, marker).await {
            // Another policy of the cluster may protect a Pod; its marks stay.
            Err(error) if !error.retryable() && !error.conflict() => {
                tracing::warn!(pod = %pod_key, marker = %key, %error, "the marks of a deleted PodProbeMarker stay");
            }
            result => result?,
        }
        let done = (uid.clone(), pod.uid.clone());
        shared
            .unmarked_pods()
            .entry(key.clone())
            .or_default()
            .insert(done);
        Ok(true)
    });
    let done = stream::iter(removals).buffer_unordered(MAX_CONCURRENT_REMOVALS);
    done.try_fold(true, async |all, done| Ok(all && done)).await
}

/// Removes what a PodProbeMarker has set on a Pod, but for what others set as well.
async fn remove_marks(
    shared: &ControllerState,
    key: &Key,
    pod: &PodView,
    marker: &PodProbeMarker,
) -> Result<(), Error> {
    let api = shared.manager.api::<Pod>(key);
    let Some(object) = write::get(&api, &key.name).await? else {
        return Ok(());
    };
    let gates = object
        .spec
        .as_ref()
        .and_then(|spec| spec.readiness_gates.as_ref());
    let gates: Vec<String> = gates
        .into_iter()
        .flatten()
        .map(|gate| gate.condition_type.clone())
        .collect();
    let others = shared.index().pod(key).map(|pod| pod.markers).unwrap_or_default();
    let uid = object.metadata.uid.clone().unwrap_or_default();
    let mut change = removal(&marks(&object), marker, &others, &gates);
    // The provider of a virtual node goes on to report what it was given at the Pod's creation.
    let gates = &shared.manager.options.feature_gates;
    let reports =
        gates.enabled(FeatureGate::EnablePodProbeMarkerOnServerless) && pod.reported_probes.is_some();
    if reports && pod.node.as_deref().is_some_and(|node| is_virtual(shared, node)) {
        change.removed_conditions.clear();
    }
    write_change(&api, key, &uid, &change).await?;
    shared.applied().remove(key);
    // What the others set depends on their results.
    mark_pod(shared, key).await
}

fn has_finalizer(marker: &PodProbeMarker) -> bool {
    let finalizers = marker.metadata.finalizers.iter().flatten();
    finalizers
        .into_iter()
        .any(|finalizer| finalizer == keys::NODE_POD_PROBE_CLEANUP)
}

async fn write_finalizers(
    api: &Api<PodProbeMarker>,
    marker: &PodProbeMarker,
    finalizers: &[String],
) -> Result<(), Error> {
    let patch = json!({ "metadata": {
        "uid": marker.metadata.uid, "resourceVersion": marker.metadata.resource_version, "finalizers": finalizers,
    } });
    let name = marker.metadata.name.as_deref().unwrap_or_default();
    match write::patch_merge(api, name, &patch).await {
        Err(error) if error.not_found() => Ok(()),
        result => result.map(drop),
    }
}

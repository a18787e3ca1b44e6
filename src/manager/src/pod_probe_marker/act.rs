//! Writes NodePodProbes, marks of Pods, and the status of PodProbeMarkers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use serde_json::{Map, Value, json};

use super::observe::{Work, has_daemon};
use super::plan::{
    Part, PodChange, PodMarks, ProbedPod, Results, full_name, node_probes, pod_change, removal,
};
use super::state::{ControllerState, RefusedMarks};
use crate::FeatureGate;
use crate::object_reference::object_reference;
use crate::view::PodView;
use kruise_api::backoff::Backoff;
use kruise_api::keys;
use kruise_api::node_pod_probe::{NodePodProbe, NodePodProbeSpec};
use kruise_api::pod_probe_marker::{PodProbeMarker, PodProbeMarkerStatus};
use kruise_api::selector::CompiledSelector;
use kruise_cluster::queue::RequeueAfter;
use kruise_cluster::{Error, EventType, Key, write};

/// How long one reconcile removes the marks of a deleted PodProbeMarker; the queue allows it two minutes.
const REMOVAL_TIME: Duration = Duration::from_secs(30);
/// Pods whose marks are removed at a time.
const MAX_CONCURRENT_REMOVALS: usize = 16;
/// Pause before it is checked again whether the probes of a PodProbeMarker have gone.
const RECHECK_DELAY: Duration = Duration::from_secs(5);
/// Pause before the removal of marks goes on.
const REMOVAL_PAUSE: Duration = Duration::from_secs(1);
/// After refused conditions, or labels and annotations: they are accepted only after a change of a policy.
const REFUSED_RETRY: Backoff = Backoff::new(Duration::from_secs(10), Duration::from_secs(1800));

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

/// Marks a Pod with its results, if they or the PodProbeMarkers have changed. What the API server refuses is tried again
/// after a pause that grows.
pub async fn mark_pod(shared: &ControllerState, key: &Key) -> Result<RequeueAfter, Error> {
    let _marking = shared.begin_marking(key);
    let pod = shared.index().pod(key);
    let Some(pod) = pod.filter(|pod| !pod.markers.is_empty()) else {
        shared.applied().remove(key);
        for part in Part::ALL {
            shared.refused().remove(&(key.clone(), part));
        }
        return Ok(None);
    };
    let Some(results) = results(shared, pod) else {
        return Ok(None);
    };
    if shared.applied().get(key) == Some(&results) {
        return Ok(None);
    }
    let api = shared.manager.api::<Pod>(key);
    let object = write::get(&api, &key.name).await?;
    let Some(object) = object.filter(|object| object.metadata.uid.as_deref() == Some(&results.uid)) else {
        return Ok(None);
    };
    let change = pod_change(&marks(&object), &results);
    let mut requeue_after: RequeueAfter = None;
    for part in Part::ALL {
        let pause = write_part(shared, key, &results, part, change.part(part)).await?;
        requeue_after = requeue_after.into_iter().chain(pause).min();
    }
    if requeue_after.is_none() {
        shared.applied().insert(key.clone(), results);
    }
    Ok(requeue_after)
}

/// Writes a part of what changes on a Pod, unless it was refused a moment ago; returns the pause before it is tried
/// again.
async fn write_part(
    shared: &ControllerState,
    key: &Key,
    results: &Results,
    part: Part,
    change: PodChange,
) -> Result<RequeueAfter, Error> {
    let of_pod = (key.clone(), part);
    if let Some(pause) = remaining_pause(shared, &of_pod, &change) {
        return Ok(Some(pause));
    }
    match write_change(&shared.manager.api::<Pod>(key), key, &results.uid, &change).await {
        Err(error) if is_refused(&error) => {
            tracing::warn!(pod = %key, %error, "marks of a Pod refused; will retry");
            report_refusal(shared, key, results, &change, &error);
            Ok(Some(record_refusal(shared, of_pod, change)))
        }
        result => {
            result?;
            shared.refused().remove(&of_pod);
            Ok(None)
        }
    }
}

/// How long marks that were refused wait, unless they are others now.
fn remaining_pause(shared: &ControllerState, of_pod: &(Key, Part), change: &PodChange) -> Option<Duration> {
    let all = shared.refused();
    let refused = all.get(of_pod).filter(|refused| refused.is_of(change))?;
    let pause = refused.retry_at.saturating_duration_since(Instant::now());
    (!pause.is_zero()).then_some(pause)
}

/// Records that marks were refused; returns the pause before they are tried again.
fn record_refusal(shared: &ControllerState, of_pod: (Key, Part), change: PodChange) -> Duration {
    let mut all = shared.refused();
    let earlier = all.get(&of_pod).filter(|refused| refused.is_of(&change));
    let refusals = earlier.map_or(0, |refused| refused.refusals.saturating_add(1));
    let pause = REFUSED_RETRY.delay(refusals);
    let refused = RefusedMarks {
        change,
        refusals,
        retry_at: Instant::now() + pause,
    };
    all.insert(of_pod, refused);
    pause
}

/// Whether a policy or a rule refuses a change, and will until it is changed. A missing role may be created in a moment.
fn is_refused(error: &Error) -> bool {
    error.denied() || error.permanent()
}

/// Publishes an event on each PodProbeMarker that sets or removes what was refused.
fn report_refusal(shared: &ControllerState, pod: &Key, results: &Results, change: &PodChange, error: &Error) {
    let note = format!("cannot mark Pod {}: {}", pod.name, error.message());
    for marker in results.markers.iter().filter(|marker| change.is_of(marker)) {
        let key = Key {
            namespace: pod.namespace.clone(),
            name: marker.metadata.name.clone().unwrap_or_default(),
        };
        // What is kept for Pods has no UID.
        let Some(marker) = shared.markers.get(&key) else {
            continue;
        };
        let uid = marker.metadata.uid.as_deref().unwrap_or_default();
        let reference = object_reference("apps.kruise.io/v1alpha1", "PodProbeMarker", &key, uid);
        let events = &shared.manager.cluster.events;
        events.publish(
            reference,
            EventType::Warning,
            "PodMarksRefused",
            "Marking",
            note.clone(),
        );
    }
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

/// Writes each part, whatever becomes of the other.
async fn write_change(api: &Api<Pod>, key: &Key, uid: &str, change: &PodChange) -> Result<(), Error> {
    let conditions = write_conditions(api, key, uid, change).await;
    both(conditions, write_metadata(api, key, uid, change).await)
}

/// The result of two writes. If both fail, an error that may pass comes first: the writes are tried again for it.
fn both(first: Result<(), Error>, second: Result<(), Error>) -> Result<(), Error> {
    match (first, second) {
        (Err(first), Err(second)) if is_refused(&first) => Err(second),
        (first, second) => first.and(second),
    }
}

async fn write_conditions(api: &Api<Pod>, key: &Key, uid: &str, change: &PodChange) -> Result<(), Error> {
    let set = change.conditions.iter().map(|condition| json!(condition));
    let removed = change.removed_conditions.iter();
    let removed = removed.map(|type_| json!({ "$patch": "delete", "type": type_ }));
    let conditions: Vec<Value> = set.chain(removed).collect();
    if conditions.is_empty() {
        return Ok(());
    }
    let patch = json!({ "metadata": { "uid": uid }, "status": { "conditions": conditions } });
    match write::patch_status_strategic(api, &key.name, &patch).await {
        Err(error) if error.not_found() => Ok(()),
        // Not at info: a probe may change each second, in each Pod.
        result => result.map(|_| tracing::debug!(pod = %key, conditions = conditions.len(), "marked a Pod")),
    }
}

/// Writes labels and annotations together; if that is refused, each on their own, because a policy may be about one of
/// them only.
async fn write_metadata(api: &Api<Pod>, key: &Key, uid: &str, change: &PodChange) -> Result<(), Error> {
    let (labels, annotations) = (("labels", &change.labels), ("annotations", &change.annotations));
    match patch_metadata(api, key, uid, &[labels, annotations]).await {
        Err(error) if is_refused(&error) && !labels.1.is_empty() && !annotations.1.is_empty() => {
            let first = patch_metadata(api, key, uid, &[labels]).await;
            both(first, patch_metadata(api, key, uid, &[annotations]).await)
        }
        result => result,
    }
}

/// A field of the metadata, and what is set or removed in it.
type FieldChange<'a> = (&'static str, &'a BTreeMap<String, Option<String>>);

async fn patch_metadata(
    api: &Api<Pod>,
    key: &Key,
    uid: &str,
    changes: &[FieldChange<'_>],
) -> Result<(), Error> {
    let mut metadata = Map::from_iter([("uid".to_owned(), json!(uid))]);
    for (field, map) in changes {
        if !map.is_empty() {
            metadata.insert((*field).to_owned(), json!(map));
        }
    }
    if metadata.len() == 1 {
        return Ok(());
    }
    match write::patch_merge(api, &key.name, &json!({ "metadata": metadata })).await {
        Err(error) if error.not_found() => Ok(()),
        result => result.map(|_| {
            let keys: usize = changes.iter().map(|(_, map)| map.len()).sum();
            tracing::debug!(pod = %key, keys, "marked a Pod with labels or annotations");
        }),
    }
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
    // The store shows the deletion first. Pods that are marked from now on must not be marked for it.
    if shared.index().is_active(key) {
        return Ok(Some(RECHECK_DELAY));
    }
    let prefix = full_name(&key.name, "");
    let namespace = key.namespace.as_deref().unwrap_or_default();
    let nodes = &shared.manager.stores.nodes;
    let is_probed = |node: &Key, object: &NodePodProbe| {
        let mut pods = object
            .spec
            .pod_probes
            .iter()
            .filter(|pod| pod.namespace == namespace);
        // That of a node without a daemon is deleted as a whole, and nothing probes there.
        pods.any(|pod| pod.probes.iter().any(|probe| probe.name.starts_with(&prefix)))
            && nodes.get(node).as_deref().is_some_and(has_daemon)
    };
    // Thousands may be deleted at once: only the last check of each looks at all nodes.
    let listed_on = shared.index().nodes_listing(key);
    let is_listed = listed_on.iter().any(|node| {
        let object = shared.node_pod_probes.get(node);
        object.is_some_and(|object| is_probed(node, &object))
    });
    let all = || shared.node_pod_probes.entries();
    if is_listed || all().iter().any(|(node, object)| is_probed(node, object)) {
        return Ok(Some(RECHECK_DELAY));
    }
    if !remove_all_marks(shared, key, marker).await? {
        return Ok(Some(REMOVAL_PAUSE));
    }
    let mut finalizers = marker.metadata.finalizers.clone().unwrap_or_default();
    finalizers.retain(|finalizer| finalizer != keys::NODE_POD_PROBE_CLEANUP);
    let api = shared.manager.api::<PodProbeMarker>(key);
    write_finalizers(&api, marker, &finalizers).await?;
    shared.unmarked_pods().remove(key);
    Ok(None)
}

/// Removes what a deleted PodProbeMarker has set on its Pods; returns whether that is done. Thousands of Pods take more
/// than one reconcile, and those that are done are remembered. A Pod that is being marked comes later: that may be for
/// the PodProbeMarker, and a mark that is written after the removal would stay.
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
        if Instant::now() >= deadline || shared.is_being_marked(&pod_key) {
            return Ok(false);
        }
        match remove_marks(shared, &pod_key, &pod, marker).await {
            // Another policy of the cluster may protect a Pod; its marks stay.
            Err(error) if is_refused(&error) => {
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
    let result = write_change(&api, key, &uid, &change).await;
    shared.applied().remove(key);
    // What the others set depends on their results. It may be refused, and come again later; at shutdown nothing does.
    let _ = shared.work.send(Work::Pod(key.clone()));
    result
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use k8s_openapi::api::core::v1::PodCondition;
    use kube::client::Body;
    use tokio::sync::mpsc;

    use super::super::enqueue_changes;
    use super::*;
    use crate::view::RawPod;
    use crate::{Context, Stores};
    use kruise_cluster::Store;

    /// A request: method, path and body.
    type Sent = (String, String, Value);

    /// A namespace with a Pod and a PodProbeMarker whose probe marks it so, and has succeeded. The API server refuses to
    /// change labels and conditions, a webhook label `protected`, and label `forbidden` needs a role. The last is what is
    /// to be reconciled.
    async fn cluster(
        marking: &Value,
        deleted: Option<&str>,
    ) -> (
        Arc<ControllerState>,
        Key,
        mpsc::UnboundedReceiver<Sent>,
        mpsc::UnboundedReceiver<Work>,
    ) {
        let pod = json!({
            "metadata": { "name": "p", "namespace": "n", "uid": "u",
                "labels": { "app": "a", "protected": "1", "forbidden": "1" } },
            "spec": { "nodeName": "node", "containers": [{ "name": "c" }] },
            "status": { "phase": "Running", "podIP": "10.0.0.1",
                "conditions": [{ "type": "Initialized", "status": "True" }] },
        });
        let mut probe = json!({ "name": "idle", "containerName": "c", "probe": {} });
        json_patch::merge(&mut probe, marking);
        let marker = json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "PodProbeMarker",
            "metadata": { "name": "m", "namespace": "n", "uid": "m", "deletionTimestamp": deleted,
                "finalizers": [keys::NODE_POD_PROBE_CLEANUP] },
            "spec": { "selector": { "matchLabels": { "app": "a" } }, "probes": [probe] } });
        let results = json!({ "apiVersion": "apps.kruise.io/v1alpha1", "kind": "NodePodProbe",
            "metadata": { "name": "node" }, "spec": {},
            "status": { "podProbeStatuses": [{ "name": "p", "namespace": "n", "uid": "u",
                "probeStates": [{ "name": "m#idle", "state": "Succeeded" }] }] } });
        let (sent_tx, sent) = mpsc::unbounded_channel();
        let view = PodView::from(&RawPod::from(pod.clone()));
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let (sent_tx, pod) = (sent_tx.clone(), pod.clone());
            async move {
                let (method, path) = (request.method().to_string(), request.uri().path().to_owned());
                let body = request.into_body().collect_bytes().await.unwrap_or_default();
                let body: Value = serde_json::from_slice(&body).unwrap_or_default();
                let is_refused =
                    body["metadata"]["labels"].is_object() || body["status"]["conditions"].is_array();
                let is_denied = body["metadata"]["labels"].get("protected").is_some();
                let is_forbidden = body["metadata"]["labels"].get("forbidden").is_some();
                let _ = sent_tx.send((method, path, body));
                let refusal = |code: u16, message: &str| {
                    let status = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code,
                        "reason": "Some", "message": message });
                    (code, status)
                };
                let (code, answer) = if is_denied {
                    refusal(503, "admission webhook \"w\" denied the request: no")
                } else if is_forbidden {
                    refusal(
                        403,
                        "pods \"p\" is forbidden: User \"m\" cannot patch resource \"pods\"",
                    )
                } else if is_refused {
                    refusal(422, "the Pod stays as it is")
                } else {
                    (200, pod)
                };
                let answer = Body::from(answer.to_string().into_bytes());
                http::Response::builder().status(code).body(answer)
            }
        });
        let key = Key::namespaced("n", "p");
        let mut manager = Context::for_test(kube::Client::new(service, "default"));
        manager.stores = Stores {
            pods: Store::from_objects([(key.clone(), view)]),
            ..Stores::empty()
        };
        let marker: PodProbeMarker = serde_json::from_value(marker).unwrap();
        let marker_key = Key::namespaced("n", "m");
        let markers = Store::from_objects([(marker_key.clone(), marker)]);
        let results: NodePodProbe = serde_json::from_value(results).unwrap();
        let results = Store::from_objects([(Key::cluster_scoped("node"), results)]);
        let (work_tx, mut work) = mpsc::unbounded_channel();
        let shared = ControllerState::new(manager, markers.clone(), results.clone(), work_tx.clone());
        let index = enqueue_changes(Arc::clone(&shared), markers, results, work_tx);
        let indexed = async {
            // All objects are indexed before.
            while work.recv().await != Some(Work::Marker(marker_key.clone())) {}
        };
        tokio::select! {
            () = index => unreachable!("its stores last"),
            () = indexed => {}
        }
        (shared, key, sent, work)
    }

    #[tokio::test]
    async fn refused_label_keeps_no_annotation_back_and_is_reported() {
        let marking = json!({ "markerPolicy": [{ "state": "Succeeded", "labels": { "pod-template-hash": "1" },
            "annotations": { "a": "1" } }] });
        let (shared, key, mut sent, _) = cluster(&marking, None).await;
        let pause = REFUSED_RETRY.delay(0);
        assert_eq!(mark_pod(&shared, &key).await.unwrap(), Some(pause));
        let remaining = mark_pod(&shared, &key).await.unwrap();
        assert!(
            remaining.is_some_and(|remaining| remaining <= pause),
            "{remaining:?}"
        );
        let (mut requests, mut event) = (Vec::new(), None);
        while requests.len() < 5 || event.is_none() {
            let (method, path, body) = sent.recv().await.unwrap();
            if path.ends_with("/events") {
                event = Some(body);
            } else {
                let [labels, annotations] =
                    ["labels", "annotations"].map(|field| body["metadata"][field].is_object());
                requests.push((method, labels, annotations));
            }
        }
        let patch = |labels: bool, annotations: bool| ("PATCH".to_owned(), labels, annotations);
        let get = ("GET".to_owned(), false, false);
        let expected = [
            get.clone(),
            patch(true, true),
            patch(true, false),
            patch(false, true),
            // In the pause nothing that was refused is sent.
            get,
        ];
        assert_eq!(requests, expected);
        let event = event.unwrap();
        assert_eq!(event["involvedObject"]["kind"], "PodProbeMarker");
        assert_eq!(event["message"], "cannot mark Pod p: the Pod stays as it is");
    }

    #[tokio::test]
    async fn refused_condition_keeps_no_annotation_back_and_is_reported() {
        let marking = json!({ "podConditionType": "Idle",
            "markerPolicy": [{ "state": "Succeeded", "annotations": { "a": "1" } }] });
        let (shared, key, mut sent, _) = cluster(&marking, None).await;
        let pause = REFUSED_RETRY.delay(0);
        assert_eq!(mark_pod(&shared, &key).await.unwrap(), Some(pause));
        assert!(mark_pod(&shared, &key).await.unwrap() <= Some(pause));
        let (mut patched, mut event) = (Vec::new(), None);
        while patched.len() < 3 || event.is_none() {
            let (method, path, body) = sent.recv().await.unwrap();
            if path.ends_with("/events") {
                event = Some(body);
            } else if method == "PATCH" {
                patched.push(path);
            }
        }
        let (pod, status) = (
            "/api/v1/namespaces/n/pods/p",
            "/api/v1/namespaces/n/pods/p/status",
        );
        // In the pause the condition is not sent.
        assert_eq!(patched, [status, pod, pod]);
        let event = event.unwrap();
        assert_eq!(event["reason"], "PodMarksRefused");
        assert_eq!(event["message"], "cannot mark Pod p: the Pod stays as it is");
    }

    /// As of a deleted PodProbeMarker, whose marks are removed once.
    #[tokio::test]
    async fn marks_are_removed_although_the_condition_is_refused() {
        let (shared, key, mut sent, _) = cluster(&json!({}), None).await;
        let change = PodChange {
            removed_conditions: vec!["Idle".to_owned()],
            annotations: [("a".to_owned(), None)].into(),
            ..PodChange::default()
        };
        let api = shared.manager.api::<Pod>(&key);
        let error = write_change(&api, &key, "u", &change).await.unwrap_err();
        assert!(is_refused(&error), "{error}");
        let (_, status, _) = sent.recv().await.unwrap();
        let (_, pod, body) = sent.recv().await.unwrap();
        assert!(status.ends_with("/pods/p/status"), "{status}");
        assert!(pod.ends_with("/pods/p"), "{pod}");
        assert_eq!(body["metadata"]["annotations"], json!({ "a": null }));
    }

    #[test]
    fn error_that_may_pass_comes_first() {
        let failure = |code: u16, message: &str| {
            let status = kube::core::Status::failure(message, "Some").with_code(code);
            Err(Error::Api(Box::new(status)))
        };
        let error = |code: u16| failure(code, "no");
        let denial = || failure(503, "admission webhook \"w\" denied the request: no");
        let code = |result: Result<(), Error>| match result {
            Err(Error::Api(status)) => Some(status.code),
            _ => None,
        };
        assert_eq!(code(both(error(422), error(503))), Some(503));
        assert_eq!(code(both(error(503), error(422))), Some(503));
        assert_eq!(code(both(denial(), error(500))), Some(500));
        assert_eq!(code(both(error(422), Ok(()))), Some(422));
        assert_eq!(code(both(Ok(()), error(422))), Some(422));
        assert_eq!(code(both(Ok(()), Ok(()))), None);
    }

    #[test]
    fn refused_condition_with_another_message_is_the_same() {
        let change = |status: &str, message: &str| PodChange {
            conditions: vec![PodCondition {
                type_: "Idle".to_owned(),
                status: status.to_owned(),
                message: Some(message.to_owned()),
                ..PodCondition::default()
            }],
            ..PodChange::default()
        };
        let refused = RefusedMarks {
            change: change("True", "a"),
            refusals: 0,
            retry_at: Instant::now(),
        };
        assert!(refused.is_of(&change("True", "b")));
        assert!(!refused.is_of(&change("False", "a")));
        assert!(!refused.is_of(&PodChange::default()));
    }

    #[tokio::test]
    async fn pauses_after_refusals_grow_and_other_marks_do_not_wait() {
        let (shared, key, _sent, _) = cluster(&json!({}), None).await;
        let change = |value: &str| PodChange {
            labels: [("l".to_owned(), Some(value.to_owned()))].into(),
            ..PodChange::default()
        };
        let of_pod = (key, Part::Metadata);
        let pauses = [1, 2, 3].map(|_| record_refusal(&shared, of_pod.clone(), change("1")));
        assert_eq!(pauses, [0, 1, 2].map(|earlier| REFUSED_RETRY.delay(earlier)));
        assert!(remaining_pause(&shared, &of_pod, &change("1")).is_some());
        assert_eq!(remaining_pause(&shared, &of_pod, &change("2")), None);
    }

    #[tokio::test]
    async fn deleted_marker_waits_for_pods_that_are_being_marked() {
        let marking = json!({ "markerPolicy": [{ "state": "Succeeded", "annotations": { "a": "1" } }] });
        let (shared, key, _sent, _) = cluster(&marking, None).await;
        tokio::select! {
            biased;
            _ = mark_pod(&shared, &key) => unreachable!("the API server has not answered"),
            () = async { assert!(shared.is_being_marked(&key)) } => {}
        }
        assert!(!shared.is_being_marked(&key));

        let (shared, key, mut sent, mut work) = cluster(&marking, Some("2026-01-01T00:00:00Z")).await;
        let marker = Key::namespaced("n", "m");
        let marking = shared.begin_marking(&key);
        assert_eq!(sync_marker(&shared, &marker).await.unwrap(), Some(REMOVAL_PAUSE));
        assert!(sent.try_recv().is_err(), "the finalizer was removed");
        drop(marking);
        while work.try_recv().is_ok() {}
        assert_eq!(sync_marker(&shared, &marker).await.unwrap(), None);
        let paths: Vec<String> = std::iter::from_fn(|| sent.try_recv().ok())
            .map(|(_, path, _)| path)
            .collect();
        assert!(paths.last().unwrap().ends_with("/podprobemarkers/m"), "{paths:?}");
        assert_eq!(work.try_recv(), Ok(Work::Pod(key)), "others may mark it");
    }

    /// As after another refusal: a webhook that is never changed would keep the PodProbeMarker for ever.
    #[tokio::test]
    async fn finalizer_is_removed_although_a_webhook_denies_the_removal_of_marks() {
        let marking = json!({ "markerPolicy": [{ "state": "Succeeded", "labels": { "protected": "1" } }] });
        let (shared, _, mut sent, _work) = cluster(&marking, Some("2026-01-01T00:00:00Z")).await;
        let marker = Key::namespaced("n", "m");
        assert_eq!(sync_marker(&shared, &marker).await.unwrap(), None);
        let patched: Vec<String> = std::iter::from_fn(|| sent.try_recv().ok())
            .filter_map(|(method, path, _)| (method == "PATCH").then_some(path))
            .collect();
        let pod = "/api/v1/namespaces/n/pods/p";
        let marker = "/apis/apps.kruise.io/v1alpha1/namespaces/n/podprobemarkers/m";
        assert_eq!(patched, [pod, marker]);
    }

    /// An API server that has just started may not have loaded it, and nothing removes the marks later.
    #[tokio::test]
    async fn finalizer_stays_until_the_manager_has_the_role_to_remove_marks() {
        let marking = json!({ "markerPolicy": [{ "state": "Succeeded", "labels": { "forbidden": "1" } }] });
        let (shared, _, mut sent, _work) = cluster(&marking, Some("2026-01-01T00:00:00Z")).await;
        let error = sync_marker(&shared, &Key::namespaced("n", "m"))
            .await
            .unwrap_err();
        assert!(error.forbidden(), "{error}");
        let patched: Vec<String> = std::iter::from_fn(|| sent.try_recv().ok())
            .filter_map(|(method, path, _)| (method == "PATCH").then_some(path))
            .collect();
        assert_eq!(patched, ["/api/v1/namespaces/n/pods/p"]);
    }
}

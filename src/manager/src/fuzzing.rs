//! Parsers and decisions of the manager, for `kruise-fuzzing`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::ControllerRevision;
use kruise_api::keys;
use kruise_api::node_image::{ImageSpec, ImageTagStatus, NodeImage, ReferenceObject};
use kruise_api::node_pod_probe::{ContainerProbeState, ProbeState};
use kruise_api::pod_probe_marker::PodProbeMarker;
use kruise_cluster::Key;
use kruise_workload::in_place::pod::Pod;
use kruise_workload::revision::Revision;
use serde_json::json;

use crate::cloneset::plan::{Observed, plan};
use crate::image_pull_job::plan::entry::{EntryOptions, JobRequest, add_request, is_owned_by};
use crate::image_pull_job::plan::job::PullJob;
use crate::pod_probe_marker::plan::{PodMarks, ProbedPod, Results, node_probes, pod_change};
use crate::view::{NamedPort, NodeImageView};

/// A NodeImage and job requests: a requested tag is there after the request or waits, and is added only once.
pub fn node_image(data: &[u8]) {
    let Ok(object) = serde_json::from_slice::<NodeImage>(data) else {
        return;
    };
    let (images, status) = (
        object.spec.images.clone(),
        object.status.clone().unwrap_or_default(),
    );
    let view = NodeImageView::from(object);
    for tag in &view.tags {
        assert!(view.tag(&tag.image, &tag.tag).is_some() && view.mentions_image(&tag.image));
        let _ = view.status_of(tag);
    }
    for (image, spec) in &images {
        let statuses = status.image_statuses.get(image);
        let statuses = statuses.map_or(&[][..], |entry| &entry.tags);
        let tags = spec.tags.iter().map(|tag| tag.tag.as_str());
        for tag in tags.chain(["another"]) {
            for policy in ["IfNotPresent", "Always"] {
                let _ = add_for_job(spec, statuses, tag, &job(image, policy));
            }
        }
    }
}

/// The image's entry after the job's request; `None` if it is unchanged.
fn add_for_job(spec: &ImageSpec, statuses: &[ImageTagStatus], tag: &str, job: &PullJob) -> Option<ImageSpec> {
    let mode = Some(keys::MODE_BATCH.to_owned());
    let secret = ReferenceObject {
        namespace: "n".to_owned(),
        name: "s".to_owned(),
        mode,
    };
    let request = JobRequest {
        job,
        secrets: &[secret],
        ended_jobs: &BTreeSet::new(),
        needed_secrets: None,
        needed_accounts: None,
    };
    let options = EntryOptions {
        default_ttl: 300,
        seed: 0,
        now: Timestamp::UNIX_EPOCH,
    };
    let added = |to: &ImageSpec| {
        let mut entry = to.clone();
        let awaited = add_request(&mut entry, statuses, tag, request, options);
        (entry, awaited)
    };
    let (after, awaited) = &added(spec);
    let owned_by_job = after
        .tags
        .iter()
        .any(|one| one.tag == tag && is_owned_by(one, &job.uid));
    assert!(owned_by_job || awaited.is_some(), "{tag} of {after:?}");
    assert_eq!(added(after).0, *after, "added twice");
    (after != spec).then(|| after.clone())
}

/// A job for this image.
fn job(image: &str, policy: &str) -> PullJob {
    let job = json!({
        "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob",
        "metadata": { "name": "j", "namespace": "n", "uid": "j", "creationTimestamp": "2026-01-01T00:00:00Z" },
        "spec": { "image": image, "imagePullPolicy": policy, "completionPolicy": {} },
    });
    let job = serde_json::from_value(job);
    PullJob::from_object(&job.unwrap_or_else(|why| unreachable!("the job above is one: {why}")))
}

/// A PodProbeMarker: a node lists its probes, the same ones when it lists them again, and each has a result. Returns how
/// many there are.
pub fn pod_probe_marker(data: &[u8]) -> usize {
    let Ok(marker) = serde_json::from_slice::<PodProbeMarker>(data) else {
        return 0;
    };
    let markers = vec![Arc::new(marker)];
    let port = NamedPort {
        container: "app".into(),
        name: "http".into(),
        number: 80,
    };
    let pod = ProbedPod {
        uid: "u".to_owned(),
        node: "node".to_owned(),
        ip: "10.0.0.9".to_owned(),
        ports: vec![port],
        markers: markers.clone(),
        liveness: Arc::default(),
        reported: None,
    };
    let pods = [(Key::namespaced("n", "p"), pod)];
    let listed = node_probes(&[], &pods);
    assert_eq!(node_probes(&listed, &pods), listed, "it would be written again");
    let probes = listed.into_iter().flat_map(|pod| pod.probes);
    let states: Vec<_> = probes
        .map(|probe| ContainerProbeState {
            name: probe.name,
            state: ProbeState::Failed,
            last_probe_time: None,
            last_transition_time: None,
            message: "no".to_owned(),
            container_id: None,
        })
        .collect();
    let count = states.len();
    let results = Results {
        uid: "u".to_owned(),
        states,
        markers,
        sets_conditions: true,
    };
    let _ = pod_change(&PodMarks::default(), &results);
    count
}

/// A stored ControllerRevision, as update revision and as current revision.
pub fn revision(data: &[u8]) {
    let Ok(stored) = serde_json::from_slice::<ControllerRevision>(data) else {
        return;
    };
    let hostile = Revision::from(&stored);
    let _ = hostile.template();
    if hostile.invalid_reason.is_some() {
        return;
    }
    let template =
        json!({ "spec": { "template": { "spec": { "containers": [{ "name": "app", "image": "a:1" }] } } } });
    let good = Revision {
        name: "good".to_owned(),
        data: template.to_string(),
        ..Revision::default()
    };
    for (update, current) in [(&hostile, &good), (&good, &hostile)] {
        let _ = plan(&observed(update, current), Timestamp::UNIX_EPOCH);
    }
}

/// A CloneSet with two replicas and one Pod, which has the current revision.
fn observed(update: &Revision, current: &Revision) -> Observed {
    let set = json!({
        "metadata": { "name": "s", "namespace": "n", "uid": "u", "generation": 1 },
        "spec": {
            "replicas": 2,
            "selector": { "matchLabels": { "app": "s" } },
            "updateStrategy": { "rollingUpdate": { "podUpdatePolicy": "InPlaceIfPossible", "maxUnavailable": "100%" } },
            "volumeClaimTemplates": [{ "metadata": { "name": "data" } }],
            "template": { "metadata": { "labels": { "app": "s" } }, "spec": { "containers": [{ "name": "app", "image": "a:2" }] } },
        },
    });
    let pod = json!({
        "metadata": { "name": "p", "namespace": "n", "uid": "p",
            "labels": { "app": "s", "controller-revision-hash": current.name },
            "ownerReferences": [{ "apiVersion": "apps.kruise.io/v1beta1", "kind": "CloneSet", "name": "s", "uid": "u", "controller": true }] },
        "spec": { "nodeName": "node", "containers": [{ "name": "app", "image": "a:1" }], "readinessGates": [{ "conditionType": "InPlaceUpdateReady" }] },
        "status": { "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }],
            "containerStatuses": [{ "name": "app", "image": "a:1", "imageID": "a@sha256:1", "containerID": "c://1", "ready": true }] },
    });
    let set = serde_json::from_value(set);
    Observed {
        set: Arc::new(set.unwrap_or_else(|why| unreachable!("the CloneSet above is one: {why}"))),
        pods: vec![Arc::new(Pod::from_json(&pod))],
        claims: Vec::new(),
        claims_owned_by_pod: BTreeMap::new(),
        revisions: [current, update].map(|one| Arc::new(one.into())).to_vec(),
        current_revision: current.name.clone(),
        update_revision: update.name.clone(),
        template_status: Default::default(),
        collision_count: None,
        unread_revisions: Vec::new(),
        max_pod_memory: update.memory.max(current.memory),
        jobs: Vec::new(),
        nodes: BTreeMap::new(),
        failures: BTreeMap::new(),
        unfinished: Default::default(),
        features: Default::default(),
        rng_seed: 0,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn fuzz_target_lists_probes() {
        let probe = json!({ "tcpSocket": { "port": "http" } });
        let marker = json!({ "metadata": { "name": "m" }, "spec": { "selector": {},
            "probes": [{ "name": "a", "containerName": "app", "probe": probe }] } });
        assert_eq!(pod_probe_marker(marker.to_string().as_bytes()), 1);
    }

    /// The jobs of the fuzz target add tags, so that its assertions are not empty.
    #[test]
    fn fuzz_target_adds_tags() {
        let pulled = json!({ "images": { "i": { "tags": [{ "tag": "1", "createdAt": "2025-01-01T00:00:00Z", "version": 1,
            "ownerReferences": [{ "kind": "ImagePullJob", "namespace": "other", "name": "o", "uid": "o" }] }] } } });
        let status = json!({ "desired": 1, "imageStatuses": { "i": { "tags": [{ "tag": "1", "phase": "Pulling", "version": 1 }] } } });
        let object = json!({ "metadata": { "name": "n" }, "spec": pulled, "status": status });
        node_image(object.to_string().as_bytes());
        let object: NodeImage = serde_json::from_value(object).unwrap();
        let statuses = &object.status.as_ref().unwrap().image_statuses["i"].tags;
        let added = |tag: &str, policy: &str| {
            let spec = add_for_job(&object.spec.images["i"], statuses, tag, &job("i", policy));
            spec.map(|spec| spec.tags.len())
        };
        assert_eq!(
            (added("1", "IfNotPresent"), added("2", "Always")),
            (Some(1), Some(2))
        );
        assert_eq!(added("1", "Always"), None, "it waits for the running pull");
    }
}

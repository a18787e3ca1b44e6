#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod batches;
mod completion_proofs;
mod go_vectors;
mod large_templates;
mod legacy;
mod resources;
mod restart_policy;
mod superseded_updates;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::*;
use crate::testing::apply;

/// The change from one revision to another, with all in-place features on.
fn spec_between(old: &Value, new: &Value) -> Result<Spec, MustRecreate> {
    let revision = |name, data| RevisionData {
        name,
        data,
        claim_hash: None,
    };
    let options = Options {
        env_from_metadata: true,
        vertical: true,
        recreate_for_claims: false,
        grace_seconds: 0,
        template_storage: normalize::TemplateStorage::WithDefaults,
    };
    spec::calculate_spec(&revision("old", old), &revision("new", new), &options)
}

/// A ready Pod with our gate, whose containers run `image:1`.
pub(super) fn pod(containers: &[&str]) -> Value {
    let specs = containers
        .iter()
        .map(|name| json!({ "name": name, "image": format!("{name}:1"), "resources": {} }));
    let statuses = containers.iter().map(|name| {
        json!({
            "name": name, "ready": true, "restartCount": 0, "containerID": format!("containerd://{name}-0"),
            "image": format!("docker.io/library/{name}:1"), "imageID": format!("sha256:{name}-1"),
            "state": { "running": {} },
        })
    });
    json!({
        "metadata": {
            "name": "p", "uid": "u", "resourceVersion": "7", "labels": { "app": "x" },
            "annotations": { "ours": "not" },
        },
        "spec": {
            "readinessGates": [{ "conditionType": "InPlaceUpdateReady" }],
            "containers": specs.collect::<Value>(),
        },
        "status": {
            "phase": "Running",
            "conditions": [
                { "type": "InPlaceUpdateReady", "status": "True" },
                { "type": "ContainersReady", "status": "True" },
                { "type": "Ready", "status": "True" },
            ],
            "containerStatuses": statuses.collect::<Value>(),
        },
    })
}

pub(super) fn apply_all(pod: &mut Value, writes: &[PodWrite]) {
    for write in writes {
        assert_eq!(write.patch["metadata"]["uid"], pod["metadata"]["uid"]);
        apply(pod, &write.patch);
    }
}

pub(super) fn images(containers: &[(&str, &str)]) -> Spec {
    Spec {
        revision: "r2".to_owned(),
        container_images: containers
            .iter()
            .map(|(n, i)| ((*n).to_owned(), (*i).to_owned()))
            .collect(),
        ..Spec::default()
    }
}

/// The revision that an update of this Pod to `spec` leads to. Pods of these tests contain it.
pub(super) fn target_revision(pod: &Value, spec: &Spec) -> Value {
    let mut revision = pod["revision"].clone();
    if revision.is_null() {
        revision = json!({ "spec": { "template": { "metadata": { "labels": {}, "annotations": {} },
            "spec": { "containers": pod["spec"]["containers"] } } } });
    }
    let template = &mut revision["spec"]["template"];
    for container in template["spec"]["containers"].as_array_mut().unwrap() {
        let name = container["name"].as_str().unwrap().to_owned();
        if let Some(image) = spec.container_images.get(&name) {
            container["image"] = json!(image);
        }
        if let Some(size) = spec.container_resources.get(&name) {
            json_patch::merge(&mut container["resources"], &json!(size));
        }
    }
    if let Some(patch) = &spec.meta_data_patch {
        let patch = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, patch).unwrap();
        json_patch::merge(template, &serde_json::from_slice(&patch).unwrap());
    }
    for read in spec.container_ref_metadata.values() {
        json_patch::merge(&mut template["metadata"]["labels"], &json!(read.labels));
        json_patch::merge(&mut template["metadata"]["annotations"], &json!(read.annotations));
    }
    revision
}

/// The writes that begin an update to `spec` of `pod`, as it was observed.
pub(super) fn begin(pod: &Pod, revision: &Value, spec: &Spec) -> Vec<PodWrite> {
    patch::begin(
        pod,
        spec,
        Template::from_data(revision),
        &Map::new(),
        &Map::new(),
        timestamp(0),
    )
}

pub(super) fn start(pod: &mut Value, spec: &Spec) -> Vec<PodWrite> {
    pod["revision"] = target_revision(pod, spec);
    let writes = begin(&Pod::from_json(pod), &pod["revision"], spec);
    apply_all(pod, &writes);
    writes
}

pub(super) fn timestamp(second: i64) -> Timestamp {
    Timestamp::from_second(1_700_000_000 + second).unwrap()
}

pub(super) fn condition_is_true(pod: &Value, type_: &str) -> bool {
    Pod::from_json(pod).condition(type_).is_some_and(|c| c.is_true)
}

pub(super) fn refresh_at(pod: &Value, second: i64) -> RefreshResult {
    let template = Template::from_data(&pod["revision"]);
    refresh(
        &Pod::from_json(pod),
        |revision| revision == "r2",
        template,
        timestamp(second),
    )
}

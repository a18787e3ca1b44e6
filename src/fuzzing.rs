//! What reads text from outside, as functions of bytes: `fuzz/` looks for bytes that break one, and the tests replay
//! those that it found.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::ControllerRevision;
use serde_json::{Value, json};

use crate::admission::fuzzing::{conversion, review};
use crate::api::image_reference::Reference;
use crate::api::keys;
use crate::api::node_image::{ImageSpec, ImageTagStatus, NodeImage, ReferenceObject};
use crate::in_place::Template;
use crate::in_place::complete::progress;
use crate::in_place::pod::Pod;
use crate::in_place::refresh::refresh;
use crate::manager::cloneset::plan::{Observed, plan};
use crate::manager::image_pull_job::plan::entry::{Ask, Setting, add, awaits, owned};
use crate::manager::image_pull_job::plan::job::Job;
use crate::manager::view::NodeImageView;
use crate::node::fuzzing::{hook_answer, pod};
use crate::node::image_pull::plan::keyring::{KEY_CFG, KEY_JSON, Keyring, TYPE_CFG, TYPE_JSON};
use crate::workload::revision::Revision;

/// Takes any bytes, and must neither panic nor take long.
pub type Target = fn(&[u8]);

/// Every target, by the name of its corpus' folder.
pub const TARGETS: [(&str, Target); 10] = [
    ("annotations", annotations),
    ("conversion", conversion),
    ("docker_config", docker_config),
    ("hook_answer", hook_answer),
    ("node_image", node_image),
    ("pod", pod),
    ("reference", reference),
    ("registry", registry),
    ("review", review),
    ("revision", revision),
];

/// A NodeImage: as the daemon reads it and pulls for it, and as the manager does and asks for more. What a job asks for is
/// there once it was added, or waits; it is added once.
fn node_image(data: &[u8]) {
    crate::node::fuzzing::node_image(data);
    let Ok(object) = serde_json::from_slice::<NodeImage>(data) else {
        return;
    };
    let (images, status) = (
        object.spec.images.clone(),
        object.status.clone().unwrap_or_default(),
    );
    let view = NodeImageView::from(object);
    for tag in &view.tags {
        assert!(view.tag(&tag.image, &tag.tag).is_some() && view.knows(&tag.image));
        let _ = view.status_of(tag);
    }
    for (image, spec) in &images {
        let statuses = status.image_statuses.get(image);
        let statuses = statuses.map_or(&[][..], |of| &of.tags);
        let tags = spec.tags.iter().map(|tag| tag.tag.as_str());
        for tag in tags.chain(["another"]) {
            for asked in ["IfNotPresent", "Always"] {
                let _ = asked_for(spec, statuses, tag, &job(image, asked));
            }
        }
    }
}

/// The image's entry, once the job has asked for the tag, if it is not the same.
fn asked_for(spec: &ImageSpec, statuses: &[ImageTagStatus], tag: &str, job: &Job) -> Option<ImageSpec> {
    let mode = Some(keys::MODE_BATCH.to_owned());
    let secret = ReferenceObject {
        namespace: "n".to_owned(),
        name: "s".to_owned(),
        mode,
    };
    let ask = Ask {
        job,
        secrets: &[secret],
        ended: &BTreeSet::new(),
    };
    let setting = Setting {
        default_ttl: 300,
        seed: 0,
        now: Timestamp::UNIX_EPOCH,
    };
    let added = add(Some(spec), statuses, tag, &[ask], setting);
    let after = added.as_ref().unwrap_or(spec);
    let there = after
        .tags
        .iter()
        .any(|one| one.tag == tag && owned(one, &job.uid));
    assert!(
        there || awaits(Some(spec), statuses, tag, ask).is_some(),
        "{tag} of {after:?}"
    );
    assert_eq!(
        add(Some(after), statuses, tag, &[ask], setting),
        None,
        "added twice"
    );
    added
}

/// A job of this image.
fn job(image: &str, policy: &str) -> Job {
    let job = json!({
        "apiVersion": "apps.kruise.io/v1beta1", "kind": "ImagePullJob",
        "metadata": { "name": "j", "namespace": "n", "uid": "j", "creationTimestamp": "2026-01-01T00:00:00Z" },
        "spec": { "image": image, "imagePullPolicy": policy, "completionPolicy": {} },
    });
    let job = serde_json::from_value(job);
    Job::read(&job.unwrap_or_else(|why| unreachable!("the job above is one: {why}")))
}

/// The first line, and what follows it.
fn two(data: &[u8]) -> (String, String) {
    let text = String::from_utf8_lossy(data);
    let (first, rest) = text.split_once('\n').unwrap_or((&text, ""));
    (first.to_owned(), rest.to_owned())
}

/// A reference, and a NodeImage's name and tag: what is read is written so that it is read as the same.
fn reference(data: &[u8]) {
    let (name, tag) = two(data);
    let read = [Reference::parse(&name), Reference::from_name_and_tag(&name, &tag)];
    for reference in read.into_iter().flatten() {
        let again = Reference::parse(&reference.to_string());
        assert_eq!(again.map(|r| r.to_string()), Ok(reference.to_string()));
        let stored = Reference::from_name_and_tag(&reference.familiar_name(), reference.tag_or_digest());
        assert_eq!(stored.map(|r| r.to_string()), Ok(reference.to_string()));
    }
}

/// A registry of a Docker configuration against a repository.
fn registry(data: &[u8]) {
    let (registry, repository) = two(data);
    let config = json!({"auths": {registry: {"username": "u"}}}).to_string();
    let mut keyring = Keyring::default();
    let read = keyring.add_config_json(config.as_bytes(), "file");
    assert!(read.is_ok(), "{read:?}");
    assert!(keyring.lookup(&repository).len() <= 1);
}

/// The content of a pull secret.
fn docker_config(data: &[u8]) {
    for (type_, wanted) in [(TYPE_JSON, KEY_JSON), (TYPE_CFG, KEY_CFG)] {
        let mut keyring = Keyring::default();
        let _ = keyring.add_secret(type_, |key| (key == wanted).then_some(data));
        let _ = keyring.lookup("r.test:5000/team/app");
    }
}

/// A Pod; and the annotations of updates in place, on a Pod that is fine.
fn annotations(data: &[u8]) {
    let (state, grace) = two(data);
    let annotations: BTreeMap<_, _> = [
        (keys::IN_PLACE_UPDATE_STATE, state),
        (keys::IN_PLACE_UPDATE_GRACE, grace),
    ]
    .into();
    let pod = json!({
        "metadata": {"name": "p", "namespace": "n", "uid": "u", "annotations": annotations},
        "spec": {"containers": [{"name": "app", "image": "a:1"}]},
        "status": {"containerStatuses": [{"name": "app", "image": "a:1", "imageID": "a@sha256:1", "containerID": "c://1"}]},
    });
    let whole = serde_json::from_slice::<Value>(data).ok();
    let revision =
        json!({ "spec": { "template": { "spec": { "containers": [{ "name": "app", "image": "a:2" }] } } } });
    for pod in whole.iter().chain([&pod]).map(Pod::of) {
        let _ = progress(&pod);
        let _ = refresh(&pod, |_| true, Template::of(&revision), Timestamp::UNIX_EPOCH);
    }
}

/// A stored ControllerRevision: as the one that Pods are made and updated to, and as the one that they have.
fn revision(data: &[u8]) {
    let Ok(stored) = serde_json::from_slice::<ControllerRevision>(data) else {
        return;
    };
    let hostile = Revision::from(&stored);
    let _ = hostile.template();
    if hostile.unfit.is_some() {
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

/// A CloneSet of two Pods with one Pod, which has the current revision.
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
        pods: vec![Arc::new(Pod::of(&pod))],
        claims: Vec::new(),
        given: BTreeMap::new(),
        revisions: [current, update].map(|one| Arc::new(one.into())).to_vec(),
        current: current.name.clone(),
        update: update.name.clone(),
        template: Default::default(),
        collisions: None,
        unread: Vec::new(),
        memory: update.memory.max(current.memory),
        jobs: Vec::new(),
        nodes: BTreeMap::new(),
        failures: BTreeMap::new(),
        left: Default::default(),
        switches: Default::default(),
        seed: 0,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// What the target asserts of jobs is not said of none.
    #[test]
    fn the_target_asks_for_tags() {
        let pulled = json!({ "images": { "i": { "tags": [{ "tag": "1", "createdAt": "2025-01-01T00:00:00Z", "version": 1,
            "ownerReferences": [{ "kind": "ImagePullJob", "namespace": "other", "name": "o", "uid": "o" }] }] } } });
        let status = json!({ "desired": 1, "imageStatuses": { "i": { "tags": [{ "tag": "1", "phase": "Pulling", "version": 1 }] } } });
        let object = json!({ "metadata": { "name": "n" }, "spec": pulled, "status": status });
        node_image(object.to_string().as_bytes());
        let object: NodeImage = serde_json::from_value(object).unwrap();
        let statuses = &object.status.as_ref().unwrap().image_statuses["i"].tags;
        let added = |tag: &str, policy: &str| {
            let asked = asked_for(&object.spec.images["i"], statuses, tag, &job("i", policy));
            asked.map(|spec| spec.tags.len())
        };
        assert_eq!(
            (added("1", "IfNotPresent"), added("2", "Always")),
            (Some(1), Some(2))
        );
        assert_eq!(added("1", "Always"), None, "it waits for the pull that there is");
    }

    #[test]
    fn the_fuzz_corpus_breaks_nothing() {
        let corpus = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
        for (name, target) in TARGETS {
            let files: Vec<_> = std::fs::read_dir(corpus.join(name)).unwrap().collect();
            assert!(!files.is_empty(), "{name} has no corpus");
            for file in files {
                target(&std::fs::read(file.unwrap().path()).unwrap());
            }
        }
    }
}

//! Parsers of external text, as functions of bytes: `fuzz/` searches for bytes that break one, and the tests replay the
//! findings. Parsers of one program only are in its own `fuzzing`.

use std::collections::BTreeMap;

use jiff::Timestamp;
use kruise_api::image_reference::ImageReference;
use kruise_api::keys;
use kruise_daemon::fuzzing::{docker_config, hook_answer, pod, registry};
use kruise_manager::admission::fuzzing::{conversion, review};
use kruise_manager::fuzzing::revision;
use kruise_workload::in_place::Template;
use kruise_workload::in_place::completion::progress;
use kruise_workload::in_place::pod::Pod;
use kruise_workload::in_place::refresh::refresh;
use serde_json::{Value, json};

/// Accepts any bytes; must neither panic nor take long.
pub type Target = fn(&[u8]);

/// Every target, by the name of its corpus directory.
pub const TARGETS: [(&str, Target); 11] = [
    ("annotations", annotations),
    ("conversion", conversion),
    ("docker_config", docker_config),
    ("hook_answer", hook_answer),
    ("node_image", node_image),
    ("pod", pod),
    ("pod_probes", pod_probes),
    ("reference", reference),
    ("registry", registry),
    ("review", review),
    ("revision", revision),
];

/// A NodeImage: as the daemon reads it and pulls, and as the manager reads it and adds tags.
fn node_image(data: &[u8]) {
    kruise_daemon::fuzzing::node_image(data);
    kruise_manager::fuzzing::node_image(data);
}

/// A NodePodProbe as the daemon reads it, or a PodProbeMarker as the manager does.
fn pod_probes(data: &[u8]) {
    kruise_daemon::fuzzing::node_pod_probe(data);
    kruise_manager::fuzzing::pod_probe_marker(data);
}

/// The first line, and the rest.
fn split_first_line(data: &[u8]) -> (String, String) {
    let text = String::from_utf8_lossy(data);
    let (first, rest) = text.split_once('\n').unwrap_or((&text, ""));
    (first.to_owned(), rest.to_owned())
}

/// An image reference, and a NodeImage's name and tag: what is parsed is written so that it parses to the same value.
fn reference(data: &[u8]) {
    let (name, tag) = split_first_line(data);
    let parsed = [
        ImageReference::parse(&name),
        ImageReference::from_name_and_tag(&name, &tag),
    ];
    for reference in parsed.into_iter().flatten() {
        let reparsed = ImageReference::parse(&reference.to_string());
        assert_eq!(reparsed.map(|r| r.to_string()), Ok(reference.to_string()));
        let stored = ImageReference::from_name_and_tag(&reference.familiar_name(), reference.tag_or_digest());
        assert_eq!(stored.map(|r| r.to_string()), Ok(reference.to_string()));
    }
}

/// A Pod; and the annotations of in-place updates, on a valid Pod.
fn annotations(data: &[u8]) {
    let (state, grace) = split_first_line(data);
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
    let parsed = serde_json::from_slice::<Value>(data).ok();
    let revision =
        json!({ "spec": { "template": { "spec": { "containers": [{ "name": "app", "image": "a:2" }] } } } });
    for pod in parsed.iter().chain([&pod]).map(Pod::from_json) {
        let _ = progress(&pod);
        let _ = refresh(
            &pod,
            |_| true,
            Template::from_data(&revision),
            Timestamp::UNIX_EPOCH,
        );
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn fuzz_corpus_does_not_panic() {
        let corpus = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
        for (name, target) in TARGETS {
            let files: Vec<_> = std::fs::read_dir(corpus.join(name)).unwrap().collect();
            assert!(!files.is_empty(), "{name} has no corpus");
            for file in files {
                target(&std::fs::read(file.unwrap().path()).unwrap());
            }
        }
    }
}

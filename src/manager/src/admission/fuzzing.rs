//! The webhooks' port for `kruise-fuzzing`: everything between a review's bytes and its answer that asks nobody.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::container_recreate_request::Seen;
use super::{cloneset, container_recreate_request, deletion, image_pull_job, node_image, wire};
use kruise_api::{convert, names};

/// An `AdmissionReview`, for every kind whatever it says.
pub fn review(data: &[u8]) {
    if let Ok((_, Some(going))) = wire::deletion(data) {
        let name = deletion::protected(&going);
        assert!(name.is_none_or(names::is_label), "{name:?}");
    }
    let Ok((_, Some(asked))) = wire::admission(data) else {
        return;
    };
    let pod = json!({
        "metadata": {"name": "p", "namespace": "n", "uid": "u"},
        "spec": {"nodeName": "node", "containers": [{"name": "app"}]},
        "status": {"phase": "Running", "containerStatuses": [{"name": "app", "containerID": "c://1", "image": "a",
            "imageID": "a", "ready": true, "restartCount": 0}]},
    });
    let seen = Seen {
        pod: serde_json::from_value::<Pod>(pod).ok(),
        ..Seen::default()
    };
    let _ = container_recreate_request::decide(&asked, &seen);
    let _ = image_pull_job::fill_in(&asked);
    let _ = image_pull_job::check(&asked, &[]);
    let _ = node_image::fill_in(&asked, Timestamp::UNIX_EPOCH);
    let _ = node_image::check(&asked);
    let _ = cloneset::new_templates(&asked);
    let _ = cloneset::newly_to_delete(&asked);
    let _ = cloneset::fill_in(&asked, None);
    let _ = cloneset::check(&asked, &[], None);
}

/// A `ConversionReview`.
pub fn conversion(data: &[u8]) {
    if let Ok((_, (objects, to))) = wire::conversion(data) {
        for object in objects.into_iter().filter_map(|text| wire::object(text).ok()) {
            let _ = convert::convert(object, &to);
        }
    }
}

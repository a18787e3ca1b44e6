//! The webhook handlers for `kruise-fuzzing`: from the bytes of a review to its answer, without any request to the API
//! server.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::container_recreate_request::PodLookup;
use super::pod::PodInjectionLookup;
use super::sidecar_set::SidecarSetLookup;
use super::{
    cloneset, container_recreate_request, deletion, image_pull_job, node_image, pod, reviews_json,
    sidecar_set,
};
use kruise_api::{convert, names};

/// An `AdmissionReview`, decided for every kind.
pub fn review(data: &[u8]) {
    if let Ok((_, Some(namespace))) = reviews_json::parse_deletion(data) {
        let name = deletion::protected_namespace(&namespace);
        assert!(name.is_none_or(names::is_label), "{name:?}");
    }
    let Ok((_, Some(request))) = reviews_json::parse_admission(data) else {
        return;
    };
    let pod = json!({
        "metadata": {"name": "p", "namespace": "n", "uid": "u"},
        "spec": {"nodeName": "node", "containers": [{"name": "app"}]},
        "status": {"phase": "Running", "containerStatuses": [{"name": "app", "containerID": "c://1", "image": "a",
            "imageID": "a", "ready": true, "restartCount": 0}]},
    });
    let lookup = PodLookup {
        pod: serde_json::from_value::<Pod>(pod).ok(),
        ..PodLookup::default()
    };
    let _ = container_recreate_request::decide(&request, &lookup);
    let _ = image_pull_job::set_defaults(&request);
    let _ = image_pull_job::validate_request(&request, &[]);
    let _ = node_image::set_defaults(&request, Timestamp::UNIX_EPOCH);
    let _ = node_image::validate_request(&request);
    let _ = cloneset::changed_templates(&request);
    let _ = cloneset::added_pods_to_delete(&request);
    let _ = cloneset::set_defaults(&request, None);
    let _ = cloneset::validate_request(&request, &[], None);
    let _ = sidecar_set::set_defaults(&request);
    let _ = sidecar_set::validate_request(&request, &SidecarSetLookup::default());
    let _ = pod::mutate(&request, &PodInjectionLookup::default(), Timestamp::UNIX_EPOCH);
}

/// A `ConversionReview`.
pub fn conversion(data: &[u8]) {
    if let Ok((_, (objects, to))) = reviews_json::parse_conversion(data) {
        for object in objects
            .into_iter()
            .filter_map(|text| reviews_json::parse_object(text).ok())
        {
            let _ = convert::convert(object, &to);
        }
    }
}

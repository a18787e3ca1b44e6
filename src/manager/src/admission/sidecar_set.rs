//! SidecarSet: sets defaults and hashes, and validates, with OpenKruise's rules.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::ControllerRevision;
use serde_json::{Value, json};

use super::review::{Decision, Request};
use kruise_api::keys;
use kruise_api::sidecarset::SidecarSet;
use kruise_workload::sidecarset::{defaults, validate};

/// What the cluster has, as far as a review needs it.
#[derive(Debug, Default)]
pub(super) struct SidecarSetLookup {
    /// All stored sets.
    pub stored: Vec<Arc<SidecarSet>>,
    /// Revisions of sets, if this one names one.
    pub revisions: Vec<Arc<ControllerRevision>>,
    /// The whitelist of annotations, if the set patches annotations and there is one.
    pub whitelist: Option<String>,
    /// Gate `SidecarSetPatchPodMetadataDefaultsAllowed`.
    pub patch_metadata_allowed: bool,
}

/// Whether the set names a revision to inject.
pub(super) fn names_revision(request: &Request) -> bool {
    request.object["spec"]["injectionStrategy"]["revision"].is_object()
}

/// Whether the set patches annotations of Pods.
pub(super) fn patches_metadata(request: &Request) -> bool {
    request.object["spec"]["patchPodMetadata"]
        .as_array()
        .is_some_and(|patches| !patches.is_empty())
}

/// Sets the defaults, and the hashes as annotations.
pub(super) fn set_defaults(request: &Request) -> Decision {
    let mut object = request.object.to_json();
    defaults::set_defaults(&mut object);
    Decision::Allow {
        object,
        warnings: Vec::new(),
    }
}

/// Validates the set. One that is being deleted may still lose its finalizers.
pub(super) fn validate_request(request: &Request, lookup: &SidecarSetLookup) -> Decision {
    let object = request.object.to_json();
    let spec_is_stored = request
        .old
        .as_ref()
        .is_some_and(|old| old["spec"] == object["spec"]);
    if spec_is_stored && object["metadata"]["deletionTimestamp"].is_string() {
        return Decision::Allow {
            object,
            warnings: Vec::new(),
        };
    }
    let concerned = validate::Concerned::new(&object);
    let stored = lookup.stored.iter().filter(|set| {
        let name = set.metadata.name.as_deref().unwrap_or_default();
        concerned.contains(name, &set.spec)
    });
    let stored: Vec<Value> = stored.map(|set| json!(**set)).collect();
    let revisions = lookup.revisions.iter().map(|revision| {
        let labels = revision.metadata.labels.as_ref();
        let label = |key: &str| labels.and_then(|labels| labels.get(key)).map(String::as_str);
        validate::Revision {
            name: revision.metadata.name.as_deref().unwrap_or_default(),
            sidecar_set: label(keys::SIDECAR_SET_NAME).unwrap_or_default(),
            custom_version: label(keys::SIDECAR_SET_CUSTOM_VERSION),
        }
    });
    let revisions: Vec<_> = revisions.collect();
    let old = request.old.as_ref().map(|old| old.to_json());
    let errors = validate::validate(&validate::Request {
        set: &object,
        old: old.as_ref(),
        stored: &stored.iter().collect::<Vec<_>>(),
        revisions: &revisions,
        whitelist: lookup.whitelist.as_deref(),
        patch_metadata_allowed: lookup.patch_metadata_allowed,
    });
    Decision::from_errors(errors, object, Vec::new())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::panic)]

    use super::*;
    use crate::admission::review::Object;

    fn request(spec: Value) -> Request {
        let object = json!({ "apiVersion": "apps.kruise.io/v1beta1", "kind": "SidecarSet", "metadata": { "name": "s" }, "spec": spec });
        Request {
            object: Object::for_test(object),
            old: None,
            namespace: String::new(),
            version: "v1beta1".into(),
            strict: false,
        }
    }

    fn spec() -> Value {
        json!({ "selector": { "matchLabels": { "app": "web" } }, "containers": [{ "name": "log", "image": "log:1" }] })
    }

    #[test]
    fn defaulted_set_has_hashes_and_is_valid() {
        let Decision::Allow { object, .. } = set_defaults(&request(spec())) else {
            panic!("refused")
        };
        assert_eq!(
            object["spec"]["containers"][0]["podInjectPolicy"],
            "BeforeAppContainer"
        );
        let annotations = &object["metadata"]["annotations"];
        assert!(annotations[keys::SIDECAR_SET_HASH].is_string());
        assert!(annotations[keys::SIDECAR_SET_HASH_WITHOUT_IMAGE].is_string());
        let decision = validate_request(&request(object["spec"].clone()), &SidecarSetLookup::default());
        assert!(matches!(decision, Decision::Allow { .. }), "{decision:?}");
    }

    #[test]
    fn refusal_names_the_field() {
        let mut bad = spec();
        bad["selector"] = json!({});
        let decision = validate_request(&request(bad), &SidecarSetLookup::default());
        let Decision::Deny { message, .. } = decision else {
            panic!("allowed")
        };
        assert!(message.contains("spec.selector"), "{message}");
    }
}

//! SidecarSet: sets defaults and hashes, and validates, with OpenKruise's rules.
//!
//! What its containers and volumes are beyond these rules, the API server checks as those of a Pod, in a dry run.

use std::sync::Arc;

use k8s_openapi::api::apps::v1::ControllerRevision;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::review::{Decision, Request};
use kruise_api::keys;
use kruise_api::sidecarset::{SidecarContainer, SidecarSet};
use kruise_api::validation::{MAX_FIELD_CHARS, truncate};
use kruise_cluster as cluster;
use kruise_cluster::pod_template::{DryRunResult, Templates};
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

/// The containers and volumes of a set as those of a Pod, if they are new or changed: an older set, stored before the
/// API server checked it, can still be changed elsewhere.
pub(super) fn changed_pod(request: &Request) -> Option<Templates> {
    let pod = PodParts::of(&request.object["spec"])?;
    let stored = request.old.as_ref().and_then(|old| PodParts::of(&old["spec"]));
    (stored.as_ref() != Some(&pod)).then(|| Templates {
        template: pod.into_template(),
        ..Templates::default()
    })
}

/// What a set adds to a Pod.
#[derive(Debug, PartialEq)]
struct PodParts {
    containers: Vec<Map<String, Value>>,
    init_containers: Vec<Map<String, Value>>,
    volumes: Value,
}

impl PodParts {
    /// `None` for a spec that has another form, which the schema refuses.
    fn of(spec: &Value) -> Option<Self> {
        let containers = |field: &str| match &spec[field] {
            Value::Null => Some(Vec::new()),
            list => {
                let list = Vec::<SidecarContainer>::deserialize(list).ok()?;
                Some(list.into_iter().map(|sidecar| sidecar.container).collect())
            }
        };
        Some(Self {
            containers: containers("containers")?,
            init_containers: containers("initContainers")?,
            volumes: spec["volumes"].clone(),
        })
    }

    fn into_template(self) -> Value {
        let Self {
            mut containers,
            init_containers,
            volumes,
        } = self;
        if containers.is_empty() {
            // A Pod needs one.
            let application = json!({ "name": "application-of-the-pod", "image": "application" });
            containers.extend(application.as_object().cloned());
        }
        json!({ "metadata": {}, "spec": {
            "containers": containers,
            "initContainers": init_containers,
            "volumes": volumes,
        } })
    }
}

/// Adds what the API server says about the containers and volumes.
pub(super) fn with_dry_run(
    decision: Decision,
    answer: Option<Result<DryRunResult, cluster::Error>>,
) -> Decision {
    let Decision::Allow { object, mut warnings } = decision else {
        return decision;
    };
    let own_path = |text: &str| {
        let text = text.replace("spec.template.spec.", "spec.");
        text.replacen("spec.template: ", "spec: ", 1)
    };
    match answer {
        None => {}
        Some(Ok(DryRunResult::Invalid(why))) => {
            return Decision::Deny {
                code: 422,
                message: own_path(&why),
            };
        }
        Some(Ok(DryRunResult::Valid { unknown_fields, .. })) => {
            warnings.extend(unknown_fields.iter().take(MAX_LISTED).map(|field| {
                format!(
                    "unknown field \"{}\" is not injected; look for a misspelling",
                    truncate(&own_path(field), MAX_FIELD_CHARS)
                )
            }));
        }
        Some(Err(why)) => warnings.push(format!(
            "the API server could not check the containers and volumes now, and will when they are injected: {why}"
        )),
    }
    Decision::Allow { object, warnings }
}

/// Maximum number of fields in the warnings.
const MAX_LISTED: usize = 8;

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
    let warnings = validate::warnings(&object);
    Decision::from_errors(errors, object, warnings)
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
    fn api_server_checks_what_a_pod_gets() {
        let mut set = spec();
        set["containers"][0]["podInjectPolicy"] = json!("BeforeAppContainer");
        set["containers"][0]["upgradeStrategy"] = json!({ "upgradeType": "ColdUpgrade" });
        set["containers"][0]["ports"] = json!([{ "containerPort": 80 }]);
        set["volumes"] = json!([{ "name": "logs", "emptyDir": {} }]);
        let template =
            |request: &Request| changed_pod(request).map(|mut templates| templates.template["spec"].take());
        let expected = json!({
            "containers": [{ "name": "log", "image": "log:1", "ports": [{ "containerPort": 80 }] }],
            "initContainers": [],
            "volumes": [{ "name": "logs", "emptyDir": {} }],
        });
        let mut changed = request(set.clone());
        assert_eq!(template(&changed), Some(expected));
        // What no Pod gets may change unchecked.
        let mut old = set.clone();
        old["selector"] = json!({ "matchLabels": { "app": "old" } });
        old["containers"][0]["podInjectPolicy"] = json!("AfterAppContainer");
        changed.old = Some(request(old).object);
        assert_eq!(template(&changed), None);
        let mut old = set.clone();
        old["volumes"] = json!([]);
        changed.old = Some(request(old).object);
        assert!(template(&changed).is_some());
        // A Pod has at least one container.
        set["initContainers"] = set["containers"].take();
        let init_only = template(&request(set)).unwrap_or_default();
        assert_eq!(init_only["containers"].as_array().map(Vec::len), Some(1));
        assert_eq!(init_only["initContainers"][0]["name"], "log");
    }

    #[test]
    fn result_of_the_dry_run_names_fields_of_the_set() {
        let allow = || Decision::Allow {
            object: Value::Null,
            warnings: Vec::new(),
        };
        let why = "spec.template.spec.containers[0].resizePolicy[0].restartPolicy: Unsupported value: \"x\"";
        let invalid = Some(Ok(DryRunResult::Invalid(why.to_owned())));
        let Decision::Deny { code: 422, message } = with_dry_run(allow(), invalid) else {
            panic!("allowed")
        };
        assert!(
            message.starts_with("spec.containers[0].resizePolicy[0].restartPolicy: "),
            "{message}"
        );
        let valid = DryRunResult::Valid {
            templates: Templates::default(),
            unknown_fields: vec!["spec.template.spec.containers[0].newField".to_owned()],
            dropped: Vec::new(),
        };
        for (answer, expected) in [
            (Ok(valid), "unknown field \"spec.containers[0].newField\""),
            (Err(cluster::Error::Transport("no route".into())), "no route"),
        ] {
            let Decision::Allow { warnings, .. } = with_dry_run(allow(), Some(answer)) else {
                panic!("refused")
            };
            assert!(warnings[0].contains(expected), "{warnings:?}");
        }
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

//! CloneSet: defaults and validates the templates by a dry run at the API server, and validates what CEL cannot.
//!
//! A CloneSet works without this webhook: the manager requests missing defaults itself, and reconciles no CloneSet with
//! errors by [`validate`].

use std::collections::HashSet;

use json_patch::jsonptr::PointerBuf;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::previous_fields::PreviousFields;
use super::review::{Decision, Request};
use kruise_api::json::set;
use kruise_api::keys;
use kruise_api::owner::Owner;
use kruise_api::schemas::MAX_INT_OR_STRING_CHARS;
use kruise_api::validation::cloneset::{
    validate, validate_hooks, validate_launch_priorities, validate_update_budget,
};
use kruise_api::validation::{FieldErrors, MAX_FIELD_CHARS, MAX_VALUE_CHARS, truncate};
use kruise_cluster as cluster;
use kruise_cluster::pod_template::{DryRunResult, Templates};
use kruise_workload::in_place::diff::visit_changes;
use kruise_workload::in_place::normalize::{TemplateStorage, normalize};
use kruise_workload::in_place::spec::is_mutable;

/// The templates that need defaults because they are new or changed. A missing template is for the API server to
/// reject.
pub(super) fn changed_templates(request: &Request) -> Option<Templates> {
    let spec = &request.object["spec"];
    let same =
        |old: &Value| old["template"] == spec["template"] && claim_templates(old) == claim_templates(spec);
    let unchanged = request.old.as_ref().is_some_and(|old| same(&old["spec"]));
    (!unchanged && spec["template"].is_object()).then(|| Templates::from_workload_spec(spec))
}

fn claim_templates(spec: &Value) -> &[Value] {
    spec["volumeClaimTemplates"].as_array().map_or(&[], Vec::as_slice)
}

/// Sets the defaults of the templates, or rejects the object with the API server's error.
pub(super) fn set_defaults(
    request: &Request,
    answer: Option<Result<DryRunResult, cluster::Error>>,
) -> Decision {
    let mut object = request.object.to_json();
    let mut warnings = Vec::new();
    match answer {
        None => {}
        Some(Ok(DryRunResult::Invalid(why))) => {
            return Decision::Deny {
                code: 422,
                message: why,
            };
        }
        Some(Ok(DryRunResult::Valid {
            templates,
            unknown_fields: unknown,
            dropped,
        })) => {
            set(&mut object, &["spec", "template"], templates.template);
            if !templates.claims.is_empty() {
                set(
                    &mut object,
                    &["spec", "volumeClaimTemplates"],
                    templates.claims.into(),
                );
            }
            warnings.extend(unknown.iter().take(MAX_LISTED).map(|field| {
                format!(
                    "unknown field \"{}\" is left out; look for a misspelling",
                    truncate(field, MAX_FIELD_CHARS)
                )
            }));
            warnings.extend(dropped.iter().take(MAX_LISTED).map(|item| {
                format!(
                    "{} is stored, but the API server drops it, so Pods may be without it; its feature gate may be off",
                    truncate(item, MAX_FIELD_CHARS)
                )
            }));
        }
        Some(Err(why)) => warnings.push(format!(
            "the Pod template could not be checked now, and will be when it is used: {why}"
        )),
    }
    Decision::Allow { object, warnings }
}

/// The error of `fieldValidation=Strict` in the API server's words: for unknown fields that are new.
pub(super) fn strict_decoding_error(previous: &PreviousFields, unknown: &[String]) -> Option<String> {
    let new = previous.filter_new(unknown);
    let fields = new.iter().take(MAX_LISTED);
    let fields: Vec<_> = fields
        .map(|field| format!("unknown field \"{}\"", truncate(field, MAX_FIELD_CHARS)))
        .collect();
    (!fields.is_empty()).then(|| format!("strict decoding error: {}", fields.join(", ")))
}

/// The template that an update replaces under `InPlaceOnly`, and which changes Pods can take.
#[derive(Debug)]
pub(super) struct InPlaceBaseline {
    pub template: Value,
    /// How templates are stored (gate `TemplateNoDefaults`).
    pub stored: TemplateStorage,
    /// Whether CPU and memory are resized in place (gate `InPlaceWorkloadVerticalScaling`).
    pub vertical_scaling: bool,
}

/// Validates the object; `missing_pods` are names newly in `podsToDelete` that no Pod of the CloneSet has.
pub(super) fn validate_request(
    request: &Request,
    missing_pods: &[String],
    baseline: Option<&InPlaceBaseline>,
) -> Decision {
    let spec = &request.object["spec"];
    let mut errors = FieldErrors::default();
    let all_errors = |spec: &Value| {
        let others = [
            validate_update_budget(spec),
            validate_hooks(&spec["lifecycle"]),
            validate_launch_priorities(&spec["template"]),
        ];
        [validate(spec), others.concat()].concat()
    };
    let old_errors = request.old.as_ref().map(|old| all_errors(&old["spec"]));
    let old_errors = old_errors.unwrap_or_default();
    for error in all_errors(spec) {
        // Stored errors are older than this check.
        if !old_errors.contains(&error) {
            errors.push(error);
        }
    }
    if let Some(baseline) = baseline {
        let sizes = if baseline.vertical_scaling {
            " cpu and memory,"
        } else {
            ""
        };
        for field in immutable_changes(baseline, &spec["template"]) {
            let field = truncate(&field, MAX_FIELD_CHARS);
            errors.push(format!(
                "spec.template.spec{field}: Forbidden: a Pod cannot be changed in this, and InPlaceOnly makes no \
                 new ones; change images,{sizes} labels and annotations only, or set \
                 podUpdatePolicy to InPlaceIfPossible"
            ));
        }
    }
    let mut warnings = pre_download_warnings(&request.object);
    for name in missing_pods {
        let why = "there is no such Pod of this CloneSet; take the name off the list";
        if request.version == "v1alpha1" {
            errors.add("spec.scaleStrategy.podsToDelete", &json!(name), why);
        } else {
            warnings.push(format!("spec.scaleStrategy.podsToDelete: {name:?}: {why}"));
        }
    }
    Decision::from_errors(errors, request.object.to_json(), warnings)
}

/// Warnings about invalid pre-download fields. In v1beta1 the schema rejects them; OpenKruise accepts them in
/// annotations of v1alpha1.
fn pre_download_warnings(set: &Value) -> Vec<String> {
    let in_place = &set["spec"]["updateStrategy"]["rollingUpdate"]["inPlaceUpdateStrategy"];
    // An annotation with a value that no field can have is not in the spec.
    let value_of = |field: &str, key: &str| match &in_place[field] {
        Value::Null => set["metadata"]["annotations"][key].clone(),
        value => value.clone(),
    };
    let allows_percentage = |key: &str| key == keys::IMAGE_PRE_DOWNLOAD_MIN_UPDATED_READY_PODS;
    let is_number = |key: &str, value: &Value| match value {
        Value::Null => true,
        Value::String(text) => {
            let share = text.strip_suffix('%').filter(|_| allows_percentage(key));
            share.unwrap_or(text).parse::<u32>().is_ok()
        }
        value => value.as_u64().is_some(),
    };
    let values = keys::PRE_DOWNLOAD.map(|(field, key)| (field, key, value_of(field, key)));
    let invalid = values
        .into_iter()
        .filter(|(_, key, value)| !is_number(key, value));
    invalid.map(|(field, key, value)| {
        let share = if allows_percentage(key) {
            "; a percentage, such as 20%, as that annotation in any version"
        } else {
            ""
        };
        let value = value.to_string();
        let value = truncate(&value, MAX_VALUE_CHARS);
        format!(
            "{field} is {value}, so images may not be pulled ahead; give a number, 0 or greater (in v1alpha1 as \
             annotation {key}{share})"
        )
    })
    .collect()
}

fn pods_to_delete(object: &Value) -> impl Iterator<Item = &str> {
    let names = object["spec"]["scaleStrategy"]["podsToDelete"].as_array();
    names.into_iter().flatten().filter_map(Value::as_str)
}

/// Names that the request adds to `podsToDelete`.
pub(super) fn added_pods_to_delete(request: &Request) -> Vec<&str> {
    let previous: HashSet<&str> = request.old.iter().flat_map(|old| pods_to_delete(old)).collect();
    pods_to_delete(&request.object)
        .filter(|name| !previous.contains(name))
        .collect()
}

/// Whether the CloneSet controls a Pod that is not terminating.
pub(super) fn is_controlled_by(set: &Owner, pod: &PodOwnership) -> bool {
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    pod.metadata.deletion_timestamp.is_none() && Owner::controller_in(owners).as_ref() == Some(set)
}

/// The fields of a Pod that identify its owner.
#[derive(Debug, Default, Deserialize)]
pub(super) struct PodOwnership {
    metadata: PodOwnershipMetadata,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PodOwnershipMetadata {
    deletion_timestamp: Option<IgnoredAny>,
    owner_references: Option<Vec<OwnerReference>>,
}

/// Whether an update never recreates Pods.
pub(super) fn is_in_place_only(object: &Value) -> bool {
    object["spec"]["updateStrategy"]["rollingUpdate"]["podUpdatePolicy"] == "InPlaceOnly"
}

/// Maximum length of a list in a Pod template that is compared with another list.
const MAX_LIST_ITEMS: usize = 1000;

/// Rejects lists that are longer than those of any Pod, because validating them would take long.
pub(super) fn reject_oversized(object: &Value) -> Option<Decision> {
    let (spec, mut errors) = (&object["spec"], FieldErrors::default());
    let mut check_length = |field: &str, list: &Value| {
        let length = list.as_array().map_or(0, Vec::len);
        if length > MAX_LIST_ITEMS {
            errors.too_many(field, length, MAX_LIST_ITEMS);
        }
    };
    for field in ["containers", "initContainers", "volumes"] {
        check_length(
            &format!("spec.template.spec.{field}"),
            &spec["template"]["spec"][field],
        );
    }
    check_length("spec.volumeClaimTemplates", &spec["volumeClaimTemplates"]);
    // In v1alpha1 this is an annotation, for which there might be no space.
    let in_place = &spec["updateStrategy"]["rollingUpdate"]["inPlaceUpdateStrategy"];
    let parallelism = in_place["imagePreDownloadParallelism"]
        .as_str()
        .unwrap_or_default();
    if parallelism.chars().nth(MAX_INT_OR_STRING_CHARS).is_some() {
        errors.push(format!(
            "spec.updateStrategy.rollingUpdate.inPlaceUpdateStrategy.imagePreDownloadParallelism: Too long: may not be \
             more than {MAX_INT_OR_STRING_CHARS} characters"
        ));
    }
    (!errors.is_empty()).then(|| Decision::from_errors(errors, Value::Null, Vec::new()))
}

/// Maximum number of changes in a message: each repeats all keys of its path, which may be as long as an object.
const MAX_LISTED: usize = 8;

/// The first changes of a Pod's spec that a running Pod cannot take, as JSON pointers.
fn immutable_changes(baseline: &InPlaceBaseline, after: &Value) -> Vec<String> {
    let [old, new] = [&baseline.template, after].map(|template| normalize(template, baseline.stored));
    let mut changes = Vec::new();
    visit_changes(&old["spec"], &new["spec"], &mut |path, replaced| {
        let is_mutable = replaced && is_mutable(path, baseline.vertical_scaling);
        if !is_mutable && changes.len() < MAX_LISTED {
            changes.push(PointerBuf::from_tokens(path.iter().map(AsRef::<str>::as_ref)).to_string());
        }
    });
    changes
}

#[cfg(test)]
mod tests;

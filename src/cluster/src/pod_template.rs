//! Pod templates and claim templates as they are stored: with defaults, or refused with the API server's message.
//!
//! Neither its rules nor its defaults are copied here: a `PodTemplate` is created in a dry run, and the API server's
//! result is read back, without what OpenKruise would not have stored. Claim templates are sent in it as ephemeral
//! volumes, which have the same spec: so defaults of the cluster, such as its storage class, do not get in, as they
//! would with a claim.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::PodTemplate;
use kube::Api;
use kube::core::Status;
use serde_json::{Value, json};

use super::{Cluster, Error, write};
use by_name::ByName;
use kruise_api::json::set;

mod by_name;
pub mod defaulting;
mod dropped;

pub use defaulting::Defaulting;
use dropped::collect_dropped_fields;
pub use dropped::dropped_fields;

/// A Pod template and the claim templates that belong to it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Templates {
    /// A `PodTemplateSpec`.
    pub template: Value,
    /// `PersistentVolumeClaim`s.
    pub claims: Vec<Value>,
    /// Labels of the workload that owns them, which policies for all kinds may require; null for none. They are in no
    /// response.
    pub labels: Value,
    /// Annotations of the workload, for the same reason.
    pub annotations: Value,
}

impl Templates {
    /// The templates of a workload's spec.
    #[must_use]
    pub fn from_workload_spec(spec: &Value) -> Self {
        Self {
            template: spec["template"].clone(),
            claims: spec["volumeClaimTemplates"]
                .as_array()
                .cloned()
                .unwrap_or_default(),
            ..Self::default()
        }
    }
}

/// The API server's result for templates.
#[derive(Clone, Debug, PartialEq)]
pub enum DryRunResult {
    /// They are valid.
    Valid {
        /// The templates to store.
        templates: Templates,
        /// Fields that the API server does not know, and that are lost.
        unknown_fields: Vec<String>,
        /// Items of lists that are not in its response, and that are stored as submitted: it drops volumes whose
        /// feature gate is off.
        dropped: Vec<String>,
    },
    /// They are invalid, in the API server's words: fields of an object that has the templates as `spec.template` and
    /// `spec.volumeClaimTemplates`, their values, and what is wrong with them.
    Invalid(String),
}

/// Validates the templates with the API server and gets its defaults, of which those that OpenKruise fills in are kept,
/// so that either manager computes the same revision of what the other one stored.
///
/// # Errors
/// When there is no result: the cluster cannot be reached, we lack the permission, or a quota prevents it.
pub async fn dry_run(
    cluster: &Cluster,
    namespace: &str,
    mut submitted: Templates,
    defaults: Defaulting,
) -> Result<DryRunResult, Error> {
    defaulting::fill_defaults(&mut submitted.template, defaults);
    let (text, origins) = build_request(&submitted);
    let api: Api<PodTemplate> = Api::namespaced(cluster.client.clone(), namespace);
    match write::create_dry_run(&api, text).await {
        Ok(answer) => Ok(apply_answer(&submitted, &origins, answer, defaults)),
        Err(Error::Api(status)) if is_template_error(&status) => Ok(DryRunResult::Invalid(error_message(
            &status, &submitted, &origins,
        ))),
        Err(Error::Api(mut status)) => {
            // The name is generated, not the user's.
            let name = status
                .details
                .as_ref()
                .map(|d| d.name.clone())
                .unwrap_or_default();
            if !name.is_empty() {
                status.message = status.message.replace(&name, "dry-run");
            }
            Err(Error::Api(status))
        }
        Err(why) => Err(why),
    }
}

/// Fields that the API server does not know, as it refuses them with `fieldValidation=Strict`: other lost fields belong
/// to features that are off.
///
/// # Errors
/// When there is no response.
pub async fn find_unknown_fields(
    cluster: &Cluster,
    namespace: &str,
    submitted: Templates,
) -> Result<Vec<String>, Error> {
    let (text, origins) = build_request(&submitted);
    drop(submitted);
    let api: Api<PodTemplate> = Api::namespaced(cluster.client.clone(), namespace);
    match write::create_dry_run_strict(&api, text).await {
        Err(Error::Api(status)) => Ok(parse_unknown_fields(&status.message, &origins)),
        Err(why) => Err(why),
        Ok(_) => Ok(Vec::new()),
    }
}

/// The object to create in a dry run. A template may be large: only the text is kept while waiting for the response.
fn build_request(submitted: &Templates) -> (String, Vec<VolumeOrigin>) {
    let (body, origins) = build_pod_template(submitted);
    (body.to_string(), origins)
}

/// The fields that a strict decoding error names, as paths of the user's object.
fn parse_unknown_fields(message: &str, origins: &[VolumeOrigin]) -> Vec<String> {
    let named = message.split("unknown field \"").skip(1);
    let fields = named.filter_map(|rest| rest.split_once('"'));
    fields.map(|(field, _)| user_field_path(field, origins)).collect()
}

/// The templates without the API server's defaults, for a dry run that is refused for a reason other than the
/// templates.
#[must_use]
pub fn without_dry_run(mut submitted: Templates, defaults: Defaulting) -> Templates {
    defaulting::fill_defaults(&mut submitted.template, defaults);
    defaulting::quantities_to_strings(&mut submitted.template);
    submitted
}

/// Origin of a volume of the dry-run object, by its index there.
#[derive(Clone, Copy, Debug, PartialEq)]
enum VolumeOrigin {
    /// The template's own volume of this index.
    Template(usize),
    /// The claim template of this index.
    Claim(usize),
}

/// The object to create in a dry run, and the origins of its volumes: all of the template's own except those with the
/// name of a claim template, which replaces them in a Pod. The claims follow, and images come last.
fn build_pod_template(templates: &Templates) -> (Value, Vec<VolumeOrigin>) {
    let mut template = templates.template.clone();
    let own = take_volumes(&mut template);
    let same_name = |volume: &Value, claim: &Value| volume["name"] == claim["metadata"]["name"];
    let replaced_by_claim = |volume: &Value| templates.claims.iter().any(|claim| same_name(volume, claim));
    let own = own
        .into_iter()
        .enumerate()
        .filter(|(_, volume)| !replaced_by_claim(volume));
    let own = own.map(|(at, volume)| (VolumeOrigin::Template(at), volume));
    let (images, others): (Vec<_>, Vec<_>) = own.partition(|(_, volume)| is_image(volume));
    let claims = templates.claims.iter().enumerate().map(|(at, claim)| {
        let metadata = &claim["metadata"];
        let volume = json!({
            "name": metadata["name"],
            "ephemeral": { "volumeClaimTemplate": {
                "metadata": { "labels": metadata["labels"], "annotations": metadata["annotations"] },
                "spec": claim["spec"],
            } },
        });
        (VolumeOrigin::Claim(at), volume)
    });
    let all = others.into_iter().chain(claims).chain(images);
    let (origins, all): (Vec<VolumeOrigin>, Vec<Value>) = all.unzip();
    if !all.is_empty() && template["spec"].is_object() {
        set(&mut template, &["spec", "volumes"], all.into());
    }
    let mut object = json!({
        "apiVersion": "v1",
        "kind": "PodTemplate",
        "metadata": { "generateName": "dry-run-", "labels": templates.labels },
    });
    let mut annotations = templates.annotations.clone();
    if let Some(annotations) = annotations.as_object_mut() {
        // As large as all the rest, and no policy checks it.
        annotations.remove("kubectl.kubernetes.io/last-applied-configuration");
    }
    set(&mut object, &["metadata", "annotations"], annotations);
    // The macro would copy it.
    set(&mut object, &["template"], template);
    (object, origins)
}

/// Whether the API server found an error in the template itself: a field that is invalid, or that it cannot read.
/// Webhooks, policies and quotas refuse with the same codes, and may refuse the dry-run object for what a Pod has.
fn is_template_error(status: &Status) -> bool {
    let causes = status.details.as_ref().map(|details| details.causes.as_slice());
    let causes = causes.unwrap_or_default();
    match status.code {
        400 => status.reason == "BadRequest" && !status.message.contains("denied the request"),
        422 => {
            let in_template = |field: &str| field == "template" || field.starts_with("template.");
            !causes.is_empty() && causes.iter().all(|cause| in_template(&cause.field))
        }
        _ => false,
    }
}

/// Removes the volumes from a template.
fn take_volumes(template: &mut Value) -> Vec<Value> {
    let spec = template.get_mut("spec").and_then(Value::as_object_mut);
    match spec.and_then(|spec| spec.remove("volumes")) {
        Some(Value::Array(volumes)) => volumes,
        _ => Vec::new(),
    }
}

fn apply_answer(
    submitted: &Templates,
    origins: &[VolumeOrigin],
    mut answer: Value,
    defaults: Defaulting,
) -> DryRunResult {
    let mut template = answer.get_mut("template").map(Value::take).unwrap_or_default();
    let mut all = ByName::from_items(take_volumes(&mut template));
    let (mut claims, mut dropped) = (submitted.claims.clone(), Vec::new());
    for (at, claim) in claims.iter_mut().enumerate() {
        let mut volume = all.take_matching(&claim["metadata"]).unwrap_or_default();
        let spec = volume.pointer_mut("/ephemeral/volumeClaimTemplate/spec");
        let Some(mut spec) = spec.map(Value::take) else {
            dropped.push(format!("spec.volumeClaimTemplates[{at}]"));
            continue;
        };
        defaulting::remove_extra_claim_defaults(&claim["spec"], &mut spec, defaults);
        set(claim, &["spec"], spec);
    }
    // The others were not sent.
    let sent_volumes: BTreeSet<usize> = origins
        .iter()
        .filter_map(|origin| match origin {
            VolumeOrigin::Template(at) => Some(*at),
            VolumeOrigin::Claim(_) => None,
        })
        .collect();
    let own = submitted.template["spec"]["volumes"]
        .as_array()
        .into_iter()
        .flatten();
    let others = own.enumerate().filter(|(at, _)| !sent_volumes.contains(at));
    all.add(others.map(|(_, volume)| volume.clone()));
    let all = all.into_items();
    if !all.is_empty() {
        set(&mut template, &["spec", "volumes"], all.into());
    }
    by_name::restore_lists(&submitted.template, &mut template, &mut dropped);
    defaulting::remove_extra_defaults(&submitted.template, &mut template, defaults);
    let mut unknown = dropped_fields(&submitted.template, &template);
    for (at, (before, after)) in submitted.claims.iter().zip(&claims).enumerate() {
        collect_dropped_fields(
            before,
            after,
            &format!("spec.volumeClaimTemplates[{at}]"),
            &mut unknown,
        );
    }
    DryRunResult::Valid {
        templates: Templates {
            template,
            claims,
            ..Templates::default()
        },
        unknown_fields: unknown,
        dropped,
    }
}

/// The error message, with field paths of the user's object.
fn error_message(status: &Status, submitted: &Templates, origins: &[VolumeOrigin]) -> String {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    let causes: Vec<_> = causes
        .map(|cause| format!("{}: {}", user_field_path(&cause.field, origins), cause.message))
        .collect();
    match causes.is_empty() {
        true => decode_error_message(&status.message, submitted),
        false => causes.join("; "),
    }
}

/// Why the object cannot be decoded: with types of fields, without indexes, and claims are volumes in it.
fn decode_error_message(message: &str, submitted: &Templates) -> String {
    // Some releases name what is embedded in a type.
    const CLAIMS: [&str; 2] = [
        "template.spec.volumes.VolumeSource.ephemeral.volumeClaimTemplate.",
        "template.spec.volumes.ephemeral.volumeClaimTemplate.",
    ];
    const NAME: &str = "template.spec.volumes.name ";
    let own = submitted.template["spec"]["volumes"].as_array();
    let own = own.map_or(&[][..], Vec::as_slice);
    let none = |wrong: fn(&Value) -> bool| !own.iter().any(wrong);
    let claims = CLAIMS.iter().find(|claims| message.contains(**claims));
    let renamed = match claims {
        Some(claims) if none(|volume| !volume["ephemeral"].is_null()) => {
            Some(message.replace(claims, "volumeClaimTemplates."))
        }
        None if message.contains(NAME)
            && none(|volume| !(volume["name"].is_string() || volume["name"].is_null())) =>
        {
            Some(message.replace(NAME, "volumeClaimTemplates.metadata.name "))
        }
        _ => None,
    };
    match renamed {
        Some(message) => format!("spec.volumeClaimTemplates: {message}"),
        None => format!("spec.template: {message}"),
    }
}

/// The user's path of a field of the `PodTemplate`.
fn user_field_path(field: &str, origins: &[VolumeOrigin]) -> String {
    const VOLUMES: &str = "template.spec.volumes[";
    let inside = field.strip_prefix(VOLUMES).and_then(|rest| rest.split_once(']'));
    let Some((at, rest)) = inside.and_then(|(at, rest)| Some((at.parse::<usize>().ok()?, rest))) else {
        return format!("spec.{field}");
    };
    match origins.get(at) {
        Some(VolumeOrigin::Template(own)) => format!("spec.{VOLUMES}{own}]{rest}"),
        Some(VolumeOrigin::Claim(claim)) => {
            let rest = match rest.strip_prefix(".ephemeral.volumeClaimTemplate") {
                Some(rest) => rest.to_owned(),
                None => rest.replacen(".name", ".metadata.name", 1),
            };
            format!("spec.volumeClaimTemplates[{claim}]{rest}")
        }
        None => format!("spec.{field}"),
    }
}

/// Whether a volume is an image: an API server without image volumes removes these, and counts only the others.
fn is_image(volume: &Value) -> bool {
    !volume["image"].is_null()
}

#[cfg(test)]
mod tests;

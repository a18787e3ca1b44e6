//! Pod templates and claim templates as they are stored: with defaults, or refused in the API server's words.
//!
//! Neither its rules nor its defaults are copied here: a `PodTemplate` is made in a dry run, and what the API
//! server makes of it is read back, without what OpenKruise would not have stored. Claim templates ride in it as
//! ephemeral volumes, which have the same spec: so defaults of the cluster, such as its storage class, do not get
//! in, as they would with a claim.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::PodTemplate;
use kube::Api;
use kube::core::Status;
use serde_json::{Value, json};

use super::{Cluster, Error, write};
use by_name::ByName;
use kruise_api::json::set;
use kruise_ops::{Gate, Gates};

mod by_name;
pub mod stored;

/// A Pod template and the claim templates that belong to it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Templates {
    /// A `PodTemplateSpec`.
    pub template: Value,
    /// `PersistentVolumeClaim`s.
    pub claims: Vec<Value>,
    /// Labels of the workload that they are of, which policies for all kinds may ask for; null for none. They are in no
    /// answer.
    pub labels: Value,
    /// Its annotations, for the same reason.
    pub annotations: Value,
}

impl Templates {
    /// Those of a workload's spec.
    #[must_use]
    pub fn of(spec: &Value) -> Self {
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

/// What the API server says to templates.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// They are good.
    Good {
        /// The templates as they are to be stored.
        templates: Templates,
        /// Fields that the API server does not know, and that are gone.
        unknown: Vec<String>,
        /// Items of lists that are not in its answer, and that are stored as they were asked for: it drops volumes whose
        /// feature gate is off.
        dropped: Vec<String>,
    },
    /// They are not, in the API server's words: fields of an object that has the templates as `spec.template`
    /// and `spec.volumeClaimTemplates`, their values, and what is wrong with them.
    Bad(String),
}

/// Which defaults templates are stored with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Defaults {
    /// Whether there are none (gate `TemplateNoDefaults`).
    pub none: bool,
    /// Whether ports of a Pod on the host's network are ports of the host (gate
    /// `DefaultHostNetworkHostPortsInPodTemplates`).
    pub host_ports: bool,
}

impl Defaults {
    /// As the feature gates say.
    #[must_use]
    pub fn of(gates: &Gates) -> Self {
        Self {
            none: gates.on(Gate::TemplateNoDefaults),
            host_ports: gates.on(Gate::DefaultHostNetworkHostPortsInPodTemplates),
        }
    }
}

/// Asks the API server for its opinion and its defaults, of which those are kept that OpenKruise fills in, so that
/// either manager makes the same revision of what the other one stored.
///
/// # Errors
/// When there is no answer: the cluster cannot be reached, or we may not ask, or a quota is in the way.
pub async fn ask(
    cluster: &Cluster,
    namespace: &str,
    mut asked: Templates,
    defaults: Defaults,
) -> Result<Answer, Error> {
    stored::prepare(&mut asked.template, defaults);
    let (body, origins) = as_text(&asked);
    let api: Api<PodTemplate> = Api::namespaced(cluster.client.clone(), namespace);
    match write::dry_run(&api, body).await {
        Ok(answer) => Ok(read_back(&asked, &origins, answer, defaults)),
        Err(Error::Api(status)) if is_mistake(&status) => {
            Ok(Answer::Bad(in_words(&status, &asked, &origins)))
        }
        Err(Error::Api(mut status)) => {
            // The name is another each time, and not the user's.
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

/// Fields that the API server does not know, as it refuses them itself where `fieldValidation=Strict` is asked for: of
/// those that are lost others belong to features that are off.
///
/// # Errors
/// When there is no answer.
pub async fn misspelled(cluster: &Cluster, namespace: &str, asked: Templates) -> Result<Vec<String>, Error> {
    let (body, origins) = as_text(&asked);
    drop(asked);
    let api: Api<PodTemplate> = Api::namespaced(cluster.client.clone(), namespace);
    match write::dry_run_strict(&api, body).await {
        Err(Error::Api(status)) => Ok(unknown_fields(&status.message, &origins)),
        Err(why) => Err(why),
        Ok(_) => Ok(Vec::new()),
    }
}

/// The object to make in a dry run. A template may be large: no more of it is kept while the answer is waited for.
fn as_text(asked: &Templates) -> (String, Vec<Origin>) {
    let (body, origins) = body(asked);
    (body.to_string(), origins)
}

/// The fields that a strict decoding error names, where the user has them.
fn unknown_fields(message: &str, origins: &[Origin]) -> Vec<String> {
    let named = message.split("unknown field \"").skip(1);
    let fields = named.filter_map(|rest| rest.split_once('"'));
    fields.map(|(field, _)| place(field, origins)).collect()
}

/// The templates without the API server's opinion, where it is refused for something else than the templates.
#[must_use]
pub fn unchecked(mut asked: Templates, defaults: Defaults) -> Templates {
    stored::prepare(&mut asked.template, defaults);
    stored::quantities_as_text(&mut asked.template);
    asked
}

/// Where a volume of the object of a dry run comes from, by its place there.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Origin {
    /// The one of this index among the template's own.
    Own(usize),
    /// The claim template of this index.
    Claim(usize),
}

/// The object to make in a dry run, and where its volumes come from: all of the template's own but those whose names claim
/// templates have, which take their places in a Pod. The claims follow, and images come last.
fn body(templates: &Templates) -> (Value, Vec<Origin>) {
    let mut template = templates.template.clone();
    let own = volumes(&mut template);
    let name = |volume: &Value, of: &Value| volume["name"] == of["metadata"]["name"];
    let claimed = |volume: &Value| templates.claims.iter().any(|claim| name(volume, claim));
    let own = own.into_iter().enumerate().filter(|(_, volume)| !claimed(volume));
    let own = own.map(|(at, volume)| (Origin::Own(at), volume));
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
        (Origin::Claim(at), volume)
    });
    let all = others.into_iter().chain(claims).chain(images);
    let (origins, all): (Vec<Origin>, Vec<Value>) = all.unzip();
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
        // As large as all the rest, and no policy asks for it.
        annotations.remove("kubectl.kubernetes.io/last-applied-configuration");
    }
    set(&mut object, &["metadata", "annotations"], annotations);
    // The macro would make a copy.
    set(&mut object, &["template"], template);
    (object, origins)
}

/// Whether the API server found something wrong with the template itself: a field that is invalid, or that it cannot
/// read. Webhooks, policies and quotas refuse with the same codes, and may refuse the object that is made in the dry run
/// for what a Pod has.
fn is_mistake(status: &Status) -> bool {
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

/// Takes the volumes out of a template.
fn volumes(template: &mut Value) -> Vec<Value> {
    let spec = template.get_mut("spec").and_then(Value::as_object_mut);
    match spec.and_then(|spec| spec.remove("volumes")) {
        Some(Value::Array(volumes)) => volumes,
        _ => Vec::new(),
    }
}

fn read_back(asked: &Templates, origins: &[Origin], mut answer: Value, defaults: Defaults) -> Answer {
    let mut template = answer.get_mut("template").map(Value::take).unwrap_or_default();
    let mut all = ByName::of(volumes(&mut template));
    let (mut claims, mut dropped) = (asked.claims.clone(), Vec::new());
    for (at, claim) in claims.iter_mut().enumerate() {
        let mut volume = all.take(&claim["metadata"]).unwrap_or_default();
        let spec = volume.pointer_mut("/ephemeral/volumeClaimTemplate/spec");
        let Some(mut spec) = spec.map(Value::take) else {
            dropped.push(format!("spec.volumeClaimTemplates[{at}]"));
            continue;
        };
        stored::claim(&claim["spec"], &mut spec, defaults);
        set(claim, &["spec"], spec);
    }
    // The others were not in the question.
    let asked_about: BTreeSet<usize> = origins
        .iter()
        .filter_map(|origin| match origin {
            Origin::Own(at) => Some(*at),
            Origin::Claim(_) => None,
        })
        .collect();
    let own = asked.template["spec"]["volumes"].as_array().into_iter().flatten();
    let others = own.enumerate().filter(|(at, _)| !asked_about.contains(at));
    all.add(others.map(|(_, volume)| volume.clone()));
    let all = all.into_items();
    if !all.is_empty() {
        set(&mut template, &["spec", "volumes"], all.into());
    }
    by_name::lists_as_asked(&asked.template, &mut template, &mut dropped);
    stored::template(&asked.template, &mut template, defaults);
    let mut unknown = lost(&asked.template, &template);
    for (at, (before, after)) in asked.claims.iter().zip(&claims).enumerate() {
        gone(
            before,
            after,
            &format!("spec.volumeClaimTemplates[{at}]"),
            &mut unknown,
        );
    }
    Answer::Good {
        templates: Templates {
            template,
            claims,
            ..Templates::default()
        },
        unknown,
        dropped,
    }
}

/// Fields that say something in `before` and are not in `after`.
#[must_use]
pub fn lost(before: &Value, after: &Value) -> Vec<String> {
    let mut found = Vec::new();
    gone(before, after, "spec.template", &mut found);
    found
}

/// Fields that were said and are not there any more.
fn gone(before: &Value, after: &Value, path: &str, found: &mut Vec<String>) {
    match (before, after) {
        (Value::Object(before), Value::Object(after)) => {
            for (key, value) in before.iter().filter(|(_, value)| says_something(value)) {
                let path = format!("{path}.{key}");
                match after.get(key) {
                    Some(after) => gone(value, after, &path, found),
                    None => found.push(path),
                }
            }
        }
        (Value::Array(before), Value::Array(after)) => {
            for (at, (before, after)) in before.iter().zip(after).enumerate() {
                gone(before, after, &format!("{path}[{at}]"), found);
            }
        }
        _ => {}
    }
}

/// Go leaves out what is null, empty, zero or false.
fn says_something(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => fields.values().any(says_something),
        Value::Bool(true) => true,
    }
}

/// What is wrong, with the fields where the user has them.
fn in_words(status: &Status, asked: &Templates, origins: &[Origin]) -> String {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    let causes: Vec<_> = causes
        .map(|cause| format!("{}: {}", place(&cause.field, origins), cause.message))
        .collect();
    match causes.is_empty() {
        true => undecodable(&status.message, asked),
        false => causes.join("; "),
    }
}

/// Why an object of that form is none: with types of fields, without indexes, and claims are volumes in it.
fn undecodable(message: &str, asked: &Templates) -> String {
    // Some releases name what is embedded in a type.
    const CLAIMS: [&str; 2] = [
        "template.spec.volumes.VolumeSource.ephemeral.volumeClaimTemplate.",
        "template.spec.volumes.ephemeral.volumeClaimTemplate.",
    ];
    const NAME: &str = "template.spec.volumes.name ";
    let own = asked.template["spec"]["volumes"].as_array();
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

/// Where a field of the `PodTemplate` comes from.
fn place(field: &str, origins: &[Origin]) -> String {
    const VOLUMES: &str = "template.spec.volumes[";
    let inside = field.strip_prefix(VOLUMES).and_then(|rest| rest.split_once(']'));
    let Some((at, rest)) = inside.and_then(|(at, rest)| Some((at.parse::<usize>().ok()?, rest))) else {
        return format!("spec.{field}");
    };
    match origins.get(at) {
        Some(Origin::Own(own)) => format!("spec.{VOLUMES}{own}]{rest}"),
        Some(Origin::Claim(claim)) => {
            let rest = match rest.strip_prefix(".ephemeral.volumeClaimTemplate") {
                Some(rest) => rest.to_owned(),
                None => rest.replacen(".name", ".metadata.name", 1),
            };
            format!("spec.volumeClaimTemplates[{claim}]{rest}")
        }
        None => format!("spec.{field}"),
    }
}

/// Whether a volume is an image: the API server takes these out where it has none, and counts the others.
fn is_image(volume: &Value) -> bool {
    !volume["image"].is_null()
}

#[cfg(test)]
mod tests;

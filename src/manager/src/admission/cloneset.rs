//! CloneSet: has the API server fill in and check the templates, and checks what CEL cannot.
//!
//! None of it is needed for a CloneSet to work: the manager asks for defaults itself where nobody did, and acts
//! on no CloneSet that has errors by [`validate`].

use std::borrow::Cow;
use std::collections::HashSet;

use json_patch::jsonptr::PointerBuf;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::known_fields::KnownFields;
use super::review::{Decision, Request};
use kruise_api::json::set;
use kruise_api::keys;
use kruise_api::schemas::LONGEST_INT_OR_STRING;
use kruise_api::validation::clone_set::{hooks, launch_priorities, no_room, validate};
use kruise_api::validation::{FieldErrors, LONGEST_FIELD, LONGEST_VALUE, cut};
use kruise_cluster as cluster;
use kruise_cluster::pod_template::{Answer, Templates};
use kruise_workload::in_place::normal::{Stored, normal};

/// The templates, if they are to have defaults: they are new, or other than before. That there is none is for
/// the API server to say.
pub(super) fn new_templates(asked: &Request) -> Option<Templates> {
    let spec = &asked.object["spec"];
    let same = |old: &Value| old["template"] == spec["template"] && claims(old) == claims(spec);
    let known = asked.old.as_ref().is_some_and(|old| same(&old["spec"]));
    (!known && spec["template"].is_object()).then(|| Templates::of(spec))
}

fn claims(spec: &Value) -> &[Value] {
    spec["volumeClaimTemplates"].as_array().map_or(&[], Vec::as_slice)
}

/// Gives the templates their defaults, or says what the API server finds wrong with them.
pub(super) fn fill_in(asked: &Request, answer: Option<Result<Answer, cluster::Error>>) -> Decision {
    let mut object = asked.object.to_json();
    let mut warnings = Vec::new();
    match answer {
        None => {}
        Some(Ok(Answer::Bad(why))) => return Decision::Deny { code: 422, why },
        Some(Ok(Answer::Good {
            templates,
            unknown,
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
            warnings.extend(unknown.iter().take(TOLD).map(|field| {
                format!(
                    "unknown field \"{}\" is left out; look for a misspelling",
                    cut(field, LONGEST_FIELD)
                )
            }));
            warnings.extend(dropped.iter().take(TOLD).map(|item| {
                format!(
                    "{} is stored, but the API server drops it, so Pods may be without it; its feature gate may be off",
                    cut(item, LONGEST_FIELD)
                )
            }));
        }
        Some(Err(why)) => warnings.push(format!(
            "the Pod template could not be checked now, and will be when it is used: {why}"
        )),
    }
    Decision::Allow { object, warnings }
}

/// What is refused where unknown fields are to be, in the API server's words: those that are new.
pub(super) fn strictly(known: &KnownFields, unknown: &[String]) -> Option<String> {
    let new = known.new_among(unknown);
    let fields = new.iter().take(TOLD);
    let fields: Vec<_> = fields
        .map(|field| format!("unknown field \"{}\"", cut(field, LONGEST_FIELD)))
        .collect();
    (!fields.is_empty()).then(|| format!("strict decoding error: {}", fields.join(", ")))
}

/// What an update replaces where Pods must stay, and which changes they can take.
#[derive(Debug)]
pub(super) struct Before {
    /// The template.
    pub template: Value,
    /// How templates are stored (gate `TemplateNoDefaults`).
    pub stored: Stored,
    /// Whether CPU and memory are resized in place (gate `InPlaceWorkloadVerticalScaling`).
    pub vertical: bool,
}

/// Checks the object; `no_pods` are names newly in `podsToDelete` that no Pod of the CloneSet has.
pub(super) fn check(asked: &Request, no_pods: &[String], before: Option<&Before>) -> Decision {
    let spec = &asked.object["spec"];
    let mut errors = FieldErrors::default();
    let all = |spec: &Value| {
        let others = [
            no_room(spec),
            hooks(&spec["lifecycle"]),
            launch_priorities(&spec["template"]),
        ];
        [validate(spec), others.concat()].concat()
    };
    let known = asked.old.as_ref().map(|old| all(&old["spec"]));
    let known = known.unwrap_or_default();
    for mistake in all(spec) {
        // What is stored already is older than this check.
        if !known.contains(&mistake) {
            errors.push(mistake);
        }
    }
    if let Some(before) = before {
        let sizes = if before.vertical { " cpu and memory," } else { "" };
        for field in needs_new_pod(before, &spec["template"]) {
            let field = cut(&field, LONGEST_FIELD);
            errors.push(format!(
                "spec.template.spec{field}: Forbidden: a Pod cannot be changed in this, and InPlaceOnly makes no \
                 new ones; change images,{sizes} labels and annotations only, or set \
                 podUpdatePolicy to InPlaceIfPossible"
            ));
        }
    }
    let mut warnings = pre_download(&asked.object);
    for name in no_pods {
        let why = "there is no such Pod of this CloneSet; take the name off the list";
        if asked.version == "v1alpha1" {
            errors.add("spec.scaleStrategy.podsToDelete", &json!(name), why);
        } else {
            warnings.push(format!("spec.scaleStrategy.podsToDelete: {name:?}: {why}"));
        }
    }
    Decision::of(errors, asked.object.to_json(), warnings)
}

/// Words about pre-download fields that nothing can be done with. In v1beta1 the schema refuses them; what comes
/// from annotations of v1alpha1 OpenKruise lets pass.
fn pre_download(set: &Value) -> Vec<String> {
    let in_place = &set["spec"]["updateStrategy"]["rollingUpdate"]["inPlaceUpdateStrategy"];
    // An annotation that no field can hold is not in the spec.
    let said = |field: &str, key: &str| match &in_place[field] {
        Value::Null => set["metadata"]["annotations"][key].clone(),
        value => value.clone(),
    };
    let may_be_share = |key: &str| key == keys::IMAGE_PRE_DOWNLOAD_MIN_UPDATED_READY_PODS;
    let number = |key: &str, value: &Value| match value {
        Value::Null => true,
        Value::String(text) => {
            let share = text.strip_suffix('%').filter(|_| may_be_share(key));
            share.unwrap_or(text).parse::<u32>().is_ok()
        }
        value => value.as_u64().is_some(),
    };
    let said = keys::PRE_DOWNLOAD.map(|(field, key)| (field, key, said(field, key)));
    let bad = said.into_iter().filter(|(_, key, value)| !number(key, value));
    bad.map(|(field, key, value)| {
        let share = if may_be_share(key) {
            "; a percentage, such as 20%, as that annotation in any version"
        } else {
            ""
        };
        let value = value.to_string();
        let value = cut(&value, LONGEST_VALUE);
        format!(
            "{field} is {value}, so images may not be pulled ahead; give a number, 0 or greater (in v1alpha1 as \
             annotation {key}{share})"
        )
    })
    .collect()
}

fn to_delete(object: &Value) -> impl Iterator<Item = &str> {
    let names = object["spec"]["scaleStrategy"]["podsToDelete"].as_array();
    names.into_iter().flatten().filter_map(Value::as_str)
}

/// Names that the request adds to `podsToDelete`.
pub(super) fn newly_to_delete(asked: &Request) -> Vec<&str> {
    let before: HashSet<&str> = asked.old.iter().flat_map(|old| to_delete(old)).collect();
    to_delete(&asked.object)
        .filter(|name| !before.contains(name))
        .collect()
}

/// Whether a Pod that is not going already is controlled by the CloneSet with this UID.
pub(super) fn owns(uid: &str, pod: &Owned) -> bool {
    let owners = pod.metadata.owner_references.iter().flatten();
    let mut controllers = owners.filter(|owner| owner.controller == Some(true));
    pod.metadata.deletion_timestamp.is_none() && controllers.any(|owner| owner.uid == uid)
}

/// What is read of a Pod to know whose it is.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Owned {
    metadata: OwnedMetadata,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct OwnedMetadata {
    deletion_timestamp: Option<IgnoredAny>,
    owner_references: Option<Vec<Owner>>,
}

#[derive(Debug, Deserialize)]
struct Owner {
    uid: String,
    controller: Option<bool>,
}

/// Whether the Pods of a CloneSet are never replaced by an update.
pub(super) fn keeps_pods(object: &Value) -> bool {
    object["spec"]["updateStrategy"]["rollingUpdate"]["podUpdatePolicy"] == "InPlaceOnly"
}

/// Items in a list of a Pod template that is held against another list.
const MOST_ITEMS: usize = 1000;

/// Lists that are longer than any Pod's, by which each check of them would take long.
pub(super) fn too_long(object: &Value) -> Option<Decision> {
    let (spec, mut errors) = (&object["spec"], FieldErrors::default());
    let mut check = |field: &str, list: &Value| {
        let length = list.as_array().map_or(0, Vec::len);
        if length > MOST_ITEMS {
            errors.too_many(field, length, MOST_ITEMS);
        }
    };
    for field in ["containers", "initContainers", "volumes"] {
        check(
            &format!("spec.template.spec.{field}"),
            &spec["template"]["spec"][field],
        );
    }
    check("spec.volumeClaimTemplates", &spec["volumeClaimTemplates"]);
    // An annotation in v1alpha1, for which there might be no room.
    let in_place = &spec["updateStrategy"]["rollingUpdate"]["inPlaceUpdateStrategy"];
    let parallelism = in_place["imagePreDownloadParallelism"]
        .as_str()
        .unwrap_or_default();
    if parallelism.chars().nth(LONGEST_INT_OR_STRING).is_some() {
        errors.push(format!(
            "spec.updateStrategy.rollingUpdate.inPlaceUpdateStrategy.imagePreDownloadParallelism: Too long: may not be \
             more than {LONGEST_INT_OR_STRING} characters"
        ));
    }
    (!errors.is_empty()).then(|| Decision::of(errors, Value::Null, Vec::new()))
}

/// How many changes are told: each repeats all the keys around it, and these may be as long as an object.
const TOLD: usize = 8;

/// Changes of a Pod's spec that cannot be made in a Pod, the first few, as JSON pointers.
fn needs_new_pod(before: &Before, after: &Value) -> Vec<String> {
    let [old, new] = [&before.template, after].map(|template| normal(template, before.stored));
    let mut found = Vec::new();
    let (old, new) = (Some(&old["spec"]), Some(&new["spec"]));
    compare(old, new, before.vertical, &mut Vec::new(), &mut found);
    found
}

fn compare<'a>(
    before: Option<&'a Value>,
    after: Option<&'a Value>,
    vertical: bool,
    path: &mut Vec<Cow<'a, str>>,
    found: &mut Vec<String>,
) {
    let mut below = |key: Cow<'a, str>, before, after| {
        path.push(key);
        compare(before, after, vertical, path, found);
        path.pop();
    };
    match (before, after) {
        (Some(Value::Object(before)), Some(Value::Object(after))) => {
            let added = after.keys().filter(|key| !before.contains_key(*key));
            for key in before.keys().chain(added) {
                below(key.into(), before.get(key), after.get(key));
            }
        }
        (Some(Value::Array(before)), Some(Value::Array(after))) => {
            for at in 0..before.len().max(after.len()) {
                below(at.to_string().into(), before.get(at), after.get(at));
            }
        }
        (before, after) if before == after || found.len() == TOLD => {}
        (Some(_), Some(_)) if changes_in_place(path, vertical) => {}
        _ => found.push(PointerBuf::from_tokens(path.iter().map(AsRef::<str>::as_ref)).to_string()),
    }
}

/// Whether a field of a running Pod can be given another value.
fn changes_in_place(path: &[Cow<str>], vertical: bool) -> bool {
    let steps: Vec<&str> = path.iter().map(AsRef::as_ref).collect();
    match steps[..] {
        ["containers", _, "image"] => true,
        ["containers", _, "resources", of, what] if vertical => {
            ["limits", "requests"].contains(&of) && ["cpu", "memory"].contains(&what)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests;

//! Normal form of Pod templates for comparison: without defaults, aliases and fields that have no effect.
//!
//! OpenKruise stores a template with the defaults of `v1.SetDefaults_PodSpec` and `imagePullPolicy: Always`. The API
//! server's round trip adds more: the alias `serviceAccount`, defaults of volumes, `service: ""` of gRPC probes. With
//! gate `TemplateNoDefaults` there are no defaults. All of these are the same template and give the same Pods. But with
//! that gate a template without `imagePullPolicy` creates other Pods than one with `Always`.

use serde_json::{Map, Value, json};

use super::quantity;
use crate::core_defaults::{
    FieldDefault, env_sources, ephemeral_claim, fields, for_each_file, items, pull_policy, text,
    visit_container, visit_volume,
};

/// Maps whose entries count even if they are empty.
const KEPT_EMPTY_MAPS: [&str; 9] = [
    "labels",
    "annotations",
    "nodeSelector",
    "matchLabels",
    "volumeAttributes",
    "options",
    "limits",
    "requests",
    "overhead",
];
/// Other objects that have no effect if they are empty.
const DROPPED_EMPTY_OBJECTS: [&str; 3] = ["metadata", "resources", "securityContext"];
/// Fields that count as absent if they are false; in the others Go has a pointer.
const DEFAULT_FALSE: [&str; 7] = [
    "hostNetwork",
    "hostPID",
    "hostIPC",
    "stdin",
    "stdinOnce",
    "tty",
    "readOnly",
];
/// Fields that count as absent if they are 0; in the others Go has a pointer.
const DEFAULT_ZERO: [&str; 8] = [
    "hostPort",
    // Of iSCSI. For Fibre Channel it counts only with targetWWNs, which require it.
    "lun",
    "initialDelaySeconds",
    "timeoutSeconds",
    "periodSeconds",
    "successThreshold",
    "failureThreshold",
    "partition",
];
/// Fields in which an empty string differs from an absent one.
const KEPT_EMPTY_TEXTS: [&str; 3] = [
    "storageClassName",
    "volumeAttributesClassName",
    "hostnameOverride",
];

const MILLI: i128 = 1_000_000;

/// How templates are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TemplateStorage {
    /// With defaults, which include `imagePullPolicy: Always`.
    #[default]
    WithDefaults,
    /// As requested (gate `TemplateNoDefaults`). Pods without `imagePullPolicy` then get the API server's default,
    /// which depends on the image's tag.
    AsWritten,
}

impl TemplateStorage {
    /// The storage that the gate selects.
    #[must_use]
    pub fn from_gate(template_no_defaults: bool) -> Self {
        if template_no_defaults {
            Self::AsWritten
        } else {
            Self::WithDefaults
        }
    }
}

/// The normal form of a template, for comparison only. Containers and volumes keep their order.
#[must_use]
pub fn normalize(template: &Value, storage: TemplateStorage) -> Value {
    let mut normal = template.clone();
    if let Some(spec) = normal.get_mut("spec").and_then(Value::as_object_mut) {
        normalize_pod(spec, storage);
    }
    drop_empty(&mut normal);
    normal
}

/// Whether two templates create the same Pods.
#[must_use]
pub fn same_template(one: &Value, other: &Value, storage: TemplateStorage) -> bool {
    one == other || normalize(one, storage) == normalize(other, storage)
}

/// The template with the fields of `filled` that it lacks, if these are only defaults. `None` if there are no such
/// fields. Zero and empty values count as absent if Go has no pointer for them.
#[must_use]
pub fn with_defaults(template: &Value, filled: &Value) -> Option<Value> {
    let mut all = template.clone();
    add_missing(&mut all, filled);
    (all != *template && same_template(&all, template, TemplateStorage::WithDefaults)).then_some(all)
}

/// Adds the fields of `from` that `to` lacks.
fn add_missing(to: &mut Value, from: &Value) {
    match (to, from) {
        (Value::Object(to), Value::Object(from)) => {
            for (name, value) in from.iter().filter(|(_, value)| !value.is_null()) {
                match to
                    .get_mut(name)
                    .filter(|existing| !is_empty_field(name, existing))
                {
                    Some(existing) => add_missing(existing, value),
                    None => drop(to.insert(name.clone(), value.clone())),
                }
            }
        }
        (Value::Array(to), Value::Array(from)) if to.len() == from.len() => {
            to.iter_mut()
                .zip(from)
                .for_each(|(to, from)| add_missing(to, from));
        }
        _ => {}
    }
}

const POD: [FieldDefault; 3] = [
    text("dnsPolicy", "ClusterFirst"),
    text("restartPolicy", "Always"),
    text("schedulerName", "default-scheduler"),
];

fn normalize_pod(spec: &mut Map<String, Value>, storage: TemplateStorage) {
    drop_defaults(spec, &POD);
    drop_default(spec, "terminationGracePeriodSeconds", &json!(30));
    // The deprecated name counts only if the current one is absent.
    if let Some(alias) = spec.remove("serviceAccount") {
        let name = spec.entry("serviceAccountName").or_insert(Value::Null);
        if name.is_null() || *name == "" {
            *name = alias;
        }
    }
    let with_defaults = storage == TemplateStorage::WithDefaults;
    for each in items(spec, "containers") {
        normalize_container(each, with_defaults.then_some("Always"));
    }
    for each in items(spec, "initContainers") {
        let policy = pull_policy(each.get("image"));
        normalize_container(each, with_defaults.then_some(policy));
    }
    items(spec, "volumes").for_each(normalize_volume);
    normalize_quantities(spec, "overhead", MILLI);
    normalize_resources(spec);
}

/// `pull_policy` is stored for a container that has none.
fn normalize_container(container: &mut Value, pull_policy: Option<&'static str>) {
    let Some(container) = container.as_object_mut() else {
        return;
    };
    if let Some(policy) = pull_policy {
        drop_defaults(container, &[text("imagePullPolicy", policy)]);
    }
    visit_container(container, &mut |object, defaults, _| {
        drop_defaults(object, defaults)
    });
    env_sources(container).for_each(normalize_divisor);
    normalize_resources(container);
}

/// `resourceFieldRef`, as environment variables and files have it.
fn normalize_divisor(from: &mut Map<String, Value>) {
    if let Some(resource) = fields(from, "resourceFieldRef") {
        normalize_quantity_at(resource, "divisor");
        drop_default(resource, "divisor", &json!("0n"));
    }
}

fn normalize_resources(object: &mut Map<String, Value>) {
    if let Some(resources) = fields(object, "resources") {
        normalize_quantities(resources, "limits", MILLI);
        normalize_quantities(resources, "requests", MILLI);
    }
}

fn normalize_volume(volume: &mut Value) {
    let Some(volume) = volume.as_object_mut() else {
        return;
    };
    visit_volume(volume, &mut |object, defaults, _| drop_defaults(object, defaults));
    for_each_file(volume, &mut normalize_divisor);
    if let Some(claim) = ephemeral_claim(volume) {
        normalize_resources(claim);
    }
    if let Some(empty) = fields(volume, "emptyDir") {
        normalize_quantity_at(empty, "sizeLimit");
    }
    if let Some(empty) = volume.get_mut("emptyDir") {
        drop_empty(empty);
        // A volume without a source is an empty one.
        if *empty == json!({}) {
            volume.remove("emptyDir");
        }
    }
}

fn normalize_quantities(object: &mut Map<String, Value>, list: &str, step: i128) {
    for (_, value) in fields(object, list).into_iter().flatten() {
        normalize_quantity(value, step);
    }
}

fn normalize_quantity_at(object: &mut Map<String, Value>, field: &str) {
    if let Some(value) = object.get_mut(field) {
        normalize_quantity(value, 1);
    }
}

/// Writes a quantity in billionths, rounded up to a multiple of `step`: the API server keeps thousandths of resources.
fn normalize_quantity(value: &mut Value, step: i128) {
    let amount = match value {
        Value::String(text) => quantity::parse(text),
        Value::Number(number) => quantity::parse(&number.to_string()),
        _ => None,
    };
    if let Some(amount) = amount {
        let remainder = amount.rem_euclid(step);
        let rounded = if remainder == 0 {
            amount
        } else {
            amount.saturating_add(step - remainder)
        };
        *value = json!(format!("{rounded}n"));
    }
}

fn drop_defaults(object: &mut Map<String, Value>, defaults: &[FieldDefault]) {
    defaults.iter().for_each(|default| default.remove(object));
}

fn drop_default(object: &mut Map<String, Value>, field: &str, default: &Value) {
    if object.get(field) == Some(default) {
        object.remove(field);
    }
}

/// Removes empty values, innermost first.
fn drop_empty(value: &mut Value) {
    match value {
        Value::Object(all) => {
            for (name, inner) in all.iter_mut() {
                if !KEPT_EMPTY_MAPS.contains(&name.as_str()) {
                    drop_empty(inner);
                }
            }
            all.retain(|name, inner| !is_empty_field(name, inner));
        }
        Value::Array(all) => all.iter_mut().for_each(drop_empty),
        _ => {}
    }
}

fn is_empty_field(field: &str, value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value && DEFAULT_FALSE.contains(&field),
        Value::Number(value) => value.as_i64() == Some(0) && DEFAULT_ZERO.contains(&field),
        Value::String(text) => text.is_empty() && !KEPT_EMPTY_TEXTS.contains(&field),
        Value::Array(all) => all.is_empty(),
        Value::Object(all) => {
            all.is_empty() && (KEPT_EMPTY_MAPS.contains(&field) || DROPPED_EMPTY_OBJECTS.contains(&field))
        }
    }
}

#[cfg(test)]
mod tests;

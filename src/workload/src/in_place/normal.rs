//! Pod templates in the form in which they are compared: without what only says a default, an alias or nothing.
//!
//! OpenKruise stores a template with the defaults of `v1.SetDefaults_PodSpec` and `imagePullPolicy: Always`. The API
//! server's round trip adds more: the alias `serviceAccount`, defaults of volumes, `service: ""` of gRPC probes. With
//! gate `TemplateNoDefaults` there are none. All of these are the same template, and the same Pods; but with that gate a
//! template without `imagePullPolicy` makes other Pods than one that says `Always`.

use serde_json::{Map, Value, json};

use super::quantity;
use kruise_api::image_reference::Reference;

/// Maps whose entries say something even where they are empty.
const MAPS: [&str; 9] = [
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
/// Other objects that say nothing where they are empty.
const EMPTY: [&str; 3] = ["metadata", "resources", "securityContext"];
/// Fields that are as good as absent when they are false; elsewhere Go has a pointer.
const FALSE: [&str; 7] = [
    "hostNetwork",
    "hostPID",
    "hostIPC",
    "stdin",
    "stdinOnce",
    "tty",
    "readOnly",
];
/// Fields that are as good as absent when they are 0; elsewhere Go has a pointer.
const ZERO: [&str; 8] = [
    "hostPort",
    // Of iSCSI; of Fibre Channel it counts with targetWWNs alone, which cannot be without.
    "lun",
    "initialDelaySeconds",
    "timeoutSeconds",
    "periodSeconds",
    "successThreshold",
    "failureThreshold",
    "partition",
];
/// Fields in which an empty text says something else than none.
const TEXT: [&str; 3] = [
    "storageClassName",
    "volumeAttributesClassName",
    "hostnameOverride",
];

const MILLI: i128 = 1_000_000;

/// How templates are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stored {
    /// With defaults, of which `imagePullPolicy: Always` is one.
    #[default]
    WithDefaults,
    /// As they were asked for (gate `TemplateNoDefaults`). Without `imagePullPolicy` Pods get the API server's default
    /// then, by the image's tag.
    AsAsked,
}

impl Stored {
    /// As the gate says.
    #[must_use]
    pub fn of(template_no_defaults: bool) -> Self {
        if template_no_defaults {
            Self::AsAsked
        } else {
            Self::WithDefaults
        }
    }
}

/// The template in the form in which it is compared; not for storing. Containers and volumes keep their places.
#[must_use]
pub fn normal(template: &Value, stored: Stored) -> Value {
    let mut normal = template.clone();
    if let Some(spec) = normal.get_mut("spec").and_then(Value::as_object_mut) {
        pod(spec, stored);
    }
    clear(&mut normal);
    normal
}

/// Whether two templates make the same Pods.
#[must_use]
pub fn same(one: &Value, other: &Value, stored: Stored) -> bool {
    one == other || normal(one, stored) == normal(other, stored)
}

/// The template with the fields that it does not say and `filled` has, where these spell out defaults and nothing else.
/// `None` where there are no such fields. What is zero or empty is not said where Go has no pointer.
#[must_use]
pub fn with_defaults(template: &Value, filled: &Value) -> Option<Value> {
    let mut all = template.clone();
    add(&mut all, filled);
    (all != *template && same(&all, template, Stored::WithDefaults)).then_some(all)
}

/// Adds what `from` says and `to` does not.
fn add(to: &mut Value, from: &Value) {
    match (to, from) {
        (Value::Object(to), Value::Object(from)) => {
            for (name, value) in from.iter().filter(|(_, value)| !value.is_null()) {
                match to.get_mut(name).filter(|known| !says_nothing(name, known)) {
                    Some(known) => add(known, value),
                    None => drop(to.insert(name.clone(), value.clone())),
                }
            }
        }
        (Value::Array(to), Value::Array(from)) if to.len() == from.len() => {
            to.iter_mut().zip(from).for_each(|(to, from)| add(to, from));
        }
        _ => {}
    }
}

fn pod(spec: &mut Map<String, Value>, stored: Stored) {
    drop_defaults(
        spec,
        &[
            ("dnsPolicy", json!("ClusterFirst")),
            ("restartPolicy", json!("Always")),
            ("schedulerName", json!("default-scheduler")),
            ("terminationGracePeriodSeconds", json!(30)),
        ],
    );
    // The old name counts where the new one says nothing.
    if let Some(alias) = spec.remove("serviceAccount") {
        let name = spec.entry("serviceAccountName").or_insert(Value::Null);
        if name.is_null() || *name == "" {
            *name = alias;
        }
    }
    let filled = stored == Stored::WithDefaults;
    for each in items(spec, "containers") {
        container(each, filled.then_some("Always"));
    }
    for each in items(spec, "initContainers") {
        let policy = pull_policy(&each["image"]);
        container(each, filled.then_some(policy));
    }
    items(spec, "volumes").for_each(volume);
    quantities(spec, "overhead", MILLI);
    resources(spec);
}

/// `pull_policy` is what a container is stored with that says none.
fn container(container: &mut Value, pull_policy: Option<&str>) {
    let Some(container) = container.as_object_mut() else {
        return;
    };
    if let Some(policy) = pull_policy {
        drop_defaults(container, &[("imagePullPolicy", json!(policy))]);
    }
    drop_defaults(
        container,
        &[
            ("terminationMessagePath", json!("/dev/termination-log")),
            ("terminationMessagePolicy", json!("File")),
        ],
    );
    for port in items(container, "ports") {
        drop_default(port, "protocol", &json!("TCP"));
    }
    for variable in items(container, "env") {
        if let Some(from) = variable.get_mut("valueFrom") {
            reference(from);
            if let Some(file) = from.get_mut("fileKeyRef") {
                drop_default(file, "optional", &json!(false));
            }
        }
    }
    for name in ["livenessProbe", "readinessProbe", "startupProbe"] {
        if let Some(probe) = fields(container, name) {
            drop_defaults(
                probe,
                &[
                    ("timeoutSeconds", json!(1)),
                    ("periodSeconds", json!(10)),
                    ("successThreshold", json!(1)),
                    ("failureThreshold", json!(3)),
                ],
            );
            http_get(probe);
        }
    }
    for name in ["postStart", "preStop"] {
        let hooks = fields(container, "lifecycle");
        if let Some(hook) = hooks.and_then(|hooks| fields(hooks, name)) {
            http_get(hook);
        }
    }
    resources(container);
}

fn http_get(of: &mut Map<String, Value>) {
    if let Some(get) = fields(of, "httpGet") {
        drop_defaults(get, &[("path", json!("/")), ("scheme", json!("HTTP"))]);
    }
}

/// A field of the Pod or a resource of its containers, as environment and files have them.
fn reference(from: &mut Value) {
    if let Some(field) = from.get_mut("fieldRef") {
        drop_default(field, "apiVersion", &json!("v1"));
    }
    if let Some(resource) = from.get_mut("resourceFieldRef") {
        quantity_at(resource, "divisor");
        drop_default(resource, "divisor", &json!("0n"));
    }
}

fn resources(of: &mut Map<String, Value>) {
    if let Some(resources) = fields(of, "resources") {
        quantities(resources, "limits", MILLI);
        quantities(resources, "requests", MILLI);
    }
}

fn volume(volume: &mut Value) {
    let Some(volume) = volume.as_object_mut() else {
        return;
    };
    for (kind, defaults) in [
        ("secret", [("defaultMode", json!(420))].as_slice()),
        ("configMap", &[("defaultMode", json!(420))]),
        ("downwardAPI", &[("defaultMode", json!(420))]),
        ("projected", &[("defaultMode", json!(420))]),
        ("iscsi", &[("iscsiInterface", json!("default"))]),
        (
            "rbd",
            &[
                ("pool", json!("rbd")),
                ("user", json!("admin")),
                ("keyring", json!("/etc/ceph/keyring")),
            ],
        ),
        (
            "azureDisk",
            &[
                ("cachingMode", json!("ReadWrite")),
                ("fsType", json!("ext4")),
                ("readOnly", json!(false)),
                ("kind", json!("Shared")),
            ],
        ),
        (
            "scaleIO",
            &[
                ("storageMode", json!("ThinProvisioned")),
                ("fsType", json!("xfs")),
            ],
        ),
    ] {
        if let Some(source) = fields(volume, kind) {
            drop_defaults(source, defaults);
        }
    }
    if let Some(image) = volume.get_mut("image") {
        let policy = json!(pull_policy(&image["reference"]));
        drop_default(image, "pullPolicy", &policy);
    }
    if let Some(files) = fields(volume, "downwardAPI") {
        items(files, "items").for_each(reference);
    }
    let projected = fields(volume, "projected").into_iter();
    for source in projected.flat_map(|projected| items(projected, "sources")) {
        if let Some(files) = source.get_mut("downwardAPI").and_then(Value::as_object_mut) {
            items(files, "items").for_each(reference);
        }
        if let Some(token) = source.get_mut("serviceAccountToken") {
            drop_default(token, "expirationSeconds", &json!(3600));
        }
    }
    let claim = volume
        .get_mut("ephemeral")
        .and_then(|e| e.get_mut("volumeClaimTemplate"));
    if let Some(claim) = claim.and_then(|claim| claim.get_mut("spec")?.as_object_mut()) {
        drop_defaults(claim, &[("volumeMode", json!("Filesystem"))]);
        resources(claim);
    }
    if let Some(empty) = volume.get_mut("emptyDir") {
        quantity_at(empty, "sizeLimit");
        clear(empty);
        // A volume without a source is one that is empty.
        if *empty == json!({}) {
            volume.remove("emptyDir");
        }
    }
}

/// The policy that Kubernetes gives to an image by its tag.
fn pull_policy(image: &Value) -> &'static str {
    let read = Reference::parse(image.as_str().unwrap_or_default());
    if read.is_ok_and(|image| image.tag_or_digest() == "latest") {
        "Always"
    } else {
        "IfNotPresent"
    }
}

fn quantities(of: &mut Map<String, Value>, list: &str, least: i128) {
    for (_, value) in fields(of, list).into_iter().flatten() {
        amount(value, least);
    }
}

fn quantity_at(of: &mut Value, field: &str) {
    if let Some(value) = of.get_mut(field) {
        amount(value, 1);
    }
}

/// Writes a quantity in billionths, rounded up to a multiple of `least`: the API server keeps thousandths of resources.
fn amount(value: &mut Value, least: i128) {
    let amount = match value {
        Value::String(text) => quantity::parse(text),
        Value::Number(number) => quantity::parse(&number.to_string()),
        _ => None,
    };
    if let Some(amount) = amount {
        let rest = amount.rem_euclid(least);
        let rounded = if rest == 0 {
            amount
        } else {
            amount.saturating_add(least - rest)
        };
        *value = json!(format!("{rounded}n"));
    }
}

fn drop_defaults(of: &mut Map<String, Value>, defaults: &[(&str, Value)]) {
    for (field, default) in defaults {
        if of.get(*field) == Some(default) {
            of.remove(*field);
        }
    }
}

fn drop_default(of: &mut Value, field: &str, default: &Value) {
    if let Some(of) = of.as_object_mut().filter(|of| of.get(field) == Some(default)) {
        of.remove(field);
    }
}

fn fields<'a>(of: &'a mut Map<String, Value>, name: &str) -> Option<&'a mut Map<String, Value>> {
    of.get_mut(name)?.as_object_mut()
}

fn items<'a>(of: &'a mut Map<String, Value>, list: &str) -> impl Iterator<Item = &'a mut Value> + use<'a> {
    let items = of.get_mut(list).and_then(Value::as_array_mut);
    items.into_iter().flatten()
}

/// Removes what says nothing, from the inside out.
fn clear(value: &mut Value) {
    match value {
        Value::Object(all) => {
            for (name, inner) in all.iter_mut() {
                if !MAPS.contains(&name.as_str()) {
                    clear(inner);
                }
            }
            all.retain(|name, inner| !says_nothing(name, inner));
        }
        Value::Array(all) => all.iter_mut().for_each(clear),
        _ => {}
    }
}

fn says_nothing(field: &str, value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value && FALSE.contains(&field),
        Value::Number(value) => value.as_i64() == Some(0) && ZERO.contains(&field),
        Value::String(text) => text.is_empty() && !TEXT.contains(&field),
        Value::Array(all) => all.is_empty(),
        Value::Object(all) => all.is_empty() && (MAPS.contains(&field) || EMPTY.contains(&field)),
    }
}

#[cfg(test)]
mod tests;

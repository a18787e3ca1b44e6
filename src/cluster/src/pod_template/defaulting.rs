//! Which part of the API server's response is stored: what OpenKruise, which fills defaults into the v1 types itself,
//! would have stored.

use serde_json::{Value, json};

use kruise_ops::{FeatureGate, FeatureGates};

/// Which defaults are stored in templates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Defaulting {
    /// Whether no defaults are stored (gate `TemplateNoDefaults`).
    pub disabled: bool,
    /// Whether ports of a Pod on the host's network default to host ports (gate
    /// `DefaultHostNetworkHostPortsInPodTemplates`).
    pub host_ports: bool,
}

impl Defaulting {
    /// The defaulting that the feature gates select.
    #[must_use]
    pub fn from_gates(gates: &FeatureGates) -> Self {
        Self {
            disabled: gates.enabled(FeatureGate::TemplateNoDefaults),
            host_ports: gates.enabled(FeatureGate::DefaultHostNetworkHostPortsInPodTemplates),
        }
    }
}

/// Defaults of volumes that the API server sets and OpenKruise does not.
const VOLUME_DEFAULTS: [(&str, &[&str]); 6] = [
    ("/ephemeral/volumeClaimTemplate/spec", &["volumeMode"]),
    ("/iscsi", &["iscsiInterface"]),
    ("/rbd", &["pool", "user", "keyring"]),
    ("/azureDisk", &["cachingMode", "fsType", "kind", "readOnly"]),
    ("/scaleIO", &["storageMode", "fsType"]),
    ("/image", &["pullPolicy"]),
];

/// Sets the defaults that OpenKruise sets and the API server does not, or sets differently.
pub fn fill_defaults(template: &mut Value, defaults: Defaulting) {
    if defaults.disabled {
        return;
    }
    for container in items_mut(template, "/spec/containers") {
        set_if_empty(container, "imagePullPolicy", &json!("Always"));
    }
    if !defaults.host_ports || template["spec"]["hostNetwork"] != true {
        return;
    }
    for list in ["/spec/containers", "/spec/initContainers"] {
        for port in items_mut(template, list).flat_map(|container| items_mut(container, "/ports")) {
            let same = port["containerPort"].clone();
            set_if_empty(port, "hostPort", &same);
        }
    }
}

/// Writes numeric quantities as strings, as Go's types do.
pub(super) fn quantities_to_strings(value: &mut Value) {
    let as_text = |value: &mut Value| {
        if let Value::Number(number) = value {
            *value = Value::String(number.to_string());
        }
    };
    match value {
        Value::Object(all) => {
            for (name, value) in all {
                match (name.as_str(), value) {
                    ("limits" | "requests" | "overhead", Value::Object(all)) => {
                        all.values_mut().for_each(as_text);
                    }
                    ("sizeLimit" | "divisor", value) => as_text(value),
                    (_, value) => quantities_to_strings(value),
                }
            }
        }
        Value::Array(all) => all.iter_mut().for_each(quantities_to_strings),
        _ => {}
    }
}

/// Removes from the API server's response what OpenKruise would not have stored.
pub fn remove_extra_defaults(submitted: &Value, answer: &mut Value, defaults: Defaulting) {
    for name in ["serviceAccount", "serviceAccountName"] {
        restore_submitted(submitted, answer, "/spec", name);
    }
    for list in ["/spec/containers", "/spec/initContainers"] {
        for (submitted, container) in zip_items(submitted, answer, list) {
            for probe in [
                "/livenessProbe/grpc",
                "/readinessProbe/grpc",
                "/startupProbe/grpc",
            ] {
                restore_submitted(submitted, container, probe, "service");
            }
        }
    }
    for (submitted, volume) in zip_items(submitted, answer, "/spec/volumes") {
        for (kind, names) in VOLUME_DEFAULTS {
            names
                .iter()
                .for_each(|name| restore_submitted(submitted, volume, kind, name));
        }
    }
    if defaults.disabled {
        retain_submitted(submitted, answer);
    }
}

/// The same for the spec of a claim template.
pub(super) fn remove_extra_claim_defaults(submitted: &Value, answer: &mut Value, defaults: Defaulting) {
    restore_submitted(submitted, answer, "", "volumeMode");
    if defaults.disabled {
        retain_submitted(submitted, answer);
    }
}

/// Restores the submitted value of a field.
fn restore_submitted(submitted: &Value, answer: &mut Value, pointer: &str, field: &str) {
    let Some(answer) = answer.pointer_mut(pointer).and_then(Value::as_object_mut) else {
        return;
    };
    match submitted
        .pointer(pointer)
        .and_then(|asked| asked.get(field))
        .filter(|value| !value.is_null())
    {
        Some(value) => answer.insert(field.to_owned(), value.clone()),
        None => answer.remove(field),
    };
}

/// Removes what was not submitted, except what Go always writes for its types.
fn retain_submitted(submitted: &Value, answer: &mut Value) {
    match (submitted, answer) {
        (Value::Object(submitted), Value::Object(answer)) => {
            answer.retain(|name, value| {
                let is_submitted = submitted
                    .get(name)
                    .is_some_and(|said| !is_zero_value(said) || said == value);
                is_submitted || value.is_null() || (name == "divisor" && value == "0")
            });
            for (name, value) in answer {
                if let Some(asked) = submitted.get(name) {
                    retain_submitted(asked, value);
                }
            }
        }
        (Value::Array(submitted), Value::Array(answer)) => {
            submitted
                .iter()
                .zip(answer)
                .for_each(|(asked, answer)| retain_submitted(asked, answer));
        }
        _ => {}
    }
}

/// Go's zero value of a field that is not a pointer.
fn is_zero_value(value: &Value) -> bool {
    value.is_null() || *value == json!(0) || *value == json!("")
}

fn set_if_empty(object: &mut Value, field: &str, value: &Value) {
    if let Some(of) = object
        .as_object_mut()
        .filter(|of| of.get(field).is_none_or(is_zero_value))
    {
        of.insert(field.to_owned(), value.clone());
    }
}

fn items_mut<'a>(object: &'a mut Value, list: &str) -> impl Iterator<Item = &'a mut Value> + use<'a> {
    object
        .pointer_mut(list)
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
}

fn zip_items<'a>(
    submitted: &'a Value,
    answer: &'a mut Value,
    list: &str,
) -> impl Iterator<Item = (&'a Value, &'a mut Value)> + use<'a> {
    let submitted = submitted
        .pointer(list)
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    submitted.zip(items_mut(answer, list))
}

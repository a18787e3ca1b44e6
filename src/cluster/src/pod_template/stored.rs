//! Which of the API server's answer is stored: what OpenKruise, which fills defaults into the v1 types itself, would
//! have stored.

use serde_json::{Value, json};

use super::Defaults;

/// What the API server fills into volumes and OpenKruise does not.
const OF_VOLUMES: [(&str, &[&str]); 6] = [
    ("/ephemeral/volumeClaimTemplate/spec", &["volumeMode"]),
    ("/iscsi", &["iscsiInterface"]),
    ("/rbd", &["pool", "user", "keyring"]),
    ("/azureDisk", &["cachingMode", "fsType", "kind", "readOnly"]),
    ("/scaleIO", &["storageMode", "fsType"]),
    ("/image", &["pullPolicy"]),
];

/// Fills in what OpenKruise fills in and the API server does not, or not so.
pub fn prepare(template: &mut Value, defaults: Defaults) {
    if defaults.none {
        return;
    }
    for container in items(template, "/spec/containers") {
        fill(container, "imagePullPolicy", &json!("Always"));
    }
    if !defaults.host_ports || template["spec"]["hostNetwork"] != true {
        return;
    }
    for list in ["/spec/containers", "/spec/initContainers"] {
        for port in items(template, list).flat_map(|container| items(container, "/ports")) {
            let same = port["containerPort"].clone();
            fill(port, "hostPort", &same);
        }
    }
}

/// Writes quantities that are numbers as texts, as Go's types do.
pub(super) fn quantities_as_text(value: &mut Value) {
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
                    (_, value) => quantities_as_text(value),
                }
            }
        }
        Value::Array(all) => all.iter_mut().for_each(quantities_as_text),
        _ => {}
    }
}

/// Leaves of the API server's answer what OpenKruise would have stored.
pub fn template(asked: &Value, answer: &mut Value, defaults: Defaults) {
    for name in ["serviceAccount", "serviceAccountName"] {
        as_asked(asked, answer, "/spec", name);
    }
    for list in ["/spec/containers", "/spec/initContainers"] {
        for (asked, container) in pairs(asked, answer, list) {
            for probe in [
                "/livenessProbe/grpc",
                "/readinessProbe/grpc",
                "/startupProbe/grpc",
            ] {
                as_asked(asked, container, probe, "service");
            }
        }
    }
    for (asked, volume) in pairs(asked, answer, "/spec/volumes") {
        for (kind, names) in OF_VOLUMES {
            names.iter().for_each(|name| as_asked(asked, volume, kind, name));
        }
    }
    if defaults.none {
        leave_asked(asked, answer);
    }
}

/// The same for the spec of a claim template.
pub(super) fn claim(asked: &Value, answer: &mut Value, defaults: Defaults) {
    as_asked(asked, answer, "", "volumeMode");
    if defaults.none {
        leave_asked(asked, answer);
    }
}

/// Makes a field what it was when it was asked for.
fn as_asked(asked: &Value, answer: &mut Value, at: &str, field: &str) {
    let Some(answer) = answer.pointer_mut(at).and_then(Value::as_object_mut) else {
        return;
    };
    match asked
        .pointer(at)
        .and_then(|asked| asked.get(field))
        .filter(|value| !value.is_null())
    {
        Some(value) => answer.insert(field.to_owned(), value.clone()),
        None => answer.remove(field),
    };
}

/// Removes what was not asked for, but for what Go writes of its types in any case.
fn leave_asked(asked: &Value, answer: &mut Value) {
    match (asked, answer) {
        (Value::Object(asked), Value::Object(answer)) => {
            answer.retain(|name, value| {
                let said = asked.get(name).is_some_and(|said| !empty(said) || said == value);
                said || value.is_null() || (name == "divisor" && value == "0")
            });
            for (name, value) in answer {
                if let Some(asked) = asked.get(name) {
                    leave_asked(asked, value);
                }
            }
        }
        (Value::Array(asked), Value::Array(answer)) => {
            asked
                .iter()
                .zip(answer)
                .for_each(|(asked, answer)| leave_asked(asked, answer));
        }
        _ => {}
    }
}

/// What Go takes for nothing, where it has no pointer.
fn empty(value: &Value) -> bool {
    value.is_null() || *value == json!(0) || *value == json!("")
}

fn fill(of: &mut Value, field: &str, value: &Value) {
    if let Some(of) = of.as_object_mut().filter(|of| of.get(field).is_none_or(empty)) {
        of.insert(field.to_owned(), value.clone());
    }
}

fn items<'a>(of: &'a mut Value, list: &str) -> impl Iterator<Item = &'a mut Value> + use<'a> {
    of.pointer_mut(list)
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
}

fn pairs<'a>(
    asked: &'a Value,
    answer: &'a mut Value,
    list: &str,
) -> impl Iterator<Item = (&'a Value, &'a mut Value)> + use<'a> {
    let asked = asked
        .pointer(list)
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    asked.zip(items(answer, list))
}

//! A Pod of a SidecarSet's containers and volumes, checked as the API server checks a new Pod: with such a set no Pod
//! could be created. What is checked is in the parent's documentation.

mod env;
mod handler;
mod mounts;
mod ports;
mod resources;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use kruise_api::names;
use kruise_api::validation::FieldErrors;
use serde_json::Value;

use super::container_names::{is_native_sidecar, names_in_pod};
use super::read::{as_text, list, object, text};

pub(super) fn check(
    init_containers: &[Value],
    containers: &[Value],
    volumes: &Value,
    errors: &mut FieldErrors,
) {
    let volumes = valid_volumes(list(volumes, "spec.volumes", errors), errors);
    let mut names = HashSet::new();
    for (at, container) in containers.iter().enumerate() {
        let field = format!("spec.containers[{at}]");
        check_container(container, &field, &volumes, errors);
        let name = &container["name"];
        if !names.insert(name.as_str().unwrap_or_default()) {
            errors.duplicate(format_args!("{field}.name"), name);
        }
        if !container["restartPolicy"].is_null() {
            let field = format_args!("{field}.restartPolicy");
            errors.forbidden(field, "may not be set for non-init containers");
        }
        handler::check_all(container, &field, errors);
    }
    for (at, container) in init_containers.iter().enumerate() {
        let field = format!("spec.initContainers[{at}]");
        check_container(container, &field, &volumes, errors);
        let name = &container["name"];
        let text = name.as_str().unwrap_or_default();
        if names.contains(text) {
            errors.duplicate(format_args!("{field}.name"), name);
        } else if !text.is_empty() {
            names.insert(text);
        }
        check_init_container(container, &field, errors);
    }
    check_hot_upgrade_names(init_containers, containers, errors);
}

/// Checks the names that containers with hot upgrade have in the Pod.
fn check_hot_upgrade_names(init_containers: &[Value], containers: &[Value], errors: &mut FieldErrors) {
    let lists = [
        ("spec.containers", containers, false),
        ("spec.initContainers", init_containers, true),
    ];
    let all = || {
        lists.into_iter().flat_map(|(field, list, is_init)| {
            let list = list.iter().enumerate();
            list.map(move |(at, container)| (field, at, container, names_in_pod(container, is_init)))
        })
    };
    let mut others: HashMap<Cow<'_, str>, usize> = HashMap::new();
    for name in all().flat_map(|(.., names)| names) {
        *others.entry(name).or_default() += 1;
    }
    for (field, at, container, names) in all().filter(|(.., names)| names.len() > 1) {
        let name = &container["name"];
        let field = format!("{field}[{at}].name");
        // What is wrong with the name itself is reported elsewhere.
        if as_text(name).len() <= names::MAX_LABEL_LENGTH
            && names.iter().any(|name| name.len() > names::MAX_LABEL_LENGTH)
        {
            let why = "must be no more than 61 bytes with upgradeType HotUpgrade";
            errors.invalid(&field, name, why);
        }
        if let Some(taken) = names.iter().find(|name| others.get(*name) > Some(&1)) {
            let why =
                format_args!("is {taken} in the Pod with upgradeType HotUpgrade, as another container is");
            errors.invalid(&field, name, why);
        }
    }
}

fn check_init_container(container: &Value, field: &str, errors: &mut FieldErrors) {
    let policy = &container["restartPolicy"];
    if is_native_sidecar(container) {
        handler::check_all(container, field, errors);
        return;
    }
    if !policy.is_null() {
        errors.not_supported(format_args!("{field}.restartPolicy"), policy, &["Always"]);
    }
    for part in ["lifecycle", "livenessProbe", "readinessProbe", "startupProbe"] {
        if !container[part].is_null() {
            errors.forbidden(
                format_args!("{field}.{part}"),
                "may not be set for init containers without restartPolicy=Always",
            );
        }
    }
}

/// Volumes without errors, by name: others cannot be mounted.
fn valid_volumes<'a>(volumes: &'a [Value], errors: &mut FieldErrors) -> HashMap<&'a str, &'a Value> {
    let mut valid = HashMap::new();
    for (at, volume) in volumes.iter().enumerate() {
        let field = format!("spec.volumes[{at}]");
        let mut found = FieldErrors::default();
        if object(volume, &field, &mut found).is_none() && volume.is_null() {
            found.required(&field, "must be a volume");
        }
        let name = check_name(&volume["name"], &format!("{field}.name"), &mut found);
        if valid.contains_key(name) {
            found.duplicate(format_args!("{field}.name"), &volume["name"]);
        }
        if found.is_empty() {
            valid.insert(name, volume);
        }
        errors.append(found);
    }
    valid
}

/// Checks a required name that is a DNS label.
fn check_name<'a>(name: &'a Value, field: &str, errors: &mut FieldErrors) -> &'a str {
    let text = text(name, field, errors);
    if text.is_empty() {
        errors.required(field, "");
        return text;
    }
    for why in names::label_errors(text) {
        errors.invalid(field, name, why);
    }
    text
}

/// What all kinds of containers have in common.
fn check_container(
    container: &Value,
    field: &str,
    volumes: &HashMap<&str, &Value>,
    errors: &mut FieldErrors,
) {
    object(container, field, errors);
    check_name(&container["name"], &format!("{field}.name"), errors);
    let image_field = format!("{field}.image");
    let image = text(&container["image"], &image_field, errors);
    if image.is_empty() {
        errors.required(&image_field, "");
    }
    if image.trim() != image {
        errors.invalid(
            image_field,
            &container["image"],
            "must not have leading or trailing whitespace",
        );
    }
    check_required_word(
        &container["terminationMessagePolicy"],
        &format!("{field}.terminationMessagePolicy"),
        &["File", "FallbackToLogsOnError"],
        errors,
    );
    check_required_word(
        &container["imagePullPolicy"],
        &format!("{field}.imagePullPolicy"),
        &["Always", "IfNotPresent", "Never"],
        errors,
    );
    ports::check(&container["ports"], &format!("{field}.ports"), errors);
    env::check(&container["env"], &format!("{field}.env"), errors);
    mounts::check(container, field, volumes, errors);
    resources::check(&container["resources"], &format!("{field}.resources"), errors);
}

/// Checks a field that has a default, and one of a few values.
fn check_required_word(value: &Value, field: &str, words: &[&str], errors: &mut FieldErrors) {
    match text(value, field, errors) {
        "" => errors.required(field, ""),
        word if !words.contains(&word) => errors.not_supported(field, value, words),
        _ => {}
    }
}

//! Mounts of volumes, and block devices.

use std::collections::{HashMap, HashSet};

use kruise_api::validation::FieldErrors;
use serde_json::{Value, json};

use crate::sidecarset::validate::read::{as_text, items, list, text};

pub(super) fn check(
    container: &Value,
    field: &str,
    volumes: &HashMap<&str, &Value>,
    errors: &mut FieldErrors,
) {
    let [mounts, devices] = ["volumeMounts", "volumeDevices"].map(|part| &container[part]);
    check_mounts(mounts, devices, &format!("{field}.volumeMounts"), volumes, errors);
    check_devices(
        devices,
        mounts,
        &format!("{field}.volumeDevices"),
        volumes,
        errors,
    );
}

/// The values of a field of all items.
fn all<'a>(list: &'a Value, part: &str) -> HashSet<&'a str> {
    items(list).iter().map(|item| as_text(&item[part])).collect()
}

fn check_mounts(
    mounts: &Value,
    devices: &Value,
    field: &str,
    volumes: &HashMap<&str, &Value>,
    errors: &mut FieldErrors,
) {
    let [device_names, device_paths] = ["name", "devicePath"].map(|part| all(devices, part));
    let mut seen = HashSet::new();
    for (at, mount) in list(mounts, field, errors).iter().enumerate() {
        let [name_field, path_field] = ["name", "mountPath"].map(|part| format!("{field}[{at}].{part}"));
        let name = text(&mount["name"], &name_field, errors);
        if name.is_empty() {
            errors.required(&name_field, "");
        }
        if !volumes.contains_key(name) {
            errors.not_found(&name_field, &json!(name));
        }
        let path = text(&mount["mountPath"], &path_field, errors);
        if path.is_empty() {
            errors.required(&path_field, "");
        }
        if !seen.insert(path) {
            errors.invalid(&path_field, &json!(path), "must be unique");
        }
        if device_names.contains(name) {
            errors.invalid(
                name_field,
                &json!(name),
                "must not already exist in volumeDevices",
            );
        }
        if device_paths.contains(path) {
            errors.invalid(
                path_field,
                &json!(path),
                "must not already exist as a path in volumeDevices",
            );
        }
        check_sub_paths(mount, field, at, errors);
    }
}

/// The API server leaves the index out of some of these fields.
fn check_sub_paths(mount: &Value, field: &str, at: usize, errors: &mut FieldErrors) {
    let [path_field, expression_field] = ["subPath", "subPathExpr"].map(|part| format!("{field}.{part}"));
    let path = text(&mount["subPath"], &path_field, errors);
    let expression = text(&mount["subPathExpr"], &expression_field, errors);
    check_descending(path, &path_field, errors);
    if !expression.is_empty() && !path.is_empty() {
        errors.invalid(
            format_args!("{field}[{at}].subPathExpr"),
            &json!(expression),
            "subPathExpr and subPath are mutually exclusive",
        );
    }
    check_descending(expression, &expression_field, errors);
}

/// Checks that a path stays inside the volume.
fn check_descending(path: &str, field: &str, errors: &mut FieldErrors) {
    if path.starts_with('/') {
        errors.invalid(field, &json!(path), "must be a relative path");
    }
    if climbs(path) {
        errors.invalid(field, &json!(path), "must not contain '..'");
    }
}

fn climbs(path: &str) -> bool {
    path.split('/').any(|part| part == "..")
}

fn check_devices(
    devices: &Value,
    mounts: &Value,
    field: &str,
    volumes: &HashMap<&str, &Value>,
    errors: &mut FieldErrors,
) {
    let [mount_names, mount_paths] = ["name", "mountPath"].map(|part| all(mounts, part));
    let (mut names, mut paths) = (HashSet::new(), HashSet::new());
    for (at, device) in list(devices, field, errors).iter().enumerate() {
        let [name_field, path_field] = ["name", "devicePath"].map(|part| format!("{field}[{at}].{part}"));
        let name = text(&device["name"], &name_field, errors);
        let path = text(&device["devicePath"], &path_field, errors);
        if name.is_empty() {
            errors.required(&name_field, "");
        } else if !names.insert(name) {
            errors.invalid(&name_field, &json!(name), "must be unique");
        }
        match volumes.get(name) {
            None => errors.not_found(&name_field, &json!(name)),
            Some(volume) if volume["persistentVolumeClaim"].is_null() && volume["ephemeral"].is_null() => {
                let why =
                    "can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode";
                errors.invalid(&name_field, &json!(name), why);
            }
            Some(_) => {}
        }
        if path.is_empty() {
            errors.required(&path_field, "");
        }
        if paths.contains(path) {
            errors.invalid(&path_field, &json!(path), "must be unique");
        }
        if climbs(path) {
            errors.invalid(&path_field, &json!(path), "can not contain backsteps ('..')");
        } else {
            paths.insert(path);
        }
        if mount_names.contains(name) {
            errors.invalid(name_field, &json!(name), "must not already exist in volumeMounts");
        }
        if mount_paths.contains(path) {
            errors.invalid(
                path_field,
                &json!(path),
                "must not already exist as a path in volumeMounts",
            );
        }
    }
}

//! Ports of a container, and of probes.

use std::collections::HashSet;

use kruise_api::validation::FieldErrors;
use serde_json::{Value, json};

use crate::sidecarset::validate::read::{int32, list, text};

const PROTOCOLS: [&str; 3] = ["SCTP", "TCP", "UDP"];
const MAX_NAME_LENGTH: usize = 15;

pub(super) fn check(ports: &Value, field: &str, errors: &mut FieldErrors) {
    let (mut names, mut host_ports) = (HashSet::new(), HashSet::new());
    for (at, port) in list(ports, field, errors).iter().enumerate() {
        let field = format!("{field}[{at}]");
        let name_field = format!("{field}.name");
        let name = text(&port["name"], &name_field, errors);
        if !name.is_empty() && check_name(name, &name_field, errors) && !names.insert(name) {
            errors.duplicate(name_field, &port["name"]);
        }
        let number_field = format!("{field}.containerPort");
        match int32(&port["containerPort"], &number_field, errors) {
            None | Some(0) => errors.required(number_field, ""),
            Some(number) => check_number(number, &number_field, errors),
        }
        let host_field = format!("{field}.hostPort");
        let host_port = int32(&port["hostPort"], &host_field, errors).unwrap_or_default();
        let protocol_field = format!("{field}.protocol");
        let protocol = text(&port["protocol"], &protocol_field, errors);
        if host_port != 0 {
            check_number(host_port, &host_field, errors);
            if !host_ports.insert((protocol, port["hostIP"].as_str(), host_port)) {
                errors.duplicate(host_field, &port["hostPort"]);
            }
        }
        match protocol {
            "" => errors.required(protocol_field, ""),
            other if !PROTOCOLS.contains(&other) => {
                errors.not_supported(protocol_field, &port["protocol"], &PROTOCOLS);
            }
            _ => {}
        }
    }
}

fn check_number(number: i32, field: &str, errors: &mut FieldErrors) {
    if !(1..=65535).contains(&number) {
        errors.invalid(field, &json!(number), "must be between 1 and 65535, inclusive");
    }
}

/// Checks the name of a port, and returns whether it is valid.
fn check_name(name: &str, field: &str, errors: &mut FieldErrors) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let rules = [
        (name.len() <= MAX_NAME_LENGTH, "must be no more than 15 bytes"),
        (
            !name.is_empty() && name.bytes().all(is_allowed),
            "must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)",
        ),
        (
            name.bytes().any(|byte| byte.is_ascii_lowercase()),
            "must contain at least one letter (a-z)",
        ),
        (!name.contains("--"), "must not contain consecutive hyphens"),
        (
            !name.starts_with('-') && !name.ends_with('-'),
            "must not begin or end with a hyphen",
        ),
    ];
    let mut is_valid = true;
    for (_, why) in rules.into_iter().filter(|(holds, _)| !holds) {
        errors.invalid(field, &json!(name), why);
        is_valid = false;
    }
    is_valid
}

/// Checks the port of a probe or a hook: a number or the name of a port.
pub(super) fn check_reference(port: &Value, field: &str, errors: &mut FieldErrors) {
    match port.as_str() {
        Some(name) => {
            check_name(name, field, errors);
        }
        None => check_number(int32(port, field, errors).unwrap_or_default(), field, errors),
    }
}

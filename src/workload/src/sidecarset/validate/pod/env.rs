//! Environment variables.

use kruise_api::validation::FieldErrors;
use serde_json::Value;

use crate::sidecarset::validate::read::{list, object, text};

/// Where a variable's value may come from.
const SOURCES: [&str; 4] = ["fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef"];

pub(super) fn check(env: &Value, field: &str, errors: &mut FieldErrors) {
    for (at, variable) in list(env, field, errors).iter().enumerate() {
        let field = format!("{field}[{at}]");
        let name_field = format!("{field}.name");
        match text(&variable["name"], &name_field, errors) {
            "" => errors.required(name_field, ""),
            name => {
                for why in name_errors(name) {
                    errors.invalid(&name_field, &variable["name"], why);
                }
            }
        }
        let value = text(&variable["value"], format_args!("{field}.value"), errors);
        let source = &variable["valueFrom"];
        check_source(source, !value.is_empty(), &format!("{field}.valueFrom"), errors);
    }
}

fn name_errors(name: &str) -> Vec<&'static str> {
    let mut errors = Vec::new();
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    if !name.bytes().all(is_allowed) || name.starts_with(|first: char| first.is_ascii_digit()) {
        errors.push(
            "must consist of alphabetic characters, digits, '_', '-', or '.', and not start with a digit",
        );
    }
    if name == "." {
        errors.push("must not be '.'");
    } else if name.starts_with("..") {
        errors.push("must not start with '..'");
    }
    errors
}

fn check_source(source: &Value, has_value: bool, field: &str, errors: &mut FieldErrors) {
    if object(source, field, errors).is_none() {
        return;
    }
    let given = SOURCES.iter().filter(|name| !source[**name].is_null()).count();
    let why = match given {
        0 => "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef` or `secretKeyRef`",
        _ if has_value => "may not be specified when `value` is not empty",
        1 => return,
        _ => "may not have more than one field specified at a time",
    };
    errors.invalid(field, source, why);
}

//! Amounts of resources.

use kruise_api::validation::FieldErrors;
use serde_json::{Map, Value};

use crate::in_place::quantity;
use crate::sidecarset::validate::read::object;

pub(super) fn check(resources: &Value, field: &str, errors: &mut FieldErrors) {
    if object(resources, field, errors).is_none() {
        return;
    }
    let none = Map::new();
    let [limits_field, requests_field] = ["limits", "requests"].map(|part| format!("{field}.{part}"));
    let limits = object(&resources["limits"], &limits_field, errors).unwrap_or(&none);
    let requests = object(&resources["requests"], &requests_field, errors).unwrap_or(&none);
    for (name, limit) in limits {
        check_amount(limit, &format!("{limits_field}[{name}]"), errors);
    }
    for (name, request) in requests {
        let amount = check_amount(request, &format!("{requests_field}[{name}]"), errors);
        let limit = limits.get(name);
        if limit.is_none() && !is_overcommit_allowed(name) {
            errors.required(
                &limits_field,
                "Limit must be set for non overcommitable resources",
            );
        }
        let (Some(amount), Some(limit)) = (amount, limit.and_then(parse)) else {
            continue;
        };
        if !is_overcommit_allowed(name) && amount != limit {
            let why = format!("must be equal to {name} limit");
            errors.invalid(&requests_field, request, why);
        } else if amount > limit {
            let why = format!("must be less than or equal to {name} limit");
            errors.invalid(&requests_field, request, why);
        }
    }
}

/// Whether requests may be lower than limits: Kubernetes' own resources without huge pages.
fn is_overcommit_allowed(name: &str) -> bool {
    (!name.contains('/') || name.contains("kubernetes.io/")) && !name.starts_with("hugepages-")
}

/// Billionths of the unit; numbers are quantities, too.
fn parse(value: &Value) -> Option<i128> {
    match value {
        Value::String(text) => quantity::parse(text),
        Value::Number(number) => quantity::parse(&number.to_string()),
        _ => None,
    }
}

fn check_amount(value: &Value, field: &str, errors: &mut FieldErrors) -> Option<i128> {
    let amount = parse(value);
    match amount {
        None => errors.invalid(field, value, "must be a quantity, as 500m or 1Gi"),
        Some(amount) if amount < 0 => {
            errors.invalid(field, value, "must be greater than or equal to 0");
        }
        Some(_) => {}
    }
    amount
}

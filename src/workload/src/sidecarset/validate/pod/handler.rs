//! Probes, and the hooks of the lifecycle. A field that has a default may be absent: OpenKruise sets those of startup
//! probes nowhere, and then refuses them.

use kruise_api::validation::FieldErrors;
use serde_json::{Value, json};

use super::ports;
use crate::sidecarset::validate::read::{int32, list, object, text};

/// Checks what containers have that run as long as the Pod.
pub(super) fn check_all(container: &Value, field: &str, errors: &mut FieldErrors) {
    for hook in ["postStart", "preStop"] {
        let handler = &container["lifecycle"][hook];
        let field = format!("{field}.lifecycle.{hook}");
        if object(handler, &field, errors).is_some() {
            check_handler(
                handler,
                &["exec", "httpGet", "tcpSocket", "sleep"],
                &field,
                errors,
            );
        }
    }
    for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
        check_probe(&container[probe], probe, &format!("{field}.{probe}"), errors);
    }
}

fn check_probe(probe: &Value, kind: &str, field: &str, errors: &mut FieldErrors) {
    if object(probe, field, errors).is_none() {
        return;
    }
    check_handler(probe, &["exec", "httpGet", "tcpSocket", "grpc"], field, errors);
    for part in [
        "initialDelaySeconds",
        "timeoutSeconds",
        "periodSeconds",
        "successThreshold",
        "failureThreshold",
    ] {
        let field = format!("{field}.{part}");
        if int32(&probe[part], &field, errors).is_some_and(|number| number < 0) {
            errors.invalid(field, &probe[part], "must be greater than or equal to 0");
        }
    }
    let grace = &probe["terminationGracePeriodSeconds"];
    let grace_field = format!("{field}.terminationGracePeriodSeconds");
    if !grace.is_null() && grace.as_i64().is_none_or(|seconds| seconds <= 0) {
        errors.invalid(&grace_field, grace, "must be greater than 0");
    }
    if kind == "readinessProbe" {
        if !grace.is_null() {
            errors.invalid(grace_field, grace, "must not be set for readinessProbes");
        }
    } else if !probe["successThreshold"].is_null() && probe["successThreshold"] != 1 {
        errors.invalid(
            format_args!("{field}.successThreshold"),
            &probe["successThreshold"],
            "must be 1",
        );
    }
}

/// Checks that there is exactly one of the `kinds` of handlers.
fn check_handler(handler: &Value, kinds: &[&str], field: &str, errors: &mut FieldErrors) {
    let mut given = kinds.iter().filter(|kind| !handler[**kind].is_null());
    let Some(kind) = given.next() else {
        return errors.required(field, "must specify a handler type");
    };
    for other in given {
        errors.forbidden(
            format_args!("{field}.{other}"),
            "may not specify more than 1 handler type",
        );
    }
    let action = &handler[*kind];
    let field = format!("{field}.{kind}");
    if object(action, &field, errors).is_none() {
        return;
    }
    match *kind {
        "exec" => {
            let field = format!("{field}.command");
            if list(&action["command"], &field, errors).is_empty() {
                errors.required(field, "");
            }
        }
        "httpGet" => {
            ports::check_reference(&action["port"], &format!("{field}.port"), errors);
            let scheme = text(&action["scheme"], format_args!("{field}.scheme"), errors);
            if !["", "HTTP", "HTTPS"].contains(&scheme) {
                errors.not_supported(format_args!("{field}.scheme"), &json!(scheme), &["HTTP", "HTTPS"]);
            }
        }
        "tcpSocket" | "grpc" => {
            ports::check_reference(&action["port"], &format!("{field}.port"), errors);
        }
        _ => {}
    }
}

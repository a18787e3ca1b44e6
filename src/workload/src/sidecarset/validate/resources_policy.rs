//! Resources that are computed from those of the Pod's containers.

use std::collections::HashMap;

use kruise_api::validation::FieldErrors;
use serde_json::Value;

use super::read::{object, text};
use crate::sidecarset::resources::{self, Resource, target_regex};

/// Different regular expressions that one SidecarSet may have: each may take a megabyte to compile.
const MAX_PATTERNS: usize = 64;
/// Bytes of all of them: other reviews wait while they are compiled.
const MAX_PATTERN_BYTES: usize = 16 << 10;

/// Checks the policies of all containers.
#[derive(Default)]
pub(super) struct Checks<'a> {
    /// Results by regular expression: most containers have the same one.
    patterns: HashMap<&'a str, Result<(), String>>,
    /// Bytes of these expressions.
    pattern_bytes: usize,
}

impl<'a> Checks<'a> {
    /// Checks the policy of a container, if it has one; `field` is the policy's.
    pub fn check(&mut self, container: &'a Value, field: &str, errors: &mut FieldErrors) {
        let policy = &container["resourcesPolicy"];
        if object(policy, field, errors).is_none() {
            return;
        }
        let has_some = |list: &str| match &container["resources"][list] {
            Value::Null => false,
            list => list.as_object().is_none_or(|amounts| !amounts.is_empty()),
        };
        if has_some("limits") || has_some("requests") {
            errors.invalid(
                field,
                policy,
                "cannot be used together with resources.limits or resources.requests",
            );
        }
        let mode = &policy["targetContainersMode"];
        let mode_field = format!("{field}.targetContainersMode");
        match text(mode, &mode_field, errors) {
            "sum" | "max" => {}
            _ => errors.not_supported(mode_field, mode, &["sum", "max"]),
        }
        self.check_pattern(
            &policy["targetContainersNameRegex"],
            &format!("{field}.targetContainersNameRegex"),
            errors,
        );
        check_expressions(
            &policy["resourcesExpr"],
            &format!("{field}.resourcesExpr"),
            errors,
        );
    }

    fn check_pattern(&mut self, value: &'a Value, field: &str, errors: &mut FieldErrors) {
        let pattern = text(value, field, errors);
        if pattern.is_empty() {
            return errors.required(field, "give a regular expression for names of containers, as .*");
        }
        if !self.patterns.contains_key(pattern) {
            if self.patterns.len() >= MAX_PATTERNS {
                return errors.too_many(field, self.patterns.len() + 1, MAX_PATTERNS);
            }
            if self.pattern_bytes + pattern.len() > MAX_PATTERN_BYTES {
                let why = format!(
                    "the regular expressions of a SidecarSet may have {MAX_PATTERN_BYTES} bytes in all"
                );
                return errors.invalid(field, value, why);
            }
            self.pattern_bytes += pattern.len();
        }
        let compile = || target_regex(pattern).map(drop).map_err(|why| why.to_string());
        if let Err(why) = self.patterns.entry(pattern).or_insert_with(compile) {
            // The lines before draw where it is.
            errors.invalid(field, value, why.lines().last().unwrap_or_default());
        }
    }
}

fn check_expressions(expressions: &Value, field: &str, errors: &mut FieldErrors) {
    let kinds = ["limits", "requests"].map(|kind| (format!("{field}.{kind}"), &expressions[kind]));
    if kinds.iter().all(|(_, of_kind)| of_kind.is_null()) {
        errors.invalid(
            field,
            expressions,
            "at least one of limits or requests must be configured",
        );
    }
    for (field, of_kind) in kinds {
        if object(of_kind, &field, errors).is_none() {
            continue;
        }
        for resource in Resource::ALL {
            let name = resource.as_str();
            let field = format!("{field}.{name}");
            let expression = text(&of_kind[name], &field, errors);
            if !expression.is_empty()
                && let Err(why) = resources::validate(expression, resource)
            {
                errors.invalid(field, &of_kind[name], format_args!("invalid expression: {why}"));
            }
        }
    }
}

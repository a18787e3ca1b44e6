//! Resources of the containers that a policy names, added up, and the sidecar's resources that follow from them.

use regex::{Regex, RegexBuilder};
use serde_json::{Map, Value};

use kruise_api::sidecarset::{ResourceExprs, ResourcesPolicy};

use super::{ExpressionError, Quantity, Resource, evaluate};

/// Bytes that a compiled expression may take.
const MAX_REGEX_BYTES: usize = 1 << 20;

/// Bytes of an expression. Before any limit applies, each of its classes is expanded: `\pL` takes 5 KiB.
const MAX_PATTERN_BYTES: usize = 4096;

/// Why a sidecar has no resources.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResourcesError {
    /// The regular expression is none.
    #[error("targetContainersNameRegex is invalid: {0}")]
    Regex(String),
    /// Neither `sum` nor `max`.
    #[error("targetContainersMode {0:?} is neither sum nor max")]
    Mode(String),
    /// The Pod has no container of such a name.
    #[error("no containers match the regex pattern {0:?}")]
    NoTarget(String),
    /// A resource of a container is not a quantity.
    #[error("{list}.{resource} of container {container:?} is not a quantity")]
    Quantity {
        /// Name of the container.
        container: String,
        /// `limits` or `requests`.
        list: &'static str,
        /// Name of the resource.
        resource: &'static str,
    },
    /// The sum has no room in a quantity.
    #[error("the sum of {list}.{resource} is out of range")]
    OutOfRange {
        /// `limits` or `requests`.
        list: &'static str,
        /// Name of the resource.
        resource: &'static str,
    },
    /// An expression has no result.
    #[error("failed to evaluate {list}.{resource} expression {expression:?}: {why}")]
    Expression {
        /// `limits` or `requests`.
        list: &'static str,
        /// Name of the resource.
        resource: &'static str,
        /// The expression.
        expression: String,
        /// What is wrong with it.
        why: ExpressionError,
    },
}

/// The regular expression of a policy, for names of containers; not anchored.
///
/// # Errors
///
/// If it is invalid, too long, or too large when compiled.
pub fn target_regex(pattern: &str) -> Result<Regex, ResourcesError> {
    if pattern.len() > MAX_PATTERN_BYTES {
        let why = format!("it has more than {MAX_PATTERN_BYTES} bytes");
        return Err(ResourcesError::Regex(why));
    }
    RegexBuilder::new(pattern)
        .size_limit(MAX_REGEX_BYTES)
        .dfa_size_limit(MAX_REGEX_BYTES)
        .build()
        .map_err(|why| ResourcesError::Regex(why.to_string()))
}

/// `resources` of a sidecar with this policy, computed from `containers` (raw JSON of `v1.Container`), which are those
/// of the Pod that no SidecarSet injects.
///
/// # Errors
///
/// If no container matches, a quantity or an expression is invalid, or a result is below zero.
pub fn resources(policy: &ResourcesPolicy, containers: &[&Value]) -> Result<Value, ResourcesError> {
    let regex = target_regex(&policy.target_containers_name_regex)?;
    let combine: fn(Quantity, Quantity) -> Option<Quantity> = match policy.target_containers_mode.as_str() {
        "sum" => Quantity::checked_add,
        "max" => |one, other| Some(one.max(other)),
        other => return Err(ResourcesError::Mode(other.to_owned())),
    };
    let name = |container: &Value| container["name"].as_str().unwrap_or_default().to_owned();
    let matches = |container: &&&Value| regex.is_match(&name(container));
    let targets: Vec<&Value> = containers.iter().filter(matches).copied().collect();
    if targets.is_empty() {
        let pattern = policy.target_containers_name_regex.clone();
        return Err(ResourcesError::NoTarget(pattern));
    }
    let mut resources = Map::new();
    let expressions = &policy.resources_expr;
    for (list, expressions) in [
        ("limits", &expressions.limits),
        ("requests", &expressions.requests),
    ] {
        let mut amounts = Map::new();
        for resource in Resource::ALL {
            let expression = expressions
                .as_ref()
                .map_or("", |all| expression_of(all, resource));
            if expression.is_empty() {
                continue;
            }
            let Some(total) = total(&targets, list, resource.as_str(), combine)? else {
                continue;
            };
            let amount = evaluate(expression, total).map_err(|why| ResourcesError::Expression {
                list,
                resource: resource.as_str(),
                expression: expression.to_owned(),
                why,
            })?;
            amounts.insert(resource.as_str().to_owned(), amount.to_string().into());
        }
        if !amounts.is_empty() {
            resources.insert(list.to_owned(), amounts.into());
        }
    }
    Ok(resources.into())
}

fn expression_of(expressions: &ResourceExprs, resource: Resource) -> &str {
    match resource {
        Resource::Cpu => &expressions.cpu,
        Resource::Memory => &expressions.memory,
    }
}

/// A resource of all containers; `None` if there is no limit, as for the limits of containers of which one has none.
fn total(
    containers: &[&Value],
    list: &'static str,
    resource: &'static str,
    combine: fn(Quantity, Quantity) -> Option<Quantity>,
) -> Result<Option<Quantity>, ResourcesError> {
    let mut total: Option<Quantity> = None;
    for container in containers {
        let amount = match &container["resources"][list][resource] {
            Value::Null if list == "limits" => return Ok(None),
            Value::Null => Quantity::ZERO,
            value => Quantity::from_json(value).ok_or_else(|| ResourcesError::Quantity {
                container: container["name"].as_str().unwrap_or_default().to_owned(),
                list,
                resource,
            })?,
        };
        let next = match total {
            None => Some(amount),
            Some(total) => combine(total, amount),
        };
        total = Some(next.ok_or(ResourcesError::OutOfRange { list, resource })?);
    }
    Ok(total)
}

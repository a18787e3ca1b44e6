//! Injection without a webhook: a SidecarSet as a MutatingAdmissionPolicy (Kubernetes 1.36 and later), which the API
//! server evaluates itself.
//!
//! A policy has the result of [`super::inject`], except for what follows.
//!
//! - The API server runs policies in random order, and each sees the results of those before it. Containers have their
//!   places nevertheless: those of other sets are found by the records of these in the Pod's annotations. Volumes and
//!   pull secrets of several sets are in the order of the policies; the API knows them by name only. Injected
//!   init containers of a Pod that has none of its own are in front or behind as the other sets have their names.
//! - When a sidecar replaces a container of the Pod that has its name, other sets no longer take variables, mounts and
//!   devices from the replaced one if their policies run later, and may have their places on its other side.
//! - There is no clock: `updateTimestamp` is null.
//! - An annotation with records that has a form which neither Go nor this program writes is replaced, not merged; the
//!   Pod is not refused.
//! - Pull secrets that the Pod itself lists twice stay so.
//! - A Pod that already records the set and has its first container is injected again, as by the function; the match
//!   condition keeps it from the webhook.
//! - Nothing compares the size of the result with the limits of the API server and etcd, which refuse the Pod.
//! - There is time for some 15 000 mounts, devices and variables that all sidecars together take over. Beyond, as after
//!   other errors, failure policy `Ignore` leaves out the whole set: nothing is half-injected. The author of
//!   a Pod can bring that about; failure policy `Fail`, or a webhook behind the policy, is the remedy.
//! - Computed resources are written in thousandths; amounts below are rounded up.
//! - A `resourcesPolicy` without a target, or with a negative result, is such an error, and so is a container with the
//!   name of an init container of the Pod, or the other way round; the function refuses the Pod.
//!
//! `literal` and `typed` keep what the user wrote from becoming code, or an object that the API server cannot read;
//! `sets` decides which sets apply to a Pod, `containers`, `resources` and `annotations` what they write.

use serde_json::{Value, json};

use kruise_api::pod_webhooks::{PodSelectors, failure_policy, new_pods};
use kruise_api::{keys, names};

use super::set::SetView;

mod annotations;
mod containers;
mod error;
mod literal;
mod options;
mod program;
mod records;
mod resources;
mod selector;
mod sets;
pub(crate) mod typed;
mod undo;

pub use error::Unsupported;
pub use options::Options;
use program::Program;
pub use undo::undo;

/// Characters of an expression; the API server allows 100 000.
const MAX_EXPRESSION: usize = 90_000;
/// Bytes of a policy; etcd stores 1.5 MiB.
const MAX_POLICY: usize = 1 << 20;

/// The policies of a set with their bindings, as JSON; none if the set injects nothing. They have the label
/// [`keys::SIDECAR_SET_NAME`].
///
/// # Errors
///
/// If the set has something that a policy cannot do.
pub fn compile(set: &SetView<'_>, options: &Options<'_>) -> Result<Vec<Value>, Unsupported> {
    let selectors = PodSelectors::new(options.namespace, set.spec).map_err(|errors| {
        let why = errors.into_messages().join("; ");
        Unsupported::new("spec", format_args!("has an invalid selector: {why}"))
    })?;
    let Some(selectors) = selectors else {
        return Ok(Vec::new());
    };
    // Names of sets have no dots, so that no two sets have a policy of the same name.
    if !names::is_label(set.name) {
        return Err(Unsupported::new("metadata.name", "is no name of a policy"));
    }
    let mut objects = Vec::new();
    for variant in sets::variants(set, options.revisions)? {
        let name = format!("sidecarset-{}{}", set.name, variant.suffix);
        let metadata = json!({ "name": name, "labels": { keys::SIDECAR_SET_NAME: set.name } });
        let mut spec = policy(set, &variant, options)?;
        let constraints = json!({
            "matchPolicy": "Equivalent",
            "resourceRules": new_pods(),
            "objectSelector": selectors.objects,
            "namespaceSelector": selectors.namespaces,
        });
        kruise_api::json::set(&mut spec, &["matchConstraints"], constraints);
        let policy = json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingAdmissionPolicy",
            "metadata": metadata,
            "spec": spec,
        });
        if policy.to_string().len() > MAX_POLICY {
            return Err(Unsupported::new("spec", "is too large for a policy"));
        }
        objects.push(policy);
        objects.push(json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingAdmissionPolicyBinding",
            "metadata": metadata,
            "spec": { "policyName": name },
        }));
    }
    Ok(objects)
}

/// The spec of a policy without its constraints.
fn policy(
    set: &SetView<'_>,
    variant: &sets::Variant<'_>,
    options: &Options<'_>,
) -> Result<Value, Unsupported> {
    let peers = sets::Peers::new(set, options);
    let mut program = Program::default();
    let patches = annotations::patches(&variant.selected)?;
    annotations::add_variables(&mut program);
    annotations::add_patches(&patches, &peers, &mut program);
    let hot = containers::add(&variant.selected, &patches, &peers, options, &mut program)?;
    annotations::add_records(&variant.selected, &hot, &mut program);

    let Program {
        variables,
        operations,
        ..
    } = program;
    let conditions = [
        ("revision", variant.condition.clone()),
        ("not-replaced", peers.not_replaced()),
    ];
    let conditions: Vec<(String, String)> = conditions
        .into_iter()
        .filter_map(|(name, expression)| Some((name.to_owned(), expression?)))
        .collect();
    let patch = format!("[{}].flatten()", operations.join(",\n"));
    for (_, expression) in variables.iter().chain(&conditions) {
        check_size(expression)?;
    }
    check_size(&patch)?;
    let named = |list: Vec<(String, String)>| -> Vec<Value> {
        let items = list.into_iter();
        items
            .map(|(name, expression)| json!({ "name": name, "expression": expression }))
            .collect()
    };
    let mut spec = json!({
        "failurePolicy": failure_policy(Some(set.annotations)),
        "reinvocationPolicy": "Never",
        "variables": named(variables),
        "mutations": [{ "patchType": "JSONPatch", "jsonPatch": { "expression": patch } }],
    });
    // The API server does not store empty lists, and what it stores is compared with this.
    if !conditions.is_empty() {
        kruise_api::json::set(&mut spec, &["matchConditions"], named(conditions).into());
    }
    Ok(spec)
}

fn check_size(expression: &str) -> Result<(), Unsupported> {
    if expression.len() > MAX_EXPRESSION {
        return Err(Unsupported::new(
            "spec",
            "is too large for an expression of a policy",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests;

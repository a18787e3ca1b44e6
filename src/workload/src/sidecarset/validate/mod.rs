//! The review of a SidecarSet, with the fields and types of OpenKruise's errors.
//!
//! It takes the object after its defaults. The containers and volumes are also checked as the API server checks those of
//! a new Pod: names, images, ports, environment variables, mounts and devices, pull and termination message policies,
//! amounts of resources, probes, hooks, and what init containers must not have. The rest is left to the API server, which
//! the webhook asks in a dry run: sources of volumes, names of resources, security contexts, resize policies, `envFrom`,
//! details of references in `env`, mount propagation, headers of HTTP probes, host ports of different containers, and
//! wrong types in fields that are not checked here.

mod conflicts;
mod container_names;
mod containers;
mod injection;
mod metadata;
mod patch_metadata;
mod pod;
mod read;
mod request;
mod resources_policy;
mod spec;
mod update;
mod update_strategy;
mod whitelist;

use kruise_api::sidecarset::SidecarSetSpec;
use kruise_api::validation::FieldErrors;
use serde::Deserialize;
use serde_json::Value;

use crate::sidecarset::overlap::Scope;
pub use request::{Request, Revision};

/// Which stored SidecarSets matter for a set: few of many.
#[derive(Debug)]
pub struct Concerned<'a> {
    base: Option<&'a str>,
    scope: Option<Scope>,
}

impl<'a> Concerned<'a> {
    /// Those for the set of a review.
    #[must_use]
    pub fn new(set: &'a Value) -> Self {
        Self {
            base: metadata::base_of_canary(&set["metadata"]),
            scope: Scope::from_spec(&set["spec"]),
        }
    }

    /// Whether a stored set may conflict with it, or is its base.
    #[must_use]
    pub fn contains(&self, name: &str, spec: &SidecarSetSpec) -> bool {
        let overlaps = |scope: &Scope| Scope::of(spec).is_some_and(|other| other.overlaps(scope));
        self.base == Some(name) || self.scope.as_ref().is_some_and(overlaps)
    }
}

/// The errors of a SidecarSet.
///
/// Conflicts with other SidecarSets are looked for if there are no other errors.
#[must_use]
pub fn validate(request: &Request) -> FieldErrors {
    let mut errors = FieldErrors::default();
    let spec = &request.set["spec"];
    metadata::check(request, &mut errors);
    spec::check(request, &mut errors);
    update_strategy::check(spec, &mut errors);
    containers::check(spec, &mut errors);
    patch_metadata::check(request, &mut errors);
    if let Some(old) = request.old {
        update::check(&spec["containers"], &old["spec"]["containers"], &mut errors);
    }
    let old_containers = request.old.map_or(&Value::Null, |old| &old["spec"]["containers"]);
    injection::check(&spec["containers"], old_containers, &mut errors);
    if errors.is_empty()
        && let Err(why) = SidecarSetSpec::deserialize(spec)
    {
        errors.invalid("spec", spec, format_args!("cannot be read: {why}"));
    }
    if errors.is_empty() {
        conflicts::check(request, &mut errors);
    }
    errors
}

/// Why no Pod can be injected with this SidecarSet, although it is valid as in OpenKruise.
#[must_use]
pub fn warnings(set: &Value) -> Vec<String> {
    let mut warnings = FieldErrors::default();
    injection::warn(&set["spec"], &mut warnings);
    warnings.into_messages()
}

#[cfg(test)]
mod tests;

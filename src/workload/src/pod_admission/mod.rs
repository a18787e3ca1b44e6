//! What the webhook for Pods changes, step by step, without a client.
//!
//! Each step is a file here, or in the module of its kind; [`mutate`] is their order.

use serde_json::Value;

use crate::sidecarset::inject::{self, InjectionError};
use launch_priority::LaunchPriorityError;

pub mod enhanced_liveness;
pub mod launch_priority;
pub mod readiness_gate;

/// What the request is about.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Namespace of the Pod; empty counts as `default`.
    pub namespace: &'a str,
    /// `status`, `eviction` and so on; empty for the Pod itself.
    pub subresource: &'a str,
}

/// Gates, time and randomness.
#[derive(Debug)]
pub struct Options<'a> {
    /// Gate `KruisePodReadinessGate`: all Pods get the readiness gate.
    pub readiness_gate_for_all: bool,
    /// Gate `EnhancedLivenessProbe`.
    pub enhanced_liveness: bool,
    /// How SidecarSets are injected.
    pub inject: inject::Options,
    /// Random bytes for the end of a generated name.
    pub random_name: [u8; 5],
    /// Where the SidecarSets come from.
    pub cluster: inject::Cluster<'a>,
}

/// Why a Pod is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MutationError {
    /// A SidecarSet cannot be injected.
    #[error(transparent)]
    Injection(#[from] InjectionError),
    /// A launch priority is invalid.
    #[error(transparent)]
    LaunchPriority(#[from] LaunchPriorityError),
}

/// Changes a Pod (raw JSON) that is created. Returns whether a step changed it; annotations of a SidecarSet that
/// injects no container do not count.
///
/// # Errors
///
/// If a step refuses the Pod, which may be half-changed then.
pub fn mutate(
    pod: &mut Value,
    request: &Request<'_>,
    options: &Options<'_>,
    random_percent: &mut dyn FnMut() -> u32,
) -> Result<bool, MutationError> {
    let mut changed = readiness_gate::apply(pod, options.readiness_gate_for_all);
    if request.subresource.is_empty() {
        let namespace = Some(request.namespace)
            .filter(|name| !name.is_empty())
            .unwrap_or("default");
        changed |= inject::inject(pod, namespace, &options.cluster, &options.inject, random_percent)?;
        // Behind the injection, because sidecars have priorities, too.
        changed |= launch_priority::apply(pod, options.random_name)?;
    }
    if options.enhanced_liveness {
        changed |= enhanced_liveness::apply(pod);
    }
    Ok(changed)
}

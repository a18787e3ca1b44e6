//! SidecarSets on a real API server, through MutatingAdmissionPolicies and through the webhook: the Pods are those of the
//! function.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod cluster;
mod hostile_text;
mod large_sets;
mod last_webhook;
mod order;
mod shared_webhook;
mod stored;
mod through_policies;
mod through_webhook;
mod vectors;

use support::connect;

//! SidecarSets as MutatingAdmissionPolicies, on a real API server: the Pods are those that the webhook would make.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod cluster;
mod hostile_text;
mod large_sets;
mod last_webhook;
mod order;
mod vectors;

use support::connect;

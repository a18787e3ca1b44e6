//! SidecarSets as MutatingAdmissionPolicies, on a real API server: the Pods are those that the webhook would make.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod cluster;
mod last_webhook;
mod vectors;

use support::connect;

//! SidecarSets on a real API server, with the manager as a process with its own account; Pods are only created as a dry
//! run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fixture;
mod injection_policies;
mod pod_webhooks;
mod policy_and_webhook;

use support::{conversion, manager};

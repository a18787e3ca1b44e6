//! The installed objects on a real API server: CRDs and their rules, admission and conversion by our own server, and
//! what the service accounts may do. One API server serves all tests of this target.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod admission;
mod cloneset;
mod cloneset_invalid;
mod cloneset_percentages;
mod cloneset_templates;
mod cloneset_without_webhooks;
mod conversion;
mod crd_upgrade;
mod crd_validation;
mod daemon_fence;
mod delete_protection;
mod manager_fence;
mod pod_security;
mod rbac;
mod readme_commands;
mod recreate_jobs;
mod service_accounts;
mod webhook_cluster;
mod webhook_replicas;

use support::{connect, etcd, manager, untyped};

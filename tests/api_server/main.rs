//! What is installed, on a real API server: CRDs and their rules, admission and conversion by our own
//! server, and what the service accounts may do. One API server serves all tests of this file.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod admission;
mod cloneset;
mod cloneset_many;
mod cloneset_mistakes;
mod cloneset_templates;
mod cloneset_unhooked;
mod conversion;
mod fence;
mod handbook;
mod manager_fence;
mod mounts;
mod programs;
mod protection;
mod rbac;
mod replicas;
mod rules;
mod upgrade;
mod world;

use support::{connect, etcd, manager, untyped};

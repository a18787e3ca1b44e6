//! What is installed, on a real API server: CRDs and their rules, admission and conversion by our own
//! server, and what the service accounts may do. One API server serves all tests of this file.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod admission;
mod cloneset;
mod cloneset_many;
mod cloneset_templates;
#[path = "../support/connect.rs"]
mod connect;
mod conversion;
#[path = "../support/etcd.rs"]
mod etcd;
mod fence;
#[path = "../support/manager.rs"]
#[allow(dead_code, reason = "targets share it")]
mod manager;
mod mounts;
mod programs;
mod rbac;
#[path = "../support/readiness.rs"]
#[allow(dead_code, reason = "targets share it")]
mod readiness;
mod replicas;
mod rules;
#[path = "../support/untyped.rs"]
mod untyped;
mod upgrade;
#[path = "../support/waits.rs"]
#[allow(dead_code, reason = "targets share it")]
mod waits;
mod world;

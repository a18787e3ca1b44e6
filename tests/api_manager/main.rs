//! The manager's program, as its service account, on a real API server. Daemons are played by the tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod arrival;
#[path = "../support/connect.rs"]
mod connect;
mod election;
#[path = "../support/etcd.rs"]
mod etcd;
mod jobs;
mod nodes;
mod old_daemon;
mod old_versions;
mod pods;
#[path = "../support/readiness.rs"]
mod readiness;
mod requests;
mod scale;
mod secrets;
mod silence;
mod world;

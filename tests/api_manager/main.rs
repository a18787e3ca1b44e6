//! The manager's program, as its service account, on a real API server. Daemons are played by the tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod arrival;
mod barriers;
mod election;
mod jobs;
mod network;
mod nodes;
mod old_daemon;
mod old_versions;
mod pods;
mod requests;
mod scale;
mod secrets;
mod silence;
mod tenants;
mod world;

use support::{connect, etcd, manager, waits};

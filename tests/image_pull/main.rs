//! The daemon's image pulls: the real binary, with its own service account and a token bound to its node, on a real API
//! server; against the fault-injecting runtime when the test controls the runtime, and against containerd.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod api_outage;
mod containerd;
mod daemon;
mod faults;
mod image_pull_job;
mod large_status;
mod node_credentials;
mod pull_node;
mod pull_secrets;
mod traces;

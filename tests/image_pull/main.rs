//! The daemon's image pulls: the program itself, as its own service account with a token of its node, on a real API
//! server; against the runtime made of faults where the test decides what the runtime does, and against containerd.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod api_outage;
mod containerd;
mod daemon;
mod faults;
mod image_pull_job;
mod large_status;
mod pull_node;
mod pull_secrets;

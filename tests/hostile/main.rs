//! All input from outside is hostile: each field of each kind at its limits and beyond, forged reviews on the open
//! port, and odd objects next to ours. The programs are the real binaries, the API server is real, the container
//! runtime is the fault-injecting one. Afterwards both programs run, serve and have not panicked once.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![recursion_limit = "256"]

mod fields;
mod full_cluster;
mod objects;
mod reviews;
mod templates;

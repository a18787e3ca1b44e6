//! Everything from outside means harm: each field of each kind at its ends and beyond, forged reviews on the open port,
//! and objects beside ours that are odd. The programs are as they are built, the API server is real, the container runtime
//! is made of faults. Afterwards both programs live, serve and have not panicked once.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![recursion_limit = "256"]

mod fields;
mod full_cluster;
mod objects;
mod reviews;
mod templates;

//! CloneSets: the manager's program, as its service account, on a real API server. kubelet is played by the tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod apart;
#[path = "../support/connect.rs"]
mod connect;
mod costs;
mod document;
mod errors;
mod field;
mod kubelet;
mod life;
mod manuals;
#[path = "../support/pods.rs"]
#[allow(dead_code, reason = "targets share it")]
mod pods;
#[path = "../support/readiness.rs"]
mod readiness;
mod scale;
#[path = "../support/sets.rs"]
#[allow(dead_code, reason = "targets share it")]
mod sets;
#[path = "../support/settled.rs"]
mod settled;
mod steady;
mod story;
#[path = "../support/untyped.rs"]
mod untyped;
mod update;
#[path = "../support/waits.rs"]
#[allow(dead_code, reason = "targets share it")]
mod waits;
#[path = "../api_manager/world.rs"]
#[allow(dead_code, reason = "the controllers' other tests use the rest of it")]
mod world;

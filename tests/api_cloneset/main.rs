//! CloneSets: the manager's program, as its service account, on a real API server. kubelet is played by the tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod ahead;
mod apart;
mod busy;
mod changed;
mod costs;
mod deletion;
mod dies;
mod document;
mod errors;
mod field;
mod foreign;
mod fragments;
mod gates;
mod history;
mod kubelet;
mod life;
mod locked;
mod lost;
mod manuals;
mod memory;
mod on_delete;
mod order;
mod proxy;
mod refused;
mod scale;
mod shared;
mod sizes;
mod standing;
mod steady;
mod story;
mod takeover;
mod times;
mod told;
mod update;
#[path = "../api_manager/world.rs"]
#[allow(dead_code, reason = "the controllers' other tests use the rest of it")]
mod world;

use support::{connect, manager, pods, sets, waits, workloads};

//! The daemon: one directory per controller, each with its own entry point.
//!
//! In:  options from the command line, the node's name, the runtime's sockets, the API server.
//! Out: the actions of the controllers; health, metrics and the control API for them.

pub mod container_meta;
mod context;
pub mod control;
mod fence;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod hook;
pub mod image_pull;
pub mod live;
mod options;
pub mod pod_probe;
pub mod pods;
pub mod pull_command;
pub mod recreate;
mod run;
pub mod stop_slots;
mod yaml;

pub use context::Context;
pub use live::LiveState;
pub use options::Options;
pub use run::{Error, run};

//! What every process needs in operation: logs, metrics, health, supervision and shutdown.
//!
//! In:  options and signals, the progress of each task, counters.
//! Out: a log, the HTTP endpoints of health and metrics, traces, one token that shuts everything down.

// A panic is one failed request or reconcile: it must unwind in every profile.
#[cfg(panic = "abort")]
compile_error!("a panic must unwind: leave `panic` out of the profile");

pub mod flag_values;
mod gates;
pub mod health;
pub mod http;
pub mod logs;
pub mod metrics;
pub mod panics;
mod process;
pub mod progress;
pub mod secure_metrics;
pub mod supervise;
pub mod traces;
pub mod upstream_flags;
mod version;
pub mod watches;

pub use gates::{FeatureGate, FeatureGates};
pub use health::Health;
pub use process::raise_open_file_limit;
pub use progress::Progress;
pub use supervise::Supervisor;
pub use version::{COMMIT, VERSION, VERSION_AND_COMMIT};
pub use watches::Watches;

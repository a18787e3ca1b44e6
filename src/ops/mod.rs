//! What every process of ours needs to be run by people: logs, metrics, health, supervision and shutdown.

mod gates;
pub mod health;
pub mod http;
pub mod logs;
pub mod metrics;
pub mod progress;
pub mod supervise;
pub mod upstream_flags;

pub use gates::{Gate, Gates};
pub use health::Health;
pub use progress::Progress;
pub use supervise::Supervisor;

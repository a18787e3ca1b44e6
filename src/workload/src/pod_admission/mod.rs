//! What the webhook for Pods changes, step by step, without a client.

pub mod enhanced_liveness;
pub mod launch_priority;
pub mod readiness_gate;

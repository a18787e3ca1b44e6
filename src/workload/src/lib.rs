//! What the controllers of workloads share, decided without a client, a runtime, a clock or chance.
//!
//! [`in_place`] updates Pods that stay: what changes, the patches, the proof.

pub mod in_place;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

//! What the controllers of workloads share, decided without a client, a runtime, a clock or chance.
//!
//! [`in_place`] updates Pods that stay: what changes, the patches, the proof. [`revision`] makes and compares
//! ControllerRevisions, [`order`] says which Pods come first, [`pods`] what holds of one, and [`not_ready`] who keeps it out
//! of its Services.

pub mod claim;
pub mod in_place;
pub mod not_ready;
pub mod order;
pub mod pods;
pub mod revision;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

//! Carries out ContainerRecreateRequests.
pub mod plan;

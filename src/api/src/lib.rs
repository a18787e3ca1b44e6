//! The API as Rust types: one file per kind, the catalogue of keys, and the two schema versions.
//!
//! `v1beta1` is stored and is what both programs speak; `v1alpha1` is served for older clients.
//! It builds alone, without a client and without a runtime.

pub mod backoff;
pub mod cloneset;
pub mod container_hash;
pub mod container_recreate_request;
pub mod convert;
mod crd;
pub mod go_json;
pub mod image_pull_job;
pub mod image_reference;
pub mod in_place;
pub mod json;
pub mod keys;
pub mod kind;
pub mod lifecycle;
pub mod manifests;
pub mod names;
pub mod node_image;
pub mod owner;
mod rules;
pub mod schemas;
pub mod selector;
pub mod update_priority;
pub mod v1alpha1;
pub mod validation;
pub mod webhooks;
mod words;

pub use crd::{crd, crds};
pub use kind::Kind;

/// API group of all our kinds.
pub const GROUP: &str = "apps.kruise.io";
/// The stored version, spoken by both programs.
pub const V1BETA1: &str = "v1beta1";
/// The older version, served to clients that know no other.
pub const V1ALPHA1: &str = "v1alpha1";

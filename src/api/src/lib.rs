//! The API as Rust types: one file per kind, the catalogue of keys, and the two schema versions.
//!
//! `v1beta1` is stored and used by both programs; `v1alpha1` is served for older clients. The crate builds without a
//! client and without a runtime.
//!
//! # Guide
//!
//! **A kind** is a variant of [`Kind`] and its [row](kind::KindInfo): its names, whether its versions are converted,
//! how it is reviewed. CRDs ([`crds`]), webhook configurations ([`webhooks`]), conversion, reviews and feature gates
//! match on it, so a kind that lacks one of them does not compile. The types of each are in the file of its name
//! ([`cloneset`], [`image_pull_job`], [`image_list_pull_job`], [`container_recreate_request`],
//! [`container_recreate_job`], [`node_image`], [`node_pod_probe`], [`pod_probe_marker`]), those of the older version in [`v1alpha1`].
//!
//! **What the schemas cannot express** is in [`validation`] and in rules in CEL, which are part of the CRDs. External
//! input is parsed where it enters: [`names`] for parts of a request, [`image_reference`] for images, [`owner`] for
//! owner references, [`selector`] for labels, [`schedule`] for times.
//!
//! ```
//! use kruise_api::image_reference::ImageReference;
//!
//! let image = ImageReference::parse("nginx:1.29").unwrap();
//! assert_eq!(image.to_string(), "docker.io/library/nginx:1.29");
//! assert!(ImageReference::parse("../nginx").is_err());
//! ```
//!
//! **What OpenKruise's clients rely on** is kept to the byte: labels, annotations and reasons in [`keys`], the
//! annotations of in-place updates in [`in_place`], Go's JSON in [`go_json`], kubelet's hashes in [`container_hash`].
//! [`convert`](mod@convert) converts an object to its other version, and keeps fields that this lacks in an annotation.
//!
//! ```
//! use serde_json::json;
//!
//! let old = json!({
//!     "apiVersion": "apps.kruise.io/v1alpha1", "kind": "CloneSet", "metadata": { "name": "web" },
//!     "spec": { "updateStrategy": { "type": "InPlaceIfPossible", "partition": 2 } },
//! });
//! let new = kruise_api::convert::convert(old, kruise_api::V1BETA1).unwrap();
//! let strategy = &new["spec"]["updateStrategy"]["rollingUpdate"];
//! assert_eq!((&strategy["podUpdatePolicy"], &strategy["partition"]), (&json!("InPlaceIfPossible"), &json!(2)));
//! ```

pub mod backoff;
pub mod byte_size;
pub mod cel;
pub mod cloneset;
pub mod container_hash;
pub mod container_recreate_job;
pub mod container_recreate_request;
pub mod convert;
mod crd;
pub mod go_json;
pub mod image_list_pull_job;
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
pub mod node_pod_probe;
pub mod owner;
pub mod pod_probe_marker;
pub mod pod_webhooks;
pub mod restart_policy;
mod rules;
pub mod schedule;
pub mod schemas;
pub mod selector;
pub mod sidecarset;
mod string_enum;
pub mod text;
pub mod time;
pub mod unconfirmed;
pub mod update_priority;
pub mod v1alpha1;
pub mod validation;
mod version;
pub mod webhooks;

pub use crd::{crd, crds};
pub use kind::Kind;
pub use version::{GROUP, V1ALPHA1, V1BETA1};

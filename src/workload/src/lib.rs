//! What the controllers of workloads share, decided without a client, a runtime, a clock or randomness.
//!
//! [`in_place`] updates Pods without recreating them: changes, patches, proof of completion. [`revision`] creates and
//! compares ControllerRevisions, [`order`] sorts Pods, [`pods`] has predicates of one Pod, and [`not_ready`] the keys
//! that keep it out of its Services. [`limits`] has the numbers of Pods that specs set, and [`job_conditions`] merges
//! the conditions of jobs.
//!
//! # Guide
//!
//! A controller that rolls out a template answers these questions in turn:
//!
//! 1. **Which revision does the spec correspond to?** [`revision::desired_revision`] names it, [`revision::plan`]
//!    decides whether it exists, is promoted or is created, and [`revision::revisions_to_delete`] selects old ones to
//!    delete. Names and hashes are OpenKruise's.
//! 2. **Which Pods have it?** [`pods::has_revision`], [`pods::ready`], [`pods::available`]; a Pod is kept as
//!    [`in_place::Pod`].
//! 3. **Which Pod is next?** [`order::update_order`] for updates, [`order::pick_for_deletion`] if there are too many.
//! 4. **Can it be updated in place?** [`in_place::spec`](in_place::spec::calculate_spec) compares two revisions;
//!    [`in_place::MustRecreate`] is the reason if not. [`in_place::patch`] builds the writes, for which part of the
//!    Pod, and in which order.
//! 5. **Is it complete?** [`in_place::refresh`](in_place::refresh()) checks the Pod repeatedly: it waits, continues
//!    with the next containers, or is complete, with a proof for each container ([`in_place::completion`]).
//!
//! ```
//! use kruise_workload::in_place::{MustRecreate, Options, RevisionData, spec::calculate_spec};
//! use kruise_workload::in_place::normalize::TemplateStorage;
//! use serde_json::{Value, json};
//!
//! let data = |image: &str, host: bool| json!({ "spec": { "template": { "spec": {
//!     "hostNetwork": host, "containers": [{ "name": "app", "image": image }] } } } });
//! let options = Options {
//!     env_from_metadata: true,
//!     vertical: false,
//!     recreate_for_claims: true,
//!     grace_seconds: 0,
//!     template_storage: TemplateStorage::default(),
//! };
//! let compare = |old: &Value, new: &Value| {
//!     let [old, new] = [("web-1", old), ("web-2", new)]
//!         .map(|(name, data)| RevisionData { name, data, claim_hash: None });
//!     calculate_spec(&old, &new, &options)
//! };
//!
//! let update = compare(&data("app:1", false), &data("app:2", false)).unwrap();
//! assert_eq!(update.container_images["app"], "app:2");
//!
//! let other = compare(&data("app:1", false), &data("app:2", true));
//! assert!(matches!(other, Err(MustRecreate::Field(_))));
//! ```

pub mod claim;
mod core_defaults;
pub mod in_place;
pub mod job_conditions;
pub mod limits;
pub mod names;
pub mod not_ready;
pub mod not_ready_reason;
pub mod order;
pub mod pod_admission;
pub mod pods;
pub mod revision;
pub mod sidecarset;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

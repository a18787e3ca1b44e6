//! The engine of updates in place, shared by the workloads: what changes in a Pod that stays, and when it is done.
//!
//! In:  the raw data of two ControllerRevisions, a projected [`Pod`], the time.
//! Out: whether templates are the same ([`normal`]), what can be changed in place ([`spec`]), the patches that do it
//!      ([`patch`], `write`), how far it is ([`complete`]), and what is to be done next about a Pod that is being
//!      updated (`refresh`).
//! All of it is pure. The annotations are OpenKruise's, so either implementation ends what the other began.

mod batch;
pub mod complete;
mod diff;
pub mod normal;
pub mod patch;
pub mod pod;
pub mod quantity;
pub mod ready;
pub mod refresh;
pub mod resize;
pub mod resize_back;
pub mod spec;
mod state;
mod template;
#[cfg(test)]
mod tests;
pub mod write;

pub use complete::{Progress, Waiting, progress};
pub use pod::{Condition, Container, ContainerStatus, Pod, priority};
pub use refresh::{Refresh, refresh};
pub use spec::{MustRecreate, Options, Revision, Spec};
pub use state::{grace, graced, state};
pub use template::Template;
pub use write::{Target, Write};

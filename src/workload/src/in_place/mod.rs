//! In-place updates, shared by the workloads: what changes in a Pod that is kept, and when the update is complete.
//!
//! In:  the raw data of two ControllerRevisions, a projected [`Pod`], the time.
//! Out: whether templates are equal ([`normalize`]), what can be changed in place ([`spec`]), the patches ([`patch`],
//!      `write`), progress ([`completion`]), and the next step for a Pod that is being updated (`refresh`).
//! All of it is pure. The annotations are OpenKruise's, so either implementation can complete an update of the other.

mod annotations;
pub mod completion;
mod container_batches;
pub mod diff;
pub mod normalize;
pub mod patch;
pub mod pod;
pub mod quantity;
pub mod ready;
pub mod refresh;
pub mod resize;
pub mod resize_rollback;
pub mod spec;
mod template;
#[cfg(test)]
mod tests;
pub mod write;

pub use annotations::{grace_spec, in_grace_period, update_state};
pub use completion::{UpdateProgress, WaitingFor, progress};
pub use pod::{Condition, Container, ContainerStatus, Pod, barrier_priority, priority};
pub use refresh::{RefreshResult, refresh};
pub use spec::{MustRecreate, Options, RevisionData, Spec};
pub use template::Template;
pub use write::{PatchTarget, PodWrite};

//! What the manager caches of each watched object: the few fields that its decisions need.
//!
//! In:  objects as the API server sends them.
//! Out: plain data, shared by the controllers.
//!
//! Objects are reduced at the watch, so ten thousand nodes cost megabytes.

mod cloneset;
mod job_pod;
mod liveness;
mod node;
mod node_image;
mod owned;
mod pod;
mod pool;
mod ports;
mod raw_pod;
mod reported_probes;

pub use cloneset::CloneSetView;
pub use job_pod::{JobContainer, JobContainerState, JobPod};
pub use kruise_api::selector::matches;
pub use liveness::{LivenessPod, Workload};
pub use node::NodeView;
#[cfg(test)]
pub use node_image::{ImageTag, TagRequest};
pub use node_image::{NodeImageView, TagOwner, TagStatusView, TagView, progress_hash};
pub use owned::{ClaimView, RevisionView};
pub use pod::{ContainerView, PodView, barrier_config_map, barrier_key};
pub use ports::{NamedPort, with_port_number};
pub use raw_pod::RawPod;
pub use reported_probes::ReportedProbes;

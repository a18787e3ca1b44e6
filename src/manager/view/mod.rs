//! What the manager keeps of each watched object: the few fields that its decisions need.
//!
//! Objects are reduced at the watch, so ten thousand nodes cost megabytes. Plain data, made from API types.

mod node;
mod node_image;
mod pod;

pub use crate::api::selector::matches;
pub use node::NodeView;
pub use node_image::{NodeImageView, Owner, TagStatusView, TagView};
pub use pod::{ContainerView, PodView};

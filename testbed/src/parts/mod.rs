//! Parts of a test cluster: Debian packages, programs built from Go modules, container images.

mod cache;
mod debian;
mod images;
pub mod kubernetes;
pub mod prepare;

pub use cache::{Cache, HELM, KWOK};
pub use images::Image;

//! The test bed: a real Kubernetes control plane, and a real node, on this machine.
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! use xtask::cluster::{Bound, ControlPlane};
//! let plane = ControlPlane::start()?;
//! plane.kubectl(&["create", "serviceaccount", "daemon"])?;
//! let config = plane.kubeconfig_for("default", "daemon", Bound::Nothing)?;
//! # Ok(()) }
//! ```
//!
//! Every bed has a folder, ports and namespaces of its own, so several run at once; it ends when its value is
//! dropped or the process that made it ends, however that ends.

mod apiserver;
mod cache;
mod certs;
mod component;
mod containerd;
mod control_plane;
mod debian;
mod etcd;
mod images;
mod kubelet;
mod managers;
mod node;
pub mod prepare;
mod registry;
mod sandbox;
pub mod wait;

pub use cache::{Cache, KUBERNETES, KWOK};
pub use component::Component;
pub use containerd::CONTAINERDS;
pub use control_plane::{Bound, ControlPlane, Options};
pub use images::Image;
pub use kubelet::NODE_NAME;
pub use node::{Node, Runtime};
pub use registry::{REGISTRY_PASSWORD, REGISTRY_USER, Registry};
pub use sandbox::{down, finish, run};

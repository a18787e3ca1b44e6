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
mod control_plane;
mod debian;
mod etcd;
mod images;
mod managers;
pub mod prepare;
mod sandbox;
pub mod wait;

pub use cache::{Cache, KUBERNETES, KWOK};
pub use component::Component;
pub use control_plane::{Bound, ControlPlane, Options};
pub use sandbox::{down, finish, run};

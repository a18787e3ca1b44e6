//! The test bed: a real Kubernetes control plane, and a real node, on this machine.
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! use testbed::cluster::{Bound, ControlPlane};
//! let plane = ControlPlane::start()?;
//! plane.kubectl(&["create", "serviceaccount", "daemon"])?;
//! let config = plane.kubeconfig_for("default", "daemon", Bound::Nothing)?;
//! # Ok(()) }
//! ```
//!
//! Every bed has a folder, ports and namespaces of its own, so several run at once; it ends when its value is
//! dropped or the process that made it ends, however that ends.

mod apiserver;
mod certs;
mod component;
mod containerd;
mod control_plane;
mod etcd;
mod kubelet;
mod managers;
mod node;
mod ports;
pub(crate) mod registry;

pub use crate::parts::{Cache, Image, KWOK, kubernetes, prepare};
pub use crate::process::{ends_with_us, finish, run};
pub use crate::sandbox::down;
pub use crate::wait;
pub use component::Component;
pub use containerd::CONTAINERDS;
pub use control_plane::{Bound, ControlPlane, Options};
pub use kubelet::NODE_NAME;
pub use node::{Node, Runtime};
pub use registry::{REGISTRY_PASSWORD, REGISTRY_USER, Registry, Store};

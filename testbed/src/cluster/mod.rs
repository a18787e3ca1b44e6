//! The test bed: a real Kubernetes control plane, and a real node, on this machine.
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! use testbed::cluster::{ControlPlane, TokenBinding};
//! let plane = ControlPlane::start()?;
//! plane.kubectl(&["create", "serviceaccount", "daemon"])?;
//! let config = plane.kubeconfig_for("default", "daemon", TokenBinding::Unbound)?;
//! # Ok(()) }
//! ```
//!
//! Every test cluster has its own folder, ports and namespaces, so several can run at once. It ends when its value is
//! dropped or when the process that created it exits for any reason.

mod apiserver;
mod audit_log;
mod certs;
mod component;
mod containerd;
mod control_plane;
mod etcd;
mod kubelet;
mod managers;
mod node;
mod ports;
pub mod prometheus;
mod readyz;
pub(crate) mod registry;

pub use crate::cgroup::cgroups_named;
pub use crate::parts::{Cache, HELM, Image, KWOK, kubernetes, prepare};
pub use crate::process::{run, run_command, with_parent_death_signal};
pub use crate::sandbox::down;
pub use crate::wait;
pub use component::Component;
pub use containerd::CONTAINERD_VERSIONS;
pub use control_plane::{ControlPlane, ControlPlaneOptions, TokenBinding};
pub use kubelet::NODE_NAME;
pub use node::{Node, Runtime, Worker};
pub use registry::{ImagePusher, REGISTRY_PASSWORD, REGISTRY_USER, Registry};

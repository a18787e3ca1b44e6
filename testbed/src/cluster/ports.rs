//! Addresses and ports of the control plane components.

use anyhow::Result;

use crate::port;
use crate::sandbox::Network;

/// An address, and a port for each component.
#[derive(Clone, Debug)]
pub(super) struct Ports {
    pub host: String,
    pub bind: String,
    pub apiserver: u16,
    pub etcd: u16,
    pub etcd_peer: u16,
    pub controller_manager: u16,
    pub scheduler: u16,
    pub endpoint_reconciler: bool,
}

impl Ports {
    /// The usual ports, in the sandbox's own network.
    pub(super) fn well_known(net: &Network) -> Self {
        Self {
            host: net.sandbox_address(),
            bind: "0.0.0.0".into(),
            apiserver: 6443,
            etcd: 2379,
            etcd_peer: 2380,
            controller_manager: 10257,
            scheduler: 10259,
            endpoint_reconciler: true,
        }
    }

    /// The usual ports without IPv4. An API server that listens on all addresses would connect to itself at
    /// `localhost`, which is 127.0.0.1.
    pub(super) fn ipv6(net: &Network) -> Self {
        Self {
            bind: net.sandbox_address(),
            endpoint_reconciler: false,
            ..Self::well_known(net)
        }
    }

    /// Host and port, as in a URL.
    pub(super) fn host_port(&self, port: u16) -> String {
        if self.host.contains(':') {
            format!("[{}]:{port}", self.host)
        } else {
            format!("{}:{port}", self.host)
        }
    }

    pub(super) fn reserve() -> Result<Self> {
        Ok(Self {
            host: "127.0.0.1".into(),
            bind: "127.0.0.1".into(),
            apiserver: port::reserve()?,
            etcd: port::reserve()?,
            etcd_peer: port::reserve()?,
            controller_manager: port::reserve()?,
            scheduler: port::reserve()?,
            endpoint_reconciler: false,
        })
    }
}

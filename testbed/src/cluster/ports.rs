//! Where the parts of a control plane listen.

use anyhow::Result;

use crate::port;
use crate::sandbox::Network;

/// An address, and a port for each part.
#[derive(Clone, Debug)]
pub(super) struct Ports {
    pub host: String,
    pub bind: String,
    pub apiserver: u16,
    pub etcd: u16,
    pub etcd_peer: u16,
    pub controller_manager: u16,
    pub scheduler: u16,
    pub services: bool,
}

impl Ports {
    /// The usual ports, in a network that is the bed's alone.
    pub(super) fn fixed(net: &Network) -> Self {
        Self {
            host: net.bed(),
            bind: "0.0.0.0".into(),
            apiserver: 6443,
            etcd: 2379,
            etcd_peer: 2380,
            controller_manager: 10257,
            scheduler: 10259,
            services: true,
        }
    }

    /// The same where there is no IPv4. An API server on all addresses would call itself by `localhost`, which is 127.0.0.1.
    pub(super) fn ipv6(net: &Network) -> Self {
        Self {
            bind: net.bed(),
            services: false,
            ..Self::fixed(net)
        }
    }

    /// Host and port, as in a URL.
    pub(super) fn at(&self, port: u16) -> String {
        if self.host.contains(':') {
            format!("[{}]:{port}", self.host)
        } else {
            format!("{}:{port}", self.host)
        }
    }

    pub(super) fn free() -> Result<Self> {
        Ok(Self {
            host: "127.0.0.1".into(),
            bind: "127.0.0.1".into(),
            apiserver: port::reserve()?,
            etcd: port::reserve()?,
            etcd_peer: port::reserve()?,
            controller_manager: port::reserve()?,
            scheduler: port::reserve()?,
            services: false,
        })
    }
}

//! etcd, which stores the API server's data. No data outlives the test cluster, so etcd does not sync to disk.

use std::net::TcpStream;
use std::sync::Arc;

use super::component::Component;
use super::ports::Ports;
use crate::parts::Cache;
use crate::sandbox::Sandbox;

pub(super) fn component(cache: &Cache, sandbox: &Arc<Sandbox>, ports: &Ports) -> Component {
    let address = ports.host_port(ports.etcd);
    let url = format!("http://{address}");
    let peer = format!("http://{}", ports.host_port(ports.etcd_peer));
    Component::new(sandbox, "etcd", cache.etcd())
        .args([
            format!("--data-dir={}", sandbox.dir().join("etcd").display()),
            format!("--listen-client-urls={url}"),
            format!("--advertise-client-urls={url}"),
            format!("--listen-peer-urls={peer}"),
            format!("--initial-advertise-peer-urls={peer}"),
            format!("--initial-cluster=default={peer}"),
            "--unsafe-no-fsync".into(),
            "--log-level=warn".into(),
            "--quota-backend-bytes=8589934592".into(),
        ])
        .env("ETCD_UNSUPPORTED_ARCH", std::env::consts::ARCH)
        .ready(move || TcpStream::connect(&address).is_ok())
}
